"""Lower experts on NVIDIA GPUs. Kernels compute a product and, in the epilogue, the activation. If
they do not support the operands, grouped products and element-wise operations run."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..group import native
from ..grouped import lowering as grouped
from ..grouped.lowering import call, flat, sizes_of, table
from ..grouped.reference import arrays_of
from .activations import KINDS, FusedActivation

SCALED_BIAS = len(KINDS)  # no activation: adds the weight of a row times the bias


def _sizes(rows: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[int, int, int, int]:
    return sizes_of(rows, sizes, arrays_of(w)[0].shape)


def of_operands(function: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a function of operands to a function of their leaves and their structure ``tree``."""

    @functools.wraps(function)
    def of_leaves(*leaves: Any, tree: jax.tree_util.PyTreeDef, **params: object) -> Any:
        return function(tree.unflatten(leaves), **params)

    return of_leaves


@of_operands
def why_no_dot_act(o: Any, *, activation: FusedActivation, **_: object) -> str:
    """Return '' if the kernel can compute ``dot_act_p`` for these types, else the reason."""
    num_rows, num_groups, k, width = _sizes(o.rows, o.w, o.sizes)
    of_columns = (width, width // activation.width(1))  # before and after the activation
    whys = (grouped.why_no_kernel(o.rows.dtype, num_rows, num_groups, k, n) for n in of_columns)
    return next(filter(None, whys), "")


@of_operands
def why_no_dot_bias(o: Any, **_: object) -> str:
    return grouped.why_no_kernel(o.rows.dtype, *_sizes(o.rows, o.w, o.sizes))


@of_operands
def why_no_act_dot_grad(o: Any, **_: object) -> str:
    return grouped.why_no_kernel(o.ct.dtype, *_sizes(o.ct, o.w_out, o.sizes))


@of_operands
def dot_act(o: Any, *, activation: FusedActivation, keep: bool) -> list[jax.Array]:
    columns = arrays_of(o.w)[0].shape[-1] // activation.width(1)
    return _product(o, columns, keep, activation.attributes)


@of_operands
def dot_bias(o: Any) -> jax.Array:
    attributes = dict(FusedActivation("silu").attributes, activation=SCALED_BIAS)
    columns = arrays_of(o.w)[0].shape[-1]
    return _product(o, columns, False, attributes)[0]


def _product(
    operands: Any, columns: int, keep: bool, attributes: dict[str, Any]
) -> list[jax.Array]:
    """Call the kernel for a ``Product`` and, in the epilogue, the activation. Return activations
    with ``columns`` columns, and with ``keep`` also the product."""
    rows, w, bias, weights, sizes = operands
    ws = arrays_of(w)
    num_rows, width = rows.shape[-2], ws[0].shape[-1]
    if bias is None:
        bias2 = jnp.zeros(0, rows.dtype)
        leads, (w3, *spare) = tuple(w.shape[:-2] for w in ws), (flat(w, 3) for w in ws)
    else:
        pairs = zip(ws, arrays_of(bias), strict=True)
        leads, (w3, *spare), biases = zip(*(grouped.aligned(*pair, 2) for pair in pairs))
        bias2 = biases[0] if len(biases) == 1 else jnp.concatenate(biases)
    groups = table(sizes, rows.shape[:-2], num_rows, *leads, has_tail=False)
    rows2 = flat(rows, 2)
    results = [(rows2.shape[0], columns), (rows2.shape[0], width) if keep else (0,)]
    h, pre = call(
        "moe_a2a_dot_act",
        [jax.ShapeDtypeStruct(shape, rows.dtype) for shape in results],
        (rows2, w3, groups, bias2, weights.reshape(-1), *spare),
        None,
        **attributes,
    )
    found = [h, pre] if keep else [h]
    return [x.reshape(*rows.shape[:-1], x.shape[-1]) for x in found]


@of_operands
def act_dot_grad(operands: Any, *, activation: FusedActivation) -> list[jax.Array]:
    ct, pre, weights, w_out, sizes = operands
    ws = arrays_of(w_out)
    columns = ws[0].shape[-2]
    leads = [w.shape[:-2] for w in ws]
    groups = table(sizes, ct.shape[:-2], ct.shape[-2], *leads, has_tail=False)
    w3, *spare = (flat(w, 3) for w in ws)
    ct2, pre2 = flat(ct, 2), flat(pre, 2)
    num_rows, num_dots = ct2.shape[0], -(-columns // native.limit("DOT_COLUMNS"))
    ct_pre, h, partial = call(
        "moe_a2a_act_dot_grad",
        [
            jax.ShapeDtypeStruct(pre2.shape, pre.dtype),
            jax.ShapeDtypeStruct((num_rows, columns), pre.dtype),
            jax.ShapeDtypeStruct((num_dots, num_rows), jnp.float32),
        ],
        (ct2, w3, groups, pre2, weights.reshape(-1), *spare),
        None,
        aliases={3: 0},  # a tile of pre is in shared memory before its gradient is stored
        **activation.attributes,
    )
    # ``+`` fixes the order of the terms, which XLA could change in ``sum``.
    ct_weights = functools.reduce(operator.add, (partial[i] for i in range(num_dots)))
    return [
        ct_pre.reshape(pre.shape),
        h.reshape(*pre.shape[:-1], columns),
        ct_weights.reshape(weights.shape),
    ]
