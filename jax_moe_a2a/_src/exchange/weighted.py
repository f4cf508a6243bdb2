"""Define the weighted combine and its transpose, the weighted dispatch.

The payload of a weighted combine has arrays of rows, equally many arrays of weights, and possibly
an addend. The payload of a weighted dispatch has the array to dispatch, then rows (the leaves),
then weights (the choice arrays). Weights have ``num_weight_axes`` axes after the axis of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.interpreters import ad, batching

from .. import compat
from ..ad import (
    accumulation_dtype,
    aval_of,
    cotangents_of,
    is_zero,
    jvp_of_moving,
    select,
    zero_tangent,
)
from ..group import native
from . import reference, rules
from .dispatch_combine import added_tangents, bind_dispatch, combine_call, cotangents_of_addends
from .lowering import CallPlacement, KernelCall, Refused
from .record import ROW, TOKEN, Layouts, Options, Record, split_routing


def _combine_layouts(*, num_leaves: int, options: Options, **_: object) -> Layouts:
    operands = [ROW] * (2 * num_leaves) + [TOKEN] * options.num_addends
    return Layouts(operands, [TOKEN], [tuple(range(len(operands)))])


def _dispatch_layouts(*, num_leaves: int, num_choice_arrays: int, **_: object) -> Layouts:
    num_others = num_leaves + num_choice_arrays
    return Layouts([TOKEN] + [ROW] * num_others, [ROW] * num_others, [(0,)] * num_others)


def _dispatch_types(
    results: list[Any],
    *,
    lead: tuple[int, ...],
    num_leaves: int,
    num_choice_arrays: int,
    num_weight_axes: int,
    **_: object,
) -> list[Any]:
    if not results:
        return results
    moved = results[0]
    num_axes = len(lead) + 1 + num_weight_axes
    shape, tail = moved.shape[:num_axes], moved.sharding.spec[len(lead) + 1 : num_axes]
    dotted = compat.result_aval(moved, shape, accumulation_dtype(moved.dtype), tail)
    return [moved] * num_choice_arrays + [dotted] * num_leaves


def _combine_calls(
    call_placement: CallPlacement, payload: Sequence[jax.Array], params: dict[str, Any]
) -> list[KernelCall]:
    num_pairs = params["num_leaves"]
    options = params["options"]
    counts = dict(num_choice_arrays=0, num_pairs=num_pairs, num_addends=options.num_addends)
    arrays, dtype = range(len(payload)), payload[0].dtype
    return [combine_call(call_placement, arrays, [0], dtype, options.wire_dtype, counts)]


def _dispatch_calls(
    call_placement: CallPlacement, payload: Sequence[jax.Array], params: dict[str, Any]
) -> list[KernelCall]:
    if call_placement.group.size == 1:
        raise Refused("XLA's fusion is faster on a single rank")  # docs/history/speed.md
    num_rows, num_weights = params["num_leaves"], params["num_choice_arrays"]
    arrays, results = range(len(payload)), range(num_rows + num_weights)
    attributes = dict(num_rows=num_rows, num_weights=num_weights)
    num_sms = call_placement.group.sms_of("dispatch") or native.tuning("WEIGHTED_NUM_SMS")
    return [KernelCall("moe_a2a_weighted_dispatch", arrays, results, attributes, num_sms)]


_dispatch_and_weigh = partial(reference.weighted_dispatch, bind_dispatch)
_whole_reference = partial(reference.weighted_dispatch, reference.dispatch)


WEIGHTED_COMBINE = Record(
    "weighted_combine",
    is_outward=False,
    reference=reference.weighted_combine,
    layouts=_combine_layouts,
    kernel_calls=_combine_calls,
)
WEIGHTED_DISPATCH = Record(
    "weighted_dispatch",
    is_outward=True,
    reference=_whole_reference,
    layouts=_dispatch_layouts,
    kernel_calls=_dispatch_calls,
    # On a single rank, XLA fuses all of the reference, which is faster (docs/history/speed.md).
    unfused=lambda group, **_: _whole_reference if group.size == 1 else _dispatch_and_weigh,
    result_types=_dispatch_types,
)


# Derivatives of the weighted combine y = C(sum_i w_i r_i), with C the combine and D the dispatch:
#   jvp: dy = C(sum_i (w_i dr_i + dw_i r_i)), the same primitive with other pairs.
#   transpose: a weighted dispatch. With G = D(ct), ct(r_i) = w_i G and ct(w_i) = <r_i, G>.
# An addend has the same derivatives as in a combine.


def _combine_jvp(
    primals: compat.Primals,
    tangents: compat.Tangents,
    *,
    num_leaves: int,
    options: Options,
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    payload, routing = split_routing(primals)
    out = WEIGHTED_COMBINE.bind(payload, routing, num_leaves=num_leaves, options=options, **params)
    end = 2 * num_leaves  # number of arrays of rows and weights
    rows, weights = payload[:num_leaves], payload[num_leaves:end]
    d_rows, d_weights = tangents[:num_leaves], tangents[num_leaves:end]
    d_addends = tangents[end : len(payload)]
    pairs = [(dr, w) for dr, w in zip(d_rows, weights, strict=True) if not is_zero(dr)]
    pairs += [(r, dw) for r, dw in zip(rows, d_weights, strict=True) if not is_zero(dw)]
    if not pairs:
        return out, [*d_addends] or [zero_tangent(x) for x in out]
    added = added_tangents(d_addends)
    payload = [*(r for r, _ in pairs), *(w for _, w in pairs), *added]
    params.update(num_leaves=len(pairs), options=options._replace(num_addends=len(added)))
    return out, WEIGHTED_COMBINE.bind(payload, routing, **params)


def _combine_transpose(
    cotangents: compat.Tangents, *operands: Any, num_leaves: int, options: Options, **params: Any
) -> list[Any]:
    payload, routing = split_routing(operands)
    payload, addends = payload[: 2 * num_leaves], payload[2 * num_leaves :]
    (cotangent,) = cotangents
    wanted = [ad.is_undefined_primal(x) and not is_zero(cotangent) for x in payload]
    found: list[Any] = []
    if any(wanted):
        rows, weights = payload[:num_leaves], payload[num_leaves:]
        scale_by, dot_with = select(wanted[:num_leaves], weights), select(wanted[num_leaves:], rows)
        num_axes = aval_of(weights[0]).ndim - 1 - int(params["emulated"])
        params.update(num_weight_axes=num_axes, options=options._replace(num_addends=0))
        params.update(num_leaves=len(dot_with), num_choice_arrays=len(scale_by))
        found = WEIGHTED_DISPATCH.bind([cotangent, *dot_with, *scale_by], routing, **params)
        linear = select(wanted, payload)
        found = [ct.astype(x.aval.dtype) for ct, x in zip(found, linear, strict=True)]
    of_addends = cotangents_of_addends(addends, cotangents)
    return cotangents_of(payload, wanted, found) + of_addends + [None] * len(routing)


# Derivatives of the weighted dispatch s_j = w_j G, d_i = <r_i, G>, with G = D(g):
#   jvp: the jvp of the unfused form, which dispatches g and dg once each. Tangents never use the
#   fused form, so it needs no transpose.


def _dispatch_jvp(
    primals: compat.Primals, tangents: compat.Tangents, **params: Any
) -> tuple[list[Any], list[Any]]:
    payload, routing = split_routing(tangents)
    moving = [not is_zero(dx) for dx in payload] + [False] * len(routing)
    fn = partial(_dispatch_and_weigh, **params)
    out, tangents_out = jvp_of_moving(fn, moving, primals, tangents)
    # Each result depends on the first operand and one array. Results of choice arrays come first.
    of_leaves = moving[1 : 1 + params["num_leaves"]]
    of_choice_arrays = moving[1 + params["num_leaves"] : len(out) + 1]
    return out, [
        dx if moving[0] or m else zero_tangent(x)
        for x, dx, m in zip(out, tangents_out, of_choice_arrays + of_leaves, strict=True)
    ]


def _dispatch_batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[Any]]:
    """Batch a weighted dispatch. If the routing is not batched, batch the unfused form, because no
    kernel supports batched rows with an unbatched ``g``."""
    _, routing_dims = split_routing(dims)
    if (
        all(dim is None for dim in dims)
        or any(dim is not None for dim in routing_dims)
        or rules.is_own_axis(axis_data, params["group"], params["emulated"])
    ):
        return rules.batch(WEIGHTED_DISPATCH, axis_data, args, dims, **params)
    out = jax.vmap(
        partial(_dispatch_and_weigh, **params),
        in_axes=tuple(dims),
        axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name,
    )(*args)
    return out, [0] * len(out)


rules.register_exchange(WEIGHTED_COMBINE)
ad.primitive_jvps[WEIGHTED_COMBINE.primitive] = _combine_jvp
ad.primitive_transposes[WEIGHTED_COMBINE.primitive] = _combine_transpose

rules.register_exchange(WEIGHTED_DISPATCH)
batching.fancy_primitive_batchers[WEIGHTED_DISPATCH.primitive] = _dispatch_batch
ad.primitive_jvps[WEIGHTED_DISPATCH.primitive] = _dispatch_jvp
