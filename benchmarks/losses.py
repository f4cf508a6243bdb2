"""Train the example model in several ways on the same text, and record the loss of each step.

    python -m benchmarks.losses --seeds 0 1 2 3
    python -m benchmarks.losses --steps 20 --only portable --out /tmp/losses.json

Trainings with the same seed start from the same parameters and read the same text in the same
batches (``examples/train_moe.py``). No row is dropped. The first losses of two trainings differ by
about one rounding error. Later, rounding errors grow, and change the router's choices.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

import numpy as np

from . import record

FOLDER = record.FOLDER / "losses"
PROGRAM = record.ROOT / "examples/train_moe.py"
WAYS = {
    "bf16": "",
    "one_rank": "--mesh 1,1",
    "fp8": "--experts fp8",
    "portable": "--implementation portable",
    "dense": "--experts dense --dtype float32",
}
NAMES = {
    "bf16": "this package, bfloat16",
    "one_rank": "this package, bfloat16, one rank",
    "fp8": "this package, experts in FP8",
    "portable": "portable path, bfloat16",
    "dense": "every expert for every token, float32",
}
# The source text of these modules is the same in Python 3.11.7, 3.12.1 and 3.13.0.
MODULES = """difflib optparse zoneinfo/_zoneinfo email/header heapq concurrent/futures/_base
tomllib/_parser weakref email/headerregistry tracemalloc xml/sax/handler _markupbase json/__init__
xml/etree/ElementPath stringprep xml/dom/xmlbuilder multiprocessing/synchronize xml/sax/saxutils
string xml/dom/pulldom multiprocessing/heap pyclbr email/contentmanager email/quoprimime graphlib
multiprocessing/spawn multiprocessing/reduction urllib/robotparser email/_encoded_words"""
SEQUENCES = 16
END = 100  # the entry "end" is the mean loss of the last 100 steps


def text() -> bytes:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = [root / f"{name}.py" for name in MODULES.split()]
    return b"\n".join(f.read_bytes() for f in files if f.exists())  # newer Pythons lack string.py


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def train(way: str, seed: int, *, steps: int, stop: int) -> list[float]:
    """Return the losses of the first ``stop`` steps of a training of ``steps`` steps."""
    with tempfile.TemporaryDirectory() as folder:
        source, losses = pathlib.Path(folder, "text"), pathlib.Path(folder, "losses.json")
        source.write_bytes(text())
        options = f"{WAYS[way]} --seed {seed} --steps {steps} --stop {stop}"
        options += f" --sequences {SEQUENCES}"
        options += f" --capacity-factor 0 --sample 0 --log-every {max(stop // 10, 1)}"
        paths = f"--text {source} --losses {losses} --out {folder}/losses.png"
        path = os.pathsep.join(filter(None, (str(record.ROOT), os.environ.get("PYTHONPATH"))))
        subprocess.run(
            [sys.executable, PROGRAM, *options.split(), *paths.split()],
            env=os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            check=True,
        )
        return json.loads(losses.read_text())


def smooth(losses: list[float], steps: int = 20) -> np.ndarray:
    return np.convolve(losses, np.full(steps, 1 / steps), "valid")


def draw(rows: record.Rows, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    curves = {(row["way"], row["seed"]): smooth(row["losses"]) for row in rows}
    seeds = sorted({seed for _, seed in curves})
    for color, way in enumerate(way for way in WAYS if (way, seeds[0]) in curves):
        style = "k--" if way == "dense" else f"C{color}"
        left.plot(curves[way, seeds[0]], style, linewidth=1, label=NAMES[way])
        if way != "dense" and ("dense", seeds[0]) in curves:
            apart = [100 * (curves[way, seed] / curves["dense", seed] - 1) for seed in seeds]
            for one in apart:
                right.plot(one, style, linewidth=0.4, alpha=0.5)
            right.plot(np.mean(apart, 0), style, linewidth=1.5)
    left.set(xlabel="step", ylabel="nats per byte", title=f"training loss, seed {seeds[0]}")
    title = f"difference from the dense model; thick: mean of {len(seeds)} seeds"
    right.set(xlabel="step", ylabel="%", title=title)
    left.legend()
    right.axhline(0, color="black", linestyle=":")
    figure.savefig(path, dpi=120)


def newest() -> record.Found:
    found = (record.Found(path, json.loads(path.read_text())) for path in FOLDER.glob("*.json"))
    has_all = lambda f: {row["way"] for row in f.record["rows"]} == set(WAYS)
    return max(filter(has_all, found), key=lambda f: f.path.name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=pathlib.Path, help="default: a record of today")
    parser.add_argument("--draw", type=pathlib.Path, help="draw this record, train nothing")
    args = parser.parse_args(argv)
    if args.draw:
        draw(json.loads(args.draw.read_text())["rows"], args.draw.with_suffix(".png"))
        return 0

    import jax  # only names the devices, because each training runs in a separate process

    devices = jax.devices()
    gpus = f"{len(devices)} x {devices[0].device_kind}"
    more = dict(text=digest(text()), steps=args.steps, seeds=args.seeds)
    found = record.head(gpus, len(devices), **more)
    path = args.out or record.default_path(found, folder=FOLDER)
    for way in args.only:
        # Trainings with several seeds share the devices.
        of_seed = functools.partial(train, way, steps=args.steps, stop=args.steps)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            curves = list(pool.map(of_seed, args.seeds))
        for seed, losses in zip(args.seeds, curves):
            end = round(float(np.mean(losses[-END:])), 4)
            found["rows"].append(dict(way=way, seed=seed, end=end, losses=losses))
            print(f"{NAMES[way]}, seed {seed}: {losses[0]} -> {end}", flush=True)
        record.write(found, path)
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
