"""Test the kernel that quantizes weights in 128x128 blocks (squares), and which programs call
it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import calls, needs_kernel
from jax.interpreters import partial_eval as pe
from jax.sharding import AxisType, PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src.grouped import lowering as lowered
from jax_moe_a2a._src.grouped import weights
from jax_moe_a2a._src.grouped.straight_through import dot_in_fp8
from jax_moe_a2a._src.grouped.weights import encode_experts

pytestmark = [
    pytest.mark.one_process("each process would compute the same on its own devices"),
    pytest.mark.exchanges(0),
]
quantize = functools.partial(ma.quantize_experts, transposed=True)


def draw(dtype, *shape):
    rng = np.random.default_rng(len(shape))
    w = rng.normal(size=shape) * 2.0 ** rng.integers(-12, 12, shape)
    w *= 2.0 ** rng.integers(-120, 100, (*shape[:-1], 1))
    flat = w.reshape(shape[0], -1)
    flat[:, 0], flat[0, 1] = (np.nan, np.inf, -np.inf, 448.0, -0.0)[: shape[0]], 449.0
    w[-1, :128, ..., -128:] = 2.0**-130 * rng.integers(-1, 2, w[-1, :128, ..., -128:].shape)
    return w.astype(jnp.dtype(dtype))


def numbers(tree):
    return [np.asarray(x).view(f"u{x.dtype.itemsize}") for x in jax.tree.leaves(tree)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("shape", ((1, 128, 256), (5, 384, 640), (2, 256, 2, 384), (3, 128, 2176)))
def test_the_kernel_equals_the_composition(monkeypatch, dtype, shape):
    if why := lowered.why_no_call(*shape):
        pytest.skip(why)
    w, k_axis = draw(dtype, *shape), 1 - len(shape)
    options = dict(k_axis=k_axis, turned=True, plain=True)
    expected = numbers(jax.jit(functools.partial(weights._composition, **options))(w))
    both = functools.partial(encode_experts, k_axis=k_axis)
    layers = jax.vmap(jax.vmap(both, out_axes=1))
    for fn, args, index in (
        (both, w, ...),
        (functools.partial(both, turned=False), w, ...),
        (functools.partial(both, plain=False), w, ...),
        (layers, jnp.stack([jnp.stack([0 * w, w])] * 3), (2, slice(None), 1)),
    ):
        found = jax.jit(fn)(args)
        parts = found.scales, found.values, found.transposed
        for part, right in zip(parts, expected, strict=True):
            if part is not None:
                np.testing.assert_array_equal(numbers(part)[0][index], right)


def shapes(fn, *args):
    """Return the operand and result shapes of the kernel's calls in a program for GPUs."""
    types = [call.types for call in calls(fn, *args) if call.target == "encode_squares"]
    return [re.findall(r"<([\dx]+)x[bf]\w+>", each) for each in types]


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_one_call_has_the_orientations_in_use(hopper):
    """The call returns only the orientations of the weights (plain, transposed) that the program
    uses."""
    w, shape, turned = array(4, 256, 384), "4x256x384", "4x384x256"
    assert shapes(quantize, w) == [[shape, turned, shape, "4x3x2"]]
    for fn in (ma.quantize_experts, lambda w: quantize(w).values):
        assert shapes(fn, w) == [[shape, turned, "0", "4x3x2"]]
    assert shapes(lambda w: quantize(w).transposed, w) == [[shape, "0", shape, "4x3x2"]]
    pairs = array(3, 4, 256, 2, 128, dtype="float32")
    assert shapes(jax.vmap(quantize), pairs) == [["12x256x256"] * 3 + ["12x2x2"]]
    assert shapes(jax.grad(lambda w: quantize(w).scales.sum()), w) == []


@needs_kernel
def test_products_without_gradients_write_one_orientation(hopper):
    def product(rows, w, sizes):
        trained = ma.quantize_experts(w, trainable=True)
        return dot_in_fp8(rows, trained, sizes).astype(jnp.float32).sum()

    args = array(64, 256), array(4, 256, 384), array(4, dtype="int32")
    shape, turned = "4x256x384", "4x384x256"
    assert shapes(product, *args) == [[shape, turned, "0", "4x3x2"]]
    assert shapes(jax.value_and_grad(product), *args) == [[shape, turned, shape, "4x3x2"]]


def test_a_gradient_of_a_program_that_read_one_orientation():
    """Dead-code elimination removes the orientation that only the gradient needs. The gradient then
    equals the gradient of the original program."""
    rng, sizes = np.random.default_rng(0), np.array([4, 5], np.int32)
    rows, w = (rng.normal(size=shape).astype("float32") for shape in ((9, 128), (2, 128, 256)))
    trained = functools.partial(ma.quantize_experts, trainable=True)
    product = lambda rows: dot_in_fp8(rows, trained(w), sizes)[:, 0].sum()
    closed = jax.make_jaxpr(product)(rows)
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, [True])
    late = lambda rows: jax.core.eval_jaxpr(jaxpr, closed.consts, rows)[0]
    np.testing.assert_array_equal(jax.grad(late)(rows), jax.grad(product)(rows))


@pytest.mark.parametrize(
    "w", (array(2, 128, 200), array(0, 128, 128), array(2, 128, 128, dtype="float16")), ids=str
)
def test_other_weights_have_the_composition(hopper, w):
    assert shapes(quantize, w) == []


@pytest.mark.several_devices("it needs meshes")
@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_weights_that_xla_divides_have_the_composition(hopper):
    spec = PartitionSpec("ep")
    w = draw("float32", 2, 128, 256)
    expected = numbers(jax.jit(quantize)(w[1:]))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("ep",), (kind,), devices=jax.devices()[:2])
        with jax.set_mesh(mesh):
            placed = jax.device_put(w, jax.NamedSharding(mesh, spec))
            assert shapes(quantize, placed) == shapes(jax.vmap(quantize), placed[:, None]) == []
            found = jax.jit(quantize)(placed)
            assert found.values.sharding.spec[0] == found.transposed.sharding.spec[0] == "ep"
            for part, right in zip(numbers(found), expected, strict=True):
                np.testing.assert_array_equal(part[1:], right)
            each = jax.shard_map(quantize, in_specs=spec, out_specs=spec)
            assert len(shapes(each, placed)) == 1
