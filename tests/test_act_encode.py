"""Compare `act_encode` (activation, router weights, encoding to FP8) with numpy: bit for bit with
ReLU and powers of two, otherwise up to FP8 ties."""

import contextlib
import functools
import itertools
import logging

import format_oracle
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import calls, needs_kernel
from test_experts import CLAMPED, PLAIN, SWIGLU, name_of

import jax_moe_a2a as ma
from jax_moe_a2a._src.experts.activations import KINDS, FusedActivation
from jax_moe_a2a._src.grouped import act_encode
from jax_moe_a2a._src.grouped.act_encode import bind_act_encode
from jax_moe_a2a._src.grouped.straight_through import dot_in_fp8

pytestmark = [
    pytest.mark.one_process("each process would compute the same on its own devices"),
    pytest.mark.exchanges(0),
]
BLOCK = 128
FMT = ma.BlockwiseFp8()
WHY_NO_ACT_ENCODE = act_encode.why_no_act_encode
GATED = [FusedActivation(act.kind, True) for act in PLAIN]
EXACT = [act for act in (*PLAIN, *GATED) if "relu" in act.kind]
# Each case is (rows, columns, group sizes). In the kernel, a warp encodes 4 groups of 128 columns;
# a block has 32 warps.
CASES = dict(
    tail=(40, 256, [7, 0, 20, 1]),
    no_tail=(30, 128, [9, 21]),
    one_row=(9, 128, [0, 1]),
    no_row_in_use=(5, 384, [0, 0]),
    no_rows=(0, 128, [0]),
    no_groups=(6, 128, []),
    many=(700, 640, [100, 0, 513, 60]),
)


def draw(case, activation, dtype, powers_of_two=False):
    """Return a random product, random weights and group sizes; rows without a token are NaN and
    have weight 0."""
    num_rows, columns, sizes = CASES[case]
    rng = np.random.default_rng(num_rows)
    product = 3 * rng.normal(size=(num_rows, activation.width(columns)))
    product *= 2.0 ** rng.integers(-30, 3, (num_rows, 1))
    weights = np.abs(rng.normal(size=num_rows))
    if powers_of_two:
        weights = 2.0 ** rng.integers(-3, 4, num_rows)
    product, weights = product.astype(jnp.dtype(dtype)), weights.astype(np.float32)
    has_token = np.arange(num_rows) < sum(sizes)
    has_token[3::7] = False
    product[~has_token], weights[~has_token] = np.nan, 0
    weights[sum(sizes) :] = np.nan
    return product, weights, np.asarray(sizes, np.int32)


def without_nan(x):
    return np.where(np.isnan(x.astype(np.float32)), x.dtype.type(0.5), x)


def run(product, weights, sizes, activation, **options):
    fn = functools.partial(bind_act_encode, activation=activation, **options)
    return harness.numpy_of(tuple(jax.jit(fn)(*map(jnp.asarray, (product, weights, sizes)))))


PATHS = ("kernel", "composition")[not harness.ON_GPU :]


def assert_same_bits(found, expected, end=None):
    for one, other in zip(found, expected, strict=True):
        one, other = (np.asarray(x)[:end].view(f"u{x.dtype.itemsize}") for x in (one, other))
        np.testing.assert_array_equal(one, other)


def assert_batch_is_its_elements(bind, run, floats, sizes, shares_sizes):
    sizes = sizes if shares_sizes else np.stack([sizes, np.array([3, 1, 0, 90], np.int32)])
    batched = jax.jit(jax.vmap(bind, (*[0] * len(floats), None if shares_sizes else 0)))
    found = harness.numpy_of(tuple(jax.tree.leaves(batched(*floats, sizes))))
    for i in range(2):
        own = sizes if shares_sizes else sizes[i]
        assert_same_bits([x[i] for x in found], run(*(x[i] for x in floats), own), sum(own))


@contextlib.contextmanager
def on_path(name, module):
    """Make the primitive of `module` use its kernel or its composition of JAX operations."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        if name == "composition":
            patch.setattr(module, "why_no_act_encode", lambda *sizes: "the test hides it")
        elif why := module.why_no_act_encode(8, 1, 128):
            pytest.skip(why)
        yield name
    jax.clear_caches()


@pytest.fixture(scope="module", params=PATHS)
def path(request):
    with on_path(request.param, act_encode) as name:
        yield name


def activated(product, weights, activation):
    """Return weighted activations in float64, and the magnitudes to which errors are relative."""
    x = product.astype(np.float64)
    gate, up = np.split(x, 2, axis=1) if activation.gated else (x, 1.0)
    if activation is CLAMPED:
        gate, up = np.minimum(gate, 0.7), np.clip(up, -0.7, 0.7) + 1
    with jax.enable_x64(True):
        act = np.asarray(activation(jnp.asarray(x)))
    is_zero, weights = weights[:, None] == 0, weights.astype(np.float64)[:, None]
    return tuple(np.where(is_zero, 0, x * weights) for x in (act, gate * up))


def assert_encodes(values, scales, h, magnitudes, dtype):
    inexact = 2.0**-15 + (2.0**-7 if dtype == "bfloat16" else 0)  # bfloat16 is rounded twice
    groups = h.reshape(len(h), -1, BLOCK)
    largest = np.abs(groups).max(axis=2)
    low, high = (
        2.0 ** np.maximum(format_oracle.smallest_exponents(largest * factor), -117.0)
        for factor in (1 - inexact, 1 + inexact)
    )
    assert ((scales == np.where(largest > 0, low, 0)) | (scales == high)).all()
    assert (scales[largest == 0] == 0).all()
    decoded = values.astype(np.float64).reshape(groups.shape) * scales[..., None]
    ratio = np.abs(groups) / np.where(scales > 0, scales, 1)[..., None]
    exponents = np.floor(np.log2(np.maximum(ratio, 2.0**-6)))
    spacing = 2.0 ** (exponents - 3) * scales[..., None]
    bound = (
        spacing / 2 + inexact * np.abs(groups) + 2.0**-21 * np.abs(magnitudes).reshape(groups.shape)
    )
    assert (np.abs(decoded - groups) <= bound).all(), (np.abs(decoded - groups) - bound).max()


def both_dtypes(values):
    """Pair each value with bfloat16 and float32; on CPUs, with only one of them."""
    dtypes = "bfloat16", "float32"
    if harness.ON_GPU:
        return itertools.product(values, dtypes)
    return list(zip(values, itertools.cycle(dtypes)))


@pytest.mark.parametrize(
    "activation_and_case, dtype",
    both_dtypes([*((EXACT[2], case) for case in CASES), *((act, "many") for act in EXACT)]),
    ids=lambda x: x if isinstance(x, str) else f"{name_of(x[0])}-{x[1]}",
)
def test_exact_activations_are_those_of_the_definition(path, activation_and_case, dtype):
    activation, case = activation_and_case
    product, weights, sizes = draw(case, activation, dtype, powers_of_two=True)
    x = product.astype(np.float32)
    gate, up = np.split(x, 2, axis=1) if activation.gated else (x, np.float32(1))
    act = np.maximum(gate, np.float32(0))
    act = act * act * up if activation.kind == "squared_relu" else act * up
    h = np.where(weights[:, None] == 0, np.float32(0), act * weights[:, None]).astype(product.dtype)
    values, scales = run(product, weights, sizes, activation)
    assert values.shape == h.shape and scales.shape == (len(h), h.shape[1] // BLOCK)
    assert_same_bits((values, scales), format_oracle.encode(FMT, h), sum(sizes))


@pytest.mark.parametrize(
    "activation, dtype",
    both_dtypes([*PLAIN, *GATED, CLAMPED]),
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)
def test_activations_are_close(path, activation, dtype):
    product, weights, sizes = draw("many", activation, dtype)
    found, end = run(product, weights, sizes, activation), sum(sizes)
    expected = activated(product, weights, activation)
    assert_encodes(*(x[:end] for x in (*found, *expected)), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", (1, 3, 1000))
def test_any_number_of_multiprocessors(path, num_sms):
    args = draw("many", SWIGLU, "bfloat16")
    assert_same_bits(run(*args, SWIGLU, num_sms=num_sms), run(*args, SWIGLU), sum(args[2]))


@pytest.mark.parametrize("number", (np.nan, np.inf))
def test_a_number_that_is_not_finite_stays_in_its_group(path, number):
    product, weights, sizes = draw("no_tail", SWIGLU, "bfloat16")
    product, weights = np.tile(product, (1, 2)), np.where(weights == 0, 1, weights)
    product = without_nan(product)
    changed = product.copy()
    changed[5, 130] = number
    right, found = (
        [np.array(part) for part in run(x, weights, sizes, SWIGLU)] for x in (product, changed)
    )
    assert np.isnan(found[1][5, 1]) and not found[0][5, 128:].view(np.uint8).any()
    found[1][5, 1], found[0][5, 128:] = right[1][5, 1], right[0][5, 128:]
    assert_same_bits(found, right)


@pytest.mark.parametrize("shares_sizes", (False, True))
def test_a_batch_is_one_call_of_the_same_rows(path, shares_sizes):
    *floats, sizes = draw("many", SWIGLU, "bfloat16")
    floats = [without_nan(np.stack([each, each[::-1]])) for each in floats]
    bind = functools.partial(bind_act_encode, activation=SWIGLU)
    run_one = functools.partial(run, activation=SWIGLU)
    assert_batch_is_its_elements(bind, run_one, floats, sizes, shares_sizes)


@pytest.mark.parametrize(
    "case, dtype", both_dtypes(CASES if harness.ON_GPU else ("tail", "no_rows"))
)
def test_rows_are_quantized_as_they_are(case, dtype):
    """Without weights and activation, `act_encode` equals `BlockwiseFp8.encode`, even in vmap."""
    rows, _, sizes = draw(case, PLAIN[0], dtype)
    rows[:1, :1] = -np.inf
    encode = lambda rows, sizes: bind_act_encode(rows, None, sizes)
    batches = jnp.stack([jnp.asarray(rows)] * 2), jnp.stack([jnp.asarray(sizes), 0 * sizes])
    alone = harness.numpy_of(tuple(jax.jit(encode)(rows, sizes)))
    batched = harness.numpy_of(tuple(jax.jit(jax.vmap(encode))(*batches)))
    shared = harness.numpy_of(tuple(jax.jit(jax.vmap(encode, (0, None)))(batches[0], sizes)))
    expected = jax.jit(FMT.encode)(rows)
    found = [alone, *([part[i] for part in parts] for parts, i in ((batched, 0), (shared, 1)))]
    for parts in found:
        assert_same_bits(parts, expected, sum(sizes))


def test_derivatives_are_refused():
    product, weights, sizes = map(jnp.asarray, draw("no_tail", SWIGLU, "float32"))
    fn = lambda product, weights: bind_act_encode(product, weights, sizes, activation=SWIGLU).scales
    for i in range(2):
        with pytest.raises(TypeError, match="trainable=True"):
            jax.eval_shape(jax.grad(lambda *args: fn(*args).sum(), i), product, weights)


@pytest.fixture
def hopper(hopper, monkeypatch):
    """Lower as for Hopper GPUs, with the kernel, which the fixture `path` may have disabled."""
    monkeypatch.setattr(act_encode, "why_no_act_encode", WHY_NO_ACT_ENCODE)


def avals(rows=512, groups=4, width=512, dtype="bfloat16", lead=()):
    array = lambda dtype, *shape: jax.ShapeDtypeStruct((*lead, *shape), dtype)
    return array(dtype, rows, width), array("float32", rows), array("int32", groups)


def test_the_pass_is_one_call_with_the_attributes_of_the_activation(hopper):
    fn = functools.partial(bind_act_encode, activation=CLAMPED, num_sms=7)
    ((_, attributes, types),) = calls(fn, *avals())
    numbers = {name: float(attributes.pop(name)) for name in ("alpha", "limit")}
    assert numbers == pytest.approx(dict(alpha=1.3, limit=0.7))
    code = str(list(KINDS).index("clamped_swiglu"))
    assert attributes == dict(activation=code, gated="1", num_sms="7")
    assert types == (
        "(tensor<1x512x512xbf16>, tensor<3x4xi32>, tensor<1x512xf32>) -> "
        "(tensor<1x512x256xf8E4M3FN>, tensor<1x512x2xf32>)"
    )
    plain = functools.partial(bind_act_encode, activation=FusedActivation("relu"))
    ((_, attributes, types),) = calls(
        jax.vmap(jax.vmap(plain)), *avals(dtype="float32", lead=(3, 2))
    )
    assert attributes["gated"] == "0" and attributes["num_sms"] == "0"
    assert types == (
        "(tensor<6x512x512xf32>, tensor<3x24xi32>, tensor<6x512xf32>) -> "
        "(tensor<6x512x512xf8E4M3FN>, tensor<6x512x4xf32>)"
    )


@needs_kernel
def test_products_that_quantize_rows_make_one_pass_over_them(hopper):
    array = jax.ShapeDtypeStruct
    rows, w = array((512, 256), "bfloat16"), array((4, 256, 384), "bfloat16")
    trained = lambda w: ma.QuantizedExperts(source=w)
    products = lambda rows, w, sizes: dot_in_fp8(rows, trained(w), sizes).astype(jnp.float32).sum()
    program = jax.value_and_grad(products, (0, 1)), rows, w, array((4,), "int32")
    found = [call.types for call in calls(*program) if call.target == "act_encode"]
    encode = (
        "(tensor<1x512x{0}xbf16>, tensor<3x4xi32>, tensor<0xf32>) -> "
        "(tensor<1x512x{0}xf8E4M3FN>, tensor<1x512x{1}xf32>)"
    )
    assert found == [encode.format(256, 2), encode.format(384, 3)]


@pytest.mark.parametrize("options", (dict(rows=0), dict(groups=0)), ids=str)
def test_no_rows_or_no_groups_make_no_call(hopper, caplog, options):
    fn = functools.partial(bind_act_encode, activation=SWIGLU)
    with caplog.at_level(logging.INFO, logger="jax_moe_a2a"):
        assert calls(fn, *avals(**options)) == []
    assert any("act_encode: not fused, because there are no rows" in m for m in caplog.messages)
