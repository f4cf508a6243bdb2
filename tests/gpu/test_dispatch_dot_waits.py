"""A product whose rows land, if a rank is late or does not come."""

import time

import harness
import jax
import next_to_products as nx
import pytest
from hooks import DELAYABLE, Phase, hooked

TIMEOUT = 1.0
PROGRAM = nx.layer, nx.WORST, "bfloat16"
LATE = 1  # rank


@pytest.fixture(scope="module")
def runs():
    options = dict(timeout=TIMEOUT, first_timeout=TIMEOUT)
    while_landing, found = nx.program(*PROGRAM, dispatch_dot=16, **options)
    after, _ = nx.program(*PROGRAM, **options)
    assert found[0] == 2
    return while_landing, after


@pytest.fixture
def group(runs):
    group = harness.group_of(nx.RANKS, timeout=TIMEOUT, first_timeout=TIMEOUT)
    jax.block_until_ready(runs[0](*nx.arguments(*PROGRAM[1:2], "uniform", "bfloat16")))
    return group


@pytest.mark.parametrize("phase", DELAYABLE, ids=lambda phase: phase.name)
def test_a_late_rank_changes_no_bit(runs, group, phase):
    while_landing, after = runs
    for seed, routing in enumerate(("uniform", "skewed", "idle_rank")):
        args = nx.arguments(nx.WORST, routing, "bfloat16", seed)
        expected = jax.block_until_ready(after(*args))
        with hooked(group, phase=phase, rank=LATE, delay=TIMEOUT / 8):
            nx.assert_same_bits(while_landing(*args), expected, routing)


def test_a_rank_that_does_not_come_ends_the_product_with_an_error(runs, group):
    while_landing, after = runs
    args = nx.arguments(nx.WORST, "uniform", "bfloat16")
    expected = jax.block_until_ready(after(*args))
    with hooked(group, phase=Phase.SEND, rank=LATE, delay=1.5 * TIMEOUT):
        start = time.monotonic()
        with pytest.raises(Exception, match="timeout: "):
            jax.block_until_ready(while_landing.__wrapped__(*args))  # not counted
            group.check()
        assert time.monotonic() - start < 4 * TIMEOUT
    group.close()
    nx.assert_same_bits(while_landing(*args), expected, "after the failure")
