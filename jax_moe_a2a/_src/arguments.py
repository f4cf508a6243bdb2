"""What public functions do with their arguments before anything else."""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, get_args

import jax
import numpy as np

PyTree = Any  # of arrays
Tail = Literal["zero", "unspecified"]  # what a result holds after the last group of rows


def short(x: Any) -> str:
    """Dtype and shape, for messages: ``float32[4,8]``."""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]"


def as_array(x: Any) -> Any:
    """A jax or numpy array; numpy is left alone, for jnp.asarray would wrap wide integers."""
    return x if isinstance(x, jax.Array) else np.asarray(x)


def check_int(name: str, value: Any, *, least: int) -> int:
    """``value`` as an int; an error that names it where it is none, or less than ``least``."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except (TypeError, jax.errors.JAXTypeError):
        number = None
    if number is None:
        raise TypeError(f"{name} must be an int; got {value!r}{_remedy(value, 'int')}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}")
    return number


def check_factor(name: str, value: Any) -> float:
    """``value`` as a finite float above 0; an error that names it where it is none."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if not is_number or isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a number; got {value!r}{_remedy(value, 'float')}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number above 0; got {value}")
    return float(value)


def _remedy(value: Any, kind: str) -> str:
    """What to do about a value that is not of that kind; empty if nothing is likely to help."""
    if isinstance(value, jax.core.Tracer):
        return (
            ". It must be known when the program is traced: pass a Python number, for example "
            "through static_argnums of jax.jit"
        )
    is_number = isinstance(value, float | np.floating | np.ndarray | jax.Array | str)
    return f": use {kind}(...)" if is_number else ""


def check_tail(tail: Any) -> None:
    """An error where ``tail`` is no ``Tail``."""
    if tail not in get_args(Tail):
        raise ValueError(f'tail must be "zero" or "unspecified"; got {tail!r}')


def check_bool(name: str, value: Any) -> None:
    """An error that names it where ``value`` is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool; got {value!r}")
