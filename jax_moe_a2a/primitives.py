"""The primitives: abstract values, derivatives, batching, dead code, and their registration.

Given a routing (integers), ``dispatch`` and ``combine`` are linear and each is the other's
transpose. ``weighted_combine`` is bilinear in (rows, weights). One set of rules serves them; what
differs between the operations is the layout of their operands.

Operands of an exchange are the payload (leaves, then scalars), then the arrays of a
``RoutingArrays``. Parameters are ``num_leaves``, ``num_scalars``, ``wire_dtype``, ``group``, and
``emulated``: whether the group's own axis is a leading axis of every array, as ``vmap`` over it
leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from . import compat, lowering, reference
from .group import Group
from .reference import accumulation_dtype, expand_like, split_routing
from .routing import RoutePlan, RoutingArrays, fold_batch, plan_shapes

route_p = compat.Primitive("moe_a2a_route")
dispatch_p = compat.Primitive("moe_a2a_dispatch")
combine_p = compat.Primitive("moe_a2a_combine")
weighted_combine_p = compat.Primitive("moe_a2a_weighted_combine")

TRANSPOSE = {dispatch_p: combine_p, combine_p: dispatch_p}

# The axes of an operand or result that belong to the exchange; what follows them is payload.
TOKEN = ("T",)
CHOICE = ("T", "K")
ROW = ("C",)
Layout = tuple[str, ...]


def operand_layouts(primitive: Any, num_leaves: int, num_scalars: int) -> list[Layout]:
    """The layouts of the payload operands."""
    if primitive is dispatch_p:
        return [TOKEN] * num_leaves + [CHOICE] * num_scalars
    if primitive is combine_p:
        return [ROW] * (num_leaves + num_scalars)
    return [ROW] * (2 * num_leaves)


def result_layouts(primitive: Any, num_leaves: int, num_scalars: int) -> list[Layout]:
    """The layouts of the results. Of dispatch and combine, result i comes from operand i alone."""
    if primitive is weighted_combine_p:
        return [TOKEN]
    return operand_layouts(TRANSPOSE[primitive], num_leaves, num_scalars)


# Binding


def bind_route(
    ids: jax.Array, *, group: Group, num_experts: int, capacity: int, alignment: int, emulated: bool
) -> RoutePlan:
    """Binds ``route_p``: ids int32 [*lead, T, K] -> a ``RoutePlan`` with the same lead."""
    (ids,) = compat.align_varying([ids], () if emulated else group.axes)
    return RoutePlan(
        *route_p.bind(
            ids,
            group=group,
            num_experts=num_experts,
            capacity=capacity,
            alignment=alignment,
            emulated=emulated,
        )
    )


def bind_exchange(
    primitive: Any,
    payload: Sequence[Any],
    routing: RoutingArrays,
    *,
    num_leaves: int,
    num_scalars: int,
    wire_dtype: Any,
    group: Group,
    emulated: bool = False,
) -> list[Any]:
    """Binds an exchange after casting all operands to vary over the same mesh axes."""
    operands = compat.align_varying([*payload, *routing], () if emulated else group.axes)
    return primitive.bind(
        *operands,
        num_leaves=num_leaves,
        num_scalars=num_scalars,
        wire_dtype=wire_dtype,
        group=group,
        emulated=emulated,
    )


def _keep_leaves(keep: Sequence[bool], params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a dispatch or combine of only those leaves and scalars that are kept."""
    num_leaves = params["num_leaves"]
    return dict(params, num_leaves=sum(keep[:num_leaves]), num_scalars=sum(keep[num_leaves:]))


def _select(keep: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for value, kept in zip(values, keep, strict=True) if kept]


# Abstract evaluation


def _route_abstract(
    ids: Any, *, group: Group, num_experts: int, capacity: int, alignment: int, emulated: bool
) -> list[Any]:
    del alignment, emulated
    _check_unsharded("topk_ids", ids, ids.ndim)
    *lead, num_tokens, top_k = ids.shape
    shapes = plan_shapes(num_tokens, top_k, group.size, num_experts // group.size, capacity)
    return [
        compat.result_aval(ids, (*lead, *shape), jnp.dtype(jnp.int32)) for shape in shapes.values()
    ]


def _check_unsharded(name: str, aval: Any, num_axes: int) -> None:
    if any(axis is not None for axis in aval.sharding.spec[:num_axes]):
        raise TypeError(
            f"{name} must not be sharded along tokens or rows by an Explicit mesh axis: make that "
            f"axis manual in jax.shard_map, or reshard; got {aval.str_short()}"
        )


def _exchange_abstract(
    primitive: Any,
    *avals: Any,
    num_leaves: int,
    num_scalars: int,
    wire_dtype: Any,
    group: Group,
    emulated: bool,
) -> list[Any]:
    del wire_dtype
    lead = (group.size,) if emulated else ()
    payload, routing = split_routing(avals)
    num_tokens, top_k = routing.choice_rank.shape[len(lead) :]
    sizes = {"T": num_tokens, "K": top_k, "C": routing.row_rank.shape[len(lead)]}

    def core(layout: Layout) -> tuple[int, ...]:
        return (*lead, *(sizes[axis] for axis in layout))

    layouts = operand_layouts(primitive, num_leaves, num_scalars)
    for aval, layout in zip(payload, layouts, strict=True):
        expected = core(layout)
        if aval.shape[: len(expected)] != expected:
            raise TypeError(
                f"{primitive} needs an operand [{expected}, ...]; got {aval.str_short()}"
            )
        _check_unsharded(f"operands of {primitive}", aval, len(expected))

    def result(aval: Any, taken: Layout, given: Layout) -> Any:
        num_core = len(lead) + len(taken)
        shape = core(given) + aval.shape[num_core:]
        return compat.result_aval(aval, shape, aval.dtype, aval.sharding.spec[num_core:])

    results = result_layouts(primitive, num_leaves, num_scalars)
    return [result(*each) for each in zip(payload, layouts, results, strict=False)]


# Derivatives


def carries_tangent(dtype: Any) -> bool:
    """Whether a payload of this dtype is differentiated.

    Integers are not; neither are floats of 8 bits or fewer, whose cotangents JAX could not add
    without overflow.
    """
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize > 1


def _zero_tangent(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def _route_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple:
    del tangents  # of integers
    plan = bind_route(*primals, **params)
    return list(plan), [_zero_tangent(x) for x in plan]


def _linear_jvp(
    primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple:
    """d(exchange(x)) = exchange(dx), of those leaves whose tangent is not zero."""
    payload, routing = split_routing(primals)
    out = bind_exchange(primitive, payload, routing, **params)
    tangents = tangents[: len(payload)]
    keep = [
        carries_tangent(jax.typeof(x).dtype) and not _is_zero(dx)
        for x, dx in zip(payload, tangents, strict=True)
    ]
    tangents_out: list[Any] = [_zero_tangent(x) for x in out]
    if any(keep):
        moved = bind_exchange(
            primitive, _select(keep, tangents), routing, **_keep_leaves(keep, params)
        )
        for i, dx in zip(_select(keep, range(len(keep))), moved, strict=True):
            tangents_out[i] = dx
    return out, tangents_out


def _linear_transpose(
    primitive: Any, cotangents: Sequence[Any], *operands: Any, **params: Any
) -> list[Any]:
    """The transpose of dispatch is combine and the other way round, leaf by leaf."""
    payload, routing = split_routing(operands)
    wanted = [ad.is_undefined_primal(x) for x in payload]
    keep = [want and not _is_zero(ct) for want, ct in zip(wanted, cotangents, strict=True)]
    out: list[Any] = [
        ad.Zero(x.aval) if want else None for want, x in zip(wanted, payload, strict=True)
    ]
    if any(keep):
        moved = bind_exchange(
            TRANSPOSE[primitive], _select(keep, cotangents), routing, **_keep_leaves(keep, params)
        )
        for i, ct in zip(_select(keep, range(len(keep))), moved, strict=True):
            out[i] = ct
    return out + [None] * len(routing)


def _weighted_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, num_leaves: int, **params: Any
) -> tuple:
    """d(sum w_i * r_i) = sum (w_i * dr_i) + sum (dw_i * r_i): the same operation on other pairs."""
    payload, routing = split_routing(primals)
    bind = partial(bind_exchange, weighted_combine_p, routing=routing, **params)
    out = bind(payload=payload, num_leaves=num_leaves)
    rows, weights = payload[:num_leaves], payload[num_leaves:]
    d_rows, d_weights = tangents[:num_leaves], tangents[num_leaves : 2 * num_leaves]
    pairs = [(dr, w) for dr, w in zip(d_rows, weights, strict=True) if not _is_zero(dr)]
    pairs += [(r, dw) for r, dw in zip(rows, d_weights, strict=True) if not _is_zero(dw)]
    if not pairs:
        return out, [_zero_tangent(out[0])]
    payload = [r for r, _ in pairs] + [w for _, w in pairs]
    return out, bind(payload=payload, num_leaves=len(pairs))


def _weighted_transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    num_leaves: int,
    num_scalars: int,
    wire_dtype: Any,
    group: Group,
    emulated: bool,
) -> list[Any]:
    """The cotangent goes to the rows once, as G; then ct(r_i) = w_i * G and ct(w_i) = <r_i, G>.

    Only where a row carries a token: whatever lies in the others, NaN included, must not leak.
    """
    payload, routing = split_routing(operands)
    (cotangent,) = cotangents
    if _is_zero(cotangent):
        zeros = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in payload]
        return zeros + [None] * len(routing)
    (moved,) = bind_exchange(
        dispatch_p,
        [cotangent],
        routing,
        num_leaves=1,
        num_scalars=num_scalars,
        wire_dtype=wire_dtype,
        group=group,
        emulated=emulated,
    )
    acc_dtype = accumulation_dtype(moved.dtype)
    wide = moved.astype(acc_dtype)
    is_row = routing.row_rank >= 0

    def scaled(weights: Any) -> Any:
        product = expand_like(weights.astype(acc_dtype), wide) * wide
        return jnp.where(expand_like(is_row, wide), product, 0).astype(moved.dtype)

    def dotted(rows: Any, weights_aval: Any) -> Any:
        dots = (rows.astype(acc_dtype) * wide).sum(axis=range(weights_aval.ndim, wide.ndim))
        return jnp.where(expand_like(is_row, dots), dots, 0).astype(weights_aval.dtype)

    rows, weights = payload[:num_leaves], payload[num_leaves:]
    pairs = list(zip(rows, weights, strict=True))
    ct_rows = [scaled(w) if ad.is_undefined_primal(r) else None for r, w in pairs]
    ct_weights = [dotted(r, w.aval) if ad.is_undefined_primal(w) else None for r, w in pairs]
    return ct_rows + ct_weights + [None] * len(routing)


# Batching


def _move_or_broadcast(x: Any, dim: int | None, to: int, size: int) -> Any:
    """Puts the batch axis of ``x`` at ``to``; makes one there if ``dim`` is None."""
    if dim is not None:
        return jnp.moveaxis(x, dim, to)
    return jnp.broadcast_to(jnp.expand_dims(x, to), (*x.shape[:to], size, *x.shape[to:]))


def _is_own_axis(axis_data: Any, group: Group, emulated: bool) -> bool:
    if axis_data.name not in group.axes:
        return False
    if emulated or len(group.axes) > 1:
        raise NotImplementedError(
            f"vmap over the group's own axis needs a group of one axis; got {group.axes}"
        )
    return True


def _route_batch(
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    group: Group,
    emulated: bool,
    **params: Any,
) -> tuple:
    (ids,), (dim,) = args, dims
    if _is_own_axis(axis_data, group, emulated):
        to, emulated = 0, True
    elif dim is None:
        plan = bind_route(ids, group=group, emulated=emulated, **params)
        return list(plan), [None] * len(plan)
    else:
        to = int(emulated)
    ids = _move_or_broadcast(ids, dim, to, axis_data.size)
    plan = bind_route(ids, group=group, emulated=emulated, **params)
    return list(plan), [to] * len(plan)


def _exchange_batch(
    primitive: Any,
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    group: Group,
    emulated: bool,
    **params: Any,
) -> tuple:
    """One exchange for the whole batch.

    Over the group's own axis: the same primitive, emulated. With the routing shared: the batch is
    the first axis of the payload, so a row is wider. With the routing batched: the batch folds into
    the tokens and rows of one larger routing.
    """
    size = axis_data.size
    bind = partial(bind_exchange, primitive, group=group, **params)
    layouts = operand_layouts(primitive, params["num_leaves"], params["num_scalars"])
    results = result_layouts(primitive, params["num_leaves"], params["num_scalars"])

    if _is_own_axis(axis_data, group, emulated):
        args = [_move_or_broadcast(x, d, 0, size) for x, d in zip(args, dims, strict=True)]
        payload, routing = split_routing(args)
        return bind(payload=payload, routing=routing, emulated=True), [0] * len(results)

    lead = int(emulated)
    payload, routing = split_routing(args)
    payload_dims, routing_dims = split_routing(dims)

    if all(dim is None for dim in routing_dims):
        batched = [dim is not None for dim in payload_dims]
        # Rows and weights of all pairs must agree. Where the batch is spread over a mesh axis
        # (spmd_axis_name), an unbatched result would be typed as varying over it, against its use.
        if primitive is weighted_combine_p or axis_data.spmd_name is not None:
            batched = [any(batched)] * len(payload)
        payload = [
            _move_or_broadcast(x, dim, lead + len(layout), size) if is_batched else x
            for x, dim, layout, is_batched in zip(
                payload, payload_dims, layouts, batched, strict=True
            )
        ]
        out = bind(payload=payload, routing=routing, emulated=emulated)
        return out, [
            lead + len(layout) if is_batched else None
            for layout, is_batched in zip(results, batched, strict=False)
        ]

    def to_lead(x: Any, dim: Any) -> Any:
        return _move_or_broadcast(x, dim, lead, size)

    def fold(x: Any) -> Any:
        return x.reshape(*x.shape[:lead], size * x.shape[lead + 1], *x.shape[lead + 2 :])

    def unfold(x: Any) -> Any:
        return x.reshape(*x.shape[:lead], size, x.shape[lead] // size, *x.shape[lead + 1 :])

    payload = [fold(to_lead(x, d)) for x, d in zip(payload, payload_dims, strict=True)]
    routing = RoutingArrays(*(to_lead(x, d) for x, d in zip(routing, routing_dims, strict=True)))
    routing = jax.vmap(fold_batch)(routing) if emulated else fold_batch(routing)
    out = bind(payload=payload, routing=routing, emulated=emulated)
    return [unfold(x) for x in out], [lead] * len(out)


# Dead code


def _linear_dce(used_outputs: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """A dispatch or combine without a used result goes; of the others the unused leaves go."""
    if not any(used_outputs):
        return [False] * len(eqn.invars), None
    if all(used_outputs):
        return [True] * len(eqn.invars), eqn
    payload, routing = split_routing(eqn.invars)
    used_inputs = [*used_outputs, *(True for _ in routing)]
    eqn = eqn.replace(
        invars=[*_select(used_outputs, payload), *routing],
        outvars=_select(used_outputs, eqn.outvars),
        params=_keep_leaves(used_outputs, eqn.params),
    )
    return used_inputs, eqn


# Registration. Split phases (start, done) will take their place here, with the same rules.

for _primitive, _reference in (
    (route_p, reference.route),
    (dispatch_p, reference.dispatch),
    (combine_p, reference.combine),
    (weighted_combine_p, reference.weighted_combine),
):
    _primitive.multiple_results = True
    _primitive.def_impl(partial(compat.apply_primitive, _primitive))
    mlir.register_lowering(_primitive, mlir.lower_fun(_reference, multiple_results=True))

mlir.register_lowering(route_p, lowering.route_cuda, platform="cuda")
mlir.register_lowering(dispatch_p, lowering.dispatch_cuda, platform="cuda")
mlir.register_lowering(combine_p, lowering.combine_cuda, platform="cuda")
mlir.register_lowering(weighted_combine_p, lowering.weighted_combine_cuda, platform="cuda")

route_p.def_abstract_eval(_route_abstract)
ad.primitive_jvps[route_p] = _route_jvp
batching.fancy_primitive_batchers[route_p] = _route_batch

for _primitive in (dispatch_p, combine_p, weighted_combine_p):
    _primitive.def_abstract_eval(partial(_exchange_abstract, _primitive))
    batching.fancy_primitive_batchers[_primitive] = partial(_exchange_batch, _primitive)

for _primitive in (dispatch_p, combine_p):
    ad.primitive_jvps[_primitive] = partial(_linear_jvp, _primitive)
    ad.primitive_transposes[_primitive] = partial(_linear_transpose, _primitive)
    compat.register_dce_rule(_primitive, _linear_dce)

ad.primitive_jvps[weighted_combine_p] = _weighted_jvp
ad.primitive_transposes[weighted_combine_p] = _weighted_transpose
