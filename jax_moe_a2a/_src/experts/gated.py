"""Define gated activations, for layers that compute gate and up projections in one product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..ad import accumulation_dtype
from ..checks import short


@dataclasses.dataclass(frozen=True)
class Gated:
    """The gated form of an activation, a function of one array [..., 2I]."""

    activation: Callable[[jax.Array], jax.Array]
    """The activation of the gate."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return ``activation(gate) * up`` [..., I] for gate and up side by side."""
        gate, up = halves(x)
        return (self.activation(gate) * up).astype(x.dtype)


def gated(activation: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Return the gated form of an activation, for ``moe_mlp``: [..., 2I] -> [..., I].

    The first half of the last axis is the gate, the second half is the up projection, and the
    result is ``activation(gate) * up``. The result is computed in float32 (float64 for float64) and
    rounded once to the dtype of the input. ``gated(jax.nn.silu)`` is SwiGLU, and
    ``gated(jax.nn.gelu)`` is GEGLU (Shazeer, arXiv:2002.05202).

    Args:
      activation: an elementwise function.

    Returns:
      A function of one array [..., 2I]. It raises a ValueError if the last axis is odd.
    """
    return Gated(activation)


def halves(x: jax.Array) -> list[jax.Array]:
    """Return gate and up [..., I] of an array [..., 2I], in the dtype of sums."""
    if x.ndim < 1 or x.shape[-1] % 2:
        raise ValueError(
            f"a gated activation needs an array [..., 2I], gate and up side by side; got {short(x)}"
        )
    return jnp.split(x.astype(accumulation_dtype(x.dtype)), 2, axis=-1)
