"""A hundred thousand exchanges of rows in a row, every element of every one of them checked."""

import checked
import jax.numpy as jnp
from jax import lax

STEPS, PROGRAMS = 5000, 10  # each step is a route, a dispatch and a combine
SHAPE = checked.fitting(checked.Shape(tokens=64))


def test_a_hundred_thousand_exchanges_show_no_error_and_no_drift():
    """With another routing in every step and a collective of NCCL between them.

    Where all ranks share one GPU the collective is a sum on it, and the counters of every rank show
    the number.
    """
    group = checked.new_group(timeout=10.0, cuda_graphs=None)
    checked.close(group)  # the counters begin again

    def order(step):
        counts = checked.whole(SHAPE, group, step)
        mine = checked.hashed(step, checked.my_rank(group), jnp.arange(64))
        every = checked.hashed(step, jnp.arange(group.size)[:, None], jnp.arange(64))
        expected = jnp.sum(every, axis=0, dtype=every.dtype)
        return counts + checked.counted(wrong=lax.psum(mine, group.axis_name) != expected)

    each = checked.exchanges_of(checked.whole.operations, SHAPE, group)
    run = checked.on_all_ranks(checked.steps_of(order, STEPS), group, each.times(STEPS))
    state = checked.repeat(run, PROGRAMS)
    checked.assert_right(state, group)
    assert (jnp.asarray(state[0]) == STEPS * PROGRAMS).all()
    if checked.ONE_GPU and checked.ON_GPU:
        assert checked.counters_of(group).whole == [3 * STEPS * PROGRAMS] * checked.RANKS
