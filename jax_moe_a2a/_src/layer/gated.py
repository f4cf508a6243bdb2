"""Define gated activations, for layers that compute gate and up projections in one product."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..checks import short
from ..exchange.reference import accumulation_dtype


def gated(activation: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Return the gated form of an activation, for ``moe_mlp``: [..., 2I] -> [..., I].

    The first half of the last axis is the gate, the second half is the up projection, and the
    result is ``activation(gate) * up``. It is computed in float32 (float64 for float64) and rounded
    once to the dtype of the input. ``gated(jax.nn.silu)`` is SwiGLU, and ``gated(jax.nn.gelu)`` is
    GEGLU (Shazeer, arXiv:2002.05202).

    Args:
      activation: an elementwise function.

    Returns:
      A function of one array [..., 2I]. It raises a ValueError if the last axis is odd.

    Example:
      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      print(ma.gated(jax.nn.relu)(jnp.array([[1.0, -2.0, 10.0, 20.0]])))
      ```

      ```text
      [[10.  0.]]
      ```
    """

    def gated_activation(x: jax.Array) -> jax.Array:
        if x.ndim < 1 or x.shape[-1] % 2:
            raise ValueError(
                "a gated activation needs an array [..., 2I], gate and up side by side; got "
                f"{short(x)}"
            )
        gate, up = jnp.split(x.astype(accumulation_dtype(x.dtype)), 2, axis=-1)
        return (activation(gate) * up).astype(x.dtype)

    return gated_activation
