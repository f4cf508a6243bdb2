"""Read and write the quantized weights of published files: FP8 in 128 x 128 blocks, and MXFP4."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import jax_moe_a2a as ma

from .._src.checks import short
from .._src.grouped.weights import BLOCK, SCALE_DTYPE, VALUE_DTYPE

_SCALES = "_scale_inv"  # the scales of the tensor ``name`` are the tensor ``name + _SCALES``
_GROUP = 32  # number of MXFP4 numbers with one scale
_MAX_SCALE = 252  # 6 (the largest e2m1 number) * 2**(_MAX_SCALE - 127) is finite in bfloat16

Tensor = TypeVar("Tensor", bound=Any)  # ``_Tensor`` of ``transformers.py``


def in_fp8(
    tensors: dict[str, Tensor], params: dict[str, Any], names: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return ``tensors`` and ``params`` with values and scales in place of the weights in FP8. A
    weight is in FP8 if ``names`` contains the name of its scales or values."""
    given = {*names}
    weights = {x.param for n, x in tensors.items() if {n + _SCALES, x.param + ".values"} & given}
    found, quantized = dict(tensors), dict(params)
    for name, tensor in tensors.items():
        if tensor.param not in weights:
            continue
        part, field = tensor.param.split(".")
        lead = (1,) * (part == "shared")  # the axis E, of size 1
        first, k, *gate, n = lead + getattr(params[part], field).shape
        if k % BLOCK or n % BLOCK:
            raise ValueError(
                f"config must have sizes that are multiples of {BLOCK}, because {tensor.param} is "
                f"in FP8; got {k} and {n}. Dequantize the model, and call ma.quantize_experts"
            )
        shapes = (first, *gate, n, k), (first, *gate, n // BLOCK, k // BLOCK)
        arrays = map(jax.ShapeDtypeStruct, shapes, (VALUE_DTYPE, SCALE_DTYPE))
        quantized[part] = quantized[part].replace(**{field: ma.QuantizedExperts(*arrays)})
        *others, rows, columns = tensor.shape
        squares = (*others, rows // BLOCK, columns // BLOCK)
        # K is the last axis, as in QuantizedExperts. Values and scales use the same ``view``.
        view = lambda x, of=tensor.view, lead=lead: of(np.moveaxis(x, -1, 1)[(0,) * len(lead)])
        found[name] = tensor._replace(param=tensor.param + ".values", view=view)
        param = tensor.param + ".scales"
        found[name + _SCALES] = tensor._replace(param=param, shape=squares, view=view)
    return found, quantized


def as_numpy(value: Any) -> Any:
    """Return a numpy array if ``value`` is a PyTorch tensor of 8-bit elements, else ``value``."""
    if type(value).__module__.split(".")[0] != "torch" or value.dtype.itemsize > 1:
        return value
    torch, dtype = importlib.import_module("torch"), str(value.dtype).removeprefix("torch.")
    return value.detach().cpu().view(torch.uint8).numpy().view(jnp.dtype(dtype))


def checked(name: str, array: np.ndarray, param: str) -> np.ndarray:
    """Check values or scales from FP8 files, and return them. Scales are cast to float32."""
    are_scales = param.endswith(".scales")
    expected = ("float32", "bfloat16") if are_scales else (VALUE_DTYPE.name,)
    if array.dtype.name not in expected:
        raise TypeError(
            f"{name} must be {' or '.join(expected)}, because {param} is in FP8; got {short(array)}"
        )
    array = array.astype(SCALE_DTYPE, copy=False) if are_scales else array
    # Compare bytes, which is fast. float8_e4m3fn has no infinity, and NaN is 0x7F or 0xFF.
    bad = ~np.isfinite(array) if are_scales else (array.view(np.uint8) & 0x7F) == 0x7F
    if bad.any():
        raise ValueError(
            f"{name} must hold finite numbers; got {bad.sum()} NaN or infinities. Load it again"
        )
    return array


def decoding(state_dict: Mapping[str, object], prefix: str) -> Mapping[str, object]:
    """Return a state dict in which floats [E, K, N] replace the blocks and scales of GPT-OSS."""
    names = [name for name in state_dict if name.startswith(prefix)]
    packed = [name.removesuffix("_blocks") for name in names if name.endswith("_blocks")]
    found = {name: state_dict[name] for name in names} if packed else {}
    for name in packed:
        if name + "_scales" in found:
            blocks, scales = (found.pop(name + part) for part in ("_blocks", "_scales"))
            found[name] = decode_mxfp4(blocks, scales).swapaxes(-1, -2)
    return found or state_dict


def decode_mxfp4(packed: object, scales: object) -> np.ndarray:
    """Decode weights in MXFP4 to bfloat16, without rounding.

    Each group of 32 numbers has 16 bytes and a scale. Number i is ``e2m1(nibble i) * 2**(scale -
    127)``. Nibble 2j is the low half of byte j, and nibble 2j + 1 is the high half. The OCP
    Microscaling Formats Specification v1.0 defines e2m1 (section 5.3.3) and the scale (5.4.1).

    Args:
      packed: uint8 or int8 [..., N, K / 32, 16], like ``*_blocks`` of GPT-OSS, or [..., N, K / 2],
        like ``weight`` of DeepSeek-V4 and ``weight_packed`` of Kimi K3. The array may be from
        NumPy, JAX or PyTorch.
      scales: uint8 or float8_e8m0fnu [..., N, K / 32].

    Returns:
      bfloat16 [..., N, K].

    Raises:
      TypeError: if an array has another dtype.
      ValueError: if shapes do not fit, or a scale exceeds 252. Larger scales mean NaN, or may give
          numbers that are too large for bfloat16.
    """
    codes, powers = (np.atleast_1d(as_numpy(array)) for array in (packed, scales))
    for name, array, other in (("packed", codes, "int8"), ("scales", powers, "float8_e8m0fnu")):
        if array.dtype.name not in ("uint8", other):
            raise TypeError(f"{name} must be uint8 or {other}; got {short(array)}")
    codes, powers = codes.view(np.uint8), powers.view(np.uint8)
    *lead, num_groups = powers.shape
    half = _GROUP // 2
    if codes.shape not in ((*lead, num_groups, half), (*lead, num_groups * half)):
        raise ValueError(
            f"packed must have {half} bytes for each of the scales {short(powers)}; got "
            f"{short(codes)}"
        )
    if powers.max(initial=0) > _MAX_SCALE:
        raise ValueError(
            f"scales must be at most {_MAX_SCALE}, 2**125; got {powers.max()}, with which numbers "
            "are NaN or too large for bfloat16"
        )
    codes, powers = codes.reshape(-1, half), powers.reshape(-1, 1).astype(np.uint16)
    pairs, table, step = np.empty(codes.shape, np.uint32), _pairs(), 1 << 12
    for i in range(0, len(codes), step):  # the indices of one step fit in a CPU cache
        indices = powers[i : i + step] << 8 | codes[i : i + step]
        table.take(indices, out=pairs[i : i + step], mode="clip")
    return pairs.view(jnp.bfloat16).reshape(*lead, num_groups * _GROUP)


@functools.cache
def _pairs() -> np.ndarray:
    """Return a uint32 for each scale and byte: the bits of the two bfloat16 numbers of the byte."""
    byte = np.arange(256, dtype=np.uint8)
    nibbles = np.stack([byte & 15, byte >> 4], axis=-1)
    numbers = nibbles.view(jnp.float4_e2m1fn).astype(np.float64)
    scales = 2.0 ** (np.arange(_MAX_SCALE + 1) - 127)
    return (numbers * scales[:, None, None]).astype(jnp.bfloat16).view(np.uint32).reshape(-1)
