"""Define unusual routings, which map (group, step) to ids [TOKENS, TOP_K] of one rank."""

import checked
import harness
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RANKS = checked.RANKS
TOP_K = 8
LOCAL_EXPERTS = max(4, 32 // RANKS)
EXPERTS = RANKS * LOCAL_EXPERTS
# An even number, and smaller for more ranks, because rows grow with the square of the ranks.
TOKENS = max(4, min(64, 1024 // RANKS) // 2 * 2)
CHOICES = TOKENS * TOP_K
INT32 = np.iinfo(np.int32)
TIGHT_CAPACITY = CHOICES * 3 // 4 | 1  # fewer rows than an average rank receives, and odd
STEPS = 500 if checked.ON_GPU else 3  # steps in one call of a program
KERNELS = checked.new_group(timeout=10.0, cuda_graphs=None)
PORTABLE = checked.new_group(implementation="portable")
POPULARITY_STEPS = 100  # after so many steps, the experts get new random popularities


def random_numbers(group, step, salt):
    """Return integers [tokens, top_k] from 0 to 2^24 - 1, which differ between ranks."""
    token, k = jnp.arange(TOKENS)[:, None], jnp.arange(TOP_K)
    mixed = checked.hashed(salt, step, checked.my_rank(group), token, k)
    return (mixed >> 8).astype(jnp.int32)


def random_number(step, salt):
    """Return an integer from 0 to 2^24 - 1, which is equal on all ranks."""
    return (checked.hashed(salt, step) >> 8).astype(jnp.int32)


def uniform(group, step):
    return random_numbers(group, step, 20) % EXPERTS


def last_expert_of_the_last_rank(group, step):
    return jnp.full((TOKENS, TOP_K), EXPERTS - 1)


def one_expert_of_rank_0(group, step):
    return jnp.full((TOKENS, TOP_K), random_number(step, 21) % LOCAL_EXPERTS)


def nothing(group, step):
    return jnp.full((TOKENS, TOP_K), -1)


def a_single_choice(group, step):
    token, k = jnp.arange(TOKENS)[:, None], jnp.arange(TOP_K)
    is_it = checked.my_rank(group) == random_number(step, 22) % RANKS
    is_it &= token == random_number(step, 23) % TOKENS
    is_it &= k == random_number(step, 24) % TOP_K
    return jnp.where(is_it, random_number(step, 25) % EXPERTS, -1)


def experts_of(rank, group, step):
    return rank * LOCAL_EXPERTS + random_numbers(group, step, 26) % LOCAL_EXPERTS


def own_rank_only(group, step):
    return experts_of(checked.my_rank(group), group, step)


def next_rank_only(group, step):
    return experts_of((checked.my_rank(group) + 1) % RANKS, group, step)


def every_second_token(group, step):
    token = jnp.arange(TOKENS)[:, None]
    return jnp.where((token + step) % 2 == 0, -1, uniform(group, step))


def outside_the_range(group, step):
    outside = [EXPERTS, EXPERTS + 1, -2, -3, -EXPERTS, 1 << 16, INT32.max, INT32.min]
    drawn = random_numbers(group, step, 27)
    wild = jnp.asarray(outside, jnp.int32)[drawn // 2 % len(outside)]
    return jnp.where(drawn % 2 == 0, wild, uniform(group, step))


def one_expert_with_90_percent(group, step):
    is_hot = random_numbers(group, step, 28) % 10 < 9
    return jnp.where(is_hot, random_number(step, 29) % EXPERTS, uniform(group, step))


def skewed(sigma):
    """Return a routing to the TOP_K experts e with the largest b_e + Gumbel noise.

    The standard deviation of b_e is sigma. With 256 experts on 32 ranks, the sigmas of ROUTINGS
    give the most even, the mean and the least even load of DeepSeek-R1's layers.
    """

    def routing(group, step):
        popularity = jax.random.fold_in(jax.random.key(30), step // POPULARITY_STEPS)
        own = jax.random.fold_in(jax.random.key(31), step)
        own = jax.random.fold_in(own, checked.my_rank(group))
        bias = sigma * jax.random.normal(popularity, (EXPERTS,))
        return lax.top_k(bias + jax.random.gumbel(own, (TOKENS, EXPERTS)), TOP_K)[1]

    return routing


ROUTINGS = {
    routing.__name__: routing
    for routing in (
        last_expert_of_the_last_rank,
        one_expert_of_rank_0,
        nothing,
        a_single_choice,
        own_rank_only,
        next_rank_only,
        every_second_token,
        outside_the_range,
        one_expert_with_90_percent,
    )
}
ROUTINGS |= {f"skewed_{sigma}": skewed(sigma) for sigma in (0.5, 1.1, 1.7)}


def ids_of(name_index, group, step):
    return jnp.stack([routing(group, step) for routing in ROUTINGS.values()])[name_index].astype(
        jnp.int32
    )


def program(take_step, **jit_options):
    """Return a program that adds ``take_step(index of a routing, step)`` to the sums."""

    def on_rank(name_index, step, sums):
        def once(carry, _):
            step, sums = carry
            return (step + 1, jax.tree.map(jnp.add, sums, take_step(name_index, step))), None

        return name_index, *lax.scan(once, (step, sums), length=STEPS)[0]

    return checked.on_all_ranks(on_rank, KERNELS, **jit_options)


def begin(name, zeros):
    """Return a program's first arguments: the routing ``name``, step 0, and the sums ``zeros``."""
    index = np.full(RANKS, list(ROUTINGS).index(name), np.int32)
    state = index, np.zeros(RANKS, np.int32), zeros
    return harness.put(state, checked.sharding_of(KERNELS))


def run_all_steps(run, name, zeros):
    _, steps, sums = harness.numpy_of(run(*begin(name, zeros)))
    KERNELS.check()
    assert (steps == STEPS).all()
    checked.assert_counted(KERNELS)
    return sums
