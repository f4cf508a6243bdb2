"""Compute the experts of a rank (SwiGLU over rows grouped by expert) in several ways. Rows after
the last group are zero, and nothing reads their results."""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_moe_a2a as ma
from jax_moe_a2a._src.experts import activations, primitives
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.grouped import lowering, straight_through

from .operations import squares

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Experts = Callable[..., jax.Array]
grouped_dot: Product = functools.partial(ma.grouped_dot, tail="unspecified")


def swiglu(gate_up: jax.Array) -> jax.Array:
    """Return [..., I] from [..., 2 I], computed in float32."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)


def side_by_side(pairs: jax.Array) -> jax.Array:
    """Reshape gate and up [..., 2, I] to [..., 2 I], as grouped products need them."""
    return pairs.reshape(*pairs.shape[:-2], -1)


def by_product(product: Product) -> Experts:
    def experts(rows: jax.Array, w_in: jax.Array, w_out: jax.Array, sizes: jax.Array) -> jax.Array:
        return product(swiglu(product(rows, side_by_side(w_in), sizes)), w_out, sizes)

    return experts


def fused(rows: jax.Array, w_in: jax.Array, w_out: jax.Array, sizes: jax.Array) -> jax.Array:
    w_in = side_by_side(w_in)
    activation = activations.recognize(ma.gated(jax.nn.silu))
    assert activation is not None
    weights = jnp.ones(rows.shape[0], jnp.float32)
    operands = primitives.ExpertOperands(rows, w_in, None, weights, w_out, None, sizes)
    return primitives.bind_experts(operands, activation=activation)[0]


RESULTS = ("y", "d_rows", "d_w_in", "d_w_out")


def with_gradients(experts: Experts) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function (rows, w_in, w_out, sizes) -> ``RESULTS``. y's cotangent is ``rows``."""

    def run(
        rows: jax.Array, w_in: jax.Array, w_out: jax.Array, sizes: jax.Array
    ) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(functools.partial(experts, sizes=sizes), rows, w_in, w_out)
        return y, *vjp(rows)

    return run


def mosaic_product() -> Product:
    ragged_dot = _mosaic("ragged_dot").ragged_dot
    ragged_outer = _mosaic("transposed_ragged_dot").transposed_ragged_dot

    def tiles(rows: jax.Array) -> dict[str, int]:
        block_m = 128 if rows.shape[0] >= 4096 else 64
        return dict(
            block_m=block_m, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=4
        )

    def multiply(rows: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
        out = ragged_dot(rows, w, group_sizes=sizes, transpose_rhs=transposed, **tiles(rows))
        # The kernel does not write rows after the last group.
        return jnp.where(jnp.arange(out.shape[0])[:, None] < sizes.sum(), out, 0)

    def outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        return ragged_outer(x, y, group_sizes=sizes, **(tiles(x) | dict(block_m=128)))

    return _differentiable(multiply, outer)


def library_product() -> Product:
    if not native.has_grouped_gemm() or native.library_version() < (13, 3):
        raise ImportError("the process has no cuBLASLt 13.3 or newer; see --cublas-lt")
    native.register_targets()
    options: Any = dict(num_sms=None, by_library=True)

    def multiply(rows: jax.Array, w: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
        how = dict(options, transposed=transposed, dtype=rows.dtype, tail="unspecified")
        return lowering.kernel_dot(rows, w, sizes, **how)

    def outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        parts = (sizes.shape,)
        return lowering.kernel_outer(x, y, sizes, parts=parts, dtype=x.dtype, **options)[0]

    return _differentiable(multiply, outer)


def _differentiable(multiply: Callable[..., jax.Array], outer: Callable[..., jax.Array]) -> Product:
    """Make a product from ``multiply(rows, w, sizes, transposed)`` and ``outer(x, y, sizes)``."""

    @jax.custom_vjp
    def product(rows: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return multiply(rows, w, sizes, False)

    def backward(residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        rows, w, sizes = residuals
        return multiply(g, w, sizes, True), outer(rows, g, sizes), None

    product.defvjp(lambda *args: (product(*args), args), backward)
    return product


def _mosaic(name: str) -> Any:
    name = f"jax.experimental.pallas.ops.gpu.{name}_mgpu"
    try:
        return importlib.import_module(name)
    except ImportError:  # the module imports JAX's test utilities, which need more packages
        utilities = "jax._src.test_util"
        sys.modules.setdefault(utilities, types.ModuleType(utilities))
        return importlib.import_module(name)


def fp8_product(rows: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return the product of rows and weights, quantized in each call."""
    return straight_through.dot_in_fp8(rows, ma.QuantizedExperts(source=w), sizes)


def errors(
    found: dict[str, jax.Array],
    rows: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    sizes: jax.Array,
    *,
    fullest: int,
) -> dict[str, jax.Array]:
    """Return ``operations.squares`` [2] of each array in ``found``, summed over the first and last
    expert."""
    starts = jnp.cumsum(sizes) - sizes

    def rows_of(x: jax.Array, expert: int) -> jax.Array:
        padded = jnp.pad(x, ((0, fullest), (0, 0)))
        part = lax.dynamic_slice_in_dim(padded, starts[expert], fullest)
        return jnp.where(jnp.arange(fullest)[:, None] < sizes[expert], part, 0)

    totals = {name: jnp.zeros(2) for name in found}
    for expert in (0, sizes.shape[0] - 1):
        x = rows_of(rows, expert)
        dense = lambda x, w_in, w_out: swiglu(x @ side_by_side(w_in)) @ w_out
        y, vjp = jax.vjp(dense, x, w_in[expert], w_out[expert])
        right = dict(zip(RESULTS, (y, *vjp(x)), strict=True))
        for name in found:
            is_of_rows = name in ("y", "d_rows")
            part = rows_of(found[name], expert) if is_of_rows else found[name][expert]
            totals[name] += squares(part, right[name])
    return totals
