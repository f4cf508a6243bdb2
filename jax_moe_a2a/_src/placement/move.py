"""Move the weights of experts to the slots of a placement, and back."""

from __future__ import annotations

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
    """Move the weights of experts to other slots, bit for bit.

    With only ``target``, weights in the order of experts move into slots. With only ``source``,
    they move back. With both, they move from one placement to another. Also move all other arrays
    that have an axis of experts, such as the moments of an optimizer.

    JAX arrays keep their sharding over mesh axes, so the number of shards of the first axis must
    divide the number of slots. The call moves experts in steps: in each step, each device receives
    the experts for one slot of every shard. Inside ``jax.jit``, over Auto axes, the compiler
    chooses the sharding of the result. NumPy arrays stay NumPy arrays.

    Args:
      w: array [N, ...], or a pytree of arrays with this first axis, such as ``Experts``. N is the
        number of slots of ``source``, or E without ``source``.
      source: the ``Placement`` of ``w``, or None if ``w`` is in the order of experts. If an expert
        has several slots, the call reads the first one.
      target: the ``Placement`` of the result, or None for the order of experts. Its number of ranks
        may differ from ``source``. Both placements have no leading axes, and need not have the home
        form.

    Returns:
      A pytree like ``w`` of arrays [N', ...]. N' is the number of slots of ``target``, or E without
      ``target``. Empty slots get zeros.

    Raises:
      TypeError: if a placement has the wrong type or leading axes.
      ValueError: if both placements are None, if their numbers of experts differ, or if the first
          axis of an array does not fit.

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
    num_experts = None
    for placement in (source, target):
        if placement is not None:
            num_ranks = getattr(placement, "num_ranks", 0)
            num_experts = check_placement(placement, num_ranks, num_experts=num_experts).num_experts
    if num_experts is None:
        raise ValueError("source or target must be a Placement; got None for both. Pass one")
    size = num_experts if source is None else source.num_slots
    for x in map(as_array, jax.tree.leaves(w)):
        if x.ndim < 1 or x.shape[0] != size:
            of = "experts" if source is None else "slots of source"
            raise ValueError(
                f"w must hold arrays [{size}, ...], one for each of the {of}; got {short(x)}"
            )
    index = np.arange(size, dtype=np.int32) if source is None else source.expert_slots[:, 0]
    if target is not None:
        xp = jnp if isinstance(target.slot_experts, jax.Array) else np
        # The expert -1 of an empty slot selects the appended index ``size``, which means zeros.
        index = xp.append(index, np.int32(size))[target.slot_experts]
    return jax.tree.map(lambda x: _moved(as_array(x), index), w)


def _moved(x: Any, index: Any) -> Any:
    """Return ``x[index]``, with zeros where the index is ``len(x)``."""
    is_traced = isinstance(x, jax.core.Tracer) or isinstance(index, jax.core.Tracer)
    if not is_traced and not isinstance(x, jax.Array):
        found = x[np.minimum(index, len(x) - 1)]
        found[np.asarray(index) == len(x)] = 0
        return found
    x = jnp.asarray(x)
    sharding = jax.typeof(x).sharding if is_traced else x.sharding
    num_parts = len(x) // sharding.shard_shape(x.shape)[0]
    take = _take if is_traced else jax.jit(_take, static_argnums=2, out_shardings=sharding)
    return take(x, index, num_parts)


@scopes.placement
def _take(x: jax.Array, index: jax.Array, num_parts: int) -> jax.Array:
    """Gather one index of each shard in a step, because each device receives all data of a step."""
    sharding = jax.typeof(x).sharding
    spec = sharding if any(axis is not None for axis in sharding.spec) else None
    take = lambda index: x.at[index].get(mode="fill", fill_value=0, out_sharding=spec)
    if num_parts == 1:
        return take(index)
    found = jax.lax.map(take, jnp.asarray(index).reshape(num_parts, -1).T)
    return jnp.moveaxis(found, 0, 1).reshape(index.size, *x.shape[1:])
