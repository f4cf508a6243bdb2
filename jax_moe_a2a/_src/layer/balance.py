"""Balance the load of experts with a loss, or with updates of the router's ``select_bias``."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .. import scopes
from ..ad import accumulation_dtype
from ..checks import as_array, check_bool, check_factor, check_int, is_known, short
from .choose import one_hot
from .sums import sum_counts, sum_over
from .top_k import bin_width, check_ids, check_logits, check_mask

AxisNames: TypeAlias = str | Sequence[str] | None


@scopes.losses
def load_balancing_loss(
    scores: ArrayLike,
    ids: ArrayLike,
    *,
    counts: ArrayLike | None = None,
    axis_name: AxisNames = None,
) -> jax.Array:
    """Return the load-balancing loss of a router: 1 if all experts have equal shares.

    The loss is ``E * sum(f * P)`` over the E experts. ``f`` is the expert's share of all choices.
    ``P`` is the mean of the expert's scores, after the scores of each token are divided by their
    sum. This is the loss of Switch Transformer (Fedus et al., arXiv:2101.03961, equations 4 to 6),
    extended to several choices per token as in Megatron. Applied to the sigmoid scores of one
    sequence, it is the sequence-wise loss of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2). For
    that loss, pass ids that were chosen without ``select_bias``.

    In transformers, ``load_balancing_loss_func`` of Mixtral, Qwen3-MoE and GPT-OSS divides choices
    by the number of tokens and not of choices, and includes the tokens of all layers. It returns
    ``top_k`` times the result of this function for scores and ids with an axis of layers. Switch in
    transformers returns the mean of this loss over sequences.

    Tokens without a valid id are ignored. If all scores of a token are 0, the loss uses equal
    scores. ``f`` includes choices that a capacity drops. The loss has three variants:

    - A loss for each sequence: ``jax.vmap(load_balancing_loss)(scores, ids).mean()``.
    - A loss of each token's first choice, as in Switch and GShard (arXiv:2006.16668): pass
      ``ids[..., :1]``, because ``TopK`` returns the best expert first.
    - A loss of all micro-batches of a step (Qiu et al., arXiv:2501.11873): pass ``counts`` of the
      earlier micro-batches. ``f`` includes their choices, but ``P`` only the tokens of this call.

    Args:
      scores: floats [..., E], not negative, such as the ``scores`` of ``TopK``.
      ids: integers [..., K]: the ``ids`` of ``TopK``. Ids outside [0, E), such as -1, are
        not counted.
      counts: the number of choices of each expert on all ranks in earlier micro-batches, integers
          or floats [E]; or None. The loss adds them to the choices in ``ids``. Start with zeros,
          and add ``statistics.load.wanted_per_expert`` after each micro-batch.
      axis_name: names of the mesh axes in scope that divide the tokens, such as ``("data", "ep")``.
        ``f`` and ``P`` then include the tokens of all ranks, and all ranks get the same loss. None
        means the tokens of this call only. The call sums 2E + 1 numbers with ``lax.psum``. Inside
        ``jax.vmap`` and ``shard_map(check_vma=False)``, the transpose of ``psum`` is ``psum``, so
        ``jax.grad`` returns the gradient of the sum of all ranks' losses.

    Returns:
      A scalar, float32 (float64 for float64 scores), differentiable in the scores. It is 0 if no id
      is valid.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape, or an axis is not in scope.

    Example:
      Three of four tokens chose expert 0:

      ```python
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      scores = jnp.array([[0.75, 0.25], [0.75, 0.25], [0.75, 0.25], [0.25, 0.75]])
      print(ma.load_balancing_loss(scores, jnp.array([[0], [0], [0], [1]])))
      ```

      ```text
      1.125
      ```
    """
    axes = _check_axes(axis_name)
    scores = _check_scores(scores)
    num_experts = scores.shape[-1]
    ids = check_ids("ids", ids, scores.shape[:-1], num_experts)
    own = one_hot(ids, num_experts).sum(axis=tuple(range(ids.ndim)), dtype=jnp.int32)
    most = ids.size * math.prod(map(lax.axis_size, axes))
    sums = sum_over(axes, sum_of_columns(*shares_of(scores, ids)))
    total = sum_counts(axes, own, most).astype(sums.dtype)
    if counts is not None:
        counts = _check_counts(counts)
        if counts.shape != (num_experts,):
            raise ValueError(
                f"counts must have a number for each expert, [{num_experts}]; got {short(counts)}. "
                "Pass the sum of wanted_per_expert over earlier micro-batches"
            )
        total += lax.stop_gradient(counts).astype(sums.dtype)
    return balance_loss_of(sums[:-1], sums[-1], total)


def shares_of(scores: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the scores [..., E], divided by their sum for each token, and booleans [...], True for
    tokens with a valid id. The scores of all other tokens become 0."""
    is_token = ((ids >= 0) & (ids < scores.shape[-1])).any(axis=-1, keepdims=True)
    # Divide by the largest score first. The derivative of a division by a tiny sum may overflow.
    largest = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    has_scores = is_token & (largest != 0)
    ratios = jnp.where(has_scores, scores, 1) / jnp.where(has_scores, largest, 1)
    shares = jnp.where(is_token, ratios / ratios.sum(axis=-1, keepdims=True), 0)
    return shares, is_token[..., 0]


@scopes.losses
def balance_loss_of(sums: jax.Array, num_tokens: jax.Array, counts: jax.Array) -> jax.Array:
    """Return the balance loss. ``sums`` [E] is the first result of ``shares_of``, added over all
    tokens. ``counts`` [E] are the numbers of choices of each expert."""
    num_choices = jnp.maximum(counts.sum(), 1).astype(sums.dtype)
    scale = counts.size / (num_choices * jnp.maximum(num_tokens, 1))
    return jnp.sum(counts.astype(sums.dtype) * sums) * scale


@scopes.losses
def router_z_loss(
    logits: ArrayLike, *, mask: ArrayLike | None = None, axis_name: AxisNames = None
) -> jax.Array:
    """Return the z-loss of a router: the mean over tokens of ``logsumexp(logits) ** 2``.

    This loss keeps the logits small (ST-MoE, Zoph et al., arXiv:2202.08906, equation 5).

    Args:
      logits: floats [..., E] of 16 bits or more.
      mask: booleans [...], False for tokens that the loss ignores, as in ``TopK``; or None.
      axis_name: names of the mesh axes that divide the tokens, as in ``load_balancing_loss``. The
        call makes one ``lax.psum`` of two numbers.

    Returns:
      A scalar, float32 (float64 for float64 logits), differentiable in the logits. It is 0 if all
      tokens are masked.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape, or an axis is not in scope.

    Example:
      ```python
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      logits = jnp.log(jnp.array([[0.5, 0.5], [jnp.e / 2, jnp.e / 2]]))
      print(ma.router_z_loss(logits).round(3))
      ```

      ```text
      0.5
      ```
    """
    axes = _check_axes(axis_name)
    logits = check_logits(logits)
    mask = None if mask is None else check_mask(mask, logits)
    columns = z_columns(logits, mask)
    return z_loss_of(*sum_over(axes, sum_of_columns(logits[..., :0], *columns)))


def z_columns(logits: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Return two arrays [...]. Their sums over the tokens are the arguments of ``z_loss_of``."""
    if mask is not None:
        logits = jnp.where(mask[..., None], logits, 0)
    # XLA computes the maximum and the sum only once if a softmax also needs them.
    largest = lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    total = jnp.exp(logits - largest).sum(axis=-1, keepdims=True)
    squares = (largest + jnp.log(total))[..., 0] ** 2
    if mask is None:
        return squares, jnp.ones_like(squares)
    return jnp.where(mask, squares, 0), mask.astype(squares.dtype)


def sum_of_columns(
    first: jax.Array,
    *others: jax.Array,
    counted: jax.Array | None = None,
    num_counted: int = 0,
) -> jax.Array:
    """Return sums over all leading axes in one array [E + n + ``num_counted``].

    The array contains the sums of ``first`` [..., E] and of the n arrays ``others`` [...]. The last
    numbers are how often ``counted`` [..., K] contains each integer below ``num_counted``.
    ``where`` joins the columns, because XLA would write the result of a concatenation to memory.
    """
    size, num_leading = first.shape[-1], first.ndim - 1
    start = size + len(others)  # the column that counts the integer 0
    column = lax.iota(jnp.int32, start + num_counted).reshape(*(1,) * num_leading, -1)
    columns = jnp.pad(first, [(0, 0)] * num_leading + [(0, len(others) + num_counted)])
    for i, x in enumerate(others):
        columns = jnp.where(column == size + i, x[..., None].astype(first.dtype), columns)
    if counted is not None:
        # Do not call ``sum`` over the axis K, because XLA would compute it in a separate kernel.
        of_k = (counted[..., k, None] == column - start for k in range(counted.shape[-1]))
        counts = functools.reduce(operator.add, (hit.astype(first.dtype) for hit in of_k))
        columns = jnp.where(column >= start, counts, columns)
    if num_leading > 1:
        # Without the barrier, XLA would merge both sums, and use only a few blocks of a GPU.
        columns = lax.optimization_barrier(columns.sum(axis=-2))
    return columns.sum(axis=tuple(range(columns.ndim - 1)))


@scopes.losses
def z_loss_of(total: jax.Array, num_tokens: jax.Array) -> jax.Array:
    return total / jnp.maximum(num_tokens, 1)


def update_select_bias(
    bias: ArrayLike,
    counts: ArrayLike,
    *,
    rate: float = 0.001,
    recenter: bool = False,
    axis_name: AxisNames = None,
) -> jax.Array:
    """Return the next ``select_bias``, which moves the load of each expert toward the mean load.

    The result is ``bias + rate * sign(mean(counts) - counts)``, which balances the load without a
    loss (DeepSeek-V3, arXiv:2412.19437, section 2.1.2; Wang et al., arXiv:2408.15664). Call it once
    after each training step. Do not store the bias among the parameters of the optimizer, because
    the bias has no gradient.

    The counts must include dropped choices. Otherwise the bias of an overloaded expert may rise.

    Args:
      bias: floats [..., E] of 32 bits or more. Leading axes are for layers.
      counts: integers or floats with the shape of ``bias``: the number of choices of each expert in
        the batch, before a capacity drops any. The comparison of integers with their mean is exact.
        The sum of the counts must be below 2**31.
      rate: a number above 0 by which a bias changes in one step. DeepSeek-V3 used 0.001.
      recenter: True to subtract the mean of the new bias from it. Otherwise, the mean may drift
          from step to step. The choices are the same in both cases.
      axis_name: names of mesh axes over which counts are first summed, such as ``"data"``, or None
        if the counts are already sums over all ranks. A second sum over the same ranks does not
        change the result, because the update reads only signs.

    Returns:
      The new bias, with the shape and dtype of ``bias``.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape or range, or an axis is not in scope.

    Example:
      ```python
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      bias = ma.update_select_bias(jnp.zeros(4), jnp.array([9, 5, 0, 6]), rate=0.5)
      print(bias)
      ```

      ```text
      [-0.5  0.   0.5 -0.5]
      ```
    """
    axes = _check_axes(axis_name)
    rate, recenter = check_factor("rate", rate), check_bool("recenter", recenter)
    bias, counts = _check_bias(bias), _check_counts(counts)
    if bias.ndim < 1 or not bias.shape[-1] or counts.shape != bias.shape:
        raise ValueError(
            "counts and bias must have the same shape [..., num_experts], with at least one "
            f"expert; got counts {short(counts)} and bias {short(bias)}. Pass one count and one "
            "bias for each expert of all ranks"
        )
    counts = sum_over(axes, counts.astype(_sum_dtype(counts.dtype)))
    bias += rate * _below_mean(lax.stop_gradient(counts)).astype(bias.dtype)
    return bias - bias.mean(axis=-1, keepdims=True) if recenter else bias


def quantile_select_bias(
    bias: ArrayLike, histogram: ArrayLike, k: int, *, axis_name: AxisNames = None
) -> jax.Array:
    """Return the ``select_bias`` with which all experts would have had equal loads.

    The method is quantile balancing (Su, https://kexue.fm/archives/11619), as in Kimi K3 (technical
    report, section 2.3.3, equations 13 and 14, and appendix D), Megatron-LM, TransformerEngine and
    torchtitan. Each token chooses k of E experts, and ``r[i, j]`` is the bias above which token i
    chooses expert j:

    ```
    r[i, j] = ((k + 1)-th highest score + bias of token i) - scores[i, j]
    b[j] = quantile(r[:, j], k / E), over all tokens
    next bias = b - mean(b)
    ```

    ``TopK.bias_histogram`` counts ``r`` in bins, and the quantile is interpolated linearly within a
    bin. Unlike ``update_select_bias``, the method needs no rate. It balances a skewed router in a
    few steps. Call it once after each training step. If small batches make the bias noisy, average
    it: ``0.9 * bias + 0.1 * next_bias``.

    Args:
      bias: floats [..., E] of 32 bits or more: the ``select_bias`` of the step. Leading axes are
        for layers.
      histogram: integers [..., E, N]: the ``TopK.bias_histogram`` of the step, added over its
        micro-batches.
      k: the number of experts of each token, 1 or more and below E.
      axis_name: names of mesh axes over which histograms are first summed, such as ``"data"``, or
          None if the histograms are already sums over all ranks.

    Returns:
      The new bias, with the shape and dtype of ``bias``. If the histogram is zero, the result is
      ``bias``.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape or range, or an axis is not in scope.

    Example:
      All four tokens prefer expert 0. After one step, each expert has two tokens:

      ```python
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      logits = jnp.array([[2.0, 0.0], [1.0, 0.4], [2.0, 1.0], [2.0, -2.0]])
      choose, bias = ma.TopK(1, score="sigmoid"), jnp.zeros(2)
      histogram = choose.bias_histogram(logits, select_bias=bias)
      bias = ma.quantile_select_bias(bias, histogram, k=1)
      print(choose(logits, select_bias=bias).ids[:, 0], bias.round(2))
      ```

      ```text
      [0 1 1 0] [-0.19  0.19]
      ```
    """
    axes, k = _check_axes(axis_name), check_int("k", k, least=1)
    bias, histogram = _check_bias(bias), _check_counts(histogram, "histogram")
    if not jnp.issubdtype(histogram.dtype, jnp.integer):
        raise TypeError(f"histogram must hold integers; got {short(histogram)}. Do not scale it")
    if bias.ndim < 1 or histogram.shape[:-1] != bias.shape or not histogram.size:
        raise ValueError(
            f"histogram must have the shape {list(bias.shape)} of bias and an axis of bins; got "
            f"{short(histogram)}. Pass the result of TopK.bias_histogram"
        )
    num_experts, num_bins = histogram.shape[-2:]
    if k >= num_experts:
        raise ValueError(f"k must be below the number of experts, {num_experts}; got {k}")
    counts = sum_over(axes, histogram.astype(_sum_dtype(histogram.dtype)))
    num_tokens = counts.sum(axis=-1, dtype=counts.dtype)
    # num_tokens * k / E is ``rank - part``, with ``part`` in [0, 1). Divide by E before the
    # product, because num_tokens * k may not fit into the dtype.
    whole, rest = jnp.divmod(num_tokens, num_experts)
    rank = whole * k - (-rest * k) // num_experts
    part = ((-rest * k) % num_experts).astype(bias.dtype) / num_experts
    is_before = jnp.cumsum(counts, axis=-1, dtype=counts.dtype) < rank[..., None]
    bin_of = is_before.sum(axis=-1, dtype=jnp.int32)
    before, inside = (
        jnp.where(mask, counts, 0).sum(axis=-1, dtype=counts.dtype)
        for mask in (is_before, one_hot(bin_of, num_bins))
    )
    share = ((rank - before).astype(bias.dtype) - part) / jnp.maximum(inside, 1).astype(bias.dtype)
    found = (bin_of.astype(bias.dtype) + share) * bin_width(bias, num_bins)
    return jnp.where(num_tokens > 0, found - found.mean(axis=-1, keepdims=True), bias)


def _sum_dtype(dtype: jnp.dtype) -> Any:
    if jnp.issubdtype(dtype, jnp.integer):
        return dtype if dtype.itemsize == 8 else jnp.dtype(jnp.int32)
    return accumulation_dtype(dtype)


def _below_mean(counts: jax.Array) -> jax.Array:
    """Return 1 for counts [..., E] below their mean, -1 for counts above it, 0 if equal."""
    num_experts = counts.shape[-1]
    total = counts.sum(axis=-1, keepdims=True, dtype=counts.dtype)
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        return jnp.sign(total - num_experts * counts)
    # Divide the total by E, because the product of a count and E may not fit into 32 bits.
    mean, rest = jnp.divmod(total, num_experts)
    return jnp.sign(mean - counts) + ((counts == mean) & (rest > 0)).astype(counts.dtype)


def _check_bias(value: object) -> jax.Array:
    bias = jnp.asarray(as_array(value))
    if not jnp.issubdtype(bias.dtype, jnp.floating) or bias.dtype.itemsize < 4:
        raise TypeError(
            "bias must hold floats of 32 bits or more, because smaller floats round updates away; "
            f"got {short(bias)}. Keep the bias in float32"
        )
    return bias


def _check_counts(value: object, name: str = "counts") -> jax.Array:
    counts = jnp.asarray(as_array(value))
    is_integer = jnp.issubdtype(counts.dtype, jnp.integer)
    if not is_integer and not jnp.issubdtype(counts.dtype, jnp.floating):
        raise TypeError(f"{name} must hold integers or floats; got {short(counts)}. Cast it")
    return counts


def _check_axes(axis_name: Any) -> tuple[str, ...]:
    """Return ``axis_name`` as a tuple of names, or raise an error if a name is not in scope."""
    if axis_name is None:
        return ()
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"axis_name must be a name of a mesh axis, a tuple of names, or None; got {axis_name!r}"
        )
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            raise ValueError(
                f"axis_name must name axes in scope; got {axis_name!r}, and {name!r} is not in "
                "scope. Call this inside jax.shard_map or inside jax.vmap(..., axis_name=...), or "
                "omit axis_name if the arrays hold all tokens"
            ) from None
    return tuple(names)


def _check_scores(value: object) -> jax.Array:
    """Return scores as an array. Raise an error if a value is negative and not traced."""
    scores = check_logits(value, "scores")
    if is_known(scores) and scores.size and (least := float(scores.min())) < 0:
        raise ValueError(
            f"scores must not be negative; got {short(scores)} with the number {least:.3g}. Pass "
            "the scores of TopK, or jax.nn.softmax(logits) in place of logits"
        )
    return scores
