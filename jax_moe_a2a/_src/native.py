"""The compiled extension: whether it is there, and what of it Python uses.

No other module uses it; ``extension.py`` finds it. Everything here works without it, and says so.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from . import compat, extension

_native: Any = extension.load()  # None: the portable path is complete without it


class Topology(NamedTuple):
    """What a workspace belongs to: the fields of ``Topology`` in ``cuda/runtime/workspace.h``, in
    the order in which the extension takes them."""

    devices: tuple[int, ...]
    """Ids of the devices of all domains, domain after domain in the order of ranks. Ranks that
    share a GPU repeat its id; in a program they have none, because the program decides."""
    num_ranks: int
    """Of a domain."""
    p2p_world_size: int
    """How many neighbouring ranks share memory; the others are reached by NVSHMEM."""

    @property
    def is_wide(self) -> bool:
        """Whether ranks of a domain are beyond each other's loads and stores."""
        return self.p2p_world_size < self.num_ranks


def on_one_gpu(device_id: int | None, num_ranks: int) -> Topology:
    """Return the topology of ranks that share a GPU; None: the one that runs the program."""
    if device_id is None:
        return Topology((), num_ranks, num_ranks)
    introduce_devices()
    return Topology((device_id,) * num_ranks, num_ranks, num_ranks)


# A topology has two rings, each with a workspace of its own (``Ring`` in ``cuda/layout.h``): of
# whole exchanges, and of those in two halves. One that spans hosts has such a pair for each size.
WHOLE_RING: int = 0
SPLIT_RING: int = 1
RINGS = (WHOLE_RING, SPLIT_RING)


def is_split(ring: int) -> bool:
    """Whether a ring is of exchanges in two halves."""
    return ring % len(RINGS) == SPLIT_RING


def has_kernels() -> bool:
    """Whether the extension was built with the CUDA kernels."""
    return _native is not None and _native.has_cuda


def cuda_build() -> str:
    """The toolkit and the architectures that the kernels were built for, in words; '' without."""
    return _native.cuda_build if has_kernels() else ""


def origin() -> str:
    """Return where the extension comes from, in words; '' without one."""
    if _native is None:
        return ""
    package = _native.__name__.partition(".")[0]
    is_wheel = package != __package__.partition(".")[0]
    return f"wheel {package.replace('_', '-')}" if is_wheel else "built with this package"


def has_test_hooks() -> bool:
    """Whether the kernels were built with the hooks by which tests break a rule on purpose."""
    return has_kernels() and _native.has_test_hooks


def has_grouped_gemm() -> bool:
    """Return True if the extension was built with the kernel of grouped products."""
    return has_kernels() and _native.has_grouped_gemm


def why_not_grouped_gemm(num_rows: int, num_groups: int, k: int, n: int) -> str:
    """Return why that kernel does not compute products of such sizes, or ''."""
    why, _ = _native.why_not_grouped_gemm(num_rows, num_groups, k, n)
    return why


def available() -> bool:
    """Return True if the CUDA kernels are built in and JAX sees a GPU that can run them."""
    return has_kernels() and bool(local_gpus())


@functools.cache
def register_targets() -> None:
    """Make the kernels known to XLA, once, at the first lowering that calls one."""
    for name, registration in _native.state_types().items():  # before targets that make such states
        jax.ffi.register_ffi_type(name, registration, platform="CUDA")
    for name, stages in _native.targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")
    if available():
        introduce_devices()


def protocol_version() -> int:
    """What the processes of a mesh must have in common; 0 without kernels."""
    return _native.PROTOCOL_VERSION if has_kernels() else 0


def limit(name: str) -> int:
    """A limit of the kernels, by its name in ``cuda/layout.h`` (``MAX_ARRAYS``, ...)."""
    return getattr(_native, name)


def tuning(name: str) -> int:
    """Return a number that was found by measurement, by its name in ``kLoweringTuning`` of
    ``cuda/tuning.h``; 0 without the extension, where no kernel is called."""
    return _native.tuning[name] if _native is not None else 0


def format_codes() -> dict[str, int]:
    """Return the codes by which kernels know token formats, by the name of the format's class; {}
    without the extension."""
    return {name: code for name, code, *_ in _native.TOKEN_FORMATS} if _native is not None else {}


def array_bytes(num_slots: int, row_bytes: int) -> int:
    """Bytes that ``num_slots`` landed rows of one payload array take in a source's zone."""
    return _native.array_bytes(num_slots, row_bytes)


def counter_regions(num_ranks: int, num_tokens: int, top_k: int, route_chunks: int) -> list[tuple]:
    """The words of a header that each kernel uses: (kernel, words, offset, bytes, count, stride,
    ring stride) of each region, as in ``cuda/counters.h``."""
    return _native.counter_regions(num_ranks, num_tokens, top_k, route_chunks)


def local_gpus() -> list[jax.Device]:
    """Return the GPUs of this process; [] where JAX sees none."""
    try:
        return jax.local_devices(backend="gpu")
    except RuntimeError:  # no such backend
        return []


def default_gpu() -> jax.Device | None:
    """Return the GPU on which JAX runs what nothing else places: its default device, or the first
    GPU. None where JAX sees no GPU."""
    gpus = local_gpus()
    default = getattr(jax.config, "jax_default_device", None)  # unknown to the types of jax 0.10
    return default if default in gpus else next(iter(gpus), None)


def why_not_on_one_gpu(num_ranks: int) -> str:
    """Return why ``num_ranks`` ranks cannot share the default GPU, or ''."""
    device = default_gpu()
    if device is None:
        return "JAX sees no GPU"
    if float(device.compute_capability) < 9.0:
        return f"{device} is older than Hopper (compute capability 9.0)"
    num_sms = getattr(device, "core_count", None)
    if num_sms is not None and not _native.colocated_blocks(num_ranks, num_sms, False):
        return (
            f"{num_ranks} ranks on one GPU need {num_ranks} streaming multiprocessors; "
            f"{device} has {num_sms}"
        )
    return ""


@functools.cache
def why_unreachable(topology: Topology) -> str:
    """Why the devices of the topology in this process cannot reach each other's memory, or ''."""
    introduce_devices()
    why, _ = _native.check_access(*topology)
    return why


def why_no_gpus() -> str:
    """Why other processes cannot use the GPUs of this one: no kernels, no peer access; or ''."""
    if not has_kernels():
        return "has no CUDA kernels"
    own = tuple(device.id for device in local_gpus())
    unreachable = why_unreachable(Topology(own, len(own), len(own)))
    return f"says that {unreachable}" if unreachable else ""


def failure(topology: Topology, rings: Sequence[int] = RINGS) -> str:
    """Return the first failure of this topology, or ''.

    A kernel has recorded it here, or another rank has told a rank of this process.

    Raises:
      RuntimeError: the CUDA runtime's complaint.
    """
    if not has_kernels():
        return ""
    for ring in rings:
        problem, failure = _native.failure(*topology, ring)
        _raise(problem)
        if failure:
            return failure
    return ""


@compat.per_job
def introduce_devices() -> None:
    """Tells of the GPUs of this process and others, once in a job, before a topology with them is
    used."""
    for device in jax.devices("gpu"):
        is_here = device.process_index == jax.process_index()
        ordinal = device.local_hardware_id if is_here else _native.ELSEWHERE
        _native.add_device(device.id, device.process_index, ordinal)


def add_process(index: int, socket: str, secret: str, pid: int) -> None:
    """Tells where another process of this host answers requests for its devices' memory.

    ``pid`` is the number that the operating system has given it, or 0 if it is not known.
    """
    _native.add_process(index, socket, secret, pid)


def has_ended(index: int) -> bool:
    """Return True if that process did not exist any more when this one asked it for memory."""
    return _native.has_ended(index)


@functools.cache
def listen() -> tuple[str, str]:
    """Begins to answer such requests of others, once. The name of the socket, and the secret that
    who asks must know."""
    problem, socket, secret = _native.listen()
    _raise(problem)
    return socket, secret


def network_library() -> pathlib.Path:
    """Where the kernels that reach ranks of other hosts are, if they were built."""
    package = _native.__file__ if _native else pathlib.Path(__file__).parent
    return pathlib.Path(package).parent / "libmoe_a2a_network.so"


def load_network() -> None:
    """Loads them; NVSHMEM's library for hosts must be loaded."""
    _raise(_native.load_network(str(network_library())))


def network_id() -> bytes:
    """What all processes that start NVSHMEM together must have, made by one of them."""
    status, unique_id = _native.network_id()
    if status:
        raise RuntimeError(f"jax_moe_a2a: NVSHMEM makes no id (status {status})")
    return unique_id


def prepare_network() -> None:
    """Do what can fail in this process alone before ``start_network``."""
    _raise(_native.prepare_network(_only_gpu()))


def start_network(unique_id: bytes) -> None:
    """Starts NVSHMEM on this process's GPU, together with all other processes."""
    index, count = jax.process_index(), jax.process_count()
    _raise(_native.start_network(_only_gpu(), unique_id, index, count))


def _only_gpu() -> int:
    """Return the ordinal of this process's GPU."""
    (device,) = jax.local_devices(backend="gpu")
    return device.local_hardware_id


def prepare_wide(topology: Topology, ring: int) -> None:
    """Do what can fail in this process alone before ``open_wide``."""
    introduce_devices()
    _raise(_native.prepare_wide(*topology, ring))


def open_wide(topology: Topology, ring: int, slot_bytes: int) -> None:
    """Open a multi-host workspace, which ``prepare_wide`` has prepared. The first time, all
    processes must call it together."""
    _raise(_native.open_wide(*topology, ring, slot_bytes))


def reserved_bytes(topology: Topology, ring: int = WHOLE_RING) -> int:
    """Bytes of landing zones in each ring slot of each device; 0 while closed."""
    return _native.reserved_bytes(*topology, ring)


def mapped_bytes(topology: Topology, ring: int = WHOLE_RING) -> list[int]:
    """Bytes of memory that each device of the topology has mapped; 0 while closed."""
    return _native.mapped_bytes(*topology, ring)


def reserve(topology: Topology, slot_bytes: int, timeout: float, ring: int = WHOLE_RING) -> None:
    """Opens the workspace, or grows it, so that every ring slot holds ``slot_bytes``. Other
    processes have ``timeout`` seconds to answer.

    Raises:
      RuntimeError: the CUDA runtime's or driver's complaint; a process that has not answered. If a
        device has too little memory, it is a ``jax.errors.JaxRuntimeError`` that starts with
        RESOURCE_EXHAUSTED, as of XLA's own allocations.
    """
    _raise(_native.reserve(*topology, ring, slot_bytes, int(timeout * 1e9)))


def counters(topology: Topology, ring: int = WHOLE_RING) -> list[tuple]:
    """(next epoch, poison, credits, heads) of each device, ring slot after ring slot; [] while
    closed. Nothing of the topology may run meanwhile."""
    problem, values = _native.counters(*topology, ring)
    _raise(problem)
    return values


def wait(topology: Topology, timeout: float, rings: Sequence[int] = RINGS) -> None:
    """Wait until the devices of this process have done all that they were given, if the workspace
    is open.

    Raises:
      RuntimeError: they have not after ``timeout`` seconds, and what they still do; the CUDA
        runtime's complaint.
    """
    if has_kernels():
        for ring in rings:
            _raise(_native.wait(*topology, ring, int(timeout * 1e9)))


def close(topology: Topology, timeout: float, rings: Sequence[int] = RINGS) -> None:
    """Wait for the devices like ``wait``, then give their workspaces back. The next use opens them
    again. After a wait in vain they are as before.

    Raises:
      RuntimeError: as ``wait``; the CUDA driver's complaint.
    """
    if has_kernels():
        wait(topology, timeout, rings)  # All of them, before the first one closes.
        problems = [_native.close(*topology, ring, int(timeout * 1e9)) for ring in rings]
        for problem in problems:
            _raise(problem)


def set_hooks(
    topology: Topology,
    index: int = -1,
    mutation: int = 0,
    delay_phase: int = 0,
    delay_ns: int = 0,
    depth: int = 0,
    ring: int = WHOLE_RING,
) -> None:
    """For tests, of an open workspace: breaks a rule of the protocol (``Mutation`` in
    ``cuda/device/signal.cuh``), delays a phase (``Phase`` in ``cuda/status.h``) or uses fewer ring
    slots, on the rank with that index in the topology, or (-1) on all of this process. Closing the
    group ends it."""
    _raise(_native.set_hooks(*topology, ring, index, mutation, delay_phase, delay_ns, depth))


def set_epoch(topology: Topology, epoch: int, ring: int = WHOLE_RING, index: int = -1) -> None:
    """For tests: make one rank, by its index in the topology, or (-1) all ranks of this process go
    on as if ``epoch - 1`` exchanges had run."""
    _raise(_native.set_epoch(*topology, ring, index, epoch))


def set_credits(topology: Topology, epoch: int, ring: int = WHOLE_RING, index: int = -1) -> None:
    """For tests: make a rank believe that its peers have read what it sent up to ``epoch``."""
    _raise(_native.set_credits(*topology, ring, index, epoch))


def set_uncapped(topology: Topology, is_uncapped: bool, ring: int = WHOLE_RING) -> None:
    """For tests, of ranks on one GPU: give each rank all the blocks of its budget, also where the
    GPU has no room for all of them at once."""
    _native.set_uncapped(*topology, ring, is_uncapped)


def _raise(problem: tuple[str, bool]) -> None:
    """Raise a problem, if there is one: its text, and whether a device lacks memory."""
    text, lacks_memory = problem
    if lacks_memory:
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: jax_moe_a2a: {text}")
    if text:
        raise RuntimeError(f"jax_moe_a2a: {text}")
