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

import jax

from . import compat, native

INSTALL = "pip install 'jax-moe-a2a[nvshmem]'"
# Of a ring slot: a workspace that spans hosts is taken once, and never grows.
LEAST_SLOT_BYTES = 64 << 20
_meetings = itertools.count()
_opened: dict[tuple, native.Topology] = {}


def why_not() -> str:
    """Why this process cannot reach ranks beyond its host, or ''."""
    if not native.network_library().exists():
        return (
            f"was built without the kernels for several hosts (first {INSTALL}, then this package)"
        )
    if _host_library() is None:
        return f"has no NVSHMEM ({INSTALL})"
    num_gpus = len(jax.local_devices(backend="gpu"))
    return f"has {num_gpus} GPUs, and NVSHMEM takes one" if num_gpus != 1 else ""


def open_workspace(topology: native.Topology, ring: int, slot_bytes: int, timeout: float) -> None:
    """Opens the workspace of a topology that spans hosts, where it is not open. All processes call
    it, in one order, with the same arguments.

    Raises:
      RuntimeError: a process has not come within ``timeout`` seconds, or came with other arguments;
        more than an open workspace holds; NVSHMEM's complaint.
    """
    if native.reserved_bytes(topology, ring) > 0:
        return native.reserve(topology, slot_bytes, timeout, ring)  # what is there is all there is
    _start(timeout)
    _meet(f"to reserve {slot_bytes} bytes of ring {ring} for devices {topology}", timeout)
    native.open_wide(topology, ring, max(slot_bytes, LEAST_SLOT_BYTES))
    _opened[topology[:2]] = topology
    _meet("after reserving", timeout)


def opened(devices: tuple[int, ...], num_ranks: int) -> native.Topology:
    """The topology of these domains that was opened here; else that whose ranks share memory."""
    return _opened.get((devices, num_ranks), (devices, num_ranks, num_ranks))


def reset(topology: native.Topology, timeout: float) -> None:
    """What closing is for others: clears a failure. All processes call it together; the workspace
    stays open, for programs that exist have its addresses.

    Raises:
      RuntimeError: a process has not come within ``timeout`` seconds.
    """
    rings = [ring for ring in native.RINGS if native.reserved_bytes(topology, ring) > 0]
    if not rings:
        return
    native.close(topology)
    _meet(f"to close rings {rings} of devices {topology}", timeout)
    for ring in rings:
        native.open_wide(topology, ring, 0)
    _meet("after closing", timeout)


@functools.cache
def _start(timeout: float) -> None:
    ctypes.CDLL(str(_host_library()), mode=ctypes.RTLD_GLOBAL)
    native.load_network()
    key = "jax_moe_a2a/network/id"
    if jax.process_index() == 0:
        compat.coordination_set(key, native.network_id().hex())
    _meet("to start NVSHMEM", timeout)
    unique_id = compat.coordination_get(key, timeout)
    assert unique_id is not None
    native.start_network(bytes.fromhex(unique_id))


def _meet(what: str, timeout: float) -> None:
    """Waits for all processes, which must have come for the same."""
    name = f"jax_moe_a2a/network/meeting/{next(_meetings)}"
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
