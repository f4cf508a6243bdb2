"""`grouped_dot` of arrays in `BlockwiseFp8` against the definition of docs/fp8.md in numpy."""

import types

import format_oracle
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

import jax_moe_a2a as ma
from jax_moe_a2a._src.grouped.straight_through import dot_in_fp8

pytestmark = [
    pytest.mark.one_process("each process would run the same products on its own devices"),
    pytest.mark.exchanges(0),
]
E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = 128
# Rows, K, N, sizes of groups. N need not be a multiple of 128.
CASES = dict(
    tail=(40, 256, 200, [7, 0, 20, 1]),
    no_tail=(30, 128, 128, [9, 21]),
    no_rows=(0, 128, 8, [0, 0]),
    no_groups=(6, 128, 8, []),
)


def normal(seed, shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def squares(w):
    """Quantize w [L, K, N] as the definition says: values [L, N, K] and scales."""
    x = np.swapaxes(np.asarray(w, np.float32), 1, 2)
    num, n, k = x.shape
    values = np.zeros(x.shape, E4M3)
    scales = np.zeros((num, -(-n // BLOCK), k // BLOCK), np.float32)
    for index in np.ndindex(scales.shape):
        group, i, j = index
        at = np.s_[group, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        square = np.zeros((BLOCK, BLOCK), np.float32)
        used = x[at]
        square[: len(used)] = used
        fmt = types.SimpleNamespace(group_size=square.size)
        found, scale = format_oracle.encode_power_of_two(
            ma.BlockwiseFp8(), np.abs(square.astype(np.float64)).reshape(1, fmt.group_size)
        )
        codes = found.reshape(square.shape) | np.signbit(square).astype(np.uint8) << 7
        values[at] = codes.view(E4M3)[: len(used)]
        scales[index] = scale.item()
    return values, scales


def draw(case, powers_of_two=True):
    """Return rows, whose tail is NaN, weights and sizes, as numpy arrays."""
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


def assert_is_product(found, rows, w, sizes, dtype, zero_tail=True, decoded=0.0):
    """Assert that a product is the definition's up to the order of sums, K roundings of float32,
    and one rounding to its dtype. `decoded` bounds the relative error of decoded numbers."""
    expected, magnitudes = oracle.grouped_dot_fp8(rows, w, sizes)
    found = np.asarray(found)
    assert found.dtype == jnp.dtype(dtype) and found.shape == expected.shape
    eps = float(ml_dtypes.finfo(found.dtype).eps)
    bound = magnitudes * (rows[0].shape[1] * 2.0**-23 + decoded) + np.abs(expected) * eps / 2
    end = len(found) if zero_tail else sum(sizes)
    error = np.abs(found.astype(np.float64) - expected)[:end]
    assert (error <= bound[:end]).all(), (error - bound[:end]).max()


@pytest.mark.parametrize("tail", ("zero", "unspecified"))
@pytest.mark.parametrize("case", CASES)
def test_a_product_is_that_of_the_definition(case, tail):
    powers_of_two = tail == "zero"
    rows, w, sizes = draw(case, powers_of_two)
    experts = ma.QuantizedExperts(*w)
    for dtype in ("bfloat16", "float32"):
        dot = jax.jit(
            lambda rows, w, sizes, dtype=dtype: ma.grouped_dot(
                rows, w, sizes, tail=tail, preferred_element_type=dtype
            )
        )
        decoded = 2.0**-7 if harness.ON_GPU and not powers_of_two else 0.0
        out = dot(rows, experts, sizes)
        assert_is_product(out, rows, w, sizes, dtype, tail == "zero", decoded)


def test_weights_are_quantized_by_squares():
    w = normal(3, (2, 256, 200), "bfloat16") * 2.0 ** np.arange(2)[:, None, None].astype("bfloat16")
    w[1, 128:, :128] = 0
    values, scales = squares(w)
    found = ma.quantize_experts(w, transposed=True)
    np.testing.assert_array_equal(np.asarray(found.values).view(np.uint8), values.view(np.uint8))
    np.testing.assert_array_equal(found.scales, scales)
    np.testing.assert_array_equal(
        np.asarray(found.transposed).view(np.uint8), np.swapaxes(values, 1, 2).view(np.uint8)
    )
    # Gate and up, and the experts of several layers.
    pair = ma.quantize_experts(np.stack([w, w[:, :, ::-1]], axis=2))
    assert pair.values.shape == (2, 2, 200, 256) and pair.scales.shape == (2, 2, 2, 2)
    np.testing.assert_array_equal(np.asarray(pair.values[:, 0]), np.asarray(found.values))
    layers = jax.jit(jax.vmap(ma.quantize_experts))(w[None])
    np.testing.assert_array_equal(np.asarray(layers.scales[0]), scales)


def test_weights_and_rows_that_others_quantized_keep_their_numbers():
    rows, w, sizes = draw("tail", powers_of_two=False)
    turned = [np.swapaxes(part, 1, 2) for part in w]
    experts = ma.quantize_experts(types.SimpleNamespace(qvalue=turned[0], scale=turned[1]))
    for part, found in zip(w, (experts.values, experts.scales)):
        np.testing.assert_array_equal(np.asarray(found), part)
    q_array = types.SimpleNamespace(qvalue=rows.values, scale=rows.scales)
    same = ma.grouped_dot(rows, ma.quantize_experts(ma.Quantized(*turned)), sizes)
    np.testing.assert_array_equal(ma.grouped_dot(q_array, experts, sizes), same)


def test_rows_are_quantized_if_only_weights_are():
    sizes = np.array([3, 4], np.int32)
    rows, w = normal(4, (9, 128), "bfloat16"), ma.quantize_experts(normal(5, (2, 128, 8)))
    given = ma.grouped_dot(ma.BlockwiseFp8().encode(rows), w, sizes)
    np.testing.assert_array_equal(ma.grouped_dot(rows, w, sizes), given)


@pytest.mark.parametrize("axes", ((0, None, 0), (None, 0, None)))
def test_a_batch_is_one_product_and_each_element_that_of_its_own_call(axes):
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


def test_derivatives_of_quantized_arrays_are_refused():
    rows, w, sizes = draw("tail")
    experts, floats = ma.QuantizedExperts(*w), normal(6, rows.values.shape)
    total = lambda rows, w: jnp.sum(ma.grouped_dot(rows, w, sizes).astype(jnp.float32))
    for argument in (0, 1):
        with pytest.raises(TypeError, match="experts_format=ma.BlockwiseFp8"):
            jax.grad(total, argument)(jax.tree.map(jnp.asarray, rows), experts)
    with pytest.raises(TypeError, match="stop_gradient"):
        jax.grad(total)(jnp.asarray(floats), experts)
    stopped = jax.grad(lambda x: total(jax.lax.stop_gradient(x), experts) + jnp.sum(x))
    assert (stopped(jnp.asarray(floats)) == 1).all()


def bad(**changes):
    """Return arguments of `grouped_dot`, of which some are changed."""
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


ERRORS = dict(
    columns=(dict(scales=lambda s: s.T.copy()), ValueError, r'scale_layout="columns".*row_major'),
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
    result=(dict(preferred_element_type="float16"), TypeError, "bfloat16 or float32"),
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


def test_plain_arrays_keep_their_dtype():
    with pytest.raises(ValueError, match="preferred_element_type must be None"):
        x = np.ones((4, 8), np.float32)
        ma.grouped_dot(x, np.ones((1, 8, 4), np.float32), [4], preferred_element_type="float32")


def test_why_no_kernel_runs():
    rows, w, _ = draw("tail")
    experts = ma.QuantizedExperts(*w)
    assert "decoded" in ma.why_no_grouped_gemm(rows, experts)
    floats = jax.ShapeDtypeStruct(rows.values.shape, jnp.bfloat16)
    assert "decoded" in ma.why_no_grouped_gemm(floats, experts)


# Products with float weights, whose derivatives are those of the floats


def test_quantization_counts_as_the_identity_for_derivatives():
    """Only the transpose quantizes, and its own derivative does not."""
    sizes = np.array([5, 0, 3], np.int32)
    dtype = "bfloat16"
    rows, d_rows = (normal(seed, (2, 9, 128), dtype) for seed in (7, 8))
    ct, d_ct = (normal(seed, (2, 9, 256), dtype) for seed in (9, 10))
    w, d_w = (normal(seed, (3, 128, 256), dtype) for seed in (11, 12))
    end = sizes.sum()
    plain = lambda rows, w: ma.grouped_dot(rows, w, sizes)

    def everything(dot):
        def backward(rows, w, ct):
            return jax.vjp(dot, rows, w)[1](ct)

        def of_one(rows, d_rows, ct, d_ct):
            out, d_out = jax.jvp(dot, (rows, w), (d_rows, d_w))
            moved = jax.jvp(backward, (rows, w, ct), (d_rows, d_w, d_ct))
            turned = jax.linear_transpose(
                lambda d: jax.jvp(lambda r: dot(r, w), (rows,), (d,))[1], rows
            )
            (of_rows,) = turned(ct)
            return out, d_out, moved, of_rows

        return jax.tree.map(np.asarray, jax.jit(jax.vmap(of_one))(rows, d_rows, ct, d_ct))

    out, d_out, ((of_rows, of_w), tangents), transposed = everything(
        lambda rows, w: dot_in_fp8(rows, w, sizes)
    )
    _, d_plain, ((_, w_plain), tangents_plain), _ = everything(plain)
    fmt = ma.BlockwiseFp8()
    turned = ma.quantize_experts(np.swapaxes(w, 1, 2))
    for i in range(2):
        right = ma.grouped_dot(fmt.encode(rows[i]), ma.quantize_experts(w), sizes)
        np.testing.assert_array_equal(out[i, :end], right[:end])
        right = ma.grouped_dot(fmt.encode(ct[i]), turned, sizes)
        np.testing.assert_array_equal(of_rows[i, :end], right[:end])
        np.testing.assert_array_equal(transposed[i, :end], right[:end])
    cut = lambda x: x[:, :end] if x.shape[1] == 9 else x
    for found, expected in zip(
        jax.tree.leaves((d_out, of_w, tangents)),
        jax.tree.leaves((d_plain, w_plain, tangents_plain)),
    ):
        found, expected = (cut(x).astype(np.float32) for x in (found, expected))
        largest = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-8 * largest)
