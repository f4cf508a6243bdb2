"""Choose the experts of each token from router logits."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .. import scopes
from ..ad import accumulation_dtype
from ..checks import as_array, check_bool, check_factor, check_floats, check_int, short
from ..plan.capacity import check_top_k

Score: TypeAlias = Literal["softmax", "sigmoid"]


class RouterChoices(NamedTuple):
    """Result of ``top_k_router`` for logits [..., E] and K choices of each token."""

    ids: jax.Array
    """[..., K] int32: the experts of each token, the best expert first; -1 in masked tokens."""
    weights: jax.Array
    """[..., K] float32: the router weight of each choice; 0 in masked tokens."""
    scores: jax.Array
    """[..., E] float32: the scores of all experts, divided by their sum, for
    ``load_balancing_loss``; 0 in masked tokens."""


@scopes.router
def top_k_router(
    logits: ArrayLike,
    top_k: int,
    *,
    score: Score = "softmax",
    select_bias: ArrayLike | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    renormalize: bool | None = None,
    scale: float = 1.0,
    mask: ArrayLike | None = None,
) -> RouterChoices:
    """Choose the ``top_k`` best experts of each token, and return their ids and router weights.

    The scores of a token are the softmax or the sigmoid of its logits, in float32. The token
    chooses the experts with the highest ``scores + select_bias``. The weights are the scores of
    these experts, divided by their sum if ``renormalize``, times ``scale``. If two experts are
    equally good, the expert with the lower id comes first. Logits of 0.0 and -0.0 are equally good.
    The function communicates nothing.

    The routers of published models:

    | model | arguments |
    | --- | --- |
    | Switch (arXiv:2101.03961) | ``top_k=1`` |
    | Mixtral (arXiv:2401.04088) and GPT-OSS (arXiv:2508.10925) | ``top_k`` |
    | Qwen3-MoE (arXiv:2505.09388) | ``top_k, renormalize=norm_topk_prob`` |
    | DeepSeek-V3 (arXiv:2412.19437) | ``top_k, score="sigmoid", select_bias=bias, num_groups=8,
      top_groups=4, scale=2.5`` |

    Tests compare these routers, except for their random noise, and their gradients with those of
    transformers. GPT-OSS adds a bias to its logits first, and applies the softmax to the logits of
    the chosen experts only. That is equal to the renormalized softmax over all experts, and is how
    this function computes it. DeepSeek-V3 adds 1e-20 to the sum of the chosen scores, so as not to
    divide by 0. This function subtracts logarithms instead. Its weights differ by 1e-6 at most if a
    chosen score is above 1e-14.

    Args:
      logits: floats [..., E] of 16 bits or more: the logits of the E experts for each token.
      top_k: K, the number of experts of each token, 1 to 32 and at most E.
      score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each logit.
      select_bias: floats [E], which are added to the scores for the choice of experts only, or
        None. It has no gradient: ``update_select_bias`` adjusts it.
      num_groups: divides the experts into this many groups of consecutive experts. A token then
        chooses from its best groups only. The value of a group is the sum of its two highest
        ``scores + select_bias``. None means that a token may choose all experts.
      top_groups: number of groups that a token may choose from. Needs ``num_groups``.
      renormalize: True if the weights of a token sum to ``scale``. None means True if ``top_k`` is
        above 1. With a single choice, a renormalized weight is constant, so that the output does
        not depend on the logits and trains no router.
      scale: a number above 0 that multiplies the weights.
      mask: booleans [...], False for tokens that choose no expert, such as padding; or None. The
        logits of masked tokens may hold any value, and have zero gradients.

    Returns:
      A ``RouterChoices`` with ids [..., K], weights [..., K] and scores [..., E]. ``moe_mlp`` and
      ``dispatch`` accept ids and weights in this order. The scores of each token are divided by
      their sum, so that sigmoids that are too small for float32 count in a balance loss, too.
      Weights and scores are differentiable in the logits, and are float64 for float64 logits.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape or range.

    Example:
      The bias changes which experts the token chooses, but not their scores. The second token is
      masked:

      ```python
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      logits = jnp.log(jnp.array([[0.5, 0.3, 0.2, 1.0], [0.1, 0.4, 0.1, 0.4]]))
      bias = jnp.array([0.0, 0.0, 0.4, 0.0])
      choices = ma.top_k_router(logits, 2, select_bias=bias, mask=jnp.array([True, False]))
      print(choices.ids.tolist())
      print((6 * choices.weights).round())
      ```

      ```text
      [[2, 3], [-1, -1]]
      [[1. 5.]
       [0. 0.]]
      ```
    """
    logits = check_logits(logits)
    num_experts = logits.shape[-1]
    top_k = check_int("top_k", top_k, least=1)
    check_top_k(top_k)
    if top_k > num_experts:
        raise ValueError(
            f"top_k must be at most the number of experts, {num_experts}; got {top_k} for logits "
            f"{short(logits)}. The last axis of logits is the axis of experts"
        )
    if score not in get_args(Score):
        raise ValueError(f'score must be "softmax" or "sigmoid"; got {score!r}')
    if select_bias is not None:
        select_bias = _check_bias(select_bias, logits)
    groups = _check_groups(num_groups, top_groups, top_k, num_experts)
    renormalize = top_k > 1 if renormalize is None else check_bool("renormalize", renormalize)
    scale = check_factor("scale", scale)
    if mask is not None:
        mask = check_mask(mask, logits)[..., None]
        logits = jnp.where(mask, logits, 0)

    is_softmax = score == "softmax"
    # A softmax of their logarithms divides scores by their sum, and never divides 0 by 0.
    log_scores = logits if is_softmax else jax.nn.log_sigmoid(logits)
    probs = jax.nn.softmax(log_scores)
    scores = probs if is_softmax else jax.nn.sigmoid(logits)
    # Logits have the order of their scores, and stay apart where scores round to the same number.
    keys = logits if select_bias is None and groups is None else scores
    keys = lax.stop_gradient(keys)
    if select_bias is not None:
        bias = lax.stop_gradient(select_bias).astype(keys.dtype)
        keys += bias.reshape((1,) * (keys.ndim - 1) + bias.shape)
    if groups is not None:
        keys = _only_best_groups(keys, *groups)
    ids = _best(keys, top_k)[1]
    weights = jax.nn.softmax(_at(log_scores, ids)) if renormalize else _at(scores, ids)
    weights *= scale
    if mask is not None:
        ids = jnp.where(mask, ids, -1)
        weights, probs = (jnp.where(mask, x, 0) for x in (weights, probs))
    return RouterChoices(ids, weights, probs)


def _best(keys: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Return the highest keys of the last axis and their indices, both from high to low. Of equal
    keys, the one with the lower index comes first."""
    # XLA orders -0.0 before 0.0, and removes an addition of 0.0.
    values, ids = lax.top_k(jnp.where(keys == 0, 0.0, keys), number)
    # A program over Auto axes on GPUs or TPUs whose result is the ids alone would return zeros
    # (https://github.com/openxla/xla/issues/49005). The minimum, which changes no id, prevents it.
    return values, jnp.minimum(ids, keys.shape[-1] - 1)


def _only_best_groups(keys: jax.Array, num_groups: int, top_groups: int) -> jax.Array:
    """Return the keys of a token's best groups, and minus infinity for all other experts."""
    size = keys.shape[-1] // num_groups
    grouped = keys.reshape(*keys.shape[:-1], num_groups, size)
    values = _best(grouped, 2)[0].sum(axis=-1)
    best = _best(values, top_groups)[1]
    is_best = one_hot(best, num_groups).any(axis=-2)
    eligible = jnp.where(is_best[..., None], grouped, -jnp.inf)
    return eligible.reshape(keys.shape)


def _at(values: jax.Array, ids: jax.Array) -> jax.Array:
    """Return ``values[..., ids]``: [..., E] and [..., K] to [..., K].

    The transpose of a sum is a sum. The transpose of a gather would be a scatter, and with Explicit
    axes a gather needs a sharding.
    """
    chosen = one_hot(ids, values.shape[-1])
    return jnp.where(chosen, values[..., None, :], 0).sum(axis=-1)


def one_hot(ids: jax.Array, num: int) -> jax.Array:
    """Return booleans [..., num], True where the last index equals the id."""
    ids = ids[..., None]
    return ids == lax.broadcasted_iota(ids.dtype, (1,) * (ids.ndim - 1) + (num,), ids.ndim - 1)


def check_logits(value: Any, name: str = "logits") -> jax.Array:
    """Return floats [..., E] as an array of the accumulation dtype, or raise an error."""
    array = as_array(value)
    check_floats(name, array, "Cast it")
    if array.ndim < 1 or not array.shape[-1]:
        raise ValueError(
            f"{name} must be an array [..., num_experts] with at least one expert; got "
            f"{short(array)}"
        )
    array = jnp.asarray(array)  # without a warning if it holds float64, which JAX has not enabled
    return array.astype(accumulation_dtype(array.dtype))


def check_mask(value: Any, logits: jax.Array) -> jax.Array:
    """Return booleans with the leading axes of ``logits`` as an array, or raise an error."""
    mask = as_array(value)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"mask must hold booleans, True for tokens that take part; got {short(mask)}. "
            "Compare it, for example mask != 0"
        )
    if mask.shape != logits.shape[:-1]:
        raise ValueError(
            f"mask must have a boolean for each token, {list(logits.shape[:-1])}, because logits "
            f"have the shape {list(logits.shape)}; got {short(mask)}"
        )
    return jnp.asarray(mask)


def _check_bias(value: Any, logits: jax.Array) -> jax.Array:
    """Return floats [E] as an array, or raise an error."""
    bias = as_array(value)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"select_bias must hold floats; got {short(bias)}. Cast it")
    if bias.shape != logits.shape[-1:]:
        raise ValueError(
            f"select_bias must have a number for each expert, {list(logits.shape[-1:])}; got "
            f"{short(bias)}. Pass the bias of one layer, without axes of tokens"
        )
    return jnp.asarray(bias)


def _check_groups(
    num_groups: Any, top_groups: Any, top_k: int, num_experts: int
) -> tuple[int, int] | None:
    """Return the numbers of groups, or None without groups; otherwise raise an error."""
    if num_groups is None and top_groups is None:
        return None
    if num_groups is None or top_groups is None:
        missing = "num_groups" if num_groups is None else "top_groups"
        raise ValueError(
            f"num_groups and top_groups must both be numbers or both be None; got num_groups="
            f"{num_groups} and top_groups={top_groups}. Pass {missing}, too"
        )
    num_groups = check_int("num_groups", num_groups, least=1)
    top_groups = check_int("top_groups", top_groups, least=1)
    size, rest = divmod(num_experts, num_groups)
    if rest or size < 2:
        raise ValueError(
            f"num_groups must divide the {num_experts} experts into groups of equal size, 2 or "
            f"more; got {num_groups}. Omit num_groups and top_groups to choose from all experts"
        )
    if not top_k <= top_groups * size <= num_experts:
        raise ValueError(
            f"top_groups must be at least {-(-top_k // size)}, so that top_groups groups of {size} "
            f"experts hold top_k={top_k} experts, and at most num_groups={num_groups}; got "
            f"{top_groups}"
        )
    return num_groups, top_groups
