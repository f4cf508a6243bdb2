"""Read and write the quantized weights of published files: FP8 in squares, and MXFP4."""

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

_SCALES = "_scale_inv"  # follows the name of a tensor in FP8, and names its scales
_WEIGHTS = "experts.w_in", "experts.w_out", "shared.w_in", "shared.w_out"
_GROUP = 32  # numbers that share a scale in MXFP4
_MAX_SCALE = 252  # with which 6, the largest number of 4 bits, is finite in bfloat16

Tensor = TypeVar("Tensor", bound=Any)  # ``_Tensor`` of ``transformers.py``


def in_fp8(
    tensors: dict[str, Tensor], params: dict[str, Any], names: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the parameters of a block some weights of which are in FP8.

    A tensor [..., N, K] in FP8 is a view of values, and its scales [..., N / 128, K / 128] are the
    same view of the scales: weights are stored as ``QuantizedExperts`` has them.

    Args:
      tensors: of the block with floats, by name, each a view of an array [E, K, ..., N].
      params: of the block with floats, as shapes.
      names: those in the state dict, or those of the parameters.

    Raises:
      ValueError: if a size of weights in FP8 is no multiple of 128.
    """
    given = {tensor.param for name, tensor in tensors.items() if name + _SCALES in names}
    given |= {weight for weight in _WEIGHTS if weight + ".values" in names}
    found, params = dict(tensors), dict(params)
    for weight in sorted(given):
        part, field = weight.split(".")
        lead = (1,) * (part == "shared")
        first, k, *between = lead + getattr(params[part], field).shape
        if k % BLOCK or between[-1] % BLOCK:
            raise ValueError(
                f"{weight} must have rows and columns in multiples of {BLOCK} in FP8; config has "
                f"{k} and {between[-1]}. Dequantize the model, and call ma.quantize_experts"
            )
        shapes = (first, *between, k), (first, *between[:-1], between[-1] // BLOCK, k // BLOCK)
        arrays = map(jax.ShapeDtypeStruct, shapes, (VALUE_DTYPE, SCALE_DTYPE))
        params[part] = params[part].replace(**{field: ma.QuantizedExperts(*arrays)})
        for name, tensor in tensors.items():
            if tensor.param != weight:
                continue
            view = functools.partial(_view, tensor.view, bool(lead))
            *others, rows, columns = tensor.shape
            squares = (*others, rows // BLOCK, columns // BLOCK)
            found[name] = tensor._replace(param=weight + ".values", view=view)
            found[name + _SCALES] = tensor._replace(
                param=weight + ".scales", shape=squares, view=view
            )
    return found, params


def _view(of_floats: Any, is_shared: bool, array: np.ndarray) -> np.ndarray:
    """Return the view of an array [E, ..., N, K] that ``of_floats`` returns of [E, K, ..., N]."""
    array = np.moveaxis(array, -1, 1)
    return of_floats(array[0] if is_shared else array)


def as_numpy(value: Any) -> Any:
    """Return a PyTorch tensor with elements of 8 bits as a numpy array, anything else unchanged."""
    if type(value).__module__.split(".")[0] != "torch" or value.dtype.itemsize > 1:
        return value
    torch, dtype = importlib.import_module("torch"), str(value.dtype).removeprefix("torch.")
    return value.detach().cpu().view(torch.uint8).numpy().view(jnp.dtype(dtype))


def checked_values(name: str, array: np.ndarray) -> np.ndarray:
    """Return the values of weights in FP8, or raise an error."""
    if array.dtype != VALUE_DTYPE:
        raise TypeError(
            f"{name} must be {VALUE_DTYPE.name}, because it has scales; got {short(array)}"
        )
    _check_finite(name, np.all(array.view(np.uint8) & 0x7F != 0x7F))
    return array


def checked_scales(name: str, array: np.ndarray) -> np.ndarray:
    """Return the scales of weights in FP8 in float32, or raise an error."""
    if array.dtype not in (SCALE_DTYPE, jnp.bfloat16):
        raise TypeError(f"{name} must be float32 or bfloat16; got {short(array)}")
    _check_finite(name, np.isfinite(array).all())
    return array.astype(SCALE_DTYPE, copy=False)


def _check_finite(name: str, is_finite: Any) -> None:
    if not is_finite:
        raise ValueError(
            f"{name} must hold finite numbers; got a NaN or an infinity. Compare the file with the "
            "published one: it may be damaged"
        )


class _Mxfp4:
    """A tensor [E, K, N] of GPT-OSS, which is decoded when it is read."""

    def __init__(self, blocks: Any, scales: Any):
        self._arrays = blocks, scales

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del dtype, copy
        return decode_mxfp4(*self._arrays).swapaxes(-1, -2)


def decoding(state_dict: Mapping[str, object], prefix: str) -> Mapping[str, object]:
    """Return a state dict that decodes tensors in MXFP4, in place of their blocks and scales."""
    names = [name for name in state_dict if name.startswith(prefix)]
    packed = {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
    packed = {name for name in packed if name + "_scales" in names}
    if not packed:
        return state_dict
    parts = {name + part for name in packed for part in ("_blocks", "_scales")}
    found = {name: state_dict[name] for name in names if name not in parts}
    read = lambda name: (state_dict[name + part] for part in ("_blocks", "_scales"))
    return found | {name: _Mxfp4(*read(name)) for name in packed}


def decode_mxfp4(packed: Any, scales: Any) -> np.ndarray:
    """Decode weights in MXFP4 to bfloat16, which is exact.

    Number i of a group of 32 is ``e2m1(nibble i) * 2**(scale - 127)``, where nibble 2j is the low
    half of byte j, and nibble 2j + 1 the high half. The OCP Microscaling Formats Specification v1.0
    (sections 5.3.3 and 5.4.1) defines e2m1 and the scale; the files of GPT-OSS, DeepSeek-V4 and
    Kimi K3 have this order of nibbles.

    Args:
      packed: uint8 or int8 [..., N, K / 32, 16], as ``*_blocks`` of GPT-OSS, or [..., N, K / 2], as
        ``weight`` of DeepSeek-V4 and ``weight_packed`` of Kimi K3. NumPy, JAX or PyTorch.
      scales: uint8 or float8_e8m0fnu [..., N, K / 32].

    Returns:
      bfloat16 [..., N, K].

    Raises:
      TypeError: if an array has another dtype.
      ValueError: if shapes do not fit, or a scale exceeds 252, with which numbers are NaN or may be
        too large for bfloat16.
    """
    packed, scales = (np.atleast_1d(as_numpy(array)) for array in (packed, scales))
    for name, array, other in (("packed", packed, "int8"), ("scales", scales, "float8_e8m0fnu")):
        if array.dtype.name not in ("uint8", other):
            raise TypeError(f"{name} must be uint8 or {other}; got {short(array)}")
    packed, scales = packed.view(np.uint8), scales.view(np.uint8)
    shape, half = scales.shape, _GROUP // 2
    if packed.shape not in ((*shape, half), (*shape[:-1], shape[-1] * half)):
        raise ValueError(
            f"packed must have {half} bytes for each of the scales {short(scales)}; got "
            f"{short(packed)}"
        )
    if scales.size and scales.max() > _MAX_SCALE:
        raise ValueError(
            f"scales must be at most {_MAX_SCALE}, 2**125; got {scales.max()}, with which numbers "
            "are NaN or too large for bfloat16"
        )
    groups, exponents = packed.reshape(-1, half), scales.reshape(-1, 1).astype(np.uint16)
    pairs, table = np.empty(groups.shape, np.uint32), _pairs()
    step = 1 << 18
    for i in range(0, len(groups), step):  # whose indices need 16 times their memory
        pairs[i : i + step] = table[exponents[i : i + step] << 8 | groups[i : i + step]]
    return pairs.view(jnp.bfloat16).reshape(*shape[:-1], shape[-1] * _GROUP)


@functools.cache
def _pairs() -> np.ndarray:
    """Return the two bfloat16 of each scale and byte, in that order, as one uint32."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = np.array([*magnitudes, *(-x for x in magnitudes)])
    byte = np.arange(256)
    of_bytes = numbers[np.stack([byte & 15, byte >> 4], axis=-1)]
    scales = 2.0 ** (np.arange(_MAX_SCALE + 1) - 127)
    return (of_bytes * scales[:, None, None]).astype(jnp.bfloat16).view(np.uint32).reshape(-1)
