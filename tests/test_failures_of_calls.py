"""Calls that fail tell XLA, and so the user, the reason: a lack of memory, or an earlier exchange
that has failed. The handlers run on CPU here, over a fake driver."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

import handler_calls
import jax
import numpy as np
import processes
import pytest
from handler_calls import MIB, ON_CPU, SECONDS, call
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_moe_a2a._src.group import native

pytestmark = [
    pytest.mark.one_process("it starts processes of its own"),
    pytest.mark.exchanges(0),
    pytest.mark.skipif(not handler_calls.can_build(), reason="needs a C++ compiler"),
]

TOPOLOGY = native.Topology((0, 1), 2)
PATIENCE = 5  # with a process that waits for another one until its timeout


def lacks_memory(library):
    handler_calls.register(library)
    library.set_room(1, 64 * MIB)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.jit(lambda: call(half_bytes=256 * MIB))()
    error = str(raised.value)
    assert error.startswith("RESOURCE_EXHAUSTED: jax_moe_a2a: workspace on device 1"), error
    assert str(256 * MIB) in error and str(64 * MIB) in error, error
    assert [library.used_bytes(device) for device in range(2)] == [0, 0]
    assert jax.jit(lambda: call(half_bytes=16 * MIB))() == 1


def raises_or_gives_nan(library):
    handler_calls.register(library)
    for raise_failures in (True, False):
        step = jax.jit(lambda raises=raise_failures: 2 * call(raise_failures=raises))
        assert step() == 2
        jax.jit(lambda: call("fail"))()
        if raise_failures:
            with pytest.raises(
                jax.errors.JaxRuntimeError, match="dispatch on rank .*stays stopped"
            ):
                jax.block_until_ready(step())
        else:
            assert np.isnan(step())
        jax.jit(lambda: call("close"))()
        assert step() == 2


def test_a_lack_of_memory_is_told_as_xla_tells_it_and_leaves_none_taken(handler_library):
    handler_calls.run(lacks_memory, handler_library)


def test_a_failed_group_raises_or_returns_nan_as_the_call_says(handler_library):
    handler_calls.run(raises_or_gives_nan, handler_library)


class Extension:
    """The compiled extension, as far as these tests need it. A problem is (text, lacks memory)."""

    def __init__(self, **answers):
        for name, answer in answers.items():
            setattr(self, name, lambda *args, answer=answer: answer)


@pytest.fixture
def answering(monkeypatch):
    """Return a context in which the extension gives certain answers. After the test, the counters
    of a real extension are read before `monkeypatch` would undo its changes."""

    @contextlib.contextmanager
    def answer(**answers):
        with monkeypatch.context() as patch:
            patch.setattr(native, "_native", Extension(**answers))
            yield

    return answer


def test_reserve_lacks_memory_as_a_call_does(answering):
    told = "^RESOURCE_EXHAUSTED: jax_moe_a2a: 8 bytes: out of memory"
    with (
        answering(reserve=("8 bytes: out of memory", True)),
        pytest.raises(jax.errors.JaxRuntimeError, match=told),
    ):
        native.reserve(TOPOLOGY, 8, timeout=1.0)
    with (
        answering(reserve=("no answer", False)),
        pytest.raises(RuntimeError, match="^jax_moe_a2a: no answer") as raised,
    ):
        native.reserve(TOPOLOGY, 8, timeout=1.0)
    assert not isinstance(raised.value, jax.errors.JaxRuntimeError)


def test_a_check_that_cannot_read_the_devices_is_an_error(answering):
    with answering(failure=(("", False), "stopped")):
        assert native.failure(TOPOLOGY) == "stopped"
    with (
        answering(failure=(("broken", False), "")),
        pytest.raises(RuntimeError, match="broken"),
    ):
        native.failure(TOPOLOGY)


# ------------------------------------------------------------------- two processes and a collective


def sums(library, raise_failures):
    """Execute a program with a psum twice. Before the second execution an exchange has failed, and
    only process 0 knows it. Print the outcome of each."""
    process = processes.joined()[2]
    processes.join()
    handler_calls.register(library)
    mesh = jax.make_mesh((2,), ("ep",), (jax.sharding.AxisType.Auto,))

    def on_rank():
        return lax.psum(call(raise_failures=raise_failures), "ep")[None]

    step = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=(), out_specs=P("ep")))

    def value():
        (shard,) = jax.block_until_ready(step()).addressable_shards
        return float(shard.data[0])

    print("before", value(), flush=True)
    if process == 0:
        jax.block_until_ready(jax.jit(lambda: call("fail"))())
    try:
        print("after", value(), flush=True)
    except jax.errors.JaxRuntimeError as error:
        print("raised", str(error).splitlines()[0], flush=True)
        time.sleep(SECONDS)  # Without its coordinator the other process would end.
    os._exit(0)


def raise_with_psum(library):
    sums(library, raise_failures=True)


def nan_with_psum(library):
    sums(library, raise_failures=False)


def in_two_processes(scenario, handler_library, folder, seconds):
    """Return what both processes have printed when they have ended, or after so many seconds."""
    address = processes.free_address()
    workers, outs = [], [folder / f"{process}.out" for process in range(2)]
    for process, out in enumerate(outs):
        environment = processes.environment_of(address, 2, process, 1) | ON_CPU
        command = handler_calls.command_of(scenario, handler_library)
        with out.open("w") as stdout:
            worker = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stdout)
        workers.append(worker)
    try:
        start = None
        end = time.monotonic() + SECONDS
        while any(worker.poll() is None for worker in workers) and time.monotonic() < end:
            time.sleep(0.1)
            if start is None and all("before" in out.read_text() for out in outs):
                start = time.monotonic()
                end = min(end, start + seconds)
        return [out.read_text() for out in outs]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_a_program_with_a_psum_ends_with_nan_in_all_processes(handler_library, tmp_path):
    for text in in_two_processes(nan_with_psum, handler_library, tmp_path, SECONDS):
        assert "before 2.0" in text and "after nan" in text, text


def test_if_one_process_raises_the_other_one_waits_in_the_psum(handler_library, tmp_path):
    """This is the reason for on_failure="nan"."""
    first, second = in_two_processes(raise_with_psum, handler_library, tmp_path, PATIENCE)
    assert "before 2.0" in first and "raised INTERNAL: jax_moe_a2a: timeout: dispatch" in first
    assert "before 2.0" in second, second
    assert "after" not in second and "raised" not in second, second


if __name__ == "__main__":
    globals()[sys.argv[1]](handler_calls.load(pathlib.Path(sys.argv[2])))
