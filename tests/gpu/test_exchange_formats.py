"""Test thousands of exchanges with token formats."""

import checked
import jax.numpy as jnp
import pytest

import jax_moe_a2a as ma

FORMATS = {"blockwise": ma.BlockwiseFp8(), "mx": ma.MxFp8()}


@pytest.mark.parametrize("name", FORMATS)
def test_thousands_of_exchanges_with_a_format_show_no_error(name):
    shape = checked.Shape(tokens=200, hidden=384, format=FORMATS[name], wire=FORMATS[name])
    plain = checked.Shape(tokens=64)
    group = checked.new_group(timeout=10.0, cuda_graphs=None)

    def order(step):
        whole = checked.whole(shape, group, step) + checked.whole(plain, group, step)
        # Use the next step's tokens, because XLA would merge equal calls.
        step += 1
        return whole + checked.at_once(shape, group, step) + checked.at_once(plain, group, step)

    run = checked.on_all_ranks(checked.steps_of(order, 1000), group)
    state = checked.repeat(run, 2)
    checked.assert_right(state, group)
    assert (jnp.asarray(state[0]) == 2000).all()
