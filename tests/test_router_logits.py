"""Test that the router's product and its derivatives have float32 precision on every device."""

import functools
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_moe_a2a._src.layer import logits as implementation
from jax_moe_a2a._src.layer.logits import router_logits

pytestmark = pytest.mark.exchanges(0)
DTYPES = "bfloat16", "float16", "float32"
# dtypes of both operands and of the result
PRODUCTS = (
    ("bfloat16", "float32", "float32"),
    ("float32", "bfloat16", "float32"),
    ("bfloat16", "float16", "float16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float32", "float32", "bfloat16"),
    ("float16", "float32", "bfloat16"),
    ("float32", "float32", "float32"),
)


def drawn(x_dtype, router_dtype, num_tokens=40, hidden=512, experts=24):
    rng = np.random.default_rng(0)
    draw = lambda dtype, *shape: jnp.asarray(rng.normal(size=shape), dtype)
    router = draw("float32", hidden, experts) / hidden**0.5
    return (
        draw(x_dtype, num_tokens, hidden),
        router.astype(router_dtype),
        draw("float32", num_tokens, experts),
    )


def exact(array):
    return np.asarray(array.astype(jnp.float32)).astype(np.float64)


def assert_equal_to(found, expected, dtype, within=2e-6):
    """Check the relative error; a 16-bit result may have one more rounding."""
    assert found.dtype == dtype
    bits = jnp.finfo(dtype).nmant
    error = np.abs(exact(found) - expected).max() / np.abs(expected).max()
    assert error < (within if bits > 20 else 0.51 * 2.0**-bits), error


def logits_and_gradients(x, router, ct):
    logits, transpose = jax.vjp(lambda *args: router_logits(*args, None), x, router)
    return logits, *transpose(ct)


@pytest.mark.parametrize("router_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_logits_and_gradients_are_those_of_float32(x_dtype, router_dtype):
    x, router, ct = drawn(x_dtype, router_dtype)
    logits, d_x, d_router = harness.quickly(logits_and_gradients)(x, router, ct)
    assert_equal_to(logits, exact(x) @ exact(router), jnp.float32)
    assert_equal_to(d_x, exact(ct) @ exact(router).T, x.dtype)
    assert_equal_to(d_router, exact(x).T @ exact(ct), router.dtype)


@pytest.mark.parametrize("dtypes", PRODUCTS, ids="-".join)
@pytest.mark.parametrize("sizes", ((40, 512, 24), (6, 8, 24)), ids=("large", "small"))
def test_products_of_pieces_are_those_of_float32(dtypes, sizes, monkeypatch):
    """XLA multiplies the 16-bit pieces of float32 numbers in float32, which is exact."""

    def matmul(a, b, dtype):
        assert a.dtype == b.dtype != jnp.float32
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.matmul(a, b, precision="highest").astype(dtype)

    monkeypatch.setattr(implementation, "_matmul", matmul)
    a, b, _ = drawn(*dtypes[:2], *sizes)
    found = harness.quickly(functools.partial(implementation._dot_on_gpu, dtype=dtypes[2]))(a, b)
    assert_equal_to(found, exact(a) @ exact(b), jnp.dtype(dtypes[2]))


def test_tokens_in_bfloat16_have_one_product_and_no_copy_in_float32():
    forward = lambda x, router, _: router_logits(x, router, None)
    forward, both = (on_gpu(fn, "bfloat16") for fn in (forward, logits_and_gradients))
    (product,) = products_of(forward)
    assert "(tensor<40x512xbf16>, tensor<512x72xbf16>) -> tensor<40x72xf32>" in product
    assert len(products_of(both)) == 3
    assert all(product.count("xbf16>") >= 2 for product in products_of(both))
    for text in forward, both:
        assert not re.search(r"tensor<(40x512|512x40)xf32>", text)


def test_tokens_in_float32_have_products_of_the_highest_precision():
    products = products_of(on_gpu(logits_and_gradients, "float32"))
    assert len(products) == 3
    assert all("precision = [HIGHEST, HIGHEST]" in product for product in products)


def on_gpu(fn, x_dtype):
    traced = jax.jit(fn).trace(*drawn(x_dtype, "float32"))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def products_of(text):
    return [line for line in text.splitlines() if "stablehlo.dot_general" in line]


@pytest.mark.parametrize("in_axes", ((0, None), (None, 0), (1, 2)), ids=str)
def test_batches_and_derivatives_in_any_order(in_axes):
    """Results equal those for float32 tokens, which JAX multiplies directly."""
    size = 3
    rng = np.random.default_rng(1)

    def draw(shape, axis, dtype):
        shape = shape if axis is None else (*shape[:axis], size, *shape[axis:])
        return jnp.asarray(rng.normal(size=shape), dtype)

    x = [draw((5, 8), in_axes[0], "bfloat16") for _ in "ab"]
    router = [draw((8, 4), in_axes[1], "float32") for _ in "ab"]

    def results(dot, dtype):
        tokens, direction = (array.astype(dtype) for array in x)

        def loss(x, router):
            one = lambda x, router: jnp.sin(dot(x, router)).sum()
            return jax.vmap(one, in_axes)(x, router).sum()

        def of_elements(x, router):
            return jax.vmap(jax.grad(lambda x, r: jnp.sin(dot(x, r)).sum(), 1), in_axes)(x, router)

        gradients = jax.grad(loss, (0, 1))
        primals, tangents = (tokens, router[0]), (direction, router[1])
        slope = lambda *args: jax.jvp(loss, args, tangents)[1]
        return (
            jax.jvp(loss, primals, tangents),
            jax.jvp(gradients, primals, tangents),
            jax.grad(slope, (0, 1))(*primals),
            of_elements(*primals),
        )

    found = harness.quickly(lambda: results(lambda *args: router_logits(*args, None), "bfloat16"))()
    plain = functools.partial(jnp.matmul, precision="highest")
    expected = harness.quickly(lambda: results(plain, "float32"))()
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        within = 2e-2 if ours.dtype == jnp.bfloat16 else 1e-5
        largest = np.abs(theirs).max()
        np.testing.assert_allclose(exact(ours), exact(theirs), atol=within * largest)
