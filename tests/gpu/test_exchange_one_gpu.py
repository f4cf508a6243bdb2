"""Test groups whose ranks share one GPU, and that `assert_right` fails if no kernel has run."""

import checked
import jax
import pytest
from device_counters import counters_of
from exchanges import Count
from jax import lax

pytestmark = pytest.mark.skipif(
    not checked.ONE_GPU,
    reason="of ranks that share one GPU: set MOE_A2A_TEST_RANKS_ON_ONE_GPU",
)

SHAPE = checked.SMALL
GROUP = checked.GROUP
SMALLER = checked.new_group(ranks=2 if checked.RANKS > 2 else 3)
STEPS = 200


def alternating_program():
    """Return a program in which two groups exchange in turns."""
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
    of_step = {GROUP: Count(whole=3), SMALLER: Count(whole=2)}

    def run(*states):
        for group, exchanges in of_step.items():
            checked.note(group, exchanges.times(STEPS))
        return program(*states)

    return run


def test_groups_of_different_sizes_alternate_on_one_device():
    run = alternating_program()
    states = checked.begin(GROUP), checked.begin(SMALLER)
    for _ in range(3):
        states = run(*states)
    for group, state in zip((GROUP, SMALLER), states):
        checked.assert_right(state, group)


def test_a_group_that_was_closed_between_calls_counts_from_the_first_epoch_again():
    """The other group on the device keeps its counters."""
    run, other = checked.program(SHAPE, GROUP), checked.program(SHAPE, SMALLER)
    state, other_state = checked.begin(GROUP), checked.begin(SMALLER)
    checked.close(GROUP)
    for times in (1, 3, 2):
        state = checked.repeat(run, times, state)
        other_state = checked.repeat(other, 1, other_state)
        checked.assert_right(state, GROUP)
        checked.assert_right(other_state, SMALLER)
        assert checked.counters_of(GROUP) == Count(whole=3 * times)  # route, dispatch, combine
        checked.close(GROUP)
        assert counters_of(GROUP) == () and GROUP.memory() == ()
        assert len(counters_of(SMALLER)) == SMALLER.size
    assert (state[0] == 6).all() and (other_state[0] == 3).all()


def test_a_program_that_takes_the_portable_path_does_not_pass():
    portable = checked.new_group(implementation="portable")
    step = checked.steps_of(lambda step: checked.whole(SHAPE, portable, step), 1)
    run = checked.on_all_ranks(step, GROUP, Count(whole=3))
    checked.assert_right(checked.repeat(checked.program(SHAPE), 1))
    try:
        with pytest.raises(AssertionError, match="the counters show"):
            checked.assert_right(checked.repeat(run, 1))
    finally:
        checked.close(GROUP)
