"""Test exchanges with one block, with many blocks, and with more blocks than fit on the GPU."""

import contextlib
import random

import checked
import pytest
from hooks import DELAYABLE, Mutation, hooked, set_hooks, uncapped

# With this shape, dispatch and combine have work for more than 400 blocks.
MANY_CHUNKS = checked.fitting(checked.Shape(tokens=4096, hidden=64))
# With `num_sms` 200 or 400, each rank uses its whole GPU, or its whole share of one GPU.
GROUPS = {num_sms: checked.new_group(num_sms=num_sms) for num_sms in (1, 2, 200, 400)}
SMALL_GRID = checked.new_group(num_sms=16)
# A launch with FLOOD has more receiver blocks than a GPU can run at once.
if checked.ONE_GPU:
    # Within `uncapped`, each rank launches up to 400 blocks, and otherwise only those that fit.
    FLOOD = checked.fitting(checked.Shape(tokens=2048, hidden=8, top_k=1), gigabytes=1.0)
    FLOODED = checked.new_group(num_sms=400, timeout=1.0)
else:
    # Half of the 2400 blocks are senders, and each of 132 SMs runs at most 4 blocks.
    FLOOD = checked.Shape(tokens=8192, hidden=8, top_k=1)
    FLOODED = checked.new_group(num_sms=2400, timeout=1.0)


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled():
    programs = [checked.program(MANY_CHUNKS, group) for group in GROUPS.values()]
    programs += [checked.program(checked.SMALL, SMALL_GRID), checked.program(FLOOD, FLOODED)]
    checked.compile_together(*((run, checked.begin()) for run in programs))


@pytest.mark.parametrize("num_sms", GROUPS)
def test_one_block_and_more_blocks_than_fit_return_the_right_rows(num_sms):
    group = GROUPS[num_sms]
    run = checked.program(MANY_CHUNKS, group)
    checked.assert_right(checked.repeat(run, 20), group)


@pytest.mark.parametrize("num_sms", GROUPS)
def test_a_slow_rank_changes_no_result(num_sms):
    group = GROUPS[num_sms]
    run = checked.program(MANY_CHUNKS, group)
    ranks = random.Random(num_sms)
    state = checked.repeat(run, 2)
    with hooked(group):
        for phase in DELAYABLE:
            for _ in range(3):
                rank = ranks.randrange(checked.RANKS)
                set_hooks(group, phase=phase, rank=rank, delay=500e-6)
                state = checked.repeat(run, 5, state)
                checked.assert_right(state, group)


def test_blocks_that_outnumber_the_gpu_end_because_senders_are_admitted_first():
    """If receivers are admitted first (RECEIVERS_FIRST), a call fails."""
    run = checked.program(FLOOD, FLOODED)
    with uncapped(FLOODED) if checked.ONE_GPU else contextlib.nullcontext():
        state = checked.repeat(run, 3)
        checked.assert_right(state, FLOODED)
        with hooked(FLOODED, mutation=Mutation.RECEIVERS_FIRST):
            broken = checked.outcome(lambda: run(state), FLOODED)
            assert "timeout" in broken.error and broken.is_never_wrong(), broken
    checked.assert_right(checked.repeat(run, 3), FLOODED)


def test_the_order_of_admission_does_not_matter_if_all_blocks_run_at_once():
    for group in (FLOODED, SMALL_GRID) if checked.ONE_GPU else (SMALL_GRID,):
        run = checked.program(FLOOD if group is FLOODED else checked.SMALL, group)
        state = checked.repeat(run, 1)
        with hooked(group, mutation=Mutation.RECEIVERS_FIRST):
            checked.assert_right(checked.repeat(run, 10, state), group)
