"""Quantize the weights of experts to ``BlockwiseFp8``, with a scale for each square of 128 x 128.

``encode_squares_p`` quantizes weights [*B, L, K, N], or [*B, L, K, 2, I] with ``k_axis=-3``. The
results are scales; with ``turned``, values whose last axis is K; and with ``plain``, values with
the axes of the weights. ``QuantizedExperts`` has the shapes. The results have no derivatives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .. import compat, scopes
from ..ad import as_bits, zero_tangent
from ..checks import as_array, check_bool, is_known, short
from ..formats.formats import BlockwiseFp8, Quantized
from ..group import native
from ..paths import Choice
from . import lowering as lowered
from .primitives import bind, register

BLOCK = BlockwiseFp8.group_size
VALUE_DTYPE = jnp.dtype(BlockwiseFp8.value_dtype)
SCALE_DTYPE = jnp.dtype(BlockwiseFp8.scale_dtype)
QUANTIZED_CHECKPOINT_NAME = "moe_a2a_quantized"
"""Checkpoint name, a str, of the quantized weights of ``Experts.in_fp8``.

If a policy of ``jax.checkpoint`` saves this name, the backward pass does not quantize the weights
again. The saved arrays have up to two bytes per weight."""

encode_squares_p = compat.Primitive("moe_a2a_encode_squares")
encode_squares_p.multiple_results = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedExperts:
    """A pytree of weights of experts: in ``BlockwiseFp8``, as floats to train in FP8, or both.

    ``quantize_experts`` and ``Experts.in_fp8`` return it. If it has no ``source``, the weights are
    frozen and have no gradient. If it has a ``source`` (float weights), the ``source`` gets the
    gradients. If it has only a ``source``, each call of a layer quantizes it.

    In weights [L, K, N] of ``grouped_dot``, each square of 128 rows and 128 columns has one scale.
    Squares at the end of N may have fewer columns. Weights [L, K, 2, I] have a gate and an up
    projection. In that case N is I. ``values`` is [L, 2, I, K], and ``scales`` also has an axis of
    size 2 after L.
    """

    values: Any = None
    """[L, N, K] float8_e4m3fn, or None. K is the last axis, because the tensor cores of Hopper need
    the summed axis to be contiguous in memory."""
    scales: Any = None
    """[L, N / 128 rounded up, K / 128] float32, or None without values."""
    transposed: Any = None
    """[L, K, N] float8_e4m3fn, or None: ``values`` with the axes of the weights. The gradient of
    rows reads this array."""
    source: Any = None
    """[L, K, N] floats, or None. This array gets the gradients."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the float weights, [L, K, N] or [L, K, 2, I]."""
        for array in (self.source, self.transposed):
            if array is not None:
                return tuple(array.shape)
        first, *between, k = self.values.shape
        return (first, k, *between)

    @property
    def k(self) -> int:
        """Return K, the size of the axis over which a product sums."""
        return self.shape[1]


class QArrayLike(Protocol):
    """The fields of a quantized array of another library, such as ``QArray`` of qwix."""

    qvalue: Any
    scale: Any


def floats_to_train(w: Any) -> Any:
    """Return float weights: ``w``, or its ``source``. Raise a TypeError if there are none."""
    source = w.source if isinstance(w, QuantizedExperts) else w
    if source is None or as_quantized(source) is not None:
        raise TypeError(
            "w must be bfloat16, float16 or float32 to be trained, because quantized weights have "
            f"no gradient; got a {type(w).__name__}. Call in_fp8() or quantize_experts(..., "
            "trainable=True) on the float weights, or train adapters: experts.with_lora(...)"
        )
    return source


def quantize_weights(
    w: ArrayLike | Quantized | QArrayLike | QuantizedExperts, *, transposed: bool, trainable: bool
) -> QuantizedExperts:
    """Return the result of ``quantize_experts`` for one array of weights."""
    check_bool("transposed", transposed)
    check_bool("trainable", trainable)
    if trainable or isinstance(w, QuantizedExperts) and w.source is not None:
        w = floats_to_train(w)
    if isinstance(w, QuantizedExperts):
        if w.transposed is None and transposed:
            w = dataclasses.replace(w, transposed=jnp.moveaxis(w.values, -1, 1))
        return w
    given = as_quantized(w)
    if given is None:
        array = as_array(w)
        if array.dtype not in map(jnp.dtype, ("bfloat16", "float16", "float32")):
            raise TypeError(
                "w must be bfloat16, float16 or float32, or a Quantized; got " + short(array)
            )
        _check_weights("w", array)
        source = jnp.asarray(array)
        found = encode_experts(source, k_axis=1 - array.ndim, plain=transposed or trainable)
        check_scales("w", found.scales)
        return dataclasses.replace(found, source=source) if trainable else found
    values, scales = map(as_array, given)
    check_dtypes("w", values, scales)
    _check_weights("the values of w", values)
    lead, n = values.shape[2:-1], values.shape[-1]
    expected = (values.shape[0], values.shape[1] // BLOCK, *lead, -(-n // BLOCK))
    check_squares("w", values, scales, expected)
    values, scales = map(jnp.asarray, (values, scales))
    check_scales("w", scales)
    return QuantizedExperts(_turned(values), _turned(scales), values if transposed else None)


def decode_experts(values: jax.Array, scales: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return decoded weights [..., N, K], rounded to ``dtype``."""
    (*lead, rows, columns), (n, k) = scales.shape, values.shape[-2:]
    # Use two reshapes: over Explicit axes, JAX cannot merge two pairs of axes in one reshape.
    squares = jnp.broadcast_to(scales[..., :, None, :, None], (*lead, rows, BLOCK, columns, BLOCK))
    numbers = squares.reshape(*lead, rows, BLOCK, k).reshape(*lead, rows * BLOCK, k)
    return (values.astype(SCALE_DTYPE) * numbers[..., :n, :]).astype(dtype)


def transposed_experts(w: QuantizedExperts) -> QuantizedExperts:
    """Return weights with the axes N and K exchanged, for the gradient of rows."""
    values = jnp.swapaxes(w.values, -1, -2) if w.transposed is None else w.transposed
    return QuantizedExperts(values, jnp.swapaxes(w.scales, -1, -2))


def as_quantized(x: object) -> Quantized | None:
    """Return a ``Quantized`` if ``x`` is one, or has ``qvalue`` and ``scale``; else return None."""
    if isinstance(x, Quantized):
        return x
    if hasattr(x, "qvalue") and hasattr(x, "scale"):
        return Quantized(x.qvalue, x.scale)
    return None


def check_dtypes(name: str, values: Any, scales: Any) -> None:
    """Raise a TypeError if values or scales of the argument ``name`` have a wrong dtype."""
    for part, array, dtype in (("values", values, VALUE_DTYPE), ("scales", scales, SCALE_DTYPE)):
        if array.dtype != dtype:
            raise TypeError(
                f"the {part} of {name} must be {dtype.name}, as in BlockwiseFp8; got {short(array)}"
            )


def check_squares(name: str, values: Any, scales: Any, shape: tuple[int, ...]) -> None:
    """Raise a ValueError if the scales of the argument ``name`` have a wrong shape."""
    if scales.shape != shape:
        raise ValueError(
            f"the scales of {name} must have the shape {list(shape)}, one number for each square of"
            f" {BLOCK} x {BLOCK} values {short(values)}; got {short(scales)}"
        )


def check_scales(name: str, scales: Any) -> None:
    """Raise a ValueError if a known (not traced) scale of the argument ``name`` is not finite."""
    if not is_known(scales):
        return
    bad = np.argwhere(~np.isfinite(np.asarray(scales)))
    if len(bad):
        index = tuple(map(int, bad[0]))
        raise ValueError(
            f"the scales of {name} must be finite; got {np.asarray(scales)[index]} at {index} and "
            f"{len(bad) - 1} more. A scale is NaN if a number of its block was infinite or NaN "
            "when it was quantized"
        )


def _check_weights(name: str, array: Any) -> None:
    ok = array.ndim == 3 or (array.ndim == 4 and array.shape[2] == 2)
    if not ok or array.shape[1] % BLOCK:
        raise ValueError(
            f"{name} must have the shape [L, K, N] or [L, K, 2, I], where K is a multiple of "
            f"{BLOCK}; got {short(array)}"
        )


def _turned(x: jax.Array) -> jax.Array:
    """Move K, the axis after L, to the end."""
    return jnp.moveaxis(x, 1, -1)


@scopes.quantization
def encode_experts(
    w: jax.Array, *, k_axis: int = -2, turned: bool = True, plain: bool = True
) -> QuantizedExperts:
    """Quantize weights as ``encode_squares_p`` does. Without ``turned``, the field ``values`` is
    None. Without ``plain``, ``transposed`` is None."""
    scales, *parts = _encode_squares(w, k_axis=k_axis, turned=turned, plain=plain)
    values = parts.pop(0) if turned else None
    return QuantizedExperts(values, scales, *parts)


def encode_source(w: QuantizedExperts) -> QuantizedExperts:
    """Return weights with a source and values. If ``w`` has no values, quantize the source; the
    results get the name ``QUANTIZED_CHECKPOINT_NAME``. FP8 values become integers (``as_bits``)."""
    if w.values is not None:
        found = jax.tree.map(as_bits, dataclasses.replace(w, source=None))
    else:
        found = jax.tree.map(as_bits, encode_experts(w.source))
        found = compat.checkpoint_name(found, QUANTIZED_CHECKPOINT_NAME)
    return dataclasses.replace(found, source=w.source)


def from_bits(values: jax.Array, scales: jax.Array, *transposed: jax.Array) -> QuantizedExperts:
    """Return weights from the arrays of ``encode_source``, without a source."""
    turned, *plain = (lax.bitcast_convert_type(x, VALUE_DTYPE) for x in (values, *transposed))
    return QuantizedExperts(turned, scales, *plain)


def _encode_squares(w: jax.Array, **params: Any) -> list[jax.Array]:
    if any(axis is not None for axis in jax.typeof(w).sharding.spec):
        return _composition(w, **params)  # keeps the sharding of w
    return bind(encode_squares_p, w, **params)


def _composition(w: jax.Array, *, k_axis: int, turned: bool, plain: bool) -> list[jax.Array]:
    """Quantize with XLA. XLA reads the weights once for the scales, and once for each array of
    values. The transpose comes after the quantization, because values are smaller than weights."""
    n, k_axis = w.shape[-1], k_axis + w.ndim
    w = _in_whole_squares(w, (k_axis, w.ndim - 1))
    padded = jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, -n % BLOCK)])
    # Use two reshapes: over Explicit axes, JAX cannot divide two axes in one reshape.
    by_rows = _divided(padded, k_axis)
    squares = _divided(by_rows, w.ndim)
    values, scales = BlockwiseFp8().encode_blocks(squares, (k_axis + 1, w.ndim + 1))
    values = values.reshape(by_rows.shape).reshape(padded.shape)[..., :n]
    scales = jnp.moveaxis(jnp.squeeze(scales, (k_axis + 1, w.ndim + 1)), k_axis, -1)
    return [scales, *[jnp.moveaxis(values, k_axis, -1)] * turned, *[values] * plain]


def _in_whole_squares(w: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Gather an axis of ``w`` over Explicit mesh axes if the size of its shards is not a multiple
    of 128. Over Auto axes, the compiler does this."""
    sharding = jax.typeof(w).sharding
    spec = list(sharding.spec)
    for axis in axes:
        names = spec[axis] or ()
        names = (names,) if isinstance(names, str) else names
        if w.shape[axis] % (BLOCK * math.prod(sharding.mesh.shape[name] for name in names)):
            spec[axis] = None
    if spec == list(sharding.spec):
        return w
    return jax.sharding.reshard(w, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def _divided(x: jax.Array, axis: int) -> jax.Array:
    """Divide an axis into blocks of 128."""
    return x.reshape(*x.shape[:axis], x.shape[axis] // BLOCK, BLOCK, *x.shape[axis + 1 :])


def _abstract(w: compat.Aval, *, k_axis: int, turned: bool, plain: bool) -> list[Any]:
    lead, (k, *between, n) = w.shape[:k_axis], w.shape[k_axis:]
    squares = (*lead, *between, -(-n // BLOCK), k // BLOCK)
    shapes = [(*lead, *between, n, k)] * turned + [w.shape] * plain
    values = [compat.result_aval(w, shape, VALUE_DTYPE) for shape in shapes]
    return [compat.result_aval(w, squares, SCALE_DTYPE), *values]


def _jvp(primals: compat.Primals, _: object, **params: object) -> Any:
    outs = bind(encode_squares_p, *primals, **params)
    return outs, list(map(zero_tangent, outs))


def _batch(args: Sequence[jax.Array], dims: Any, **params: object) -> Any:
    outs = _encode_squares(jnp.moveaxis(args[0], dims[0], 0), **params)
    return outs, [0] * len(outs)


def _dce(used: Sequence[bool], eqn: compat.Equation) -> tuple[list[bool], Any]:
    """Do not compute the array of values that the program does not use."""
    names = [name for name in ("turned", "plain") if eqn.params[name]]
    keeps = dict(zip(names, used[1:], strict=True))
    outvars = [var for var, keep in zip(eqn.outvars, (True, *used[1:]), strict=True) if keep]
    return [True], eqn.replace(outvars=outvars, params=dict(eqn.params, **keeps))


def _kernel(w: jax.Array, *, k_axis: int, turned: bool, plain: bool) -> list[jax.Array]:
    k = w.shape[k_axis]
    matrices = w.reshape(math.prod(w.shape[:k_axis]), k, -1)
    num, _, n = matrices.shape
    shapes = (num, n, k) if turned else (0,), (num, k, n) if plain else (0,)
    results = [jax.ShapeDtypeStruct(shape, VALUE_DTYPE) for shape in shapes]
    squares = jax.ShapeDtypeStruct((num, n // BLOCK, k // BLOCK), SCALE_DTYPE)
    *values, scales = native.call_product("moe_a2a_encode_squares", [*results, squares], [matrices])
    outs = [scales, *[values[0]] * turned, *[values[1]] * plain]
    avals = _abstract(jax.typeof(w), k_axis=k_axis, turned=turned, plain=plain)
    return [x.reshape(a.shape) for x, a in zip(outs, avals)]


def _why_no_kernel(ctx: compat.Context, w: compat.Aval, k_axis: int) -> str:
    if compat.is_partitioned(ctx):
        return "XLA divides the program among devices: call it in jax.shard_map"
    if w.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the kernel quantizes bfloat16 and float32; got {w.dtype}"
    if w.shape[k_axis] % BLOCK or w.shape[-1] % BLOCK:
        return f"the kernel quantizes whole squares of {BLOCK} x {BLOCK}; got {short(w)}"
    return lowered.why_no_call(*w.shape)


def _cuda(ctx: Any, w: compat.Value, **params: Any) -> Choice:
    why = _why_no_kernel(ctx, ctx.avals_in[0], params["k_axis"])
    return native.choose_kernel(ctx, (w,), params, _kernel, why, _composition)


register(
    encode_squares_p,
    abstract=_abstract,
    jvp=_jvp,
    batch=_batch,
    composition=_composition,
    cuda=_cuda,
)
compat.register_dce_rule(encode_squares_p, _dce)
