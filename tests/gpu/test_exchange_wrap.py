"""Test exchanges whose epochs cross 2^31, 2^32 and 2^47."""

import checked
import pytest
from hooks import hooked, set_epoch

LIMITS = (2**31, 2**32, 2**47)  # at 2**47, a flag's highest bit is set


@pytest.mark.parametrize("limit", LIMITS)
def test_a_flag_raised_before_the_limit_is_no_flag_of_after_it(limit):
    """Epochs cross the limit in small calls, while old flags of large calls remain. Large calls
    after the limit return correct results."""
    large, small = checked.program(checked.MANY_CHUNKS), checked.program(checked.ONE_CHUNK)
    state = checked.repeat(large, 2)
    with hooked(checked.GROUP):
        set_epoch(checked.GROUP, limit - 9)
        state = checked.repeat(large, 2, state)  # fills both ring halves
        state = checked.repeat(small, 6, state)
        checked.assert_right(checked.repeat(large, 10, state))


@pytest.mark.parametrize("limit", LIMITS)
def test_the_first_call_above_the_limit_is_right(limit):
    run = checked.program(checked.MANY_CHUNKS)
    state = checked.repeat(run, 2)
    with hooked(checked.GROUP):
        set_epoch(checked.GROUP, limit)
        checked.assert_right(checked.repeat(run, 6, state))
