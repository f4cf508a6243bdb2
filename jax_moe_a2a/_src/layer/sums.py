"""Sum numbers and counts over ranks in one all-reduce."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from ..compat import align_varying


def sum_over(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Return the sums of an array over mesh axes."""
    (aligned,) = align_varying([x], axes)
    return lax.psum(aligned, axes) if axes else x


DIGITS = 24  # bits of a float32 mantissa


def exact_in_float32(most: int) -> bool:
    """Return True if float32 holds every integer from 0 to ``most`` exactly."""
    return most <= 2**DIGITS


def sum_counts(axes: tuple[str, ...], counts: jax.Array, most: int) -> jax.Array:
    """Return the sums of counts [N] over mesh axes, int32 [N].

    Counts travel as float32 together with losses and gradients, because XLA merges sums of one
    dtype into one all-reduce. The sums are exact, because counts that may be large are split into
    groups of a few bits.

    Args:
      counts: int32, or float32 below 2**24; not negative.
      most: the largest sum of a count, for example the number of choices of all ranks.
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
