"""Test rematerialized exchanges, and compare the kernels with the portable path bit for bit."""

import functools

import checked
import harness
import jax
import jax.numpy as jnp
import pytest

import jax_moe_a2a as ma

SHAPE = checked.SMALL
SHAPES = (checked.ONE_CHUNK, SHAPE, checked.MANY_CHUNKS)
PORTABLE = checked.new_group(implementation="portable")


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled():
    state = checked.begin()
    programs = [checked.program(shape) for shape in SHAPES]
    programs.append(checked.program(SHAPE, checked.GROUP, checked.dispatch_only))
    layers = [layer_program(*kind) for kind in ((checked.GROUP, False), (checked.GROUP, True))]
    layers.append(layer_program(PORTABLE, False))
    checked.compile_together(
        *((run, state) for run in programs), *((run, state[0]) for run in layers)
    )


def layer(group, remat, step):
    """Return output and gradients of a layer on one rank, as small integers."""
    shape, rank = SHAPE, checked.my_rank(group)
    token = jnp.arange(shape.tokens)

    def expert(x, weights):
        routing = checked.route(shape, group, step)
        recv = ma.dispatch(x, routing, weights)
        return ma.combine(recv.rows * recv.rows, recv)

    x = checked.tokens_at(shape, step, rank, token)
    cotangent = checked.tokens_at(shape, step + 1, rank, token)
    expert = jax.checkpoint(expert) if remat else expert
    out, vjp = jax.vjp(expert, x, checked.own_weights(shape, group, step))
    return out, *vjp(cotangent)


@functools.cache
def layer_program(group, remat):
    return checked.on_all_ranks(lambda step: layer(group, remat, step), group)


def layers(group, remat):
    run = layer_program(group, remat)
    steps = [checked.begin(first_step=step)[0] for step in range(6)]
    results = harness.numpy_of([run(step) for step in steps])
    checked.assert_counted()
    return jax.tree.leaves(results)


def test_a_rematerialized_dispatch_returns_the_same_bits():
    for plain, again in zip(layers(checked.GROUP, False), layers(checked.GROUP, True)):
        assert plain.tobytes() == again.tobytes()


def test_results_and_gradients_have_the_bits_of_the_portable_path():
    for kernels, portable in zip(layers(checked.GROUP, False), layers(PORTABLE, False)):
        assert kernels.tobytes() == portable.tobytes()
