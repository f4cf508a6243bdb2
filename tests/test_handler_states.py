"""Test the FFI handlers on CPU, with a fake driver that only counts kernel launches."""

import contextlib
import functools
import pathlib
import pickle
import re
import sys

import handler_calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handler_calls import MIB, NUM_DEVICES
from jax.experimental import serialize_executable

from jax_moe_a2a._src.group import native

pytestmark = [
    pytest.mark.one_process("it starts processes of its own"),
    pytest.mark.exchanges(0),
    pytest.mark.skipif(not handler_calls.can_build(), reason="needs a C++ compiler"),
]

TOPOLOGY = native.Topology((0, 1), 2)
RANKS, TOKENS, TOP_K, CAPACITY, HIDDEN, EXPERTS = NUM_DEVICES, 6, 3, 40, 128, 4
BF16, F32, I32, U8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint8
ROUTING = dict(
    token_slot=(I32, TOKENS, RANKS),
    slot_token=(I32, RANKS, TOKENS),
    choice_rank=(I32, TOKENS, TOP_K),
    slot_rows=(I32, RANKS, TOKENS, TOP_K),
    row_slot=(I32, CAPACITY),
)
PLAN = [
    *list(ROUTING.values())[:4],
    *[(I32, CAPACITY)] * 4,  # row_rank, row_slot, row_k, row_token
    (I32, EXPERTS // RANKS),
    (I32,),
    (I32,),
]
IDS, RANK = (I32, TOKENS, TOP_K), (I32,)
TOKEN_ROWS, ROWS, WEIGHTS = (BF16, TOKENS, HIDDEN), (BF16, CAPACITY, HIDDEN), (F32, CAPACITY)
ROUTED = dict(num_experts=np.int64(EXPERTS), alignment=np.int64(8), may_drop=False)
MOVED = dict(num_choice_arrays=np.int64(0), leaves_tail=False)
ENCODED = dict(
    MOVED,
    format="BlockwiseFp8",
    decode=False,
    keeps_encoded=False,
    num_leaves=np.int64(1),
    global_scale=np.float32(1),
    has_token_scales=False,
)
SUMMED = dict(
    num_choice_arrays=np.int64(0),
    num_addends=np.int64(0),
    wire="BF16",
    global_scale=np.float32(1),
)
# Each custom call is (operands, results, attributes that only some calls have).
CALLS = dict(
    route=(
        [IDS, RANK],
        [*PLAN, (I32, 32), (I32, 32), (I32, 32)],
        dict(ROUTED, tokens_per_chunk=np.int64(64), parts=np.int64(1)),
    ),
    dispatch=([TOKEN_ROWS, *ROUTING.values()], [ROWS], MOVED),
    format_dispatch=(
        [TOKEN_ROWS, *ROUTING.values()],
        [(U8, CAPACITY, HIDDEN), (F32, CAPACITY, 1)],
        ENCODED,
    ),
    routed_dispatch=(
        [IDS, RANK, TOKEN_ROWS],
        [*PLAN, ROWS],
        dict(ROUTED, **MOVED, format=""),
    ),
    weighted_dispatch=(
        [TOKEN_ROWS, ROWS, WEIGHTS, *ROUTING.values()],
        [ROWS, WEIGHTS],
        dict(num_rows=np.int64(1), num_weights=np.int64(1)),
    ),
    combine=(
        [ROWS, WEIGHTS, *ROUTING.values()],
        [TOKEN_ROWS],
        dict(SUMMED, num_pairs=np.int64(1)),
    ),
)


HALVES = "dispatch_start", "dispatch_done", "combine_start", "combine_done"


def make(operation, operands, results, attributes, **options):
    """Return a jitted program that makes one custom call, and its arguments."""
    attributes = handler_calls.attributes(**options) | attributes
    return jitted(operation, results, attributes), zeros(operands)


def jitted(operation, results, attributes):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for dtype, *shape in results]
    target = jax.ffi.ffi_call(f"moe_a2a_{operation}", shapes, has_side_effect=True)
    return jax.jit(lambda *args: target(*args, **attributes))


def zeros(arrays):
    return [jnp.zeros(shape, dtype) for dtype, *shape in arrays]


def run(program):
    step, arguments = program
    jax.block_until_ready(step(*arguments))


# Each scenario runs with the handlers' library in a separate process.


def keeps_what_does_not_change(library):
    for operation, call in CALLS.items():
        for suffix in ("", "_in_graph"):
            runs_without_allocations(library, make(operation + suffix, *call))
    runs_without_allocations(library, split_program())


def runs_without_allocations(library, program):
    allocations = library.num_allocations()
    run(program)
    assert library.num_allocations() > allocations
    launches, allocations = library.num_launches(), library.num_allocations()
    for _ in range(3):
        run(program)
    assert library.num_launches() == launches + 3
    assert library.num_allocations() == allocations


def split_program():
    operands, results, attributes = CALLS["dispatch"]
    attributes = handler_calls.attributes(split=True) | attributes
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for dtype, *shape in results]
    start = jax.ffi.ffi_call("moe_a2a_dispatch_start", shapes, has_side_effect=True)
    aliases = {len(operands): 0}
    done = jax.ffi.ffi_call(
        "moe_a2a_dispatch_done", shapes, has_side_effect=True, input_output_aliases=aliases
    )

    def both(*args):
        return done(*args, *start(*args, **attributes), **attributes)

    return jax.jit(both), zeros(operands)


def opens_again(library):
    program = make("dispatch", *CALLS["dispatch"])
    run(program)
    for _ in range(2):
        used, launches = library.used_bytes(0), library.num_launches()
        assert used > 0
        jax.block_until_ready(jax.jit(lambda: handler_calls.call("close"))())
        assert library.used_bytes(0) == 0
        run(program)
        assert library.used_bytes(0) == used
        assert library.num_launches() == launches + 1


def grows(library):
    small = make("dispatch", *CALLS["dispatch"])
    run(small)
    used = library.used_bytes(0)
    run(make("dispatch", *CALLS["dispatch"], half_bytes=64 * MIB))
    assert library.used_bytes(0) > used
    launches = library.num_launches()
    run(small)
    assert library.num_launches() == launches + 1


def comes_with_a_loaded_executable(library):
    step, arguments = make("dispatch", *CALLS["dispatch"])
    serialized = pickle.dumps(serialize_executable.serialize(step.lower(*arguments).compile()))
    jax.clear_caches()
    jax.block_until_ready(jax.jit(lambda: handler_calls.call("close"))())
    assert library.used_bytes(0) == 0
    loaded = serialize_executable.deserialize_and_load(*pickle.loads(serialized))
    assert library.used_bytes(0) > 0  # loading it has opened the workspace
    launches = library.num_launches()
    for _ in range(2):
        run((loaded, arguments))
    assert library.num_launches() == launches + 2


def damages(arrays):
    """Yield changed lists. In each list, one of the arrays has a wrong dtype or wrong axes."""
    for i, (dtype, *shape) in enumerate(arrays):
        others = (
            (U8 if dtype != U8 else F32, *shape),
            (dtype, *shape[:-1], shape[-1] + 1),
            (dtype, *shape, 2),
        )
        yield [*arrays[:i], others[i % len(others)], *arrays[i + 1 :]]


def refuses_arrays(library):
    operands, results, attributes = CALLS["weighted_dispatch"]
    refused = functools.partial(is_refused, library, "weighted_dispatch", attributes=attributes)
    assert all(refused(damaged, results) for damaged in damages(operands))
    assert all(refused(operands, damaged) for damaged in damages(results))
    assert not refused(operands, results)


def is_refused(library, operation, operands, results, attributes):
    launches = library.num_launches()
    try:
        run(make(operation, operands, results, attributes))
    except jax.errors.JaxRuntimeError as error:
        assert str(error).startswith("INVALID_ARGUMENT: jax_moe_a2a: "), (operands, results, error)
        assert library.num_launches() == launches, (operands, results)
        return True
    assert library.num_launches() == launches + 1, (operands, results)
    return False


def refuses_missing_attributes(library):
    told = re.escape("INVALID_ARGUMENT: jax_moe_a2a: the call lacks an attribute. Another version")
    for operation, (operands, results, attributes) in CALLS.items():
        everything = handler_calls.attributes() | attributes
        for name in (next(iter(everything)), next(reversed(everything))):
            rest = {key: value for key, value in everything.items() if key != name}
            with pytest.raises(jax.errors.JaxRuntimeError, match=told):
                jitted(operation, results, rest).lower(*zeros(operands)).compile()


def refuses_a_done_without_its_start(library):
    operands, results, attributes = CALLS["dispatch"]
    for operation, told in (
        ("dispatch_done", "XLA has moved the results of a start before its done"),
        ("dispatch", "done needs the operands and the results of the start"),
    ):
        split = operation != "dispatch"
        program = make("dispatch_done", [*operands, *results], results, attributes, split=split)
        with pytest.raises(jax.errors.JaxRuntimeError, match=told):
            run(program)
    launches = library.num_launches()
    run(split_program())
    assert library.num_launches() == launches + 1


def lacks_memory(library):
    library.set_room(1, 64 * MIB)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.jit(lambda: handler_calls.call(half_bytes=256 * MIB))()
    error = str(raised.value)
    assert error.startswith("RESOURCE_EXHAUSTED: jax_moe_a2a: workspace on device 1"), error
    assert str(256 * MIB) in error and str(64 * MIB) in error, error
    assert [library.used_bytes(device) for device in range(2)] == [0, 0]
    assert jax.jit(lambda: handler_calls.call(half_bytes=16 * MIB))() == 1


def raises_or_gives_nan(library):
    for raise_failures in (True, False):
        step = jax.jit(lambda raises=raise_failures: 2 * handler_calls.call(raise_failures=raises))
        assert step() == 2
        jax.jit(lambda: handler_calls.call("fail"))()
        if raise_failures:
            with pytest.raises(
                jax.errors.JaxRuntimeError, match="dispatch on rank .*stays stopped"
            ):
                jax.block_until_ready(step())
        else:
            assert np.isnan(step())
        jax.jit(lambda: handler_calls.call("close"))()
        assert step() == 2


SCENARIOS = [
    keeps_what_does_not_change,
    opens_again,
    grows,
    comes_with_a_loaded_executable,
    refuses_arrays,
    refuses_missing_attributes,
    refuses_a_done_without_its_start,
    lacks_memory,
    raises_or_gives_nan,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_handler(scenario, handler_library):
    handler_calls.run(scenario, handler_library)


@pytest.mark.skipif(not native.has_kernels(), reason="needs the compiled kernels")
def test_the_state_is_registered_before_the_targets_that_make_it(monkeypatch):
    told = []
    record = lambda name, *_, platform: told.append((name, platform))
    monkeypatch.setattr(jax.ffi, "register_ffi_type", record)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", record)
    native.register_targets.__wrapped__()
    assert told[0] == ("moe_a2a_exchange", "CUDA")
    names = [f"moe_a2a_{name}" for name in CALLS]
    names += [f"{name}_in_graph" for name in names]
    names += [*(f"moe_a2a_{half}" for half in HALVES), "moe_a2a_fill_slots", "moe_a2a_choose"]
    if native.has_grouped_gemm():
        names += ["moe_a2a_grouped_gemm", "moe_a2a_library_gemm", "moe_a2a_dot_act"]
        names += ["moe_a2a_act_dot_grad", "moe_a2a_fp8_gemm", "moe_a2a_act_encode"]
        names += ["moe_a2a_encode_squares", "moe_a2a_act_grad"]
    assert sorted(told[1:]) == sorted((name, "CUDA") for name in names)


class Extension:
    """A fake extension whose functions return `answers`; a failure is (text, is out of memory)."""

    def __init__(self, **answers):
        for name, answer in answers.items():
            setattr(self, name, lambda *args, answer=answer: answer)


@pytest.fixture
def answering(monkeypatch):
    """Return a context that fakes the extension, and ends before fixtures read real counters."""

    @contextlib.contextmanager
    def answer(**answers):
        with monkeypatch.context() as patch:
            patch.setattr(native, "_native", Extension(**answers))
            yield

    return answer


def test_reserve_reports_lack_of_memory_like_a_call(answering):
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
    library = handler_calls.load(pathlib.Path(sys.argv[2]))
    handler_calls.register(library)
    globals()[sys.argv[1]](library)
