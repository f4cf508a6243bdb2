"""Bind routes and exchanges of groups with one level or two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jax import lax

from . import compat, two_level
from .capacity import default_capacity
from .exchange import Exchange
from .group import Group
from .plan import RoutePlan, renumbered_ids
from .primitives.routed import bind_route, bind_routed_dispatch
from .reference import own_rank
from .routing import ROUTING_CHECKPOINT_NAME, RouteOptions, Routing
from .two_level import AnyRouting, TwoLevelPlan, TwoLevelRouting


class RouteParams(TypedDict):
    """Hold the numbers of ``plan_route``, with the group that routes."""

    group: Group
    num_experts: int
    capacity: int
    alignment: int
    first_choice: int | None


def route_ids(ids: jax.Array, options: RouteOptions) -> AnyRouting:
    """Return the routing of ids int32 [T, K]."""
    planned, params = _planned(ids, options)
    plan: RoutePlan | TwoLevelPlan
    if options.has_levels:
        plan = two_level.plan_levels(planned, **params)
    else:
        plan = bind_route(planned, emulated=False, **params)
    plan = compat.checkpoint_name(plan, ROUTING_CHECKPOINT_NAME)
    return _routing_of(plan, ids, options)


def route_and_dispatch(
    ids: jax.Array, options: RouteOptions, payload: Sequence[jax.Array], **params: Any
) -> tuple[AnyRouting, list[jax.Array]]:
    """Route ids int32 [T, K] and dispatch by the result in one primitive, over one level.

    Args:
      ids: as in ``route_ids``.
      options: of a routing with one level.
      payload: the payload of ``DISPATCH``.
      **params: parameters of ``DISPATCH``.

    Returns:
      The routing, and the results of ``DISPATCH``.
    """
    planned, route_params = _planned(ids, options)
    plan, moved = bind_routed_dispatch(planned, payload, **route_params, **params)
    return _routing_of(plan, ids, options), moved


def bind(
    exchange: Exchange, payload: Sequence[jax.Array], routing: AnyRouting, **params: Any
) -> list[jax.Array]:
    """Bind an exchange with a routing, over both levels if it has them."""
    if isinstance(routing, TwoLevelRouting):
        return two_level.bind(exchange, payload, routing, **params)
    return exchange.bind(payload, routing.arrays, group=routing.domain, **params)


def bind_start(
    exchange: Exchange, payload: Sequence[jax.Array], routing: AnyRouting, **params: Any
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], list[jax.Array]]]:
    """Bind the start of an exchange with a routing.

    Returns:
      What is in flight, and the function that binds the done: it takes what is in flight and
      returns the results of the exchange.
    """
    if isinstance(routing, TwoLevelRouting):
        in_flight = two_level.bind_start(exchange, payload, routing, **params)
        return in_flight, partial(two_level.bind_done, exchange, routing=routing, **params)
    numbers = dict(params, group=routing.domain)
    kept: Sequence[jax.Array] = ()
    if exchange.keeps_payload:
        # The done reads the payload, too. XLA copies a constant for each reader, and the done must
        # find the memory that the start has read: both read what leaves one barrier.
        kept = payload = lax.optimization_barrier(payload)

    def bind_done(in_flight: Sequence[jax.Array]) -> list[jax.Array]:
        return exchange.done.bind([*in_flight, *kept], routing.arrays, **numbers)

    return exchange.start.bind(payload, routing.arrays, **numbers), bind_done


def _planned(ids: jax.Array, options: RouteOptions) -> tuple[jax.Array, RouteParams]:
    """Return the ids that ``route_p`` routes, and its parameters."""
    group, domain, shared_expert = options.group, options.domain, options.shared_expert
    num_tokens, top_k = ids.shape
    most_rows = default_capacity(
        num_tokens,
        top_k,
        group.size,
        options.num_experts,
        options.alignment,
        shared_expert=shared_expert,
        replicated=options.replicated,
    )
    first_choice = None  # nothing can drop
    if options.capacity < most_rows:
        first_choice = top_k if shared_expert else 0  # the shared expert's, or the router's
    if shared_expert or options.replicated:
        ids = renumbered_ids(
            ids,
            own_rank(group),
            group_size=group.size,
            num_experts=options.num_experts,
            shared_expert=shared_expert,
            replicated=options.replicated,
        )
    return ids, RouteParams(
        group=domain,
        num_experts=options.num_local_experts * domain.size,
        capacity=options.capacity,
        alignment=options.alignment,
        first_choice=first_choice,
    )


def _routing_of(
    plan: RoutePlan | TwoLevelPlan, ids: jax.Array, options: RouteOptions
) -> AnyRouting:
    """Return the routing with the arrays of a plan."""
    num_invalid = ((ids < -1) | (ids >= options.num_experts)).sum(dtype=jnp.int32)
    num_invalid = compat.checkpoint_name(num_invalid, ROUTING_CHECKPOINT_NAME)
    # ``vars`` and not ``dataclasses.asdict``, which would make a dictionary of the group too.
    if isinstance(plan, RoutePlan):
        return Routing(**plan.named(), num_invalid=num_invalid, **vars(options))
    return TwoLevelRouting(**plan._asdict(), num_invalid=num_invalid, **vars(options))
