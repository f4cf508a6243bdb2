"""Run a few tests of tests/ in two processes; `make test-processes` runs all tests. On CPU, the
processes run the portable path over gloo."""

import harness
import jax
import processes
import pytest

from jax_moe_a2a._src import compat

pytestmark = pytest.mark.several_devices("it starts processes, each with its devices")

# sums, a layer, and exchanges over two mesh axes
CHOSEN = (
    "tests/test_two_processes.py::test_processes_tell_each_other_and_silence_is_none",
    "tests/test_combine.py::test_weights_come_from_recv_an_array_or_nowhere",
    "tests/test_shard_map.py::test_without_check_vma_the_layer_equals_the_dense_layer",
    "tests/test_shard_map.py::test_two_groups_over_different_axes_of_one_mesh_exchange_in_one_program",
)


@pytest.mark.one_process("it starts processes of its own")
@pytest.mark.skipif(harness.NUM_DEVICES < 2, reason="needs a device for each process")
def test_the_suite_passes_in_two_processes():
    processes.assert_tests_pass(CHOSEN)


@pytest.mark.skipif(harness.PROCESSES == 1, reason="needs several processes")
def test_processes_tell_each_other_and_silence_is_none():
    own = jax.process_index()
    for value in ("old", "new"):
        compat.coordination_set(f"test/{own}", f"{value} {own}")
    harness.of_all_processes(None)
    for process in range(harness.PROCESSES):
        assert compat.coordination_get(f"test/{process}", 10.0) == f"new {process}"
    assert compat.coordination_get("test/nobody", 0.2) is None
