"""Compare the bits of token formats, dispatches and derivatives with `format_oracle.py`, which
shares no code with the package."""

import dataclasses
import functools
import pathlib

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
from fuzz.draw import FORMATS
from jax import lax
from small_layer import routing_of

import jax_moe_a2a as ma
from jax_moe_a2a._src.api import bind_dispatch
from jax_moe_a2a._src.exchange.arguments import check_dispatch
from jax_moe_a2a._src.formats import formats
from jax_moe_a2a._src.routing.checks import RouteArguments

pytestmark = pytest.mark.exchanges(0)  # most tests run no exchange

DTYPES = ("bfloat16", "float16", "float32")
E2M1 = cases.dtype("float4_e2m1fn")
ODD_SCALE = FORMATS["nv"].global_scale  # this number and its inverse need many bits

of_every_format = pytest.mark.parametrize("name", FORMATS)
of_every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def test_every_format_is_in_each_list_of_formats():
    """CONTRIBUTING.md lists the places that must contain every format."""

    def formats_of(module):
        kinds = ((name, kind) for name, kind in vars(module).items() if isinstance(kind, type))
        found = {name for name, kind in kinds if issubclass(kind, ma.TokenFormat)}
        return {name for name in found if not name.startswith("_")} - {"TokenFormat"}

    names = formats_of(formats)
    assert names == formats_of(ma) == {type(fmt).__name__ for fmt in FORMATS.values()}
    with pytest.raises(TypeError) as error:
        ma.Exchange(token_format="fp8")
    files = ("docs/formats.md", "docs/api/formats.md", "cuda/token_format.h")
    texts = {file: pathlib.Path(__file__).parents[1].joinpath(file).read_text() for file in files}
    texts |= {fn.__name__: fn.__doc__ for fn in (ma.Exchange, ma.combine)}
    texts["the error of another format"] = str(error.value)
    assert [(name, place) for name in names for place in texts if name not in texts[place]] == []
    # Payloads, memory estimates and call attributes assume that only NvFp4 has a parameter.
    fields = {type(fmt): dataclasses.fields(fmt) for fmt in FORMATS.values()}
    more = {kind: {f.name for f in fields[kind]} for kind in fields}
    assert {kind for kind in more if more[kind]} == {ma.NvFp4}
    assert more[ma.NvFp4] == {"global_scale"}


def every_pattern(dtype, group_size):
    """Return groups that contain all 65536 bit patterns of a 16-bit float, and random groups."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[np.argsort(bits & 0x7FFF, kind="stable")]
    chunks = np.resize(bits, (-(-bits.size // (group_size - 1)), group_size - 1))
    largest = (chunks & 0x7FFF).max(axis=1)
    most = np.array(ml_dtypes.finfo(dtype).max, cases.dtype(dtype)).view(np.uint16)
    mantissa = 7 if dtype == "bfloat16" else 10
    groups = []
    for steps in (0, 2, 5, 8, 11, 17):  # adds a number 2**steps times as large as the largest
        beside = np.minimum(largest.astype(np.int64) + (steps << mantissa), most)
        groups.append(np.concatenate([beside.astype(np.uint16)[:, None], chunks], axis=1))
    groups.append(np.random.default_rng(0).permutation(bits).reshape(-1, group_size))
    return np.concatenate(groups).view(cases.dtype(dtype))


def float32_groups(group_size):
    """Return random float32 groups with every kind of scale."""
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
        """Return groups whose first number is `first`, and whose other numbers are x."""
        x = np.resize(x, (-(-len(x) // (group_size - 1)), group_size - 1))
        return np.concatenate([np.full((len(x), 1), first), sign[: len(x), 1:] * x], axis=1)

    bounds = with_neighbours((E4M3_VALUES[:-1] + E4M3_VALUES[1:]) / 2)
    for exponent in (-117, -116, -40, 0, 1, 119):
        for first in (256, 300, 448):
            with np.errstate(over="ignore"):
                scaled = np.ldexp(np.float64(bounds), exponent)
            groups.append(in_groups(scaled[scaled <= first * 2.0**exponent], first * 2.0**exponent))
    # ODD_SCALE is no power of two, so results depend on the order of operations.
    bounds = (E2M1_VALUES[:-1] + E2M1_VALUES[1:]) / 2
    for code in (1, 2, 3, 7, 8, 9, 77, 98, 111, 125, 126):
        for scale in E4M3_VALUES[code] * np.array([1, np.float32(ODD_SCALE)]):
            groups.append(in_groups(with_neighbours(bounds * scale), 6 * scale))

    # If the largest magnitude of a group is near one of these bounds, the scale changes.
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


# Inputs of all dtypes have equal shapes, so that JAX compiles fewer eager operations.
NUM_INPUTS = {128: 1250, 32: 5000, 16: 10200}


@functools.cache
def inputs(dtype, group_size):
    """Return groups [NUM_INPUTS, 3 * group_size]."""
    groups = float32_groups(group_size) if dtype == "float32" else every_pattern(dtype, group_size)
    rows = NUM_INPUTS[group_size]
    assert len(groups) <= 3 * rows
    return np.resize(groups, (rows, 3 * group_size))


@functools.cache
def encoded(name, dtype):
    """Return the oracle's (values, scales) of `inputs`."""
    return encode(FORMATS[name], inputs(dtype, FORMATS[name].group_size))


def assert_quantized_is(actual, expected, what=""):
    assert isinstance(actual, ma.Quantized)
    for field, a, e in zip(ma.Quantized._fields, actual, expected):
        harness.assert_same_bytes(np.asarray(a), e, f"{what} {field}")


@of_every_dtype
@of_every_format
def test_encode_returns_the_bits_of_the_oracle(name, dtype):
    fmt = FORMATS[name]
    actual = jax.jit(fmt.encode)(jnp.asarray(inputs(dtype, fmt.group_size)))
    assert_quantized_is(actual, encoded(name, dtype))


@of_every_format
def test_decode_returns_the_bits_of_the_oracle(name):
    """Scales that make products subnormal in float32 are omitted."""
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


@of_every_format
def test_shapes(name):
    fmt = FORMATS[name]
    for shape in ((0, 128), (3, 0), (128,), (2, 0, 256), (2, 3, 128)):
        quantized = jax.eval_shape(fmt.encode, jax.ShapeDtypeStruct(shape, "float32"))
        assert quantized.scales.shape == (*shape[:-1], shape[-1] // fmt.group_size)
        assert jax.eval_shape(lambda q: fmt.decode(q, "float32"), quantized).shape == shape


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_the_rounding_that_made_a_token_is_not_skipped(dtype):
    """XLA must not remove the cast to a 16-bit float before `encode`."""
    x = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    for fmt in (ma.BlockwiseFp8(), ma.NvFp4(global_scale=ODD_SCALE)):
        rounded = (x * np.float32(1.2345)).astype(cases.dtype(dtype))
        actual = jax.jit(lambda x: fmt.encode((x * np.float32(1.2345)).astype(dtype)))(x)
        assert_quantized_is(actual, encode(fmt, rounded))


def test_a_traced_global_scale_means_what_a_static_one_does():
    rng = np.random.default_rng(0)
    scales = np.ldexp(rng.uniform(1, 2, 3000), rng.integers(-116, 116, 3000)).astype(np.float32)
    edges = np.float32(
        [2.0**-116, 2.0**116, 1, 0.5, np.nextafter(1, 0), np.nextafter(np.float32(1), 2)]
    )
    scales = np.concatenate([scales, edges.astype(np.float32)])
    bounds = (E2M1_VALUES[:-1] + E2M1_VALUES[1:]) / 2
    factors = E4M3_VALUES[rng.integers(8, 127, scales.size)] * scales
    x = (factors[:, None] * np.concatenate([[6, 6], bounds, bounds])).astype(np.float32)
    x[:, 2:9] = np.nextafter(x[:, 2:9], rng.choice([0, np.inf], (scales.size, 1)), dtype=np.float32)
    actual = jax.jit(jax.vmap(lambda x, s: ma.NvFp4(global_scale=s).encode(x)))(x, scales)
    expected = [encode(ma.NvFp4(global_scale=scale), group) for group, scale in zip(x, scales)]
    assert_quantized_is(actual, [np.stack(parts) for parts in zip(*expected)])


def test_formats_are_static_values():
    assert hash(ma.BlockwiseFp8()) == hash(ma.BlockwiseFp8()) and ma.MxFp8() == ma.MxFp8()
    assert ma.NvFp4(global_scale=0.5) == ma.NvFp4(global_scale=0.5) != ma.NvFp4()
    assert len({*FORMATS.values(), ma.MxFp8(), ma.NvFp4()}) == len(FORMATS) + 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        ma.NvFp4().global_scale = 2.0


def test_unpacked_values_are_float4():
    values = np.arange(256, dtype=np.uint8)[None]
    unpacked = np.asarray(jax.jit(ma.NvFp4().unpack)(values))
    assert unpacked.dtype == E2M1 and unpacked.shape == (1, 512)
    codes = np.stack([values & 15, values >> 4], axis=-1).reshape(1, -1)
    np.testing.assert_array_equal(unpacked.astype(np.float32), codes.view(E2M1).astype(np.float32))


PADDED, TIGHT = (dataclasses.replace(layout, hidden=256) for layout in (cases.PADDED, cases.TIGHT))
SMALL = cases.Layout(
    "small", tokens=6, top_k=3, local_experts=2, capacity=10, alignment=4, hidden=128
)


RANKS = harness.FEW


def dispatch_both(x, ids, topk_weights, **options):
    """Make one exchange, and return a Recv of quantized rows and a Recv of decoded rows."""
    given = RouteArguments(*map(options.get, ("group", "num_experts", "exchange")))
    arguments = check_dispatch(x, ids, topk_weights, given, decode=True, tail="zero")
    kept = arguments.options._replace(keeps_encoded=True)
    recv = bind_dispatch(arguments._replace(options=kept))
    return (dataclasses.replace(recv, rows=rows) for rows in recv.rows)


@functools.cache
def dispatch_program(name, layout, ranks):
    """Compile a function of (ids, x, topk_weights) that returns Recvs of quantized rows, Recvs of
    decoded rows, and a combine of decoded rows."""
    fmt, static = FORMATS[name], layout.route_args(harness.group_of(ranks))

    def dispatch(ids, x, topk_weights):
        by_ids = functools.partial(
            ma.dispatch, x, ids, topk_weights, **harness.exchanging(static, token_format=fmt)
        )
        recv, decoded = by_ids(), by_ids(decode=True)
        given = functools.partial(
            ma.dispatch, x, recv.routing, topk_weights, exchange=ma.Exchange(token_format=fmt)
        )
        quantized, all_decoded = [recv, given()], [decoded, given(decode=True)]
        for to, options in ((ids, static), (recv.routing, {})):
            options = harness.exchanging(options, token_format=fmt)
            one, other = dispatch_both(x, to, topk_weights, **options)
            quantized.append(one)
            all_decoded.append(other)
        return quantized, all_decoded, ma.combine(decoded.rows, decoded)

    return harness.on_each_rank(dispatch, harness.mesh_of(ranks))


def tokens_of(layout, ranks, dtype="bfloat16"):
    """Return random tokens; on each rank, one token is zero, and one has an infinity."""
    rng = np.random.default_rng([ranks, layout.hidden])
    x = rng.standard_normal((ranks, layout.tokens, layout.hidden))
    x *= 10.0 ** rng.uniform(-3, 3, x.shape[:2])[..., None]
    x[:, 1] = 0
    x[:, 2, 5] = np.inf
    return x.astype(cases.dtype(dtype))


@pytest.mark.exchanges(6 * 7)
@pytest.mark.parametrize(("name", "layout"), (("blockwise", PADDED), ("mx", TIGHT), ("nv", PADDED)))
def test_dispatch_moves_what_encode_returns(name, layout):
    """Quantized rows without a token are zero bytes, and are decoded as zeros."""
    ranks, fmt = harness.MANY, FORMATS[name]
    x = tokens_of(layout, ranks)
    values, scales = encode(fmt, x)
    topk_weights = np.ones((ranks, layout.tokens, layout.top_k), np.float32)
    for routing in ("uniform", "idle_rank", "masked", "all_masked", "repeated", "invalid"):
        ids = cases.Case(layout, routing).ids(ranks)
        expected = routing_of(ids, layout)
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


# With these (tokens, hidden), the tokens of all ranks contain all of `inputs`.
WIDE = {"blockwise": (56, 9600), "mx": (56, 9600), "nv": (64, 8160)}


def dispatch_and_check_rows(name, x, expected_parts, out_dtype):
    fmt, (ranks, tokens, _) = FORMATS[name], x.shape
    has_traced_scale = name == "nv" and out_dtype != "bfloat16"
    first = np.arange(ranks * tokens, dtype=np.int32).reshape(ranks, tokens, 1)
    ids = np.concatenate([first, first + 1], axis=2) % ranks
    # The ids are balanced, so a rank receives about twice as many rows as it has tokens.
    capacity = 2 * (tokens + ranks) if harness.RANKS_ON_ONE_GPU else 2 * ranks * tokens
    expected = oracle.route(ids, ranks, capacity, 1)
    assert not expected.num_dropped.any()
    topk_weights = np.random.default_rng(0).random(ids.shape, np.float32)
    group = harness.group_of(ranks)

    def dispatch(ids, x, topk_weights, scale):
        used = ma.NvFp4(global_scale=scale) if has_traced_scale else fmt
        static = dict(group=group, num_experts=ranks, capacity=capacity)
        routing = ma.route(ids, **harness.exchanging(static))
        by_ids = (x, ids, topk_weights)
        recvs = []
        for args, options in ((by_ids, static), ((x, routing, topk_weights), {})):
            for decodes in (False, True):
                recvs.append(
                    ma.dispatch(
                        *args, **harness.exchanging(options, token_format=used), decode=decodes
                    )
                )
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


@pytest.mark.gpu  # on CPUs, XLA encodes
@pytest.mark.exchanges(5)
@of_every_dtype
@of_every_format
def test_dispatch_encodes_and_decodes_every_number(name, dtype):
    tokens, hidden = WIDE[name]
    every_number = inputs(dtype, FORMATS[name].group_size)
    x = np.resize(every_number, (RANKS, -(-tokens // RANKS), hidden))
    parts = [
        np.resize(part, (*x.shape[:2], part.size * hidden // every_number.size))
        for part in encoded(name, dtype)
    ]
    dispatch_and_check_rows(name, x, parts, dtype)


@pytest.mark.gpu
@pytest.mark.exchanges(3)
@of_every_format
def test_dispatch_encodes_tokens_of_which_several_share_a_flag(name):
    """A rank has more tokens than the kernel's receive buffer has flags."""
    group_size = FORMATS[name].group_size
    num_groups = 3 if RANKS <= cases.MOST_RANKS else 1  # the zones' memory grows with ranks^2
    x = np.resize(inputs("bfloat16", group_size), (RANKS, 4100, num_groups * group_size))
    parts = [
        np.resize(part, (RANKS, 4100, part.shape[-1] * num_groups // 3))
        for part in encoded(name, "bfloat16")
    ]
    dispatch_and_check_rows(name, x, parts, "bfloat16")


def on_the_wire(fmt):
    """Return a function that encodes and decodes partial sums, as combine does."""
    return lambda sums: decode(fmt, *encode(fmt, sums), "float32").reshape(sums.shape)


# In these cases, groups do not fill a warp, or a warp needs several steps, or a vector is not full.
WIRES = (
    ("blockwise", dataclasses.replace(cases.PADDED, hidden=640), "bfloat16"),
    ("mx", dataclasses.replace(cases.CUT, hidden=96), "float16"),
    ("nv", dataclasses.replace(cases.TIGHT, hidden=48), "float32"),
    ("blockwise", dataclasses.replace(cases.TIGHT, hidden=384), "float32"),
    ("mx", dataclasses.replace(cases.TIGHT, hidden=544), "bfloat16"),
    ("nv", dataclasses.replace(cases.PADDED, hidden=528), "bfloat16"),
    ("blockwise", dataclasses.replace(cases.TIGHT, hidden=7168), "bfloat16"),
)[: None if harness.ON_GPU else 3]


def rows_of_every_size(layout, ranks, dtype):
    """Return random rows of tiny to huge magnitudes, with zeros, NaN and infinities."""
    rng = np.random.default_rng([ranks, layout.hidden])
    y = rng.standard_normal((ranks, layout.rows(ranks), layout.hidden))
    limits = ml_dtypes.finfo(cases.dtype(dtype))
    # XLA:CPU flushes subnormal sums to zero.
    exponents = max(-100, np.log2(float(limits.tiny))), np.log2(float(limits.max)) - 4
    y *= 2.0 ** rng.uniform(*exponents, y.shape[:2])[..., None]
    y[:, 1] = 0
    y[:, 2, 5], y[:, 3, -1], y[:, 4, 17] = np.inf, np.nan, -np.inf
    y[:, 5, 3] = float(limits.max)
    return y.astype(cases.dtype(dtype))


@pytest.mark.exchanges(12)
@pytest.mark.parametrize(("name", "layout", "dtype"), WIRES)
def test_sums_in_a_format_are_those_of_the_definition_for_every_routing(name, layout, dtype):
    """Weights are powers of two, so no product is rounded."""
    fmt, ranks = FORMATS[name], RANKS
    group = harness.group_of(ranks)
    y = rows_of_every_size(layout, ranks, dtype)
    weights = 2.0 ** np.random.default_rng(0).integers(-2, 2, y.shape[:2])
    weights = weights.astype(np.float32)

    def combine(ids, y, weights):
        routing = ma.route(ids, **layout.route_args(group))
        y = jnp.where(routing.row_rank[:, None] >= 0, y, jnp.nan)
        return [ma.combine(y, routing, weights=w, wire_dtype=fmt) for w in (None, weights)]

    run = harness.on_each_rank(combine, group.mesh)
    for routing in ("uniform", "skewed", "masked", "repeated"):
        ids = cases.Case(layout, routing).ids(ranks)
        expected = routing_of(ids, layout)
        for out, given in zip(run(ids, y, weights), (None, weights)):
            sums, slack = oracle.combine(y, expected, given, on_the_wire(fmt))
            harness.assert_sums_agree(out, sums, np.zeros_like(slack), (routing, given is None))


@pytest.mark.exchanges(8, split=1)
def test_batches_halves_and_gradients_of_sums_in_a_format():
    fmt, ranks = FORMATS["nv"], RANKS
    ids, group = cases.Case(SMALL, "uniform").ids(ranks), harness.group_of(ranks)
    rng = np.random.default_rng(4)
    y = cases.normal(rng, (ranks, 2, SMALL.rows(ranks), SMALL.hidden), "bfloat16")
    weights = 2.0 ** rng.integers(-2, 2, y.shape[:3]).astype(np.float32)

    def combine(ids, y, weights):
        routing = ma.route(ids, **SMALL.route_args(group))

        def of(y, weights=None, wire_dtype=fmt):
            return ma.combine(y, routing, weights=weights, wire_dtype=wire_dtype)

        def by_halves(y):
            return ma.combine_done(ma.combine_start(y, routing, wire_dtype=fmt))

        gradient, plain_gradient = (
            transposed(functools.partial(of, wire_dtype=used), y[0], y[1, : SMALL.tokens])
            for used in (fmt, None)
        )
        each = [*map(of, y)], [*map(of, y, weights)]
        return [
            (each, ([*jax.vmap(of)(y)], [*jax.vmap(of)(y, weights)])),
            (by_halves(y[0]), each[0][0]),
            (gradient, plain_gradient),
        ]

    for actual, expected in harness.on_each_rank(combine, group.mesh)(ids, y, weights):
        assert_same_trees(actual, expected)


# Straight-through derivatives ignore the rounding, so they equal those without a format bit for
# bit.


def transposed(fn, x, direction):
    return jax.vjp(fn, x)[1](direction)[0]


def twice(fn):
    return lambda x: lax.scan(lambda x, _: (fn(x), None), x, length=2)[0]


DERIVATIVES = {
    "vjp": transposed,
    "jvp": lambda fn, x, d: jax.jvp(fn, (x,), (d,))[1],
    "scan_remat": lambda fn, x, d: transposed(twice(jax.checkpoint(fn)), x, d),
}


def assert_same_trees(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected)):
        harness.assert_same_bytes(np.asarray(a), np.asarray(e), jax.tree_util.keystr(path))


@pytest.mark.exchanges(lambda check_vma: 6 if check_vma else 12)
@pytest.mark.parametrize("check_vma", (True, False))
def test_derivatives_are_those_of_a_dispatch_without_a_format(check_vma):
    group, names = harness.group_of(RANKS), ("vjp", "jvp") if check_vma else ("scan_remat",)
    ids = cases.Case(SMALL, "masked").ids(RANKS)
    shape = (2, RANKS, SMALL.tokens, SMALL.hidden)
    x, direction = cases.normal(np.random.default_rng(RANKS), shape, "bfloat16")

    def derivatives(ids, x, direction, fmt):
        def there_and_back(x):
            options = harness.exchanging(SMALL.route_args(group), token_format=fmt)
            recv = ma.dispatch(x, ids, **options, decode=fmt is not None)
            return ma.combine(recv.rows, recv)

        return {name: DERIVATIVES[name](there_and_back, x, direction) for name in names}

    programs = (functools.partial(derivatives, fmt=fmt) for fmt in (FORMATS["blockwise"], None))
    mapped = (small_layer.on_all_ranks(f, group.mesh, check_vma=check_vma) for f in programs)
    actual, expected = (small_layer.compiled(fn)(ids, x, direction) for fn in mapped)
    assert_same_trees(actual, expected)


@pytest.mark.several_devices("it needs a second mesh axis")
def test_hidden_may_be_sharded_by_an_explicit_axis():
    mesh = harness.mesh_over(jax.sharding.AxisType.Explicit, ep=2, tp=2)
    group = ma.Group(mesh, harness.AXIS, implementation=harness.IMPLEMENTATION)
    P = jax.sharding.PartitionSpec
    layout = dataclasses.replace(SMALL, hidden=256)

    def of_rank(ids, x):
        def rows(x, **options):
            return ma.dispatch(
                x,
                ids,
                **harness.exchanging(
                    layout.route_args(group), options, token_format=ma.BlockwiseFp8()
                ),
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


def dispatch(*x, **options):
    """Dispatch zeros of shape x from each of two ranks, and return the shapes of the results."""
    route_args = dict(group=harness.emulated_group(2), num_experts=2)
    ids = jnp.zeros((2, 1), jnp.int32)
    on_rank = lambda x: ma.dispatch(x, ids, **harness.exchanging(route_args, options)).rows
    return jax.eval_shape(jax.vmap(on_rank, axis_name=harness.AXIS), jnp.zeros((2, *x)))


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, cases.dtype(dtype))


FP8, MX = ma.BlockwiseFp8(), ma.MxFp8()
OF_MX = ma.Quantized(zeros(3, 64, dtype=E4M3.name), zeros(3, 2, dtype=E8M0.name))
NARROW = zeros(32, dtype=E4M3.name)
REFUSALS = dict(
    hidden=(lambda: FP8.encode(zeros(4, 100)), ValueError, r"x .*128.*float32\[4,100\]"),
    scalar=(lambda: MX.encode(zeros()), ValueError, r"x .*32.*float32\[\]"),
    integers=(lambda: MX.encode(np.ones(32, "int32")), TypeError, "x .*float32.*int32"),
    narrow=(lambda: MX.encode(NARROW), TypeError, "x .*float32.*float8_e4m3fn"),
    decode_dtype=(lambda: MX.decode(OF_MX, "int8"), TypeError, "dtype .*float32; got int8"),
    other_format=(
        lambda: MX.decode(ma.Quantized(zeros(1, 128, dtype=E4M3.name), zeros(1, 1)), "float32"),
        TypeError,
        "scales .*float8_e8m0fnu for MxFp8; got float32",
    ),
    not_quantized=(lambda: MX.decode(zeros(32), "float32"), TypeError, "quantized .*ndarray"),
    shapes=(
        lambda: MX.decode(OF_MX._replace(values=NARROW), "float32"),
        ValueError,
        r"values .*32.*\[3,2\]; got .*\[32\]",
    ),
    scale_type=(lambda: ma.NvFp4(global_scale="1"), TypeError, "global_scale .*'1'"),
    scale_zero=(lambda: ma.NvFp4(global_scale=0.0), ValueError, "global_scale .*got 0.0"),
    scale_nan=(lambda: ma.NvFp4(global_scale=np.nan), ValueError, "global_scale .*got nan"),
    scale_shape=(
        lambda: ma.NvFp4(global_scale=jnp.ones(3)).encode(zeros(4, 16)),
        ValueError,
        r"global_scale .*\[T\].*float32\[4,16\].*float32\[3\]",
    ),
    scale_dtype=(
        lambda: ma.NvFp4(global_scale=jnp.ones((), "bfloat16")),
        TypeError,
        "global_scale .*bfloat16",
    ),
    decode=(lambda: dispatch(2, 128, decode=True), ValueError, "decode.*format"),
    decode_type=(lambda: dispatch(2, 128, token_format=FP8, decode=1), TypeError, "decode .*1"),
    no_hidden=(lambda: dispatch(2, token_format=MX), ValueError, r"x .*hidden.*\[2\]"),
    dispatch_hidden=(lambda: dispatch(2, 64, token_format=FP8), ValueError, r"x .*128.*\[2,64\]"),
    wire_axes=(lambda: dispatch(2, wire_dtype=MX), ValueError, r"x .*wire_dtype.*\[2\]"),
    wire_scale=(
        lambda: dispatch(2, 64, wire_dtype=ma.NvFp4(global_scale=jnp.ones(2))),
        TypeError,
        "wire_dtype must have a float as global_scale",
    ),
)


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused(case):
    call, error, message = REFUSALS[case]
    with pytest.raises(error, match=message):
        call()
