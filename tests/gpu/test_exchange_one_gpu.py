"""All ranks on one GPU: what only this mode has, and that no test passes without the kernels."""

import re

import checked
import jax
import pytest
from hooks import Phase, hooked
from jax import lax

from jax_moe_a2a._src.group import runtime

pytestmark = pytest.mark.skipif(
    not checked.ONE_GPU,
    reason="of ranks that share one GPU: set MOE_A2A_TEST_RANKS_ON_ONE_GPU",
)

SHAPE = checked.SMALL
GROUP = checked.GROUP
SMALLER = checked.new_group(ranks=2 if checked.RANKS > 2 else 3)
STEPS = 200
TIMEOUT = 1.0
DELAY = 1.5


def exchanges_of(order, group):
    return checked.exchanges_of(order.operations, SHAPE, group)


def alternating_program():
    """Return a program of the states of both groups, which exchange in turn in a loop."""
    orders = {GROUP: checked.whole, SMALLER: checked.at_once}

    def a_step(group):
        one_rank = checked.steps_of(lambda step: orders[group](SHAPE, group, step), 1)
        return checked.mapped(one_rank, group)

    def once(states, _):
        large, small = states
        large = a_step(GROUP)(large)
        small, large = lax.optimization_barrier((small, large))
        return (large, a_step(SMALLER)(small)), None

    program = jax.jit(lambda *states: lax.scan(once, states, length=STEPS)[0])
    each = {group: exchanges_of(order, group).times(STEPS) for group, order in orders.items()}
    return checked.Noted(program, each)


def test_groups_of_different_sizes_alternate_on_one_device():
    run = alternating_program()
    states = checked.begin(GROUP), checked.begin(SMALLER)
    for _ in range(3):
        states = run(*states)
    for group, state in zip((GROUP, SMALLER), states):
        checked.assert_right(state, group)


def test_a_group_that_was_closed_between_calls_counts_from_the_first_epoch_again():
    """The other group on the device keeps its workspace."""
    run, other = checked.program(SHAPE, GROUP), checked.program(SHAPE, SMALLER)
    state, other_state = checked.begin(GROUP), checked.begin(SMALLER)
    checked.close(GROUP)
    for times in (1, 3, 2):
        state = checked.repeat(run, times, state)
        other_state = checked.repeat(other, 1, other_state)
        checked.assert_right(state, GROUP)
        checked.assert_right(other_state, SMALLER)
        each = exchanges_of(checked.whole, GROUP).whole
        assert checked.counters_of(GROUP).whole == [times * each] * GROUP.size
        checked.close(GROUP)
        assert runtime.counters(GROUP) == () and GROUP.memory() == ()
        assert len(runtime.counters(SMALLER)) == SMALLER.size
    assert (state[0] == 6).all() and (other_state[0] == 3).all()


def test_a_program_that_takes_the_portable_path_does_not_pass():
    portable = checked.new_group(implementation="portable")
    step = checked.steps_of(lambda step: checked.whole(SHAPE, portable, step), 1)
    run = checked.on_all_ranks(step, GROUP, exchanges_of(checked.whole, GROUP))
    checked.assert_right(checked.repeat(checked.program(SHAPE), 1))
    try:
        with pytest.raises(AssertionError, match="the counters show"):
            checked.assert_right(checked.repeat(run, 1))
    finally:
        checked.close(GROUP)


@pytest.mark.parametrize("rank", sorted({0, checked.RANKS // 2, checked.RANKS - 1}))
def test_an_error_names_the_rank_that_was_late(rank):
    group = checked.new_group(timeout=TIMEOUT)
    run = checked.program(SHAPE, group)
    state = checked.repeat(run, 1)
    checked.assert_right(state, group)
    with hooked(group, phase=Phase.SEND, rank=rank, delay=DELAY):
        failed = checked.outcome(lambda: run(state), group)
        told = re.search(
            r"timeout: route on rank (\d+), .*nothing came from rank (\d+)", failed.error
        )
        assert told, failed
        assert int(told[1]) != rank and int(told[2]) == rank, failed
        assert failed.counts is None or not failed.counts.wrong.any(), failed
    checked.assert_right(checked.repeat(run, 2), group)
