"""Time schedules of a whole layer on one GPU, whose peers are played by a paced sender.

    python -m benchmarks.schedules                         build/schedules_bench, on the first GPU
    python -m benchmarks.schedules --binary FILE --out FILE --shapes A --ranks 2

Runs the driver ``tools/driver/schedules.cu``, whose first lines say how it is built and what it
measures, and writes its figures as a record. The routing is uniformly random; the package's own
``route`` computes it on the CPU. Options that are not listed here go to the driver.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jax_moe_a2a as ma

from . import record as records
from . import run as runs
from .workload import LAYERS, Setting, draw

BINARY = records.ROOT / "build" / "schedules_bench"
SECONDS = 540  # of the whole run
SHAPES = dict(LAYERS, tiny=(Setting(48, hidden=64, top_k=4, experts=16), 32))

ARRAYS = (  # of a routing, as LayerFile in the driver reads them
    *("token_slot", "slot_token", "choice_rank", "slot_rows"),
    *("row_rank", "row_slot", "row_token", "group_sizes"),
)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the command line, and the options of the driver."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.schedules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--binary", type=pathlib.Path, default=BINARY, help="the driver")
    parser.add_argument("--out", type=pathlib.Path, help="default: results/")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=("A", "B"))
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4, 8))
    parser.add_argument("--layers", type=pathlib.Path, help="only write the layers to this folder")
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the driver; return the exit status: 1 if it failed."""
    args, options = parse(argv)
    if args.layers:
        print(*write_layers(args.layers, args.shapes, args.ranks), sep=",")
        return 0
    if not args.binary.exists():
        print(f"{args.binary} is not built: tools/driver/schedules.cu says how")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        # A process of its own: JAX would take the memory of the GPU.
        writing = [sys.executable, "-m", "benchmarks.schedules", "--layers", folder]
        writing += ["--shapes", *args.shapes, "--ranks", *map(str, args.ranks)]
        layers = subprocess.run(
            writing,
            cwd=records.ROOT,
            env=dict(os.environ, JAX_PLATFORMS="cpu"),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
        lines = pathlib.Path(folder) / "rows"
        command = [str(args.binary.resolve()), *options, "--layers", layers, "--json", str(lines)]
        first, status = run(command)
        text = lines.read_text() if lines.exists() else ""
    rows = predict([json.loads(line) for line in text.splitlines()])
    if not rows:
        print("no figures: no record")
        return 1
    name, _, played = first.partition(", ")
    failures = [] if status == 0 else [f"the driver ended with the status {status}"]
    # JAX is asked for its devices only now, because it takes the memory of the GPU.
    record = records.head(f"1 x {name}", 1, played=played, options=options, failures=failures)
    record["rows"] = rows
    return runs.finish(record, args.out or records.default_path(record, "schedules"))


def write_layers(
    folder: pathlib.Path, shapes: Sequence[str], ranks: Sequence[int]
) -> list[pathlib.Path]:
    """Write layers for the driver, one file of int32 for each shape and number of ranks.

    Returns:
      The files; ``LayerFile`` in the driver names the numbers and arrays.
    """
    paths = []
    for name in shapes:
        setting, intermediate = SHAPES[name]
        for size in ranks:
            work = draw(setting, size)
            options = dict(
                group=ma.Group(axis_name="ep", size=size, implementation="portable"),
                num_experts=setting.experts,
                capacity=work.capacity,
            )
            route = jax.vmap(lambda ids, options=options: ma.route(ids, **options), axis_name="ep")
            routings = jax.tree.map(np.asarray, jax.jit(route)(work.ids))
            of_rank_0 = jax.tree.map(lambda array: array[0], routings)
            sent = (routings.slot_token >= 0).sum(axis=2)  # tokens, by source and destination
            sent[0, 0] = 0
            sizes = (size, setting.tokens, setting.hidden, intermediate, setting.experts)
            numbers = [*sizes, setting.top_k, work.capacity, int(of_rank_0.num_rows)]
            arrays = [getattr(of_rank_0, name).ravel() for name in ARRAYS]
            paths.append(folder / f"{name}-{size}")
            content = np.concatenate([numbers, *arrays, sent[:, 0], sent[0]])
            content.astype(np.int32).tofile(paths[-1])
    return paths


def predict(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with ``predicted_us``: the time of an overlap from its parts, or None.

    The exchange disappears, and the products next to it lose its multiprocessors while it runs.
    """
    found = []
    for row in rows:
        us = None
        if row["products"]:
            same = {key: row[key] for key in ("shape", "played_ranks", "op")}
            part = lambda name, same=same, **more: records.entry(
                rows, schedule=name, **same, **more
            )
            alone, next_to = (
                part("combine alone", num_sms=sms) for sms in (row["sms_alone"], row["num_sms"])
            )
            share = row["num_sms"] / row["free_sms"]
            overlapped = min(next_to, part("weight gradients alone") / (1 - share))
            us = part("one after the other") - alone + share * overlapped + next_to - overlapped
        found.append(dict(row, predicted_us=us if us is None else round(us, 1)))
    return found


def run(command: list[str]) -> tuple[str, int]:
    """Run the driver and show what it prints; return its first line and its exit status."""
    first = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            first = first or line.strip()
            print(line, end="", flush=True)
        return first, driver.wait(SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
