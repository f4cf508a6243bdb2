"""Test the reserved and mapped memory of a workspace, its growth, and its counters."""

import checked
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_counters import counters_of
from exchanges import Count

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import native

# No other test has this order of devices or number of ranks, so the workspace is separate.
MESH = checked.mesh_of((checked.DEVICES[1::2] + checked.DEVICES[::2])[::-1])
RANKS = max(checked.RANKS - 1, 3 if checked.RANKS == 2 else 2) if checked.ONE_GPU else checked.RANKS
SHAPE = checked.Shape(tokens=64)
LARGER = checked.Shape(tokens=200, hidden=2048)
PAGE = 2 << 20
# `Group.memory` only lists devices of the current process.
ALL = checked.DEVICES * RANKS if checked.ONE_GPU else MESH.devices
OWN = [(r, d) for r, d in enumerate(ALL) if d.process_index == jax.process_index()]
OWN_RANKS, OWN_DEVICES = map(list, zip(*OWN))


def new_group(**options):
    return checked.new_group(MESH, ranks=RANKS, **options)


def begin():
    return checked.begin(new_group())


def sizes_of(shape):
    """Return `Group.reserve`'s arguments for `checked.whole`, with 8 elements for the tag."""
    return dict(
        num_tokens=shape.tokens,
        hidden=shape.hidden + 8,
        top_k=shape.top_k,
        num_experts=RANKS * shape.local_experts,
        dtype=shape.dtype,
    )


@pytest.fixture(params=(False, True), ids=("launched", "captured"))
def group(request):
    group = new_group(cuda_graphs=request.param)
    checked.close(group)
    yield group
    harness.of_all_processes(None)  # another process may still reserve memory
    checked.close(group)


def test_a_closed_group_has_nothing_mapped_and_no_counters(group):
    assert group.memory() == ()
    assert counters_of(group) == ()


def test_a_header_and_two_ring_halves_are_mapped(group):
    estimate = group.reserve(**sizes_of(SHAPE))
    memory = group.memory()
    assert [m.device for m in memory] == OWN_DEVICES
    for m in memory:
        assert m.half_bytes >= estimate.half_bytes > 0
        needed = m.header_bytes + m.ring_depth * m.half_bytes
        assert needed <= m.mapped_bytes <= needed + m.ring_depth * PAGE


def test_a_program_finds_what_was_reserved_for_it(group):
    group.reserve(**sizes_of(LARGER))
    reserved = group.memory()
    run = checked.new_program(LARGER, group)
    checked.assert_right(checked.repeat(run, 3, begin()), group)
    assert group.memory() == reserved


def test_programs_that_exist_go_on_when_the_workspace_grows(group):
    """Old programs are right after growth, also in graphs that were recorded before it."""
    old = checked.new_program(SHAPE, group)
    state = checked.repeat(old, 20, begin())  # later calls are replays
    before = group.memory()[0].mapped_bytes
    tokens = 300 + before // (RANKS * 4 * LARGER.hidden)  # too many for the current memory
    group.reserve(**sizes_of(LARGER) | dict(num_tokens=tokens))
    assert group.memory()[0].mapped_bytes > before
    state = checked.repeat(old, 20, state)
    new = checked.new_program(LARGER, group)
    for _ in range(5):
        state = old(new(old(state)))
    checked.assert_right(state, group)


@pytest.mark.parametrize("steps", (0, 1, 2, 5))
def test_counters_count_exchanges_and_say_what_each_rank_has_read_and_announced(group, steps):
    run = checked.new_program(SHAPE, group, checked.dispatch_only)  # two exchanges in a step
    group.reserve(**sizes_of(SHAPE))
    state = checked.repeat(run, steps, begin())
    checked.assert_right(state, group)
    last = 2 * steps
    counters = counters_of(group)
    assert [c.device for c in counters] == OWN_DEVICES
    for rank, c in zip(OWN_RANKS, counters, strict=True):
        assert c.num_exchanges == last
        for words in (c.credits, c.heads):
            words = np.array(words)
            depth = len(words)
            assert words.shape == (native.limit("RING_DEPTH"), RANKS)
            for half in range(depth):
                epochs = [e for e in range(1, last + 1) if e % depth == half]
                expected = np.full(RANKS, max(epochs, default=0))
                expected[rank] = 0
                assert (words[half] == expected).all()


def there_and_back(group, step):
    token = jnp.arange(SHAPE.tokens)
    ids = checked.ids_at(SHAPE, RANKS, step, 0, token[:, None], jnp.arange(SHAPE.top_k))
    route_args = dict(
        num_experts=RANKS * SHAPE.local_experts, exchange=ma.Exchange(replicated=True)
    )
    recv = ma.dispatch(checked.tokens_at(SHAPE, step, 0, token), ids, group=group, **route_args)
    return ma.combine(recv.rows, recv)


def test_replicated_tokens_have_a_header_of_their_own_and_no_landing_zones(group):
    # These exchanges use the workspace of `group.single_rank`.
    run = checked.on_all_ranks(lambda step: there_and_back(group, step), group, Count())
    jax.block_until_ready(run(begin()[0]))
    memory = group.memory()
    assert {m.device for m in memory} == set(OWN_DEVICES)
    assert {(m.half_bytes, m.mapped_bytes) for m in memory} == {(0, memory[0].header_bytes)}
    assert counters_of(group) == ()
