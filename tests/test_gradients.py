"""Gradients of dispatch and combine: exactly the sums and rows of the oracle."""

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_moe_a2a as ma


def transpose_of_dispatch(layout, ranks, wire_dtype):
    """Return a function (ids, x, topk_weights, cotangents of rows and of weights) -> cotangents of
    x and topk_weights."""
    group = harness.group_of(ranks)

    def transposed(ids, x, topk_weights, ct_rows, ct_weights):
        def dispatch(x, topk_weights):
            recv = ma.dispatch(
                x,
                ids,
                topk_weights,
                **harness.exchanging(layout.route_args(group), wire_dtype=wire_dtype),
            )
            return recv.rows, recv.weights

        return jax.vjp(dispatch, x, topk_weights)[1]((ct_rows, ct_weights))

    # A combine for each of the three dtypes; what is dispatched is not used.
    return harness.on_each_rank(transposed, harness.mesh_of(ranks), exchanges=4)


@pytest.mark.parametrize(
    "layout, wire_dtype",
    [(cases.PADDED, None), (cases.PADDED, "float32"), (cases.CUT, None)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_gradient_of_dispatch_sums_as_combine_does(layout, wire_dtype):
    """Exactly the oracle's sum; NaN cotangents of rows without a token reach nothing."""
    ranks = harness.SEVERAL
    program = transpose_of_dispatch(layout, ranks, wire_dtype)
    rng = np.random.default_rng(0)
    tokens, rows = (ranks, layout.tokens, 7), (ranks, layout.rows(ranks), 7)
    for routing in ("skewed", "masked", "repeated", "first_expert_only"):
        (ids, _, weights, _), expected = harness.exchange_inputs(cases.Case(layout, routing), ranks)
        x = {name: cases.normal(rng, tokens, name) for name in cases.SUMMED_DTYPES}
        ct_rows = {name: cases.normal(rng, rows, name) for name in cases.SUMMED_DTYPES}
        ct_weights = cases.normal(rng, (ranks, layout.rows(ranks)), "float32")
        for cotangent in (*ct_rows.values(), ct_weights):
            cotangent[expected.row_token < 0] = np.nan
        ct_x, ct_topk = program(ids, x, weights, ct_rows, ct_weights)
        for name, rows_of in ct_rows.items():
            wire = cases.dtype(wire_dtype or name)
            sums = oracle.combine(rows_of, expected, None, wire)
            harness.assert_sums_agree(ct_x[name], *sums, f"{routing}: {name}")
        back = oracle.combine_choices(ct_weights, expected)
        harness.assert_same_bytes(ct_topk, back, routing)


@pytest.mark.exchanges(8)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_the_gradient_of_a_weighted_combine_is_exact(dtype):
    """dy = w * G rounded once, dw = <y, G> in float32, zero where a row carries no token, whatever
    lies there.
    """
    layout, ranks = cases.CUT, harness.SEVERAL
    group = harness.group_of(ranks)

    def transposed(ids, y, weights, g):
        routing = ma.route(ids, **layout.route_args(group))
        return jax.vjp(lambda y, w: ma.combine(y, routing, weights=w), y, weights)[1](g)

    program = harness.on_each_rank(transposed, harness.mesh_of(ranks))
    rng = np.random.default_rng(0)
    for routing in ("skewed", "masked", "repeated", "first_expert_only"):
        ids = cases.Case(layout, routing).ids(ranks)
        expected = oracle.route(ids, layout.num_experts(ranks), layout.capacity, layout.alignment)
        y = cases.normal(rng, (ranks, layout.capacity, 33), dtype)
        weights = cases.normal(rng, (ranks, layout.capacity), "float32")
        y[expected.row_token < 0] = np.nan
        weights[expected.row_token < 0] = np.nan
        g = cases.normal(rng, (ranks, layout.tokens, 33), dtype)
        ct_y, ct_weights = program(ids, y, weights, g)
        expected_y, expected_weights = oracle.combine_transpose(g, y, expected, weights)
        # One product, one rounding: the same value everywhere (-0 may be 0).
        np.testing.assert_array_equal(
            ct_y.astype(np.float32), expected_y.astype(np.float32), err_msg=routing
        )
        assert ct_weights.dtype == np.float32
        # A sum of 33 products in float32, in any order.
        np.testing.assert_allclose(
            ct_weights, expected_weights, rtol=1e-5, atol=1e-4, err_msg=routing
        )


@pytest.mark.exchanges(6)
def test_the_gradient_of_a_combine_is_a_dispatch():
    """Without weights, each row gets the bits of its token's cotangent, and other rows are zero."""
    layout, ranks = cases.CUT, harness.SEVERAL
    group = harness.group_of(ranks)

    def transposed(ids, y, g):
        routing = ma.route(ids, **layout.route_args(group))
        return jax.vjp(lambda y: ma.combine(y, routing), y)[1](g)[0]

    program = harness.on_each_rank(transposed, harness.mesh_of(ranks))
    rng = np.random.default_rng(0)
    for routing in ("skewed", "masked", "repeated"):
        ids = cases.Case(layout, routing).ids(ranks)
        expected = oracle.route(ids, layout.num_experts(ranks), layout.capacity, layout.alignment)
        y = np.full((ranks, layout.capacity, 7), np.nan, np.float32)
        g = cases.normal(rng, (ranks, layout.tokens, 7), "float32")
        harness.assert_same_bytes(program(ids, y, g), oracle.dispatch(g, expected), routing)


def payload_gradient(x, ids, floats, ranks):
    """Return the gradient of a payload dict with respect to its leaves, through the sum of only its
    `floats` rows."""
    group = harness.group_of(ranks)

    def gradient(x, ids):
        def loss(x):
            recv = ma.dispatch(
                x, ids, group=group, num_experts=3 * ranks, exchange=ma.Exchange(capacity=20)
            )
            return sum(jnp.sum(recv.rows[name].astype(jnp.float32)) for name in floats)

        grads = jax.grad(loss, allow_int=True)(x)
        return {n: g for n, g in grads.items() if g.dtype != jax.dtypes.float0}

    return harness.on_each_rank(gradient, harness.mesh_of(ranks))(x, ids)


@pytest.mark.exchanges(2)
@pytest.mark.parametrize("dtype", ("float8_e4m3fn",))
def test_8_bit_floats_in_a_payload_have_zero_gradients(dtype):
    """Their sums would mean nothing, and JAX would make NaN of them: gradients belong to the
    formats.
    """
    ranks, layout = harness.SEVERAL, cases.TIGHT
    ids = cases.Case(layout, "repeated").ids(ranks)
    rng = np.random.default_rng(0)
    x = {
        "values": cases.normal(rng, (ranks, layout.tokens, 5), dtype),
        "scale": cases.normal(rng, (ranks, layout.tokens), "float32"),
    }
    grads = payload_gradient(x, ids, ("values", "scale"), ranks)
    assert (grads["values"].astype(np.float32) == 0).all()
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks))
    np.testing.assert_array_equal(grads["scale"], (expected.choice_row >= 0).sum(axis=-1))
