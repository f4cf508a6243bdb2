"""Times route, dispatch, combine, the round trip and its backward pass on this machine's GPUs.

    python -m benchmarks                   everything; under five minutes
    python -m benchmarks --quick           two sizes, ours and all_gather
    python -m benchmarks --num-sms 8 16 24 32 64 --tokens 4096 --methods ours

Beside them, in the same run: plain JAX, and the wire's own limit. Writes a JSON record and a plot
to benchmarks/results/. Without a GPU it runs small on virtual CPU devices, to show that it runs;
those are not figures of anything, and are written only where --out says.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import time
from typing import Any

from . import record as records
from . import wire
from .workload import CPU_SETTINGS, FULL, GPU_SETTINGS, TINY, Setting, Workload, draw

METHODS = ("ours", "all_gather", "dense", "ragged")
QUICK_METHODS = ("ours", "all_gather")
QUICK_TOKENS = (4096, 128)
# ragged_all_to_all takes some 100 times the wire's limit: only where it says something.
RAGGED_TOKENS = (128, 4096)
CPU_RANKS = 8
NOT_GPU = "No GPU here: tiny sizes on virtual CPU devices. These are NOT GPU figures."

_start = time.perf_counter()


def say(text: str) -> None:
    """Prints a line of progress at once."""
    print(f"[{time.perf_counter() - _start:6.1f} s] {text}", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two sizes, two methods, few samples")
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="tokens per rank, uniform, instead of all settings"
    )
    parser.add_argument(
        "--num-sms",
        type=int,
        nargs="+",
        default=[None],
        help="SM budgets of ours; default: its own",
    )
    parser.add_argument(
        "--cuda-graphs", choices=("on", "off"), help="may XLA capture ours; default: its own"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all")
    parser.add_argument("--samples", type=int, help="timed samples of each; default: 7")
    parser.add_argument(
        "--out", type=pathlib.Path, help="the record's path (.json), or a folder for it"
    )
    args = parser.parse_args(argv)
    if min([args.samples or 1, *(args.tokens or [1]), *(n or 1 for n in args.num_sms)]) < 1:
        parser.error("--samples, --tokens and --num-sms must be positive")
    return args


def choose_settings(args: argparse.Namespace, on_gpu: bool) -> list[Setting]:
    """What to run, what matters most first."""
    sizes = FULL if on_gpu else TINY
    if args.tokens:
        return [Setting(tokens, **sizes) for tokens in args.tokens]
    if args.quick:
        return [Setting(t, **sizes) for t in QUICK_TOKENS] if on_gpu else list(CPU_SETTINGS[:1])
    return list(GPU_SETTINGS if on_gpu else CPU_SETTINGS)


def choose_methods(args: argparse.Namespace, setting: Setting, on_gpu: bool) -> list[str]:
    """The methods for a setting; ours first, for the others are checked against it."""
    wanted = args.methods or (QUICK_METHODS if args.quick else METHODS)
    is_pointless = setting.tokens not in RAGGED_TOKENS or setting.routing != "uniform"
    if not on_gpu or (is_pointless and args.methods is None):  # XLA:CPU does not have it
        wanted = [method for method in wanted if method != "ragged"]
    return [method for method in METHODS if method in wanted]


def measure_wire(workloads: list[Workload]) -> dict[str, Any] | None:
    """The wire's limit for the bytes of every workload; None, and why, if it cannot be measured."""
    say("the wire: building and running wire.cu")
    try:
        measured = wire.measure(w.busiest_bytes for w in workloads if w.busiest_bytes)
    except RuntimeError as error:
        say(f"the wire's limit is not known: {error}")
        return None
    for result in measured["results"]:
        say(
            f"the wire: {result['bytes'] / 1e6:.3f} MB from each GPU in {result['median_us']:.1f} "
            f"us, {result['gb_per_s']:.0f} GB/s with {result['blocks']} blocks"
        )
    say(f"the wire: a flag takes {measured['flag_us']:.2f} us one way")
    return measured


def main(argv: list[str] | None = None) -> int:
    """Runs it; returns the exit status: 1 if anything failed."""
    args = parse(argv)
    num_gpus = 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else wire.count_gpus()
    if not num_gpus:  # read when JAX starts
        os.environ["JAX_PLATFORMS"] = "cpu"
        flag = "--xla_force_host_platform_device_count"
        if flag not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={CPU_RANKS}"
        print(NOT_GPU, flush=True)

    settings = choose_settings(args, bool(num_gpus))
    workloads = [draw(setting, num_gpus) for setting in settings] if num_gpus else []
    measured = measure_wire(workloads) if num_gpus > 1 else None  # JAX would take the memory

    say("starting JAX")
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from . import suite

    devices = jax.devices()
    if num_gpus and (devices[0].platform != "gpu" or len(devices) != num_gpus):
        print(f"There are {num_gpus} GPUs, but JAX has {devices}: JAX_PLATFORMS=cpu runs without.")
        return 1
    mesh = Mesh(np.array(devices), (suite.AXIS,))
    why_portable = suite.why_portable(mesh)
    if num_gpus and why_portable and "ours" in (args.methods or METHODS):
        print(f"The kernels would not run: {why_portable}. --methods without ours runs the others.")
        return 1
    workloads = workloads or [draw(setting, len(devices)) for setting in settings]
    wire_by_bytes = {r["bytes"]: r for r in measured["results"]} if measured else {}
    run = suite.Run(
        mesh=mesh,
        wire_us={size: result["median_us"] for size, result in wire_by_bytes.items()},
        choose_methods=lambda setting: choose_methods(args, setting, bool(num_gpus)),
        num_sms=args.num_sms,
        cuda_graphs=None if args.cuda_graphs is None else args.cuda_graphs == "on",
        samples=args.samples or (3 if args.quick or not num_gpus else 7),
        say=say,
        rows=[],
        failures=[],
    )
    kind = devices[0].device_kind
    record = dict(
        date=records.today(),
        commit=records.commit(),
        gpus=f"{num_gpus} x {kind}" if num_gpus else "none (virtual CPU devices: not GPU figures)",
        ranks=len(devices),
        versions=records.versions(),
        default_num_sms=suite.lowering.DEFAULT_NUM_SMS,
        cuda_graphs=args.cuda_graphs or "default",
        alignment=1,
        wire=measured,
        failures=run.failures,
        rows=run.rows,
    )
    path = args.out
    if path is None and num_gpus:
        path = records.default_path(num_gpus, kind)
    elif path is not None and path.suffix != ".json":
        path = records.default_path(len(devices), kind, path)

    for workload in workloads:
        suite.run_workload(run, workload)
        if workload.busiest_bytes in wire_by_bytes:
            run.rows.append(suite.wire_row(workload, wire_by_bytes[workload.busiest_bytes]))
        if path is not None:  # after every setting: a run cut short leaves what it has
            records.write(record, path)

    print(f"\n{suite.table(run.rows)}\n", flush=True)
    if path is not None:
        print(f"record: {path}", flush=True)
        try:
            from .plot import plot

            plot(record, path.with_suffix(".png"))
            print(f"plot:   {path.with_suffix('.png')}")
        except ImportError:
            print("no plot: matplotlib is not installed")
    for failure in run.failures:
        print(f"FAILED {failure}")
    if not num_gpus:
        print(NOT_GPU)
    say("done")
    return 1 if run.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
