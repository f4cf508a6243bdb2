"""Fences: a thread that has seen a chunk's flag sees its rows."""

import checked
import pytest
from hooks import Mutation, Phase, hooked

# A chunk of one row of 16 KB, which takes long to write.
LONG_CHUNKS = checked.fitting(checked.Shape(tokens=1024, hidden=4096, top_k=1, dtype="float32"))
# A chunk of one row that a single bulk copy moves: it is read as soon as its flag is seen.
SHORT_CHUNKS = checked.fitting(checked.Shape(tokens=512, hidden=256, top_k=1, dtype="float32"))
# If a rank sends late, all other ranks poll the flags already. Ranks that share one GPU have few
# blocks each, which begin to poll late.
LATE = dict(phase=Phase.SEND, rank=0, delay=5e-3 if checked.ONE_GPU else 200e-6)

DISPATCH, COMBINE = checked.dispatch_given, checked.combine_given
# The broken rule, the operation, the shape, and how many calls notice the breach for certain.
BROKEN = {
    "flag_before_rows_of_dispatch": (Mutation.FLAG_BEFORE_ROWS, DISPATCH, LONG_CHUNKS, 20),
    "flag_before_rows_of_combine": (Mutation.FLAG_BEFORE_ROWS, COMBINE, LONG_CHUNKS, 20),
    "flag_before_bulk_stores_end": (Mutation.FLAG_BEFORE_STORED, DISPATCH, SHORT_CHUNKS, 500),
}


@pytest.fixture(scope="module")
def routings():
    return {shape: checked.routing_program(shape)() for shape in (LONG_CHUNKS, SHORT_CHUNKS)}


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled(routings):
    checked.compile_together(
        *(
            (checked.program_with_routing(order, shape), checked.begin(), routings[shape])
            for _, order, shape, _ in BROKEN.values()
        )
    )


def calls(order, shape, routing, number):
    run = checked.program_with_routing(order, shape)
    state = checked.begin()
    for _ in range(number):
        state = run(state, routing)
    return state


@pytest.mark.parametrize("case", BROKEN)
def test_rows_have_arrived_when_their_flag_has(routings, case):
    _, order, shape, number = BROKEN[case]
    checked.assert_right(calls(order, shape, routings[shape], 1))
    with hooked(checked.GROUP, **LATE):
        checked.assert_right(calls(order, shape, routings[shape], number))


# On H200 the stores of a bulk copy are visible before a flag that follows `wait_group.read`. PTX
# does not guarantee that. The rule stays, but this test cannot show a breach on H200.
NOT_SHOWN_BY_HOPPER = pytest.mark.xfail(
    reason="Hopper shows no difference between read and stored", strict=False
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[NOT_SHOWN_BY_HOPPER] * (case == "flag_before_bulk_stores_end"))
        for case in BROKEN
    ],
)
@checked.enough_tokens_to_be_late
def test_a_flag_before_its_rows_is_noticed(routings, case):
    mutation, order, shape, number = BROKEN[case]
    checked.assert_right(calls(order, shape, routings[shape], 1))
    with hooked(checked.GROUP, mutation=mutation, **LATE):
        broken = checked.outcome(lambda: calls(order, shape, routings[shape], number))
    assert broken.counts is not None and broken.counts.wrong.any(), broken
