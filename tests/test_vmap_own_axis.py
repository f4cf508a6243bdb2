"""vmap over the group's own axis runs all ranks on one device, with the rules of the primitives."""

import functools

import harness
import jax
import numpy as np
import oracle
import pytest
import small_layer
from small_layer import LAYOUT, OF_FLOATS, route_args

import jax_moe_a2a as ma

# The ranks that share a GPU, or else 3: not a power of two, and more than some machines' devices.
RANKS = harness.RANKS_ON_ONE_GPU or 3
GROUP = harness.vmapped_group(RANKS)


def emulated(fn, **options):
    return jax.vmap(fn, axis_name=harness.AXIS, **options)


def emulated_layer():
    return emulated(small_layer.layer_of(GROUP))


@functools.cache
def arguments():
    return small_layer.arguments(RANKS)


@pytest.mark.exchanges(5)
def test_grad_inside_the_emulation_equals_that_of_the_dense_layer():
    """Cotangents cross between the emulated ranks."""
    floats, ids, kept = arguments()

    def of_one_rank(*args):
        *floats, ids = args
        layer = small_layer.layer_of(GROUP)
        return jax.grad(small_layer.loss_of(layer, ids), OF_FLOATS)(*floats)

    actual = small_layer.compiled(emulated(of_one_rank))(*floats, ids)
    small_layer.assert_close(actual, small_layer.dense_value_and_grads(floats, ids, kept)[1])


@pytest.mark.exchanges(0)
def test_the_emulation_keeps_the_primitives_and_their_gradient():
    """A derivative of the portable path itself would round differently."""
    floats, ids, _ = arguments()
    gradient = jax.grad(small_layer.loss_of(emulated_layer(), ids), OF_FLOATS)
    assert small_layer.counts(gradient, *floats) == {
        "route": 1,
        "dispatch": 1,
        "weighted_combine": 1,
        "weighted_dispatch": 1,
        "combine": 1,
    }


@pytest.mark.exchanges(2)
def test_the_emulation_returns_the_bytes_of_shard_map():
    """The number of ranks equals the number of devices. Weighted sums agree up to rounding."""
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
    each = [small_layer.arguments(RANKS, seed) for seed in range(2)]
    floats, ids, kept = small_layer.stacked(*each)
    if shared_ids:
        ids, kept = ids[0], np.stack([kept[0]] * 2)
    ids_axis = None if shared_ids else 0
    layer = small_layer.layer_of(GROUP)
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
def test_the_rank_axis_may_stand_anywhere_and_arguments_may_lack_it():
    """The rank is the last axis of the tokens, and the ids are equal on all ranks."""
    (x, _, _), ids, _ = arguments()
    ids = ids[0]
    expected = small_layer.routing_of(np.stack([ids] * RANKS))

    def rows(x, ids):
        return ma.dispatch(x, ids, **route_args(GROUP)).rows

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
