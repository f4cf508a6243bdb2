"""Compute how many rows a rank reserves, and check how many experts a token chooses."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

from ..checks import check_factor, check_int, taken_from

MAX_TOP_K = 32  # a warp's lanes hold one token's choices
KEEP_ALL = ". Omit {} to drop no row"  # libraries in which a number such as -1 means this exist


class Sizes(NamedTuple):
    """The sizes that decide how many rows a rank reserves: arguments of ``default_capacity``."""

    num_tokens: int
    top_k: int
    group_size: int
    num_experts: int
    alignment: int
    shared_expert: bool
    replicated: bool

    def rows(self, factor: float | None = None) -> int:
        """Return the number of rows that holds ``factor`` times the balanced load, or with None the
        worst case.

        Raises:
          TypeError: if a size is not an int.
          ValueError: if a size is out of range.
        """
        leasts = dict(num_tokens=0, top_k=0, group_size=1, num_experts=1, alignment=1)
        num_tokens, top_k, group_size, num_experts, alignment = (
            check_int(name, getattr(self, name), least=least) for name, least in leasts.items()
        )
        num_rows = (1 if self.replicated else group_size) * num_tokens * top_k
        if factor is not None:
            # Compute with the decimal number: 1.1 times 10 rows are 11 rows, and not 12.
            share = Fraction(str(factor)) / group_size
            num_rows = min(num_rows, math.ceil(share * num_rows))
        shared = 0
        if self.shared_expert:
            shared = shared_tokens(num_tokens, group_size, self.replicated)
        padded = _padded_rows(num_rows, num_experts // group_size, alignment)
        return padded + -(-shared // alignment) * alignment

    def capacity(self, rows: Any, factor: Any) -> int:
        """Return the capacity for the arguments ``capacity`` (here ``rows``) and
        ``capacity_factor`` (here ``factor``), or the worst case if both are None.

        Raises:
          TypeError: if an argument has the wrong type.
          ValueError: if an argument is out of range, or both are given.
        """
        if rows is not None and factor is not None:
            raise ValueError(
                f"capacity must be None with a capacity_factor; got {rows!r} and {factor!r}. Pass "
                "one of them"
            )
        if rows is not None:
            return check_int("capacity", rows, least=0, remedy=KEEP_ALL.format("capacity"))
        if factor is not None:
            factor = check_factor("capacity_factor", factor, KEEP_ALL.format("capacity_factor"))
        return self.rows(factor)


def default_capacity(
    num_tokens: int,
    top_k: int,
    group_size: int,
    num_experts: int,
    alignment: int = 1,
    *,
    shared_expert: bool = False,
    replicated: bool = False,
) -> int:
    """Return the number of rows with which no routing drops a row.

    In the worst case, every token of every rank chooses only experts of one rank. With alignment,
    each local expert that has rows also has up to ``alignment - 1`` rows of padding.

    Args:
      num_tokens: tokens of each rank.
      top_k: choices of each token.
      group_size: number of ranks.
      num_experts: number of experts of all ranks together.
      alignment: the rows of each local expert start at a multiple of this number.
      shared_expert: adds the rows of the shared expert, rounded up to ``alignment``.
      replicated: counts the tokens of one rank only, because nothing is exchanged.

    Returns:
      The number of rows, a multiple of ``alignment``.

    Raises:
      TypeError: if a size is not an int.
      ValueError: if a size is out of range.
    """
    return taken_from(locals(), Sizes).rows()


def capacity(
    factor: float,
    *,
    num_tokens: int,
    top_k: int,
    group_size: int,
    num_experts: int,
    alignment: int = 1,
    shared_expert: bool = False,
    replicated: bool = False,
) -> int:
    """Return the number of rows that holds ``factor`` times the balanced load of a rank.

    The load is balanced if every rank receives equally many rows: ``num_tokens * top_k``, or with
    replicated tokens ``num_tokens * top_k / group_size``. Padding for ``alignment`` and the rows of
    a shared expert are added to ``factor`` times this load. So an alignment never causes more
    drops. The result is at most ``default_capacity``, with which nothing is dropped.

    The argument ``capacity_factor`` of ``route`` and ``dispatch`` uses this function. The idea is
    the expert capacity of GShard (Lepikhin et al., arXiv:2006.16668), counted per rank instead of
    per expert.

    Args:
      factor: capacity in multiples of the balanced load, above 0. A factor of ``group_size`` holds
        the worst case.
      num_tokens: tokens of each rank.
      top_k: choices of each token.
      group_size: number of ranks.
      num_experts: number of experts of all ranks together.
      alignment: the rows of each local expert start at a multiple of this number.
      shared_expert: adds the rows of the shared expert, rounded up to ``alignment``.
      replicated: counts the tokens of one rank only, because nothing is exchanged.

    Returns:
      The number of rows, a multiple of ``alignment``.

    Raises:
      TypeError: if a size is not an int, or ``factor`` is not a number.
      ValueError: if a size or ``factor`` is out of range.

    Example:
      Room for 1.25 times the balanced load of 1,024 tokens with 8 choices, with and without
      alignment for 8 local experts:

      ```python
      import jax_moe_a2a as ma

      sizes = dict(num_tokens=1024, top_k=8, group_size=4, num_experts=32)
      print(ma.capacity(1.25, **sizes), ma.capacity(1.25, **sizes, alignment=128))
      ```

      ```text
      10240 11264
      ```
    """
    return taken_from(locals(), Sizes).rows(check_factor("factor", factor))


def _padded_rows(num_rows: int, num_local_experts: int, alignment: int) -> int:
    """Return the most rows, with padding, that ``num_rows`` rows of local experts can need, rounded
    up to the alignment."""
    num_rows += min(num_local_experts, num_rows) * (alignment - 1)
    return -(-num_rows // alignment) * alignment


def check_top_k(
    top_k: int, shared_expert: bool = False, *, name: str = "top_k", of: str = ""
) -> None:
    """Raise a ValueError if tokens have too many choices. ``of`` ends the message."""
    most = MAX_TOP_K - shared_expert
    if top_k > most:
        which = " with a shared expert" * shared_expert
        raise ValueError(f"{name} must be at most {most}{which}; got {top_k}{of}")


def shared_tokens(num_tokens: int, group_size: int, replicated: bool) -> int:
    """Return the number of tokens of a rank's shared expert: all tokens of the rank, or the rank's
    share of replicated tokens."""
    return -(-num_tokens // group_size) if replicated else num_tokens
