"""Define common helpers for rules of derivatives and for dtypes of sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from . import compat


def accumulation_dtype(dtype: DTypeLike) -> Any:
    """Return the dtype of sums: float32, or ``dtype`` itself if it has more bits or is complex."""
    wide = (jnp.float64, jnp.complex64, jnp.complex128)
    return jnp.dtype(dtype) if dtype in wide else jnp.dtype(jnp.float32)


def carries_tangent(dtype: DTypeLike) -> bool:
    """Return True if arrays of this dtype have derivatives: floats of 16 bits or more. In smaller
    floats, sums of cotangents would overflow."""
    return jnp.issubdtype(dtype, jnp.inexact) and jnp.dtype(dtype).itemsize > 1


def zero_tangent(primal: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def is_zero(tangent: Any) -> bool:
    return type(tangent) is ad.Zero


def aval_of(x: Any) -> Any:
    """Return the abstract value of an array, an undefined primal or a symbolic zero."""
    return x.aval if ad.is_undefined_primal(x) or is_zero(x) else jax.typeof(x)


def select(keep: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for value, kept in zip(values, keep, strict=True) if kept]


def spread(keep: Sequence[bool], kept: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return ``others``, but with the elements of ``kept`` in order where ``keep`` is True."""
    values = iter(kept)
    return [next(values) if k else other for k, other in zip(keep, others, strict=True)]


def jvp_of_moving(
    fn: Callable[..., Any],
    moves: Sequence[bool],
    primals: compat.Primals,
    tangents: compat.Tangents,
) -> Any:
    """Return the results of ``fn`` and their tangents. Only operands with a True in ``moves`` have
    tangents."""
    of_moving = lambda *moving: fn(*spread(moves, moving, primals))
    return jax.jvp(of_moving, select(moves, primals), select(moves, tangents))


def cotangents_of(
    payload: Sequence[jax.Array], wanted: Sequence[bool], found: Sequence[Any]
) -> list[Any]:
    """Return one cotangent for each operand in ``payload``: an element of ``found`` if ``wanted``,
    None for a known operand, and otherwise zero."""
    none = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in payload]
    return spread(wanted, found, none)


def with_tangent(x: Any, tangent_of: Callable[[Any, Any], Any], *operands: Any) -> Any:
    """Return the pytree ``x``. Its tangent is ``tangent_of(operands, tangents of operands)``, and
    the tangent of the argument ``x`` is ignored."""

    @jax.custom_jvp
    def same(x: Any, *_: object) -> Any:
        return x

    @same.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        out = same(*primals)  # not primals[0], because second derivatives need this rule, too
        found = tangent_of(primals[1:], tangents[1:])
        # ``x`` may vary over more mesh axes than its tangent.
        aligned = lambda tangent, out: compat.align_varying([tangent, out], ())[0]
        return out, jax.tree.map(aligned, found, out)

    return same(x, *operands)


def named(tree: Any, name: str) -> Any:
    """Return ``tree``, whose arrays get the checkpoint name ``name`` for ``jax.checkpoint``."""

    def of_array(x: jax.Array) -> jax.Array:
        bits = compat.checkpoint_name(as_bits(x), name)
        return bits if bits.dtype == x.dtype else lax.bitcast_convert_type(bits, x.dtype)

    return jax.tree.map(of_array, tree)


def as_bits(x: jax.Array) -> jax.Array:
    """Return floats of 8 bits as integers, and other arrays unchanged. ``jax.checkpoint`` rounds
    saved floats with ``lax.reduce_precision``, which returns NaN for a float8_e4m3fn of 256 or more
    (jax 0.10.2 to 0.12.0)."""
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1
    return lax.bitcast_convert_type(x, jnp.uint8) if is_narrow else x


def register_constant(primitive: compat.Primitive) -> None:
    """Register a primitive that returns its operand and has no derivative."""
    primitive.def_impl(partial(compat.apply_primitive, primitive))
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    ad.primitive_jvps[primitive] = lambda primals, _, **params: (
        primitive.bind(*primals, **params),
        zero_tangent(primals[0]),
    )
    batching.primitive_batchers[primitive] = lambda args, dims, **params: (
        primitive.bind(*args, **params),
        dims[0],
    )


fixed_p = compat.Primitive("fixed")


def fixed(x: jax.Array) -> jax.Array:
    """Return ``x`` as a constant, whose derivative is zero. Unlike ``lax.stop_gradient``, this
    function works under ``jax.linear_transpose``."""
    return fixed_p.bind(x)


def register_fixed(primitive: compat.Primitive) -> None:
    register_constant(primitive)
    ad.primitive_transposes[primitive] = lambda ct, x, **_: [ad.Zero(aval_of(x))]


register_fixed(fixed_p)
