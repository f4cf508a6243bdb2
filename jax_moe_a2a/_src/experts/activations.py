"""Define the activations that the kernels compute, and recognize them in a user's function.

A function is recognized by its program: the jaxprs of its value and of its tangent are compared
with the jaxprs of the listed functions. (A function may define its tangent itself.) A function that
reads arrays of the enclosing function is never recognized. A function of [..., 2I] that divides its
argument itself is recognized like a result of ``gated``.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..ad import accumulation_dtype
from ..checks import check_factor
from .gated import Gated, halves

Function = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class FusedActivation:
    """An activation that the kernels compute: a function [..., I'] -> [..., I]."""

    kind: str
    """A key of ``KINDS``."""
    gated: bool = False
    """True if I' = 2I: gate and up are side by side, and the result is ``act(gate) * up``."""
    alpha: float = 0.0
    """Of clamped_swiglu."""
    limit: float = 0.0
    """Of clamped_swiglu."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the activations, computed in float32 (float64 for float64) and rounded once."""
        if self.kind == CLAMPED_SWIGLU:
            return self._clamped_swiglu(*halves(x)).astype(x.dtype)
        act = KINDS[self.kind]
        if self.gated:
            return Gated(act)(x)
        return act(x.astype(accumulation_dtype(x.dtype))).astype(x.dtype)

    def _clamped_swiglu(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        # Exactly at a limit, the derivative is the same as inside the limits.
        limit = jnp.asarray(self.limit, gate.dtype)
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)

    def width(self, intermediate: int) -> int:
        """Return I', the number of columns before the activation, for I columns after it."""
        return 2 * intermediate if self.gated else intermediate

    @property
    def code(self) -> int:
        """Return the number that stands for the kind of activation in the kernels."""
        return list(KINDS).index(self.kind)

    @property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes of a call of a kernel."""
        return dict(
            activation=self.code,
            gated=int(self.gated),
            alpha=float(self.alpha),
            limit=float(self.limit),
        )


CLAMPED_SWIGLU = "clamped_swiglu"


@jax.custom_jvp
def _normal_cdf(x: jax.Array) -> jax.Array:
    """Return the probability that a normal variable is below x: ``erfc(-x / sqrt(2)) / 2``.

    Its derivative is the density ``exp(-x**2 / 2) / sqrt(2 pi)``. JAX 0.12.0.1 refuses its own
    derivatives of erf and erfc in ``jax.shard_map``, because their polynomials have coefficients
    that do not vary over mesh axes.
    """
    return 0.5 * lax.erfc(x * -math.sqrt(0.5))


@_normal_cdf.defjvp
def _normal_cdf_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return _normal_cdf(x), jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)) * dx


def _gelu(x: jax.Array) -> jax.Array:
    """Return ``x * cdf(x)``."""
    return x * _normal_cdf(x)


# The order is that of Activation in cuda/gemm (tests/test_layout.py compares them).
KINDS: dict[str, Function] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    CLAMPED_SWIGLU: lambda x: x,  # has two arguments: see FusedActivation
}

_TANH = math.sqrt(2 / math.pi)

# More spellings of the same functions. At 0, JAX's derivative of maximum(x, 0) is 0.5. The kernels
# compute 0, the derivative of ``jax.nn.relu``.
_SPELLINGS: tuple[tuple[str, Function], ...] = (
    *((kind, act) for kind, act in KINDS.items() if kind != CLAMPED_SWIGLU),
    ("gelu", functools.partial(jax.nn.gelu, approximate=False)),
    ("relu", lambda x: jnp.maximum(x, 0)),
    ("relu", lambda x: lax.max(x, jnp.zeros_like(x))),
    ("relu", lambda x: jnp.where(x > 0, x, 0)),
    ("squared_relu", lambda x: jax.nn.relu(x) ** 2),
    ("squared_relu", lambda x: jax.nn.relu(x) * jax.nn.relu(x)),
    ("squared_relu", lambda x: jnp.square(jnp.maximum(x, 0))),
    ("squared_relu", lambda x: jnp.maximum(x, 0) ** 2),
    ("gelu", lambda x: 0.5 * x * (1 + lax.erf(x / math.sqrt(2)))),
    ("gelu", lambda x: x * 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))),
    ("gelu_tanh", lambda x: 0.5 * x * (1 + jnp.tanh(_TANH * (x + 0.044715 * x**3)))),
)


def clamped_swiglu(limit: float = 7.0, alpha: float = 1.702) -> FusedActivation:
    """Return the gated activation of GPT-OSS, for ``moe_mlp``: [..., 2I] -> [..., I].

    With gate and up side by side, as in ``gated``, the result is ``gate * sigmoid(alpha * gate) *
    (up + 1)``, where gate is at most ``limit``, and up lies between ``-limit`` and ``limit``.
    Published weights of GPT-OSS interleave gate and up: use ``w[..., 0::2]`` for gate and ``w[...,
    1::2]`` for up.

    Args:
      limit: a number above 0.
      alpha: a number above 0.

    Returns:
      A function of one array [..., 2I]. It raises a ValueError if the last axis is odd.
    """
    limit, alpha = check_factor("limit", limit), check_factor("alpha", alpha)
    return FusedActivation(CLAMPED_SWIGLU, gated=True, alpha=alpha, limit=limit)


def recognize(activation: Any, rows: jax.ShapeDtypeStruct) -> FusedActivation | None:
    """Return the listed activation that a function of rows [C, I'] computes, or None."""
    if isinstance(activation, FusedActivation):
        return activation
    is_gated = isinstance(activation, Gated)
    if is_gated:
        activation = activation.activation
        shape = (*rows.shape[:-1], rows.shape[-1] // 2)
        rows = jax.ShapeDtypeStruct(shape, accumulation_dtype(rows.dtype))
    found = _program_of(activation, rows)
    if not found:
        return None
    around = _has_x64(), jax.sharding.get_abstract_mesh()
    divides = not is_gated and _HALF in found
    for spelling, (kind, _) in enumerate(_SPELLINGS):
        if found in _programs_of_spelling(spelling, divides, rows.dtype, around):
            return FusedActivation(kind, is_gated or divides)
    return None


@functools.cache
def _programs_of_spelling(
    spelling: int, divides: bool, dtype: jnp.dtype, around: Any
) -> tuple[str, ...]:
    """Return the programs of a spelling, gated if ``divides``, in its dtype and in float32."""
    del around  # part of the key, because programs depend on it
    _, act = _SPELLINGS[spelling]
    acc = accumulation_dtype(dtype)
    in_acc = lambda x: act(x.astype(acc)).astype(x.dtype)
    forms: list[Function] = [act] if acc == dtype else [act, in_acc]
    if divides:
        forms = [Gated(act), *map(_gated_in_own_dtype, forms)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rows = jax.ShapeDtypeStruct((3, 6), dtype)
        return tuple(_program_of(form, rows) for form in forms)


def _gated_in_own_dtype(act: Function) -> Function:
    def gated(x: jax.Array) -> jax.Array:
        gate, up = jnp.split(x, 2, axis=-1)
        return act(gate) * up

    return gated


def _has_x64() -> bool:
    return getattr(jax.config, "jax_enable_x64", False)  # unknown to the types of jax 0.10


def _program_of(fn: Function, rows: jax.ShapeDtypeStruct) -> str:
    """Return a digest of the value and the tangent of a function. The digest depends neither on
    names nor on the shape of rows. Return '' if the function cannot equal a listed one."""

    def value_and_tangent(x: jax.Array, dx: jax.Array) -> Any:
        return jax.jvp(fn, (x,), (dx,))

    try:
        closed = jax.make_jaxpr(value_and_tangent)(rows, rows)
        if closed.effects:
            return ""
        digests = _Digests(tuple(rows.shape))
        outs = digests.of(closed, ["x", "dx"])
    except Exception:  # the layer calls the function again, which raises this error for the user
        return ""
    return " ".join([_HALF] * digests.has_halves + outs)


_HALF = "gated:"  # in the programs of functions that divide their argument
_INLINED = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call")
_COMMUTE = ("add", "add_any", "mul", "max", "min")
_PARTS = ("gate", "up")


class _Digests:
    """A function from jaxprs to digests of their results."""

    def __init__(self, shape: tuple[int, ...]):
        self._shapes = {shape: "shape", (*shape[:-1], shape[-1] // 2): "half"}
        self._width = shape[-1]
        self.has_halves = False

    def of(self, closed: Any, args: Sequence[str]) -> list[str]:
        """Return the digests of the results of a closed jaxpr."""
        values = dict(zip(closed.jaxpr.invars, args, strict=True))
        values.update(zip(closed.jaxpr.constvars, map(_constant, closed.consts), strict=True))
        read = lambda atom: _constant(atom.val) if hasattr(atom, "val") else values[atom]
        for eqn in closed.jaxpr.eqns:
            values.update(zip(eqn.outvars, self._results(eqn, list(map(read, eqn.invars)))))
        return list(map(read, closed.jaxpr.outvars))

    def _results(self, eqn: Any, args: list[str]) -> list[str]:
        name, params = eqn.primitive.name, eqn.params
        if name in _INLINED:
            return self.of(params.get("jaxpr") or params["call_jaxpr"], args)
        if name == "copy":
            return args
        if name in ("slice", "split") and (parts := self._halves(name, eqn)):
            self.has_halves = True
            return [f"{part} {args[0]}" for part in parts]
        half = ""
        if name == "convert_element_type" and args[0].startswith(_PARTS):
            half, args[0] = args[0].split(" ", 1)  # as if the conversion were before the division
        if name in _COMMUTE:
            args = sorted(args)
        params = {key: self._named(value) for key, value in params.items()}
        text = f"{name} {sorted(params.items())} {args}"
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return [f"{half} {digest} {i}".lstrip() for i in range(len(eqn.outvars))]

    def _named(self, value: Any) -> Any:
        """Return a parameter, or a name in place of a shape that depends on the shape of the
        rows."""
        return self._shapes.get(value, value) if isinstance(value, tuple) else value

    def _halves(self, name: str, eqn: Any) -> Sequence[str]:
        """Return which halves of the last axis the results of an equation are, or ()."""
        shape, results = eqn.invars[0].aval.shape, [var.aval.shape for var in eqn.outvars]
        if shape not in self._shapes or shape[-1] != self._width or self._width % 2:
            return ()
        if any(self._shapes.get(result) != "half" for result in results):
            return ()
        if name == "split":
            return _PARTS if len(results) == 2 else ()
        if any(stride != 1 for stride in eqn.params["strides"] or ()):
            return ()
        starts = {0: _PARTS[:1], self._width // 2: _PARTS[1:]}
        return starts.get(eqn.params["start_indices"][-1], ())


def _constant(value: Any) -> str:
    """Return a constant as text. Raise a TypeError if it is not a known number."""
    if isinstance(value, jax.core.Tracer) or np.size(value) != 1:
        raise TypeError("the function reads an array")
    return f"{value.dtype if hasattr(value, 'dtype') else type(value)} {np.asarray(value).item()}"
