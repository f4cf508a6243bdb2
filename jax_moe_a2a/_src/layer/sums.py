"""Sum arrays over ranks, such that XLA can merge the sums into one all-reduce."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from ..compat import align_varying


def sum_over(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    (aligned,) = align_varying([x], axes)
    return lax.psum(aligned, axes) if axes else x


DIGITS = 24  # number of bits of a float32 mantissa


def exact_in_float32(most: int) -> bool:
    """Return True if float32 can represent every integer from 0 to ``most``."""
    return most <= 2**DIGITS


def sum_counts(axes: tuple[str, ...], counts: jax.Array, most: int) -> jax.Array:
    """Return the sums of counts [N] over mesh axes, int32 [N].

    The sums are in float32, like sums of losses and gradients, because XLA merges sums of one dtype
    into one all-reduce. If float32 cannot represent all possible sums, the call splits the counts
    into groups of a few bits. Therefore the results are exact.

    Args:
      counts: int32, or float32 below 2**24; not negative.
      most: an upper bound of the sums, for example the number of choices of all ranks.
    """
    ranks = math.prod(map(lax.axis_size, axes))
    if exact_in_float32(most):
        return sum_over(axes, counts.astype(jnp.float32)).astype(jnp.int32)
    counts, bits = counts.astype(jnp.int32), DIGITS - (ranks - 1).bit_length()
    shifts = range(0, most.bit_length(), bits)
    pieces = jnp.stack([(counts >> shift) & (2**bits - 1) for shift in shifts])
    found = sum_over(axes, pieces.astype(jnp.float32)).astype(jnp.int32)
    places = jnp.asarray(shifts, jnp.int32)[:, None]
    return (found << places).sum(axis=0, dtype=jnp.int32)
