"""Compare combine's sums with the oracle's: exactly, or within the slack of `oracle.combine` if XLA
may fuse multiply-adds."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_moe_a2a as ma


@functools.cache
def combine_program(layout, ranks, weighted=False, wire_dtype=None, exchanges=2):
    """Return a program (ids, y[, row weights]) -> sums. It has an exchange for the route, and one
    for each dtype."""
    group = harness.group_of(ranks)

    def combine(ids, y, *weights):
        routing = ma.route(ids, **layout.route_args(group))
        return ma.combine(
            y, routing, weights=weights[0] if weighted else None, wire_dtype=wire_dtype
        )

    return harness.on_each_rank(combine, harness.mesh_of(ranks), exchanges=exchanges)


def routed(layout, routing, ranks, seed=0):
    ids = cases.Case(layout, routing).ids(ranks, seed)
    return ids, oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)


@pytest.mark.parametrize("wire_dtype", (None, "bfloat16", "float32"))
def test_every_summed_dtype_rounds_as_stated(wire_dtype):
    layout, ranks = cases.PLAIN, harness.SEVERAL
    rng = np.random.default_rng(0)
    y = {n: cases.normal(rng, (ranks, layout.rows(ranks), 33), n) for n in cases.SUMMED_DTYPES}
    # No kernel rounds float32 or float16 to a bfloat16 wire dtype, so XLA then computes all sums.
    exchanges = 1 if wire_dtype == "bfloat16" else 1 + len(y)
    program = combine_program(layout, ranks, wire_dtype=wire_dtype, exchanges=exchanges)
    for routing in ("skewed", "repeated", "first_expert_only"):
        ids, expected = routed(layout, routing, ranks)
        for name, out in program(ids, y).items():
            wire = cases.dtype(wire_dtype or name)
            harness.assert_sums_agree(out, *oracle.combine(y[name], expected, None, wire), name)


@pytest.mark.parametrize("wire_dtype", (None, "float32"))
@pytest.mark.parametrize("dtype", cases.SUMMED_DTYPES)
def test_every_weighted_dtype_rounds_as_stated(dtype, wire_dtype):
    layout, ranks = cases.PLAIN, harness.FEW
    rng = np.random.default_rng(0)
    y = cases.normal(rng, (ranks, layout.rows(ranks), 33), dtype)
    weights = cases.normal(rng, (ranks, layout.rows(ranks)), "float32")
    program = combine_program(layout, ranks, weighted=True, wire_dtype=wire_dtype)
    wire = cases.dtype(wire_dtype or dtype)
    for routing in ("skewed", "repeated", "first_expert_only"):
        ids, expected = routed(layout, routing, ranks)
        out = program(ids, y, weights)
        harness.assert_sums_agree(out, *oracle.combine(y, expected, weights, wire), routing)


def test_the_sum_of_negative_zeros_is_a_positive_zero():
    """The test has one rank, because partial sums of other ranks would add 0.0."""
    layout, ranks = cases.PLAIN, 1
    ids, expected = routed(layout, "uniform", ranks)
    y = np.full((ranks, expected.capacity, 33), -0.0, np.float32)
    out = combine_program(layout, ranks)(ids, y)
    np.testing.assert_array_equal(cases.bits(out), 0)


@pytest.mark.parametrize("weighted", (False, True), ids=("sum", "weighted"))
def test_float64_is_summed_in_float64(weighted):
    layout, ranks = cases.PLAIN, harness.SEVERAL
    rng = np.random.default_rng(0)
    ids, expected = routed(layout, "skewed", ranks)
    y = cases.normal(rng, (ranks, expected.capacity, 3), "float64")
    weights = cases.normal(rng, (ranks, expected.capacity), "float64") if weighted else None
    program = combine_program(layout, ranks, weighted, exchanges=1)  # XLA computes the sums
    with jax.enable_x64(True):
        out = program(ids, y, *([weights] if weighted else []))
    harness.assert_sums_agree(out, *oracle.combine(y, expected, weights))


def cancelling_rows(dtype):
    """Return four numbers whose sum depends on the order of additions."""
    big = 2.0 / oracle.epsilon(dtype)
    return np.array([big, 1.0, -big, 1.0], cases.dtype(dtype))


def test_the_sum_over_k_runs_in_order_of_k():
    """In float32, big + 1 - big + 1 is 1 if added from left to right, otherwise 0 or 2."""
    layout = cases.Layout("order_of_k", tokens=1, top_k=4, local_experts=4)
    ranks = harness.SEVERAL
    for permutation in np.array([[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]]):
        ids = np.broadcast_to(permutation.astype(np.int32), (ranks, 1, 4)).copy()
        expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks))
        y = np.zeros((ranks, expected.capacity, 1), np.float32)
        for *_, k, rank, row in oracle.choices(expected):
            y[rank, row] = cancelling_rows("float32")[k]
        out = combine_program(layout, ranks)(ids, y)
        np.testing.assert_array_equal(out, np.ones((ranks, 1, 1), np.float32))
        np.testing.assert_array_equal(oracle.combine(y, expected)[0], out)


@pytest.mark.parametrize("wire_dtype", (None, "float32"))
def test_the_sum_over_ranks_runs_in_order_of_ranks(wire_dtype):
    """A token has one row on each rank (at most 32)."""
    ranks = harness.SEVERAL
    top_k = min(ranks, 32)
    layout = cases.Layout("order_of_ranks", tokens=4, top_k=top_k, local_experts=1)
    orders = np.argsort(np.random.default_rng(0).random((ranks, 4, top_k)))
    ids = orders.astype(np.int32)
    expected = oracle.route(ids, ranks, layout.rows(ranks))
    y = np.zeros((ranks, expected.capacity, 1), np.float32)
    values = np.resize(cancelling_rows("float32"), top_k)
    y[:top_k] = values[:, None, None]
    out = combine_program(layout, ranks, wire_dtype=wire_dtype)(ids, y)
    in_order = np.float32(0)
    for value in values:
        in_order += value
    np.testing.assert_array_equal(out, np.full((ranks, 4, 1), in_order))


def test_every_partial_sum_is_rounded_to_the_wire_dtype():
    """Partial sums of the bfloat16 rows 1 and 2^-9, also on the source rank, round to 1."""
    ranks = harness.SEVERAL
    top_k = min(2 + ranks, 32)
    layout = cases.Layout("rounding", tokens=ranks, top_k=top_k, local_experts=2)
    ids = np.full((ranks, ranks, layout.top_k), -1, np.int32)
    for token in range(ranks):
        ids[:, token, :2] = 2 * token, 2 * token + 1
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks))
    y = np.zeros((ranks, expected.capacity, 1), cases.dtype("bfloat16"))
    for *_, k, rank, row in oracle.choices(expected):
        y[rank, row] = (1.0, 2.0**-9)[k]
    out = combine_program(layout, ranks)(ids, y)
    np.testing.assert_array_equal(out.astype(np.float32), np.ones((ranks, ranks, 1), np.float32))

    # Then the next rank's third row, -1, is added. The sum is 0 if the first partial sum was
    # rounded, and 2^-9 otherwise.
    if ranks == 1:
        return
    for token in range(ranks):
        ids[:, token, 2] = 2 * ((token + 1) % ranks)
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks))
    y = np.zeros_like(y)
    for *_, k, rank, row in oracle.choices(expected):
        y[rank, row] = (1.0, 2.0**-9, -1.0)[k]
    rounded = combine_program(layout, ranks)(ids, y)
    np.testing.assert_array_equal(rounded.astype(np.float32), np.zeros((ranks, ranks, 1)))
    exact = combine_program(layout, ranks, wire_dtype="float32")(ids, y)
    np.testing.assert_array_equal(exact.astype(np.float32), np.full((ranks, ranks, 1), 2.0**-9))


def test_nan_of_a_real_row_reaches_its_own_token_only():
    layout, ranks = cases.PLAIN, harness.SEVERAL
    ids, expected = routed(layout, "uniform", ranks)
    y = cases.normal(np.random.default_rng(0), (ranks, expected.capacity, 7), "float32")
    source, token, _, rank, row = list(oracle.choices(expected))[len(ids[0]) // 2]
    y[rank, row] = np.nan
    out = combine_program(layout, ranks)(ids, y)
    assert np.isnan(out[source, token]).all()
    others = np.delete(out.reshape(-1, 7), source * layout.tokens + token, axis=0)
    assert not np.isnan(others).any()


def test_weights_come_from_recv_an_array_or_nowhere():
    layout, ranks = cases.CUT, harness.SEVERAL
    group = harness.group_of(ranks)
    (ids, x, topk_weights, y), expected = harness.exchange_inputs(
        cases.Case(layout, "masked"), ranks
    )
    own = cases.normal(np.random.default_rng(5), (ranks, layout.capacity), "float32")
    own[expected.row_token < 0] = np.nan

    def combine(ids, x, topk_weights, y, own):
        route_args = layout.route_args(group)
        weighted = ma.dispatch(x, ids, topk_weights, **route_args)
        plain = ma.dispatch(x, ids, **route_args)
        return {
            "default": ma.combine(y, weighted),
            "recv": ma.combine(y, weighted, weights="recv"),
            "none": ma.combine(y, weighted, weights=None),
            "array": ma.combine(y, weighted, weights=own),
            "array_routing": ma.combine(y, weighted.routing, weights=own),
            "recv_has_none": ma.combine(y, plain),
            "routing": ma.combine(y, plain.routing),
        }

    # XLA would merge equal exchanges, so the two dispatches and four combines differ.
    program = harness.on_each_rank(combine, harness.mesh_of(ranks), exchanges=2 + 4)
    sums = program(ids, x, topk_weights, y, own)
    sent = oracle.dispatch_choices(topk_weights, expected)
    for names, weights in (
        (("default", "recv"), sent),
        (("array", "array_routing"), own),
        (("none", "recv_has_none", "routing"), None),
    ):
        for name in names:
            harness.assert_sums_agree(sums[name], *oracle.combine(y, expected, weights), name)


def test_a_tree_of_rows_is_summed_leaf_by_leaf_in_one_combine():
    layout, ranks = cases.CUT, harness.SEVERAL
    ids, expected = routed(layout, "repeated", ranks)
    rng = np.random.default_rng(0)
    y = {
        name: cases.normal(rng, (ranks, expected.capacity, *trailing), name)
        for name, trailing in (("bfloat16", (5,)), ("float16", (2, 2)), ("float32", ()))
    }
    program = combine_program(layout, ranks, exchanges=1 + len(y))
    for name, out in program(ids, y).items():
        harness.assert_sums_agree(out, *oracle.combine(y[name], expected), name)

    def combine(y, ids):
        routing = ma.route(
            ids,
            group=harness.emulated_group(ranks),
            num_experts=3 * ranks,
            exchange=ma.Exchange(capacity=19),
        )
        return ma.combine(y, routing, weights=None)

    jaxpr = jax.make_jaxpr(jax.vmap(combine, axis_name=harness.AXIS))(y, ids)
    assert harness.count_primitives(jaxpr) == {"route": 1, "combine": 1}


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("weighted", (False, True))
def test_tokens_without_choices_have_sums_and_gradients_of_zeros(weighted):
    ranks, tokens, hidden = harness.FEW, 3, 5
    group = harness.group_of(ranks)

    def on_rank(x):
        ids = jnp.zeros((tokens, 0), jnp.int32)
        recv = ma.dispatch(
            x, ids, group=group, num_experts=2 * ranks, exchange=ma.Exchange(capacity=8)
        )

        def sums(y):
            weights = jnp.ones(y.shape[:1]) if weighted else None
            return ma.combine(y, recv, weights=weights)

        out, vjp = jax.vjp(sums, recv.rows + 1)
        return out, vjp(jnp.ones_like(out))[0]

    x = np.ones((ranks, tokens, hidden), np.float32)
    out, gradient = harness.on_each_rank(on_rank, group.mesh)(x)
    assert out.shape == x.shape and not out.any()
    assert gradient.shape == (ranks, 8, hidden) and not gradient.any()
