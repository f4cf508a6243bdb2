"""Copy the weights of experts from their home ranks to the spare slots that have replicas.

An expert's weights are cut into pieces of equal size. One dispatch sends these pieces in place of
tokens, and spare slots take the place of experts. All ranks know the placement, so each rank
computes its routing without communication. The transpose is a combine, which adds the gradients of
replicas on the home rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat, scopes
from ..checks import PyTree, as_array, short
from ..exchange.dispatch_combine import DISPATCH
from ..exchange.record import Options
from ..exchange.reference import own_rank
from ..group.group import Group
from ..placement.types import Placement, check_placement
from ..plan.plan import RoutingArrays, number_slots, quotient, rows_of_slots, values_by_row
from ..routing.checks import GroupOrAxes, check_scope

FETCHED_CHECKPOINT_NAME = "moe_a2a_fetched"
"""Checkpoint name, a str, of the weights that ``fetch_experts`` returns.

If a policy of ``jax.checkpoint`` does not save this name, the backward pass fetches the weights
again."""

# If the largest array is cut, its pieces have at least this many elements, but under twice as many.
# Smaller pieces keep more SMs busy, but routing arrays have an entry per piece, rank and replica.
PIECE_ELEMENTS = 2**15


def fetch_experts(w: PyTree, placement: Placement, *, group: GroupOrAxes) -> PyTree:
    """Fetch the weights for this rank's spare slots from the home ranks of the experts.

    One exchange copies all arrays bit for bit. Call ``fetch_experts`` on every rank, where the
    group's axes are in scope. The gradient of ``w`` is the sum of the gradients of all replicas in
    spare slots, computed in float32 (float64 for float64 weights) in the order of ranks, and
    rounded once to the dtype of ``w``. Integers, and floats of 8 bits, have no gradient.

    Args:
      w: array [E / R, ...], or a pytree of arrays with this first axis: the weights of this rank's
        experts. Any dtype is allowed, for example FP8 values and their scales.
      placement: a placement in the home form for these ranks, without leading axes, equal on all
        ranks. Its arrays may be traced.
      group: the ranks, as in ``route``. A group of two levels is not supported.

    Returns:
      Arrays [S, ...] like ``w``: for each of this rank's S spare slots, the weights of its expert,
      or zeros for an empty slot.

    Raises:
      TypeError: if an argument has the wrong type or dtype, or the arrays of the placement have
        wrong shapes.
      ValueError: if an argument has the wrong shape, the placement is for another number of ranks
          or not in the home form, or the group has two levels.

    Example:
      Two ranks have two experts and a spare slot each. Both spare slots have expert 0:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      placement = ma.Placement.from_slots([0, 1, 0, 2, 3, 0], 4, num_ranks=2)
      group = ma.Group(axis_name="ep", size=2)
      fetch = lambda w: ma.fetch_experts(w, placement, group=group)
      print(jax.vmap(fetch, axis_name="ep")(jnp.array([[10.0, 11.0], [12.0, 13.0]])).tolist())
      ```

      ```text
      [[10.0], [10.0]]
      ```
    """
    found = check_scope(group)
    leaves, treedef = jax.tree.flatten(w)
    arrays = [jnp.asarray(as_array(leaf)) for leaf in leaves]
    num_experts = check_placement(placement, found.size).num_experts
    per_rank = num_experts // found.size
    for array in arrays:
        if array.ndim < 1 or array.shape[0] != per_rank:
            raise ValueError(
                f"w must hold arrays [E / R={per_rank}, ...], because the placement has "
                f"{num_experts} experts and the group {found.size} ranks; got {short(array)}"
            )
    return jax.tree.unflatten(treedef, fetch(arrays, placement, found))


@scopes.placement
def fetch(arrays: list[jax.Array], placement: Placement, group: Group) -> list[jax.Array]:
    num_experts, num_ranks = placement.num_experts, group.size
    check_placement(placement, num_ranks).check_home()
    placement = jax.tree.map(jnp.asarray, placement)
    if group.two_level:
        raise ValueError(
            f"group must not have two levels, in which weights are not fetched; got {group}. Pass "
            "Group(..., two_level=False), or weights of all slots"
        )
    spare = (placement.num_slots - num_experts) // num_ranks
    sizes = [int(np.prod(x.shape[1:])) for x in arrays]
    if not spare or not arrays or not max(sizes):
        return [jnp.zeros((spare, *x.shape[1:]), x.dtype) for x in arrays]
    num_pieces = 1 << max(0, (max(sizes) // PIECE_ELEMENTS).bit_length() - 1)
    routing = _in_pieces(_routing_of_experts(placement, own_rank(group), num_ranks), num_pieces)
    tokens = [_pieces_of(x, num_pieces) for x in arrays]
    # If a rank has several replicas of an expert, it sends one sum of their gradients, in float32.
    is_wide = any(x.dtype == jnp.float64 for x in tokens)
    options = Options(wire_dtype=None if is_wide else jnp.dtype(jnp.float32))
    params: dict[str, Any] = dict(num_leaves=len(tokens), num_choice_arrays=0, options=options)
    moved = DISPATCH.bind(tokens, routing, group=group, **params)
    found = [
        rows.reshape(spare, -1)[:, :size].reshape(spare, *x.shape[1:])
        for rows, size, x in zip(moved, sizes, arrays, strict=True)
    ]
    return compat.checkpoint_name(found, FETCHED_CHECKPOINT_NAME)


def _pieces_of(x: jax.Array, num_pieces: int) -> jax.Array:
    """Return an array [L, ...], cut into pieces [L * num_pieces, width] and padded with zeros."""
    flat = x.reshape(x.shape[0], -1)
    if more := -flat.shape[1] % num_pieces:
        flat = jnp.pad(flat, ((0, 0), (0, more)))
    return flat.reshape(x.shape[0] * num_pieces, -1)


def _routing_of_experts(placement: Placement, rank: jax.Array, num_ranks: int) -> RoutingArrays:
    """Return the routing of a rank, in which each expert is a token, and each spare slot is a row.
    Empty slots are padding, to which a dispatch writes zeros."""
    num_experts, num_slots = placement.num_experts, placement.num_slots
    per_rank, slots_of_rank = num_experts // num_ranks, num_slots // num_ranks
    spare = slots_of_rank - per_rank
    # The first slot of an expert is its home slot. Its other slots, [R, L, K], are the choices.
    slots = placement.expert_slots[:, 1:].reshape(num_ranks, per_rank, -1)
    choice_rank = jnp.where(slots >= 0, quotient(slots, slots_of_rank), -1)
    row = slots - choice_rank * slots_of_rank - per_rank
    is_here = choice_rank == rank
    numbered = number_slots(choice_rank, rank)
    by_row = partial(values_by_row, jnp.where(is_here, row, spare), spare)
    r, k = (jax.lax.broadcasted_iota(jnp.int32, slots.shape, axis) for axis in (0, 2))
    return RoutingArrays(
        token_slot=numbered.token_slot,
        slot_token=numbered.slot_token,
        choice_rank=jax.lax.dynamic_index_in_dim(choice_rank, rank, keepdims=False),
        slot_rows=rows_of_slots(numbered, is_here, row),
        row_rank=by_row(r),
        row_slot=by_row(numbered.here),
        row_k=by_row(k),
    )


def _in_pieces(routing: RoutingArrays, num: int) -> RoutingArrays:
    """Return the routing of pieces: each index t becomes t * num, ..., t * num + num - 1."""

    def numbered(x: jax.Array, axis: int) -> jax.Array:
        x = jnp.repeat(x, num, axis)
        piece = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) % num
        return jnp.where(x >= 0, x * num + piece, x)

    return RoutingArrays(
        token_slot=numbered(routing.token_slot, 0),
        slot_token=numbered(routing.slot_token, 1),
        choice_rank=jnp.repeat(routing.choice_rank, num, 0),
        slot_rows=numbered(routing.slot_rows, 1),
        row_rank=jnp.repeat(routing.row_rank, num, 0),
        row_slot=numbered(routing.row_slot, 0),
        row_k=jnp.repeat(routing.row_k, num, 0),
    )
