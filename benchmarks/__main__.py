"""Times route, dispatch, combine, the round trip and its backward pass on this machine's GPUs.

    python -m benchmarks                   the standard settings; under five minutes
    python -m benchmarks --quick           two sizes, ours and all_gather
    python -m benchmarks --num-sms 8 16 24 32 64 --tokens 4096 --methods ours
    python -m benchmarks --sweep tokens,skew       as work grows; some 15 seconds each
    python -m benchmarks --sweep formats,modes     token formats; shared experts and other modes
    python -m benchmarks --sweep all --ranks 2     on the first two GPUs
    python -m benchmarks.layer             a whole MoE layer
    python -m benchmarks.overlap           what runs beside a split exchange
    python -m benchmarks.processes         one process and several, and NVSHMEM

Beside them, in the same run: plain JAX, and the wire's own limit. Writes a JSON record and a plot
to benchmarks/results/. Without a GPU it runs small on virtual CPU devices, to show that it runs;
those are not figures of anything, and are written only where --out says.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import record as records
from . import wire
from .workload import CPU_SETTINGS, FULL, GPU_SETTINGS, TINY, Setting, draw

if TYPE_CHECKING:
    from . import suite

METHODS = ("ours", "all_gather", "dense", "ragged")  # of the standard settings
QUICK_SAMPLES = 3
QUICK_SECONDS = 0.008  # of a sample: to see that it runs; figures scatter by 15 %
QUICK_METHODS = ("ours", "all_gather")
QUICK_TOKENS = (4096, 128)
# ragged_all_to_all takes some 100 times the wire's limit: only where it says something.
RAGGED_TOKENS = (128, 4096)
# Sizes that stand for all others of a sweep: throughput hardly depends on the size.
WIRE_TOKENS = (128, 1024, 4096)
SWEEPS = (  # what says most first
    *("tokens", "sms", "formats", "modes", "experts", "hidden", "topk", "skew"),
    *("capacity", "payload", "vmap", "graphs"),
)
CPU_RANKS = 8
NOT_GPU = "No GPU here: tiny sizes on virtual CPU devices. These are NOT GPU figures."

_start = time.perf_counter()


def say(text: str) -> None:
    """Prints a line of progress at once."""
    print(f"[{time.perf_counter() - _start:6.1f} s] {text}", flush=True)


def common_options(parser: argparse.ArgumentParser) -> None:
    """Options that every benchmark has."""
    parser.add_argument("--quick", action="store_true", help="few sizes and methods, few samples")
    parser.add_argument("--ranks", type=int, help="so many of the GPUs; default: all")
    parser.add_argument("--samples", type=int, help="timed samples of each; default: 7, or 3")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds after which nothing more is timed"
    )
    parser.add_argument(
        "--wire",
        default="measure",
        help="the wire's limit: 'measure' (default), 'none', or the path of a record that has it",
    )
    parser.add_argument("--no-plot", action="store_true", help="only the record")
    parser.add_argument(
        "--out", type=pathlib.Path, help="the record's path (.json), or a folder for it"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--sweep",
        type=lambda text: SWEEPS if text == "all" else tuple(text.split(",")),
        default=(),
        help=f"instead of the standard settings: 'all', or some of {','.join(SWEEPS)}",
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="tokens per rank, uniform, instead of all settings"
    )
    parser.add_argument("--num-sms", type=int, nargs="+", help="SM budgets of ours")
    parser.add_argument("--cuda-graphs", choices=("on", "off"), help="may XLA capture ours")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all")
    common_options(parser)
    args = parser.parse_args(argv)
    if unknown := set(args.sweep) - set(SWEEPS):
        parser.error(f"--sweep must name some of {','.join(SWEEPS)}; got {','.join(unknown)}")
    numbers = [args.samples or 1, args.ranks or 1, *(args.tokens or []), *(args.num_sms or [])]
    if min(numbers) < 1:
        parser.error("--samples, --ranks, --tokens and --num-sms must be positive")
    return args


def choose_settings(args: argparse.Namespace, on_gpu: bool) -> list[Setting]:
    """What to run without a sweep, what matters most first."""
    sizes = FULL if on_gpu else TINY
    if args.tokens:
        return [Setting(tokens, **sizes) for tokens in args.tokens]
    if args.quick:
        return [Setting(t, **sizes) for t in QUICK_TOKENS] if on_gpu else list(CPU_SETTINGS[:1])
    return list(GPU_SETTINGS if on_gpu else CPU_SETTINGS)


def choose_methods(args: argparse.Namespace, setting: Setting, on_gpu: bool) -> tuple[str, ...]:
    """The methods for a setting; ours first, for the others are checked against it."""
    wanted = args.methods or (QUICK_METHODS if args.quick else METHODS)
    is_pointless = setting.tokens not in RAGGED_TOKENS or setting.routing != "uniform"
    if not on_gpu or (is_pointless and args.methods is None):  # XLA:CPU does not have it
        wanted = [method for method in wanted if method != "ragged"]
    return tuple(method for method in METHODS if method in wanted)


def get_wire(args: argparse.Namespace, sizes: list[int], num_gpus: int) -> dict[str, Any] | None:
    """The wire's limit, measured or out of a record; None, and why, if it is not known."""
    if args.wire == "none":
        return None
    if args.wire != "measure":
        found = json.loads(pathlib.Path(args.wire).read_text())["wire"]
        if found is None or found["gpus"] != num_gpus:
            raise SystemExit(f"--wire must be a record of {num_gpus} GPUs; got {args.wire}")
        return dict(found, measured_for=found.get("measured_for", pathlib.Path(args.wire).name))
    say("the wire: building and running wire.cu")
    try:
        measured = wire.measure(sizes, num_gpus)
    except (RuntimeError, ValueError) as error:  # ValueError: what it printed is no JSON
        say(f"the wire's limit is not known: {error}")
        return None
    for result in measured["results"]:
        say(
            f"the wire: {result['bytes'] / 1e6:.3f} MB from each GPU in {result['median_us']:.1f} "
            f"us, {result['gb_per_s']:.0f} GB/s with {result['blocks']} blocks"
        )
    for way, result in measured.get("bulk", {}).items():
        say(f"the wire: by bulk copies, {way}: {result}")
    say(f"the wire: a flag takes {measured['flag_us']:.2f} us one way")
    say(f"memory: {measured.get('local_gb_per_s')} GB/s, reads and writes counted")
    return measured


def set_platform(ranks: int | None) -> int:
    """Decides between GPUs and virtual CPU devices; returns the number of GPUs to use, or 0.

    Before JAX starts, for it reads the environment then.
    """
    num_gpus = 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else wire.count_gpus()
    if num_gpus:
        return min(ranks or num_gpus, num_gpus)
    os.environ["JAX_PLATFORMS"] = "cpu"
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        count = ranks or CPU_RANKS
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={count}"
    print(NOT_GPU, flush=True)
    return 0


def start_jax(num_gpus: int, ranks: int | None) -> Any:
    """The mesh of a run.

    Raises:
      SystemExit: JAX does not have the GPUs.
    """
    say("starting JAX")
    import jax
    import numpy as np
    from jax.sharding import Mesh

    devices = jax.devices()
    if num_gpus and (devices[0].platform != "gpu" or len(devices) < num_gpus):
        raise SystemExit(
            f"There are {num_gpus} GPUs, but JAX has {devices}: JAX_PLATFORMS=cpu runs without."
        )
    return Mesh(np.array(devices[: num_gpus or ranks or len(devices)]), ("ep",))


def open_run(
    args: argparse.Namespace,
    num_gpus: int,
    sweeps: Sequence[str],
    what: str,
    samples: int,
    measured: dict[str, Any] | None = None,
) -> suite.Run:
    """Starts JAX and a run, whose record goes to ``what``."""
    mesh = start_jax(num_gpus, args.ranks)
    from . import suite, timing

    return suite.Run(
        mesh=mesh,
        record=dict(
            describe_run(mesh, num_gpus, measured),
            cuda_graphs=getattr(args, "cuda_graphs", None) or "default",
            sweeps=list(sweeps),
            failures=[],
            rows=[],
        ),
        path=choose_path(args, mesh, what),
        samples=args.samples or samples,
        sample_seconds=QUICK_SECONDS if args.quick else timing.SAMPLE_SECONDS,
        deadline=_start + args.budget,
        say=say,
    )


def describe_run(mesh: Any, num_gpus: int, measured: dict[str, Any] | None) -> dict[str, Any]:
    """The head of a record."""
    from jax_moe_a2a._src import native

    from . import suite

    if native.has_test_hooks():
        say("The kernels are built with test hooks, which may take time: the record says so.")
    kind = mesh.devices.flat[0].device_kind
    return dict(
        date=records.today(),
        commit=records.commit(),
        gpus=f"{num_gpus} x {kind}" if num_gpus else "none (virtual CPU devices: not GPU figures)",
        ranks=mesh.size,
        versions=records.versions(),
        test_hooks=native.has_test_hooks(),
        default_num_sms=suite.default_num_sms(),
        default_cuda_graphs=suite.DEFAULT_CUDA_GRAPHS,
        alignment=1,
        wire=measured,
    )


def choose_path(args: argparse.Namespace, mesh: Any, what: str = "") -> pathlib.Path | None:
    """Where the record goes; nowhere without a GPU, unless --out says where."""
    device = mesh.devices.flat[0]
    if args.out is not None:
        if args.out.suffix == ".json":
            return args.out
        return records.default_path(mesh.size, device.device_kind, what, args.out)
    return (
        records.default_path(mesh.size, device.device_kind, what)
        if device.platform == "gpu"
        else None
    )


def make_batches(args: argparse.Namespace, ranks: int, on_gpu: bool) -> list[list[suite.Plan]]:
    """Plans; those of a batch are compiled together."""
    from . import suite, sweeps

    options = tuple({"num_sms": num_sms} if num_sms else {} for num_sms in args.num_sms or [None])
    if args.cuda_graphs is not None:
        options = tuple({**o, "cuda_graphs": args.cuda_graphs == "on"} for o in options)
    if args.sweep:
        return [sweeps.plans(name, ranks, on_gpu, args.quick) for name in args.sweep]
    return [
        [
            suite.Plan(
                draw(setting, ranks),
                methods=choose_methods(args, setting, on_gpu),
                options=options,
            )
        ]
        for setting in choose_settings(args, on_gpu)
    ]


def finish(args: argparse.Namespace, record: dict[str, Any], path: pathlib.Path | None) -> int:
    """Writes the record, says where it is, plots it, and returns the exit status: 1 if anything
    failed."""
    if path is not None:
        records.write(record, path)
        print(f"record: {path}", flush=True)
        if not args.no_plot:
            try:
                from .plot import plot

                for made in plot(record, path):
                    print(f"plot:   {made}")
            except ImportError:
                print("no plot: matplotlib is not installed")
    for failure in record["failures"]:
        print(f"FAILED {failure}")
    if record["gpus"].startswith("none"):
        print(NOT_GPU)
    say("done")
    return 1 if record["failures"] else 0


def main(argv: list[str] | None = None) -> int:
    """Runs it; returns the exit status: 1 if anything failed."""
    args = parse(argv)
    num_gpus = set_platform(args.ranks)
    measured = None
    if num_gpus > 1:  # before JAX takes the memory
        settings = choose_settings(args, True)
        if args.sweep:
            settings = [Setting(tokens, **FULL) for tokens in WIRE_TOKENS]
        sizes = [draw(setting, num_gpus).busiest_bytes for setting in settings]
        measured = get_wire(args, sizes, num_gpus)

    is_brief = args.quick or args.sweep or not num_gpus
    what = "-".join(args.sweep) if len(args.sweep) < 3 else "sweeps"
    run = open_run(args, num_gpus, args.sweep, what, QUICK_SAMPLES if is_brief else 7, measured)
    from . import suite

    why_portable = suite.why_portable(run.mesh)
    if num_gpus and why_portable and "ours" in (args.methods or METHODS):
        print(f"The kernels would not run: {why_portable}. --methods without ours runs the others.")
        return 1
    results = {r["bytes"]: r for r in measured["results"]} if measured else {}
    for plans in make_batches(args, run.mesh.size, bool(num_gpus)):
        try:
            suite.run_plans(run, plans)
        except Exception as error:  # of one batch, must not end the run
            run.fail(str(plans[0].sweep or plans[0].workload.setting), error)
        for plan in plans:
            if not plan.sweep and plan.workload.busiest_bytes in results:
                run.add(suite.wire_row(plan.workload, results[plan.workload.busiest_bytes]))

    print(f"\n{suite.table(run.record['rows'])}\n", flush=True)
    return finish(args, run.record, run.path)


if __name__ == "__main__":
    raise SystemExit(main())
