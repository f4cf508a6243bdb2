"""Test derivatives and memory of layers that run in chunks of tokens; test_layer.py tests other
results of chunks."""

import functools
import re

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from cuda_calls import lowered
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma
from jax_moe_a2a._src.formats.formats import RowsInFp8
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.grouped import totals
from jax_moe_a2a._src.grouped.straight_through import dot_in_fp8

pytestmark = [pytest.mark.exchanges(0), pytest.mark.usefixtures("exact_products")]

RANKS, TOKENS, TOP_K, HIDDEN, WIDTH, LOCAL = 2, 4, 2, 8, 4, 2
LAYOUT = cases.Layout("chunks", TOKENS, TOP_K, LOCAL, hidden=HIDDEN)
SWIGLU = ma.gated(jax.nn.silu)
ACTIVATIONS = dict(fused=SWIGLU, unfused=lambda h: jnp.tanh(h[:, :WIDTH]) * h[:, WIDTH:])


def drawn(seed, *lead, dtype="float32", biases=True):
    """Return random ids, and random x, router weights, weights and biases, with the leading axes
    `lead`."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, RANKS * LOCAL, (*lead, TOKENS, TOP_K))
    shapes = small_layer.shapes_of_moe(LAYOUT, 2 * WIDTH, WIDTH)[: 6 if biases else 4]
    floats = tuple(jnp.asarray(0.5 * rng.normal(size=(*lead, *s)), dtype) for s in shapes)
    return jnp.asarray(ids, jnp.int32), floats


def layer(ids, floats, *, activation=SWIGLU, **options):
    options = dict(group=harness.emulated_group(RANKS), layout=LAYOUT) | options
    return small_layer.moe_layer(*floats, ids, activation=activation, **options)


def of_ranks(**options):
    return jax.vmap(functools.partial(layer, **options), axis_name=harness.AXIS)


def gradient(fn, ids):
    return jax.grad(lambda floats: jnp.sin(fn(ids, floats)).sum())


@pytest.mark.parametrize(
    ("activation", "second"), (("fused", "reverse"), ("unfused", "forward over reverse"))
)
def test_derivatives_of_all_orders_are_those_of_the_layer_without_chunks(activation, second):
    ids, floats = drawn(0, RANKS)
    directions = drawn(1, RANKS)[1]

    @functools.partial(harness.quickly, static_argnums=2)
    def derivatives(floats, directions, num_chunks):
        fn = of_ranks(activation=ACTIVATIONS[activation], num_chunks=num_chunks)
        grad = gradient(fn, ids)
        if second == "reverse":
            dot = lambda floats: sum(map(jnp.vdot, grad(floats), directions))
            return fn(ids, floats), jax.grad(dot)(floats)
        return jax.jvp(grad, (floats,), (directions,))

    found, expected = (derivatives(floats, directions, n) for n in (2, None))
    small_layer.assert_close(found, expected, tolerance=1e-4)


@pytest.mark.several_devices("a mesh of two axes")
def test_weights_that_vary_over_fewer_mesh_axes_than_tokens_have_gradients():
    """With a data axis, gradients with and without chunks are equal, and the loop adds weight
    gradients to totals."""
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, RANKS), ("data", harness.AXIS), axis_types=axis_types)
    group = ma.Group(mesh, harness.AXIS)
    ids, (x, topk_weights, *_) = drawn(0, 2 * RANKS)
    weights = drawn(1, RANKS)[1][2:]
    floats = [v.reshape(-1, *v.shape[2:]) for v in (x, topk_weights, *weights)]
    ids = ids.reshape(-1, TOP_K)
    of_tokens, of_experts = P(("data", harness.AXIS)), P(harness.AXIS)
    specs = of_tokens, [of_tokens, of_tokens, *[of_experts] * len(weights)]

    def grads(num_chunks):
        fn = functools.partial(layer, num_chunks=num_chunks, group=group)
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=of_tokens)
        return gradient(mapped, ids)

    jaxpr = jax.make_jaxpr(grads(2))(floats)
    scans = [eqn for eqn in harness.equations(jaxpr) if eqn.primitive.name == "scan"]
    inner = [str(eqn.params["jaxpr"]) for eqn in scans if eqn.params["reverse"]]
    assert inner and not any("moe_a2a_add_outer" not in text for text in inner)
    found, expected = (harness.quickly(grads(n))(floats) for n in (2, None))
    small_layer.assert_close(found, expected, tolerance=1e-4)


@pytest.mark.parametrize("in_fp8", (False, True))
def test_a_product_with_a_total_has_the_derivatives_of_the_product(in_fp8):
    rng = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    size = 128 if in_fp8 else 5
    rows, w, sizes = draw(7, size), draw(2, size, size), jnp.array([3, 2], jnp.int32)
    ct, d_rows, d_w = draw(7, size), draw(7, size), draw(2, size, size)
    encode, stop_gradient = ma.BlockwiseFp8().encode, jax.lax.stop_gradient

    def twice(rows, w, sums):
        cut = lambda y: jnp.where(jnp.arange(7)[:, None] < 5, y, 0)
        total = totals.total_of(w)
        for _ in range(2):
            if sums:
                own = totals.with_total(stop_gradient(w), total)
                if in_fp8:
                    own, encoded = ma.QuantizedExperts(source=own), encode(stop_gradient(rows))
                    rows = RowsInFp8(encoded, rows)
                rows, total = totals.summing_dot(rows, own, total, sizes)
            elif in_fp8:
                rows = dot_in_fp8(rows, ma.QuantizedExperts(source=w), sizes)
            else:
                rows = totals.unspecified_dot(rows, w, sizes)
            rows = jnp.sin(cut(rows))
        return rows

    @functools.partial(harness.quickly, static_argnums=0)
    def derivatives(sums):
        fn = functools.partial(twice, sums=sums)
        grad = jax.grad(lambda rows, w: (ct * fn(rows, w)).sum(), (0, 1))
        jvp = jax.jvp(fn, (rows, w), (d_rows, d_w))
        return jvp, grad(rows, w), jax.jvp(grad, (rows, w), (d_rows, d_w))

    small_layer.assert_close(derivatives(True), derivatives(False), tolerance=1e-3)


def test_the_kernel_adds_in_place(hopper, monkeypatch):
    """The kernel call of the product has the total as an operand, and updates it in place."""
    monkeypatch.setattr(native, "why_not_grouped_gemm", lambda *_: "")
    aval = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)
    avals = aval(5, 16, 8, dtype="float32"), aval(24, 16), aval(24, 8), aval(5, dtype="int32")
    (call,) = re.findall(r"@moe_a2a_grouped_gemm.*", lowered(totals.bind_add_outer, *avals))
    assert "output_tuple_indices = [0], operand_index = 3" in call
    assert "-> (tensor<5x16x8xf32>, tensor<1xi32>)" in call


def test_hidden_may_be_0():
    ids, (x, topk_weights, w_in, w_out) = drawn(0, RANKS, biases=False)
    floats = x[..., :0], topk_weights, w_in[:, :, :0], w_out[..., :0]
    y = jax.eval_shape(of_ranks(num_chunks=2), ids, floats)
    assert y.shape == (RANKS, TOKENS, 0)


def temporary(num_chunks, *, tokens, hidden, width, gradients=True, top_k=4, dtype="bfloat16"):
    """Compile a layer for CPUs, and return the bytes of its temporary arrays."""

    def run(ids, floats, ct):
        fn = functools.partial(layer, num_chunks=num_chunks)
        if not gradients:
            return fn(ids, floats)
        return jax.vjp(functools.partial(fn, ids), floats)[1](ct)

    aval = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct((RANKS, *shape), dtype)
    x, ids = aval(tokens, hidden), aval(tokens, top_k, dtype="int32")
    weights = aval(LOCAL, hidden, 2 * width), aval(LOCAL, width, hidden)
    floats = x, aval(tokens, top_k, dtype="float32"), *weights
    program = jax.jit(jax.vmap(run, axis_name=harness.AXIS))
    return program.lower(ids, floats, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(harness.ON_GPU, reason="it reads what the compiler for CPUs allocates")
def test_memory_for_rows_is_that_of_one_chunk():
    sizes = dict(tokens=256, hidden=128, width=64)
    assert temporary(8, **sizes) <= 0.25 * temporary(None, **sizes)


@pytest.mark.skipif(harness.ON_GPU, reason="it reads what the compiler for CPUs allocates")
def test_memory_for_gradients_of_weights_does_not_grow_with_the_number_of_chunks():
    sizes = dict(tokens=16, hidden=256, width=256, top_k=2)
    weights = 4 * RANKS * LOCAL * 3 * sizes["hidden"] * sizes["width"]
    few, many = (temporary(n, **sizes) for n in (2, 8))
    assert many <= few and weights <= few <= 3.5 * weights
    # Without gradients, the loop over chunks needs no totals.
    assert temporary(8, gradients=False, **sizes) <= temporary(None, gradients=False, **sizes)
