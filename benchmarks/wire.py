"""The wire's limit, measured by ``wire.cu`` in a process of its own before JAX takes the GPUs."""

from __future__ import annotations

import ctypes
import json
import math
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from typing import Any

SOURCE = pathlib.Path(__file__).with_name("wire.cu")
ARCHITECTURES = (
    "-gencode=arch=compute_80,code=[sm_80,compute_80]",
    "-gencode=arch=compute_90,code=sm_90",
)


def count_gpus() -> int:
    """GPUs that this process may use, by the CUDA driver; 0 without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def find_nvcc() -> str | None:
    """nvcc on PATH, under CUDA_HOME, or where toolkits are installed."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(os.path.join(home, "bin", "nvcc"))


def build(folder: str) -> str:
    """Compiles ``wire.cu``; returns the program's path.

    Raises:
      RuntimeError: there is no nvcc, or it failed.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc on PATH or under CUDA_HOME")
    program = os.path.join(folder, "wire")
    command = [nvcc, "-O3", "-std=c++17", *ARCHITECTURES, "-o", program, str(SOURCE)]
    _run(command, timeout=120)
    return program


def measure(sizes: Iterable[int], num_gpus: int) -> dict[str, Any]:
    """Measures the wire among the first GPUs.

    Args:
      sizes: bytes that each GPU sends in all.
      num_gpus: how many GPUs, two at least.

    Returns:
      ``flag_us`` (one way, between two GPUs), ``gpus``, ``name``, ``local_gb_per_s`` (a GPU's own
      memory, reads and writes counted), and ``results``: by plain peer stores, one dict per size
      with ``bytes``, ``blocks`` (the best number of them), ``median_us``, ``min_us``, ``max_us``,
      ``gb_per_s``. ``bulk`` has the same for the greatest size by bulk copies, the best of pushing
      and of pulling, with ``segment_bytes`` and ``stages`` too.

    Raises:
      RuntimeError: it could not be built, or failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [build(folder), str(num_gpus), *(str(size) for size in sorted(set(sizes)))]
        return json.loads(_run(command, timeout=60))


def microseconds(measured: dict[str, Any] | None, num_bytes: int) -> float | None:
    """What plain peer stores take for bytes out of every GPU, by what ``measure`` gave.

    For a size that was not measured, at the rate of the nearest that was. None if none was.
    """
    results = (measured or {}).get("results")
    if not results or not num_bytes:
        return None
    nearest = min(results, key=lambda r: abs(math.log(r["bytes"] / num_bytes)))
    return nearest["median_us"] * (num_bytes / nearest["bytes"])


def local_gb_per_s(measured: dict[str, Any] | None) -> float | None:
    """The rate of a GPU's own memory, by what ``measure`` gave."""
    return (measured or {}).get("local_gb_per_s")


def _run(command: list[str], timeout: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} took longer than {timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
