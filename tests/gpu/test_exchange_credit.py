"""Test that a sender waits for a credit before it overwrites rows that a slow rank still reads."""

import random

import checked
import pytest
from hooks import Mutation, Phase, hooked

TRIES = 20
READER = 1  # the slow rank
SLOW = dict(phase=Phase.RECEIVE_CHUNK, rank=READER, delay=1e-3)


@pytest.mark.parametrize("depth", (1, 2))
def test_a_slow_reader_is_not_overwritten(depth):
    run = checked.program()
    state = checked.repeat(run, 2)
    with hooked(checked.GROUP, depth=depth, **SLOW):
        checked.assert_right(checked.repeat(run, TRIES, state))


@pytest.mark.several_devices(
    "ranks that share one GPU end a launch together: every credit has arrived before it is needed"
)
@pytest.mark.parametrize("mutation", (Mutation.IGNORE_CREDIT, Mutation.CREDIT_BY_FIRST_BLOCK))
def test_a_slow_reader_is_overwritten_if_the_rule_is_broken(mutation):
    """With a broken credit rule and one ring half, at least one of 20 tries is wrong."""
    run = checked.program()
    state = checked.repeat(run, 2)
    with hooked(checked.GROUP, mutation=mutation, depth=1, **SLOW):
        for _ in range(TRIES):
            broken = checked.outcome(lambda: checked.repeat(run, 3, state))
            if not broken.is_right():
                break
        else:
            pytest.fail(f"{mutation!r} was noticed in none of {TRIES} tries")
    checked.assert_right(checked.repeat(run, 3))


def mixed_shapes():
    draw = random.Random(2)
    orders = [checked.whole] * 12 + [checked.two_dispatches_first] * 4
    orders += [checked.dispatch_only] * 2 + [checked.route_only] * 2
    return [
        checked.program(
            checked.fitting(
                checked.Shape(
                    tokens=draw.choice((1, 3, 16, 17, 64, 200, 512)),
                    hidden=draw.choice((1, 7, 64, 256, 1000)),
                    top_k=draw.choice((1, 2, 4, 8)),
                    local_experts=draw.choice((1, 2, 8)),
                    dtype=draw.choice(("bfloat16", "float16", "float32")),
                    alignment=draw.choice((1, 8)),
                )
            ),
            checked.GROUP,
            order,
        )
        for order in orders
    ]


@pytest.fixture(scope="module")
def programs():
    programs = mixed_shapes()
    checked.compile_together(*((run, checked.begin()) for run in programs))
    return programs


@pytest.mark.parametrize("depth", (2, 1))
def test_programs_of_mixed_shapes_in_random_order_never_disturb_each_other(programs, depth):
    draw = random.Random(depth)
    state = checked.begin()
    for run in programs:
        state = run(state)
        checked.assert_right(state)
    with hooked(checked.GROUP, depth=depth):
        for _ in range(1200):
            state = draw.choice(programs)(state)
        checked.assert_right(state)
