"""Lower the route and the routed dispatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ... import compat
from ...group import native
from ...plan.plan import PlanOptions
from .budgets import num_sms_of
from .call_placement import CallPlacement
from .custom_call import custom_call, half_bytes_of, own_rank, rank_aval
from .dispatch import dispatch_attributes


def route(
    ctx: Any, call_placement: CallPlacement, ids: Any, **params: Any
) -> Callable[[], list[Any]]:
    """Lower ``route_p`` to one call with two launches.

    The rank of this device is an operand, because the exchange of ids needs it.
    """
    group = call_placement.group
    (aval,) = ctx.avals_in
    *lead, num_tokens, top_k = call_placement.of_rank(aval).shape
    batch = math.prod(lead)
    options: PlanOptions = params["plan_options"]
    tokens_per_chunk, chunks = route_chunks(num_tokens)
    levels = 1 if options.first_choice is None else top_k

    def int32(*shape: int) -> Any:
        shape = (*aval.shape[: call_placement.lead], *shape)
        return compat.result_aval(aval, shape, jnp.dtype(jnp.int32))

    scratch = [
        int32(group.size, batch * num_tokens * top_k),  # ids of all ranks
        # choices per expert (for each choice index if rows may drop), and tokens for this rank
        int32(batch, group.size, chunks, levels * options.num_local_experts + 1),
        int32(batch, chunks, group.size),  # own tokens per destination
    ]
    attributes = _attributes(params) | dict(tokens_per_chunk=tokens_per_chunk, parts=options.parts)
    return _call(ctx, call_placement, "route", [ids], attributes, scratch)


def routed_dispatch(
    ctx: Any, call_placement: CallPlacement, ids: Any, *payload: Any, **params: Any
) -> Callable[[], list[Any]]:
    """Lower ``routed_dispatch_p`` to one launch."""
    attributes = dict(_attributes(params), format="") | dispatch_attributes(params)
    return _call(ctx, call_placement, "routed_dispatch", [ids, *payload], attributes)


def _attributes(params: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a route. ``first_choice`` is -1 if the capacity holds any
    routing."""
    options: PlanOptions = params["plan_options"]
    return dict(
        num_experts=options.num_local_experts * params["group"].size,
        alignment=options.alignment,
        first_choice=-1 if options.first_choice is None else options.first_choice,
    )


def _call(
    ctx: Any,
    call_placement: CallPlacement,
    name: str,
    operands: Sequence[Any],
    attributes: dict[str, Any],
    scratch: Sequence[Any] = (),
) -> Callable[[], list[Any]]:
    """Choose a call whose first operand is the ids, and whose second operand is this device's
    rank. Return the function that emits it, and drops its last results, the scratch arrays."""
    (ids, *payload), (ids_aval, *payload_avals) = operands, ctx.avals_in
    avals_in = [ids_aval, rank_aval(ctx, call_placement), *payload_avals]
    avals_out = [*ctx.avals_out, *scratch]
    target = f"moe_a2a_{name}"
    half_bytes = half_bytes_of(target, attributes, call_placement, avals_in, avals_out)
    num_tokens = ids_aval.shape[-2]

    def emit() -> list[Any]:
        results = custom_call(
            ctx.replace(avals_in=avals_in, avals_out=avals_out),
            target,
            [ids, *own_rank(ctx, call_placement), *payload],
            call_placement,
            attributes,
            num_sms=num_sms_of(call_placement.group, name.removeprefix("routed_"), num_tokens),
            half_bytes=half_bytes,
        )
        return results[: len(ctx.avals_out)]

    return emit


def route_chunks(num_tokens: int) -> tuple[int, int]:
    """Return the number of tokens that share a flag of the route, and the number of flags."""
    few = num_tokens <= native.tuning("ROUTE_FEW_TOKENS")
    tokens_per_chunk = native.tuning(
        "ROUTE_TOKENS_PER_CHUNK" if few else "ROUTE_MANY_TOKENS_PER_CHUNK"
    )
    return tokens_per_chunk, max(1, -(-num_tokens // tokens_per_chunk))
