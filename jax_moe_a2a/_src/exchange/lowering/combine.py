"""Choose the kernel calls of a combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...formats.formats import TokenFormat
from ...group import native
from .budgets import FORMAT_NUM_SMS
from .call_placement import CallPlacement
from .dispatch import global_scale
from .exchange import KernelCall


def combine_calls(
    call_placement: CallPlacement, payload: Sequence[Any], params: dict[str, Any]
) -> list[KernelCall]:
    """Return the calls of a combine, whole or split. Each call sums the leaves of one dtype, and
    the first call also moves the choice arrays. The payload may end with addends of the leaves."""
    num_leaves, wire = params["num_leaves"], params["options"].wire_dtype
    leaves, num_moved = payload[:num_leaves], num_leaves + params["num_choice_arrays"]
    has_addends = params["options"].num_addends > 0
    calls = []
    choice_arrays_left = list(range(num_leaves, num_moved))
    for dtype in dict.fromkeys(aval.dtype for aval in leaves) or [None]:  # None: choice arrays only
        own = [i for i in range(num_leaves) if leaves[i].dtype == dtype]
        addends = [num_moved + i for i in own if has_addends]
        results = own + choice_arrays_left
        counts = dict(
            num_choice_arrays=len(choice_arrays_left), num_pairs=0, num_addends=len(addends)
        )
        calls.append(_call(call_placement, results + addends, results, dtype, wire, counts))
        choice_arrays_left = []
    return calls


def weighted_combine_calls(
    call_placement: CallPlacement, payload: Sequence[Any], params: dict[str, Any]
) -> list[KernelCall]:
    """Return the call of a weighted combine, whole or split. The rank of the rows scales and sums
    them. The payload may end with an addend."""
    num_pairs = params["num_leaves"]
    options = params["options"]
    counts = dict(num_choice_arrays=0, num_pairs=num_pairs, num_addends=options.num_addends)
    arrays, dtype = range(len(payload)), payload[0].dtype
    return [_call(call_placement, arrays, [0], dtype, options.wire_dtype, counts)]


def _call(
    call_placement: CallPlacement,
    arrays: Sequence[int],
    results: Sequence[int],
    dtype: Any,
    wire: Any,
    counts: dict[str, int],
) -> KernelCall:
    """Return a call whose partial sums of ``dtype`` rows travel in ``wire``: a dtype, a token
    format, or None for ``dtype``. If ``dtype`` is None, there are no sums."""
    fmt = wire if isinstance(wire, TokenFormat) else None
    num_sms = None
    if fmt and call_placement.group.size > 1:
        num_sms = call_placement.group.sms_of("combine") or FORMAT_NUM_SMS
    attributes = dict(counts, wire=_wire_name(wire, dtype), global_scale=global_scale(fmt))
    return KernelCall("moe_a2a_combine", arrays, results, attributes, num_sms)


def _wire_name(wire: Any, dtype: Any) -> str:
    """Return the kernels' name of ``wire``; '' if there are no sums."""
    if dtype is None:
        return ""
    if isinstance(wire, TokenFormat):
        return type(wire).__name__
    return native.type_name(dtype if wire is None else wire)
