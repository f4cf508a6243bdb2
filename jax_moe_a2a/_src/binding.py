"""Bind routes and exchanges of groups with one level or two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from . import compat, two_level
from .capacity import default_capacity
from .group import Group
from .plan import RoutePlan, planned_ids
from .primitives import bind_exchange, bind_route, bind_routed_dispatch
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
      payload: operands of ``dispatch_p``.
      **params: parameters of ``dispatch_p``.

    Returns:
      The routing, and the results of ``dispatch_p``.
    """
    planned, route_params = _planned(ids, options)
    plan, moved = bind_routed_dispatch(planned, payload, **route_params, **params)
    return _routing_of(plan, ids, options), moved


def bind(
    primitive: compat.Primitive, payload: Sequence[jax.Array], routing: AnyRouting, **params: Any
) -> list[jax.Array]:
    """Bind an exchange with a routing, over both levels if it has them."""
    if isinstance(routing, TwoLevelRouting):
        return two_level.bind(primitive, payload, routing, **params)
    return bind_exchange(primitive, payload, routing.arrays, group=routing.domain, **params)


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
        ids = planned_ids(
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
    kind = Routing if isinstance(plan, RoutePlan) else TwoLevelRouting
    # ``vars`` and not ``dataclasses.asdict``, which would make a dictionary of the group too.
    return kind(**plan._asdict(), num_invalid=num_invalid, **vars(options))
