"""Compare exchanges of replicated tokens with oracle.py, which has a routing for each rank."""

import dataclasses
import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import small_layer

import jax_moe_a2a as ma
from jax_moe_a2a._src import api

RANKS = harness.SEVERAL
LAYOUTS = (
    cases.PADDED,
    dataclasses.replace(cases.CUT, name="cut", capacity=29),
    cases.Layout("one_row", tokens=5, top_k=2, local_experts=2, capacity=1),
    cases.Layout("one_token", tokens=1, top_k=3, local_experts=2, hidden=33),
    cases.Layout("no_tokens", tokens=0, top_k=2, local_experts=2, alignment=4),
    cases.Layout("top_32", tokens=3, top_k=32, local_experts=5, hidden=1),
    cases.Layout(
        "many_tokens",
        tokens=api.FUSED_MAX_TOKENS + 1,
        top_k=6,
        local_experts=4,
        alignment=16,
        hidden=5,
    ),
)
NAMES = ("uniform", "masked", "repeated", "invalid", "last_rank_only")


def capacity_of(layout, replicated=True):
    """Return the layout's capacity, or the worst-case capacity if the layout has none."""
    if layout.capacity is not None:
        return layout.capacity
    sizes = layout.tokens, layout.top_k, layout.local_experts, layout.alignment
    return oracle.mode_capacity(RANKS, *sizes, replicated)


def routings_of(ids, layout, replicated=True):
    """Return a list of one routing or, for replicated tokens, of one routing for each rank."""
    sizes = layout.local_experts, capacity_of(layout, replicated), layout.alignment
    return oracle.route_mode(ids, *sizes, replicated)


def joined(trees):
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)


def route_args(group, layout, replicated=True):
    return harness.exchanging(small_layer.route_args(group, layout), replicated=replicated)


@functools.cache
def exchange_program(layout):
    group = harness.group_of(RANKS)

    def exchange(ids, x, topk_weights, y):
        recv = ma.dispatch(x, ids, topk_weights, **route_args(group, layout))
        return recv, ma.combine(y, recv, weights=None), ma.combine(y, recv)

    exchanges = 4 * layout.has_rows(RANKS)  # each rank exchanges only with itself
    return harness.on_each_rank(exchange, group.mesh, exchanges=exchanges)


def inputs(layout, routing):
    rng = np.random.default_rng([0, layout.tokens])
    ids = cases.Case(layout, routing).ids(RANKS, 0)
    x = cases.normal(rng, (RANKS, layout.tokens, layout.hidden), "bfloat16")
    topk_weights = cases.normal(rng, ids.shape, "float32")
    of_tokens = [np.broadcast_to(a[:1], a.shape).copy() for a in (ids, x, topk_weights)]
    routings = routings_of(of_tokens[0], layout)
    y = cases.normal(rng, (RANKS, routings[0].capacity, layout.hidden), "bfloat16")
    y[np.concatenate([r.row_token for r in routings]) < 0] = np.nan
    return (*of_tokens, y), routings


def check_exchange(layout, routing):
    args, routings = inputs(layout, routing)
    ids, x, topk_weights, y = args
    recv, total, weighted = exchange_program(layout)(*args)

    num_invalid = (ids < -1) | (ids >= layout.num_experts(RANKS))
    expected = joined([{f: getattr(r, f) for f in oracle.FIELDS} for r in routings])
    expected["num_invalid"] = num_invalid.sum(axis=(1, 2)).astype(np.int32)
    for field, value in expected.items():
        harness.assert_same_bytes(np.asarray(getattr(recv.routing, field)), value, field)
    offsets = np.concatenate([r.row_offsets for r in routings])
    experts = np.arange(layout.num_experts(RANKS), dtype=np.int32).reshape(RANKS, -1)
    harness.assert_same_bytes(recv.row_offsets, offsets, "row_offsets")
    harness.assert_same_bytes(recv.expert_ids, experts, "expert_ids")

    def each(fn, *arrays):
        of_ranks = ([array[r : r + 1] for array in arrays] for r in range(RANKS))
        return joined([fn(*a, r) for r, a in zip(routings, of_ranks, strict=True)])

    harness.assert_same_bytes(recv.rows, each(oracle.dispatch, x), "rows")
    weights = each(oracle.dispatch_choices, topk_weights)
    harness.assert_same_bytes(recv.weights, weights, "weights")
    harness.assert_sums_agree(total, *each(lambda y, r: oracle.combine(y, r), y), "sum")
    summed = each(lambda y, w, r: oracle.combine(y, r, w), y, weights)
    harness.assert_sums_agree(weighted, *summed, "weighted")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_rows_and_sums_are_those_of_the_oracle(layout):
    for routing in NAMES if layout.tokens else NAMES[:1]:
        check_exchange(layout, routing)


@pytest.mark.several_devices("it looks for collectives between devices")
def test_replicated_tokens_are_not_exchanged():
    group = harness.group_of(RANKS)
    args, _ = inputs(cases.PADDED, "masked")

    def lowered(replicated):
        modes = route_args(group, cases.PADDED, replicated)

        def of_one_rank(ids, *floats):
            def loss(x, weights):
                recv = ma.dispatch(x, ids, weights, **modes)
                return small_layer.loss(ma.combine(jnp.tanh(recv.rows), recv))

            return jax.grad(loss, (0, 1))(*floats)

        fn = small_layer.on_all_ranks(of_one_rank, check_vma=False)
        return jax.jit(fn).lower(*args[:3]).as_text()

    for collective in ("all_to_all", "all_gather", "all_reduce", "collective_permute"):
        assert collective not in lowered(True)
    assert harness.ON_GPU or "all_gather" in lowered(False)


@pytest.mark.exchanges(4)
def test_a_routing_keeps_its_mode():
    layout, group = cases.PLAIN, harness.group_of(RANKS)
    (ids, x, topk_weights, _), routings = inputs(layout, "masked")

    def exchange(ids, x, topk_weights):
        given = ma.route(ids, **route_args(group, layout))
        assert (given.top_k, given.num_experts) == (layout.top_k, layout.num_experts(RANKS))
        recv = ma.dispatch(x, given, topk_weights, exchange=ma.Exchange(replicated=True))
        again = ma.dispatch(2 * x, recv.routing, num_experts=layout.num_experts(RANKS))
        with pytest.raises(ValueError, match="replicated must be omitted or equal"):
            ma.dispatch(x, given, topk_weights, exchange=ma.Exchange(replicated=False))
        return again.rows, ma.combine(again.rows, given)

    rows, sums = harness.on_each_rank(exchange, group.mesh)(ids, x, topk_weights)
    moved = [oracle.dispatch(2 * x[r : r + 1], own) for r, own in enumerate(routings)]
    harness.assert_same_bytes(rows, np.concatenate(moved))
    summed = [oracle.combine(rows[r : r + 1], own) for r, own in enumerate(routings)]
    harness.assert_sums_agree(sums, *joined(summed))


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("alignment", (1, 8))
def test_the_default_capacity_is_enough_for_the_worst_routing_and_exact_without_alignment(
    alignment,
):
    layout = cases.Layout("worst", tokens=5, top_k=3, local_experts=2, alignment=alignment)
    ids = np.full((RANKS, layout.tokens, layout.top_k), 0, np.int32)
    ids[..., 1:] = 1  # experts 0 and 1 are both on rank 0
    for replicated in (True, False):
        capacity = harness.worst_case(
            layout.tokens,
            layout.top_k,
            RANKS,
            layout.num_experts(RANKS),
            alignment=alignment,
            replicated=replicated,
        )
        assert capacity == capacity_of(layout, replicated)
        routing = routings_of(ids, layout, replicated)[0]
        assert routing.num_dropped[0] == 0
        if alignment == 1:
            assert capacity == routing.group_sizes[0].sum()
