"""Choose the replicas for the spare slots of ranks, in NumPy or JAX. On NVIDIA GPUs, a kernel with
equal results replaces the loop in JAX.

``fill_slots_p`` has the operands and results of ``fill_loop``. ``vmap`` adds leading axes. There
are no derivatives, because all arrays are integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import batching, mlir

from .. import compat, paths
from ..compat import align_varying, varying_axes
from ..group import native
from ..paths import Choice
from .types import map_leading

INT32_MAX = int(np.iinfo(np.int32).max)
TARGET = "moe_a2a_fill_slots"

fill_slots_p = compat.Primitive(TARGET)
fill_slots_p.multiple_results = True


def fill_slots(xp: ModuleType, experts: Any, rows: Any, **params: Any) -> Any:
    """Call ``fill_loop`` for NumPy arrays, and bind ``fill_slots_p`` for JAX arrays."""
    if xp is np:
        return fill_loop(np, experts, rows, **params)
    return fill_slots_p.bind(*align_varying([experts, rows], ()), **params)


def fill_loop(xp: Any, experts: Any, rows: Any, *, spare: int, most: int, min_rows: int) -> Any:
    """Return two arrays int32 [R, L + spare]: the expert and the number of rows of each slot.

    Args:
      experts: int32 [R, L], the experts of each rank, without replicas.
      rows: int32 [R, L], the number of rows of each of these experts.
      spare: the number of spare slots of each rank.
      most: the largest number of slots of an expert.
      min_rows: as in ``plan_placement``.
    """
    num_ranks, num_local = experts.shape
    total = rows.sum(dtype=np.int32)
    # The target is the mean load or, if larger, the rows of the largest expert divided by ``most``.
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
    replicas = pad(xp.ones_like(experts), most)  # spare slots give no rows away
    start = pad(experts, -1), pad(rows, 0), free, replicas
    slots, rows, _, _ = repeat(xp, num_ranks * spare, fill, start, rows)
    return slots, rows


def repeat(xp: ModuleType, most: int, step: Callable[..., Any], state: Any, read: Any) -> Any:
    """Run ``goes_on, state = step(index, state)`` while ``goes_on``, at most ``most`` times."""
    if xp is np:
        for index in range(most):
            goes_on, state = step(index, state)
            if not goes_on:
                break
        return state
    leaves, tree = jax.tree.flatten([jnp.int32(0), jnp.bool_(True), state])
    start = jax.tree.unflatten(tree, align_varying(leaves, varying_axes(read)))

    def next_(carry: Any) -> Any:
        index, _, state = carry
        goes_on, state = step(index, state)
        return [index + 1, jnp.asarray(goes_on) & carry[1], state]

    return lax.while_loop(lambda carry: (carry[0] < most) & carry[1], next_, start)[2]


def why_no_kernel(num_ranks: int, num_experts: int) -> str:
    """Return '' if the kernel can run for these sizes on this process's GPUs, else the reason."""
    if why := native.why_no_local_kernel():
        return why
    ranks, experts = native.limit("MAX_RANKS"), native.limit("MAX_PLANNED_EXPERTS")
    if num_ranks > ranks or num_experts > experts:
        return (
            f"the kernel plans at most {ranks} ranks and {experts} experts; got {num_ranks} and "
            f"{num_experts}"
        )
    return ""


def _abstract(experts: Any, rows: Any, *, spare: int, **_: Any) -> list[Any]:
    shape = (*rows.shape[:-1], rows.shape[-1] + spare)
    return [compat.result_aval(rows, shape, np.int32)] * 2


def _batch(args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    (size,) = {arg.shape[dim] for arg, dim in zip(args, dims) if dim is not None}
    arrays = [batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims)]
    return fill_slots(jnp, *arrays, **params), (0, 0)


def _loops(experts: jax.Array, rows: jax.Array, **params: Any) -> Any:
    loop = lambda *arrays: fill_loop(jnp, *arrays, **params)
    return map_leading(jnp, loop, experts, rows, ndim=2)


def _kernel(
    experts: jax.Array, rows: jax.Array, *, spare: int, most: int, min_rows: int
) -> list[jax.Array]:
    *lead, num_ranks, num_local = rows.shape
    batch = (math.prod(lead), num_ranks)
    out = jax.ShapeDtypeStruct((*batch, num_local + spare), np.int32)
    operands = [x.reshape(*batch, num_local) for x in (experts, rows)]
    found = native.call_product(TARGET, [out, out], operands, most=most, min_rows=min_rows)
    return [x.reshape(*lead, *x.shape[1:]) for x in found]


def _cuda(ctx: Any, *operands: Any, **params: Any) -> Choice:
    num_ranks, num_local = ctx.avals_in[1].shape[-2:]
    why = why_no_kernel(num_ranks, num_ranks * num_local)
    return native.choose_kernel(ctx, operands, params, _kernel, why, _loops, "a loop")


fill_slots_p.def_impl(lambda *args, **params: compat.apply_primitive(fill_slots_p, *args, **params))
fill_slots_p.def_abstract_eval(_abstract)
batching.primitive_batchers[fill_slots_p] = _batch
mlir.register_lowering(
    fill_slots_p, lambda ctx, *operands, **params: compat.lower_fun(ctx, _loops, operands, params)
)
mlir.register_lowering(fill_slots_p, paths.lowering(fill_slots_p, _cuda), platform="cuda")
