"""Inter-node ranks: their memory and waits. `make test-network` checks their results: it runs all
tests with MOE_A2A_TEST_P2P_WORLD_SIZE=1, in a process for each GPU."""

import os

import checked
import jax
import numpy as np
import pytest

from jax_moe_a2a._src.group import network, runtime

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("MOE_A2A_TEST_P2P_WORLD_SIZE"),
        reason="needs a process for each GPU and NVSHMEM: make test-network",
    ),
    pytest.mark.several_devices("ranks on one GPU reach each other's memory without NVSHMEM"),
]

MESH = checked.mesh_of(np.roll(checked.DEVICES[1::2] + checked.DEVICES[::2], 1))
SHAPE = checked.Shape(tokens=64)
LARGE = checked.Shape(tokens=4096, hidden=8192)  # more than the least that a workspace has


def slot_sizes(group):
    return {memory.half_bytes for memory in group.memory()}


def test_a_larger_exchange_has_a_workspace_of_its_own_and_smaller_ones_keep_theirs():
    group = checked.new_group(MESH)
    small, large = (checked.program(shape, group) for shape in (SHAPE, LARGE))
    state = checked.repeat(small, 2, checked.begin(group))
    before = slot_sizes(group)
    for program in (large, small, large, small):
        state = checked.repeat(program, 3, state)
    checked.assert_right(state, group)
    assert network.LEAST_HALF_BYTES in before
    assert max(slot_sizes(group)) > max(before)


def test_after_closing_the_memory_is_where_it_was_and_exchanges_go_on():
    group = checked.new_group(MESH)
    program = checked.program(SHAPE, group)
    state = checked.repeat(program, 2, checked.begin(group))
    mapped = group.memory()
    checked.close(group)
    assert group.memory() == mapped
    assert {counters.num_exchanges for counters in runtime.counters(group)} == {0}
    checked.assert_right(checked.repeat(program, 2, state), group)


def test_processes_that_open_different_workspaces_are_told_so():
    """The programs that each process has lowered decide which process waits for which."""
    group = checked.new_group(MESH)
    checked.assert_right(
        checked.repeat(checked.program(SHAPE, group), 1, checked.begin(group)), group
    )
    own = jax.process_index()
    sizes = [network.LEAST_HALF_BYTES << doublings for doublings in (5, 6)]
    with pytest.raises(RuntimeError, match="opening workspace .* in the same order"):
        network.open_workspace(group.topology, sizes[own % 2], 30.0)
    checked.assert_right(
        checked.repeat(checked.program(SHAPE, group), 1, checked.begin(group)), group
    )
