"""Break rules of the protocol with all ranks on one GPU, and test the errors."""

import checked
import pytest
from device_counters import counters_of
from hooks import (
    PHASE_TEXT,
    Mutation,
    Phase,
    hooked,
    set_credits_of,
    set_epoch_of,
    set_hooks_of,
)

pytestmark = pytest.mark.skipif(
    not checked.ONE_GPU,
    reason="of ranks that share one GPU: set MOE_A2A_TEST_RANKS_ON_ONE_GPU",
)

TIMEOUT = 1.0
ODD_RANK = 1
GROUP = checked.new_group(timeout=TIMEOUT)


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
        assert failed.is_never_wrong() and failed.seconds < TIMEOUT, failed
    checked.assert_right(checked.repeat(run, 2), GROUP)


def test_a_wait_for_a_missing_credit_times_out():
    run = checked.program(checked.SMALL, GROUP)
    state = checked.repeat(run, 2)
    checked.assert_right(state, GROUP)
    with hooked(GROUP):
        set_credits_of(GROUP, ODD_RANK, 0)
        failed = checked.outcome(lambda: run(state), GROUP)
        # Either ODD_RANK or a rank that waits for ids from ODD_RANK may time out first.
        waits = f"timeout: route on rank {ODD_RANK}, {PHASE_TEXT[Phase.SEND_CREDIT]}"
        is_awaited = f"nothing came from rank {ODD_RANK} "
        assert waits in failed.error or is_awaited in failed.error, failed
        assert failed.is_never_wrong(), failed
    checked.assert_right(checked.repeat(run, 2), GROUP)


def test_a_missing_credit_is_not_noticed_if_the_rule_is_broken():
    """With IGNORE_CREDIT, a call succeeds although a rank has no credits."""
    run = checked.program(checked.SMALL, GROUP)
    state = checked.repeat(run, 2)
    with hooked(GROUP, mutation=Mutation.IGNORE_CREDIT):
        set_credits_of(GROUP, ODD_RANK, 0)
        checked.assert_right(checked.repeat(run, 1, state), GROUP)


def test_a_rank_that_left_out_calls_is_noticed():
    run = checked.program(checked.SMALL, GROUP)
    state = checked.repeat(run, 2)
    checked.assert_right(state, GROUP)
    with hooked(GROUP):
        epoch = counters_of(GROUP)[ODD_RANK].num_exchanges + 1
        set_epoch_of(GROUP, ODD_RANK, epoch + 2)
        failed = checked.outcome(lambda: run(state), GROUP)
        assert f"protocol violation: route on rank {ODD_RANK}" not in failed.error, failed
        assert f"rank {ODD_RANK} is ahead of this rank" in failed.error, failed
        assert failed.is_never_wrong(), failed
    checked.assert_right(checked.repeat(run, 2), GROUP)
