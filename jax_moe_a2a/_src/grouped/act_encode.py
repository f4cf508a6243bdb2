"""Define ``act_encode_p``, which quantizes rows, or activations of rows, to ``BlockwiseFp8``.

The operands are rows [*B, C, P] and sizes [*B, L]. The results are values [*B, C, I] and scales
[*B, C, I / 128]. With an ``activation``, the last operand is ``weights``, float32 [*B, C]. Then ``h
= weights * act(rows)`` is rounded to the dtype of the rows, and quantized. Without an activation,
the rows are quantized, and I = P. The results of rows with the weight 0 are exact zeros. Rows after
the last group are unspecified. ``primitives.py`` describes ``B`` and ``num_sms``.

The primitive has no derivatives, because gradients in float8 would be too imprecise.
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
from .reference import scaled
from .weights import BLOCK

act_encode_p = compat.Primitive("moe_a2a_act_encode")
act_encode_p.multiple_results = True

# The attributes of a kernel call that only quantizes.
_IDENTITY = dict(activation=0, gated=0, alpha=0.0, limit=0.0)


@scopes.quantization
def bind_act_encode(
    rows: jax.Array,
    weights: jax.Array | None,
    sizes: jax.Array,
    *,
    activation: Any = None,
    num_sms: int | None = None,
) -> Quantized:
    """Bind ``act_encode_p`` for bfloat16 or float32 rows. I is a multiple of 128. Either pass a
    ``FusedActivation`` and ``weights``, which are 0 for rows without a token, or None for both."""
    operands = (rows, sizes) if weights is None else (rows, sizes, weights)
    params = dict(activation=activation, num_sms=num_sms)
    return Quantized(*bind(act_encode_p, *operands, **params))


def why_no_act_encode(num_rows: int, num_groups: int, width: int) -> str:
    """Return '' if the kernel can activate and quantize a product of this size, else the reason."""
    return lowered.why_no_call(num_rows, num_groups, width)


def _columns(rows: jax.Array, activation: Any) -> int:
    return rows.shape[-1] // (1 if activation is None else activation.width(1))


def _abstract(rows: Any, *_: object, activation: Any, **__: object) -> list[Any]:
    columns = _columns(rows, activation)
    values = rows_like(rows, columns, jnp.float8_e4m3fn)
    return [values, rows_like(rows, columns // BLOCK, jnp.float32)]


def _composition(
    rows: jax.Array, _: jax.Array, *weights: jax.Array, activation: Any, **__: object
) -> list[jax.Array]:
    if weights:
        rows = scaled(activation(rows), weights[0], selects=True).astype(rows.dtype)
    return list(BlockwiseFp8().encode(rows))


def batch_and_table(
    rows: jax.Array, sizes: jax.Array
) -> tuple[tuple[int, ...], tuple[int, int], jax.Array]:
    """Return the leading axes of rows, the pair (product of these axes, C), and the table of groups
    (``lowering.table``). The product of these rows has an equal table, and XLA merges both."""
    lead, num_rows = rows.shape[:-2], rows.shape[-2]
    ones = (1,) * len(lead)
    table = lowered.table(sizes, lead, num_rows, (*ones, sizes.shape[-1]), has_tail=False)
    return lead, (math.prod(lead), num_rows), table


def _kernel(
    rows: jax.Array,
    sizes: jax.Array,
    *weights: jax.Array,
    activation: Any,
    num_sms: int | None,
) -> list[jax.Array]:
    (lead, flat, groups), width = batch_and_table(rows, sizes), rows.shape[-1]
    columns = _columns(rows, activation)
    results = [
        jax.ShapeDtypeStruct((*flat, columns), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct((*flat, columns // BLOCK), jnp.float32),
    ]
    row_weights = weights[0].reshape(flat) if weights else jnp.zeros(0, jnp.float32)
    found = native.call_product(
        "moe_a2a_act_encode",
        results,
        (rows.reshape(*flat, width), groups, row_weights),
        num_sms=num_sms or 0,
        **(_IDENTITY if activation is None else activation.attributes),
    )
    return [x.reshape(*lead, *x.shape[1:]) for x in found]


def _why_no_kernel(rows: Any, sizes: Any, *_: Any, **__: object) -> str:
    num_rows, num_groups, *_rest = lowered.sizes_of(rows, sizes, rows.shape)
    return why_no_act_encode(num_rows, num_groups, rows.shape[-1])


register(
    act_encode_p,
    abstract=_abstract,
    jvp=partial(refusing_jvp, act_encode_p),
    is_full=lambda activation, **_: (True, False) + (True,) * (activation is not None),
    composition=_composition,
    cuda=lowered.by_kernel(_why_no_kernel, _kernel, _composition),
)
