"""Count the exchanges of a group, which show whether kernels or the portable path ran."""

import dataclasses

from device_counters import epochs_of

from jax_moe_a2a._src.group import native


@dataclasses.dataclass(frozen=True)
class Count:
    """The numbers of unsplit (whole) and of split exchanges on each rank."""

    whole: int = 0
    split: int = 0

    def __add__(self, other):
        return Count(self.whole + other.whole, self.split + other.split)

    def __sub__(self, other):
        return Count(self.whole - other.whole, self.split - other.split)

    def times(self, factor):
        return Count(self.whole * factor, self.split * factor)


def shown_by_counters(group):
    """Return the number of exchanges since the workspaces opened, including the exchanges of
    replicated tokens (`group.single_rank`)."""
    total = Count()
    for topology in (group.topology, group.single_rank.topology):
        whole, split = (num_exchanges(topology, kind) for kind in native.WORKSPACE_KINDS)
        total += Count(whole, split)
    return total


def num_exchanges(topology, kind):
    """Return the number of exchanges, equal on all ranks, or 0 if the workspace is closed."""
    of_ranks = {next_epoch - 1 for next_epoch, *_ in epochs_of(topology, kind)}
    assert len(of_ranks) <= 1, f"ranks have made different numbers of exchanges: {of_ranks}"
    return of_ranks.pop() if of_ranks else 0
