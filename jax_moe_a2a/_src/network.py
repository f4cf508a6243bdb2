"""Ranks beyond the host: NVSHMEM, which all processes start, and take memory from, together.

NVSHMEM bounds no wait for a process. So before each of its collective calls every process does what
can fail in it alone, and then the processes meet (``meetings.py``), which is bounded. If anything
failed in one process, all processes raise an error and none makes the collective call.
"""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import threading
from collections.abc import Callable, Sequence

import jax

from . import native
from .meetings import meet
from .memory import RING_DEPTH

INSTALL = "pip install 'jax-moe-a2a[nvshmem]'"
# Of a ring slot: a workspace that spans hosts never grows, so exchanges share one with those of
# about their size.
LEAST_SLOT_BYTES = 64 << 20
# For a meeting: processes that compile do not come at the same time, however soon an exchange of
# theirs is to be answered.
LEAST_SECONDS = 30.0
_failed: dict[str, str] = {}  # why, by what failed
_is_started = False
_lock = threading.Lock()  # programs may be lowered by several threads
_opened: dict[native.Topology, list[int]] = {}  # the rings


def why_not() -> str:
    """Why this process cannot reach ranks beyond its host, or ''."""
    if not native.network_library().exists():
        return "was built without the kernels for several hosts (see docs/multi_host.md)"
    if _host_library() is None:
        return f"has no NVSHMEM ({INSTALL})"
    num_gpus = len(jax.local_devices(backend="gpu"))
    return f"has {num_gpus} GPUs, but NVSHMEM needs one GPU per process" if num_gpus != 1 else ""


def ring_of(ring: int, slot_bytes: int) -> int:
    """The ring of exchanges of this size: as ``ring`` one of whole ones, or of split ones."""
    return ring + len(native.RINGS) * _doublings(slot_bytes)


def _slots_up_to(slot_bytes: int) -> list[int]:
    """Bytes of a ring slot, of each ring up to that of exchanges of this size."""
    return [LEAST_SLOT_BYTES << doublings for doublings in range(_doublings(slot_bytes) + 1)]


def _doublings(slot_bytes: int) -> int:
    """Of ``LEAST_SLOT_BYTES``, until as much fits."""
    return (-(-slot_bytes // LEAST_SLOT_BYTES) - 1).bit_length() if slot_bytes else 0


def open_workspace(
    topology: native.Topology, slot_bytes: int, timeout: float, ring: int = native.WHOLE_RING
) -> int:
    """The ring that serves exchanges of this size, opened where it is not open. All processes call
    it, in one order, with the same arguments.

    Raises:
      RuntimeError: a process has not come within ``timeout`` seconds, or 30, or came with other
        arguments; what failed in any process, for instance in NVSHMEM.
    """
    ring = ring_of(ring, slot_bytes)
    with _lock:
        if ring not in _opened.get(topology, ()):
            _start(timeout)
            _together(
                f"to open ring {ring} of {topology}",
                timeout,
                lambda: native.prepare_wide(topology, ring),
                lambda _: native.open_wide(topology, ring, _slots_up_to(slot_bytes)[-1]),
            )
            _opened.setdefault(topology, []).append(ring)
    return ring


def reserve(
    topology: native.Topology, slot_bytes: int, timeout: float, ring: int = native.WHOLE_RING
) -> None:
    """Opens all rings that exchanges of this size have use for: those of their smaller calls too.
    Arguments and errors as of ``open_workspace``."""
    for size in _slots_up_to(slot_bytes):
        open_workspace(topology, size, timeout, ring)


def bytes_to_reserve(slot_bytes: int) -> int:
    """What ``reserve`` takes of each device, headers not counted: what lands, and as much for what
    goes out."""
    return 2 * RING_DEPTH * sum(_slots_up_to(slot_bytes))


def rings(topology: native.Topology) -> Sequence[int]:
    """The rings that a topology has: of one that spans hosts, those that were opened."""
    return _opened.get(topology, ()) if topology.is_wide else native.RINGS


def close(topology: native.Topology, timeout: float, idle_timeout: float) -> None:
    """Clears a failure, as closing does. But the workspaces stay open, for programs that exist have
    their addresses; and all processes call it together.

    Args:
      topology: a multi-host one.
      timeout: seconds to wait for the other processes; at least 30.
      idle_timeout: seconds to wait for this process's device.

    Raises:
      RuntimeError: a process has not come in time; what failed in any process.
    """
    with _lock:
        if not (opened := rings(topology)):
            return
        what, seconds = f"rings {sorted(opened)} of {topology}", _patience(timeout)
        meet(f"to close {what}", seconds)

        def close() -> None:
            native.close(topology, idle_timeout, opened)

        # Another process may take all of its time to find that its device is at work.
        meet(f"back, having closed {what}", seconds + idle_timeout, close)

        def open_again() -> None:  # They have their memory: nothing of this is collective.
            for ring in opened:
                native.prepare_wide(topology, ring)
                native.open_wide(topology, ring, 0)

        meet(f"back, having cleared {what}", seconds, open_again)


def load() -> None:
    """Loads the kernels, behind NVSHMEM's library, which they need."""
    ctypes.CDLL(str(_host_library()), mode=ctypes.RTLD_GLOBAL)
    native.load_network()


def _start(timeout: float) -> None:
    """Starts NVSHMEM, once."""
    global _is_started
    if _is_started:
        return

    def prepare() -> str:
        load()
        native.prepare_network()
        return native.network_id().hex() if jax.process_index() == 0 else ""

    def start(ids: list[str]) -> None:
        native.start_network(bytes.fromhex(ids[0]))

    _together("to start NVSHMEM", timeout, prepare, start)
    _is_started = True


def _together(
    what: str,
    timeout: float,
    prepare: Callable[[], str | None],
    collective: Callable[[list[str]], None],
) -> None:
    """Make a collective call of NVSHMEM, after all processes have prepared it.

    Args:
      what: as of ``meet``.
      timeout: seconds that a process waits for the others.
      prepare: what a process does alone.
      collective: the call. It receives what ``prepare`` returned in each process.

    Raises:
      RuntimeError: in all processes, what failed in one. After a failure of ``prepare`` the call
        can be repeated. After a failure of ``collective`` every later call raises the same error,
        because some processes have done their part.
    """
    if what in _failed:
        raise RuntimeError(_failed[what])
    prepared = meet(what, _patience(timeout), prepare)
    try:
        meet(f"back, having come {what}", _patience(timeout), lambda: collective(prepared))
    except RuntimeError as error:
        _failed[what] = str(error)
        raise


def _patience(timeout: float) -> float:
    return max(timeout, LEAST_SECONDS)


def _host_library() -> pathlib.Path | None:
    """NVSHMEM's library for hosts, in the package that JAX's users have."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvshmem")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in sorted(pathlib.Path(folder, "lib").glob("libnvshmem_host.so.*")):
            return library
    return None
