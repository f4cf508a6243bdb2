"""Find the compiled extension, built from source into this package or in a wheel with kernels.

Wheels with kernels are separate distributions, one for each major version of CUDA. The extras
``cuda12`` and ``cuda13`` install them. Kernels and Python agree on layouts and on the protocol, so
both must have the same version.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from types import ModuleType

PACKAGE = "jax-moe-a2a"
WHEELS = ("jax-moe-a2a-cuda13", "jax-moe-a2a-cuda12")  # the first installed wheel is used


def load() -> ModuleType | None:
    """Return the extension, or None. Without the extension, every call takes the portable path.

    Raises:
      ImportError: if a wheel with kernels is installed, but its version differs from this
        package's.
    """
    try:
        # A build from source comes first: it has the version of this package.
        return importlib.import_module("jax_moe_a2a._native")
    except ImportError:
        wheel = installed_wheel()
    if wheel is None:
        return None
    _check_version(wheel)
    return importlib.import_module(f"{_module(wheel)}._native")


def installed_wheel() -> str | None:
    """Return the name of the installed wheel with kernels, or None."""
    return next((wheel for wheel in WHEELS if importlib.util.find_spec(_module(wheel))), None)


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _module(wheel: str) -> str:
    return wheel.replace("-", "_")


def _check_version(wheel: str) -> None:
    expected, found = version_of(PACKAGE), version_of(wheel)
    if found != expected or expected is None:
        extra = wheel.rpartition("-")[2]
        remedy = (
            f"pip install '{PACKAGE}[{extra}]=={expected}', or pip uninstall {wheel}"
            if expected
            else f"install {PACKAGE}, or pip uninstall {wheel}"
        )
        raise ImportError(
            f"{PACKAGE} {expected or '(not installed)'} needs {wheel} of the same version; "
            f"found {found or 'no version'}: {remedy}"
        )
