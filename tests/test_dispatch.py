"""Dispatch: rows are the tokens' bytes, where the routing puts them, whatever the dtype."""

import functools

import cases
import harness
import jax
import numpy as np
import oracle
import pytest
from jax.sharding import Mesh

import jax_moe_a2a as ma


@functools.cache
def dispatch_program(layout, ranks):
    """Return a program (ids, x, topk_weights or None) -> Recv."""
    group = harness.group_of(ranks)

    def dispatch(ids, x, topk_weights):
        return ma.dispatch(x, ids, topk_weights, **layout.route_args(group))

    exchanges = layout.exchanges_of_dispatch(ranks)
    return harness.on_each_rank(dispatch, harness.mesh_of(ranks), exchanges=exchanges)


def assert_recv_is(recv, x, topk_weights, expected):
    """Compare every field of a Recv [R, ...] with the oracle, its routing too."""
    harness.assert_recv_is(recv, x, topk_weights, expected)
    harness.assert_routing_is(recv.routing, expected)


@pytest.mark.parametrize("case", cases.catalogue(), ids=lambda case: case.name)
def test_dispatch_moves_every_row(case):
    result = harness.run_case(case, harness.SEVERAL)
    assert_recv_is(result.recv, result.x, result.topk_weights, result.expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.gpu_catalogue(), ids=lambda case: case.name)
def test_dispatch_moves_every_row_of_many_tokens(case):
    result = harness.run_case(case, harness.SEVERAL)
    assert_recv_is(result.recv, result.x, result.topk_weights, result.expected)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("routing", ("uniform", "repeated", "invalid", "first_expert_only"))
def test_dispatch_emulated_by_vmap_moves_every_row_on_three_ranks(routing):
    result = harness.run_case(cases.Case(cases.CUT, routing), 3, emulate=True)
    assert_recv_is(result.recv, result.x, result.topk_weights, result.expected)


def test_dispatch_follows_a_routing_that_changes_at_every_call(ranks):
    for result in harness.changing_routings(cases.CUT, ranks):
        assert_recv_is(result.recv, result.x, result.topk_weights, result.expected)


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
    right = np.full_like(expected.row_rank, -1)
    for rank, offsets in enumerate(expected.row_offsets):
        for expert in range(len(offsets) - 1):
            right[rank, offsets[expert] : offsets[expert + 1]] = expert
    right[expected.row_rank < 0] = -1
    harness.assert_same_bytes(harness.numpy_of(found), right)


def test_two_runs_return_the_same_bytes():
    (ids, x, weights, _), _ = harness.exchange_inputs(
        cases.Case(cases.CUT, "skewed"), harness.SEVERAL
    )
    program = dispatch_program(cases.CUT, harness.SEVERAL)
    first, second = program(ids, x, weights), program(ids, x, weights)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second)):
        harness.assert_same_bytes(a, b)


# Half of the dtypes are few enough arrays for the kernels; with all of them, only the route is an
# exchange.
@pytest.mark.parametrize(
    "dtypes",
    (cases.MOVED_DTYPES, cases.MOVED_DTYPES[::2], cases.MOVED_DTYPES[1::2]),
    ids=("all", "even", "odd"),
)
def test_every_dtype_keeps_its_bits_in_one_payload(dtypes):
    """Many dtypes as leaves of one payload: any bits; odd sizes, no and several trailing axes."""
    layout, ranks = cases.PADDED, harness.SEVERAL
    rng = np.random.default_rng(0)
    ids = cases.Case(layout, "masked").ids(ranks)
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)
    trailing = [(), (1,), (7,), (33,), (2, 3)]
    x = {
        name: cases.any_bits(rng, (ranks, layout.tokens, *trailing[i % len(trailing)]), name)
        for i, name in enumerate(dtypes)
    }
    recv = dispatch_program(layout, ranks)(ids, x, None)
    assert_recv_is(recv, x, None, expected)


def test_64_bit_dtypes_keep_their_bits():
    layout, ranks = cases.TIGHT, harness.SEVERAL
    rng = np.random.default_rng(0)
    ids = cases.Case(layout, "uniform").ids(ranks)
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks))
    x = {name: cases.any_bits(rng, (ranks, layout.tokens, 3), name) for name in cases.WIDE_DTYPES}
    weights = cases.normal(rng, ids.shape, "float64")
    with jax.enable_x64(True):
        recv = dispatch_program(layout, ranks)(ids, x, weights)
    assert_recv_is(recv, x, weights, expected)


@pytest.mark.parametrize("name", ("uint8", "uint16", "float32"))
def test_any_hidden_size_moves(name):
    layout, ranks = cases.TIGHT, harness.SEVERAL
    rng = np.random.default_rng(0)
    ids = cases.Case(layout, "skewed").ids(ranks)
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks))
    x = {
        f"{name}[{hidden}]": cases.any_bits(rng, (ranks, layout.tokens, hidden), name)
        for hidden in (1, 2, 3, 33, 127, 1000)
    }
    assert_recv_is(dispatch_program(layout, ranks)(ids, x, None), x, None, expected)


@pytest.mark.parametrize("top_k", (5, 8, 17, 31))
def test_any_top_k_moves(top_k):
    layout = cases.Layout("top_k", tokens=4, top_k=top_k, local_experts=9, capacity=60, alignment=4)
    ranks = harness.SEVERAL
    for routing in ("uniform", "masked", "one_expert_per_token"):
        (ids, x, topk_weights, _), expected = harness.exchange_inputs(
            cases.Case(layout, routing), ranks
        )
        recv = dispatch_program(layout, ranks)(ids, x, topk_weights)
        assert_recv_is(recv, x, topk_weights, expected)


def test_a_payload_keeps_its_tree():
    """A bare array, tuples, lists, dicts, None inside: each leaf becomes rows of its own."""
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


@pytest.mark.exchanges(0)
def test_a_whole_payload_travels_in_one_dispatch():
    """The program has one routed dispatch for any number of leaves and weights."""
    layout = cases.PLAIN
    group = harness.emulated_group(2)
    x = {"values": np.zeros((12, 7), np.int8), "scales": np.zeros((12,), np.float32)}

    def dispatch(ids, weights, x):
        return ma.dispatch(x, ids, weights, group=group, num_experts=layout.num_experts(2))

    jaxpr = jax.make_jaxpr(jax.vmap(dispatch, axis_name=harness.AXIS))(
        np.zeros((2, 12, 4), np.int32),
        np.zeros((2, 12, 4), np.float32),
        jax.tree.map(lambda leaf: np.stack([leaf, leaf]), x),
    )
    assert harness.count_primitives(jaxpr) == {"routed_dispatch": 1}


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
def test_weights_of_a_narrow_dtype_arrive_as_float32(dtype):
    layout, ranks = cases.TIGHT, harness.SEVERAL
    (ids, x, _, _), expected = harness.exchange_inputs(cases.Case(layout, "uniform"), ranks)
    weights = cases.normal(np.random.default_rng(1), ids.shape, dtype)
    recv = dispatch_program(layout, ranks)(ids, x, weights)
    assert_recv_is(recv, x, weights.astype(np.float32), expected)


def test_weights_of_choices_without_a_row_do_not_travel():
    """NaN weights of masked, invalid and overflowing choices reach no result."""
    for routing in ("masked", "invalid", "first_expert_only"):
        result = harness.run_case(cases.Case(cases.CUT, routing), harness.SEVERAL)
        assert np.isnan(result.topk_weights).any(), routing
        assert not np.isnan(result.recv.weights).any(), routing


@pytest.mark.several_devices("it changes the order of devices in a mesh")
def test_rows_do_not_depend_on_the_order_of_the_devices():
    """Ranks count along the mesh axis, not by device id."""
    layout, ranks = cases.CUT, harness.SEVERAL
    (ids, x, weights, _), expected = harness.exchange_inputs(cases.Case(layout, "skewed"), ranks)
    mesh = Mesh(np.roll(harness.mesh_of(ranks).devices, 1)[::-1], (harness.AXIS,))
    group = ma.Group(mesh, harness.AXIS, implementation=harness.IMPLEMENTATION)

    def dispatch(ids, x, weights):
        return ma.dispatch(x, ids, weights, **layout.route_args(group))

    assert_recv_is(harness.on_each_rank(dispatch, mesh)(ids, x, weights), x, weights, expected)


@pytest.mark.several_devices("check_vma is an option of shard_map")
def test_check_vma_changes_no_byte():
    layout, ranks = cases.CUT, harness.SEVERAL
    (ids, x, weights, y), expected = harness.exchange_inputs(cases.Case(layout, "masked"), ranks)
    exchange = harness.exchange_fn(layout, harness.group_of(ranks))
    program = harness.on_each_rank(exchange, harness.mesh_of(ranks), check_vma=False)
    results = program(ids, x, weights, y)
    assert_recv_is(results["recv"], x, weights, expected)
    harness.assert_sums_agree(results["sum"], *oracle.combine(y, expected))


def test_a_replicated_payload_is_accepted_with_varying_ids():
    """Under check_vma operands may vary over different axes; here only the ids vary over ranks."""
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
            capacity=layout.capacity,
        )
        return recv.rows

    program = harness.jit(harness.over_ranks(dispatch, group.mesh, in_axes=(0, None)), exchanges=1)
    sent = np.broadcast_to(x, (ranks, *x.shape))
    harness.assert_same_bytes(np.asarray(program(ids, x)), oracle.dispatch(sent, expected))


def test_a_routing_may_come_with_its_own_numbers_again():
    """group, num_experts, capacity and alignment may come with a Routing if they equal its own."""
    layout, ranks = cases.CUT, harness.SEVERAL
    (ids, x, weights, _), expected = harness.exchange_inputs(cases.Case(layout, "uniform"), ranks)
    group = harness.group_of(ranks)
    route_args = layout.route_args(group)

    def dispatch(ids, x, weights):
        return ma.dispatch(x, ma.route(ids, **route_args), weights, **route_args)

    program = harness.on_each_rank(dispatch, harness.mesh_of(ranks), exchanges=2)
    assert_recv_is(program(ids, x, weights), x, weights, expected)


def test_strict_dtype_and_rank_promotion_is_enough():
    """The package relies on no implicit conversion of its users' arrays."""
    layout, ranks = cases.CUT, harness.SEVERAL
    (ids, x, weights, y), expected = harness.exchange_inputs(cases.Case(layout, "masked"), ranks)
    exchange = harness.exchange_fn(layout, harness.group_of(ranks))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        program = harness.on_each_rank(exchange, harness.mesh_of(ranks), exchanges=3)
        results = program(ids, x, weights, y)
    assert_recv_is(results["recv"], x, weights, expected)
