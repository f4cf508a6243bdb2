"""Define the experts and router weights that tokens have chosen."""

from __future__ import annotations

from typing import Any, NamedTuple


class RouterChoices(NamedTuple):
    """The choices of tokens with any leading axes, K for each token.

    A ``TopK`` returns choices. ``moe`` accepts them in place of a router, and ``moe_mlp`` accepts
    those of one rank.
    """

    ids: Any
    """[..., K] integers: the experts of each token; -1 for no expert, as in masked tokens."""
    weights: Any
    """[..., K] floats: the router weight of each choice, or None for an unweighted sum."""
    scores: Any = None
    """[..., E] floats: the scores of all experts, for ``load_balancing_loss``; or None. ``TopK``
    divides its scores by their sum, and its scores of masked tokens are 0."""
