"""Encode and decode token formats in numpy, in float32 where docs/formats.md requires it, otherwise
in float64."""

import cases
import ml_dtypes
import numpy as np

import jax_moe_a2a as ma

E4M3, E8M0 = (cases.dtype(name) for name in ("float8_e4m3fn", "float8_e8m0fnu"))


def magnitudes(dtype, num_codes):
    """Return, as float64, the numbers that the bytes 0 to num_codes - 1 encode."""
    return np.arange(num_codes, dtype=np.uint8).view(dtype).astype(np.float64)


E4M3_VALUES = magnitudes(E4M3, 127)  # up to 448
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest(x, values):
    """Return the index of the element of `values` nearest to x >= 0, the even index in a tie."""
    bounds = (values[:-1] + values[1:]) / 2
    below, upto = np.searchsorted(bounds, x, "left"), np.searchsorted(bounds, x, "right")
    return np.where(below % 2 == 0, below, upto)


EXPONENTS = np.arange(-200, 200)


def smallest_exponents(largest):
    """Return the exponent of the smallest power of two with largest / power <= 448."""
    return EXPONENTS[np.searchsorted(448 * 2.0**EXPONENTS, largest, "left")]


def ocp_exponents(largest):
    """Return the exponent of `largest`, minus the largest exponent of float8_e4m3fn, which is 8."""
    return EXPONENTS[np.searchsorted(2.0**EXPONENTS, largest, "right") - 1] - 8


def encode(fmt, x):
    """Return x [..., H] in a format as (values, scales)."""
    with np.errstate(invalid="ignore"):  # a cast of a signalling NaN would warn
        groups = x.astype(np.float64).reshape(-1, fmt.group_size)
    is_finite = np.isfinite(groups).all(axis=1)
    groups[~is_finite] = 0
    groups[np.abs(groups) < 2.0**-126] *= 0.0  # 0 with the same sign
    encode_groups = encode_nv if isinstance(fmt, ma.NvFp4) else encode_power_of_two
    codes, scales = encode_groups(fmt, np.abs(groups))
    sign = np.signbit(groups).astype(np.uint8)
    if isinstance(fmt, ma.NvFp4):
        codes |= sign << 3
        values = codes[:, ::2] | codes[:, 1::2] << 4
    else:
        values = (codes | sign << 7).view(E4M3)
    scales[~is_finite] = np.nan
    *lead, hidden = x.shape  # without tokens, reshape(-1) would fail
    values = values.reshape(*lead, hidden * values.shape[-1] // fmt.group_size)
    return values, scales.reshape(*lead, hidden // fmt.group_size)


def encode_power_of_two(fmt, groups):
    largest = groups.max(axis=1)
    rule = ocp_exponents if isinstance(fmt, ma.MxFp8) else smallest_exponents
    exponents = np.maximum(rule(largest), -117)
    codes = nearest(groups / 2.0 ** exponents[:, None], E4M3_VALUES).astype(np.uint8)
    if isinstance(fmt, ma.BlockwiseFp8):
        return codes, np.where(largest > 0, 2.0**exponents, 0).astype(np.float32)
    return codes, np.where(largest > 0, exponents + 127, 0).astype(np.uint8).view(E8M0)


def encode_nv(fmt, groups):
    with np.errstate(over="ignore"):
        inverse = np.float32(1) / np.float32(fmt.global_scale)
        y = groups.astype(np.float32) * inverse
        sixth = y.max(axis=1) * np.float32(1 / 6)
    scales = nearest(sixth.astype(np.float64), E4M3_VALUES)
    codes = np.zeros(groups.shape, np.uint8)
    for scale in np.unique(scales[scales > 0]):
        bounded = y[scales == scale].astype(np.float64)
        codes[scales == scale] = nearest(bounded, E2M1_VALUES * E4M3_VALUES[scale])
    return codes, scales.astype(np.uint8).view(E4M3)


def encode_squares(w, size=128):
    """Quantize weights [L, K, N] in squares; return values [L, N, K] and scales."""
    x = np.swapaxes(np.asarray(w, np.float64), 1, 2)
    experts, n, k = x.shape
    padded = np.zeros((experts, -(-n // size) * size, k))
    padded[:, :n] = x
    squares = padded.reshape(experts, -1, size, k // size, size).swapaxes(2, 3)
    groups = np.abs(squares).reshape(-1, size * size)
    codes, scales = encode_power_of_two(ma.BlockwiseFp8(), groups)
    codes = codes.reshape(squares.shape) | np.signbit(squares).astype(np.uint8) << 7
    values = codes.swapaxes(2, 3).reshape(padded.shape)[:, :n]
    return values.view(E4M3), scales.reshape(squares.shape[:3])


def decode(fmt, values, scales, dtype):
    global_scale = 1.0
    if isinstance(fmt, ma.NvFp4):
        nibbles = np.stack([values & 15, values >> 4], axis=-1)
        nibbles = nibbles.reshape(*values.shape[:-1], 2 * values.shape[-1])
        values = np.where(nibbles > 7, -1.0, 1.0) * E2M1_VALUES[nibbles & 7]
        global_scale = np.float64(np.float32(fmt.global_scale))
    if isinstance(fmt, ma.MxFp8):
        scales = np.where(scales.view(np.uint8) == 0, 0, scales.astype(np.float64))
    scales = np.repeat(scales.astype(np.float64), fmt.group_size, axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(np.float64)
        exact = values * scales * global_scale  # exact: at most 6 + 24 bits
        limit = float(ml_dtypes.finfo(dtype).max)
        out = np.clip(exact.astype(np.float32), -limit, limit).astype(cases.dtype(dtype))
    bad = ~(np.isfinite(values) & np.isfinite(scales))
    return np.where(bad, np.array(np.nan, out.dtype), out)


# In the functions below, the token x[i] of x [*lead, ..., H] has the global scale scales[i].


def of_each_token(fn, scales, *arrays):
    """Call `fn(fmt, is_valid, *the token's arrays)` for each token. Return (lead, results)."""
    lead, least = scales.shape, 2.0**-116
    results = []
    for index in np.ndindex(lead):
        scale = scales[index]
        is_valid = bool(np.isfinite(scale)) and not np.signbit(scale)
        fmt = ma.NvFp4(global_scale=min(max(float(scale), least), 1 / least) if is_valid else 1.0)
        results.append(fn(fmt, is_valid, *(array[index] for array in arrays)))
    return lead, results


def encode_tokens(x, scales):
    """Return (values, scales); a token with an invalid global scale has zero bytes and NaN
    scales."""

    def of_token(fmt, is_valid, token):
        return encode(fmt, token if is_valid else np.full_like(token, np.nan))

    lead, parts = of_each_token(of_token, scales, x)
    likes = encode(ma.NvFp4(), np.zeros((1, *x.shape[len(lead) :]), x.dtype))
    return tuple(
        np.array([part[i] for part in parts], like.dtype).reshape(*lead, *like.shape[1:])
        for i, like in enumerate(likes)
    )


def decode_tokens(values, scales, global_scales, dtype):
    def of_token(fmt, is_valid, values, scales):
        numbers = decode(fmt, values, scales, dtype)
        return numbers if is_valid else np.full_like(numbers, np.nan)

    lead, tokens = of_each_token(of_token, global_scales, values, scales)
    shape = (*lead, *values.shape[len(lead) : -1], 2 * values.shape[-1])
    return np.array(tokens, cases.dtype(dtype)).reshape(shape)
