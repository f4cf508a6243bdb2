"""Token formats: the bits of values and scales, what moves of them, and what is differentiated.

The oracle is `format_oracle.py`, which shares nothing with the package.
"""

import dataclasses
import functools
import math
import pathlib
import re

import cases
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import small_layer
from format_oracle import E2M1_VALUES, E4M3, E4M3_VALUES, E8M0, decode, encode
from fuzz import draw
from jax import lax
from jax.interpreters import partial_eval

import jax_moe_a2a as ma
from jax_moe_a2a._src import api
from jax_moe_a2a._src.exchange.payload_checks import check_format
from jax_moe_a2a._src.formats import formats

pytestmark = pytest.mark.exchanges(0)  # of tests without an exchange, or that only trace programs

DTYPES = ("bfloat16", "float16", "float32")
E2M1 = cases.dtype("float4_e2m1fn")
ODD_SCALE = 0.0037187  # neither it nor its inverse is a simple number

FORMATS = {
    **draw.FORMATS,
    "nv": ma.NvFp4(),
    "nv_scaled": ma.NvFp4(global_scale=ODD_SCALE),
}


def test_every_format_stands_wherever_formats_are_listed():
    """A compiler or another test guards the other places of a format that CONTRIBUTING.md lists."""

    def formats_of(module):
        kinds = ((name, kind) for name, kind in vars(module).items() if isinstance(kind, type))
        found = {name for name, kind in kinds if issubclass(kind, ma.TokenFormat)}
        return {name for name in found if not name.startswith("_")} - {"TokenFormat"}

    names = formats_of(formats)
    assert names == formats_of(ma) == {type(fmt).__name__ for fmt in draw.FORMATS.values()}
    with pytest.raises(TypeError) as error:
        check_format("fp8", False, [])
    files = ("docs/formats.md", "docs/api/formats.md", "cuda/token_format.h")
    texts = {file: pathlib.Path(__file__).parents[1].joinpath(file).read_text() for file in files}
    texts |= {fn.__name__: fn.__doc__ for fn in (ma.dispatch, ma.combine)}
    texts["the error of another format"] = str(error.value)
    assert [(name, place) for name in names for place in texts if name not in texts[place]] == []
    # Payloads, estimates and attributes of calls know the parameter of NvFp4 alone.
    fields = {type(fmt): dataclasses.fields(fmt) for fmt in FORMATS.values()}
    more = {kind: {f.name for f in fields[kind]} - {"scale_layout"} for kind in fields}
    assert {kind for kind in more if more[kind]} == {ma.NvFp4}
    assert more[ma.NvFp4] == {"global_scale"}


# Inputs


def every_pattern(dtype, group_size):
    """Return groups of all 65536 numbers of a 16-bit float, next to numbers that make their scale
    larger.

    Numbers of one group are of about one magnitude; then all of them in a random order.
    """
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[np.argsort(bits & 0x7FFF, kind="stable")]
    chunks = np.resize(bits, (-(-bits.size // (group_size - 1)), group_size - 1))
    largest = (chunks & 0x7FFF).max(axis=1)
    most = np.array(ml_dtypes.finfo(dtype).max, cases.dtype(dtype)).view(np.uint16)
    mantissa = 7 if dtype == "bfloat16" else 10
    groups = []
    for steps in (0, 2, 5, 8, 11, 17):  # powers of two that the scale is larger by
        beside = np.minimum(largest.astype(np.int64) + (steps << mantissa), most)
        groups.append(np.concatenate([beside.astype(np.uint16)[:, None], chunks], axis=1))
    groups.append(np.random.default_rng(0).permutation(bits).reshape(-1, group_size))
    return np.concatenate(groups).view(cases.dtype(dtype))


def float32_groups(group_size):
    """Draw groups of float32: any bits; any exponents, near each other; bounds between two results
    and the numbers next to them; the largest and smallest; all with every kind of scale."""
    rng = np.random.default_rng(1)
    groups = [rng.integers(0, 1 << 32, (64, group_size), np.uint32).view(np.float32)]
    exponents = rng.integers(-150, 128, (400, 1)) - rng.integers(0, 14, (400, group_size))
    sign = rng.choice([-1, 1], exponents.shape)
    groups.append(np.ldexp(sign * rng.uniform(1, 2, exponents.shape), exponents))

    def with_neighbours(x):
        x = np.asarray(x, np.float32)
        return np.concatenate(
            [x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))]
        )

    def in_groups(x, first):
        """Return groups that begin with a number and continue with x."""
        x = np.resize(x, (-(-len(x) // (group_size - 1)), group_size - 1))
        return np.concatenate([np.full((len(x), 1), first), sign[: len(x), 1:] * x], axis=1)

    bounds = with_neighbours((E4M3_VALUES[:-1] + E4M3_VALUES[1:]) / 2)
    for exponent in (-117, -116, -40, 0, 1, 119):
        for first in (256, 300, 448):
            with np.errstate(over="ignore"):
                scaled = np.ldexp(np.float64(bounds), exponent)
            groups.append(in_groups(scaled[scaled <= first * 2.0**exponent], first * 2.0**exponent))
    # NvFp4, also with a global scale that is no power of two: there the order of operations shows.
    bounds = (E2M1_VALUES[:-1] + E2M1_VALUES[1:]) / 2
    for code in (1, 2, 3, 7, 8, 9, 77, 98, 111, 125, 126):
        for scale in E4M3_VALUES[code] * np.array([1, np.float32(ODD_SCALE)]):
            groups.append(in_groups(with_neighbours(bounds * scale), 6 * scale))

    # Largest magnitudes of a group at which the scale changes, by themselves and next to others.
    bounds = 6 * (E4M3_VALUES[:-1] + E4M3_VALUES[1:]) / 2
    firsts = [with_neighbours(bounds), with_neighbours(bounds * ODD_SCALE), [448 * 6, 1e9]]
    firsts += [with_neighbours(factor * 2.0 ** np.arange(-126, 119)) for factor in (1, 1.75, 1.9)]
    firsts += [np.float32([2.0**-126, 2.0**-127, 1e-45, 2.0**-118, 3.4028235e38, 2.0**127])]
    firsts = np.concatenate(firsts).astype(np.float32)
    groups.append(firsts[:, None] * rng.uniform(-1, 1, (len(firsts), group_size)))
    groups[-1][:, 0] = firsts
    zeros = np.where(rng.random((4, group_size)) < 0.5, -0.0, 0.0)
    groups.append(zeros)
    groups.append(np.where(rng.random((4, group_size)) < 0.5, 1e-39, zeros))
    for bad in (np.inf, -np.inf, np.nan):
        groups.append(rng.standard_normal((2, group_size)))
        groups[-1][0, -1] = groups[-1][1, 0] = bad
    with np.errstate(over="ignore"):
        return np.concatenate([group.astype(np.float32) for group in groups])


# The same for all dtypes, so that they share what eager operations compile.
NUM_INPUTS = {128: 1250, 32: 5000, 16: 10200}


@functools.cache
def inputs(dtype, group_size):
    """Return [NUM_INPUTS, 3 * group_size], the first groups again at the end."""
    groups = float32_groups(group_size) if dtype == "float32" else every_pattern(dtype, group_size)
    rows = NUM_INPUTS[group_size]
    assert len(groups) <= 3 * rows
    return np.resize(groups, (rows, 3 * group_size))


@functools.cache
def encoded(name, dtype):
    """Return (values, scales) of `inputs` by the oracle."""
    return encode(FORMATS[name], inputs(dtype, FORMATS[name].group_size))


def assert_quantized_is(actual, expected, what=""):
    assert isinstance(actual, ma.Quantized)
    for field, a, e in zip(ma.Quantized._fields, actual, expected):
        harness.assert_same_bytes(np.asarray(a), e, f"{what} {field}")


# Encoding and decoding

of_every_format = pytest.mark.parametrize("name", ("blockwise", "mx", "nv_scaled"))
of_every_dtype = pytest.mark.parametrize("dtype", DTYPES)


FORMATS_AND_DTYPES = [
    (name, dtype) for name in FORMATS for dtype in DTYPES if name != "nv" or dtype == "float32"
]


@pytest.mark.parametrize(("name", "dtype"), FORMATS_AND_DTYPES)
@pytest.mark.parametrize("how", ("eager", "jit"))
def test_encode_returns_the_bits_of_the_oracle(name, dtype, how):
    fmt = FORMATS[name]
    run = jax.jit(fmt.encode) if how == "jit" else fmt.encode
    actual = run(jnp.asarray(inputs(dtype, fmt.group_size)))
    assert_quantized_is(actual, encoded(name, dtype))


@of_every_dtype
@of_every_format
@pytest.mark.parametrize("how", ("eager", "jit"))
def test_decode_returns_the_bits_of_the_oracle(name, dtype, how):
    """The input is what `encode` returns; for every dtype of the result."""
    fmt = FORMATS[name]
    run = functools.partial(jax.jit(fmt.decode, static_argnums=1) if how == "jit" else fmt.decode)
    values, scales = encoded(name, "float32")
    actual = run(ma.Quantized(jnp.asarray(values), jnp.asarray(scales)), dtype)
    harness.assert_same_bytes(np.asarray(actual), decode(fmt, values, scales, dtype))


@of_every_format
def test_decode_knows_every_value_and_every_scale(name):
    """Also scales that `encode` never returns, except if a product is subnormal in float32."""
    fmt = FORMATS[name]
    codes = np.resize(np.arange(256, dtype=np.uint8), 256 * fmt.group_size)
    if name == "blockwise":
        scales = np.float32([0, 1, 0.3, 1e-30, 3e38, np.inf, -np.inf, np.nan, -2, 2.0**-117])
        values = codes.view(E4M3)
    elif name == "mx":
        scales = np.delete(np.arange(256, dtype=np.uint8), np.arange(1, 10)).view(E8M0)
        values = codes.view(E4M3)
    else:
        scales = np.arange(256, dtype=np.uint8).view(E4M3)
        values = codes[: 256 * fmt.group_size // 2]
    scales = np.repeat(scales[:, None], 256, axis=1)
    values = np.broadcast_to(values, (len(scales), *values.shape))
    for dtype in DTYPES:
        actual = jax.jit(fmt.decode, static_argnums=1)(ma.Quantized(values, scales), dtype)
        harness.assert_same_bytes(np.asarray(actual), decode(fmt, values, scales, dtype), dtype)


@pytest.mark.parametrize("name", ("blockwise", "mx", "nv"))
def test_decoded_values_are_near(name):
    """The bounds that docs/formats.md states, for tensors of ordinary numbers of several sizes."""
    rng = np.random.default_rng(0)
    shape = (64, 4, 128)
    x = (rng.standard_normal(shape) * 10.0 ** rng.uniform(-2, 2, (*shape[:2], 1))).astype("float32")
    fmt = FORMATS[name]
    if name == "nv":
        fmt = ma.NvFp4(global_scale=np.abs(x).max() / 2688)
    actual = np.asarray(jax.jit(lambda x: fmt.decode(fmt.encode(x), "float32"))(x))
    groups = np.abs(x).reshape(*shape[:2], -1, fmt.group_size)
    largest = groups.max(axis=-1, keepdims=True)
    if isinstance(fmt, ma.NvFp4):
        bound = np.maximum(groups / 5, largest * (1 + 1 / 16) / 24)
    else:
        bound = np.maximum(groups / 16, largest / 224 / 1024)
        if name == "mx":
            bound = np.where(groups > 7 / 8 * largest, groups / 8, bound)
    error = np.abs(actual - x).reshape(groups.shape)
    assert (error <= 1.0001 * bound).all()
    assert (error > 0.9 * bound).any()  # it is no wider than it has to be


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@of_every_dtype
def test_what_becomes_of_special_numbers(fmt, dtype):
    """Groups: zeros of both signs; one infinity; one NaN; the largest number; ones."""
    most = float(ml_dtypes.finfo(dtype).max)
    x = np.ones((5, fmt.group_size), np.float64)
    x[0] = 0.0
    x[0, 1::2] = -0.0
    x[1, 3], x[2, 0] = -np.inf, np.nan
    x[3, 1:3] = most, -most
    quantized = jax.jit(fmt.encode)(x.astype(cases.dtype(dtype)))
    back = np.asarray(jax.jit(fmt.decode, static_argnums=1)(quantized, dtype), np.float64)
    assert not cases.bits(np.asarray(quantized.scales)[0]).any()
    np.testing.assert_array_equal(back[0], 0)
    np.testing.assert_array_equal(np.signbit(back[0]), np.signbit(x[0]))
    assert (
        np.isnan(back[1:3]).all() and np.isnan(np.asarray(quantized.scales)[1:3].astype("f4")).all()
    )
    assert not cases.bits(np.asarray(quantized.values)[1:3]).any()
    assert np.isfinite(back[3]).all() and back[3, 1] == -back[3, 2] > 0
    np.testing.assert_allclose(back[4], 1, rtol=0.1)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_zero_bytes_decode_to_zeros(fmt):
    """Rows without a token are zero bytes."""
    values, scales = jax.eval_shape(fmt.encode, jax.ShapeDtypeStruct((2, 256), "float32"))
    zeros = [
        np.zeros(a.shape + (a.dtype.itemsize,), np.uint8).view(a.dtype)[..., 0]
        for a in (values, scales)
    ]
    back = np.asarray(jax.jit(fmt.decode, static_argnums=1)(ma.Quantized(*zeros), "bfloat16"))
    assert back.shape == (2, 256) and not cases.bits(back).any()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", ((0, 128), (3, 0), (128,), (2, 0, 256), (2, 3, 128)))
def test_shapes(fmt, shape):
    quantized = jax.jit(fmt.encode)(np.ones(shape, np.float32))
    assert quantized.scales.shape == (*shape[:-1], shape[-1] // fmt.group_size)
    back = jax.jit(fmt.decode, static_argnums=1)(quantized, "float32")
    assert back.shape == shape
    np.testing.assert_allclose(np.asarray(back), 1, rtol=0.1)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_rounding_that_made_a_token_is_not_skipped(dtype):
    """Inside one program, a backend may keep the unrounded number."""
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    for fmt in (ma.BlockwiseFp8(), ma.NvFp4(global_scale=ODD_SCALE)):
        rounded = (x * np.float32(1.2345)).astype(cases.dtype(dtype))
        actual = jax.jit(lambda x: fmt.encode((x * np.float32(1.2345)).astype(dtype)))(x)
        assert_quantized_is(actual, encode(fmt, rounded))


# The global scale of NvFp4


def test_a_traced_global_scale_means_what_a_static_one_does():
    """Numbers of every size and mantissa, clipped to the range; the inverse is rounded once."""
    rng = np.random.default_rng(0)
    scales = np.ldexp(rng.uniform(1, 2, 3000), rng.integers(-116, 116, 3000)).astype(np.float32)
    edges = np.float32(
        [2.0**-116, 2.0**116, 1, 0.5, np.nextafter(1, 0), np.nextafter(np.float32(1), 2)]
    )
    scales = np.concatenate([scales, edges.astype(np.float32)])
    # Groups of bounds between two values, and of the numbers next to them.
    bounds = (E2M1_VALUES[:-1] + E2M1_VALUES[1:]) / 2
    factors = E4M3_VALUES[rng.integers(8, 127, scales.size)] * scales
    x = (factors[:, None] * np.concatenate([[6, 6], bounds, bounds])).astype(np.float32)
    x[:, 2:9] = np.nextafter(x[:, 2:9], rng.choice([0, np.inf], (scales.size, 1)), dtype=np.float32)
    actual = jax.jit(jax.vmap(lambda x, s: ma.NvFp4(global_scale=s).encode(x)))(x, scales)
    expected = [encode(ma.NvFp4(global_scale=scale), group) for group, scale in zip(x, scales)]
    assert_quantized_is(actual, [np.stack(parts) for parts in zip(*expected)])


def test_the_inverse_of_a_global_scale_is_rounded_once():
    rng = np.random.default_rng(0)
    mantissas = np.concatenate(
        [np.arange(1 << 14), rng.integers(0, 1 << 23, 1 << 16), [(1 << 23) - 1]]
    )
    bits = (rng.integers(11, 244, mantissas.size) << 23 | mantissas).astype(np.uint32)
    actual = np.asarray(jax.jit(formats._reciprocal)(bits))
    harness.assert_same_bytes(actual, np.float32(1) / bits.view(np.float32))


@pytest.mark.parametrize("scale", (np.nan, np.inf, -1.0, -np.inf))
def test_an_invalid_traced_global_scale_leads_to_nan(scale):
    def there_and_back(x, scale):
        fmt = ma.NvFp4(global_scale=scale)
        quantized = fmt.encode(x)
        return (
            quantized.scales.astype(jnp.float32),
            fmt.decode(quantized, "float32"),
            fmt.decode(ma.NvFp4().encode(x), "float32"),
        )

    for out in jax.jit(there_and_back)(np.ones((2, 32), np.float32), np.float32(scale)):
        assert np.isnan(np.asarray(out)).all()


def test_a_traced_global_scale_of_zero_is_the_smallest():
    """A tensor of zeros has that scale, by its largest magnitude."""
    x = np.zeros((2, 32), np.float32)
    x[1] = 2.0**-114
    fmt = functools.partial(lambda x, s: ma.NvFp4(global_scale=s).encode(x))
    assert_quantized_is(jax.jit(fmt)(x, np.float32(0)), encode(ma.NvFp4(global_scale=2.0**-116), x))


def test_formats_are_static_values():
    assert hash(ma.BlockwiseFp8()) == hash(ma.BlockwiseFp8()) and ma.MxFp8() == ma.MxFp8()
    assert ma.NvFp4(global_scale=0.5) == ma.NvFp4(global_scale=0.5) != ma.NvFp4()
    assert len({*FORMATS.values(), ma.MxFp8()}) == len(FORMATS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ma.NvFp4().global_scale = 2.0


def test_unpacked_values_are_float4():
    values = np.arange(256, dtype=np.uint8)[None]
    unpacked = np.asarray(jax.jit(ma.NvFp4().unpack)(values))
    assert unpacked.dtype == E2M1 and unpacked.shape == (1, 512)
    codes = np.stack([values & 15, values >> 4], axis=-1).reshape(1, -1)
    np.testing.assert_array_equal(unpacked.astype(np.float32), codes.view(E2M1).astype(np.float32))


# Layouts of scales


def laid_out(fmt, scales):
    """Return the scales [C, S] in the layout of the format, and back in rows."""
    values = np.zeros((len(scales), scales.shape[1] * fmt.group_size // fmt.values_per_item))
    values = values.astype(fmt.value_dtype)
    quantized = jax.jit(fmt.laid_out)(ma.Quantized(values, scales))
    back = fmt.row_major(quantized)
    harness.assert_same_bytes(back.values, values)
    harness.assert_same_bytes(back.scales, scales)
    return np.asarray(quantized.scales)


@pytest.mark.parametrize("shape", ((5, 3), (8, 1), (0, 2), (4, 0)))
def test_scales_in_columns(shape):
    scales = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    out = laid_out(ma.BlockwiseFp8(scale_layout="columns"), scales)
    rows = -(-shape[0] // 4) * 4
    assert out.shape == (shape[1], rows) and out.dtype == np.float32
    memory = out.ravel()
    for row in range(rows):
        for group in range(shape[1]):
            expected = scales[row, group] if row < shape[0] else 0
            assert memory[group * rows + row] == expected


@pytest.mark.parametrize(("kind", "dtype"), ((ma.NvFp4, E4M3), (ma.MxFp8, E8M0)))
@pytest.mark.parametrize("shape", ((128, 4), (300, 9), (1, 1), (0, 4)))
def test_scales_in_tiles(shape, kind, dtype):
    """Compare with the offsets of the cuBLAS documentation, "1D Block Scaling Factors Layout"."""
    rng = np.random.default_rng(0)
    scales = rng.integers(1, 126, shape, np.uint8)
    out = laid_out(kind(scale_layout="tiles"), scales.view(dtype))
    rows, groups = -(-shape[0] // 128), -(-shape[1] // 4)
    assert out.shape == (rows, groups, 32, 16) and out.dtype == dtype
    memory = out.view(np.uint8).ravel().copy()
    for row, group in np.ndindex(shape):
        tile = 512 * (row // 128 * groups + group // 4)
        at = tile + row % 128 % 32 * 16 + row % 128 // 32 * 4 + group % 4
        assert memory[at] == scales[row, group]
        memory[at] = 0
    assert not memory.any()


# Dispatch

PADDED, TIGHT = (dataclasses.replace(layout, hidden=256) for layout in (cases.PADDED, cases.TIGHT))
SMALL = cases.Layout(
    "small", tokens=6, top_k=3, local_experts=2, capacity=10, alignment=4, hidden=128
)


RANKS = harness.FEW
# Ranks of a vmap: two, or all those that share a GPU.
VMAPPED = harness.RANKS_ON_ONE_GPU or 2


def sums_in_a_format(number, layout=SMALL):
    """Return a number of sums in a format: portable ones, which do not count, of many ranks."""
    return number * layout.is_summed_in_formats(RANKS)


@functools.cache
def dispatch_program(name, layout, ranks):
    """Return a program (ids, x, topk_weights) -> (Recvs of quantized rows, by ids and by a routing;
    the same of decoded rows; the combine of these)."""
    fmt, static = FORMATS[name], layout.route_args(harness.group_of(ranks))

    def dispatch(ids, x, topk_weights):
        by_ids = functools.partial(ma.dispatch, x, ids, topk_weights, format=fmt, **static)
        recv, decoded = by_ids(), by_ids(decode=True)
        given = functools.partial(ma.dispatch, x, recv.routing, topk_weights, format=fmt)
        both = [recv, given()], [decoded, given(decode=True)]
        return *both, ma.combine(decoded.rows, decoded)

    return harness.on_each_rank(dispatch, harness.mesh_of(ranks))


def tokens_of(layout, ranks, dtype="bfloat16"):
    """Draw numbers of several sizes, with one token of zeros and one with an infinity on each
    rank."""
    rng = np.random.default_rng([ranks, layout.hidden])
    x = rng.standard_normal((ranks, layout.tokens, layout.hidden))
    x *= 10.0 ** rng.uniform(-3, 3, x.shape[:2])[..., None]
    x[:, 1] = 0
    x[:, 2, 5] = np.inf
    return x.astype(cases.dtype(dtype))


@pytest.mark.exchanges(6 * 5)
@pytest.mark.parametrize(
    ("name", "layout"),
    (("blockwise", PADDED), ("mx", TIGHT), ("nv_scaled", PADDED)),
)
def test_dispatch_moves_what_encode_returns(name, layout):
    """Rows without a token are zero bytes, and decode to zeros."""
    ranks, fmt = harness.MANY, FORMATS[name]
    x = tokens_of(layout, ranks)
    values, scales = encode(fmt, x)
    topk_weights = np.ones((ranks, layout.tokens, layout.top_k), np.float32)
    for routing in ("uniform", "idle_rank", "masked", "all_masked", "repeated", "invalid"):
        ids = cases.Case(layout, routing).ids(ranks)
        expected = oracle.route(
            ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment
        )
        quantized, decoded, combined = dispatch_program(name, layout, ranks)(ids, x, topk_weights)
        rows = oracle.dispatch(values, expected), oracle.dispatch(scales, expected)
        expected_rows = decode(fmt, *rows, "bfloat16")
        weights = oracle.dispatch_choices(topk_weights, expected)
        for recv in quantized:
            assert_quantized_is(recv.rows, rows, routing)
        for recv in decoded:
            harness.assert_same_bytes(recv.rows, expected_rows, routing)
        for recv in quantized + decoded:
            harness.assert_routing_is(recv.routing, expected)
            harness.assert_same_bytes(recv.weights, weights, routing)
        sums, slack = oracle.combine(expected_rows, expected, weights)
        harness.assert_sums_agree(combined, sums, slack, routing)


# Tokens and hidden of all ranks together: all of `inputs` and some of them again, in rows of many
# segments, of which the last is not whole.
WIDE = {"blockwise": (56, 9600), "mx": (56, 9600), "nv_scaled": (64, 8160)}


def assert_rows_are(fmt, traced_scale, x, expected_parts, out_dtype):
    """Dispatch x [R, T, H], every token to two experts, encoded and decoded, and check the rows."""
    ranks, tokens, _ = x.shape
    first = np.arange(ranks * tokens, dtype=np.int32).reshape(ranks, tokens, 1)
    ids = np.concatenate([first, first + 1], axis=2) % ranks
    # If tokens are spread evenly, a rank gets twice as many as its own, and few more.
    capacity = 2 * (tokens + ranks) if harness.RANKS_ON_ONE_GPU else 2 * ranks * tokens
    expected = oracle.route(ids, ranks, capacity, 1)
    assert not expected.num_dropped.any()
    topk_weights = np.random.default_rng(0).random(ids.shape, np.float32)
    group = harness.group_of(ranks)

    def dispatch(ids, x, topk_weights, scale):
        used = ma.NvFp4(global_scale=scale) if traced_scale else fmt
        static = dict(group=group, num_experts=ranks, capacity=capacity)
        routing = ma.route(ids, **static)
        by_ids = (x, ids, topk_weights)
        recvs = []
        for args, options in ((by_ids, static), ((x, routing, topk_weights), {})):
            for decodes in (False, True):
                recvs.append(ma.dispatch(*args, format=used, decode=decodes, **options))
        return [(recv.rows, recv.weights) for recv in recvs]

    scales = np.full(ranks, getattr(fmt, "global_scale", 1), np.float32)
    run = harness.on_each_rank(dispatch, harness.mesh_of(ranks))
    recvs = run(ids, x, topk_weights, scales)
    rows = [oracle.dispatch(part, expected) for part in expected_parts]
    decoded_rows = decode(fmt, *rows, out_dtype)
    weights_of_rows = oracle.dispatch_choices(topk_weights, expected)
    for i, (received, weights) in enumerate(recvs):
        if i % 2 == 0:
            assert_quantized_is(received, rows)
        else:
            harness.assert_same_bytes(received, decoded_rows)
        harness.assert_same_bytes(weights, weights_of_rows)


@pytest.mark.exchanges(5)
@of_every_dtype
@of_every_format
def test_dispatch_encodes_and_decodes_every_number(name, dtype):
    fmt, ranks = FORMATS[name], harness.FEW
    tokens, hidden = WIDE[name]
    every_number = inputs(dtype, fmt.group_size)
    x = np.resize(every_number, (ranks, -(-tokens // ranks), hidden))
    parts = [
        np.resize(part, (*x.shape[:2], part.size * hidden // every_number.size))
        for part in encoded(name, dtype)
    ]
    assert_rows_are(fmt, name == "nv_scaled" and dtype != "bfloat16", x, parts, dtype)


@pytest.mark.exchanges(3)
@of_every_format
def test_dispatch_encodes_tokens_of_which_several_share_a_flag(name):
    """There are more slots than flags, and values and scales of a row are not whole vectors."""
    fmt, ranks = FORMATS[name], harness.FEW
    num_groups = 3 if ranks <= cases.MOST_RANKS else 1  # landing zones grow with the ranks' square
    x = np.resize(inputs("bfloat16", fmt.group_size), (ranks, 4100, num_groups * fmt.group_size))
    parts = [
        np.resize(part, (ranks, 4100, part.shape[-1] * num_groups // 3))
        for part in encoded(name, "bfloat16")
    ]
    assert_rows_are(fmt, name == "nv_scaled", x, parts, "bfloat16")


LAID_OUT = {
    "blockwise": ma.BlockwiseFp8(scale_layout="columns"),
    "mx": ma.MxFp8(scale_layout="tiles"),
    "nv_scaled": ma.NvFp4(global_scale=ODD_SCALE, scale_layout="tiles"),
}


@pytest.mark.exchanges(1)
@of_every_format
def test_scales_come_in_the_layout_that_the_format_names(name):
    fmt, plain, ranks = LAID_OUT[name], FORMATS[name], harness.FEW
    layout = dataclasses.replace(SMALL, capacity=130, hidden=384)
    ids, group = cases.Case(layout, "masked").ids(ranks), harness.group_of(ranks)
    x = tokens_of(layout, ranks)

    def dispatch(ids, x):
        rows = ma.dispatch(x, ids, format=fmt, **layout.route_args(group)).rows
        return rows, fmt.row_major(rows), fmt.decode(rows, "float32"), fmt.encode(x)

    rows, row_major, decoded, tokens = harness.on_each_rank(dispatch, group.mesh)(ids, x)
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)
    parts = [oracle.dispatch(part, expected) for part in encode(plain, x)]
    assert_quantized_is(row_major, parts)
    harness.assert_same_bytes(decoded, decode(plain, *parts, "float32"))
    for rank in range(ranks):
        laid_out_rows = fmt.laid_out(ma.Quantized(parts[0][rank], parts[1][rank]))
        harness.assert_same_bytes(rows.scales[rank], np.asarray(laid_out_rows.scales))
        own = fmt.decode(ma.Quantized(tokens.values[rank], tokens.scales[rank]), "float32")
        expected = plain.decode(plain.encode(x[rank]), "float32")
        harness.assert_same_bytes(np.asarray(own), np.asarray(expected))


# The wire dtype of combine


@pytest.mark.exchanges(2 + sums_in_a_format(2))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@of_every_format
def test_partial_sums_of_a_combine_are_quantized_once_while_they_travel(name, dtype):
    fmt, ranks = FORMATS[name], harness.FEW
    ids, group = cases.Case(SMALL, "uniform").ids(ranks), harness.group_of(ranks)
    expected = oracle.route(ids, SMALL.num_experts(ranks), SMALL.rows(ranks), SMALL.alignment)
    rng = np.random.default_rng(3)
    y = cases.normal(rng, (ranks, SMALL.rows(ranks), SMALL.hidden), dtype)

    def combine(ids, y):
        routing = ma.route(ids, **SMALL.route_args(group))
        ones = jnp.ones(SMALL.rows(ranks))
        return (
            ma.combine(y, routing, wire_dtype=fmt),
            ma.combine(y, routing, weights=ones, wire_dtype=fmt),
            transposed(lambda y: ma.combine(y, routing, wire_dtype=fmt), y, y[: SMALL.tokens]),
            transposed(lambda y: ma.combine(y, routing), y, y[: SMALL.tokens]),
        )

    combined, weighted, gradient, plain_gradient = harness.on_each_rank(combine, group.mesh)(ids, y)

    def on_the_wire(partial):
        return decode(fmt, *encode(fmt, partial), "float32").reshape(partial.shape)

    sums, slack = oracle.combine(y, expected, None, on_the_wire)
    harness.assert_sums_agree(combined, sums, slack)
    harness.assert_sums_agree(weighted, sums, slack)
    harness.assert_same_bytes(gradient, plain_gradient)


# Groups that fill no warp, groups larger than a warp takes at a time, and values that end between
# two vectors.
WIRES = (
    ("blockwise", dataclasses.replace(cases.PADDED, hidden=640), "bfloat16"),
    ("blockwise", dataclasses.replace(cases.TIGHT, hidden=384), "float32"),
    ("mx", dataclasses.replace(cases.TIGHT, hidden=544), "bfloat16"),
    ("mx", dataclasses.replace(cases.CUT, hidden=96), "float16"),
    ("nv_scaled", dataclasses.replace(cases.PADDED, hidden=528), "bfloat16"),
    ("nv_scaled", dataclasses.replace(cases.TIGHT, hidden=48), "float32"),
)


def rows_of_every_size(layout, ranks, dtype):
    """Draw rows from tiny to huge, on each rank one row of zeros and some with special numbers."""
    rng = np.random.default_rng([ranks, layout.hidden])
    y = rng.standard_normal((ranks, layout.rows(ranks), layout.hidden))
    limits = ml_dtypes.finfo(cases.dtype(dtype))
    # XLA:CPU flushes subnormal sums.
    exponents = max(-100, np.log2(float(limits.tiny))), np.log2(float(limits.max)) - 4
    y *= 2.0 ** rng.uniform(*exponents, y.shape[:2])[..., None]
    y[:, 1] = 0
    y[:, 2, 5], y[:, 3, -1], y[:, 4, 17] = np.inf, np.nan, -np.inf
    y[:, 5, 3] = float(limits.max)
    return y.astype(cases.dtype(dtype))


@pytest.mark.exchanges(lambda layout: 4 * (1 + sums_in_a_format(2, layout)))
@pytest.mark.parametrize(("name", "layout", "dtype"), WIRES)
def test_sums_in_a_format_are_those_of_the_definition_for_every_routing(name, layout, dtype):
    """Weights are powers of two, so that no product is rounded."""
    fmt, ranks = FORMATS[name], harness.FEW
    group = harness.group_of(ranks)
    y = rows_of_every_size(layout, ranks, dtype)
    weights = 2.0 ** np.random.default_rng(0).integers(-2, 2, y.shape[:2])
    weights = weights.astype(np.float32)

    def combine(ids, y, weights):
        routing = ma.route(ids, **layout.route_args(group))
        y = jnp.where(routing.row_rank[:, None] >= 0, y, jnp.nan)
        return [ma.combine(y, routing, weights=w, wire_dtype=fmt) for w in (None, weights)]

    run = harness.on_each_rank(combine, group.mesh)

    def on_the_wire(partial):
        return decode(fmt, *encode(fmt, partial), "float32").reshape(partial.shape)

    for routing in ("uniform", "skewed", "masked", "repeated"):
        ids = cases.Case(layout, routing).ids(ranks)
        expected = oracle.route(
            ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment
        )
        for out, given in zip(run(ids, y, weights), (None, weights)):
            sums, slack = oracle.combine(y, expected, given, on_the_wire)
            harness.assert_sums_agree(out, sums, np.zeros_like(slack), (routing, given is None))


@pytest.mark.exchanges(1 + sums_in_a_format(8))
@pytest.mark.parametrize("name", ("blockwise", "mx", "nv"))
def test_a_batch_with_one_routing_is_summed_in_a_format_as_each_of_its_elements(name):
    fmt, ranks = FORMATS[name], harness.FEW
    ids, group = cases.Case(SMALL, "uniform").ids(ranks), harness.group_of(ranks)
    rng = np.random.default_rng(4)
    y = cases.normal(rng, (ranks, 3, SMALL.rows(ranks), SMALL.hidden), "bfloat16")
    weights = 2.0 ** rng.integers(-2, 2, y.shape[:3]).astype(np.float32)

    def combine(ids, y, weights):
        routing = ma.route(ids, **SMALL.route_args(group))

        def of(y, weights=None):
            return ma.combine(y, routing, weights=weights, wire_dtype=fmt)

        return (
            (jax.vmap(of)(y), jnp.stack([*map(of, y)])),
            (jax.vmap(of)(y, weights), jnp.stack([*map(of, y, weights)])),
        )

    for batch, each in harness.on_each_rank(combine, group.mesh)(ids, y, weights):
        harness.assert_same_bytes(batch, each)


@pytest.mark.exchanges(1 + sums_in_a_format(2), split=sums_in_a_format(2))
def test_the_halves_of_a_combine_in_a_format_return_what_the_whole_returns():
    fmt, ranks = FORMATS["blockwise"], harness.FEW
    ids, group = cases.Case(SMALL, "uniform").ids(ranks), harness.group_of(ranks)
    rng = np.random.default_rng(5)
    y = cases.normal(rng, (ranks, SMALL.rows(ranks), SMALL.hidden), "bfloat16")
    weights = rng.random(y.shape[:2], np.float32)

    def combine(ids, y, weights):
        routing = ma.route(ids, **SMALL.route_args(group))
        options = [dict(weights=w, wire_dtype=fmt) for w in (None, weights)]
        halves = [ma.combine_done(ma.combine_start(y, routing, **each)) for each in options]
        return halves, [ma.combine(y, routing, **each) for each in options]

    for halves, whole in zip(*harness.on_each_rank(combine, group.mesh)(ids, y, weights)):
        harness.assert_same_bytes(halves, whole)


@pytest.mark.exchanges(1 + sums_in_a_format(1))
def test_the_gradient_of_a_dispatch_may_be_quantized_while_it_travels():
    ids, x, direction, _ = small_arguments(VMAPPED)
    group, fmt = harness.vmapped_group(VMAPPED), FORMATS["mx"]

    def run(ids, x, direction):
        def rows(x):
            return ma.dispatch(x, ids, wire_dtype=fmt, **SMALL.route_args(group)).rows

        routing = ma.route(ids, **SMALL.route_args(group))
        ct = jnp.concatenate([x, direction])[: SMALL.rows(VMAPPED)]
        return transposed(rows, x, ct), ma.combine(ct, routing, wire_dtype=fmt)

    assert_same_trees(*emulated(run)(ids, x, direction))


# Transforms. Dispatch and an unweighted combine are linear except for the format's rounding, so
# that straight-through derivatives equal those without a format bit for bit.


def there_and_back(group, fmt, ids, topk_weights=None):
    """Return a function x -> tokens, each the sum of its rows."""

    def of(x):
        recv = ma.dispatch(
            x, ids, topk_weights, format=fmt, decode=fmt is not None, **SMALL.route_args(group)
        )
        return ma.combine(recv.rows, recv)

    return of


def transposed(fn, x, direction):
    return jax.vjp(fn, x)[1](direction)[0]


def tangent(fn, x, direction):
    return jax.jvp(fn, (x,), (direction,))[1]


def twice(fn):
    return lambda x: lax.scan(lambda x, _: (fn(x), None), x, length=2)[0]


DERIVATIVES = {
    "vjp": lambda fn, x, d: transposed(fn, x, d),
    "jvp": lambda fn, x, d: tangent(fn, x, d),
    "linearize": lambda fn, x, d: jax.linearize(fn, x)[1](d),
    "scan_remat": lambda fn, x, d: transposed(twice(jax.checkpoint(fn)), x, d),
    "vmap": lambda fn, x, d: transposed(jax.vmap(fn), jnp.stack([x, d]), jnp.stack([d, x])),
    "vmap_inside": lambda fn, x, d: jax.vmap(functools.partial(transposed, fn))(
        jnp.stack([x, d]), jnp.stack([d, x])
    ),
    "reverse_over_forward": lambda fn, x, d: jax.grad(lambda x: jnp.vdot(d, tangent(fn, x, x)))(x),
}


def small_arguments(ranks, dtype="float32"):
    ids = cases.Case(SMALL, "masked").ids(ranks)
    rng = np.random.default_rng(ranks)
    shape = (ranks, SMALL.tokens, SMALL.hidden)
    x, direction = cases.normal(rng, shape, dtype), cases.normal(rng, shape, dtype)
    return ids, x, direction, cases.normal(rng, ids.shape, "float32")


def derivatives(names, fmt, group):
    def of(ids, x, direction):
        fn = there_and_back(group, fmt, ids)
        return {name: DERIVATIVES[name](fn, x, direction) for name in names}

    return of


def assert_same_trees(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected)):
        harness.assert_same_bytes(np.asarray(a), np.asarray(e), jax.tree_util.keystr(path))


def emulated(fn):
    return small_layer.compiled(jax.vmap(fn, axis_name=harness.AXIS))


@pytest.mark.exchanges(lambda check_vma: 6 if check_vma else 12)
@pytest.mark.parametrize("check_vma", (True, False))
def test_derivatives_are_those_of_a_dispatch_without_a_format(check_vma):
    group, names = harness.group_of(harness.FEW), ("vjp", "jvp") if check_vma else ("scan_remat",)
    ids, x, direction, _ = small_arguments(harness.FEW, "bfloat16")
    actual, expected = (
        small_layer.compiled(
            small_layer.on_all_ranks(
                derivatives(names, fmt, group), group.mesh, check_vma=check_vma
            )
        )(ids, x, direction)
        for fmt in (FORMATS["blockwise"], None)
    )
    assert_same_trees(actual, expected)


@pytest.mark.exchanges(harness.merged(22, predicted=26))
def test_derivatives_of_every_transform_emulated_by_vmap():
    ids, x, direction, _ = small_arguments(VMAPPED)
    group = harness.vmapped_group(VMAPPED)
    actual, expected = (
        emulated(derivatives(sorted({*DERIVATIVES} - {"vjp", "jvp"}), fmt, group))(
            ids, x, direction
        )
        for fmt in (FORMATS["nv_scaled"], None)
    )
    assert_same_trees(actual, expected)


@pytest.mark.exchanges(16)
def test_values_and_other_gradients_are_those_of_quantized_tokens():
    """This holds under transforms, and for the gradient of the router weights, which uses the
    decoded rows."""
    fmt, group = FORMATS["mx"], harness.vmapped_group(VMAPPED)
    ids, x, direction, weights = small_arguments(VMAPPED)

    def quantize(x):
        return fmt.decode(fmt.encode(x), x.dtype)

    def of(fmt):
        def run(ids, x, direction, weights):
            def weighted(weights, x):
                return there_and_back(group, fmt, ids, weights)(x)

            tokens = x if fmt is not None else quantize(x)
            batch = jnp.stack([tokens, tokens[::-1]])
            return {
                "weights": transposed(lambda w: weighted(w, tokens), weights, direction),
                "batch": jax.vmap(lambda x: weighted(weights, x))(batch),
                "remat": jax.checkpoint(functools.partial(weighted, weights))(tokens),
            }

        return emulated(run)(ids, x, direction, weights)

    small_layer.assert_close(of(fmt), of(None))


@pytest.mark.exchanges(8)
def test_a_global_scale_may_be_traced_and_change_in_a_scan():
    ids, x, _, _ = small_arguments(VMAPPED)
    group = harness.vmapped_group(VMAPPED)
    scales = np.float32([0.01, 0.002])

    def run(ids, x):
        def step(_, scale):
            return None, there_and_back(group, ma.NvFp4(global_scale=scale), ids)(x)

        static = [there_and_back(group, ma.NvFp4(global_scale=s), ids)(x) for s in scales]
        return lax.scan(step, None, scales)[1], jnp.stack(static)

    assert_same_trees(*emulated(run)(ids, x))


@pytest.mark.exchanges(harness.merged(13, predicted=14))
def test_a_batch_may_have_a_routing_a_global_scale_or_both_for_each_element():
    ids, x, direction, _ = small_arguments(VMAPPED)
    group, scales = harness.vmapped_group(VMAPPED), np.float32([0.01, 0.002])

    def run(ids, x, direction):
        def rows(ids, x, scale, decode=False):
            fmt = ma.NvFp4(global_scale=scale)
            return ma.dispatch(x, ids, format=fmt, decode=decode, **SMALL.route_args(group)).rows

        both = dict(ids=jnp.stack([ids, ids[::-1]]), x=jnp.stack([x, direction]), scale=scales)
        one = dict(ids=ids, x=x, scale=jnp.asarray(scales[0]))
        results = []
        for i, axes in enumerate(((0, 0, 0), (None, 0, 0), (None, None, 0), (None, 0, None))):
            of = functools.partial(rows, decode=i % 2 > 0)
            args = [(both if axis == 0 else one)[name] for name, axis in zip(one, axes)]
            elements = [
                of(*(a[i] if axis == 0 else a for a, axis in zip(args, axes))) for i in (0, 1)
            ]
            stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *elements)
            results.append((jax.vmap(of, axes)(*args), stacked))
        return [batch for batch, _ in results], [stacked for _, stacked in results]

    assert_same_trees(*emulated(run)(ids, x, direction))


@pytest.mark.parametrize("tokens", (SMALL.tokens, api.FUSED_MAX_TOKENS + 1))  # one launch, two
def test_unused_results_of_a_format_are_not_made(tokens):
    """Values and scales are removed together. Without them the format and its scale are removed
    too."""
    group, layout = harness.group_of(harness.FEW), dataclasses.replace(SMALL, tokens=tokens)
    ids = cases.Case(layout, "masked").ids(harness.FEW)
    x = np.ones((harness.FEW, tokens, SMALL.hidden), np.float32)
    weights, scales = np.ones(ids.shape, np.float32), np.ones(harness.FEW, np.float32)

    def payload_of(pick):
        def of(ids, x, weights, scale):
            fmt = ma.NvFp4(global_scale=scale)
            recv = ma.dispatch((x, x[:, :64]), ids, weights, format=fmt, **layout.route_args(group))
            return pick(recv)

        closed = jax.make_jaxpr(small_layer.on_all_ranks(of, group.mesh))(ids, x, weights, scales)
        jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        name = "routed_dispatch" if tokens == SMALL.tokens else "dispatch"
        (eqn,) = small_layer.equations(jaxpr, name)
        shapes = small_layer.shapes_of_one_rank(eqn)
        payload = shapes[1:] if name == "routed_dispatch" else shapes[:-7]
        return payload, eqn.params["options"].format is not None

    a, b, choices, scale = (tokens, 128), (tokens, 64), (tokens, 3), (tokens,)
    assert payload_of(lambda recv: recv) == ([a, b, choices, scale], True)
    assert payload_of(lambda recv: recv.rows[1].scales) == ([b, scale], True)
    assert payload_of(lambda recv: recv.rows[0].values) == ([a, scale], True)
    assert payload_of(lambda recv: recv.weights) == ([choices], False)


def two_by_two(axes, axis_type):
    """Return a mesh of four devices, equally many of each process."""
    if harness.NUM_DEVICES < 4:
        pytest.skip("needs four devices")
    return jax.make_mesh((2, 2), axes, axis_types=(axis_type,) * 2, devices=harness.devices(4))


@pytest.mark.several_devices("it needs a second mesh axis")
def test_router_weights_may_vary_over_more_axes_than_tokens():
    """Tokens that are equal along another axis of the mesh get the sum of its gradients."""
    mesh = two_by_two(("dp", harness.AXIS), jax.sharding.AxisType.Auto)
    group = ma.Group(mesh, harness.AXIS, implementation=harness.IMPLEMENTATION)
    ids, x, _, weights = small_arguments(2)
    ids, x, weights = ids.reshape(-1, 3), x.reshape(-1, SMALL.hidden), np.concatenate([weights] * 2)
    P = jax.sharding.PartitionSpec
    tokens, both = P(harness.AXIS), P(("dp", harness.AXIS))

    def gradient(fmt):
        def of_rank(ids, x, weights):
            return jax.grad(
                lambda x: lax.psum(
                    there_and_back(group, fmt, ids, weights)(x).sum(), mesh.axis_names
                )
            )(x)

        mapped = jax.shard_map(
            of_rank, mesh=mesh, in_specs=(tokens, tokens, both), out_specs=tokens
        )
        return harness.jit(mapped)(ids, x, weights.reshape(-1, 3))

    assert_same_trees(gradient(ma.BlockwiseFp8()), gradient(None))


@pytest.mark.several_devices("it needs a second mesh axis")
def test_hidden_may_be_sharded_by_an_explicit_axis():
    """Whole groups on each device; values and scales are sharded alike."""
    mesh = two_by_two((harness.AXIS, "tp"), jax.sharding.AxisType.Explicit)
    group = ma.Group(mesh, harness.AXIS, implementation=harness.IMPLEMENTATION)
    P = jax.sharding.PartitionSpec
    layout = dataclasses.replace(SMALL, hidden=256)

    def of_rank(ids, x):
        def rows(x, **options):
            return ma.dispatch(
                x, ids, format=ma.BlockwiseFp8(), **layout.route_args(group), **options
            ).rows

        return rows(x), jax.grad(lambda x: lax.psum(rows(x, decode=True).sum(), harness.AXIS))(x)

    mapped = jax.shard_map(
        of_rank, in_specs=P(harness.AXIS), out_specs=P(harness.AXIS), axis_names={harness.AXIS}
    )
    with jax.set_mesh(mesh):
        ids = jnp.zeros((2 * layout.tokens, layout.top_k), jnp.int32, out_sharding=P(harness.AXIS))
        x = jnp.ones((2 * layout.tokens, 256), out_sharding=P(harness.AXIS, "tp"))
        out = jax.eval_shape(mapped, ids, x)
    assert [a.sharding.spec for a in jax.tree.leaves(out)] == [P(harness.AXIS, "tp")] * 3


def test_tokens_are_dispatched_once_as_they_are_and_gradients_once_each_way():
    ids, x, _, _ = small_arguments(harness.SEVERAL)
    group = harness.group_of(harness.SEVERAL)

    def counts(fn):
        return small_layer.counts(small_layer.on_all_ranks(fn), ids, x)

    def dispatch(decode):
        def of(ids, x):
            return ma.dispatch(
                x, ids, format=ma.MxFp8(), decode=decode, **SMALL.route_args(group)
            ).rows

        return of

    def gradient(decode):
        def of(ids, x):
            def total(x):
                rows = dispatch(decode)(ids, x)
                return jnp.sum(rows if decode else rows.values.astype(jnp.float32))

            return jax.grad(total)(x)

        return of

    assert counts(dispatch(False)) == counts(dispatch(True)) == {"routed_dispatch": 1}
    assert counts(gradient(True))["combine"] == 1
    assert "combine" not in counts(gradient(False))
    jaxpr = jax.make_jaxpr(small_layer.on_all_ranks(dispatch(True)))(ids, x)
    (eqn,) = small_layer.equations(jaxpr, "routed_dispatch")
    assert small_layer.shapes_of_one_rank(eqn)[1:] == [(SMALL.tokens, SMALL.hidden)]


def test_quantized_rows_have_no_gradient():
    ids, x, _, _ = small_arguments(VMAPPED)
    group = harness.vmapped_group(VMAPPED)

    def gradient(ids, x):
        def total(x):
            recv = ma.dispatch(x, ids, format=ma.BlockwiseFp8(), **SMALL.route_args(group))
            return jnp.sum(ma.BlockwiseFp8().decode(recv.rows, "float32"))

        return jax.grad(total)(x)

    assert not np.asarray(emulated(gradient)(ids, x)).any()


@pytest.mark.exchanges(3)
def test_payloads_of_several_arrays():
    """A format applies to all arrays; a Quantized may be in the payload with other arrays."""
    ids, x, direction, _ = small_arguments(VMAPPED)
    group, fmt = harness.vmapped_group(VMAPPED), ma.BlockwiseFp8()
    position = np.arange(VMAPPED * SMALL.tokens, dtype=np.int32).reshape(VMAPPED, -1)

    def run(ids, x, direction, position):
        static = SMALL.route_args(group)
        both = {"a": x, "b": (direction.astype(jnp.bfloat16)[:, None],)}
        together = ma.dispatch(both, ids, format=fmt, **static).rows
        decoded = ma.dispatch(both, ids, format=fmt, decode=True, **static).rows
        by_hand, places = ma.dispatch((fmt.encode(x), position), ids, **static).rows
        return together, decoded, by_hand, places

    together, decoded, by_hand, places = emulated(run)(ids, x, direction, position)
    assert set(together) == set(decoded) == {"a", "b"}
    assert_same_trees(together["a"], by_hand)
    expected = oracle.route(ids, SMALL.num_experts(VMAPPED), SMALL.rows(VMAPPED), SMALL.alignment)
    b = encode(fmt, direction.astype(cases.dtype("bfloat16"))[:, :, None])
    rows = [oracle.dispatch(part, expected) for part in b]
    assert_quantized_is(together["b"][0], rows)
    harness.assert_same_bytes(decoded["b"][0], decode(fmt, *rows, "bfloat16"))
    assert decoded["a"].dtype == np.float32
    harness.assert_same_bytes(places, oracle.dispatch(position, expected))


# Errors


def refusals():
    def array(*shape, dtype="float32"):
        return jnp.zeros(shape, dtype)

    def dispatch(x, **options):
        ids = jnp.zeros((2, 1), jnp.int32)
        return jax.vmap(
            lambda x: ma.dispatch(
                x, ids, group=harness.emulated_group(2), num_experts=2, **options
            ),
            axis_name=harness.AXIS,
        )(jnp.zeros((2, *x), "float32"))

    def in_columns(scales):
        values = array(2, 256, dtype=E4M3)
        return ma.BlockwiseFp8(scale_layout="columns").laid_out(ma.Quantized(values, scales))

    def in_tiles(scales):
        values = array(2, 64, dtype=E4M3)
        return ma.MxFp8(scale_layout="tiles").laid_out(ma.Quantized(values, scales))

    fp8, mx, nv = ma.BlockwiseFp8(), ma.MxFp8(), ma.NvFp4()
    of_mx = ma.Quantized(array(3, 64, dtype=E4M3), array(3, 2, dtype=E8M0))
    of_fp8 = ma.Quantized(array(1, 128, dtype=E4M3), array(1, 1))
    return {
        "hidden": (
            lambda: fp8.encode(array(4, 100)),
            ValueError,
            ["x", "128", r"float32\[4,100\]"],
        ),
        "hidden_16": (lambda: nv.encode(array(4, 24)), ValueError, ["x", "16", r"\[4,24\]"]),
        "scalar": (lambda: mx.encode(array()), ValueError, ["x", "32", r"float32\[\]"]),
        "integers": (
            lambda: mx.encode(array(32, dtype="int32")),
            TypeError,
            ["x", "float32", "int32"],
        ),
        "narrow": (lambda: mx.encode(array(32, dtype=E4M3)), TypeError, ["x", "float8_e4m3fn"]),
        "decode_dtype": (
            lambda: mx.decode(of_mx, "int8"),
            TypeError,
            ["dtype", "int8"],
        ),
        "other_format": (
            lambda: mx.decode(of_fp8, "float32"),
            TypeError,
            ["scales", "float8_e8m0fnu", "MxFp8", "float32"],
        ),
        "not_quantized": (
            lambda: mx.decode(array(32), "float32"),
            TypeError,
            ["quantized", "Array"],
        ),
        "shapes": (
            lambda: mx.decode(of_mx._replace(values=array(3, 32, dtype=E4M3)), "float32"),
            ValueError,
            ["values", "32", r"\[3,2\]", r"\[3,32\]"],
        ),
        "global_scale_type": (
            lambda: ma.NvFp4(global_scale="1"),
            TypeError,
            ["global_scale", "'1'"],
        ),
        "global_scale_zero": (
            lambda: ma.NvFp4(global_scale=0.0),
            ValueError,
            ["global_scale", "0.0"],
        ),
        "global_scale_nan": (
            lambda: ma.NvFp4(global_scale=np.nan),
            ValueError,
            ["global_scale", "nan"],
        ),
        "global_scale_negative": (
            lambda: ma.NvFp4(global_scale=-1),
            ValueError,
            ["global_scale", "-1"],
        ),
        "global_scale_shape": (
            lambda: ma.NvFp4(global_scale=array(3)).encode(array(4, 16)),
            ValueError,
            ["global_scale", r"\[T\]", r"float32\[4,16\]", r"float32\[3\]"],
        ),
        "global_scale_dtype": (
            lambda: ma.NvFp4(global_scale=array(dtype="bfloat16")),
            TypeError,
            ["global_scale", "bfloat16"],
        ),
        "format": (
            lambda: dispatch((2, 128), format="fp8"),
            TypeError,
            ["format", "BlockwiseFp8", "'fp8'"],
        ),
        "format_class": (
            lambda: dispatch((2, 128), format=ma.MxFp8),
            TypeError,
            ["format", "MxFp8'"],
        ),
        "decode": (lambda: dispatch((2, 128), decode=True), ValueError, ["decode", "format"]),
        "decode_type": (
            lambda: dispatch((2, 128), format=fp8, decode=1),
            TypeError,
            ["decode", "1"],
        ),
        "no_hidden": (lambda: dispatch((2,), format=mx), ValueError, ["x", "hidden", r"\[2\]"]),
        "dispatch_hidden": (
            lambda: dispatch((2, 64), format=fp8),
            ValueError,
            ["x", "128", r"\[2,64\]"],
        ),
        "scale_layout": (
            lambda: ma.MxFp8(scale_layout="columns"),
            ValueError,
            ["scale_layout", "tiles", "'columns'"],
        ),
        "scale_layout_axes": (
            lambda: ma.BlockwiseFp8(scale_layout="columns").encode(array(2, 2, 128)),
            ValueError,
            ["x", "columns", r"\[2,2,128\]"],
        ),
        "scales_of_another_layout": (
            lambda: ma.MxFp8(scale_layout="tiles").decode(of_mx, "float32"),
            ValueError,
            ["scales", "tiles", r"\[1, 1, 32, 16\]", r"\[3,2\]"],
        ),
        "wire_hidden": (
            lambda: dispatch((2, 64), wire_dtype=fp8),
            ValueError,
            ["x", "128", r"\[2,64\]"],
        ),
        "wire_axes": (
            lambda: dispatch((2,), wire_dtype=mx),
            ValueError,
            ["x", "wire_dtype", r"\[2\]"],
        ),
        "wire_scale": (
            lambda: dispatch((2, 64), wire_dtype=ma.NvFp4(global_scale=array())),
            TypeError,
            ["wire_dtype", "global_scale"],
        ),
        "columns_dtype": (
            lambda: in_columns(array(2, 2, dtype=E4M3)),
            TypeError,
            ["scales", "float32", "columns", "float8_e4m3fn"],
        ),
        "columns_axes": (
            lambda: in_columns(array(2)),
            ValueError,
            ["scales", "columns", r"\[2\]"],
        ),
        "tiles_dtype": (
            lambda: in_tiles(array(2, 2)),
            TypeError,
            ["scales", "float8_e8m0fnu", "tiles", "float32"],
        ),
        "tiles_axes": (
            lambda: in_tiles(array(2, dtype=E8M0)),
            ValueError,
            ["scales", "tiles", r"\[2\]"],
        ),
    }


@pytest.mark.parametrize("case", refusals())
def test_bad_input_is_refused(case):
    call, error, naming = refusals()[case]
    with pytest.raises(error) as refusal:
        call()
    for pattern in naming:
        assert re.search(pattern, str(refusal.value)), f"no {pattern!r} in: {refusal.value}"


def formatted(group, layout, **options):
    """Dispatch (x, ids, global scale) of one rank, and return decoded rows."""

    def rows(x, ids, scale=0.25):
        fmt = ma.NvFp4(global_scale=scale)
        route_args = dict(group=group, num_experts=group.size * layout.local_experts)
        return ma.dispatch(x, ids, format=fmt, decode=True, **route_args, **options).rows

    return rows


@pytest.mark.exchanges(10)
def test_elements_of_a_batch_with_global_scales_of_their_own_have_the_rows_and_gradients_of_each():
    layout = cases.Layout("formatted", tokens=5, top_k=2, local_experts=2, hidden=64)
    (x, *_), ids, _ = small_layer.arguments(harness.SEVERAL, layout=layout)
    rows = formatted(harness.group_of(harness.SEVERAL), layout)
    scales = jnp.asarray([0.25, 0.5])

    def rows_and_gradient(x, ids, scale):
        out, vjp = jax.vjp(lambda x: rows(x, ids, scale), x)
        return out, vjp(out)[0]

    def by_batch(x, ids):
        return jax.vmap(rows_and_gradient, in_axes=(0, None, 0))(jnp.stack([x, 2 * x]), ids, scales)

    def outside(x, ids):
        batch = jax.vmap(rows, in_axes=(0, None, 0))
        out, vjp = jax.vjp(lambda x: batch(x, ids, scales), jnp.stack([x, 2 * x]))
        return out, vjp(out)[0]

    def one_by_one(x, ids):
        each = [rows_and_gradient((1 + b) * x, ids, scales[b]) for b in range(2)]
        return tuple(jnp.stack(parts) for parts in zip(*each, strict=True))

    expected, *actual = (
        small_layer.compiled(small_layer.on_all_ranks(fn, check_vma=False))(x, ids)
        for fn in (one_by_one, by_batch, outside)
    )
    assert np.any(np.asarray(expected[1]) != 0)
    for each in actual:
        small_layer.assert_same(each, expected)


@pytest.mark.exchanges(2)
def test_the_transpose_of_a_dispatch_that_decodes_is_that_of_one_without_a_format():
    layout = cases.Layout("formatted", tokens=5, top_k=2, local_experts=2, hidden=64)
    (x, *_), ids, _ = small_layer.arguments(harness.SEVERAL, layout=layout)
    group = harness.group_of(harness.SEVERAL)

    def transposed(x, ids):
        route_args = dict(group=group, num_experts=group.size * layout.local_experts)
        fns = [formatted(group, layout), lambda x, ids: ma.dispatch(x, ids, **route_args).rows]
        fns.append(functools.partial(fns[0], scale=jnp.max(x)))  # an array known in the transpose
        rows = jnp.sin(jnp.arange(1.0, 1 + fns[1](x, ids).size)).reshape(fns[1](x, ids).shape)
        return [jax.linear_transpose(lambda x, fn=fn: fn(x, ids), x)(rows)[0] for fn in fns]

    fn = small_layer.compiled(small_layer.on_all_ranks(transposed, check_vma=False))
    with_format, without, with_traced_scale = fn(x, ids)
    small_layer.assert_same(with_format, without)
    small_layer.assert_same(with_traced_scale, without)
