"""Epochs near the limits of narrower integers, with flags that were last raised long before."""

import checked
import pytest
from hooks import hooked

from jax_moe_a2a import native


@pytest.mark.parametrize("epoch", (2**31 - 3, 2**32 - 3, 2**47 - 3, 2**47))
def test_exchanges_are_right_across_the_limit_of_an_integer(epoch):
    large, small = checked.program(checked.MANY_CHUNKS), checked.program(checked.ONE_CHUNK)
    state = checked.repeat(large, 2)
    with hooked(checked.GROUP):
        native.set_epoch(checked.GROUP.topology, epoch)
        # The high chunks' flags stay what they were before the jump, until a call needs them.
        state = checked.repeat(small, 6, state)
        checked.assert_right(state)
        state = checked.repeat(large, 12, state)
        checked.assert_right(checked.repeat(small, 6, state))


@pytest.mark.parametrize("epoch", (2**31 - 3, 2**32 - 3))
def test_the_first_call_after_a_jump_may_need_flags_of_long_ago(epoch):
    large = checked.program(checked.MANY_CHUNKS)
    state = checked.repeat(large, 2)
    with hooked(checked.GROUP):
        native.set_epoch(checked.GROUP.topology, epoch)
        checked.assert_right(checked.repeat(large, 6, state))
