"""Define ``Routing``, a pytree, and check the arrays of a routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..checks import as_array, short
from ..group.group import Group
from ..plan.capacity import Sizes
from ..plan.plan import RoutingArrays, plan_shapes

ROUTING_CHECKPOINT_NAME = "moe_a2a_routing"
"""Checkpoint name of every routing array, a str.

If a policy of ``jax.checkpoint`` saves this name, the backward pass does not route again. An
example is ``jax.checkpoint_policies.save_only_these_names(ROUTING_CHECKPOINT_NAME)``.
"""


STATIC = dict(static=True)  # metadata of a field that is not a leaf of the pytree


@dataclasses.dataclass(frozen=True)
class RouteOptions:
    """The static fields of a routing: everything except its arrays."""

    group: Group = dataclasses.field(metadata=STATIC)
    """The ranks that exchange tokens."""
    num_experts: int = dataclasses.field(metadata=STATIC)
    """Number of experts of all ranks together."""
    capacity: int = dataclasses.field(metadata=STATIC)
    """C, the number of rows of each rank."""
    alignment: int = dataclasses.field(metadata=STATIC)
    """The rows of each local expert start at a multiple of this number."""
    replicated: bool = dataclasses.field(metadata=STATIC)
    """True if all ranks have the same tokens."""

    @property
    def domain(self) -> Group:
        """Return the group over which tokens travel: one rank if tokens are replicated."""
        return self.group.single_rank if self.replicated else self.group

    @property
    def has_levels(self) -> bool:
        """Return True if tokens travel over two levels. Replicated tokens do not travel."""
        return self.group.two_level and not self.replicated

    @property
    def num_local_experts(self) -> int:
        """Return L, the number of experts of each rank."""
        return self.num_experts // self.group.size

    def sizes(self, num_tokens: int, top_k: int) -> Sizes:
        """Return the sizes that decide the capacity."""
        own = self.num_experts, self.alignment, self.replicated
        return Sizes(num_tokens, top_k, self.group.size, *own)

    def may_drop(self, num_tokens: int, top_k: int) -> bool:
        """Return True if some ids [num_tokens, top_k] need more rows than the capacity."""
        return self.capacity < self.sizes(num_tokens, top_k).rows()


@dataclasses.dataclass(frozen=True)
class RoutedRows(RouteOptions):
    """The fields of every routing that describe the rows of this rank.

    C is the capacity, and L the number of experts per rank. All arrays are int32.
    """

    row_rank: jax.Array
    """[C]: source rank of a row, or -1 if the row has no token."""
    row_token: jax.Array
    """[C]: index of a row's token at its source rank, or -1 if the row has no token."""
    group_sizes: jax.Array
    """[L]: number of rows of each local expert, with padding but without dropped rows."""
    num_rows: jax.Array
    """[]: number of rows with a token."""
    num_dropped: jax.Array
    """[]: number of rows that this rank dropped because the capacity was too small."""
    num_invalid: jax.Array
    """[]: number of this rank's ids outside [-1, num_experts), which are treated like -1."""
    topk_ids: jax.Array
    """[T, K]: the ids that this rank routed. No exchange reads this array."""

    @property
    def num_tokens(self) -> int:
        """Return T, the number of tokens of each rank."""
        return self.topk_ids.shape[0]

    @property
    def top_k(self) -> int:
        """Return K, the number of choices of each token."""
        return self.topk_ids.shape[1]

    def check_rows(self, argument: str, num_tokens: int, top_k: int) -> None:
        """Check the arrays that every routing has."""
        shapes: dict[str, tuple[int, ...]] = dict(
            row_rank=(self.capacity,),
            row_token=(self.capacity,),
            group_sizes=(self.num_local_experts,),
            num_rows=(),
            num_dropped=(),
            num_invalid=(),
            topk_ids=(num_tokens, top_k),
        )
        arrays = {name: _shaped(getattr(self, name)) for name in shapes}
        reason = (
            f"capacity={self.capacity}, num_experts={self.num_experts} of {self.group.size} "
            f"ranks, and {num_tokens} tokens of {top_k} choices"
        )
        check_int32(f"{argument} must be a routing as route returned it", arrays, shapes, reason)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing(RoutedRows):
    """The destinations of this rank's tokens and the sources of its rows, as a pytree.

    In the shapes, T is the number of tokens per rank, K the number of choices of a token, R the
    number of ranks, C the capacity, and L the number of experts per rank. All arrays are int32. A
    token uses one *slot* in the receive buffer of each rank that has experts of the token. On that
    rank, each of the token's choices among the rank's experts becomes one *row*.

    Do not change the arrays of a routing: ``dispatch`` and ``combine`` check their dtypes and
    shapes, but not their values. To leave choices out, set their ids to -1 before ``route``.

    With replicated tokens, R is 1. Choices of other ranks' experts are treated like the id -1.
    """

    token_slot: jax.Array
    """[T, R]: entry [t, r] is the slot of this rank's token t on rank r, or -1 without a slot."""
    slot_token: jax.Array
    """[R, T]: entry [r, s] is this rank's token in slot s on rank r, or -1 for an empty slot."""
    choice_rank: jax.Array
    """[T, K]: rank of a choice; -1 if its id sends nothing."""
    slot_rows: jax.Array
    """[R, T, K]: entry [r, s, k] is the row of choice k of the token in slot s from rank r. -1
    means that the choice is not for this rank. -2 means that the choice was dropped."""
    row_slot: jax.Array
    """[C]: slot of a row's token. -1 means padding, and -2 means a row after all padding."""
    row_k: jax.Array
    """[C]: index of a row's choice, or -1 if the row has no token."""

    @property
    def arrays(self) -> RoutingArrays:
        """Return the arrays that an exchange reads."""
        return RoutingArrays(*(getattr(self, name) for name in RoutingArrays._fields))

    def check(self, argument: str) -> None:
        """Check dtype and shape of all arrays."""
        check_arrays(argument, self.arrays, self.domain.size, self.capacity)
        self.check_rows(argument, *self.choice_rank.shape)


def check_arrays(
    argument: str, arrays: RoutingArrays, num_ranks: int, capacity: int, *, level: str = ""
) -> None:
    """Check dtype and shape of the arrays that an exchange reads, because kernels would read
    outside of arrays with other shapes. In errors, ``level`` precedes the names of the arrays."""
    what = f"{argument} must be a routing as route returned it"
    named = {f"{level}{name}": _shaped(array) for name, array in arrays._asdict().items()}
    choices = named[f"{level}choice_rank"]
    if len(choices.shape) != 2:
        raise TypeError(
            f"{what}: {level}choice_rank must be int32[num_tokens,top_k]; got {short(choices)}. "
            "Pass the routing of one rank unchanged"
        )
    num_tokens, top_k = choices.shape
    shapes = plan_shapes(num_tokens, top_k, num_ranks, 0, capacity)
    check_int32(
        what,
        named,
        {f"{level}{name}": shapes[name] for name in RoutingArrays._fields},
        f"{level}choice_rank {short(choices)}, {num_ranks} ranks and capacity={capacity}",
    )


def check_int32(
    what: str, arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], reason: str
) -> None:
    """Raise a TypeError with ``reason`` unless each array is int32 with its shape in ``shapes``."""
    for name, shape in shapes.items():
        if arrays[name].dtype != jnp.int32 or arrays[name].shape != shape:
            expected = ",".join(map(str, shape))
            raise TypeError(
                f"{what}: {name} must be int32[{expected}], because of {reason}; got "
                f"{short(arrays[name])}. Do not cast or slice the arrays of a "
                "routing; for other shapes, call route again"
            )


def _shaped(array: jax.Array) -> Any:
    return array if hasattr(array, "shape") and hasattr(array, "dtype") else as_array(array)
