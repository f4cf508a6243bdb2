"""Test that dispatch and combine are each other's transpose. Results are exact: inputs are small
integers, or the oracle rounds in the same order."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import small_layer
from small_layer import LAYOUT, OF_FLOATS, route_args

import jax_moe_a2a as ma

RANKS = harness.SEVERAL


@functools.cache
def maps():
    """Return a dispatch of tokens and weights, and a combine of rows, on all ranks' arrays."""
    group = harness.group_of(RANKS)
    ids = small_layer.arguments(RANKS).ids

    def dispatch_of_one(x, topk_weights, ids):
        recv = ma.dispatch(x, ma.route(ids, **route_args(group)), topk_weights)
        return recv.rows, recv.weights

    def combine_of_one(y, ids):
        return ma.combine(y, ma.route(ids, **route_args(group)), weights=None)

    def dispatch(x, topk_weights):
        return small_layer.on_all_ranks(dispatch_of_one)(x, topk_weights, ids)

    def combine(y):
        return small_layer.on_all_ranks(combine_of_one)(y, ids)

    return dispatch, combine


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-8, 9, (RANKS, *shape)).astype(np.float32)


TOKENS = (LAYOUT.tokens, LAYOUT.hidden)
CHOICES = (LAYOUT.tokens, LAYOUT.top_k)
ROWS = (LAYOUT.capacity, LAYOUT.hidden)


@pytest.mark.exchanges(2)
def test_a_transpose_is_one_primitive_and_its_own_transpose_is_the_map():
    dispatch, combine = maps()
    x, topk_weights, y = integers(*TOKENS), integers(*CHOICES), integers(*ROWS)
    rows = y, integers(LAYOUT.capacity)

    def dispatch_t(rows):
        return jax.linear_transpose(dispatch, x, topk_weights)(rows)

    def dispatch_tt(tokens):
        return jax.linear_transpose(dispatch_t, rows)(tokens)[0]

    def combine_t(x):
        return jax.linear_transpose(combine, y)(x)[0]

    def combine_tt(y):
        return jax.linear_transpose(combine_t, x)(y)[0]

    assert small_layer.counts(dispatch_t, rows) == {"route": 1, "combine": 1}
    assert small_layer.counts(dispatch_tt, (x, topk_weights)) == {"route": 1, "dispatch": 1}
    assert small_layer.counts(combine_t, x) == {"route": 1, "dispatch": 1}
    assert small_layer.counts(combine_tt, y) == {"route": 1, "combine": 1}
    twice, once = small_layer.compiled(lambda *args: (dispatch_tt(args), dispatch(*args)))(
        x, topk_weights
    )
    small_layer.assert_same(twice, once)


@pytest.mark.exchanges(4)
def test_a_weighted_combine_transposes_in_its_rows_and_in_its_weights():
    group = harness.group_of(RANKS)
    ids = small_layer.arguments(RANKS).ids
    y, weights, g = integers(*ROWS), integers(LAYOUT.capacity, seed=1), integers(*TOKENS, seed=2)

    @small_layer.on_all_ranks
    def of_all_ranks(y, weights, g, ids):
        routing = ma.route(ids, **route_args(group))
        in_rows = functools.partial(ma.combine, recv=routing, weights=weights)

        def in_weights(weights):
            return ma.combine(y, routing, weights=weights)

        return (
            in_rows(y),
            jax.linear_transpose(in_rows, y)(g)[0],
            jax.linear_transpose(in_weights, weights)(g)[0],
        )

    out, ct_y, ct_weights = small_layer.compiled(of_all_ranks)(y, weights, g, ids)
    assert np.vdot(out, g) == np.vdot(y, ct_y) == np.vdot(weights, ct_weights) != 0


@pytest.mark.exchanges(0)
def test_only_leaves_with_a_cotangent_are_moved_back():
    group = harness.group_of(RANKS)
    ids = small_layer.arguments(RANKS).ids
    x = {"a": integers(*TOKENS), "b": integers(LAYOUT.tokens, 2), "w": integers(*CHOICES)}

    def gradient(uses):
        def of_one_rank(x, ids):
            recv = ma.dispatch({n: x[n] for n in "ab"}, ids, x["w"], **route_args(group))
            return sum(jnp.sum(jnp.sin(used)) for used in uses(recv))

        def total(x):
            return small_layer.on_all_ranks(of_one_rank)(x, ids).sum()

        jaxpr = jax.make_jaxpr(jax.grad(total))(x)
        return [small_layer.payload(eqn) for eqn in small_layer.equations(jaxpr, "combine")]

    capacity = LAYOUT.capacity
    assert gradient(lambda recv: [recv.rows["a"]]) == [([ROWS], [])]
    assert gradient(lambda recv: [recv.rows["b"]]) == [([(capacity, 2)], [])]
    assert gradient(lambda recv: [recv.weights]) == [([], [(capacity,)])]
    assert gradient(lambda recv: [recv.rows["a"], recv.weights]) == [([ROWS], [(capacity,)])]


def transpose_of_dispatch(layout, ranks, wire_dtype):
    """Return a function from (ids, x, topk_weights, cotangents of rows and weights) to the
    cotangents of x and weights."""
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

    # A route and one combine for each of three dtypes; XLA removes the unused dispatch.
    return harness.on_each_rank(transposed, harness.mesh_of(ranks), exchanges=4)


@pytest.mark.parametrize(
    "layout, wire_dtype",
    [(cases.PADDED, None), (cases.PADDED, "float32"), (cases.CUT, None)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_gradient_of_dispatch_sums_as_combine_does(layout, wire_dtype):
    """NaN cotangents of rows without a token do not affect the result."""
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


WHOLE = {
    name: 1 for name in ("route", "dispatch", "weighted_combine", "weighted_dispatch", "combine")
}


@pytest.mark.exchanges(0)
def test_the_gradient_of_a_layer_moves_rows_once_each_way():
    floats, ids, _ = small_layer.arguments(RANKS)
    loss = small_layer.loss_of(small_layer.layer_of_all_ranks(), ids)
    jaxpr = jax.make_jaxpr(jax.grad(loss, OF_FLOATS))(*floats)
    assert harness.count_primitives(jaxpr) == WHOLE
    # Backward, one weighted dispatch computes the gradients of rows and of weights.
    (dispatch,) = small_layer.equations(jaxpr, "dispatch")
    assert small_layer.payload(dispatch) == ([TOKENS], [CHOICES])
    (back,) = small_layer.equations(jaxpr, "weighted_dispatch")
    assert small_layer.shapes_of_one_rank(back)[0] == TOKENS
    (combine,) = small_layer.equations(jaxpr, "combine")
    both = [ROWS], [ROWS[:1]]
    assert small_layer.payload(back) == small_layer.payload(combine) == both
    (weighted,) = small_layer.equations(jaxpr, "weighted_combine")
    assert weighted.params["num_leaves"] == 1


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("shared", (True, False), ids=("shared_routing", "own_routings"))
def test_each_of_several_layers_moves_rows_once_each_way_and_shared_ids_are_routed_once(shared):
    group = harness.group_of(RANKS)
    floats, ids, _ = small_layer.arguments(RANKS)

    def layers(x, topk_weights, w, ids):
        routing = ma.route(ids, **route_args(group)) if shared else ids
        for _ in range(3):
            recv = ma.dispatch(x, routing, topk_weights, **route_args(group))
            x = x + ma.combine(small_layer.experts(recv.rows, recv.row_offsets, w), recv)
        return x

    gradient = jax.grad(small_layer.loss_of(small_layer.on_all_ranks(layers), ids), OF_FLOATS)
    expected = {name: 3 * count for name, count in WHOLE.items()}
    if shared:
        expected["route"] = 1
    assert small_layer.counts(gradient, *floats) == expected
