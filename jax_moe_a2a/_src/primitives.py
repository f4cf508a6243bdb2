"""The primitives: abstract values, derivatives, batching, dead code, and their registration.

Given a routing (integers), ``dispatch`` and ``combine`` are linear and each is the other's
transpose. ``weighted_combine`` is bilinear in (rows, weights), and ``weighted_dispatch`` is what it
transposes to. One set of rules serves them; what differs between the operations is the layout of
their operands. ``routed_dispatch`` is ``route`` and ``dispatch`` in one, so that few tokens take
one launch; every transform that wants only one of the two takes it apart.

Operands of an exchange are the payload (leaves, then scalars), then the arrays of a
``RoutingArrays``. Of ``weighted_combine`` the leaves are pairs, rows before weights; the payload of
``weighted_dispatch`` is the array to dispatch, then rows (the leaves), then weights (the scalars).

Parameters are ``num_leaves``, ``num_scalars``, ``wire_dtype``, ``group``, and ``emulated``: whether
the group's own axis is a leading axis of every array, as ``vmap`` over it leaves it. Of
``weighted_dispatch`` also ``num_weight_axes``: axes of a weight behind that of the rows. A dispatch
that quantizes its leaves has an ``encoding`` too, and maybe one more operand, the scales of the
tokens. It is linear but for the rounding: its derivatives are those of one without.

A dispatch, or a half of one, may have ``tail="unspecified"``: rows after the last group hold
anything. So do those of its tangents. Its transpose is a combine, which reads no such rows, and has
no such parameter; the transpose of a combine has zeros there, because what has made the rows of a
combine may read all of their cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from . import compat, lowering, reference
from .formats import Encoding, Quantized, TokenFormat
from .group import Group
from .plan import RoutePlan, RoutingArrays, fold_batch, plan_shapes
from .reference import accumulation_dtype, split_routing
from .routing import ROUTING_CHECKPOINT_NAME, check_arrays

route_p = compat.Primitive("moe_a2a_route")
dispatch_p = compat.Primitive("moe_a2a_dispatch")
combine_p = compat.Primitive("moe_a2a_combine")
weighted_combine_p = compat.Primitive("moe_a2a_weighted_combine")
weighted_dispatch_p = compat.Primitive("moe_a2a_weighted_dispatch")
routed_dispatch_p = compat.Primitive("moe_a2a_routed_dispatch")
# The halves of dispatch, combine and weighted_combine; their derivatives are in ``split``.
dispatch_start_p = compat.Primitive("moe_a2a_dispatch_start")
dispatch_done_p = compat.Primitive("moe_a2a_dispatch_done")
combine_start_p = compat.Primitive("moe_a2a_combine_start")
combine_done_p = compat.Primitive("moe_a2a_combine_done")
weighted_combine_start_p = compat.Primitive("moe_a2a_weighted_combine_start")
weighted_combine_done_p = compat.Primitive("moe_a2a_weighted_combine_done")
# Identity on the ids of a group that takes its devices from the program. JAX shares lowered
# programs among device assignments; one with this primitive is lowered for each. The other
# primitives cannot have that property: such programs need devices, and an export may have none.
on_own_devices_p = compat.Primitive("on_own_devices")

TRANSPOSE = {
    dispatch_p: combine_p,
    combine_p: dispatch_p,
    dispatch_start_p: combine_done_p,
    dispatch_done_p: combine_start_p,
    combine_start_p: dispatch_done_p,
    combine_done_p: dispatch_start_p,
}

HALVES = (
    dispatch_start_p,
    dispatch_done_p,
    combine_start_p,
    combine_done_p,
    weighted_combine_start_p,
    weighted_combine_done_p,
)
WEIGHTED_COMBINES = (weighted_combine_p, weighted_combine_start_p, weighted_combine_done_p)

# The axes of an operand or result that belong to the exchange; what follows them is payload.
TOKEN = ("T",)
CHOICE = ("T", "K")
ROW = ("C",)
Layout = tuple[str, ...]


def operand_layouts(
    primitive: Any, num_leaves: int, num_scalars: int, encoding: Encoding | None = None
) -> list[Layout]:
    """The layouts of the payload operands.

    What is in flight is two arrays for each leaf and scalar: its form at home, of all of them, then
    its form at the rows.
    """
    homes: list[Layout] = [TOKEN] * num_leaves + [CHOICE] * num_scalars
    rows: list[Layout] = [ROW] * (num_leaves + num_scalars)
    if primitive in (dispatch_p, dispatch_start_p):
        has_scales = encoding is not None and encoding.has_token_scales
        return [*homes, TOKEN] if has_scales else homes
    if primitive in (combine_p, combine_start_p):
        return rows
    if primitive in (dispatch_done_p, combine_done_p):
        return homes + rows
    if primitive is weighted_dispatch_p:
        return [TOKEN, *rows]
    pairs: list[Layout] = [ROW] * (2 * num_leaves)
    return [TOKEN, ROW, *pairs] if primitive is weighted_combine_done_p else pairs


def result_layouts(
    primitive: Any, num_leaves: int, num_scalars: int, encoding: Encoding | None = None
) -> list[Layout]:
    """The layouts of the results."""
    if primitive in (weighted_combine_p, weighted_combine_done_p):
        return [TOKEN]
    if primitive is weighted_combine_start_p:
        return [TOKEN, ROW]
    if primitive is weighted_dispatch_p:
        return [ROW] * (num_scalars + num_leaves)
    if encoding is not None:
        return [ROW] * (encoding.results_per_leaf * num_leaves + num_scalars)
    return operand_layouts(TRANSPOSE[primitive], num_leaves, num_scalars)


def result_sources(
    primitive: Any, num_leaves: int, num_scalars: int, encoding: Encoding | None = None
) -> list[int]:
    """For each result the operand that it is like, but for the axes of the exchange."""
    if primitive in (weighted_combine_p, weighted_combine_done_p):
        return [0]
    if primitive is weighted_combine_start_p:
        return [0, 0]
    per_leaf = 1 if encoding is None else encoding.results_per_leaf
    each = [leaf for leaf in range(num_leaves) for _ in range(per_leaf)]
    each += range(num_leaves, num_leaves + num_scalars)
    return each * 2 if primitive in (dispatch_start_p, combine_start_p) else each


# Binding


def _for_own_devices(ids: jax.Array, group: Group) -> jax.Array:
    """Mark a program whose devices are those of ``jax.set_mesh``, and not of the group."""
    takes_devices = group.placed_on(compat.mesh_in_context()) is not group
    return on_own_devices_p.bind(ids) if takes_devices else ids


def _crossed_axes(group: Group, emulated: bool) -> tuple[str, ...]:
    """Return the mesh axes over which results vary even if operands do not. A group of one rank
    exchanges nothing: its results vary as its operands do."""
    return () if emulated or group.size == 1 else group.axes


def bind_route(
    ids: jax.Array,
    *,
    group: Group,
    num_experts: int,
    capacity: int,
    alignment: int,
    first_choice: int | None,
    emulated: bool,
    parts: int = 1,
) -> RoutePlan:
    """Binds ``route_p``: ids int32 [*lead, T, K] -> a ``RoutePlan`` with the same lead. Numbers as
    of ``plan_route``."""
    (ids,) = compat.align_varying([ids], _crossed_axes(group, emulated))
    ids = _for_own_devices(ids, group)
    return RoutePlan(
        *route_p.bind(
            ids,
            group=group,
            num_experts=num_experts,
            capacity=capacity,
            alignment=alignment,
            first_choice=first_choice,
            emulated=emulated,
            parts=parts,
        )
    )


def bind_exchange(
    primitive: Any,
    payload: Sequence[Any],
    routing: RoutingArrays,
    *,
    group: Group,
    emulated: bool = False,
    **params: Any,
) -> list[Any]:
    """Binds an exchange after casting all operands to vary over the same mesh axes."""
    operands = compat.align_varying([*payload, *routing], _crossed_axes(group, emulated))
    return primitive.bind(*operands, group=group, emulated=emulated, **params)


def bind_routed_dispatch(
    ids: jax.Array, payload: Sequence[Any], *, group: Group, emulated: bool = False, **params: Any
) -> tuple[RoutePlan, list[Any]]:
    """Binds ``routed_dispatch_p``: ids int32 [T, K] and a payload for ``dispatch_p``.

    The routing comes from the ids alone: it varies over no axis that only the payload varies over.
    It has no checkpoint name, for ``_routed_remat`` heeds that name by itself.
    """
    axes = _crossed_axes(group, emulated)
    (ids,) = compat.align_varying([ids], axes)
    ids = _for_own_devices(ids, group)
    _, *payload = compat.align_varying([ids, *payload], axes)
    results = routed_dispatch_p.bind(ids, *payload, group=group, emulated=emulated, **params)
    return _split_plan(results)


def _split_plan(results: Sequence[Any]) -> tuple[RoutePlan, list[Any]]:
    """Splits the results of ``routed_dispatch_p`` into routing and payload."""
    num_fields = len(RoutePlan._fields)
    return RoutePlan(*results[:num_fields]), list(results[num_fields:])


def _split_params(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters of the ``route_p`` and of the ``dispatch_p`` in a ``routed_dispatch_p``."""
    names = ("num_leaves", "num_scalars", "wire_dtype", "encoding", "tail")
    shared = dict(group=params["group"], emulated=params["emulated"])
    route = {name: value for name, value in params.items() if name not in names}
    route["parts"] = 1  # one launch routes for the ranks of one host
    dispatch = {name: value for name, value in params.items() if name in names}
    return {**route, **shared}, {**dispatch, **shared}


def _route_and_dispatch(ids: Any, *payload: Any, **params: Any) -> list[Any]:
    """A ``routed_dispatch_p`` as two primitives, the routing named as ``api.route`` does."""
    route_params, dispatch_params = _split_params(params)
    plan = compat.checkpoint_name(bind_route(ids, **route_params), ROUTING_CHECKPOINT_NAME)
    return [*plan, *bind_exchange(dispatch_p, payload, plan.arrays, **dispatch_params)]


def _with_known_ids(known: Sequence[bool]) -> Callable[..., list[Any]] | None:
    """Return how a ``routed_dispatch_p`` is bound if its ids are known and its payload is not."""
    return _route_and_dispatch if known[0] and not all(known) else None


def _known_apart(primitive: Any, known: Sequence[bool]) -> Callable[..., list[Any]] | None:
    """Return how a dispatch or combine is bound by a known routing if a part of its payload is
    known: as two, one of what is known and one of what is not. None if it is not so."""
    payload_known, routing_known = split_routing(known)
    if not all(routing_known) or all(payload_known) or not any(payload_known):
        return None

    def bind_apart(*operands: Any, **params: Any) -> list[Any]:
        payload, routing = split_routing(operands)
        num_leaves, num_scalars = params["num_leaves"], params["num_scalars"]
        encoding = params.get("encoding")
        sources = result_sources(primitive, num_leaves, num_scalars, encoding)
        num_moved = num_leaves + num_scalars
        results: dict[int, Any] = {}
        for keep in (payload_known[:num_moved], [not k for k in payload_known[:num_moved]]):
            if not any(keep):
                continue
            kept = _select(keep, payload[:num_moved])
            if any(keep[:num_leaves]):
                kept += payload[num_moved:]  # the scales of tokens
            moved = bind_exchange(primitive, kept, routing, **_keep_leaves(keep, params))
            places = [i for i, source in enumerate(sources) if keep[source]]
            results.update(zip(places, moved, strict=True))
        return [results[i] for i in range(len(sources))]

    return bind_apart


def _encode_and_dispatch(
    *operands: Any, num_leaves: int, num_scalars: int, encoding: Encoding, **params: Any
) -> list[Any]:
    """A ``dispatch_p`` with an encoding as one without, and what stands around it."""
    payload, routing = split_routing(operands)

    def dispatch(*parts: Any, **numbers: Any) -> list[Any]:
        return bind_exchange(dispatch_p, parts, routing, **numbers, **params)

    return reference.encode_and_decode(dispatch, payload, num_leaves, num_scalars, encoding)


def _dispatch_and_weigh(
    *operands: Any,
    num_leaves: int,
    num_scalars: int,
    num_weight_axes: int,
    emulated: bool,
    **params: Any,
) -> list[Any]:
    """A ``weighted_dispatch_p`` as ``dispatch_p`` and what follows it where the rows are."""
    (g, *payload), routing = split_routing(operands)
    (moved,) = bind_exchange(
        dispatch_p, [g], routing, num_leaves=1, num_scalars=0, emulated=emulated, **params
    )
    return reference.scale_and_dot(
        moved,
        payload[:num_leaves],
        payload[num_leaves:],
        routing,
        num_axes=int(emulated) + 1 + num_weight_axes,
    )


def _keep_leaves(keep: Sequence[bool], params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a dispatch or combine of only those leaves and scalars that are kept."""
    end_of_leaves = params["num_leaves"]
    end_of_scalars = end_of_leaves + params["num_scalars"]
    num_leaves, num_scalars = sum(keep[:end_of_leaves]), sum(keep[end_of_leaves:end_of_scalars])
    kept = dict(params, num_leaves=num_leaves, num_scalars=num_scalars)
    if num_leaves == 0:
        kept.pop("encoding", None)
    return kept


def _select(keep: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for value, kept in zip(values, keep, strict=True) if kept]


# Abstract evaluation


def _route_abstract(
    ids: Any,
    *,
    group: Group,
    num_experts: int,
    capacity: int,
    alignment: int,
    first_choice: int | None,
    emulated: bool,
    parts: int = 1,
) -> list[Any]:
    del alignment, first_choice, emulated
    _check_unsharded("topk_ids", ids, ids.ndim)
    *lead, num_tokens, top_k = ids.shape
    num_groups = num_experts // group.size // parts
    shapes = plan_shapes(num_tokens, top_k, group.size, num_groups, capacity)
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
    num_weight_axes: int = 0,
    encoding: Encoding | None = None,
    tail: str = "zero",
) -> list[Any]:
    del wire_dtype, tail
    lead = (group.size,) if emulated else ()
    payload, routing = split_routing(avals)
    capacity = routing.row_rank.shape[len(lead)] if routing.row_rank.ndim > len(lead) else 0
    check_arrays(f"the routing of {primitive}", routing, group.size, capacity, lead=lead)
    num_tokens, top_k = routing.choice_rank.shape[len(lead) :]
    sizes = {"T": num_tokens, "K": top_k, "C": capacity}

    def core(layout: Layout) -> tuple[int, ...]:
        return (*lead, *(sizes[axis] for axis in layout))

    layouts = operand_layouts(primitive, num_leaves, num_scalars, encoding)
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

    if primitive is weighted_dispatch_p:
        moved = result(payload[0], TOKEN, ROW)
        num_axes = len(lead) + 1 + num_weight_axes
        dotted = compat.result_aval(
            moved,
            moved.shape[:num_axes],
            accumulation_dtype(moved.dtype),
            moved.sharding.spec[len(lead) + 1 : num_axes],
        )
        for aval, rest in zip(
            payload[1:], [moved.shape] * num_leaves + [dotted.shape] * num_scalars, strict=True
        ):
            if aval.shape != rest:
                raise TypeError(f"{primitive} needs an operand {rest}; got {aval.str_short()}")
        return [moved] * num_scalars + [dotted] * num_leaves
    if encoding is not None:
        rows = [result(aval, TOKEN, ROW) for aval in payload[:num_leaves]]
        if not encoding.decode:
            rows = [part for row in rows for part in _quantized_avals(row, encoding.format)]
        scalars = payload[num_leaves : num_leaves + num_scalars]
        return rows + [result(aval, CHOICE, ROW) for aval in scalars]
    results = result_layouts(primitive, num_leaves, num_scalars)
    sources = result_sources(primitive, num_leaves, num_scalars)
    return [
        result(payload[source], layouts[source], given)
        for source, given in zip(sources, results, strict=True)
    ]


def _quantized_avals(rows: Any, fmt: TokenFormat) -> Quantized:
    """Values and scales of rows [..., H], sharded as they are: by whole groups."""
    *lead, hidden = rows.shape

    def part(items: int, dtype: Any) -> Any:
        return compat.result_aval(rows, (*lead, items), jnp.dtype(dtype), rows.sharding.spec)

    return Quantized(
        part(hidden // fmt.values_per_item, fmt.value_dtype),
        part(hidden // fmt.group_size, fmt.scale_dtype),
    )


def _routed_abstract(ids: Any, *payload: Any, **params: Any) -> list[Any]:
    route_params, dispatch_params = _split_params(params)
    plan = RoutePlan(*_route_abstract(ids, **route_params))
    return [*plan, *_exchange_abstract(dispatch_p, *payload, *plan.arrays, **dispatch_params)]


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
    return out, _moved_tangents(primitive, payload, tangents, out, routing, **params)


def _moved_tangents(
    primitive: Any,
    payload: Sequence[Any],
    tangents: Sequence[Any],
    out: Sequence[Any],
    routing: RoutingArrays,
    **params: Any,
) -> list[Any]:
    """The tangents of the results ``out`` of a dispatch or combine.

    Of an encoding they are straight-through, if it decodes; quantized rows have none.
    """
    encoding = params.pop("encoding", None)
    num_leaves, num_scalars = params["num_leaves"], params["num_scalars"]
    moves = [encoding is None or encoding.decode] * num_leaves + [True] * num_scalars
    moves += [False] * (len(payload) - len(moves))  # the scales of tokens
    keep = [
        can_move and carries_tangent(jax.typeof(x).dtype) and not _is_zero(dx)
        for can_move, x, dx in zip(moves, payload, tangents, strict=True)
    ]
    moved = {}
    if any(keep):
        results = bind_exchange(
            primitive, _select(keep, tangents), routing, **_keep_leaves(keep, params)
        )
        moved = dict(zip(_select(keep, range(len(keep))), results, strict=True))
    sources = result_sources(primitive, num_leaves, num_scalars, encoding)
    return [
        moved[source] if source in moved else _zero_tangent(x)
        for source, x in zip(sources, out, strict=True)
    ]


def _routed_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple:
    """The tangents follow the routing that the primals came by: they are not routed again."""
    ids, *payload = primals
    plan, moved = bind_routed_dispatch(ids, payload, **params)
    _, dispatch_params = _split_params(params)
    moved_tangents = _moved_tangents(
        dispatch_p, payload, tangents[1:], moved, plan.arrays, **dispatch_params
    )
    return [*plan, *moved], [*map(_zero_tangent, plan), *moved_tangents]


def _linear_transpose(
    primitive: Any,
    cotangents: Sequence[Any],
    *operands: Any,
    encoding: Encoding | None = None,
    tail: str = "zero",
    **params: Any,
) -> list[Any]:
    """The transpose of dispatch is combine and the other way round, leaf by leaf. With an encoding
    it is straight-through: rows that are not decoded have no gradient, nor have scales."""
    del tail
    payload, routing = split_routing(operands)
    if encoding is not None:
        num_leaves, num_scalars = params["num_leaves"], params["num_scalars"]
        zeros = [ad.Zero(x.aval if ad.is_undefined_primal(x) else jax.typeof(x)) for x in payload]
        leaves = cotangents[:num_leaves] if encoding.decode else zeros[:num_leaves]
        scalars = cotangents[len(cotangents) - num_scalars :]
        cotangents = [*leaves, *scalars, *zeros[num_leaves + num_scalars :]]
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


def weighted_jvp(
    primitive: Any,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    num_leaves: int,
    **params: Any,
) -> tuple:
    """d(sum w_i * r_i) = sum (w_i * dr_i) + sum (dw_i * r_i): the same operation on other pairs.

    Also of the halves. What is in flight comes before the pairs, with a tangent of its own.
    """
    payload, routing = split_routing(primals)
    bind = partial(bind_exchange, primitive, routing=routing, **params)
    out = bind(payload=payload, num_leaves=num_leaves)
    num_flying = len(payload) - 2 * num_leaves
    d_flying = [ad.instantiate_zeros(dx) for dx in tangents[:num_flying]]
    pairs = _tangent_pairs(payload[num_flying:], tangents[num_flying : len(payload)], num_leaves)
    if not pairs:
        return out, [_zero_tangent(x) for x in out]
    payload = [*d_flying, *(r for r, _ in pairs), *(w for _, w in pairs)]
    return out, bind(payload=payload, num_leaves=len(pairs))


def _tangent_pairs(
    payload: Sequence[Any], tangents: Sequence[Any], num_leaves: int
) -> list[tuple[Any, Any]]:
    rows, weights = payload[:num_leaves], payload[num_leaves:]
    d_rows, d_weights = tangents[:num_leaves], tangents[num_leaves:]
    pairs = [(dr, w) for dr, w in zip(d_rows, weights, strict=True) if not _is_zero(dr)]
    return pairs + [(r, dw) for r, dw in zip(rows, d_weights, strict=True) if not _is_zero(dw)]


def _weighted_transpose(
    cotangents: Sequence[Any], *operands: Any, num_leaves: int, **params: Any
) -> list[Any]:
    """The cotangent goes to the rows once, as G; then ct(r_i) = w_i * G and ct(w_i) = <r_i, G>."""
    payload, routing = split_routing(operands)
    (cotangent,) = cotangents
    wanted = [ad.is_undefined_primal(x) for x in payload]
    out: list[Any] = [
        ad.Zero(x.aval) if want else None for want, x in zip(wanted, payload, strict=True)
    ]
    if not _is_zero(cotangent):
        rows, weights = payload[:num_leaves], payload[num_leaves:]
        dot_with = _select(wanted[num_leaves:], rows)
        scale_by = _select(wanted[:num_leaves], weights)
        weight = weights[0].aval if wanted[num_leaves] else jax.typeof(weights[0])
        params.update(num_leaves=len(dot_with), num_scalars=len(scale_by))
        moved = bind_exchange(
            weighted_dispatch_p,
            [cotangent, *dot_with, *scale_by],
            routing,
            num_weight_axes=weight.ndim - 1 - int(params["emulated"]),
            **params,
        )
        for i, ct in zip(_select(wanted, range(len(wanted))), moved, strict=True):
            out[i] = ct.astype(payload[i].aval.dtype)
    return out + [None] * len(routing)


def _weighted_dispatch_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple:
    """Of the composition, in which G and its tangent move once each, whatever else has tangents."""
    payload, routing = split_routing(tangents)
    moving = [not _is_zero(dx) for dx in payload] + [False] * len(routing)

    def of_moving(*args: Any) -> list[Any]:
        given = iter(args)
        operands = [next(given) if m else x for m, x in zip(moving, primals, strict=True)]
        return _dispatch_and_weigh(*operands, **params)

    out, tangents_out = jax.jvp(of_moving, _select(moving, primals), _select(moving, tangents))
    # Results come from the first operand and one other each: the scalars', then the leaves'.
    of_leaves = moving[1 : 1 + params["num_leaves"]]
    of_scalars = moving[1 + params["num_leaves"] : len(out) + 1]
    return out, [
        dx if moving[0] or m else _zero_tangent(x)
        for x, dx, m in zip(out, tangents_out, of_scalars + of_leaves, strict=True)
    ]


def _weighted_dispatch_transpose(
    cotangents: Sequence[Any],
    *operands: Any,
    num_leaves: int,
    num_scalars: int,
    num_weight_axes: int,
    **params: Any,
) -> list[Any]:
    """Of s = w * G and d = <r, G>: the weighted combine of the pairs (ct(s), w) and (r, ct(d)).

    For a given g, ct(w) = <ct(s), G> and ct(r) = ct(d) * G: the same operation again.
    """
    (g, *payload), routing = split_routing(operands)
    rows, weights = payload[:num_leaves], payload[num_leaves:]
    ct_scaled, ct_dotted = cotangents[:num_scalars], cotangents[num_scalars:]
    if ad.is_undefined_primal(g):
        pairs = [(ct, w) for ct, w in zip(ct_scaled, weights, strict=True) if not _is_zero(ct)]
        pairs += [(r, ct) for r, ct in zip(rows, ct_dotted, strict=True) if not _is_zero(ct)]
        ct_g = ad.Zero(g.aval)
        if pairs:
            paired = [r for r, _ in pairs] + [w for _, w in pairs]
            (ct_g,) = bind_exchange(
                weighted_combine_p,
                paired,
                routing,
                num_leaves=len(pairs),
                num_scalars=0,
                **params,
            )
        return [ct_g] + [None] * (len(payload) + len(routing))

    partners = [*ct_dotted, *ct_scaled]
    wanted = [ad.is_undefined_primal(x) for x in payload]
    out: list[Any] = [
        ad.Zero(x.aval) if want else None for want, x in zip(wanted, payload, strict=True)
    ]
    keep = [want and not _is_zero(ct) for want, ct in zip(wanted, partners, strict=True)]
    if any(keep):
        scale_by = _select(keep[:num_leaves], ct_dotted)
        dot_with = _select(keep[num_leaves:], ct_scaled)
        moved = bind_exchange(
            weighted_dispatch_p,
            [g, *dot_with, *scale_by],
            routing,
            num_leaves=len(dot_with),
            num_scalars=len(scale_by),
            num_weight_axes=num_weight_axes,
            **params,
        )
        for i, ct in zip(_select(keep, range(len(keep))), moved, strict=True):
            out[i] = ct.astype(payload[i].aval.dtype)
    return [None, *out] + [None] * len(routing)


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
    encoding = params.get("encoding")
    numbers = params["num_leaves"], params["num_scalars"]
    layouts = operand_layouts(primitive, *numbers, encoding)
    results = result_layouts(primitive, *numbers, encoding)

    if _is_own_axis(axis_data, group, emulated):
        args = [_move_or_broadcast(x, d, 0, size) for x, d in zip(args, dims, strict=True)]
        payload, routing = split_routing(args)
        return bind(payload=payload, routing=routing, emulated=True), [0] * len(results)

    lead = int(emulated)
    payload, routing = split_routing(args)
    payload_dims, routing_dims = split_routing(dims)

    # Global scales of each element's own need tokens of its own: as with a routing of its own.
    own_scales = encoding is not None and encoding.has_token_scales and payload_dims[-1] is not None
    if all(dim is None for dim in routing_dims) and not own_scales:
        if primitive is weighted_dispatch_p:
            if all(dim is None for dim in dims):
                out = bind(payload=payload, routing=routing, emulated=emulated)
                return out, [None] * len(out)
            return _batch_apart(axis_data, args, dims, group=group, emulated=emulated, **params)
        batched = [dim is not None for dim in payload_dims]
        # Rows and weights of all pairs must agree, and the halves of what is in flight. Where the
        # batch is spread over a mesh axis (spmd_axis_name), an unbatched result would be typed as
        # varying over it, against its use.
        if primitive in WEIGHTED_COMBINES or axis_data.spmd_name is not None:
            batched = [any(batched)] * len(payload)
        elif primitive in (dispatch_done_p, combine_done_p):
            half = len(batched) // 2
            batched = [h or r for h, r in zip(batched[:half], batched[half:], strict=True)] * 2
        payload = [
            _move_or_broadcast(x, dim, lead + len(layout), size) if is_batched else x
            for x, dim, layout, is_batched in zip(
                payload, payload_dims, layouts, batched, strict=True
            )
        ]
        out = bind(payload=payload, routing=routing, emulated=emulated)
        sources = result_sources(primitive, *numbers, encoding)
        return out, [
            lead + len(layout) if batched[source] else None
            for layout, source in zip(results, sources, strict=True)
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


def _batch_apart(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    """By one routing for the whole batch, as a wider dispatch and a batch of what stands around it:
    no kernel weighs rows of several elements, of which g may not be batched."""
    out = jax.vmap(
        partial(_dispatch_and_weigh, **params),
        in_axes=tuple(dims),
        axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name,
    )(*args)
    return out, [0] * len(out)


def _routed_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    """Over the group's own axis: the same primitive, emulated. A batch is routed and dispatched
    apart, by the rules of ``route_p`` and ``dispatch_p``."""
    (ids, *payload), (ids_dim, *payload_dims) = args, dims
    if _is_own_axis(axis_data, params["group"], params["emulated"]):
        size = axis_data.size
        args = [_move_or_broadcast(x, dim, 0, size) for x, dim in zip(args, dims, strict=True)]
        out = routed_dispatch_p.bind(*args, **dict(params, emulated=True))
        return out, [0] * len(out)
    if all(dim is None for dim in dims):
        out = routed_dispatch_p.bind(*args, **params)
        return out, [None] * len(out)
    route_params, dispatch_params = _split_params(params)
    plan, plan_dims = _route_batch(axis_data, [ids], [ids_dim], **route_params)
    plan = RoutePlan(*compat.checkpoint_name(plan, ROUTING_CHECKPOINT_NAME))
    moved, moved_dims = _exchange_batch(
        dispatch_p,
        axis_data,
        [*payload, *plan.arrays],
        [*payload_dims, *RoutePlan(*plan_dims).arrays],
        **dispatch_params,
    )
    return [*plan, *moved], [*plan_dims, *moved_dims]


# Dead code


def _linear_dce(used_outputs: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """A dispatch or combine without a used result goes; of the others the unused leaves go."""
    if not any(used_outputs):
        return [False] * len(eqn.invars), None
    if all(used_outputs):
        return [True] * len(eqn.invars), eqn
    payload, routing = split_routing(eqn.invars)
    used, kept = _used_payload(used_outputs, eqn.params)
    eqn = eqn.replace(
        invars=[*_select(used, payload), *routing],
        outvars=_select(kept, eqn.outvars),
        params=_keep_leaves(used, eqn.params),
    )
    return [*used, *(True for _ in routing)], eqn


def _used_payload(
    used_outputs: Sequence[bool], params: dict[str, Any]
) -> tuple[list[bool], list[bool]]:
    """Which operands of the payload of a dispatch or combine are used, and the results that stay:
    all those of a used operand."""
    num_leaves, num_scalars = params["num_leaves"], params["num_scalars"]
    encoding = params.get("encoding")
    sources = result_sources(dispatch_p, num_leaves, num_scalars, encoding)
    used = [False] * (num_leaves + num_scalars)
    for source, is_used in zip(sources, used_outputs, strict=True):
        used[source] = used[source] or is_used
    kept = [used[source] for source in sources]
    if encoding is not None and encoding.has_token_scales:
        used.append(any(used[:num_leaves]))
    return used, kept


def _weighted_dispatch_dce(used_outputs: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Rows and weights of unused results go; without any used result all goes."""
    if not any(used_outputs):
        return [False] * len(eqn.invars), None
    num_scalars = eqn.params["num_scalars"]
    of_scalars, of_leaves = used_outputs[:num_scalars], used_outputs[num_scalars:]
    _, routing = split_routing(eqn.invars)
    used_inputs = [True, *of_leaves, *of_scalars, *(True for _ in routing)]
    return used_inputs, eqn.replace(
        invars=_select(used_inputs, eqn.invars),
        outvars=_select(used_outputs, eqn.outvars),
        params=dict(eqn.params, num_leaves=sum(of_leaves), num_scalars=sum(of_scalars)),
    )


def _routed_dce(used_outputs: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Unused leaves go; without any used leaf the route alone is left."""
    plan_used, moved_used = _split_plan(used_outputs)
    if not any(used_outputs):
        return [False] * len(eqn.invars), None
    used, kept = _used_payload(moved_used, eqn.params)
    used_inputs = [True, *used]
    if not any(used):
        return used_inputs, _route_of(eqn)
    plan, moved = _split_plan(eqn.outvars)
    return used_inputs, eqn.replace(
        invars=_select(used_inputs, eqn.invars),
        outvars=[*plan, *_select(kept, moved)],
        params=_keep_leaves(used, eqn.params),
    )


# Rematerialization: a routed dispatch is taken apart into what a policy saves and what it does not.


def _route_of(eqn: Any) -> Any:
    """The equation of the ``route_p`` in that of a ``routed_dispatch_p``."""
    plan, _ = _split_plan(eqn.outvars)
    params, _ = _split_params(eqn.params)
    return eqn.replace(primitive=route_p, invars=eqn.invars[:1], outvars=[*plan], params=params)


def _dispatch_of(eqn: Any) -> Any:
    """The equation of the ``dispatch_p`` in that of a ``routed_dispatch_p``."""
    plan, moved = _split_plan(eqn.outvars)
    _, params = _split_params(eqn.params)
    invars = [*eqn.invars[1:], *plan.arrays]
    return eqn.replace(primitive=dispatch_p, invars=invars, outvars=moved, params=params)


def _routed_remat(
    saves: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple:
    """Policies see a route, whose results have their checkpoint name, and a dispatch.

    Where the routing is saved and the rows are not, the backward pass dispatches by the saved one.
    """
    eqn = compat.with_variables(eqn)
    route, dispatch = _route_of(eqn), _dispatch_of(eqn)
    plan, moved = _split_plan(eqn.outvars)
    is_routed, is_moved = not unknown[0], not any(unknown)

    def saves_results(eqn: Any) -> bool:
        return saves(eqn.primitive, *(x.aval for x in eqn.invars), **eqn.params)

    has_plan = is_routed and (
        saves_results(eqn)
        or saves_results(route)
        or all(saves(compat.name_p, x.aval, name=ROUTING_CHECKPOINT_NAME) for x in plan)
    )
    has_moved = is_moved and (saves_results(eqn) or saves_results(dispatch))

    forward = eqn if is_moved else route if is_routed else None
    if has_plan:
        backward = None if has_moved else dispatch
    else:
        backward = route if has_moved else eqn
    read = [] if backward is None else backward.invars
    needs = [
        x
        for x, inst in zip(eqn.invars, instantiated, strict=True)
        if not inst and any(x is each for each in read)
    ]
    if backward is dispatch:
        needs += plan.arrays
    unknown_out = [not is_routed] * len(plan) + [not is_moved] * len(moved)
    of_backward = [not has_plan] * len(plan) + [not has_moved] * len(moved)
    return forward, backward, unknown_out, of_backward, needs


# Registration

for _primitive, _reference, _kernels in (
    (route_p, reference.route, lowering.route_cuda),
    (dispatch_p, reference.dispatch, partial(lowering.dispatch_cuda, _encode_and_dispatch)),
    (combine_p, reference.combine, lowering.combine_cuda),
    (weighted_combine_p, reference.weighted_combine, lowering.weighted_combine_cuda),
    (
        weighted_dispatch_p,
        reference.weighted_dispatch,
        partial(lowering.weighted_dispatch_cuda, _dispatch_and_weigh),
    ),
    (
        routed_dispatch_p,
        reference.routed_dispatch,
        partial(lowering.routed_dispatch_cuda, _route_and_dispatch),
    ),
    (dispatch_start_p, reference.dispatch_start, lowering.dispatch_start_cuda),
    (dispatch_done_p, reference.dispatch_done, lowering.dispatch_done_cuda),
    (combine_start_p, reference.combine_start, lowering.combine_start_cuda),
    (combine_done_p, reference.combine_done, lowering.combine_done_cuda),
    (
        weighted_combine_start_p,
        reference.weighted_combine_start,
        lowering.weighted_combine_start_cuda,
    ),
    (
        weighted_combine_done_p,
        reference.weighted_combine_done,
        lowering.weighted_combine_done_cuda,
    ),
):
    _primitive.multiple_results = True
    _primitive.def_impl(partial(compat.apply_primitive, _primitive))
    compat.register_lowering_per_call(
        _primitive, cuda=_kernels, others=lowering.on_other_platforms(_reference)
    )

on_own_devices_p.def_impl(partial(compat.apply_primitive, on_own_devices_p))
on_own_devices_p.def_abstract_eval(lambda ids: ids)
mlir.register_lowering(on_own_devices_p, lambda ctx, ids: [ids])
ad.primitive_jvps[on_own_devices_p] = lambda primals, _: (
    on_own_devices_p.bind(*primals),
    _zero_tangent(primals[0]),
)
batching.primitive_batchers[on_own_devices_p] = lambda args, dims: (
    on_own_devices_p.bind(*args),
    dims[0],
)
compat.lower_for_devices(on_own_devices_p)

route_p.def_abstract_eval(_route_abstract)
ad.primitive_jvps[route_p] = _route_jvp
batching.fancy_primitive_batchers[route_p] = _route_batch

routed_dispatch_p.def_abstract_eval(_routed_abstract)
ad.primitive_jvps[routed_dispatch_p] = _routed_jvp
batching.fancy_primitive_batchers[routed_dispatch_p] = _routed_batch
compat.register_dce_rule(routed_dispatch_p, _routed_dce)
compat.register_remat_rule(routed_dispatch_p, _routed_remat)
# Known ids are routed at once, so that what is linear in the payload is a dispatch alone. It, and
# what follows by the routing, can then be transposed; ``routed_dispatch_p`` itself never is.
compat.register_partial_eval_rule(routed_dispatch_p, _with_known_ids)

for _primitive in (dispatch_p, combine_p, weighted_combine_p, weighted_dispatch_p, *HALVES):
    _primitive.def_abstract_eval(partial(_exchange_abstract, _primitive))
    batching.fancy_primitive_batchers[_primitive] = partial(_exchange_batch, _primitive)

for _primitive in (dispatch_p, combine_p):
    ad.primitive_jvps[_primitive] = partial(_linear_jvp, _primitive)
    ad.primitive_transposes[_primitive] = partial(_linear_transpose, _primitive)
    compat.register_dce_rule(_primitive, _linear_dce)
    # Known leaves move at once: their product with an unknown one is then linear in the latter.
    compat.register_partial_eval_rule(_primitive, partial(_known_apart, _primitive))

ad.primitive_jvps[weighted_combine_p] = partial(weighted_jvp, weighted_combine_p)
ad.primitive_transposes[weighted_combine_p] = _weighted_transpose

ad.primitive_jvps[weighted_dispatch_p] = _weighted_dispatch_jvp
ad.primitive_transposes[weighted_dispatch_p] = _weighted_dispatch_transpose
compat.register_dce_rule(weighted_dispatch_p, _weighted_dispatch_dce)
