"""Activate the first product of experts in FP8 and quantize the result, as a primitive.

``act_encode_p`` computes ``BlockwiseFp8().encode(h)`` of ``h = (weights * act(product))``, rounded
to the dtype of the product. Its operands are product [*B, C, P], weights [*B, C] float32, and sizes
[*B, L]; its results are values [*B, C, I] and scales [*B, C, I / 128]. As in ``primitives.py``, a
leading axis of sizes is 1 if the batch shares the array, a row of weight 0 has exact zeros whatever
the product holds, and rows after the last group are unspecified. The parameters are the
``activation`` and ``num_sms``.

The primitive has no derivatives, because a float8 array cannot hold a gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat, scopes
from ..formats.formats import BlockwiseFp8, Quantized
from ..grouped import lowering as grouped
from ..grouped.encode_rows import encode_by_kernel
from ..grouped.primitives import bind, register, rows_like
from ..grouped.quantized import refusing_jvp
from ..grouped.weights import BLOCK
from .activations import FusedActivation
from .lowering import attributes_of
from .primitives import scaled

act_encode_p = compat.Primitive("moe_a2a_act_encode")
act_encode_p.multiple_results = True


@scopes.quantization
def bind_act_encode(
    product: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *,
    activation: FusedActivation,
    num_sms: int | None = None,
) -> Quantized:
    """Bind ``act_encode_p``.

    Args:
      product: bfloat16 or float32 [C, P]. I is a multiple of 128.
      weights: float32 [C]; 0 for rows without a token.
      sizes: int32 [L].
      activation: maps P columns to I.
      num_sms: the most multiprocessors that a kernel uses, or None.
    """
    params = dict(activation=activation, num_sms=num_sms)
    return Quantized(*bind(act_encode_p, product, weights, sizes, **params))


def why_no_act_encode(num_rows: int, num_groups: int, width: int) -> str:
    """Return why no kernel activates and quantizes a product [num_rows, width] on the GPUs of this
    process; '' if it does."""
    return grouped.why_no_call(num_rows, num_groups, width)


def _abstract(product: Any, *_: Any, activation: FusedActivation, **__: Any) -> list[Any]:
    columns = product.shape[-1] // activation.width(1)
    values = rows_like(product, columns, jnp.float8_e4m3fn)
    return [values, rows_like(product, columns // BLOCK, jnp.float32)]


def _composition(
    product: jax.Array, weights: jax.Array, _: jax.Array, *, activation: FusedActivation, **__: Any
) -> list[jax.Array]:
    h = scaled(activation(product), weights, True).astype(product.dtype)
    return list(BlockwiseFp8().encode(h))


def _kernel(
    product: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *,
    activation: FusedActivation,
    num_sms: int | None,
) -> list[jax.Array]:
    columns, attributes = product.shape[-1] // activation.width(1), attributes_of(activation)
    return encode_by_kernel(product, weights, sizes, columns, num_sms, **attributes)


def _why_no_kernel(product: Any, _: Any, sizes: Any, **__: Any) -> str:
    num_rows, num_groups, *_rest = grouped.sizes_of(product, sizes, product.shape)
    return why_no_act_encode(num_rows, num_groups, product.shape[-1])


_cuda = grouped.by_kernel(_why_no_kernel, _kernel, _composition)

register(
    act_encode_p,
    abstract=_abstract,
    jvp=partial(refusing_jvp, act_encode_p),
    is_full=(True, True),
    composition=_composition,
    cuda=_cuda,
)
