"""Define the route, and the routed dispatch: a route and a dispatch in one primitive.

The kernels run a routed dispatch of few tokens in one launch. Differentiation divides it into two
primitives, because a policy of ``jax.checkpoint`` may save only the routing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from .. import compat
from ..ad import register_constant, zero_tangent
from ..checks import check_unsharded
from ..group import native
from ..group.group import Group
from ..plan.plan import NUM_RESULTS, PlanOptions, RoutePlan, RoutingArrays, plan_shapes
from ..routing.types import ROUTING_CHECKPOINT_NAME
from . import reference, rules
from .dispatch_combine import DISPATCH, dispatch_attributes, moved_tangents
from .lowering import CallPlacement, custom_call, half_bytes_of, num_sms_of, register
from .record import crossed_axes
from .rules import is_own_axis, move_or_broadcast

route_p = compat.Primitive("moe_a2a_route")
routed_dispatch_p = compat.Primitive("moe_a2a_routed_dispatch")

# An identity that makes JAX lower a program again for each list of devices. It is bound only if the
# program decides the devices of the group. Other primitives do not have this effect, because JAX
# then refuses to lower a program without devices, for example for an export.
on_own_devices_p = compat.Primitive("on_own_devices")


def _for_own_devices(ids: jax.Array, group: Group) -> jax.Array:
    """Return ``ids``, marked by ``on_own_devices_p`` if the group uses ``jax.set_mesh``."""
    takes_devices = group.placed_on(compat.mesh_in_context()) is not group
    return on_own_devices_p.bind(ids) if takes_devices else ids


def bind_route(
    ids: jax.Array, *, group: Group, emulated: bool, plan_options: PlanOptions
) -> RoutePlan:
    """Bind ``route_p``: ids int32 [*lead, T, K] -> a ``RoutePlan`` with the same leading axes."""
    (ids,) = compat.align_varying([ids], crossed_axes(group, emulated))
    ids = _for_own_devices(ids, group)
    return RoutePlan.of_results(
        route_p.bind(ids, group=group, emulated=emulated, plan_options=plan_options)
    )


def bind_routed_dispatch(
    ids: jax.Array,
    payload: Sequence[Any],
    *,
    group: Group,
    emulated: bool = False,
    **params: object,
) -> tuple[RoutePlan, list[Any]]:
    """Bind ``routed_dispatch_p`` to ids int32 [T, K] and a payload for ``DISPATCH``. The plan
    varies over the axes of the group and of ids, even if the payload varies over more axes."""
    axes = crossed_axes(group, emulated)
    (ids,) = compat.align_varying([ids], axes)
    ids = _for_own_devices(ids, group)
    _, *payload = compat.align_varying([ids, *payload], axes)
    return _split_plan(
        routed_dispatch_p.bind(ids, *payload, group=group, emulated=emulated, **params)
    )


def _split_plan(results: Sequence[Any]) -> tuple[RoutePlan, list[Any]]:
    return RoutePlan.of_results(results[:NUM_RESULTS]), list(results[NUM_RESULTS:])


def _split_params(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of the route and of the dispatch in a routed dispatch."""
    dispatch = dict(params)
    plan_options = dispatch.pop("plan_options")
    route = dict(group=params["group"], emulated=params["emulated"], plan_options=plan_options)
    return route, dispatch


def _route_and_dispatch(ids: jax.Array, *payload: jax.Array, **params: object) -> list[Any]:
    """Bind a route and then a dispatch. The arrays of the plan get a checkpoint name."""
    route_params, dispatch_params = _split_params(params)
    plan = compat.checkpoint_name(bind_route(ids, **route_params), ROUTING_CHECKPOINT_NAME)
    return [*plan.results, *DISPATCH.bind(payload, plan.arrays, **dispatch_params)]


# Abstract values


def _route_abstract(
    ids: compat.Aval, *, group: Group, emulated: bool, plan_options: PlanOptions
) -> list[Any]:
    del emulated
    check_unsharded("topk_ids", ids)
    *lead, num_tokens, top_k = ids.shape
    num_groups = plan_options.num_local_experts // plan_options.parts
    shapes = plan_shapes(num_tokens, top_k, group.size, num_groups, plan_options.capacity)
    int32 = jnp.dtype(jnp.int32)
    return [compat.result_aval(ids, (*lead, *shape), int32) for shape in shapes.values()]


def _routed_abstract(ids: Any, *payload: compat.Aval, **params: object) -> list[Any]:
    route_params, dispatch_params = _split_params(params)
    plan = RoutePlan.of_results(_route_abstract(ids, **route_params))
    return [*plan.results, *rules.abstract(DISPATCH, *payload, *plan.arrays, **dispatch_params)]


# Derivatives. A routing contains only integers, so it has no derivative.


def _route_jvp(primals: compat.Primals, tangents: compat.Tangents, **params: Any) -> tuple:
    del tangents
    results = bind_route(*primals, **params).results
    return results, [zero_tangent(x) for x in results]


def _routed_jvp(primals: compat.Primals, tangents: compat.Tangents, **params: Any) -> tuple:
    ids, *payload = primals
    plan, moved = _split_plan(_route_and_dispatch(ids, *payload, **params))
    _, dispatch_params = _split_params(params)
    d_moved = moved_tangents(DISPATCH, payload, tangents[1:], moved, plan.arrays, **dispatch_params)
    return [*plan.results, *moved], [*map(zero_tangent, plan.results), *d_moved]


# Batching


def _route_batch(
    axis_data: Any,
    args: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    group: Group,
    emulated: bool,
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    (ids,), (dim,) = args, dims
    if is_own_axis(axis_data, group, emulated):
        to, emulated = 0, True
    elif dim is None:
        plan = bind_route(ids, group=group, emulated=emulated, **params)
        return plan.results, [None] * NUM_RESULTS
    else:
        to = int(emulated)
    ids = move_or_broadcast(ids, dim, to, axis_data.size)
    plan = bind_route(ids, group=group, emulated=emulated, **params)
    return plan.results, [to] * NUM_RESULTS


def _routed_batch(
    axis_data: Any, args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[Any]]:
    """Batch the primitive over the group's axis. Over other axes, bind a route and a dispatch."""
    (ids, *payload), (ids_dim, *payload_dims) = args, dims
    if is_own_axis(axis_data, params["group"], params["emulated"]):
        size = axis_data.size
        args = [move_or_broadcast(x, dim, 0, size) for x, dim in zip(args, dims, strict=True)]
        out = routed_dispatch_p.bind(*args, **dict(params, emulated=True))
        return out, [0] * len(out)
    if all(dim is None for dim in dims):
        out = routed_dispatch_p.bind(*args, **params)
        return out, [None] * len(out)
    route_params, dispatch_params = _split_params(params)
    results, results_dims = _route_batch(axis_data, [ids], [ids_dim], **route_params)
    results = compat.checkpoint_name(results, ROUTING_CHECKPOINT_NAME)
    num_arrays = len(RoutingArrays._fields)
    moved, moved_dims = rules.batch(
        DISPATCH,
        axis_data,
        [*payload, *results[:num_arrays]],
        [*payload_dims, *results_dims[:num_arrays]],
        **dispatch_params,
    )
    return [*results, *moved], [*results_dims, *moved_dims]


# Kernel calls


def _lower_route(
    ctx: Any, call_placement: CallPlacement, ids: compat.Value, **params: Any
) -> Callable[[], list[Any]]:
    """Lower ``route_p`` to one call with two launches."""
    group = call_placement.group
    (aval,) = ctx.avals_in
    *lead, num_tokens, top_k = call_placement.of_rank(aval).shape
    batch = math.prod(lead)
    options: PlanOptions = params["plan_options"]
    tokens_per_chunk, chunks = route_chunks(num_tokens)
    levels = top_k if options.may_drop else 1

    def int32(*shape: int) -> Any:
        shape = (*aval.shape[: call_placement.lead], *shape)
        return compat.result_aval(aval, shape, jnp.dtype(jnp.int32))

    scratch = [
        int32(group.size, batch * num_tokens * top_k),  # ids of all ranks
        # number of choices of each expert (for each k if rows may drop), and tokens for this rank
        int32(batch, group.size, chunks, levels * options.num_local_experts + 1),
        int32(batch, chunks, group.size),  # this rank's tokens per destination
    ]
    attributes = _attributes(params) | dict(tokens_per_chunk=tokens_per_chunk, parts=options.parts)
    return _call(ctx, call_placement, "route", [ids], attributes, scratch)


def _lower_routed_dispatch(
    ctx: compat.Context,
    call_placement: CallPlacement,
    ids: compat.Value,
    *payload: compat.Value,
    **params: object,
) -> Callable[[], list[Any]]:
    attributes = dict(_attributes(params), format="") | dispatch_attributes(params)
    return _call(ctx, call_placement, "routed_dispatch", [ids, *payload], attributes)


def _attributes(params: dict[str, Any]) -> dict[str, Any]:
    options: PlanOptions = params["plan_options"]
    return dict(
        num_experts=options.num_local_experts * params["group"].size,
        alignment=options.alignment,
        may_drop=options.may_drop,
    )


def _call(
    ctx: Any,
    call_placement: CallPlacement,
    name: str,
    operands: Sequence[compat.Value],
    attributes: dict[str, Any],
    scratch: Sequence[Any] = (),
) -> Callable[[], list[Any]]:
    """Return a function that emits a call and returns its results without the scratch arrays, which
    come last. The operands of the call are the ids, this device's rank, and the payload."""
    (ids, *payload), (ids_aval, *payload_avals) = operands, ctx.avals_in
    ranks = (call_placement.group.size,) * call_placement.lead
    rank_aval = compat.result_aval(ids_aval, ranks, jnp.dtype(jnp.int32))
    avals_in = [ids_aval, rank_aval, *payload_avals]
    avals_out = [*ctx.avals_out, *scratch]
    target = f"moe_a2a_{name}"
    half_bytes = half_bytes_of(target, attributes, call_placement, avals_in, avals_out)
    operation, num_tokens = name.removeprefix("routed_"), ids_aval.shape[-2]

    def emit() -> list[Any]:
        results = custom_call(
            ctx.replace(avals_in=avals_in, avals_out=avals_out),
            target,
            [ids, *_own_rank(ctx, call_placement, rank_aval), *payload],
            call_placement,
            attributes,
            num_sms=num_sms_of(call_placement.group, operation, num_tokens, half_bytes),
            half_bytes=half_bytes,
        )
        return results[: len(ctx.avals_out)]

    return emit


def route_chunks(num_tokens: int) -> tuple[int, int]:
    """Return the number of tokens in a chunk of the route kernel, and the number of chunks."""
    names = ("ROUTE_LEAST_TOKENS", "ROUTE_MOST_TOKENS", "ROUTE_CHUNKS")
    tokens_per_chunk, most, num_chunks = map(native.tuning, names)
    while tokens_per_chunk < min(most, num_tokens / num_chunks):
        tokens_per_chunk *= 2
    return tokens_per_chunk, max(1, -(-num_tokens // tokens_per_chunk))


def _own_rank(ctx: compat.Context, call_placement: CallPlacement, aval: compat.Aval) -> Any:
    """Return the rank of this device, or all ranks if they share a GPU."""
    group = call_placement.group
    rank = partial(reference.own_rank, group)
    if call_placement.lead:
        rank = partial(jnp.arange, group.size, dtype=jnp.int32)
    ctx = ctx.replace(avals_in=[], avals_out=[aval])
    return mlir.lower_fun(rank, multiple_results=False)(ctx)


register(route_p, reference.route, _lower_route)
route_p.def_abstract_eval(_route_abstract)
ad.primitive_jvps[route_p] = _route_jvp
batching.fancy_primitive_batchers[route_p] = _route_batch

register(
    routed_dispatch_p,
    reference.routed_dispatch,
    _lower_routed_dispatch,
    lambda **_: _route_and_dispatch,
)
routed_dispatch_p.def_abstract_eval(_routed_abstract)
ad.primitive_jvps[routed_dispatch_p] = _routed_jvp
batching.fancy_primitive_batchers[routed_dispatch_p] = _routed_batch

register_constant(on_own_devices_p)
compat.lower_for_devices(on_own_devices_p)
