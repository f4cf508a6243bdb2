"""Find nvcc: the nvcc in ``CUDACXX``, nvcc 12.1 or newer of this machine, or PyPI's nvcc.

CMake runs this file, and reads the path that it prints. The build backend imports this file.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST = (12, 1)  # older versions do not support kernel parameters of more than 4 KiB
# A driver for CUDA 13 accepts the PTX of 13.0, but may refuse the PTX of a newer minor version.
PYPI_TOOLKIT = "cuda-toolkit[nvcc,cccl,cudart]==13.0.*"
OLDEST_GPU = 90
# Duration of a compilation for one architecture: CPU seconds of all files, and of the slowest file.
SECONDS, LONGEST = 360, 60
# Files that the build needs besides nvcc. jax[cuda13] installs nvcc without them.
NEEDED_BESIDE_NVCC = (
    "include/cuda_runtime.h",
    "include/crt/host_config.h",
    "include/cccl/nv/target",
    "lib/libcudart_static.a",
)


def of_machine() -> str | None:
    """Return the nvcc that ``CUDACXX`` names. Otherwise, return the first nvcc of ``CUDA_PATH`` and
    ``PATH`` that is 12.1 or newer, or None."""
    if named := os.environ.get("CUDACXX"):
        return named
    folder = os.environ.get("CUDA_PATH")
    found = (folder and shutil.which("nvcc", path=f"{folder}/bin"), shutil.which("nvcc"))
    return next((nvcc for nvcc in found if nvcc and version(nvcc) >= OLDEST), None)


def of_pypi() -> str | None:
    """Return the nvcc of a complete toolkit that pip has installed in this environment, or None."""
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


def known_architectures(nvcc: str) -> list[int]:
    """Return the architectures that an nvcc supports. The number 90 is compute capability 9.0."""
    done = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True)
    return sorted(map(int, re.findall(r"compute_(\d+)\b", done.stdout)))


def architectures(nvcc: str) -> list[int]:
    """Return the architectures of this machine's GPUs, or [90] if all GPUs are older.

    If nvcc does not support a GPU's architecture, use the newest supported one before it, whose
    machine code or PTX also runs on the GPU.
    """
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        said = ""
    of_gpus = {10 * int(major) + int(minor) for major, minor in re.findall(r"(\d+)\.(\d)", said)}
    known = known_architectures(nvcc)
    usable = (max(n for n in known if n <= gpu) for gpu in of_gpus if gpu >= OLDEST_GPU)
    return sorted(set(usable)) or [OLDEST_GPU]


def announcement(nvcc: str, built_for: str) -> str:
    """Return a message about the compilation. ``built_for`` is CMake's list of architectures."""
    names = built_for.split(";")
    capabilities = [f"{number[:-1]}.{number[-1]}" for number in re.findall(r"\d+", built_for)]
    cores = len(os.sched_getaffinity(0))
    seconds = max(SECONDS * len(names) / cores, LONGEST * len(names))
    return (
        f"jax_moe_a2a: nvcc {'.'.join(map(str, version(nvcc)))} ({nvcc}) compiles the CUDA kernels "
        f"for compute capability {', '.join(capabilities)}; this takes about "
        f"{max(1, round(seconds / 60))} min on {cores} CPU cores (MOE_A2A_CUDA=OFF skips it)"
    )


def announce(text: str) -> None:
    """Print a text on stdout and on the terminal, because pip without -v hides stdout."""
    print(text, flush=True)
    if not sys.stdout.isatty():
        try:
            Path("/dev/tty").write_text(f"\n{text}\n")
        except OSError:  # no terminal
            pass


def is_on_pypi() -> bool:
    """Return True if PyPI has the CUDA toolkit for this operating system and CPU."""
    has_glibc = platform.libc_ver()[0] == "glibc"
    return sys.platform == "linux" and has_glibc and platform.machine() in ("x86_64", "aarch64")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", metavar="NVCC", help="print a list for CMake")
    parser.add_argument("--announce", nargs=2, metavar=("NVCC", "LIST"), help="say what compiles")
    flags = parser.parse_args()
    if flags.architectures:
        print(*architectures(flags.architectures), sep=";")
    elif flags.announce:
        announce(announcement(*flags.announce))
    else:
        print(of_machine() or of_pypi() or "")


if __name__ == "__main__":
    main()
