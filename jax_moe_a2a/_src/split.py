"""Split phases: derivatives of the halves of an exchange, and what ties other work between them.

Each half is linear (a weighted one: bilinear) and transposes to a half of the twin: a start to a
done, a done to a start. So the backward pass is split as well, with whatever was computed between.
Two halves must always move the same arrays: where one takes part in a derivative, all of its arrays
that have tangents do, zero or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from . import compat, lowering, reference
from .plan import RoutingArrays
from .primitives import (
    TRANSPOSE,
    bind_exchange,
    carries_tangent,
    combine_done_p,
    combine_start_p,
    dispatch_done_p,
    dispatch_start_p,
    weighted_combine_done_p,
    weighted_combine_start_p,
    weighted_jvp,
)
from .reference import split_routing

tie_p = compat.Primitive("moe_a2a_tie")

STARTS = (dispatch_start_p, combine_start_p, weighted_combine_start_p)


def tie(*arrays: Any) -> list[Any]:
    """The same arrays, none of which is there before all operands are."""
    return tie_p.bind(*arrays)


# Halves of dispatch and combine


def _half_jvp(
    primitive: Any, primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple:
    """The same half of the tangents: of every array that has some, zero or not."""
    payload, routing = split_routing(primals)
    out = bind_exchange(primitive, payload, routing, **params)
    tangents = [
        ad.instantiate_zeros(dx)
        for x, dx in zip(payload, tangents, strict=False)
        if carries_tangent(jax.typeof(x).dtype)
    ]
    moved = iter(_bind_kept(primitive, tangents, payload, routing, params))
    return out, [
        next(moved)
        if carries_tangent(jax.typeof(x).dtype)
        else ad.Zero(jax.typeof(x).to_tangent_aval())
        for x in out
    ]


def _half_transpose(
    primitive: Any, cotangents: Sequence[Any], *operands: Any, **params: Any
) -> list[Any]:
    """A start transposes to the twin's done and the other way round."""
    params.pop("tail", None)  # as of a whole exchange
    payload, routing = split_routing(operands)
    cotangents = [
        ad.instantiate_zeros(ct) for ct in cotangents if carries_tangent(_aval_of(ct).dtype)
    ]
    moved = iter(_bind_kept(TRANSPOSE[primitive], cotangents, payload, routing, params))
    out: list[Any] = []
    for x in payload:
        ct = next(moved) if carries_tangent(_aval_of(x).dtype) else ad.Zero(_aval_of(x))
        out.append(ct if ad.is_undefined_primal(x) else None)
    return out + [None] * len(routing)


def _aval_of(x: Any) -> Any:
    """Of an array, an undefined primal, or a zero, whose integers are float0 by then."""
    return x.aval if ad.is_undefined_primal(x) or type(x) is ad.Zero else jax.typeof(x)


def _bind_kept(
    primitive: Any,
    operands: Sequence[Any],
    payload: Sequence[Any],
    routing: RoutingArrays,
    params: dict[str, Any],
) -> list[Any]:
    """Binds a half to those operands that stand for arrays of ``payload`` with tangents."""
    if not operands:
        return []
    num_leaves, num_scalars = params["num_leaves"], params["num_scalars"]
    keep = [carries_tangent(_aval_of(x).dtype) for x in payload[: num_leaves + num_scalars]]
    kept = dict(num_leaves=sum(keep[:num_leaves]), num_scalars=sum(keep[num_leaves:]))
    return bind_exchange(primitive, operands, routing, **dict(params, **kept))


# Halves of the weighted combine. They transpose together: what the done sends back by a dispatch's
# start comes to the start by its done, as G; then ct(r_i) = w_i * G and ct(w_i) = <r_i, G>. Rows
# and weights are operands of both: what is in flight need not be kept for a backward pass.


def _weighted_done_transpose(
    cotangents: Sequence[Any], *operands: Any, num_leaves: int, **params: Any
) -> list[Any]:
    del num_leaves
    payload, routing = split_routing(operands)
    in_flight: list[Any] = [ad.Zero(_aval_of(x)) for x in payload[:2]]
    if type(cotangents[0]) is not ad.Zero:
        in_flight = bind_exchange(dispatch_start_p, cotangents, routing, num_leaves=1, **params)
    pairs = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in payload[2:]]
    return [*in_flight, *pairs, *(None for _ in routing)]


def _weighted_start_transpose(
    cotangents: Sequence[Any], *operands: Any, num_leaves: int, **params: Any
) -> list[Any]:
    payload, routing = split_routing(operands)
    wanted = [ad.is_undefined_primal(x) for x in payload]
    out: list[Any] = [
        ad.Zero(x.aval) if want else None for want, x in zip(wanted, payload, strict=True)
    ]
    if any(type(ct) is not ad.Zero for ct in cotangents):
        (moved,) = bind_exchange(
            dispatch_done_p,
            [ad.instantiate_zeros(ct) for ct in cotangents],
            routing,
            num_leaves=1,
            **params,
        )
        rows, weights = payload[:num_leaves], payload[num_leaves:]
        products = reference.scale_and_dot(
            moved,
            [r for r, want in zip(rows, wanted[num_leaves:], strict=True) if want],
            [w for w, want in zip(weights, wanted[:num_leaves], strict=True) if want],
            routing,
            num_axes=_aval_of(weights[0]).ndim,
        )
        for i, ct in zip([i for i, want in enumerate(wanted) if want], products, strict=True):
            out[i] = ct.astype(payload[i].aval.dtype)
    return [*out, *(None for _ in routing)]


# The tie. Not ``lax.optimization_barrier`` itself, whose derivatives may make zeros of what has no
# tangent, and so a done without a start; it also lets go of what nobody uses.


def _tie_those_with_tangents(tangents: Sequence[Any]) -> list[Any]:
    is_tied = [
        type(dx) is not ad.Zero and jax.typeof(dx).dtype != jax.dtypes.float0 for dx in tangents
    ]
    tied = iter(tie(*(dx for dx, tied in zip(tangents, is_tied, strict=True) if tied)))
    return [next(tied) if tied_too else dx for dx, tied_too in zip(tangents, is_tied, strict=True)]


def _tie_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple:
    return tie(*primals), _tie_those_with_tangents(tangents)


def _tie_transpose(cotangents: Sequence[Any], *operands: Any) -> list[Any]:
    tied = _tie_those_with_tangents(cotangents)
    return [ct if ad.is_undefined_primal(x) else None for ct, x in zip(tied, operands, strict=True)]


def _tie_batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    return tie(*args), dims


def _tie_dce(used_outputs: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    def used(values: Sequence[Any]) -> list[Any]:
        return [value for value, is_used in zip(values, used_outputs, strict=True) if is_used]

    if not any(used_outputs):
        return [False] * len(eqn.invars), None
    return list(used_outputs), eqn.replace(invars=used(eqn.invars), outvars=used(eqn.outvars))


# Registration

tie_p.multiple_results = True
tie_p.def_impl(partial(compat.apply_primitive, tie_p))
tie_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(tie_p, lowering.barrier)
ad.primitive_jvps[tie_p] = _tie_jvp
ad.primitive_transposes[tie_p] = _tie_transpose
batching.primitive_batchers[tie_p] = _tie_batch
compat.register_dce_rule(tie_p, _tie_dce)

for _primitive in (dispatch_start_p, dispatch_done_p, combine_start_p, combine_done_p):
    ad.primitive_jvps[_primitive] = partial(_half_jvp, _primitive)
    ad.primitive_transposes[_primitive] = partial(_half_transpose, _primitive)

for _primitive in (weighted_combine_start_p, weighted_combine_done_p):
    ad.primitive_jvps[_primitive] = partial(weighted_jvp, _primitive)
ad.primitive_transposes[weighted_combine_start_p] = _weighted_start_transpose
ad.primitive_transposes[weighted_combine_done_p] = _weighted_done_transpose

# Were what is in flight saved for a backward pass, that would be done with it again. A tie holds it
# too.
for _primitive in (*STARTS, tie_p):
    compat.register_remat_rule(_primitive, compat.never_saved)
