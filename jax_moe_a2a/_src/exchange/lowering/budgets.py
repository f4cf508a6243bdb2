"""Choose how many SMs a call uses.

The numbers are measured; ``cuda/tuning.h`` has the numbers and the reasons. The handler limits a
budget to the SMs of the GPU.
"""

from __future__ import annotations

from ...group import native
from ...group.group import Group

DEFAULT_NUM_SMS = native.tuning("DEFAULT_NUM_SMS")
FEW_TOKENS = native.tuning("FEW_TOKENS")
FEW_TOKENS_NUM_SMS = native.tuning("FEW_TOKENS_NUM_SMS")
WEIGHTED_NUM_SMS = native.tuning("WEIGHTED_NUM_SMS")
FORMAT_NUM_SMS = native.tuning("FORMAT_NUM_SMS")
ALONE_NUM_SMS = native.tuning("ALONE_NUM_SMS")  # of a single-rank domain
SPLIT_NUM_SMS = native.tuning("SPLIT_NUM_SMS")  # of a split exchange
DOT_COMBINE_NUM_SMS = native.tuning("DOT_COMBINE_NUM_SMS")  # of a combine next to its product
# With fewer ranks or fewer tokens of all ranks, it was not measured faster (docs/history/speed.md).
DOT_COMBINE_RANKS, DOT_COMBINE_TOKENS = 4, 16384


def default_num_sms(num_tokens: int) -> int:
    """Return the default number of SMs of a route, dispatch or combine."""
    return FEW_TOKENS_NUM_SMS if num_tokens <= FEW_TOKENS else DEFAULT_NUM_SMS


def num_sms_of(group: Group, operation: str, num_tokens: int) -> int:
    """Return the SMs of a route or a whole exchange with this number of tokens per rank."""
    if group.size == 1:  # all SMs, because only local memory limits the speed
        return group.sms_of(operation) or ALONE_NUM_SMS
    return group.sms_of(operation) or default_num_sms(num_tokens)


def num_sms_of_dot_combine(group: Group, num_tokens: int) -> int:
    """Return the SMs of a combine next to its product, or 0 if it comes after the product."""
    num_sms = group.sms_of("dot_combine")
    if num_sms is not None:
        return num_sms
    if group.size < DOT_COMBINE_RANKS or group.size * num_tokens < DOT_COMBINE_TOKENS:
        return 0
    return min(DOT_COMBINE_NUM_SMS, group.sms_of("combine") or DOT_COMBINE_NUM_SMS)
