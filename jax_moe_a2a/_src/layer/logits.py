"""Multiply tokens by the router's kernel with the precision of float32.

By default, GPUs and TPUs compute a float32 product in fewer bits (TF32 on NVIDIA GPUs). If two
logits of a token are almost equal, the token could then choose another expert than with float32.
``router_dot_p`` sums exact products of float32 numbers. The primitive is bilinear, and its
transposes are calls of the same primitive. Therefore derivatives of any order have the same
precision, and need no float32 copy of bfloat16 tokens.

A float32 number is the sum of three bfloat16 numbers, its *pieces*. On GPUs, a product of bfloat16
and float32 arrays is one product of bfloat16 arrays: the pieces are side by side in one array. This
product has three times as many multiplications, but on tensor cores each takes half the time of a
multiplication in TF32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir

from .. import compat, scopes
from ..ad import accumulation_dtype, is_zero
from ..grouped.primitives import bilinear_jvp, bind, register

router_dot_p = compat.Primitive("moe_a2a_router_dot")


@scopes.router
def router_logits(x: jax.Array, router: jax.Array, router_bias: jax.Array | None) -> jax.Array:
    """Return the logits of tokens [T, E]: ``x @ router + router_bias``."""
    logits = bind(router_dot_p, x, router, dtype=_sum_dtype(x, router))
    return logits if router_bias is None else logits + router_bias.astype(logits.dtype)[None]


def _sum_dtype(a: jax.Array, b: jax.Array) -> Any:
    return max(map(accumulation_dtype, (a.dtype, b.dtype)), key=lambda dtype: dtype.itemsize)


def _dot(a: jax.Array, b: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
    """Return the products of ``a`` [*B, M, K] and ``b`` [*B, K, N], summed with the precision of
    the larger dtype, and rounded to ``dtype``."""
    sum_dtype = _sum_dtype(a, b)
    operands = a.astype(sum_dtype), b.astype(sum_dtype)
    return jnp.matmul(*operands, precision=lax.Precision.HIGHEST).astype(dtype)


def _dot_on_gpu(a: jax.Array, b: jax.Array, *, dtype: jnp.dtype) -> jax.Array:
    """Compute ``_dot``. If ``a`` or ``b`` is bfloat16, use products of bfloat16 arrays."""
    if a.dtype == b.dtype and a.dtype.itemsize == 2:
        return _matmul(a, b, dtype)  # float32 can represent products of 16-bit floats exactly
    if _sum_dtype(a, b) != jnp.float32:
        return _dot(a, b, dtype=dtype)
    if a.dtype == jnp.bfloat16:
        return _dot_of_pieces(a, b, dtype)
    if b.dtype == jnp.bfloat16:
        return _dot_of_pieces(b.mT, a.mT, dtype).mT
    if dtype == jnp.bfloat16:  # products with smaller pieces would not change the result
        (a_0, a_1, _), (b_0, b_1, _) = _pieces(a), _pieces(b)
        a, b = jnp.concatenate((a_1, a_0, a_0), -1), jnp.concatenate((b_0, b_1, b_0), -2)
        return _matmul(a, b, dtype)
    return _dot(a, b, dtype=dtype)


def _dot_of_pieces(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return the product of ``a``, in bfloat16, and ``b``, in float32 or float16."""
    pieces = _pieces(b)[::-1]  # from small to large
    num_products, num_columns = b.shape[-2:]
    if num_products < num_columns:
        return _matmul(jnp.concatenate((a, a, a), -1), jnp.concatenate(pieces, -2), dtype)
    product = _matmul(a, jnp.concatenate(pieces, -1), jnp.float32)
    return product.reshape(*product.shape[:-1], 3, num_columns).sum(axis=-2).astype(dtype)


def _pieces(x: jax.Array) -> list[jax.Array]:
    """Return three bfloat16 arrays, from large to small, whose sum is ``x``."""
    rest, pieces = x.astype(jnp.float32), list[jax.Array]()
    for _ in range(3):
        # XLA may remove a conversion to bfloat16 and back, but not ``reduce_precision``.
        piece = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        pieces.append(piece.astype(jnp.bfloat16))
        rest -= piece
    return pieces


def _matmul(a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Multiply arrays of 16-bit floats with sums in float32."""
    result = dtype if dtype == a.dtype else jnp.float32
    precision = lax.Precision.DEFAULT  # ignores jax_default_matmul_precision
    return jnp.matmul(a, b, precision=precision, preferred_element_type=result).astype(dtype)


def _abstract(a: compat.Aval, b: compat.Aval, *, dtype: jnp.dtype) -> Any:
    return compat.result_aval(a, (*a.shape[:-1], b.shape[-1]), dtype)


def _transpose(ct: Any, a: Any, b: Any, *, dtype: jnp.dtype) -> list[Any]:
    del dtype
    of_a = ad.is_undefined_primal(a)
    wanted = a if of_a else b
    found: Any = ad.Zero(wanted.aval)
    if not is_zero(ct):
        operands = (ct, b.mT) if of_a else (a.mT, ct)
        found = bind(router_dot_p, *operands, dtype=wanted.aval.dtype)
    return [found, None] if of_a else [None, found]


def _batch(args: Any, dims: Any, *, dtype: jnp.dtype) -> tuple[jax.Array, int]:
    """Batch the product. If one operand is not batched, merge the batch into the other operand."""
    (a, b), (i, j) = args, dims
    dot = partial(bind, router_dot_p, dtype=dtype)
    if j is None:
        a = jnp.moveaxis(a, i, -3)
        out = dot(lax.collapse(a, a.ndim - 3, a.ndim - 1), b)
        return out.reshape(*a.shape[:-1], out.shape[-1]), a.ndim - 3
    if i is None:
        b = jnp.moveaxis(b, j, -2)
        out = dot(a, lax.collapse(b, b.ndim - 2))
        return out.reshape(*out.shape[:-1], *b.shape[-2:]), b.ndim - 2
    return dot(jnp.moveaxis(a, i, 0), jnp.moveaxis(b, j, 0)), 0


register(
    router_dot_p,
    abstract=_abstract,
    jvp=partial(bilinear_jvp, router_dot_p),
    transpose=_transpose,
    batch=_batch,
    composition=_dot,
)
on_gpu = mlir.lower_fun(_dot_on_gpu, multiple_results=False)
mlir.register_lowering(router_dot_p, on_gpu, platform="cuda")
