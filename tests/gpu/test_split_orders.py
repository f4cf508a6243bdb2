"""Test split exchanges that finish in any order, with other work and exchanges in between."""

import functools

import checked
import in_flight
import jax.numpy as jnp
import pytest
from alone import run_alone
from exchanges import Count
from hooks import Phase, hooked

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import native

SHAPE = checked.SMALL
SHAPES = (checked.ONE_CHUNK, SHAPE, checked.MANY_CHUNKS)
MANY = 24  # more exchanges than events in the pool, and than ring halves
ORDERS = {
    "split_whole": in_flight.split_whole,
    "in_the_order_of_starts": in_flight.scripted(in_flight.started_first(2, reverse=False)),
    "in_the_other_order": in_flight.scripted(in_flight.started_first(2, reverse=True)),
    "whole_ones_between": in_flight.whole_between,
    "many": in_flight.scripted(in_flight.started_first(MANY, reverse=True)),
}
RANDOM = [in_flight.scripted(in_flight.random_script(seed)) for seed in range(6)]
STEPS = 2000


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled():
    state = checked.begin()
    programs = [checked.program(SHAPE, checked.GROUP, order) for order in ORDERS.values()]
    programs += [checked.program(shape, checked.GROUP, in_flight.split_whole) for shape in SHAPES]
    programs += [random_program(order) for order in RANDOM]
    checked.compile_together(*((run, state) for run in programs))


@functools.cache
def random_program(order):
    return checked.program(checked.Shape(tokens=64), checked.GROUP, order)


@pytest.mark.parametrize("name", ORDERS)
def test_split_exchanges_may_be_done_in_any_order(name):
    run = checked.program(SHAPE, checked.GROUP, ORDERS[name])
    checked.assert_right(checked.repeat(run, 20))


@pytest.mark.parametrize("phase", (Phase.SEND, Phase.RECEIVE_CHUNK))
@pytest.mark.parametrize("name", ("in_the_other_order", "whole_ones_between"))
def test_a_slow_rank_changes_nothing(name, phase):
    run = checked.program(SHAPE, checked.GROUP, ORDERS[name])
    state = checked.repeat(run, 1)
    with hooked(checked.GROUP, phase=phase, rank=0, delay=2e-3, kind=native.SPLIT):
        checked.assert_right(checked.repeat(run, 5, state))


def test_split_programs_of_different_shapes_may_alternate():
    programs = [checked.program(shape, checked.GROUP, in_flight.split_whole) for shape in SHAPES]
    state = checked.begin()
    for i in range(60):
        state = programs[i % len(programs)](state)
    checked.assert_right(state)


def test_a_scan_may_hold_a_start_and_its_done():
    run = checked.new_program(SHAPE, checked.GROUP, in_flight.split_whole, num_steps=500)
    checked.assert_right(checked.repeat(run, 3))


def test_the_workspace_grows_while_a_split_exchange_is_in_flight():
    run = checked.program(checked.ONE_CHUNK, checked.GROUP, in_flight.split_whole)
    large = checked.fitting(checked.Shape(tokens=4096, hidden=2048), gigabytes=6.0)
    routing = checked.routing_program(large)()

    def rows_of_ones(step, routing):
        x = jnp.ones((large.tokens, large.hidden), large.dtype) + (step * 0).astype(large.dtype)
        rows = ma.dispatch_done(ma.dispatch_start(x, routing)).rows
        return jnp.all(rows == (routing.row_rank >= 0)[:, None])

    ones = checked.on_all_ranks(rows_of_ones, checked.GROUP)
    lowered = ones.lower(checked.begin()[0], routing)
    state = checked.repeat(run, 1)
    before = native.reserved_bytes(checked.GROUP.topology, native.SPLIT)
    slow = dict(phase=Phase.SEND, rank=0, delay=1.0, kind=native.SPLIT)
    with hooked(checked.GROUP, **slow):
        state = checked.repeat(run, 3, state)
        assert not state[1].is_ready()
        compiled = checked.Noted(lowered.compile(), checked.GROUP, Count(split=1))
        if checked.ONE_GPU:  # the program reserves memory only when it runs
            assert compiled(checked.begin()[0], routing).all()
        after = native.reserved_bytes(checked.GROUP.topology, native.SPLIT)
        assert after > before > 0
        assert compiled(checked.begin()[0], routing).all()
        checked.assert_right(state)
    assert compiled(checked.begin()[0], routing).all()
    checked.assert_right(checked.repeat(run, 3))


def run_some_programs():
    for order in (in_flight.whole_between, RANDOM[0], RANDOM[1]):
        checked.assert_right(checked.repeat(random_program(order), 50))


@pytest.mark.one_process("it starts a process of its own")
def test_split_exchanges_end_with_a_single_hardware_queue():
    run_alone(run_some_programs, CUDA_DEVICE_MAX_CONNECTIONS="1")


def test_random_programs_in_random_order_never_disturb_each_other():
    programs = [random_program(order) for order in RANDOM]
    state = checked.begin()
    for i in range(STEPS // 15):
        state = programs[(i * i) % len(programs)](state)
    checked.assert_right(state)
