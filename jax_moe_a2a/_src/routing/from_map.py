"""Turn a routing map (a boolean for each token and expert) into the ids that ``route`` accepts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..checks import as_array, check_int, short
from ..plan.capacity import check_top_k
from .choices import RouterChoices


def choices_from_map(
    routing_map: ArrayLike, probs: ArrayLike | None = None, *, top_k: int
) -> tuple[RouterChoices, jax.Array]:
    """Turn a routing map into the choices that ``moe_mlp`` and ``moe`` accept.

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
      ``RouterChoices`` with ids [T, K], ascending and -1 after the last expert, and with weights
      [T, K] in the dtype of ``probs``, 0 where the id is -1, or None without ``probs``; and the
      number of choices that were left out because their token has more than K choices, [] int32.

    Example:
      The last token has three experts, so one choice is dropped:

      ```python
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      routing_map = jnp.array([[False, True, True], [False, False, False], [True, True, True]])
      choices, num_dropped = ma.choices_from_map(routing_map, top_k=2)
      print(choices.ids.tolist(), num_dropped)
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
    weights = None
    if probs is not None:
        # An id out of range reads 0, and its cotangent is discarded.
        weights = jax.vmap(lambda p, i: p.at[i].get(mode="fill", fill_value=0))(probs, ids)
    num_dropped = jnp.maximum(num_named - top_k, 0).sum(dtype=jnp.int32)
    return RouterChoices(jnp.where(ids < num_experts, ids, -1), weights), num_dropped


def _check_probs(probs: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """Return ``probs`` as an array; raise an error unless they are floats of this shape."""
    wanted = f"a float array [num_tokens, num_experts]={list(shape)} of 16 bits or more"
    array = as_array(probs)
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise TypeError(f"probs must be {wanted}; got {short(array)}")
    if array.shape != shape:
        raise ValueError(f"probs must be {wanted}; got {short(array)}")
    return jnp.asarray(array)
