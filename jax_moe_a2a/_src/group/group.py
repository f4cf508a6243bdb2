"""Define ``Group``, the value that names the ranks of an exchange, with methods that act on it."""

from __future__ import annotations

from typing import Any, Self

from jax.sharding import Mesh

from ..plan.memory import DeviceMemory, MemoryEstimate
from . import native, runtime
from .value import GroupValue


class Group(GroupValue):
    """The ranks that exchange tokens, along one or several mesh axes.

    A group is a value: it is frozen, hashable, and equal to any group with the same content. It
    holds no experts, sizes or dtypes, so different layers can share a group. Making, comparing and
    printing a group contacts no other process and no device.

    If a group has GPUs of several processes, each process must announce itself to the others. A
    process does so when it first lowers a program with an exchange of the group, or first uses
    ``path`` or ``reserve``. Both may wait until the other processes have
    announced themselves, so use them in all processes. See "When processes announce themselves" in
    ``docs/processes.md``.

    Args:
      mesh: the mesh that ``axis_name`` belongs to, concrete or abstract. Each index of its other
        axes is an independent domain. With an abstract mesh or None, the program decides the
        devices. Inside ``jax.shard_map`` they are the devices of its mesh, or of the mesh of
        ``jax.set_mesh``. Inside ``jax.vmap`` over the group's axis, all ranks share one device.
      axis_name: an axis name, or a tuple of axis names. Ranks are numbered row-major in this order.
        ``jax.vmap`` over the group needs a single axis.
      size: number of ranks. It is required without a mesh. With a mesh, it must equal the product
        of the axes.
      num_sms: number of multiprocessors (SMs) that a kernel may occupy: a number, or a mapping from
        ``"route"``, ``"dispatch"`` and ``"combine"`` to numbers. For None, and for an operation
        that the mapping lacks, the package chooses, and split exchanges use fewer SMs. A launch
        never uses more SMs than the GPU has, and an exchange of several ranks leaves one SM free.
      timeout: seconds that a kernel waits for a peer, and that a process waits for another process,
        before an error is raised. At most 1e9.
      first_timeout: seconds to wait for a peer that has made no exchange since the workspace was
        opened, and for a process that has not announced itself. Such a process may still be
        compiling its program. At most 1e9. If it is less than ``timeout``, ``timeout`` is used.
      on_failure: what executions do after an exchange of the group has failed. With ``"raise"``,
        the next execution in each process raises the error. With ``"nan"``, executions do not
        raise, and all float results of exchanges are NaN, so that other collectives of the program
        still end in all processes. ``check`` reports the failure in both cases. See "When an
        exchange fails" in ``docs/troubleshooting.md``.
      implementation: ``"portable"`` selects the portable path. ``"cuda"`` selects the CUDA kernels,
        and is an error if they cannot run; with two levels, they must run within each host. None
        selects the kernels if they can run, otherwise the portable path. Inside ``jax.vmap`` over
        the group's axis, None means the portable path, and ``"cuda"`` runs the kernels for all
        ranks on one GPU, in one launch.
      cuda_graphs: True if XLA may capture the calls in CUDA graphs, False if not, None to let the
        package choose.
      two_level: True to exchange in two levels: a token crosses to each host once, and each host
        sums before it sends back. Two levels need a mesh, and ``axis_name`` must be the axis over
        at most 32 hosts and the axis over the ranks of a host. Rows and their order stay the same.
        None chooses two levels if the mesh has devices, and the two axes are 2 to 32 hosts and at
        least two ranks of each host.

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
        """Return ``"cuda"`` if the kernels run on the group's devices, otherwise ``"portable"``.

        With two levels of which only the level within a host runs on the kernels, return
        ``"cuda within hosts, portable between"``. This is normal for a group over several hosts.
        ``explain`` says why a program takes the portable path. If the devices belong to several
        processes, ``path`` waits until all of them have announced themselves, so read it in all
        processes.

        Raises:
          RuntimeError: if another process of the mesh has not announced itself within
            ``first_timeout``, or if ``jax.distributed.initialize()`` was not called.
          ValueError: if the group has ``implementation="cuda"``, and the kernels cannot run. With
            two levels, they must run within a host.
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
        """Return why the kernels do not run on the group's devices, or '' if they do."""
        return runtime.why_portable(self)

    @property
    def topology(self) -> native.Topology:
        """Return the devices and sizes that a workspace of this group belongs to.

        A group without devices uses the mesh of ``jax.set_mesh``. Without such a mesh, all ranks
        share the default GPU.
        """
        return runtime.topology(self)

    def placed_by(self, program_mesh: Mesh | None) -> Self:
        """Return what ``placed_on`` returns, for a program that is being lowered."""
        return runtime.placed_by(self, program_mesh)

    def reserve(self, *, split: bool = False, **sizes: Any) -> MemoryEstimate:
        """Open or grow the workspace before a program needs it, and return the estimate.

        The call is optional, because loading a program does the same. Call ``reserve`` to find a
        lack of memory early, or to load kernels outside ``jit``. The workspace never shrinks or
        moves, so existing programs stay valid. On the portable path nothing is reserved.

        Args:
          split: True for split exchanges (``dispatch_start`` and so on), which use a second
            workspace.
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
        return runtime.reserve(self, split, sizes)

    def memory(self) -> tuple[DeviceMemory, ...]:
        """Report what the workspace has mapped on each device of this process.

        Devices are in the order of domains and ranks. The workspace for split exchanges has
        separate entries. So does the workspace for replicated tokens, which has no landing zones.
        If programs of other processes grow the workspace, the reported size is updated with the
        next program of this process.

        Returns:
          One ``DeviceMemory`` per mapping. The tuple is empty on the portable path and while the
          workspace is closed.
        """
        return runtime.memory(self)

    def check(self) -> None:
        """Raise the error that a kernel of the group has reported, if there is one.

        A failed exchange leaves NaN in float outputs and an empty routing, and stops the group
        until ``close``. The next execution of a program that uses the group raises the error,
        unless the group has ``on_failure="nan"``. Call ``check`` after the last step, or if numbers
        look wrong.

        ``check`` does not wait for running programs, so wait for results first
        (``jax.block_until_ready``). It reads one word of each device. It also reports a failure on
        a rank of another process, if that failure has stopped ranks of this process.

        Raises:
          RuntimeError: if an exchange has failed. The message names the operation, the phase, the
            ranks, and the value that was found. Also if the CUDA runtime reports an error.
        """
        runtime.check(self)

    def close(self, timeout: float | None = None) -> None:
        """Wait for the group's devices and free its workspace.

        The next use opens the workspace again. Call ``close`` to continue after a failure. All
        groups over the same devices in the same order share one workspace. With several processes,
        each process frees the memory of its own devices, and all processes must call ``close``
        before the workspace opens again.

        Args:
          timeout: seconds to wait for this process's devices. None means twice the group's
            ``timeout``, but at least 60.

        Raises:
          RuntimeError: if a device is still at work after that time. The error names the device,
            and says whether it runs an exchange of the group or other work. The workspace then
            stays open and keeps its memory, and it can be closed later.
        """
        runtime.close(self, timeout)
