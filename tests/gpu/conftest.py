"""Skip these tests unless MOE_A2A_TEST_GPU=1. If it is set, missing GPUs or hooks are errors."""

import os
import pathlib

import harness
import jax
import pytest

from jax_moe_a2a._src.group import native

ON_GPU = os.environ.get("MOE_A2A_TEST_GPU") == "1"
HERE = pathlib.Path(__file__).parent
# No test needs this long. The method is "thread", because "signal" cannot end a wait in XLA.
TEST_SECONDS = 90 * harness.TIMES_SLOWER


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(TEST_SECONDS, method="thread"))
        if not ON_GPU:
            item.add_marker(pytest.mark.skip(reason="needs GPUs: set MOE_A2A_TEST_GPU=1"))


@pytest.fixture(scope="session", autouse=True)
def machine_and_build_are_fit():
    """Fail if GPUs or test hooks are missing, because skipped tests look like success."""
    least = 1 if harness.RANKS_ON_ONE_GPU else 2
    if len(jax.devices("gpu")) < least:
        raise RuntimeError(
            f"the tests of the exchange need {least} GPUs or more; got {jax.devices()}"
        )
    if harness.RANKS_ON_ONE_GPU == 1:
        raise RuntimeError(
            "the tests of the exchange need 2 ranks or more; got MOE_A2A_TEST_RANKS_ON_ONE_GPU=1"
        )
    if not native.has_test_hooks():
        raise RuntimeError(
            "the tests of the exchange need kernels with test hooks: "
            "pip install . -C cmake.define.MOE_A2A_TEST_HOOKS=ON"
        )


@pytest.fixture(scope="module", autouse=True)
def counters_begin_anew(machine_and_build_are_fit):
    """Close all groups, because `checked` has not counted the exchanges of other tests."""
    import checked

    if harness.RANKS_ON_ONE_GPU:
        checked.close_all()


@pytest.fixture(autouse=True)
def next_test_finds_a_healthy_group():
    import checked

    yield
    if any(harness.of_all_processes(bool(native.failure(checked.GROUP.topology)))):
        checked.close(checked.GROUP)
