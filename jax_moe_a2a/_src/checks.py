"""Check arguments, and describe arrays in error messages."""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

PyTree: TypeAlias = Any  # a pytree of arrays, for which Python's type system has no type
Tail: TypeAlias = Literal["zero", "unspecified"]  # values of rows after the last group


def short(x: Any) -> str:
    """Return dtype and shape, such as ``float32[4,8]``; for another object, its type."""
    if x.dtype == object and not x.shape:
        return type(x.item()).__name__
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def merge_axes(name: str, array: Any, ndim: int) -> str:
    """Return how to merge the axes of batch and sequence, as the end of an error message. Return ""
    unless the array has ``ndim`` + 1 axes."""
    if array.ndim != ndim + 1:
        return ""
    rest = "".join(f", {size}" for size in array.shape[2:])
    return f". Merge the axes of batch and sequence: {name}.reshape(-1{rest})"


def as_array(x: object) -> Any:
    """Return a jax array unchanged, and anything else as a numpy array. ``jnp.asarray`` is not
    used, because it would truncate integers of 64 bits."""
    return x if isinstance(x, jax.Array) else np.asarray(x)


def is_known(x: object) -> bool:
    """Return True if this process can read the array's elements while JAX traces the program."""
    if isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def check_static(name: str, array: Any) -> None:
    """Raise an error if ``jax.export`` made a size of the array symbolic. XLA would abort the
    process that calls such an exported program."""
    if not all(isinstance(size, int) for size in array.shape):
        raise ValueError(
            f"{name} must have a static shape; got {short(array)} with a symbolic size: use "
            "jax.export once for each size"
        )


def check_floats(name: str, array: Any, remedy: str = "Cast it first") -> None:
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.dtype.itemsize < 2:
        raise TypeError(f"{name} must hold floats of 16 bits or more; got {short(array)}. {remedy}")


def check_unsharded(name: str, aval: Any, num_axes: int | None = None) -> None:
    """Raise a TypeError if an Explicit mesh axis shards one of the first axes of an array."""
    if any(axis is not None for axis in aval.sharding.spec[:num_axes]):
        raise TypeError(
            f"{name} must not be sharded along tokens or rows by an Explicit mesh axis: make that "
            f"axis manual in jax.shard_map, or reshard; got {aval.str_short()}"
        )


def check_int(name: str, value: Any, *, least: int, remedy: str = "") -> int:
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except (TypeError, jax.errors.JAXTypeError):
        number = None
    if number is None:
        raise TypeError(f"{name} must be an int; got {value!r}{_remedy(value, 'int')}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}{remedy}")
    return number


def fitting_experts(num_experts: int, size: int) -> str:
    """Return advice for the end of an error message. It names a number of experts that ``size``
    ranks can divide, and a number of ranks that divides ``num_experts``."""
    fewer = num_experts // size * size
    near = " or ".join(str(number) for number in (fewer, fewer + size) if number)
    ranks = max(n for n in range(1, size + 1) if num_experts % n == 0) if num_experts else 1
    return f"Use {near} experts, or {ranks} rank{'s' * (ranks > 1)}"


def check_factor(name: str, value: Any, remedy: str = "") -> float:
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a number; got {value!r}{_remedy(value, 'float')}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0; got {value}{remedy}")
    return float(value)


def _remedy(value: Any, kind: str) -> str:
    """Return how to make ``value`` a number, as the end of an error message, or ""."""
    if isinstance(value, jax.core.Tracer):
        return (
            ". It must be known when the program is traced: pass a Python number, for example "
            "through static_argnums of jax.jit"
        )
    is_number = isinstance(value, float | np.floating | np.ndarray | jax.Array | str)
    return f": use {kind}(...)" if is_number else ""


def check_tail(tail: Any) -> Tail:
    """Return the checked argument ``tail``. Under ``jax.debug_nans``, return ``"zero"``, because
    JAX would report NaN after the last group as an error of the program."""
    if tail not in get_args(Tail):
        raise ValueError(f'tail must be "zero" or "unspecified"; got {tail!r}')
    return "zero" if jax.debug_nans.value else tail


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool; got {value!r}")
    return value
