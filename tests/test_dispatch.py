"""Test that a dispatch copies tokens to rows bit for bit, for all dtypes and pytrees."""

import functools

import cases
import harness
import jax
import numpy as np
import oracle
import pytest

import jax_moe_a2a as ma


@functools.cache
def dispatch_program(layout, ranks):
    group = harness.group_of(ranks)

    def dispatch(ids, x, topk_weights):
        return ma.dispatch(x, ids, topk_weights, **layout.route_args(group))

    exchanges = layout.exchanges_of_dispatch(ranks)
    return harness.on_each_rank(dispatch, harness.mesh_of(ranks), exchanges=exchanges)


@pytest.mark.parametrize("routing", ("uniform", "first_expert_only"))
@pytest.mark.exchanges(1)
def test_row_experts_are_the_local_experts_of_rows_with_a_token(routing):
    layout, ranks = cases.CUT, harness.SEVERAL
    case = cases.Case(layout, routing)
    (ids, x, weights, _), expected = harness.exchange_inputs(case, ranks)

    def row_experts(ids, x):
        recv = ma.dispatch(x, ids, **layout.route_args(harness.group_of(ranks)))
        return recv.row_experts

    found = harness.on_each_rank(row_experts, harness.mesh_of(ranks))(ids, x)
    harness.assert_same_bytes(harness.numpy_of(found), oracle.row_experts(expected))


# The kernels accept a payload with half of the dtypes, but not one with all dtypes.
@pytest.mark.parametrize(
    "dtypes",
    (cases.MOVED_DTYPES, cases.MOVED_DTYPES[::2], cases.MOVED_DTYPES[1::2], cases.WIDE_DTYPES),
    ids=("all", "even", "odd", "wide"),
)
def test_every_dtype_keeps_its_bits_in_one_payload(dtypes):
    layout, ranks = cases.PADDED, harness.SEVERAL
    rng = np.random.default_rng(0)
    ids = cases.Case(layout, "masked").ids(ranks)
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)
    trailing = [(), (1,), (7,), (33,), (2, 3)]
    x = {
        name: cases.any_bits(rng, (ranks, layout.tokens, *trailing[i % len(trailing)]), name)
        for i, name in enumerate(dtypes)
    }
    is_wide = dtypes == cases.WIDE_DTYPES
    topk_weights = cases.normal(rng, ids.shape, "float64") if is_wide else None
    with jax.enable_x64(is_wide):
        recv = dispatch_program(layout, ranks)(ids, x, topk_weights)
    harness.assert_recv_is(recv, x, topk_weights, expected)
    harness.assert_routing_is(recv.routing, expected)


def test_a_payload_keeps_its_tree():
    layout, ranks = cases.TIGHT, harness.SEVERAL
    rng = np.random.default_rng(0)
    ids = cases.Case(layout, "uniform").ids(ranks)
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks))
    leaf = cases.any_bits(rng, (ranks, layout.tokens, 5), "bfloat16")
    scale = cases.any_bits(rng, (ranks, layout.tokens), "float32")
    program = dispatch_program(layout, ranks)
    for x in (leaf, {"a": {"b": leaf}, "c": (scale, None, [leaf])}):
        rows = program(ids, x, None).rows
        assert jax.tree.structure(rows) == jax.tree.structure(x)
        for sent, received in zip(jax.tree.leaves(x), jax.tree.leaves(rows)):
            harness.assert_same_bytes(received, oracle.dispatch(sent, expected))


def test_a_replicated_payload_is_accepted_with_varying_ids():
    layout, ranks = cases.TIGHT, harness.SEVERAL
    (ids, x, _, _), expected = harness.exchange_inputs(cases.Case(layout, "uniform"), ranks)
    x = x["rows"][0]
    group = harness.group_of(ranks)

    def dispatch(ids, x):
        recv = ma.dispatch(
            x,
            ids,
            group=group,
            num_experts=layout.num_experts(ranks),
            exchange=ma.Exchange(capacity=layout.capacity),
        )
        return recv.rows

    program = harness.jit(harness.over_ranks(dispatch, group.mesh, in_axes=(0, None)), exchanges=1)
    sent = np.broadcast_to(x, (ranks, *x.shape))
    harness.assert_same_bytes(np.asarray(program(ids, x)), oracle.dispatch(sent, expected))
