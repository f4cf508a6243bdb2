"""Find nvcc: the one that the user names, a new enough one of this machine, or PyPI's.

CMake runs this file and reads the path that it prints, or nothing. The build backend imports it,
and asks for PyPI's toolkit if this machine has no nvcc that is new enough.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (12, 1)  # kernel parameters of more than 4 KiB
# Every driver for CUDA 13 compiles the PTX of 13.0. It refuses PTX of a newer minor version.
PYPI_TOOLKIT = "cuda-toolkit[nvcc,cccl,cudart]==13.0.*"
# jax[cuda13] installs nvcc without these files.
NEEDED_BESIDE_NVCC = (
    "include/cuda_runtime.h",
    "include/crt/host_config.h",
    "include/cccl/nv/target",
    "lib/libcudart_static.a",
)


def of_machine() -> str | None:
    """Return the nvcc that ``CUDACXX`` names, or this machine's nvcc if it is 12.1 or newer.

    The folder ``CUDA_PATH`` comes before ``PATH``.
    """
    if named := os.environ.get("CUDACXX"):
        return named
    folder = os.environ.get("CUDA_PATH")
    found = (folder and shutil.which("nvcc", path=f"{folder}/bin"), shutil.which("nvcc"))
    return next((nvcc for nvcc in found if nvcc and version(nvcc) >= OLDEST), None)


def of_pypi() -> str | None:
    """Return the nvcc of a complete toolkit from PyPI that this interpreter can import."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for nvcc in sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True):
            toolkit = nvcc.parents[1]
            if all((toolkit / needed).exists() for needed in NEEDED_BESIDE_NVCC):
                return str(nvcc)
    return None


def version(nvcc: str) -> tuple[int, int]:
    """Return (major, minor) of an nvcc, or (0, 0) if it does not run."""
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0, 0
    release = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(release[1]), int(release[2])) if release else (0, 0)


def is_on_pypi() -> bool:
    """Return True if PyPI has the toolkit for this system and CPU."""
    has_glibc = platform.libc_ver()[0] == "glibc"
    return sys.platform == "linux" and has_glibc and platform.machine() in ("x86_64", "aarch64")


if __name__ == "__main__":
    print(of_machine() or of_pypi() or "")
