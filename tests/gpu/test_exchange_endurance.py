"""A hundred thousand exchanges of rows in a row, every element of every one of them checked."""

import checked
import jax.numpy as jnp
from jax import lax

STEPS, PROGRAMS = 5000, 10  # each step is a route, a dispatch and a combine
SHAPE = checked.Shape(tokens=64)


def test_a_hundred_thousand_exchanges_show_no_error_and_no_drift():
    """With another routing in every step and a collective of NCCL between them."""
    group = checked.new_group(timeout=10.0, cuda_graphs=None)

    def order(step):
        counts = checked.whole(SHAPE, group, step)
        mine = checked.hashed(step, checked.my_rank(group), jnp.arange(64))
        expected = sum(checked.hashed(step, rank, jnp.arange(64)) for rank in range(group.size))
        return counts + checked.counted(wrong=lax.psum(mine, group.axis_name) != expected)

    run = checked.on_all_ranks(checked.steps_of(order, STEPS), group.mesh)
    state = checked.repeat(run, PROGRAMS)
    checked.assert_right(state, group)
    assert (jnp.asarray(state[0]) == STEPS * PROGRAMS).all()
