"""Arrange the scales of quantized rows as grouped matrix products read them.

Scales travel row-major: [C, S], for C rows of S groups. ``scale_layout`` of a token format names
the layout of the result. Padding is zero bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class ScaleLayout(NamedTuple):
    """The functions that convert row-major scales to a layout and back."""

    shape: Callable[[int, int], tuple[int, ...]]
    """Maps (C, S) to the shape of the scales in this layout."""
    lay_out: Callable[[jax.Array], jax.Array]
    """Maps scales [C, S] to the scales in this layout."""
    row_major: Callable[[jax.Array, int, int], jax.Array]
    """Maps (scales in this layout, C, S) to scales [C, S]."""


# "tiles": tiles of 128 rows and 4 groups, which cuBLAS and CUTLASS read. The scale of row r and
# group s of a tile is at [r % 32, r // 32 * 4 + s].


def _tiles_shape(num_rows: int, num_groups: int) -> tuple[int, ...]:
    return -(-num_rows // 128), -(-num_groups // 4), 32, 16


def _to_tiles(scales: jax.Array) -> jax.Array:
    shape = _tiles_shape(*scales.shape)
    bits = lax.bitcast_convert_type(scales, jnp.uint8)  # float8_e8m0fnu has no zero to pad with
    bits = jnp.pad(bits, ((0, -bits.shape[0] % 128), (0, -bits.shape[1] % 4)))
    bits = bits.reshape(shape[0], 4, 32, shape[1], 4).transpose(0, 3, 2, 1, 4)
    return lax.bitcast_convert_type(bits.reshape(shape), scales.dtype)


def _from_tiles(scales: jax.Array, num_rows: int, num_groups: int) -> jax.Array:
    row_tiles, group_tiles = scales.shape[:2]
    bits = lax.bitcast_convert_type(scales, jnp.uint8)
    bits = bits.reshape(row_tiles, group_tiles, 32, 4, 4).transpose(0, 3, 2, 1, 4)
    bits = bits.reshape(row_tiles * 128, group_tiles * 4)[:num_rows, :num_groups]
    return lax.bitcast_convert_type(bits, scales.dtype)


LAYOUTS = {
    # The scales of a group of columns are adjacent, and start at multiples of 16 bytes. DeepGEMM
    # reads this layout as its "TMA-aligned and transposed" scales of the left operand.
    "columns": ScaleLayout(
        shape=lambda num_rows, num_groups: (num_groups, num_rows + -num_rows % 4),
        lay_out=lambda scales: jnp.pad(scales, ((0, -scales.shape[0] % 4), (0, 0))).T,
        row_major=lambda scales, num_rows, num_groups: scales.T[:num_rows],
    ),
    "tiles": ScaleLayout(_tiles_shape, _to_tiles, _from_tiles),
}
