"""Compute slots and rows from expert ids, in plain jnp."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .capacity import shared_tokens

# Arguments of indexing without negative indices. By default, JAX adds three operations for them.
_IN_BOUNDS: dict[str, Any] = dict(mode="promise_in_bounds", wrap_negative_indices=False)
_DROP: dict[str, Any] = dict(mode="drop", wrap_negative_indices=False)
TAIL_ROW = -2  # ``row_slot`` of rows after the last group; kTailRow in cuda/params.h


class RoutingArrays(NamedTuple):
    """The arrays of a routing that an exchange reads, int32, with the fields of
    ``Routing``."""

    token_slot: jax.Array
    slot_token: jax.Array
    choice_rank: jax.Array
    slot_rows: jax.Array
    row_rank: jax.Array
    row_slot: jax.Array
    row_k: jax.Array


class RoutePlan(NamedTuple):
    """The results of a route. The fields are those of ``Routing``."""

    arrays: RoutingArrays
    row_token: jax.Array
    group_sizes: jax.Array
    num_rows: jax.Array
    num_dropped: jax.Array

    @classmethod
    def of_results(cls, results: Sequence[Any]) -> RoutePlan:
        """Return the plan that holds the results of the route primitive, in their order."""
        num_arrays = len(RoutingArrays._fields)
        return cls(RoutingArrays(*results[:num_arrays]), *results[num_arrays:])

    @property
    def results(self) -> list[Any]:
        """Return the arrays in the order of the route primitive and of ``plan_shapes``."""
        return [*self.arrays, *self[1:]]

    def named(self) -> dict[str, Any]:
        """Return the arrays by their names in a ``Routing``."""
        return {**self.arrays._asdict(), **dict(zip(self._fields[1:], self[1:], strict=True))}


def plan_shapes(
    num_tokens: int, top_k: int, num_ranks: int, num_local_experts: int, capacity: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the arrays of a ``RoutePlan``, by name and in order."""
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


NUM_RESULTS = len(RoutingArrays._fields) + len(RoutePlan._fields) - 1
"""Number of results of the route primitive."""


def renumbered_ids(
    ids: jax.Array,
    rank: jax.Array,
    *,
    group_size: int,
    num_experts: int,
    shared_expert: bool,
    replicated: bool,
) -> jax.Array:
    """Return ids of an ordinary routing that has the effect of shared experts or replicated tokens.

    Experts get new ids, for the ranks of ``Routing.domain``. A shared expert has the first id of
    its rank, and is the last choice of each token of this rank. With replicated tokens, only the
    experts of this rank have ids. The shared expert of rank r of R then receives the r-th of R
    equal shares of the tokens.

    Args:
      ids: int32 [T, K]; an id outside [0, num_experts) sends nothing.
      rank: int32 [], this rank.

    Returns:
      int32 [T, K], or [T, K + 1] with a shared expert; -1 sends nothing.
    """
    local_experts = num_experts // group_size
    first: Any = 0  # new id of this rank's first expert
    if replicated:
        local = ids - rank * local_experts
        ids = jnp.where((local >= 0) & (local < local_experts), local + int(shared_expert), -1)
    elif shared_expert:
        is_valid = (ids >= 0) & (ids < num_experts)
        ids = jnp.where(is_valid, ids + quotient(ids, local_experts) + 1, -1)
        first = rank * (local_experts + 1)
    if not shared_expert:
        return ids
    shared = jnp.broadcast_to(jnp.int32(first), ids.shape[:1])
    if replicated:
        share = max(1, shared_tokens(len(ids), group_size, replicated))
        token = jnp.arange(len(ids), dtype=jnp.int32)
        shared = jnp.where(quotient(token, share) == rank, shared, -1)
    return jnp.concatenate([ids, shared[:, None]], axis=1)


# The parameters of the primitives that route, without those of every exchange.
PLAN_PARAMS = ("num_experts", "capacity", "alignment", "first_choice")


def plan_route(
    all_ids: jax.Array,
    rank: jax.Array,
    *,
    num_local_experts: int,
    capacity: int,
    alignment: int,
    first_choice: int | None = None,
    parts: int = 1,
) -> RoutePlan:
    """Compute one rank's routing from the ids of all ranks.

    Args:
      all_ids: int32 [R, T, K], global expert ids; an id outside [0, R * L) sends nothing.
      rank: int32 [], this rank.
      num_local_experts: L; expert e lives on rank e // L.
      capacity: C, the number of rows of this rank.
      alignment: the rows of each group start at a multiple of this number.
      first_choice: the choice index that asks for room first; the other indices follow in cyclic
        order. None if the capacity holds any routing.
      parts: number of consecutive experts whose rows form one group.
    """
    num_ranks, num_tokens, top_k = all_ids.shape
    int32 = jnp.int32

    # Invalid ids are removed before any prefix sum, because all ranks must count the same choices.
    valid = (all_ids >= 0) & (all_ids < num_ranks * num_local_experts)
    choice_rank = jnp.where(valid, quotient(all_ids, num_local_experts), -1)

    slots = number_slots(choice_rank, rank)

    # Rows of this rank are sorted by local expert, then source rank, token and k.
    is_here = choice_rank == rank
    local_expert = jnp.where(is_here, all_ids - rank * num_local_experts, num_local_experts)
    is_kept = is_here
    if first_choice is not None:
        is_kept &= has_room(
            quotient(local_expert, parts),
            num_groups=num_local_experts // parts,
            capacity=capacity,
            alignment=alignment,
            first_choice=first_choice,
        )
    local_expert = jnp.where(is_kept, local_expert, num_local_experts).ravel()
    num_choices = local_expert.size
    choices = jnp.arange(num_choices, dtype=int32)
    counts, index_in_expert = count_and_number(local_expert, num_local_experts)
    of_groups = counts.reshape(-1, parts)
    rows_of_groups = of_groups.sum(axis=1, dtype=int32)
    padded = quotient(rows_of_groups + (alignment - 1), alignment) * alignment
    ends = running_sum(padded)
    starts = (ends - padded)[:, None] + running_sum(of_groups, axis=1) - of_groups
    starts = jnp.append(starts.ravel(), np.int32(0))
    row = (starts.at[local_expert].get(**_IN_BOUNDS) + index_in_expert).reshape(all_ids.shape)
    is_kept &= row < capacity

    slot_rows = rows_of_slots(slots, is_here, jnp.where(is_kept, row, -2))
    by_row = partial(values_by_row, jnp.where(is_kept, row, capacity), capacity)

    # The index of a row's choice determines its rank, token and k. Each scatter would be a launch.
    choice = by_row(choices.reshape(all_ids.shape))
    token = quotient(choice, max(1, top_k))
    num_rows = is_kept.sum(dtype=int32)
    arrays = RoutingArrays(
        token_slot=slots.token_slot,
        slot_token=slots.slot_token,
        choice_rank=lax.dynamic_index_in_dim(choice_rank, rank, keepdims=False),
        slot_rows=slot_rows,
        row_rank=jnp.where(choice >= 0, quotient(token, max(1, num_tokens)), -1),
        row_slot=jnp.where(
            jnp.arange(capacity, dtype=int32) < ends[-1:], by_row(slots.here), TAIL_ROW
        ),
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
    """The slots of tokens on the ranks that receive them."""

    token_slot: jax.Array
    """[T, R]: slot of each own token on each rank, or -1."""
    slot_token: jax.Array
    """[R, T]: own token in each slot, or -1."""
    here: jax.Array
    """[R, T, 1]: slot of each rank's tokens on this rank, or -1."""


def number_slots(choice_rank: jax.Array, rank: jax.Array) -> Slots:
    """Return the slots of tokens. A token uses one slot on each rank of its choices, in token
    order.

    Args:
      choice_rank: int32 [R, T, K], the rank of each choice, or -1.
      rank: int32 [], this rank.
    """
    num_ranks, num_tokens, _ = choice_rank.shape
    ranks = jnp.arange(num_ranks, dtype=jnp.int32)
    goes_to = (choice_rank[..., None] == ranks[None, None, None, :]).any(axis=2)
    slots = jnp.where(goes_to, running_sum(goes_to.astype(jnp.int32), axis=1) - 1, -1)  # [R, T, R]
    token_slot = lax.dynamic_index_in_dim(slots, rank, keepdims=False)
    slot_token = (
        jnp.full((num_ranks, num_tokens), -1, jnp.int32)
        .at[ranks[None, :], jnp.where(token_slot >= 0, token_slot, num_tokens)]
        .set(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], **_DROP)
    )
    return Slots(token_slot, slot_token, lax.dynamic_index_in_dim(slots, rank, axis=2))


def rows_of_slots(slots: Slots, is_here: jax.Array, row: jax.Array) -> jax.Array:
    """Return ``slot_rows`` from the rows of choices.

    Args:
      slots: of the tokens.
      is_here: bool [R, T, K], True for choices of this rank.
      row: int32 [R, T, K], the row of each choice of this rank, or a negative mark.
    """
    num_tokens = row.shape[1]
    r, _, k = (lax.broadcasted_iota(jnp.int32, row.shape, axis) for axis in range(3))
    slot = jnp.where(is_here, slots.here, num_tokens)
    return jnp.full(row.shape, -1, jnp.int32).at[r, slot, k].set(row, **_DROP)


def values_by_row(row: jax.Array, num_rows: int, values: jax.Array) -> jax.Array:
    """Return the value of the choice of each row [num_rows]; -1 for other rows.

    Args:
      row: int32 [R, T, K], the row of each choice; ``num_rows`` for none.
      num_rows: number of rows.
      values: int32, of the choices.
    """
    values = jnp.broadcast_to(values, row.shape).ravel()
    return jnp.full(num_rows, -1, jnp.int32).at[row.ravel()].set(values, **_DROP)


def has_room(
    group: jax.Array,
    *,
    num_groups: int,
    capacity: int,
    alignment: int,
    first_choice: int,
) -> jax.Array:
    """Return which choices fit if choices ask for room in order.

    The order is by choice, then token, then source rank (docs/protocol.md, section 19). The first
    choice of a block of ``alignment`` rows reserves the block.

    Args:
      group: int32 [R, T, K], the group of each choice; ``num_groups`` if it is not for this rank.
      num_groups: number of groups.

    The other arguments are those of ``plan_route``.

    Returns:
      bool [R, T, K]; choices for other ranks have any value.
    """
    if group.size == 0:
        return jnp.zeros(group.shape, bool)
    asking = jnp.roll(group, -first_choice, axis=2).transpose(2, 1, 0)
    opens_block = asking < num_groups
    if alignment > 1:
        _, index = count_and_number(asking.ravel(), num_groups)
        opens_block &= remainder(index.reshape(asking.shape), alignment) == 0
    taken = running_sum(opens_block.ravel().astype(jnp.int32)) * alignment
    fits = (taken <= capacity).reshape(asking.shape).transpose(2, 1, 0)
    return jnp.roll(fits, first_choice, axis=2)


def count_and_number(group: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """Count the elements of each group, and number the elements of a group in their order.

    Args:
      group: int32 [N], the group of each element; ``num_groups`` for an element without a group.

    Returns:
      int32 [num_groups], the size of each group, and int32 [N], the number of earlier elements of
      the same group.
    """
    counts = jnp.zeros(num_groups + 1, jnp.int32).at[group].add(1, **_DROP)
    order = jnp.argsort(group, stable=True)
    positions = jnp.arange(group.size, dtype=jnp.int32)
    place = jnp.zeros(group.size, jnp.int32).at[order].set(positions, **_DROP)
    earlier = running_sum(counts) - counts
    return counts[:-1], place - earlier.at[group].get(**_IN_BOUNDS)


def quotient(x: jax.Array, divisor: int) -> jax.Array:
    """Return ``x // divisor`` for int32 x >= 0; any number for negative x.

    ``//`` would emit ten more operations, which correct the sign.
    """
    return lax.div(x.astype(jnp.uint32), np.uint32(divisor)).astype(jnp.int32)


def remainder(x: jax.Array, divisor: int) -> jax.Array:
    """Return ``x % divisor`` for int32 x >= 0; any number for negative x."""
    return lax.rem(x.astype(jnp.uint32), np.uint32(divisor)).astype(jnp.int32)


def running_sum(x: jax.Array, axis: int = 0) -> jax.Array:
    """Return the inclusive prefix sum along an axis, in the dtype of ``x``.

    ``jnp.cumsum`` emits many operations on CPU. In jax 0.12.0.1 it becomes a scan, on which XLA:CPU
    aborts if one export serves several platforms.
    """
    length = x.shape[axis]
    if length == 0:
        return x
    window, padding = [1] * x.ndim, [(0, 0)] * x.ndim
    window[axis], padding[axis] = length, (length - 1, 0)
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, [1] * x.ndim, padding)


def fold_batch(routing: RoutingArrays) -> RoutingArrays:
    """Merge B routings (leading axis B on every array) into one routing over B*T tokens and B*C
    rows.

    Each element b of the batch keeps its own capacity and drops. Tokens and slots are renumbered by
    b*T, and rows by b*C. Negative marks stay. The result may have empty slots between used slots.
    """
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
