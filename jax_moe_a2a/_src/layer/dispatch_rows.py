"""Dispatch the tokens of a layer. The received rows get a ``jax.checkpoint`` name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ..ad import fixed, named, with_tangent
from ..api import bind_dispatch
from ..exchange.arguments import DispatchArguments
from ..exchange.bind import bind
from ..exchange.dispatch_combine import DISPATCH
from ..exchange.recv import Recv
from ..formats.formats import BlockwiseFp8, RowsInFp8

ROWS_CHECKPOINT_NAME = "moe_a2a_rows"
"""Checkpoint name, a str, of the rows that ``moe_mlp`` dispatches and of their router weights.

If a policy saves this name and ``ROUTING_CHECKPOINT_NAME``, the backward pass of ``jax.checkpoint``
does not dispatch the tokens again. If experts are trained in FP8 and rows arrive in FP8, the policy
saves each row in two forms: in FP8, and decoded to floats."""


def dispatch_rows(arguments: DispatchArguments) -> Recv:
    """Dispatch one array [T, H] with ``tail="unspecified"``. Rows and weights of the ``Recv`` get
    the name ``ROWS_CHECKPOINT_NAME``. With ``keeps_encoded``, the rows are ``RowsInFp8``."""
    recv = bind_dispatch(arguments)
    rows, weights = named((recv.rows, recv.weights), ROWS_CHECKPOINT_NAME)
    return dataclasses.replace(recv, rows=rows, weights=weights)


def dispatch_in_fp8(arguments: DispatchArguments) -> Recv:
    """Dispatch the tokens of a layer in ``BlockwiseFp8``, for products with frozen weights.

    The rows of the ``Recv`` are ``RowsInFp8``. The derivative is the derivative of one dispatch of
    float tokens with their router weights, so one exchange returns the gradients of both.
    """
    (x,), weights = arguments.leaves, arguments.choice_arrays
    known = arguments._replace(leaves=[fixed(x)], choice_arrays=list(map(fixed, weights)))
    recv = dispatch_rows(known)
    options = arguments.options.unencoded
    params = dict(num_leaves=1, num_choice_arrays=len(weights), options=options)

    def tangent_of(primals: Any, tangents: Any) -> list[jax.Array]:
        return bind(DISPATCH, tangents[0], primals[1], **params)

    moved = [BlockwiseFp8().decode(recv.rows, x.dtype), *[recv.weights] * len(weights)]
    # Under ``vmap``, ids may be a NumPy array, which custom_jvp does not accept (jax 0.10.2).
    routing = jax.tree.map(fixed, recv.routing)
    floats, *found = with_tangent(moved, tangent_of, [x, *weights], routing)
    rows = RowsInFp8(recv.rows, floats)
    return dataclasses.replace(recv, rows=rows, weights=found[0] if found else None)
