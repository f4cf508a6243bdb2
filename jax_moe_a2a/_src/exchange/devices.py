"""Mark programs that decide the devices of a group."""

from __future__ import annotations

from functools import partial

import jax
from jax.interpreters import ad, batching, mlir

from .. import compat
from ..group.group import Group
from .rules import zero_tangent

# The identity on the ids of a group whose devices the program decides. JAX reuses a lowered program
# for other devices, but lowers a program with this primitive again for each device assignment. The
# other primitives cannot have this property, because it requires devices, and an export may have
# none.
on_own_devices_p = compat.Primitive("on_own_devices")


def for_own_devices(ids: jax.Array, group: Group) -> jax.Array:
    """Mark the program if the group has no devices and uses the devices of ``jax.set_mesh``."""
    takes_devices = group.placed_on(compat.mesh_in_context()) is not group
    return on_own_devices_p.bind(ids) if takes_devices else ids


on_own_devices_p.def_impl(partial(compat.apply_primitive, on_own_devices_p))
on_own_devices_p.def_abstract_eval(lambda ids: ids)
mlir.register_lowering(on_own_devices_p, lambda ctx, ids: [ids])
ad.primitive_jvps[on_own_devices_p] = lambda primals, _: (
    on_own_devices_p.bind(*primals),
    zero_tangent(primals[0]),
)
batching.primitive_batchers[on_own_devices_p] = lambda args, dims: (
    on_own_devices_p.bind(*args),
    dims[0],
)
compat.lower_for_devices(on_own_devices_p)
