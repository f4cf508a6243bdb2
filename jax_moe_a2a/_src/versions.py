"""Raise an ImportError for Python without the GIL, and for an old JAX. This module is imported
first, because other modules import names that an old JAX lacks."""

from __future__ import annotations

import platform
import sys

import jax

OLDEST_JAX = (0, 10, 2)


def check_jax() -> None:
    if jax.__version_info__ < OLDEST_JAX:
        oldest = ".".join(map(str, OLDEST_JAX))
        raise ImportError(
            f"jax_moe_a2a needs jax {oldest} or newer; found {jax.__version__}: "
            f"pip install --upgrade 'jax>={oldest}' (with [cuda13] or [cuda12] for GPUs)"
        )


def check_gil() -> None:
    """Raise an ImportError if Python runs without the GIL, because no test covers this."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise ImportError(
            "jax_moe_a2a needs the GIL; found free-threaded Python "
            f"{platform.python_version()} without it: set PYTHON_GIL=1 (portable path only: no "
            "wheel with kernels is for free-threaded Python), or use the default build of Python"
        )


check_jax()
check_gil()
