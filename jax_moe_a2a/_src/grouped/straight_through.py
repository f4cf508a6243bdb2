"""Multiply rows and weights that are quantized on the way, with the derivatives of the product.

Let Q be the rounding to ``BlockwiseFp8``. ``straight_through_dot_p`` computes ``Q(r) Q(w)`` for
rows r and weights w or, if its parameter ``quantizes`` is False, ``r w``. Its derivative is defined
as that of ``r w``: quantization counts as the identity.

- jvp: ``dr w + r dw``, with ``quantizes=False``.
- transpose in rows: ``Q(ct) Q(w^T)``, with ``quantizes=True``. The derivative of this product is
  again that of the product without Q. So derivatives of any order exist.
- transpose in weights: the outer product of rows and ct, without Q.

The other parameters and the operands are those of ``grouped_dot_p``, and values, scales and
transposed values of ``QuantizedExperts`` if Q(w) and Q(w^T) are given. The axis that a quantized
product sums over has a size that is a multiple of 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad

from .. import compat
from ..ad import is_zero
from .act_encode import bind_act_encode
from .primitives import (
    bilinear_tangents,
    bind,
    bind_dot,
    bind_outer,
    dot_abstract,
    register,
    unspecified_dot,
)
from .quantized import bind_dot_fp8
from .weights import QuantizedExperts, encode_experts, transposed_experts

straight_through_dot_p = compat.Primitive("moe_a2a_straight_through_dot")


def dot_in_fp8(rows: jax.Array, w: QuantizedExperts, sizes: jax.Array) -> jax.Array:
    """Multiply rows [C, K] by weights [L, K, N] in FP8. Rows after the last group, and their
    derivatives, are unspecified.

    Args:
      rows: bfloat16 or float32. K is a multiple of 128.
      w: weights whose source has the dtype of ``rows``. N is a multiple of 128. Without values,
        each product quantizes the source.
      sizes: int32 [L].
    """
    source, *parts = operands_of(w)
    return unspecified_dot(
        rows, source, sizes, None, *parts, primitive=straight_through_dot_p, quantizes=True
    )


def operands_of(w: QuantizedExperts) -> list[jax.Array]:
    """Return the source of weights, and their last operands of ``straight_through_dot_p``."""
    return [w.source, *jax.tree.leaves((w.values, w.scales, w.transposed))]


def _dot(
    rows: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *parts: jax.Array,
    quantizes: bool,
    transposed: bool,
    **params: Any,
) -> jax.Array:
    if not quantizes:
        return bind_dot(rows, w, sizes, transposed=transposed, **params)
    if parts:
        quantized = QuantizedExperts(*parts)
    else:
        quantized = encode_experts(w, turned=not transposed, plain=transposed)
    if transposed:
        # A program that was differentiated after ``_dce`` has no ``transposed``.
        quantized = transposed_experts(quantized)
    encoded = bind_act_encode(rows, None, sizes, num_sms=params["num_sms"])
    return bind_dot_fp8(encoded, quantized, sizes, **params)


def _transpose(
    ct: Any,
    rows: Any,
    w: Any,
    sizes: Any,
    *parts: Any,
    quantizes: bool,
    transposed: bool,
    **params: object,
) -> Any:
    del quantizes
    others = [None] * (1 + len(parts))
    if ad.is_undefined_primal(rows):
        if is_zero(ct):
            return [ad.Zero(rows.aval), None, *others]
        params.update(dtype=rows.aval.dtype, transposed=not transposed, quantizes=True)
        ct = ct.astype(rows.aval.dtype)
        return [bind(straight_through_dot_p, ct, w, sizes, *parts, **params), None, *others]
    if is_zero(ct):
        return [None, ad.Zero(w.aval), *others]
    dtype, lead = w.aval.dtype, w.aval.shape[:-3]
    x, y = (ct.astype(dtype), rows) if transposed else (rows, ct.astype(dtype))
    return [None, bind_outer(x, y, sizes, **dict(params, dtype=dtype, lead=lead)), *others]


def _jvp(primals: compat.Primals, tangents: compat.Tangents, **params: object) -> Any:
    out = bind(straight_through_dot_p, *primals, **params)
    params.update(quantizes=False)
    return out, bilinear_tangents(straight_through_dot_p, out, primals, tangents, **params)


def _dce(used: Sequence[bool], eqn: compat.Equation) -> tuple[list[bool], Any]:
    """Do not read the orientation of quantized weights that only the transposed product needs, so
    that a program without gradients does not write it."""
    num = len(eqn.invars)
    reads_all = eqn.params["transposed"] or not eqn.params["quantizes"]
    num_read = num if reads_all else 5  # rows, w, sizes, values and scales
    return [i < num_read for i in range(num)], eqn.replace(invars=eqn.invars[:num_read])


register(
    straight_through_dot_p,
    abstract=dot_abstract,
    jvp=_jvp,
    transpose=_transpose,
    is_full=(True,),
    composition=_dot,
)
compat.register_dce_rule(straight_through_dot_p, _dce)
