"""Define the primitives of dispatch and combine.

With ``has_token_scales``, the last payload operand of a dispatch is the tokens' global scales. A
dispatch with a token format returns decoded rows of all leaves (with ``decode``), then values and
scales of each leaf (without ``decode``, or with ``keeps_encoded``), then choice arrays.

With ``tail="unspecified"``, a dispatch and its jvp return any values in rows after the last group.
The transpose of a dispatch is a combine, which does not read these rows. The transpose of a combine
is a dispatch with the ``tail`` option of the combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.typing import DTypeLike

from .. import compat
from ..ad import aval_of, carries_tangent, cotangents_of, is_zero, select, zero_tangent
from ..formats.formats import NvFp4, TokenFormat
from ..group import native
from ..plan.plan import RoutingArrays
from . import reference, rules
from .lowering import CallPlacement, KernelCall
from .record import CHOICE, ROW, TOKEN, Layout, Layouts, Options, Record, split_routing


def _dispatch_layouts(
    *, num_leaves: int, num_choice_arrays: int, options: Options, **_: object
) -> Layouts:
    operands: list[Layout] = [TOKEN] * num_leaves + [CHOICE] * num_choice_arrays
    operands += [TOKEN] * options.has_token_scales
    # Scales of tokens are not in ``sources``, because ``vmap`` need not batch them with the leaves.
    has_floats = options.token_format is None or options.decode
    sources = [(leaf,) for leaf in range(num_leaves * has_floats)]
    sources += [(i // 2,) for i in range(2 * num_leaves * options.has_encoded)]
    sources += [(num_leaves + i,) for i in range(num_choice_arrays)]
    return Layouts(operands, [ROW] * len(sources), sources)


def _combine_layouts(
    *, num_leaves: int, num_choice_arrays: int, options: Options, **_: object
) -> Layouts:
    results: list[Layout] = [TOKEN] * num_leaves + [CHOICE] * num_choice_arrays
    num_moved, num_addends = len(results), options.num_addends
    sources = [(i, num_moved + i) if i < num_addends else (i,) for i in range(num_moved)]
    return Layouts([ROW] * num_moved + [TOKEN] * num_addends, results, sources)


def _dispatch_types(
    results: list[Any], *, num_leaves: int, options: Options, **_: object
) -> list[Any]:
    """Replace quantized rows in ``results`` by values and scales."""
    fmt = options.token_format
    if fmt is None or not options.has_encoded:
        return results
    first = num_leaves * options.decode
    end = first + 2 * num_leaves
    parts = (fmt.values_per_item, fmt.value_dtype), (fmt.group_size, fmt.scale_dtype)

    def part(row: Any, size: int, dtype: DTypeLike) -> Any:
        *lead, hidden = row.shape
        shape = (*lead, hidden // size)
        return compat.result_aval(row, shape, jnp.dtype(dtype), row.sharding.spec)

    encoded = [part(row, *of_part) for row in results[first:end:2] for of_part in parts]
    return [*results[:first], *encoded, *results[end:]]


def global_scale(fmt: TokenFormat | None) -> float:
    return float(fmt.global_scale) if isinstance(fmt, NvFp4) else 1.0


def dispatch_attributes(params: dict[str, Any]) -> dict[str, Any]:
    options: Options = params["options"]
    attributes = dict(
        num_choice_arrays=params["num_choice_arrays"],
        leaves_tail=options.tail == "unspecified",
    )
    if options.token_format is None:
        return attributes
    return dict(
        attributes,
        num_leaves=params["num_leaves"],
        format=type(options.token_format).__name__,
        decode=options.decode,
        keeps_encoded=options.keeps_encoded,
        has_token_scales=options.has_token_scales,
        global_scale=global_scale(options.token_format),
    )


def dispatch_calls(
    call_placement: CallPlacement, payload: Sequence[jax.Array], params: dict[str, Any]
) -> list[KernelCall]:
    options: Options = params["options"]
    arrays, attributes = range(len(payload)), dispatch_attributes(params)
    if options.token_format is None:
        return [KernelCall("moe_a2a_dispatch", arrays, arrays, attributes)]
    num_results = options.results_per_leaf * params["num_leaves"] + params["num_choice_arrays"]
    num_sms = call_placement.group.sms_of("dispatch") or native.tuning("FORMAT_NUM_SMS")
    return [KernelCall("moe_a2a_format_dispatch", arrays, range(num_results), attributes, num_sms)]


def combine_calls(
    call_placement: CallPlacement, payload: Sequence[jax.Array], params: dict[str, Any]
) -> list[KernelCall]:
    """Return one kernel call for the leaves of each dtype. The first also moves choice arrays."""
    num_leaves, wire = params["num_leaves"], params["options"].wire_dtype
    leaves, num_moved = payload[:num_leaves], num_leaves + params["num_choice_arrays"]
    has_addends = params["options"].num_addends > 0
    calls = []
    choice_arrays_left = list(range(num_leaves, num_moved))
    for dtype in dict.fromkeys(aval.dtype for aval in leaves) or [None]:  # None without leaves
        own = [i for i in range(num_leaves) if leaves[i].dtype == dtype]
        addends = [num_moved + i for i in own if has_addends]
        results = own + choice_arrays_left
        counts = dict(
            num_choice_arrays=len(choice_arrays_left), num_pairs=0, num_addends=len(addends)
        )
        calls.append(combine_call(call_placement, results + addends, results, dtype, wire, counts))
        choice_arrays_left = []
    return calls


def combine_call(
    call_placement: CallPlacement,
    arrays: Sequence[int],
    results: Sequence[int],
    dtype: DTypeLike | None,
    wire: Any,
    counts: dict[str, int],
) -> KernelCall:
    """Return a call that sums rows of ``dtype``, or only moves choice arrays if ``dtype`` is None.
    ``wire`` is the dtype or the token format of travelling partial sums. None means ``dtype``."""
    fmt = wire if isinstance(wire, TokenFormat) else None
    num_sms, name = None, ""
    if fmt and call_placement.group.size > 1:
        num_sms = call_placement.group.sms_of("combine") or native.tuning("FORMAT_NUM_SMS")
    if dtype is not None:
        name = type(fmt).__name__ if fmt else native.type_name(dtype if wire is None else wire)
    attributes = dict(counts, wire=name, global_scale=global_scale(fmt))
    return KernelCall("moe_a2a_combine", arrays, results, attributes, num_sms)


def bind_dispatch(*operands: jax.Array, **params: Any) -> list[Any]:
    return DISPATCH.bind(*split_routing(operands), **params)


_encode_around = partial(reference.encode_and_decode, bind_dispatch)


DISPATCH = Record(
    "dispatch",
    is_outward=True,
    reference=reference.dispatch,
    layouts=_dispatch_layouts,
    kernel_calls=dispatch_calls,
    unfused=lambda options, **_: _encode_around if options.token_format is not None else None,
    result_types=_dispatch_types,
)
COMBINE = Record(
    "combine",
    is_outward=False,
    reference=reference.combine,
    layouts=_combine_layouts,
    kernel_calls=combine_calls,
)
DISPATCH.transpose, COMBINE.transpose = COMBINE, DISPATCH


def keep_arrays(keep: Sequence[bool], params: dict[str, Any]) -> dict[str, Any]:
    """Return ``params`` for an exchange of only the arrays for which ``keep`` is True."""
    first = params["num_leaves"]  # index of the first choice array
    of_leaves, of_choices = keep[:first], keep[first : first + params["num_choice_arrays"]]
    options = params["options"] if any(of_leaves) else params["options"].unencoded
    if options.num_addends:
        options = options._replace(num_addends=sum(of_leaves))
    return dict(
        params, num_leaves=sum(of_leaves), num_choice_arrays=sum(of_choices), options=options
    )


# Derivatives of an exchange y = P x + a, which is linear in the payload x and in the addend a:
#   jvp: dy = P dx + da, rounded once. Only arrays with a tangent move.
#   transpose: ct(x) = P^T ct(y), ct(a) = ct(y). Dispatch and combine are transposes.
# With a format, decoded rows have the derivative of P (straight-through). Quantized rows have none.


def _jvp(
    exchange: Record, primals: compat.Primals, tangents: compat.Tangents, **params: Any
) -> tuple[list[Any], list[Any]]:
    payload, routing = split_routing(primals)
    out = exchange.bind(payload, routing, **params)
    tangents = tangents[: len(payload)]
    return out, moved_tangents(exchange, payload, tangents, out, routing, **params)


def moved_tangents(
    exchange: Record,
    payload: Sequence[jax.Array],
    tangents: compat.Tangents,
    out: Sequence[Any],
    routing: RoutingArrays,
    **params: Any,
) -> list[Any]:
    """Return the tangents of the results ``out`` of a dispatch or combine."""
    sources = exchange.layouts(**params).sources
    options = params["options"]
    first = params["num_leaves"] * options.decode
    encoded = range(first, first + 2 * params["num_leaves"] * options.has_encoded)
    moves = [options.token_format is None or options.decode] * params["num_leaves"]
    moves += [True] * params["num_choice_arrays"]
    # ``moves`` has no entries for addends and the tokens' scales, because these do not move.
    keep = [
        can_move and carries_tangent(jax.typeof(x).dtype) and not is_zero(dx)
        for can_move, x, dx in zip(moves, payload, tangents, strict=False)
    ]
    d_addends = tangents[len(keep) : len(keep) + options.num_addends]
    added = added_tangents(select(keep[: len(d_addends)], d_addends))
    params["options"] = options.unencoded._replace(num_addends=len(added))
    moved = {}
    if any(keep):
        payload = [*select(keep, tangents[: len(keep)]), *added]
        results = exchange.bind(payload, routing, **keep_arrays(keep, params))
        moved = dict(zip(select(keep, range(len(keep))), results, strict=True))
    others = [*d_addends, *map(zero_tangent, out[len(d_addends) :])]
    return [
        other if i in encoded else moved.get(source, other)
        for i, ((source, *_), other) in enumerate(zip(sources, others, strict=True))
    ]


def added_tangents(d_addends: compat.Tangents) -> list[Any]:
    """Return the tangents of addends as arrays, or [] if all of these tangents are zero."""
    return [] if all(map(is_zero, d_addends)) else list(map(ad.instantiate_zeros, d_addends))


def cotangents_of_addends(addends: Sequence[Any], cotangents: compat.Tangents) -> list[Any]:
    pairs = zip(addends, cotangents, strict=False)  # choice arrays have no addends
    return [ct if ad.is_undefined_primal(x) else None for x, ct in pairs]


def of_transpose(exchange: Record, options: Options) -> Options:
    tail = "zero" if exchange.is_outward else options.tail
    return options.unencoded._replace(tail=tail, num_addends=0)


def _transpose(
    exchange: Record,
    cotangents: compat.Tangents,
    *operands: Any,
    options: Options,
    **params: Any,
) -> list[Any]:
    params["options"] = of_transpose(exchange, options)
    payload, routing = split_routing(operands)
    if options.token_format is not None:
        num_leaves, num_choice_arrays = params["num_leaves"], params["num_choice_arrays"]
        zeros = [ad.Zero(aval_of(x)) for x in payload]
        leaves = cotangents[:num_leaves] if options.decode else zeros[:num_leaves]
        choice_arrays = cotangents[len(cotangents) - num_choice_arrays :]
        cotangents = [*leaves, *choice_arrays, *zeros[num_leaves + num_choice_arrays :]]
    first = len(payload) - options.num_addends
    payload, addends = payload[:first], payload[first:]
    keep = [
        ad.is_undefined_primal(x) and not is_zero(ct)
        for x, ct in zip(payload, cotangents, strict=True)
    ]
    moved: list[Any] = []
    if any(keep):
        params = keep_arrays(keep, params)
        moved = exchange.transpose.bind(select(keep, cotangents), routing, **params)
    of_addends = cotangents_of_addends(addends, cotangents)
    return cotangents_of(payload, keep, moved) + of_addends + [None] * len(routing)


for _exchange in (DISPATCH, COMBINE):
    rules.register_exchange(_exchange)
    ad.primitive_jvps[_exchange.primitive] = partial(_jvp, _exchange)
    ad.primitive_transposes[_exchange.primitive] = partial(_transpose, _exchange)
