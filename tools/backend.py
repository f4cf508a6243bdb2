"""The build backend: scikit-build-core, plus PyPI's nvcc if this machine lacks a new enough one."""

from __future__ import annotations

from pathlib import Path

import nvcc
from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403
from scikit_build_core.settings.skbuild_read_settings import SettingsReader


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """Return what a build needs in addition to ``build-system.requires``."""
    return build.get_requires_for_build_wheel(config_settings) + toolkit(config_settings)


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """Return what an editable build needs in addition to ``build-system.requires``."""
    return build.get_requires_for_build_editable(config_settings) + toolkit(config_settings)


def toolkit(config_settings: dict | None) -> list[str]:
    """Return the requirement of PyPI's CUDA toolkit, or nothing if the build does not use it."""
    settings = SettingsReader.from_file(Path("pyproject.toml"), config_settings).settings
    has_kernels = settings.wheel.cmake and settings.cmake.define.get("MOE_A2A_CUDA") != "OFF"
    if not has_kernels or nvcc.of_machine() or not nvcc.is_on_pypi():
        return []
    return [nvcc.PYPI_TOOLKIT]
