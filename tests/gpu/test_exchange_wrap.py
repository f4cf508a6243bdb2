"""Test exchanges whose epochs cross 2^31, 2^32 and 2^47."""

import checked
import pytest
from hooks import hooked, set_epoch

LIMITS = (2**31, 2**32, 2**47)  # from epoch 2**47 on, the highest bit of flags is set


@pytest.mark.parametrize("limit", LIMITS)
def test_a_flag_from_before_the_limit_is_not_accepted_after_it(limit):
    large, small = checked.program(checked.MANY_CHUNKS), checked.program(checked.ONE_CHUNK)
    state = checked.repeat(large, 2)
    with hooked(checked.GROUP):
        set_epoch(checked.GROUP, limit - 9)
        state = checked.repeat(large, 2, state)
        state = checked.repeat(small, 6, state)
        checked.assert_right(checked.repeat(large, 10, state))


@pytest.mark.parametrize("limit", LIMITS)
def test_the_first_call_above_the_limit_is_right(limit):
    run = checked.program(checked.MANY_CHUNKS)
    state = checked.repeat(run, 2)
    with hooked(checked.GROUP):
        set_epoch(checked.GROUP, limit)
        checked.assert_right(checked.repeat(run, 6, state))
