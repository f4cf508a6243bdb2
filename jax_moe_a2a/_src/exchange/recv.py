"""Define ``Recv``, the result of ``dispatch``."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..checks import PyTree
from ..routing.two_level import AnyRouting
from .reference import own_rank


class SourceInfo(NamedTuple):
    """Source rank, token and choice of each row, int32 [C] each.

    All three are -1 for a row without a token. ``rank`` is 0 if tokens are replicated.
    """

    rank: jax.Array
    token: jax.Array
    k: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recv:
    """The result of ``dispatch`` on a rank. It is a pytree.

    C is the capacity, and L the number of local experts. Rows are sorted by local expert, then
    source rank, token and choice. Padding rows and the tail (the rows after the last expert's
    padding) are zero. With ``tail="unspecified"``, the tail has any values.
    """

    rows: PyTree
    """Rows like ``x``, with leading axis C. Rows that stay quantized are ``Quantized``."""
    weights: jax.Array | None
    """[C] float32, or float64 if ``topk_weights`` is float64: the router weight of each row. None
    without ``topk_weights``."""
    group_sizes: jax.Array
    """[L] int32: number of rows of each local expert, padding included. ``grouped_dot`` and
    ``lax.ragged_dot`` accept this array."""
    row_offsets: jax.Array
    """[L + 1] int32: first row of each local expert, and the end of the last expert's rows."""
    expert_ids: jax.Array
    """[L] int32: global id of each local expert."""
    src_info: SourceInfo
    """Source rank, token and choice of each row."""
    num_rows: jax.Array
    """[] int32: number of rows with a token."""
    num_dropped: jax.Array
    """[] int32: number of rows that this rank dropped because the capacity was too small."""
    num_invalid: jax.Array
    """[] int32: number of this rank's ids outside [-1, num_experts). These ids send nothing."""
    routing: AnyRouting
    """The routing of this dispatch. Pass it to other calls to route only once."""
    global_scales: jax.Array | None = None
    """[C] float32: the global scale of each row, if rows stay quantized and ``NvFp4`` has a scale
    for each token; otherwise None. ``NvFp4(global_scale=recv.global_scales)`` decodes the rows."""

    @property
    def row_experts(self) -> jax.Array:
        """Return the local expert of each row, [C] int32; -1 for a row without a token.

        Use this array to apply a bias or a scale of each expert. Each access computes it. A batched
        ``Recv``, as ``vmap`` returns it, is not supported.
        """
        rows = jnp.arange(self.src_info.rank.shape[0], dtype=jnp.int32)
        ends = self.row_offsets[1:]
        expert = jnp.sum(rows[:, None] >= ends[None], axis=-1, dtype=jnp.int32)
        return jnp.where(self.src_info.rank < 0, jnp.int32(-1), expert)


def recv_of(
    routing: AnyRouting,
    rows: PyTree,
    weights: jax.Array | None,
    global_scales: jax.Array | None,
) -> Recv:
    local = jnp.arange(routing.num_local_experts, dtype=jnp.int32)
    expert_ids = own_rank(routing.group) * routing.num_local_experts + local
    ends = jnp.cumsum(routing.group_sizes, dtype=jnp.int32)
    return Recv(
        rows=rows,
        weights=weights,
        group_sizes=routing.group_sizes,
        row_offsets=jnp.concatenate([jnp.zeros_like(ends[:1]), ends]),
        expert_ids=expert_ids,
        src_info=SourceInfo(rank=routing.row_rank, token=routing.row_token, k=routing.row_k),
        num_rows=routing.num_rows,
        num_dropped=routing.num_dropped,
        num_invalid=routing.num_invalid,
        routing=routing,
        global_scales=global_scales,
    )
