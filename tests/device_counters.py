"""Read the sync counters of a group's workspace. Tests compare them with the exchanges that they
made."""

import dataclasses

import jax

from jax_moe_a2a._src.group import group as group_module
from jax_moe_a2a._src.group import native


@dataclasses.dataclass(frozen=True)
class DeviceCounters:
    """The sync counters of one device. An epoch is the number of an exchange, from 1."""

    device: jax.Device
    rank: int
    """The rank of these counters. If several ranks share a GPU, each has separate counters."""
    num_exchanges: int
    """Number of exchanges on this rank since the workspace opened."""
    credits: tuple[tuple[int, ...], ...]
    """[ring halves, ranks]: the last epoch whose rows from this rank each peer has read; 0 for this
    rank itself, and for a peer that has read none."""
    heads: tuple[tuple[int, ...], ...]
    """[ring halves, ranks]: the last epoch that each peer has announced to this rank; 0 for this
    rank itself, and for a peer that has announced none."""


def epochs_of(topology, kind=native.WHOLE):
    """Return (next epoch, poison, credits, heads) of each device; [] while the workspace is closed.
    Credits and heads list the ranks of one ring half after the other. No exchange of the topology
    may run during this call."""
    problem, values = native._native.counters(*topology, kind)
    native._raise(problem)
    return values


def counters_of(group):
    """Return the ``DeviceCounters`` of each device, in the order of ``Group.memory``. Counters of
    split exchanges and of replicated tokens are left out. Return () on the portable path, with two
    levels, or while the workspace is closed."""
    if group.two_level:
        return ()

    def by_slot(words):
        return tuple(tuple(words[i : i + group.size]) for i in range(0, len(words), group.size))

    found = []
    for of_devices, own_devices in group_module._places(group):
        ids = list(of_devices.devices)
        for i, (next_epoch, _, credits, heads) in enumerate(epochs_of(of_devices)):
            device = own_devices[i]
            is_shared = ids.count(device.id) > 1
            rank = (i if is_shared else ids.index(device.id)) % group.size
            words = by_slot(credits), by_slot(heads)
            found.append(DeviceCounters(device, rank, next_epoch - 1, *words))
    return tuple(found)
