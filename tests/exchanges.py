"""Count the exchanges that a GPU's counters show.

If all ranks share one GPU, every test states how many exchanges it makes on each rank. Otherwise a
test whose calls take the portable path would pass without any kernel.
"""

import dataclasses

from device_counters import epochs_of

from jax_moe_a2a._src.group import native


@dataclasses.dataclass(frozen=True)
class Count:
    """Numbers of exchanges on each rank: whole exchanges, and split exchanges (a start and its
    done)."""

    whole: int = 0
    split: int = 0

    def __add__(self, other):
        return Count(self.whole + other.whole, self.split + other.split)

    def __sub__(self, other):
        return Count(self.whole - other.whole, self.split - other.split)

    def times(self, factor):
        return Count(self.whole * factor, self.split * factor)


def shown_by_counters(group):
    """Return the exchanges since the workspaces opened, from the counters of the group's ranks.

    Replicated tokens are exchanged by `group.single_rank`, whose separate counters are added.
    """
    total = Count()
    for topology in (group.topology, group.single_rank.topology):
        whole, split = (num_exchanges(topology, kind) for kind in native.WORKSPACE_KINDS)
        total += Count(whole, split)
    return total


def num_exchanges(topology, kind):
    """Return how many exchanges each rank of a topology has made; 0 while its workspace is closed.

    Epochs number the exchanges of a rank from 1.
    """
    of_ranks = {next_epoch - 1 for next_epoch, *_ in epochs_of(topology, kind)}
    assert len(of_ranks) <= 1, f"ranks have made different numbers of exchanges: {of_ranks}"
    return of_ranks.pop() if of_ranks else 0
