"""Test what follows from the definition of dropped choices; other tests compare drops with the
oracle."""

import functools

import harness
import jax
import numpy as np
import pytest

import jax_moe_a2a as ma

RANKS, TOKENS, TOP_K, LOCAL_EXPERTS = 4, 24, 3, 4
EXPERTS = RANKS * LOCAL_EXPERTS
CAPACITY = TOKENS * TOP_K  # a capacity factor of 1
pytestmark = pytest.mark.exchanges(0)  # ranks are emulated on the portable path


@functools.cache
def program(capacity, alignment):
    """Return a function from ids [R, T, K] to booleans: True for each choice that has a row."""
    group = ma.Group(axis_name="ep", size=RANKS, implementation="portable")

    def kept(ids):
        route_args = dict(num_experts=EXPERTS, capacity=capacity, alignment=alignment)
        recv = ma.dispatch(ids, ids, group=group, **harness.exchanging(route_args))
        one_hot = jax.nn.one_hot(recv.src_info.k, ids.shape[1])
        return ma.combine(one_hot, recv, weights=None) > 0

    return jax.jit(jax.vmap(kept, axis_name="ep"))


def kept_choices(ids, capacity=CAPACITY, alignment=1):
    return harness.numpy_of(program(capacity, alignment)(ids))


def ids_of(seed, spread=0.7):
    """Return random ids [R, T, K], distinct in a token; a larger spread makes loads less even."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, EXPERTS) + rng.gumbel(size=(RANKS, TOKENS, EXPERTS))
    return np.argsort(-logits, axis=-1)[..., :TOP_K]


@pytest.mark.parametrize("alignment", (1, 4))
def test_at_a_rank_no_choice_is_dropped_before_a_later_one(alignment):
    ids = ids_of(0)
    kept = kept_choices(ids, alignment=alignment)
    for rank in range(RANKS):
        here = ids // LOCAL_EXPERTS == rank
        dropped_choices = np.nonzero(here & ~kept)[2]
        kept_of_rank = np.nonzero(here & kept)[2]
        if dropped_choices.size:
            assert kept_of_rank.max() <= dropped_choices.min()
    assert not kept.all()


def test_the_last_expert_of_a_rank_is_dropped_no_more_than_the_first():
    dropped = [0, 0]
    for seed in range(8):
        ids = ids_of(seed, spread=0.5)
        kept = kept_choices(ids)
        for i, expert in enumerate((0, LOCAL_EXPERTS - 1)):
            dropped[i] += np.sum(~kept & (ids % LOCAL_EXPERTS == expert))
    first, last = dropped
    assert first > 0 and last < 2 * first


def test_sources_drop_equally_many_choices():
    """If ranks have equal ids, their numbers of dropped choices at a rank differ by at most one."""
    ids = np.broadcast_to(ids_of(1)[:1], (RANKS, TOKENS, TOP_K))
    dropped = np.sum(~kept_choices(ids), axis=(1, 2))
    assert dropped.min() > 0 and dropped.max() - dropped.min() <= RANKS
