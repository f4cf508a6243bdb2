"""Hold the sizes at which the package changes how it runs a layer, each with its measurement.

All figures are in docs/history/speed.md.
"""

from __future__ import annotations

from typing import NamedTuple

# Up to this number of tokens of a rank, one primitive routes and dispatches them ("Version 3" and
# the records of the standard settings).
FUSED_MAX_TOKENS = 256


class Sizes(NamedTuple):
    """Hold sizes of a layer at which a schedule gains."""

    min_ranks: int
    max_intermediate: int


# The last combine of the backward pass runs next to the weight gradients of the first product if
# the layer is like one of these ("Schedules of a layer", peers played on one H100, 4,096 tokens).
# The gain was 2.8 to 7.2 % of the backward pass at the first sizes, and 2.5 to 3.7 % at the second.
# It was below 2 %, or within the noise, with 2 ranks, and with 4 ranks at intermediate 2,048. On 2
# GPUs in JAX it was 0 (6,552 us with it, 6,562 us without). In JAX on 4 GPUs it was not measured.
OVERLAPPED_BACKWARD = (
    Sizes(min_ranks=4, max_intermediate=1536),
    Sizes(min_ranks=8, max_intermediate=2048),
)
OVERLAPPED_BACKWARD_MIN_TOKENS = 4096


def overlaps_backward(*, ranks: int, tokens: int, intermediate: int) -> bool:
    """Return True if the backward pass of such a layer is faster with a split combine."""
    return tokens >= OVERLAPPED_BACKWARD_MIN_TOKENS and any(
        ranks >= sizes.min_ranks and intermediate <= sizes.max_intermediate
        for sizes in OVERLAPPED_BACKWARD
    )
