"""Choose how many SMs a call uses.

The numbers are measured; ``cuda/tuning.h`` has the numbers and the reasons. The handler limits a
budget to the SMs of the GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...group import native
from ...group.group import Group

DEFAULT_NUM_SMS = native.tuning("DEFAULT_NUM_SMS")
FEW_TOKENS = native.tuning("FEW_TOKENS")
FEW_TOKENS_NUM_SMS = native.tuning("FEW_TOKENS_NUM_SMS")
WEIGHTED_NUM_SMS = native.tuning("WEIGHTED_NUM_SMS")
FORMAT_NUM_SMS = native.tuning("FORMAT_NUM_SMS")
ALONE_NUM_SMS = native.tuning("ALONE_NUM_SMS")  # of a single-rank domain
SPLIT_NUM_SMS = native.tuning("SPLIT_NUM_SMS")  # of a split exchange


class NextToProduct(NamedTuple):
    """When an exchange runs next to a product by default, and on how many SMs."""

    operation: str  # whose budget limits that of the exchange
    num_sms: int
    ranks: float  # with fewer it was not measured faster (docs/history/speed.md)
    tokens: int  # of all ranks; likewise


NEXT_TO_PRODUCT = dict(
    dot_combine=NextToProduct(
        "combine", native.tuning("DOT_COMBINE_NUM_SMS"), ranks=4, tokens=16384
    ),
    dispatch_dot=NextToProduct(
        "dispatch", native.tuning("DISPATCH_DOT_NUM_SMS"), ranks=math.inf, tokens=0
    ),
)


def default_num_sms(num_tokens: int) -> int:
    """Return the default number of SMs of a route, dispatch or combine."""
    return FEW_TOKENS_NUM_SMS if num_tokens <= FEW_TOKENS else DEFAULT_NUM_SMS


def num_sms_of(group: Group, operation: str, num_tokens: int) -> int:
    """Return the SMs of a route or a whole exchange with this number of tokens per rank."""
    if group.size == 1:  # all SMs, because only local memory limits the speed
        return group.sms_of(operation) or ALONE_NUM_SMS
    return group.sms_of(operation) or default_num_sms(num_tokens)


def num_sms_next_to_product(group: Group, call: str, num_tokens: int) -> int:
    """Return the SMs of an exchange next to a product, or 0 if one comes after the other.

    Args:
      call: ``"dispatch_dot"`` or ``"dot_combine"``.
    """
    num_sms = group.sms_of(call)
    if num_sms is not None:
        return num_sms
    default = NEXT_TO_PRODUCT[call]
    if group.size < default.ranks or group.size * num_tokens < default.tokens:
        return 0
    return min(default.num_sms, group.sms_of(default.operation) or default.num_sms)
