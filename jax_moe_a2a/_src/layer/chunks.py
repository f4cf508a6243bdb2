"""Run a layer for chunks of tokens, one after the other, to save memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import compat
from ..checks import as_array, short
from ..exchange.reference import accumulation_dtype
from ..formats.weights import QuantizedExperts
from ..routing.two_level import TwoLevelRouting
from ..routing.types import Routing


def in_chunks(
    layer: Callable[..., Any],
    num_chunks: int,
    per_token: Mapping[str, Any],
    weights: Mapping[str, Any],
) -> Any:
    """Return the layer's results for all chunks, a pytree of arrays [num_chunks, ...].

    Args:
      layer: maps keyword arguments of both kinds to a pytree of arrays. It runs under
        ``jax.checkpoint``.
      num_chunks: number of chunks of equal size.
      per_token: arguments [T, ...], which are divided. Numbers and None are passed to all chunks.
      weights: arrays or None. Their gradients are summed over the chunks in float32. Quantized
        weights have no gradient.

    Raises:
      TypeError: if an argument is a routing of all tokens.
      ValueError: if the chunks cannot have equal sizes.
    """
    divided, others = {}, {}
    for name, value in per_token.items():
        if isinstance(value, Routing | TwoLevelRouting):
            raise TypeError(
                f"{name} must be integers [T, K] with num_chunks, because each chunk is routed on "
                f"its own; got a {type(value).__name__}"
            )
        array = None if value is None else as_array(value)
        if array is None or array.ndim == 0:
            others[name] = value
            continue
        if array.shape[0] % num_chunks:
            raise ValueError(
                f"num_chunks must divide the number of tokens; got {num_chunks} for {name} "
                f"{short(array)}"
            )
        chunks = num_chunks, array.shape[0] // num_chunks
        divided[name] = jnp.reshape(array, (*chunks, *array.shape[1:]))
    others |= {name: w for name, w in weights.items() if isinstance(w, QuantizedExperts)}
    weights = {name: w for name, w in weights.items() if name not in others}
    arrays = {name: None if w is None else as_array(w) for name, w in weights.items()}
    sums = {name: None if w is None else _gradient_sum(w) for name, w in arrays.items()}

    def step(_: None, chunk: dict[str, jax.Array]) -> tuple[None, Any]:
        own = {name: w if w is None else _with_sum(w, sums[name]) for name, w in arrays.items()}
        return None, layer(**chunk, **others, **own)

    # The loop already keeps XLA from merging both computations of a chunk.
    return lax.scan(jax.checkpoint(step, prevent_cse=False), None, divided)[1]


# A scan sums the gradients of an array that its steps read, in the dtype of the array. So the
# gradient of weights in 16 bits is the gradient of zeros in float32, which are never computed with.


@jax.custom_jvp
def _gradient_sum(w: jax.Array) -> jax.Array:
    """Return zeros in the dtype of sums, whose tangent is that of ``w``."""
    zeros = jnp.zeros(w.shape, accumulation_dtype(w.dtype))
    return compat.align_varying([zeros, w], ())[0]


@_gradient_sum.defjvp
def _gradient_sum_jvp(primals: Any, tangents: Any) -> Any:
    zeros = _gradient_sum(*primals)
    return zeros, tangents[0].astype(zeros.dtype)


@jax.custom_jvp
def _with_sum(w: jax.Array, gradient_sum: jax.Array) -> jax.Array:
    """Return ``w``, whose tangent is that of its ``_gradient_sum``."""
    del gradient_sum
    return w


@_with_sum.defjvp
def _with_sum_jvp(primals: Any, tangents: Any) -> Any:
    w, gradient_sum = primals
    return _with_sum(w, gradient_sum), tangents[1].astype(w.dtype)
