"""Choose the slot of each choice of a token, among the replicas of its expert."""

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

# Multiples of this odd number, modulo ALL, are spread evenly, because it is about ALL / 1.618 (the
# golden ratio).
STRIDE = 20253


@scopes.placement
def choose_slots(
    ids: ArrayLike,
    placement: Placement,
    *,
    rank: ArrayLike | None,
    num_ranks: int,
) -> jax.Array:
    """Return the slot of each choice of this rank's tokens. Pass these slots to ``route`` as ids.

    Each slot of an expert should receive its share (``Placement.share_ends``) of the expert's rows
    from all ranks. A rank first fills its own slot of the expert, up to the rows that this slot
    should receive. It spreads its remaining rows evenly over the rows that the other slots still
    lack. A rank does not know the rows of other ranks, and assumes that all ranks have equally many
    rows.

    The result depends only on the arguments. Two equal ids of a token are two rows of its expert,
    and these rows may be in different slots.

    Args:
      ids: integers [T, K], the expert of each choice. -1 sends nothing and stays -1. Other ids
        outside [0, E) stay outside [0, P), so that ``route`` counts them as invalid.
      placement: the placement, without leading axes. Its arrays may be traced.
      rank: this rank, an int32 scalar, for example ``jax.lax.axis_index("ep")``. None if all ranks
        have the same tokens: all ranks then choose the same slots, with exact shares.
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
    """Return, for each choice, the index of its slot among the slots of its expert, int32 like
    ``expert``.

    Each expert has two lists of equal length. The first list has the expert's rows of all ranks,
    rank after rank. The second list has each slot once for each row that the slot should receive.
    Rows for a rank's own slot are first removed from both lists. Each other row goes to the slot at
    the same place of the second list.
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
    # If an expert has several slots on a rank, only the first slot counts as the rank's own.
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
    """Return the index of the slot at a place of the expert's list. ``ends`` [E, M] is the end of
    each slot's places. Places beyond the last end belong to the last slot."""
    index = (ends[expert] <= place[..., None]).sum(-1, dtype=jnp.int32)
    return jnp.minimum(index, num_slots[expert] - 1)


def _scaled(x: jax.Array, share: jax.Array) -> jax.Array:
    """Return ``x * share / ALL`` for int32 x >= 0, rounded down, without overflow."""
    low = lax.shift_right_logical((x & (ALL - 1)) * share, np.int32(SHARE_BITS))
    return lax.shift_right_logical(x, np.int32(SHARE_BITS)) * share + low
