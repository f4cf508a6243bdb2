"""No call allocates, waits for a device or calls back: shown by a trace of a warm loop.

XLA runs without CUDA graphs while it is profiled: every call of the trace goes through its handler.
"""

import collections
import gzip
import json
import os
import pathlib
import re

import checked
import jax
import jax.numpy as jnp
import pytest

import jax_moe_a2a as ma

SHAPE = checked.SMALL
ROUNDS = 4  # route, dispatch and combine in one program
CALLS = 25  # of the program in the warm loop
OWN_DEVICES = sum(device.process_index == jax.process_index() for device in checked.DEVICES)
WARM_LOOP = "moe_a2a_warm_loop"
OPERATIONS = dict(routed_dispatch=ROUNDS, combine=ROUNDS)  # of the program
EXCHANGES = checked.exchanges_of(OPERATIONS, SHAPE, checked.GROUP)
IS_FUSED = EXCHANGES.whole == 2 * ROUNDS
DISPATCH = "routed_dispatch_kernel" if IS_FUSED else "dispatch_kernel"
KERNELS = (DISPATCH, "combine_kernel")
NEVER_PER_CALL = re.compile(
    r"^cu(da)?("
    r"Mem(Alloc|Create|Map|Unmap|Free|Release|SetAccess|Address|HostAlloc|HostRegister|Pool)"
    r"|Malloc|Free|HostAlloc|HostRegister"
    r"|(Stream|Ctx|Device|Event)Synchronize"
    r"|LaunchHostFunc|StreamAddCallback|ModuleLoad|LibraryLoad)"
    r"|[Hh]ost_?[Cc]allback|python_\w*callback"
)


def rounds(exchange):
    """Return a program of several rounds, each with an exchange or with a local stand-in."""

    def on_rank(x, ids, weights):
        for i in range(ROUNDS):
            if exchange:
                experts = checked.RANKS * SHAPE.local_experts
                ids = (ids + i) % experts
                recv = ma.dispatch(
                    x,
                    ids,
                    weights,
                    group=checked.GROUP,
                    num_experts=experts,
                    capacity=checked.enough_rows(SHAPE, checked.GROUP),
                )
                x = ma.combine(recv.rows, recv)
            else:
                rows = jnp.repeat(x, SHAPE.top_k, axis=0) * weights.reshape(-1, 1).astype(x.dtype)
                x = rows.reshape(*ids.shape, -1).sum(axis=1)
            x = jnp.tanh(x)
        return x

    exchanges = EXCHANGES if exchange else checked.NONE
    return checked.on_all_ranks(on_rank, checked.GROUP, exchanges)


def arguments():
    step = checked.begin()[0]

    def on_rank(step):
        rank, token = checked.my_rank(checked.GROUP), jnp.arange(SHAPE.tokens)
        return (
            checked.tokens_at(SHAPE, step, rank, token),
            checked.own_ids(SHAPE, checked.GROUP, step),
            checked.own_weights(SHAPE, checked.GROUP, step),
        )

    return checked.on_all_ranks(on_rank, checked.GROUP, checked.NONE)(step)


def trace_warm_loop(run, args, folder):
    """Return the names of all events, on hosts and devices, that began within the warm loop."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    for _ in range(3):
        jax.block_until_ready(run(*args))
    with jax.profiler.trace(folder, profiler_options=options):
        for _ in range(3):  # the first calls under a profiler pay for its own set-up
            jax.block_until_ready(run(*args))
        with jax.profiler.TraceAnnotation(WARM_LOOP):
            jax.block_until_ready([run(*args) for _ in range(CALLS)])
    return events_of_warm_loop(folder)


def events_of_warm_loop(folder):
    files = sorted(pathlib.Path(folder).rglob("*.trace.json.gz"))
    written = [str(path) for path in pathlib.Path(folder).rglob("*")]
    assert files, f"the profiler wrote no trace: {written}"
    events = []
    for path in files:
        with gzip.open(path) as file:
            events += json.load(file)["traceEvents"]
    events = [event for event in events if "ts" in event and "name" in event]
    (loop,) = [event for event in events if event["name"].startswith(WARM_LOOP)]
    start, end = loop["ts"], loop["ts"] + loop["dur"]
    return collections.Counter(event["name"] for event in events if start <= event["ts"] <= end)


def never_per_call(names):
    return {name: count for name, count in names.items() if NEVER_PER_CALL.search(name)}


def test_a_warm_call_neither_allocates_nor_waits_nor_calls_back(tmp_path):
    args = arguments()
    ours = trace_warm_loop(rounds(exchange=True), args, tmp_path / "ours")
    plain = trace_warm_loop(rounds(exchange=False), args, tmp_path / "plain")
    checked.assert_counted()
    kernels = {part: sum(count for name, count in ours.items() if part in name) for part in KERNELS}
    excess = {
        name: count - plain[name]
        for name, count in never_per_call(ours).items()
        if count > plain[name]
    }
    if path := os.environ.get("MOE_A2A_TRACE_OUT"):
        record = dict(
            calls=CALLS,
            exchanges_of_each_kind=CALLS * ROUNDS * OWN_DEVICES,
            kernels=kernels,
            never_per_call=never_per_call(ours),
            never_per_call_without_exchanges=never_per_call(plain),
            driver_calls={n: c for n, c in ours.items() if n.startswith("cu")},
            driver_calls_without_exchanges={n: c for n, c in plain.items() if n.startswith("cu")},
        )
        pathlib.Path(path).write_text(json.dumps(record, indent=2) + "\n")

    # The trace must contain our launches and calls of the driver; otherwise it proves nothing.
    # Which calls the profiler records depends on its version. test_exchange_graphs.py proves the
    # same otherwise: a call that allocates or synchronizes cannot be captured.
    assert all(count >= CALLS * ROUNDS * OWN_DEVICES for count in kernels.values()), kernels
    assert any(name.startswith("cu") for name in ours), ours.most_common(50)
    # Work of a call shows once per call and device; occasional work of the runtime does not.
    assert all(count < CALLS for count in excess.values()), excess


@pytest.mark.parametrize(
    "name",
    (
        "cuMemAlloc_v2",
        "cuMemCreate",
        "cudaMalloc",
        "cuMemAllocHost_v2",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cudaDeviceSynchronize",
        "cuLaunchHostFunc",
        "xla_ffi_python_gpu_callback",
    ),
)
def test_what_must_not_happen_is_recognized(name):
    assert never_per_call({name: 1})


@pytest.mark.parametrize("name", ("cuLaunchKernel", "cuMemcpyDtoDAsync_v2", "cuMemsetD32Async"))
def test_what_may_happen_is_not_taken_for_it(name):
    assert not never_per_call({name: 1})
