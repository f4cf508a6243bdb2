"""Test that calls that differ between ranks raise an error."""

import concurrent.futures
import functools

import checked
import harness
import jax
import jax.numpy as jnp
import pytest
from alone import run_alone
from hooks import Mutation, hooked
from jax import lax

import jax_moe_a2a as ma

SHAPE = checked.SMALL
GROUP = checked.GROUP


def payload(step, rows=SHAPE.tokens):
    return checked.tokens_at(SHAPE, step, checked.my_rank(GROUP), jnp.arange(rows))


def dispatch(step, routing):
    return ma.dispatch(payload(step), routing).rows


def dispatch_narrower(step, routing):
    return ma.dispatch(payload(step)[:, : SHAPE.hidden // 2], routing).rows


def dispatch_two_arrays(step, routing):
    rows = ma.dispatch((payload(step), payload(step + 1)), routing).rows
    return rows[0] + rows[1]


def combine(step, routing, dtype=SHAPE.dtype):
    return ma.combine(payload(step, routing.capacity).astype(dtype), routing)


def route_aligned(alignment, step, routing):
    del routing
    ids = checked.own_ids(SHAPE, GROUP, step)
    experts = GROUP.size * SHAPE.local_experts
    routing = ma.route(
        ids,
        group=GROUP,
        num_experts=experts,
        exchange=ma.Exchange(capacity=512, alignment=alignment),
    )
    return routing.row_token


def in_order(first, second):
    def both(step, routing):
        first_out, step = lax.optimization_barrier((first(step, routing), step))
        return jnp.sum(first_out) + jnp.sum(second(step, routing))

    return both


# Each value: (calls of rank 0, calls of other ranks). Numbers of flags differ only in the last.
CASES = {
    "another_shape": (dispatch_narrower, dispatch),
    "another_number_of_arrays": (dispatch_two_arrays, dispatch),
    "another_dtype": (functools.partial(combine, dtype="float32"), combine),
    "another_operation": (combine, dispatch),
    "another_order": (in_order(combine, dispatch), in_order(dispatch, combine)),
    "another_alignment": (
        functools.partial(route_aligned, 2),
        functools.partial(route_aligned, 1),
    ),
    "route_for_dispatch": (functools.partial(route_aligned, 1), dispatch),
}


@functools.cache
def routing():
    """Return the routing of step 0. The first call waits for all processes."""
    return jax.block_until_ready(checked.routing_program(SHAPE)())


@functools.cache
def compiled_program(case):
    """Return a program (state, Routing) -> state, in which rank 0 makes a different call."""
    calls = [
        lambda *args, call=call: jnp.sum(call(*args), dtype=jnp.float32) for call in CASES[case]
    ]

    def on_rank(state, routing):
        step, counts = state
        total = lax.cond(checked.my_rank(GROUP) == 0, *calls, step, routing)
        lost = checked.counted(lost=jnp.isnan(total))
        return step + 1, counts + lost

    program = checked.on_all_ranks(on_rank, GROUP)
    return program.lower(checked.begin(), routing()).compile()


def run_mismatched(case):
    return checked.outcome(lambda: compiled_program(case)(checked.begin(), routing()))


RANKS_DIFFER = pytest.mark.several_devices(
    "ranks that share one GPU run in one launch, of one call, so that none can make another one"
)


@pytest.fixture(scope="module")
def programs_are_compiled():
    routing()  # compute the routing before several threads need it
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(compiled_program, CASES))
    harness.of_all_processes(None)


@RANKS_DIFFER
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("programs_are_compiled")
def test_ranks_that_make_different_calls_get_an_error_at_once(case):
    """The error "mismatched calls" comes before the timeout."""
    mismatched = run_mismatched(case)
    assert "mismatched calls" in mismatched.error, mismatched
    assert mismatched.seconds < GROUP.timeout, mismatched
    checked.close(GROUP)
    checked.assert_right(checked.repeat(checked.program(SHAPE), 2))


@RANKS_DIFFER
@pytest.mark.parametrize("case", ("another_shape", "another_order"))
@pytest.mark.usefixtures("programs_are_compiled")
def test_different_calls_are_not_noticed_without_signatures(case):
    checked.assert_right(checked.repeat(checked.program(SHAPE), 1))
    with hooked(GROUP, mutation=Mutation.IGNORE_SIGNATURE):
        unnoticed = run_mismatched(case)
        assert "mismatched" not in unnoticed.error, unnoticed


def run_in_two_threads():
    """Call programs from two threads. Fail if a result is wrong and there is no error."""
    programs = [
        checked.program(SHAPE),
        checked.program(checked.Shape(tokens=200)),
        checked.program(SHAPE, GROUP, checked.two_dispatches_first),
    ]
    checked.compile_together(*((run, checked.begin()) for run in programs))
    for run in programs:
        checked.assert_right(run(checked.begin()))

    def work(run):
        outcomes, state = [], checked.begin()
        while len(outcomes) < 50 and not (outcomes and outcomes[-1].error):
            outcomes.append(checked.outcome(lambda: checked.repeat(run, 4, state)))
        return outcomes

    for first, second in ((0, 0), (0, 1), (1, 2)) * 2:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            of_both = list(pool.map(work, (programs[first], programs[second])))
        outcomes = of_both[0] + of_both[1]
        errors = {outcome.error for outcome in outcomes if outcome.error}
        counts = [outcome.counts for outcome in outcomes if outcome.counts is not None]
        assert not any(count.wrong.any() for count in counts), counts
        assert errors or all(outcome.is_right() for outcome in outcomes), outcomes
        print(first, second, len(outcomes), errors or "right")
        checked.close(GROUP)
    for run in programs:
        checked.assert_right(run(checked.begin()))


@pytest.mark.one_process("it starts a process of its own")
def test_two_threads_on_one_group_get_right_results_or_an_error():
    print(run_alone(run_in_two_threads))
