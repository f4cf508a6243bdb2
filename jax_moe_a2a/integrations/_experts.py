"""The experts of one layer between a dispatch and a combine: what all integrations share."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jax_moe_a2a as ma
from jax_moe_a2a._src.arguments import Tail

Activation = Callable[[jax.Array], jax.Array]


def gated(activation: Activation) -> Activation:
    """Return the function ``[..., 2 * I] -> [..., I]`` that multiplies activation(gate) by up."""

    def gate_and_up(hidden: jax.Array) -> jax.Array:
        gate, up = jnp.split(hidden, 2, axis=-1)
        return activation(gate) * up

    return gate_and_up


def axis_size(axis_name: str) -> int:
    """Return the size of a mesh axis that is in scope.

    Raises:
      ValueError: if the axis is not in scope.
    """
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis {axis_name!r} is not in scope; call this inside jax.shard_map over a mesh with "
            "that axis (of size 1 without expert parallelism)"
        ) from None


def group_over(axis_name: str) -> ma.Group:
    """Return the group of a mesh axis that is in scope; the devices come from the program."""
    return ma.Group(axis_name=axis_name, size=axis_size(axis_name))


def routed_mlp(
    x: jax.Array,
    topk_ids: jax.Array,
    topk_weights: jax.Array,
    w_in: tuple[jax.Array, ...],
    w_out: jax.Array,
    *,
    activation: Callable[..., jax.Array],
    group: ma.Group,
    num_experts: int,
    biases: tuple[jax.Array, ...] | None = None,
    capacity_factor: float | None = None,
    replicated: bool = False,
    names: tuple[str, str, str] | None = None,
) -> tuple[jax.Array, ma.Recv]:
    """Send tokens to their experts, apply a two-layer network there, and sum what comes back.

    Args:
      x: this rank's tokens, floats [T, H].
      topk_ids: global expert ids, integers [T, K]; -1 means no expert.
      topk_weights: router weights, floats [T, K].
      w_in: first weights of this rank's experts, one or several arrays [L, H, I'].
      w_out: second weights of this rank's experts, [L, I, H].
      activation: maps the products of the rows and each of ``w_in``, [C, I'], to [C, I].
      group: the ranks.
      num_experts: number of experts of all ranks together.
      biases: None, or a bias for each of ``w_in``, [L, I'], and the one of ``w_out``, [L, H].
      capacity_factor: rows of a rank as a multiple of the balanced load; None never drops.
      replicated: True if all ranks hold the same tokens. The result is then a partial sum.
      names: checkpoint names of the received rows, of the result of the first product, and of the
        experts' outputs; or None.

    Returns:
      Weighted sums, [T, H] in the dtype of the experts' outputs, and the ``Recv``.
    """
    recv = ma.dispatch(
        x,
        topk_ids,
        topk_weights,
        group=group,
        num_experts=num_experts,
        capacity_factor=capacity_factor,
        replicated=replicated,
        tail="unspecified",
    )
    rows, weights = recv.rows, recv.weights
    hidden_name = out_name = None
    if names is not None:
        rows_name, hidden_name, out_name = names
        # Combine needs the weights in the backward pass, so they are saved with the rows.
        rows, weights = checkpoint_name((rows, weights), rows_name)
    # The gradient of a bias sums all rows, so rows without a token must not hold NaN.
    tail: Tail = "unspecified" if biases is None else "zero"

    def product(rows: jax.Array, w: jax.Array, which: int, name: str | None) -> jax.Array:
        out = ma.grouped_dot(rows, w, recv.group_sizes, tail=tail)
        if biases is not None:
            out = out + biases[which][jnp.maximum(recv.row_experts, 0)]
        return out if name is None else checkpoint_name(out, name)

    hidden = [product(rows, w, i, hidden_name) for i, w in enumerate(w_in)]
    y = product(activation(*hidden), w_out, -1, out_name)
    return ma.combine(y, recv, weights=weights), recv
