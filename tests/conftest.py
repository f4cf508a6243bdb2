"""Choose the devices of the tests before JAX is imported: 8 virtual CPU devices, or real GPUs.

MOE_A2A_TEST_GPU=1 requires GPUs. MOE_A2A_TEST_IMPLEMENTATION sets the argument `implementation` of
every group. With MOE_A2A_TEST_RANKS_ON_ONE_GPU=8, all 8 ranks share one device, and tests that need
several devices are skipped (`-rs` lists them). If this device is a GPU, all other tests must
declare their exchanges (`harness.expect_exchanges`).
"""

import contextlib
import inspect
import os
import sys

import environment
import processes

ON_GPU = os.environ.get("MOE_A2A_TEST_GPU") == "1"
JOINED = processes.joined()

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before the tests could set XLA's flags")
if ON_GPU:
    # Autotuning takes minutes if test workers share a GPU.
    os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 {os.environ.get('XLA_FLAGS', '')}"
else:
    num_devices = JOINED[-1] if JOINED else processes.CPU_DEVICES
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Level 0 compiles faster. XLA uses the last value of a flag, so the user's flags come later.
    os.environ["XLA_FLAGS"] = (
        f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')} "
        f"--xla_force_host_platform_device_count={num_devices}"
    )

processes.join()

import host_extension

if not ON_GPU:
    host_extension.provide()

import handler_calls
import harness
import jax
import pytest

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange import lowering
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.grouped import lowering as lowered

if harness.RANKS_ON_ONE_GPU and ON_GPU:
    # Calls that the kernels do not support take the portable path in tests, even with
    # implementation="cuda".
    lowering.check_may_refuse = lambda *args: None

TOO_MANY_RANKS = "one GPU has no room for split exchanges of so many ranks"


def pytest_configure(config):
    if ON_GPU and jax.default_backend() != "gpu":
        raise pytest.UsageError(f"MOE_A2A_TEST_GPU=1, but JAX runs on {jax.default_backend()!r}")
    if ON_GPU and not (native.has_kernels() and native.local_gpus()):
        raise pytest.UsageError("MOE_A2A_TEST_GPU=1, but the CUDA kernels are not built in")


def pytest_collection_modifyitems(items):
    for item in items:
        alone = item.get_closest_marker("one_process")
        if JOINED and alone:
            item.add_marker(pytest.mark.skip(reason=f"needs a single process: {alone.args[0]}"))
        if not ON_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs GPUs: set MOE_A2A_TEST_GPU=1"))
        several = item.get_closest_marker("several_devices")
        if harness.RANKS_ON_ONE_GPU and several:
            item.add_marker(pytest.mark.skip(reason=f"needs several devices: {several.args[0]}"))
        # All tests of such a file share one program, which makes split exchanges.
        if item.path.match("gpu/test_split_*.py") and not harness.splits_fit():
            item.add_marker(pytest.mark.skip(reason=TOO_MANY_RANKS))


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report):
    """Add the exit status of a crashed pytest worker to the report; -9 means that another process
    killed it."""
    report.longrepr += f", with exit status {report.node.gateway._io.wait()}"


@pytest.fixture(scope="session")
def handler_library(tmp_path_factory):
    return handler_calls.build(tmp_path_factory.mktemp("handlers"))


# .ci/run sets these to "strict" and "raise": JAX then promotes neither dtypes nor numbers of axes.
PROMOTION = "JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Run tests with the marker `promotes`, and their processes, with JAX's default promotion."""
    if item.get_closest_marker("promotes") is None:
        return (yield)
    with environment.restored():
        for name in PROMOTION:
            os.environ.pop(name, None)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Check the exchanges that the test declares, if all ranks share one GPU."""
    # Tests in tests/gpu change the counters, so this hook cannot check their exchanges.
    counts_by_itself = item.path.parent.name == "gpu" or item.get_closest_marker("counts_by_itself")
    if not (harness.RANKS_ON_ONE_GPU and ON_GPU) or counts_by_itself:
        return (yield)
    with harness.every_exchange_is_stated(), stated_by_marker(item):
        return (yield)


def stated_by_marker(item):
    """Return a context that expects the exchanges of the test's marker `exchanges`, if any."""
    marker = item.get_closest_marker("exchanges")
    if marker is None:
        return contextlib.nullcontext()

    def number(given):
        if not callable(given):
            return given
        return given(*(item.funcargs[name] for name in inspect.signature(given).parameters))

    split = number(marker.kwargs.get("split", 0))
    if split and not harness.splits_fit():
        pytest.skip(TOO_MANY_RANKS)
    return harness.expect_exchanges(*map(number, marker.args), split=split)


@pytest.fixture
def exact_products():
    """Multiply with full precision; on GPUs, operands would otherwise be rounded to TF32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def devices_pass_for_gpus(monkeypatch):
    monkeypatch.setattr(ma.Group, "_why_portable", "")


@pytest.fixture
def hopper(monkeypatch):
    jax.clear_caches()
    monkeypatch.setattr(lowered, "_why_other_gpu", lambda: "")
    monkeypatch.setattr(native, "has_grouped_gemm", lambda: True)
    if not (native.has_kernels() and native.local_gpus()):
        monkeypatch.setattr(native, "register_targets", lambda: None)
    yield
    jax.clear_caches()


@pytest.fixture(params=harness.RANK_COUNTS, ids=lambda ranks: f"{ranks}ranks")
def ranks(request):
    return request.param


@pytest.fixture
def mesh(ranks):
    return harness.mesh_of(ranks)


@pytest.fixture
def group(ranks):
    return harness.group_of(ranks)
