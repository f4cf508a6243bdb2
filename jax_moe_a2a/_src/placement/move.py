"""Move the weights of experts into the slots of a placement, and back."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import scopes
from ..checks import PyTree, as_array, short
from .types import Placement, check_placement


def move_experts(
    w: PyTree, *, source: Placement | None = None, target: Placement | None = None
) -> PyTree:
    """Return the weights of experts in other slots, bit for bit.

    ``move_experts(w, target=placement)`` puts weights from the order of experts into the slots of a
    placement, and ``move_experts(w, source=placement)`` puts them back. With both, they move from
    one placement to the next. Placements may have any form, and different numbers of ranks. Apply
    the call to whatever else has the axis of experts, too, such as the moments of an optimizer.

    Each JAX array keeps its placement over the mesh, over Auto and Explicit axes, so the number of
    slots must be a multiple of the parts of its first axis. A device then holds as many experts
    of other devices at a time as there are parts. Inside ``jax.jit``, the compiler places the
    result over Auto axes, and may gather all experts. NumPy arrays stay NumPy arrays.

    Args:
      w: array [N, ...], or a pytree of arrays with this first axis, such as ``Experts``. N is the
        number of slots of ``source``, or E without ``source``.
      source: the ``Placement`` of ``w``, without leading axes, or None for the order of experts.
        If an expert has several slots, the first one is read.
      target: the ``Placement`` of the result, without leading axes, or None for the order of
        experts.

    Returns:
      [N', ...] like ``w``, where N' is the number of slots of ``target``, or E. Weights of empty
      slots are zero.

    Raises:
      TypeError: if a placement has the wrong type or leading axes.
      ValueError: if both placements are None or have other experts, or an array has another first
        axis.

    Example:
      ```python
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      placement = ma.Placement.from_slots([2, 0, 1, 0, 3, -1], 4, num_ranks=2)
      slots = ma.move_experts(jnp.array([10, 11, 12, 13]), target=placement)
      print(slots, ma.move_experts(slots, source=placement))
      ```

      ```text
      [12 10 11 10 13  0] [10 11 12 13]
      ```
    """
    given = [placement for placement in (source, target) if placement is not None]
    if not given:
        raise ValueError("source or target must be a Placement; got None for both. Pass one")
    num_experts = None
    for placement in given:
        num_ranks = getattr(placement, "num_ranks", 0)
        num_experts = check_placement(placement, num_ranks, num_experts=num_experts).num_experts
    expected = num_experts if source is None else source.num_slots
    for x in map(as_array, jax.tree.leaves(w)):
        if x.ndim < 1 or x.shape[0] != expected:
            raise ValueError(
                f"w must hold arrays [{expected}, ...], the number of "
                f"{'experts' if source is None else 'slots of source'}; got {short(x)}"
            )
    return jax.tree.map(partial(_moved, source=source, target=target), w)


def _moved(x: Any, *, source: Placement | None, target: Placement | None) -> Any:
    """Return an array in other slots."""
    x = as_array(x)
    if not isinstance(x, jax.Array):
        index = _index_of(np, source, target)
        is_empty = (index < 0).reshape(-1, *(1,) * (x.ndim - 1))
        return np.where(is_empty, np.zeros((), x.dtype), x[index])
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else x.sharding
    num_parts = x.shape[0] // sharding.shard_shape(x.shape)[0]
    if isinstance(x, jax.core.Tracer):
        return _take(x, source, target, num_parts)
    take = jax.jit(_take, static_argnums=3, out_shardings=x.sharding)
    return take(x, source, target, num_parts)


def _index_of(xp: ModuleType, source: Placement | None, target: Placement | None) -> Any:
    """Return the slot of source for each slot of target, or -1 for an empty slot."""
    found = source if source is not None else target
    assert found is not None
    experts = xp.arange(found.num_experts, dtype=np.int32)
    index = experts if source is None else xp.asarray(source.expert_slots)[:, 0]
    if target is None:
        return index
    experts = xp.asarray(target.slot_experts)
    return xp.where(experts < 0, -1, index[experts])


@scopes.placement
def _take(x: jax.Array, source: Any, target: Any, num_parts: int) -> jax.Array:
    """Return an array in other slots: the first ones of all devices, then the second ones, and so
    on, because each device gathers what one step reads."""
    index = _index_of(jnp, source, target)
    index = jnp.where(index < 0, x.shape[0], index)  # a fill of zeros
    sharding = jax.typeof(x).sharding
    spec = sharding if any(axis is not None for axis in sharding.spec) else None
    take = lambda index: x.at[index].get(mode="fill", fill_value=0, out_sharding=spec)
    if num_parts == 1:
        return take(index)
    found = jax.lax.map(take, index.reshape(num_parts, -1).T)
    return jnp.moveaxis(found, 0, 1).reshape(index.size, *x.shape[1:])
