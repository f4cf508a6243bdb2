"""Run a layer for chunks of tokens, one after the other, to save memory.

The totals of the weights (``grouped/totals.py``) are the carry of the loop over chunks. So the
loop of the backward pass carries the sums of the gradients of weights in float32, and products add
to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import compat
from ..checks import as_array, short
from ..formats.formats import TokenFormat
from ..grouped.totals import total_of, with_total
from ..grouped.weights import QuantizedExperts
from ..routing.two_level import TwoLevelRouting
from ..routing.types import Routing


def check_one_global_scale(fmt: TokenFormat | None, reason: str, remedy: str) -> None:
    """Raise an error if the format has a global scale for each token, which ``reason`` forbids."""
    scales = None if fmt is None else fmt.token_scales
    if scales is not None:
        raise ValueError(
            f"token_format must have one global_scale for all tokens, because {reason}; got "
            f"{short(scales)}. {remedy}, or pass a float32 array []"
        )


def in_chunks(
    layer: Callable[..., Any],
    num_chunks: int,
    per_token: Mapping[str, Any],
    weights: Mapping[str, Any],
    *,
    summed: Sequence[str],
) -> Any:
    """Return the layer's results for all chunks, a pytree of arrays [num_chunks, ...].

    Args:
      layer: maps keyword arguments of both kinds, and the totals of some weights as ``totals``, to
        a pytree of arrays, and to the totals that its products returned. It runs under
        ``jax.checkpoint``.
      num_chunks: number of chunks of equal size.
      per_token: arguments [T, ...], which are divided. Numbers and None are passed to all chunks.
      weights: arrays or None. Their gradients are summed over the chunks in float32. Quantized
        weights have no gradient.
      summed: names of the weights whose totals the layer passes to its products.

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
    arrays = {}
    for name, w in weights.items():
        if w is None or isinstance(w, QuantizedExperts):
            others[name] = w
        else:
            arrays[name] = jnp.asarray(as_array(w))
    first = {name: total_of(w) for name, w in arrays.items()}
    totals = {name: total for name, total in first.items() if name in summed}
    # Gradients take the way of the totals.
    arrays = {name: lax.stop_gradient(w) for name, w in arrays.items()}

    def step(totals: dict[str, jax.Array], chunk: dict[str, jax.Array]) -> Any:
        own = {name: with_total(w, first[name]) for name, w in arrays.items()}
        result, found = layer(**chunk, **others, **own, totals=totals)
        return found, result

    if totals:
        # After a chunk, totals also vary over the mesh axes of the tokens.
        first_chunk = {name: x[0] for name, x in divided.items()}
        found, _ = jax.eval_shape(step, totals, first_chunk)
        for name, total in found.items():
            (totals[name],) = compat.align_varying([totals[name]], compat.varying_axes(total))
    # The loop already keeps XLA from merging both computations of a chunk.
    return lax.scan(jax.checkpoint(step, prevent_cse=False), totals, divided)[1]
