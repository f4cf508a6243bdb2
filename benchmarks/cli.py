"""Share what all benchmarks need: options, the choice of devices, and the head of a record."""

from __future__ import annotations

import argparse
import os
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import record as records
from . import wire

if TYPE_CHECKING:
    from . import suite

QUICK_SAMPLES = 3
QUICK_SECONDS = 0.008  # of a sample: to see that it runs; figures scatter by 15 %
CPU_RANKS = 8
NOT_GPU = "No GPU here: tiny sizes on virtual CPU devices. These are NOT GPU figures."

_start = time.perf_counter()


def say(text: str) -> None:
    """Print a line of progress at once."""
    print(f"[{time.perf_counter() - _start:6.1f} s] {text}", flush=True)


def make_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of ``python -m name`` with the options of every benchmark."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few sizes and methods, few samples")
    parser.add_argument("--ranks", type=int, help="use this many of the GPUs; default: all")
    parser.add_argument("--samples", type=int, help="timed samples of each program")
    parser.add_argument(
        "--budget", type=float, default=1e9, help="seconds after which nothing more is timed"
    )
    parser.add_argument("--no-plot", action="store_true", help="only the record")
    parser.add_argument(
        "--out", type=pathlib.Path, help="the record's path (.json), or a folder for it"
    )
    return parser


def set_platform(ranks: int | None) -> int:
    """Decide between GPUs and virtual CPU devices; return the number of GPUs to use, or 0.

    Call it before JAX starts, because JAX reads the environment then.
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
    """Return the mesh of a run.

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
    """Start JAX and a run, whose record goes to ``what``."""
    mesh = start_jax(num_gpus, args.ranks)
    from . import suite, timing

    return suite.Run(
        mesh=mesh,
        record=describe_run(mesh, num_gpus, wire=measured, sweeps=list(sweeps), failures=[]),
        path=choose_path(args, mesh, what),
        samples=args.samples or samples,
        sample_seconds=QUICK_SECONDS if args.quick else timing.SAMPLE_SECONDS,
        deadline=_start + args.budget,
        say=say,
    )


def describe_run(mesh: Any, num_gpus: int, **more: Any) -> dict[str, Any]:
    """Return a record without rows."""
    from jax_moe_a2a._src import native

    from . import suite

    if native.has_test_hooks():
        say("The kernels are built with test hooks, which may take time: the record says so.")
    kind = mesh.devices.flat[0].device_kind
    return records.head(
        f"{num_gpus} x {kind}" if num_gpus else "none (virtual CPU devices: not GPU figures)",
        mesh.size,
        test_hooks=native.has_test_hooks(),
        default_num_sms=suite.default_num_sms(),
        default_cuda_graphs=suite.DEFAULT_CUDA_GRAPHS,
        alignment=1,
        **more,
    )


def choose_path(args: argparse.Namespace, mesh: Any, what: str = "") -> pathlib.Path | None:
    """Return the path of the record; None without a GPU, unless ``--out`` names one."""
    device = mesh.devices.flat[0]
    if args.out is not None and args.out.suffix == ".json":
        return args.out
    if args.out is None and device.platform != "gpu":
        return None
    return records.default_path(mesh.size, device.device_kind, what, args.out or records.FOLDER)


def finish(args: argparse.Namespace, record: dict[str, Any], path: pathlib.Path | None) -> int:
    """Write the record and its plots, print tables; return the exit status: 1 for failures."""
    status = records.finish(record, path, not args.no_plot)
    from .plot import grouped
    from .readme import sweep_table, table

    for sweep, rows in grouped(record["rows"], lambda row: row["sweep"]).items():
        print(f"\n{sweep}\n{table(*sweep_table(sweep, rows))}\n", flush=True)
    if record["gpus"].startswith("none"):
        print(NOT_GPU)
    say("done")
    return status
