"""Fences: who has seen a chunk's flag sees its rows."""

import checked
import pytest
from hooks import Mutation, Phase, hooked

TRIES = 20
# Wide rows take long to write; a rank that sends late finds everybody else looking at the flags.
WIDE = checked.Shape(tokens=64, hidden=4096, top_k=2, dtype="float32")
LATE = dict(phase=Phase.SEND, rank=0, delay=1e-3)

OPERATIONS = {"dispatch": checked.dispatch_given, "combine": checked.combine_given}


@pytest.fixture(scope="module")
def routing():
    return checked.routing_program(WIDE)()


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled(routing):
    given = [checked.program_with_routing(order, WIDE) for order in OPERATIONS.values()]
    calls = [(run, checked.begin(), routing) for run in given]
    checked.compile_together((checked.program(WIDE), checked.begin()), *calls)


def test_rows_are_there_when_their_flag_is():
    run = checked.program(WIDE)
    state = checked.repeat(run, 2)
    with hooked(checked.GROUP, **LATE):
        checked.assert_right(checked.repeat(run, TRIES, state))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_flag_before_its_rows_is_noticed(operation, routing):
    run = checked.program_with_routing(OPERATIONS[operation], WIDE)
    state = run(checked.begin(), routing)
    checked.assert_right(state)
    with hooked(checked.GROUP, mutation=Mutation.FLAG_BEFORE_ROWS, **LATE):
        for _ in range(TRIES):
            state = run(state, routing)
        broken = checked.outcome(lambda: state)
    assert broken.counts is not None and broken.counts.wrong.any(), broken
