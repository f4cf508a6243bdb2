"""Test extreme routings after earlier calls have filled the ring with NaN."""

import dataclasses
import functools

import cases
import harness
import jax
import numpy as np
import pytest
from test_catalogue import assert_is_the_oracles

RANKS = harness.SEVERAL
# A run makes a dispatch and two combines, so two runs use each ring half 3 times.
FULL = cases.Layout("worst_case", tokens=8, top_k=32, local_experts=2, hidden=24)
LAYOUTS = [
    dataclasses.replace(FULL, name=f"capacity_{capacity}", capacity=capacity)
    for capacity in (0, 1, 100)
]
ROUTINGS = (
    "all_masked",
    "all_invalid",
    "invalid",
    "last_expert_only",
    "one_expert_per_token",
    "uniform",
    "masked",
)


@functools.cache
def nan_arrays():
    """Return arguments for `harness.exchange_fn`: tokens, weights and rows, all NaN."""
    (_, *arrays), _ = harness.exchange_inputs(cases.Case(FULL, "uniform"), RANKS)
    sharding = harness.placement(harness.mesh_of(RANKS))
    return jax.tree.map(lambda array: harness.poison(array, sharding), arrays)


def leave_nan_in_both_ring_halves():
    experts = FULL.num_experts(RANKS)
    # Together, the routings of this loop send every token to every rank.
    for first in range(0, experts, FULL.top_k):
        everywhere = np.arange(first, first + FULL.top_k, dtype=np.int32) % experts
        ids = np.broadcast_to(everywhere, (RANKS, FULL.tokens, FULL.top_k))
        for _ in range(4):
            results = harness.exchange_program(FULL, RANKS)(ids, *nan_arrays())
            assert np.isnan(results["sum"].astype(np.float32)).all()


@pytest.mark.parametrize("layout", (*LAYOUTS, FULL), ids=lambda layout: layout.name)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_stale_bytes_never_reach_a_result(layout, routing):
    case = cases.Case(layout, routing)
    leave_nan_in_both_ring_halves()
    for seed in range(2):  # the second run begins with the other ring half
        assert_is_the_oracles(harness.run_case(case, RANKS, seed), case.name)
