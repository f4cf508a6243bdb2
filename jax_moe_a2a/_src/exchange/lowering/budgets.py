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
# Fewer ranks, and fewer tokens of all ranks, gain little (docs/history/speed.md, "A combine next to
# its product").
DOT_COMBINE_RANKS, DOT_COMBINE_TOKENS = 8, 8192

DISPATCH_DOT_NUM_SMS = native.tuning("DISPATCH_DOT_NUM_SMS")  # of a dispatch next to a product
DISPATCH_DOT_RANKS, DISPATCH_DOT_TOKENS = 8, 8192
# Computed: a dispatch on 32 SMs takes as long as a product of its rows with 400 columns.
DISPATCH_DOT_COLUMNS = 1024


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
    least = DOT_COMBINE_RANKS, DOT_COMBINE_TOKENS
    return _num_sms_next_to(
        group, "combine", "dot_combine", DOT_COMBINE_NUM_SMS, num_tokens, *least
    )


def num_sms_of_dispatch_dot(group: Group, num_tokens: int) -> int:
    """Return the SMs of a dispatch next to the product of its rows, or 0 if it comes before."""
    least = DISPATCH_DOT_RANKS, DISPATCH_DOT_TOKENS
    return _num_sms_next_to(
        group, "dispatch", "dispatch_dot", DISPATCH_DOT_NUM_SMS, num_tokens, *least
    )


def least_columns_of_dispatch_dot(group: Group) -> int:
    """Return the least columns of a product that a dispatch runs next to."""
    return DISPATCH_DOT_COLUMNS if group.sms_of("dispatch_dot") is None else 0


def _num_sms_next_to(
    group: Group,
    operation: str,
    call: str,
    default: int,
    num_tokens: int,
    least_ranks: int,
    least_tokens: int,
) -> int:
    num_sms = group.sms_of(call)
    if num_sms is not None:
        return num_sms
    if group.size < least_ranks or group.size * num_tokens < least_tokens:
        return 0
    return min(default, group.sms_of(operation) or default)
