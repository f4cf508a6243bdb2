"""Compute the bytes of payload arrays in their slots, and list the dtypes that kernels can sum."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...formats import formats
from ...formats.formats import NvFp4, TokenFormat
from ...group import native

SUMMED_DTYPES = tuple(jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))
FORMAT_CODES = {getattr(formats, name): code for name, code in native.format_codes().items()}
FLOAT32_BYTES = 4
VECTOR_BYTES = 16  # what a thread loads at once


def row_bytes(aval: Any, itemsize: int | None = None) -> int:
    """Return the bytes of one token or row of an array [T, ...] or [C, ...]."""
    return math.prod(aval.shape[1:]) * (itemsize or aval.dtype.itemsize)


def is_sub_byte(aval: Any) -> bool:
    """Return True if several elements of the array share a byte."""
    dtype = aval.dtype
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8
    if jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    return bits < 8


def encoded_row_bytes(aval: Any, fmt: TokenFormat) -> list[int]:
    """Return the bytes of the values and of the scales of a row."""
    numbers = math.prod(aval.shape[1:])
    values, scales = numbers // fmt.values_per_item, numbers // fmt.group_size
    return [values, scales * jnp.dtype(fmt.scale_dtype).itemsize]


def global_scale(fmt: TokenFormat | None) -> np.float32:
    """Return the global scale of a format as an attribute; 1 if the format has no global scale."""
    return np.float32(fmt.global_scale if isinstance(fmt, NvFp4) else 1)


def sum_bytes(aval: Any, wire: Any) -> int:
    """Return the bytes of a partial sum of a row in its slot."""
    if isinstance(wire, TokenFormat):  # `encoded_stride` of cuda/token_format.h
        parts = encoded_row_bytes(aval, wire)
        return sum(-(-part // VECTOR_BYTES) * VECTOR_BYTES for part in parts)
    return row_bytes(aval, itemsize=None if wire is None else jnp.dtype(wire).itemsize)
