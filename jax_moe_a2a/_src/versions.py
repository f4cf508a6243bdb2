"""Refuse a JAX that is too old, before other modules import what an old JAX lacks."""

from __future__ import annotations

import jax

OLDEST_JAX = (0, 10, 2)


def check_jax() -> None:
    """Raise an ImportError if JAX is older than ``OLDEST_JAX``."""
    if jax.__version_info__ < OLDEST_JAX:
        oldest = ".".join(map(str, OLDEST_JAX))
        raise ImportError(
            f"jax_moe_a2a needs jax {oldest} or newer; found {jax.__version__}: "
            f"pip install --upgrade 'jax>={oldest}' (with [cuda13] or [cuda12] for GPUs)"
        )


check_jax()
