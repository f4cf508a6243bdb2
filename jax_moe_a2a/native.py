"""The compiled extension: whether it is there, and what of it Python uses.

The only module that imports it. Everything here works without it, and says so.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

try:
    from . import _native  # type: ignore[attr-defined]
except ImportError:  # a source tree that was never built: the portable path is complete
    _native = None

# A device topology: ordinals of all domains, domain after domain in rank order; ranks per domain.
Topology = tuple[tuple[int, ...], int]


def has_kernels() -> bool:
    """Whether the extension was built with the CUDA kernels."""
    return _native is not None and _native.has_cuda


def cuda_build() -> str:
    """The toolkit and the architectures that the kernels were built for, in words; '' without."""
    return _native.cuda_build if has_kernels() else ""


def has_test_hooks() -> bool:
    """Whether the kernels were built with the hooks by which tests break a rule on purpose."""
    return has_kernels() and _native.has_test_hooks


def available() -> bool:
    """Whether the CUDA kernels are built in and JAX sees a GPU to run them on."""
    if not has_kernels():
        return False
    try:
        return bool(jax.local_devices(backend="cuda"))
    except RuntimeError:  # no such backend
        return False


@functools.cache
def register_targets() -> None:
    """Makes the kernels known to XLA, once, at the first lowering that calls one."""
    for name, stages in _native.handlers().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")


def limit(name: str) -> int:
    """A limit of the kernels, by its name in ``cuda/layout.h`` (``MAX_ARRAYS``, ...)."""
    return getattr(_native, name)


def array_bytes(num_slots: int, row_bytes: int) -> int:
    """Bytes that ``num_slots`` landed rows of one payload array take in a source's zone."""
    return _native.array_bytes(num_slots, row_bytes)


@functools.cache
def why_unreachable(topology: Topology) -> str:
    """Why the devices of the topology cannot reach each other's memory, or ''."""
    return _native.check_access(*topology)


def failure(topology: Topology) -> str:
    """The first failure that a kernel of this topology has recorded, or ''."""
    return _native.failure(*topology) if has_kernels() else ""


def reserved_bytes(topology: Topology) -> int:
    """Bytes of landing zones in each ring slot of each device; 0 while closed."""
    return _native.reserved_bytes(*topology)


def close(topology: Topology) -> None:
    """Waits for the devices and gives their workspaces back. The next use opens them again.

    Raises:
      RuntimeError: the CUDA runtime's or driver's complaint.
    """
    if has_kernels():
        _raise(_native.close(*topology))


def set_hooks(
    topology: Topology,
    ordinal: int = -1,
    mutation: int = 0,
    delay_phase: int = 0,
    delay_ns: int = 0,
    depth: int = 0,
) -> None:
    """For tests, of an open workspace: breaks a rule of the protocol (``Mutation`` in
    ``cuda/device/signal.cuh``), delays a phase (``Phase`` in ``cuda/status.h``) or uses fewer ring
    slots, on one device or (-1) on all. Closing the group ends it."""
    _raise(_native.set_hooks(*topology, ordinal, mutation, delay_phase, delay_ns, depth))


def set_epoch(topology: Topology, epoch: int) -> None:
    """For tests: continues as if ``epoch - 1`` exchanges had run."""
    _raise(_native.set_epoch(*topology, epoch))


def _raise(problem: Any) -> None:
    if problem:
        raise RuntimeError(f"jax_moe_a2a: {problem}")
