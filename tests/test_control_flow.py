"""Compare layers in scan, cond and while_loop with dense layers outside of them."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from jax import lax
from small_layer import OF_FLOATS, route_args

import jax_moe_a2a as ma

RANKS = harness.SEVERAL
LAYERS = 3


@functools.cache
def problem():
    """Return (x, topk_weights, w), ids, and which choices are kept; all except x have a leading
    layer axis."""
    layers = [small_layer.arguments(RANKS, seed) for seed in range(LAYERS)]
    topk_weights, w = small_layer.stacked(*(layer.floats[1:] for layer in layers))
    ids, kept = (np.stack(arrays) for arrays in zip(*(layer[1:] for layer in layers)))
    return (layers[0].floats[0], topk_weights, w), ids, kept


def value_and_grads(fn, *others):
    return small_layer.compiled(jax.value_and_grad(small_layer.loss_of(fn, *others), OF_FLOATS))


def of_all_ranks(fn):
    return harness.over_ranks(fn, harness.mesh_of(RANKS), in_axes=(0, 1, 1, 1))


def dense_layers(x, topk_weights, w, ids, kept, active=(True,) * LAYERS):
    for each in zip(topk_weights, w, ids, kept, active):
        if each[-1]:
            x = x + small_layer.dense_layer(x, *each[:-1])
    return x


@pytest.mark.exchanges((1 + 4) * LAYERS)
def test_a_scan_may_run_over_routings_and_carry_one():
    """A `lax.map` computes the routings, and each step of a scan gets its routing from the previous
    step."""
    group = harness.group_of(RANKS)

    def layers(x, topk_weights, w, ids):
        routings = lax.map(lambda each: ma.route(each, **route_args(group)), ids)
        first = jax.tree.map(lambda leaf: leaf[0], routings)

        def step(carry, each):
            x, routing = carry
            topk_weights, w, own = each
            recv = ma.dispatch(x, routing, topk_weights)
            x = x + ma.combine(small_layer.experts(recv.rows, recv.row_offsets, w), recv)
            return (x, own), None

        following = jax.tree.map(lambda leaf: jnp.roll(leaf, -1, axis=0), routings)
        return lax.scan(step, (x, first), (topk_weights, w, following))[0][0]

    floats, ids, kept = problem()
    actual = value_and_grads(of_all_ranks(layers), ids)(*floats)
    expected = value_and_grads(dense_layers, ids, kept)(*floats)
    small_layer.assert_close(actual, expected, tolerance=1e-4)


@pytest.mark.exchanges(5 * (2 + 1 + 0))
def test_cond_with_a_uniform_predicate_runs_only_the_active_layers():
    floats, ids, kept = problem()
    layer = small_layer.layer_of(harness.group_of(RANKS))

    def program(active):
        def layers(x, topk_weights, w, ids):
            def step(x, each):
                run, *args = each
                return lax.cond(run, lambda x: x + layer(x, *args), lambda x: x, x), None

            return lax.scan(step, x, (active, topk_weights, w, ids))[0]

        return jax.value_and_grad(small_layer.loss_of(of_all_ranks(layers), ids), OF_FLOATS)

    compiled = small_layer.compiled(lambda active, *floats: program(active)(*floats))
    for active in ([True, False, True], [False, True, False], [False] * LAYERS):
        expected = value_and_grads(functools.partial(dense_layers, active=active), ids, kept)
        small_layer.assert_close(
            compiled(np.array(active), *floats), expected(*floats), active, tolerance=1e-4
        )


def test_a_while_loop_runs_until_all_ranks_agree_to_stop():
    """A while_loop repeats a layer until a sum over ranks exceeds a limit."""
    layer = small_layer.layer_of(harness.group_of(RANKS))
    floats, ids, kept = small_layer.arguments(RANKS)
    directions = small_layer.directions(RANKS)
    limit = 400.0 * RANKS

    def norm(x):
        return jnp.sum(x * x)

    def of_one_rank(x, topk_weights, w, ids):
        def go_on(carry):
            return lax.psum(norm(carry[0]), harness.AXIS) < limit

        def step(carry):
            x, steps = carry
            return 1.5 * x + layer(x, topk_weights, w, ids), steps + 1

        steps = jnp.zeros_like(ids[0, 0])
        return lax.while_loop(go_on, step, (x, steps))

    def dense(num_steps, x, topk_weights, w):
        for _ in range(num_steps):
            x = 1.5 * x + small_layer.dense_layer(x, topk_weights, w, ids, kept)
        return x

    def value(*floats):
        return small_layer.on_all_ranks(of_one_rank)(*floats, ids)

    @small_layer.compiled
    def program(floats, directions):
        out, tangent, steps = jax.jvp(lambda *f: value(*f)[:1], floats, directions) + (
            value(*floats)[1],
        )
        return out[0], tangent[0], steps

    num_steps = next(n for n in range(10) if norm(dense(n, *floats)) >= limit)
    assert num_steps > 1
    # JAX makes two loops: one of the layer with its tangent, and one of the layer alone.
    with harness.expect_exchanges(num_steps * (5 + 2)):
        out, tangent, steps = program(floats, directions)
    np.testing.assert_array_equal(steps, num_steps)
    expected = jax.jvp(functools.partial(dense, num_steps), floats, directions)
    small_layer.assert_close((out, tangent), expected, tolerance=1e-3)
