"""Replace the exchange of MaxText's ``RoutedMoE`` in the body of its ``shard_map``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

import jax_moe_a2a as ma

from ._axes import group_over


@dataclasses.dataclass(frozen=True)
class RouteOutput:
    """The data that the experts and ``unsort_and_unpermute`` need with the rows. It is a
    pytree.

    C is the number of rows of a rank and L the number of its experts.
    """

    group_sizes: jax.Array
    """[L] int32: rows of each local expert, for the grouped matrix product."""
    selected_experts: jax.Array
    """[C] int32: local expert of each row, for the biases; 0 for a row without a token."""
    num_dropped: jax.Array
    """[] int32: rows of this rank that were dropped because ``ragged_buffer_factor`` was too
    small."""
    recv: ma.Recv
    """The result of ``ma.dispatch``, for example for ``ma.expert_load``."""
    weighted: bool
    """True if outputs are multiplied by router weights; False if the rows were scaled instead."""


jax.tree_util.register_dataclass(
    RouteOutput,
    data_fields=["group_sizes", "selected_experts", "num_dropped", "recv"],
    meta_fields=["weighted"],
)


def ra2a_and_route(
    x: jax.Array,
    weights: jax.Array,
    selected_experts: jax.Array,
    *,
    num_experts: int,
    ragged_buffer_factor: float = -1.0,
    is_batch_sharded_by_expert: bool = True,
    scale_inputs: bool = False,
    axis_name: str = "expert",
    group: ma.Group | None = None,
) -> tuple[jax.Array, RouteOutput]:
    """Send tokens to the ranks of their experts, grouped by expert, inside ``jax.shard_map``.

    This function replaces ``permute``, the gathered group sizes, ``get_all_to_all_params``, the
    first ``ragged_all_to_all`` and ``local_permute``.

    Args:
      x: this rank's tokens, floats [B, S, H].
      weights: router weights, floats [B, S, K], as ``get_topk`` returns them.
      selected_experts: global expert ids, integers [B, S, K]; -1 means no expert.
      num_experts: number of experts of all ranks together.
      ragged_buffer_factor: rows of a rank as a multiple of the balanced load; rows that do not fit
        are dropped and counted. 0 or less means the worst case, which drops nothing.
      is_batch_sharded_by_expert: False if all ranks hold the same tokens, for example when decoding
        one sequence. Then no token is sent, and ``unsort_and_unpermute`` sums over the ranks.
      scale_inputs: True to multiply each row by the sigmoid of its weight before the experts, and
        to sum their outputs without weights, as in Llama 4.
      axis_name: the mesh axis over which experts are sharded.
      group: the ranks, for options such as ``num_sms`` or ``timeout``; its axis is ``axis_name``.
        None makes a group with the default options.

    Returns:
      Rows [C, H] in the dtype of ``x``, sorted by local expert and zero after the last one, and the
      ``RouteOutput``.

    Raises:
      TypeError: if an array has the wrong dtype, as in ``ma.dispatch``.
      ValueError: if an array has the wrong shape or ``axis_name`` is not in scope.
    """
    top_k = selected_experts.shape[-1]
    weights = weights.reshape(-1, top_k)
    if scale_inputs:
        weights = jax.nn.sigmoid(weights.astype(jnp.float32))
    recv = ma.dispatch(
        x.reshape(-1, x.shape[-1]),
        selected_experts.reshape(-1, top_k),
        weights,
        group=group_over(axis_name, group),
        num_experts=num_experts,
        capacity_factor=ragged_buffer_factor if ragged_buffer_factor > 0 else None,
        replicated=not is_batch_sharded_by_expert,
    )
    rows = recv.rows
    if scale_inputs:
        assert recv.weights is not None
        rows = (rows.astype(jnp.float32) * recv.weights[:, None]).astype(rows.dtype)
    experts = jnp.maximum(recv.row_experts, 0)
    return rows, RouteOutput(recv.group_sizes, experts, recv.num_dropped, recv, not scale_inputs)


def unsort_and_unpermute(
    outputs: jax.Array,
    routing: RouteOutput,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Return the experts' outputs to the source ranks, and sum them, inside ``jax.shard_map``.

    This function replaces ``unsort_output_and_ra2a`` and ``unpermute``. Sums are computed in
    float32.

    Args:
      outputs: the experts' outputs, floats [C, H'] in the order of the rows. H' may be a part of
        the hidden size, for example after ``psum_scatter`` over a tensor axis.
      routing: the ``RouteOutput`` of the rows.
      batch_size: B.
      sequence_length: S.
      dtype: dtype of the result. None means the dtype of ``outputs``.

    Returns:
      [B, S, H']: for each token the sum over its choices, weighted unless the rows were scaled.

    Raises:
      TypeError: if ``outputs`` has the wrong dtype, as in ``ma.combine``.
      ValueError: if ``outputs`` has the wrong shape.
    """
    recv = routing.recv
    y = ma.combine(outputs, recv, weights="recv" if routing.weighted else None)
    if recv.routing.replicated:
        y = lax.psum(y, recv.routing.group.axis_name)
    return y.reshape(batch_size, sequence_length, -1).astype(dtype or outputs.dtype)
