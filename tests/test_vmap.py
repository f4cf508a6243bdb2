"""Test vmap over a batch axis (one exchange for the batch) and over the group's axis (all ranks on
one device). References are the oracle and the dense layer, applied to each element."""

import functools

import cases
import harness
import jax
import numpy as np
import oracle
import pytest
import small_layer
from jax.sharding import PartitionSpec
from small_layer import LAYOUT, OF_FLOATS, route_args

import jax_moe_a2a as ma

RANKS = harness.SEVERAL
BATCH = 3
ONCE = {"route": 1, "dispatch": 1, "combine": 1, "weighted_combine": 1}


@functools.cache
def elements():
    """Return the arguments [R, ...] of `exchange` for each batch element, with NaN where nothing
    may read."""
    all_inputs = []
    for seed in range(BATCH):
        rng = np.random.default_rng(seed)
        ids = small_layer.arguments(RANKS, seed).ids
        routing = small_layer.routing_of(ids)
        x = {
            "rows": cases.any_bits(rng, (RANKS, LAYOUT.tokens, LAYOUT.hidden), "bfloat16"),
            "position": cases.any_bits(rng, (RANKS, LAYOUT.tokens), "int32"),
        }
        weights = cases.normal(rng, ids.shape, "float32")
        weights[routing.choice_row < 0] = np.nan
        y = cases.normal(rng, (RANKS, LAYOUT.capacity, LAYOUT.hidden), "bfloat16")
        all_inputs.append((ids, x, weights, y))
    return all_inputs


def exchange(ids, x, topk_weights, y):
    return harness.exchange_fn(LAYOUT, harness.group_of(RANKS))(ids, x, topk_weights, y)


def element(results, b, dim=1):
    return jax.tree.map(lambda leaf: np.take(leaf, b, dim), results)


def assert_is_the_oracles(results, ids, x, topk_weights, y):
    expected = small_layer.routing_of(ids)
    recv = results["recv"]
    harness.assert_routing_is(recv.routing, expected)
    for name, tokens in x.items():
        harness.assert_same_bytes(recv.rows[name], oracle.dispatch(tokens, expected), name)
    weights = oracle.dispatch_choices(topk_weights, expected)
    harness.assert_same_bytes(recv.weights, weights)
    harness.assert_same_bytes(recv.row_offsets, expected.row_offsets)
    y = np.where((expected.row_token >= 0)[..., None], y, np.nan).astype(y.dtype)
    harness.assert_sums_agree(results["sum"], *oracle.combine(y, expected), "sum")
    harness.assert_sums_agree(results["weighted"], *oracle.combine(y, expected, weights))


@pytest.mark.exchanges(4)
@pytest.mark.parametrize(
    "batched",
    [
        (True, True, True, True),
        (False, True, True, True),
        (False, False, True, False),
    ],
    ids=("all", "shared_ids", "only_weights"),
)
def test_every_element_of_a_batch_is_exchanged_as_if_alone_in_one_exchange(batched):
    inputs, axes = [], []
    for i, is_batched in enumerate(batched):
        values = [each[i] for each in elements()]
        # The batch axis is after the rank axis.
        stack = jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *values)
        inputs.append(stack if is_batched else values[0])
        axes.append(0 if is_batched else None)
    mapped = jax.vmap(exchange, in_axes=tuple(axes))
    results = harness.on_each_rank(mapped, harness.mesh_of(RANKS))(*inputs)
    for b in range(BATCH):
        own = [elements()[b if is_batched else 0][i] for i, is_batched in enumerate(batched)]
        assert_is_the_oracles(element(results, b), *own)
    jaxpr = jax.make_jaxpr(small_layer.on_all_ranks(mapped))(*inputs)
    assert harness.count_primitives(jaxpr) == ONCE


@pytest.mark.exchanges(0)
def test_unbatched_leaves_of_a_shared_routing_are_sent_once_and_stay_unbatched():
    ids, x, weights, _ = elements()[0]
    group = harness.group_of(RANKS)

    def dispatch(rows, position, ids, weights):
        recv = ma.dispatch({"a": rows, "b": position}, ids, weights, **route_args(group))
        return recv.rows["a"], recv.rows["b"], recv.weights

    mapped = jax.vmap(dispatch, in_axes=(0, None, None, None), out_axes=(0, None, None))
    rows = np.stack([x["rows"]] * BATCH, axis=1)
    args = rows, x["position"], ids, weights
    jaxpr = jax.make_jaxpr(small_layer.on_all_ranks(mapped))(*args)
    (eqn,) = small_layer.equations(jaxpr, "dispatch")
    tokens, hidden, top_k = LAYOUT.tokens, LAYOUT.hidden, LAYOUT.top_k
    assert small_layer.payload(eqn) == ([(tokens, BATCH, hidden), (tokens,)], [(tokens, top_k)])


@pytest.mark.exchanges(3 + 9 * 3)
@pytest.mark.parametrize("fmt", (None, ma.BlockwiseFp8()), ids=("plain", "fp8"))
def test_no_row_is_lost_where_elements_share_flags(fmt):
    """The kernel has 4096 flags, so adjacent slots of an element, of which some are empty, share a
    flag."""
    ranks, batch, tokens, hidden, top_k = harness.FEW, 9, 1000, 128, 2
    num_experts, capacity = max(8, ranks), 1600
    if ranks > cases.MOST_RANKS:  # receive buffers grow with the square of the ranks
        tokens, capacity = 500, 800
    rng = np.random.default_rng(0)
    ids = rng.integers(-2, num_experts, (ranks, batch, tokens, top_k), np.int32).clip(-1)
    x = cases.normal(rng, (ranks, batch, tokens, hidden), "bfloat16")

    def exchange(ids, x):
        options = dict(token_format=fmt, decode=fmt is not None)
        recv = ma.dispatch(
            x,
            ids,
            group=harness.group_of(ranks),
            num_experts=num_experts,
            **harness.exchanging(options, capacity=capacity),
        )
        return ma.combine(recv.rows, recv), recv.rows

    mesh = harness.mesh_of(ranks)
    at_once = harness.on_each_rank(jax.vmap(exchange), mesh)(ids, x)
    in_turn = harness.on_each_rank(lambda *args: jax.lax.map(lambda e: exchange(*e), args), mesh)
    for name, batched, alone in zip(("sum", "rows"), at_once, in_turn(ids, x), strict=True):
        harness.assert_same_bytes(batched, alone, name)


@pytest.mark.exchanges(4)
def test_batch_axes_may_have_any_position():
    ids, x, weights, y = (
        jax.tree.map(lambda *leaves: np.stack(leaves, axis=1), *values)
        for values in zip(*elements())
    )
    moved = (
        np.moveaxis(ids, 1, -1),
        {"rows": np.moveaxis(x["rows"], 1, 2), "position": np.moveaxis(x["position"], 1, -1)},
        np.moveaxis(weights, 1, 2),
        np.moveaxis(y, 1, -1),
    )

    def some(*args):
        results = exchange(*args)
        return results["recv"].rows, results["sum"], results["weighted"]

    mapped = jax.vmap(some, in_axes=(-1, {"rows": 1, "position": -1}, 1, 2), out_axes=(1, 2, -1))
    rows, total, weighted = harness.on_each_rank(mapped, harness.mesh_of(RANKS))(*moved)
    for b, (ids, x, weights, y) in enumerate(elements()):
        expected = small_layer.routing_of(ids)
        for name, tokens in x.items():
            harness.assert_same_bytes(
                np.take(rows[name], b, 2), oracle.dispatch(tokens, expected), name
            )
        harness.assert_sums_agree(np.take(total, b, 3), *oracle.combine(y, expected))
        row_weights = oracle.dispatch_choices(weights, expected)
        harness.assert_sums_agree(
            np.take(weighted, b, 3), *oracle.combine(y, expected, row_weights)
        )


dense = small_layer.compiled(small_layer.dense_layer)


@functools.cache
def batch():
    """Return floats, ids, and which choices are kept, with the axes batch and rank first."""
    each = [small_layer.arguments(RANKS, seed) for seed in range(BATCH)]
    return small_layer.stacked(*each)


@pytest.mark.exchanges(5)
def test_grad_of_vmap_equals_that_of_the_dense_layer():
    """The gradients of shared experts and router weights are sums over the batch."""
    floats, ids, kept = batch()
    x, topk_weights, w = floats
    own = x, topk_weights[0], w[0]
    axes = (0, None, None, 0)

    def gradients(layer, *others):
        mapped = jax.vmap(layer, in_axes=axes + (0,) * (len(others) - 1))
        return small_layer.compiled(jax.grad(small_layer.loss_of(mapped, *others), OF_FLOATS))

    actual = gradients(small_layer.layer_of_all_ranks(), ids)(*own)
    expected = gradients(small_layer.dense_layer, ids, kept)(*own)
    small_layer.assert_close(actual, expected)


@pytest.mark.several_devices("it needs a second mesh axis")
@pytest.mark.parametrize("shared", (False, True), ids=("own_routing", "shared_routing"))
def test_a_batch_may_be_spread_over_another_axis_of_the_mesh(shared):
    """In one case, elements share the ids and the router weights."""
    dp = min(2, harness.MANY)
    ranks = harness.MANY // dp
    mesh = harness.mesh_over(dp=dp, ep=ranks)
    group = ma.Group(mesh, harness.AXIS, implementation=harness.IMPLEMENTATION)
    each = [small_layer.arguments(ranks, seed) for seed in range(2)]
    (x, topk_weights, w), ids, kept = small_layer.stacked(*each)
    if shared:
        topk_weights, ids, kept = topk_weights[0], ids[0], kept[0]
    axis = None if shared else 0
    spec = PartitionSpec(harness.AXIS)

    def of_one_rank(*args):
        return small_layer.layer_of(group)(*(arg[0] for arg in args))[None]

    mapped = jax.shard_map(of_one_rank, mesh=mesh, in_specs=spec, out_specs=spec)
    batched = jax.vmap(mapped, in_axes=(0, axis, 0, axis), spmd_axis_name="dp")
    dense = jax.vmap(small_layer.dense_layer, in_axes=(0, axis, 0, axis, axis))
    floats = x, topk_weights, w
    small_layer.assert_close(
        small_layer.compiled(small_layer.value_and_grads(batched, ids))(*floats),
        small_layer.compiled(small_layer.value_and_grads(dense, ids, kept))(*floats),
    )


# 3 ranks are emulated, because 3 is no power of two, and some machines have fewer devices.
EMULATED = harness.RANKS_ON_ONE_GPU or 3
VMAPPED = harness.vmapped_group(EMULATED)


def emulated(fn, **options):
    return jax.vmap(fn, axis_name=harness.AXIS, **options)


@pytest.mark.exchanges(5)
def test_grad_inside_the_emulation_equals_that_of_the_dense_layer():
    floats, ids, kept = small_layer.arguments(EMULATED)

    def of_one_rank(*args):
        *floats, ids = args
        layer = small_layer.layer_of(VMAPPED)
        return jax.grad(small_layer.loss_of(layer, ids), OF_FLOATS)(*floats)

    actual = small_layer.compiled(emulated(of_one_rank))(*floats, ids)
    small_layer.assert_close(actual, small_layer.dense_value_and_grads(floats, ids, kept)[1])


@pytest.mark.exchanges(2)
def test_the_emulation_returns_the_bytes_of_shard_map():
    """Weighted sums may differ by roundings, and are not compared."""
    ranks = harness.SEVERAL
    floats, ids, _ = small_layer.arguments(ranks)

    def of_one_rank(group):
        def exchange(x, topk_weights, ids):
            recv = ma.dispatch(x, ids, topk_weights, **route_args(group))
            return recv.rows, recv.weights, recv.src_info, ma.combine(recv.rows, recv, weights=None)

        return exchange

    args = floats[0], floats[1], ids
    real = small_layer.compiled(small_layer.on_all_ranks(of_one_rank(harness.group_of(ranks))))(
        *args
    )
    small_layer.assert_same(
        small_layer.compiled(emulated(of_one_rank(harness.emulated_group(ranks))))(*args), real
    )


@pytest.mark.exchanges(5)
@pytest.mark.parametrize(
    "outside, shared_ids",
    [(True, False), (True, True), (False, True)],
    ids=("outside-own_ids", "outside-shared_ids", "inside-shared_ids"),
)
def test_another_batch_around_or_inside_the_emulation_is_one_exchange(outside, shared_ids):
    each = [small_layer.arguments(EMULATED, seed) for seed in range(2)]
    floats, ids, kept = small_layer.stacked(*each)
    if shared_ids:
        ids, kept = ids[0], np.stack([kept[0]] * 2)
    ids_axis = None if shared_ids else 0
    layer = small_layer.layer_of(VMAPPED)
    if outside:
        mapped = jax.vmap(emulated(layer), in_axes=(0, 0, 0, ids_axis))
    else:
        inner = jax.vmap(layer, in_axes=(0, 0, 0, ids_axis))
        mapped = emulated(inner, in_axes=(1, 1, 1, 0 if shared_ids else 1), out_axes=1)
    actual = small_layer.compiled(small_layer.value_and_grads(mapped, ids))(*floats)
    all_ids = np.stack([ids] * 2) if shared_ids else ids
    expected = jax.vmap(small_layer.dense_value_and_grads)(floats, all_ids, kept)
    small_layer.assert_close(actual, expected)
    once = {"route": 1, "dispatch": 1, "weighted_combine": 1}
    assert small_layer.counts(mapped, *floats, ids) == once


@pytest.mark.exchanges(1)
def test_the_rank_axis_may_have_any_position_and_arguments_may_lack_it():
    """The rank axis is the last of the tokens, and all ranks share the ids."""
    (x, _, _), ids, _ = small_layer.arguments(EMULATED)
    ids = ids[0]
    expected = small_layer.routing_of(np.stack([ids] * EMULATED))

    def rows(x, ids):
        return ma.dispatch(x, ids, **route_args(VMAPPED)).rows

    mapped = emulated(rows, in_axes=(-1, None), out_axes=1)
    out = small_layer.compiled(mapped)(np.moveaxis(x, 0, -1), ids)
    small_layer.assert_same(np.moveaxis(out, 1, 0), oracle.dispatch(x, expected))


@pytest.mark.exchanges(0)
def test_a_group_of_two_axes_cannot_be_emulated_and_says_so():
    group = ma.Group(axis_name=("a", "b"), size=4)
    ids = np.zeros((2, 2, LAYOUT.tokens, LAYOUT.top_k), np.int32)

    def route(ids):
        return ma.route(ids, **route_args(group)).num_rows

    with pytest.raises(NotImplementedError, match="one axis.*'a', 'b'"):
        jax.vmap(jax.vmap(route, axis_name="b"), axis_name="a")(ids)
