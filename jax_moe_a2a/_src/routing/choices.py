"""Define the experts and router weights that tokens have chosen."""

from __future__ import annotations

from typing import Any, NamedTuple


class RouterChoices(NamedTuple):
    """The choices of tokens. Each token has K choices, and tokens may have any leading axes.

    A ``TopK`` returns choices. ``moe`` accepts choices in place of a router, and ``moe_mlp``
    accepts the choices of one rank.
    """

    ids: Any
    """[..., K] integers: the experts of each token. -1 means no expert, as in masked tokens."""
    weights: Any
    """[..., K] floats: the router weight of each choice, or None for an unweighted sum."""
    scores: Any = None
    """[..., E] floats: the scores of all experts, for ``load_balancing_loss``; or None. ``TopK``
    divides the scores of each token by their sum. It sets the scores of masked tokens to 0."""
