"""Define ``plan_placement``, which places experts on ranks from the rows that each expert had.

The code is the same for NumPy and JAX. All numbers are int32, so that all ranks compute the same
plan.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from .. import scopes
from ..checks import as_array, check_bool, check_int, short
from .fill import INT32_MAX, fill_slots, repeat
from .types import Placement, home_experts, map_leading, max_replicas, placement_of


@scopes.placement
def plan_placement(
    load: ArrayLike,
    *,
    num_ranks: int,
    spare: int,
    home: bool = True,
    num_hosts: int = 1,
    min_rows: int = 1,
) -> Placement:
    """Plan which experts get replicas, on which ranks, and how many rows each replica gets.

    Each step finds a source, the rank with the most rows, and a target, the rank with the fewest
    rows among ranks with an empty spare slot. The target gets a replica of the source's largest
    expert, with at most the number of rows that the target lacks to reach the mean. Steps repeat
    until all ranks have the mean load, or no replica helps.

    With ``home=False``, the plan first moves experts: each expert, from the largest to the
    smallest, moves to the rank with the fewest rows so far among the ranks that have room. With
    ``spare=0``, there are no further steps.

    Args:
      load: integers [..., E], the rows of each expert, such as
        ``ExpertLoad.wanted_per_expert``. Their sum must be below 2**31. Leading axes are for
        layers. If the load varies between training steps, pass the sum over several steps.
      num_ranks: R, the number of ranks, which divides E.
      spare: spare slots of each rank.
      home: True for the home form of a ``Placement``, for training: experts stay on their ranks,
        and only replicas are added. False for inference.
      num_hosts: number of hosts, which divides R. Each host has consecutive ranks. Replicas of an
        expert are on its host, so that weights do not travel between hosts. With ``home=False``,
        experts may move to other hosts.
      min_rows: the smallest number of rows that a new replica must receive.

    Returns:
      A placement with ``E + R * spare`` slots and the leading axes of ``load``. If ``load`` is a
      JAX array, which may be traced, the placement has JAX arrays. Otherwise it has NumPy arrays
      with equal values. Its field ``home`` is the argument ``home``, even if a plan with
      ``home=False`` moves no expert.
    """
    array = as_array(load)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"load must hold integers; got {short(array)}. Use sums over steps in place of means"
        )
    if not array.ndim:
        raise ValueError(f"load must have the shape [..., num_experts]; got {short(array)}")
    spare = check_int("spare", spare, least=0)
    home = check_bool("home", home)
    min_rows = check_int("min_rows", min_rows, least=1)
    homes = home_experts(array.shape[-1], num_ranks)
    num_hosts = check_int("num_hosts", num_hosts, least=1)
    if num_ranks % num_hosts:
        raise ValueError(f"num_hosts must divide num_ranks={num_ranks}; got {num_hosts}")
    xp: Any = jnp if isinstance(array, jax.Array) else np
    if xp is np and array.size and (array.min() < 0 or array.sum(-1).max() > INT32_MAX):
        raise ValueError(
            "load must not be negative, and its sum must be below 2**31; got values from "
            f"{array.min()}, and a sum of {array.sum(-1).max()}. Divide it by a power of 2"
        )
    num_experts, num_local = homes.size, homes.shape[1]
    most = min(max_replicas(num_experts + num_ranks * spare, num_experts), num_ranks // num_hosts)
    homes = homes.astype(np.int32)

    def plan(load: Any) -> Placement:
        by_host = xp.asarray(homes.reshape(num_hosts, -1))
        if not home:
            by_host = _pack(xp, load, by_host.ravel(), num_hosts)

        def plan_host(experts: Any) -> Any:
            tables = experts.reshape(-1, num_local)
            if not home:
                tables = _pack(xp, load[experts], experts, num_ranks // num_hosts)
            options = dict(spare=spare, most=most, min_rows=min_rows)
            return fill_slots(xp, tables, load[tables], **options)

        slots, rows = map_leading(xp, plan_host, by_host)
        flat = (num_ranks, num_local + spare)
        return placement_of(xp, slots.reshape(flat), rows.reshape(flat), num_experts, home)

    return map_leading(xp, plan, array.astype(np.int32))


def _pack(xp: ModuleType, load: Any, experts: Any, num_packs: int) -> Any:
    """Divide experts [n] with loads [n] into packs with equally many experts and similar load.
    Return the experts of each pack, int32 [num_packs, n / num_packs]."""
    size = len(experts) // num_packs
    order = xp.argsort(-load, stable=True)
    load, experts = load[order], experts[order]
    pack_index = xp.arange(num_packs, dtype=np.int32)
    member_index = xp.arange(size, dtype=np.int32)

    def add(step: Any, state: Any) -> Any:
        packs, loads, counts = state
        pack = xp.where(counts < size, loads, INT32_MAX).argmin()
        is_pack = pack_index == pack
        is_place = is_pack[:, None] & (member_index[None, :] == counts[pack])
        packs = xp.where(is_place, experts[step], packs)
        loads = loads + xp.where(is_pack, load[step], 0)
        return True, (packs, loads, counts + xp.where(is_pack, 1, 0))

    empty = xp.zeros(num_packs, np.int32)
    start = xp.zeros((num_packs, size), np.int32), empty, empty
    packs, _, _ = repeat(xp, len(experts), add, start, load)
    return packs
