"""Multiply rows by weights, and add the gradients of all uses of the weights in one array.

A *total* is an array of zeros with the shape of the weights, in the accumulation dtype. Its tangent
is the tangent of the weights. Each product with these weights gets the total, and returns it for
the next product. The backward pass runs from the last product to the first. Each product adds the
gradient of its weights to the cotangent of the total, and passes this sum to the previous product.
Therefore the gradient of each use is added to one float32 array, and then freed.

- ``passing_dot_p`` computes ``(r d, d)`` for rows r. It is linear in d, the tangent of a total.
- ``add_outer_p`` is its transpose, and computes ``total + outer(r, ct)``. On GPUs, one kernel
  multiplies and adds in float32, and overwrites the total in memory.

``primitives.py`` describes the operands. A total has the leading axes of its weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from .. import compat
from ..ad import accumulation_dtype, is_zero, with_tangent
from ..formats.formats import RowsInFp8, floats_of
from . import lowering as lowered
from . import reference
from .primitives import (
    bind,
    bind_outer,
    register,
    rows_like,
    sum_of,
    unspecified_dot,
)
from .straight_through import dot_in_fp8
from .weights import QuantizedExperts, encode_source

passing_dot_p = compat.Primitive("moe_a2a_passing_dot")
add_outer_p = compat.Primitive("moe_a2a_add_outer")
passing_dot_p.multiple_results = True


def total_of(w: jax.Array, given: jax.Array | None = None) -> jax.Array:
    """Return a total for weights of any shape: ``given``, or zeros. Its tangent is the tangent of
    the weights, plus the tangent of ``given`` if ``given`` is not None."""
    zeros = jnp.zeros(w.shape, accumulation_dtype(w.dtype)) if given is None else given
    total, w = compat.align_varying([zeros, w], ())
    return _total_of(_batched_with(total, w), w)


def _batched_with(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return x. The select, which XLA removes, makes ``vmap`` map the result if it maps ``other``.
    A traced ``custom_jvp`` needs results that are mapped like their tangents (jax 0.12.0)."""
    return lax.select(False, other.astype(x.dtype), x)


@jax.custom_jvp
def _total_of(total: jax.Array, w: jax.Array) -> jax.Array:
    del w
    return total


@partial(_total_of.defjvp, symbolic_zeros=True)
def _total_of_jvp(primals: Any, tangents: Any) -> Any:
    total = _total_of(*primals)
    moving = (d.astype(total.dtype) for d in tangents if not isinstance(d, SymbolicZero))
    return total, sum_of(total, list(moving))


def with_total(w: jax.Array, total: jax.Array) -> jax.Array:
    """Return the weights ``w``. The tangent of the result is the tangent of the total."""
    w, total = compat.align_varying([w, total], ())
    w = _batched_with(w, total)
    return with_tangent(w, lambda _, tangents: tangents[0].astype(w.dtype), total)


def summing_dot(
    rows: jax.Array | RowsInFp8,
    w: jax.Array | QuantizedExperts,
    total: jax.Array,
    sizes: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return rows times weights, unspecified after the last group, and the total. The derivative
    ignores the tangent of the weights, and uses the tangent of the total instead."""
    w = encode_source(w) if isinstance(w, QuantizedExperts) else w
    leaves, tree = jax.tree.flatten((rows, w, total, sizes))
    return _summing_dot(*jax.tree.unflatten(tree, compat.align_varying(leaves, ())))


@jax.custom_jvp
def _summing_dot(rows: Any, w: Any, total: Any, sizes: Any) -> tuple[jax.Array, jax.Array]:
    return _dot(rows, w, sizes, quantizes=True), total


@partial(_summing_dot.defjvp, symbolic_zeros=True)
def _summing_dot_jvp(primals: Any, tangents: Any) -> Any:
    (rows, w, _, sizes), (d_rows, _, d_total, _) = primals, tangents
    d_rows = floats_of(d_rows)
    outs, terms = _summing_dot(*primals), []
    if not isinstance(d_rows, SymbolicZero):
        terms.append(_dot(d_rows, w, sizes, quantizes=False))
    if not isinstance(d_total, SymbolicZero):
        term, d_total = bind(passing_dot_p, floats_of(rows), d_total, sizes)
        terms.append(term)
    return outs, (sum(terms[1:], terms[0]) if terms else jnp.zeros_like(outs[0]), d_total)


def _dot(rows: Any, w: Any, sizes: jax.Array, *, quantizes: bool) -> jax.Array:
    if isinstance(w, QuantizedExperts):
        return dot_in_fp8(rows, w, sizes, quantizes=quantizes)
    return unspecified_dot(rows, w, sizes)


def bind_add_outer(total: Any, x: Any, y: Any, sizes: jax.Array) -> jax.Array:
    """Bind ``add_outer_p``. ``total`` may be an ``ad.Zero``."""
    if isinstance(total, ad.Zero):
        aval: Any = total.aval
        total = jnp.zeros(aval.shape, aval.dtype)
    return bind(add_outer_p, total, x, y, sizes)


def _passing_dot(rows: jax.Array, d: jax.Array | ad.Zero, sizes: jax.Array) -> list[Any]:
    return [unspecified_dot(rows, d, sizes), d]


def _passing_dot_jvp(primals: compat.Primals, tangents: Any) -> Any:
    (rows, d, sizes), (d_rows, d_d, _) = primals, tangents
    outs = bind(passing_dot_p, rows, d, sizes)
    terms = []
    if not is_zero(d_rows):
        terms.append(unspecified_dot(d_rows, d, sizes))
    if not is_zero(d_d):
        term, d_d = bind(passing_dot_p, rows, d_d, sizes)
        terms.append(term)
    return outs, [sum_of(outs[0], terms), d_d]


def _passing_dot_transpose(cts: Any, rows: Any, d: Any, sizes: Any) -> list[Any]:
    ct, total = cts
    if not is_zero(ct):
        total = bind_add_outer(total, rows, ct.astype(rows.dtype), sizes)
    return [None, total, None]


def _add_outer(total: jax.Array, x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    parts = (total.shape[:-2],)
    return total + reference.outer(x, y, sizes, parts=parts, dtype=total.dtype)[0]


def _add_outer_by_product(
    total: jax.Array, x: jax.Array, y: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Add rounded products to the total, because only the kernel adds products without rounding."""
    params: dict[str, Any] = dict(lead=total.shape[:-3], dtype=x.dtype)
    params.update(tail="unspecified", num_sms=None)
    outer = bind_outer(x, y, sizes, **params)
    return total + outer.astype(total.dtype)


def _add_outer_jvp(primals: Any, tangents: Any) -> Any:
    (total, x, y, sizes), (d_total, d_x, d_y, _) = primals, tangents
    params = dict(lead=total.shape[:-3], dtype=total.dtype, tail="unspecified", num_sms=None)
    pairs = [pair for pair in ((d_x, y), (x, d_y)) if not any(map(is_zero, pair))]
    terms = [bind_outer(*pair, sizes, **params) for pair in pairs]
    terms += [] if is_zero(d_total) else [d_total]
    out = bind_add_outer(total, x, y, sizes)
    return out, sum_of(out, terms)


choose_add_outer = lowered.by_kernel(
    lowered.why_no_add_outer, lowered.add_outer, _add_outer_by_product
)

register(
    passing_dot_p,
    abstract=lambda rows, d, *_, **__: [rows_like(rows, d.shape[-1]), d],
    jvp=_passing_dot_jvp,
    transpose=_passing_dot_transpose,
    is_full=(True,),
    passed=lambda **_: (1,),
    composition=_passing_dot,
)
register(
    add_outer_p,
    abstract=lambda total, *_, **__: total,
    jvp=_add_outer_jvp,
    is_full=(True, True, True),
    composition=_add_outer,
    cuda=choose_add_outer,
)
