"""Hold the sizes at which the package changes how it runs a layer, each with its measurement.

All figures are in docs/history/speed.md.
"""

from __future__ import annotations

from typing import NamedTuple

# Up to this number of tokens of a rank, one primitive routes and dispatches them (256 tokens
# take 64 us in one launch and 68 us in two, on 4 GPUs).
FUSED_MAX_TOKENS = 256


class Sizes(NamedTuple):
    """Hold sizes of a layer at which a schedule gains."""

    min_ranks: int
    max_intermediate: int


# The last combine of the backward pass runs next to the weight gradient of the first product if the
# layer is like one of these ("Schedules of a layer": peers played on one H100, 4,096 tokens, with
# both weight gradients next to the combine). The backward pass gained 2.8 to 7.2 % at the first
# sizes with 4 and 8 ranks, and 2.5 to 3.7 % at the second. With 2 ranks (-0.2 to 2.7 %), and with 4
# ranks at intermediate 2,048 (-0.7 to 1.4 %), the gain was within the noise. In JAX on 2 GPUs it
# was 0 (6,552 us with it, 6,562 us without); in JAX on more GPUs it was not measured.
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
