"""Dispatch tokens and multiply their rows by the first weights of the experts.

If one kernel ever does both, call it in this module. The call must then have the results,
derivatives and checkpoint name of ``dispatch_dot``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .. import compat
from ..api import bind_dispatch, bind_dispatch_start, dispatch_done, routing_of
from ..exchange.arguments import DispatchArguments
from ..exchange.inflight import overlap
from ..exchange.recv import Recv, recv_of
from ..exchange.rules import jvp_of_moving
from ..grouped.api import grouped_dot
from ..routing.two_level import AnyRouting

ROWS_CHECKPOINT_NAME = "moe_a2a_rows"
"""Checkpoint name, a str, of the rows that ``moe_mlp`` dispatches and of their router weights.

If a policy saves this name and ``ROUTING_CHECKPOINT_NAME``, the backward pass of ``jax.checkpoint``
does not dispatch the tokens again."""

product_of = partial(grouped_dot, tail="unspecified")


def dispatch_dot(arguments: DispatchArguments, w: jax.Array) -> tuple[Recv, jax.Array]:
    """Dispatch tokens, and multiply the rows of each expert by its weights. The combine of the
    token gradients runs at the same time as the gradient of ``w``, but not if tokens do not travel,
    with a format, or outside ``jit``. Results are the same.

    Args:
      arguments: of a dispatch of one array [T, H] with ``tail="unspecified"``. A dispatch with
        a format decodes the rows.
      w: weights of the local experts, [L, H, N].

    Returns:
      A pair: the ``Recv``, whose rows and weights have the checkpoint name, and the products [C,
      N]. After the last group, rows, weights, products and their derivatives are unspecified.
    """
    if _can_split(arguments):
        return _with_overlapped_backward(arguments, w)
    return _plain(arguments, w)


def dispatch_rows(arguments: DispatchArguments) -> Recv:
    """Dispatch tokens as in ``dispatch_dot``, without the product."""
    recv = bind_dispatch(arguments)
    rows, weights = compat.checkpoint_name((recv.rows, recv.weights), ROWS_CHECKPOINT_NAME)
    return dataclasses.replace(recv, rows=rows, weights=weights)


def _plain(arguments: DispatchArguments, w: jax.Array) -> tuple[Recv, jax.Array]:
    recv = dispatch_rows(arguments)
    return recv, product_of(recv.rows, w, recv.group_sizes)


def _can_split(arguments: DispatchArguments) -> bool:
    """Return True if the dispatch can be split and can then overlap with other work.

    A dispatch with a token format is never split, because the format may hold a traced scale. A
    ``jax.custom_jvp`` function must not read traced values of the enclosing function.
    """
    options = arguments.route_options
    is_moved = options.group.size > 1 and not options.replicated
    return is_moved and arguments.options.format is None and compat.traced_function() is not None


# Let D be the dispatch by the routing. The derivative of P = D(x) w is dP = D(dx) w + D(x) dw. Here
# D(dx) is a split exchange, and D(x) dw is computed between its start and done. So the transpose
# starts the combine of the token gradients, computes the gradient of w, and finishes the combine.
def _with_overlapped_backward(arguments: DispatchArguments, w: jax.Array) -> tuple[Recv, jax.Array]:
    routing, payload = routing_of(arguments), [*arguments.leaves, *arguments.choice_arrays]
    # JAX keeps the functions below in the program, so they must not hold its arrays.
    static = {
        name: value
        for name, value in arguments._asdict().items()
        if name not in ("source", "leaves", "choice_arrays")
    }

    def arguments_of(payload: Sequence[jax.Array], routing: AnyRouting) -> DispatchArguments:
        leaf, *choice_arrays = payload
        return DispatchArguments(
            source=routing, leaves=[leaf], choice_arrays=choice_arrays, **static
        )

    def compute(payload: Any, w: Any, routing: Any) -> Any:
        recv, product = _plain(arguments_of(payload, routing), w)
        return recv.rows, recv.weights, product

    def jvp(primals: Any, tangents: Any) -> Any:
        (payload, w, routing), (d_payload, dw, _) = primals, tangents
        # If either tangent is zero, there is nothing to send, or nothing to compute meanwhile.
        if _is_zero(d_payload[0]) or _is_zero(dw):
            of_all = lambda *args: compute(args[:-1], args[-1], routing)
            moves = [not _is_zero(dx) for dx in (*d_payload, dw)]
            return jvp_of_moving(of_all, moves, [*payload, w], [*d_payload, dw])
        out = rows, weights, _ = compute(payload, w, routing)
        moving = [dx for dx in d_payload if not _is_zero(dx)]
        inflight = bind_dispatch_start(arguments_of(moving, routing))
        inflight, own = overlap(inflight, lambda dw: product_of(rows, dw, routing.group_sizes), dw)
        moved = dispatch_done(inflight)
        d_weights = moved.weights
        if weights is not None and d_weights is None:
            d_weights = jnp.zeros_like(weights)
        d_product = product_of(moved.rows, w, routing.group_sizes) + own
        return out, jax.tree.map(_typed_as, (moved.rows, d_weights, d_product), out)

    dispatched = jax.custom_jvp(compute)
    dispatched.defjvp(jvp, symbolic_zeros=True)
    rows, weights, product = dispatched(payload, w, routing)
    return recv_of(routing, rows, weights), product


def _is_zero(tangent: Any) -> bool:
    """Return True if a tangent is a symbolic zero of ``jax.custom_jvp``."""
    return isinstance(tangent, SymbolicZero)


def _typed_as(tangent: jax.Array, primal: jax.Array) -> jax.Array:
    """Return a tangent, cast to vary over the mesh axes over which its primal varies."""
    return compat.align_varying([tangent, primal], ())[0]
