"""Define combines with addends: arrays that are added to the sums before their only rounding.

The payload is the payload of a combine without addends, then one addend for each result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jax.interpreters import ad

from .. import compat
from ..ad import is_zero, select, spread
from . import rules
from .dispatch_combine import COMBINE
from .record import TOKEN, Exchange, Layouts, split_routing
from .weighted import WEIGHTED_COMBINE, tangent_pairs


def _layouts(whole: Exchange, **params: Any) -> Layouts:
    operands, results, sources = whole.layouts(**params)
    first = len(operands)  # of the addends
    sources = [(*of_whole, first + i) for i, of_whole in enumerate(sources)]
    return Layouts([*operands, *([TOKEN] * len(results))], results, sources)


def _with_addends(whole: Exchange) -> Exchange:
    return Exchange(
        f"{whole.name}_add",
        is_outward=False,
        reference=whole.reference,
        layouts=partial(_layouts, whole),
        kernel_calls=whole.kernel_calls,
    )


COMBINE_ADD, WEIGHTED_COMBINE_ADD = map(_with_addends, (COMBINE, WEIGHTED_COMBINE))
_WITH_ADDENDS = {COMBINE: COMBINE_ADD, WEIGHTED_COMBINE: WEIGHTED_COMBINE_ADD}


def adding(
    whole: Exchange, payload: Sequence[Any], addends: Sequence[Any]
) -> tuple[Exchange, Sequence[Any]]:
    """Return the exchange that combines a payload and adds the addends, if there are any, and its
    payload."""
    if not addends:
        return whole, payload
    return _WITH_ADDENDS[whole], [*payload, *addends]


# Derivatives. With C a combine, the result is C(payload) + addend, rounded once.
#   jvp: C(tangents) + the addend's tangent, by the same primitive if both are not zero.
#   transpose: that of C, and the cotangent itself for the addend.


def _bind_tangents(
    whole: Exchange, payload: Sequence[Any], d_addends: Sequence[Any], *args: Any, **params: Any
) -> list[Any]:
    if all(map(is_zero, d_addends)):
        d_addends = []
    exchange, payload = adding(whole, payload, [ad.instantiate_zeros(dx) for dx in d_addends])
    return exchange.bind(payload, *args, **params)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, num_leaves: int, **params: Any
) -> tuple[list[Any], list[Any]]:
    payload, routing = split_routing(primals)
    out = COMBINE_ADD.bind(payload, routing, num_leaves=num_leaves, **params)
    d_rows, d_addends = tangents[:num_leaves], tangents[num_leaves : len(payload)]
    moves = [not is_zero(dx) for dx in d_rows]
    if not any(moves):
        return out, list(d_addends)
    params.update(num_leaves=sum(moves))
    moved = _bind_tangents(
        COMBINE, select(moves, d_rows), select(moves, d_addends), routing, **params
    )
    return out, spread(moves, moved, d_addends)


def _weighted_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, num_leaves: int, **params: Any
) -> tuple[list[Any], list[Any]]:
    payload, routing = split_routing(primals)
    out = WEIGHTED_COMBINE_ADD.bind(payload, routing, num_leaves=num_leaves, **params)
    *d_pairs, d_addend = tangents[: len(payload)]
    pairs = tangent_pairs(payload[:-1], d_pairs, num_leaves)
    if not pairs:
        return out, [d_addend]
    payload = [*(r for r, _ in pairs), *(w for _, w in pairs)]
    params.update(num_leaves=len(pairs))
    return out, _bind_tangents(WEIGHTED_COMBINE, payload, [d_addend], routing, **params)


def _transpose(
    of_whole: Callable[..., list[Any]],
    cotangents: Sequence[Any],
    *operands: Any,
    **params: Any,
) -> list[Any]:
    payload, routing = split_routing(operands)
    first = len(payload) - len(cotangents)  # of the addends
    found = of_whole(cotangents, *payload[:first], *routing, **params)
    wanted = map(ad.is_undefined_primal, payload[first:])
    of_addends = [ct if want else None for ct, want in zip(cotangents, wanted, strict=True)]
    return [*found[:first], *of_addends, *found[first:]]


def _dce(used_results: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Remove the leaves and addends of unused results, or the whole exchange."""
    if not any(used_results):
        return [False] * len(eqn.invars), None
    payload, routing = split_routing(eqn.invars)
    used = [*used_results, *used_results]
    return [*used, *(True for _ in routing)], eqn.replace(
        invars=[*select(used, payload), *routing],
        outvars=select(used_results, eqn.outvars),
        params=dict(eqn.params, num_leaves=sum(used_results)),
    )


for _whole, _added in _WITH_ADDENDS.items():
    rules.register_exchange(_added)
    _of_whole = ad.primitive_transposes[_whole.primitive]
    ad.primitive_transposes[_added.primitive] = partial(_transpose, _of_whole)
ad.primitive_jvps[COMBINE_ADD.primitive] = _jvp
ad.primitive_jvps[WEIGHTED_COMBINE_ADD.primitive] = _weighted_jvp
compat.register_dce_rule(COMBINE_ADD.primitive, _dce)
