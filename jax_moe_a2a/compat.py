"""Everything that touches private JAX or differs between the supported versions of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name as checkpoint_name
from jax.extend.core import Primitive as Primitive
from jax.interpreters import partial_eval as pe
from jax.interpreters.xla import apply_primitive as apply_primitive
from jax.sharding import PartitionSpec


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which the type of ``x`` says that it varies (empty under check_vma=False)."""
    return frozenset(jax.typeof(x).mat.varying)


def align_varying(args: Sequence[Any], axes: Iterable[str]) -> list[Any]:
    """Casts every array to vary over the same mesh axes: those of any array, and ``axes``.

    Axes that are not manual in the mesh in scope (an axis of ``vmap``) are left out. Under
    check_vma=False ``lax.pcast`` changes nothing.
    """
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    wanted = frozenset(axis for axis in axes if axis in manual_axes)
    wanted = wanted.union(*(varying_axes(arg) for arg in args))

    def cast(arg: Any) -> Any:
        missing = tuple(sorted(wanted - varying_axes(arg)))
        return lax.pcast(arg, missing, to="varying") if missing else arg

    return [cast(arg) for arg in args]


def result_aval(like: Any, shape: tuple[int, ...], dtype: Any, tail: tuple = ()) -> Any:
    """The abstract value of a result: varies as ``like``; of its axes only the last are sharded."""
    spec = PartitionSpec(*(None,) * (len(shape) - len(tail)), *tail)
    sharding = like.sharding.update(spec=spec)
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def register_dce_rule(
    primitive: Primitive, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]
) -> None:
    """Registers ``rule(used_outputs, eqn) -> (used_inputs, new eqn or None)``."""

    def with_any_signature(used_outputs: Sequence[bool], *args: Any) -> tuple[list[bool], Any]:
        return rule(used_outputs, args[-1])  # newer versions pass the live inputs in between

    pe.dce_rules[primitive] = with_any_signature
