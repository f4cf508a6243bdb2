"""Define ``Group``, which says which devices are the ranks of an exchange.

The methods of ``Group`` choose the path of its exchanges (kernels or the portable path), open and
close workspaces, and report their memory. ``_of_programs`` is the only state of this module.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh

from .. import compat, paths
from ..plan.memory import HEADER_BYTES, RING_DEPTH, DeviceMemory, MemoryEstimate, memory_estimate
from ..plan.options import check_exchange
from . import extension, native, processes
from .value import GroupValue, check_seconds, devices_of, domains_of, spans_processes

LEAST_CLOSE_SECONDS = 60.0  # the default timeout of ``close`` is at least this


class Group(GroupValue):
    """The ranks that exchange tokens, along one or several mesh axes.

    A group is a value: it is frozen, hashable, and equal to any group with the same content. It
    does not depend on experts, tokens or dtypes, so different layers can share a group. Making,
    comparing and printing a group contacts no other process and no device.

    If a group has GPUs of several processes, each process announces itself to all other processes
    before its first exchange of the group: when it lowers the program, or uses ``path`` or
    ``reserve``. At these points, a process may wait until the other processes have announced
    themselves, so all of them must reach such a point (``docs/processes.md``).

    Args:
      mesh: the concrete or abstract mesh that has the axes ``axis_name``. For each index of the
        mesh's other axes, the ranks form an independent *domain*. With an abstract mesh or None,
        the program decides the devices. Inside ``jax.shard_map``, the group uses the devices of the
        mesh of ``jax.shard_map`` or ``jax.set_mesh``. Inside ``jax.vmap`` over the group's axis,
        all ranks share one device.
      axis_name: an axis name, or a tuple of axis names. Ranks are numbered row-major in this order.
        ``jax.vmap`` over the group needs a single axis.
      size: number of ranks. Without a mesh, ``size`` is required. With a mesh, ``size`` must equal
        the product of the axes.
      num_sms: number of multiprocessors (SMs) that a kernel may occupy: a number, or a mapping from
        ``"route"``, ``"dispatch"`` and ``"combine"`` to numbers. If the argument is None, or the
        mapping lacks an operation, the package chooses the number. It chooses fewer SMs for split
        exchanges. A launch never uses more SMs than the GPU has. An exchange of several ranks
        leaves one SM free.
      timeout: seconds that a kernel waits for another rank, or a process for another process,
        before an error is raised. The maximum is 1e9.
      first_timeout: seconds to wait for a rank that has made no exchange since the workspace was
        opened, or for a process that has not announced itself yet. This rank may still be compiling
        its program. The maximum is 1e9. A value below ``timeout`` means ``timeout``.
      on_failure: what executions of programs do after an exchange of the group has failed. With
        ``"raise"``, the next execution in each process raises the error. With ``"nan"``, executions
        do not raise, and all float results of exchanges are NaN, so that other collectives of the
        program still end in all processes. ``check`` reports the failure in both cases. See "When
        an exchange fails" in ``docs/troubleshooting.md``.
      implementation: ``"portable"`` selects the portable path. ``"cuda"`` selects the CUDA kernels,
        and raises an error if they cannot run (with two levels: within a host).
        None selects the kernels if they can run, otherwise the portable path. Inside ``jax.vmap``
        over the group's axis, None means the portable path. ``"cuda"`` then runs the kernels for
        all ranks on one GPU, in one launch.
      cuda_graphs: True if XLA may capture the calls in CUDA graphs, False if not, None to let the
        package choose.
      two_level: True to exchange in two levels: a token travels to each host once, and each host
        sums rows before it sends the sum back. Two levels need a mesh, and two axes in
        ``axis_name``: first at most 32 hosts, then the ranks of a host. Rows keep their order.
        None means True if the mesh has devices, the first axis is over 2 to 32 hosts, and the
        second axis is over at least two ranks of each host. Otherwise None means False.

    Example:
      Eight devices form two domains of four ranks:

      ```python
      import jax
      import jax_moe_a2a as ma

      mesh = jax.sharding.AbstractMesh((2, 4), ("data", "ep"))
      group = ma.Group(mesh, "ep", timeout=60.0, num_sms={"dispatch": 48, "combine": 64})
      print(group.size, group == ma.Group(mesh, "ep"), group.sms_of("dispatch"))
      ```

      ```text
      4 False 48
      ```
    """

    @property
    def path(self) -> str:
        """Return ``"cuda"`` if the kernels run on the group's devices, otherwise ``"portable"``.

        If the group has two levels, and only the exchange within a host uses the kernels, return
        ``"cuda within hosts, portable between"``. This path is normal for a group over several
        hosts. ``explain`` says why a program takes the portable path.

        Raises:
          RuntimeError: if another process of the mesh has not announced itself within
            ``first_timeout``, or if ``jax.distributed.initialize()`` was not called.
          ValueError: if the group has ``implementation="cuda"``, and the kernels cannot run. With
            two levels, only if they cannot run within a host.
        """
        if self.two_level:
            between, within = (level.path for level in self.levels)
            return within if between == within else f"{within} within hosts, {between} between"
        why = self._why_portable
        if why and self.implementation == "cuda":
            raise ValueError(
                "implementation must be None or 'portable' where the CUDA kernels cannot run "
                f"({why}); got implementation='cuda'"
            )
        return "portable" if why else "cuda"

    @property
    def _why_portable(self) -> str:
        """Return why the kernels do not run on the group's devices, or ''.

        If the devices belong to several processes, the property waits for all of these processes.
        For ``explain``, it raises ``Unknown`` instead. If a group with two axes could run the
        kernels within each host, the returned text and a Python warning recommend such a group.
        """
        if self.two_level:
            between, within = (level._why_portable for level in self.levels)
            if between == within:
                return between and f"within and between hosts: {between}"
            reasons = {"within": within, "between": between}
            return "; ".join(f"{where} hosts: {why}" for where, why in reasons.items() if why)
        group = self.placed_on(compat.mesh_in_context())
        announce(group)  # always, because another process may wait for the notice
        if why := _why_no_workspace(group):
            return why
        if paths.named_gpu():
            return ""
        if not isinstance(group.mesh, Mesh):
            return native.why_not_on_one_gpu(group.size)
        if spans_processes(group):
            if paths.is_explaining():
                raise paths.Unknown(
                    "the GPUs belong to several processes, which decide together when the program "
                    "is lowered. Group.path in all processes returns their choice, and the log the "
                    "reason"
                )
            domains = domains_of(group)
            if why := processes.why_not_together(domains, group.patience):
                if 1 < processes.ranks_of_a_host(domains, group.patience) < group.size:
                    why += (
                        ". To run the kernels within each host, make the mesh and the group with "
                        "two axes, hosts and ranks of a host, as docs/multi_host.md shows"
                    )
                    if group.implementation is None:
                        message = f"jax_moe_a2a: {group} takes the portable path: {why}"
                        warnings.warn(message, stacklevel=2)
                return why
            processes.meet((device.process_index for device in devices_of(group)), group.patience)
        return ""

    @property
    def topology(self) -> native.Topology:
        """Return the devices of the group's workspace. A group without devices uses the mesh of
        ``jax.set_mesh``. If no mesh is set, all ranks share the default GPU."""
        placed = self.placed_on(compat.mesh_in_context())
        if isinstance(placed.mesh, Mesh):
            announce(placed)
            return _topology_of(placed)
        if (gpu := native.default_gpu()) is None:
            return native.Topology((), self.size)
        return native.on_one_gpu(gpu.id, self.size)

    def placed_by(self, program_mesh: Mesh | None) -> Self:
        """Return ``placed_on(program_mesh)``, for a program that is being lowered. After this call,
        ``memory``, ``check`` and ``close`` include the devices of the program."""
        placed = self.placed_on(program_mesh)
        if placed is not self and not paths.is_explaining():
            _of_programs.setdefault(self, {})[placed] = None
        announce(placed)
        return placed

    def reserve(self, *, split: bool = False, **sizes: Any) -> MemoryEstimate:
        """Open or grow the workspace before a program needs it, and return its estimated memory.

        The call is optional, because loading a program also opens the workspace. Call ``reserve``
        to find a lack of memory early, or to load kernels outside ``jit``. The workspace never
        shrinks or moves, so compiled programs stay valid. The portable path needs no workspace.

        Args:
          split: True for split exchanges (``dispatch_start`` and so on). If the group has one
            level, split exchanges use a second workspace.
          **sizes: arguments of ``memory_estimate`` except ``group_size``: ``num_tokens``,
            ``hidden``, ``top_k``, ``num_experts``, and optionally ``dtype`` and ``exchange``.

        Returns:
          The ``MemoryEstimate``.

        Raises:
          RuntimeError: if the driver reports an error, or if another process has not announced
            itself within ``first_timeout`` or has not answered. If a device has too little memory,
            the error is a ``jax.errors.JaxRuntimeError`` that starts with ``RESOURCE_EXHAUSTED``,
            like XLA's own errors.
        """
        replicated = check_exchange(sizes.get("exchange")).replicated
        levels = (self.single_rank,) if replicated else self.levels
        group_size = (levels[0].size, levels[1].size) if len(levels) > 1 else self.size
        estimate = memory_estimate(group_size=group_size, **sizes)
        workspace_bytes, collective_bytes = estimate.workspace_bytes, estimate.collective_bytes
        for level, of_level in zip(levels, estimate.levels or (estimate,), strict=True):
            if level._why_portable:
                continue
            kind = native.SPLIT if split and not estimate.levels else native.WHOLE
            native.reserve(level.topology, of_level.half_bytes, self.timeout, kind)
            if estimate.levels and level is levels[0]:  # the kernels also run between hosts
                collective_bytes = 0
                workspace_bytes += of_level.workspace_bytes
        return dataclasses.replace(
            estimate, workspace_bytes=workspace_bytes, collective_bytes=collective_bytes
        )

    def memory(self) -> tuple[DeviceMemory, ...]:
        """Report the memory that the workspace has mapped on each device of this process.

        Devices are in the order of domains and ranks. The workspaces for split exchanges and for
        replicated tokens have separate entries. The workspace for replicated tokens has no landing
        zones. If a program of another process grows the workspace, the reported size changes only
        with this process's next program.

        Returns:
          One ``DeviceMemory`` per device and workspace. The tuple is empty on the portable path and
          while the workspace is closed.
        """
        found = []
        for of_devices, own_devices in _all_places(self):
            for kind in native.WORKSPACE_KINDS:
                half_bytes = native.reserved_bytes(of_devices, kind)
                mapped = native.mapped_bytes(of_devices, kind)
                for device, mapped_bytes in zip(own_devices, mapped, strict=True):
                    if mapped_bytes:
                        found.append(
                            DeviceMemory(device, HEADER_BYTES, half_bytes, RING_DEPTH, mapped_bytes)
                        )
        return tuple(found)

    def check(self) -> None:
        """Raise the error that a kernel of the group has reported, if there is one.

        A failed exchange returns NaN in float results and an empty routing. The failure stops the
        group until ``close``. Call ``check`` after the last step, or if numbers look wrong.

        ``check`` does not wait for running programs, so wait for results first
        (``jax.block_until_ready``). ``check`` reads one word of each device. If a failure in
        another process has stopped this process's ranks, ``check`` reports that failure.

        Raises:
          RuntimeError: if an exchange has failed, or if the CUDA runtime reports an error. For an
            exchange, the message names the operation, the phase, the ranks, and the unexpected
            value.
        """
        for place in _all_places(self):
            if not (failure := native.failure(place.topology)):
                continue
            several = isinstance(self.mesh, Mesh) and spans_processes(self)
            where = " in every process" if several else ""
            raise RuntimeError(
                f"jax_moe_a2a: {failure}. The group stays stopped until group.close() is called"
                f"{where}."
            )

    def close(self, timeout: float | None = None) -> None:
        """Wait for the group's devices and free its workspace.

        The next use opens the workspace again. Call ``close`` to continue after a failure. All
        groups over the same devices in the same order share one workspace. With several processes,
        each process frees the memory of its devices only. The workspace opens again only after all
        processes have called ``close``.

        Args:
          timeout: seconds to wait for this process's devices. None means twice the group's
            ``timeout``, and at least 60 seconds.

        Raises:
          RuntimeError: if a device is still at work after that time. The error names the device,
            and says whether the device runs an exchange of the group or other work. The workspace
            then stays open and keeps its memory. Call ``close`` again later.
        """
        if timeout is None:
            timeout = max(2 * self.timeout, LEAST_CLOSE_SECONDS)
        check_seconds("timeout", timeout)
        topologies = [place.topology for place in _all_places(self)]
        for each in topologies:  # If this raises an error, all workspaces stay open.
            native.wait(each, timeout)
        for each in topologies:
            native.close(each, timeout)


# Maps a group without devices to its copies, which have the devices of lowered programs.
_of_programs: dict[Group, dict[Group, None]] = {}


class _Place(NamedTuple):
    """A topology, and the devices of this process in the order of the topology."""

    topology: native.Topology
    own_devices: tuple[jax.Device, ...]


def announce(group: Group) -> None:
    """Publish the notice of this process, once in a job, without waiting for another process.

    Every function of this module that may wait for another process calls ``announce`` first. The
    lowering of every program (``placed_by``) also calls it first. Therefore two processes never
    wait for each other's notice, even if they lower their programs in different orders. A process
    without kernels also publishes a notice, because other processes wait for the notice.
    """
    if not isinstance(group.mesh, Mesh) or group.implementation == "portable":
        return
    if paths.is_explaining():
        return
    if spans_processes(group) and all(d.platform == "gpu" for d in group.mesh.devices.flat):
        processes.publish()


def _why_no_workspace(group: Group) -> str:
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
    if why := native.why_no_exchange(devices):
        return why
    return "" if gpu else native.why_unreachable(_topology_of(group))


def _topology_of(group: Group) -> native.Topology:
    return native.Topology(tuple(device.id for device in devices_of(group)), group.size)


def _places(group: Group) -> list[_Place]:
    """Return the places where a group of one level may have an open workspace."""
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


def _all_places(group: Group) -> list[_Place]:
    """Return the distinct results of ``_places`` for all levels and for replicated tokens."""
    groups = (*group.levels, group.single_rank)
    return list(dict.fromkeys(place for of_group in groups for place in _places(of_group)))
