"""The meaning of every primitive: jnp and lax collectives, for any platform.

Each function here takes the operands and parameters of its primitive. ``emulated`` puts a leading
rank axis on everything and runs all ranks of the group on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .group import Group
from .routing import RoutePlan, RoutingArrays, plan_route

EMULATED_AXIS = "moe_a2a_emulated"
NUM_ROUTING = len(RoutingArrays._fields)


def route(
    ids: jax.Array, *, group: Group, num_experts: int, capacity: int, alignment: int, emulated: bool
) -> RoutePlan:
    """ids int32 [*lead, T, K] -> ``RoutePlan``, each field with the same lead."""

    def on_rank(ids: jax.Array, axis_name: Any) -> RoutePlan:
        num_lead = ids.ndim - 2
        all_ids = jnp.moveaxis(lax.all_gather(ids, axis_name), 0, num_lead)
        plan = partial(
            plan_route,
            num_local_experts=num_experts // group.size,
            capacity=capacity,
            alignment=alignment,
        )
        for _ in range(num_lead):
            plan = jax.vmap(plan, in_axes=(0, None))
        return plan(all_ids, lax.axis_index(axis_name))

    return _run(on_rank, (ids,), group, emulated)


def dispatch(
    *operands: jax.Array,
    num_leaves: int,
    num_scalars: int,
    wire_dtype: Any,
    group: Group,
    emulated: bool,
) -> list[jax.Array]:
    """leaves [T, ...], scalars [T, K, ...], routing -> leaves [C, ...], scalars [C, ...]."""
    del num_scalars, wire_dtype

    def on_rank(*operands: jax.Array, axis_name: Any) -> list[jax.Array]:
        payload, routing = split_routing(operands)
        leaves, scalars = payload[:num_leaves], payload[num_leaves:]
        return [tokens_to_rows(x, routing, axis_name) for x in leaves] + [
            choices_to_rows(x, routing, axis_name) for x in scalars
        ]

    return _run(on_rank, operands, group, emulated)


def combine(
    *operands: jax.Array,
    num_leaves: int,
    num_scalars: int,
    wire_dtype: Any,
    group: Group,
    emulated: bool,
) -> list[jax.Array]:
    """leaves [C, ...], scalars [C, ...], routing -> sums [T, ...], scalars [T, K, ...]."""
    del num_scalars

    def on_rank(*operands: jax.Array, axis_name: Any) -> list[jax.Array]:
        payload, routing = split_routing(operands)
        leaves, scalars = payload[:num_leaves], payload[num_leaves:]
        return [rows_to_tokens([(x, None)], routing, axis_name, wire_dtype) for x in leaves] + [
            rows_to_choices(x, routing, axis_name) for x in scalars
        ]

    return _run(on_rank, operands, group, emulated)


def weighted_combine(
    *operands: jax.Array,
    num_leaves: int,
    num_scalars: int,
    wire_dtype: Any,
    group: Group,
    emulated: bool,
) -> list[jax.Array]:
    """rows_1..n [C, *W, ...], weights_1..n [C, *W], routing -> [T, *W, ...]: combine of the sum of
    weights_i * rows_i."""
    del num_scalars

    def on_rank(*operands: jax.Array, axis_name: Any) -> list[jax.Array]:
        payload, routing = split_routing(operands)
        pairs = list(zip(payload[:num_leaves], payload[num_leaves:], strict=True))
        return [rows_to_tokens(pairs, routing, axis_name, wire_dtype)]

    return _run(on_rank, operands, group, emulated)


def split_routing(operands: Sequence[Any]) -> tuple[list[Any], RoutingArrays]:
    """Splits the operands of an exchange into payload and routing."""
    return list(operands[:-NUM_ROUTING]), RoutingArrays(*operands[-NUM_ROUTING:])


def accumulation_dtype(dtype: Any) -> Any:
    """The dtype that sums of ``dtype`` are taken in: float32, or the dtype itself if wider."""
    wide = (jnp.float64, jnp.complex64, jnp.complex128)
    return jnp.dtype(dtype) if dtype in wide else jnp.dtype(jnp.float32)


def expand_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Appends axes of size one to ``x`` until it has the rank of ``like``."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[index]`` along the leading axis, zero where ``index`` is negative."""
    zero = np.zeros((), x.dtype)  # bytes, for float8_e8m0fnu has no zero
    if x.shape[0] == 0:
        return jnp.broadcast_to(zero, index.shape + x.shape[1:])
    taken = x.at[jnp.maximum(index, 0)].get(mode="promise_in_bounds")
    return jnp.where(expand_like(index >= 0, taken), taken, zero)


def tokens_to_rows(x: jax.Array, routing: RoutingArrays, axis_name: Any) -> jax.Array:
    """[T, ...] -> [C, ...]: a token crosses to a rank once and becomes a row per choice there."""
    landed = _swap(take_rows(x, routing.slot_token), axis_name)  # [R, T, ...]
    num_tokens = x.shape[0]
    index = jnp.where(routing.row_rank >= 0, routing.row_rank * num_tokens + routing.row_slot, -1)
    return take_rows(landed.reshape(-1, *x.shape[1:]), index)


def choices_to_rows(x: jax.Array, routing: RoutingArrays, axis_name: Any) -> jax.Array:
    """[T, K, ...] -> [C, ...]: the entry of the row's own choice."""
    landed = _swap(take_rows(x, routing.slot_token), axis_name)  # [R, T, K, ...]
    num_tokens, top_k = x.shape[:2]
    slot = routing.row_rank * num_tokens + routing.row_slot
    index = jnp.where(routing.row_rank >= 0, slot * top_k + routing.row_k, -1)
    return take_rows(landed.reshape(-1, *x.shape[2:]), index)


def rows_to_tokens(
    pairs: Sequence[tuple[jax.Array, jax.Array | None]],
    routing: RoutingArrays,
    axis_name: Any,
    wire_dtype: Any,
) -> jax.Array:
    """[C, ...] (and weights [C, *W] or None) -> [T, ...]: the sum over a token's rows.

    Summed over k where the rows are, rounded once for the wire, then over ranks where the token is;
    in the accumulation dtype and in this order, whatever the platform.
    """
    rows, _ = pairs[0]
    acc_dtype = accumulation_dtype(rows.dtype)
    partial_sums: Any = jnp.zeros((), acc_dtype)
    for k in range(routing.slot_rows.shape[2]):
        index = routing.slot_rows[:, :, k]
        for x, weights in pairs:
            term = take_rows(x, index).astype(acc_dtype)
            if weights is not None:
                term *= expand_like(take_rows(weights, index).astype(acc_dtype), term)
            partial_sums = partial_sums + term
    num_ranks, num_tokens, _ = routing.slot_rows.shape
    partial_sums = jnp.broadcast_to(partial_sums, (num_ranks, num_tokens, *rows.shape[1:]))
    if wire_dtype is None or not jnp.issubdtype(rows.dtype, jnp.floating):
        wire_dtype = rows.dtype
    returned = _swap(partial_sums.astype(wire_dtype), axis_name)
    total = jnp.zeros((num_tokens, *rows.shape[1:]), acc_dtype)
    for rank in range(num_ranks):
        total += take_rows(returned[rank], routing.token_slot[:, rank]).astype(acc_dtype)
    return total.astype(rows.dtype)


def rows_to_choices(x: jax.Array, routing: RoutingArrays, axis_name: Any) -> jax.Array:
    """[C, ...] -> [T, K, ...]: each row's entry at its own choice, zero where there is no row."""
    returned = _swap(take_rows(x, routing.slot_rows), axis_name)  # [R, T, K, ...]
    num_tokens, top_k = routing.choice_rank.shape
    rank = jnp.maximum(routing.choice_rank, 0)
    slot = rank * num_tokens + jnp.take_along_axis(routing.token_slot, rank, axis=1)
    index = slot * top_k + jnp.arange(top_k, dtype=jnp.int32)
    index = jnp.where(routing.choice_rank >= 0, index, -1)
    return take_rows(returned.reshape(-1, *x.shape[1:]), index)


def _swap(x: jax.Array, axis_name: Any) -> jax.Array:
    """[R, ...] -> [R, ...]: entry r goes to rank r; what comes back in entry r came from rank r."""
    return x if x.size == 0 else lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0)


def _run(
    on_rank: Callable[..., Any], operands: Sequence[jax.Array], group: Group, emulated: bool
) -> Any:
    if not emulated:
        return on_rank(*operands, axis_name=group.axis_name)
    on_rank = partial(on_rank, axis_name=EMULATED_AXIS)
    return jax.vmap(on_rank, axis_name=EMULATED_AXIS, axis_size=group.size)(*operands)
