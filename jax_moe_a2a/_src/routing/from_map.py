"""Turn a routing map (a boolean for each token and expert) into the ids that ``route`` accepts."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..checks import as_array, check_int, short
from ..plan.capacity import check_top_k


class Choices(NamedTuple):
    """The result of ``choices_from_map`` for T tokens with K choices each."""

    topk_ids: jax.Array
    """[T, K] int32: the experts of each token, ascending; -1 after the last expert."""
    topk_weights: jax.Array | None
    """[T, K] in the dtype of ``probs``: the weight of each choice, 0 if its id is -1. None without
    ``probs``."""
    num_dropped: jax.Array
    """[] int32: choices that were left out because their token has more than K choices."""


def choices_from_map(
    routing_map: ArrayLike, probs: ArrayLike | None = None, *, top_k: int
) -> Choices:
    """Turn a routing map into the ids and router weights that ``dispatch`` accepts.

    The map says for each token and expert whether the token goes to the expert. This is the input
    of Megatron and HybridEP. The function communicates nothing, and needs no axes in scope. The
    gradient of ``probs`` is the gradient of the weights at the elements that were read, and zero
    elsewhere.

    Args:
      routing_map: booleans [T, num_experts].
      probs: router weights, floats [T, num_experts] of 16 bits or more, or None. They are used
        unchanged where the map is True; nothing is normalised.
      top_k: K, the number of choices of a token, 1 to 32. It may exceed ``num_experts``. A token
        with more choices keeps the choices with the lowest expert ids, and the dropped choices are
        counted.

    Returns:
      A ``Choices`` with topk_ids [T, K], topk_weights [T, K] or None, and num_dropped [].

    Raises:
      TypeError: if an argument has the wrong dtype.
      ValueError: if an argument has the wrong shape or range.

    Example:
      The last token has three experts, so one choice is dropped:

      ```python
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      routing_map = jnp.array([[False, True, True], [False, False, False], [True, True, True]])
      choices = ma.choices_from_map(routing_map, top_k=2)
      print(choices.topk_ids.tolist(), choices.num_dropped)
      ```

      ```text
      [[1, 2], [-1, -1], [0, 1]] 1
      ```
    """
    is_chosen = as_array(routing_map)
    if is_chosen.dtype != jnp.bool_ or is_chosen.ndim != 2:
        raise (ValueError if is_chosen.dtype == jnp.bool_ else TypeError)(
            f"routing_map must be a bool array [num_tokens, num_experts]; got {short(is_chosen)}"
        )
    num_experts = is_chosen.shape[1]
    if not num_experts:
        raise ValueError(
            f"routing_map must have an expert on its last axis; got {short(is_chosen)}"
        )
    top_k = check_int("top_k", top_k, least=1)
    check_top_k(top_k)
    if probs is not None:
        probs = _check_probs(probs, is_chosen.shape)

    # ``named`` counts the experts of a token up to each expert. Choice k is the first expert whose
    # count exceeds k, so its id is the number of experts before it, and num_experts if no such
    # choice exists. This needs no sort.
    named = jnp.cumsum(is_chosen, axis=1, dtype=jnp.int32)
    choices = jnp.arange(top_k, dtype=jnp.int32)[None, None, :]
    ids = (named[:, :, None] <= choices).sum(axis=1, dtype=jnp.int32)
    num_named = is_chosen.sum(axis=1, dtype=jnp.int32)
    topk_weights = None
    if probs is not None:
        # An id out of range reads 0, and its cotangent is discarded.
        topk_weights = jax.vmap(lambda p, i: p.at[i].get(mode="fill", fill_value=0))(probs, ids)
    return Choices(
        topk_ids=jnp.where(ids < num_experts, ids, -1),
        topk_weights=topk_weights,
        num_dropped=jnp.maximum(num_named - top_k, 0).sum(dtype=jnp.int32),
    )


def _check_probs(probs: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """Return ``probs`` as an array; raise an error unless they are floats of this shape."""
    wanted = f"a float array [num_tokens, num_experts]={list(shape)} of 16 bits or more"
    array = as_array(probs)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise TypeError(f"probs must be {wanted}; got {short(array)}")
    if array.shape != shape:
        raise ValueError(f"probs must be {wanted}; got {short(array)}")
    return jnp.asarray(array)
