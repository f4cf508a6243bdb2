"""Multiply rows by frozen weights, which exist only in FP8 and have no derivatives.

Let Q be the rounding to ``BlockwiseFp8``, and W the decoded weights. ``dot_of_frozen`` computes
``Q(r) W`` for rows r with ``grouped_dot_fp8_p``, and defines the derivative as the derivative of
``r W``, as in ``straight_through.py``. ``frozen_dot_p`` computes this derivative and its transpose.
The result of ``frozen_dot_p`` is ``r W``, or ``Q(r) W`` if the parameter ``quantizes`` is True.

- jvp: ``dr W``, with ``quantizes=False``.
- transpose: ``Q(ct) W^T``, with ``quantizes=True``. The derivative of this product is the
  derivative of ``ct W^T``. Therefore derivatives of any order exist.

The operands of ``frozen_dot_p`` are rows [*B, C, K], sizes [*B, L], and the leaves of a tuple of
``QuantizedExperts``. The tuple contains the home weights, and perhaps spare weights for the last
groups. ``tree`` is the tuple's structure. All other parameters are as in ``grouped_dot_p``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from .. import compat
from ..ad import is_zero, with_tangent, zero_tangent
from ..checks import Tail
from ..formats.formats import RowsInFp8
from .act_encode import bind_act_encode
from .primitives import bind, bind_dot, register, rows_like
from .quantized import NO_GRADIENT, bind_dot_fp8
from .reference import arrays_of
from .weights import BLOCK, QuantizedExperts, decode_experts, transposed_experts

frozen_dot_p = compat.Primitive("moe_a2a_frozen_dot")


def dot_of_frozen(
    rows: RowsInFp8,
    w: QuantizedExperts | tuple[QuantizedExperts, QuantizedExperts],
    sizes: jax.Array,
    *,
    tail: Tail,
) -> jax.Array:
    """Multiply rows [C, K] by frozen weights [L, K, N], in the dtype of ``rows.floats``.

    A compiled program does not compute ``rows.floats``, because only their derivatives are used. If
    N is a multiple of 128, the gradient of rows is a product in FP8 with the transposed values of
    ``w``, which are computed if ``w.transposed`` is None. ``tail`` also applies to derivatives.
    """
    params: dict[str, Any] = dict(dtype=rows.floats.dtype, tail=tail, num_sms=None)
    product = bind_dot_fp8(rows.encoded, w, sizes, **params)
    leaves, tree = jax.tree.flatten(arrays_of(w))
    params.update(tree=tree, quantizes=False, transposed=False)

    def tangent_of(primals: compat.Primals, tangents: compat.Tangents) -> jax.Array:
        _, *others = primals
        return bind(frozen_dot_p, tangents[0], *others, **params)

    return with_tangent(product, tangent_of, rows.floats, sizes, *map(jnp.asarray, leaves))


def _dot(
    rows: jax.Array,
    sizes: jax.Array,
    *leaves: jax.Array,
    tree: jax.tree_util.PyTreeDef,
    quantizes: bool,
    transposed: bool,
    **params: Any,
) -> jax.Array:
    weights = tree.unflatten(leaves)
    if not quantizes or rows.shape[-1] % BLOCK:
        home, *spare = (decode_experts(w.values, w.scales, rows.dtype) for w in weights)
        # The decoded weights are [L, N, K], so an original product is a transposed product here.
        return bind_dot(rows, home, sizes, *spare, transposed=not transposed, **params)
    if transposed:
        weights = tuple(map(transposed_experts, weights))
    encoded = bind_act_encode(rows, None, sizes)
    return bind_dot_fp8(encoded, weights, sizes, **params)


def _abstract(
    rows: Any,
    _: object,
    *leaves: compat.Aval,
    tree: jax.tree_util.PyTreeDef,
    transposed: bool,
    dtype: jnp.dtype,
    **__: object,
) -> Any:
    n, k = tree.unflatten(leaves)[0].values.shape[-2:]
    return rows_like(rows, k if transposed else n, dtype)


def _jvp(primals: compat.Primals, tangents: compat.Tangents, **params: object) -> Any:
    out, (tangent, *others) = bind(frozen_dot_p, *primals, **params), tangents
    if not all(map(is_zero, others)):
        raise TypeError(NO_GRADIENT)
    if is_zero(tangent):
        return out, zero_tangent(out)
    return out, bind(frozen_dot_p, tangent, *primals[1:], **dict(params, quantizes=False))


def _transpose(ct: Any, rows: Any, *others: Any, transposed: bool, **params: object) -> list[Any]:
    none = [None] * len(others)
    if is_zero(ct):
        return [ad.Zero(rows.aval), *none]
    params.update(dtype=rows.aval.dtype, transposed=not transposed, quantizes=True)
    return [bind(frozen_dot_p, ct.astype(rows.aval.dtype), *others, **params), *none]


register(
    frozen_dot_p,
    abstract=_abstract,
    jvp=_jvp,
    transpose=_transpose,
    is_full=(True,),
    composition=_dot,
)
