"""Compare `grouped_dot` of arrays in the format `BlockwiseFp8` with the definition in docs/fp8.md,
computed in numpy."""

import dataclasses
import functools
import itertools
import types

import format_oracle
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.interpreters import mlir

import jax_moe_a2a as ma
from jax_moe_a2a._src import paths
from jax_moe_a2a._src.formats.formats import RowsInFp8
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.grouped import lowering as lowered
from jax_moe_a2a._src.grouped import quantized
from jax_moe_a2a._src.grouped.frozen import dot_of_frozen
from jax_moe_a2a._src.grouped.straight_through import dot_in_fp8
from jax_moe_a2a._src.grouped.weights import decode_experts

pytestmark = [
    pytest.mark.one_process("each process would run the same products on its own devices"),
    pytest.mark.exchanges(0),
]
E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = 128
# Each case is (number of rows, K, N, sizes of groups). N need not be a multiple of 128.
CASES = dict(
    tail=(40, 256, 200, [7, 0, 20, 1]),
    no_tail=(30, 128, 128, [9, 21]),
    no_rows=(0, 128, 8, [0, 0]),
    no_groups=(6, 128, 8, []),
    odd_columns=(9, 128, 12, [4, 3]),
)
# Arrays with at most 32 rows for each group have a kernel of only the form for few rows. (With a
# tail of zeros, the tail is a group.) Of two forms, the kernel chooses this one for FEW_ROWS.
FEW_ROWS = [63, 64, 1, 0, 65, 17, 64, 2, 48, 5, *[1] * 6]
MANY_GROUPS = [7 * i % 23 for i in range(70)]
# These sizes are near multiples of the kernel's tiles (128 rows by 192 columns, 64 by 256).
HOSTILE = dict(
    one_row=(1, 128, 8, [1]),
    all_empty=(70, 256, 136, [0, 0, 0]),
    empty_ends=(90, 128, 128, [0, 0, 60, 20, 0]),
    one_row_each=(40, 384, 264, [1] * 37),
    edges=(970, 256, 200, [127, 1, 128, 129, 63, 64, 65, 0, 191, 193]),
    many_groups=(800, 256, 136, MANY_GROUPS),
    many_groups_of_two_forms=(2400, 256, 136, MANY_GROUPS),
    few_rows=(700, 256, 200, FEW_ROWS),
    few_rows_of_whole_turns=(700, 512, 200, FEW_ROWS),
    only_few_rows=(340, 256, 200, FEW_ROWS),
    one_group=(300, 1152, 392, [300]),
    all_but_one_row=(530, 128, 1160, [0, 1, 0, 520]),
    whole_turns=(500, 1024, 264, [129, 0, 255, 91]),  # K is a multiple of 512
)


def normal(seed, shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def draw(case, powers_of_two=True):
    """Return random quantized rows (NaN after the last group), quantized weights, and sizes."""
    num_rows, k, n, sizes = CASES[case]
    rows = format_oracle.encode(ma.BlockwiseFp8(), normal(0, (num_rows, k)) * 10)
    w = ma.quantize_experts(normal(1, (len(sizes), k, n)))
    w = np.asarray(w.values), np.array(w.scales)
    scales = rows[1].copy()
    if not powers_of_two:
        rng = np.random.default_rng(2)
        scales *= rng.uniform(0.5, 1, scales.shape).astype(np.float32)
        w[1][...] *= rng.uniform(0.5, 1, w[1].shape).astype(np.float32)
    values = rows[0].copy()
    values[sum(sizes) :], scales[sum(sizes) :] = np.nan, np.inf
    return ma.Quantized(values, scales), w, np.array(sizes, np.int32)


def integers(seed, shape):
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(E4M3)


def powers(seed, shape):
    return 2.0 ** np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def draw_exact(num_rows, k, n, sizes, seed=0):
    """Return quantized rows and weights whose sums are exact."""
    rows = ma.Quantized(integers(seed, (num_rows, k)), powers(seed + 1, (num_rows, k // BLOCK)))
    rows.values[sum(sizes) :], rows.scales[sum(sizes) :] = np.nan, np.inf
    blocks = len(sizes), -(-n // BLOCK), k // BLOCK
    return rows, (integers(seed + 2, (len(sizes), n, k)), powers(seed + 3, blocks))


def read_table(target, results, arrays, num_sms):
    """Replace a kernel call by numpy; rows that the kernel would not write are NaN."""
    (out,) = results

    def run(*arrays):
        values, w_values, table, scales, w_scales, *spare = map(np.asarray, arrays)
        w_values = np.concatenate([w_values, *spare])
        d = np.full(out.shape, np.nan, out.dtype)
        for start, size, weight in table.T.tolist():
            assert start >= 0 and size >= 0 and start + size <= len(values)
            rows, of_group = slice(start, start + size), slice(weight, weight + 1)
            if weight < 0:
                d[rows] = 0
            else:
                w = w_values[of_group], w_scales[of_group]
                d[rows] = oracle.grouped_dot_fp8((values[rows], scales[rows]), w, [size])[0]
        return d

    assert target == quantized.TARGET
    return [jax.pure_callback(run, out, *arrays)]


@pytest.fixture(
    scope="module", params=("kernel", "decoded") if harness.ON_GPU else ("table", "reference")
)
def path(request):
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "decoded":
            patch.setattr(lowered, "why_no_fp8_kernel", lambda *sizes: "the test hides it")
        if request.param == "table":
            cannot = lambda *sizes: "the test says so" if 0 in sizes or sizes[-1] % 8 else ""
            patch.setattr(lowered, "why_no_fp8_kernel", cannot)
            patch.setattr(native, "register_targets", lambda: None)
            patch.setattr(lowered, "call", read_table)
            rule = paths.lowering(quantized.grouped_dot_fp8_p, quantized._cuda)
            mlir.register_lowering(quantized.grouped_dot_fp8_p, rule, platform="cpu")
        yield request.param
    if request.param == "table":
        mlir._platform_specific_lowerings["cpu"].pop(quantized.grouped_dot_fp8_p)
    jax.clear_caches()


def assert_is_product(found, rows, w, sizes, dtype, zero_tail=True, inexact=0.0):
    """Assert that an error is at most K roundings to float32 and one rounding to `dtype`, plus
    `inexact`."""
    expected, magnitudes = oracle.grouped_dot_fp8(rows, w, sizes)
    found = np.asarray(found)
    assert found.dtype == jnp.dtype(dtype) and found.shape == expected.shape
    eps = float(ml_dtypes.finfo(found.dtype).eps)
    bound = magnitudes * (rows[0].shape[1] * 2.0**-23 + inexact) + np.abs(expected) * eps / 2
    end = len(found) if zero_tail else sum(sizes)
    error = np.abs(found.astype(np.float64) - expected)[:end]
    assert (error <= bound[:end]).all(), (error - bound[:end]).max()


@pytest.mark.parametrize("case", CASES)
def test_a_product_is_that_of_the_definition(path, case):
    for dtype, tail in (("bfloat16", "zero"), ("float32", "unspecified")):
        powers_of_two = tail == "zero"
        rows, w, sizes = draw(case, powers_of_two)
        dot = jax.jit(
            lambda rows, w, sizes, dtype=dtype: ma.grouped_dot(
                rows, w, sizes, tail=tail, preferred_element_type=dtype
            )
        )
        # Decoding rounds to bfloat16. Tensor cores add 32 products at a time, and keep 13 bits
        # after the first bit of the largest product. For random normal numbers, these errors are
        # below 2^-7 of the sum of the products' magnitudes.
        is_exact = path == "reference" or (path != "kernel" and powers_of_two)
        out = dot(rows, ma.QuantizedExperts(*w), sizes)
        inexact = 0.0 if is_exact else 2.0**-7
        assert_is_product(out, rows, w, sizes, dtype, tail == "zero", inexact)


OF_KERNEL = itertools.product(("tail", "many_groups", "edges", "whole_turns"), (1, 2))


@pytest.mark.parametrize("case, num_spare", OF_KERNEL if harness.ON_GPU else [("tail", 2)])
def test_spare_weights_are_a_second_array(path, case, num_spare):
    """Products with one and with two arrays of weights have equal bits, because all sums are
    exact."""
    num_rows, k, n, sizes = (CASES | HOSTILE)[case]
    rows, w = draw_exact(num_rows, k, n, sizes)
    home, spare = ([x[:-num_spare] for x in w], [x[-num_spare:] for x in w])
    params = dict(dtype=jnp.dtype("float32"), tail="zero", num_sms=None)
    dot = jax.jit(functools.partial(quantized.bind_dot_fp8, **params))
    sizes = np.array(sizes, np.int32)
    pair = ma.QuantizedExperts(*home), ma.QuantizedExperts(*spare)
    np.testing.assert_array_equal(dot(rows, pair, sizes), dot(rows, ma.QuantizedExperts(*w), sizes))
    lead = lambda x: jax.tree.map(lambda x: np.stack([x, x]), x)
    both = jax.jit(jax.vmap(functools.partial(quantized.bind_dot_fp8, **params), (0, (0, None), 0)))
    shared = both(lead(rows), (lead(pair[0]), pair[1]), lead(sizes))
    np.testing.assert_array_equal(shared, np.stack([dot(rows, pair, sizes)] * 2))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32")[: 1 + harness.ON_GPU])
@pytest.mark.parametrize("case", HOSTILE if harness.ON_GPU else ("all_empty", "many_groups"))
def test_exact_sums_of_hostile_groups(path, case, dtype):
    num_rows, k, n, sizes = HOSTILE[case]
    rows, w = draw_exact(*HOSTILE[case])
    right = oracle.grouped_dot_fp8(rows, w, sizes)[0].astype(jnp.dtype(dtype))
    for tail in ("zero", "unspecified"):
        # If XLA reuses this memory for the result, elements that the kernel does not write are NaN.
        jax.block_until_ready(jnp.full((num_rows, n), np.nan, dtype)).delete()
        dot = jax.jit(
            lambda *args, tail=tail: ma.grouped_dot(*args, tail=tail, preferred_element_type=dtype)
        )
        found = np.asarray(dot(rows, ma.QuantizedExperts(*w), np.array(sizes, np.int32)))
        end = num_rows if tail == "zero" else sum(sizes)
        np.testing.assert_array_equal(found[:end], right[:end])


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", (1, 2, 7, 10_000))
@pytest.mark.parametrize("case", ("edges", "few_rows", "only_few_rows", "many_groups"))
def test_any_number_of_multiprocessors(path, case, num_sms):
    rows, w = draw_exact(*HOSTILE[case])
    sizes = HOSTILE[case][-1]
    found = ma.grouped_dot(rows, ma.QuantizedExperts(*w), sizes, num_sms=num_sms)
    right = oracle.grouped_dot_fp8(rows, w, sizes)[0].astype(found.dtype)
    np.testing.assert_array_equal(found, right)


def test_nan_in_a_row_stays_in_the_row(path):
    num_rows, k, n, sizes = HOSTILE["edges"]
    rows, w = draw_exact(*HOSTILE["edges"])
    rows.values[200, 5], rows.scales[400, 1] = np.nan, np.nan
    dot = jax.jit(ma.grouped_dot)
    found = np.asarray(dot(rows, ma.QuantizedExperts(*w), np.array(sizes))).astype(np.float32)
    right = oracle.grouped_dot_fp8(rows, w, sizes)[0].astype(jnp.bfloat16)
    assert np.isnan(found[[200, 400]]).all()
    np.testing.assert_array_equal(found, right.astype(np.float32))


def test_weights_are_quantized_by_squares():
    w = normal(3, (2, 256, 200), "bfloat16") * 2.0 ** np.arange(2)[:, None, None].astype("bfloat16")
    w[1, 128:, :128] = 0
    values, scales = format_oracle.encode_squares(w)
    found = ma.quantize_experts(w, transposed=True)
    np.testing.assert_array_equal(np.asarray(found.values).view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(found.scales, scales)
    np.testing.assert_array_equal(
        np.asarray(found.transposed).view(np.uint8), np.swapaxes(values, 1, 2).view(np.uint8)
    )
    pair = ma.quantize_experts(np.stack([w, w[:, :, ::-1]], axis=2))
    assert pair.values.shape == (2, 2, 200, 256) and pair.scales.shape == (2, 2, 2, 2)
    np.testing.assert_array_equal(np.asarray(pair.values[:, 0]), np.asarray(found.values))
    layers = jax.jit(jax.vmap(ma.quantize_experts))(w[None])
    np.testing.assert_array_equal(np.asarray(layers.scales[0]), scales)


def test_weights_and_rows_that_others_quantized_keep_their_numbers(path):
    rows, w, sizes = draw("tail", powers_of_two=False)
    turned = [np.swapaxes(part, 1, 2) for part in w]
    experts = ma.quantize_experts(types.SimpleNamespace(qvalue=turned[0], scale=turned[1]))
    for part, found in zip(w, (experts.values, experts.scales)):
        np.testing.assert_array_equal(np.asarray(found), part)
    q_array = types.SimpleNamespace(qvalue=rows.values, scale=rows.scales)
    same = ma.grouped_dot(rows, ma.quantize_experts(ma.Quantized(*turned)), sizes)
    np.testing.assert_array_equal(ma.grouped_dot(q_array, experts, sizes), same)


def test_both_orientations_of_weights_that_others_quantized_have_their_numbers():
    """K equals N, so an array's shape does not show whether it is transposed."""
    squares = format_oracle.encode_squares(normal(3, (2, 256, 256)))
    w = ma.Quantized(*(np.swapaxes(part, 1, 2) for part in squares))
    found = ma.quantize_experts(w, transposed=True)
    for part, of_w in zip((found.transposed, found.values), (w.values, w.values.swapaxes(1, 2))):
        np.testing.assert_array_equal(np.asarray(part).view(np.uint8), of_w.view(np.uint8))
    np.testing.assert_array_equal(found.scales, np.swapaxes(w.scales, 1, 2))


def test_rows_are_quantized_if_only_weights_are():
    sizes = np.array([3, 4], np.int32)
    rows, w = normal(4, (9, 128), "bfloat16"), ma.quantize_experts(normal(5, (2, 128, 8)))
    given = ma.grouped_dot(ma.BlockwiseFp8().encode(rows), w, sizes)
    np.testing.assert_array_equal(ma.grouped_dot(rows, w, sizes), given)


@pytest.mark.parametrize("axes", ((0, None, 0), (None, 0, None)))
def test_a_batch_is_one_product_with_the_results_of_its_elements(path, axes):
    rows, w, sizes = draw("tail")
    args = (rows, ma.QuantizedExperts(*w), sizes)
    again = (
        rows._replace(values=-rows.values),
        ma.QuantizedExperts(w[0][::-1], w[1][::-1]),
        sizes[::-1],
    )
    stacked = [
        given if axis is None else jax.tree.map(lambda a, b: np.stack([a, b]), given, other)
        for given, other, axis in zip(args, again, axes)
    ]
    batch = jax.jit(jax.vmap(ma.grouped_dot, axes))
    found = batch(*stacked)
    assert harness.count_primitives(jax.make_jaxpr(batch)(*stacked)) == {"grouped_dot_fp8": 1}
    for i, chosen in enumerate((args, again)):
        own = [given if axis is None else c for given, c, axis in zip(args, chosen, axes)]
        np.testing.assert_array_equal(found[i], ma.grouped_dot(*own))


def test_batches_that_share_values_or_scales(path):
    num_rows, k, n, sizes = CASES["tail"]
    rows, w = draw_exact(num_rows, k, n, [num_rows, 0, 0, 0])
    values, scales = (np.stack([x, x[::-1], x]) for x in rows)
    w_values, w_scales = (np.stack([x, x[::-1]]) for x in w)
    sizes = np.stack([sizes, sizes[::-1], [num_rows, 0, 0, 0]]).astype(np.int32)

    def dot(values, scales, w_values, w_scales, sizes):
        experts = ma.QuantizedExperts(w_values, w_scales)
        return ma.grouped_dot(ma.Quantized(values, scales), experts, sizes)

    inner = jax.vmap(dot, (None, None, 0, None, None))
    nested = jax.vmap(inner, (0, None, None, None, 0))
    turned = jax.vmap(jax.vmap(dot, (0, None, None, None, 0)), (None, None, None, 0, None))
    args = values, rows.scales, w_values, w[1], sizes
    of_values = jax.jit(nested)(*args)
    of_scales = jax.jit(turned)(values, rows.scales, w[0], w_scales, sizes)
    for i, j in np.ndindex(3, 2):
        pair = values[i], rows.scales
        right = oracle.grouped_dot_fp8(pair, (w_values[j], w[1]), sizes[i])[0]
        np.testing.assert_array_equal(of_values[i, j], right.astype(jnp.bfloat16))
        right = oracle.grouped_dot_fp8(pair, (w[0], w_scales[j]), sizes[i])[0]
        np.testing.assert_array_equal(of_scales[j, i], right.astype(jnp.bfloat16))


def test_derivatives_of_quantized_arrays_are_refused():
    rows, w, sizes = draw("tail")
    experts, floats = ma.QuantizedExperts(*w), normal(6, rows.values.shape)
    total = lambda rows, w: jnp.sum(ma.grouped_dot(rows, w, sizes).astype(jnp.float32))
    for argument in (0, 1):
        with pytest.raises(TypeError, match="trainable=True"):
            jax.grad(total, argument)(jax.tree.map(jnp.asarray, rows), experts)
    with pytest.raises(TypeError, match="stop_gradient"):
        jax.grad(total)(jnp.asarray(floats), experts)
    stopped = jax.grad(lambda x: total(jax.lax.stop_gradient(x), experts) + jnp.sum(x))
    assert (stopped(jnp.asarray(floats)) == 1).all()


def bad(**changes):
    rows, w, sizes = draw("tail")
    rows = ma.Quantized(rows.values, np.where(np.isinf(rows.scales), 0, rows.scales))
    given = dict(values=rows.values, scales=rows.scales, w_values=w[0], w_scales=w[1])
    given = {name: changes.pop(name, lambda x: x)(array) for name, array in given.items()}
    rows = ma.Quantized(given["values"], given["scales"])
    experts = ma.QuantizedExperts(given["w_values"], given["w_scales"])
    return dict(dict(rows=rows, w=experts, group_sizes=sizes), **changes)


def with_nan(scales):
    scales = scales.copy()
    scales.flat[1] = np.nan
    return scales


TRAINED = ma.quantize_experts(normal(0, (4, 256, 128)), trainable=True)
ERRORS = dict(
    columns=(dict(scales=lambda s: s.T.copy()), ValueError, r"scales of rows.*\[40, 2\]"),
    row_scales=(dict(scales=lambda s: s[:, :1]), ValueError, r"scales of rows.*\[40, 2\]"),
    nan_rows=(dict(scales=with_nan), ValueError, r"scales of rows must be finite; got nan at"),
    nan_weights=(dict(w_scales=with_nan), ValueError, "scales of w must be finite; got nan at"),
    scale_dtype=(dict(scales=lambda s: s.astype("bfloat16")), TypeError, "rows must be float32"),
    value_dtype=(
        dict(w_values=lambda v: v.astype("float32")),
        TypeError,
        "w must be float8_e4m3fn",
    ),
    k=(dict(w_values=lambda v: v[..., :200]), ValueError, "K is a multiple of 128"),
    other_k=(dict(values=lambda v: v[:, :128]), ValueError, r"\[C, K=256\]"),
    w_scales=(dict(w_scales=lambda s: s[:, :1]), ValueError, r"scales of w.*\[4, 2, 2\]"),
    w_floats=(dict(w=normal(0, (4, 256, 200))), TypeError, "ma.quantize_experts once"),
    rows_k=(dict(rows=normal(0, (40, 128))), ValueError, r"rows must have.*\[C, K=256\]"),
    no_scales=(dict(w=ma.QuantizedExperts(1, source=1)), ValueError, "w must .* None for scales"),
    source=(
        dict(w=TRAINED),
        ValueError,
        r"source of w must be None, because grouped_dot.*; got float32\[4,256,128\]. Call quant",
    ),
    transposed=(
        dict(w=dataclasses.replace(TRAINED, transposed=TRAINED.values)),
        ValueError,
        r"transposed values of w must have the shape \[4, 256, 128\].*; got .*\[4,128,256\]",
    ),
    result=(dict(preferred_element_type="float16"), TypeError, "bfloat16 or float32"),
    plain=(
        dict(rows=normal(0, (9, 8)), w=normal(0, (4, 8, 8)), preferred_element_type="float32"),
        ValueError,
        "preferred_element_type must be None",
    ),
    sizes=(dict(group_sizes=[50, 0, 0, 0]), ValueError, "at most 40"),
)


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_names_the_argument(case):
    changes, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        ma.grouped_dot(**bad(**changes))


@pytest.mark.parametrize(
    "w, message",
    (
        (np.ones((2, 100, 8), np.float32), "K is a multiple of 128; got float32"),
        (np.full((2, 128, 8), np.inf, np.float32), "scales of w must be finite"),
        (ma.Quantized(np.ones((2, 128, 8), E4M3), np.ones((2, 1), np.float32)), r"\[2, 1, 1\]"),
    ),
    ids=("k", "infinite", "scales"),
)
def test_weights_that_cannot_be_quantized(w, message):
    with pytest.raises(ValueError, match=message):
        ma.quantize_experts(w)


@pytest.mark.parametrize("shape", ((2, 128, 256), (2, 256, 2, 200)))
def test_weights_know_their_shape_in_each_state(shape):
    w = normal(0, shape)
    frozen, trained = (ma.quantize_experts(w, trainable=trains) for trains in (False, True))
    np.testing.assert_array_equal(trained.source, w)
    for state in (frozen, trained, ma.QuantizedExperts(source=w)):
        assert state.shape == shape and state.k == shape[1]


def test_weights_to_train_are_floats():
    frozen = ma.quantize_experts(TRAINED.source)
    for given in (ma.Quantized(TRAINED.transposed, TRAINED.scales), frozen):
        message = f"w must be bfloat16.* to be trained.*; got a {type(given).__name__}. "
        with pytest.raises(TypeError, match=message):
            ma.quantize_experts(given, trainable=True)
    with pytest.raises(TypeError, match="got a QuantizedExperts.*with_lora"):
        ma.Experts(frozen, frozen, activation=jax.nn.gelu).in_fp8()


def test_a_shared_expert_needs_an_axis_of_experts():
    with pytest.raises(ValueError, match=r"shared.replace\(w_in=shared.w_in\[None\]"):
        ma.quantize_experts(ma.Experts(normal(0, (128, 2, 256)), normal(1, (256, 128))))


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("shape", ((2, 128, 256), (2, 256, 2, 200)))
def test_quantized_weights_are_not_quantized_again(shape, transposed):
    w = normal(0, shape)
    quantize = functools.partial(ma.quantize_experts, transposed=transposed)
    once = quantize(w)
    for given in (once, ma.quantize_experts(w), ma.QuantizedExperts(source=w)):
        again = quantize(given)
        for found, expected in zip(jax.tree.leaves(again), jax.tree.leaves(once), strict=True):
            found, expected = (np.asarray(x).view(np.uint8) for x in (found, expected))
            np.testing.assert_array_equal(found, expected)


def test_quantization_counts_as_the_identity_for_derivatives():
    sizes, fmt = np.array([5, 0, 3], np.int32), ma.BlockwiseFp8()
    rows, d_rows = (normal(seed, (9, 128), "bfloat16") for seed in (7, 8))
    ct, d_ct = (normal(seed, (9, 256), "bfloat16") for seed in (9, 10))
    w, d_w = (normal(seed, (3, 128, 256), "bfloat16") for seed in (11, 12))
    w[:, :, BLOCK:] *= 8  # blocks have different scales
    end = sizes.sum()

    def derivatives(dot):
        def backward(rows, w, ct):
            return jax.vjp(dot, rows, w)[1](ct)

        _, d_out = jax.jvp(dot, (rows, w), (d_rows, d_w))
        (of_rows, of_w), tangents = jax.jvp(backward, (rows, w, ct), (d_rows, d_w, d_ct))
        return of_rows, (d_out, of_w, tangents)

    @jax.jit
    def everything():
        trained = functools.partial(ma.quantize_experts, trainable=True)
        dot = lambda rows, w: dot_in_fp8(rows, trained(w), sizes)
        plain = lambda rows, w: ma.grouped_dot(rows, w, sizes)
        of_rows, found = derivatives(dot)
        tangent = lambda d: jax.jvp(lambda rows: dot(rows, w), (rows,), (d,))[1]
        transposed = jax.linear_transpose(tangent, rows)(ct)[0]
        turned = ma.quantize_experts(np.swapaxes(w, 1, 2))
        right = ma.grouped_dot(fmt.encode(rows), ma.quantize_experts(w), sizes)
        right_of_rows = ma.grouped_dot(fmt.encode(ct), turned, sizes)
        pairs = (dot(rows, w), right), (of_rows, right_of_rows), (transposed, right_of_rows)
        return pairs, found, derivatives(plain)[1]

    assert_derivatives(everything(), end)


def assert_derivatives(everything, end):
    """Compare pairs of arrays that must be equal, and derivatives that may differ by rounding."""
    pairs, found, expected = jax.tree.map(np.asarray, everything)
    for one, right in pairs:
        np.testing.assert_array_equal(one[:end], right[:end])
    for one, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        one, right = (x[:end].astype(np.float32) for x in (one, right))
        largest = np.abs(right).max()
        np.testing.assert_allclose(one, right, rtol=2**-7, atol=2**-8 * largest)


@pytest.mark.parametrize("num_spare", (0, 1))
@pytest.mark.parametrize("n", (256, 200))
def test_products_of_frozen_weights_have_derivatives_of_any_order(num_spare, n):
    """If N is no multiple of 128, the gradient of rows is a product with decoded weights."""
    sizes, fmt = np.array([5, 0, 3], np.int32), ma.BlockwiseFp8()
    rows, d_rows = (normal(seed, (9, 128), "bfloat16") for seed in (7, 8))
    ct, d_ct = (normal(seed, (9, n), "bfloat16") for seed in (9, 10))
    frozen = ma.quantize_experts(normal(11, (3, 128, n), "bfloat16"), transposed=True)
    plain = jnp.swapaxes(decode_experts(frozen.values, frozen.scales, "bfloat16"), 1, 2)
    home = jax.tree.map(lambda x: x[: 3 - num_spare], frozen)
    spare = [dataclasses.replace(jax.tree.map(lambda x: x[2:], frozen), transposed=None)]

    def derivatives(dot):
        backward = lambda rows, ct: jax.vjp(dot, rows)[1](ct)[0]
        d_out = jax.jvp(dot, (rows,), (d_rows,))[1]
        return (d_out, *jax.jvp(backward, (rows, ct), (d_rows, d_ct)))

    @jax.jit
    def everything():
        w = (home, *spare) if num_spare else home
        dot = lambda rows: dot_of_frozen(
            RowsInFp8(fmt.encode(jax.lax.stop_gradient(rows)), rows), w, sizes, tail="zero"
        )
        d_out, of_rows, d_of_rows = derivatives(dot)
        right = derivatives(lambda rows: ma.grouped_dot(rows, plain, sizes))
        turned = ma.QuantizedExperts(frozen.transposed, jnp.swapaxes(frozen.scales, 1, 2))
        right_of_rows = (
            ma.grouped_dot(fmt.encode(ct), turned, sizes) if n % BLOCK == 0 else right[1]
        )
        pairs = (
            (dot(rows), ma.grouped_dot(fmt.encode(rows), frozen, sizes)),
            (of_rows, right_of_rows),
        )
        return pairs, (d_out, d_of_rows), (right[0], right[2])

    assert_derivatives(everything(), sizes.sum())
