"""Lower primitives to custom calls of the CUDA kernels, or to the portable path.

If ranks share a GPU, one call runs all ranks, and its arrays have a leading axis of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import mlir
from jax.sharding import Mesh

from .. import compat, paths, scopes
from ..group import extension, native
from ..group.group import Group
from ..paths import Choice
from .record import Record, split_routing

DEFAULT_CUDA_GRAPHS = True  # measured (docs/history/speed.md)
ALL_SMS = 2**31 - 1  # the handler limits the SMs of a call to the SMs of the GPU
# The arrays of a routing that the kernels read, in the order of the handlers' operands.
READ_BY_KERNELS = ("token_slot", "slot_token", "choice_rank", "slot_rows", "row_slot")


class Refused(Exception):
    """Raised if the kernels do not support a call. The text says why."""


class CallPlacement(NamedTuple):
    """The devices on which the kernels run a call, and the layout of its arrays."""

    group: Group
    """The group. If each rank has a separate device, the group has the devices of the program."""
    topology: native.Topology
    lead: int
    """1 if arrays have a leading axis of ranks, because the ranks share a GPU; otherwise 0."""

    def of_rank(self, aval: Any) -> jax.ShapeDtypeStruct:
        """Return the abstract value of an array of one rank."""
        return jax.ShapeDtypeStruct(aval.shape[self.lead :], aval.dtype)


def _placement_of(ctx: compat.Context, params: dict[str, Any]) -> CallPlacement | str:
    """Return where the kernels run a call, or the reason for the portable path."""
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
        topology = native.Topology((), group.size)
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
    primitive: compat.Primitive,
    reference: Callable[..., Any],
    kernels: Callable[..., Any],
    unfused: Callable[..., Callable[..., Any] | None] = lambda **_: None,
) -> None:
    """Register how a primitive runs eagerly, and how it is lowered for GPUs and other platforms.

    Args:
      reference: computes the results from the operands and parameters.
      kernels: ``kernels(ctx, call_placement, *operands, **params)`` raises ``Refused``, or returns
        a function that emits custom calls and returns their results. ``kernels`` itself emits
        nothing, and reads only abstract values of ``ctx``.
      unfused: ``unfused(**params)`` returns a function that replaces ``reference`` on GPUs, or
        None. The replacement binds other exchanges, which may run the kernels.
    """

    def of_only_rank(*operands: jax.Array, **params: object) -> list[Any]:
        ranks = [jnp.squeeze(x, 0) for x in operands]
        results = primitive.bind(*ranks, **dict(params, emulated=False))
        return [jnp.expand_dims(x, 0) for x in results]

    def choose(ctx: compat.Context, *operands: compat.Value, **params: Any) -> Choice:
        if not native.has_kernels() and params["group"].implementation is None:
            extension.warn_of_missing_kernels()

        def traced(path: str, why: str, fn: Any, within: Any) -> Choice:
            lower = partial(mlir.lower_fun(fn, multiple_results=True), ctx, *operands, **params)
            return Choice(path, why, lower, within and partial(within, **params))

        found, composition, what = _placement_of(ctx, params), unfused(**params), "portable path"
        if isinstance(found, CallPlacement):
            if found.lead and found.group.size == 1:
                # Handlers expect an axis of ranks only if a launch has several ranks.
                return traced("", "", of_only_rank, of_only_rank)
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
        return traced(what, why, composition or reference, composition)

    lower_reference = mlir.lower_fun(reference, multiple_results=True)

    def on_others(ctx: compat.Context, *operands: compat.Value, **params: Any) -> Any:
        check_platforms(params["group"], ctx.module_context.platforms)
        paths.logger.info("%s: portable path, because %s", primitive, paths.NOT_FOR_GPUS)
        return lower_reference(ctx, *operands, **params)

    primitive.multiple_results = True
    primitive.def_impl(partial(compat.apply_primitive, primitive))
    compat.register_lowering_per_call(
        primitive, cuda=paths.lowering(primitive, choose), others=on_others
    )


def check_platforms(group: Group, platforms: Sequence[str]) -> None:
    if group.implementation == "cuda":
        raise ValueError(
            "implementation='cuda' needs a program for NVIDIA GPUs; got one that is lowered "
            f"for {', '.join(platforms)}: use implementation=None there"
        )


def check_may_refuse(group: Group, primitive: compat.Primitive, why: str) -> None:
    if group.implementation == "cuda":
        raise ValueError(
            f"implementation must be None or 'portable' for a {primitive} that the kernels do not "
            f"support ({why}); got implementation='cuda'"
        )


barrier = mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays), multiple_results=True)
"""Lowers a function that returns its operands. Each result depends on all operands."""


def default_num_sms(num_tokens: int, half_bytes: int) -> int:
    """Return the default number of SMs of a call. ``half_bytes`` is the size of a ring half: the
    bytes of one rank's tokens times the number of ranks."""
    tuning = native.tuning
    is_few = num_tokens <= tuning("FEW_TOKENS") or half_bytes <= tuning("FEW_BYTES")
    return tuning("FEW_NUM_SMS" if is_few else "DEFAULT_NUM_SMS")


def num_sms_of(group: Group, operation: str, num_tokens: int, half_bytes: int) -> int:
    """Return the number of SMs of a route, or of an exchange that is not split."""
    is_alone = group.size == 1  # one rank gets all SMs: only its memory limits it
    default = ALL_SMS if is_alone else default_num_sms(num_tokens, half_bytes)
    return group.sms_of(operation) or default


def half_bytes_of(
    target: str,
    attributes: dict[str, Any],
    call_placement: CallPlacement,
    avals_in: Sequence[compat.Aval],
    avals_out: Sequence[compat.Aval],
) -> int:
    """Return the size in bytes of the ring half that a call needs, or raise ``Refused``."""
    operands, results = (map(call_placement.of_rank, avals) for avals in (avals_in, avals_out))
    why, half_bytes = native.why_not(
        target, attributes, operands, results, call_placement.topology, bool(call_placement.lead)
    )
    if why:
        raise Refused(why)
    return half_bytes


def custom_call(
    ctx: compat.Context,
    target: str,
    operands: Sequence[compat.Value],
    call_placement: CallPlacement,
    attributes: dict[str, Any],
    *,
    num_sms: int,
    half_bytes: int,
    is_split: bool = False,
    aliases: dict[int, int] | None = None,
) -> list[Any]:
    """Emit the custom call ``target``. Add the attributes that all handlers read."""
    native.register_targets()
    group, topology = call_placement.group, call_placement.topology
    where = f"devices {topology.devices}" if topology.devices else "one GPU"
    paths.logger.info("%s: CUDA kernels for %d ranks on %s", target, topology.num_ranks, where)
    kind = native.SPLIT if is_split else native.WHOLE
    if is_split:  # XLA must not merge the call, remove it, or capture it in a graph
        rule = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)
    else:
        graphs = DEFAULT_CUDA_GRAPHS if group.cuda_graphs is None else group.cuda_graphs
        rule = jax.ffi.ffi_lowering(target + "_in_graph" if graphs else target)
    results = rule(
        ctx,
        *operands,
        devices=np.array(topology.devices, np.int64),
        num_ranks=np.int64(topology.num_ranks),
        workspace_kind=np.int64(kind),
        num_sms=np.int64(num_sms),
        timeout_ns=np.int64(group.timeout * 1e9),
        first_timeout_ns=np.int64(group.patience * 1e9),
        raise_failures=group.on_failure == "raise",
        half_bytes=np.int64(half_bytes),
        scopes=_hash("/".join(scopes.of_user(ctx))),
        **{name: native.attribute(value) for name, value in attributes.items()},
    )
    # If a loop stores a result in a larger array, and the program also uses the result elsewhere,
    # XLA's dynamic_slice_fusion copies the call, and the exchange runs twice. A barrier prevents
    # the copy. Each result has a separate barrier, because XLA removes unused results from a shared
    # barrier. Two equal calls could then have different barriers, and XLA would not merge them.
    alone = [ctx.replace(avals_in=[aval], avals_out=[aval]) for aval in ctx.avals_out]
    return [out for args in zip(alone, results, strict=True) for out in barrier(*args)]


def _hash(text: str) -> np.int64:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return np.int64(int.from_bytes(digest, "big", signed=True))


class KernelCall(NamedTuple):
    """One custom call of an exchange."""

    target: str
    arrays: Sequence[int]
    """Indices of the payload operands that the call reads."""
    results: Sequence[int]
    """Indices of the results that the call computes."""
    attributes: dict[str, Any]
    num_sms: int | None = None
    """The number of SMs of the call, or None for the default number."""


def _inputs(operands: Sequence[Any]) -> list[Any]:
    """Return the payload and the routing arrays that the kernels read, or their types."""
    payload, routing = split_routing(operands)
    return [*payload, *(getattr(routing, name) for name in READ_BY_KERNELS)]


def _of_call(call: KernelCall, inputs: Sequence[Any]) -> list[Any]:
    return [*(inputs[i] for i in call.arrays), *inputs[-len(READ_BY_KERNELS) :]]


def lower_by_kernels(
    exchange: Record,
    phase: str,
    ctx: compat.Context,
    call_placement: CallPlacement,
    *operands: compat.Value,
    **params: Any,
) -> Callable[[], list[Any]]:
    """Return a function that emits the custom calls of an exchange and returns their results.

    ``phase`` is "start", "done", or "" for an exchange that is not split. The calls of a done have
    the operands of the start, so that XLA keeps these arrays in place until the done. A done also
    has one operand for each result: an array in flight, whose memory the result overwrites.
    """
    sources, is_outward = exchange.layouts(**params).sources, exchange.is_outward
    num_results = len(sources)

    def divide(arrays: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        """Return the exchange's operands, and for a done the arrays that become results."""
        if phase != "done":
            return _inputs(arrays), []
        moved, routing = split_routing(arrays)
        at_tokens, at_rows = moved[:num_results], moved[num_results:]
        if is_outward:
            return _inputs([*at_tokens, *routing]), at_rows
        return _inputs([*at_rows, *routing]), at_tokens

    avals, in_flight_avals = divide(ctx.avals_in)
    avals_out = ctx.avals_out
    if phase == "start":  # The arrays at the tokens come before the arrays at the rows.
        avals_out = avals_out[num_results:] if is_outward else avals_out[:num_results]
    payload = [call_placement.of_rank(aval) for aval in avals[: -len(READ_BY_KERNELS)]]
    calls = []
    for call in exchange.kernel_calls(call_placement, payload, params):
        types = _of_call(call, avals), [avals_out[i] for i in call.results]
        half_bytes = half_bytes_of(call.target, call.attributes, call_placement, *types)
        calls.append((call, *types, half_bytes))
    group, operation = call_placement.group, "dispatch" if is_outward else "combine"
    choice_rank = avals[READ_BY_KERNELS.index("choice_rank") - len(READ_BY_KERNELS)]
    num_slots = choice_rank.shape[call_placement.lead]

    def emit() -> list[Any]:
        inputs, in_flight = divide(operands)
        if phase:
            held = _held(ctx, [*inputs, *in_flight], [*avals, *in_flight_avals])
            inputs, in_flight = held[: len(inputs)], held[len(inputs) :]
        results: list[Any] = [None] * len(avals_out)
        for call, call_avals_in, call_avals_out, half_bytes in calls:
            become_results = [in_flight[i] for i in call.results] if phase == "done" else []
            num_inputs, num_aliased = len(call_avals_in), len(become_results)
            if phase:
                num_sms = group.sms_of(operation) or native.tuning("SPLIT_NUM_SMS")
            else:
                num_sms = call.num_sms or num_sms_of(group, operation, num_slots, half_bytes)
            call_results = custom_call(
                ctx.replace(
                    avals_in=[*call_avals_in, *call_avals_out[:num_aliased]],
                    avals_out=call_avals_out,
                ),
                f"{call.target}_{phase}" if phase else call.target,
                [*_of_call(call, inputs), *become_results],
                call_placement,
                call.attributes,
                num_sms=num_sms,
                half_bytes=half_bytes,
                is_split=bool(phase),
                aliases={num_inputs + i: i for i in range(num_aliased)},
            )
            for i, result in zip(call.results, call_results, strict=True):
                results[i] = result
        if phase != "start":
            return results
        payload = inputs[: -len(READ_BY_KERNELS)]  # The done reads this memory again.
        if is_outward:
            return [*payload, *results]
        return [*results, *(payload[source[0]] for source in sources)]

    return emit


def _hold(*arrays: jax.Array) -> Any:
    in_order = [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in arrays]
    return lax.optimization_barrier(in_order)


_lower_hold = mlir.lower_fun(_hold, multiple_results=True)


def _held(
    ctx: compat.Context, arrays: Sequence[compat.Value], avals: Sequence[compat.Aval]
) -> list[Any]:
    """Return arrays in row-major layout, as the results of one barrier, so that start and done read
    the same memory. Without the barrier, XLA could copy constants, and arrays in other layouts,
    once for the start and again for the done. XLA's dynamic_slice_fusion could also fuse a call
    with slices of its operands, or with an update of a larger array."""
    return list(_lower_hold(ctx.replace(avals_in=avals, avals_out=avals), *arrays))
