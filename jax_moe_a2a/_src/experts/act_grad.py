"""Define ``act_grad_p``, which computes and quantizes gradients of an activation in one pass.

The operands are ct_h [*B, C, I], pre [*B, C, I'], weights [*B, C] float32, and sizes [*B, L]. pre
is the input of the activation, and ct_h is the cotangent of h (see below). The first results are
``ct_pre = weights * act'(pre) * ct_h``, ``h = weights * act(pre)``, and ``ct_weights = <ct_h,
act(pre)>``. The other results are the values [*B, C, I'] and scales [*B, C, I' / 128] of
ct_pre in ``BlockwiseFp8``, without derivatives. The first three results have the derivatives of
the function ``gradients``. ``primitives.py`` describes the axes B and rows without a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import compat, scopes
from ..ad import is_zero, jvp_of_moving, zero_tangent
from ..formats.formats import BlockwiseFp8, Quantized
from ..group import native
from ..grouped import lowering as grouped
from ..grouped.act_encode import batch_and_table, why_no_act_encode
from ..grouped.primitives import bind, register, rows_like
from ..grouped.reference import scaled
from ..grouped.weights import BLOCK
from .activations import FusedActivation

act_grad_p = compat.Primitive("moe_a2a_act_grad")
act_grad_p.multiple_results = True


@scopes.activation
def bind_act_grad(
    ct_h: jax.Array,
    pre: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *,
    activation: FusedActivation,
    num_sms: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Quantized]:
    """Bind ``act_grad_p``. I must be a multiple of 128."""
    params = dict(activation=activation, num_sms=num_sms)
    *floats, values, scales = bind(act_grad_p, ct_h, pre, weights, sizes, **params)
    return (*floats, Quantized(values, scales))


def gradients(
    ct_h: jax.Array,
    pre: jax.Array,
    weights: jax.Array,
    *,
    activation: FusedActivation,
    selects: bool,
) -> list[jax.Array]:
    """Return ct_pre, h and ct_weights. ``selects`` is the argument of ``scaled``."""
    act, transpose = jax.vjp(activation, pre)
    (ct_pre,) = transpose(scaled(ct_h, weights, selects).astype(pre.dtype))
    if selects:
        ct_pre = jnp.where(weights[..., None] != 0, ct_pre, 0)
    h = scaled(act, weights, selects).astype(pre.dtype)
    ct_weights = jnp.sum(ct_h.astype(weights.dtype) * act.astype(weights.dtype), axis=-1)
    return [ct_pre, h, ct_weights]


def _composition(
    *operands: jax.Array, activation: FusedActivation, num_sms: int | None
) -> list[jax.Array]:
    del num_sms
    found = gradients(*operands[:3], activation=activation, selects=True)
    return [*found, *BlockwiseFp8().encode(found[0])]


def _abstract(ct_h: Any, pre: Any, weights: Any, _: object, **__: object) -> list[Any]:
    width = pre.shape[-1]
    values = rows_like(pre, width, jnp.float8_e4m3fn)
    return [pre, ct_h, weights, values, rows_like(pre, width // BLOCK, jnp.float32)]


def _jvp(primals: compat.Primals, tangents: compat.Tangents, **params: Any) -> Any:
    outs = bind(act_grad_p, *primals, **params)
    moves = [not is_zero(d) for d in tangents[:3]]
    if not any(moves):
        return outs, list(map(zero_tangent, outs))
    fn = partial(gradients, activation=params["activation"], selects=False)
    found = jvp_of_moving(fn, moves, primals[:3], tangents[:3])[1]
    return outs, [*found, *map(zero_tangent, outs[3:])]


def _kernel(
    ct_h: jax.Array,
    pre: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *,
    activation: FusedActivation,
    num_sms: int | None,
) -> list[jax.Array]:
    (lead, flat, groups), width = batch_and_table(pre, sizes), pre.shape[-1]
    result = lambda dtype, *columns: jax.ShapeDtypeStruct((*flat, *columns), dtype)
    columns = ct_h.shape[-1]
    values, scales, *floats = native.call_product(
        "moe_a2a_act_grad",
        [
            result(jnp.float8_e4m3fn, width),
            result(jnp.float32, width // BLOCK),
            result(pre.dtype, width),
            result(pre.dtype, columns),
            result(jnp.float32),
        ],
        (
            pre.reshape(*flat, width),
            groups,
            weights.reshape(flat),
            ct_h.reshape(*flat, columns),
        ),
        # h may overwrite ct_h, because each lane reads its elements before it writes them. ct_pre
        # does not overwrite pre, because XLA would then copy pre, which other operations also read.
        {3: 3},
        num_sms=num_sms or 0,
        **activation.attributes,
    )
    return [x.reshape(*lead, *x.shape[1:]) for x in (*floats, values, scales)]


def _why_no_kernel(_: object, pre: Any, __: object, sizes: Any, **___: object) -> str:
    num_rows, num_groups, *_rest = grouped.sizes_of(pre, sizes, pre.shape)
    return why_no_act_encode(num_rows, num_groups, pre.shape[-1])


register(
    act_grad_p,
    abstract=_abstract,
    jvp=_jvp,
    is_full=(True, True, True),
    composition=_composition,
    cuda=grouped.by_kernel(_why_no_kernel, _kernel, _composition),
)
