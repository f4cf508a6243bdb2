"""Start NVSHMEM and allocate its memory for multi-host groups, in all processes together.

A collective call of NVSHMEM waits for other processes without a timeout. So before the call, every
process runs all steps that can fail in this process alone. Then the processes meet
(``meetings.py``), with a timeout. If a step failed in any process, all processes raise an error,
and no process makes the collective call.
"""

from __future__ import annotations

import ctypes
import importlib.util
import pathlib
import threading
from collections.abc import Callable, Sequence

import jax

from ..plan.memory import RING_DEPTH
from . import native
from .meetings import meet

INSTALL = "pip install 'nvidia-nvshmem-cu13~=3.4.5', or -cu12 with CUDA 12"
# The size of a ring half is this number times a power of two. A multi-host workspace never grows,
# so exchanges of similar size share a workspace.
LEAST_HALF_BYTES = 64 << 20
# The least timeout of a meeting. Processes that compile come at different times, even if the
# timeout of their exchanges is short.
LEAST_SECONDS = 30.0
_failed: dict[str, str] = {}  # the error of each collective call that failed
_is_started = False
_lock = threading.Lock()  # programs may be lowered by several threads
_opened: dict[native.Topology, list[int]] = {}  # the kinds of the open workspaces


def why_not() -> str:
    """Return why this process cannot reach ranks on other hosts, or ''."""
    if not native.network_library().exists():
        return "was built without the kernels for several hosts (see docs/multi_host.md)"
    if _host_library() is None:
        return f"has no NVSHMEM ({INSTALL})"
    num_gpus = len(jax.local_devices(backend="gpu"))
    return f"has {num_gpus} GPUs, but NVSHMEM needs one GPU per process" if num_gpus != 1 else ""


def kind_of(kind: int, half_bytes: int) -> int:
    """Return the kind of the workspace for exchanges of this size. ``kind`` says whether they are
    whole or split."""
    return kind + len(native.WORKSPACE_KINDS) * _doublings(half_bytes)


def _halves_up_to(half_bytes: int) -> list[int]:
    """Return the bytes of a ring half for each workspace size, up to exchanges of this size."""
    return [LEAST_HALF_BYTES << doublings for doublings in range(_doublings(half_bytes) + 1)]


def _doublings(half_bytes: int) -> int:
    """Return how often ``LEAST_HALF_BYTES`` must double to hold ``half_bytes``."""
    return (-(-half_bytes // LEAST_HALF_BYTES) - 1).bit_length() if half_bytes else 0


def open_workspace(
    topology: native.Topology, half_bytes: int, timeout: float, kind: int = native.WHOLE
) -> int:
    """Open the workspace for exchanges of this size, if it is not open, and return its kind.
    All processes must call this in the same order, with the same arguments.

    Raises:
      RuntimeError: if a process has not arrived within ``timeout`` seconds (at least 30), or has
        other arguments. Also if a step failed in any process, for example in NVSHMEM.
    """
    kind = kind_of(kind, half_bytes)
    with _lock:
        if kind not in _opened.get(topology, ()):
            _start(timeout)
            _together(
                f"opening workspace {kind} of {topology}",
                timeout,
                lambda: native.prepare_multi_host(topology, kind),
                lambda _: native.open_multi_host(topology, kind, _halves_up_to(half_bytes)[-1]),
            )
            _opened.setdefault(topology, []).append(kind)
    return kind


def reserve(
    topology: native.Topology, half_bytes: int, timeout: float, kind: int = native.WHOLE
) -> None:
    """Open all workspaces for exchanges of up to this size. Arguments and errors are those of
    ``open_workspace``."""
    for size in _halves_up_to(half_bytes):
        open_workspace(topology, size, timeout, kind)


def bytes_to_reserve(half_bytes: int) -> int:
    """Return the bytes that ``reserve`` allocates on each device, without headers. Half of them are
    for received rows, and half for outgoing rows."""
    return 2 * RING_DEPTH * sum(_halves_up_to(half_bytes))


def kinds(topology: native.Topology) -> Sequence[int]:
    """Return the kind of each workspace of a topology; of each open workspace, if multi-host."""
    return _opened.get(topology, ()) if topology.is_multi_host else native.WORKSPACE_KINDS


def close(topology: native.Topology, timeout: float, idle_timeout: float) -> None:
    """Clear a failure, but keep the workspaces open, because existing programs hold their
    addresses. All processes must call this together.

    Args:
      topology: a multi-host topology.
      timeout: seconds to wait for the other processes, at least 30.
      idle_timeout: seconds to wait for this process's device.

    Raises:
      RuntimeError: if a process has not arrived in time, or a step failed in any process.
    """
    with _lock:
        if not (opened := kinds(topology)):
            return
        what, seconds = f"workspaces {sorted(opened)} of {topology}", _patience(timeout)
        meet(f"closing {what}", seconds)

        def close() -> None:
            native.close(topology, idle_timeout, opened)

        # Another process may use its whole idle_timeout before it reports a busy device.
        meet(f"clearing {what}", seconds + idle_timeout, close)

        def open_again() -> None:  # No call is collective, because memory is kept.
            for kind in opened:
                native.prepare_multi_host(topology, kind)
                native.open_multi_host(topology, kind, 0)

        meet(f"reopening {what}", seconds, open_again)


def load() -> None:
    """Load NVSHMEM's library, and then the multi-host kernels, which need it."""
    ctypes.CDLL(str(_host_library()), mode=ctypes.RTLD_GLOBAL)
    native.load_network()


def _start(timeout: float) -> None:
    """Start NVSHMEM, once."""
    global _is_started
    if _is_started:
        return

    def prepare() -> str:
        load()
        native.prepare_network()
        return native.network_id().hex() if jax.process_index() == 0 else ""

    def start(ids: list[str]) -> None:
        native.start_network(bytes.fromhex(ids[0]))

    _together("starting NVSHMEM", timeout, prepare, start)
    _is_started = True


def _together(
    what: str,
    timeout: float,
    prepare: Callable[[], str | None],
    collective: Callable[[list[str]], None],
) -> None:
    """Make a collective call of NVSHMEM, after all processes have prepared it.

    Args:
      what: as in ``meet``.
      timeout: seconds that a process waits for the others.
      prepare: the steps of each process before the call.
      collective: the call. It receives the result of ``prepare`` of each process.

    Raises:
      RuntimeError: in all processes, if a step failed in any process. After a failure of
        ``prepare``, the call can be repeated. After a failure of ``collective``, every later call
        raises the same error, because some processes have done their part.
    """
    if what in _failed:
        raise RuntimeError(_failed[what])
    prepared = meet(what, _patience(timeout), prepare)
    try:
        meet(f"the joint step of {what}", _patience(timeout), lambda: collective(prepared))
    except RuntimeError as error:
        _failed[what] = str(error)
        raise


def _patience(timeout: float) -> float:
    return max(timeout, LEAST_SECONDS)


def _host_library() -> pathlib.Path | None:
    """Return the path of NVSHMEM's host library in the installed package; None if it is missing."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvshmem")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in sorted(pathlib.Path(folder, "lib").glob("libnvshmem_host.so.*")):
            return library
    return None
