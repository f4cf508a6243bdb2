"""Choose the experts of each token from router logits."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from .. import scopes
from ..ad import accumulation_dtype
from ..checks import as_array, check_bool, check_factor, check_floats, check_int, short
from ..plan.capacity import check_top_k
from ..routing.checks import as_int32
from ..routing.choices import RouterChoices
from .choose import Groups, Weighing, at, best, choose

Score: TypeAlias = Literal["softmax", "sigmoid"]


@dataclasses.dataclass(frozen=True)
class TopK:
    """A function that chooses ``k`` experts for each token from router logits.

    The scores of a token are the softmax or the sigmoid of its logits, in float32. The token
    chooses the experts with the highest ``scores + select_bias``. The weights are the scores of
    these experts, divided by their sum if ``renormalize``, times ``scale``. If two experts have
    equal sums, the expert with the lower id comes first. Logits of 0.0 and -0.0 are equal.

    Pass a ``TopK`` to a ``Router`` as ``choose``. A ``TopK`` contains no arrays, and does not
    communicate. This table has the routers of published models:

    | model | ``TopK`` |
    | --- | --- |
    | Switch (arXiv:2101.03961) | ``TopK(1)`` |
    | Mixtral (arXiv:2401.04088) and GPT-OSS (arXiv:2508.10925) | ``TopK(k)`` |
    | Qwen3-MoE (arXiv:2505.09388) | ``TopK(k, renormalize=norm_topk_prob)`` |
    | DeepSeek-V2 (arXiv:2405.04434) | ``TopK(6, num_groups=8, top_groups=3, top_in_group=1,
      renormalize=False, scale=16)`` |
    | DeepSeek-V3 (arXiv:2412.19437) | ``TopK(k, score="sigmoid", num_groups=8, top_groups=4,
      scale=2.5)``, with ``select_bias`` |
    | Llama 4 | ``TopK(1, score="sigmoid")``, with ``weigh_input`` of ``Experts`` |

    Tests compare these routers and their gradients with the library transformers. A ``TopK`` adds
    no random noise. GPT-OSS applies the softmax only to the logits of the chosen experts, which is
    equal to the renormalized softmax. DeepSeek-V3 adds 1e-20 to the sum of the chosen scores, and
    this class does not. The weights differ by at most 1e-6 if a chosen score is above 1e-14.

    Args:
      k: K, the number of experts of each token, 1 to 32 and at most E.
      score: ``"softmax"`` over all experts, or ``"sigmoid"`` of each logit.
      num_groups: number of groups of consecutive experts, or None for no groups. A token chooses
        only from the ``top_groups`` groups with the highest values.
      top_groups: number of groups that a token may choose from, or None for no groups.
      top_in_group: the value of a group is the sum of its ``top_in_group`` highest
          ``scores + select_bias``. DeepSeek-V3 uses 2, and DeepSeek-V2 uses 1.
      renormalize: True if the weights of a token sum to ``scale``. None means ``k > 1``. With
        ``k=1``, a renormalized weight is constant, so its gradient does not train the router.
      scale: a number above 0 that multiplies the weights.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if an argument has the wrong range.

    Example:
      The bias makes the first token choose expert 2. The second token is masked:

      ```python
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      logits = jnp.log(jnp.array([[0.5, 0.3, 0.2, 1.0], [0.1, 0.4, 0.1, 0.4]]))
      bias = jnp.array([0.0, 0.0, 0.4, 0.0])
      choices = ma.TopK(2)(logits, select_bias=bias, mask=jnp.array([True, False]))
      print(choices.ids.tolist())
      print((6 * choices.weights).round())
      ```

      ```text
      [[2, 3], [-1, -1]]
      [[1. 5.]
       [0. 0.]]
      ```
    """

    k: int
    _: dataclasses.KW_ONLY
    score: Score = "softmax"
    num_groups: int | None = None
    top_groups: int | None = None
    top_in_group: int = 2
    renormalize: bool | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        own: dict[str, Any] = dict(k=check_int("k", self.k, least=1))
        check_top_k(own["k"], name="k")
        if self.score not in get_args(Score):
            raise ValueError(f'score must be "softmax" or "sigmoid"; got {self.score!r}')
        groups = dict(num_groups=self.num_groups, top_groups=self.top_groups)
        missing = [name for name, number in groups.items() if number is None]
        if len(missing) == 1:
            raise ValueError(
                "num_groups and top_groups must both be numbers or both be None; got num_groups="
                f"{self.num_groups} and top_groups={self.top_groups}. Pass {missing[0]}, too"
            )
        if not missing:
            own |= {name: check_int(name, number, least=1) for name, number in groups.items()}
        own["top_in_group"] = check_int("top_in_group", self.top_in_group, least=1)
        if self.renormalize is not None:
            check_bool("renormalize", self.renormalize)
        own["scale"] = check_factor("scale", self.scale)
        for name, value in own.items():  # converts numpy integers to int
            object.__setattr__(self, name, value)

    @scopes.router
    def __call__(
        self,
        logits: ArrayLike,
        *,
        select_bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
    ) -> RouterChoices:
        """Choose the experts of each token, and compute their weights.

        Args:
          logits: floats [..., E] of 16 bits or more: the logits of the E experts for each token.
          select_bias: floats [E], or None. The bias affects which experts are chosen, but not their
            weights. It has no gradient: ``update_select_bias`` adjusts it.
          mask: booleans [...], False for tokens that choose no expert, such as padding; or None.
            The logits of masked tokens may have any values, and their gradients are zero.

        Returns:
          A ``RouterChoices`` with ids [..., K] (highest first), weights [..., K] and scores [...,
          E]. The scores of each token are divided by their sum. The quotients are computed from
          logarithms, because float32 cannot represent very small sigmoids. For masked tokens, ids
          are -1, and weights and scores are 0. Weights and scores are differentiable in the logits.
          Their dtype is float32, or float64 for float64 logits.

        Raises:
          TypeError: if an argument has the wrong type or dtype.
          ValueError: if an argument has the wrong shape.
        """
        logits, mask = self._checked(logits, mask)
        if select_bias is not None:
            select_bias = check_bias("select_bias", select_bias, logits.shape[-1])
        scores, probs = self._scores(logits)
        groups = None
        if self.num_groups is not None and self.top_groups is not None:
            groups = Groups(self.num_groups, self.top_groups, self.top_in_group)
        # Compare logits if possible, because rounding may make different scores equal.
        keys = logits if select_bias is None and groups is None else scores
        if select_bias is not None:
            keys = lax.stop_gradient(keys) + _for_tokens(select_bias, keys)
        values = logits if self._weighing.renormalizes else scores
        ids, weights = choose(keys, values, mask, k=self.k, groups=groups, weighing=self._weighing)
        return RouterChoices(ids, weights, _kept(mask, probs))

    @scopes.router
    def replay(
        self, logits: ArrayLike, ids: ArrayLike, *, mask: ArrayLike | None = None
    ) -> RouterChoices:
        """Return choices with the given ids, and compute their weights as in a call.

        Args:
          logits: as in a call.
          ids: integers [..., K']: the experts of each token. Ids outside [0, E), such as -1, choose
            no expert, and have the weight 0.
          mask: as in a call.

        Returns:
          A ``RouterChoices`` with the ids, weights [..., K'], and scores as in a call. If the ids
          come from a call with these logits, the weights are equal to that call's weights.

        Raises:
          TypeError: if an argument has the wrong type or dtype.
          ValueError: if an argument has the wrong shape.
        """
        logits, mask = self._checked(logits, mask)
        ids = check_ids("ids", ids, logits.shape[:-1], logits.shape[-1])
        scores, probs = self._scores(logits)
        ids = _kept(mask, ids, -1)
        is_choice = (ids >= 0) & (ids < logits.shape[-1])
        # If a token has no valid id, treat all its ids as valid: a softmax of no logits is NaN.
        counts = is_choice | ~is_choice.any(axis=-1, keepdims=True)
        values = logits if self._weighing.renormalizes else scores
        weights = self._weighing(at(values, ids), counts)
        return RouterChoices(ids, jnp.where(is_choice, weights, 0), _kept(mask, probs))

    @scopes.router
    def bias_histogram(
        self,
        logits: ArrayLike,
        *,
        select_bias: ArrayLike,
        mask: ArrayLike | None = None,
        num_bins: int = 1000,
    ) -> jax.Array:
        """Return, for each expert, a histogram of the bias above which a token chooses the expert.

        ``quantile_select_bias`` computes the next bias from the histogram, and its documentation
        has the formula. For several micro-batches, add their histograms.

        Args:
          logits: as in a call, for example the ``logits`` of ``MoEStatistics``.
          select_bias: floats [E], as in a call.
          mask: as in a call. Masked tokens are not counted.
          num_bins: N. The bins have equal width, from ``min(select_bias) - 1`` to
            ``max(select_bias) + 1``. No token is outside this range, because scores are in [0, 1].
            Use more bins if scores are small, as in a softmax over many experts.

        Returns:
          [E, N] int32: number of tokens in each bin.

        Raises:
          TypeError: if an argument has the wrong type or dtype.
          ValueError: if an argument has the wrong shape or range, or if this ``TopK`` has groups or
            chooses all experts.
        """
        logits, mask = self._checked(lax.stop_gradient(logits), mask)
        num_experts, num_bins = logits.shape[-1], check_int("num_bins", num_bins, least=1)
        bias = check_bias("select_bias", select_bias, num_experts)
        if self.num_groups is not None or self.k == num_experts:
            raise ValueError(
                "bias_histogram needs a TopK without groups, and with k below the number of "
                f"experts, {num_experts}; got {self}. Use update_select_bias"
            )
        bias = lax.stop_gradient(bias).astype(logits.dtype)
        scores = self._scores(logits)[0]
        least = best(scores + _for_tokens(bias, scores), self.k + 1)[0][..., -1:] - scores
        bins = jnp.floor((least - (bias.min() - 1)) / bin_width(bias, num_bins)[0])
        bins = jnp.clip(bins, 0, num_bins - 1).astype(jnp.int32)
        if mask is not None:
            bins = jnp.where(mask[..., None], bins, num_bins)  # not counted
        expert = lax.broadcasted_iota(jnp.int32, bins.shape, bins.ndim - 1)
        counts = jnp.zeros((num_experts, num_bins), jnp.int32).at[expert, bins]
        mesh = jax.typeof(bins).sharding.mesh
        whole = None if mesh.empty else NamedSharding(mesh, P())
        return counts.add(1, mode="drop", out_sharding=whole)

    def _checked(
        self, logits: ArrayLike, mask: ArrayLike | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return logits with 0 in masked tokens, and the mask, or raise an error."""
        logits = check_logits(logits)
        num_experts = logits.shape[-1]
        if self.k > num_experts:
            raise ValueError(
                f"k of TopK must be at most the number of experts, {num_experts}; got {self.k} for "
                f"logits {short(logits)}. The last axis of logits is the axis of experts"
            )
        mask = None if mask is None else check_mask(mask, logits)
        logits = _kept(mask, logits)
        if self.num_groups is None or self.top_groups is None:
            return logits, mask
        size, rest = divmod(num_experts, self.num_groups)
        if rest or size < self.top_in_group:
            raise ValueError(
                f"num_groups must divide the {num_experts} experts into groups of equal size, "
                f"{self.top_in_group} or more; got {self.num_groups}. Omit num_groups and "
                "top_groups to choose from all experts"
            )
        if not self.k <= self.top_groups * size <= num_experts:
            raise ValueError(
                f"top_groups must be at least {-(-self.k // size)}, so that top_groups groups of "
                f"{size} experts hold k={self.k} experts, and at most num_groups="
                f"{self.num_groups}; got {self.top_groups}"
            )
        return logits, mask

    def _scores(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the scores, and the scores divided by their sum for each token."""
        if self.score == "softmax":
            scores = jax.nn.softmax(logits)
            return scores, scores
        return jax.nn.sigmoid(logits), jax.nn.softmax(jax.nn.log_sigmoid(logits))

    @property
    def _weighing(self) -> Weighing:
        renormalizes = self.k > 1 if self.renormalize is None else self.renormalize
        return Weighing(renormalizes, self.score == "sigmoid", self.scale)


def _kept(mask: jax.Array | None, array: jax.Array, other: int = 0) -> jax.Array:
    return array if mask is None else jnp.where(mask[..., None], array, other)


def _for_tokens(bias: jax.Array, scores: jax.Array) -> jax.Array:
    """Return a bias [E] in the dtype of scores, reshaped to [1, ..., E], without derivatives."""
    bias = lax.stop_gradient(bias).astype(scores.dtype)
    return bias.reshape((1,) * (scores.ndim - 1) + bias.shape)


def bin_width(bias: jax.Array, num_bins: int) -> jax.Array:
    """Return the width of the bins of a histogram, [..., 1], for a bias [..., E]."""
    return (bias.max(axis=-1, keepdims=True) - bias.min(axis=-1, keepdims=True) + 2) / num_bins


def check_logits(value: object, name: str = "logits") -> jax.Array:
    """Return floats [..., E] in the accumulation dtype, or raise an error."""
    array = as_array(value)
    check_floats(name, array, "Cast it")
    if array.ndim < 1 or not array.shape[-1]:
        raise ValueError(
            f"{name} must be an array [..., num_experts] with at least one expert; got "
            f"{short(array)}"
        )
    array = jnp.asarray(array)  # astype would warn if float64 is not enabled
    return array.astype(accumulation_dtype(array.dtype))


def check_mask(value: object, logits: jax.Array) -> jax.Array:
    """Return a mask as booleans with the leading axes of ``logits``, or raise an error."""
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


def check_bias(name: str, value: object, num_experts: int) -> jax.Array:
    """Return a bias as floats [num_experts], or raise an error."""
    bias = as_array(value)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"{name} must hold floats; got {short(bias)}. Cast it")
    if bias.shape != (num_experts,):
        raise ValueError(
            f"{name} must have a number for each expert, [{num_experts}]; got {short(bias)}. Pass "
            "the bias of one layer, without axes of tokens"
        )
    return jnp.asarray(bias)


def check_ids(name: str, value: object, leading: tuple[int, ...], num_experts: int) -> jax.Array:
    """Return ids [*leading, K] as int32, or raise an error."""
    ids = as_array(value)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers; got {short(ids)}")
    if ids.ndim != len(leading) + 1 or ids.shape[:-1] != leading:
        expected = f"[{', '.join(map(str, (*leading, 'K')))}]"
        raise ValueError(
            f"{name} must be {expected}, K ids for each token; got {short(ids)}. Pass the ids of "
            "these tokens, in the same order"
        )
    return as_int32(ids, num_experts)
