"""Set the hooks of a test build."""

import contextlib
import enum
import functools
import pathlib
import re

import checked
import harness
import jax

from jax_moe_a2a._src.group import native

CUDA = pathlib.Path(__file__).parents[2] / "cuda"
SIGNAL, STATUS = ((CUDA / name).read_text() for name in ("device/signal.cuh", "status.h"))


def enumeration(source, name):
    """Read an enumeration from a CUDA source: `kSendCredit` becomes `SEND_CREDIT`."""
    body = re.search(rf"enum (?:class )?{name} : uint32_t {{(.*?)}};", source, re.S)[1]
    numbers = {
        re.sub(r"(?<!^)(?=[A-Z])", "_", member).upper(): int(number)
        for member, number in re.findall(r"k(\w+) = (\d+)", body)
    }
    return enum.IntEnum(name, {"NONE": 0, **numbers})


Mutation = enumeration(SIGNAL, "Mutation")
Phase = enumeration(STATUS, "Phase")

# The kernels can delay these phases; in others, a rank waits for another rank.
DELAYABLE = (Phase.SEND, Phase.RECEIVE_CHUNK)

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
    """Replace the hooks of an open group. Every process must call this function.

    Args:
      mutation: the rule that all ranks break.
      phase: the phase in which `rank` (None: every rank) waits `delay` seconds.
      depth: the number of ring halves on all ranks (0: the default).
    """
    devices, num_ranks = group.topology
    assert len(devices) == num_ranks, "hooks are for groups of one domain"
    delayed = int(phase), int(delay * 1e9)
    assert_open(group, kind)
    with nothing_under_way():
        of_all = delayed if rank is None else (0, 0)
        set_hooks_of(group, -1, mutation, *of_all, depth, kind)
        if rank is not None:
            set_hooks_of(group, rank, mutation, *delayed, depth, kind)


def set_hooks_of(group, index, mutation, phase=0, delay_ns=0, depth=0, kind=native.WHOLE):
    """Set the hooks of one rank (-1: all ranks of this process) until the group is closed."""
    hooks = index, int(mutation), phase, delay_ns, depth
    native._raise(native._native.set_hooks(*group.topology, kind, *hooks))


def set_epoch_of(group, index, epoch):
    """Let rank `index` (-1: all of this process) continue as if `epoch - 1` exchanges had run."""
    native._raise(native._native.set_epoch(*group.topology, native.WHOLE, index, epoch))


def set_credits_of(group, index, epoch):
    """Set the credits of rank `index`, as if its peers had read all its rows up to `epoch`."""
    native._raise(native._native.set_credits(*group.topology, native.WHOLE, index, epoch))


@contextlib.contextmanager
def uncapped(group):
    """Let ranks on one GPU launch more blocks than the GPU can run at once."""
    set_uncapped = functools.partial(native._native.set_uncapped, *group.topology, native.WHOLE)
    set_uncapped(True)
    try:
        yield
    finally:
        set_uncapped(False)


def set_epoch(group, epoch):
    """Call `set_epoch_of` for all ranks; every process must call this function."""
    assert_open(group, native.WHOLE)
    with nothing_under_way():
        set_epoch_of(group, -1, epoch)
    checked.restart(group, whole=epoch - 1)


def assert_open(group, kind):
    opened = native.reserved_bytes(group.topology, kind)
    assert opened, "run an exchange first: it opens the workspace"


@contextlib.contextmanager
def nothing_under_way():
    """Let no process store flags or credits while the `with` block sets hooks or epochs."""
    # The addition on a device runs after all earlier work of the device.
    jax.block_until_ready([jax.device_put(0, device) + 1 for device in jax.local_devices()])
    harness.of_all_processes(None)
    yield
    harness.of_all_processes(None)


@contextlib.contextmanager
def hooked(group, **hooks):
    """Set hooks for a `with` block. At its end, close the group, which removes the hooks."""
    try:
        set_hooks(group, **hooks)
        yield
    finally:
        checked.close(group)
