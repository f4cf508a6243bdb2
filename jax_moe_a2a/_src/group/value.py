"""Define the value of a group: its mesh, axes and options, and properties that depend only on them.

Code in this module never uses kernels, other processes or JAX backends. ``Group`` may use them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..checks import check_bool, check_int
from ..plan.capacity import MAX_TOP_K

MOST_SECONDS = 1e9  # the longest timeout (31 years)
OPERATIONS = ("route", "dispatch", "combine")


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class GroupValue:
    """The mesh, axes and options of a group, as ``Group`` documents them."""

    mesh: Mesh | AbstractMesh | None
    axis_name: str | tuple[str, ...]
    size: int
    num_sms: int | tuple[tuple[str, int], ...] | None
    timeout: float
    first_timeout: float
    on_failure: str
    implementation: str | None
    cuda_graphs: bool | None
    two_level: bool

    def __init_subclass__(cls) -> None:
        # This makes subclasses frozen. A decorator would hide their ``__init__`` from mkdocs.
        dataclasses.dataclass(frozen=True, init=False, repr=False)(cls)

    def __init__(
        self,
        mesh: Mesh | AbstractMesh | None = None,
        axis_name: str | tuple[str, ...] | None = None,
        *,
        size: int | None = None,
        num_sms: int | Mapping[str, int] | tuple[tuple[str, int], ...] | None = None,
        timeout: float = 30.0,
        first_timeout: float = 600.0,
        on_failure: str = "raise",
        implementation: str | None = None,
        cuda_graphs: bool | None = None,
        two_level: bool | None = None,
    ):
        if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
            is_name = isinstance(mesh, str | tuple) and axis_name is None
            remedy = f"Group(mesh, {mesh!r}), or {mesh!r} in place of the Group" if is_name else ""
            raise TypeError(
                f"mesh must be a jax.sharding.Mesh, an AbstractMesh or None; got {mesh!r}. Pass "
                f"{remedy or 'the result of jax.make_mesh'}"
            )
        axes = check_axis_name(axis_name)
        axis_name = axes[0] if len(axes) == 1 else axes
        check_seconds("timeout", timeout)
        check_seconds("first_timeout", first_timeout)
        if on_failure not in ("raise", "nan"):
            raise ValueError(f"on_failure must be 'raise' or 'nan'; got {on_failure!r}")
        if implementation not in (None, "portable", "cuda"):
            raise ValueError(
                f"implementation must be None, 'portable' or 'cuda'; got {implementation!r}"
            )
        if cuda_graphs is not None:
            check_bool("cuda_graphs", cuda_graphs)

        self._set(
            mesh=mesh,
            axis_name=axis_name,
            size=_check_size(mesh, axes, size),
            num_sms=_check_num_sms(num_sms),
            timeout=float(timeout),
            first_timeout=float(first_timeout),
            on_failure=on_failure,
            implementation=implementation,
            cuda_graphs=cuda_graphs,
            two_level=_check_two_level(mesh, axes, two_level),
        )

    def __repr__(self) -> str:
        """Return an expression that makes this group, without arguments that equal the defaults."""
        shown = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        shown = {name: value for name, value in shown.items() if value != _DEFAULTS[name]}
        if self.mesh is not None:
            shown["mesh"] = f"{type(self.mesh).__name__}({dict(self.mesh.shape)})"
        if isinstance(self.num_sms, tuple):
            shown["num_sms"] = dict(self.num_sms)
        arguments = (
            f"{name}={value if name == 'mesh' else repr(value)}" for name, value in shown.items()
        )
        return f"{type(self).__name__}({', '.join(arguments)})"

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axis names, always as a tuple."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name

    @property
    def patience(self) -> float:
        """Return the seconds to wait for a rank that has made no exchange yet."""
        return max(self.timeout, self.first_timeout)

    def sms_of(self, operation: str) -> int | None:
        """Return the number of SMs of an operation, or None if the package chooses the number."""
        if isinstance(self.num_sms, tuple):
            return dict(self.num_sms).get(operation)
        return self.num_sms

    def placed_on(self, mesh: Mesh | None) -> Self:
        """Return the group with the devices of ``mesh``. If the group already has devices, or the
        mesh does not have the axes of the group, return the group unchanged."""
        if isinstance(self.mesh, Mesh) or mesh is None:
            return self
        sizes = [mesh.shape.get(axis) for axis in self.axes]
        if None in sizes or math.prod(size or 0 for size in sizes) != self.size:
            return self
        return self._with(mesh=mesh)

    @functools.cached_property
    def single_rank(self) -> Self:
        """Return a group of the same devices in which each domain has one rank."""
        return self._with(axis_name=(), size=1, two_level=False)

    @functools.cached_property
    def levels(self) -> tuple[Self, ...]:
        """Return the group of each level, in the order in which tokens travel. With two levels, the
        first group has one rank of each host, and the second group has the ranks of one host."""
        if not self.two_level:
            return (self,)
        assert self.mesh is not None
        hosts, ranks = (
            self._with(axis_name=axis, size=self.mesh.shape[axis], two_level=False)
            for axis in self.axes
        )
        if self.implementation == "cuda":  # between hosts, kernels are optional
            hosts = hosts._with(implementation=None)
        return hosts, ranks

    def divided_by_hosts(self, mesh: Mesh | None) -> tuple[Mesh, Self] | None:
        """Divide the group's only axis into an axis of hosts and an axis of a host's ranks. Return
        the new mesh and a group of two levels with its abstract mesh, or None if not possible."""
        if mesh is None or len(self.axes) > 1:
            return None
        hosts = hosts_of(mesh, self.axes)
        ranks_of_host = int((hosts[0] == hosts[0, 0]).sum())
        if self.size % ranks_of_host:
            return None
        (axis,), names, host = self.axes, list(mesh.axis_names), "host"
        while host in names:
            host = f"{axis}_{host}"
        at, axes = names.index(axis), (host, axis)
        sizes, types = list(mesh.devices.shape), list(mesh.axis_types)
        sizes[at : at + 1] = self.size // ranks_of_host, ranks_of_host
        names[at : at + 1] = axes
        types[at : at + 1] = types[at], types[at]
        divided = Mesh(mesh.devices.reshape(sizes), tuple(names), axis_types=tuple(types))
        if not are_hosts_and_ranks(hosts_of(divided, axes)):
            return None
        return divided, self._with(mesh=divided.abstract_mesh, axis_name=axes, two_level=True)

    def _with(self, **fields: Any) -> Self:
        group = object.__new__(type(self))
        group._set(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | fields)
        return group

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)


# The default of each field. The field ``two_level`` is never None, so its default here is False.
_DEFAULTS = {
    name: parameter.default for name, parameter in inspect.signature(GroupValue).parameters.items()
} | {"two_level": False}


def devices_of(group: GroupValue) -> list[jax.Device]:
    """Return the devices of a group with a concrete mesh, by domain and then by rank."""
    assert isinstance(group.mesh, Mesh)
    return _in_order_of_ranks(group.mesh, group.axes)


def _in_order_of_ranks(mesh: Mesh, axes: tuple[str, ...]) -> list[jax.Device]:
    order = (*(axis for axis in mesh.axis_names if axis not in axes), *axes)
    return list(mesh.devices.transpose(list(map(mesh.axis_names.index, order))).flat)


def domains_of(group: GroupValue) -> list[list[jax.Device]]:
    """Return a list of devices for each domain, in the order of ranks."""
    devices = devices_of(group)
    return [devices[i : i + group.size] for i in range(0, len(devices), group.size)]


def spans_processes(group: GroupValue) -> bool:
    return len({device.process_index for device in devices_of(group)}) > 1


def check_seconds(name: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"{name} must be a number of seconds; got {seconds!r}")
    if not 0 < seconds <= MOST_SECONDS:
        raise ValueError(
            f"{name} must be positive and at most {MOST_SECONDS:.0e} s, because the kernels "
            f"count nanoseconds in int64; got {seconds!r}"
        )


def _check_num_sms(num_sms: Any) -> int | tuple[tuple[str, int], ...] | None:
    """Return the argument ``num_sms`` as a value that can be hashed."""
    if num_sms is None:
        return None
    if not isinstance(num_sms, Mapping | tuple):  # the field ``num_sms`` may be a tuple
        return check_int("num_sms", num_sms, least=1)
    budgets = dict(num_sms)
    if unknown := budgets.keys() - OPERATIONS:
        raise ValueError(f"num_sms must have keys among {OPERATIONS}; got {min(unknown)!r}")
    return tuple(sorted((n, check_int(f"num_sms[{n!r}]", budgets[n], least=1)) for n in budgets))


def check_axis_name(axis_name: object, argument: str = "axis_name") -> tuple[str, ...]:
    """Return the names of a group's axes as a tuple, or raise an error that names ``argument``."""
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not axes or not all(isinstance(axis, str) for axis in axes):
        raise TypeError(f"{argument} must be a str or a non-empty tuple of str; got {axis_name!r}")
    if len(set(axes)) != len(axes):
        raise ValueError(f"{argument} must not name an axis twice; got {axis_name!r}")
    return axes


def _check_two_level(
    mesh: Mesh | AbstractMesh | None, axes: tuple[str, ...], two_level: object
) -> bool:
    if two_level is not None:
        check_bool("two_level", two_level)
    if two_level:
        if len(axes) != 2:
            raise ValueError(
                "two_level must be None or False unless axis_name names two axes (hosts, then the "
                f"ranks of a host); got two_level=True and axis_name={axes!r}"
            )
        if mesh is None:
            raise ValueError(
                "two_level must be None or False without a mesh, because the mesh has the "
                "number of hosts; got two_level=True. Pass a mesh; it may be abstract"
            )
        if mesh.shape[axes[0]] > MAX_TOP_K:
            raise ValueError(
                f"two_level must be None or False for more than {MAX_TOP_K} hosts; got "
                f"two_level=True and {mesh.shape[axes[0]]} along {axes[0]!r}"
            )
        return True
    if two_level is None and isinstance(mesh, Mesh) and len(axes) == 2:
        return are_hosts_and_ranks(hosts_of(mesh, axes))
    return False


def hosts_of(mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    """Return the index of each device's host, [domains, sizes of the axes...]; -1 if unknown.

    The index is JAX's partition index (slice index in older versions). By default, each host is one
    partition, but hosts that NVLink connects are one partition together. The program can choose
    other partitions in ``jax.distributed.initialize``.
    """
    hosts = [
        getattr(device, "partition_index", getattr(device, "slice_index", None))
        for device in _in_order_of_ranks(mesh, axes)
    ]
    hosts = [-1 if host is None else host for host in hosts]
    return np.array(hosts).reshape(-1, *(mesh.shape[axis] for axis in axes))


def are_hosts_and_ranks(hosts: np.ndarray) -> bool:
    """Return True if the first axis is 2 to 32 hosts, and the second axis is several ranks of each
    host. ``hosts`` is the host of each rank, [domains, first axis, second axis]."""
    _, num_hosts, num_ranks = hosts.shape
    if not (2 <= num_hosts <= MAX_TOP_K and num_ranks >= 2):
        return False
    is_one_host = (hosts == hosts[:, :, :1]).all()
    first = np.sort(hosts[:, :, 0], axis=1)
    return bool(is_one_host and (first[:, 1:] != first[:, :-1]).all())


def _check_size(mesh: Mesh | AbstractMesh | None, axes: tuple[str, ...], size: int | None) -> int:
    if size is not None:
        size = check_int("size", size, least=1)
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
