"""Choose how many SMs a call uses, by measurement (docs/history/speed.md).

The handler reduces a budget to what the GPU has.
"""

from __future__ import annotations

from ..group import Group

# More SMs are no faster at 4096 tokens, and the rest of the program needs some too.
DEFAULT_NUM_SMS = 64
# An exchange of few tokens ends before it delays other work.
FEW_TOKENS = 512
FEW_TOKENS_NUM_SMS = 128
# Weighing and encoding need more SMs than moving.
WEIGHTED_NUM_SMS = 128
FORMAT_NUM_SMS = 128
ALONE_NUM_SMS = 132  # of a domain of one rank
SPLIT_NUM_SMS = 24  # of a split exchange: the work between start and done needs the others


def default_num_sms(num_tokens: int) -> int:
    """Return the default number of SMs of a route, dispatch or combine."""
    return FEW_TOKENS_NUM_SMS if num_tokens <= FEW_TOKENS else DEFAULT_NUM_SMS


def num_sms_of(group: Group, operation: str, num_tokens: int) -> int:
    """Return the SMs of a whole exchange, or of a route, with this number of tokens per rank."""
    if group.size == 1:  # local memory takes what all SMs can provide, and no rank waits for a peer
        return group.sms_of(operation) or ALONE_NUM_SMS
    return group.sms_of(operation) or default_num_sms(num_tokens)
