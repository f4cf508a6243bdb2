"""Define ``RouterChoices``: the experts of each token, and their weights."""

from __future__ import annotations

from typing import Any, NamedTuple


class RouterChoices(NamedTuple):
    """The K chosen experts of each token. The arrays may have any leading axes.

    A ``TopK`` router returns ``RouterChoices``. ``moe`` accepts them in place of a router, and
    ``moe_mlp`` accepts those of one rank.
    """

    ids: Any
    """[..., K] integers: the experts of each token. -1 means no expert, as in masked tokens."""
    weights: Any = None
    """[..., K] floats: the router weight of each choice, or None for an unweighted sum."""
    scores: Any = None
    """[..., E] floats: the scores of all experts, for ``load_balancing_loss``; or None. ``TopK``
    divides the scores of each token by their sum. It sets the scores of masked tokens to 0."""
