"""If a call fails, XLA and the user get the reason: a lack of memory, or an earlier failed
exchange. In these tests, the handlers run on CPU over a fake driver."""

import contextlib
import pathlib
import sys

import handler_calls
import jax
import numpy as np
import pytest
from handler_calls import MIB, call

from jax_moe_a2a._src.group import native

pytestmark = [
    pytest.mark.one_process("it starts processes of its own"),
    pytest.mark.exchanges(0),
    pytest.mark.skipif(not handler_calls.can_build(), reason="needs a C++ compiler"),
]

TOPOLOGY = native.Topology((0, 1), 2)


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
    """A pretended extension with the functions that these tests need. A problem is (text, True if
    memory is lacking)."""

    def __init__(self, **answers):
        for name, answer in answers.items():
            setattr(self, name, lambda *args, answer=answer: answer)


@pytest.fixture
def answering(monkeypatch):
    """Return a context in which the extension gives certain answers. After the test, the counters
    of a real extension are read before `monkeypatch` undoes its changes."""

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


if __name__ == "__main__":
    globals()[sys.argv[1]](handler_calls.load(pathlib.Path(sys.argv[2])))
