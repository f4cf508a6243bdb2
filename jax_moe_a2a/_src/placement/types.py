"""Define ``Placement``, which says which expert is in each slot of each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from ..checks import as_array, check_int, short
from ..plan import plan

# The largest number of slots of an expert, because sets of ranks and of slots are 32-bit integers.
MAX_REPLICAS = 31

SHARE_BITS = 15  # shares are multiples of 2**-15, so that products fit in 32 bits
ALL = 2**SHARE_BITS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placement:
    """A pytree that says which expert's weights are in each expert slot of all ranks.

    Each of R ranks has P / R expert slots; slot ``s`` is on rank ``s // (P / R)``. If an expert is
    in several slots, these are its *replicas*. Ranks exchange rows as if each slot were a separate
    expert: ``choose_slots`` replaces ids of experts by ids of slots.

    The arrays are int32, so JAX does not compile a program again for other placements of the same
    shapes. ``num_ranks`` and ``home`` are static. All arrays may have the same leading axes, for
    example for layers.

    In the *home form*, the first E / R slots of rank ``r`` contain the experts from ``r * E / R``
    on, in order, as without a placement. Only the slots after them, the *spare* slots, depend on
    the placement. Training uses this form: parameters do not move, and only spare slots get new
    weights.
    """

    slot_experts: Any
    """[..., P]: expert of each slot, -1 for an empty slot."""
    expert_slots: Any
    """[..., E, M]: slots of each expert, -1 after the last slot. The slots of an expert are sorted
    by their position on their rank, then by rank. Therefore the first one is the home slot in the
    home form."""
    num_replicas: Any
    """[..., E]: number of slots of each expert, from 1 to M."""
    share_ends: Any
    """[..., E, M]: in units of 2**-15, the share of an expert's rows that this slot and all earlier
    slots of the expert should receive together; 2**15 for the last slot and all later entries."""
    num_ranks: int = dataclasses.field(metadata=dict(static=True))
    """R, the number of ranks."""
    home: bool = dataclasses.field(metadata=dict(static=True))
    """True if the placement has the home form."""

    @property
    def num_experts(self) -> int:
        """Return E, the number of experts."""
        return self.expert_slots.shape[-2]

    @property
    def num_slots(self) -> int:
        """Return P, the number of slots of all ranks."""
        return self.slot_experts.shape[-1]

    @classmethod
    def from_slots(cls, slot_experts: ArrayLike, num_experts: int, *, num_ranks: int) -> Placement:
        """Return a placement from the expert in each slot, for example from another system.

        Such arrays are ``physical_to_logical_map`` of vLLM and SGLang, and the first result of
        ``rebalance_experts`` of EPLB.

        Args:
          slot_experts: integers [..., P], known outside ``jax.jit``: the expert of each slot, -1
            for an empty slot. Each expert needs 1 to 31 slots.
          num_experts: E, the number of experts.
          num_ranks: R, the number of ranks, which divides P.

        Returns:
          A placement with NumPy arrays. All slots of an expert get equal shares of its rows. Shapes
          depend only on P and E: M is ``min(31, P - E + 1)``. ``home`` is True if all layers have
          the home form.
        """
        num_experts = check_int("num_experts", num_experts, least=1)
        num_ranks = check_int("num_ranks", num_ranks, least=1)
        given = as_array(slot_experts)
        if isinstance(given, jax.core.Tracer):
            raise TypeError(
                f"slot_experts must be known when the program is traced; got {short(given)}. Make "
                "the placement outside jax.jit, and pass it as an argument"
            )
        table = np.asarray(given)
        if not np.issubdtype(table.dtype, np.integer):
            raise TypeError(f"slot_experts must hold integers; got {short(table)}")
        num_slots = table.shape[-1] if table.ndim else 0
        if num_slots < num_experts or num_slots % num_ranks:
            raise ValueError(
                f"slot_experts must have the shape [..., num_slots], with at least {num_experts} "
                f"slots (num_experts) and a multiple of {num_ranks} (num_ranks); got {short(table)}"
            )
        wrong = table[(table < -1) | (table >= num_experts)]
        if wrong.size:
            raise ValueError(
                f"slot_experts must be ids of experts in [0, {num_experts}), or -1 for an empty "
                f"slot; got {wrong[0]}"
            )
        num_replicas = (table[..., :, None] == np.arange(num_experts)).sum(-2)
        most = max_replicas(num_slots, num_experts)
        wrong = np.argwhere((num_replicas < 1) | (num_replicas > most))
        if wrong.size:
            count = num_replicas[tuple(wrong[0])]
            remedy = "give it a slot" if not count else "use fewer replicas"
            raise ValueError(
                f"slot_experts must have 1 to {most} slots of each expert; got {count} of expert "
                f"{wrong[0][-1]}: {remedy}"
            )
        table = table.reshape(*table.shape[:-1], num_ranks, -1).astype(np.int32)
        home = num_experts % num_ranks == 0
        if home:
            experts = home_experts(num_experts, num_ranks)
            home = bool((table[..., : experts.shape[1]] == experts).all())
        of_table = lambda table: placement_of(np, table, np.ones_like(table), num_experts, home)
        return map_leading(np, of_table, table, ndim=2)

    def check_home(self) -> None:
        """Raise a ValueError if the placement does not have the home form."""
        if not self.home:
            raise ValueError(
                "placement must have the home form, because weights of all other slots stay where "
                "they are; got another one. Plan it with home=True, or pass weights of all slots"
            )


def check_placement(
    placement: object, num_ranks: int, *, num_experts: int | None = None, or_none: bool = False
) -> Placement:
    """Return ``placement``. Raise an error if it is not a ``Placement`` without leading axes for
    these numbers of ranks and experts (None for any number). The values in its arrays are not
    checked."""
    if not isinstance(placement, Placement):
        kinds = "a Placement or None" if or_none else "a Placement"
        raise TypeError(f"placement must be {kinds}; got {type(placement).__name__}")
    tables = placement.slot_experts, placement.expert_slots
    if tuple(table.ndim for table in tables) != (1, 2):
        raise TypeError(
            "placement must have slot_experts [P] and expert_slots [E, M]; got "
            f"{' and '.join(map(short, tables))}. Pass the placement of one layer"
        )
    own = placement.num_experts, placement.num_ranks
    expected = own[0] if num_experts is None else num_experts, num_ranks
    if own != expected:
        raise ValueError(
            "placement must have {} experts on {} ranks; got one with {} experts on {} ranks. Plan "
            "it from the load of these experts with num_ranks={}".format(*expected, *own, num_ranks)
        )
    num_slots = placement.num_slots
    slots = own[0], max_replicas(num_slots, own[0])
    shapes: dict[str, tuple[int, ...]] = dict(
        slot_experts=(num_slots,), expert_slots=slots, num_replicas=slots[:1], share_ends=slots
    )
    for name, shape in shapes.items():
        array = getattr(placement, name)
        if array.shape != shape or array.dtype != np.int32:
            raise TypeError(
                f"placement must be a placement of {own[0]} experts as Placement.from_slots "
                f"returns it: {name} must be int32[{','.join(map(str, shape))}]; got "
                f"{short(array)}. Pass the placement of one layer"
            )
    return placement


def max_replicas(num_slots: int, num_experts: int) -> int:
    """Return M, the largest number of slots that one expert can have."""
    return min(MAX_REPLICAS, num_slots - num_experts + 1)


def placement_of(
    xp: ModuleType, slot_experts: Any, slot_rows: Any, num_experts: int, home: bool
) -> Placement:
    """Return the placement for valid ``slot_experts``, int32 [R, P / R]. The shares of an expert's
    slots are proportional to their ``slot_rows``. If these are all zero, the first slot gets all
    rows."""
    num_slots = slot_experts.size
    experts = xp.arange(num_experts, dtype=np.int32)
    num_replicas = (slot_experts.reshape(1, -1) == experts[:, None]).sum(-1, dtype=np.int32)
    by_position = np.arange(num_slots, dtype=np.int32).reshape(slot_experts.shape).T.ravel()
    order = xp.asarray(by_position)[xp.argsort(slot_experts.T.ravel(), stable=True)]
    # In ``order``, empty slots are before all others.
    first = running_sum(xp, num_replicas) - num_replicas + (num_slots - num_replicas.sum())
    replica = xp.arange(max_replicas(num_slots, num_experts), dtype=np.int32)[None, :]
    is_replica = replica < num_replicas[:, None]
    expert_slots = order[xp.minimum(first[:, None] + replica, num_slots - 1)]
    rows = xp.where(is_replica, slot_rows.ravel()[expert_slots], 0)
    return Placement(
        slot_experts=slot_experts.ravel(),
        expert_slots=xp.where(is_replica, expert_slots, -1),
        num_replicas=num_replicas,
        share_ends=_shares(xp, running_sum(xp, rows, axis=1)),
        num_ranks=len(slot_experts),
        home=home,
    )


def _shares(xp: ModuleType, ends: Any) -> Any:
    """Return ``ends * ALL / last end`` for each row of nondecreasing int32 ``ends``, rounded down.
    Use long division, because ``ends * ALL`` would not fit in 32 bits."""
    total = ends[:, -1:].astype(np.uint32)
    rest, share = ends.astype(np.uint32), xp.zeros_like(ends)
    for _ in range(SHARE_BITS):
        rest = rest * 2
        is_one = rest >= total
        share = share * 2 + xp.where(is_one, 1, 0)
        rest = xp.where(is_one, rest - total, rest)
    return xp.where(ends >= ends[:, -1:], ALL, share).astype(np.int32)


def running_sum(xp: ModuleType, x: Any, axis: int = 0) -> Any:
    """Return the inclusive prefix sum along an axis, in int32."""
    return np.cumsum(x, axis, dtype=np.int32) if xp is np else plan.running_sum(x, axis)


def map_leading(xp: ModuleType, function: Callable[..., Any], *arrays: Any, ndim: int = 1) -> Any:
    """Map a function of arrays with ``ndim`` axes over all leading axes of ``arrays``."""
    if arrays[0].ndim == ndim:
        return function(*arrays)
    inner = lambda *arrays: map_leading(xp, function, *arrays, ndim=ndim)
    if xp is np:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *map(inner, *arrays))
    return jax.vmap(inner)(*arrays)


def home_experts(num_experts: int, num_ranks: int) -> np.ndarray:
    """Return the home experts of each rank, [R, E / R], or raise an error."""
    num_ranks = check_int("num_ranks", num_ranks, least=1)
    num_experts = check_int("num_experts", num_experts, least=1)
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a multiple of num_ranks={num_ranks}; got {num_experts}"
        )
    return np.arange(num_experts).reshape(num_ranks, -1)
