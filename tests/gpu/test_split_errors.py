"""Test errors of split exchanges: wrong uses of start and done, and ranks that do not arrive."""

import re

import checked
import harness
import in_flight
import jax
import jax.numpy as jnp
import pytest
from hooks import Phase, hooked

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange.dispatch_combine import DISPATCH
from jax_moe_a2a._src.exchange.record import Options
from jax_moe_a2a._src.group import native

TIMEOUT = 1.0
DELAY = 1.5  # longer than the timeout, but shorter than the time in which all ranks must stop
GROUP = checked.new_group(timeout=TIMEOUT)
SHAPE = checked.SMALL
SLOW_RANK = 1
NUMBERS = dict(num_leaves=1, num_choice_arrays=0, options=Options(), group=GROUP)


@pytest.fixture(scope="module")
def routing():
    return checked.routing_program(SHAPE, GROUP)()


def program(of_rows):
    return checked.on_all_ranks(lambda x, routing: of_rows(x, routing.arrays), GROUP)


def start(x, routing):
    return DISPATCH.start.bind([x], routing, **NUMBERS)


def done(in_flight, routing):
    return DISPATCH.done.bind(in_flight, routing, **NUMBERS)[0]


def once(x, routing):
    return done(start(x, routing), routing)


def twice(x, routing):
    inflight = start(x, routing)
    return done(inflight, routing), done(inflight, routing)


def never_started(x, routing):
    rows = jnp.zeros((routing.row_rank.shape[0], x.shape[1]), x.dtype)
    return done([x, rows], routing)


def through_cond(x, routing):
    inflight = start(x, routing)
    inflight = jax.lax.cond(x[0, 0] < 1e9, lambda f: [f[0], f[1] + 1], lambda f: f, inflight)
    return done(inflight, routing)


def never_done(x, routing):
    home, rows = start(x, routing)
    return home


def tokens():
    x = jnp.ones((checked.RANKS, SHAPE.tokens, SHAPE.hidden), jnp.bfloat16)
    return harness.put(x, checked.sharding_of(GROUP))


IN_PLACE = pytest.param(
    through_cond,
    marks=pytest.mark.several_devices("under vmap a cond is a select, which XLA computes in place"),
)


@pytest.mark.parametrize("misuse", (twice, never_started, IN_PLACE))
def test_a_done_of_what_is_not_in_flight_is_an_error(routing, misuse):
    """The test binds primitives, because class `InFlight` already refuses such calls."""
    run, right = program(misuse), program(once)
    jax.block_until_ready(right(tokens(), routing))
    with pytest.raises(RuntimeError, match="done of an exchange"):
        jax.block_until_ready(run(tokens(), routing))
    checked.close(GROUP)
    jax.block_until_ready(right(tokens(), routing))
    GROUP.check()


def test_the_next_execution_reports_a_start_without_a_done(routing):
    run, right = program(never_done), program(once)
    jax.block_until_ready(right(tokens(), routing))
    jax.block_until_ready(run(tokens(), routing))
    with pytest.raises(RuntimeError, match="never done"):
        jax.block_until_ready(right(tokens(), routing))
    checked.close(GROUP)
    jax.block_until_ready(right(tokens(), routing))
    GROUP.check()


def test_a_start_outside_jit_is_refused():
    x = jnp.ones((checked.RANKS, 4, 8))
    ids = jnp.zeros((checked.RANKS, 4, 2), jnp.int32)

    def eager(x, ids):
        return ma.dispatch_start(x, ids, group=GROUP, num_experts=GROUP.size)

    with pytest.raises(ValueError, match="under jax.jit"):
        checked.mapped(eager, GROUP)(x, ids)
    checked.close(GROUP)  # a route has run before the error


OPERATIONS = dict(dispatch=in_flight.dispatch_given, combine=in_flight.combine_given)
SLOW_TO_READ = pytest.param(
    Phase.RECEIVE_CHUNK,
    marks=pytest.mark.several_devices(
        "ranks that share one GPU run in one launch, in which each has sent when it begins to read"
    ),
)


@pytest.mark.parametrize("phase", (Phase.SEND, SLOW_TO_READ))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stalled_rank_stops_all_in_time_with_nan_and_never_a_wrong_number(
    routing, operation, phase
):
    run = checked.program_with_routing(OPERATIONS[operation], SHAPE, GROUP)
    state = checked.repeat(run, 2, None, routing)
    checked.assert_right(state, GROUP)
    calls = 1 if phase == Phase.SEND else 2
    with hooked(GROUP, phase=phase, rank=SLOW_RANK, delay=DELAY, kind=native.SPLIT):
        failed = checked.outcome(lambda: checked.repeat(run, calls, state, routing), GROUP)
        told = re.search(rf"timeout: {operation} on rank (\d+), .*: nothing came", failed.error)
        assert told and int(told[1]) != SLOW_RANK, failed
        checked.assert_stopped(failed, lambda state: run(state, routing), GROUP)
    GROUP.check()
    checked.assert_right(run(checked.begin(), routing), GROUP)


def test_whole_exchanges_go_on_where_only_a_split_one_is_slow():
    run = checked.program(SHAPE, GROUP, in_flight.whole_between)
    state = checked.repeat(run, 1)
    with hooked(GROUP, phase=Phase.SEND, rank=SLOW_RANK, delay=TIMEOUT / 8, kind=native.SPLIT):
        checked.assert_right(checked.repeat(run, 2, state), GROUP)
