"""Group: a communication domain of ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from . import compat, native, network, processes
from .capacity import MAX_TOP_K
from .memory import HEADER_BYTES, RING_DEPTH, DeviceMemory, MemoryEstimate, memory_estimate


@dataclasses.dataclass(frozen=True)
class DeviceCounters:
    """Hold the sync counters of one device. Epochs number its exchanges from 1."""

    device: jax.Device
    rank: int
    """Of the device; of several ranks on one GPU, each has counters of its own."""
    num_exchanges: int
    """Exchanges that have run on this device since the workspace opened."""
    credits: tuple[tuple[int, ...], ...]
    """[ring halves, ranks]: the last epoch that each rank has read of this rank's rows; 0 for none,
    and for this rank itself."""
    heads: tuple[tuple[int, ...], ...]
    """[ring halves, ranks]: the last epoch that each rank has announced here; 0 as above."""


MOST_SECONDS = 1e9  # of a timeout: 31 years
LEAST_CLOSE_SECONDS = 60.0  # that ``close`` waits for devices, unless it is told
MOST_HOSTS = 8  # of two levels, where the group chooses
IMPLEMENTATIONS = (None, "portable", "cuda")
ON_FAILURE = ("raise", "nan")
OPERATIONS = ("route", "dispatch", "combine")

# By the domains of a group: what its processes have told.
_ranks_of_a_host = compat.per_job(dict[tuple[tuple[int, ...], int], int])
# By a group without devices: that group with the devices of each program that was lowered for it.
_of_programs: dict[Group, dict[Group, None]] = {}


class _Place(NamedTuple):
    """Hold where exchanges of a group run: a topology, and this process's devices in its order."""

    topology: native.Topology
    own_devices: tuple[jax.Device, ...]


@dataclasses.dataclass(frozen=True, init=False)
class Group:
    """Name the ranks that exchange tokens, along one or several mesh axes.

    A group is a value: frozen, hashable, and equal to any group with the same content. It holds no
    experts, sizes or dtypes, so layers that differ in those can share one group.

    Args:
      mesh: the mesh that ``axis_name`` belongs to, concrete or abstract. Its other axes give
        several independent domains. An abstract mesh, or None, leaves the devices to the program:
        inside ``jax.shard_map`` they are those of its mesh or of ``jax.set_mesh``; inside
        ``jax.vmap`` over the group's axis, all ranks share one device.
      axis_name: an axis name, or a tuple of axis names. Ranks count row-major in the order given.
      size: number of ranks. Required without a mesh; checked with a mesh.
      num_sms: number of multiprocessors (SMs) that a kernel may occupy: a number, or a mapping from
        ``"route"``, ``"dispatch"`` and ``"combine"`` to numbers. For None, or an operation that the
        mapping lacks, the package chooses; split exchanges then use fewer SMs. A launch never has
        more blocks than the GPU has SMs, and an exchange of several ranks leaves one SM free.
      p2p_world_size: number of neighbouring ranks that reach each other's memory with loads and
        stores, as GPUs of one host do. Other ranks are reached with NVSHMEM, which needs one
        process per GPU. None means the ranks of one host. It changes no result, and nothing on the
        portable path.
      timeout: seconds that a kernel waits for a peer, and a process for another process, before
        they raise an error. At most 1e9.
      first_timeout: the same for a peer that has not come yet, in seconds: one that has made no
        exchange on this workspace since it was opened, or a process that has made no group. It may
        still compile its program. At most 1e9; if it is less than ``timeout``, ``timeout`` counts.
      on_failure: what executions do after an exchange of the group has failed. ``"raise"``: the
        next execution in each process raises the error. ``"nan"``: executions do not raise; all
        their float results of exchanges are NaN, so that collectives which the program makes as
        well end in all processes. ``check`` reports the failure either way. See "When an exchange
        fails" in ``docs/multi_host.md``.
      implementation: None (CUDA kernels if they can run, otherwise the portable path),
        ``"portable"``, or ``"cuda"`` (an error if the kernels cannot run). Inside ``jax.vmap`` over
        the group's axis, None means the portable path, and ``"cuda"`` runs the kernels for all
        ranks on one GPU, in one launch.
      cuda_graphs: True or False to let XLA capture the calls in CUDA graphs or not; None to let the
        package choose.
      two_level: True to exchange in two levels: a token crosses to each host once, and each host
        sums before it sends back. ``axis_name`` must then be the axis over hosts and the axis over
        the ranks of a host. Rows and their order stay the same. None chooses two levels only over
        devices of 2 to 8 hosts if each host is a row of ``axis_name``.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if the mesh lacks an axis, a size does not match, or a number is out of range.

    Example:
      Eight devices as two domains of four ranks:

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

    mesh: Mesh | AbstractMesh | None = dataclasses.field(repr=False)
    axis_name: str | tuple[str, ...]
    size: int
    num_sms: int | tuple[tuple[str, int], ...] | None
    p2p_world_size: int | None
    timeout: float
    first_timeout: float
    on_failure: str
    implementation: str | None
    cuda_graphs: bool | None
    two_level: bool

    def __init__(
        self,
        mesh: Mesh | AbstractMesh | None = None,
        axis_name: str | tuple[str, ...] | None = None,
        *,
        size: int | None = None,
        num_sms: int | Mapping[str, int] | tuple[tuple[str, int], ...] | None = None,
        p2p_world_size: int | None = None,
        timeout: float = 30.0,
        first_timeout: float = 600.0,
        on_failure: str = "raise",
        implementation: str | None = None,
        cuda_graphs: bool | None = None,
        two_level: bool | None = None,
    ):
        if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(
                f"mesh must be a jax.sharding.Mesh, an AbstractMesh or None; got {mesh!r}"
            )
        axes = _check_axis_name(axis_name)
        _check_seconds("timeout", timeout)
        _check_seconds("first_timeout", first_timeout)
        if on_failure not in ON_FAILURE:
            raise ValueError(f"on_failure must be 'raise' or 'nan'; got {on_failure!r}")
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"implementation must be None, 'portable' or 'cuda'; got {implementation!r}"
            )
        if cuda_graphs is not None and not isinstance(cuda_graphs, bool):
            raise TypeError(f"cuda_graphs must be True, False or None; got {cuda_graphs!r}")

        size = _check_size(mesh, axes, size)
        if p2p_world_size is not None and (
            not _is_int(p2p_world_size)
            or p2p_world_size < 1
            or (p2p_world_size < size and size % p2p_world_size)
        ):
            raise ValueError(
                f"p2p_world_size must be a positive int that divides the group's {size} ranks, or "
                f"exceeds them, or None; got {p2p_world_size!r}"
            )
        fields = dict(
            mesh=mesh,
            axis_name=axes[0] if len(axes) == 1 else axes,
            size=size,
            p2p_world_size=p2p_world_size,
            num_sms=_check_num_sms(num_sms),
            timeout=float(timeout),
            first_timeout=float(first_timeout),
            on_failure=on_failure,
            implementation=implementation,
            cuda_graphs=cuda_graphs,
            two_level=_check_two_level(mesh, axes, two_level),
        )
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        if self.two_level and p2p_world_size is not None:
            _, per_host = (level.size for level in self.levels)
            if p2p_world_size % per_host and per_host % p2p_world_size:
                raise ValueError(
                    f"p2p_world_size must divide the {per_host} ranks of a host or be a multiple "
                    f"of them in two levels; got {p2p_world_size!r}"
                )
        if isinstance(mesh, Mesh) and implementation != "portable" and self._spans_processes:
            if all(device.platform == "gpu" for device in mesh.devices.flat):
                processes.publish()  # Others may come to a program of this group first.

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axis names, always as a tuple."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name

    @property
    def patience(self) -> float:
        """Return the seconds to wait for a peer that has not come yet."""
        return max(self.timeout, self.first_timeout)

    def sms_of(self, operation: str) -> int | None:
        """Return the SMs of an operation, or None if the package chooses.

        Args:
          operation: ``"route"``, ``"dispatch"`` or ``"combine"``.
        """
        if isinstance(self.num_sms, tuple):
            return dict(self.num_sms).get(operation)
        return self.num_sms

    @property
    def path(self) -> str:
        """Return what runs on the group's devices: ``"cuda"`` (the kernels) or ``"portable"``.

        Raises:
          RuntimeError: as ``why_portable``.
        """
        return "portable" if self.why_portable else "cuda"

    @property
    def why_portable(self) -> str:
        """Return why the kernels do not run on the group's devices, or '' if they do.

        With two levels, it returns the reason of the first level without kernels. If the mesh has
        several processes, it waits until all of them have made a group.

        Raises:
          RuntimeError: if another process of the mesh has made no group within ``first_timeout``.
        """
        if self.two_level:
            return next(filter(None, (level.why_portable for level in self.levels)), "")
        placed = self.placed_on(compat.mesh_in_context())
        if placed is not self:
            return placed.why_portable
        if why := self._why_no_workspace:
            return why
        if not isinstance(self.mesh, Mesh):
            return native.why_not_on_one_gpu(self.size)
        if self._spans_processes:
            shared = self.topology.p2p_world_size
            if why := processes.why_apart(self._domains, shared, self.patience):
                return why
            processes.meet((device.process_index for device in self._devices), self.patience)
        elif self.is_wide:
            return "ranks beyond p2p_world_size need NVSHMEM, which needs one process per GPU"
        return ""

    @property
    def _why_no_workspace(self) -> str:
        """Why this process runs no kernels on the group's devices, whatever others do."""
        if self.implementation == "portable":
            return "the group asks for the portable path"
        if not native.has_kernels():
            return "jax_moe_a2a was built without CUDA kernels"
        if self.size > native.limit("MAX_RANKS"):
            return f"the group has {self.size} ranks, more than {native.limit('MAX_RANKS')}"
        if not isinstance(self.mesh, Mesh):
            if self.implementation == "cuda":
                return ""
            return (
                "the group has no devices (no mesh, or an abstract one): the program decides. In "
                "jax.shard_map the kernels run where its devices allow; in jax.vmap over the axis "
                "they run only with implementation='cuda'"
            )
        if any(d.platform != "gpu" for d in self.mesh.devices.flat):
            return "the mesh has devices that are not GPUs"
        if any(float(d.compute_capability) < 9.0 for d in self.mesh.devices.flat):
            return "the mesh has GPUs older than Hopper (compute capability 9.0)"
        return native.why_unreachable(native.Topology(self._device_ids, self.size, self.size))

    def placed_on(self, mesh: Mesh | None) -> Group:
        """Return the group with the devices of ``mesh``, if it has none and the mesh has its axes;
        otherwise the group itself."""
        if isinstance(self.mesh, Mesh) or mesh is None:
            return self
        sizes = [mesh.shape.get(axis) for axis in self.axes]
        if None in sizes or math.prod(size or 0 for size in sizes) != self.size:
            return self
        return self._with(mesh=mesh)

    def placed_by(self, program_mesh: Mesh | None) -> Group:
        """Like ``placed_on``, for a program that is being lowered: its devices become places that
        ``memory``, ``check`` and ``close`` know."""
        placed = self.placed_on(program_mesh)
        if placed is not self:
            _of_programs.setdefault(self, {})[placed] = None
        return placed

    @property
    def topology(self) -> native.Topology:
        """Return the devices and sizes that a workspace of this group belongs to.

        Without devices of its own, a group has those that ``jax.set_mesh`` has set, or all of its
        ranks on the default GPU.

        Raises:
          RuntimeError: as ``why_portable``.
        """
        placed = self.placed_on(compat.mesh_in_context())
        if isinstance(placed.mesh, Mesh):
            return native.Topology(placed._device_ids, placed.size, placed._ranks_that_share_memory)
        device = native.default_gpu()
        return native.on_one_gpu(None if device is None else device.id, self.size)

    @property
    def _open_topology(self) -> native.Topology:
        """The same of a workspace that may be open, without a wait for other processes."""
        if self.p2p_world_size is not None:
            return self.topology
        ids, size = self._device_ids, self.size
        return native.Topology(ids, size, _ranks_of_a_host().get((ids, size), size))

    def _places(self) -> list[_Place]:
        """Return where a workspace of this group may be open, not counting levels and replicated
        tokens."""
        if isinstance(self.mesh, Mesh):
            if self._why_no_workspace:
                return []
            return [_Place(self._open_topology, tuple(self._own_devices))]
        places = [place for placed in _of_programs.get(self, ()) for place in placed._places()]
        if self.implementation == "cuda" and native.has_kernels():
            for gpu in native.local_gpus():
                topology = native.on_one_gpu(gpu.id, self.size)
                places.append(_Place(topology, (gpu,) * self.size))
        return places

    def _all_places(self) -> list[_Place]:
        """Return where a workspace may be open, each place once: of the levels, and that for
        replicated tokens."""
        groups = (*self.levels, self.alone)
        return list(dict.fromkeys(place for group in groups for place in group._places()))

    @property
    def is_wide(self) -> bool:
        """Return True if the group is multi-host: not all ranks share memory."""
        return self.topology.is_wide

    @property
    def _ranks_that_share_memory(self) -> int:
        if self.size == 1 or self.p2p_world_size is not None or not self._spans_processes:
            return min(self.p2p_world_size or self.size, self.size)
        key = self._device_ids, self.size
        if key not in (known := _ranks_of_a_host()):
            ranks = processes.ranks_of_a_host(self._domains, self.patience)
            known[key] = ranks or self.size
        return known[key]

    @property
    def _device_ids(self) -> tuple[int, ...]:
        return tuple(device.id for device in self._devices)

    @property
    def _domains(self) -> list[list[jax.Device]]:
        devices = self._devices
        return [devices[i : i + self.size] for i in range(0, len(devices), self.size)]

    @property
    def _devices(self) -> list[jax.Device]:
        """The devices, domain after domain in the order of ranks."""
        assert isinstance(self.mesh, Mesh)
        names = self.mesh.axis_names
        others = [names.index(axis) for axis in names if axis not in self.axes]
        own = [names.index(axis) for axis in self.axes]
        return list(self.mesh.devices.transpose(others + own).flat)

    @property
    def _own_devices(self) -> list[jax.Device]:
        """Those of this process, in the same order."""
        return [d for d in self._devices if d.process_index == jax.process_index()]

    @property
    def _spans_processes(self) -> bool:
        return len({device.process_index for device in self._devices}) > 1

    @functools.cached_property
    def alone(self) -> Group:
        """Return a group of the same devices in which each rank is a domain of its own."""
        return self._with(axis_name=(), size=1, two_level=False)

    @functools.cached_property
    def levels(self) -> tuple[Group, ...]:
        """Return the groups that exchange in turn.

        That is the group itself; with two levels, first the ranks of equal local index on all
        hosts, then the ranks of a host.
        """
        if not self.two_level:
            return (self,)
        assert self.mesh is not None
        sizes = self.mesh.shape
        hosts, ranks = self.axes
        p2p = self.p2p_world_size
        between = None if p2p is None else max(1, p2p // sizes[ranks])
        return (
            self._with(axis_name=hosts, size=sizes[hosts], two_level=False, p2p_world_size=between),
            self._with(axis_name=ranks, size=sizes[ranks], two_level=False),
        )

    def _with(self, **fields: Any) -> Group:
        group = object.__new__(Group)
        for field in dataclasses.fields(Group):
            value = fields.get(field.name, getattr(self, field.name))
            object.__setattr__(group, field.name, value)
        return group

    def reserve(self, *, split: bool = False, **sizes: Any) -> MemoryEstimate:
        """Open or grow the workspace before a program needs it, and return the estimate.

        Calling it is optional, because loading a program does the same. Call it to find a lack of
        memory early, or to load kernels outside ``jit``. The workspace never shrinks or moves, so
        existing programs stay valid. On the portable path nothing is reserved.

        Args:
          split: True for split exchanges (``dispatch_start`` and so on), which use a second
            workspace.
          **sizes: keyword arguments of ``memory_estimate`` except ``group_size``: ``num_tokens``,
            ``hidden``, ``top_k``, ``num_experts``, and optionally ``dtype``, ``format`` and so on.

        Returns:
          The ``MemoryEstimate``. Its ``network_bytes`` says what NVSHMEM was asked for.

        Raises:
          TypeError: as ``memory_estimate``.
          ValueError: as ``memory_estimate``.
          RuntimeError: if the driver reports an error, or another process has made no group or has
            not answered. If a device has too little memory, it is a
            ``jax.errors.JaxRuntimeError`` whose text starts with ``RESOURCE_EXHAUSTED``, as
            where XLA lacks memory.
        """
        levels = (self.alone,) if sizes.get("replicated") else self.levels
        estimate = memory_estimate(
            group_size=(self.levels[0].size, self.levels[1].size) if self.two_level else self.size,
            **sizes,
        )
        network_bytes = 0
        for level, of_level in zip(levels, estimate.levels or (estimate,), strict=True):
            if level.path == "portable":
                continue
            if level.is_wide:
                network_bytes += network.bytes_to_reserve(of_level.slot_bytes)
            # Of two levels the one within the host is whole in a split exchange too.
            is_split = split and level is levels[0]
            ring = native.SPLIT_RING if is_split else native.WHOLE_RING
            if level.is_wide:
                network.reserve(level.topology, of_level.slot_bytes, self.patience, ring)
            else:
                native.reserve(level.topology, of_level.slot_bytes, self.timeout, ring)
        return dataclasses.replace(estimate, network_bytes=network_bytes)

    def memory(self) -> tuple[DeviceMemory, ...]:
        """Report what the workspace has mapped on each device of this process.

        Devices are in the order of domains and ranks. Split exchanges have entries of their own,
        and so does the header for replicated tokens, which has no landing zones. If programs of
        other processes open or grow the workspace, the size of a ring half follows with the next
        program of this process.

        Returns:
          One ``DeviceMemory`` per mapping; empty on the portable path and while the workspace is
          closed.
        """
        found = []
        for topology, own_devices in self._all_places():
            for ring in network.rings(topology):
                slot_bytes = native.reserved_bytes(topology, ring)
                mapped = native.mapped_bytes(topology, ring)
                for device, mapped_bytes in zip(own_devices, mapped, strict=True):
                    if mapped_bytes:
                        found.append(
                            DeviceMemory(device, HEADER_BYTES, slot_bytes, RING_DEPTH, mapped_bytes)
                        )
        return tuple(found)

    def counters(self) -> tuple[DeviceCounters, ...]:
        """Report the sync counters of each device, in the order of ``memory``.

        This is for tests and for examining a failure. Call it while no program of the group runs.
        It does not include the counters of split exchanges and of replicated tokens.

        Returns:
          One ``DeviceCounters`` per device; empty on the portable path, while the workspace is
          closed, and with two levels, whose counters are in ``levels``.

        Raises:
          RuntimeError: if the CUDA runtime reports an error.
        """
        if self.two_level:
            return ()

        def by_slot(words: list[int]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(words[i : i + self.size]) for i in range(0, len(words), self.size))

        found = []
        for topology, own_devices in self._places():
            ids = list(topology.devices)
            for ring in network.rings(topology):
                if native.is_split(ring):
                    continue
                values = native.counters(topology, ring)  # none while closed
                for i, (next_epoch, _, credits, heads) in enumerate(values):
                    device = own_devices[i]
                    is_shared = ids.count(device.id) > 1
                    rank = (i if is_shared else ids.index(device.id)) % self.size
                    counters = by_slot(credits), by_slot(heads)
                    found.append(DeviceCounters(device, rank, next_epoch - 1, *counters))
        return tuple(found)

    def check(self) -> None:
        """Raise the error that a kernel of the group has reported, if there is one.

        A failed exchange leaves NaN in float outputs and an empty routing, and stops the group
        until ``close``. The next execution of a program that uses the group raises the error
        itself, unless the group has ``on_failure="nan"``. Call ``check`` after the last step, or if
        numbers look wrong.

        It reports what has failed so far, also on another rank that has stopped the ranks of this
        process. So wait for results first (``jax.block_until_ready``). It reads one word of each
        device, and does not wait for programs that run.

        Raises:
          RuntimeError: with the operation and phase, the ranks involved, and what was seen; or the
            CUDA runtime's complaint.
        """
        topologies = [place.topology for place in self._all_places()]
        failures = (native.failure(topology, network.rings(topology)) for topology in topologies)
        for failure in filter(None, failures):
            spans_processes = isinstance(self.mesh, Mesh) and self._spans_processes
            where = " in every process" if spans_processes else ""
            raise RuntimeError(
                f"jax_moe_a2a: {failure}. The group stays stopped until group.close() is called"
                f"{where}."
            )

    def close(self, timeout: float | None = None) -> None:
        """Wait for the group's devices and free its workspace.

        The next use opens the workspace again; after a failure, this is how to continue. All groups
        over the same devices in the same order share one workspace. With several processes, each
        process frees its own part, and all processes must close before it opens again.

        Args:
          timeout: seconds to wait for this process's devices. None: twice the group's ``timeout``,
            at least 60.

        Raises:
          RuntimeError: if a device is still at work after that time. The error names the device,
            and says whether an exchange of the group runs there or something else does. The
            workspace then stays open, with its memory, and can be closed later.
        """
        if timeout is None:
            timeout = max(2 * self.timeout, LEAST_CLOSE_SECONDS)
        _check_seconds("timeout", timeout)
        topologies = [place.topology for place in self._all_places()]
        for topology in topologies:  # Before the first one closes: all of them do, or none.
            if not topology.is_wide:  # There all processes must learn of a wait in vain.
                native.wait(topology, timeout)
        for topology in topologies:
            if topology.is_wide:
                network.close(topology, self.timeout, timeout)
            else:
                native.close(topology, timeout)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_seconds(name: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be a number of seconds; got {seconds!r}")
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(
            f"{name} must be positive and at most {MOST_SECONDS:.0e} s, because the kernels "
            f"count nanoseconds in int64; got {seconds!r}"
        )


def _check_num_sms(num_sms: Any) -> int | tuple[tuple[str, int], ...] | None:
    """The budget in a form that can be hashed."""
    if isinstance(num_sms, tuple):  # of another group
        num_sms = dict(num_sms)
    budgets = num_sms if isinstance(num_sms, Mapping) else {OPERATIONS[0]: num_sms}
    for operation, number in budgets.items():
        if operation not in OPERATIONS:
            raise ValueError(f"num_sms must have keys among {OPERATIONS}; got {operation!r}")
        if num_sms is not None and (not _is_int(number) or number < 1):
            raise ValueError(
                "num_sms must be a positive int, a mapping of operations to positive ints, or "
                f"None; got {num_sms!r}"
            )
    return tuple(sorted(budgets.items())) if isinstance(num_sms, Mapping) else num_sms


def _check_axis_name(axis_name: object) -> tuple[str, ...]:
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not axes or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(f"axis_name must be a str or a non-empty tuple of str; got {axis_name!r}")
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis_name must not name an axis twice; got {axis_name!r}")
    return axes


def _check_two_level(
    mesh: Mesh | AbstractMesh | None, axes: tuple[str, ...], two_level: object
) -> bool:
    if two_level is not None and not isinstance(two_level, bool):
        raise TypeError(f"two_level must be True, False or None; got {two_level!r}")
    if two_level:
        if len(axes) != 2:
            raise ValueError(
                "two_level must be None or False unless axis_name names two axes (hosts, then the "
                f"ranks of a host); got two_level=True and axis_name={axes!r}"
            )
        if mesh is None:
            raise ValueError(
                "two_level must be None or False without a mesh, because the mesh says how many "
                "hosts there are; got two_level=True. Pass a mesh; it may be abstract"
            )
        if mesh.shape[axes[0]] > MAX_TOP_K:
            raise ValueError(
                f"two_level must be None or False for more than {MAX_TOP_K} hosts; got "
                f"two_level=True and {mesh.shape[axes[0]]} along {axes[0]!r}"
            )
        return True
    if two_level is None and isinstance(mesh, Mesh) and len(axes) == 2:
        return two_levels_pay(_hosts_of(mesh, axes))
    return False


def _hosts_of(mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    """Which host each device is on, [domains, first axis, second axis]: what JAX calls a slice or a
    partition, where stores reach all memory. -1 where it does not tell."""
    names = mesh.axis_names
    order = [names.index(axis) for axis in names if axis not in axes]
    order += [names.index(axis) for axis in axes]
    hosts = [
        getattr(device, "partition_index", getattr(device, "slice_index", None))
        for device in mesh.devices.transpose(order).flat
    ]
    hosts = [-1 if host is None else host for host in hosts]
    return np.array(hosts).reshape(-1, *(mesh.shape[axis] for axis in axes))


def two_levels_pay(hosts: np.ndarray) -> bool:
    """Whether two levels are faster than one, by the model of ``benchmarks/model.py``.

    ``hosts`` [domains, first axis, second axis] says where each rank is. With several ranks on each
    of 2 to 8 hosts they are, for few tokens and many; beyond, the experts of a token are on almost
    as many hosts as ranks (``docs/cost_model.md``).
    """
    _, num_hosts, num_ranks = hosts.shape
    if not (2 <= num_hosts <= MOST_HOSTS and num_ranks >= 2):
        return False
    is_one_host = (hosts == hosts[:, :, :1]).all()
    first = np.sort(hosts[:, :, 0], axis=1)
    return bool(is_one_host and (first[:, 1:] != first[:, :-1]).all())


def _check_size(mesh: Mesh | AbstractMesh | None, axes: tuple[str, ...], size: int | None) -> int:
    if size is not None and (not _is_int(size) or size < 1):
        raise ValueError(f"size must be a positive int, the number of ranks; got {size!r}")
    if mesh is None:
        if size is None:
            raise ValueError("size must be given without a mesh; got None. Pass size or a mesh")
        return size
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"axis_name must name axes of the mesh, which has {mesh.axis_names}; got {axis!r}"
            )
    mesh_size = math.prod(mesh.shape[axis] for axis in axes)
    if size is not None and size != mesh_size:
        raise ValueError(
            f"size must equal the product of the mesh axes {axes}, which is {mesh_size}; got {size}"
        )
    return mesh_size
