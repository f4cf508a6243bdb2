"""Define three *forms*: ways in which a rank applies its experts to its rows.

A form is a function of rows, weights, group sizes and totals of the weights. It returns the outputs
[C, H] and new totals. Outputs after the last group are unspecified. The forms are:

- *fused*: the kernels of the products also apply the activation and its derivative. If weights are
  trained in FP8, these kernels also quantize.
- *composed*: separate passes apply the activation between two products. The products of LoRA
  adapters are added.
- *frozen*: products read rows and weights that are already in FP8. The weights have no gradient.

If weights are trained in FP8, the first product quantizes the rows, unless they are ``RowsInFp8``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from .. import compat, paths, scopes
from ..ad import accumulation_dtype, fixed, named, register_fixed, with_tangent
from ..checks import Tail, short
from ..experts.activations import FusedActivation, recognize
from ..experts.primitives import (
    PRODUCTS_CHECKPOINT_NAME,
    ExpertOperands,
    bias_of_rows,
    bind_experts,
)
from ..formats.formats import BlockwiseFp8, RowsInFp8, floats_of
from ..grouped.act_encode import bind_act_encode
from ..grouped.api import grouped_dot
from ..grouped.frozen import dot_of_frozen
from ..grouped.primitives import unspecified_dot
from ..grouped.quantized import encode_rows
from ..grouped.straight_through import dot_in_fp8
from ..grouped.totals import summing_dot
from ..grouped.weights import QuantizedExperts, encode_source
from ..paths import Choice
from .lora import add_product
from .placed import Rows
from .weights import Activation, Experts, Totals

Form: TypeAlias = Callable[[Rows, Experts, jax.Array, Totals], tuple[jax.Array, Totals]]
"""A way in which a rank applies its experts. Fields of ``Experts`` may be tuples (home, spare),
unless the weights are trained in FP8."""


def choose_form(weights: Experts, activation: Activation, tail: Tail) -> Form:
    """Return the form for ``weights``, whose w_in has gate and up side by side (``weights.flat``).
    ``tail`` is the argument of the dispatch."""
    width, intermediate = weights.w_in.shape[-1], weights.w_out.shape[-2]
    # If the kernels know this activation, use the function in ``KINDS``, because some versions of
    # JAX cannot differentiate the function that the caller passed.
    known = recognize(activation)
    if known is not None and known.width(intermediate) != width:
        known = None
    in_training = weights.is_trained_in_fp8
    # Kernels that apply an activation do not write rows after the last group. Under jax_debug_nans,
    # ``tail`` is "zero", and such rows would raise an error if they contain NaN.
    fused = None if tail != "unspecified" else known
    if known is None:
        why = (
            "the activation is not one of those that the kernels compute (jax.nn.silu, "
            "jax.nn.gelu, jax.nn.relu, ma.squared_relu, each also in ma.gated; ma.clamped_swiglu); "
            f"got {getattr(activation, '__name__', activation)!r}"
        )
    elif weights.has_lora:
        why = "adapters add to the product before the activation"
    elif fused is not None:
        why = "no kernel computes the derivative of an activation that is quantized"
    else:
        why = "jax_debug_nans must not see the rows that the kernels leave unwritten"
    # For the backward pass, keep only the operands of the activation, and compute it again.
    activate = jax.checkpoint(partial(_activate, known or activation, intermediate, why))
    if isinstance(weights.w_in, QuantizedExperts) and not in_training:
        return _frozen(activate, fused, tail)
    if fused is not None and not weights.has_lora:
        return partial(_fused, activation=fused)
    of_rows = lambda product, rows, _: activate(product, rows.weights, rows.has_token)
    return partial(_composed, multiply=_multiply, activate=of_rows)


@scopes.products
def _fused(
    rows: Rows, weights: Experts, sizes: jax.Array, totals: Totals, *, activation: FusedActivation
) -> tuple[jax.Array, Totals]:
    given = tuple(jax.tree.leaves(totals))
    if weights.is_trained_in_fp8:
        weights = weights.map_weights(encode_source)
    w_in, w_out, b_in, b_out = weights.w_in, weights.w_out, weights.b_in, weights.b_out
    operands = ExpertOperands(rows.rows, w_in, b_in, rows.weights, w_out, b_out, sizes, given)
    y, found = bind_experts(operands, activation=activation)
    return y, jax.tree.unflatten(jax.tree.structure(totals), found)


@scopes.products
def _composed(
    rows: Rows,
    weights: Experts,
    sizes: jax.Array,
    totals: Totals,
    *,
    multiply: Callable[..., tuple[jax.Array, jax.Array | None]],
    activate: Callable[[jax.Array, Rows, jax.Array], Any],
) -> tuple[jax.Array, Totals]:
    """Apply experts with two products. ``multiply`` is a function like ``_multiply``. ``activate``
    maps the first product's result, ``rows`` and ``sizes`` to the operand of the second product."""

    def dot(rows: Any, w: Any) -> jax.Array:
        return unspecified_dot(floats_of(rows), w, sizes)

    product, of_in = multiply(rows.rows, weights.w_in, sizes, totals.w_in)
    product = add_product(product, rows.rows, weights.lora_in, dot)
    if weights.b_in is not None:
        ones = jnp.ones(rows.has_token.shape, jnp.float32)
        product += bias_of_rows(weights.b_in, ones, sizes)
    product = named(product, PRODUCTS_CHECKPOINT_NAME)
    h = activate(product, rows, sizes)
    y, of_out = multiply(h, weights.w_out, sizes, totals.w_out)
    y = add_product(y, h, weights.lora_out, dot)
    if weights.b_out is not None:
        y += bias_of_rows(weights.b_out, rows.weights, sizes)
    return y, dataclasses.replace(totals, w_in=of_in, w_out=of_out)


def _multiply(
    rows: Any, w: Any, sizes: jax.Array, total: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    if total is not None:
        return summing_dot(rows, w, total, sizes)
    if isinstance(w, tuple):
        return unspecified_dot(rows, w, sizes), None
    if isinstance(w, QuantizedExperts):
        return dot_in_fp8(rows, w, sizes), None
    return grouped_dot(rows, w, sizes, tail="unspecified"), None


def _frozen(activate: Callable[..., jax.Array], fused: FusedActivation | None, tail: Tail) -> Form:
    """Return the form for ``RowsInFp8`` and frozen weights. If ``fused`` is not None, one kernel
    applies this activation and quantizes the result."""

    def multiply(rows: Any, w: Any, sizes: jax.Array, _: object) -> tuple[jax.Array, None]:
        return dot_of_frozen(rows, w, sizes, tail=tail), None

    def activate_and_quantize(product: jax.Array, rows: Rows, sizes: jax.Array) -> RowsInFp8:
        if fused is None:
            activated = activate(product, rows.weights, rows.has_token)
            return RowsInFp8(encode_rows(fixed(activated), "the result of activation"), activated)
        row_weights = jnp.where(rows.has_token, fixed(rows.weights).astype(jnp.float32), 0)
        encoded = bind_act_encode(fixed(product), row_weights, sizes, activation=fused)

        def tangent_of(primals: compat.Primals, tangents: compat.Tangents) -> jax.Array:
            of_floats = lambda product, weights: activate(product, weights, primals[2])
            return jax.jvp(of_floats, primals[:2], tangents[:2])[1]

        floats = BlockwiseFp8().decode(encoded, product.dtype)
        operands = product, rows.weights, rows.has_token
        return RowsInFp8(encoded, with_tangent(floats, tangent_of, *operands))

    return partial(_composed, multiply=multiply, activate=activate_and_quantize)


unfused_p = compat.Primitive("moe_a2a_unfused_activation")
"""An identity that marks an activation outside of the kernels, so that ``explain`` can report it.
Its parameter ``why`` is the reason."""

register_fixed(unfused_p)


def _choose_passes(ctx: compat.Context, x: compat.Value, *, why: str) -> Choice:
    return Choice("passes over the rows", why, lambda: [x])


mlir.register_lowering(unfused_p, paths.lowering(unfused_p, _choose_passes), platform="cuda")


@scopes.activation
def _activate(
    activation: Activation,
    intermediate: int,
    why: str,
    product: jax.Array,
    row_weights: jax.Array,
    is_row: jax.Array,
) -> jax.Array:
    """Return ``row_weights * activation(product)``, [C, I], in the dtype of ``product``.

    Rows without a token, and their weights, have unspecified values, which must not affect a
    gradient. If the activation reads an array of the enclosing function, each row without a token
    adds 0 * act'(row) to the gradient of that array. This product is NaN if act' is infinite, and
    act' may be infinite at 0, or at any other fixed value. Therefore each row without a token is
    replaced by a row with a token before the activation, and by zeros after it.
    """
    has_token = is_row[:, None]
    # If any row has a token, the first row has one. If no row has, use 0.5, where most activations
    # and their derivatives are finite.
    first = jnp.where(has_token[:1], unfused_p.bind(product[:1], why=why), 0.5)
    act = activation(jnp.where(has_token, product, first))
    expected = (product.shape[0], intermediate)
    if getattr(act, "shape", None) != expected or not jnp.issubdtype(act.dtype, jnp.floating):
        got = short(act) if hasattr(act, "shape") else repr(act)
        raise ValueError(
            f"activation must return floats [C, I]={list(expected)}, because w_out has I="
            f"{intermediate}; got {got} for {short(product)}. For a gated "
            "activation, use ma.gated"
        )
    acc_dtype = accumulation_dtype(act.dtype)
    weights = jnp.where(is_row, row_weights.astype(acc_dtype), 0)
    weighted = act.astype(acc_dtype) * weights[:, None]
    return jnp.where(has_token, weighted, 0).astype(product.dtype)
