"""Dispatches and combines that quantize: the protocol's rules hold for them as for others."""

import cases
import checked
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hooks import Mutation, Phase, hooked

import jax_moe_a2a as ma

FORMATS = {"blockwise": ma.BlockwiseFp8(), "mx": ma.MxFp8()}
# Rows of 32 KB, which take long to encode; and many tokens, of which several share a flag.
LONG = checked.fitting(
    checked.Shape(tokens=1024, hidden=8192, top_k=1, dtype="float32", format=ma.MxFp8())
)
SHARED_FLAGS = checked.fitting(
    checked.Shape(tokens=5000, hidden=128, top_k=2, format=ma.BlockwiseFp8())
)
# The same for partial sums.
LONG_SUMS = checked.fitting(
    checked.Shape(tokens=1024, hidden=8192, top_k=2, dtype="float32", wire=ma.MxFp8())
)
SHARED_SUMS = checked.fitting(
    checked.Shape(tokens=5000, hidden=128, top_k=2, wire=ma.BlockwiseFp8())
)
LATE = dict(phase=Phase.SEND, rank=0, delay=200e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_thousands_of_exchanges_with_a_format_show_no_error(name):
    """Every step has another routing, with combines and dispatches of other shapes between."""
    shape = checked.Shape(tokens=200, hidden=384, format=FORMATS[name], wire=FORMATS[name])
    plain = checked.Shape(tokens=64)
    group = checked.new_group(timeout=10.0, cuda_graphs=None)

    def order(step):
        whole = checked.whole(shape, group, step) + checked.whole(plain, group, step)
        # Other tokens: with many ranks both make the same calls, which XLA would merge.
        step += 1
        return whole + checked.at_once(shape, group, step) + checked.at_once(plain, group, step)

    each = [
        checked.exchanges_of(operations, of, group)
        for of in (shape, plain)
        for operations in (checked.whole.operations, checked.at_once.operations)
    ]
    each = checked.Exchanges(whole=sum(of.whole for of in each))
    run = checked.on_all_ranks(checked.steps_of(order, 1000), group, each.times(1000))
    state = checked.repeat(run, 2)
    checked.assert_right(state, group)
    assert (jnp.asarray(state[0]) == 2000).all()


@pytest.mark.parametrize("order", (checked.dispatch_only, checked.two_dispatches_first))
def test_any_order_of_dispatches_with_a_format_is_right(order):
    for shape in (checked.Shape(tokens=100, format=FORMATS["mx"]), SHARED_FLAGS):
        checked.assert_right(checked.repeat(checked.program(shape, order=order), 20))


# The most tokens of one launch, with and without a format. A rank of four plans its received rows
# in less time than writing these rows takes.
LONG_AT_ONCE = tuple(
    checked.fitting(checked.Shape(tokens=256, hidden=32768, top_k=1, dtype="float32", format=fmt))
    for fmt in (FORMATS["mx"], FORMATS["blockwise"], None)
)
at_once = pytest.mark.parametrize("shape", LONG_AT_ONCE, ids=("mx", "blockwise", "none"))


@at_once
def test_rows_of_a_routed_dispatch_have_arrived_when_their_flag_has(shape):
    run = checked.program(shape, order=checked.routed_dispatch_only)
    for phase in (Phase.SEND, Phase.RECEIVE_CHUNK):
        checked.assert_right(run(checked.begin()))  # it opens the workspace
        with hooked(checked.GROUP, **{**LATE, "phase": phase}):
            checked.assert_right(checked.repeat(run, 20))


@checked.enough_tokens_to_be_late
@at_once
def test_a_flag_before_what_is_routed_and_sent_at_once_is_noticed(shape):
    run = checked.program(shape, order=checked.routed_dispatch_only)
    checked.assert_right(run(checked.begin()))
    with hooked(checked.GROUP, mutation=Mutation.FLAG_BEFORE_ROWS, **LATE):
        broken = checked.outcome(lambda: checked.repeat(run, 20))
    assert broken.counts is not None and broken.counts.wrong.any(), broken


def of_few_ranks(shape):
    """Return a mark that skips a test of partial sums which XLA encodes."""
    is_portable = not checked.kernels_sum_in_a_format(shape.top_k)
    return pytest.mark.skipif(is_portable, reason="XLA encodes the partial sums of so many ranks")


encoded = pytest.mark.parametrize(
    ("order", "shape"),
    (
        (checked.dispatch_given, LONG),
        (checked.dispatch_given, SHARED_FLAGS),
        pytest.param(checked.combine_given, LONG_SUMS, marks=of_few_ranks(LONG_SUMS)),
        pytest.param(checked.combine_given, SHARED_SUMS, marks=of_few_ranks(SHARED_SUMS)),
    ),
    ids=("rows_long", "rows_shared_flags", "sums_long", "sums_shared_flags"),
)


@encoded
def test_encoded_rows_have_arrived_when_their_flag_has(order, shape):
    routing = checked.routing_program(shape)()
    run = checked.program_with_routing(order, shape)
    for phase in (Phase.SEND, Phase.RECEIVE_CHUNK):
        checked.assert_right(run(checked.begin(), routing))  # it opens the workspace
        with hooked(checked.GROUP, **{**LATE, "phase": phase}):
            checked.assert_right(checked.repeat(lambda state: run(state, routing), 20))


@checked.enough_tokens_to_be_late
@encoded
def test_a_flag_before_what_is_encoded_is_noticed(order, shape):
    routing = checked.routing_program(shape)()
    run = checked.program_with_routing(order, shape)
    checked.assert_right(run(checked.begin(), routing))
    with hooked(checked.GROUP, mutation=Mutation.FLAG_BEFORE_ROWS, **LATE):
        broken = checked.outcome(lambda: checked.repeat(lambda state: run(state, routing), 20))
    assert broken.counts is not None and broken.counts.wrong.any(), broken


# Rows of more than a warp takes at a time, of groups that fill no warp, and of values that end
# between two vectors; too few rows for all choices; more tokens than flags.
SUMS = {
    "blockwise": (ma.BlockwiseFp8(), 7168, 300, None),
    "blockwise_short": (ma.BlockwiseFp8(), 128, 5000, None),
    "mx": (ma.MxFp8(), 1120, 300, 500),
    "nv": (ma.NvFp4(global_scale=0.0037187), 528, 300, 500),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    (
        *((name, "bfloat16") for name in SUMS),
        ("blockwise_short", "float32"),
        ("mx", "float16"),
        ("nv", "float32"),
    ),
)
def test_sums_in_a_format_equal_those_of_the_portable_path(name, dtype):
    """Every bit is equal, except the sign of zeros and the payload of a NaN. Weights are powers of
    two, so that no product is rounded."""
    fmt, hidden, tokens, capacity = SUMS[name]
    ranks = checked.RANKS
    if checked.ONE_GPU:
        tokens = checked.fitting(checked.Shape(tokens, hidden, dtype=dtype), gigabytes=0.25).tokens
    layout = cases.Layout(name, tokens, top_k=4, local_experts=3, capacity=capacity, hidden=hidden)
    rows = layout.rows(ranks)
    rng = np.random.default_rng(hidden)
    y = rng.standard_normal((ranks, rows, hidden), np.float32)
    largest = np.log2(float(ml_dtypes.finfo(cases.dtype(dtype)).max)) - 4
    y *= 2.0 ** rng.uniform(max(-100, -largest), largest, (ranks, rows, 1)).astype(np.float32)
    y[:, 1::50] = 0
    y[:, 2::50, 5], y[:, 3::50, -1], y[:, 4::50, 17] = np.inf, np.nan, -np.inf
    y = jnp.asarray(y, dtype)
    weights = jnp.asarray(2.0 ** rng.integers(-2, 2, (ranks, rows)), jnp.float32)

    listed = checked.kernels_sum_in_a_format(layout.top_k, ranks)

    def program(group, exchanges):
        def combine(ids, y, weights):
            route_args = dict(num_experts=layout.num_experts(ranks), capacity=layout.capacity)
            routing = ma.route(ids, group=group, **route_args)
            y = jnp.where(routing.row_rank[:, None] >= 0, y, jnp.nan)
            sums = [ma.combine(y, routing, weights=w, wire_dtype=fmt) for w in (None, weights)]
            return sums

        return checked.on_all_ranks(combine, group, exchanges)

    group = checked.new_group(timeout=30.0, cuda_graphs=None)
    portable = checked.new_group(implementation="portable")
    programs = [
        program(group, checked.Exchanges(whole=3 if listed else 1)),
        program(portable, checked.NONE),
    ]
    for routing in ("uniform", "skewed", "masked", "own_rank", "repeated"):
        ids = jnp.asarray(cases.Case(layout, routing).ids(ranks))
        outs = [
            [np.asarray(each, np.float32) for each in harness.numpy_of(run(ids, y, weights))]
            for run in programs
        ]
        for actual, expected in zip(*outs):
            np.testing.assert_array_equal(actual, expected, err_msg=routing)
            assert np.isfinite(expected).any(), routing
    checked.assert_counted(group)


@pytest.mark.parametrize("decode", (False, True), ids=("quantized", "decoded"))
def test_rows_with_scales_of_tokens_equal_those_of_the_portable_path(decode):
    """Every byte of rows, and of the scales that travel with them, is equal, also if a scale is
    invalid or outside its range."""
    ranks = checked.RANKS
    layout = cases.Layout("scaled", 300, top_k=4, local_experts=3, capacity=900, hidden=528)
    rng = np.random.default_rng(0)
    scales = (10.0 ** rng.uniform(-6, 3, (ranks, layout.tokens))).astype(np.float32)
    x = rng.standard_normal((ranks, layout.tokens, layout.hidden), np.float32)
    x *= (2688 * scales * 10.0 ** rng.uniform(-4, 1, scales.shape))[..., None].astype(np.float32)
    x[:, 1::50] = 0
    x[:, 2::50, 5], x[:, 3::50, -1] = np.inf, np.nan
    special = np.float32([0, -0.0, -1, np.inf, np.nan, 1e-40, 2.0**-120, 3e38])
    scales[:, 4::37] = np.resize(special, scales[:, 4::37].shape)
    x, scales = jnp.asarray(x, jnp.bfloat16), jnp.asarray(scales)

    def program(group, exchanges):
        def dispatch(ids, x, scales):
            route_args = dict(num_experts=layout.num_experts(ranks), capacity=layout.capacity)
            routing = ma.route(ids, group=group, **route_args)
            fmt = ma.NvFp4(global_scale=scales)
            recv = ma.dispatch(x, routing, format=fmt, decode=decode)
            return recv.rows, recv.global_scales

        return checked.on_all_ranks(dispatch, group, exchanges)

    group = checked.new_group(timeout=30.0, cuda_graphs=None)
    programs = [
        program(group, checked.Exchanges(whole=2)),
        program(checked.new_group(implementation="portable"), checked.NONE),
    ]
    for routing in ("uniform", "skewed", "masked", "own_rank", "repeated"):
        ids = jnp.asarray(cases.Case(layout, routing).ids(ranks))
        outs = [jax.tree.leaves(harness.numpy_of(run(ids, x, scales))) for run in programs]
        for actual, expected in zip(*outs, strict=True):
            harness.assert_same_bytes(actual, expected, routing)
    checked.assert_counted(group)
