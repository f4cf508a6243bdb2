"""Test that all ranks stop in time with NaN and an error if a rank does not arrive."""

import dataclasses
import re

import checked
import harness
import jax
import numpy as np
import pytest
from hooks import PHASE_TEXT, Phase, hooked

TIMEOUT = 1.0
DELAY = 1.5  # longer than the timeout, but shorter than the time in which all ranks must stop
GROUP = checked.new_group(timeout=TIMEOUT)
SHAPE = checked.SMALL
SLOW_RANK = checked.RANKS - 1
OPERATIONS = {"dispatch": checked.dispatch_given, "combine": checked.combine_given}


@pytest.fixture(scope="module")
def routing():
    return checked.routing_program(SHAPE, GROUP)()


@pytest.fixture
def run(routing, operation):
    if operation == "route":
        return checked.program(SHAPE, GROUP, checked.route_only)
    given = checked.program_with_routing(OPERATIONS[operation], SHAPE, GROUP)
    return lambda state: given(state, routing)


IN_ONE_LAUNCH = pytest.mark.several_devices(
    "ranks that share one GPU run in one launch, in which each has sent when it begins to read"
)


# Each value: (slow phase, ring halves (0: the default), calls, phases in which other ranks wait).
STALLS = {
    # A rank that expects no chunk waits for the head.
    "sending": (Phase.SEND, 0, 1, [Phase.RECEIVE_CHUNK, Phase.RECEIVE_HEAD]),
    # The slow rank still reads in the first call, so it begins the second call too late.
    "reading": (Phase.RECEIVE_CHUNK, 0, 2, [Phase.RECEIVE_CHUNK, Phase.RECEIVE_HEAD]),
    # The slow rank also posts no credit for its only ring half.
    "reading_at_depth_1": (
        Phase.RECEIVE_CHUNK,
        1,
        2,
        [Phase.SEND_CREDIT, Phase.RECEIVE_CHUNK, Phase.RECEIVE_HEAD],
    ),
}


@pytest.mark.parametrize(
    "stall",
    [pytest.param(stall, marks=[] if stall == "sending" else [IN_ONE_LAUNCH]) for stall in STALLS],
)
@pytest.mark.parametrize("operation", ("route", "dispatch", "combine"))
def test_a_stalled_rank_stops_all_in_time_with_nan_and_never_a_wrong_number(run, operation, stall):
    slow_phase, depth, calls, waits = STALLS[stall]
    state = checked.repeat(run, 2)
    checked.assert_right(state, GROUP)
    with hooked(GROUP, phase=slow_phase, rank=SLOW_RANK, delay=DELAY, depth=depth):
        failed = checked.outcome(lambda: checked.repeat(run, calls, state), GROUP)
        wait = "|".join(PHASE_TEXT[phase] for phase in waits)
        told = re.search(
            rf"timeout: {operation} on rank (\d+), (?:{wait}): nothing came from rank (\d+) "
            rf"within {TIMEOUT:f} s",
            failed.error,
        )
        assert told, failed
        assert int(told[1]) != SLOW_RANK, failed
        if Phase.SEND_CREDIT not in waits:
            assert int(told[2]) == SLOW_RANK, failed
        shown = "misplaced" if operation == "route" else "lost"
        checked.assert_stopped(failed, run, GROUP, shown)
    GROUP.check()
    checked.assert_right(checked.repeat(run, 3), GROUP)


@IN_ONE_LAUNCH
@pytest.mark.parametrize("operation", ("dispatch",))
def test_a_rank_that_was_done_keeps_its_results(run):
    """Only the slow rank loses the results of the first of two calls."""
    state = checked.repeat(run, 2)
    with hooked(GROUP, phase=Phase.RECEIVE_CHUNK, rank=SLOW_RANK, delay=DELAY):
        first = run(state)
        second = checked.outcome(lambda: run(state), GROUP)
        assert second.error and second.counts.lost.all(), second
        counts = checked.outcome(lambda: first, group=None).counts
        fast = np.arange(checked.RANKS) != SLOW_RANK
        assert not counts.wrong.any() and not counts.lost[fast].any(), counts


def test_only_the_first_exchange_waits_longer_for_a_rank_that_is_late():
    group = checked.new_group(timeout=TIMEOUT, first_timeout=60.0)
    run = checked.program(SHAPE, group, checked.route_only)
    state = checked.repeat(run, 1, checked.begin(group))  # compiles the program
    checked.close(group)
    sizes = dict(num_tokens=SHAPE.tokens, hidden=SHAPE.hidden, top_k=SHAPE.top_k)
    group.reserve(**sizes, num_experts=group.size * SHAPE.local_experts)
    with hooked(group, phase=Phase.SEND, rank=SLOW_RANK, delay=DELAY):
        first = checked.outcome(lambda: run(state), group)
        assert first.is_right() and first.seconds > TIMEOUT, first
        second = checked.outcome(lambda: run(state), group)
        assert re.search(rf"timeout: .* within {TIMEOUT:f} s", second.error), second


def test_a_group_that_does_not_raise_returns_nan_until_it_is_closed():
    group = checked.new_group(timeout=TIMEOUT, on_failure="nan")
    run = checked.sum_program(group, SHAPE)
    state = checked.begin(group)

    def sums():
        return harness.numpy_of(jax.block_until_ready(run(state)))

    right = sums()
    assert np.isfinite(right).all() and (right == right[0]).all(), right
    with hooked(group, phase=Phase.SEND, rank=SLOW_RANK, delay=DELAY):
        for _ in range(3):
            assert np.isnan(sums()).all()
        with pytest.raises(RuntimeError, match='timeout: |has reported "timeout"'):
            group.check()
        # GROUP has the same devices, but not on_failure="nan", so it raises an error.
        failed = checked.outcome(lambda: checked.program(SHAPE, GROUP)(checked.begin()), GROUP)
        assert failed.counts is None and failed.error, failed
    group.check()
    np.testing.assert_array_equal(sums(), right)
    checked.close(group)


@pytest.mark.several_devices("devices in another order; one device has no other order")
def test_a_program_over_another_order_of_devices_gets_the_error_wrong_rank():
    group = checked.new_group(checked.mesh_of(checked.MESH.devices[::-1]), timeout=TIMEOUT)
    on_rank = checked.steps_of(lambda step: checked.whole(SHAPE, group, step), 1)
    run = checked.on_all_ranks(on_rank, GROUP)
    try:
        wrong = checked.outcome(lambda: run(checked.begin()), group)
        assert "wrong rank: route on rank" in wrong.error and "start" in wrong.error, wrong
        assert wrong.is_never_wrong(), wrong
        with pytest.raises(RuntimeError, match="wrong rank"):
            jax.block_until_ready(run(checked.begin()))
    finally:
        checked.close(group)
    checked.assert_right(checked.repeat(checked.program(SHAPE, GROUP), 2), GROUP)
    checked.assert_right(
        checked.repeat(checked.program(SHAPE, group), 2, checked.begin(group)), group
    )


@pytest.mark.parametrize(
    ("operation", "field", "limit"),
    (
        ("dispatch", "slot_token", "tokens"),
        ("dispatch", "slot_rows", "capacity"),
        ("combine", "slot_rows", "capacity"),
        ("combine", "token_slot", "tokens"),
    ),
)
def test_an_index_out_of_range_is_an_error_and_not_a_stray_access(routing, operation, field, limit):
    run = checked.program_with_routing(OPERATIONS[operation], SHAPE, GROUP)
    checked.assert_right(run(checked.begin(), routing), GROUP)

    values = np.array(harness.numpy_of(getattr(routing, field)))
    values[values >= 0] += SHAPE.tokens if limit == "tokens" else routing.capacity
    values = harness.put(values, getattr(routing, field).sharding)
    damaged = dataclasses.replace(routing, **{field: values})
    try:
        failed = checked.outcome(lambda: run(checked.begin(), damaged), GROUP)
        assert f"index out of range: {operation} on rank" in failed.error, failed
        assert failed.seconds < TIMEOUT, failed
    finally:
        checked.close(GROUP)
    checked.assert_right(run(checked.begin(), routing), GROUP)
