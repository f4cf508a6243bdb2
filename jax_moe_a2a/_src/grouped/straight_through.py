"""Multiply rows and weights in FP8, with the derivative of the product of float arrays.

Let Q be the rounding to ``BlockwiseFp8``. ``straight_through_dot_p`` computes ``Q(r) Q(w)`` for
rows r and weights w. If its parameter ``quantizes`` is False, it computes ``r w``. Its derivative
is defined as the derivative of ``r w``, so the derivative of Q is the identity.

- jvp: ``dr w + r dw``, with ``quantizes=False``.
- transpose in rows: ``Q(ct) Q(w^T)``, with ``quantizes=True``. The derivative of this product is
  defined in the same way, so derivatives of any order exist.
- transpose in weights: the outer product of rows and ct, without Q.

Rows, weights, sizes, and all parameters except ``quantizes`` and ``encoded`` are as in
``grouped_dot_p``. With ``encoded``, the next two operands are the values and scales of Q(r). The
last operands may be the values, scales and transposed values of Q(w) from ``encode_source``. In a
quantized product, the size of the summed axis is a multiple of 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad

from .. import compat
from ..ad import is_zero
from ..formats.formats import Quantized, RowsInFp8, floats_of
from .act_encode import bind_act_encode
from .primitives import (
    bind,
    bind_dot,
    bind_outer,
    dot_abstract,
    register,
    sum_of,
    unspecified_dot,
)
from .quantized import bind_dot_fp8
from .weights import (
    QuantizedExperts,
    encode_experts,
    encode_source,
    from_bits,
    transposed_experts,
)

straight_through_dot_p = compat.Primitive("moe_a2a_straight_through_dot")


def dot_in_fp8(
    rows: jax.Array | RowsInFp8,
    w: QuantizedExperts,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    quantizes: bool = True,
) -> jax.Array:
    """Multiply rows [C, K] by weights [L, K, N] in FP8. After the last group, rows of results and
    of derivatives are unspecified.

    Args:
      rows: ``RowsInFp8``, or bfloat16 or float32 rows to quantize. K is a multiple of 128.
      w: weights whose source has the dtype of ``rows``. N is a multiple of 128. If ``w`` has no
        values, the source is quantized once for this product and its gradients.
      transposed: True to multiply rows [C, N] by the transposed weights.
      quantizes: False to multiply float rows and the source, as in a derivative.
    """
    w = encode_source(w)
    encoded = rows.encoded if isinstance(rows, RowsInFp8) else None
    params = dict(transposed=transposed, quantizes=quantizes, encoded=encoded is not None)
    parts = jax.tree.leaves((encoded, w.values, w.scales, w.transposed))
    return unspecified_dot(
        floats_of(rows), w.source, sizes, *parts, primitive=straight_through_dot_p, **params
    )


def _dot(
    rows: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *parts: jax.Array,
    quantizes: bool,
    transposed: bool,
    encoded: bool,
    **params: Any,
) -> jax.Array:
    if not quantizes:
        return bind_dot(rows, w, sizes, transposed=transposed, **params)
    if of_weights := parts[2 * encoded :]:
        quantized = from_bits(*of_weights)
    else:
        quantized = encode_experts(w, turned=not transposed, plain=transposed)
    if transposed:
        # ``_dce`` may have removed the transposed values before differentiation.
        quantized = transposed_experts(quantized)
    if encoded:
        of_rows = Quantized(*parts[:2])
    else:
        of_rows = bind_act_encode(rows, None, sizes)
    return bind_dot_fp8(of_rows, quantized, sizes, **params)


def _transpose(
    ct: Any,
    rows: Any,
    w: Any,
    sizes: Any,
    *parts: Any,
    quantizes: bool,
    transposed: bool,
    encoded: bool,
    **params: object,
) -> Any:
    del quantizes
    others = [None] * (1 + len(parts))
    if ad.is_undefined_primal(rows):
        if is_zero(ct):
            return [ad.Zero(rows.aval), None, *others]
        params.update(dtype=rows.aval.dtype, transposed=not transposed)
        params.update(quantizes=True, encoded=False)
        ct, of_weights = ct.astype(rows.aval.dtype), parts[2 * encoded :]
        return [bind(straight_through_dot_p, ct, w, sizes, *of_weights, **params), None, *others]
    if is_zero(ct):
        return [None, ad.Zero(w.aval), *others]
    dtype, lead = w.aval.dtype, w.aval.shape[:-3]
    x, y = (ct.astype(dtype), rows) if transposed else (rows, ct.astype(dtype))
    return [None, bind_outer(x, y, sizes, **dict(params, dtype=dtype, lead=lead)), *others]


def _jvp(primals: compat.Primals, tangents: compat.Tangents, **params: Any) -> Any:
    out = bind(straight_through_dot_p, *primals, **params)
    (rows, w, sizes, *others), (d_rows, d_w, *_) = primals, tangents
    parts, terms = others[2 * params["encoded"] :], []
    params.update(quantizes=False, encoded=False)
    if not is_zero(d_rows):
        terms.append(bind(straight_through_dot_p, d_rows, w, sizes, *parts, **params))
    if not is_zero(d_w):  # its transpose is the outer product, which reads no FP8 weights
        terms.append(bind(straight_through_dot_p, rows, d_w, sizes, **params))
    return out, sum_of(out, terms)


def _dce(used: Sequence[bool], eqn: compat.Equation) -> tuple[list[bool], Any]:
    """Remove unread transposed values, so that programs without gradients do not compute them."""
    num = len(eqn.invars)
    reads_all = eqn.params["transposed"] or not eqn.params["quantizes"]
    # Always read: rows, w, sizes, with ``encoded`` two arrays of Q(r), and two arrays of Q(w).
    num_read = num if reads_all else 5 + 2 * eqn.params["encoded"]
    return [i < num_read for i in range(num)], eqn.replace(invars=eqn.invars[:num_read])


register(
    straight_through_dot_p,
    abstract=dot_abstract,
    jvp=_jvp,
    transpose=_transpose,
    is_full=lambda encoded, **_: (True, False, False) + (True, True) * encoded,
    composition=_dot,
)
compat.register_dce_rule(straight_through_dot_p, _dce)
