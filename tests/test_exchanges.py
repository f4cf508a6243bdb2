"""The exchanges that tests state if all ranks share one GPU. Portable calls do not count."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from exchanges import Count, predicted
from jax import lax
from small_layer import LAYOUT, route_args

import jax_moe_a2a as ma

RANKS = 2
GROUP = ma.Group(axis_name=harness.AXIS, size=RANKS)


def there_and_back(x, ids, group=GROUP, **options):
    recv = ma.dispatch(x, ids, **harness.exchanging(route_args(group), options))
    return ma.combine(recv.rows, recv)


def count(fn, *args, **options):
    mapped = jax.vmap(fn, axis_name=harness.AXIS)
    return predicted(jax.make_jaxpr(mapped)(*args), **options)


def inputs(tokens=LAYOUT.tokens, dtype="float32"):
    x = np.ones((RANKS, tokens, LAYOUT.hidden), dtype)
    return x, np.zeros((RANKS, tokens, LAYOUT.top_k), np.int32)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize(
    "fn, args, expected",
    [
        (there_and_back, inputs(), 2),
        (there_and_back, inputs(tokens=300), 3),
        (there_and_back, inputs(tokens=0), 0),
        (lambda *args: there_and_back(*args, group=harness.emulated_group(RANKS)), inputs(), None),
        (lambda x, ids: lax.fori_loop(0, 3, lambda i, x: there_and_back(x, ids), x), inputs(), 6),
        (lambda x, ids: (there_and_back(x, ids), there_and_back(x, ids)), inputs(), 2),
        (lambda x, ids: (there_and_back(x, ids), there_and_back(2 * x, ids)), inputs(), 4),
        (lambda x, ids: (there_and_back(x, ids), x)[1], inputs(), 0),
    ],
    ids=("few", "many", "empty", "portable", "loop", "repeated", "distinct", "unused"),
)
def test_a_program_has_as_many_exchanges_as_the_kernels_would_make(fn, args, expected):
    if expected is None:  # of a group without an implementation the kernels may run
        expected = 0 if harness.RANKS_ON_ONE_GPU else 2
    assert count(fn, *args) == Count(expected)


@pytest.mark.exchanges(0)
def test_operations_that_run_one_by_one_repeat_what_is_repeated():
    def twice(x, ids):
        return there_and_back(x, ids), there_and_back(x, ids)

    assert count(twice, *inputs(), is_compiled=False) == Count(4)


@pytest.mark.exchanges(0)
def test_sums_of_float64_are_portable():
    with jax.enable_x64(True):
        assert count(there_and_back, *inputs(dtype="float64")) == Count(1)


@pytest.mark.exchanges(0)
def test_split_exchanges_count_separately():
    def split(x, ids):
        recv = ma.dispatch_done(ma.dispatch_start(x, ids, **route_args(GROUP)))
        return ma.combine_done(ma.combine_start(recv.rows, recv))

    assert count(split, *inputs()) == Count(1, split=2)


@pytest.mark.exchanges(0)
def test_what_a_loop_decides_while_it_runs_is_unknown():
    def until(x, ids):
        return lax.while_loop(
            lambda x: lax.psum(jnp.sum(x), harness.AXIS) < 9, lambda x: there_and_back(x, ids), x
        )

    assert count(until, *inputs()) is None


in_the_mode = pytest.mark.skipif(
    not harness.RANKS_ON_ONE_GPU, reason="statements are checked where ranks share one GPU"
)


def run_layer(**statement):
    floats, ids, _ = small_layer.arguments(harness.SEVERAL)
    return small_layer.compiled(small_layer.layer_of_all_ranks(), **statement)(*floats, ids)


@in_the_mode
@pytest.mark.exchanges(2)
def test_a_wrong_statement_fails():
    with pytest.raises(AssertionError, match=r"expects Count\(whole=3.*Count\(whole=2"):
        run_layer(exchanges=3)


@in_the_mode
@pytest.mark.exchanges(4)
def test_exchanges_that_nothing_states_fail():
    for run in (run_layer, lambda: None):
        with pytest.raises(AssertionError, match="does not state"):
            with harness.every_exchange_is_stated():
                run()
    with pytest.raises(AssertionError, match="in all, but states"):
        with harness.every_exchange_is_stated():
            with harness.expect_exchanges(0):
                pass
            run_layer()
