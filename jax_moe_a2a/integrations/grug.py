"""Apply the experts of Marin's Grug models, with the interface of Grug's backends."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

import jax_moe_a2a as ma

from ._axes import group_over

REMAT_SAVE_NAMES = (ma.ROWS_CHECKPOINT_NAME, ma.ROUTING_CHECKPOINT_NAME)
"""Checkpoint names for ``jax.checkpoint_policies.save_only_these_names``.

If a policy saves these names, the backward pass neither routes nor dispatches the tokens again. Add
them to the names that the model saves."""


def moe_mlp(
    x: jax.Array,
    selected_experts: jax.Array,
    combine_weights: jax.Array,
    token_valid: jax.Array | None,
    w13: jax.Array,
    w2: jax.Array,
    *,
    activation_fn: Callable[[jax.Array], jax.Array] = jax.nn.silu,
    num_experts: int,
    capacity_factor: float | None = 1.25,
    axis_name: str = "expert",
    token_sharding_axes: tuple[str, ...] = ("replica_dcn", "data", "expert"),
    group: ma.Group | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Apply the routed experts to this rank's tokens, inside ``jax.shard_map``.

    This function can replace the function that Grug passes to ``shard_map`` for an expert-parallel
    backend. It needs no mesh, because sizes come from the axes in scope, and devices from the
    program. So a model with only an abstract mesh, with Explicit axes, can use it.

    Args:
      x: this rank's tokens, floats [T, H].
      selected_experts: global expert ids, integers [T, K], K <= 32.
      combine_weights: router weights, floats [T, K].
      token_valid: booleans [T], False for padding, which sends nothing and returns zeros; or None.
      w13: gate and up weights of this rank's experts, [L, H, 2 * I], gate first.
      w2: down weights of this rank's experts, [L, I, H].
      activation_fn: a function that maps the gate [C, I] to [C, I].
      num_experts: number of experts of all ranks together: L times the size of ``axis_name``.
      capacity_factor: rows of a rank as a multiple of the balanced load, or None for the worst
        case. Rows that do not fit are dropped. The last choices of all tokens are dropped first.
      axis_name: the mesh axis over which experts are sharded.
      token_sharding_axes: mesh axes over which tokens are sharded. The number of dropped choices
        is summed over these axes; axes that are not in scope are skipped.
      group: the ranks, for options such as ``num_sms`` or ``timeout``; its axis is ``axis_name``.
        None makes a group with the default options.

    Returns:
      A pair: the weighted sums of the experts' outputs, [T, H] in the dtype of ``x``, and the
      number of dropped choices on all ranks, [] int32, equal on all ranks.

    Raises:
      TypeError: if an array has the wrong dtype, as in ``ma.dispatch``.
      ValueError: if an array has the wrong shape or ``axis_name`` is not in scope.
    """
    group = group_over(axis_name, group)
    if w13.shape[0] * group.size != num_experts:
        raise ValueError(
            f"num_experts must be the {w13.shape[0]} local experts of w13 times the {group.size} "
            f"ranks of axis {axis_name!r}; got {num_experts}"
        )
    ids = selected_experts
    if token_valid is not None:
        ids = jnp.where(token_valid[:, None], ids, -1)
    routing = ma.route(ids, group=group, num_experts=num_experts, capacity_factor=capacity_factor)
    y = ma.moe_mlp(x, routing, combine_weights, w13, w2, activation=ma.gated(activation_fn))
    return y, lax.psum(routing.num_dropped, _in_scope(token_sharding_axes))


def _in_scope(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes that are manual in the enclosing ``shard_map``."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes if axis in manual)
