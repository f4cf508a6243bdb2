"""Define ``choose_p``, which chooses the experts with the highest keys for each token.

``choose_p`` has the operands keys and values, floats [*B, E], and an optional mask, booleans [*B].
It returns the ids of the experts with the highest keys, int32 [*B, K], their weights [*B, K] and
their values [*B, K]. In masked tokens, ids are -1, and weights and values are 0. The parameters are
``k`` (K), ``groups`` and ``weighing``. The kernel for NVIDIA GPUs and the JAX composition choose
equal ids, because both add the keys of a group in the same order.

The ids have no derivative. Chosen values are linear in ``values``, and determine the weights.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from .. import compat, paths
from ..ad import is_zero, zero_tangent
from ..checks import short
from ..group import native
from ..grouped.primitives import bind
from ..paths import Choice

TARGET = "moe_a2a_choose"

choose_p = compat.Primitive(TARGET)
choose_p.multiple_results = True


class Groups(NamedTuple):
    """The parameters of a choice among groups of consecutive experts, as in ``TopK``."""

    num_groups: int
    top_groups: int
    """A token chooses only from this many groups: the groups with the highest values."""
    top_in_group: int
    """The value of a group is the sum of its ``top_in_group`` highest keys."""


class Weighing(NamedTuple):
    """A function that computes the weights of choices from the chosen values."""

    renormalizes: bool
    """True if the weights are the softmax of the values, or of their log-sigmoids if
    ``is_sigmoid``. False if the weights are the values."""
    is_sigmoid: bool
    scale: float

    def __call__(self, chosen: jax.Array, counts: jax.Array | None = None) -> jax.Array:
        """Return weights of chosen values. The softmax ignores choices with False in ``counts``."""
        if not self.renormalizes:
            return chosen * self.scale
        logs = jax.nn.log_sigmoid(chosen) if self.is_sigmoid else chosen
        if counts is not None:
            logs = jnp.where(counts, logs, -jnp.inf)
        # The softmax of log(scores) is scores / sum(scores), without the risk of 0 / 0.
        return jax.nn.softmax(logs) * self.scale

    def tangent(self, weights: jax.Array, chosen: jax.Array, d_chosen: jax.Array) -> jax.Array:
        """Return the tangent of ``weights``, from the tangent ``d_chosen`` of ``chosen``."""
        if not self.renormalizes:
            return d_chosen * self.scale
        d_logs = d_chosen * jax.nn.sigmoid(-chosen) if self.is_sigmoid else d_chosen
        mean = (weights * d_logs).sum(axis=-1, keepdims=True) / self.scale
        return weights * (d_logs - mean)


def choose(
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array | None,
    *,
    k: int,
    groups: Groups | None,
    weighing: Weighing,
) -> tuple[jax.Array, jax.Array]:
    """Return the ids [..., K] of the experts with the highest keys [..., E], from high to low, and
    their weights [..., K]. ``weighing`` computes the weights from the values [..., E] of these
    experts. Keys have no gradient. ``mask`` [...] is False for tokens that choose no expert."""
    operands = (lax.stop_gradient(keys), values, *([] if mask is None else [mask]))
    ids, weights, _ = bind(choose_p, *operands, k=k, groups=groups, weighing=weighing)
    return ids, weights


def best(keys: jax.Array, number: int) -> tuple[jax.Array, jax.Array]:
    """Return the highest keys and their indices. Among equal keys, the lowest index is first."""
    # ``top_k`` sorts 0.0 before -0.0, so ``where`` replaces -0.0. XLA would remove ``keys + 0.0``.
    values, ids = lax.top_k(jnp.where(keys == 0, 0.0, keys), number)
    # The minimum does not change the ids. Without it, a program over Auto axes whose only result is
    # the ids would return zeros on GPUs and TPUs (https://github.com/openxla/xla/issues/49005).
    return values, jnp.minimum(ids, keys.shape[-1] - 1)


def at(values: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the values of the ids [..., K], with 0 for ids outside [0, E). This is a sum,
    because a gather would need a sharding over Explicit axes, and its transpose is a scatter."""
    chosen = one_hot(ids, values.shape[-1])
    return jnp.where(chosen, values[..., None, :], 0).sum(axis=-1)


def one_hot(ids: jax.Array, num: int) -> jax.Array:
    """Return booleans [..., num]: True at the index that equals the id."""
    ids = ids[..., None]
    return ids == lax.broadcasted_iota(ids.dtype, (1,) * (ids.ndim - 1) + (num,), ids.ndim - 1)


def _only_best_groups(keys: jax.Array, groups: Groups) -> jax.Array:
    """Return the keys, with minus infinity outside the token's ``top_groups`` groups."""
    num_groups, top_groups, top_in_group = groups
    grouped = keys.reshape(*keys.shape[:-1], num_groups, keys.shape[-1] // num_groups)
    highest = best(grouped, top_in_group)[0]
    # Add the keys from high to low, as the kernel does.
    values = functools.reduce(operator.add, (highest[..., i] for i in range(top_in_group)))
    is_best = one_hot(best(values, top_groups)[1], num_groups).any(axis=-2)
    return jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(keys.shape)


def _composition(
    keys: jax.Array,
    values: jax.Array,
    *masks: jax.Array,
    k: int,
    groups: Groups | None,
    weighing: Weighing,
) -> list[jax.Array]:
    ids = best(keys if groups is None else _only_best_groups(keys, groups), k)[1]
    chosen = at(values, ids)
    results = [ids, weighing(chosen), chosen]
    for mask in masks:
        results = [jnp.where(mask[..., None], x, -1 if x is ids else 0) for x in results]
    return results


def _kernel(
    *operands: jax.Array, k: int, groups: Groups | None, weighing: Weighing
) -> list[jax.Array]:
    *lead, num_experts = operands[0].shape
    tokens = math.prod(lead)
    flat = [x.reshape(tokens, *x.shape[len(lead) :]) for x in operands]
    if len(operands) == 2:  # no mask
        flat.append(jnp.zeros(0, jnp.bool_))
    results = [jax.ShapeDtypeStruct((tokens, k), t) for t in (jnp.int32, *[jnp.float32] * 2)]
    attributes: dict[str, Any] = (groups or Groups(1, 1, 1))._asdict()
    attributes |= dict(renormalizes=int(weighing.renormalizes), scale=float(weighing.scale))
    attributes |= dict(is_sigmoid=int(weighing.is_sigmoid))
    return [x.reshape(*lead, k) for x in native.call_product(TARGET, results, flat, **attributes)]


def why_no_kernel(keys: Any, groups: Groups | None = None) -> str:
    """Return why no kernel on this process's GPUs can choose from these keys, or ''."""
    if keys.dtype != jnp.float32:
        return f"the kernel compares float32 numbers; got {short(keys)}"
    if why := native.why_no_local_kernel():
        return why
    most = native.limit("MAX_CHOICE_EXPERTS")
    num_groups = 1 if groups is None else groups.num_groups
    # The kernel uses an equal number of lanes of a warp for each group.
    padded = 1 << (num_groups - 1).bit_length()
    if padded > 32 or keys.shape[-1] // num_groups * padded > most:
        return (
            f"the kernel chooses from at most 32 groups and {most} experts, with the number of "
            f"groups rounded up to a power of two; got {num_groups} groups and {keys.shape[-1]} "
            "experts"
        )
    return ""


def _cuda(ctx: Any, *operands: Any, **params: Any) -> Choice:
    if compat.is_partitioned(ctx):
        why = "XLA divides the program among devices: call it in jax.shard_map"
    else:
        why = why_no_kernel(ctx.avals_in[0], params["groups"])
    return native.choose_kernel(ctx, operands, params, _kernel, why, _composition, "lax.top_k")


def _abstract(keys: Any, *_: Any, k: int, **__: Any) -> list[Any]:
    shape, tail = (*keys.shape[:-1], k), (*keys.sharding.spec[:-1], None)
    return [compat.result_aval(keys, shape, t, tail) for t in (jnp.int32, keys.dtype, keys.dtype)]


def _jvp(
    primals: compat.Primals, tangents: compat.Tangents, *, weighing: Weighing, **params: Any
) -> Any:
    outs = bind(choose_p, *primals, weighing=weighing, **params)
    ids, weights, chosen = outs
    d_values: Any = tangents[1]
    if is_zero(d_values):
        return outs, list(map(zero_tangent, outs))
    d_chosen = at(d_values, ids)
    d_weights = weighing.tangent(weights, chosen, d_chosen)
    return outs, [zero_tangent(ids), d_weights, d_chosen]


def _batch(args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
    (size,) = {arg.shape[dim] for arg, dim in zip(args, dims) if dim is not None}
    arrays = [batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims)]
    return bind(choose_p, *arrays, **params), (0, 0, 0)


choose_p.def_impl(functools.partial(compat.apply_primitive, choose_p))
choose_p.def_abstract_eval(_abstract)
ad.primitive_jvps[choose_p] = _jvp
batching.primitive_batchers[choose_p] = _batch
mlir.register_lowering(
    choose_p, lambda ctx, *operands, **params: compat.lower_fun(ctx, _composition, operands, params)
)
mlir.register_lowering(choose_p, paths.lowering(choose_p, _cuda), platform="cuda")
