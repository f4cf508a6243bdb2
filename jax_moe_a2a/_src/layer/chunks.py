"""Run a layer on one chunk of tokens after the other, to save memory.

The carry of the loop over chunks is the totals of the weights (``grouped/totals.py``). The carry of
the backward loop is their cotangents, which are the float32 sums of the weights' gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

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
from .weights import Experts, Totals


class Tokens(NamedTuple):
    """The arrays [T, ...] of a rank's tokens. A field may also be None or a number."""

    x: Any
    topk_ids: Any
    topk_weights: Any
    shared_weights: Any = None


class LayerWeights(NamedTuple):
    """The weights of a rank, in the shapes that ``flat`` returns."""

    experts: Experts
    """Weights of the rank's home experts, or of the experts in all its slots."""
    fetched: Experts | None = None
    """Weights of the spare slots, or None if the layer fetches them or has no such slots."""
    shared: Experts | None = None


def check_one_global_scale(fmt: TokenFormat | None, reason: str, remedy: str) -> None:
    """Raise an error, with ``reason``, if the token format has a global scale for each token."""
    scales = None if fmt is None else fmt.token_scales
    if scales is not None:
        raise ValueError(
            f"token_format must have one global_scale for all tokens, because {reason}; got "
            f"{short(scales)}. {remedy}, or pass a float32 array []"
        )


def in_chunks(
    layer: Callable[[Tokens, LayerWeights, Totals], tuple[Any, Totals]],
    num_chunks: int,
    tokens: Tokens,
    weights: LayerWeights,
    totals: Totals,
) -> tuple[Totals, Any]:
    """Return the totals, and the layer's results, a pytree of arrays [num_chunks, ...].

    Args:
      layer: a function that returns the arrays of a chunk (a pytree), and the totals after this
        chunk. It runs under ``jax.checkpoint``.
      tokens: arrays [T, ...] are divided into chunks. Numbers and None are passed to all chunks.
      weights: JAX arrays. Their gradients are summed over the chunks in float32. Values and scales
        of ``QuantizedExperts`` have no gradient.
      totals: the totals of the experts, or a ``Totals`` without arrays.
    """
    divided = {}
    for name, value in tokens._asdict().items():
        if isinstance(value, Routing | TwoLevelRouting):
            raise TypeError(
                f"{name} must be integers [T, K] with num_chunks, because each chunk is routed on "
                f"its own; got a {type(value).__name__}"
            )
        array = None if value is None else as_array(value)
        if array is None or array.ndim == 0:
            continue
        if array.shape[0] % num_chunks:
            raise ValueError(
                f"num_chunks must divide the number of tokens; got {num_chunks} for {name} "
                f"{short(array)}"
            )
        chunks = num_chunks, array.shape[0] // num_chunks
        divided[name] = jnp.reshape(array, (*chunks, *array.shape[1:]))
    first = _map_floats(total_of, weights)
    if not jax.tree.leaves(totals) and not weights.experts.has_lora:
        totals = totals.of(first.experts.map_weights(_floats))
    # ``weights`` get no gradients directly, because the totals receive them.
    fixed = _map_floats(lax.stop_gradient, weights)

    def step(totals: Totals, chunk: dict[str, jax.Array]) -> tuple[Totals, Any]:
        own = _map_floats(with_total, fixed, first)
        result, found = layer(tokens._replace(**chunk), own, totals)
        return found, result

    # A carry keeps its type, so the first totals must vary over the tokens' mesh axes, too.
    axes = frozenset().union(*map(compat.varying_axes, divided.values()))
    totals = jax.tree.map(lambda total: compat.align_varying([total], axes)[0], totals)
    # ``prevent_cse`` is not needed, because XLA does not merge forward and backward loops.
    return lax.scan(jax.checkpoint(step, prevent_cse=False), totals, divided)


def _floats(w: Any) -> Any:
    """Return the float array of ``w`` that gets gradients, or None if ``w`` has no such array."""
    return w.source if isinstance(w, QuantizedExperts) else w


def _map_floats(function: Callable[..., jax.Array], weights: Any, *others: Any) -> Any:
    """Apply a function to each array of weights that has a gradient."""

    def apply(w: Any, *more: Any) -> Any:
        if _floats(w) is None:
            return w
        found = function(*map(_floats, (w, *more)))
        return dataclasses.replace(w, source=found) if isinstance(w, QuantizedExperts) else found

    is_leaf = lambda w: isinstance(w, QuantizedExperts)
    return jax.tree.map(apply, weights, *others, is_leaf=is_leaf)
