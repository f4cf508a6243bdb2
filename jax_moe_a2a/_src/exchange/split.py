"""Define the primitives of split exchanges: start, done, and the tie, which orders other work.

The transpose of a start is the done of the transposed exchange, and the transpose of a done is the
start of that exchange. Therefore the gradient of work between start and done also runs between a
start and a done. Zero tangents also move, because start and done must move the same arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from .. import compat
from ..ad import aval_of, carries_tangent, cotangents_of, is_zero, select, spread, zero_tangent
from ..plan.plan import RoutingArrays
from . import lowering, reference, rules
from .dispatch_combine import COMBINE, DISPATCH, keep_arrays, of_transpose
from .record import Layout, Layouts, Record, split_routing

tie_p = compat.Primitive("moe_a2a_tie")


def tie(*arrays: jax.Array) -> list[Any]:
    """Return ``arrays``. Each returned array depends on all arguments."""
    return tie_p.bind(*arrays)


def add_halves(whole: Record) -> None:
    """Define and register ``whole.start`` and ``whole.done``."""

    def in_flight(layouts: Layouts) -> list[Layout]:
        operands = [layouts.operands[sources[0]] for sources in layouts.sources]
        if whole.is_outward:
            return [*operands, *layouts.results]
        return [*layouts.results, *operands]

    def start_layouts(**params: object) -> Layouts:
        layouts = whole.layouts(**params)
        return Layouts(layouts.operands, in_flight(layouts), [*layouts.sources, *layouts.sources])

    def done_layouts(**params: object) -> Layouts:
        layouts = whole.layouts(**params)
        num_results = len(layouts.results)
        sources = [(i, num_results + i) for i in range(num_results)]
        return Layouts(in_flight(layouts), layouts.results, sources)

    for phase, layouts, compute in (
        ("start", start_layouts, reference.start),
        ("done", done_layouts, reference.done),
    ):
        half = Record(
            f"{whole.name}_{phase}",
            is_outward=whole.is_outward,
            reference=partial(compute, whole),
            layouts=layouts,
            kernel_calls=whole.kernel_calls,
        )
        setattr(whole, phase, half)
        by_kernels = partial(lowering.lower_by_kernels, whole, phase)
        lowering.register(half.primitive, half.reference, by_kernels)
        rules.register_shapes(half)


def _half_jvp(
    half: Record, primals: compat.Primals, tangents: compat.Tangents, **params: Any
) -> tuple[list[Any], list[Any]]:
    payload, routing = split_routing(primals)
    out = half.bind(payload, routing, **params)
    tangents = select(_have_tangents(payload), tangents[: len(payload)])
    moved = _bind_kept(half, tangents, payload, routing, params)
    return out, spread(_have_tangents(out), moved, [zero_tangent(x) for x in out])


def _half_transpose(
    half: Record, cotangents: compat.Tangents, *operands: Any, **params: Any
) -> list[Any]:
    params["options"] = of_transpose(half, params["options"])
    payload, routing = split_routing(operands)
    cotangents = select(_have_tangents(cotangents), cotangents)
    moved = _bind_kept(half.transpose, cotangents, payload, routing, params)
    found = spread(_have_tangents(payload), moved, [ad.Zero(aval_of(x)) for x in payload])
    wanted = [ad.is_undefined_primal(x) for x in payload]
    return cotangents_of(payload, wanted, select(wanted, found)) + [None] * len(routing)


def _bind_kept(
    half: Record,
    operands: Sequence[Any],
    payload: Sequence[jax.Array],
    routing: RoutingArrays,
    params: dict[str, Any],
) -> list[Any]:
    """Bind a half to ``operands``, one for each array of ``payload`` that can have a tangent."""
    if not operands:
        return []
    operands = list(map(ad.instantiate_zeros, operands))
    return half.bind(operands, routing, **keep_arrays(_have_tangents(payload), params))


def _have_tangents(arrays: Sequence[Any]) -> list[bool]:
    return [carries_tangent(aval_of(x).dtype) for x in arrays]


# ``lax.optimization_barrier`` cannot replace the tie, because its derivatives in jax 0.10.2 replace
# missing tangents by zeros. Such a zero would create a done without a start.


def _tie_those_with_tangents(tangents: compat.Tangents) -> list[Any]:
    is_tied = [not is_zero(dx) and jax.typeof(dx).dtype != jax.dtypes.float0 for dx in tangents]
    return spread(is_tied, tie(*select(is_tied, tangents)), tangents)


def _tie_transpose(cotangents: compat.Tangents, *operands: Any) -> list[Any]:
    tied = _tie_those_with_tangents(cotangents)
    return [ct if ad.is_undefined_primal(x) else None for ct, x in zip(tied, operands, strict=True)]


def _tie_dce(used_results: Sequence[bool], eqn: compat.Equation) -> tuple[list[bool], Any]:
    return list(used_results), eqn.replace(
        invars=select(used_results, eqn.invars), outvars=select(used_results, eqn.outvars)
    )


tie_p.multiple_results = True
tie_p.def_impl(partial(compat.apply_primitive, tie_p))
tie_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(tie_p, lowering.barrier)
ad.primitive_jvps[tie_p] = lambda primals, tangents: (
    tie(*primals),
    _tie_those_with_tangents(tangents),
)
ad.primitive_transposes[tie_p] = _tie_transpose
batching.primitive_batchers[tie_p] = lambda args, dims: (tie(*args), dims)
compat.register_dce_rule(tie_p, _tie_dce)
# A policy of ``jax.checkpoint`` must not save the results of a tie. They may be arrays in flight,
# with which the backward pass would finish the exchange a second time.
compat.never_save(tie_p)

for _whole in (DISPATCH, COMBINE):
    add_halves(_whole)
    compat.never_save(_whole.start.primitive)

for _whole in (DISPATCH, COMBINE):
    _twin = _whole.transpose
    _whole.start.transpose, _whole.done.transpose = _twin.done, _twin.start
    for _half in (_whole.start, _whole.done):
        ad.primitive_jvps[_half.primitive] = partial(_half_jvp, _half)
        ad.primitive_transposes[_half.primitive] = partial(_half_transpose, _half)
