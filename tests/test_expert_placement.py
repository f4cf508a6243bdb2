"""Test the tables of a `Placement`, plans of placements in NumPy and JAX, and the choice of
replicas."""

import functools
import operator
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe_a2a as ma
from jax_moe_a2a._src.placement.types import check_placement

pytestmark = pytest.mark.exchanges(0)
PLANS = ((4, 16, 2, True, 1), (4, 16, 2, False, 2), (4, 16, 0, False, 1), (2, 4, 4, True, 1))


def loads(num_experts, num_ranks):
    """Return N loads of E experts [N, E]: some random, some hard to balance."""
    rng = np.random.default_rng(num_experts)
    skewed = np.exp(rng.normal(0, 1.7, (3, num_experts))) * 1000
    one_expert, one_rank = np.zeros((2, num_experts))
    one_expert[1], one_rank[: num_experts // num_ranks] = 1e6, 1000
    largest = np.full(num_experts, (2**31 - 1) // num_experts)
    return np.stack([*skewed, one_expert, one_rank, largest, one_rank * 0]).astype(np.int32)


@functools.cache
def planner(ranks, spare, home, hosts):
    options = dict(num_ranks=ranks, spare=spare, home=home, num_hosts=hosts)
    plan = functools.partial(ma.plan_placement, **options)
    return plan, harness.jit(plan)


def rank_loads(placement, load, num_ranks):
    """Return each rank's number of rows if every slot receives its share of its expert's load."""
    shares = np.diff(placement.share_ends, axis=-1, prepend=0) / 2**15
    assert (shares >= 0).all() and (placement.share_ends[..., -1] == 2**15).all()
    found = np.zeros(num_ranks)
    for expert, slots in enumerate(placement.expert_slots):
        for replica in range(placement.num_replicas[expert]):
            rank = slots[replica] // (placement.num_slots // num_ranks)
            found[rank] += load[expert] * shares[expert, replica]
        assert (shares[expert, placement.num_replicas[expert] :] == 0).all()
    return found


@pytest.mark.parametrize(("ranks", "experts", "spare", "home", "hosts"), PLANS)
def test_plans_are_valid_and_equal_in_numpy_and_jax(ranks, experts, spare, home, hosts):
    plan, in_jax = planner(ranks, spare, home, hosts)
    many = loads(experts, ranks)
    plans = plan(many)
    in_program = in_jax(jnp.asarray(many))
    jax.tree.map(harness.assert_same_bytes, in_program, plans)
    assert (plans.num_ranks, plans.home) == (ranks, home)
    for i, load in enumerate(many):
        placement = jax.tree.map(operator.itemgetter(i), plans)
        table = placement.slot_experts
        check_placement(placement, ranks, num_experts=experts)
        again = ma.Placement.from_slots(table, experts, num_ranks=ranks)
        for name in ("expert_slots", "num_replicas"):
            harness.assert_same_bytes(getattr(again, name), getattr(placement, name))
        assert again.home or not home
        for on_rank in table.reshape(ranks, -1):
            held = on_rank[on_rank >= 0]
            assert len(set(held)) == len(held)
        if home:
            found = rank_loads(placement, load, ranks)
            assert found.max() <= load.reshape(ranks, -1).sum(1).max() * 1.001
        if hosts > 1:
            host_of = placement.expert_slots // (len(table) // hosts)
            is_slot = placement.expert_slots >= 0
            assert ((host_of == host_of[:, :1]) | ~is_slot).all()


def test_two_spare_slots_balance_the_ranks():
    for ranks, experts, home in ((8, 64, True), (16, 64, False), (2, 4, True)):
        for load in loads(experts, ranks)[:4]:
            placement = ma.plan_placement(load, num_ranks=ranks, spare=2, home=home)
            found = rank_loads(placement, load, ranks)
            assert found.max() <= 1.02 * found.mean()


def test_replicas_are_worth_their_slots():
    load = np.array([600, 0, 250, 250, 300, 200])
    many = ma.plan_placement(load, num_ranks=3, spare=1)
    assert (many.slot_experts >= 0).sum() == 8
    few = ma.plan_placement(load, num_ranks=3, spare=1, min_rows=51)
    assert (few.slot_experts >= 0).sum() == 6
    # A replica of expert 0 would have 30 rows.
    for min_rows, num_slots in ((30, 5), (31, 4)):
        plan = ma.plan_placement([60, 10, 10, 0], num_ranks=2, spare=1, min_rows=min_rows)
        assert (plan.slot_experts >= 0).sum() == num_slots
        half = 2**14 if min_rows == 30 else 2**15
        assert plan.share_ends[0].tolist() == [half, 2**15, 2**15]


def test_experts_are_packed_in_the_order_of_their_loads():
    """If the planner places the experts with the most rows first, both ranks have 9 rows."""
    placement = ma.plan_placement([9, 4, 4, 1, 0, 0], num_ranks=2, spare=0, home=False)
    assert rank_loads(placement, [9, 4, 4, 1, 0, 0], 2).tolist() == [9, 9]


def test_the_last_spare_slot_of_a_rank_fills_it_even_if_its_source_falls_below_the_mean():
    """The planner moves 190 rows from rank 0 to rank 2, and then 90 from rank 1 to rank 0."""
    load = np.array([300, 290, 10])
    placement = ma.plan_placement(load, num_ranks=3, spare=1)
    np.testing.assert_allclose(rank_loads(placement, load, 3), 200, atol=0.1)


def chosen_by_hand(ids, placement, num_ranks, counts):
    """Return slots: each rank first uses its own slots, then the slots of all ranks in order."""
    slots = np.full_like(ids, -1)
    for expert, replicas in enumerate(placement.expert_slots):
        replicas = replicas[: placement.num_replicas[expert]]
        ends = counts[:, expert].sum() * placement.share_ends[expert].astype(np.int64) // 2**15
        room = dict(zip(replicas, np.diff(ends, prepend=0)))
        rows = [np.argwhere(ids[rank] == expert).tolist() for rank in range(num_ranks)]
        for rank in range(num_ranks):
            on_rank = [s for s in replicas if s // (placement.num_slots // num_ranks) == rank]
            while on_rank and room[on_rank[0]] and rows[rank]:
                slots[rank, *rows[rank].pop(0)] = on_rank[0]
                room[on_rank[0]] -= 1
        for rank in range(num_ranks):
            for row in rows[rank]:
                slot = next(s for s in replicas if room[s])
                slots[rank, *row] = slot
                room[slot] -= 1
        assert not any(room.values())
    return slots


def drawn_ids(ranks, tokens, experts, sigma=1.7, seed=0):
    rng = np.random.default_rng(seed)
    keys = rng.normal(0, sigma, experts) + rng.gumbel(size=(ranks, tokens, experts))
    ids = keys.argsort(axis=-1)[..., :-5:-1].astype(np.int32)
    return np.where(rng.random(ids.shape) < 0.1, -1, ids)


@functools.cache
def chooser(ranks):
    def choose(ids, placement, rank):
        return ma.choose_slots(ids, placement, rank=rank, num_ranks=ranks)

    return harness.jit(choose)


@pytest.mark.parametrize("table", ["planned", "loaded"])
def test_choices_fill_the_shares_of_slots(table):
    ranks, experts = 4, 16
    ids = drawn_ids(ranks, 64, experts)
    counts = np.stack([np.bincount(i[i >= 0], minlength=experts) for i in ids]).astype(np.int32)
    if table == "planned":
        placement = ma.plan_placement(counts.sum(0), num_ranks=ranks, spare=2)
    else:
        slots = np.random.default_rng(1).permutation([*range(16), 3, 3, 3, 3, 5, 5, 9, -1])
        placement = ma.Placement.from_slots(slots, experts, num_ranks=ranks)
    assert placement.num_replicas.max() >= 2
    choose = chooser(ranks)
    exact = chosen_by_hand(ids, placement, ranks, counts)
    slots = np.stack([choose(ids[r], placement, np.int32(r)) for r in range(ranks)])
    of_slots = lambda slots: np.bincount(slots[slots >= 0], minlength=placement.num_slots)
    is_row = ids >= 0
    assert (placement.slot_experts[slots[is_row]] == ids[is_row]).all()
    assert (slots[~is_row] == -1).all()
    assert abs(of_slots(slots) - of_slots(exact)).max() <= 0.04 * is_row.sum() / ranks

    everywhere = np.asarray(choose(ids[0], placement, None))
    shares = np.diff(placement.share_ends, axis=1, prepend=0) / 2**15
    for expert, slots in enumerate(placement.expert_slots):
        for slot, share in zip(slots[slots >= 0], shares[expert]):
            assert abs((everywhere == slot).sum() - share * counts[0, expert]) < 1


def test_ids_of_no_expert_get_no_slot():
    placement = ma.Placement.from_slots([0, 1, -1, 2, 3, 0], 4, num_ranks=2)
    for dtype, ids in ((np.int64, [[-(2**40), -1, 4, 2**40]]), (np.uint8, [[255, 4, 3, 3]])):
        ids = np.array(ids, dtype)  # a constant, because jit would wrap 64-bit arguments
        choose = lambda table, ids=ids: ma.choose_slots(ids, table, rank=0, num_ranks=2)
        slots = harness.jit(choose)(placement)
        assert slots.tolist() == [[-2, -1, 6, 6] if dtype == np.int64 else [6, 6, 4, 4]]


@pytest.mark.parametrize("home", (True, False))
def test_another_plan_does_not_compile_again(home):
    choose = jax.jit(lambda ids, placement: ma.choose_slots(ids, placement, rank=1, num_ranks=4))
    ids = drawn_ids(1, 8, 16)[0]
    for seed in range(10):
        load = np.random.default_rng(seed).integers(0, 1000, 16)
        choose(ids, ma.plan_placement(load, num_ranks=4, spare=2, home=home))
    assert choose._cache_size() == 1


FROM_SLOTS = functools.partial(ma.Placement.from_slots, num_experts=4, num_ranks=2)
PLAN = functools.partial(ma.plan_placement, num_ranks=2, spare=1)
TABLE = FROM_SLOTS([0, 1, -1, 2, 3, 0])
CHOOSE = functools.partial(ma.choose_slots, np.zeros((2, 1), np.int32), rank=0, num_ranks=2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        (lambda: FROM_SLOTS([0, 1, 2, 3.0]), TypeError, "must hold integers; got float64[4]"),
        (lambda: FROM_SLOTS([0, 1, 2, 3, 0]), ValueError, "a multiple of 2 (num_ranks)"),
        (lambda: FROM_SLOTS([0, 1, 2, 4]), ValueError, "ids of experts in [0, 4)"),
        (lambda: FROM_SLOTS([0, 1, 2, 2]), ValueError, "got 2 of expert 2: use fewer"),
        (lambda: FROM_SLOTS([0, 1, 2, 2, -1, -1]), ValueError, "got 0 of expert 3: give"),
        (lambda: jax.jit(FROM_SLOTS)(np.arange(4)), TypeError, "known when the program is traced"),
        (lambda: PLAN([1.0, 2]), TypeError, "load must hold integers"),
        (lambda: PLAN([1, 2, 3]), ValueError, "num_experts must be a multiple of num_ranks=2"),
        (lambda: PLAN([2**31 - 1, 1]), ValueError, "its sum must be below 2**31"),
        (lambda: PLAN([1, 2], num_hosts=3), ValueError, "num_hosts must divide num_ranks=2"),
        (lambda: CHOOSE([0]), TypeError, "placement must be a Placement; got list"),
        (lambda: CHOOSE(TABLE, num_ranks=4), ValueError, "4 experts on 4 ranks; got one with 4"),
        (
            lambda: CHOOSE(jax.tree.map(lambda leaf: leaf[None], TABLE)),
            TypeError,
            "Pass the placement of one layer",
        ),
    ),
)
def test_errors_name_the_remedy(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
