"""Compute slots and rows from expert ids, in plain jnp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Promise that no index is negative. Otherwise JAX adds three operations to each access.
_IN_BOUNDS: dict[str, Any] = dict(mode="promise_in_bounds", wrap_negative_indices=False)
_DROP: dict[str, Any] = dict(mode="drop", wrap_negative_indices=False)
TAIL_ROW = -2  # ``row_slot`` of rows after all padding; kTailRow in cuda/params.h


class RoutingArrays(NamedTuple):
    """The int32 arrays of a ``Routing`` that an exchange reads."""

    token_slot: jax.Array
    slot_token: jax.Array
    choice_rank: jax.Array
    slot_rows: jax.Array
    row_rank: jax.Array
    row_slot: jax.Array
    row_k: jax.Array


class RoutePlan(NamedTuple):
    """The results of a route. ``Routing`` describes the fields."""

    arrays: RoutingArrays
    row_token: jax.Array
    group_sizes: jax.Array
    num_rows: jax.Array
    num_dropped: jax.Array

    @classmethod
    def of_results(cls, results: Sequence[Any]) -> RoutePlan:
        num_arrays = len(RoutingArrays._fields)
        return cls(RoutingArrays(*results[:num_arrays]), *results[num_arrays:])

    @property
    def results(self) -> list[Any]:
        """Return the arrays in the order of the route primitive's results."""
        return [*self.arrays, *self[1:]]

    def named(self) -> dict[str, Any]:
        """Return a dict with the arrays. Its keys are the names of the fields of ``Routing``."""
        return {**self.arrays._asdict(), **dict(zip(self._fields[1:], self[1:], strict=True))}


def plan_shapes(
    num_tokens: int, top_k: int, num_ranks: int, num_local_experts: int, capacity: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of a ``RoutePlan``, in the order of its ``results``."""
    return dict(
        token_slot=(num_tokens, num_ranks),
        slot_token=(num_ranks, num_tokens),
        choice_rank=(num_tokens, top_k),
        slot_rows=(num_ranks, num_tokens, top_k),
        row_rank=(capacity,),
        row_slot=(capacity,),
        row_k=(capacity,),
        row_token=(capacity,),
        group_sizes=(num_local_experts,),
        num_rows=(),
        num_dropped=(),
    )


NUM_RESULTS = len(RoutingArrays._fields) + len(RoutePlan._fields) - 1  # results of ``route_p``


class PlanOptions(NamedTuple):
    """The static options of a route."""

    num_local_experts: int
    """L, the number of experts per rank. Expert e is on rank e // L."""
    capacity: int
    """C, the number of rows of this rank."""
    alignment: int
    """The rows of each group start at a multiple of this number."""
    may_drop: bool
    """True if the capacity is too small for some ids."""
    parts: int = 1
    """The number of consecutive experts whose rows form one group."""


def plan_route(all_ids: jax.Array, rank: jax.Array, options: PlanOptions) -> RoutePlan:
    """Plan one rank from all ranks' ids, int32 [R, T, K]. Ids outside [0, R * L) send nothing."""
    num_local_experts, capacity, alignment, may_drop, parts = options
    num_ranks, num_tokens, top_k = all_ids.shape
    int32 = jnp.int32

    # Remove invalid ids before any prefix sum, because all ranks must count the same choices.
    valid = (all_ids >= 0) & (all_ids < num_ranks * num_local_experts)
    choice_rank = jnp.where(valid, quotient(all_ids, num_local_experts), -1)

    slots = number_slots(choice_rank, rank)

    # Rows of this rank are sorted by local expert, then source rank, token and k.
    is_here = choice_rank == rank
    local_expert = jnp.where(is_here, all_ids - rank * num_local_experts, num_local_experts)
    is_kept = is_here
    if may_drop:
        is_kept &= has_room(quotient(local_expert, parts), options)
    local_expert = jnp.where(is_kept, local_expert, num_local_experts).ravel()
    firsts, position = sort_by_group(local_expert, num_local_experts)
    firsts = firsts[::parts]
    rows_of_groups = firsts[1:] - firsts[:-1]
    ends, padded = firsts[1:], rows_of_groups
    if alignment > 1:
        padded = quotient(rows_of_groups + (alignment - 1), alignment) * alignment
        ends = running_sum(padded)
        shift = jnp.append(ends - padded - firsts[:-1], np.int32(0))
        position += shift.at[quotient(local_expert, parts)].get(**_IN_BOUNDS)
    row = position.reshape(all_ids.shape)
    is_kept &= row < capacity

    slot_rows = rows_of_slots(slots, is_here, jnp.where(is_kept, row, -2))

    # Scatter only the index of each row's choice, because rank, token and k follow from the index.
    choices = jnp.arange(row.size, dtype=int32).reshape(row.shape)
    choice = values_by_row(jnp.where(is_kept, row, capacity), capacity, choices)
    token = quotient(choice, max(1, top_k))
    slot = jnp.where(choice >= 0, take(slots.here.ravel(), token), -1)
    num_rows = is_kept.sum(dtype=int32)
    arrays = RoutingArrays(
        token_slot=slots.token_slot,
        slot_token=slots.slot_token,
        choice_rank=lax.dynamic_index_in_dim(choice_rank, rank, keepdims=False),
        slot_rows=slot_rows,
        row_rank=jnp.where(choice >= 0, quotient(token, max(1, num_tokens)), -1),
        row_slot=jnp.where(jnp.arange(capacity, dtype=int32) < ends[-1:], slot, TAIL_ROW),
        row_k=jnp.where(choice >= 0, remainder(choice, max(1, top_k)), -1),
    )
    return RoutePlan(
        arrays=arrays,
        row_token=jnp.where(choice >= 0, remainder(token, max(1, num_tokens)), -1),
        group_sizes=jnp.minimum(ends, capacity) - jnp.minimum(ends - padded, capacity),
        num_rows=num_rows,
        num_dropped=is_here.sum(dtype=int32) - num_rows,
    )


class Slots(NamedTuple):
    """The slots of tokens on the ranks that receive the tokens."""

    token_slot: jax.Array
    """[T, R]: as in ``Routing``."""
    slot_token: jax.Array
    """[R, T]: as in ``Routing``."""
    here: jax.Array
    """[R, T, 1]: entry [r, t] is the slot of rank r's token t on this rank, or -1."""
    token_here: jax.Array
    """[R, T, 1]: entry [r, s] is rank r's token in slot s on this rank, or -1."""


def number_slots(choice_rank: jax.Array, rank: jax.Array) -> Slots:
    """Return the slots of tokens from ``choice_rank`` int32 [R, T, K]: the rank of each choice, or
    -1. A token uses one slot on each rank of its choices. Slots are in token order."""
    num_ranks, num_tokens, _ = choice_rank.shape
    own = lax.dynamic_index_in_dim(choice_rank, rank)
    ranks = lax.broadcasted_iota(jnp.int32, (num_ranks, 1, 1), 0)
    # [2R, T]: which tokens this rank sends to each rank, then which it receives from each rank
    goes = jnp.concatenate([own == ranks, choice_rank == rank]).any(axis=2)
    # Tokens with a slot come first. XLA:CPU compiles a sort faster than a prefix sum or a scatter.
    token = lax.broadcasted_iota(jnp.int32, goes.shape, 1)
    token_of = lax.sort(jnp.where(goes, token, token + num_tokens), dimension=1)
    is_used = token_of < num_tokens
    of_any = jnp.where(is_used, token_of, token_of - num_tokens)
    slot = jnp.where(goes, inverse_permutation(of_any), -1)
    token_of = jnp.where(is_used, token_of, -1)
    return Slots(
        token_slot=slot[:num_ranks].T,
        slot_token=token_of[:num_ranks],
        here=slot[num_ranks:, :, None],
        token_here=token_of[num_ranks:, :, None],
    )


def rows_of_slots(slots: Slots, is_here: jax.Array, row: jax.Array) -> jax.Array:
    """Return ``slot_rows``. ``is_here``, bool [R, T, K], says which choices are for this rank.
    ``row``, int32 [R, T, K], is the row of each of these choices, or negative if it has none."""
    if row.size == 0:
        return row
    r, k = (lax.broadcasted_iota(jnp.int32, row.shape, axis) for axis in (0, 2))
    token = jnp.broadcast_to(jnp.maximum(slots.token_here, 0), row.shape)
    found = jnp.where(is_here, row, -1).at[r, token, k].get(**_IN_BOUNDS)
    return jnp.where(slots.token_here >= 0, found, -1)


def values_by_row(row: jax.Array, num_rows: int, values: jax.Array) -> jax.Array:
    """Return an array int32 [num_rows]: for each row, the entry of ``values`` for the row's choice,
    or -1 without a choice. ``row``, int32 [R, T, K], is each choice's row, or ``num_rows``."""
    values = jnp.broadcast_to(values, row.shape).ravel()
    return jnp.full(num_rows, -1, jnp.int32).at[row.ravel()].set(values, **_DROP)


def has_room(group: jax.Array, options: PlanOptions) -> jax.Array:
    """Return which choices for this rank fit into its capacity, bool [R, T, K]. Choices reserve
    rows in the order of k, then token, then source rank (docs/protocol.md, section 17). The first
    choice of a block of ``alignment`` rows reserves the block. ``group``, int32 [R, T, K], is the
    group of each choice, or the number of groups for a choice of another rank's expert."""
    if group.size == 0:
        return jnp.zeros(group.shape, bool)
    alignment, num_groups = options.alignment, options.num_local_experts // options.parts
    asking = group.transpose(2, 1, 0)
    opens_block = asking < num_groups
    if alignment > 1:
        _, index = count_and_number(asking.ravel(), num_groups)
        opens_block &= remainder(index.reshape(asking.shape), alignment) == 0
    taken = running_sum(opens_block.ravel().astype(jnp.int32)) * alignment
    return (taken <= options.capacity).reshape(asking.shape).transpose(2, 1, 0)


def count_and_number(group: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """Return the size of each group, int32 [num_groups], and the index of each element in its
    group, int32 [N]. ``group`` is as in ``sort_by_group``."""
    firsts, position = sort_by_group(group, num_groups)
    return firsts[1:] - firsts[:-1], position - firsts.at[group].get(**_IN_BOUNDS)


def sort_by_group(group: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """Sort elements by group, in a stable order. ``group``, int32 [N], is ``num_groups`` for an
    element without a group. Return the first position of each group, int32 [num_groups + 1].
    Elements without a group form the last group. Also return the position of each element, [N]."""
    # Sort the elements together with one mark per group, which precedes the group's elements. The
    # group's first position is the position of its mark, minus the number of earlier marks.
    marks = jnp.arange(num_groups + 1, dtype=jnp.int32)
    keys = jnp.concatenate([marks, group])
    order = lax.sort((keys, lax.iota(jnp.int32, keys.size)), num_keys=1)[1]
    place = inverse_permutation(order)
    return place[: marks.size] - marks, place[marks.size :] - group - 1


def inverse_permutation(order: jax.Array) -> jax.Array:
    """Return the position of each number 0 to N - 1 in the permutation ``order`` [..., N]."""
    place = lax.broadcasted_iota(jnp.int32, order.shape, order.ndim - 1)
    return lax.sort((order, place), num_keys=1, is_stable=False)[1]


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return ``x[index]`` for x [N]. A negative index returns any number."""
    if x.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    return x.at[jnp.maximum(index, 0)].get(**_IN_BOUNDS)


def quotient(x: jax.Array, divisor: int) -> jax.Array:
    """Return ``x // divisor`` for int32 x >= 0, and any number for negative x. The operator ``//``
    would emit ten more operations for negative numbers."""
    return lax.div(x.astype(jnp.uint32), np.uint32(divisor)).astype(jnp.int32)


def remainder(x: jax.Array, divisor: int) -> jax.Array:
    """Return ``x % divisor`` for int32 x >= 0, and any number for negative x."""
    return lax.rem(x.astype(jnp.uint32), np.uint32(divisor)).astype(jnp.int32)


def running_sum(x: jax.Array, axis: int = 0) -> jax.Array:
    """Return the inclusive prefix sum, in the dtype of ``x``. ``jnp.cumsum`` emits many operations
    on CPU. In jax 0.12.0.1 it is a scan, on which XLA:CPU aborts in multi-platform exports."""
    length = x.shape[axis]
    if length == 0:
        return x
    window, padding = [1] * x.ndim, [(0, 0)] * x.ndim
    window[axis], padding[axis] = length, (length - 1, 0)
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, [1] * x.ndim, padding)


def fold_batch(routing: RoutingArrays) -> RoutingArrays:
    """Merge a batch of B routings (leading axis B on every array) into one routing over B*T tokens
    and B*C rows. The merge drops no row. Empty slots may be between used slots."""
    batch, num_tokens, _ = routing.choice_rank.shape
    capacity = routing.row_rank.shape[1]

    def shift(x: jax.Array, step: int) -> jax.Array:
        offset = step * lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where(x >= 0, x + offset, x)

    def flatten(x: jax.Array, axis: int = 0) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], batch * x.shape[axis + 1], *x.shape[axis + 2 :])

    return RoutingArrays(
        token_slot=flatten(shift(routing.token_slot, num_tokens)),
        slot_token=flatten(shift(routing.slot_token, num_tokens), axis=1),
        choice_rank=flatten(routing.choice_rank),
        slot_rows=flatten(shift(routing.slot_rows, capacity), axis=1),
        row_rank=flatten(routing.row_rank),
        row_slot=flatten(shift(routing.row_slot, num_tokens)),
        row_k=flatten(routing.row_k),
    )
