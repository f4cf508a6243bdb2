"""Lower whole exchanges and split phases to the kernel calls of an operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import mlir

from ..record import Record, split_routing
from .budgets import SPLIT_NUM_SMS, num_sms_of
from .call_placement import CallPlacement
from .custom_call import custom_call, half_bytes_of

# The arrays of a routing that the kernels read, in the order of the handlers' operands.
READ_BY_KERNELS = ("token_slot", "slot_token", "choice_rank", "slot_rows", "row_slot")


class KernelCall(NamedTuple):
    """One custom call of an exchange."""

    target: str
    arrays: Sequence[int]
    """Indices of the payload operands that the call reads."""
    results: Sequence[int]
    """Indices of the results that the call computes."""
    attributes: dict[str, Any]
    num_sms: int | None = None
    """SMs of the call, or None for the default budget."""


def _inputs(operands: Sequence[Any]) -> list[Any]:
    """Return the payload of an exchange, then the routing arrays that the kernels read, from the
    operands of its primitive or from their types."""
    payload, routing = split_routing(operands)
    return [*payload, *(getattr(routing, name) for name in READ_BY_KERNELS)]


def _of_call(call: KernelCall, inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs that a call reads."""
    return [*(inputs[i] for i in call.arrays), *inputs[-len(READ_BY_KERNELS) :]]


def whole(
    exchange: Record, ctx: Any, call_placement: CallPlacement, *operands: Any, **params: Any
) -> list[Any]:
    """Lower an exchange."""
    avals, inputs = _inputs(ctx.avals_in), _inputs(operands)
    calls = _kernel_calls(exchange, call_placement, avals, ctx.avals_out, params)
    return _make(exchange, calls, ctx, call_placement, inputs, avals, ctx.avals_out)


def start(
    exchange: Record, ctx: Any, call_placement: CallPlacement, *operands: Any, **params: Any
) -> list[Any]:
    """Lower the start of an exchange."""
    avals = _inputs(ctx.avals_in)
    sources = exchange.layouts(**params).sources
    num_results = len(sources)
    # In flight, the arrays at the tokens come before the arrays at the rows.
    is_outward = exchange.is_outward
    avals_out = ctx.avals_out[num_results:] if is_outward else ctx.avals_out[:num_results]
    calls = _kernel_calls(exchange, call_placement, avals, avals_out, params)
    held = _held(ctx, _inputs(operands), avals)
    results = _make(exchange, calls, ctx, call_placement, held, avals, avals_out, phase="start")
    payload = held[: -len(READ_BY_KERNELS)]  # The done reads the same memory.
    if is_outward:
        return [*payload, *results]
    return [*results, *(payload[source[0]] for source in sources)]


def done(
    exchange: Record, ctx: Any, call_placement: CallPlacement, *operands: Any, **params: Any
) -> list[Any]:
    """Lower the done of an exchange.

    The done has the operands of its start, so that XLA keeps them in place. Its other operands are
    the arrays in flight, which become its results.
    """
    num_results = len(exchange.layouts(**params).results)

    def divide(arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the inputs of the start, and the results in flight."""
        moved, routing = split_routing(arrays)
        at_tokens, at_rows = moved[:num_results], moved[num_results : 2 * num_results]
        if exchange.is_outward:
            return _inputs([*at_tokens, *routing]), at_rows
        kept_payload = moved[2 * num_results :]
        return _inputs([*(kept_payload or at_rows), *routing]), at_tokens

    avals, in_flight_avals = divide(ctx.avals_in)
    calls = _kernel_calls(exchange, call_placement, avals, ctx.avals_out, params)
    inputs, in_flight = divide(operands)
    held = _held(ctx, [*inputs, *in_flight], [*avals, *in_flight_avals])
    inputs, in_flight = held[: len(inputs)], held[len(inputs) :]
    args = exchange, calls, ctx, call_placement, inputs, avals, ctx.avals_out
    return _make(*args, phase="done", in_flight=in_flight)


def _kernel_calls(
    exchange: Record,
    call_placement: CallPlacement,
    avals: Sequence[Any],
    avals_out: Sequence[Any],
    params: dict[str, Any],
) -> list[tuple[KernelCall, int]]:
    """Return the calls of an exchange, each with the bytes of a ring half that it needs.

    Raises:
      Refused: if the kernels do not support a call.
    """
    payload = [call_placement.of_rank(aval) for aval in avals[: -len(READ_BY_KERNELS)]]
    found = []
    for call in exchange.kernel_calls(call_placement, payload, params):
        types = _of_call(call, avals), [avals_out[i] for i in call.results]
        half_bytes = half_bytes_of(call.target, call.attributes, call_placement, *types)
        found.append((call, half_bytes))
    return found


def _hold(*arrays: Any) -> Any:
    in_order = [with_layout_constraint(x, Layout(tuple(range(x.ndim)))) for x in arrays]
    return lax.optimization_barrier(in_order)


_lower_hold = mlir.lower_fun(_hold, multiple_results=True)


def _held(ctx: Any, arrays: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Return arrays after one barrier for all of them.

    The barrier keeps XLA from copying arrays in flight. XLA's dynamic_slice_fusion would fuse a
    call with slices of its operands, and with the update of a larger array by a result. XLA would
    also copy a constant for each call that reads it, but the done must read the memory of the
    start. Where XLA chooses another layout, such as for a batch axis that was moved, it would copy
    an array for the start and again for the done: so the arrays already have the calls' layout.
    """
    return list(_lower_hold(ctx.replace(avals_in=avals, avals_out=avals), *arrays))


def _make(
    exchange: Record,
    calls: Sequence[tuple[KernelCall, int]],
    ctx: Any,
    call_placement: CallPlacement,
    inputs: Sequence[Any],
    avals: Sequence[Any],
    avals_out: Sequence[Any],
    *,
    phase: str = "",
    in_flight: Sequence[Any] = (),
) -> list[Any]:
    """Emit the calls of an exchange or of a phase, and return the results."""
    group, operation = call_placement.group, "dispatch" if exchange.is_outward else "combine"
    choice_rank = avals[READ_BY_KERNELS.index("choice_rank") - len(READ_BY_KERNELS)]
    num_slots = choice_rank.shape[call_placement.lead]
    results: list[Any] = [None] * len(avals_out)
    for call, half_bytes in calls:
        results_in_flight = [in_flight[i] for i in call.results] if in_flight else []
        call_avals_out = [avals_out[i] for i in call.results]
        call_avals_in = _of_call(call, avals)
        num_inputs = len(call_avals_in)
        num_sms = call.num_sms or num_sms_of(group, operation, num_slots)
        if phase:
            num_sms = group.sms_of(operation) or SPLIT_NUM_SMS
        call_results = custom_call(
            ctx.replace(
                avals_in=[*call_avals_in, *call_avals_out[: len(results_in_flight)]],
                avals_out=call_avals_out,
            ),
            f"{call.target}_{phase}" if phase else call.target,
            [*_of_call(call, inputs), *results_in_flight],
            call_placement,
            call.attributes,
            num_sms=num_sms,
            half_bytes=half_bytes,
            is_split=bool(phase),
            aliases={num_inputs + i: i for i in range(len(results_in_flight))},
        )
        for i, result in zip(call.results, call_results, strict=True):
            results[i] = result
    return results
