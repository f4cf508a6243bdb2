"""Shared experts and replicated tokens: rows against the numpy oracle, layers against dense ones.

Both are ordinary routings of other ids. The oracle computes these ids with its own loops.
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
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src import api

RANKS = harness.SEVERAL
MODES = tuple((s, r) for s, r in itertools.product((True, False), repeat=2) if s or r)
IDS_OF_MODES = ["shared_and_replicated", "shared", "replicated"]
all_modes = pytest.mark.parametrize("shared, replicated", MODES, ids=IDS_OF_MODES)

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
# pad, that drop, and that have fewer rows than tokens; on GPUs, in all layouts.
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
    """Return the oracle's routings: one of all ranks, or one for each rank by itself."""
    capacity = capacity_of(layout, len(ids), shared, replicated)
    local_experts, alignment = layout.local_experts, layout.alignment
    return oracle.route_mode(ids, local_experts, capacity, alignment, shared, replicated)


def by_domain(replicated, array):
    """Divide an array of all ranks into what belongs to each of `routings_of`."""
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


def routed(ids, layout, **modes):
    """Return the routing of all ranks."""
    group = harness.group_of(RANKS)
    return harness.on_each_rank(
        lambda ids: ma.route(
            ids, **harness.exchanging(small_layer.route_args(group, layout), modes)
        ),
        group.mesh,
        exchanges=1,
    )(ids)


def test_shared_rows_come_first_in_the_order_of_tokens_and_the_others_follow_as_without_them():
    layout = cases.PADDED
    ids = cases.Case(layout, "masked").ids(RANKS)
    with_shared, plain = routed(ids, layout, shared_expert=True), routed(ids, layout)
    own = -(-layout.tokens // layout.alignment) * layout.alignment
    token = np.arange(own)
    token = np.where(token < layout.tokens, token, -1)
    for rank in range(RANKS):
        assert (with_shared.row_token[rank, :own] == token).all()
        assert (with_shared.row_rank[rank, : layout.tokens] == rank).all()
        assert (with_shared.row_k[rank, : layout.tokens] == layout.top_k).all()
        for field in ("row_token", "row_rank", "row_k"):
            rest, expected = (getattr(r, field)[rank] for r in (with_shared, plain))
            assert (rest[own:] == expected).all()
    assert (with_shared.group_sizes[:, 0] == own).all()
    assert (with_shared.group_sizes[:, 1:] == plain.group_sizes).all()


def test_a_shared_expert_sends_no_token_to_another_rank():
    ids = cases.Case(cases.PLAIN, "masked").ids(RANKS)
    with_shared, plain = (routed(ids, cases.PLAIN, shared_expert=s) for s in (True, False))
    elsewhere = ~np.eye(RANKS, dtype=bool)
    for rank in range(RANKS):
        others = elsewhere[rank]
        assert (with_shared.token_slot[rank][:, others] == plain.token_slot[rank][:, others]).all()


@pytest.mark.parametrize("tokens", (1, 5, 8, 9))
def test_every_replicated_token_meets_one_shared_expert(tokens):
    layout = cases.Layout("any", tokens=tokens, top_k=1, local_experts=1)
    ids = np.full((RANKS, tokens, 1), -1, np.int32)
    routing = routed(ids, layout, shared_expert=True, replicated=True)
    shares = [row[row >= 0].tolist() for row in routing.row_token]
    assert sum(shares, []) == list(range(tokens))
    assert max(map(len, shares)) == -(-tokens // RANKS)


@pytest.mark.exchanges(0)
@all_modes
@pytest.mark.parametrize("tokens", (4, api.FUSED_MAX_TOKENS + 1), ids=("few", "many"))
def test_the_primitives_are_those_of_an_ordinary_exchange(tokens, shared, replicated):
    layout = cases.Layout("any", tokens=tokens, top_k=2, local_experts=2)
    args, _ = inputs(layout, "uniform", shared, replicated)
    group = harness.group_of(RANKS)

    def there_and_back(ids, x, w):
        recv = ma.dispatch(x, ids, w, **route_args(group, layout, shared, replicated))
        return ma.combine(recv.rows, recv)

    # Single-rank domains that share a device are a batch, which is routed and dispatched
    # separately.
    at_once = tokens == 4 and not (replicated and harness.RANKS_ON_ONE_GPU)
    first = {"routed_dispatch": 1} if at_once else {"route": 1, "dispatch": 1}
    counted = small_layer.counts(small_layer.on_all_ranks(there_and_back), *args[:3])
    assert counted == {**first, "weighted_combine": 1}


@pytest.mark.several_devices("it looks for collectives between devices")
@pytest.mark.parametrize("shared", (True, False))
def test_replicated_tokens_are_not_exchanged(shared):
    """The gradient of replicated tokens inside shard_map has no collective; that of other tokens
    has."""
    floats, ids, _ = arguments(shared, True)

    def of_one_rank(x, w_topk, w_shared, w, ids):
        layer = layer_of(harness.group_of(RANKS), shared, True)
        args = (x, w_topk, w_shared, w)
        return jax.grad(lambda *args: small_layer.loss(layer(*args, ids)), (0, 1, 2, 3))(*args)

    args = spread(floats, ids)
    fn = small_layer.on_all_ranks(of_one_rank, check_vma=False)
    text = jax.jit(fn).lower(*args).as_text()
    for collective in ("all_to_all", "all_gather", "all_reduce", "collective_permute"):
        assert collective not in text
    exchanged = small_layer.on_all_ranks(layer_of(harness.group_of(RANKS), shared, False))
    assert harness.ON_GPU or "all_gather" in jax.jit(exchanged).lower(*args).as_text()


# Layers: x [T, H], topk_weights [T, K], shared_weights [T], w [L (+ 1), H], ids [T, K].

LAYOUT = cases.Layout(
    "small", tokens=6, top_k=3, local_experts=2, capacity=18, alignment=4, hidden=4
)


def layer_of(group, shared, replicated, layout=LAYOUT):
    """Return the layer as a function of one rank's arrays; its partial sum, if replicated."""

    def layer(x, topk_weights, shared_weights, w, ids):
        recv = ma.dispatch(
            x,
            ids,
            topk_weights,
            shared_weights=shared_weights if shared else None,
            **route_args(group, layout, shared, replicated),
        )
        return ma.combine(small_layer.experts(recv.rows, recv.row_offsets, w), recv)

    return layer


def arguments(shared, replicated, seed=0):
    """Return ((x, topk_weights, shared_weights, w), ids, kept): all except w of one rank, if
    replicated.

    `kept` [R, T, K (+ 1)], or [T, K + 1] if replicated: which choices have a row anywhere."""
    floats, ids, _ = small_layer.arguments(RANKS, seed, layout=LAYOUT)
    rng = np.random.default_rng(seed)
    x, topk_weights, w = floats
    shared_weights = cases.normal(rng, ids.shape[:2], "float32")
    if shared:
        w = cases.normal(rng, (RANKS, LAYOUT.local_experts + 1, LAYOUT.hidden), "float32")
    if replicated:
        x, topk_weights, shared_weights, ids = (
            a[0] for a in (x, topk_weights, shared_weights, ids)
        )
        all_ids = np.stack([ids] * RANKS)
        rows = [r.choice_row[0] >= 0 for r in routings_of(all_ids, LAYOUT, shared, True)]
        kept = np.any(rows, axis=0)
    else:
        kept = routings_of(ids, LAYOUT, shared, False)[0].choice_row >= 0
    return (x, topk_weights, shared_weights, w), ids, kept


def spread(floats, ids):
    """Return arguments of one rank that are replicated as arguments of all ranks."""
    x, topk_weights, shared_weights, w = floats
    each = (np.stack([a] * RANKS) for a in (x, topk_weights, shared_weights, ids))
    x, topk_weights, shared_weights, ids = each
    return x, topk_weights, shared_weights, w, ids


def dense(shared, replicated):
    """Compute the layer without any exchange, from all ranks' arrays; `kept` replaces any drops."""

    def layer(x, topk_weights, shared_weights, w, ids, kept):
        routed = w[:, shared:].reshape(-1, w.shape[-1])
        chosen = routed[jnp.clip(ids, 0, len(routed) - 1)]
        top_k = ids.shape[-1]
        weights = jnp.where(kept[..., :top_k], topk_weights, 0)[..., None]
        out = jnp.sum(weights * jnp.tanh(x[..., None, :] * chosen), axis=-2)
        if not shared:
            return out
        if replicated:
            rank = oracle.share_of(np.arange(len(x)), len(x), RANKS)
            own = w[rank, 0]
        else:
            own = w[:, :1]
        weight = jnp.where(kept[..., top_k], shared_weights, 0)[..., None]
        return out + weight * jnp.tanh(x * own)

    return layer


SPLIT, WHOLE = PartitionSpec(harness.AXIS), PartitionSpec()
OF_REPLICATED = dict(in_axes=(None, None, None, 0, None), out_axes=None)


def on_ranks(shared, replicated):
    """Return the layer of all ranks: a function of the arguments, with lead axes where they are
    split."""
    group = harness.group_of(RANKS)
    layer = layer_of(group, shared, replicated)
    if not replicated:
        return small_layer.on_all_ranks(layer)

    def of_one_rank(*args):
        return lax.psum(layer(*args), harness.AXIS)

    return harness.over_ranks(of_one_rank, group.mesh, **OF_REPLICATED)


ARGS = (0, 1, 2, 3)


# Of replicated tokens, XLA weighs the gradients, and a rank routes in a call of its own.
@pytest.mark.exchanges(lambda replicated: 9 if replicated else 8)
@all_modes
def test_a_layer_and_its_derivatives_are_those_of_the_dense_layer(shared, replicated):
    """The value, its gradients, and the tangents of both."""
    floats, ids, kept = arguments(shared, replicated)
    directions, *_ = arguments(shared, replicated, seed=100)

    def derivatives(fn):
        def gradient(*floats):
            value = lambda *floats: small_layer.loss(fn(*floats, ids))
            return fn(*floats, ids), jax.grad(value, ARGS)(*floats)

        return small_layer.compiled(lambda *args: jax.jvp(gradient, *args))(floats, directions)

    actual = derivatives(on_ranks(shared, replicated))
    expected = derivatives(functools.partial(dense(shared, replicated), kept=kept))
    small_layer.assert_close(actual, expected, tolerance=1e-4)


@pytest.mark.exchanges(16)
def test_a_batch_of_replicated_tokens_is_one_exchange_and_equals_its_elements():
    each = [arguments(True, True, seed) for seed in range(3)]
    floats, ids, _ = small_layer.stacked(*each)
    layer = on_ranks(True, True)

    def gradient(*args):
        *floats, ids = args
        return layer(*args), jax.grad(small_layer.loss_of(layer, ids), ARGS)(*floats)

    actual = small_layer.compiled(jax.vmap(gradient))(*floats, ids)
    single = small_layer.compiled(gradient)
    expected = small_layer.stacked(*(single(*f, i) for f, i, _ in each))
    small_layer.assert_close(actual, expected)
    counted = small_layer.counts(jax.vmap(layer), *floats, ids)
    assert counted == {"route": 1, "dispatch": 1, "weighted_combine": 1}


@pytest.mark.several_devices("its group has two mesh axes")
@pytest.mark.skipif(RANKS < 4, reason="needs 4 devices")
def test_ranks_may_lie_along_two_axes_of_a_larger_mesh():
    """The order of the group's axes decides the shares of replicated tokens and the ranks of
    experts."""
    (x, topk_weights, shared_weights, w), ids, kept = arguments(True, True)
    mesh = Mesh(np.array(harness.devices(4)).reshape(2, 1, 2), ("a", "dp", "b"))
    group = ma.Group(mesh, ("b", "a"), implementation=harness.IMPLEMENTATION)

    def of_one_rank(x, topk_weights, shared_weights, w, ids):
        layer = layer_of(group, True, True)
        return lax.psum(layer(x, topk_weights, shared_weights, w[0], ids), ("a", "b"))

    specs = (WHOLE, WHOLE, WHOLE, PartitionSpec(("b", "a")), WHOLE)
    fn = jax.shard_map(of_one_rank, mesh=mesh, in_specs=specs, out_specs=WHOLE)
    args = (x, topk_weights, shared_weights, w, ids)
    actual = small_layer.compiled(fn)(*args)
    small_layer.assert_close(actual, dense(True, True)(*args, kept))


@pytest.mark.exchanges(4)
def test_a_routing_keeps_its_mode():
    """A routing is used again, also by only a combine; other modes with it are refused."""
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


@pytest.mark.exchanges(2)
def test_shared_rows_are_quantized_like_the_others():
    layout = cases.Layout("quantized", tokens=6, top_k=2, local_experts=2, hidden=64)
    group, format = harness.group_of(RANKS), ma.MxFp8()
    args, (routing,) = inputs(layout, "masked", True, False)
    ids, x = args[:2]

    def rows(ids, x):
        options = route_args(group, layout, True, False)
        quantized = ma.dispatch(x, ids, **harness.exchanging(options, token_format=format)).rows
        decoded = ma.dispatch(
            x, ids, **harness.exchanging(options, token_format=format), decode=True
        ).rows
        return quantized, decoded

    quantized, decoded = harness.on_each_rank(rows, group.mesh)(ids, x)
    expected = harness.numpy_of(format.encode(x))
    harness.assert_same_bytes(quantized.values, oracle.dispatch(expected.values, routing))
    harness.assert_same_bytes(quantized.scales, oracle.dispatch(expected.scales, routing))
    harness.assert_same_bytes(decoded, np.asarray(format.decode(quantized, x.dtype)))


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("alignment", (1, 8))
def test_the_default_capacity_is_enough_for_the_worst_routing_and_exact_without_alignment(
    alignment,
):
    layout = cases.Layout("worst", tokens=5, top_k=3, local_experts=2, alignment=alignment)
    ids = np.full((RANKS, layout.tokens, layout.top_k), 0, np.int32)
    ids[..., 1:] = 1  # all at rank 0
    for shared, replicated in MODES:
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


def trace(fn, *args):
    stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), args)
    return jax.eval_shape(jax.vmap(fn, axis_name=harness.AXIS), *stacked)


X = jax.ShapeDtypeStruct((6, 4), jnp.float32)
IDS = jax.ShapeDtypeStruct((6, 2), jnp.int32)
WEIGHTS = jax.ShapeDtypeStruct((6, 2), jnp.float32)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize(
    "changed, error, naming",
    [
        (dict(shared_expert=1), TypeError, "shared_expert must be a bool; got 1"),
        (dict(replicated="yes"), TypeError, "replicated must be a bool; got 'yes'"),
        (dict(shared_weights=0.5), ValueError, "shared_weights must be None without .*got 0.5"),
        (
            dict(shared_expert=True, shared_weights=np.ones(5)),
            ValueError,
            r"shared_weights must be a float array \[num_tokens\]=\[6\].*\[5\]",
        ),
        (
            dict(shared_expert=True, shared_weights=np.ones(6, int)),
            TypeError,
            "shared_weights must be a float array.*int",
        ),
        (
            dict(shared_expert=True, num_experts=2**31 - 2),
            ValueError,
            "num_experts must be a multiple of the group's size 2 and at most",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_modes_that_make_no_sense_are_refused(changed, error, naming):
    options = dict(group=harness.emulated_group(2), num_experts=4) | changed
    with pytest.raises(error, match=naming):
        trace(
            lambda x, ids, w: ma.dispatch(x, ids, w, **harness.exchanging(options)), X, IDS, WEIGHTS
        )


@pytest.mark.exchanges(0)
def test_shared_weights_need_router_weights():
    options = dict(group=harness.emulated_group(2), num_experts=4, shared_expert=True)
    with pytest.raises(ValueError, match="shared_weights must be None without topk_weights"):
        trace(
            lambda x, ids: ma.dispatch(x, ids, shared_weights=0.5, **harness.exchanging(options)),
            X,
            IDS,
        )


@pytest.mark.exchanges(0)
def test_a_shared_expert_takes_a_choice():
    options = dict(group=harness.emulated_group(2), num_experts=4, capacity=1)
    for top_k in (31, 32):
        ids = jax.ShapeDtypeStruct((6, top_k), jnp.int32)
        trace(lambda ids: ma.route(ids, **harness.exchanging(options)), ids)
        if top_k == 31:
            trace(lambda ids: ma.route(ids, **harness.exchanging(options, shared_expert=True)), ids)
    with pytest.raises(
        ValueError, match="top_k must be at most 31 with a shared expert; got 32 in topk_ids"
    ):
        trace(lambda ids: ma.route(ids, **harness.exchanging(options, shared_expert=True)), ids)
