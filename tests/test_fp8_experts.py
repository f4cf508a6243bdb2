"""Compare the primitive that computes experts in FP8 with separate products and activations."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import calls, needs_kernel
from test_experts import CLAMPED, GELU, OF_ALL, SIZES, SWIGLU, operands

import jax_moe_a2a as ma
from jax_moe_a2a._src.experts import primitives as experts
from jax_moe_a2a._src.formats.formats import RowsInFp8
from jax_moe_a2a._src.grouped import straight_through
from jax_moe_a2a._src.grouped.straight_through import dot_in_fp8
from jax_moe_a2a._src.grouped.weights import encode_source

pytestmark = [
    pytest.mark.one_process("each process would compute the same experts on its own devices"),
    pytest.mark.exchanges(0),
]
END = sum(SIZES)


def draw(activation, seed=0, dtype="float32"):
    """Return finite operands, because derivatives with respect to all operands are compared."""
    args = operands(activation, seed, dtype, hidden=128, intermediate=128)
    return tuple(jnp.where(jnp.isfinite(x), x, 1) for x in args)


def trained(w):
    return ma.QuantizedExperts(source=w)


def fused(rows, w_in, b_in, weights, w_out, b_out, activation=SWIGLU, arrived=True):
    """Return the primitive's results for rows that were received in FP8 (`arrived`), or for float
    rows."""
    if arrived:
        rows = RowsInFp8(ma.BlockwiseFp8().encode(jax.lax.stop_gradient(rows)), rows)
    w_in, w_out = (encode_source(trained(w)) for w in (w_in, w_out))
    sizes = jnp.array(SIZES, jnp.int32)
    all_args = experts.ExpertOperands(rows, w_in, b_in, weights, w_out, b_out, sizes)
    return experts.bind_experts(all_args, activation=activation)[0][:END]


def separate(rows, w_in, b_in, weights, w_out, b_out, activation=SWIGLU):
    sizes = jnp.array(SIZES, jnp.int32)
    bias = lambda b, scale: experts.bias_of_rows(b, scale, sizes)
    pre = dot_in_fp8(rows, trained(w_in), sizes) + bias(b_in, jnp.ones_like(weights))
    h = (activation(pre) * weights[:, None]).astype(pre.dtype)
    return (dot_in_fp8(h, trained(w_out), sizes) + bias(b_out, weights))[:END]


def gradients(fn, *args, of=jnp.sin):
    """Return gradients without the undefined rows after the last group."""
    grads = jax.grad(lambda *args: jnp.sum(of(fn(*args))), OF_ALL)(*args)
    rows, w_in, b_in, weights, *others = grads
    return rows[:END], w_in, b_in, weights[:END], *others


def assert_close(found, expected, tolerance=2e-3):
    """Compare norms, because a number between two FP8 values may round either way."""
    for one, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert np.linalg.norm(one - right) < tolerance * np.linalg.norm(right)


@pytest.mark.parametrize("activation, arrived", ((GELU, False), (CLAMPED, True)))
def test_gradients_are_those_of_separate_passes(activation, arrived):
    args = draw(activation)
    of = lambda fn, **options: harness.quickly(
        functools.partial(gradients, functools.partial(fn, activation=activation, **options))
    )
    assert_close(of(fused, arrived=arrived)(*args), of(separate)(*args))


def test_derivatives_of_any_order_are_those_of_separate_passes():
    args, tangents = draw(SWIGLU), draw(SWIGLU, seed=1)

    def everything(fn):
        of_gradients = functools.partial(gradients, fn)

        def run(args, tangents):
            size = lambda *args: sum(jnp.sum(jnp.sin(g)) for g in of_gradients(*args))
            unchanged = lambda x: x
            of_tangent = lambda *args: jax.jvp(fn, args, tangents)[1]
            return (
                of_tangent(*args),
                jax.linearize(fn, *args)[1](*tangents),
                jax.jvp(of_gradients, args, tangents)[1],
                gradients(size, *args, of=unchanged),
                gradients(of_tangent, *args),
            )

        return harness.quickly(run)(args, tangents)

    (*found, reverse), (*expected, right) = everything(fused), everything(separate)
    assert_close(found, expected)
    assert_close(reverse, right, 0.1)  # the two functions quantize different products


@pytest.mark.parametrize("wanted", range(len(OF_ALL)))
def test_each_gradient_can_be_computed_alone(wanted):
    args = draw(SWIGLU)

    def alone(x):
        return jnp.sum(jnp.sin(fused(*args[:wanted], x, *args[wanted + 1 :])))

    found = harness.quickly(jax.grad(alone))(args[wanted])
    right = harness.quickly(functools.partial(gradients, separate))(*args)[wanted]
    assert_close(found[:END] if wanted in (0, 3) else found, right)


@pytest.mark.parametrize("shares_weights", (False, True))
def test_a_batch_has_the_results_of_its_elements(shares_weights):
    args, others = draw(SWIGLU), draw(SWIGLU, seed=1)
    axes = [None if shares_weights and i in (1, 2, 4, 5) else 0 for i in OF_ALL]
    others = [one if axis is None else other for one, other, axis in zip(args, others, axes)]
    batch = [
        one if axis is None else jnp.stack(pair)
        for axis, one, *pair in zip(axes, args, args, others)
    ]
    run = functools.partial(gradients, fused)
    found = harness.quickly(jax.vmap(run, axes))(*batch)
    for i, each in enumerate((args, others)):
        assert_close([x[i] for x in found], harness.quickly(run)(*each))


def unwriting(fn):
    """Wrap a function: its results are NaN after the last group."""

    def poisoned(*args, **options):
        def cut(x):
            rows = (jnp.arange(x.shape[0]) < END).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(rows, x, jnp.full_like(x, jnp.nan))

        return jax.tree.map(cut, fn(*args, **options))

    return poisoned


def test_rows_that_kernels_leave_unwritten_reach_no_gradient(monkeypatch):
    args = operands(SWIGLU, hidden=128, intermediate=128)  # here, rows after the last group are NaN
    run = lambda: jax.jit(lambda *args: gradients(fused, *args))(*args)
    expected = run()
    for module in (experts, straight_through):
        for name in ("bind_act_encode", "bind_dot_fp8", "bind_act_grad"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, unwriting(getattr(module, name)))
    for one, right in zip(run(), expected, strict=True):
        assert np.isfinite(right).all() and np.abs(right).max() > 0
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-2 * np.abs(right).max())


def avals(dtype="bfloat16"):
    shapes = (512, 256), (3, 256, 768), (3, 768), (512,), (3, 384, 256), (3, 256)
    dtypes = (dtype,) * 3 + ("float32",) + (dtype,) * 2
    return list(map(jax.ShapeDtypeStruct, shapes, map(jnp.dtype, dtypes)))


@needs_kernel
@pytest.mark.parametrize("arrived", (False, True))
def test_no_pass_of_xla_is_between_the_products(hopper, arrived):
    """The kernel that computes activations also quantizes them."""
    fn = functools.partial(fused, arrived=arrived)
    found = calls(functools.partial(gradients, fn), *avals())
    targets = [call.target for call in found if call.target != "grouped_gemm"]
    first = ["fp8_gemm"] if arrived else ["act_encode", "fp8_gemm"]
    forward = ["encode_squares"] * 2 + first + ["act_encode", "fp8_gemm"]
    assert targets == [*forward, "act_encode", "fp8_gemm", "act_grad", "fp8_gemm"]
    inference = [call.target for call in calls(fn, *avals()) if call.target != "dot_act"]
    assert sorted(set(inference)) == ["act_encode", "encode_squares", "fp8_gemm", "grouped_gemm"]
    for call in calls(fn, *avals()):
        if call.target == "encode_squares":  # the unused orientation of weights is empty
            assert "tensor<0xf8E4M3FN>" in call.types
