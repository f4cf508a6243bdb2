"""From expert ids to slots and rows, in plain jnp; and the pytree that holds the result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arguments import as_array, check_factor, check_int, short

if TYPE_CHECKING:
    from .group import Group


# For indices that are not negative: by default JAX adds three operations for negative ones.
_IN_BOUNDS: dict[str, Any] = dict(mode="promise_in_bounds", wrap_negative_indices=False)
_DROP: dict[str, Any] = dict(mode="drop", wrap_negative_indices=False)

MAX_TOP_K = 32  # a warp's lanes hold one token's choices
TAIL_ROW = -2  # ``row_slot`` of rows after the last group; kTailRow in cuda/params.h

ROUTING_CHECKPOINT_NAME = "moe_a2a_routing"
"""Checkpoint name of every routing array.

With a policy that saves it, such as
``jax.checkpoint_policies.save_only_these_names(ROUTING_CHECKPOINT_NAME)``, the backward pass of
``jax.checkpoint`` does not route again: it uses the saved routing."""


class RoutingArrays(NamedTuple):
    """The part of a routing that an exchange reads. All int32; fields as in ``Routing``."""

    token_slot: jax.Array
    slot_token: jax.Array
    choice_rank: jax.Array
    slot_rows: jax.Array
    row_rank: jax.Array
    row_slot: jax.Array
    row_k: jax.Array


STATIC_FIELDS = ("group", "num_experts", "capacity", "alignment", "shared_expert", "replicated")


@dataclasses.dataclass(frozen=True)
class RoutedRows:
    """Hold what every routing knows about the rows of this rank.

    C is the capacity and L the number of experts per rank, one more with a shared expert. All
    arrays are int32.
    """

    row_rank: jax.Array
    """[C]: source rank of a row, -1 if the row holds no token."""
    row_token: jax.Array
    """[C]: token of a row at its source rank, or -1."""
    group_sizes: jax.Array
    """[L]: rows of each local expert, alignment padding included, clipped at the capacity."""
    num_rows: jax.Array
    """[]: rows that hold a token."""
    num_dropped: jax.Array
    """[]: rows dropped at this rank because the capacity was too small."""
    num_invalid: jax.Array
    """[]: ids of this rank's tokens outside [-1, num_experts); they count as -1."""
    group: Group
    num_experts: int
    capacity: int
    alignment: int
    shared_expert: bool
    replicated: bool

    def check_rows(self, argument: str) -> None:
        """Check dtype and shape of the arrays that every routing has.

        Raises:
          TypeError: an array of another dtype or shape; the message names it and ``argument``.
        """
        num_local_experts = self.num_experts // self.group.size + self.shared_expert
        shapes: dict[str, tuple[int, ...]] = dict(
            row_rank=(self.capacity,),
            row_token=(self.capacity,),
            group_sizes=(num_local_experts,),
            num_rows=(),
            num_dropped=(),
            num_invalid=(),
        )
        arrays = {name: _shaped(getattr(self, name)) for name in shapes}
        reason = (
            f"capacity={self.capacity}, num_experts={self.num_experts} and "
            f"shared_expert={self.shared_expert} of {self.group.size} ranks"
        )
        check_int32(f"{argument} must be a routing as route returned it", arrays, shapes, reason)


Kind = TypeVar("Kind", bound=RoutedRows)


def as_pytree(kind: type[Kind]) -> type[Kind]:
    """Makes a routing's dataclass a pytree of its arrays."""
    names = [field.name for field in dataclasses.fields(kind)]
    arrays = [name for name in names if name not in STATIC_FIELDS]
    return jax.tree_util.register_dataclass(kind, arrays, list(STATIC_FIELDS))


@as_pytree
@dataclasses.dataclass(frozen=True)
class Routing(RoutedRows):
    """Hold where every token of this rank goes and where every row comes from; a pytree.

    T tokens per rank, K choices of a token, R ranks, C capacity, L experts per rank; all arrays are
    int32. A token uses one *slot* in the landing zone of each rank that holds any of its experts,
    and one *row* there for each of its choices.

    Pass it on as ``route`` returned it. ``dispatch`` and ``combine`` refuse arrays of another dtype
    or shape, but they cannot check numbers. To leave choices out, set their ids to -1 before
    ``route``: ``dispatch`` does not zero a row that no slot of a changed routing names.

    A shared expert is one more local expert, the first, and one more choice, the last: K is then
    ``top_k + 1``, and L one more. With replicated tokens, R is 1, and choices of other ranks'
    experts are dropped as if their id were -1.
    """

    token_slot: jax.Array
    """[T, R]: slot of a token of this rank at each rank, -1 if none of its experts live there."""
    slot_token: jax.Array
    """[R, T]: which token of this rank uses a slot of each rank's zone, -1 if empty."""
    choice_rank: jax.Array
    """[T, K]: rank of a choice, -1 if its id sends nothing."""
    slot_rows: jax.Array
    """[R, T, K]: row of a choice in each source's slot; -1 not here, -2 dropped for capacity."""
    row_slot: jax.Array
    """[C]: slot of a row; -1 for padding within a group, -2 for rows after the last group."""
    row_k: jax.Array
    """[C]: choice of a row, or -1."""

    @property
    def num_tokens(self) -> int:
        """Return T, the number of tokens of each rank."""
        return self.choice_rank.shape[0]

    @property
    def top_k(self) -> int:
        """Return the number of choices of each token, without the shared expert's."""
        return self.choice_rank.shape[1] - self.shared_expert

    @property
    def domain(self) -> Group:
        """Return the group that rows come from: each rank alone if tokens are replicated."""
        return self.group.alone if self.replicated else self.group

    @property
    def arrays(self) -> RoutingArrays:
        """Return the arrays that an exchange reads."""
        return RoutingArrays(*(getattr(self, name) for name in RoutingArrays._fields))

    def check(self, argument: str) -> None:
        """Check dtype and shape of all arrays.

        Raises:
          TypeError: an array of another dtype or shape; the message names it and ``argument``.
        """
        check_arrays(argument, self.arrays, self.domain.size, self.capacity)
        self.check_rows(argument)


class RoutePlan(NamedTuple):
    """The results of the route primitive, in their order. Fields as in ``Routing``."""

    token_slot: jax.Array
    slot_token: jax.Array
    choice_rank: jax.Array
    slot_rows: jax.Array
    row_rank: jax.Array
    row_slot: jax.Array
    row_k: jax.Array
    row_token: jax.Array
    group_sizes: jax.Array
    num_rows: jax.Array
    num_dropped: jax.Array

    @property
    def arrays(self) -> RoutingArrays:
        """What an exchange reads."""
        return RoutingArrays(*self[: len(RoutingArrays._fields)])


def plan_shapes(
    num_tokens: int, top_k: int, num_ranks: int, num_local_experts: int, capacity: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the fields of a ``RoutePlan``, by name and in order."""
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


def check_arrays(
    argument: str,
    arrays: RoutingArrays,
    num_ranks: int,
    capacity: int,
    *,
    lead: tuple[int, ...] = (),
    level: str = "",
) -> None:
    """Check dtype and shape of what an exchange reads.

    The kernels take the sizes from some of these arrays and read all of them by these sizes.

    Args:
      argument: the name of the argument, for the message.
      arrays: arrays or abstract values; ``choice_rank`` says how many tokens and choices there are.
      lead: axes before those of one rank.
      level: what the names of the arrays begin with, for the message.

    Raises:
      TypeError: an array of another dtype or shape; the message names it.
    """
    what = f"{argument} must be a routing as route returned it"
    named = {f"{level}{name}": _shaped(array) for name, array in arrays._asdict().items()}
    choices = named[f"{level}choice_rank"]
    if len(choices.shape) != len(lead) + 2 or choices.shape[: len(lead)] != lead:
        expected = ",".join([*map(str, lead), "num_tokens", "top_k"])
        raise TypeError(
            f"{what}: {level}choice_rank must be int32[{expected}]; got {short(choices)}"
        )
    num_tokens, top_k = choices.shape[len(lead) :]
    shapes = plan_shapes(num_tokens, top_k, num_ranks, 0, capacity)
    check_int32(
        what,
        named,
        {f"{level}{name}": (*lead, *shapes[name]) for name in RoutingArrays._fields},
        f"{level}choice_rank {short(choices)}, {num_ranks} ranks and capacity={capacity}",
    )


def check_int32(
    what: str, arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], reason: str
) -> None:
    """Raise a TypeError if an array is not int32 of its shape; ``reason`` says why of that one."""
    for name, shape in shapes.items():
        if arrays[name].dtype != jnp.int32 or arrays[name].shape != shape:
            expected = ",".join(map(str, shape))
            raise TypeError(
                f"{what}: {name} must be int32[{expected}], because of {reason}; got "
                f"{short(arrays[name])}. Leave the arrays of a routing out of casts and slices of "
                "a pytree, and route again for other shapes"
            )


def _shaped(array: Any) -> Any:
    """Return what has a shape and a dtype: abstract values as they are, all else as an array."""
    return array if hasattr(array, "shape") and hasattr(array, "dtype") else as_array(array)


def default_capacity(
    num_tokens: int,
    top_k: int,
    group_size: int,
    num_experts: int,
    alignment: int = 1,
    *,
    shared_expert: bool = False,
    replicated: bool = False,
) -> int:
    """Return the number of rows that holds the worst case, so that nothing is ever dropped.

    In the worst case, every token of every rank chooses experts of one rank. With alignment, each
    local expert that has rows wastes fewer than ``alignment`` of them.

    Args:
      num_tokens: tokens of each rank.
      top_k: choices of each token.
      group_size: number of ranks.
      num_experts: number of experts of all ranks together.
      alignment: the rows of each local expert start at a multiple of this number.
      shared_expert: adds the rows of the shared expert, rounded up to ``alignment``.
      replicated: counts the tokens of one rank only, because nothing is exchanged.

    Returns:
      The number of rows, a multiple of ``alignment``.
    """
    max_rows = (1 if replicated else group_size) * num_tokens * top_k
    shared = shared_tokens(num_tokens, group_size, replicated) if shared_expert else 0
    padded = _padded_rows(max_rows, num_experts // group_size, alignment)
    return padded + -(-shared // alignment) * alignment


def capacity(
    factor: float,
    *,
    num_tokens: int,
    top_k: int,
    group_size: int,
    num_experts: int,
    alignment: int = 1,
    shared_expert: bool = False,
    replicated: bool = False,
) -> int:
    """Return the number of rows that holds ``factor`` times the balanced load of a rank.

    The load is balanced if every rank receives equally many rows: ``num_tokens * top_k``, or with
    replicated tokens ``num_tokens * top_k / group_size``. Rows that ``alignment`` may add, and the
    rows of a shared expert, are on top. So a factor means the same share of dropped rows with any
    alignment. The result is at most ``default_capacity``, with which nothing is dropped.

    ``capacity_factor`` of ``route`` and ``dispatch`` uses this function.

    Args:
      factor: capacity in multiples of the balanced load, above 0. A factor of ``group_size`` holds
        the worst case.
      num_tokens: tokens of each rank.
      top_k: choices of each token.
      group_size: number of ranks.
      num_experts: number of experts of all ranks together.
      alignment: the rows of each local expert start at a multiple of this number.
      shared_expert: adds the rows of the shared expert, rounded up to ``alignment``.
      replicated: counts the tokens of one rank only, because nothing is exchanged.

    Returns:
      The number of rows, a multiple of ``alignment``.

    Raises:
      TypeError: if a size is not an int, or ``factor`` is not a number.
      ValueError: if a size or ``factor`` is out of range.

    Example:
      Room for 1.25 times the balanced load of 1,024 tokens with 8 choices, with and without
      alignment for 8 local experts:

      ```python
      import jax_moe_a2a as ma

      sizes = dict(num_tokens=1024, top_k=8, group_size=4, num_experts=32)
      print(ma.capacity(1.25, **sizes), ma.capacity(1.25, **sizes, alignment=128))
      ```

      ```text
      10240 11264
      ```
    """
    factor = check_factor("factor", factor)
    num_tokens = check_int("num_tokens", num_tokens, least=0)
    top_k = check_int("top_k", top_k, least=0)
    group_size = check_int("group_size", group_size, least=1)
    num_experts = check_int("num_experts", num_experts, least=1)
    alignment = check_int("alignment", alignment, least=1)
    sizes = num_tokens, top_k, group_size, num_experts, alignment
    worst_case = default_capacity(*sizes, shared_expert=shared_expert, replicated=replicated)
    # As it was written: 1.1 times 10 rows are 11 rows, and not 12.
    balanced = Fraction(num_tokens * top_k, group_size if replicated else 1)
    num_rows = math.ceil(Fraction(str(factor)) * balanced)
    shared = shared_tokens(num_tokens, group_size, replicated) if shared_expert else 0
    padded = _padded_rows(num_rows, num_experts // group_size, alignment)
    return min(worst_case, padded + -(-shared // alignment) * alignment)


def chosen_capacity(
    rows: Any,
    factor: Any,
    num_tokens: int,
    top_k: int,
    group_size: int,
    num_experts: int,
    alignment: int,
    **modes: bool,
) -> int:
    """The rows of a rank by the arguments ``capacity`` and ``capacity_factor`` of a function; the
    worst case if both are None.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: an argument out of range, or both are given.
    """
    if factor is None:
        if rows is not None:
            return check_int("capacity", rows, least=0)
        return default_capacity(num_tokens, top_k, group_size, num_experts, alignment, **modes)
    if rows is not None:
        raise ValueError(
            f"capacity must be None with a capacity_factor; got {rows!r} and {factor!r}. Pass one "
            "of them"
        )
    return capacity(
        check_factor("capacity_factor", factor),
        num_tokens=num_tokens,
        top_k=top_k,
        group_size=group_size,
        num_experts=num_experts,
        alignment=alignment,
        **modes,
    )


def _padded_rows(num_rows: int, num_local_experts: int, alignment: int) -> int:
    """The most that rows of local experts take with padding, rounded up to the alignment."""
    num_rows += min(num_local_experts, num_rows) * (alignment - 1)
    return -(-num_rows // alignment) * alignment


def check_top_k(top_k: int, shared_expert: bool = False, of: str = "") -> None:
    """An error where a token has more choices than there may be; ``of`` says whose they are."""
    most = MAX_TOP_K - shared_expert
    if top_k > most:
        which = " with a shared expert" * shared_expert
        raise ValueError(f"top_k must be at most {most}{which}; got {top_k}{of}")


def shared_tokens(num_tokens: int, group_size: int, replicated: bool) -> int:
    """Tokens that a rank gives to its shared expert: its own; of replicated tokens, its share."""
    return -(-num_tokens // group_size) if replicated else num_tokens


def planned_ids(
    ids: jax.Array,
    rank: jax.Array,
    *,
    group_size: int,
    num_experts: int,
    shared_expert: bool,
    replicated: bool,
) -> jax.Array:
    """The ids by which the modes are ordinary routings of the ranks of ``Routing.domain``.

    Experts are numbered anew: a shared one comes first on its rank, and is the last choice of each
    token, at the token's own rank. With replicated tokens, only the own experts have numbers, and
    rank r of R gives the r-th of R equal shares of the tokens to its shared expert.

    Args:
      ids: int32 [T, K]; any id outside [0, num_experts) drops its choice.
      rank: int32 [], this rank.

    Returns:
      int32 [T, K], or [T, K + 1] with a shared expert, -1 for no choice.
    """
    local_experts = num_experts // group_size
    first: Any = 0  # what the first local expert is called
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
    """Computes one rank's routing from the ids of all ranks.

    Args:
      all_ids: int32 [R, T, K], global expert ids; any id outside [0, R * L) drops its choice.
      rank: int32 [], this rank.
      num_local_experts: L; expert e lives on rank e // L.
      capacity: C, rows here.
      alignment: each group's rows start at a multiple of it.
      first_choice: the choice index that is dropped last, and after which the others follow in a
        ring; None if the capacity holds any routing.
      parts: H, if tokens are H equal parts that come from hosts of their own, each of which names
        experts of its own: L is H times the number of groups.
    """
    num_ranks, num_tokens, top_k = all_ids.shape
    int32 = jnp.int32

    # Invalid ids vanish before any prefix sum: every rank must count alike.
    valid = (all_ids >= 0) & (all_ids < num_ranks * num_local_experts)
    choice_rank = jnp.where(valid, quotient(all_ids, num_local_experts), -1)

    # A token takes one slot per rank that holds any of its experts, in token order.
    ranks = jnp.arange(num_ranks, dtype=int32)
    goes_to = (choice_rank[..., None] == ranks[None, None, None, :]).any(axis=2)
    slots = jnp.where(goes_to, running_sum(goes_to.astype(int32), axis=1) - 1, -1)  # [R, T, R]
    token_slot = lax.dynamic_index_in_dim(slots, rank, keepdims=False)
    tokens = jnp.arange(num_tokens, dtype=int32)
    slot_token = (
        jnp.full((num_ranks, num_tokens), -1, int32)
        .at[ranks[None, :], jnp.where(token_slot >= 0, token_slot, num_tokens)]
        .set(tokens[:, None], **_DROP)
    )

    # Rows here: by local expert, and in (source rank, token, k) order within each.
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
            parts=parts,
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

    source_slot = lax.dynamic_index_in_dim(slots, rank, axis=2)  # [R, T, 1]
    r, t, k = (lax.broadcasted_iota(int32, all_ids.shape, axis) for axis in range(3))
    slot_rows = (
        jnp.full(all_ids.shape, -1, int32)
        .at[r, jnp.where(is_here, source_slot, num_tokens), k]
        .set(jnp.where(is_kept, row, -2), **_DROP)
    )

    row_or_none = jnp.where(is_kept, row, capacity).ravel()

    def by_row(values: jax.Array) -> jax.Array:
        values = jnp.broadcast_to(values, all_ids.shape).ravel()
        return jnp.full(capacity, -1, int32).at[row_or_none].set(values, **_DROP)

    # The other numbers of a row follow from that of its choice: a scatter is a launch of its own.
    choice = by_row(choices.reshape(all_ids.shape))
    token = quotient(choice, max(1, top_k))
    num_rows = is_kept.sum(dtype=int32)
    return RoutePlan(
        token_slot=token_slot,
        slot_token=slot_token,
        choice_rank=lax.dynamic_index_in_dim(choice_rank, rank, keepdims=False),
        slot_rows=slot_rows,
        row_rank=jnp.where(choice >= 0, quotient(token, max(1, num_tokens)), -1),
        row_slot=jnp.where(
            jnp.arange(capacity, dtype=int32) < ends[-1:], by_row(source_slot), TAIL_ROW
        ),
        row_k=jnp.where(choice >= 0, remainder(choice, max(1, top_k)), -1),
        row_token=jnp.where(choice >= 0, remainder(token, max(1, num_tokens)), -1),
        group_sizes=jnp.minimum(ends, capacity) - jnp.minimum(ends - padded, capacity),
        num_rows=num_rows,
        num_dropped=is_here.sum(dtype=int32) - num_rows,
    )


def has_room(
    group: jax.Array,
    *,
    num_groups: int,
    capacity: int,
    alignment: int,
    first_choice: int,
    parts: int,
) -> jax.Array:
    """Whether each choice is kept, by the order in which choices ask for room.

    The order is that of section 19 of docs/protocol.md: choice, token, and source, which is host
    before rank.

    Args:
      group: int32 [R, T, K], the group of each choice, ``num_groups`` for none here.
      others: as of ``plan_route``.

    Returns:
      bool [R, T, K]; of choices that are not here it says nothing.
    """
    num_ranks, num_tokens, top_k = group.shape
    if group.size == 0:
        return jnp.zeros(group.shape, bool)
    shape = (num_ranks, parts, num_tokens // parts, top_k)
    asking = jnp.roll(group, -first_choice, axis=2).reshape(shape).transpose(3, 2, 1, 0)
    opens_block = asking < num_groups
    if alignment > 1:
        _, index = count_and_number(asking.ravel(), num_groups)
        opens_block &= remainder(index.reshape(asking.shape), alignment) == 0
    taken = running_sum(opens_block.ravel().astype(jnp.int32)) * alignment
    fits = (taken <= capacity).reshape(asking.shape).transpose(3, 2, 1, 0)
    return jnp.roll(fits.reshape(group.shape), first_choice, axis=2)


def count_and_number(group: jax.Array, num_groups: int) -> tuple[jax.Array, jax.Array]:
    """int32 [N], the group of each element, ``num_groups`` for none -> the number of elements of
    each group, and for each element the number of earlier ones of its group."""
    counts = jnp.zeros(num_groups + 1, jnp.int32).at[group].add(1, **_DROP)
    order = jnp.argsort(group, stable=True)
    numbers = jnp.arange(group.size, dtype=jnp.int32)
    place = jnp.zeros(group.size, jnp.int32).at[order].set(numbers, **_DROP)
    earlier = running_sum(counts) - counts
    return counts[:-1], place - earlier.at[group].get(**_IN_BOUNDS)


def quotient(x: jax.Array, divisor: int) -> jax.Array:
    """Return ``x // divisor`` for int32 x >= 0; any number for other x.

    ``//`` emits ten more operations, which correct the signs.
    """
    return lax.div(x.astype(jnp.uint32), np.uint32(divisor)).astype(jnp.int32)


def remainder(x: jax.Array, divisor: int) -> jax.Array:
    """Return ``x % divisor`` for int32 x >= 0; any number for other x."""
    return lax.rem(x.astype(jnp.uint32), np.uint32(divisor)).astype(jnp.int32)


def running_sum(x: jax.Array, axis: int = 0) -> jax.Array:
    """Return the inclusive prefix sum along an axis, in the dtype of ``x``.

    ``jnp.cumsum`` emits many operations on CPU. In newer versions it becomes a scan that XLA:CPU
    aborts on where one export serves several platforms (jax 0.12.0.1).
    """
    length = x.shape[axis]
    if length == 0:
        return x
    window, padding = [1] * x.ndim, [(0, 0)] * x.ndim
    window[axis], padding[axis] = length, (length - 1, 0)
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, [1] * x.ndim, padding)


def fold_batch(routing: RoutingArrays) -> RoutingArrays:
    """Turns B routings (leading axis B on every array) into one over B*T tokens and B*C rows.

    Each element keeps its own capacity and drops: only tokens, slots and rows are renumbered, by
    b*T and b*C, and the negative marks stay. Slots of the result may have holes.
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
