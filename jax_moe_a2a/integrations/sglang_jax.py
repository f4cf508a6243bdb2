"""Apply the experts of sglang-jax's ``EPMoE`` in the body of its ``shard_map``."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import lax

import jax_moe_a2a as ma

from ._axes import group_over


def ep_moe(
    hidden_states: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    wi_0: jax.Array,
    wi_1: jax.Array,
    wo: jax.Array,
    *,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    scatter_on_tensor: bool = False,
    expert_axis: str = "expert",
    tensor_axis: str = "tensor",
    group: ma.Group | None = None,
) -> jax.Array:
    """Apply the experts to tokens that all ranks hold, inside ``jax.shard_map``.

    This function can replace ``EPMoE._forward`` if the weights are not quantized. No token is sent.
    Each rank computes the choices of its own experts, and the last step is a sum over both axes.

    Args:
      hidden_states: tokens, floats [T, H] or [B, S, H], equal on all ranks.
      topk_weights: router weights, floats [T, K] or [B, S, K].
      topk_ids: global expert ids, integers like ``topk_weights``; -1 means no expert.
      wi_0: gate weights of this rank, [L, H, I], for L local experts. I is the share of the
        experts' width on this rank.
      wi_1: up weights of this rank, like ``wi_0``.
      wo: down weights of this rank, [L, I, H].
      activation: a function that maps the gate [C, I] to [C, I].
      scatter_on_tensor: True to return only this rank's slice of the first axis, which is then
        split over ``tensor_axis``.
      expert_axis: the mesh axis over which experts are sharded.
      tensor_axis: the mesh axis over which the width of each expert is sharded.
      group: the ranks, for options such as ``num_sms`` or ``timeout``; its axis is ``expert_axis``.
        None makes a group with the default options.

    Returns:
      The weighted sums of the experts' outputs, with the shape and dtype of ``hidden_states``. With
      ``scatter_on_tensor``, the first axis is divided by the size of ``tensor_axis``.

    Raises:
      TypeError: if an array has the wrong dtype, as in ``ma.dispatch``.
      ValueError: if an array has the wrong shape or ``expert_axis`` is not in scope.
    """
    group, top_k = group_over(expert_axis, group), topk_ids.shape[-1]
    recv = ma.dispatch(
        hidden_states.reshape(-1, hidden_states.shape[-1]),
        topk_ids.reshape(-1, top_k),
        topk_weights.reshape(-1, top_k),
        group=group,
        num_experts=wi_0.shape[0] * group.size,
        replicated=True,
        tail="unspecified",
    )
    dot = functools.partial(ma.grouped_dot, group_sizes=recv.group_sizes)
    y = ma.combine(dot(activation(dot(recv.rows, wi_0)) * dot(recv.rows, wi_1), wo), recv)
    y = y.reshape(hidden_states.shape).astype(hidden_states.dtype)
    if scatter_on_tensor:
        y = lax.psum_scatter(y, tensor_axis, scatter_dimension=0, tiled=True)
        return lax.psum(y, expert_axis)
    return lax.psum(y, (expert_axis, tensor_axis))
