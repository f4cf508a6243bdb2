"""Measure the link limit in a separate process before JAX uses the GPUs."""

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

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "tools" / "driver" / "wire.cu"
ARCHITECTURES = (
    "-gencode=arch=compute_80,code=[sm_80,compute_80]",
    "-gencode=arch=compute_90,code=sm_90",
)


def count_gpus() -> int:
    """Return the number of GPUs, or 0 without a CUDA driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(os.path.join(home, "bin", "nvcc"))


def build(folder: str) -> str:
    """Compile ``wire.cu``; return the program's path. Raise RuntimeError without a working nvcc."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise RuntimeError("no nvcc on PATH or under CUDA_HOME")
    program = os.path.join(folder, "wire")
    options = ["-O3", "-std=c++17", f"-I{ROOT / 'cuda'}", *ARCHITECTURES]
    run([nvcc, *options, "-o", program, str(SOURCE)], timeout=120)
    return program


def measure(sizes: Iterable[int], num_gpus: int) -> dict[str, Any]:
    """Return the JSON that ``wire.cu`` prints. Each size is the total bytes that a GPU sends."""
    with tempfile.TemporaryDirectory() as folder:
        command = [build(folder), str(num_gpus), *(str(size) for size in sorted(set(sizes)))]
        return json.loads(run(command, timeout=60))


def microseconds(measured: dict[str, Any] | None, num_bytes: int) -> float | None:
    """Return the time at the rate of the nearest measured size, or None."""
    results = (measured or {}).get("results")
    if not results or not num_bytes:
        return None
    nearest = min(results, key=lambda r: abs(math.log(r["bytes"] / num_bytes)))
    return nearest["median_us"] * (num_bytes / nearest["bytes"])


def run(command: list[str], timeout: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{command[0]} took longer than {timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout
