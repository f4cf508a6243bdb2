"""Test that a dispatch of few tokens is one primitive, with the same results as a route and a
dispatch."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from jax.sharding import PartitionSpec
from small_layer import route_args

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


@pytest.mark.exchanges(0)
def test_derivatives_have_a_route_and_dispatches_of_their_own():
    """Tangents are dispatched with the same routing."""
    floats, ids, _ = small_layer.arguments(RANKS)
    layer = small_layer.layer_of_all_ranks()

    def tangents(floats, directions):
        return jax.jvp(lambda *floats: layer(*floats, ids), floats, directions)

    counted = small_layer.counts(tangents, floats, small_layer.directions(RANKS))
    assert counted == {"route": 1, "dispatch": 2, "weighted_combine": 2}

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


@pytest.mark.several_devices("it needs a second mesh axis")
@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
def test_a_routing_is_typed_as_varying_by_its_ids_alone(check_vma):
    """A routing of ids that are equal over a mesh axis may be returned as replicated over the
    axis."""
    dp = min(2, harness.MANY)
    ranks = harness.MANY // dp
    mesh = harness.mesh_over(dp=dp, ep=ranks)
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
