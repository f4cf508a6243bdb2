"""Dispatches that quantize: the protocol's rules hold for them as for others."""

import checked
import jax.numpy as jnp
import pytest
from hooks import Mutation, Phase, hooked

import jax_moe_a2a as ma

FORMATS = {"blockwise": ma.BlockwiseFp8(), "mx": ma.MxFp8()}
# Rows of 32 KB, which take long to encode; and many tokens, of which several share a flag.
LONG = checked.Shape(tokens=1024, hidden=8192, top_k=1, dtype="float32", format=ma.MxFp8())
SHARED_FLAGS = checked.Shape(tokens=5000, hidden=128, top_k=2, format=ma.BlockwiseFp8())
LATE = dict(phase=Phase.SEND, rank=0, delay=200e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_thousands_of_dispatches_with_a_format_show_no_error(name):
    """With another routing in every step, and combines and dispatches of other shapes between."""
    shape = checked.Shape(tokens=200, hidden=384, format=FORMATS[name])
    plain = checked.Shape(tokens=64)
    group = checked.new_group(timeout=10.0, cuda_graphs=None)

    def order(step):
        return checked.whole(shape, group, step) + checked.whole(plain, group, step)

    run = checked.on_all_ranks(checked.steps_of(order, 1000), group.mesh)
    state = checked.repeat(run, 2)
    checked.assert_right(state, group)
    assert (jnp.asarray(state[0]) == 2000).all()


@pytest.mark.parametrize("order", (checked.dispatch_only, checked.two_dispatches_first))
def test_any_order_of_dispatches_with_a_format_is_right(order):
    for shape in (checked.Shape(tokens=100, format=FORMATS["mx"]), SHARED_FLAGS):
        checked.assert_right(checked.repeat(checked.program(shape, order=order), 20))


@pytest.mark.parametrize("shape", (LONG, SHARED_FLAGS), ids=("long", "shared_flags"))
def test_encoded_rows_are_there_when_their_flag_is(shape):
    routing = checked.routing_program(shape)()
    run = checked.program_with_routing(checked.dispatch_given, shape)
    for phase in (Phase.SEND, Phase.RECEIVE_CHUNK):
        checked.assert_right(run(checked.begin(), routing))  # it opens the workspace
        with hooked(checked.GROUP, **{**LATE, "phase": phase}):
            checked.assert_right(checked.repeat(lambda state: run(state, routing), 20))


@pytest.mark.parametrize("shape", (LONG, SHARED_FLAGS), ids=("long", "shared_flags"))
def test_a_flag_before_its_encoded_rows_is_noticed(shape):
    routing = checked.routing_program(shape)()
    run = checked.program_with_routing(checked.dispatch_given, shape)
    checked.assert_right(run(checked.begin(), routing))
    with hooked(checked.GROUP, mutation=Mutation.FLAG_BEFORE_ROWS, **LATE):
        broken = checked.outcome(lambda: checked.repeat(lambda state: run(state, routing), 20))
    assert broken.counts is not None and broken.counts.wrong.any(), broken
