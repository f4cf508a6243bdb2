"""Make a group when only the name of its mesh axis is known, or check a given group."""

from __future__ import annotations

from jax import lax

import jax_moe_a2a as ma


def group_over(axis_name: str, group: ma.Group | None = None) -> ma.Group:
    """Return ``group``, or for None the group of a mesh axis in scope, whose devices the program
    decides.

    Raises:
      ValueError: if the axis is not in scope, or is not the axis of ``group``.
    """
    if group is not None:
        if group.axis_name != axis_name:
            raise ValueError(
                f"group must be a group over the axis {axis_name!r}, over which the experts are "
                f"sharded; got {group}. Pass the name of the group's axis as well"
            )
        return group
    try:
        size = lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis {axis_name!r} must be in scope; got an axis that is not. Call this inside "
            "jax.shard_map over a mesh with this axis, of size 1 without expert parallelism"
        ) from None
    return ma.Group(axis_name=axis_name, size=size)
