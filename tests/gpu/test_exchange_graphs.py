"""Compare calls in replayed CUDA graphs with calls without graphs.

The tests compile all programs first, because a compilation drops the graphs of all programs.
"""

import concurrent.futures

import checked
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alone import run_alone
from hooks import Phase, hooked

import jax_moe_a2a as ma

STEPS = 5000  # replays of the loop's body in one call
SHAPE = checked.Shape(tokens=64)
OTHER = checked.Shape(tokens=200, top_k=2)


def captured_group():
    return checked.new_group(cuda_graphs=True, timeout=5.0)


def test_tens_of_thousands_of_replays_with_launches_between_are_right():
    """A loop is replayed 20,000 times, with calls without graphs in between."""
    group = captured_group()
    captured = checked.new_program(SHAPE, group, num_steps=STEPS)
    launched = checked.program(OTHER)
    state = launched(captured(checked.begin()))
    for _ in range(3):
        state = captured(state)
        for _ in range(5):
            state = launched(state)
    checked.assert_right(state, group)


def test_short_programs_replay_in_any_order():
    group = captured_group()
    programs = [checked.new_program(shape, group) for shape in (SHAPE, OTHER)]
    programs.append(checked.new_program(SHAPE, group, checked.two_dispatches_first))
    state = checked.begin()
    checked.compile_together(*((run, state) for run in programs))
    for i in range(600):
        state = programs[i % 7 % 3](state)
    checked.assert_right(state, group)


def layer(shape, group, step):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), step), checked.my_rank(group))
    x = jax.random.normal(key, (shape.tokens, shape.hidden), shape.dtype)
    routing = checked.route(shape, group, step)

    def exchange(x, weights):
        recv = ma.dispatch(x, routing, weights)
        return ma.combine(jnp.tanh(recv.rows), recv)

    out, vjp = jax.vjp(exchange, x, checked.own_weights(shape, group, step))
    return out, *vjp(x)


def test_captured_calls_return_the_bits_of_launched_calls():
    steps = [checked.begin(first_step=step)[0] for step in range(4)]
    results = []
    for group in (captured_group(), checked.GROUP):
        run = checked.on_all_ranks(lambda step: layer(SHAPE, group, step), group)
        for _ in range(3):  # the last round replays graphs
            outs = [run(step) for step in steps]
        results.append(harness.numpy_of(outs))
        checked.assert_counted(group)
    for captured, launched in zip(*map(jax.tree.leaves, results)):
        assert captured.tobytes() == launched.tobytes()
        assert np.isfinite(captured.astype(np.float32)).all()


@pytest.mark.one_process("the number of its calls is by the clock")
def test_compiling_another_program_while_graphs_replay_changes_nothing():
    """One device may launch while another replays, because a compilation drops all graphs."""
    group = captured_group()
    captured = checked.new_program(SHAPE, group, num_steps=STEPS)
    state = captured(checked.begin())
    checked.assert_right(state, group)

    def compile_others():
        for tokens in (33, 34, 35):
            checked.new_program(checked.Shape(tokens=tokens), group).lower(state).compile()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(compile_others)
        looping = state
        while not compiling.done():
            looping = captured(looping)
    compiling.result()
    checked.assert_right(looping, group)


def two_independent_exchanges(shape, group, step):
    return sum(checked.whole(shape, group, s) for s in (2 * step, 2 * step + 1))


def test_exchanges_that_xla_lets_overlap_are_right_or_raise():
    """In the mode "CONCURRENT", a graph orders only calls that use the same buffer."""
    group = checked.new_group(cuda_graphs=True, timeout=1.0)
    step = checked.steps_of(lambda step: two_independent_exchanges(SHAPE, group, step), 1)
    concurrent = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    run = checked.on_all_ranks(step, group, compiler_options=concurrent)
    try:
        overlapped = checked.outcome(lambda: checked.repeat(run, 50), group)
        print(overlapped)
        assert overlapped.error or overlapped.is_right(), overlapped
        assert overlapped.counts is None or not overlapped.counts.wrong.any(), overlapped
    finally:
        checked.close(group)
    checked.assert_right(checked.repeat(checked.new_program(SHAPE, group), 3), group)


def replay_after_close_and_after_failure():
    group = checked.new_group(cuda_graphs=True, timeout=1.0)
    run = checked.new_program(SHAPE, group)
    checked.assert_right(checked.repeat(run, 20), group)
    for _ in range(3):
        checked.close(group)
        checked.assert_right(checked.repeat(run, 20), group)
    print("right after close")

    state = checked.repeat(run, 20)
    with hooked(group, phase=Phase.SEND, rank=0, delay=1.5):
        broken = checked.outcome(lambda: run(state), group)
        assert "timeout" in broken.error and broken.is_never_wrong(), broken
    checked.assert_right(checked.repeat(run, 20), group)
    print("right after failure and close")


@pytest.mark.one_process("it starts a process of its own")
def test_a_captured_program_runs_again_after_close_and_after_failure():
    """The test runs alone, because an access to freed memory makes the GPUs unusable."""
    run_alone(replay_after_close_and_after_failure)
