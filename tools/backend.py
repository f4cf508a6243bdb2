"""The build backend: scikit-build-core, which also asks pip for packages that the kernels need.
If this machine has no nvcc, or only an old one, these packages include PyPI's nvcc."""

from __future__ import annotations

from pathlib import Path

import nvcc
from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

# The build needs jaxlib only for its FFI headers. A compiled handler works with the jaxlib of its
# headers and with every newer one. The headers are therefore those of the lowest supported jaxlib.
KERNELS_NEED = ["nanobind>=2.4", "jaxlib==0.10.2"]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return build.get_requires_for_build_wheel(config_settings) + for_kernels(config_settings)


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return build.get_requires_for_build_editable(config_settings) + for_kernels(config_settings)


def for_kernels(config_settings: dict | None) -> list[str]:
    """Return the packages that the kernels need. A build without kernels needs none."""
    settings = SettingsReader.from_file(Path("pyproject.toml"), config_settings).settings
    if not settings.wheel.cmake or settings.cmake.define.get("MOE_A2A_CUDA") == "OFF":
        return []
    if nvcc.of_machine() or not nvcc.is_on_pypi():
        return KERNELS_NEED
    return [*KERNELS_NEED, nvcc.PYPI_TOOLKIT]
