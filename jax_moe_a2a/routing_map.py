"""Routing maps: a boolean for each token and expert, as the ids that ``route`` takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .arguments import as_array, check_int, short
from .routing import check_top_k


class Choices(NamedTuple):
    """What ``choices_from_map`` returns. T tokens, K choices each."""

    topk_ids: jax.Array
    """[T, K] int32: the experts of each token, ascending; -1 behind the last."""
    topk_weights: jax.Array | None
    """[T, K], dtype of ``probs``: theirs, 0 where the id is -1; None if no ``probs`` were given."""
    num_dropped: jax.Array
    """[] int32: experts that tokens name beyond K each, and that ``topk_ids`` lacks."""


def choices_from_map(routing_map: Any, probs: Any = None, *, top_k: int) -> Choices:
    """Turns a routing map into the ids and router weights that ``dispatch`` takes.

    The map says for each token and expert whether they meet, as in Megatron and HybridEP. With
    ``top_k=2`` the map

        [[False, True, True], [False, False, False], [True, True, True]]

    gives the ids ``[[1, 2], [-1, -1], [0, 1]]``, and one choice is dropped.

    Nothing is communicated, and no axes need be in scope. Exact gradient: that of a weight is that
    of its place in ``probs``, and the other places, which are not read, have zero.

    Args:
      routing_map: booleans [T, num_experts].
      probs: floats [T, num_experts] of 16 bits or more, or None: the router weights, used as they
        are where the map is True. Nothing is normalised.
      top_k: K, choices of a token, 1 to 32; more than ``num_experts`` is allowed. A token that
        names more keeps the first by expert, whatever their probs, and the others are counted.

    Returns:
      A ``Choices``.

    Raises:
      TypeError, ValueError: an argument of the wrong type, shape or range.
    """
    routing_map = as_array(routing_map)
    if routing_map.dtype != jnp.bool_ or routing_map.ndim != 2:
        raise (ValueError if routing_map.dtype == jnp.bool_ else TypeError)(
            f"routing_map must be a bool array [num_tokens, num_experts]; got {short(routing_map)}"
        )
    num_experts = routing_map.shape[1]
    if not num_experts:
        raise ValueError(
            f"routing_map must have an expert on its last axis; got {short(routing_map)}"
        )
    top_k = check_int("top_k", top_k, least=1)
    check_top_k(top_k)
    if probs is not None:
        probs = _check_probs(probs, routing_map.shape)

    # How many experts a token names up to each one. Choice k is the first where that exceeds k, so
    # the experts before it are counted: no sort, and num_experts where there is no such choice.
    named = jnp.cumsum(routing_map, axis=1, dtype=jnp.int32)
    choices = jnp.arange(top_k, dtype=jnp.int32)[None, None, :]
    ids = (named[:, :, None] <= choices).sum(axis=1, dtype=jnp.int32)
    num_named = routing_map.sum(axis=1, dtype=jnp.int32)
    topk_weights = None
    if probs is not None:
        # Out of range reads 0, and its cotangent, whatever it is, goes nowhere.
        topk_weights = jax.vmap(lambda p, i: p.at[i].get(mode="fill", fill_value=0))(probs, ids)
    return Choices(
        topk_ids=jnp.where(ids < num_experts, ids, -1),
        topk_weights=topk_weights,
        num_dropped=jnp.maximum(num_named - top_k, 0).sum(dtype=jnp.int32),
    )


def _check_probs(probs: Any, shape: tuple[int, ...]) -> jax.Array:
    wanted = f"a float array [num_tokens, num_experts]={list(shape)} of 16 bits or more"
    array = as_array(probs)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise TypeError(f"probs must be {wanted}; got {short(array)}")
    if array.shape != shape:
        raise ValueError(f"probs must be {wanted}; got {short(array)}")
    return jnp.asarray(array)
