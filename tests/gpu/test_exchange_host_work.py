"""No call allocates, waits for a device or calls back: shown by a trace of a warm loop.

XLA runs without CUDA graphs while it is profiled: every call of the trace goes through its handler.
"""

import collections
import gzip
import json
import pathlib
import re

import checked
import jax
import jax.numpy as jnp

import jax_moe_a2a as ma

SHAPE = checked.SMALL
ROUNDS = 4  # route, dispatch and combine in one program
CALLS = 25  # of the program in the warm loop
OWN_DEVICES = sum(device.process_index == jax.process_index() for device in checked.DEVICES)
WARM_LOOP = "moe_a2a_warm_loop"
KERNELS = ("dispatch_kernel", "combine_kernel")  # ends of names, such as routed_dispatch_kernel
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
    route_args = checked.route_args(SHAPE, checked.GROUP)

    def on_rank(x, ids, weights):
        for i in range(ROUNDS):
            if exchange:
                ids = (ids + i) % route_args["num_experts"]
                recv = ma.dispatch(x, ids, weights, **route_args)
                x = ma.combine(recv.rows, recv)
            else:
                rows = jnp.repeat(x, SHAPE.top_k, axis=0) * weights.reshape(-1, 1).astype(x.dtype)
                x = rows.reshape(*ids.shape, -1).sum(axis=1)
            x = jnp.tanh(x)
        return x

    return checked.on_all_ranks(on_rank, checked.GROUP)


def arguments():
    step = checked.begin()[0]

    def on_rank(step):
        rank, token = checked.my_rank(checked.GROUP), jnp.arange(SHAPE.tokens)
        return (
            checked.tokens_at(SHAPE, step, rank, token),
            checked.own_ids(SHAPE, checked.GROUP, step),
            checked.own_weights(SHAPE, checked.GROUP, step),
        )

    return checked.on_all_ranks(on_rank, checked.GROUP)(step)


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
    """Return how many events of each name began within the warm loop."""
    files = sorted(pathlib.Path(folder).rglob("*.trace.json.gz"))
    assert files, f"the profiler wrote no trace into {folder}"
    traces = (json.loads(gzip.decompress(path.read_bytes())) for path in files)
    events = [event for trace in traces for event in trace["traceEvents"]]
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

    # The trace must contain our launches and calls of the driver; otherwise it proves nothing.
    # Which calls the profiler records depends on its version. test_exchange_graphs.py proves the
    # same otherwise: a call that allocates or synchronizes cannot be captured.
    assert all(count >= CALLS * ROUNDS * OWN_DEVICES for count in kernels.values()), kernels
    assert any(name.startswith("cu") for name in ours), ours.most_common(50)
    # Work of a call shows once per call and device; occasional work of the runtime does not.
    assert all(count < CALLS for count in excess.values()), excess
