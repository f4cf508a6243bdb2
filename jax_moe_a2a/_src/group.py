"""Define ``Group``: the ranks that exchange tokens, as a value with methods that act on it."""

from __future__ import annotations

from typing import Any, Self

from jax.sharding import Mesh

from . import native, runtime
from .group_value import GroupValue
from .memory import DeviceMemory, MemoryEstimate


class Group(GroupValue):
    """Name the ranks that exchange tokens, along one or several mesh axes.

    A group is a value: frozen, hashable, and equal to any group with the same content. It holds no
    experts, sizes or dtypes, so layers that differ in those can share one group. To make, compare
    or print a group asks no other process and no device.

    Over GPUs of several processes, a process announces itself to the others when it first lowers a
    program with an exchange of such a group, or first asks ``path``, ``why_portable``, ``is_wide``
    or ``reserve``. Each of these may then wait until the other processes have announced themselves,
    so use them in all processes. See "When processes announce themselves" in
    ``docs/multi_host.md``.

    Args:
      mesh: the mesh that ``axis_name`` belongs to, concrete or abstract. Each index of its other
        axes is an independent domain. An abstract mesh, or None, leaves the devices to the program:
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
        exchange on this workspace since it was opened, or a process that has not announced itself.
        It may still compile its program. At most 1e9; if it is less than ``timeout``, ``timeout``
        counts.
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
        several processes, it waits until all of them have announced themselves, so ask in all
        processes.

        Raises:
          RuntimeError: if another process of the mesh has not announced itself within
            ``first_timeout``, or if ``jax.distributed.initialize()`` was not called.
        """
        return runtime.why_portable(self)

    @property
    def topology(self) -> native.Topology:
        """Return the devices and sizes that a workspace of this group belongs to.

        Without devices of its own, a group has those that ``jax.set_mesh`` has set, or all of its
        ranks on the default GPU.

        Raises:
          RuntimeError: as ``why_portable``.
        """
        return runtime.topology(self)

    @property
    def is_wide(self) -> bool:
        """Return True if the group is multi-host: not all ranks share memory.

        Raises:
          RuntimeError: as ``why_portable``.
        """
        return self.topology.is_wide

    def placed_by(self, program_mesh: Mesh | None) -> Self:
        """Return the group with the devices of a program that is being lowered.

        It is ``placed_on`` for a lowering: ``memory``, ``check`` and ``close`` then know these
        devices, and this process announces itself.
        """
        return runtime.placed_by(self, program_mesh)

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
          RuntimeError: if the driver reports an error, another process has not announced itself
            within ``first_timeout``, or has not answered. If a device has too little memory, it is
            a ``jax.errors.JaxRuntimeError`` whose text starts with ``RESOURCE_EXHAUSTED``, as where
            XLA lacks memory.
        """
        return runtime.reserve(self, split, sizes)

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
        return runtime.memory(self)

    def counters(self) -> tuple[runtime.DeviceCounters, ...]:
        """Report the sync counters of each device, in the order of ``memory``.

        This is for tests and for examining a failure. Call it while no program of the group runs.
        It does not include the counters of split exchanges and of replicated tokens.

        Returns:
          One ``DeviceCounters`` per device; empty on the portable path, while the workspace is
          closed, and with two levels, whose counters are in ``levels``.

        Raises:
          RuntimeError: if the CUDA runtime reports an error.
        """
        return runtime.counters(self)

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
        runtime.check(self)

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
        runtime.close(self, timeout)
