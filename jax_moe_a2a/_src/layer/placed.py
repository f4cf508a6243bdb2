"""Apply a rank's home experts, and replicas in its spare slots, whose weights are fetched.

Most products accept two arrays, the home weights and the spare weights. Products that quantize
weights accept only one array. In that case, the home experts are applied first, and the experts in
the spare slots are applied in a second call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .. import compat
from ..exchange.dispatch_combine import DISPATCH
from ..exchange.recv import Recv
from ..exchange.reference import own_rank
from ..formats.formats import RowsInFp8, floats_of
from ..group.group import Group
from ..grouped.weights import QuantizedExperts, encode_squares_p
from ..placement.choice import choose_slots
from ..placement.types import Placement, check_placement
from ..routing.checks import RouteArguments, check_scope
from ..routing.two_level import AnyRouting
from .fetch import fetch
from .weights import Experts, paired


class Rows(NamedTuple):
    """The rows of a rank, their router weights, and which rows have a token."""

    rows: Any
    """[C, H]: an array or ``RowsInFp8``."""
    weights: jax.Array
    """[C]: router weights."""
    has_token: jax.Array
    """[C] bool."""


def to_slots(
    topk_ids: ArrayLike | AnyRouting, given: RouteArguments, placement: Placement
) -> tuple[Any, RouteArguments]:
    """Return slot ids in place of expert ids, and the route arguments for these slots. If
    ``topk_ids`` is a routing, return it unchanged, because its ids are already slots."""
    if isinstance(topk_ids, AnyRouting):
        check_placement(placement, topk_ids.group.size, or_none=True)
        if topk_ids.num_experts != placement.num_slots:
            raise ValueError(
                f"topk_ids must be a Routing of the {placement.num_slots} slots of the placement; "
                f"got one of {topk_ids.num_experts} experts. Call route with the ids of "
                f"choose_slots and num_experts={placement.num_slots}"
            )
        if given.num_experts == placement.num_experts:
            given = given._replace(num_experts=placement.num_slots)
        return topk_ids, given
    if given.group is None:
        return topk_ids, given  # ``check_dispatch`` will raise the error
    group = check_scope(given.group)
    check_placement(placement, group.size, or_none=True)
    if given.num_experts not in (None, placement.num_experts):
        raise ValueError(
            f"num_experts must be {placement.num_experts}, the number of experts of the placement; "
            f"got {given.num_experts}"
        )
    rank = None if given.exchange.replicated else own_rank(group)
    slots = choose_slots(topk_ids, placement, rank=rank, num_ranks=group.size)
    return slots, given._replace(num_experts=placement.num_slots)


def apply_to_both(
    apply: Callable[[Rows, Experts, jax.Array], jax.Array],
    rows: Rows,
    home: Experts,
    recv: Recv,
    placement: Placement,
    fetched: Experts | None,
) -> jax.Array:
    """Return the outputs of all rows. Fetch the weights of spare slots if ``fetched`` is None. The
    groups of ``recv`` are the home experts, followed by the spare slots."""
    sizes, group = recv.group_sizes, recv.routing.group

    def with_spare(rows: Rows, home: Experts, spare: Experts, sizes: jax.Array) -> jax.Array:
        if not home.is_trained_in_fp8:
            return apply(rows, paired(home, spare), sizes)
        num_home = home.w_in.shape[0]
        start = sizes[:num_home].sum(dtype=jnp.int32)
        is_home = jnp.arange(rows.has_token.shape[0], dtype=jnp.int32) < start
        y_home = apply(_only(rows, is_home), home, sizes[:num_home])
        moved = jax.tree.map(lambda x: jnp.roll(x, -start, axis=0), _only(rows, ~is_home))
        y_spare = jnp.roll(apply(moved, spare, sizes[num_home:]), start, axis=0)
        return jnp.where(is_home[:, None], y_home, y_spare)

    if fetched is not None:
        return with_spare(rows, home, fetched, sizes)

    # Without ``jax.checkpoint``, JAX would keep the fetched weights for the backward pass.
    @partial(jax.checkpoint, policy=_keeps_all_but_fetched)
    def of_both(rows: Rows, home: Experts, sizes: jax.Array, placement: Placement) -> jax.Array:
        return with_spare(rows, home, fetch_all(home, placement, group), sizes)

    return of_both(rows, home, sizes, placement)


def fetch_all(home: Experts, placement: Placement, group: Group) -> Experts:
    """Fetch the weights of spare slots from the home experts of all ranks. Transposed FP8 values
    are not fetched, because the backward pass can transpose the values."""
    in_fp8 = lambda w: isinstance(w, QuantizedExperts)
    cut = lambda w: dataclasses.replace(w, transposed=None) if in_fp8(w) else w
    given, treedef = jax.tree.flatten(home.map_weights(cut))
    return jax.tree.unflatten(treedef, fetch(given, placement, group))


# Results of these primitives are fetched weights, which must not be kept for the backward pass.
_OF_FETCHED = {DISPATCH.primitive, compat.name_p, lax.reshape_p, lax.slice_p}
_OF_FETCHED |= {encode_squares_p, lax.bitcast_convert_type_p}


def _keeps_all_but_fetched(primitive: compat.Primitive, *_: object, **__: object) -> bool:
    return primitive not in _OF_FETCHED and primitive.name not in ("pvary", "pcast")


def _only(rows: Rows, is_kept: jax.Array) -> Rows:
    """Return rows. If ``is_kept`` is False, a row gets no token, no gradient and the weight 0."""
    floats = _with_gradients_of(floats_of(rows.rows), is_kept)
    in_fp8 = isinstance(rows.rows, RowsInFp8)
    return Rows(
        rows.rows._replace(floats=floats) if in_fp8 else floats,
        jnp.where(is_kept, rows.weights, 0),
        rows.has_token & is_kept,
    )


@jax.custom_jvp
def _with_gradients_of(rows: jax.Array, is_kept: jax.Array) -> jax.Array:
    """Return rows unchanged. The tangents of rows that are not kept are zero, because products
    return unspecified gradients for these rows."""
    del is_kept
    return rows


@_with_gradients_of.defjvp
def _with_gradients_of_jvp(primals: compat.Primals, tangents: Any) -> Any:
    rows, is_kept = primals
    return _with_gradients_of(*primals), jnp.where(is_kept[:, None], tangents[0], 0)
