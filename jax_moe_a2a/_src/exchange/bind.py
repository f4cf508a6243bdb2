"""Bind the primitives of routes and exchanges, for groups with one level or two levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat, scopes
from ..plan.plan import PlanOptions, RoutePlan
from ..routing.checks import CheckedIds
from ..routing.two_level import AnyRouting, TwoLevelRouting
from ..routing.types import ROUTING_CHECKPOINT_NAME, RouteOptions, Routing
from . import two_level
from .record import Record
from .reference import own_rank
from .routed import bind_route, bind_routed_dispatch


@scopes.exchange
def route_ids(ids: jax.Array, options: RouteOptions) -> AnyRouting:
    """Return the routing of ids int32 [T, K]."""
    planned, plan_options = _planned(ids, options)
    plan: RoutePlan | dict[str, Any]
    if options.has_levels:
        plan = two_level.plan_levels(planned, options.group, plan_options)
    else:
        plan = bind_route(planned, group=options.domain, emulated=False, plan_options=plan_options)
    plan = compat.checkpoint_name(plan, ROUTING_CHECKPOINT_NAME)
    return _routing_of(plan, ids, options)


@scopes.exchange
def route_and_dispatch(
    checked: CheckedIds, payload: Sequence[jax.Array], **params: Any
) -> tuple[AnyRouting, list[jax.Array]]:
    """Route ids and dispatch a payload in one primitive, for a group of one level. The payload,
    ``params`` and the list of results are as for ``DISPATCH``."""
    planned, plan_options = _planned(*checked)
    params.update(group=checked.options.domain, plan_options=plan_options)
    plan, moved = bind_routed_dispatch(planned, payload, **params)
    plan = compat.checkpoint_name(plan, ROUTING_CHECKPOINT_NAME)
    return _routing_of(plan, *checked), moved


@scopes.exchange
def bind(
    exchange: Record,
    payload: Sequence[jax.Array],
    routing: AnyRouting,
    **params: Any,
) -> list[jax.Array]:
    if isinstance(routing, TwoLevelRouting):
        return two_level.bind(exchange, payload, routing, **params)
    return exchange.bind(payload, routing.arrays, group=routing.domain, **params)


@scopes.exchange
def bind_start(
    exchange: Record, payload: Sequence[jax.Array], routing: AnyRouting, **params: Any
) -> tuple[Sequence[jax.Array], Callable[[Sequence[jax.Array]], list[jax.Array]]]:
    """Bind a start. Return arrays in flight, and a function that binds the done to these arrays.

    With two levels, the start of a dispatch or the done of a combine runs the whole exchange,
    because XLA's collectives between hosts would not overlap with other work.
    """
    if isinstance(routing, TwoLevelRouting):
        whole = lambda arrays: bind(exchange, arrays, routing, **params)
        return (whole(payload), list) if exchange.is_outward else (payload, whole)
    all_params = dict(params, group=routing.domain)

    @scopes.exchange
    def bind_done(in_flight: Sequence[jax.Array]) -> list[jax.Array]:
        return exchange.done.bind(in_flight, routing.arrays, **all_params)

    return exchange.start.bind(payload, routing.arrays, **all_params), bind_done


def _planned(ids: jax.Array, options: RouteOptions) -> tuple[jax.Array, PlanOptions]:
    num_local_experts = options.num_local_experts
    if options.replicated:  # Drop choices of other ranks' experts.
        local = ids - own_rank(options.group) * num_local_experts
        ids = jnp.where((local >= 0) & (local < num_local_experts), local, -1)
    may_drop = options.may_drop(*ids.shape)
    return ids, PlanOptions(num_local_experts, options.capacity, options.alignment, may_drop)


def _routing_of(
    plan: RoutePlan | dict[str, Any], ids: jax.Array, options: RouteOptions
) -> AnyRouting:
    num_invalid = ((ids < -1) | (ids >= options.num_experts)).sum(dtype=jnp.int32)
    num_invalid = compat.checkpoint_name(num_invalid, ROUTING_CHECKPOINT_NAME)
    # ``dataclasses.asdict`` would also convert the group to a dictionary.
    others = dict(vars(options), num_invalid=num_invalid, topk_ids=ids)
    if isinstance(plan, RoutePlan):
        return Routing(**plan.named(), **others)
    return TwoLevelRouting(**plan, **others)
