"""Compare exchanges with the oracle, for all layouts and routings of cases.py."""

import cases
import harness
import jax
import oracle
import pytest


def assert_is_the_oracles(result, what):
    expected = result.expected
    harness.assert_recv_is(result.recv, result.x, result.topk_weights, expected)
    harness.assert_routing_is(result.recv.routing, expected)
    harness.assert_sums_agree(result.sum, *oracle.combine(result.y, expected), what)
    weights = oracle.dispatch_choices(result.topk_weights, expected)
    harness.assert_sums_agree(result.weighted, *oracle.combine(result.y, expected, weights), what)


@pytest.mark.parametrize("layout", cases.LAYOUTS, ids=lambda layout: layout.name)
def test_an_exchange_equals_the_oracle(layout):
    for case in cases.cases_of(layout):
        assert_is_the_oracles(harness.run_case(case, harness.SEVERAL), case.name)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.gpu_catalogue(), ids=lambda case: case.name)
def test_an_exchange_of_many_tokens_equals_the_oracle(case):
    assert_is_the_oracles(harness.run_case(case, harness.SEVERAL), case.name)


def test_one_program_runs_with_another_routing_in_every_call(ranks):
    names = list(cases.ROUTINGS)
    for seed in range(100 if harness.ON_GPU else len(names)):
        case = cases.Case(cases.CUT, names[seed % len(names)])
        assert_is_the_oracles(harness.run_case(case, ranks, seed), case.name)


def test_two_runs_return_the_same_bytes():
    inputs, _ = harness.exchange_inputs(cases.Case(cases.CUT, "skewed"), harness.SEVERAL)
    program = harness.exchange_program(cases.CUT, harness.SEVERAL)
    first, second = program(*inputs), program(*inputs)
    for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True):
        harness.assert_same_bytes(a, b)
