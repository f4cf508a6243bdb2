"""A dispatch of few ids routes and moves in one launch, with the bits of route and dispatch.

Which of the two is bound, and what every transform makes of it. Remat: in test_remat.py. Dead code:
in test_dce.py.
"""

import dataclasses
import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from jax.sharding import Mesh, PartitionSpec
from small_layer import LAYOUT, OF_FLOATS, route_args

import jax_moe_a2a as ma
from jax_moe_a2a._src import api

RANKS = harness.SEVERAL


def at_once(x, ids, topk_weights=None, **options):
    return ma.dispatch(x, ids, topk_weights, **harness.exchanging(options))


def in_two_calls(x, ids, topk_weights=None, **options):
    return ma.dispatch(x, ma.route(ids, **harness.exchanging(options)), topk_weights)


@functools.cache
def exchange_program(dispatch, layout, ranks):
    group = harness.group_of(ranks)
    of_dispatch = layout.exchanges_of_dispatch(ranks) if dispatch is at_once else 2
    exchanges = (of_dispatch + 2) * layout.has_rows(ranks)

    def exchange(ids, x, topk_weights, y):
        recv = dispatch(x, ids, topk_weights, **route_args(group, layout))
        return recv, ma.combine(y, recv, weights=None), ma.combine(y, recv)

    return harness.on_each_rank(exchange, group.mesh, exchanges=exchanges)


@pytest.mark.parametrize("layout", cases.few_layouts(), ids=lambda layout: layout.name)
def test_every_case_has_the_bits_of_route_and_dispatch(layout):
    for case in cases.cases_of(layout):
        args, _ = harness.exchange_inputs(case, RANKS)
        actual, expected = (
            exchange_program(d, layout, RANKS)(*args) for d in (at_once, in_two_calls)
        )
        small_layer.assert_same(actual, expected, case.name)


FORMATS = {
    "blockwise": ma.BlockwiseFp8(),
    "mx": ma.MxFp8(),
    "nv": ma.NvFp4(global_scale=0.0037187),
}


@functools.cache
def format_program(dispatch, name, layout, decode):
    """Return a program of two leaves; with a global scale of each rank for "nv"."""
    group = harness.group_of(RANKS)

    def exchange(ids, x, topk_weights, scale):
        fmt = ma.NvFp4(global_scale=scale) if name == "nv" else FORMATS[name]
        options = dict(token_format=fmt, decode=decode)
        payload = {"a": x, "b": x[:, :128] * 3}
        if dispatch is in_two_calls:
            return ma.dispatch(
                payload,
                ma.route(ids, **route_args(group, layout)),
                topk_weights,
                **harness.exchanging(options),
            )
        return ma.dispatch(
            payload, ids, topk_weights, **harness.exchanging(route_args(group, layout), options)
        )

    exchanges = layout.exchanges_of_dispatch(RANKS) if dispatch is at_once else 2
    return harness.on_each_rank(exchange, group.mesh, exchanges=exchanges)


@pytest.mark.parametrize(
    ("name", "layout", "decode"),
    (
        ("blockwise", cases.TIGHT, False),
        ("mx", cases.CUT, True),
        ("nv", cases.PADDED, True),
    ),
    ids=FORMATS,
)
def test_tokens_in_a_format_have_the_bits_of_route_and_dispatch(name, layout, decode):
    """This holds if tokens are dropped, and if no choice is for a rank."""
    layout = dataclasses.replace(layout, hidden=384)
    rng = np.random.default_rng(layout.tokens)
    x = rng.standard_normal((RANKS, layout.tokens, layout.hidden)).astype("bfloat16")
    topk_weights = rng.random((RANKS, layout.tokens, layout.top_k), np.float32)
    scales = np.linspace(1e-3, 2e-3, RANKS, dtype=np.float32)
    for routing in ("uniform", "first_expert_only", "masked", "all_masked", "repeated", "invalid"):
        args = cases.Case(layout, routing).ids(RANKS), x, topk_weights, scales
        actual, expected = (
            format_program(d, name, layout, decode)(*args) for d in (at_once, in_two_calls)
        )
        small_layer.assert_same(actual, expected, routing)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize(
    "num_tokens, counted",
    [
        (0, {"routed_dispatch": 1}),
        (api.FUSED_MAX_TOKENS, {"routed_dispatch": 1}),
        (api.FUSED_MAX_TOKENS + 1, {"route": 1, "dispatch": 1}),
    ],
)
def test_few_tokens_are_routed_and_moved_at_once_and_more_are_not(num_tokens, counted):
    x, ids = np.zeros((RANKS, num_tokens, 2)), np.zeros((RANKS, num_tokens, 2), np.int32)
    group = harness.group_of(RANKS)

    def rows(x, ids):
        return at_once(x, ids, **route_args(group)).rows

    assert small_layer.counts(small_layer.on_all_ranks(rows), x, ids) == counted


def layer_by(dispatch, group=None):
    """Return the small layer of one rank, with one of the two dispatches."""
    group = group or harness.group_of(RANKS)

    def layer(x, topk_weights, w, ids):
        recv = dispatch(x, ids, topk_weights, **route_args(group))
        return ma.combine(small_layer.experts(recv.rows, recv.row_offsets, w), recv)

    return layer


def assert_same_by_both(transform, *args):
    """Assert that transform(the layer of all ranks) of the arguments has the same bits with both
    dispatches."""
    actual, expected = (
        small_layer.compiled(transform(small_layer.on_all_ranks(layer_by(dispatch))))(*args)
        for dispatch in (at_once, in_two_calls)
    )
    small_layer.assert_same(actual, expected)


@pytest.mark.exchanges(harness.merged(23, predicted=25))
def test_gradients_and_tangents_of_every_order_have_the_bits_of_route_and_dispatch():
    floats, ids, _ = small_layer.arguments(RANKS)
    directions = small_layer.directions(RANKS)

    def transform(layer):
        def of(floats, directions):
            def gradient(*floats):
                return jax.grad(small_layer.loss_of(layer, ids), OF_FLOATS)(*floats)

            def slope(*floats):
                return sum(jnp.vdot(g, d) for g, d in zip(gradient(*floats), directions))

            forward = jax.jvp(gradient, floats, directions)
            return layer(*floats, ids), forward, jax.grad(slope, OF_FLOATS)(*floats)

        return of

    assert_same_by_both(transform, floats, directions)


@pytest.mark.exchanges(0)
def test_tangents_and_cotangents_use_the_existing_routing():
    """Nothing is routed again, and integers of the result have no tangents."""
    floats, ids, _ = small_layer.arguments(RANKS)
    layer = small_layer.on_all_ranks(layer_by(at_once))

    def tangents(floats, directions):
        return jax.jvp(lambda *floats: layer(*floats, ids), floats, directions)

    counted = small_layer.counts(tangents, floats, small_layer.directions(RANKS))
    assert counted == {"routed_dispatch": 1, "dispatch": 1, "weighted_combine": 2}

    def recv_tangents(x, dx):
        def recv(x):
            return small_layer.on_all_ranks(
                lambda x, ids: at_once(x, ids, **route_args(harness.group_of(RANKS)))
            )(x, ids)

        return jax.jvp(recv, (x,), (dx,))[1]

    out = jax.eval_shape(recv_tangents, floats[0], floats[0])
    assert out.rows.dtype == np.float32
    others = [leaf for leaf in jax.tree.leaves(out) if leaf is not out.rows]
    assert others and all(leaf.dtype == jax.dtypes.float0 for leaf in others)


def linear_maps(of_ids, checkpoint):
    """Return linear functions of x for known ids: dispatch, round trip, and half of a payload."""
    group = harness.group_of(RANKS)
    ids = small_layer.arguments(RANKS).ids

    def there(x, ids):
        return of_ids(x, ids, **route_args(group)).rows

    def there_and_back(x, ids):
        recv = of_ids(x, ids, **route_args(group))
        return ma.combine(recv.rows * 2, recv)

    def beside_known(x, ids):
        payload = {"x": x, "known": jnp.ones_like(x)}
        return of_ids(payload, ids, **route_args(group)).rows["x"]

    for fn in (there, there_and_back, beside_known):
        mapped = small_layer.on_all_ranks(jax.checkpoint(fn) if checkpoint else fn)
        yield lambda x, mapped=mapped: mapped(x, ids)


@pytest.mark.exchanges(lambda checkpoint: harness.merged(18, predicted=25) if checkpoint else 15)
@pytest.mark.parametrize(
    "within, checkpoint", ((jax.jit, False), (lambda fn: fn, True)), ids=("jit", "checkpoint")
)
def test_functions_of_known_ids_transpose_and_transpose_back(within, checkpoint):
    """Only the dispatch is linear, also for exchanges by the routing of a result."""
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, (RANKS, LAYOUT.tokens, LAYOUT.hidden)).astype(np.float32)
    maps = zip(linear_maps(at_once, checkpoint), linear_maps(in_two_calls, checkpoint))
    for fn, expected_fn in ((within(a), within(b)) for a, b in maps):
        out = jax.eval_shape(fn, x)
        ct = rng.integers(-8, 9, out.shape).astype(np.float32)

        def transposed(ct, fn=fn):
            return jax.linear_transpose(fn, x)(ct)[0]

        def twice(x, out=out, transposed=transposed):
            return jax.linear_transpose(transposed, out)(x)[0]

        def expected(ct, fn=expected_fn):
            return jax.linear_transpose(fn, x)(ct)[0]

        @small_layer.compiled
        def program(x, ct, fns=(fn, transposed, twice, expected)):
            fn, transposed, twice, expected = fns
            return fn(x), transposed(ct), twice(x), expected(ct)

        y, ct_x, again, ct_expected = program(x, ct)
        small_layer.assert_same(again, y)
        small_layer.assert_same(ct_x, ct_expected)
        assert np.vdot(y, ct) == np.vdot(x, ct_x) != 0
        assert small_layer.counts(transposed, ct) == small_layer.counts(expected, ct)


BATCH = 3


@pytest.mark.exchanges(lambda batched: 8 if batched else 7)
@pytest.mark.parametrize(
    "batched, counted",
    [
        ("xi", {"route": 1, "dispatch": 1}),
        ("x", {"route": 1, "dispatch": 1}),
        ("i", {"route": 1, "dispatch": 1}),
        ("", {"routed_dispatch": 1}),
    ],
    ids=lambda value: value or "none" if isinstance(value, str) else "",
)
def test_a_batch_is_routed_and_moved_separately_with_the_bits_of_its_elements(batched, counted):
    each = [small_layer.arguments(RANKS, seed) for seed in range(BATCH)]
    own = [each[b if "x" in batched else 0].floats[0] for b in range(BATCH)]
    own_ids = [each[b if "i" in batched else 0].ids for b in range(BATCH)]
    group = harness.group_of(RANKS)

    def recv(dispatch):
        def of_one_rank(x, ids):
            return dispatch((x, x[:, 0]), ids, x[:, :3], **route_args(group))

        return small_layer.on_all_ranks(of_one_rank)

    args = (
        np.stack(own) if "x" in batched else own[0],
        np.stack(own_ids) if "i" in batched else own_ids[0],
    )
    axes = [0 if name in batched else None for name in "xi"]

    def mapped(*args):
        return jax.vmap(lambda unused, *args: recv(at_once)(*args), in_axes=(0, *axes))(
            np.zeros(BATCH), *args
        )

    assert small_layer.counts(mapped, *args) == counted
    out = small_layer.compiled(mapped)(*args)
    single = small_layer.compiled(recv(in_two_calls))
    for b in range(BATCH):
        element = jax.tree.map(lambda leaf: leaf[b], out)
        small_layer.assert_same(element, single(own[b], own_ids[b]), f"{batched} {b}")


@pytest.mark.several_devices("it needs a second mesh axis")
@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
def test_a_routing_is_typed_as_varying_by_its_ids_alone(check_vma):
    """For a payload with another value on each device of a second axis, where the ids are the same:
    the routing may leave shard_map as one for all of them.
    """
    dp = min(2, harness.MANY)
    ranks = harness.MANY // dp
    mesh = Mesh(np.array(harness.devices(harness.MANY)).reshape(dp, ranks), ("dp", harness.AXIS))
    group = ma.Group(mesh, harness.AXIS, implementation=harness.IMPLEMENTATION)
    ids = small_layer.arguments(ranks).ids
    x = np.stack([small_layer.arguments(ranks, seed).floats[0] for seed in range(dp)])
    own, all_axes = PartitionSpec(harness.AXIS), PartitionSpec("dp", harness.AXIS)

    def program(dispatch):
        def of_one_rank(x, ids):
            def loss(x):
                recv = dispatch(x, ids[0], **route_args(group))
                return jnp.sum(jnp.sin(recv.rows)), recv

            gradient, recv = jax.grad(loss, has_aux=True)(x[0, 0])
            plan = recv.group_sizes[None], recv.row_offsets[None], recv.src_info.token[None]
            return gradient[None, None], recv.rows[None, None], plan

        return small_layer.compiled(
            jax.shard_map(
                of_one_rank,
                mesh=mesh,
                in_specs=(all_axes, own),
                out_specs=(all_axes, all_axes, own),
                check_vma=check_vma,
            )
        )

    small_layer.assert_same(program(at_once)(x, ids), program(in_two_calls)(x, ids))
