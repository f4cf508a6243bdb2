"""Test two-level groups on CPU. Each process acts as a host, and gloo connects the processes."""

import os
import shutil

import harness
import processes
import pytest
from faults import campaign

pytestmark = [
    pytest.mark.one_process("it starts processes of its own"),
    pytest.mark.several_devices("it starts processes, each with its devices"),
    pytest.mark.skipif(harness.ON_GPU, reason="it starts processes that have CPU devices"),
    pytest.mark.exchanges(0),  # this process makes no exchange
]

CHOSEN = (
    "tests/test_two_level.py::test_any_number_of_hosts_returns_the_same_rows[2x2]",
    "tests/test_two_level.py::test_gradients_are_those_of_the_dense_layer[2x2]",
)
CAN_MAKE_HOSTS = os.geteuid() == 0 and shutil.which("ip") is not None


def test_each_process_as_a_host_has_the_rows_sums_and_gradients_of_a_flat_group():
    processes.assert_tests_pass(CHOSEN, "--devices=4", *["--as-hosts"] * CAN_MAKE_HOSTS)


def test_a_host_that_is_killed_ends_the_others_with_an_error_within_the_bound():
    done = campaign.run_one(1, 0, ["programs: a killed host"])
    assert done.outcome == "error", done
