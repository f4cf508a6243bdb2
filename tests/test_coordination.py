"""The package's requests to JAX's coordination service. `test_two_processes.py` runs these tests in
two processes."""

import harness
import jax
import pytest

from jax_moe_a2a._src import compat

pytestmark = pytest.mark.several_devices("it is about several processes")


@pytest.mark.skipif(harness.PROCESSES == 1, reason="needs several processes")
def test_processes_tell_each_other_and_silence_is_none():
    own = jax.process_index()
    for value in ("old", "new"):
        compat.coordination_set(f"test/{own}", f"{value} {own}")
    harness.of_all_processes(None)
    for process in range(harness.PROCESSES):
        assert compat.coordination_get(f"test/{process}", 10.0) == f"new {process}"
    assert compat.coordination_get("test/nobody", 0.2) is None
