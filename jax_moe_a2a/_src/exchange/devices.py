"""Mark programs that decide the devices of a group."""

from __future__ import annotations

import jax

from .. import compat
from ..ad import register_constant
from ..group.group import Group

# The identity on the ids of a group whose devices the program decides. JAX reuses a lowered program
# for other devices, but lowers a program with this primitive again for each device assignment. The
# other primitives cannot have this property, because it requires devices, and an export may have
# none.
on_own_devices_p = compat.Primitive("on_own_devices")


def for_own_devices(ids: jax.Array, group: Group) -> jax.Array:
    """Mark the program if the group has no devices and uses the devices of ``jax.set_mesh``."""
    takes_devices = group.placed_on(compat.mesh_in_context()) is not group
    return on_own_devices_p.bind(ids) if takes_devices else ids


register_constant(on_own_devices_p)
compat.lower_for_devices(on_own_devices_p)
