"""Define the activations that the kernels compute."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..ad import accumulation_dtype
from ..checks import check_factor, short


@dataclasses.dataclass(frozen=True)
class Gated:
    """A function of one array [..., 2I], which returns ``activation(gate) * up``."""

    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return ``activation(gate) * up`` [..., I]. ``x`` has gate and up side by side."""
        gate, up = halves(x)
        return (self.activation(gate) * up).astype(x.dtype)


def gated(activation: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Return a gated activation for ``moe_mlp``, a function [..., 2I] -> [..., I].

    The first half of the last axis is the gate, and the second half is the up projection. The
    result ``activation(gate) * up`` is computed in float32 (float64 for float64 inputs) and rounded
    once to the dtype of the input. ``gated(jax.nn.silu)`` is SwiGLU, and ``gated(jax.nn.gelu)`` is
    GEGLU (Shazeer, arXiv:2002.05202).

    Args:
      activation: an elementwise function.

    Returns:
      A function of one array [..., 2I]. It raises a ValueError if the last axis is odd.
    """
    return Gated(activation)


def halves(x: jax.Array) -> list[jax.Array]:
    """Return gate and up [..., I] of an array [..., 2I], in the accumulation dtype."""
    if x.ndim < 1 or x.shape[-1] % 2:
        raise ValueError(
            f"a gated activation needs an array [..., 2I], gate and up side by side; got {short(x)}"
        )
    return jnp.split(x.astype(accumulation_dtype(x.dtype)), 2, axis=-1)


@dataclasses.dataclass(frozen=True)
class FusedActivation:
    """An activation that the kernels can compute: a function [..., I'] -> [..., I]."""

    kind: str
    """A key of ``KINDS``."""
    gated: bool = False
    """True if I' = 2I: the input has gate and up side by side, and the result is ``act(gate) *
    up``."""
    alpha: float = 0.0
    limit: float = 0.0
    """``alpha`` and ``limit`` are the arguments of ``clamped_swiglu``."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the activations, computed in float32 (float64 for float64 inputs) and rounded
        once."""
        if self.kind == CLAMPED_SWIGLU:
            return self._clamped_swiglu(*halves(x)).astype(x.dtype)
        act = KINDS[self.kind]
        if self.gated:
            return Gated(act)(x)
        return act(x.astype(accumulation_dtype(x.dtype))).astype(x.dtype)

    def _clamped_swiglu(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        # For a value equal to a limit, the derivative is 1, as for values inside the limits.
        limit = jnp.asarray(self.limit, gate.dtype)
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, jnp.where(up < -limit, -limit, up))
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)

    def width(self, intermediate: int) -> int:
        """Return I', the number of input columns, if the activation has I output columns."""
        return 2 * intermediate if self.gated else intermediate

    @property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes that tell a kernel which activation to compute."""
        return dict(
            activation=list(KINDS).index(self.kind),
            gated=int(self.gated),
            alpha=float(self.alpha),
            limit=float(self.limit),
        )


CLAMPED_SWIGLU = "clamped_swiglu"


@jax.custom_jvp
def _normal_cdf(x: jax.Array) -> jax.Array:
    """Return the probability that a normal variable is below x: ``erfc(-x / sqrt(2)) / 2``.

    The derivative ``exp(-x**2 / 2) / sqrt(2 pi)`` is defined below. In ``jax.shard_map``, JAX
    0.12.0.1 raises an error for its own derivatives of erf and erfc, because the coefficients of
    their polynomials do not vary over mesh axes.
    """
    return 0.5 * lax.erfc(x * -math.sqrt(0.5))


@_normal_cdf.defjvp
def _normal_cdf_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    return _normal_cdf(x), jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)) * dx


def squared_relu(x: jax.Array) -> jax.Array:
    """Return ``relu(x)**2``, the activation of Primer (arXiv:2109.08668) and Nemotron-4.
    ``activation`` of ``Experts`` may be this function or ``gated(squared_relu)``.

    Args:
      x: floats of any shape.

    Returns:
      An array like ``x``.
    """
    return jnp.square(jax.nn.relu(x))


# The enum ``Activation`` in cuda/gemm has the same order (tests/test_layout.py compares both).
KINDS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: x * _normal_cdf(x),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "squared_relu": squared_relu,
    CLAMPED_SWIGLU: lambda x: x,  # not used: see ``FusedActivation``
}


def clamped_swiglu(limit: float = 7.0, alpha: float = 1.702) -> FusedActivation:
    """Return the gated activation of GPT-OSS for ``moe_mlp``, a function [..., 2I] -> [..., I].

    Gate and up are side by side, as in ``gated``. The function clips gate values above ``limit``,
    and clips up values to [-limit, limit]. Then it returns ``gate * sigmoid(alpha * gate) * (up +
    1)``. In published weights of GPT-OSS, columns of gate and up alternate: gate is
    ``w[..., 0::2]``, and up is ``w[..., 1::2]``.

    Args:
      limit: a number above 0.
      alpha: a number above 0.

    Returns:
      A function of one array [..., 2I]. It raises a ValueError if the last axis is odd.
    """
    limit, alpha = check_factor("limit", limit), check_factor("alpha", alpha)
    return FusedActivation(CLAMPED_SWIGLU, gated=True, alpha=alpha, limit=limit)


def recognize(activation: Any) -> FusedActivation | None:
    """Return the ``FusedActivation`` that computes ``activation``, or None. ``activation`` may be a
    result of ``gated``, and ``gelu`` may be a ``functools.partial`` with ``approximate``."""
    if isinstance(activation, FusedActivation):
        return activation
    is_gated = isinstance(activation, Gated)
    act = activation.activation if is_gated else activation
    kinds = [kind for kind, function in KINDS.items() if act is function]
    if act is jax.nn.gelu:
        kinds = ["gelu_tanh"]
    elif isinstance(act, functools.partial) and act.func is jax.nn.gelu and not act.args:
        if act.keywords.keys() == {"approximate"}:
            kinds = ["gelu_tanh" if act.keywords["approximate"] else "gelu"]
    return FusedActivation(kinds[0], is_gated) if kinds else None
