"""Define ``Axes``, the mesh axes of a layer."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from ..routing.checks import GroupOrAxes, axes_of


@dataclasses.dataclass(frozen=True)
class Axes:
    """The mesh axes of a layer: each field says which axes divide one dimension.

    If only ``experts`` is needed, pass its value in place of an ``Axes``. Devices repeat the work
    along mesh axes that no field names.
    """

    experts: GroupOrAxes
    """Name of the mesh axis over which experts and tokens are divided, such as ``"ep"``; or a tuple
    of names; or a ``Group`` for options such as ``num_sms`` or ``timeout``."""
    _: dataclasses.KW_ONLY
    data: str | tuple[str, ...] = ()
    """Name or names of further axes over which tokens are divided."""
    tensor: str | None = None
    """Name of the axis over which the I columns of each expert are divided, or None."""
    fsdp: str | tuple[str, ...] | None = None
    """Name or names of axes that divide the H axis of stored weights, usually the axes of ``data``.
    Each call of ``moe`` then gathers the weights, and scatters their gradients. With None, each
    device stores the whole H axis."""

    def __post_init__(self) -> None:
        axes_of(self.experts, "axes")
        for name, value in (("data", self.data), ("fsdp", self.fsdp or ())):
            names = (value,) if isinstance(value, str) else value
            if not isinstance(names, tuple) or not all(isinstance(axis, str) for axis in names):
                raise TypeError(f"{name} of Axes must be a str or a tuple of str; got {value!r}")
        if self.tensor is not None and not isinstance(self.tensor, str):
            raise TypeError(f"tensor of Axes must be a str or None; got {self.tensor!r}")


AxesLike: TypeAlias = Axes | GroupOrAxes


def as_axes(axes: Any) -> Axes:
    return axes if isinstance(axes, Axes) else Axes(axes)
