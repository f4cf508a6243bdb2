"""Implement the methods of ``Group``: choose a path, and open, report and close workspaces.

A group itself is a value (``value.py``). This module has all state that a process keeps for
groups. It also announces the process to other processes (``announce``), always before it waits for
another process.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh

from .. import compat, paths
from ..plan.memory import HEADER_BYTES, RING_DEPTH, DeviceMemory, MemoryEstimate, memory_estimate
from ..plan.options import check_exchange
from . import extension, native, processes
from .value import (
    GroupValue,
    check_seconds,
    device_ids,
    devices_of,
    domains_of,
    how_to_divide,
    spans_processes,
)

LEAST_CLOSE_SECONDS = 60.0  # the least default timeout of ``close``

G = TypeVar("G", bound=GroupValue)

# For a group without devices: the group with the devices of each program lowered for it.
_of_programs: dict[GroupValue, dict[GroupValue, None]] = {}


class _Place(NamedTuple):
    """A topology, and the devices of this process in the order of the topology."""

    topology: native.Topology
    own_devices: tuple[jax.Device, ...]


def announce(group: GroupValue) -> None:
    """Publish the notice of this process, once in a job. Never wait for another process.

    Only groups over GPUs of several processes need an announcement. Every function here that may
    wait for another process calls ``announce`` first, and so does the lowering of every program
    (``placed_by``). So no two processes wait for each other's announcement, in whatever order they
    lower their programs. A process without kernels announces itself too, because the other
    processes wait for its announcement.
    """
    if not isinstance(group.mesh, Mesh) or group.implementation == "portable":
        return
    if paths.is_explaining():
        return
    if spans_processes(group) and all(d.platform == "gpu" for d in group.mesh.devices.flat):
        processes.publish()


def placed_by(group: G, program_mesh: Mesh | None) -> G:
    """Return the group with the devices of a program that is being lowered, as ``placed_on`` does.

    Afterwards ``memory``, ``check`` and ``close`` include these devices, and this process has
    announced itself.
    """
    placed = group.placed_on(program_mesh)
    if placed is not group and not paths.is_explaining():
        _of_programs.setdefault(group, {})[placed] = None
    announce(placed)
    return placed


def why_portable(group: GroupValue) -> str:
    """Return why the kernels do not run on the group's devices, or ''.

    With two levels, each reason begins with its level: ``"within hosts: "``, ``"between hosts: "``
    or ``"within and between hosts: "``. If the devices belong to several processes, it waits until
    all of them have announced themselves. Only ``explain`` does not wait.

    If the ranks are on several hosts, and a group over two mesh axes could run the kernels within
    each host, the reason ends with the lines that make this group, and is also a Python warning.

    Raise the errors of ``Group.path``, and ``Unknown`` if ``explain`` would have to wait.
    """
    if group.two_level:
        between, within = map(why_portable, group.levels)
        if between == within:
            return between and f"within and between hosts: {between}"
        reasons = {"within": within, "between": between}
        return "; ".join(f"{where} hosts: {why}" for where, why in reasons.items() if why)
    group = group.placed_on(compat.mesh_in_context())
    announce(group)  # even if this process has its answer: another process may wait for this one
    if why := _why_no_workspace(group):
        return why
    if paths.named_gpu():
        return ""
    if not isinstance(group.mesh, Mesh):
        return native.why_not_on_one_gpu(group.size)
    if spans_processes(group):
        if paths.is_explaining():
            raise paths.Unknown(
                "the GPUs belong to several processes, which decide together when the program is "
                "lowered. Group.path in all processes returns their choice, and the log the reason"
            )
        domains = domains_of(group)
        if why := processes.why_not_together(domains, group.patience):
            ranks_of_host = processes.ranks_of_a_host(domains, group.patience)
            if ranks_of_host and (how := how_to_divide(group, ranks_of_host)):
                why += f". To run the kernels within each host, {how}"
                if group.implementation is None:
                    message = f"jax_moe_a2a: {group} takes the portable path: {why}"
                    warnings.warn(message, stacklevel=2)
            return why
        processes.meet((device.process_index for device in devices_of(group)), group.patience)
    return ""


def _why_no_workspace(group: GroupValue) -> str:
    """Return why this process alone cannot run the kernels on the group's devices, or ''."""
    if group.implementation == "portable":
        return "the group asks for the portable path"
    if not native.has_kernels():
        return extension.why_missing()
    if group.size > native.limit("MAX_RANKS"):
        return f"the group has {group.size} ranks, more than {native.limit('MAX_RANKS')}"
    gpu = paths.named_gpu()
    if not gpu and not isinstance(group.mesh, Mesh):
        if group.implementation == "cuda":
            return ""
        return (
            "the group has no devices (its mesh is None or abstract), so the program decides. In "
            "jax.shard_map, the kernels run if the devices of the program allow it. In jax.vmap "
            "over the axis, they run only with implementation='cuda'"
        )
    devices: list[Any] = [gpu] if gpu else devices_of(group)
    if any(d.platform != "gpu" for d in devices):
        return "the mesh has devices that are not GPUs"
    if not all(map(native.is_new_enough, devices)):
        oldest = native.OLDEST_CAPABILITY
        return f"the mesh has GPUs older than Hopper (compute capability {oldest})"
    return "" if gpu else native.why_unreachable(_topology_of(group))


def topology(group: GroupValue) -> native.Topology:
    """Return the devices and sizes that a workspace of this group belongs to. See ``Group``."""
    placed = group.placed_on(compat.mesh_in_context())
    if isinstance(placed.mesh, Mesh):
        announce(placed)
        return _topology_of(placed)
    device = native.default_gpu()
    return native.on_one_gpu(None if device is None else device.id, group.size)


def _topology_of(group: GroupValue) -> native.Topology:
    """Return the topology of a group with devices."""
    return native.Topology(device_ids(group), group.size)


def _places(group: GroupValue) -> list[_Place]:
    """Return the places where a workspace of this group may be open, without the groups of its
    levels and of replicated tokens."""
    if isinstance(group.mesh, Mesh):
        if _why_no_workspace(group):
            return []
        own = (d for d in devices_of(group) if d.process_index == jax.process_index())
        return [_Place(_topology_of(group), tuple(own))]
    places = [place for placed in _of_programs.get(group, ()) for place in _places(placed)]
    if group.implementation == "cuda" and native.has_kernels():
        for gpu in native.local_gpus():
            places.append(_Place(native.on_one_gpu(gpu.id, group.size), (gpu,) * group.size))
    return places


def _all_places(group: GroupValue) -> list[_Place]:
    """Return the distinct places where a workspace of this group may be open, for all levels and
    for replicated tokens."""
    groups = (*group.levels, group.single_rank)
    return list(dict.fromkeys(place for of_group in groups for place in _places(of_group)))


def reserve(group: GroupValue, split: bool, sizes: dict[str, Any]) -> MemoryEstimate:
    """Open or grow the workspace, and return the estimate. See ``Group``."""
    replicated = check_exchange(sizes.get("exchange")).replicated
    levels = (group.single_rank,) if replicated else group.levels
    group_size = (levels[0].size, levels[1].size) if len(levels) > 1 else group.size
    estimate = memory_estimate(group_size=group_size, **sizes)
    workspace_bytes, collective_bytes = estimate.workspace_bytes, estimate.collective_bytes
    for level, of_level in zip(levels, estimate.levels or (estimate,), strict=True):
        if why_portable(level):
            continue
        # In a split exchange, the level within the host is whole.
        kind = native.SPLIT if split and level is levels[0] else native.WHOLE
        native.reserve(topology(level), of_level.half_bytes, group.timeout, kind)
        if estimate.levels and level is levels[0]:  # the kernels run between hosts, too
            collective_bytes = 0
            workspace_bytes += of_level.workspace_bytes
    return dataclasses.replace(
        estimate, workspace_bytes=workspace_bytes, collective_bytes=collective_bytes
    )


def memory(group: GroupValue) -> tuple[DeviceMemory, ...]:
    """Return what the workspace has mapped on each device of this process. See ``Group``."""
    found = []
    for of_devices, own_devices in _all_places(group):
        for kind in native.WORKSPACE_KINDS:
            half_bytes = native.reserved_bytes(of_devices, kind)
            mapped = native.mapped_bytes(of_devices, kind)
            for device, mapped_bytes in zip(own_devices, mapped, strict=True):
                if mapped_bytes:
                    found.append(
                        DeviceMemory(device, HEADER_BYTES, half_bytes, RING_DEPTH, mapped_bytes)
                    )
    return tuple(found)


def check(group: GroupValue) -> None:
    """Raise the error that a kernel of the group has reported, if there is one. See ``Group``."""
    topologies = [place.topology for place in _all_places(group)]
    failures = map(native.failure, topologies)
    for failure in filter(None, failures):
        several = isinstance(group.mesh, Mesh) and spans_processes(group)
        where = " in every process" if several else ""
        raise RuntimeError(
            f"jax_moe_a2a: {failure}. The group stays stopped until group.close() is called{where}."
        )


def close(group: GroupValue, timeout: float | None) -> None:
    """Wait for the group's devices and free its workspace. See ``Group``."""
    if timeout is None:
        timeout = max(2 * group.timeout, LEAST_CLOSE_SECONDS)
    check_seconds("timeout", timeout)
    topologies = [place.topology for place in _all_places(group)]
    for each in topologies:  # Wait first, so that either all close or none.
        native.wait(each, timeout)
    for each in topologies:
        native.close(each, timeout)
