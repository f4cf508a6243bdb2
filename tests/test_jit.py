"""Compare a layer's results with jit, without jit, compiled ahead of time, and as two jitted
programs."""

import functools

import harness
import jax
import numpy as np
import pytest
import small_layer
from small_layer import LAYOUT, route_args

import jax_moe_a2a as ma

RANKS = harness.SEVERAL


def test_eager_shard_map_returns_the_rows_and_gradients_of_jit():
    group = harness.group_of(RANKS)

    def of_one_rank(x, topk_weights, w, ids):
        recv = ma.dispatch(x, ids, topk_weights, **route_args(group))
        return ma.combine(small_layer.experts(recv.rows, recv.row_offsets, w), recv), recv

    floats, ids, kept = small_layer.arguments(RANKS)

    def value_and_grad(*floats):
        def value(*floats):
            out, recv = small_layer.on_all_ranks(of_one_rank)(*floats, ids)
            return small_layer.loss(out), recv

        return jax.value_and_grad(value, small_layer.OF_FLOATS, has_aux=True)(*floats)

    eager, compiled = (wrap(value_and_grad, exchanges=5) for wrap in (harness.eagerly, harness.jit))
    (eager_value, eager_recv), eager_grads = eager(*floats)
    (jit_value, jit_recv), jit_grads = compiled(*floats)
    small_layer.assert_same(eager_recv, jit_recv)
    # XLA may use fused multiply-adds in one program and not in the other.
    small_layer.assert_close((eager_value, eager_grads), (jit_value, jit_grads))
    small_layer.assert_close(jit_grads, small_layer.dense_value_and_grads(floats, ids, kept)[1])


def test_a_program_is_traced_once_for_routings_that_change_and_groups_that_are_equal():
    traces = []

    @functools.partial(harness.jit, exchanges=2, static_argnames="group")
    def program(*args, group):
        traces.append(group)
        return small_layer.on_all_ranks(small_layer.layer_of(group), group.mesh)(*args)

    for seed in range(3):
        floats, ids, kept = small_layer.arguments(RANKS, seed)
        group = harness.group_of(RANKS)
        out = program(*floats, ids, group=group)
        small_layer.assert_close(out, small_layer.dense_layer(*floats, ids, kept), seed)
    assert len(traces) == 1
    assert group is not traces[0]


def test_recv_leaves_one_program_and_enters_another():
    floats, ids, kept = small_layer.arguments(RANKS)
    x, topk_weights, w = floats
    group = harness.group_of(RANKS)

    dispatch = harness.jit(
        small_layer.on_all_ranks(lambda x, ids, t: ma.dispatch(x, ids, t, **route_args(group))),
        exchanges=1,
    )
    combine = harness.jit(
        small_layer.on_all_ranks(
            lambda recv, w: ma.combine(small_layer.experts(recv.rows, recv.row_offsets, w), recv)
        ),
        exchanges=1,
    )
    out = combine(dispatch(x, ids, topk_weights), w)
    small_layer.assert_close(out, small_layer.dense_layer(*floats, ids, kept))


def test_a_program_compiled_ahead_of_time_with_constant_ids_equals_the_dense_layer():
    floats, ids, kept = small_layer.arguments(RANKS)
    floats = harness.put(floats, harness.placement(harness.mesh_of(RANKS)))
    layer = small_layer.layer_of_all_ranks()
    program = jax.jit(lambda *floats: layer(*floats, ids)).lower(*floats).compile()
    with harness.expect_exchanges(2):
        out = jax.block_until_ready(program(*floats))
    small_layer.assert_close(out, small_layer.dense_layer(*floats, ids, kept))


@pytest.mark.exchanges(0)
def test_the_small_layer_sees_masked_dropped_and_repeated_choices():
    """Tests of transforms use small_layer.py, so its choices must include masked, dropped and
    repeated ones."""
    for ranks in (2, 4, 8):
        _, ids, kept = small_layer.arguments(ranks)
        routing = small_layer.routing_of(ids)
        assert (ids == -1).any() and routing.num_dropped.any() and kept.any()
        assert (routing.group_sizes.sum(axis=1) > routing.num_rows).any()
        twice = (ids[..., :, None] == ids[..., None, :]) & (ids[..., None] >= 0)
        assert (twice & ~np.eye(LAYOUT.top_k, dtype=bool)).any()
