"""Ranks beyond the host: NVSHMEM, which all processes start, and take memory from, together.

NVSHMEM bounds no wait for a process. So before each of its collective calls the processes meet
through JAX's coordination service, which does.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import json
import pathlib
import threading
from collections.abc import Callable, Sequence

import jax

from . import compat, native
from .memory import RING_DEPTH

INSTALL = "pip install 'jax-moe-a2a[nvshmem]'"
# Of a ring slot: a workspace that spans hosts never grows, so exchanges share one with those of
# about their size.
LEAST_SLOT_BYTES = 64 << 20
# For a meeting: processes that compile do not come at the same time, however soon an exchange of
# theirs is to be answered.
LEAST_SECONDS = 30.0
_meetings = itertools.count()
_failed: dict[tuple[native.Topology, int], str] = {}  # why
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
        arguments; NVSHMEM's complaint.
    """
    ring = ring_of(ring, slot_bytes)
    with _lock:
        if (topology, ring) in _failed:
            raise RuntimeError(_failed[topology, ring])
        if ring not in _opened.get(topology, ()):
            _start(timeout)
            _meet(f"to open ring {ring} of {topology}", timeout)
            try:
                _do_together(
                    "from opening it",
                    timeout,
                    lambda: native.open_wide(topology, ring, _slots_up_to(slot_bytes)[-1]),
                )
            except RuntimeError as error:
                # Its memory is there in some processes, and can be asked for by all only.
                _failed[topology, ring] = str(error)
                raise
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


def close(topology: native.Topology, timeout: float) -> None:
    """Clears a failure, as closing does. But the workspaces stay open, for programs that exist have
    their addresses; and all processes call it together.

    Raises:
      RuntimeError: a process has not come within ``timeout`` seconds, or 30.
    """
    with _lock:
        if not (opened := rings(topology)):
            return
        what = f"rings {opened} of {topology}"
        _together(f"to close {what}", timeout, lambda: native.close(topology, opened))

        def open_again() -> None:
            for ring in opened:
                native.open_wide(topology, ring, 0)

        _together(f"to clear {what}", timeout, open_again)


def load() -> None:
    """Loads the kernels, behind NVSHMEM's library, which they need."""
    ctypes.CDLL(str(_host_library()), mode=ctypes.RTLD_GLOBAL)
    native.load_network()


def _start(timeout: float) -> None:
    """Starts NVSHMEM, once."""
    global _is_started
    if _is_started:
        return
    key = "jax_moe_a2a/network/id"

    def make_id() -> None:
        load()
        if jax.process_index() == 0:
            compat.coordination_set(key, native.network_id().hex())

    def start() -> None:
        unique_id = compat.coordination_get(key, timeout)
        assert unique_id is not None
        native.start_network(bytes.fromhex(unique_id))

    _together("to load NVSHMEM", timeout, make_id)
    _together("to start NVSHMEM", timeout, start)
    _is_started = True


def _together(what: str, timeout: float, act: Callable[[], None]) -> None:
    """Acts when all processes have come to."""
    _meet(what, timeout)
    _do_together(f"back, having come {what}", timeout, act)


def _do_together(what: str, timeout: float, act: Callable[[], None]) -> None:
    """Acts, and raises in all processes what has gone wrong in one."""
    problem = ""
    try:
        act()
    except RuntimeError as error:
        problem = str(error)
    _meet(what, timeout, problem)


def _meet(what: str, timeout: float, problem: str = "") -> None:
    """Waits for all processes, which must have come for the same, and without a problem."""
    name, timeout = f"jax_moe_a2a/network/meeting/{next(_meetings)}", max(timeout, LEAST_SECONDS)
    own = jax.process_index()
    compat.coordination_set(f"{name}/{own}", json.dumps([what, problem]))
    if missing := compat.coordination_barrier(name, timeout):
        raise RuntimeError(
            f"jax_moe_a2a: waiting for all processes, {what}: {missing}; all processes must make "
            "the same groups, lower the same programs and close together, in one order"
        )
    told = [
        json.loads(compat.coordination_get(f"{name}/{index}", timeout) or "[null, null]")
        for index in range(jax.process_count())
    ]
    for index, (other, _) in enumerate(told):
        if other != what:
            raise RuntimeError(
                f"jax_moe_a2a: process {index} came {other}, and this process {what}; all "
                "processes must make the same groups, lower the same programs and close together, "
                "in one order"
            )
    if problem:
        raise RuntimeError(problem)
    for index, (_, elsewhere) in enumerate(told):
        if elsewhere:
            raise RuntimeError(f"jax_moe_a2a: in process {index}: {elsewhere}")


def _host_library() -> pathlib.Path | None:
    """NVSHMEM's library for hosts, in the package that JAX's users have."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvshmem")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in sorted(pathlib.Path(folder, "lib").glob("libnvshmem_host.so.*")):
            return library
    return None
