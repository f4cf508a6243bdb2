"""Lower the experts of a layer on NVIDIA GPUs to kernels with the activation in their epilogue, or
to a composition of grouped products and element-wise passes.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..grouped import lowering as grouped
from ..grouped.lowering import FORWARD, FORWARD_FEW, call, flat, sizes_of, table
from ..grouped.reference import lead_of
from .activations import KINDS, FusedActivation

DOT_ACT = "moe_a2a_dot_act"
ACT_DOT_GRAD = "moe_a2a_act_dot_grad"
SCALED_BIAS = len(KINDS)  # the number of no activation: the bias is multiplied by the row's weight
TILE_COLUMNS = 256  # columns of activations whose share of a weight's gradient is one partial sum


def why_not_dot_act(
    activation: FusedActivation, dtype: Any, num_rows: int, num_groups: int, k: int, width: int
) -> str:
    """Return why the kernel does not compute the activations of a product of these sizes on the
    GPUs of this process; '' if it does. The product has ``width`` columns."""
    of_columns = (width, width // activation.width(1))  # of the product, and of its activations
    whys = (grouped.why_no_kernel(dtype, num_rows, num_groups, k, n) for n in of_columns)
    return next(filter(None, whys), "")


def why_no_dot_act(rows: Any, w: Any, *others: Any, activation: FusedActivation, **_: Any) -> str:
    """Return why no kernel computes ``dot_act_p`` of these types, or ''."""
    return why_not_dot_act(activation, rows.dtype, *sizes_of(rows, others[-1], w.shape))


def why_no_dot_bias(h: Any, w_out: Any, b_out: Any, weights: Any, sizes: Any, **_: Any) -> str:
    """Return why no kernel computes ``dot_bias_p`` of these types, or ''."""
    return grouped.why_no_kernel(h.dtype, *sizes_of(h, sizes, w_out.shape))


def why_no_act_dot_grad(ct: Any, pre: Any, weights: Any, w_out: Any, sizes: Any, **_: Any) -> str:
    """Return why no kernel computes ``act_dot_grad_p`` of these types, or ''."""
    return grouped.why_no_kernel(ct.dtype, *sizes_of(ct, sizes, w_out.shape))


def dot_act(
    rows: jax.Array,
    w: jax.Array,
    *others: jax.Array,
    activation: FusedActivation,
    keep: bool,
    has_bias: bool,
    num_sms: int | None,
) -> list[jax.Array]:
    *bias, weights, sizes = others
    columns = w.shape[-1] // activation.width(1)
    attributes = attributes_of(activation)
    return _product(
        rows, w, bias[0] if has_bias else None, weights, sizes, columns, keep, num_sms, attributes
    )


def dot_bias(
    h: jax.Array,
    w_out: jax.Array,
    b_out: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *,
    num_sms: int | None,
) -> jax.Array:
    attributes = dict(attributes_of(FusedActivation("silu")), activation=np.int64(SCALED_BIAS))
    columns = w_out.shape[-1]
    return _product(h, w_out, b_out, weights, sizes, columns, False, num_sms, attributes)[0]


def _product(
    rows: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    weights: jax.Array,
    sizes: jax.Array,
    columns: int,
    keep: bool,
    num_sms: int | None,
    attributes: dict[str, Any],
) -> list[jax.Array]:
    """Call the kernel that has an activation in the epilogue of a product of rows.

    Args:
      columns: of the result. With ``keep``, the product itself is a second result.
    """
    num_rows, width = rows.shape[-2], w.shape[-1]
    bias2 = jnp.zeros(0, rows.dtype)
    if bias is not None:  # the table has one index for both
        lead = np.broadcast_shapes(w.shape[:-3], bias.shape[:-2])
        w = jnp.broadcast_to(w, (*lead, *w.shape[-3:]))
        bias2 = flat(jnp.broadcast_to(bias, (*lead, *bias.shape[-2:])), 2)
    groups = table(sizes, lead_of(rows), num_rows, w.shape[:-3], has_tail=False)
    rows2 = flat(rows, 2)
    few = num_rows <= grouped.FEW_ROWS * sizes.shape[-1]
    results = [(rows2.shape[0], columns), (rows2.shape[0], width) if keep else (0,)]
    h, pre = call(
        DOT_ACT,
        [jax.ShapeDtypeStruct(shape, rows.dtype) for shape in results],
        (rows2, flat(w, 3), groups, bias2, weights.reshape(-1)),
        num_sms,
        product=FORWARD_FEW if few else FORWARD,
        **attributes,
    )
    found = [h, pre] if keep else [h]
    return [x.reshape(*rows.shape[:-1], x.shape[-1]) for x in found]


def act_dot_grad(
    ct: jax.Array,
    pre: jax.Array,
    weights: jax.Array,
    w_out: jax.Array,
    sizes: jax.Array,
    *,
    activation: FusedActivation,
    num_sms: int | None,
) -> list[jax.Array]:
    columns = w_out.shape[-2]
    groups = table(sizes, lead_of(ct), ct.shape[-2], w_out.shape[:-3], has_tail=False)
    ct2, pre2 = flat(ct, 2), flat(pre, 2)
    num_rows, num_tiles = ct2.shape[0], -(-columns // TILE_COLUMNS)
    ct_pre, h, partial = call(
        ACT_DOT_GRAD,
        [
            jax.ShapeDtypeStruct(pre2.shape, pre.dtype),
            jax.ShapeDtypeStruct((num_rows, columns), pre.dtype),
            jax.ShapeDtypeStruct((num_tiles, num_rows), jnp.float32),
        ],
        (ct2, flat(w_out, 3), groups, pre2, weights.reshape(-1)),
        num_sms,
        aliases={3: 0},  # a warp reads its elements before it writes them
        **attributes_of(activation),
    )
    # The sum in the order of tiles, which no choice of XLA changes.
    ct_weights = functools.reduce(operator.add, (partial[i] for i in range(num_tiles)))
    return [
        ct_pre.reshape(pre.shape),
        h.reshape(*pre.shape[:-1], columns),
        ct_weights.reshape(weights.shape),
    ]


def attributes_of(activation: FusedActivation) -> dict[str, Any]:
    return dict(
        activation=np.int64(activation.code),
        gated=np.int64(activation.gated),
        alpha=np.float32(activation.alpha),
        limit=np.float32(activation.limit),
    )
