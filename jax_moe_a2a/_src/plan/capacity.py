"""Compute how many rows a rank reserves, and check how many experts a token chooses."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from ..checks import check_int

MAX_TOP_K = 32  # each lane of a warp has one choice of a token


class Sizes(NamedTuple):
    """The sizes that decide how many rows a rank reserves."""

    num_tokens: int
    top_k: int
    group_size: int
    num_experts: int
    alignment: int
    replicated: bool

    def rows(self, factor: float | None = None) -> int:
        """Return the rows for ``factor`` times the balanced load. None means the worst case."""
        leasts = dict(num_tokens=0, top_k=0, group_size=1, num_experts=1, alignment=1)
        num_tokens, top_k, group_size, num_experts, alignment = (
            check_int(name, getattr(self, name), least=least) for name, least in leasts.items()
        )
        num_rows = (1 if self.replicated else group_size) * num_tokens * top_k
        if factor is not None:
            # Multiply as decimals. The float product 1.1 * 10 would be rounded up to 12.
            share = Fraction(str(factor)) / group_size
            num_rows = min(num_rows, math.ceil(share * num_rows))
        # Add the largest possible padding, and round up to the alignment.
        num_rows += min(num_experts // group_size, num_rows) * (alignment - 1)
        return -(-num_rows // alignment) * alignment


def check_top_k(top_k: int, *, name: str = "top_k", of: str = "") -> None:
    if top_k > MAX_TOP_K:
        raise ValueError(f"{name} must be at most {MAX_TOP_K}; got {top_k}{of}")
