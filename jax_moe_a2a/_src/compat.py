"""Wrap private functions of JAX, and functions that differ between versions of JAX."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import jax
from jax import lax
from jax._src import config, core, dispatch, distributed
from jax._src.ad_checkpoint import name_p as name_p
from jax._src.core import jaxprs_in_params as jaxprs_in_params
from jax._src.interpreters.mlir import lower_per_platform
from jax._src.interpreters.partial_eval import DynamicJaxprTrace
from jax._src.lib.mlir import ir
from jax._src.mesh import get_concrete_mesh, thread_resources
from jax._src.source_info_util import Scope, current_name_stack
from jax.ad_checkpoint import checkpoint_name as checkpoint_name
from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad, mlir
from jax.interpreters import partial_eval as pe
from jax.interpreters.xla import apply_primitive as apply_primitive
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

T = TypeVar("T")
Aval: TypeAlias = core.ShapedArray
Context: TypeAlias = mlir.LoweringRuleContext
Value: TypeAlias = ir.Value  # an array in the IR of a program
Equation: TypeAlias = core.JaxprEqn
Primals: TypeAlias = Sequence[jax.Array]
Tangents: TypeAlias = Sequence[jax.Array | ad.Zero]  # or cotangents


def varying_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes over which the type of ``x`` varies; empty under check_vma=False."""
    return frozenset(jax.typeof(x).mat.varying)


def align_varying(args: Sequence[Any], axes: Iterable[str]) -> list[Any]:
    """Cast all arrays to vary over the same mesh axes: every axis over which one of the arrays
    varies, and the ``axes`` that are manual in the mesh in scope (axes of ``vmap`` are not)."""
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    wanted = frozenset(axis for axis in axes if axis in manual_axes)
    wanted = wanted.union(*(varying_axes(arg) for arg in args))

    def cast(arg: Any) -> Any:
        missing = tuple(sorted(wanted - varying_axes(arg)))
        return lax.pcast(arg, missing, to="varying") if missing else arg

    return [cast(arg) for arg in args]


def varying_unchecked() -> AbstractContextManager[None]:
    """Return a context in which no type varies over mesh axes, as under ``check_vma=False``."""
    return config._check_vma(False)


def lower_fun(ctx: Any, fn: Any, operands: Sequence[Value], params: dict[str, Any]) -> Any:
    """Emit the operations of ``fn(*operands)``. In ``fn``, types do not vary over mesh axes,
    because FFI calls do not handle varying types."""
    avals = [core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
    lower = mlir.lower_fun(fn, multiple_results=ctx.primitive.multiple_results)
    with varying_unchecked():
        return lower(ctx.replace(avals_in=avals), *operands, **params)


def result_aval(like: Any, shape: tuple[int, ...], dtype: DTypeLike, tail: tuple = ()) -> Any:
    """Return the abstract value of a result that varies over the mesh axes of ``like``. The
    result's last axes have the sharding ``tail``, and its other axes are not sharded."""
    spec = PartitionSpec(*(None,) * (len(shape) - len(tail)), *tail)
    sharding = like.sharding.update(spec=spec)
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def without_dead_code(program: Any) -> Any:
    """Return the jaxpr of a closed jaxpr, without equations whose results are not used."""
    return pe.dce_jaxpr(program.jaxpr, True)[0]


def traced_in(fn: Callable[..., Any], avals: Sequence[Any], axes: Any) -> Any:
    """Trace ``fn`` with mesh axes in scope. Return its jaxpr, where no type varies over them."""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    # Over Explicit axes of the mesh in scope, JAX could not infer shardings in ``fn``.
    no_mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with no_mesh, varying_unchecked(), core.extend_axis_env_nd(list(axes.items())):
        return without_dead_code(jax.make_jaxpr(fn)(*types))


# JAX adds these scopes around functions that it calls or computes again.
ADDED_SCOPES = ("checkpoint", "rematted_computation", "closed_call", "shard_map")


def scopes_of(ctx: Context) -> tuple[str, ...]:
    """Return the ``jax.named_scope`` names around a primitive that is being lowered, outermost
    first. Inside a loop or an inner ``jit``, only the names inside the loop or ``jit`` are known.
    Names that JAX adds are left out, so a call has the same names if a gradient repeats it."""
    names = (entry.name for entry in ctx.name_stack.stack if isinstance(entry, Scope))
    return tuple(name for name in names if name not in ADDED_SCOPES and not name.startswith("jit("))


def innermost_scope() -> str | None:
    """Return the innermost ``jax.named_scope`` around what is being traced, or None without one."""
    stack = current_name_stack().stack
    return stack[-1].name if stack and isinstance(stack[-1], Scope) else None


def mesh_in_context() -> Mesh | None:
    """Return the mesh of ``jax.set_mesh``, also inside ``jit``, or None if there is no such mesh.
    Also return None inside ``jax.shard_map`` over another mesh, because the program then runs on
    the devices of that mesh."""
    mesh, here = get_concrete_mesh(), jax.sharding.get_abstract_mesh()
    if not isinstance(mesh, Mesh) or mesh.empty or here.shape != mesh.shape:
        return None
    return mesh


def in_context_of_old() -> bool:
    """Return True inside ``with mesh:``, the context that ``jax.set_mesh`` replaced."""
    return not thread_resources.env.physical_mesh.empty


def mesh_of_program(ctx: Context) -> Mesh | None:
    """Return the mesh of the ``shard_map`` around a primitive that is being lowered. Return None
    without a ``shard_map``, or if the devices of its mesh are not known."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    return mesh if isinstance(mesh, Mesh) and not mesh.empty else None


def is_partitioned(ctx: Any) -> bool:
    """Return True if XLA, not ``shard_map``, divides the arrays of the lowered primitive."""
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return context.num_devices > 1
    return any(size > 1 for axis, size in mesh.shape.items() if axis not in context.manual_axes)


def lower_for_devices(primitive: Primitive) -> None:
    """Make JAX lower a program with this primitive once for each list of devices."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def register_lowering_per_call(
    primitive: Primitive, *, cuda: Callable[..., Any], others: Callable[..., Any]
) -> None:
    """Register a lowering for CUDA and one for other platforms. JAX does not reuse a lowering for
    another call with equal shapes, because lowerings depend on the named scopes around a call."""

    def rule(ctx: Context, *operands: Any, **params: object) -> Any:
        # JAX 0.10.2 to 0.12.0 fails to choose among platforms in uncached lowerings if
        # ``avals_out`` is a tuple and not a list.
        ctx = ctx.replace(avals_out=list(ctx.avals_out))
        return lower_per_platform(
            ctx, str(primitive), {"cuda": cuda}, others, frozenset(), *operands, **params
        )

    mlir.register_lowering(primitive, rule, cacheable=False)


def register_dce_rule(
    primitive: Primitive, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]
) -> None:
    """Register a primitive's rule for removal of unused code: ``rule(used_outputs, eqn) ->
    (used_inputs, new eqn)``. The rule runs only if at least one output is used."""

    def of_any(used_outputs: Sequence[bool], *args: Any) -> tuple[list[bool], Any]:
        eqn = args[-1]  # the last of two or three arguments, by JAX version
        return rule(used_outputs, eqn) if any(used_outputs) else ([False] * len(eqn.invars), None)

    pe.dce_rules[primitive] = of_any


# JAX may bind ``name_p`` to linear values, but does not define its transpose.
ad.primitive_transposes.setdefault(name_p, lambda ct, x, **_: [ct])


def never_save(primitive: Primitive) -> None:
    """Make every policy of ``jax.checkpoint`` compute a primitive again in the backward pass."""

    def rule(_: Any, unknown: Any, instantiated: Sequence[bool], eqn: Equation) -> tuple:
        pairs = zip(eqn.invars, instantiated, strict=True)
        needs = [x for x, inst in pairs if not inst and isinstance(x, core.Var)]
        is_unknown, every = any(unknown), [True] * len(eqn.outvars)
        return None if is_unknown else eqn, eqn, [is_unknown for _ in every], every, needs

    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


def traced_function() -> object | None:
    """Return an object that identifies the innermost function that JAX traces now, for example
    under ``jit``, ``scan`` or ``checkpoint``. Return None if operations run eagerly."""
    trace: Any = core.trace_ctx.trace
    while not isinstance(trace, DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
        if trace is None:
            return None
    return trace


def process_id() -> int:
    """Return the index of this process. This also works if JAX finds no devices."""
    return distributed.global_state.process_id or 0


def coordination_set(key: str, value: str) -> None:
    """Publish a value to all processes of ``jax.distributed``. It replaces an earlier value."""
    _coordination().key_value_set(key, value, allow_overwrite=True)


def coordination_get(key: str, timeout: float) -> str | None:
    """Wait for the value of ``key`` and return it, or None after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            # Wait at most one second at a time, so that Python can handle signals such as Ctrl-C.
            wait_ms = max(1, int(min(left, 1.0) * 1000))
            return _coordination().blocking_key_value_get(key, wait_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if left <= 1.0:
                return None


def coordination_barrier(name: str, timeout: float) -> str:
    """Wait for all processes, up to ``timeout`` seconds. Return why this failed, or ''."""
    try:
        _coordination().wait_at_barrier(name, max(1, int(timeout * 1000)))
    except jax.errors.JaxRuntimeError as error:
        return " ".join(str(error).partition("RPC:")[0].split())
    return ""


def per_job(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that returns the result of ``make()``, but calls ``make`` only once in a
    job. A job ends with ``jax.distributed.shutdown``. The function's attribute ``forget`` drops the
    stored result."""
    kept: list[tuple[Any, T]] = []
    lock = threading.Lock()

    def of_this_job() -> T:
        client = distributed.global_state.client
        with lock:
            if not kept or kept[0][0] is not client:
                kept[:] = [(client, make())]
            return kept[0][1]

    of_this_job.forget = kept.clear  # type: ignore[attr-defined]
    return of_this_job


def _coordination() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "jax_moe_a2a: the mesh has GPUs of several processes, but "
            "jax.distributed.initialize() was not called. Call it before any other use of JAX"
        )
    return client
