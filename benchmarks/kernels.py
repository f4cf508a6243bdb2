"""List the kernels that a call runs on the first GPU, by name, from a trace of JAX's profiler."""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

GPU = "/device:GPU:0"
STREAM = "Stream"  # the names of trace lines with kernels begin with this
MOST_LISTED = 60
MOST_OF_NAME = 90
# A kernel belongs to the first kind of which a word is in the kernel's name.
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


class Kernel(NamedTuple):
    """The launches of a kernel."""

    name: str
    kind: str
    calls: int
    us: float
    scope: str
    """The operation of its first launch."""


def kernels_of(call: Callable[[], Any]) -> list[Kernel]:
    """Run a call twice, trace the second one, and return its kernels, the longest first."""
    call()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        return summed(
            (event.name, event.duration_ns, scope(dict(event.stats)))
            for plane in data.planes
            for line in plane.lines
            for event in line.events
            if plane.name == GPU and line.name.startswith(STREAM)
        )


def kind_of(name: str) -> str:
    """Return the kind of a kernel of this name."""
    return next(kind for kind, words in KINDS.items() if re.search(words, name.lower()))


def scope(stats: dict[str, Any]) -> str:
    """Return the program's operation that launched a kernel, if the trace names it."""
    return str(stats.get("tf_op") or stats.get("hlo_op") or "")


def summed(events: Iterable[tuple[str, float, str]]) -> list[Kernel]:
    """Return kernels from the names, nanoseconds and scopes of launches, the longest first."""
    calls: dict[str, list[float]] = {}
    scopes: dict[str, str] = {}
    for name, ns, of_launch in events:
        calls.setdefault(name, []).append(ns)
        scopes.setdefault(name, of_launch)
    found = [
        Kernel(name, kind_of(name), len(ns), sum(ns) / 1e3, scopes[name])
        for name, ns in calls.items()
    ]
    return sorted(found, key=lambda kernel: -kernel.us)


def in_words(found: list[Kernel]) -> str:
    """Return a table of kinds, and a table of kernels."""
    total = sum(kernel.us for kernel in found)
    lines = [f"{total:12.1f} us in all"]
    for kind in KINDS:
        of_kind = [kernel for kernel in found if kernel.kind == kind]
        calls, us = sum(k.calls for k in of_kind), sum(k.us for k in of_kind)
        lines.append(f"{us:12.1f} us {us / (total or 1):6.1%} {calls:5} calls  {kind}")
    lines += [""]
    for k in found[:MOST_LISTED]:
        names = f"{k.name[:MOST_OF_NAME]}  {k.scope[-MOST_OF_NAME:]}"
        lines.append(f"{k.us:12.1f} us {k.calls:5} calls  {k.kind:13} {names}")
    return "\n".join(lines) + "\n"
