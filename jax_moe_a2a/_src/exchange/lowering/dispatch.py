"""Choose the kernel call of a dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...formats.formats import NvFp4, TokenFormat
from ..record import Options
from .budgets import FORMAT_NUM_SMS, WEIGHTED_NUM_SMS
from .call_placement import CallPlacement, Refused
from .exchange import KernelCall


def global_scale(fmt: TokenFormat | None) -> float:
    """Return the global scale of a format as an attribute; 1 if the format has no global scale."""
    return float(fmt.global_scale) if isinstance(fmt, NvFp4) else 1.0


def dispatch_attributes(params: dict[str, Any]) -> dict[str, Any]:
    """Return how a dispatch moves its payload, and quantizes it if there is a format."""
    options: Options = params["options"]
    attributes = dict(
        num_choice_arrays=params["num_choice_arrays"],
        leaves_tail=options.tail == "unspecified",
    )
    if options.token_format is None:
        return attributes
    return dict(
        attributes,
        num_leaves=params["num_leaves"],
        format=type(options.token_format).__name__,
        decode=options.decode,
        has_token_scales=options.has_token_scales,
        global_scale=global_scale(options.token_format),
    )


def dispatch_calls(
    call_placement: CallPlacement, payload: Sequence[Any], params: dict[str, Any]
) -> list[KernelCall]:
    """Return the call of a dispatch, whole or split. One call moves all arrays as bytes, and
    quantizes the leaves if there is a format."""
    options: Options = params["options"]
    arrays, attributes = range(len(payload)), dispatch_attributes(params)
    if options.token_format is None:
        return [KernelCall("moe_a2a_dispatch", arrays, arrays, attributes)]
    num_results = options.results_per_leaf * params["num_leaves"] + params["num_choice_arrays"]
    num_sms = call_placement.group.sms_of("dispatch") or FORMAT_NUM_SMS
    return [KernelCall("moe_a2a_format_dispatch", arrays, range(num_results), attributes, num_sms)]


def weighted_dispatch_calls(
    call_placement: CallPlacement, payload: Sequence[Any], params: dict[str, Any]
) -> list[KernelCall]:
    """Return the call of a weighted dispatch, which weighs rows as they arrive."""
    if call_placement.group.size == 1:
        raise Refused("XLA's fusion is faster on a single rank")  # docs/history/speed.md
    num_rows, num_weights = params["num_leaves"], params["num_choice_arrays"]
    return [
        KernelCall(
            "moe_a2a_weighted_dispatch",
            range(len(payload)),
            range(num_rows + num_weights),
            dict(num_rows=num_rows, num_weights=num_weights),
            call_placement.group.sms_of("dispatch") or WEIGHTED_NUM_SMS,
        )
    ]
