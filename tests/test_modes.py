"""Rows of shared experts and of replicated tokens equal those of the numpy oracle.

Both modes are ordinary routings of changed ids. The oracle computes these ids with loops.
"""

import dataclasses
import functools
import itertools

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
MODES = tuple((s, r) for s, r in itertools.product((True, False), repeat=2) if s or r)
IDS_OF_MODES = ["shared_and_replicated", "shared", "replicated"]
LAYOUTS = (
    cases.PADDED,
    dataclasses.replace(cases.CUT, name="cut", capacity=29),
    cases.Layout("fewer_rows_than_shared", tokens=5, top_k=2, local_experts=2, capacity=1),
    cases.Layout("one_token", tokens=1, top_k=3, local_experts=2, hidden=33),
    cases.Layout("no_tokens", tokens=0, top_k=2, local_experts=2, alignment=4),
    cases.Layout("top_31", tokens=3, top_k=31, local_experts=5, hidden=1),
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
# Every layout is exchanged with a shared expert. Replicated tokens are exchanged in layouts that
# pad, that drop, or that have fewer rows than tokens. On GPUs, they are exchanged in all layouts.
CASES = [
    pytest.param(layout, *modes, id=f"{layout.name}-{name}")
    for layout in LAYOUTS
    for modes, name in zip(MODES, IDS_OF_MODES)
    if harness.ON_GPU or layout in LAYOUTS[:3] or name == "shared"
]


def capacity_of(layout, ranks, shared, replicated):
    """Return the given capacity, or the worst case."""
    if layout.capacity is not None:
        return layout.capacity
    sizes = layout.tokens, layout.top_k, layout.local_experts, layout.alignment
    return oracle.mode_capacity(ranks, *sizes, shared, replicated)


def routings_of(ids, layout, shared, replicated):
    """Return the oracle's routings: one routing of all ranks, or a separate routing for each
    rank."""
    capacity = capacity_of(layout, len(ids), shared, replicated)
    local_experts, alignment = layout.local_experts, layout.alignment
    return oracle.route_mode(ids, local_experts, capacity, alignment, shared, replicated)


def by_domain(replicated, array):
    """Divide an array of all ranks into the arrays of each routing of `routings_of`."""
    return [array[r : r + 1] for r in range(len(array))] if replicated else [array]


def joined(trees):
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *trees)


def route_args(group, layout, shared, replicated):
    given = small_layer.route_args(group, layout)
    return harness.exchanging(given, shared_expert=shared, replicated=replicated)


@functools.cache
def exchange_program(layout, shared, replicated, check_vma=True):
    group = harness.group_of(RANKS)

    def exchange(ids, x, topk_weights, shared_weights, y):
        recv = ma.dispatch(
            x,
            ids,
            topk_weights,
            shared_weights=shared_weights if shared else None,
            **route_args(group, layout, shared, replicated),
        )
        return recv, ma.combine(y, recv, weights=None), ma.combine(y, recv)

    exchanges = layout.exchanges_of_dispatch(RANKS) + 2
    if replicated:  # batches of single-rank domains, routed and dispatched separately
        exchanges = 4
    exchanges *= layout.has_rows(RANKS)
    return harness.on_each_rank(exchange, group.mesh, check_vma, exchanges=exchanges)


def inputs(layout, routing, shared, replicated, seed=0):
    rng = np.random.default_rng([seed, layout.tokens])
    ids = cases.Case(layout, routing).ids(RANKS, seed)
    x = cases.normal(rng, (RANKS, layout.tokens, layout.hidden), "bfloat16")
    topk_weights = cases.normal(rng, ids.shape, "float32")
    shared_weights = cases.normal(rng, ids.shape[:2], "float32")
    if replicated:
        ids, x, topk_weights, shared_weights = (
            np.broadcast_to(a[:1], a.shape).copy() for a in (ids, x, topk_weights, shared_weights)
        )
    routings = routings_of(ids, layout, shared, replicated)
    y = cases.normal(rng, (RANKS, routings[0].capacity, layout.hidden), "bfloat16")
    y[np.concatenate([r.row_token for r in routings]) < 0] = np.nan
    return (ids, x, topk_weights, shared_weights, y), routings


def check_exchange(layout, routing, shared, replicated, **options):
    args, routings = inputs(layout, routing, shared, replicated)
    ids, x, topk_weights, shared_weights, y = args
    recv, total, weighted = exchange_program(layout, shared, replicated, **options)(*args)

    num_invalid = (ids < -1) | (ids >= layout.num_experts(RANKS))
    expected = joined([{f: getattr(r, f) for f in oracle.FIELDS} for r in routings])
    expected["num_invalid"] = num_invalid.sum(axis=(1, 2)).astype(np.int32)
    for field, value in expected.items():
        harness.assert_same_bytes(np.asarray(getattr(recv.routing, field)), value, field)
    offsets = np.concatenate([r.row_offsets for r in routings])
    experts = np.arange(layout.num_experts(RANKS), dtype=np.int32).reshape(RANKS, -1)
    if shared:
        experts = np.concatenate([np.full((RANKS, 1), -1, np.int32), experts], axis=1)
        topk_weights = np.concatenate([topk_weights, shared_weights[..., None]], axis=2)
    harness.assert_same_bytes(recv.row_offsets, offsets, "row_offsets")
    harness.assert_same_bytes(recv.expert_ids, experts, "expert_ids")

    def each(fn, *arrays):
        parts = zip(routings, *(by_domain(replicated, a) for a in arrays), strict=True)
        return joined([fn(*a, r) for r, *a in parts])

    harness.assert_same_bytes(recv.rows, each(oracle.dispatch, x), "rows")
    weights = each(oracle.dispatch_choices, topk_weights)
    harness.assert_same_bytes(recv.weights, weights, "weights")
    harness.assert_sums_agree(total, *each(lambda y, r: oracle.combine(y, r), y), "sum")
    summed = each(lambda y, w, r: oracle.combine(y, r, w), y, weights)
    harness.assert_sums_agree(weighted, *summed, "weighted")


@pytest.mark.parametrize("layout, shared, replicated", CASES)
def test_rows_and_sums_are_those_of_the_oracle(layout, shared, replicated):
    for routing in NAMES if layout.tokens else NAMES[:1]:
        check_exchange(layout, routing, shared, replicated)


@pytest.mark.several_devices("it looks for collectives between devices")
@pytest.mark.parametrize("shared", (True, False))
def test_replicated_tokens_are_not_exchanged(shared):
    """Inside shard_map, the gradient of replicated tokens has no collective, and the gradient of
    other tokens has one."""
    group = harness.group_of(RANKS)
    args, _ = inputs(cases.PADDED, "masked", shared, True)

    def lowered(replicated):
        modes = route_args(group, cases.PADDED, shared, replicated)

        def of_one_rank(ids, *floats):
            def loss(x, weights, shared_weights):
                given = shared_weights if shared else None
                recv = ma.dispatch(x, ids, weights, shared_weights=given, **modes)
                return small_layer.loss(ma.combine(jnp.tanh(recv.rows), recv))

            return jax.grad(loss, (0, 1, 2))(*floats)

        fn = small_layer.on_all_ranks(of_one_rank, check_vma=False)
        return jax.jit(fn).lower(*args[:4]).as_text()

    for collective in ("all_to_all", "all_gather", "all_reduce", "collective_permute"):
        assert collective not in lowered(True)
    assert harness.ON_GPU or "all_gather" in lowered(False)


@pytest.mark.exchanges(4)
def test_a_routing_keeps_its_mode():
    """A routing can be used again, even by a combine alone. Arguments for a different mode raise an
    error."""
    layout, group = cases.PLAIN, harness.group_of(RANKS)
    args, (routing,) = inputs(layout, "masked", True, False)
    ids, x, topk_weights, _, _ = args

    def exchange(ids, x, topk_weights):
        given = ma.route(ids, **route_args(group, layout, True, False))
        assert (given.top_k, given.num_experts) == (layout.top_k, layout.num_experts(RANKS))
        recv = ma.dispatch(x, given, topk_weights, exchange=ma.Exchange(shared_expert=True))
        again = ma.dispatch(2 * x, recv.routing, num_experts=layout.num_experts(RANKS))
        for modes in (dict(shared_expert=False), dict(replicated=True)):
            with pytest.raises(ValueError, match=next(iter(modes))):
                ma.dispatch(x, given, topk_weights, **harness.exchanging(modes))
        return recv.weights, again.rows, ma.combine(again.rows, given)

    weights, rows, sums = harness.on_each_rank(exchange, group.mesh)(ids, x, topk_weights)
    ones = np.ones((*ids.shape[:2], 1), np.float32)
    with_ones = np.concatenate([topk_weights, ones], axis=2)
    harness.assert_same_bytes(weights, oracle.dispatch_choices(with_ones, routing))
    harness.assert_same_bytes(rows, oracle.dispatch(2 * x, routing))
    harness.assert_sums_agree(sums, *oracle.combine(rows, routing))


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("alignment", (1, 8))
def test_the_default_capacity_is_enough_for_the_worst_routing_and_exact_without_alignment(
    alignment,
):
    layout = cases.Layout("worst", tokens=5, top_k=3, local_experts=2, alignment=alignment)
    ids = np.full((RANKS, layout.tokens, layout.top_k), 0, np.int32)
    ids[..., 1:] = 1  # all at rank 0
    for shared, replicated in (*MODES, (False, False)):
        capacity = harness.worst_case(
            layout.tokens,
            layout.top_k,
            RANKS,
            layout.num_experts(RANKS),
            alignment=alignment,
            shared_expert=shared,
            replicated=replicated,
        )
        assert capacity == capacity_of(layout, RANKS, shared, replicated)
        routing = routings_of(ids, layout, shared, replicated)[0]
        assert routing.num_dropped[0] == 0
        if alignment == 1:
            assert capacity == routing.group_sizes[0].sum()
