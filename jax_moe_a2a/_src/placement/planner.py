"""Plan where experts are, from how many rows each of them had.

The code is the same for NumPy and JAX. It computes in int32, so all ranks plan the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ..checks import as_array, check_bool, check_int, short
from ..compat import align_varying, varying_axes
from .types import Placement, home_experts, map_leading, max_replicas, placement_of

INT32_MAX = int(np.iinfo(np.int32).max)


def plan_placement(
    load: ArrayLike,
    *,
    num_ranks: int,
    spare: int,
    home: bool = True,
    num_hosts: int = 1,
    min_rows: int = 1,
) -> Placement:
    """Plan replicas of popular experts, and how many rows each replica should receive.

    The plan fills the emptiest rank that has an empty spare slot: a replica of the largest expert
    of the fullest rank takes the rows that the rank lacks. It repeats this until all ranks have the
    mean load, or no spare slot helps. A rank fills its last spare slot even if its source falls
    below the mean, because that source has spare slots of its own.

    Without the home form, experts first move: each expert, from the largest to the smallest, moves
    to the emptiest rank that has room. With ``spare=0``, this is the whole plan.

    Args:
      load: integers [..., E], the rows of each expert, such as
        ``ExpertLoad.wanted_per_expert``. Their sum must be below 2**31. Leading axes are for
        layers. Plan from the sum of several steps if routing varies between steps.
      num_ranks: R, the number of ranks, which divides E.
      spare: spare slots of each rank.
      home: True for the home form of a ``Placement``, for training: experts stay, and only
        replicas are added. False for serving.
      num_hosts: number of hosts, which divides R. Each host has consecutive ranks. Replicas are on
        the host of their expert, so that weights do not travel between hosts. Without the home
        form, experts first move between hosts.
      min_rows: the fewest rows for which a replica is worth its slot.

    Returns:
      The placement, with the shapes of ``Placement.identity(E, R, spare=spare)`` after the leading
      axes of ``load``. It holds NumPy arrays, or JAX arrays if ``load`` is a JAX array: then the
      call can be part of a program, and its plan is equal to NumPy's, bit for bit.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape or range.

    Example:
      Expert 0 has 60 of 80 rows. Rank 1 has 10 rows, and takes 30 of them:

      ```python
      import jax_moe_a2a as ma

      placement = ma.plan_placement([60, 10, 10, 0], num_ranks=2, spare=1)
      print(placement.slot_experts, placement.share_ends[0] / 2**15)
      ```

      ```text
      [ 0  1 -1  2  3  0] [0.5 1.  1. ]
      ```
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
            return _replicate(xp, load, tables, spare, most, min_rows)

        slots, rows = map_leading(xp, plan_host, by_host)
        flat = (num_ranks, num_local + spare)
        return placement_of(xp, slots.reshape(flat), rows.reshape(flat), num_experts)

    return map_leading(xp, plan, array.astype(np.int32))


def _pack(xp: Any, load: Any, experts: Any, num_packs: int) -> Any:
    """Divide experts [n], with these loads [n], into packs of equal size and similar load. Return
    the experts of each pack, int32 [num_packs, n / num_packs]."""
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
    packs, _, _ = _repeat(xp, len(experts), add, start, load)
    return packs


def _replicate(xp: Any, load: Any, tables: Any, spare: int, most: int, min_rows: int) -> Any:
    """Fill the spare slots of ranks.

    Args:
      load: int32 [E], the rows of all experts.
      tables: int32 [R, L], the experts of these ranks, each once.
      spare: the spare slots of each rank.
      most: the most slots of an expert.
      min_rows: as in ``plan_placement``.

    Returns:
      The expert of each slot, int32 [R, L + spare], and the rows of each slot.
    """
    num_ranks, num_local = tables.shape
    rows = load[tables]
    total = rows.sum(dtype=np.int32)
    # An expert with ``most`` slots of equal shares may load each rank more than the mean.
    target = xp.maximum(-(-total // num_ranks), -(-rows.max() // most))
    rank_index = xp.arange(num_ranks, dtype=np.int32)[:, None]
    slot_index = xp.arange(num_local + spare, dtype=np.int32)[None, :]
    at = lambda rank, slot: (rank_index == rank) & (slot_index == slot)
    pad = lambda array, value: xp.pad(array, ((0, 0), (0, spare)), constant_values=value)

    def fill(step: Any, state: Any) -> Any:
        slots, rows, free, replicas = state
        loads = rows.sum(-1, dtype=np.int32)
        to = xp.where(free > 0, loads, INT32_MAX).argmin()
        source = loads.argmax()
        lacking, excess = target - loads[to], loads[source] - target
        slot = xp.where(replicas[source] < most, rows[source], -1).argmax()
        taken = xp.where(free[to] > 1, xp.minimum(lacking, excess), lacking)
        taken = xp.minimum(taken, rows[source, slot])
        is_worth = xp.minimum(taken, excess) >= min_rows
        goes_on = is_worth & (free[to] > 0) & (replicas[source, slot] < most)
        is_source = at(source, slot) & goes_on
        is_new = at(to, num_local + spare - free[to]) & goes_on
        return goes_on, (
            xp.where(is_new, slots[source, slot], slots),
            xp.where(is_new, taken, rows - xp.where(is_source, taken, 0)),
            free - is_new.sum(-1, dtype=np.int32),
            replicas + is_source.astype(np.int32),
        )

    free = xp.full(num_ranks, spare, np.int32)
    replicas = pad(xp.ones_like(tables), most)  # nothing moves out of spare slots
    start = pad(tables, -1), pad(rows, 0), free, replicas
    slots, rows, _, _ = _repeat(xp, num_ranks * spare, fill, start, load)
    return slots, rows


def _repeat(xp: Any, most: int, step: Callable[..., Any], state: Any, load: Any) -> Any:
    """Call ``goes_on, state = step(index, state)`` while it goes on, up to ``most`` times. The step
    reads ``load``."""
    if xp is np:
        for index in range(most):
            goes_on, state = step(index, state)
            if not goes_on:
                break
        return state
    leaves, tree = jax.tree.flatten([jnp.int32(0), jnp.bool_(True), state])
    start = jax.tree.unflatten(tree, align_varying(leaves, varying_axes(load)))

    def next_(carry: Any) -> Any:
        index, _, state = carry
        goes_on, state = step(index, state)
        return [index + 1, jnp.asarray(goes_on) & carry[1], state]

    return lax.while_loop(lambda carry: (carry[0] < most) & carry[1], next_, start)[2]
