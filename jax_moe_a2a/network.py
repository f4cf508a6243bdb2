"""Ranks beyond the host: NVSHMEM, which all processes start, and take memory from, together.

NVSHMEM bounds no wait for a process. So before each of its collective calls the processes meet
through JAX's coordination service, which does.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import json
import pathlib
import threading
from collections.abc import Sequence

import jax

from . import compat, native

INSTALL = "pip install 'jax-moe-a2a[nvshmem]'"
# Of a ring slot: a workspace that spans hosts never grows, so exchanges share one with those of
# about their size.
LEAST_SLOT_BYTES = 64 << 20
# For a meeting: processes that compile do not come at the same time, however soon an exchange of
# theirs is to be answered.
LEAST_SECONDS = 30.0
_meetings = itertools.count()
_lock = threading.Lock()  # programs may be lowered by several threads
_opened: dict[native.Topology, list[int]] = {}  # the rings


def why_not() -> str:
    """Why this process cannot reach ranks beyond its host, or ''."""
    if not native.network_library().exists():
        return "was built without the kernels for several hosts (docs/multi_host.md: how to build)"
    if _host_library() is None:
        return f"has no NVSHMEM ({INSTALL})"
    num_gpus = len(jax.local_devices(backend="gpu"))
    return f"has {num_gpus} GPUs, and NVSHMEM takes one" if num_gpus != 1 else ""


def ring_of(ring: int, slot_bytes: int) -> int:
    """The ring of exchanges of this size: as ``ring`` one of whole ones, or of split ones."""
    return ring + len(native.RINGS) * _doublings(slot_bytes)


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
        if native.reserved_bytes(topology, ring) == 0:
            _start(timeout)
            _meet(f"to open ring {ring} of devices {topology}", timeout)
            native.open_wide(topology, ring, LEAST_SLOT_BYTES << _doublings(slot_bytes))
            _opened.setdefault(topology, []).append(ring)
            _meet("after opening it", timeout)
    return ring


def rings(topology: native.Topology) -> Sequence[int]:
    """The rings that a topology has: of one that spans hosts, those that were opened."""
    _, num_ranks, p2p_world_size = topology
    return _opened.get(topology, ()) if p2p_world_size < num_ranks else native.RINGS


def close(topology: native.Topology, timeout: float) -> None:
    """Clears a failure, as closing does. But the workspaces stay open, for programs that exist have
    their addresses; and all processes call it together.

    Raises:
      RuntimeError: a process has not come within ``timeout`` seconds, or 30.
    """
    with _lock:
        if not (opened := rings(topology)):
            return
        native.close(topology, opened)
        _meet(f"to close rings {opened} of devices {topology}", timeout)
        for ring in opened:
            native.open_wide(topology, ring, 0)
        _meet("after closing them", timeout)


def load() -> None:
    """Loads the kernels, behind NVSHMEM's library, which they need."""
    ctypes.CDLL(str(_host_library()), mode=ctypes.RTLD_GLOBAL)
    native.load_network()


@functools.cache
def _start(timeout: float) -> None:
    load()
    key = "jax_moe_a2a/network/id"
    if jax.process_index() == 0:
        compat.coordination_set(key, native.network_id().hex())
    _meet("to start NVSHMEM", timeout)
    unique_id = compat.coordination_get(key, timeout)
    assert unique_id is not None
    native.start_network(bytes.fromhex(unique_id))


def _meet(what: str, timeout: float) -> None:
    """Waits for all processes, which must have come for the same."""
    name, timeout = f"jax_moe_a2a/network/meeting/{next(_meetings)}", max(timeout, LEAST_SECONDS)
    compat.coordination_set(f"{name}/{jax.process_index()}", json.dumps(what))
    if missing := compat.coordination_barrier(name, timeout):
        raise RuntimeError(
            f"jax_moe_a2a: waiting for all processes, {what}: {missing}; all must make the same "
            "groups and lower the same programs, in one order"
        )
    for index in range(jax.process_count()):
        other = json.loads(compat.coordination_get(f"{name}/{index}", timeout) or "null")
        if other != what:
            raise RuntimeError(
                f"jax_moe_a2a: process {index} came {other}, and this process {what}; all must "
                "make the same groups and lower the same programs, in one order"
            )


def _host_library() -> pathlib.Path | None:
    """NVSHMEM's library for hosts, in the package that JAX's users have."""
    spec = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.nvshmem")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in sorted(pathlib.Path(folder, "lib").glob("libnvshmem_host.so.*")):
            return library
    return None
