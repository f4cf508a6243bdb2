"""The build backend: scikit-build-core, plus the packages that the kernels need if they are built.
These include PyPI's nvcc if this machine has no nvcc that is new enough."""

from __future__ import annotations

from pathlib import Path

import nvcc
from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

# The build needs jaxlib only for its FFI headers. A handler built against the lowest supported
# version registers on every newer version, but an older runtime refuses a handler built against
# newer headers.
KERNELS_NEED = ["nanobind>=2.4", "jaxlib==0.10.2"]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """Return what a build needs in addition to ``build-system.requires``."""
    return build.get_requires_for_build_wheel(config_settings) + for_kernels(config_settings)


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """Return what an editable build needs in addition to ``build-system.requires``."""
    return build.get_requires_for_build_editable(config_settings) + for_kernels(config_settings)


def for_kernels(config_settings: dict | None) -> list[str]:
    """Return what the kernels need, or nothing if they are not built."""
    settings = SettingsReader.from_file(Path("pyproject.toml"), config_settings).settings
    if not settings.wheel.cmake or settings.cmake.define.get("MOE_A2A_CUDA") == "OFF":
        return []
    if nvcc.of_machine() or not nvcc.is_on_pypi():
        return KERNELS_NEED
    return [*KERNELS_NEED, nvcc.PYPI_TOOLKIT]
