"""Exchange equal blocks between all ranks, for the portable path.

A primitive, because CPUs compile small blocks in less time another way. It has no derivative and no
batching rule, because the portable path is traced when a program is lowered.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.interpreters import mlir

from .. import compat
from ..group.group import Group

# XLA:CPU compiles one copy kernel for each block of an all_to_all, and a concatenation of as many
# operands. An all_gather has none, but moves and holds the blocks of all pairs of ranks.
MAX_GATHERED_BYTES = 4 * 2**20

swap_p = compat.Primitive("moe_a2a_swap")


def swap(blocks: jax.Array, group: Group) -> jax.Array:
    """Send block r of [R, ...] to rank r. Return the blocks from all ranks, [R, ...], bit for bit
    unless XLA computes the collectives of the dtype in another dtype."""
    if blocks.size == 0 or group.size == 1:
        return blocks
    return swap_p.bind(blocks, axis_name=group.axis_name)


def _all_to_all(blocks: jax.Array, *, axis_name: Any) -> jax.Array:
    return lax.all_to_all(blocks, axis_name, split_axis=0, concat_axis=0)


def _on_cpu(blocks: jax.Array, *, axis_name: Any) -> jax.Array:
    if len(blocks) * blocks.nbytes > MAX_GATHERED_BYTES:
        return _all_to_all(blocks, axis_name=axis_name)
    every = lax.all_gather(blocks, axis_name)
    return lax.dynamic_index_in_dim(every, lax.axis_index(axis_name), 1, keepdims=False)


swap_p.def_abstract_eval(lambda blocks, **_: blocks)
mlir.register_lowering(swap_p, mlir.lower_fun(_all_to_all, multiple_results=False))
mlir.register_lowering(swap_p, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
