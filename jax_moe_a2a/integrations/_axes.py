"""Make a group when only the name of its mesh axis is known."""

from __future__ import annotations

from jax import lax

import jax_moe_a2a as ma


def group_over(axis_name: str) -> ma.Group:
    """Return the group of a mesh axis in scope. The program decides its devices.

    Raises:
      ValueError: if the axis is not in scope.
    """
    try:
        size = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis {axis_name!r} must be in scope; got an axis that is not. Call this inside "
            "jax.shard_map over a mesh with this axis, of size 1 without expert parallelism"
        ) from None
    return ma.Group(axis_name=axis_name, size=size)
