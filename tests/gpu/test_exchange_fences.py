"""Fences: who has seen a chunk's flag sees its rows."""

import checked
import pytest
from hooks import Mutation, Phase, hooked

TRIES = 20
# Wide rows take long to write; a rank that sends late finds everybody else looking at the flags.
WIDE = checked.Shape(tokens=64, hidden=4096, top_k=2, dtype="float32")
LATE = dict(phase=Phase.SEND, rank=0, delay=1e-3)


def test_rows_are_there_when_their_flag_is():
    run = checked.program(WIDE)
    state = checked.repeat(run, 2)
    with hooked(checked.GROUP, **LATE):
        checked.assert_right(checked.repeat(run, TRIES, state))


@pytest.mark.parametrize("operation", ("dispatch", "combine"))
def test_a_flag_before_its_rows_is_noticed(operation):
    order = {"dispatch": checked.dispatch_given, "combine": checked.combine_given}[operation]
    run = checked.program_with_routing(order, WIDE)
    routing = checked.routing_program(WIDE)()
    state = run(checked.begin(), routing)
    checked.assert_right(state)
    with hooked(checked.GROUP, mutation=Mutation.FLAG_BEFORE_ROWS, **LATE):
        for _ in range(TRIES):
            state = run(state, routing)
        broken = checked.outcome(lambda: state)
    assert broken.counts is not None and broken.counts.wrong.any(), broken
