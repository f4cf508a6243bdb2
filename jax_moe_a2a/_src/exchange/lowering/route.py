"""Lower the route and the routed dispatch."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ... import compat
from ...group import native
from .budgets import num_sms_of
from .custom_call import custom_call, own_rank
from .dispatch import landing
from .site import Site

INT32_BYTES = 4
MAX_ASSIGN_BLOCKS = 65535  # of a rank that shares its GPU: limit of the second grid dimension


def route(ctx: Any, site: Site, ids: Any, **params: Any) -> list[Any] | None:
    """Lower ``route_p`` to one call with two launches. Return None if the kernels do not apply.

    The rank of this device is an operand, because the exchange of ids needs it.
    """
    group = site.group
    (aval,) = ctx.avals_in
    *lead, num_tokens, top_k = site.of_rank(aval).shape
    batch = math.prod(lead)
    local_experts = params["num_experts"] // group.size
    tokens_per_chunk, chunks = route_chunks(num_tokens)
    may_drop = params["first_choice"] is not None
    levels = top_k if may_drop else 1
    if (
        0 in (params["capacity"], local_experts)
        or (may_drop and params["parts"] > 1)
        or levels * local_experts > native.limit("MAX_ROUTE_COUNTS")
        or batch * chunks > native.limit("MAX_CHUNKS")
        or local_experts > native.limit("MAX_LOCAL_EXPERTS")
        or (site.lead and batch * chunks * group.size > MAX_ASSIGN_BLOCKS)
    ):
        return None

    def int32(*shape: int) -> Any:
        shape = (*aval.shape[: site.lead], *shape)
        return compat.result_aval(aval, shape, jnp.dtype(jnp.int32))

    scratch = [
        int32(group.size, batch * num_tokens * top_k),  # ids of all ranks
        # choices per expert (for each choice index if rows may drop), and tokens for this rank
        int32(batch, group.size, chunks, levels * local_experts + 1),
        int32(batch, chunks, group.size),  # own tokens per destination
    ]
    rank_aval, rank = own_rank(ctx, site)
    results = custom_call(
        ctx.replace(avals_in=[aval, rank_aval], avals_out=[*ctx.avals_out, *scratch]),
        "moe_a2a_route",
        [ids, *rank],
        site,
        num_sms=num_sms_of(group, "route", num_tokens),
        zone_bytes=native.array_bytes(1, batch * num_tokens * top_k * INT32_BYTES),
        num_experts=np.int64(params["num_experts"]),
        alignment=np.int64(params["alignment"]),
        tokens_per_chunk=np.int64(tokens_per_chunk),
        first_choice=_first_choice(params),
        parts=np.int64(params["parts"]),
    )
    return results[: len(ctx.avals_out)]


def routed_dispatch(
    ctx: Any, site: Site, ids: Any, *payload: Any, **params: Any
) -> list[Any] | None:
    """Lower ``routed_dispatch_p`` to one launch. Return None if the kernel does not apply."""
    group = site.group
    ids_aval, *payload_avals = map(site.of_rank, ctx.avals_in)
    num_tokens, top_k = ids_aval.shape
    local_experts = params["num_experts"] // group.size
    if (
        site.topology.is_wide
        or 0 in (params["capacity"], local_experts)
        or num_tokens > native.limit("MAX_FUSED_TOKENS")
        or group.size * num_tokens * top_k > native.limit("MAX_FUSED_CHOICES")
        or local_experts > native.limit("MAX_FUSED_EXPERTS")
    ):
        return None
    found = landing(site, payload_avals, params)
    if found is None:
        return None
    rank_aval, rank = own_rank(ctx, site)
    return custom_call(
        ctx.replace(avals_in=[ctx.avals_in[0], rank_aval, *ctx.avals_in[1:]]),
        "moe_a2a_routed_dispatch",
        [ids, *rank, *payload],
        site,
        num_sms=num_sms_of(group, "dispatch", num_tokens),
        zone_bytes=sum(native.array_bytes(num_tokens, size) for size in found.landed_bytes),
        num_experts=np.int64(params["num_experts"]),
        alignment=np.int64(params["alignment"]),
        first_choice=_first_choice(params),
        **{"format": np.int64(0), **found.attributes},  # 0: no format
    )


def _first_choice(params: dict[str, Any]) -> np.int64:
    """Return the attribute ``first_choice`` of a route; -1 if the capacity holds any routing."""
    return np.int64(-1 if params["first_choice"] is None else params["first_choice"])


def route_chunks(num_tokens: int) -> tuple[int, int]:
    """Return the number of tokens that share a flag of the route, and the number of flags."""
    few = num_tokens <= native.tuning("ROUTE_FEW_TOKENS")
    tokens_per_chunk = native.tuning(
        "ROUTE_TOKENS_PER_CHUNK" if few else "ROUTE_MANY_TOKENS_PER_CHUNK"
    )
    return tokens_per_chunk, max(1, -(-num_tokens // tokens_per_chunk))
