"""Lower whole exchanges and split phases to the kernel calls of an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...group import native
from ...plan.plan import RoutingArrays
from ..record import Exchange, split_routing
from .budgets import SPLIT_NUM_SMS, num_sms_of
from .custom_call import custom_call
from .site import Site, barrier

# The arrays of a routing that the kernels read, in the order of the handlers' operands.
READ_BY_KERNELS = ("token_slot", "slot_token", "choice_rank", "slot_rows", "row_slot")


class KernelCall(NamedTuple):
    """Describe one custom call of an exchange."""

    target: str
    arrays: Sequence[int]
    """Indices of the payload operands that the call reads."""
    results: Sequence[int]
    """Indices of the results that the call computes."""
    landed_bytes: list[int]
    """For each array, the bytes that land for each token."""
    attributes: dict[str, Any]
    num_sms: int | None = None
    """SMs of the call, or None for the default budget."""


def whole(
    exchange: Exchange, ctx: Any, site: Site, *operands: Any, **params: Any
) -> list[Any] | None:
    """Lower an exchange. Return None if the kernels do not apply."""
    payload_avals, routing_avals = split_routing(ctx.avals_in)
    calls = _kernel_calls(exchange, site, payload_avals, routing_avals, params)
    if calls is None:
        return None
    payload, routing = split_routing(operands)
    read = [*payload, *_read(routing)]
    read_avals = [*payload_avals, *_read(routing_avals)]
    return _make(exchange, calls, ctx, site, read, read_avals, ctx.avals_out)


def start(
    exchange: Exchange, ctx: Any, site: Site, *operands: Any, **params: Any
) -> list[Any] | None:
    """Lower the start of an exchange. Return None if the kernels do not apply."""
    payload_avals, routing_avals = split_routing(ctx.avals_in)
    calls = _kernel_calls(exchange, site, payload_avals, routing_avals, params)
    if calls is None:
        return None
    payload, routing = split_routing(operands)
    read_avals = [*payload_avals, *_read(routing_avals)]
    read = _held(ctx, [*payload, *_read(routing)], read_avals)
    payload = read[: len(payload)]  # The done reads the same memory.
    sources = exchange.layouts(**params).sources
    num_results = len(sources)
    if exchange.is_outward:
        avals_out = ctx.avals_out[num_results:]
        rows = _make(exchange, calls, ctx, site, read, read_avals, avals_out, phase="start")
        return [*payload, *rows]
    avals_out = ctx.avals_out[:num_results]
    sums = _make(exchange, calls, ctx, site, read, read_avals, avals_out, phase="start")
    return [*sums, *(payload[source[0]] for source in sources)]


def done(
    exchange: Exchange, ctx: Any, site: Site, *operands: Any, **params: Any
) -> list[Any] | None:
    """Lower the done of an exchange. Return None if the kernels do not apply.

    The done has the operands of its start, so that XLA keeps them in place. Its other operands are
    the arrays in flight, which become its results.
    """
    num_results = len(exchange.layouts(**params).results)

    def divide(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the payload of the start, and the results in flight."""
        at_tokens, at_rows = arrays[:num_results], arrays[num_results : 2 * num_results]
        kept = arrays[2 * num_results :]
        if exchange.is_outward:
            return list(at_tokens), list(at_rows)
        return list(kept or at_rows), list(at_tokens)

    avals, routing_avals = split_routing(ctx.avals_in)
    payload_avals, in_flight_avals = divide(avals)
    calls = _kernel_calls(exchange, site, payload_avals, routing_avals, params)
    if calls is None:
        return None
    arrays, routing = split_routing(operands)
    payload, in_flight = divide(arrays)
    read = [*payload, *_read(routing)]
    read_avals = [*payload_avals, *_read(routing_avals)]
    held = _held(ctx, [*read, *in_flight], [*read_avals, *in_flight_avals])
    read, in_flight = held[: len(read)], held[len(read) :]
    avals_out = ctx.avals_out
    return _make(
        exchange, calls, ctx, site, read, read_avals, avals_out, phase="done", in_flight=in_flight
    )


def _kernel_calls(
    exchange: Exchange,
    site: Site,
    payload_avals: Sequence[Any],
    routing_avals: RoutingArrays,
    params: dict[str, Any],
) -> list[KernelCall] | None:
    top_k = site.of_rank(routing_avals.choice_rank).shape[1]
    payload = [site.of_rank(aval) for aval in payload_avals]
    return exchange.kernel_calls(site, payload, top_k, params)


def _read(routing: RoutingArrays) -> list[Any]:
    return [getattr(routing, name) for name in READ_BY_KERNELS]


def _held(ctx: Any, arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Return arrays after one barrier for all of them.

    The barrier keeps XLA from copying arrays in flight. XLA's dynamic_slice_fusion would fuse a
    call with slices of its operands, and with the update of a larger array by a result. XLA would
    also copy a constant for each call that reads it, but the done must read the memory of the
    start.
    """
    return list(barrier(ctx.replace(avals_in=avals, avals_out=avals), *arrays))


def _make(
    exchange: Exchange,
    calls: Sequence[KernelCall],
    ctx: Any,
    site: Site,
    read: Sequence[Any],
    read_avals: Sequence[Any],
    avals_out: Sequence[Any],
    *,
    phase: str = "",
    in_flight: Sequence[Any] = (),
) -> list[Any]:
    """Emit the calls of an exchange or of a phase, and return the results."""
    group, operation = site.group, "dispatch" if exchange.is_outward else "combine"
    num_payload = len(read) - len(READ_BY_KERNELS)
    choice_rank = read_avals[num_payload + READ_BY_KERNELS.index("choice_rank")]
    num_slots = choice_rank.shape[site.lead]
    results: list[Any] = [None] * len(avals_out)
    for call in calls:
        mine = [*call.arrays, *range(num_payload, len(read))]
        my_results_in_flight = [in_flight[i] for i in call.results] if in_flight else []
        my_avals_out = [avals_out[i] for i in call.results]
        num_sms = call.num_sms or num_sms_of(group, operation, num_slots)
        if phase:
            num_sms = group.sms_of(operation) or SPLIT_NUM_SMS
        call_results = custom_call(
            ctx.replace(
                avals_in=[
                    *(read_avals[i] for i in mine),
                    *my_avals_out[: len(my_results_in_flight)],
                ],
                avals_out=my_avals_out,
            ),
            f"{call.target}_{phase}" if phase else call.target,
            [*(read[i] for i in mine), *my_results_in_flight],
            site,
            num_sms=num_sms,
            zone_bytes=sum(native.array_bytes(num_slots, size) for size in call.landed_bytes),
            is_split=bool(phase),
            aliases={len(mine) + i: i for i in range(len(my_results_in_flight))},
            **call.attributes,
        )
        for i, result in zip(call.results, call_results, strict=True):
            results[i] = result
    return results
