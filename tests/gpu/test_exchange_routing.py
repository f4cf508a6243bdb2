"""Degenerate routings, over landing zones full of what earlier calls have left there."""

import functools

import checked
import harness
import numpy as np
import oracle
import pytest

import jax_moe_a2a as ma

RANKS, TOKENS, TOP_K, LOCAL_EXPERTS, HIDDEN = checked.RANKS, 8, 32, 2, 24
EXPERTS = RANKS * LOCAL_EXPERTS
FULL = RANKS * TOKENS * TOP_K  # rows of the worst case
CHOICES = (RANKS, TOKENS, TOP_K)
# In turn these send every token to every rank. One of them is enough for up to 16 ranks.
EVERYWHERE = [
    np.broadcast_to(np.arange(first, first + TOP_K, dtype=np.int32) % EXPERTS, CHOICES)
    for first in range(0, EXPERTS, TOP_K)
]


def uniform(rng):
    return rng.integers(0, EXPERTS, CHOICES, np.int32)


def with_holes(rng):
    return np.where(rng.random(CHOICES) < 0.5, uniform(rng), np.int32(-1))


def outside(rng):
    wild = np.array([EXPERTS, EXPERTS + 1, -2, -EXPERTS, 2**31 - 1, -(2**31)], np.int32)
    return np.where(rng.random(CHOICES) < 0.5, rng.choice(wild, CHOICES), uniform(rng))


ROUTINGS = {
    "nothing": lambda rng: np.full(CHOICES, -1, np.int32),
    "all_outside": lambda rng: np.full(CHOICES, EXPERTS, np.int32),
    "some_outside": outside,
    "one_expert_32_times": lambda rng: np.full(CHOICES, EXPERTS - 1, np.int32),
    "own_expert_32_times": lambda rng: np.broadcast_to(
        np.repeat(rng.integers(0, EXPERTS, CHOICES[:2], np.int32)[..., None], TOP_K, -1), CHOICES
    ),
    "uniform": uniform,
    "with_holes": with_holes,
}


@functools.cache
def program(capacity):
    def on_rank(ids, x, weights, y):
        recv = ma.dispatch(
            x, ids, weights, group=checked.GROUP, num_experts=EXPERTS, capacity=capacity
        )
        return recv, ma.combine(y, recv, weights=None), ma.combine(y, recv)

    shape = checked.Shape(TOKENS, HIDDEN, TOP_K, LOCAL_EXPERTS, "float32")
    operations = dict(routed_dispatch=1, combine=2)
    each = checked.exchanges_of(operations, shape, checked.GROUP)
    run = checked.on_all_ranks(on_rank, checked.GROUP, each if capacity else checked.NONE)
    return lambda *args: harness.numpy_of(run(*harness.put(args, checked.sharding_of())))


def leave_nan_in_both_ring_halves():
    """Fill every landing slot of dispatch and of combine.

    A run makes an odd number of exchanges, so that two runs reach both ring halves.
    """
    nan = np.float32(np.nan)
    x, y = np.full((RANKS, TOKENS, HIDDEN), nan), np.full((RANKS, FULL, HIDDEN), nan)
    for ids in (ids for ids in EVERYWHERE for _ in range(4)):
        recv, *sums = program(FULL)(ids, x, np.full(CHOICES, nan), y)
    assert np.isnan(recv.rows[recv.src_info.rank >= 0]).all() and np.isnan(sums).all()


@pytest.mark.parametrize("capacity", (0, 1, 100, FULL))
@pytest.mark.parametrize("name", ROUTINGS)
def test_stale_bytes_never_reach_a_result(name, capacity):
    rng = np.random.default_rng([capacity, *name.encode()])
    ids = ROUTINGS[name](rng)
    expected = oracle.route(ids, EXPERTS, capacity)
    x = rng.standard_normal((RANKS, TOKENS, HIDDEN), np.float32)
    weights = rng.standard_normal(CHOICES, np.float32)
    y = rng.standard_normal((RANKS, capacity, HIDDEN), np.float32)
    y[expected.row_token < 0] = np.nan

    rows = oracle.dispatch(x, expected)
    row_weights = oracle.dispatch_choices(weights, expected)
    total, _ = oracle.combine(y, expected)
    weighted_total, slack = oracle.combine(y, expected, row_weights)

    run = program(capacity)
    leave_nan_in_both_ring_halves()
    for _ in range(2):  # with either ring half first
        recv, plain, weighted = run(ids, x, weights, y)
        for field in oracle.FIELDS:
            np.testing.assert_array_equal(
                getattr(recv.routing, field), getattr(expected, field), err_msg=field
            )
        np.testing.assert_array_equal(recv.rows, rows)
        np.testing.assert_array_equal(recv.weights, row_weights)
        np.testing.assert_array_equal(plain, total)
        assert (np.abs(weighted.astype(np.float64) - weighted_total) <= slack).all()
    checked.GROUP.check()
    checked.assert_counted()
