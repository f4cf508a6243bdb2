"""Test that jax.grad returns the dense layer's gradients, both inside and outside shard_map."""

import functools

import harness
import jax
import jax.numpy as jnp
import pytest
import small_layer
from jax import lax
from small_layer import OF_FLOATS

RANKS = harness.SEVERAL
AXIS = harness.AXIS


@functools.cache
def problem():
    """Return (floats, ids, gradients of the dense layer's loss)."""
    floats, ids, kept = small_layer.arguments(RANKS)
    return floats, ids, small_layer.dense_value_and_grads(floats, ids, kept)[1]


@pytest.mark.exchanges(5)
@pytest.mark.parametrize("check_vma", (True, False), ids=("vma", "no_vma"))
def test_gradients_of_each_ranks_loss_inside_shard_map_equal_the_dense_layers(check_vma):
    """Cotangents cross ranks, so each rank gets the gradient of the sum of all losses."""
    floats, ids, expected = problem()
    layer = small_layer.layer_of(harness.group_of(RANKS))

    def of_one_rank(*args):
        *floats, ids = args
        return jax.grad(small_layer.loss_of(layer, ids), OF_FLOATS)(*floats)

    gradient = small_layer.on_all_ranks(of_one_rank, check_vma=check_vma)
    small_layer.assert_close(small_layer.compiled(gradient)(*floats, ids), expected)


@pytest.mark.several_devices("it tests the derivative of psum in shard_map")
def test_gradients_of_the_summed_loss_inside_shard_map_equal_the_dense_layers():
    floats, ids, expected = problem()
    layer = small_layer.layer_of(harness.group_of(RANKS))

    def of_one_rank(*args):
        *floats, ids = args

        def total(*floats):
            return lax.psum(small_layer.loss(layer(*floats, ids)), AXIS)

        return jax.grad(total, OF_FLOATS)(*floats)

    small_layer.assert_close(
        small_layer.compiled(small_layer.on_all_ranks(of_one_rank))(*floats, ids), expected
    )


@pytest.mark.exchanges(5)
@pytest.mark.parametrize(
    "inside",
    (
        pytest.param(False, id="outside"),
        pytest.param(
            True,
            marks=pytest.mark.several_devices("only shard_map sums the gradient over ranks"),
            id="inside",
        ),
    ),
)
def test_the_gradient_of_a_replicated_parameter_is_the_sum_over_ranks(inside):
    floats, ids, _ = problem()
    kept = small_layer.arguments(RANKS).kept
    group = harness.group_of(RANKS)
    layer = small_layer.layer_of(group)
    scale = jnp.linspace(0.5, 1.5, small_layer.LAYOUT.hidden)

    def of_one_rank(scale, x, topk_weights, w, ids):
        def value(scale):
            scale = scale[None]
            return small_layer.loss(scale * layer(scale * x, topk_weights, w, ids))

        if inside:  # the gradient has a replicated type
            return jax.grad(value)(scale)
        return lax.psum(value(scale), AXIS)

    mapped = harness.over_ranks(of_one_rank, group.mesh, in_axes=(None, 0, 0, 0, 0), out_axes=None)
    gradient = mapped if inside else jax.grad(mapped)

    def dense_loss(scale):
        x, *rest = floats
        scale = scale[None, None]
        return small_layer.loss(scale * small_layer.dense_layer(scale * x, *rest, ids, kept))

    small_layer.assert_close(
        small_layer.compiled(gradient)(scale, *floats, ids), jax.grad(dense_loss)(scale)
    )
