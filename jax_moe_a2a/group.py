"""Group: a communication domain of ranks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from . import native

IMPLEMENTATIONS = (None, "portable", "cuda")
OPERATIONS = ("route", "dispatch", "combine")


@dataclasses.dataclass(frozen=True, init=False)
class Group:
    """The ranks that exchange tokens, along one or several named axes.

    A group is a value: frozen, hashable, equal to any group with the same content. It holds no
    experts, sizes or dtypes; layers that differ in those share one group.

    Args:
      mesh: the mesh that ``axis_name`` belongs to, concrete or abstract. Its other axes give
        several independent domains. ``None`` for a group without devices, which is enough for the
        portable path and for ``vmap`` over the axis.
      axis_name: an axis name, or a tuple of them; ranks count row-major in the order given.
      size: number of ranks; needed without a mesh, checked with one.
      num_sms: streaming multiprocessors that a CUDA kernel may occupy: a number, or a mapping of
        ``"route"``, ``"dispatch"`` and ``"combine"`` to numbers. ``None``, or an operation that
        the mapping lacks, leaves the choice to the package, which gives split exchanges fewer.
      timeout: seconds that a CUDA kernel waits for a peer before it gives up.
      implementation: ``None`` (CUDA kernels where they can run, else portable), ``"portable"``, or
        ``"cuda"`` (an error at trace time where the kernels cannot run).
      cuda_graphs: whether XLA may capture the CUDA calls in graphs; ``None`` chooses.

    Raises:
      TypeError: an argument of the wrong type.
      ValueError: an axis that the mesh lacks, a size that does not match, a number out of range.
    """

    mesh: Mesh | AbstractMesh | None = dataclasses.field(repr=False)
    axis_name: str | tuple[str, ...]
    size: int
    num_sms: int | tuple[tuple[str, int], ...] | None
    timeout: float
    implementation: str | None
    cuda_graphs: bool | None

    def __init__(
        self,
        mesh: Mesh | AbstractMesh | None = None,
        axis_name: str | tuple[str, ...] | None = None,
        *,
        size: int | None = None,
        num_sms: int | Mapping[str, int] | tuple[tuple[str, int], ...] | None = None,
        timeout: float = 30.0,
        implementation: str | None = None,
        cuda_graphs: bool | None = None,
    ):
        if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
            raise TypeError(
                f"mesh must be a jax.sharding.Mesh, an AbstractMesh or None; got {mesh!r}"
            )
        axes = _check_axis_name(axis_name)
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise TypeError(f"timeout must be a number of seconds; got {timeout!r}")
        if not (timeout > 0 and math.isfinite(timeout)):
            raise ValueError(f"timeout must be positive and finite, in seconds; got {timeout!r}")
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"implementation must be None, 'portable' or 'cuda'; got {implementation!r}"
            )
        if cuda_graphs is not None and not isinstance(cuda_graphs, bool):
            raise TypeError(f"cuda_graphs must be True, False or None; got {cuda_graphs!r}")

        fields = dict(
            mesh=mesh,
            axis_name=axes[0] if len(axes) == 1 else axes,
            size=_check_size(mesh, axes, size),
            num_sms=_check_num_sms(num_sms),
            timeout=float(timeout),
            implementation=implementation,
            cuda_graphs=cuda_graphs,
        )
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axis names, always as a tuple."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name

    def sms_of(self, operation: str) -> int | None:
        """The SMs of an operation, as in ``num_sms``; ``None`` where the package chooses."""
        if isinstance(self.num_sms, tuple):
            return dict(self.num_sms).get(operation)
        return self.num_sms

    @property
    def path(self) -> str:
        """What runs on the group's devices: ``"cuda"`` (the kernels) or ``"portable"``."""
        return "portable" if self.why_portable else "cuda"

    @property
    def why_portable(self) -> str:
        """Why the kernels do not run on the group's devices; '' where they do."""
        if self.implementation == "portable":
            return "the group asks for the portable path"
        if not native.has_kernels():
            return "jax_moe_a2a was built without CUDA kernels"
        if not isinstance(self.mesh, Mesh):
            return "the group has no devices (no mesh, or an abstract one)"
        if any(d.platform != "gpu" for d in self.mesh.devices.flat):
            return "the mesh has devices that are no GPUs"
        if any(d.process_index != jax.process_index() for d in self.mesh.devices.flat):
            return "the mesh has devices of other processes"
        if any(float(d.compute_capability) < 9.0 for d in self.mesh.devices.flat):
            return "the mesh has GPUs older than Hopper (compute capability 9.0)"
        if self.size > native.limit("MAX_RANKS"):
            return f"the group has more than {native.limit('MAX_RANKS')} ranks"
        return native.why_unreachable(self.topology)

    @functools.cached_property
    def topology(self) -> native.Topology:
        """The devices' ordinals, domain after domain in the order of ranks; ranks per domain."""
        assert isinstance(self.mesh, Mesh)
        names = self.mesh.axis_names
        others = [names.index(axis) for axis in names if axis not in self.axes]
        own = [names.index(axis) for axis in self.axes]
        devices = self.mesh.devices.transpose(others + own)
        return tuple(d.local_hardware_id for d in devices.flat), self.size

    def check(self) -> None:
        """Raises what a kernel of the group has reported, if any has failed.

        A failed exchange leaves NaN in float outputs and an empty routing, and stops the group
        until ``close``. The next execution of a program that uses it raises by itself; call this
        after the last step, or where numbers look wrong.

        Raises:
          RuntimeError: the operation and phase, who waited for whom, and what was seen.
        """
        if self.path == "cuda" and (failure := native.failure(self.topology)):
            raise RuntimeError(
                f"jax_moe_a2a: {failure}. The group stays stopped until group.close() is called."
            )

    def close(self) -> None:
        """Waits for the group's devices and gives its workspace back.

        The next use opens it again; after a failure that is the way to go on. All groups over the
        same devices in the same order share one workspace.
        """
        if self.path == "cuda":
            native.close(self.topology)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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


def _check_size(mesh: Mesh | AbstractMesh | None, axes: tuple[str, ...], size: int | None) -> int:
    if size is not None and (not _is_int(size) or size < 1):
        raise ValueError(f"size must be a positive int, the number of ranks; got {size!r}")
    if mesh is None:
        if size is None:
            raise ValueError("size must be given for a group without a mesh; got None")
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
