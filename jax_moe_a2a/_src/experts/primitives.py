"""Define ``experts_p``, two grouped products around an activation, and related primitives.

``experts_p`` computes ``y = (weights * act(rows w_in + b_in)) w_out + weights * b_out``. Each row
is multiplied by the matrices of its group. The last operands may be the totals of w_in and w_out
(``grouped/totals.py``), which are then also the last results. The derivatives of ``experts_p`` use
the following primitives. Let ``pre = rows w_in + b_in`` and ``h = weights * act(pre)``.

- ``dot_act_p`` computes h, and with ``keep`` also pre, from rows and w_in.
- ``dot_bias_p`` computes ``h w_out + weights * b_out``.
- ``act_dot_tangent_p`` is jointly linear in (d_pre, d_weights, d_w_out):
  ``(weights * act'(pre) * d_pre + d_weights * act(pre)) w_out + h d_w_out``. With ``passes``,
  d_w_out is the tangent of a total, and is returned as second result.
- ``act_dot_grad_p`` computes one product, ``ct_h = ct_y w_out^T``. It returns the cotangents
  ``ct_pre = weights * act'(pre) * ct_h`` and ``ct_weights = <ct_h, act(pre)>``, and h. The
  cotangent of w_out is the outer product of h and ct_y. If ``experts_p`` has totals,
  ``add_outer_p`` adds this cotangent to the total of w_out.

Therefore no separate kernel for the activation reads all rows. For the backward pass, rows and pre
are kept, and y is not. Derivatives of any order exist: second derivatives differentiate the
compositions below, which consist of grouped products and jnp.

Weights that are trained in FP8 are ``QuantizedExperts`` from ``encode_source``. Their tangents are
the tangents of the source. ``grouped/straight_through.py`` defines products with them. With these
weights, the primitives differ as follows:

- ``act_dot_p`` computes ``h w_out`` from pre, in place of ``dot_act_p`` and ``dot_bias_p``, and
  stores h only in FP8.
- ``act_dot_tangent_p`` is also linear in d_rows, because d_pre has the term ``d_rows w_in``. Its
  transpose therefore includes the product of ct_pre and w_in^T. ``act_grad_p`` (``act_grad.py``)
  computes and quantizes ct_pre in one pass.

Operands are as in ``grouped/primitives.py``: rows [*B, C, K], w_in [*B, L, K, N'], b_in [*B, L,
N'], weights [*B, C] in the accumulation dtype, w_out [*B, L, I, H], sizes [*B, L]. Results after
the last group are unspecified. The parameter ``tree`` is the structure of the operands, such as a
``Product``. ``w_in``, ``b_in``, ``w_out`` and ``b_out`` may be tuples (home array, spare array),
like ``w`` and ``spare`` of ``grouped_dot_p``. If one is a tuple, all are.

A row without a token has the weight 0. In rows with the weight 0, h and ct_pre are exactly zero for
any pre and ct_y. ct_weights is also computed for rows with the weight 0. In rows without a token,
it may have any value, because the caller ignores it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from .. import compat
from ..ad import is_zero, jvp_of_moving, named, zero_tangent
from ..formats.formats import RowsInFp8, floats_of
from ..grouped.act_encode import bind_act_encode
from ..grouped.lowering import by_kernel
from ..grouped.primitives import (
    all_or_none,
    bind,
    grouped_dot_p,
    outers_like,
    register,
    rows_like,
    unspecified_dot,
)
from ..grouped.primitives import sum_of as _sum
from ..grouped.quantized import bind_dot_fp8
from ..grouped.reference import arrays_of, scaled
from ..grouped.straight_through import dot_in_fp8
from ..grouped.totals import bind_add_outer, passing_dot_p
from ..grouped.weights import QuantizedExperts, from_bits
from . import lowering as lowered
from .act_grad import bind_act_grad, gradients
from .activations import FusedActivation
from .lowering import of_operands

experts_p = compat.Primitive("moe_a2a_experts")
dot_act_p = compat.Primitive("moe_a2a_dot_act")
dot_bias_p = compat.Primitive("moe_a2a_dot_bias")
act_dot_p = compat.Primitive("moe_a2a_act_dot")
act_dot_tangent_p = compat.Primitive("moe_a2a_act_dot_tangent")
act_dot_grad_p = compat.Primitive("moe_a2a_act_dot_grad")
for _primitive in (experts_p, dot_act_p, act_dot_tangent_p, act_dot_grad_p):
    _primitive.multiple_results = True

# ``bias_of_rows`` computes a grouped product with matrices [BIAS_ROWS, N]. The bias is the first
# row, and all other rows are zero. For the kernel, BIAS_ROWS must be a multiple of 8.
BIAS_ROWS = 8


PRODUCTS_CHECKPOINT_NAME = "moe_a2a_products"
"""Checkpoint name, a str, of the inputs of the activation in ``moe_mlp``: products plus bias.

If a policy of ``jax.checkpoint`` saves only this name and ``ROUTING_CHECKPOINT_NAME``, the backward
pass repeats no product, but it repeats the dispatch, because rows are not saved."""


class ExpertOperands(NamedTuple):
    """The operands of ``experts_p``. Biases may be None. If w_in or w_out is in FP8, both are, and
    the rows may be ``RowsInFp8``."""

    rows: Any
    w_in: Any
    b_in: Any
    weights: Any
    w_out: Any
    b_out: Any
    sizes: Any
    totals: tuple[Any, ...] = ()
    """The totals of w_in and w_out, or an empty tuple."""


class Product(NamedTuple):
    """The operands of ``dot_act_p``, ``dot_bias_p`` and ``act_dot_p``. The bias may be None."""

    rows: Any
    w: Any
    bias: Any
    weights: Any
    sizes: Any


class TangentOperands(NamedTuple):
    """The operands of ``act_dot_tangent_p``, which is linear in the first four operands. Some of
    these four may be None. If weights are not in FP8, d_rows and w_in are None."""

    d_rows: Any
    d_pre: Any
    d_weights: Any
    d_w_out: Any
    pre: Any
    weights: Any
    w_in: Any
    w_out: Any
    sizes: Any


class Gradient(NamedTuple):
    """The operands of ``act_dot_grad_p``."""

    ct: Any
    pre: Any
    weights: Any
    w_out: Any
    sizes: Any


# In these operands, ``vmap`` adds axes of full size. In all others, it may add axes of size 1.
FULL = ("rows", "weights", "d_rows", "d_pre", "d_weights", "ct", "pre")


def _bind(primitive: compat.Primitive, operands: Any, **params: object) -> Any:
    leaves, tree = jax.tree.flatten(operands)
    return bind(primitive, *leaves, tree=tree, **params)


def _places(tree: jax.tree_util.PyTreeDef) -> Any:
    """Return the operands with their index in place of each array."""
    return tree.unflatten(range(tree.num_leaves))


def _is_full(*, tree: jax.tree_util.PyTreeDef, **_: object) -> list[bool]:
    named = _places(tree)._asdict()
    return [name in FULL for name, places in named.items() for _ in jax.tree.leaves(places)]


def bind_experts(
    operands: ExpertOperands, *, activation: FusedActivation
) -> tuple[jax.Array, list[jax.Array]]:
    """Bind ``experts_p``. Return y and the totals. With totals, the tangents of w_in and w_out are
    ignored, and w_in and w_out must not be tuples."""
    y, *totals = _bind(experts_p, operands, activation=activation)
    return y, totals


def _dot(rows: Any, w: Any, sizes: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Multiply rows by weights. If the weights are in FP8, the product is in FP8."""
    if isinstance(w, QuantizedExperts):
        return dot_in_fp8(rows, w, sizes, transposed=transposed)
    return unspecified_dot(rows, w, sizes, transposed=transposed)


def _floats(x: Any) -> Any:
    """Return the source of weights in FP8, the floats of rows in FP8, or else ``x``."""
    return x.source if isinstance(x, QuantizedExperts) else floats_of(x)


def _bind_dot_act(o: ExpertOperands, **params: object) -> list[jax.Array]:
    return _bind(dot_act_p, Product(o.rows, o.w_in, o.b_in, o.weights, o.sizes), **params)


def _bind_dot_bias(h: jax.Array, o: ExpertOperands) -> jax.Array:
    """Bind ``dot_bias_p``. If there is no bias, bind a grouped product."""
    if o.b_out is None:
        return _dot(h, o.w_out, o.sizes)
    operands = Product(h, o.w_out, o.b_out, o.weights, o.sizes)
    return _bind(dot_bias_p, operands)


# Functions of grouped products and jnp that define the results of the primitives


def bias_of_rows(bias: Any, scale: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return [*B, C, N]: each row's scale [*B, C] times the bias [*B, L, N] of its expert.

    This is a grouped product and not ``bias[experts]``, whose gradient would add rows in an
    unspecified order.
    """

    def padded(x: jax.Array, axis: int) -> jax.Array:
        x = jnp.expand_dims(x, axis)
        return jnp.pad(x, [(0, (BIAS_ROWS - 1) * (i == x.ndim + axis)) for i in range(x.ndim)])

    rows = scale.astype(arrays_of(bias)[0].dtype)
    padded_bias = jax.tree.map(lambda x: padded(x, -2), bias)
    return _dot(padded(rows, -1), padded_bias, sizes)


def _pre(rows: Any, w: Any, bias: jax.Array | None, sizes: jax.Array) -> jax.Array:
    pre = _dot(rows, w, sizes)
    if bias is None:
        return pre
    return pre + bias_of_rows(bias, jnp.ones(pre.shape[:-1], pre.dtype), sizes)


@of_operands
def _dot_act(
    o: Product,
    *,
    activation: FusedActivation,
    keep: bool,
    selects: bool = True,
) -> list[jax.Array]:
    rows, w, bias, weights, sizes = o
    pre = _pre(rows, w, bias, sizes)
    h = scaled(activation(pre), weights, selects).astype(rows.dtype)
    return [h, pre] if keep else [h]


@of_operands
def _experts(o: ExpertOperands, **params: Any) -> list[jax.Array]:
    if isinstance(o.w_out, QuantizedExperts):
        return [_products_in_fp8(o, **params)[1], *o.totals]
    (h,) = _bind_dot_act(o, keep=False, **params)
    return [_bind_dot_bias(h, o), *o.totals]


def _products_in_fp8(o: ExpertOperands, **params: Any) -> tuple[jax.Array, jax.Array]:
    """Return pre and y of experts in FP8."""
    pre = _pre(o.rows, o.w_in, o.b_in, o.sizes)
    y = _bind(act_dot_p, Product(pre, o.w_out, None, o.weights, o.sizes), **params)
    if o.b_out is not None:
        y += bias_of_rows(o.b_out, o.weights, o.sizes)
    return pre, y


@of_operands
def _act_dot(o: Product, *, activation: FusedActivation) -> jax.Array:
    h = bind_act_encode(o.rows, o.weights, o.sizes, activation=activation)
    w = from_bits(o.w.values, o.w.scales)
    return bind_dot_fp8(h, w, o.sizes, dtype=o.rows.dtype, tail="unspecified")


@of_operands
def _dot_bias(o: Product) -> jax.Array:
    h, w_out, b_out, weights, sizes = o
    return _dot(h, w_out, sizes) + bias_of_rows(b_out, weights, sizes)


@of_operands
def _act_dot_tangent(
    o: TangentOperands,
    *,
    activation: FusedActivation,
    passes: bool,
    selects: bool = True,
) -> list[jax.Array]:
    d_rows, d_pre, d_weights, d_w_out, pre, weights, w_in, w_out, sizes = o
    act, terms = None, []
    if d_rows is not None:
        of_rows = _dot(d_rows, _floats(w_in), sizes)
        d_pre = of_rows if d_pre is None else d_pre + of_rows
    if d_pre is not None:
        act, d_act = jax.jvp(activation, (pre,), (d_pre,))
        terms.append(scaled(d_act, weights, selects))
    if act is None:
        act = activation(pre)
    if d_weights is not None:
        terms.append(scaled(act, d_weights, False))
    out = []
    if terms:
        d_h = sum(terms[1:], terms[0]).astype(pre.dtype)
        out.append(_dot(d_h, _floats(w_out), sizes))
    if d_w_out is not None:
        h = scaled(act, weights, selects).astype(pre.dtype)
        out.append(_dot(h, d_w_out, sizes))
    return [sum(out[1:], out[0]), *([d_w_out] if passes else [])]


@of_operands
def _act_dot_grad(
    o: Gradient, *, activation: FusedActivation, selects: bool = True
) -> list[jax.Array]:
    ct, pre, weights, w_out, sizes = o
    ct_h = _dot(ct, w_out, sizes, transposed=True)
    return gradients(ct_h, pre, weights, activation=activation, selects=selects)


def _product_of(rows: Any, w: Any) -> Any:
    return rows_like(rows, arrays_of(w)[0].shape[-1])


def _dot_act_types(
    o: Product, *, keep: bool, activation: FusedActivation, **_: object
) -> list[Any]:
    pre = _product_of(o.rows, o.w)
    h = rows_like(o.rows, pre.shape[-1] // activation.width(1))
    return [h, pre] if keep else [h]


def _tangent_types(o: TangentOperands, *, passes: bool, **_: object) -> list[Any]:
    return [_product_of(o.pre, o.w_out), *([o.d_w_out] if passes else [])]


def _grad_types(o: Gradient, **_: object) -> list[Any]:
    h = rows_like(o.pre, arrays_of(o.w_out)[0].shape[-2])
    return [rows_like(o.pre, o.pre.shape[-1]), h, o.weights]


def _experts_jvp(
    primals: compat.Primals,
    tangents: compat.Tangents,
    *,
    tree: jax.tree_util.PyTreeDef,
    **params: Any,
) -> Any:
    o, d = tree.unflatten(primals), _tangents(tree, tangents)
    rows = _floats(o.rows)
    passes, in_fp8 = bool(o.totals), isinstance(o.w_out, QuantizedExperts)
    d_w_in, d_w_out = d.totals or (d.w_in, d.w_out)
    if in_fp8:
        pre, y = _products_in_fp8(o, **params)
    else:
        h, pre = _bind_dot_act(o, keep=True, **params)
        y = _bind_dot_bias(h, o)
    pre = named(pre, PRODUCTS_CHECKPOINT_NAME)
    terms = []
    d_rows = d.rows if in_fp8 and not is_zero(d.rows) else None
    if not (in_fp8 or is_zero(d.rows)):
        terms.append(_dot(d.rows, o.w_in, o.sizes))
    if not is_zero(d_w_in):
        term, d_w_in = _dot_of(rows, d_w_in, o.sizes, passes)
        terms.append(term)
    if o.b_in is not None and not is_zero(d.b_in):
        ones = jnp.ones(rows.shape[:-1], rows.dtype)
        terms.append(bias_of_rows(d.b_in, ones, o.sizes))
    d_y = []
    if terms or d_rows is not None or not is_zero(d.weights) or (in_fp8 and not is_zero(d_w_out)):
        d_pre = sum(terms[1:], terms[0]) if terms else None
        d_weights, moving = (None if is_zero(x) else x for x in (d.weights, d_w_out))
        w_in = o.w_in if in_fp8 else None
        known = pre, o.weights, w_in, o.w_out, o.sizes
        operands = TangentOperands(d_rows, d_pre, d_weights, moving, *known)
        moves = passes and moving is not None
        term, *passed = _bind(act_dot_tangent_p, operands, passes=moves, **params)
        (d_w_out,) = passed or [d_w_out]
        d_y.append(term)
    elif not is_zero(d_w_out):
        term, d_w_out = _dot_of(h, d_w_out, o.sizes, passes)
        d_y.append(term)
    if o.b_out is not None:
        d_y += _bias_terms(o.b_out, d.b_out, o.weights, d.weights, o.sizes)
    return [y, *o.totals], [_sum(y, d_y), *([d_w_in, d_w_out] if passes else [])]


def _dot_of(rows: jax.Array, d_w: Any, sizes: jax.Array, passes: bool) -> Sequence[Any]:
    """Return rows times the tangent of weights, and the tangent that the next product gets."""
    if passes:
        return bind(passing_dot_p, rows, d_w, sizes)
    return _dot(rows, d_w, sizes), d_w


def _bias_terms(
    bias: Any, d_bias: Any, scale: jax.Array, d_scale: Any, sizes: jax.Array
) -> list[jax.Array]:
    """Return the terms of the tangent of ``bias_of_rows``."""
    moving = [(d_bias, scale), (bias, d_scale)]
    return [bias_of_rows(*pair, sizes) for pair in moving if not any(map(is_zero, pair))]


def _tangents(tree: jax.tree_util.PyTreeDef, tangents: compat.Tangents) -> Any:
    """Return the tangents in the structure of the operands, with one zero for a tuple of zeros."""
    d = tree.unflatten(tangents)
    return d._replace(
        **{name: all_or_none(_floats(x)) for name, x in d._asdict().items() if name != "totals"}
    )


def _dot_bias_jvp(
    primals: compat.Primals,
    tangents: compat.Tangents,
    *,
    tree: jax.tree_util.PyTreeDef,
) -> Any:
    h, w_out, b_out, weights, sizes = tree.unflatten(primals)
    d_h, d_w_out, d_b_out, d_weights, _ = _tangents(tree, tangents)
    y = bind(dot_bias_p, *primals, tree=tree)
    moving = [(d_h, w_out), (h, d_w_out)]
    terms = [_dot(*pair, sizes) for pair in moving if not any(map(is_zero, pair))]
    terms += _bias_terms(b_out, d_b_out, weights, d_weights, sizes)
    return y, _sum(y, terms)


def _tangent_transpose(
    cts: compat.Tangents,
    *operands: Any,
    tree: jax.tree_util.PyTreeDef,
    activation: FusedActivation,
    passes: bool,
) -> list[Any]:
    ct, *passed = cts
    o = tree.unflatten(operands)
    moving = [d if ad.is_undefined_primal(d) else None for d in o[:3]]
    d_w_out = arrays_of(o.d_w_out)
    of_w = any(map(ad.is_undefined_primal, d_w_out))
    found: list[Any] = [None if d is None else ad.Zero(d.aval) for d in moving]
    found.append([ad.Zero(d.aval) if ad.is_undefined_primal(d) else None for d in d_w_out])
    if passes:
        found[3] = passed
    if not is_zero(ct):
        ct_pre: Any = None
        encoded = ct_weights = None
        if all(d is None for d in moving):
            h = scaled(activation(o.pre), o.weights, True).astype(o.pre.dtype)
        elif isinstance(o.w_out, QuantizedExperts):
            ct_h = _dot(ct, o.w_out, o.sizes, transposed=True)
            known = o.pre, o.weights, o.sizes
            ct_pre, h, ct_weights, encoded = bind_act_grad(ct_h, *known, activation=activation)
        else:
            gradient = Gradient(ct, o.pre, o.weights, o.w_out, o.sizes)
            ct_pre, h, ct_weights = _bind(act_dot_grad_p, gradient, activation=activation)
        if passes:
            found[3] = [bind_add_outer(found[3][0], h, ct, o.sizes)]
            # The barrier makes XLA free h and ct before the product with w_in starts.
            ct_pre, encoded, found[3] = lax.optimization_barrier((ct_pre, encoded, found[3]))
        elif of_w:
            of_outer = dict(tail="unspecified", num_sms=None)
            found[3] = outers_like(d_w_out, h, ct, o.sizes, ct, **of_outer)
        if moving[0] is not None:
            rows = ct_pre if encoded is None else RowsInFp8(encoded, ct_pre)
            found[0] = _dot(rows, o.w_in, o.sizes, transposed=True)
        found[1:3] = (None if d is None else x for x, d in zip((ct_pre, ct_weights), moving[1:]))
    of_linear: list[Any] = []
    for x, d in zip(found, o[:4], strict=True):
        if d is not None:
            of_linear += x if isinstance(x, list) else [x]
    return of_linear + [None] * (len(operands) - len(of_linear))


def _tangent_jvp(
    primals: compat.Primals,
    tangents: compat.Tangents,
    *,
    tree: jax.tree_util.PyTreeDef,
    passes: bool,
    **params: object,
) -> Any:
    """Compute the jvp. Tangents of the linear operands use this primitive, and all other tangents
    use the derivative of the composition."""
    o, d = tree.unflatten(primals), _tangents(tree, tangents)
    outs = _bind(act_dot_tangent_p, o, passes=passes, **params)
    num = len(jax.tree.leaves(o[:4]))
    terms = []
    passed = [d.d_w_out] if passes else []
    moving = [None if x is None or is_zero(x) else x for x in d[:4]]
    if any(x is not None for x in moving):
        moves = passes and moving[3] is not None
        of_moving = TangentOperands(*moving, *o[4:])
        term, *found = _bind(act_dot_tangent_p, of_moving, passes=moves, **params)
        passed = found or passed
        terms.append(term)
    if not all(map(is_zero, tangents[num:])):
        options = dict(tree=tree, passes=False, selects=False, **params)
        fn = partial(_act_dot_tangent, *primals[:num], **options)
        terms += _jvp_of(fn, primals[num:], tangents[num:])[1]
    return outs, [_sum(outs[0], terms), *passed]


def _act_dot_jvp(
    primals: compat.Primals,
    tangents: compat.Tangents,
    *,
    tree: jax.tree_util.PyTreeDef,
    **params: object,
) -> Any:
    y = bind(act_dot_p, *primals, tree=tree, **params)
    o, d = tree.unflatten(primals), _tangents(tree, tangents)
    d_pre, d_weights, d_w = (None if is_zero(x) else x for x in (d.rows, d.weights, d.w))
    if d_pre is d_weights is d_w is None:
        return y, zero_tangent(y)
    known = o.rows, o.weights, None, o.w, o.sizes
    operands = TangentOperands(None, d_pre, d_weights, d_w, *known)
    return y, _bind(act_dot_tangent_p, operands, passes=False, **params)[0]


def _grad_jvp(primals: compat.Primals, tangents: compat.Tangents, **params: Any) -> Any:
    (ct, *others), (d_ct, *d_others) = primals, tangents
    outs = bind(act_dot_grad_p, *primals, **params)
    d_outs: list[list[Any]] = [[] for _ in outs]
    if not is_zero(d_ct):
        d_ct_pre, _, d_ct_weights = bind(act_dot_grad_p, d_ct, *others, **params)
        d_outs[0].append(d_ct_pre)
        d_outs[2].append(d_ct_weights)
    if not all(map(is_zero, d_others)):
        fn = partial(_act_dot_grad, ct, selects=False, **params)
        for terms, term in zip(d_outs, _jvp_of(fn, others, d_others)[1], strict=True):
            terms.append(term)
    return outs, list(map(_sum, outs, d_outs))


def _dot_act_jvp(primals: compat.Primals, tangents: compat.Tangents, **params: Any) -> Any:
    outs = bind(dot_act_p, *primals, **params)
    if all(map(is_zero, tangents)):
        return outs, [_sum(out, []) for out in outs]
    return _jvp_of(partial(_dot_act, selects=False, **params), primals, tangents)


def _jvp_of(fn: Callable[..., Any], primals: compat.Primals, tangents: compat.Tangents) -> Any:
    """Return the results of ``fn`` and their tangents. ``tangents`` may contain symbolic zeros."""
    return jvp_of_moving(fn, [not is_zero(d) for d in tangents], primals, tangents)


def _grad_transpose(
    cts: compat.Tangents, *operands: Any, tree: jax.tree_util.PyTreeDef, **params: object
) -> list[Any]:
    """Compute the cotangent of ``ct`` with ``act_dot_tangent_p``. Other operands get None."""
    ct_pre, _, ct_weights = (None if is_zero(c) else c for c in cts)
    ct, pre, weights, w_out, sizes = tree.unflatten(operands)
    found: Any = ad.Zero(ct.aval)
    if ct_pre is not None or ct_weights is not None:
        known = pre, weights, None, w_out, sizes
        linear = TangentOperands(None, ct_pre, ct_weights, None, *known)
        (found,) = _bind(act_dot_tangent_p, linear, passes=False, **params)
    return [found] + [None] * (len(operands) - 1)


def _dot_act_dce(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Do not store pre if the program does not use it. If the program does not use h, and there is
    no bias, replace the primitive by a grouped product, which computes pre."""
    rows, w, bias, weights, sizes = eqn.params["tree"].unflatten(eqn.invars)
    if used[0] or bias is not None:
        if not all(used[1:]):
            eqn = eqn.replace(outvars=eqn.outvars[:1], params=dict(eqn.params, keep=False))
        return [True] * len(eqn.invars), eqn
    w, *spare = arrays_of(w)
    params = dict(transposed=False, dtype=rows.aval.dtype, tail="unspecified", num_sms=None)
    dot = dict(primitive=grouped_dot_p, invars=[rows, w, sizes, *spare], params=params)
    return [var is not weights for var in eqn.invars], eqn.replace(outvars=eqn.outvars[1:], **dot)


def _dce_in_fp8(used: Sequence[bool], eqn: Any) -> tuple[list[bool], Any]:
    """Remove unread transposed values, so that programs without gradients do not compute them."""
    in_fp8 = lambda x: isinstance(x, QuantizedExperts)
    cut = lambda x: dataclasses.replace(x, transposed=None) if in_fp8(x) else x
    operands = jax.tree.map(cut, eqn.params["tree"].unflatten(eqn.invars), is_leaf=in_fp8)
    leaves, tree = jax.tree.flatten(operands)
    kept = set(map(id, leaves))
    is_read = [id(x) in kept for x in eqn.invars]
    return is_read, eqn.replace(invars=leaves, params=dict(eqn.params, tree=tree))


register(
    experts_p,
    abstract=of_operands(lambda o, **_: [_product_of(_floats(o.rows), o.w_out), *o.totals]),
    jvp=_experts_jvp,
    is_full=_is_full,
    passed=lambda tree, **_: _places(tree).totals,
    composition=_experts,
)
register(
    dot_act_p,
    abstract=of_operands(_dot_act_types),
    jvp=_dot_act_jvp,
    is_full=_is_full,
    composition=_dot_act,
    cuda=by_kernel(lowered.why_no_dot_act, lowered.dot_act, _dot_act),
)
register(
    dot_bias_p,
    abstract=of_operands(lambda o, **_: _product_of(o.rows, o.w)),
    jvp=_dot_bias_jvp,
    is_full=_is_full,
    composition=_dot_bias,
    cuda=by_kernel(lowered.why_no_dot_bias, lowered.dot_bias, _dot_bias),
)
register(
    act_dot_p,
    abstract=of_operands(lambda o, **_: _product_of(o.rows, o.w)),
    jvp=_act_dot_jvp,
    is_full=_is_full,
    composition=_act_dot,
)
register(
    act_dot_tangent_p,
    abstract=of_operands(_tangent_types),
    jvp=_tangent_jvp,
    transpose=_tangent_transpose,
    is_full=_is_full,
    passed=lambda tree, passes, **_: [_places(tree).d_w_out] if passes else [],
    composition=_act_dot_tangent,
)
register(
    act_dot_grad_p,
    abstract=of_operands(_grad_types),
    jvp=_grad_jvp,
    transpose=_grad_transpose,
    is_full=_is_full,
    composition=_act_dot_grad,
    cuda=by_kernel(lowered.why_no_act_dot_grad, lowered.act_dot_grad, _act_dot_grad),
)
compat.register_dce_rule(dot_act_p, _dot_act_dce)
compat.register_dce_rule(experts_p, _dce_in_fp8)
compat.register_dce_rule(act_dot_p, _dce_in_fp8)
