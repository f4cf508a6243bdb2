"""Define token formats in plain jnp: how a row becomes values and scales, and back.

docs/formats.md has the definition, and the kernels compute the same bits. Float operations differ
between backends. XLA:CPU flushes subnormals inside ``jit``. XLA:GPU divides inexactly, and fuses
multiplications with additions. Every backend may omit a conversion to a float of fewer bits and
back. Therefore floats are only multiplied and compared, and integer operations compute everything
else. Each product is exact or rounded once. A flush of subnormal products changes no result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..checks import short

DTYPES = ("bfloat16", "float16", "float32")
ANY_DTYPE = "bfloat16, float16 or float32"  # for error messages

# Bits of float32 numbers.
MIN_NORMAL = 1 << 23
INFINITY = 0xFF << 23

# Codes of float8_e4m3fn.
E4M3_MAX = 0x7E  # 448
E4M3_NAN = 0x7F
E4M3_MAX_EXPONENT = 8  # 2**8 is the largest E4M3 power of two
# The smallest float8_e4m3fn is 2**-9. With this scale, it decodes to a normal float32, 2**-126.
MIN_SCALE_EXPONENT = -117

# 6 is the largest float4_e2m1fn. XLA may replace x / 6 with x * (1 / 6), so always multiply.
ONE_SIXTH = np.float32(1 / 6)
# In this range, the global scale, its inverse and the smallest decoded number are normal float32
# numbers. The smallest decoded number is the global scale times 2**-10 (smallest value * scale).
GLOBAL_SCALE_EXPONENTS = (-116, 116)


class Quantized(NamedTuple):
    """Tokens or rows in a token format. It is a pytree."""

    values: jax.Array
    """[..., H] float8_e4m3fn, or [..., H / 2] uint8. A uint8 contains two float4_e2m1fn values,
    with the first value in the low 4 bits."""
    scales: jax.Array
    """[..., H / group_size] in the dtype of the format."""


class RowsInFp8(NamedTuple):
    """Quantized rows for products in FP8, and the same rows as floats for derivatives."""

    encoded: Quantized
    """The rows in ``BlockwiseFp8``, without derivatives."""
    floats: jax.Array
    """[C, K]: the rows as floats, which have the derivatives."""


def floats_of(rows: Any) -> Any:
    return rows.floats if isinstance(rows, RowsInFp8) else rows


def _flatten(fmt: TokenFormat) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Return the leaves of a format (``global_scale`` if it is an array) and its static fields."""
    static = dict(vars(fmt))
    if isinstance(static.get("global_scale", 1.0), int | float | np.number):
        return (), tuple(static.items())
    leaf = jax.tree_util.GetAttrKey("global_scale"), static.pop("global_scale")
    return (leaf,), tuple(static.items())


def _unflatten(kind: type[TokenFormat], static: Any, leaves: Sequence[Any]) -> TokenFormat:
    fmt = object.__new__(kind)  # skips the checks, because leaves may be any objects
    vars(fmt).update(static, **dict(zip(("global_scale",), leaves)))
    return fmt


@dataclasses.dataclass(frozen=True)
class TokenFormat:
    """The common interface of all token formats: groups along the last axis, each with a scale.

    A format is a pytree. If ``global_scale`` is an array, this array is its only leaf.

    If a group contains an infinity or a NaN, all of its elements decode to NaN. If a group contains
    only zeros, all bytes of its scale are 0, and it decodes to zeros. In rows without a token, all
    bytes are 0, too. ``docs/formats.md`` defines each format and names its sources.
    """

    group_size: ClassVar[int]

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_with_keys(cls, _flatten, partial(_unflatten, cls))

    def encode(self, x: ArrayLike) -> Quantized:
        """Quantize numbers. The result has no gradient.

        Args:
          x: bfloat16, float16 or float32 [..., H], H a multiple of ``group_size``.

        Returns:
          A ``Quantized``.
        """
        x = jnp.asarray(x)
        self.check_numbers(x)
        magnitude, sign = (_split(bits, self.group_size) for bits in _float32_bits(x))
        codes, scales = self._encode_groups(magnitude, sign)
        return Quantized(self._to_values(codes.reshape(x.shape)), scales[..., 0])

    @property
    def token_scales(self) -> jax.Array | None:
        """Return the global scale of each token, or None if tokens have no separate scales."""
        return None

    def check_numbers(self, x: jax.Array, name: str = "x") -> None:
        """Raise an error if ``encode`` does not accept ``x``. The error calls ``x`` by ``name``."""
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be {ANY_DTYPE} to be quantized; got {short(x)}")
        if x.ndim < 1 or x.shape[-1] % self.group_size:
            raise ValueError(
                f"{name} must have a last axis that is a multiple of {self.group_size} for "
                f"{type(self).__name__}; got {short(x)}"
            )

    def decode(self, quantized: Quantized, dtype: DTypeLike) -> jax.Array:
        """Return values times scales.

        A finite product that is too large for ``dtype`` becomes the largest number of ``dtype``. If
        the value or the scale is not finite, the result is NaN.

        Args:
          quantized: a ``Quantized`` of this format.
          dtype: bfloat16, float16 or float32.

        Returns:
          [..., H] in ``dtype``.
        """
        dtype = jnp.dtype(dtype)
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be {ANY_DTYPE}; got {dtype}")
        values, scales = self._check(quantized)
        product = values * scales
        is_finite = jnp.isfinite(values) & jnp.isfinite(scales)
        product, is_finite = self._scale_globally(product, is_finite)
        limit = float(jnp.finfo(dtype).max)
        out = lax.clamp(np.float32(-limit), product, np.float32(limit)).astype(dtype)
        out = jnp.where(is_finite, out, jnp.asarray(np.nan, dtype))
        return _merge(out)

    # Formats override the following members. In these, elements have the shape [..., H /
    # group_size, group_size], and scales have the shape [..., H / group_size, 1].

    value_dtype: ClassVar[Any] = jnp.float8_e4m3fn
    scale_dtype: ClassVar[Any]
    values_per_item: ClassVar[int] = 1

    def _encode_groups(self, magnitude: jax.Array, sign: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return codes (uint8) and scales, from the results of ``_float32_bits``."""
        raise NotImplementedError

    def _to_values(self, codes: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(codes, self.value_dtype)

    def _from_values(self, values: jax.Array) -> jax.Array:
        return values.astype(jnp.float32)

    def _from_scales(self, scales: jax.Array) -> jax.Array:
        return scales.astype(jnp.float32)

    def _scale_globally(
        self, product: jax.Array, is_finite: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return product, is_finite

    def _check(self, quantized: Quantized) -> tuple[jax.Array, jax.Array]:
        """Check ``quantized``, and return its values and scales in groups, as float32."""
        if not isinstance(quantized, Quantized):
            raise TypeError(f"quantized must be a Quantized; got {type(quantized).__name__}")
        values, scales = map(jnp.asarray, quantized)
        for name, array, wanted in (
            ("values", values, self.value_dtype),
            ("scales", scales, self.scale_dtype),
        ):
            if array.dtype != wanted:
                raise TypeError(
                    f"{name} must be {jnp.dtype(wanted).name} for {type(self).__name__}; "
                    f"got {short(array)}"
                )
        items = self.group_size // self.values_per_item
        if scales.ndim < 1 or values.shape != (*scales.shape[:-1], scales.shape[-1] * items):
            raise ValueError(
                f"values must have {items} items for each of the scales {short(scales)}; "
                f"got {short(values)}"
            )
        groups = _split(self._from_values(values), self.group_size)
        return groups, self._from_scales(scales)[..., None]


class _PowerOfTwoScales(TokenFormat):
    """float8_e4m3fn values with powers of two as scales, so only the values are rounded."""

    def _scale_exponent(self, largest: jax.Array) -> jax.Array:
        """Return the exponent of the scale, int32, from the largest magnitude of a group."""
        raise NotImplementedError

    def _to_scales(self, exponent: jax.Array) -> jax.Array:
        """Return scales from biased exponents: exponent + 127, 0 for zero, or 255 for NaN."""
        raise NotImplementedError

    def encode_blocks(self, x: jax.Array, axes: int | tuple[int, ...]) -> Quantized:
        """Quantize with one scale for all elements along ``axes``, which have size 1 in scales."""
        codes, scales = self._encode_groups(*_float32_bits(x), axes)
        return Quantized(self._to_values(codes), scales)

    def _encode_groups(
        self, magnitude: jax.Array, sign: jax.Array, axes: int | tuple[int, ...] = -1
    ) -> tuple[jax.Array, jax.Array]:
        largest = magnitude.max(axis=axes, keepdims=True)
        is_finite = largest < INFINITY
        exponent = jnp.maximum(self._scale_exponent(largest), MIN_SCALE_EXPONENT)
        codes = _e4m3_codes(magnitude, exponent) | sign << 7
        biased = jnp.where(largest > 0, jnp.where(is_finite, exponent + 127, 255), 0)
        return jnp.where(is_finite, codes, 0).astype(jnp.uint8), self._to_scales(biased)


@dataclasses.dataclass(frozen=True)
class BlockwiseFp8(_PowerOfTwoScales):
    """float8_e4m3fn values in groups of 128 with float32 scales.

    The scale is the smallest power of two for which no value of the group exceeds 448. The minimum
    is 2**-117. DeepSeek-V3 has the same group size (arXiv:2412.19437, section 3.3).
    """

    group_size: ClassVar[int] = 128
    scale_dtype: ClassVar[Any] = jnp.float32

    def _scale_exponent(self, largest: jax.Array) -> jax.Array:
        exceeds = (largest & (MIN_NORMAL - 1)) > 0x600000  # 448 is 1.75 * 2**8
        return _exponent(largest) - E4M3_MAX_EXPONENT + exceeds.astype(jnp.int32)

    def _to_scales(self, exponent: jax.Array) -> jax.Array:
        quiet = jnp.where(exponent == 255, 1 << 22, 0)
        return lax.bitcast_convert_type((exponent << 23) | quiet, jnp.float32)


@dataclasses.dataclass(frozen=True)
class MxFp8(_PowerOfTwoScales):
    """float8_e4m3fn values in groups of 32 with float8_e8m0fnu scales (MXFP8 of OCP).

    The scale is the largest magnitude of the group divided by 256, rounded down to a power of two.
    The minimum is 2**-117. Magnitudes above 448 times the scale become 448 times the scale. A scale
    byte of 0 means zero, not 2**-127.
    """

    group_size: ClassVar[int] = 32
    scale_dtype: ClassVar[Any] = jnp.float8_e8m0fnu

    def _scale_exponent(self, largest: jax.Array) -> jax.Array:
        return _exponent(largest) - E4M3_MAX_EXPONENT

    def _to_scales(self, exponent: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)

    def _from_scales(self, scales: jax.Array) -> jax.Array:
        # The byte 255 means NaN. The shift makes it infinity, which also decodes to NaN.
        bits = lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
        return lax.bitcast_convert_type(bits << 23, jnp.float32)


@dataclasses.dataclass(frozen=True)
class NvFp4(TokenFormat):
    """float4_e2m1fn values in groups of 16 with float8_e4m3fn scales, and a global scale.

    ``x`` is approximately value * scale * global_scale. Values are stored as uint8, two per byte,
    with the first in the low 4 bits. ``unpack`` converts them to float4_e2m1fn.

    Attributes:
      global_scale: a float from 2**-116 to 2**116, or a float32 array. An array may be traced, and
        is clipped to this range. An array [] must be equal on all ranks. An array [T] has one scale
        for each of the tokens [T, ..., H], and each scale travels with its token. The full range of
        the format is used if the scale is the largest magnitude of the tensor, or of the token,
        divided by 2688 (6 * 448). Numbers with a negative, infinite or NaN scale decode to NaN.
    """

    global_scale: float | jax.Array = 1.0

    group_size: ClassVar[int] = 16
    value_dtype: ClassVar[Any] = jnp.uint8
    scale_dtype: ClassVar[Any] = jnp.float8_e4m3fn
    values_per_item: ClassVar[int] = 2

    def __post_init__(self) -> None:
        scale = self.global_scale
        if isinstance(scale, jax.Array):
            if scale.dtype != jnp.float32:
                raise TypeError(
                    f"global_scale must be a float32 array [] or [T]; got {short(scale)}. Cast it "
                    "to float32"
                )
            return
        if isinstance(scale, bool) or not isinstance(scale, int | float | np.number):
            raise TypeError(
                f"global_scale must be a float, or a float32 array [] or [T]; got {scale!r}. "
                "Convert an array of another library with jnp.asarray"
            )
        least, most = (2.0**exponent for exponent in GLOBAL_SCALE_EXPONENTS)
        if not least <= np.float32(scale) <= most:
            raise ValueError(f"global_scale must be from {least:.4g} to {most:.4g}; got {scale!r}")

    def unpack(self, values: jax.Array) -> jax.Array:
        """Convert uint8 [..., H / 2] to float4_e2m1fn [..., H], for matrix products of JAX."""
        return _merge(lax.bitcast_convert_type(values, jnp.float4_e2m1fn))

    @property
    def token_scales(self) -> jax.Array | None:
        scale = self.global_scale
        return scale if isinstance(scale, jax.Array) and scale.ndim > 0 else None

    def check_numbers(self, x: jax.Array, name: str = "x") -> None:
        super().check_numbers(x, name)
        self._check_token_scales(x)

    def _check(self, quantized: Quantized) -> tuple[jax.Array, jax.Array]:
        groups = super()._check(quantized)
        remedy = ". Rows of a dispatch need the scales of the rows: recv.global_scales"
        self._check_token_scales(jnp.asarray(quantized.values), remedy)
        return groups

    def _check_token_scales(self, x: jax.Array, remedy: str = "") -> None:
        """Raise a ValueError unless token scales match ``x``, the tokens or their values."""
        scales = self.token_scales
        if scales is not None and scales.shape != x.shape[:-1][: scales.ndim]:
            raise ValueError(
                "global_scale must be a float, or a float32 array [], or [T] with one scale for "
                f"each token of {short(x)}; got {short(scales)}{remedy}"
            )

    def _global_scale_bits(self, num_axes: int) -> tuple[jax.Array, jax.Array]:
        """Return the bits of the clipped global scale, and whether the scale is valid. If tokens
        have separate scales, append axes of size one up to ``num_axes`` axes."""
        scale = jnp.asarray(self.global_scale, jnp.float32)
        if scale.ndim:
            scale = scale.reshape(scale.shape + (1,) * (num_axes - scale.ndim))
        bits = lax.bitcast_convert_type(scale, jnp.uint32)
        least, most = ((127 + exponent) << 23 for exponent in GLOBAL_SCALE_EXPONENTS)
        # As integers, the bits of negative numbers and of NaN exceed the bits of infinity.
        return bits.clip(least, most), bits < INFINITY

    def _encode_groups(self, magnitude: jax.Array, sign: jax.Array) -> tuple[jax.Array, jax.Array]:
        global_scale, is_valid = self._global_scale_bits(magnitude.ndim)
        is_finite = (magnitude.max(axis=-1, keepdims=True) < INFINITY) & is_valid
        y = lax.bitcast_convert_type(magnitude, jnp.float32) * _reciprocal(global_scale)
        # The maximum of integers prevents XLA from merging the two float multiplications.
        largest = lax.bitcast_convert_type(y, jnp.uint32).max(axis=-1, keepdims=True)
        sixth = lax.bitcast_convert_type(largest, jnp.float32) * ONE_SIXTH
        code = _e4m3_codes(lax.bitcast_convert_type(sixth, jnp.uint32), 0)
        codes = _e2m1_codes(y, self._from_scales(_as_e4m3(code))) | sign << 3
        scale = _as_e4m3(jnp.where(is_finite, code, E4M3_NAN))
        return jnp.where(is_finite, codes, 0).astype(jnp.uint8), scale

    def _to_values(self, codes: jax.Array) -> jax.Array:
        pairs = _split(codes, 2)
        return pairs[..., 0] | pairs[..., 1] << 4

    def _from_values(self, values: jax.Array) -> jax.Array:
        codes = _merge(jnp.stack([values & 0xF, values >> 4], axis=-1)).astype(jnp.uint32)
        magnitude = codes & 7
        normal = ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22
        bits = jnp.where(magnitude < 2, magnitude * (126 << 23), normal)  # codes 0, 1: 0.0, 0.5
        return lax.bitcast_convert_type(bits | codes >> 3 << 31, jnp.float32)

    def _scale_globally(
        self, product: jax.Array, is_finite: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        bits, is_valid = self._global_scale_bits(product.ndim)
        return product * lax.bitcast_convert_type(bits, jnp.float32), is_finite & is_valid


WireDtype: TypeAlias = np.dtype | TokenFormat | None  # None means the dtype of rows


def as_wire_dtype(wire_dtype: Any) -> WireDtype:
    """Check the argument ``wire_dtype``, and convert the name of a dtype to the dtype."""
    if wire_dtype is None:
        return None
    if isinstance(wire_dtype, TokenFormat):
        if isinstance(getattr(wire_dtype, "global_scale", None), jax.Array):
            raise TypeError(
                "wire_dtype must have a float as global_scale; got an array. Pass "
                "NvFp4(global_scale=...) with a number"
            )
        return wire_dtype
    try:
        dtype = jnp.dtype(wire_dtype)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            "wire_dtype must be a float dtype such as jnp.bfloat16 or 'bfloat16', a token format "
            f"such as ma.BlockwiseFp8(), or None; got {wire_dtype!r}"
        )
    return dtype


def paired(parts: Sequence[jax.Array]) -> list[Quantized]:
    """Return [values, scales, values, scales, ...] as a list of ``Quantized``."""
    return [Quantized(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]


def _float32_bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the magnitude (bits of a float32, 0 for a subnormal) and the sign (0 or 1) of ``x``,
    uint32. ``astype`` is not used, because XLA could omit the rounding to ``x.dtype``."""
    if x.dtype == jnp.float32:
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        magnitude, sign = bits & 0x7FFFFFFF, bits >> 31
    else:
        half = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        magnitude, sign = half & 0x7FFF, half >> 15
        if x.dtype == jnp.bfloat16:
            magnitude <<= 16
        else:
            # A subnormal float16 is ``magnitude`` times 2**-24, which is a normal float32.
            multiple = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.uint32)
            subnormal = jnp.where(magnitude > 0, multiple - (24 << 23), 0)
            bias = jnp.where(magnitude < 0x7C00, 112, 224) << 23  # exponent 31 becomes 255
            normal = (magnitude << 13) + bias.astype(jnp.uint32)
            magnitude = jnp.where(magnitude < 0x400, subnormal, normal)
    return jnp.where(magnitude < MIN_NORMAL, 0, magnitude), sign


def _exponent(magnitude: jax.Array) -> jax.Array:
    """Return the exponent, int32, of a normal float32 from its bits without the sign."""
    return (magnitude >> 23).astype(jnp.int32) - 127


def _e4m3_codes(magnitude: jax.Array, exponent: Any) -> jax.Array:
    """Return magnitude / 2**exponent as codes (uint32) of float8_e4m3fn, rounded to nearest, ties
    to even, at most 448. ``magnitude`` is the bits of a float32. Its subnormals count as zero."""
    scaled = _exponent(magnitude) - exponent
    is_normal = magnitude >= MIN_NORMAL
    significand = jnp.where(is_normal, magnitude & (MIN_NORMAL - 1) | MIN_NORMAL, 0)
    # Keep the leading bit of the significand and three more bits. For results below 2**-6, which
    # are multiples of 2**-9, keep fewer bits. If 25 bits are dropped, the result is 0.
    dropped = jnp.clip(14 - scaled, 20, 25).astype(jnp.uint32)
    is_odd = significand >> dropped & 1
    rounded = (significand + (1 << (dropped - 1)) - 1 + is_odd) >> dropped
    # The leading bit adds 1 to the exponent field. A carry of the rounding adds 1 more.
    codes = (jnp.maximum(scaled, -6) + 6) * 8 + rounded.astype(jnp.int32)
    return jnp.where(is_normal, jnp.minimum(codes, E4M3_MAX), 0).astype(jnp.uint32)


def _e2m1_codes(y: jax.Array, scale: jax.Array) -> jax.Array:
    """Return y / scale, for y >= 0, as codes (uint32) of float4_e2m1fn, rounded to nearest, ties to
    even, at most 6. If the scale is 0, return 0. To avoid a division, compare y with the scale
    times the midpoint of each two neighboring values. These products are exact."""
    codes = jnp.zeros(y.shape, jnp.uint32)
    for i, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        bound = scale * np.float32(middle)
        exceeds = (y >= bound) if i % 2 else (y > bound)  # a tie goes to the even code
        codes += exceeds.astype(jnp.uint32)
    return jnp.where(scale > 0, codes, 0)


def _as_e4m3(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn)


def _reciprocal(bits: jax.Array) -> jax.Array:
    """Return 1 / x, rounded to nearest, from the bits of a float32 x. Both numbers are normal and
    positive. Integers are divided, because XLA:GPU does not round float divisions correctly."""
    significand = bits & (MIN_NORMAL - 1) | MIN_NORMAL
    quotient = jnp.zeros_like(bits)
    rest = jnp.full_like(bits, MIN_NORMAL)
    for _ in range(3):  # each step computes 8 bits of the quotient
        quotient = (quotient << 8) + (rest << 8) // significand
        rest = (rest << 8) % significand
    # Ties do not occur, because an odd number greater than 1 does not divide a power of two.
    quotient += (2 * rest > significand).astype(jnp.uint32)
    exponent = 253 - (bits >> 23)
    return lax.bitcast_convert_type((exponent << 23) + quotient - MIN_NORMAL, jnp.float32)


def _split(x: jax.Array, size: int) -> jax.Array:
    """Reshape [..., N] to [..., N / size, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _merge(x: jax.Array) -> jax.Array:
    """Reshape [..., N, size] to [..., N * size]."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
