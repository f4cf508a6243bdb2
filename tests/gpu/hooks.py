"""Set the hooks of a test build: rules of the protocol to break, phases to delay, ring halves to
use."""

import contextlib
import enum
import pathlib
import re

import checked
import harness
import jax

from jax_moe_a2a._src.group import native

CUDA = pathlib.Path(__file__).parents[2] / "cuda"
SIGNAL, STATUS = ((CUDA / name).read_text() for name in ("device/signal.cuh", "status.h"))


def enumeration(source, name):
    """Return an enumeration of the kernels, with NONE = 0. `kSendCredit` is `SEND_CREDIT`."""
    body = re.search(rf"enum (?:class )?{name} : uint32_t {{(.*?)}};", source, re.S)[1]
    numbers = {
        re.sub(r"(?<!^)(?=[A-Z])", "_", member).upper(): int(number)
        for member, number in re.findall(r"k(\w+) = (\d+)", body)
    }
    return enum.IntEnum(name, {"NONE": 0, **numbers})


Mutation = enumeration(SIGNAL, "Mutation")  # the rule to break
Phase = enumeration(STATUS, "Phase")  # the phase to delay, and where a failure happened

# The phases that the kernels can delay. In the other phases, a rank waits for a rank in one of
# these phases.
DELAYABLE = (Phase.SEND, Phase.RECEIVE_CHUNK)

# How a failure names its phase.
PHASE_TEXT = {
    phase: re.search(
        rf'case Phase::k{phase.name.title().replace("_", "")}: return "(.*)";', STATUS
    )[1]
    for phase in Phase
    if phase
}


def set_hooks(
    group,
    *,
    mutation=Mutation.NONE,
    phase=Phase.NONE,
    rank=None,
    delay=0.0,
    depth=0,
    kind=native.WHOLE,
):
    """Replace the hooks of an open group. `rank`, or all ranks for None, waits `delay` seconds in
    `phase`.

    A mutation and a depth (0: the default) hold for all ranks. Every process must call this
    function, which sets the hooks of the ranks of this process.
    """
    devices, num_ranks = group.topology
    assert len(devices) == num_ranks, "hooks are for groups of one domain"
    delayed = int(phase), int(delay * 1e9)
    assert_open(group, kind)
    with nothing_under_way():
        of_all = delayed if rank is None else (0, 0)
        set_hooks_of(group, -1, mutation, *of_all, depth, kind)
        if rank is not None:  # another process sets the hooks of its ranks
            set_hooks_of(group, rank, mutation, *delayed, depth, kind)


def set_hooks_of(group, index, mutation, phase=0, delay_ns=0, depth=0, kind=native.WHOLE):
    """Set the hooks of the rank with this index in the topology, or (-1) of all ranks of this
    process, until the group is closed. The workspace must be open."""
    hooks = index, int(mutation), phase, delay_ns, depth
    native._raise(native._native.set_hooks(*group.topology, kind, *hooks))


def set_epoch_of(group, index, epoch, kind=native.WHOLE):
    """Let a rank, or (-1) all ranks of this process, continue as if `epoch - 1` exchanges had
    run."""
    native._raise(native._native.set_epoch(*group.topology, kind, index, epoch))


def set_credits_of(group, index, epoch):
    """Set the credits of a rank, as if its peers had read all its rows up to `epoch`."""
    native._raise(native._native.set_credits(*group.topology, native.WHOLE, index, epoch))


def set_uncapped(group, is_uncapped):
    """Let ranks on one GPU launch all blocks of their budget. Without this setting, a launch has
    only as many blocks as the GPU can run at once."""
    native._native.set_uncapped(*group.topology, native.WHOLE, is_uncapped)


def set_epoch(group, epoch):
    """Continue as if `epoch - 1` whole exchanges had run. Every process calls this."""
    assert_open(group, native.WHOLE)
    with nothing_under_way():
        set_epoch_of(group, -1, epoch)
    checked.restart(group, whole=epoch - 1)


def assert_open(group, kind):
    opened = native.reserved_bytes(group.topology, kind)
    assert opened, "run an exchange first: it opens the workspace"


@contextlib.contextmanager
def nothing_under_way():
    """Meet before and after the block with idle devices, so that no process raises a flag or posts
    a credit while another process sets its hooks or its epoch."""
    # A sum runs after all earlier work of its device.
    jax.block_until_ready([jax.device_put(0, device) + 1 for device in jax.local_devices()])
    harness.of_all_processes(None)
    yield
    harness.of_all_processes(None)


@contextlib.contextmanager
def hooked(group, **hooks):
    """Set hooks as `set_hooks` does, and close the group afterwards, which removes them."""
    try:
        set_hooks(group, **hooks)
        yield
    finally:
        checked.close(group)
