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


def default_num_sms(num_tokens: int) -> int:
    """Return the default number of SMs of a route, dispatch or combine."""
    return FEW_TOKENS_NUM_SMS if num_tokens <= FEW_TOKENS else DEFAULT_NUM_SMS


def num_sms_of(group: Group, operation: str, num_tokens: int) -> int:
    """Return the SMs of a route or a whole exchange with this number of tokens per rank."""
    if group.size == 1:  # all SMs, because only local memory limits the speed
        return group.sms_of(operation) or ALONE_NUM_SMS
    return group.sms_of(operation) or default_num_sms(num_tokens)
