"""Wrap everything that uses private JAX, or that differs between supported versions of JAX."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
from jax import lax
from jax._src import config, core, dispatch, distributed
from jax._src.ad_checkpoint import name_p as name_p
from jax._src.interpreters.mlir import lower_per_platform
from jax._src.interpreters.partial_eval import DynamicJaxprTrace, RecomputeType
from jax._src.mesh import get_concrete_mesh
from jax._src.source_info_util import Scope
from jax.ad_checkpoint import checkpoint_name as checkpoint_name
from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad, mlir
from jax.interpreters import partial_eval as pe
from jax.interpreters.xla import apply_primitive as apply_primitive
from jax.sharding import Mesh, PartitionSpec

T = TypeVar("T")


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes over which the type of ``x`` says that it varies (empty under
    check_vma=False)."""
    return frozenset(jax.typeof(x).mat.varying)


def align_varying(args: Sequence[Any], axes: Iterable[str]) -> list[Any]:
    """Cast every array to vary over the same mesh axes: those of any array, and ``axes``.

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


def varying_unchecked() -> AbstractContextManager[None]:
    """Return a context as in ``jax.shard_map(check_vma=False)``: operations traced in it do not say
    over which mesh axes they vary."""
    return config._check_vma(False)


def result_aval(like: Any, shape: tuple[int, ...], dtype: Any, tail: tuple = ()) -> Any:
    """Return the abstract value of a result. It varies like ``like``; only its last axes, ``tail``,
    are sharded."""
    spec = PartitionSpec(*(None,) * (len(shape) - len(tail)), *tail)
    sharding = like.sharding.update(spec=spec)
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


# Names that JAX puts around what it computes again or calls.
ADDED_SCOPES = ("checkpoint", "rematted_computation", "closed_call", "shard_map")


def scopes_of(ctx: Any) -> tuple[str, ...]:
    """Return the names around a primitive that is being lowered, outermost first: those of
    ``jax.named_scope``, which frameworks assign to modules.

    Without what JAX adds (transforms, ``jit``, ``checkpoint``), so that a call and its repetition
    in a derivative have the same names. What stands in a loop or an inner ``jit`` has the names
    within it only.
    """
    names = (entry.name for entry in ctx.name_stack.stack if isinstance(entry, Scope))
    return tuple(name for name in names if name not in ADDED_SCOPES and not name.startswith("jit("))


def mesh_in_context() -> Mesh | None:
    """Return the mesh that ``jax.set_mesh`` has set, also inside ``jit``; None if there is none."""
    mesh = get_concrete_mesh()
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None


def mesh_of_program(ctx: Any) -> Mesh | None:
    """Return the mesh of the ``shard_map`` around a primitive that is being lowered; None if there
    is none, or its devices are not known."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None


def lower_for_devices(primitive: Primitive) -> None:
    """Make JAX lower programs with a primitive again for each assignment of devices, because its
    lowering depends on them."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def register_lowering_per_call(
    primitive: Primitive, *, cuda: Callable[..., Any], others: Callable[..., Any]
) -> None:
    """Register a lowering for CUDA and one for other platforms, which know where a call stands.

    JAX keeps the lowering of a primitive for calls with equal shapes. These are not kept.
    """

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        # JAX 0.10.2 to 0.12.0 cannot choose among platforms by itself for a lowering that is not
        # kept: it adds the results' types to a list, and they are a tuple.
        ctx = ctx.replace(avals_out=list(ctx.avals_out))
        return lower_per_platform(
            ctx, str(primitive), {"cuda": cuda}, others, frozenset(), *operands, **params
        )

    mlir.register_lowering(primitive, rule, cacheable=False)


def register_dce_rule(
    primitive: Primitive, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]
) -> None:
    """Register ``rule(used_outputs, eqn) -> (used_inputs, new eqn or None)``."""

    def with_any_signature(used_outputs: Sequence[bool], *args: Any) -> tuple[list[bool], Any]:
        return rule(used_outputs, args[-1])  # newer versions pass the live inputs in between

    pe.dce_rules[primitive] = with_any_signature


def register_partial_eval_rule(
    primitive: Primitive, choose: Callable[[Sequence[bool]], Callable[..., list[Any]] | None]
) -> None:
    """Bind other primitives in place of one of which some operands are known.

    ``choose(known)`` returns the function that binds them, called with the operands and parameters,
    so that results of only known operands are known too; or None for the primitive itself.
    """

    def rule(trace: Any, *tracers: Any, **params: Any) -> Any:
        apart = choose([tracer.is_known() for tracer in tracers])
        if apart is None:
            return trace.default_process_primitive(primitive, tracers, params)
        with core.set_current_trace(trace):
            return apart(*tracers, **params)

    pe.custom_partial_eval_rules[primitive] = rule


def register_remat_rule(primitive: Primitive, rule: Callable[..., tuple]) -> None:
    """Register ``rule(saves, unknown, instantiated, eqn)`` for ``jax.checkpoint``.
    ``saves(primitive, *avals, **params)`` returns whether the policy saves the results of a
    primitive.

    The rule returns the equation of the forward pass, the equation of the backward pass, which
    outputs are unknown, which outputs the backward pass computes, and which variables the backward
    pass needs from the forward pass.
    """

    def with_policy(policy: Callable[..., Any], *args: Any) -> tuple:
        def saves(primitive: Primitive, *avals: Any, **params: Any) -> bool:
            verdict = policy(primitive, *avals, **params)
            return verdict if isinstance(verdict, bool) else not isinstance(verdict, RecomputeType)

        return rule(saves, *args)

    pe.partial_eval_jaxpr_custom_rules[primitive] = with_policy


# JAX names linear values, too, but cannot transpose the name.
ad.primitive_transposes.setdefault(name_p, lambda ct, x, **_: [ct])


def never_saved(
    saves: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple:
    """Apply the remat rule of a primitive whose results no policy saves (for
    ``register_remat_rule``)."""
    del saves
    needs = [
        x
        for x, inst in zip(eqn.invars, instantiated, strict=True)
        if not inst and isinstance(x, core.Var)
    ]
    is_unknown, every = any(unknown), [True] * len(eqn.outvars)
    return None if is_unknown else eqn, eqn, [is_unknown for _ in every], every, needs


def traced_function() -> object | None:
    """Return the function that JAX traces now, as an object to compare by identity.

    It is the innermost function under ``jit``, ``scan``, ``cond``, ``checkpoint`` and so on; its
    derivatives and batches are the same function. None if operations run eagerly.
    """
    trace: Any = core.trace_ctx.trace
    while not isinstance(trace, DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
        if trace is None:
            return None
    return trace


def with_variables(eqn: Any) -> Any:
    """Return the equation with a variable for each of its results, unused results included."""
    outvars = [core.Var(v.aval) if isinstance(v, core.DropVar) else v for v in eqn.outvars]
    return eqn.replace(outvars=outvars)


def process_id() -> int:
    """Return the number of this process, even if JAX finds no devices; 0 without
    ``jax.distributed``."""
    return distributed.global_state.process_id or 0


def coordination_set(key: str, value: str) -> None:
    """Publish a value to all processes of ``jax.distributed``, in place of an earlier value."""
    _coordination().key_value_set(key, value, allow_overwrite=True)


def coordination_get(key: str, timeout: float) -> str | None:
    """Return what a process has told; wait for it. None: no process has, in ``timeout`` seconds.

    It waits a second at a time, so that Python handles signals such as Ctrl-C in between.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            wait_ms = max(1, int(min(left, 1.0) * 1000))
            return _coordination().blocking_key_value_get(key, wait_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if left <= 1.0:
                return None


def coordination_barrier(name: str, timeout: float) -> str:
    """Wait for all processes. Return '' when all have come, otherwise the reason why the wait
    failed within ``timeout`` seconds."""
    try:
        _coordination().wait_at_barrier(name, max(1, int(timeout * 1000)))
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def coordination_list(folder: str) -> dict[str, str]:
    """Return the values published below ``folder`` by the rest of their keys. Never blocks."""
    entries = _coordination().key_value_dir_get(f"{folder}/")
    return {key.removeprefix(f"{folder}/"): value for key, value in entries}


def coordination_delete(key: str) -> None:
    """Delete a published value, if it exists."""
    _coordination().key_value_delete(key)


def per_job(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls ``make`` once and keeps the result, until
    ``jax.distributed.shutdown()`` and ``initialize()`` begin another job.

    Its attribute ``forget`` drops the result at once.
    """
    kept: list[tuple[Any, T]] = []

    def of_this_job() -> T:
        client = distributed.global_state.client
        if not kept or kept[0][0] is not client:
            kept[:] = [(client, make())]
        return kept[0][1]

    of_this_job.forget = kept.clear  # type: ignore[attr-defined]
    return of_this_job


def _coordination() -> Any:
    """Return the client of the coordination service."""
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "jax_moe_a2a: the mesh has GPUs of several processes, but "
            "jax.distributed.initialize() was not called. Call it before anything else of JAX"
        )
    return client
