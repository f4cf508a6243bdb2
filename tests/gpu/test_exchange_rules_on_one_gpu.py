"""Rules of the protocol, broken on purpose, with all ranks on one GPU.

All ranks share a launch. So in ordinary calls no rank makes another call, credits arrive before
they are needed, and all blocks fit. Hooks take each of these away.
"""

import contextlib

import checked
import pytest
from hooks import (
    PHASE_TEXT,
    Mutation,
    Phase,
    hooked,
    set_credits_of,
    set_epoch_of,
    set_hooks_of,
    set_uncapped,
)

from jax_moe_a2a._src.group import runtime

pytestmark = pytest.mark.skipif(
    not checked.ONE_GPU,
    reason="of ranks that share one GPU: set MOE_A2A_TEST_RANKS_ON_ONE_GPU",
)

TIMEOUT = 1.0
ODD_RANK = 1
# Budgets of 400 blocks for each rank: many times what a GPU can hold at once.
CROWD = checked.new_group(num_sms=400, timeout=TIMEOUT)
SHAPE = checked.fitting(checked.Shape(tokens=2048, hidden=8, top_k=1), gigabytes=1.0)
GROUP = checked.new_group(timeout=TIMEOUT)


@contextlib.contextmanager
def more_blocks_than_fit(group):
    set_uncapped(group, True)
    try:
        yield
    finally:
        set_uncapped(group, False)


def is_never_wrong(outcome):
    return outcome.counts is None or not (outcome.counts.wrong.any() or outcome.counts.unsafe.any())


@pytest.mark.parametrize(
    "order", (checked.whole, checked.at_once), ids=lambda order: order.__name__
)
def test_a_rank_that_makes_another_call_is_noticed(order):
    run = checked.program(checked.SMALL, GROUP, order)
    state = checked.repeat(run, 2)
    checked.assert_right(state, GROUP)
    with hooked(GROUP):
        set_hooks_of(GROUP, ODD_RANK, Mutation.OTHER_CALL)
        failed = checked.outcome(lambda: run(state), GROUP)
        assert "mismatched calls" in failed.error, failed
        assert is_never_wrong(failed) and failed.seconds < TIMEOUT, failed
    checked.assert_right(checked.repeat(run, 2), GROUP)


def test_a_rank_waits_for_a_credit_that_is_not_there_and_says_so():
    run = checked.program(checked.SMALL, GROUP)
    state = checked.repeat(run, 2)
    checked.assert_right(state, GROUP)
    with hooked(GROUP):
        set_credits_of(GROUP, ODD_RANK, 0)
        failed = checked.outcome(lambda: run(state), GROUP)
        # It is chance which of them times out first: that rank, or one that waits for its ids.
        waits = f"timeout: route on rank {ODD_RANK}, {PHASE_TEXT[Phase.SEND_CREDIT]}"
        is_awaited = f"nothing came from rank {ODD_RANK} "
        assert waits in failed.error or is_awaited in failed.error, failed
        assert is_never_wrong(failed), failed
    checked.assert_right(checked.repeat(run, 2), GROUP)


def test_a_missing_credit_is_not_noticed_where_the_rule_is_broken():
    """The test above shows only the wait for the credit."""
    run = checked.program(checked.SMALL, GROUP)
    state = checked.repeat(run, 2)
    with hooked(GROUP, mutation=Mutation.IGNORE_CREDIT):
        set_credits_of(GROUP, ODD_RANK, 0)
        checked.assert_right(checked.repeat(run, 1, state), GROUP)


def test_a_rank_that_left_out_calls_is_noticed():
    """Its flags are from the future, by as many epochs as there are ring halves."""
    run = checked.program(checked.SMALL, GROUP)
    state = checked.repeat(run, 2)
    checked.assert_right(state, GROUP)
    with hooked(GROUP):
        epoch = runtime.counters(GROUP)[ODD_RANK].num_exchanges + 1
        set_epoch_of(GROUP, ODD_RANK, epoch + 2)
        failed = checked.outcome(lambda: run(state), GROUP)
        assert f"protocol violation: route on rank {ODD_RANK}" not in failed.error, failed
        assert f"rank {ODD_RANK} is ahead of this rank" in failed.error, failed
        assert is_never_wrong(failed), failed
    checked.assert_right(checked.repeat(run, 2), GROUP)


def test_blocks_that_outnumber_the_gpu_end_because_senders_are_admitted_first():
    run = checked.program(SHAPE, CROWD)
    with more_blocks_than_fit(CROWD):
        state = checked.repeat(run, 3)
        checked.assert_right(state, CROWD)
        with hooked(CROWD, mutation=Mutation.RECEIVERS_FIRST):
            broken = checked.outcome(lambda: run(state), CROWD)
            assert "timeout" in broken.error, broken
            assert is_never_wrong(broken), broken
    checked.assert_right(checked.repeat(run, 2), CROWD)


def test_the_order_of_admission_is_free_where_all_blocks_fit():
    """The test above breaks only the order."""
    run = checked.program(SHAPE, CROWD)
    state = checked.repeat(run, 1)
    with hooked(CROWD, mutation=Mutation.RECEIVERS_FIRST):
        checked.assert_right(checked.repeat(run, 3, state), CROWD)
