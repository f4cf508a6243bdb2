"""Time route, dispatch, combine, the round trip and its backward pass on this machine's GPUs.

    python -m benchmarks                   the standard settings; under five minutes
    python -m benchmarks --tokens 4096 128 --methods ours all_gather
    python -m benchmarks --sweep tokens,sigma      two sweeps, about 15 seconds each
    python -m benchmarks --sweep all --ranks 2     all sweeps on the first two GPUs

The same run measures plain JAX and the link limit. The program writes a JSON record and a plot
to benchmarks/results/. Without a GPU, the program runs small sizes on virtual CPU devices, which
only checks that the program works. It then writes a record only if --out names a path.
"""

from __future__ import annotations

import argparse
from typing import Any

from . import run as runs
from . import suite, sweeps, wire
from .run import say
from .workload import CPU_SETTINGS, FULL, GPU_SETTINGS, TINY, Setting, draw

METHODS = ("ours", "all_gather", "dense", "ragged", "ragged32")
# Few sizes, because ragged_all_to_all takes 10 to 100 times the link limit.
RAGGED_TOKENS = (128, 4096)
# Few sizes, because the rate of links hardly depends on the size.
WIRE_TOKENS = (128, 1024, 4096)
SAMPLES, SWEEP_SAMPLES = 7, 3


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = runs.make_parser("benchmarks", __doc__)
    parser.add_argument(
        "--sweep",
        type=lambda text: tuple(sweeps.SWEEPS) if text == "all" else tuple(text.split(",")),
        default=(),
        help=f"instead of the standard settings: 'all', or some of {','.join(sweeps.SWEEPS)}",
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="tokens per rank, uniform, instead of all settings"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all")
    args = parser.parse_args(argv)
    if unknown := set(args.sweep) - set(sweeps.SWEEPS):
        names = ",".join(sweeps.SWEEPS)
        parser.error(f"--sweep must name some of {names}; got {','.join(unknown)}")
    if min(args.samples or 1, args.ranks or 1, *(args.tokens or [1])) < 1:
        parser.error("--samples, --ranks and --tokens must be positive")
    return args


def choose_settings(args: argparse.Namespace, on_gpu: bool) -> list[Setting]:
    if args.tokens:
        sizes = FULL if on_gpu else TINY
        return [Setting(tokens, **sizes) for tokens in args.tokens]
    return list(GPU_SETTINGS if on_gpu else CPU_SETTINGS)


def choose_methods(args: argparse.Namespace, setting: Setting, on_gpu: bool) -> tuple[str, ...]:
    """Return methods. ``ours`` is first, because the rows of others must equal its rows."""
    wanted = args.methods or METHODS
    is_pointless = setting.tokens not in RAGGED_TOKENS or setting.routing != "uniform"
    # XLA:CPU has no ragged_all_to_all.
    if not on_gpu or (is_pointless and args.methods is None):
        wanted = [method for method in wanted if not method.startswith("ragged")]
    return tuple(method for method in METHODS if method in wanted)


def measure_wire(sizes: list[int], num_gpus: int) -> dict[str, Any] | None:
    """Return the JSON that ``wire.cu`` prints, or None after an error."""
    say("the link limit: building and running wire.cu")
    try:
        measured = wire.measure(sizes, num_gpus)
    except (RuntimeError, ValueError) as error:  # ValueError: the output is not JSON
        say(f"the link limit is not known: {error}")
        return None
    rate = max(result["gb_per_s"] for result in measured["results"])
    say(f"each GPU stores {rate:.0f} GB/s to its peers")
    return measured


def make_batches(args: argparse.Namespace, ranks: int, on_gpu: bool) -> list[list[suite.Plan]]:
    """Return lists of plans that are compiled together."""
    if args.sweep:
        return [sweeps.plans(name, ranks, on_gpu) for name in args.sweep]
    return [
        [suite.Plan(draw(s, ranks), methods=choose_methods(args, s, on_gpu))]
        for s in choose_settings(args, on_gpu)
    ]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    num_gpus = runs.set_platform(args.ranks)
    measured = None
    if num_gpus > 1:  # before JAX reserves the memory of the GPUs
        settings = choose_settings(args, True)
        if args.sweep:
            settings = [Setting(tokens, **FULL) for tokens in WIRE_TOKENS]
        sizes = [draw(setting, num_gpus).busiest_bytes for setting in settings]
        measured = measure_wire(sizes, num_gpus)

    what = "-".join(args.sweep) if len(args.sweep) < 3 else "sweeps"
    samples = SAMPLES if num_gpus and not args.sweep else SWEEP_SAMPLES
    run = runs.open_run(args, num_gpus, args.sweep, what, samples, measured)
    path = run.group().path
    if num_gpus and path != "cuda" and "ours" in (args.methods or METHODS):
        print(
            f"The {path} path would run; python -m jax_moe_a2a says why. --methods without ours "
            "runs the others."
        )
        return 1
    for plans in make_batches(args, run.mesh.size, bool(num_gpus)):
        with run.attempt(str(plans[0].sweep or plans[0].workload.setting)):
            suite.run_plans(run, plans)
    return runs.finish(run.record, run.path, not args.no_plot)
