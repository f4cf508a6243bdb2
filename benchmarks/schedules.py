"""Schedules of a whole layer on one GPU, whose peers are played by a paced sender.

    python -m benchmarks.schedules                         build/schedules_bench, on the first GPU
    python -m benchmarks.schedules --binary FILE --output FILE --shapes A --ranks 2

Runs the driver ``schedules.cu``, whose first lines say how it is built and what it measures, and
writes its figures as a record. Options that are not listed here go to the driver.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import tempfile
from typing import Any

from . import record as records

BINARY = records.ROOT / "build" / "schedules_bench"
SECONDS = 540  # of the whole run


def main(argv: list[str] | None = None) -> int:
    """Run it; return the exit status: 1 if the driver failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.schedules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--binary", type=pathlib.Path, default=BINARY, help="the driver")
    parser.add_argument("--output", type=pathlib.Path, help="default: results/")
    args, options = parser.parse_known_args(argv)
    if not args.binary.exists():
        print(f"{args.binary} is not built: the first lines of tools/driver/schedules.cu say how")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        lines = pathlib.Path(folder) / "rows"
        command = [str(args.binary.resolve()), *options, "--json", str(lines)]
        first, status = run(command)
        text = lines.read_text() if lines.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    failures = [] if status == 0 else [f"the driver ended with the status {status}"]
    if not rows:
        print("no figures: no record")
        return 1
    record = make_record(first, rows, failures, options)
    name = first.partition(",")[0]
    path = args.output or records.default_path(1, name, "schedules")
    records.write(record, path)
    print(f"record: {path}", flush=True)
    try:
        from .plot import plot

        for drawn in plot(record, path):
            print(f"plot:   {drawn}")
    except ImportError:
        print("no plot: matplotlib is not installed")
    return 1 if failures else 0


def run(command: list[str]) -> tuple[str, int]:
    """Run the driver and show what it prints; return its first line and its exit status."""
    first = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            first = first or line.strip()
            print(line, end="", flush=True)
        return first, driver.wait(SECONDS)


def make_record(
    first: str, rows: list[dict[str, Any]], failures: list[str], options: list[str]
) -> dict[str, Any]:
    """Return the record. It asks JAX for its version after the run: JAX takes the GPU's memory."""
    name, _, rest = first.partition(", ")
    return dict(
        date=records.today(),
        commit=records.commit(),
        gpus=f"1 x {name}",
        ranks=1,
        versions=records.versions(),
        wire=None,
        played=rest,
        options=options,
        failures=failures,
        rows=rows,
    )


if __name__ == "__main__":
    raise SystemExit(main())
