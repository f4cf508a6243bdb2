"""Multiply rows by weights that are used several times, and sum the gradients of the weights in
order.

A *total* is an array of zeros like the weights, in the dtype of sums, whose tangent is the tangent
of the weights. A product takes the total and returns it, for the next product with these weights.
The transpose of such a chain starts at the last product: each product adds the gradient of its
weights to the total that it receives, and passes the total on. So one array in float32 holds the
sum at all times, and no gradient of a single use outlives its addition.

- ``total_of_p``: the total of weights.
- ``summing_dot_p``: ``(r w, total)``, also for ``straight_through_dot_p``, whose last operands
  follow those of the dot. Its tangent is that of ``r w`` in r, and ``passing_dot_p`` in the total.
  The tangent of w is ignored: it is the tangent of the total.
- ``passing_dot_p``, linear in d: ``(r d, d)``.
- ``add_outer_p``, its transpose: ``total + outer(r, ct)``, linear in the total, and in r and ct.

Operands are as in ``primitives.py``. A total has the leading axes of its weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from .. import compat
from ..ad import accumulation_dtype, is_zero
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
from .straight_through import operands_of, straight_through_dot_p
from .weights import QuantizedExperts

total_of_p = compat.Primitive("moe_a2a_total_of")
summing_dot_p = compat.Primitive("moe_a2a_summing_dot")
passing_dot_p = compat.Primitive("moe_a2a_passing_dot")
add_outer_p = compat.Primitive("moe_a2a_add_outer")
summing_dot_p.multiple_results = passing_dot_p.multiple_results = True


def total_of(w: jax.Array) -> jax.Array:
    """Return the total of weights of any shape."""
    return total_of_p.bind(w)


def with_total(w: jax.Array, total: jax.Array) -> jax.Array:
    """Return weights unchanged, whose tangent is that of their total."""
    return _with_total(*compat.align_varying([w, total], ()))


@jax.custom_jvp
def _with_total(w: jax.Array, total: jax.Array) -> jax.Array:
    del total
    return w


@_with_total.defjvp
def _with_total_jvp(primals: compat.Primals, tangents: Any) -> Any:
    w, total = primals
    return _with_total(w, total), tangents[1].astype(w.dtype)


def summing_dot(
    rows: jax.Array, w: jax.Array | QuantizedExperts, total: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the products of rows, unspecified after the last group, and the total.

    Args:
      w: an array, or ``QuantizedExperts`` to multiply as ``dot_in_fp8`` does.
    """
    in_fp8 = isinstance(w, QuantizedExperts)
    array, *parts = operands_of(w) if isinstance(w, QuantizedExperts) else [w]
    params = dict(in_fp8=in_fp8, num_sms=None)
    product, total = bind(summing_dot_p, rows, array, total, sizes, *parts, **params)
    return product, total


def bind_passing(
    rows: jax.Array, d: jax.Array | ad.Zero, sizes: jax.Array, num_sms: int | None
) -> list[jax.Array]:
    """Bind ``passing_dot_p``."""
    return bind(passing_dot_p, rows, d, sizes, num_sms=num_sms)


def bind_add_outer(total: Any, x: Any, y: Any, sizes: jax.Array, num_sms: int | None) -> jax.Array:
    """Bind ``add_outer_p``. ``total`` may be an ``ad.Zero``."""
    if isinstance(total, ad.Zero):
        aval: Any = total.aval
        total = jnp.zeros(aval.shape, aval.dtype)
    return bind(add_outer_p, total, x, y, sizes, num_sms=num_sms)


# The total of weights


def _total_of(w: jax.Array) -> jax.Array:
    return jnp.zeros(w.shape, accumulation_dtype(w.dtype))


def _total_of_jvp(primals: compat.Primals, tangents: Any) -> Any:
    total = total_of(*primals)
    (tangent,) = tangents
    if is_zero(tangent):
        return total, sum_of(total, [])
    return total, tangent.astype(total.dtype)


# Products


def _summing_dot(
    rows: jax.Array,
    w: jax.Array,
    total: jax.Array,
    sizes: jax.Array,
    *parts: jax.Array,
    in_fp8: bool,
    num_sms: int | None,
) -> list[Any]:
    how = _how(in_fp8, quantizes=True)
    return [unspecified_dot(rows, w, sizes, num_sms, *parts, **how), total]


def _how(in_fp8: bool, *, quantizes: bool) -> dict[str, Any]:
    """Return how ``unspecified_dot`` multiplies."""
    return dict(primitive=straight_through_dot_p, quantizes=quantizes) if in_fp8 else {}


def _summing_dot_abstract(
    rows: Any, w: compat.Aval, total: compat.Aval, *_: object, **__: object
) -> list[Any]:
    return [rows_like(rows, w.shape[-1]), total]


def _summing_dot_jvp(
    primals: compat.Primals, tangents: Any, *, in_fp8: bool, num_sms: int | None
) -> Any:
    rows, w, _, sizes, *parts = primals
    d_rows, _, d_total, *_ = tangents
    outs = bind(summing_dot_p, *primals, in_fp8=in_fp8, num_sms=num_sms)
    terms = []
    if not is_zero(d_rows):
        how = _how(in_fp8, quantizes=False)
        terms.append(unspecified_dot(d_rows, w, sizes, num_sms, *parts, **how))
    if not is_zero(d_total):
        term, d_total = bind_passing(rows, d_total, sizes, num_sms)
        terms.append(term)
    return outs, [sum_of(outs[0], terms), d_total]


def _passing_dot(
    rows: jax.Array, d: jax.Array | ad.Zero, sizes: jax.Array, *, num_sms: int | None
) -> list[Any]:
    return [unspecified_dot(rows, d, sizes, num_sms), d]


def _passing_dot_abstract(rows: Any, d: Any, *_: object, **__: object) -> list[Any]:
    return [rows_like(rows, d.shape[-1]), d]


def _passing_dot_jvp(primals: compat.Primals, tangents: Any, *, num_sms: int | None) -> Any:
    (rows, d, sizes), (d_rows, d_d, _) = primals, tangents
    outs = bind_passing(rows, d, sizes, num_sms)
    terms = []
    if not is_zero(d_rows):
        terms.append(unspecified_dot(d_rows, d, sizes, num_sms))
    if not is_zero(d_d):
        term, d_d = bind_passing(rows, d_d, sizes, num_sms)
        terms.append(term)
    return outs, [sum_of(outs[0], terms), d_d]


def _passing_dot_transpose(
    cts: Any, rows: Any, d: Any, sizes: Any, *, num_sms: int | None
) -> list[Any]:
    ct, total = cts
    if not is_zero(ct):
        total = bind_add_outer(total, rows, ct.astype(rows.dtype), sizes, num_sms)
    return [None, total, None]


# Their transpose


def _add_outer(
    total: jax.Array, x: jax.Array, y: jax.Array, sizes: jax.Array, **params: Any
) -> jax.Array:
    parts = (total.shape[:-2],)
    return total + reference.outer(x, y, sizes, parts=parts, dtype=total.dtype, **params)[0]


def _add_outer_by_product(
    total: jax.Array, x: jax.Array, y: jax.Array, sizes: jax.Array, **params: object
) -> jax.Array:
    lead, dtype = total.shape[:-3], x.dtype
    outer = bind_outer(x, y, sizes, lead=lead, dtype=dtype, tail="unspecified", **params)
    return total + outer.astype(total.dtype)


def _add_outer_jvp(primals: Any, tangents: Any, *, num_sms: int | None) -> Any:
    total, x, y, sizes = primals
    tangent, d_x, d_y, _ = tangents
    for pair in ((d_x, y), (x, d_y)):
        if not any(map(is_zero, pair)):
            tangent = bind_add_outer(tangent, *pair, sizes, num_sms)
    return bind_add_outer(total, x, y, sizes, num_sms), tangent


def _add_outer_transpose(
    ct: Any, total: Any, x: Any, y: Any, sizes: Any, *, num_sms: int | None
) -> list[Any]:
    found: list[Any] = [None] * 4
    if ad.is_undefined_primal(total):
        found[0] = ct
    for i, (wanted, other) in enumerate(((x, y), (y, x))):
        if ad.is_undefined_primal(wanted):
            found[1 + i] = ad.Zero(wanted.aval)
            if not is_zero(ct):
                of_other = other.astype(wanted.aval.dtype)
                found[1 + i] = unspecified_dot(of_other, ct, sizes, num_sms, transposed=i == 0)
    return found


# Registration

register(
    total_of_p,
    abstract=lambda w: compat.result_aval(w, w.shape, accumulation_dtype(w.dtype)),
    jvp=_total_of_jvp,
    batch=lambda args, dims: (total_of(*args), dims[0]),
    composition=_total_of,
)
register(
    summing_dot_p,
    abstract=_summing_dot_abstract,
    jvp=_summing_dot_jvp,
    is_full=(True,),
    passed=lambda **_: (2,),
    composition=_summing_dot,
)
register(
    passing_dot_p,
    abstract=_passing_dot_abstract,
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
    transpose=_add_outer_transpose,
    is_full=(True, True, True),
    composition=_add_outer,
    cuda=partial(lowered.add_outer_cuda, _add_outer_by_product),
)
