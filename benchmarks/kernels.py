"""List the kernels that a call runs on the first GPU, from a trace of JAX's profiler."""

from __future__ import annotations

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

GPU = "/device:GPU:0"
STREAM = "Stream"  # lines of kernels begin with this word
MOST_LISTED = 60
MOST_OF_NAME = 90
# The first pattern that matches a kernel's name gives its kind.
KINDS = {
    "our products": r"moe_a2a.*gemm",
    "our exchange": r"moe_a2a.*(route|dispatch|combine)",
    "ours, other": r"moe_a2a",
    "attention": r"cudnn|flash|sdpa|mha",
    "cuBLAS": r"nvjet|cutlass|cublas|gemm|wgmma|xmma",
    "NCCL": r"nccl",
    "copies": r"memcpy|memset",
    "XLA": r"",
}


def kernels_of(call: Callable[[], Any]) -> dict[str, list[float]]:
    """Return the microseconds of each launch, by kernel, in the second of two runs."""
    call()
    launches = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if plane.name == GPU else ():
                for event in line.events if line.name.startswith(STREAM) else ():
                    launches[event.name].append(event.duration_ns / 1e3)
    return launches


def in_words(launches: dict[str, list[float]]) -> str:
    kind_of = lambda name: next(kind for kind in KINDS if re.search(KINDS[kind], name.lower()))
    total = sum(map(sum, launches.values()))
    lines = [f"{total:12.1f} us in all"]
    for kind in KINDS:
        us = [time for name, times in launches.items() if kind_of(name) == kind for time in times]
        share = sum(us) / (total or 1)
        lines.append(f"{sum(us):12.1f} us {share:6.1%} {len(us):5} calls  {kind}")
    lines.append("")
    for name, us in sorted(launches.items(), key=lambda item: -sum(item[1]))[:MOST_LISTED]:
        words = f"{kind_of(name):13} {name[:MOST_OF_NAME]}"
        lines.append(f"{sum(us):12.1f} us {len(us):5} calls  {words}")
    return "\n".join(lines) + "\n"
