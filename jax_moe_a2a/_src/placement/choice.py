"""Define ``choose_slots``, which sends each choice of a token to one slot of the chosen expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .. import scopes
from ..checks import check_int
from ..plan.plan import count_and_number, running_sum
from ..routing.checks import as_int32, check_ids
from .types import ALL, SHARE_BITS, Placement, check_placement

# Multiples of this odd number modulo ALL are spread evenly in [0, ALL), because the number is about
# ALL divided by the golden ratio.
STRIDE = 20253


@scopes.placement
def choose_slots(
    ids: ArrayLike,
    placement: Placement,
    *,
    rank: ArrayLike | None,
    num_ranks: int,
) -> jax.Array:
    """Return a slot of the chosen expert for each choice, as ids for ``route``.

    Each slot of an expert should receive its share (``Placement.share_ends``) of the expert's rows
    from all ranks. If a rank has a slot of the expert, it first sends rows to this slot, up to the
    number that the slot should receive. The rank distributes its other rows over all slots of the
    expert, in proportion to the rows that each slot should still receive. A rank does not know the
    rows of other ranks, and assumes that all ranks have equally many rows.

    The result depends only on the arguments. If a token has the same id twice, the two slots may
    differ.

    Args:
      ids: integers [T, K], the expert of each choice. The id -1, for no expert, stays -1. For other
        ids outside [0, E), the results are outside [0, P), so that ``route`` counts them as
        invalid.
      placement: the placement, without leading axes. Its arrays may be traced.
      rank: this rank, an int32 scalar, for example ``jax.lax.axis_index("ep")``. None if all ranks
        have the same tokens. Then all ranks choose the same slots, and the shares are exact.
      num_ranks: R, the number of ranks of the placement.

    Returns:
      int32 [T, K]: slots in [0, P). Slot ``s`` is on rank ``s // (P / R)``.
    """
    num_ranks = check_int("num_ranks", num_ranks, least=1)
    placement = jax.tree.map(jnp.asarray, check_placement(placement, num_ranks))
    num_experts, num_slots = placement.num_experts, placement.num_slots
    ids = as_int32(check_ids("ids", ids), num_experts)
    is_valid = (ids >= 0) & (ids < num_experts)
    expert = jnp.where(is_valid, ids, num_experts)
    replica = _replicas(expert, placement, rank, num_ranks)
    slots = placement.expert_slots[jnp.minimum(expert, num_experts - 1), replica]
    return jnp.where(is_valid, slots, jnp.where(ids < 0, ids, num_slots))


def _replicas(
    expert: jax.Array,
    placement: Placement,
    rank: ArrayLike | None,
    num_ranks: int,
) -> jax.Array:
    """Return indices like ``expert``, int32: for each choice, which of its expert's slots to use.

    Each expert has a list of places, one for each row that its slots should still receive after all
    ranks have sent rows to their own slots. Each place belongs to one slot. This rank chooses a
    place for each of its remaining rows, and spreads these places evenly over the list.
    """
    num_experts, most = placement.expert_slots.shape
    if most == 1:
        return jnp.zeros_like(expert)
    own_counts, index = count_and_number(expert.ravel(), num_experts)
    index, expert = index.reshape(expert.shape), jnp.minimum(expert, num_experts - 1)
    num_sources = 1 if rank is None else num_ranks
    ends = _scaled((num_sources * own_counts)[:, None], placement.share_ends)
    if rank is None:
        return _slot_at(ends, index, expert, placement.num_replicas)

    quotas = ends - jnp.pad(ends, ((0, 0), (1, 0)))[:, :-1]
    ranks = jnp.arange(num_ranks, dtype=jnp.int32)
    rank = jnp.asarray(rank).astype(jnp.int32)
    slot_rank = lax.div(placement.expert_slots, np.int32(placement.num_slots // num_ranks))
    slot_rank = jnp.where(placement.expert_slots >= 0, slot_rank, -1)
    is_on = slot_rank[None] == ranks[:, None, None]  # [R, E, M]
    # If an expert has several slots on a rank, only the first one is the rank's own slot.
    is_own = is_on & (running_sum(is_on.astype(jnp.int32), axis=2) == 1)
    own_rows = jnp.minimum(
        own_counts[None], jnp.where(is_own, quotas[None], 0).sum(2, dtype=jnp.int32)
    )
    quotas -= jnp.where(is_own, own_rows[:, :, None], 0).sum(0, dtype=jnp.int32)
    ends = running_sum(quotas, axis=1)

    own_slot = lax.dynamic_index_in_dim(is_own, rank, keepdims=False).argmax(-1)
    here = lax.dynamic_index_in_dim(own_rows, rank, keepdims=False)[expert]
    beyond = index - here
    offset = lax.div(rank * ALL, np.int32(num_ranks))
    share = ((beyond & (ALL - 1)) * STRIDE + offset) & (ALL - 1)
    place = _scaled(ends[:, -1][expert], share)
    other = _slot_at(ends, place, expert, placement.num_replicas)
    return jnp.where(beyond < 0, own_slot[expert].astype(jnp.int32), other)


def _slot_at(ends: jax.Array, place: jax.Array, expert: jax.Array, num_slots: jax.Array) -> Any:
    """Return the index of the slot at a place in the list of the expert. In this list, the places
    of a slot end at its number in ``ends`` [E, M]. Places after the last end are places of the last
    slot."""
    index = (ends[expert] <= place[..., None]).sum(-1, dtype=jnp.int32)
    return jnp.minimum(index, num_slots[expert] - 1)


def _scaled(x: jax.Array, share: jax.Array) -> jax.Array:
    """Return ``x * share / ALL`` for int32 x >= 0, rounded down, without overflow."""
    low = lax.shift_right_logical((x & (ALL - 1)) * share, np.int32(SHARE_BITS))
    return lax.shift_right_logical(x, np.int32(SHARE_BITS)) * share + low
