"""Quantize rows to ``BlockwiseFp8`` for a product of groups, as a primitive.

``encode_rows_p`` has the operands rows [*B, C, K] and sizes [*B, L], and the results values [*B, C,
K] and scales [*B, C, K / 128]. As in ``primitives.py``, a leading axis of sizes is 1 if the batch
shares the array. Rows after the last group are unspecified in the results. The parameter is
``num_sms``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat, scopes
from ..formats.formats import BlockwiseFp8, Quantized
from ..group import native
from . import lowering as lowered
from .primitives import bind, register, rows_like
from .quantized import refusing_jvp
from .reference import lead_of
from .weights import BLOCK

TARGET = "moe_a2a_act_encode"
IDENTITY = dict(activation=0, gated=0, alpha=0.0, limit=0.0)

encode_rows_p = compat.Primitive("moe_a2a_encode_rows")
encode_rows_p.multiple_results = True


@scopes.quantization
def bind_encode_rows(rows: jax.Array, sizes: jax.Array, num_sms: int | None) -> Quantized:
    """Bind ``encode_rows_p``. Rows are bfloat16 or float32, and K is a multiple of 128."""
    return Quantized(*bind(encode_rows_p, rows, sizes, num_sms=num_sms))


def encode_by_kernel(
    product: jax.Array,
    weights: jax.Array | None,
    sizes: jax.Array,
    columns: int,
    num_sms: int | None,
    **activation: Any,
) -> list[jax.Array]:
    """Call the kernel that activates and quantizes rows.

    Args:
      product: [*B, C, P].
      weights: float32 [*B, C], or None to quantize the product itself.
      sizes: int32 [*B, L].
      columns: I, of the activations.
      activation: attributes of the call.
    """
    lead, (num_rows, width) = lead_of(product), product.shape[-2:]
    # The table is that of the product before or after, so XLA computes it once.
    groups = lowered.table(
        sizes, lead, num_rows, (*[1] * len(lead), sizes.shape[-1]), has_tail=False
    )
    rows = math.prod(lead), num_rows
    results = [
        jax.ShapeDtypeStruct((*rows, columns), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((*rows, columns // BLOCK), jnp.float32),
    ]
    weights = jnp.zeros(0, jnp.float32) if weights is None else weights.reshape(rows)
    operands = product.reshape(*rows, width), groups, weights
    found = native.call_product(TARGET, results, operands, num_sms=num_sms or 0, **activation)
    return [x.reshape(*lead, num_rows, x.shape[-1]) for x in found]


def _abstract(rows: Any, *_: Any, **__: Any) -> list[Any]:
    k = rows.shape[-1]
    return [rows_like(rows, k, jnp.float8_e4m3fn), rows_like(rows, k // BLOCK, jnp.float32)]


def _composition(rows: jax.Array, *_: Any, **__: Any) -> list[jax.Array]:
    return list(BlockwiseFp8().encode(rows))


def _kernel(rows: jax.Array, sizes: jax.Array, *, num_sms: int | None) -> list[jax.Array]:
    return encode_by_kernel(rows, None, sizes, rows.shape[-1], num_sms, **IDENTITY)


def _why_no_kernel(rows: Any, sizes: Any, **_: Any) -> str:
    return lowered.why_no_call(*lowered.sizes_of(rows, sizes, rows.shape))


register(
    encode_rows_p,
    abstract=_abstract,
    jvp=partial(refusing_jvp, encode_rows_p),
    is_full=(True,),
    composition=_composition,
    cuda=lowered.by_kernel(_why_no_kernel, _kernel, _composition),
)
