"""Decide where a call runs, and lower it to the portable path if the kernels do not apply.

A device finds its rank from the mesh axes of the program, and the ``route`` kernel checks this rank
against the rank of the workspace. If ranks share a GPU, one call runs all of them, and its arrays
have a leading axis of ranks. The lowering rules see the arrays of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jax.sharding import Mesh

from ... import compat, paths
from ...group import extension, native
from ...group.group import Group
from ...paths import Choice


class Refused(Exception):
    """The reason why the kernels do not support a call."""


class CallPlacement(NamedTuple):
    """The group and topology on which the kernels run a call."""

    group: Group
    """The group, with the devices of the program if each rank has its own device."""
    topology: native.Topology
    lead: int
    """1 if the ranks share a GPU, and the arrays have a leading axis of ranks; otherwise 0."""

    def of_rank(self, aval: Any) -> jax.ShapeDtypeStruct:
        """Return the abstract value of an array of one rank."""
        return jax.ShapeDtypeStruct(aval.shape[self.lead :], aval.dtype)


def _placement_of(ctx: Any, params: dict[str, Any]) -> CallPlacement | str:
    """Return where the kernels run a call, or why it takes the portable path.

    Raises:
      ValueError: if the group requires the kernels, and the devices of the program are not known.
    """
    group: Group = params["group"].placed_by(compat.mesh_of_program(ctx))
    if any(0 in aval.shape for aval in (*ctx.avals_in, *ctx.avals_out)):
        return "the call has an array without elements"
    has_devices = isinstance(group.mesh, Mesh)
    if params["emulated"] or (group.size == 1 and not has_devices):
        if group.implementation != "cuda":
            return "ranks on one device run the kernels only with implementation='cuda'"
        if has_devices:
            raise ValueError(
                "implementation='cuda' needs a group without a mesh inside jax.vmap over its axis; "
                f"got {group} with a mesh: use Group(axis_name={group.axis_name!r}, "
                f"size={group.size}, implementation='cuda')"
            )
        topology = native.on_one_gpu(None, group.size)
        return CallPlacement(group, topology, lead=int(params["emulated"]))
    if has_devices or paths.named_gpu():
        if group.path != "cuda":
            return group._why_portable
        topology = group.topology if has_devices else native.Topology((), group.size)
        return CallPlacement(group, topology, lead=0)
    if group.implementation == "cuda":
        raise ValueError(
            "implementation='cuda' needs a program whose devices are known when it is lowered; got "
            f"{group} in jax.shard_map over an abstract mesh: call jax.set_mesh(mesh) first, or "
            "pass the mesh to shard_map or to the group"
        )
    return "the devices of the program are not known when it is lowered"


def register(
    primitive: Any,
    reference: Callable[..., Any],
    kernels: Callable[..., Any],
    unfused: Callable[..., Callable[..., Any] | None] = lambda **_: None,
) -> None:
    """Register how a primitive runs: outside ``jit``, on GPUs, and on other platforms.

    Args:
      reference: computes the results with jnp and lax from the operands and parameters.
      kernels: chooses custom calls. ``kernels(ctx, call_placement, *operands, **params)`` returns a
        function that emits them and returns the results. It raises ``Refused`` if the kernels do
        not support the call. It reads the types of ``ctx`` only.
      unfused: ``unfused(**params)`` returns what replaces ``reference`` on GPUs, or None. The
        replacement binds other exchanges, which may run the kernels.
    """

    def of_only_rank(*operands: Any, **params: Any) -> list[Any]:
        ranks = [jnp.squeeze(x, 0) for x in operands]
        results = primitive.bind(*ranks, **dict(params, emulated=False))
        return [jnp.expand_dims(x, 0) for x in results]

    def choose(ctx: Any, *operands: Any, **params: Any) -> Choice:
        if not native.has_kernels() and params["group"].implementation is None:
            extension.warn_of_missing_kernels()

        def traced(path: str, why: str, fn: Any, is_within: bool = True) -> Choice:
            lower = partial(mlir.lower_fun(fn, multiple_results=True), ctx, *operands, **params)
            return Choice(path, why, lower, partial(fn, **params) if is_within else None)

        found, composition, what = _placement_of(ctx, params), unfused(**params), "portable path"
        if isinstance(found, CallPlacement):
            if found.lead and found.group.size == 1:
                # A handler expects an axis of ranks only if several ranks share a launch.
                return traced("", "", of_only_rank)
            try:
                return Choice(paths.KERNEL, "", kernels(ctx, found, *operands, **params))
            except Refused as refused:
                why = str(refused)
            if composition is None:
                check_may_refuse(found.group, primitive, why)
            else:
                what = "not fused"
        else:
            why = found
        if composition is None:
            return traced(what, why, reference, is_within=False)
        return traced(what, why, composition)

    lower_reference = mlir.lower_fun(reference, multiple_results=True)

    def on_others(ctx: Any, *operands: Any, **params: Any) -> Any:
        check_platforms(params["group"], ctx.module_context.platforms)
        paths.logger.info("%s: portable path, because %s", primitive, paths.NOT_FOR_GPUS)
        return lower_reference(ctx, *operands, **params)

    primitive.multiple_results = True
    primitive.def_impl(partial(compat.apply_primitive, primitive))
    compat.register_lowering_per_call(
        primitive, cuda=paths.lowering(primitive, choose), others=on_others
    )


def check_platforms(group: Group, platforms: Sequence[str]) -> None:
    """Check that a call may be lowered for platforms other than CUDA.

    Raises:
      ValueError: if the group requires the kernels.
    """
    if group.implementation == "cuda":
        raise ValueError(
            "implementation='cuda' needs a program for NVIDIA GPUs; got one that is lowered "
            f"for {', '.join(platforms)}: use implementation=None there"
        )


def check_may_refuse(group: Group, primitive: Any, why: str) -> None:
    """Check that a call may take the portable path.

    Raises:
      ValueError: if the group requires the kernels.
    """
    if group.implementation == "cuda":
        raise ValueError(
            f"implementation must be None or 'portable' for a {primitive} that the kernels do not "
            f"support ({why}); got implementation='cuda'"
        )


barrier = mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays), multiple_results=True)
"""Lowers the identity. No result is available before all operands have been computed."""
