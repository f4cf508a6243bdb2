"""Time round trips in one process, in several, and in two levels.

    python -m benchmarks.processes                        every layout of this machine's GPUs
    python -m benchmarks.processes --tokens 128 4096
    python -m benchmarks.processes --layouts 1 4 1:2      processes[:hosts]

The GPUs are in one process, in several, and in two levels as if on two hosts. Each layout has
processes of its own, started and ended here. All use the times that process 0 has measured, so that
they make the same calls.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import re
import sys
import tempfile
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from . import record as records
from . import run as runs
from . import suite
from .operations import ROUND_TRIP
from .run import Run, say
from .together import run_together
from .workload import FULL, TINY, Setting, draw

SWEEP = "processes"
TOKENS = (8, 128, 1024, 4096)
CPU_TOKENS = (3, 16)
SAMPLES = 7
TIMEOUT_SECONDS = 20.0  # of a wait in a kernel, because processes compile at different times
SECONDS_OF_LAYOUT = 150.0  # to start, to compile and to measure


class Layout(NamedTuple):
    """How the ranks are divided into processes and hosts."""

    processes: int
    hosts: int = 1
    """2: in two levels, as if on two hosts."""

    def __str__(self) -> str:
        return ":".join(map(str, self))


def layout_of(text: str) -> Layout:
    """Return the layout of ``processes[:hosts]``."""
    return Layout(*map(int, text.split(":")))


def all_layouts(num_devices: int) -> list[Layout]:
    """Return one process and several; then one as if on two hosts."""
    found = [Layout(n) for n in range(1, num_devices + 1) if num_devices % n == 0]
    if num_devices >= 4 and num_devices % 2 == 0:
        found.append(Layout(1, hosts=2))
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = runs.make_parser("benchmarks.processes", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", help="per rank; default: 8 to 4096")
    parser.add_argument("--layouts", type=layout_of, nargs="+", help="default: all that there are")
    hidden = dict(coordinator=str, num_processes=int, process_id=int)  # of run_together()
    for name, kind in dict(hidden, worker=pathlib.Path).items():  # where work() writes its record
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run it; return the exit status: 1 if anything failed."""
    args = parse(argv)
    if args.worker:
        return work(args)
    num_gpus = runs.set_platform(args.ranks)
    num_devices = num_gpus or args.ranks or runs.CPU_RANKS
    record: dict[str, Any] = {}
    failures, rows = [], []
    path = None
    for layout in args.layouts or all_layouts(num_devices):
        say(f"processes:hosts {layout}")
        try:
            found = run_layout(args, layout, num_devices, bool(num_gpus))
        except RuntimeError as error:  # of one layout, must not end the run
            say(f"FAILED {error}")
            failures.append(f"{layout}: {error}")
            continue
        for row in found["rows"]:
            say(f"{row['tokens']:5} tokens: {row['us']:8.1f} us  ({layout}, {row['path']})")
        rows += found["rows"]
        failures += [f"{layout}: {failure}" for failure in found["failures"]]
        record = dict(found, failures=failures, rows=rows)
        path = path or runs.choose_path(args, record, SWEEP)
        if path:
            records.write(record, path)
    return runs.finish(record, path, not args.no_plot) if record else 1


def run_layout(
    args: argparse.Namespace, layout: Layout, num_devices: int, on_gpu: bool
) -> dict[str, Any]:
    """Start the processes of a layout and return the record of process 0.

    Raises:
      RuntimeError: if one of them failed, or if they did not end in time.
    """
    each, rest = divmod(num_devices, layout.processes)
    if rest:
        raise RuntimeError(f"{num_devices} devices are not to be shared by {layout.processes}")
    tokens = args.tokens or (TOKENS if on_gpu else CPU_TOKENS)[: 2 if args.quick else None]
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )

    def environment_of(process: int) -> dict[str, str]:
        if on_gpu:
            own = range(process * each, (process + 1) * each)
            return dict(JAX_LOCAL_DEVICE_IDS=",".join(map(str, own)))
        own_flags = f"{flags} --xla_force_host_platform_device_count={each}"
        gloo = dict(JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo")
        return dict(gloo, XLA_FLAGS=own_flags, JAX_PLATFORMS="cpu")

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        found = folder / "found.json"
        program = [sys.executable, "-m", "benchmarks.processes", "--worker", str(found)]
        program += ["--layouts", str(layout), "--ranks", str(num_devices), "--tokens"]
        program += [*map(str, tokens), "--samples", str(args.samples or SAMPLES)]
        programs = [(program, environment_of(process)) for process in range(layout.processes)]
        problems, _, complaints = run_together(folder, programs, SECONDS_OF_LAYOUT)
        if problems:
            ends = (" ".join(complaint[-400:].split()) for complaint in complaints)
            raise RuntimeError("; ".join([*problems, *filter(None, ends)]))
        return records.read(found)


def work(args: argparse.Namespace) -> int:
    """Measure in a process of a layout; the first one writes a record."""
    (layout,) = args.layouts
    if layout.processes > 1:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    devices = np.array(jax.devices()[: args.ranks])
    on_gpu = devices[0].platform == "gpu"
    mesh = Mesh(devices.reshape(layout.hosts, -1), ("host", "ep"))
    options = dict(two_level=layout.hosts > 1, timeout=TIMEOUT_SECONDS)
    head = runs.describe_run(mesh, devices.size if on_gpu else 0, sweeps=[SWEEP], failures=[])
    # Programs are loaded in the same order in all processes.
    pool = concurrent.futures.ThreadPoolExecutor(1)
    run = Run(mesh, head, None, args.samples, pool=pool)
    group = run.group(**options)
    if on_gpu and group.path != "cuda":
        raise RuntimeError(f"the kernels would not run: {group.why_portable}")
    for tokens in args.tokens:
        workload = draw(Setting(tokens, **(FULL if on_gpu else TINY)), mesh.size)
        suite.run_plans(
            run, [suite.Plan(workload, ops=(ROUND_TRIP,), options=(options,), sweep=SWEEP)]
        )
    for row in run.record["rows"]:
        row.update(layout._asdict())
    if args.process_id == 0:
        records.write(run.record, args.worker)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
