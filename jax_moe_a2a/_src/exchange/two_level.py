"""Define exchanges over hosts in two levels: one exchange over each of the group's two axes.

A token first travels once to each host that has one of its experts, from rank n of the source host
to rank n of the destination host (level ``hosts``). That rank sends the token on to the ranks of
these experts (level ``ranks``). A combine first sums rows within each host, then returns the sums.

There are H hosts with N ranks each. Rank ``h * N + n`` is rank n of host h. After the first
exchange, token t of host h is the *relayed* token ``t * H + h``. The route within a host reserves
rows by choice, then relayed token, then rank. Therefore it drops the same rows as the route of a
group of one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..group.group import Group
from ..plan.plan import PlanOptions, RoutingArrays, quotient, remainder, running_sum
from ..routing.two_level import TwoLevelRouting
from .dispatch_combine import COMBINE, DISPATCH
from .record import Options, Record
from .reference import own_rank
from .routed import bind_route


def plan_levels(ids: jax.Array, group: Group, options: PlanOptions) -> dict[str, Any]:
    """Return the arrays of a ``TwoLevelRouting`` by name, for ids int32 [T, K] of this rank."""
    hosts, ranks = group.levels
    num_tokens, top_k = ids.shape
    host = own_rank(hosts)
    per_host = options.num_local_experts * ranks.size

    # From each of the H hosts, receive the ids [T, K] of the rank with this rank's index.
    everywhere = jnp.arange(hosts.size, dtype=jnp.int32)
    everywhere = jnp.broadcast_to(everywhere, (num_tokens, hosts.size, hosts.size))
    params: dict[str, Any] = dict(num_leaves=1, num_choice_arrays=0, options=Options())
    (gathered,) = DISPATCH.bind([ids], _between_hosts(everywhere, host), group=hosts, **params)
    gathered = gathered.reshape(num_tokens, hosts.size, top_k)
    is_valid = (gathered >= 0) & (gathered < per_host * hosts.size)
    to_host = jnp.where(is_valid, quotient(gathered, per_host), -1)

    # As with one level, an expert's rows must be sorted by source host, then by the source rank's
    # index on it. Therefore each local expert becomes H experts, one for each source host.
    source = lax.broadcasted_iota(jnp.int32, gathered.shape, 1)
    local = (gathered - host * per_host) * hosts.size + source
    relayed = jnp.where(to_host == host, local, -1).reshape(num_tokens * hosts.size, top_k)
    num_local_experts = options.num_local_experts * hosts.size
    options = options._replace(num_local_experts=num_local_experts, parts=hosts.size)
    plan = bind_route(relayed, group=ranks, emulated=False, plan_options=options)
    is_row = plan.arrays.row_rank >= 0
    source_host = remainder(plan.row_token, hosts.size)
    return dict(
        hosts=_between_hosts(_hosts_of_tokens(to_host, hosts.size), host),
        ranks=plan.arrays,
        row_rank=jnp.where(is_row, source_host * ranks.size + plan.arrays.row_rank, -1),
        row_token=jnp.where(is_row, quotient(plan.row_token, hosts.size), -1),
        group_sizes=plan.group_sizes,
        num_rows=plan.num_rows,
        num_dropped=plan.num_dropped,
    )


def _hosts_of_tokens(to_host: jax.Array, num_hosts: int) -> jax.Array:
    """Return each token's distinct hosts [T, H, min(K, H)], from its choices' hosts [T, H, K]."""
    hosts = jnp.arange(num_hosts, dtype=jnp.int32)[None, None, None, :]
    goes_to = (to_host[..., None] == hosts).any(axis=2)
    # ``wanted`` counts the hosts of a token up to each host. Choice k is the first host whose count
    # exceeds k, so the index of this host is the number of counts that do not exceed k.
    wanted = running_sum(goes_to.astype(jnp.int32), axis=2)
    choices = jnp.arange(min(to_host.shape[2], num_hosts), dtype=jnp.int32)
    found = (wanted[..., None] <= choices[None, None, None, :]).sum(axis=2, dtype=jnp.int32)
    return jnp.where(found < num_hosts, found, -1)


def _between_hosts(choices: jax.Array, host: jax.Array) -> RoutingArrays:
    """Return the routing between one rank of each host. ``choices`` [T, H, K] has, for token t of
    host h, the token's destination hosts. There the token has slot t, and is row t * H + h."""
    num_hosts = choices.shape[1]
    own = lax.dynamic_index_in_dim(choices, host, axis=1, keepdims=False)
    hosts = jnp.arange(num_hosts, dtype=jnp.int32)
    goes_to = (own[:, :, None] == hosts[None, None, :]).any(axis=1)
    token_slot = jnp.where(goes_to, lax.broadcasted_iota(jnp.int32, goes_to.shape, 0), -1)
    is_here = choices == host
    token, source, k = (lax.broadcasted_iota(jnp.int32, choices.shape, axis) for axis in range(3))

    def by_row(values: jax.Array) -> jax.Array:
        return jnp.where(is_here, values, -1).max(axis=2, initial=-1).reshape(-1)

    return RoutingArrays(
        token_slot=token_slot,
        slot_token=token_slot.T,
        choice_rank=own,
        slot_rows=jnp.where(is_here, token * num_hosts + source, -1).transpose(1, 0, 2),
        row_rank=by_row(source),
        row_slot=by_row(token),
        row_k=by_row(k),
    )


def bind(
    exchange: Record,
    payload: Sequence[Any],
    routing: TwoLevelRouting,
    *,
    num_leaves: int,
    **params: Any,
) -> list[Any]:
    """Bind an exchange over both levels. Only the exchange between hosts adds the addends."""
    hosts, ranks = routing.group.levels
    between, within = dict(params, group=hosts), dict(params, group=ranks, num_leaves=num_leaves)
    if exchange.is_outward:
        payload = _for_hosts(payload, num_leaves, routing)
        relayed = exchange.bind(payload, routing.hosts, num_leaves=num_leaves, **between)
        return exchange.bind(relayed, routing.ranks, **within)
    options = params["options"]
    first = len(payload) - options.num_addends
    within["options"] = options._replace(num_addends=0)
    sums = exchange.bind(payload[:first], routing.ranks, **within)
    payload = [*sums, *payload[first:]]
    return COMBINE.bind(payload, routing.hosts, num_leaves=len(sums), **between)


def _for_hosts(
    payload: Sequence[jax.Array], num_leaves: int, routing: TwoLevelRouting
) -> list[jax.Array]:
    """Return the payload between hosts. Leaves are unchanged. A choice array [T, K] becomes
    [T, min(K, H), K], because each host receives the entries of all choices of a token. Unlike the
    gradient of leaves, the gradient of choice arrays is not rounded to ``wire_dtype``."""
    num_tokens, most_hosts = routing.hosts.choice_rank.shape
    repeated = lambda x: jnp.broadcast_to(x[:, None], (num_tokens, most_hosts, x.shape[1]))
    return [*payload[:num_leaves], *map(repeated, payload[num_leaves:])]
