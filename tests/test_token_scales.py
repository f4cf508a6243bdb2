"""`NvFp4` with a global scale for each token, which travels with its row.

The oracle is `format_oracle.py`, which shares nothing with the package.
"""

import dataclasses
import functools
import itertools

import cases
import format_oracle
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_moe_a2a as ma
from jax_moe_a2a._src import api

pytestmark = pytest.mark.exchanges(0)  # of tests without an exchange, or that only trace programs

# Some choices are masked, some are dropped, and there is a tail.
LAYOUT = cases.Layout(
    "scaled", tokens=6, top_k=3, local_experts=2, capacity=14, alignment=4, hidden=64
)
# More tokens than one launch routes and dispatches.
MANY = dataclasses.replace(LAYOUT, tokens=api.FUSED_MAX_TOKENS + 1, capacity=None)
RANKS = harness.FEW
PARTS = (*ma.Quantized._fields, "global_scales")
SPECIAL = np.float32([np.nan, np.inf, -np.inf, -1.0, -0.0, 0.0, 1e-40, 2.0**-120, 3e38])


def scales_of_tokens(ranks, tokens, special=True):
    """Draw scales [R, T] of many sizes, some of them special."""
    rng = np.random.default_rng([ranks, tokens])
    scales = (10.0 ** rng.uniform(-6, 3, (ranks, tokens))).astype(np.float32)
    if special:
        for rank, scale in zip(itertools.cycle(range(ranks)), SPECIAL):
            scales[rank, rng.integers(tokens)] = scale
    return scales


def tokens_of(scales, shape, dtype):
    """Draw tokens [R, T, *shape] near the ranges of their scales, some with an infinity, of zeros,
    or far outside of the range."""
    rng = np.random.default_rng(scales.shape)
    x = rng.standard_normal((*scales.shape, *shape))
    sizes = np.where((scales > 1e-7) & (scales < 1e4), scales, 1) * 2688.0
    x *= (sizes * 10.0 ** rng.uniform(-4, 1, scales.shape)).reshape(
        *scales.shape, *[1] * len(shape)
    )
    x[0, 0] = 0
    x[-1, -1, ..., 5] = np.inf
    with np.errstate(over="ignore"):
        return x.astype(cases.dtype(dtype))


def route_args(group, layout):
    return dict(
        group=group,
        num_experts=layout.num_experts(group.size),
        capacity=layout.capacity,
        alignment=layout.alignment,
    )


def oracle_routing(ids, layout):
    ranks = len(ids)
    return oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)


def assert_rows_are(rows, global_scales, x, scales, expected, written=...):
    """Compare quantized rows [R, C, ...] and their global scales with those of the oracle."""
    parts = (*format_oracle.encode_tokens(x, scales), scales)
    assert isinstance(rows, ma.Quantized)
    for field, actual, part in zip(PARTS, (*rows, global_scales), parts, strict=True):
        of_oracle = oracle.dispatch(part, expected)
        harness.assert_same_bytes(np.asarray(actual)[written], of_oracle[written], field)


def assert_decoded_are(rows, x, scales, expected, written=...):
    """Compare decoded rows [R, C, ...] with those of the oracle."""
    decoded = format_oracle.decode_tokens(
        *format_oracle.encode_tokens(x, scales), scales, x.dtype.name
    )
    of_oracle = oracle.dispatch(decoded, expected)
    harness.assert_same_bytes(np.asarray(rows)[written], of_oracle[written], "decoded")


# Without an exchange


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("shape", ((64,), (2, 32)))
@pytest.mark.parametrize("how", ("eager", "jit"))
def test_encode_and_decode_use_the_scale_of_each_token(dtype, shape, how):
    scales = scales_of_tokens(1, 40)
    x = tokens_of(scales, shape, dtype)

    def there_and_back(x, scales):
        fmt = ma.NvFp4(global_scale=scales)
        quantized = fmt.encode(x)
        return quantized, fmt.decode(quantized, dtype)

    run = jax.jit(there_and_back) if how == "jit" else there_and_back
    quantized, decoded = run(jnp.asarray(x[0]), jnp.asarray(scales[0]))
    parts = format_oracle.encode_tokens(x[0], scales[0])
    for field, actual, part in zip(PARTS, quantized, parts):
        harness.assert_same_bytes(np.asarray(actual), part, field)
    expected = format_oracle.decode_tokens(*parts, scales[0], dtype)
    harness.assert_same_bytes(np.asarray(decoded), expected)
    is_invalid = ~(scales[0] >= 0) | np.isinf(scales[0]) | np.signbit(scales[0])
    assert is_invalid.sum() >= 4 and np.isnan(expected[is_invalid].astype("float32")).all()


def test_scales_of_tokens_are_those_of_a_tensor_for_each_token():
    scales = scales_of_tokens(1, 9)[0]
    x = tokens_of(scales[None], (3, 32), "float32")[0]
    together = ma.NvFp4(global_scale=jnp.asarray(scales)).encode(x)
    each = [ma.NvFp4(global_scale=jnp.asarray(s)).encode(t) for s, t in zip(scales, x)]
    for i, field in enumerate(("values", "scales")):
        expected = np.stack([np.asarray(one[i]) for one in each])
        harness.assert_same_bytes(np.asarray(together[i]), expected, field)


@pytest.mark.parametrize("tokens", (0, 1))
def test_no_token_and_one_token(tokens):
    x, scales = np.ones((tokens, 32), np.float32), np.full(tokens, 1 / 2688, np.float32)
    fmt = ma.NvFp4(global_scale=jnp.asarray(scales))
    quantized = fmt.encode(x)
    assert [a.shape for a in quantized] == [(tokens, 16), (tokens, 2)]
    np.testing.assert_allclose(np.asarray(fmt.decode(quantized, "float32")), x, rtol=0.1)


def test_tiles_keep_the_scales_of_tokens():
    scales = scales_of_tokens(1, 130)[0]
    x = tokens_of(scales[None], (96,), "bfloat16")[0]
    fmt = ma.NvFp4(global_scale=jnp.asarray(scales), scale_layout="tiles")
    plain = ma.NvFp4(global_scale=jnp.asarray(scales))
    tiles, rows = fmt.encode(x), plain.encode(x)
    assert tiles.scales.shape == (2, 2, 32, 16)
    for field, actual, expected in zip(PARTS, fmt.row_major(tiles), rows):
        harness.assert_same_bytes(np.asarray(actual), np.asarray(expected), field)
    harness.assert_same_bytes(
        np.asarray(fmt.decode(tiles, "bfloat16")), np.asarray(plain.decode(rows, "bfloat16"))
    )


# Dispatch


def by_ids(x, ids, weights, group, layout, **options):
    return ma.dispatch(x, ids, weights, **route_args(group, layout), **options)


def by_routing(x, ids, weights, group, layout, **options):
    return ma.dispatch(x, ma.route(ids, **route_args(group, layout)), weights, **options)


def by_halves(x, ids, weights, group, layout, **options):
    return ma.dispatch_done(
        ma.dispatch_start(x, ids, weights, **route_args(group, layout), **options)
    )


FORMS = dict(ids=by_ids, routing=by_routing, halves=by_halves)


def exchanges_of(form, layout):
    """Return (whole, split) exchanges of two dispatches by a form."""
    if form == "halves":
        return 2, 2
    return 2 + 2 * (form == "routing" or layout is MANY), 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("layout", "routing", "dtype"),
    (
        (LAYOUT, "masked", "bfloat16"),
        (LAYOUT, "skewed", "float32"),
        (LAYOUT, "all_masked", "float16"),
        (MANY, "uniform", "bfloat16"),
    ),
    ids=("masked", "dropped", "all_masked", "many"),
)
def test_rows_and_their_scales_are_those_of_the_oracle(form, layout, routing, dtype):
    """Two leaves have the same scales. Rows without a token are zero bytes."""
    ids = cases.Case(layout, routing).ids(RANKS)
    scales = scales_of_tokens(RANKS, layout.tokens)
    x, other = (tokens_of(scales, shape, dtype) for shape in ((64,), (2, 32)))
    weights = np.random.default_rng(0).random(ids.shape, np.float32)
    group, expected = harness.group_of(RANKS), oracle_routing(ids, layout)

    def rows(x, other, ids, weights, scales):
        fmt = ma.NvFp4(global_scale=scales)
        run = functools.partial(FORMS[form], (x, [other]), ids, weights, group, layout, format=fmt)
        recvs = run(), run(decode=True)
        return [(recv.rows, recv.weights, recv.global_scales) for recv in recvs]

    program = harness.on_each_rank(rows, harness.mesh_of(RANKS), compiler_options=harness.QUICKLY)
    with harness.expect_exchanges(*exchanges_of(form, layout)):
        (quantized, decoded) = program(x, other, ids, weights, scales)
    (first, (second,)), of_rows, global_scales = quantized
    harness.assert_same_bytes(of_rows, oracle.dispatch_choices(weights, expected))
    assert_rows_are(first, global_scales, x, scales, expected)
    assert_rows_are(second, global_scales, other, scales, expected)
    (first, (second,)), of_rows, none = decoded
    harness.assert_same_bytes(of_rows, oracle.dispatch_choices(weights, expected))
    assert_decoded_are(first, x, scales, expected)
    assert_decoded_are(second, other, scales, expected)
    assert none is None


@pytest.mark.parametrize("form", FORMS)
def test_an_unspecified_tail_is_only_a_tail(form):
    """The portable path fills the scales of the tail with NaN."""
    ids = cases.Case(LAYOUT, "masked").ids(RANKS)
    scales = scales_of_tokens(RANKS, LAYOUT.tokens, special=False)
    x = tokens_of(scales, (64,), "bfloat16")
    group, expected = harness.group_of(RANKS), oracle_routing(ids, LAYOUT)

    def rows(x, ids, scales):
        options = dict(format=ma.NvFp4(global_scale=scales), tail="unspecified")
        run = functools.partial(FORMS[form], x, ids, None, group, LAYOUT, **options)
        recv = run()
        return recv.rows, recv.global_scales, run(decode=True).rows

    program = harness.on_each_rank(rows, harness.mesh_of(RANKS), compiler_options=harness.QUICKLY)
    with harness.expect_exchanges(*exchanges_of(form, LAYOUT)):
        quantized, global_scales, decoded = program(x, ids, scales)
    written = ~expected.is_tail
    assert expected.is_tail.any()
    assert_rows_are(quantized, global_scales, x, scales, expected, written)
    assert_decoded_are(decoded, x, scales, expected, written)
    if not harness.ON_GPU:
        assert np.isnan(global_scales[expected.is_tail]).all()


@pytest.mark.exchanges(2)
@pytest.mark.parametrize("tokens", (0, 1))
def test_dispatch_of_no_token_and_of_one(tokens):
    layout = dataclasses.replace(LAYOUT, tokens=tokens, capacity=8)
    ranks = harness.RANKS_ON_ONE_GPU or 2
    group = harness.vmapped_group(ranks)
    ids = np.zeros((ranks, tokens, 3), np.int32)
    scales = np.full((ranks, tokens), 0.5, np.float32)
    x = np.ones((ranks, tokens, 64), np.float32)

    def rows(x, ids, scales):
        options = dict(route_args(group, layout), format=ma.NvFp4(global_scale=scales))
        recv = ma.dispatch(x, ids, **options)
        return recv.rows, recv.global_scales, ma.dispatch(x, ids, decode=True, **options).rows

    *quantized, decoded = harness.jit(jax.vmap(rows, axis_name=harness.AXIS))(x, ids, scales)
    expected = oracle_routing(ids, layout)
    assert_rows_are(*quantized, x, scales, expected)
    assert_decoded_are(decoded, x, scales, expected)


@pytest.mark.exchanges(2)
@pytest.mark.parametrize("replicated", (False, True), ids=("own_tokens", "replicated"))
def test_shared_experts_and_replicated_tokens(replicated):
    """The shared expert is one more choice of a token."""
    scales = scales_of_tokens(RANKS, LAYOUT.tokens)
    ids = cases.Case(LAYOUT, "masked").ids(RANKS)
    if replicated:
        scales, ids = (np.broadcast_to(a[:1], a.shape) for a in (scales, ids))
    x = tokens_of(scales, (64,), "bfloat16")
    if replicated:
        x = np.broadcast_to(x[:1], x.shape)
    group = harness.group_of(RANKS)

    def rows(x, ids, scales):
        options = dict(
            route_args(group, dataclasses.replace(LAYOUT, capacity=None)),
            shared_expert=True,
            replicated=replicated,
            format=ma.NvFp4(global_scale=scales),
        )
        recv = ma.dispatch(x, ids, **options)
        rows = (*recv.rows, recv.global_scales)
        return rows, recv.src_info, ma.dispatch(x, ids, decode=True, **options).rows

    quantized, source, decoded = harness.on_each_rank(rows, group.mesh)(x, ids, scales)
    is_row = source.rank >= 0
    assert (source.k == LAYOUT.top_k).any()
    parts = (*format_oracle.encode_tokens(x, scales), scales)
    for field, actual, part in zip(PARTS, quantized, parts, strict=True):
        of_source = part[source.rank, source.token]
        harness.assert_same_bytes(actual[is_row], of_source[is_row], field)
        assert not actual[~is_row].view(np.uint8).any()
    expected = format_oracle.decode_tokens(*parts, x.dtype.name)[source.rank, source.token]
    harness.assert_same_bytes(decoded[is_row], expected[is_row])


@pytest.mark.several_devices("it needs two levels")
def test_two_levels_return_what_one_level_returns():
    ids = cases.Case(LAYOUT, "masked").ids(4)
    scales = scales_of_tokens(4, LAYOUT.tokens)
    x = tokens_of(scales, (64,), "bfloat16")
    weights = np.random.default_rng(0).random(ids.shape, np.float32)
    mesh = jax.make_mesh(
        (2, 2),
        ("host", "local"),
        (jax.sharding.AxisType.Auto,) * 2,
        devices=harness.devices(4),
    )
    group = ma.Group(mesh, ("host", "local"), two_level=True, implementation=harness.IMPLEMENTATION)
    expected = oracle_routing(ids, LAYOUT)

    def rows(x, ids, weights, scales):
        options = dict(route_args(group, LAYOUT), format=ma.NvFp4(global_scale=scales))
        recvs = [ma.dispatch(x, ids, weights, decode=d, **options) for d in (False, True)]
        return [(recv.rows, recv.global_scales, recv.weights) for recv in recvs]

    program = harness.on_each_rank(rows, mesh, compiler_options=harness.QUICKLY)
    (*quantized, of_rows), (decoded, *_) = program(x, ids, weights, scales)
    assert_rows_are(*quantized, x, scales, expected)
    assert_decoded_are(decoded, x, scales, expected)
    harness.assert_same_bytes(of_rows, oracle.dispatch_choices(weights, expected))
