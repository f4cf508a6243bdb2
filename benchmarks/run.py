"""Functions for all benchmarks."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import native

from . import record as records
from . import timing, wire
from .record import Row
from .report import plot, tables

CPU_RANKS = 8
MAX_THREADS = 32
TIMEOUT_SECONDS = 10.0  # limit of a wait in a kernel
NOT_GPU = "No GPU here: tiny sizes on virtual CPU devices. These are NOT GPU figures."

_start = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - _start:6.1f} s] {text}", flush=True)


def make_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    """Choose devices before JAX makes them. Return the number of GPUs."""
    num_gpus = 0 if os.environ.get("JAX_PLATFORMS") == "cpu" else wire.count_gpus()
    if num_gpus:
        return min(ranks or num_gpus, num_gpus)
    jax.config.update("jax_platforms", "cpu")
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        count = ranks or CPU_RANKS
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={count}"
    print(NOT_GPU, flush=True)
    return 0


class Program(NamedTuple):
    """A program that repeats a step, perhaps not compiled yet."""

    compiling: concurrent.futures.Future
    reps: int
    exchanges: int
    """The least number of exchanges in each repetition."""
    num_results: int


class Job(NamedTuple):
    what: str
    program: Program
    args: Callable[[Any], tuple[Any, ...]]
    """Maps the result of ``Case.check`` to arguments."""
    row: Callable[[timing.Timing], Row | None]
    """Maps a repetition's time to a row, or None."""


class Case(NamedTuple):
    what: str
    check: Callable[[], Any]
    jobs: Sequence[Job]
    group: ma.Group | None = None
    """After an error, the group is closed."""


@dataclasses.dataclass(frozen=True)
class Run:
    mesh: Mesh
    record: dict[str, Any]
    path: pathlib.Path | None
    """None: write no record."""
    samples: int
    sample_seconds: float = timing.SAMPLE_SECONDS
    deadline: float = float("inf")
    """In ``time.perf_counter()``: no sample starts later."""
    pool: concurrent.futures.Executor = dataclasses.field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(
            min(MAX_THREADS, os.cpu_count() or 1)
        )
    )
    compiling: list[concurrent.futures.Future] = dataclasses.field(default_factory=list)
    tie_us: dict[Any, float | None] = dataclasses.field(default_factory=dict)
    """By ``suite.TieKey``; None: not known."""

    @property
    def on_gpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "gpu"

    def group(self, **options: Any) -> ma.Group:
        return ma.Group(self.mesh, self.mesh.axis_names, **{"timeout": TIMEOUT_SECONDS, **options})

    def per_rank(self, fn: Callable[..., Any]) -> Any:
        return timing.per_rank(fn, self.mesh)

    def add(self, row: Row) -> None:
        """Add a row, and write the record, so an interrupted run keeps its rows."""
        self.record["rows"].append(row)
        if "us" in row:
            say(in_words(row))
        self.save()

    def save(self) -> None:
        if self.path is not None:
            records.write(self.record, self.path)

    @contextlib.contextmanager
    def attempt(self, what: str, group: ma.Group | None = None) -> Iterator[None]:
        """If the ``with`` block fails, record the error, close the group, and continue."""
        try:
            yield
        except Exception as error:
            text = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
            say(f"FAILED {text}")
            self.record["failures"].append(text)
            if group is not None:
                with contextlib.suppress(Exception):
                    group.close()

    def check_time(self) -> None:
        if time.perf_counter() > self.deadline:
            raise TimeoutError("not run: the time budget is spent")

    def compile(self, lowered: Any) -> concurrent.futures.Future:
        self.compiling.append(self.pool.submit(lowered.compile))
        return self.compiling[-1]

    def wait(self) -> None:
        """Wait for XLA's compilations, because they use the cores and GPUs of measurements."""
        concurrent.futures.wait(self.compiling)
        self.compiling.clear()

    def measure(self, cases: Iterable[Case]) -> None:
        self.wait()
        for case in cases:
            with self.attempt(case.what, case.group):
                self.check_time()
                checked = case.check()
                for job in case.jobs:
                    with self.attempt(f"{case.what} {job.what}", case.group):
                        sample_us = self.sampler(job.program, *job.args(checked))
                        result = timing.Timing.of([sample_us() for _ in range(self.samples)])
                        if case.group is not None:
                            case.group.check()
                        if row := job.row(result):
                            self.add(row)

    def start(
        self,
        step: Callable[..., Any],
        state: Any,
        *fixed: Any,
        reps: int = 1,
        exchanges: int = 1,
        tied_axes: int | None = 2,
        keeps_results: bool = False,
    ) -> Program:
        """Start to compile ``timing.chain``, or one step if ``keeps_results``."""
        if not self.on_gpu:  # XLA:CPU ignores the barriers between repetitions
            reps = 1
        fn = step if keeps_results else timing.chain(step, reps, tied_axes)
        lowered = self.per_rank(fn).lower(state, *fixed)
        num_results = len(jax.tree.leaves(lowered.out_info))
        return Program(self.compile(lowered), reps, exchanges, num_results)

    def sampler(self, program: Program, *args: Any) -> Callable[[], float]:
        """Return a function that returns microseconds of a repetition."""
        self.check_time()
        compiled = program.compiling.result()
        timing.check_unmerged(compiled, program.reps, program.exchanges)
        return timing.sampler(compiled, args, program.reps, self.sample_seconds)


def in_words(row: Row) -> str:
    name = row["op"] + " with route" * bool(row.get("includes_route"))
    text = f"{row['method']:10} {name:24} {row['us']:10.1f} us"
    text += f"  ({row['min_us']:.1f} to {row['max_us']:.1f})"
    if row.get("ratio") is not None:
        text += f"  {row['ratio']:.2f} x wire, {row['gb_per_s']:.0f} GB/s"
    if row.get("weight_gb_per_s") is not None:
        text += f"  {row['tflops']:.1f} TFLOP/s, {row['weight_gb_per_s']:.1f} GB/s of weights"
    return text + (f"  {row['num_sms']} SMs" if row.get("num_sms") else "")


def open_run(
    args: argparse.Namespace,
    num_gpus: int,
    sweeps: Sequence[str],
    what: str,
    samples: int,
    measured: dict[str, Any] | None = None,
) -> Run:
    """Start JAX and a new record. ``samples`` is the default of ``--samples``."""
    say("starting JAX")
    devices = jax.devices()
    if num_gpus and (devices[0].platform != "gpu" or len(devices) < num_gpus):
        raise SystemExit(
            f"expected {num_gpus} GPUs; JAX has {devices}; set JAX_PLATFORMS=cpu to use none"
        )
    mesh = Mesh(np.array(devices[: num_gpus or args.ranks or len(devices)]), ("ep",))
    gpus = f"{num_gpus} x {devices[0].device_kind}"
    record = records.head(
        gpus if num_gpus else "none (virtual CPU devices: not GPU figures)",
        mesh.size,
        test_hooks=native.has_test_hooks(),
        tuning=dict(native.TUNING),
        wire=measured,
        sweeps=list(sweeps),
        failures=[],
    )
    if native.has_test_hooks():
        say("The kernels are built with test hooks, which may take time. The record says so.")
    path = args.out
    if path is None or path.suffix != ".json":
        path = records.default_path(record, what, args.out or records.FOLDER)
    return Run(
        mesh=mesh,
        record=record,
        path=path if num_gpus or args.out else None,
        samples=args.samples or samples,
        deadline=_start + args.budget,
    )


def finish(record: dict[str, Any], path: pathlib.Path | None, has_plots: bool = True) -> int:
    """Return 1 after failures, otherwise 0."""
    if path is not None:
        records.write(record, path)
        print(f"record: {path}", flush=True)
    if path is not None and has_plots:
        try:
            for made in plot(records.read(path), path):
                print(f"plot:   {made}")
        except ImportError:
            print("no plot: matplotlib is not installed")
    print("", *tables(record["rows"]), "", sep="\n\n", flush=True)
    if record["gpus"].startswith("none"):
        print(NOT_GPU)
    for failure in record["failures"]:
        print(f"FAILED {failure}")
    say("done")
    return 1 if record["failures"] else 0
