"""Compute grouped products with jnp and lax. These functions define the results of the primitives,
and run if there is no kernel.

``primitives.py`` describes the operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..ad import accumulation_dtype


def groups_of(sizes: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """Return two arrays, int32 [..., L]: the first row of each group, and its number of rows.

    A negative size becomes 0. Groups end at ``num_rows`` or before, because kernels do not check
    sizes.
    """
    sizes = jnp.clip(sizes, 0, num_rows)
    if sizes.shape[-1] * num_rows < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes, axis=-1, dtype=jnp.int32), num_rows)
    else:  # a plain sum could overflow
        add = lambda a, b: jnp.minimum(a, num_rows - b) + b
        ends = lax.associative_scan(add, sizes.astype(jnp.int32), axis=-1)
    starts = jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1)
    return starts, jnp.maximum(ends - starts, 0)


def arrays_of(w: Any) -> tuple[Any, ...]:
    """Return ``w`` if it is a tuple (home, spare); else return the tuple ``(w,)``."""
    return w if isinstance(w, tuple) else (w,)


def ragged_dot(
    rows: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool, dtype: jnp.dtype
) -> jax.Array:
    """Multiply rows [C, K] by w [L, K, N], or rows [C, N] by the transposed weights. Rows after the
    last group must be zero, and their results may have any values.

    The weights of groups without rows may be NaN, and ``lax.ragged_dot`` may multiply them by
    zeros. Therefore zeros replace these weights."""
    w = jnp.where((sizes > 0)[:, None, None], w, jnp.zeros_like(w))
    w = jnp.swapaxes(w, -1, -2) if transposed else w
    out = lax.ragged_dot(rows, w, sizes, preferred_element_type=accumulation_dtype(dtype))
    return out.astype(dtype)


def ragged_outer(x: jax.Array, y: jax.Array, sizes: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
    """Return [L, K, N]: for each group, the sum of outer products of its rows of x [C, K] and y [C,
    N]. Rows after the last group must be zero."""
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    out = lax.ragged_dot_general(
        x, y, sizes, dimensions, preferred_element_type=accumulation_dtype(dtype)
    )
    return out.astype(dtype)


def dot(
    rows: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *spare: jax.Array,
    transposed: bool,
    dtype: jnp.dtype,
    **_: object,
) -> jax.Array:
    """Multiply rows by the weights of their groups. Return [*B, C, N], or [*B, C, K] for products
    with the transposed weights. Results after the last group are zero.

    Spare weights have a separate product, because a concatenation would need memory for all
    weights.
    """
    columns = w.shape[-2] if transposed else w.shape[-1]
    shape = (*rows.shape[:-1], columns)
    if 0 in (*shape, *w.shape):
        return jnp.zeros(shape, dtype)

    def product(rows: jax.Array, w: jax.Array, cut: jax.Array) -> jax.Array:
        rows = _without_tail(rows, cut)
        out = ragged_dot(rows, w, cut, transposed=transposed, dtype=dtype)
        return _without_tail(out, cut)

    def of_one(rows: jax.Array, w: jax.Array, sizes: jax.Array, *spare: jax.Array) -> jax.Array:
        cut, num = groups_of(sizes, rows.shape[0])[1], w.shape[0]
        out = product(rows, w, cut[:num])
        for x in spare:
            start = jnp.sum(cut[:num], dtype=jnp.int32)
            others = product(jnp.roll(rows, -start, axis=0), x, cut[num:])
            is_home = jnp.arange(rows.shape[0], dtype=jnp.int32) < start
            out = jnp.where(is_home[:, None], out, jnp.roll(others, start, axis=0))
        return out

    operands = ((rows, 2), (w, 3), (sizes, 1), *((x, 3) for x in spare))
    return _for_each(of_one, rows.shape[:-2], *operands)


def outer(
    x: jax.Array,
    y: jax.Array,
    sizes: jax.Array,
    *,
    parts: tuple[tuple[int, ...], ...],
    dtype: jnp.dtype,
    **_: object,
) -> list[jax.Array]:
    """Return an array [*part, K, N] for each of ``parts``: for each group, the sum of outer
    products. A part is a shape: the leading axes, then the number of groups. If a leading axis has
    size 1 in the part, the result is also summed over this axis."""
    found, first = [], 0
    for *lead, num in parts:
        shape = (*x.shape[:-2], num, x.shape[-1], y.shape[-1])

        def of_one(
            x: jax.Array, y: jax.Array, sizes: jax.Array, first: int = first, num: int = num
        ) -> jax.Array:
            cut = groups_of(sizes, x.shape[0])[1]
            own = cut[first : first + num]
            if first:
                start = jnp.sum(cut[:first], dtype=jnp.int32)
                x, y = (jnp.roll(rows, -start, axis=0) for rows in (x, y))
            return ragged_outer(_without_tail(x, own), _without_tail(y, own), own, dtype=dtype)

        if 0 in (*shape, *x.shape):
            found.append(jnp.zeros((*lead, *shape[-3:]), dtype))
        else:
            sums = _for_each(of_one, x.shape[:-2], (x, 2), (y, 2), (sizes, 1))
            found.append(sum_lead(sums, tuple(lead)))
        first += num
    return found


def sum_lead(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    """Return sums over the leading axes that are 1 in ``lead``. These axes keep the size 1."""
    axes = tuple(i for i, size in enumerate(lead) if size != x.shape[i])
    if not axes:
        return x
    return jnp.sum(x, axes, dtype=accumulation_dtype(x.dtype), keepdims=True).astype(x.dtype)


def _without_tail(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return rows [C, H] with zeros after the last group."""
    end = jnp.sum(sizes, dtype=jnp.int32)
    is_in_group = jnp.arange(rows.shape[0], dtype=jnp.int32) < end
    return jnp.where(is_in_group[:, None], rows, jnp.zeros_like(rows))


def _for_each(
    of_one: Callable[..., jax.Array], lead: tuple[int, ...], *operands: tuple[jax.Array, int]
) -> jax.Array:
    """Call ``of_one`` for each index of the leading axes. A loop makes the calls, to save memory.
    An operand is a pair: an array, and the number of its axes after the leading axes."""
    if not math.prod(lead) > 1:
        out = of_one(*(x.reshape(x.shape[x.ndim - axes :]) for x, axes in operands))
        return out.reshape(*lead, *out.shape)
    flat = []
    for x, axes in operands:
        own = x.shape[x.ndim - axes :]
        flat.append(jnp.broadcast_to(x, (*lead, *own)).reshape(-1, *own))
    out = lax.map(lambda args: of_one(*args), tuple(flat))
    return out.reshape(*lead, *out.shape[1:])


def scaled(x: jax.Array, weights: jax.Array, selects: bool) -> jax.Array:
    """Return rows times their weights, in the dtype of the weights. With ``selects``, rows with the
    weight 0 become zeros, even if they are NaN. Differentiated functions need ``selects=False``,
    because the selection has a zero derivative with respect to any weight that is 0."""
    weights = weights[..., None]
    scaled = x.astype(weights.dtype) * weights
    return jnp.where(weights != 0, scaled, 0) if selects else scaled
