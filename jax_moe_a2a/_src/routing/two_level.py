"""Define the routing of a group of two levels."""

from __future__ import annotations

import dataclasses

import jax

from ..checks import short
from ..plan.plan import RoutingArrays
from .types import RoutedRows, Routing, check_arrays, check_int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TwoLevelRouting(RoutedRows):
    """The routing of a group of two levels. The rows and their order are as in a ``Routing``.

    In the shapes, T is the number of tokens per rank, K the number of choices of a token, H the
    number of hosts, C the capacity, and L the number of experts per rank. All arrays are int32. The
    capacity limits only rows. Between hosts, no token is dropped.
    """

    hosts: RoutingArrays
    """Routing of the exchange between hosts, with T tokens and min(K, H) choices per token. Its H *
    T rows are called relayed tokens."""
    ranks: RoutingArrays
    """Routing of the exchange within the host, with H * T relayed tokens, K choices, and C rows."""

    @property
    def row_k(self) -> jax.Array:
        """Return the choice of each row, [C]; -1 for a row without a token."""
        return self.ranks.row_k

    def check(self, argument: str) -> None:
        """Check dtype and shape of all arrays."""
        hosts, ranks = self.group.levels
        check_arrays(argument, self.ranks, ranks.size, self.capacity, level="ranks.")
        num_relayed, top_k = self.ranks.choice_rank.shape
        num_tokens = num_relayed // hosts.size
        check_arrays(argument, self.hosts, hosts.size, num_relayed, level="hosts.")
        check_int32(
            f"{argument} must be a routing as route returned it",
            {"hosts.choice_rank": self.hosts.choice_rank},
            {"hosts.choice_rank": (num_tokens, min(top_k, hosts.size))},
            f"ranks.choice_rank {short(self.ranks.choice_rank)} and {hosts.size} hosts",
        )
        self.check_rows(argument, num_tokens, top_k)


AnyRouting = Routing | TwoLevelRouting
