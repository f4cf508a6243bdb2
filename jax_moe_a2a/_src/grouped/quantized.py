"""Define ``grouped_dot_fp8_p``, which multiplies rows and weights, both in ``BlockwiseFp8``.

The operands are values and scales of rows, [*B, C, K] and [*B, C, K / 128]; values and scales of
weights, [*B, L, N, K] and [*B, L, N / 128 rounded up, K / 128]; and sizes [*B, L]. The values and
scales of spare weights may be two more operands. ``primitives.py`` describes the leading axes
``B``. Parameters are ``dtype`` of the result, ``tail`` and ``num_sms``.

docs/fp8.md defines the arithmetic. The primitive has no derivatives, because float8 is too
imprecise for gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import compat, scopes
from ..ad import is_zero, zero_tangent
from ..checks import Tail, as_array, short
from ..formats.formats import BlockwiseFp8, Quantized
from . import lowering as lowered
from . import reference
from .primitives import bind, bind_dot, register, rows_like
from .reference import arrays_of
from .weights import (
    BLOCK,
    QuantizedExperts,
    as_quantized,
    check_dtypes,
    check_scales,
    check_squares,
    decode_experts,
)

RESULT_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
TARGET = "moe_a2a_fp8_gemm"
NO_GRADIENT = (
    "an array in FP8 has no gradient, and no product of grouped_dot passes a gradient through it. "
    "Differentiate a layer with ma.quantize_experts(w, trainable=True) of float weights w; or "
    "apply jax.lax.stop_gradient to the arrays that must not have a gradient"
)

grouped_dot_fp8_p = compat.Primitive("moe_a2a_grouped_dot_fp8")


def is_quantized(*arrays: object) -> bool:
    """Return True if one of these rows or weights is quantized, so its products must be in FP8."""
    return any(isinstance(x, QuantizedExperts) or as_quantized(x) is not None for x in arrays)


def check_operands(rows: Any, w: object) -> tuple[Quantized, QuantizedExperts]:
    """Return quantized rows and weights, or raise an error. Float rows are quantized here. The
    arguments may contain ``jax.ShapeDtypeStruct`` in place of arrays."""
    weights = check_experts("w", w)
    if weights.source is not None:
        raise ValueError(
            "the source of w must be None, because grouped_dot passes no gradient to it; got "
            f"{short(weights.source)}. Call quantize_experts without trainable, or moe_mlp"
        )
    given = as_quantized(rows)
    values = _array(given.values if given else rows)
    if given:
        check_dtypes("rows", values, _array(given.scales))
    if values.ndim != 2 or values.shape[1] != weights.k:
        raise ValueError(
            f"{'the values of rows' if given else 'rows'} must have the shape [C, "
            f"K={weights.k}], because the values of w are {short(weights.values)}; got "
            f"{short(values)}"
        )
    if not given:
        if isinstance(values, jax.ShapeDtypeStruct):
            return jax.eval_shape(partial(encode_rows, name="rows"), values), weights
        return encode_rows(jnp.asarray(values), "rows"), weights
    scales, expected = _array(given.scales), (values.shape[0], values.shape[1] // BLOCK)
    if scales.shape != expected:
        raise ValueError(
            f"the scales of rows must have the shape {list(expected)}, one number for each "
            f"{BLOCK} values {short(values)} of a row; got {short(scales)}"
        )
    return Quantized(values, scales), weights


def check_experts(name: str, w: object, *, may_be_pairs: bool = False) -> QuantizedExperts:
    """Return quantized weights. Raise an error if their values are not [L, N, K] (or [L, 2, I, K]
    with ``may_be_pairs``), or if another array does not fit."""
    if not isinstance(w, QuantizedExperts):
        got = short(w) if hasattr(w, "dtype") else type(w).__name__
        raise TypeError(
            f"{name} must be a QuantizedExperts, because rows or other weights are quantized; got "
            f"{got}. Call ma.quantize_experts once and keep the result"
        )
    missing = [part for part in ("values", "scales") if getattr(w, part) is None]
    if missing:
        raise ValueError(
            f"{name} must have values and scales; got None for {' and '.join(missing)}. Call "
            "ma.quantize_experts once and keep the result"
        )
    values, scales = _array(w.values), _array(w.scales)
    check_dtypes(name, values, scales)
    is_pair = may_be_pairs and len(values.shape) == 4 and values.shape[1] == 2
    if not (is_pair or len(values.shape) == 3) or values.shape[-1] % BLOCK:
        raise ValueError(
            f"the values of {name} must have the shape [L, N, K]"
            f"{' or [L, 2, I, K]' if may_be_pairs else ''}, where K is a multiple of {BLOCK}; got "
            f"{short(values)}"
        )
    *lead, n, k = values.shape
    check_squares(name, values, scales, (*lead, -(-n // BLOCK), k // BLOCK))
    check_scales(name, scales)
    transposed, source = (None if x is None else _array(x) for x in (w.transposed, w.source))
    if transposed is not None:
        check_dtypes(name, transposed, scales)
    shape = QuantizedExperts(values).shape
    for part, array in (("transposed values", transposed), ("source", source)):
        if array is not None and array.shape != shape:
            raise ValueError(
                f"the {part} of {name} must have the shape {list(shape)}, because its values are "
                f"{short(values)}; got {short(array)}"
            )
    return QuantizedExperts(values, scales, transposed, source)


@scopes.quantization
def encode_rows(rows: jax.Array, name: str) -> Quantized:
    """Quantize rows [C, K] for a product. A derivative with respect to them raises a TypeError."""
    fmt = BlockwiseFp8()
    fmt.check_numbers(rows, name)
    return fmt.encode(without_gradient(rows))


def check_dtype(dtype: DTypeLike | None) -> Any:
    found = jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
    if found not in RESULT_DTYPES:
        raise TypeError(
            "preferred_element_type must be bfloat16 or float32 for a product in FP8; got "
            f"{found.name}"
        )
    return found


def _array(x: Any) -> Any:
    return x if isinstance(x, jax.ShapeDtypeStruct) else as_array(x)


@jax.custom_jvp
def without_gradient(x: jax.Array) -> jax.Array:
    """Return ``x``. A derivative with respect to ``x`` raises a TypeError."""
    return x


@without_gradient.defjvp
def _refuse(primals: compat.Primals, tangents: compat.Tangents) -> Any:
    del primals, tangents
    raise TypeError(NO_GRADIENT)


def bind_dot_fp8(
    rows: Quantized,
    w: QuantizedExperts | tuple[QuantizedExperts, QuantizedExperts],
    sizes: jax.Array,
    *,
    dtype: Any,
    tail: Tail,
    num_sms: int | None = None,
) -> jax.Array:
    """Bind ``grouped_dot_fp8_p``. ``w`` may be a tuple of home and spare weights."""
    home, *spare = ((jnp.asarray(x.values), jnp.asarray(x.scales)) for x in arrays_of(w))
    operands = [*map(jnp.asarray, rows), *home, sizes, *itertools.chain(*spare)]
    return bind(grouped_dot_fp8_p, *operands, dtype=dtype, tail=tail, num_sms=num_sms)


def _abstract(values: Any, _: object, w_values: Any, *__: Any, dtype: jnp.dtype, **___: Any) -> Any:
    return rows_like(values, w_values.shape[-2], dtype)


def refusing_jvp(
    primitive: compat.Primitive,
    primals: compat.Primals,
    tangents: compat.Tangents,
    **params: object,
) -> Any:
    """Return zero tangents, or raise a TypeError if a tangent of an operand is not zero."""
    if not all(map(is_zero, tangents)):
        raise TypeError(NO_GRADIENT)
    out = primitive.bind(*primals, **params)
    return out, jax.tree.map(zero_tangent, out)


def _decoded(operands: Sequence[jax.Array], dtype: jnp.dtype) -> list[jax.Array]:
    """Return the operands of ``grouped_dot_p``, with rows and weights decoded to a dtype."""
    values, scales, w_values, w_scales, sizes, *spare = operands
    rows = BlockwiseFp8().decode(Quantized(values, scales), dtype)
    decoded = (decode_experts(*pair, dtype) for pair in _pairs(w_values, w_scales, *spare))
    w, *more = (jnp.swapaxes(x, -1, -2) for x in decoded)
    return [rows, w, sizes, *more]


def _pairs(*parts: jax.Array) -> Iterable[tuple[jax.Array, jax.Array]]:
    """Return the values and scales of each array of weights."""
    return zip(parts[::2], parts[1::2], strict=True)


def _reference(*operands: jax.Array, dtype: jnp.dtype, **_: object) -> jax.Array:
    """Decode to float32, which is exact for scales that are powers of two, and multiply."""
    return reference.dot(*_decoded(operands, jnp.float32), transposed=False, dtype=dtype)


def _in_bfloat16(
    *operands: jax.Array, dtype: jnp.dtype, tail: Tail, num_sms: int | None
) -> jax.Array:
    """Decode to bfloat16, which is exact for scales that are powers of two, and multiply."""
    decoded = _decoded(operands, jnp.bfloat16)
    if dtype == jnp.bfloat16:
        params = dict(transposed=False, dtype=dtype, tail=tail, num_sms=num_sms)
        return bind_dot(*decoded, **params)
    return reference.dot(*decoded, transposed=False, dtype=dtype)


def _kernel(
    values: jax.Array,
    scales: jax.Array,
    w_values: jax.Array,
    w_scales: jax.Array,
    sizes: jax.Array,
    *spare: jax.Array,
    dtype: jnp.dtype,
    tail: Tail,
    num_sms: int | None,
) -> jax.Array:
    num_rows, columns = values.shape[-2], w_values.shape[-2]
    # ``vmap`` may map only values or only scales. The kernel reads both at the same index.
    pairs = _pairs(w_values, w_scales, *spare)
    leads, flat_values, flat_scales = zip(*(lowered.aligned(*pair, 3) for pair in pairs))
    groups = lowered.table(sizes, values.shape[:-2], num_rows, *leads, has_tail=tail == "zero")
    rows2 = lowered.flat(values, 2)
    out = jax.ShapeDtypeStruct((rows2.shape[0], columns), dtype)
    # The kernel reads one array of scales. Scales are small, so the concatenation is fast.
    scales3 = jnp.concatenate(flat_scales) if spare else flat_scales[0]
    w3, *spare3 = flat_values
    operands = rows2, w3, groups, lowered.flat(scales, 2), scales3, *spare3
    (result,) = lowered.call(TARGET, [out], operands, num_sms)
    return result.reshape(*values.shape[:-1], columns)


def _why_no_kernel(
    rows: Any, _: object, w: Any, __: Any, sizes: compat.Aval, *___: Any, **____: Any
) -> str:
    n, k = w.shape[-2:]
    return lowered.why_no_fp8_kernel(*lowered.sizes_of(rows, sizes, (k, n)))


_cuda = lowered.by_kernel(_why_no_kernel, _kernel, _in_bfloat16, "decoded to bfloat16")

register(
    grouped_dot_fp8_p,
    abstract=_abstract,
    jvp=partial(refusing_jvp, grouped_dot_fp8_p),
    is_full=(True, True),
    composition=_reference,
    cuda=_cuda,
)
