"""Read the exchange counters that a workspace has in device memory."""

import dataclasses

import jax

from jax_moe_a2a._src.group import group as group_module
from jax_moe_a2a._src.group import native


@dataclasses.dataclass(frozen=True)
class DeviceCounters:
    """The exchange counters of a rank on a device; epoch n is the n-th exchange."""

    device: jax.Device
    rank: int
    num_exchanges: int
    credits: tuple[tuple[int, ...], ...]
    """[ring halves, ranks]: the last epoch whose rows from this rank the peer has read, or 0."""
    heads: tuple[tuple[int, ...], ...]
    """[ring halves, ranks]: the last epoch that the peer has announced to this rank, or 0."""


def epochs_of(topology, kind=native.WHOLE):
    """Return (next epoch, poison, credits, heads) of each device, or [] if the workspace is closed.
    Credits and heads list all ranks for the first ring half, then for the second. The caller must
    ensure that no exchange runs."""
    problem, values = native._native.counters(*topology, kind)
    native._raise(problem)
    return values


def counters_of(group):
    """Return the counters of unsplit exchanges in the order of ``Group.memory``, or () without an
    open workspace."""
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
