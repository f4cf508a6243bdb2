"""Check the arguments of layers in FP8, and define how their experts multiply and activate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..ad import fixed, with_tangent
from ..checks import Tail, short
from ..exchange.arguments import DispatchArguments
from ..exchange.bind import bind
from ..exchange.dispatch_combine import DISPATCH
from ..exchange.recv import Recv
from ..experts.activations import FusedActivation
from ..formats.formats import BlockwiseFp8, TokenFormat
from ..grouped.act_encode import bind_act_encode
from ..grouped.frozen import RowsInFp8, dot_of_frozen
from ..grouped.quantized import RESULT_DTYPES, check_experts, encode_rows, without_gradient
from ..grouped.weights import BLOCK, QuantizedExperts, check_dtypes
from ..placement.types import Placement
from .dispatch_rows import dispatch_rows
from .placed import Rows


def format_of_fp8(fmt: TokenFormat | None) -> BlockwiseFp8:
    """Return the format in which tokens travel to experts in FP8, or raise an error."""
    if fmt is not None and not isinstance(fmt, BlockwiseFp8):
        raise ValueError(
            "token_format must be BlockwiseFp8() or None with quantized weights, because products "
            f"read the rows in it; got {fmt!r}"
        )
    return BlockwiseFp8()


def check_experts_format(experts_format: TokenFormat | None, in_fp8: bool) -> None:
    """Raise an error if a layer does not have this format for its products."""
    if experts_format is None:
        return
    if not isinstance(experts_format, BlockwiseFp8):
        raise ValueError(f"experts_format must be BlockwiseFp8() or None; got {experts_format!r}")
    if in_fp8:
        raise ValueError(
            f"experts_format must be None with quantized weights; got {experts_format!r}. Pass the "
            "weights that were quantized to train them"
        )


def check_training(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> None:
    """Raise an error if arrays do not fit to products in FP8 and to those of their gradients."""
    if x.dtype not in RESULT_DTYPES:
        raise TypeError(f"x must be bfloat16 or float32 with experts_format; got {short(x)}")
    for name, w in (("w_in", w_in), ("w_out", w_out)):
        if any(size % BLOCK for size in w.shape[1:]):
            raise ValueError(
                f"{name} must have rows and columns in multiples of {BLOCK} with experts_format; "
                f"got {short(w)}"
            )


def check_quantized(
    quantized: Any,
    experts_format: TokenFormat | None,
    placement: Placement | None,
    weights: Mapping[str, tuple[int, ...]],
) -> tuple[QuantizedExperts, ...]:
    """Return weights that are already quantized for training, or raise an error.

    Args:
      weights: the shapes of both weights of the layer, by the expression that makes them.
    """
    if quantized is None:
        return ()
    if experts_format is None:
        raise ValueError(
            "experts_format must be BlockwiseFp8() with quantized; got None. Pass it, too"
        )
    if placement is not None:
        raise ValueError("placement must be None with quantized; got a Placement. Omit quantized")
    calls = [f"quantize_experts({expression}, transposed=True)" for expression in weights]
    is_sequence = isinstance(quantized, tuple | list)
    if not is_sequence or len(quantized) != len(calls):
        got = f"{len(quantized)} elements" if is_sequence else type(quantized).__name__
        raise TypeError(f"quantized must be the pair of {' and '.join(calls)}; got {got}")
    found = []
    for i, (q, call, shape) in enumerate(zip(quantized, calls, weights.values(), strict=True)):
        if not isinstance(q, QuantizedExperts):
            got = short(q) if hasattr(q, "dtype") else type(q).__name__
            raise TypeError(f"quantized[{i}] must be {call}; got {got}")
        check_experts(f"quantized[{i}]", q, may_be_pairs=len(shape) == 4)
        if q.transposed is None:
            raise ValueError(f"quantized[{i}] must be {call}; got it without transposed")
        check_dtypes(f"quantized[{i}]", q.transposed, q.scales)
        if not q.shape == q.transposed.shape == shape:
            raise ValueError(
                f"quantized[{i}] must be {call} of the shape {list(shape)}; got {list(q.shape)}, "
                f"and transposed {short(q.transposed)}"
            )
        found.append(jax.tree.map(without_gradient, q))
    return tuple(found)


def check_weights(
    w_in: Any, w_out: Any, x: jax.Array, experts: int
) -> tuple[QuantizedExperts, QuantizedExperts]:
    """Return the quantized weights of a layer, of this many experts, or raise an error."""
    if x.dtype not in RESULT_DTYPES:
        raise TypeError(
            f"x must be bfloat16 or float32 with quantized weights; got {short(x)}. Cast it"
        )
    hidden = x.shape[1]
    found = check_experts("w_in", w_in), check_experts("w_out", w_out)
    expected = (experts, found[0].values.shape[1], hidden), (experts, hidden, found[1].k)
    for name, w, shape, axes in zip(("w_in", "w_out"), found, expected, ("I', H", "H, I")):
        if w.values.shape != shape:
            raise ValueError(
                f"the values of {name} must have the shape [L, {axes}] = {list(shape)}, for the L "
                f"local experts (a shared expert is one of them) and x {short(x)}; got "
                f"{short(w.values)}"
            )
    first, second = (jax.tree.map(without_gradient, w) for w in found)
    return first, second


def dispatch_in_fp8(arguments: DispatchArguments) -> Recv:
    """Dispatch the tokens of a layer in ``BlockwiseFp8``.

    Returns:
      The ``Recv`` of ``dispatch_rows``. Its rows are ``RowsInFp8``. They and the weights have the
      derivatives of one dispatch of floats, so their gradients travel in one exchange.
    """
    (x,), weights = arguments.leaves, arguments.choice_arrays
    known = arguments._replace(leaves=[fixed(x)], choice_arrays=list(map(fixed, weights)))
    recv = dispatch_rows(known)
    options = arguments.options.unencoded
    params = dict(num_leaves=1, num_choice_arrays=len(weights), options=options)

    def tangent_of(primals: Any, tangents: Any) -> list[jax.Array]:
        return bind(DISPATCH, tangents[0], primals[1], **params)

    moved = [BlockwiseFp8().decode(recv.rows, x.dtype), *[recv.weights] * len(weights)]
    floats, *found = with_tangent(moved, tangent_of, [x, *weights], recv.routing)
    rows = RowsInFp8(recv.rows, floats)
    return dataclasses.replace(recv, rows=rows, weights=found[0] if found else None)


def steps_in_fp8(
    activate: Callable[..., jax.Array], fused: FusedActivation | None, *, tail: Tail
) -> dict[str, Any]:
    """Return how frozen experts multiply and activate in FP8: arguments of ``experts_of``, whose
    rows are ``RowsInFp8``.

    Args:
      activate: maps products, weights of rows, and whether rows have a token, to activations times
        weights. Rows without a token are zeros in the result.
      fused: the same activation, to apply and quantize in one pass over the rows in use, or None.
      tail: of the products, as in ``grouped_dot``.
    """

    def multiply(rows: Any, w: Any, sizes: jax.Array, totals: Any, _: str) -> tuple[Any, Any]:
        return dot_of_frozen(rows, w, sizes, tail=tail), totals

    def activate_and_quantize(product: jax.Array, rows: Rows, sizes: jax.Array) -> RowsInFp8:
        if fused is None:
            activated = activate(product, rows.weights, rows.has_token)
            return RowsInFp8(encode_rows(fixed(activated), "the result of activation"), activated)
        row_weights = jnp.where(rows.has_token, fixed(rows.weights).astype(jnp.float32), 0)
        encoded = bind_act_encode(fixed(product), row_weights, sizes, activation=fused)

        def tangent_of(primals: Any, tangents: Any) -> jax.Array:
            of_floats = lambda product, weights: activate(product, weights, primals[2])
            return jax.jvp(of_floats, primals[:2], tangents[:2])[1]

        floats = BlockwiseFp8().decode(encoded, product.dtype)
        operands = product, rows.weights, rows.has_token
        return RowsInFp8(encoded, with_tangent(floats, tangent_of, *operands))

    return dict(multiply=multiply, activate=activate_and_quantize)
