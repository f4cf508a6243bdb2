"""Find the numbers of cuda/tuning.h for the exchange on two or more GPUs of this machine.

    python -m benchmarks.tune
    python -m benchmarks.tune --only FEW_NUM_SMS ROUTE_CHUNKS

The program varies the numbers that Python reads when it lowers programs. A candidate is a new value
for one number. With a candidate, rows must equal the rows of the portable path bit for bit, and
sums must agree within a tolerance. Samples of today's value and of all candidates are then taken in
turns, in random order. Each number is measured with the values that were chosen for earlier
numbers. The program writes a JSON record to benchmarks/results/, and prints a table and the lines
for tuning.h. A number keeps today's value unless a candidate is at least 2 % faster, and faster in
every turn. Times include the tie (timing.py), so the gains of short operations are slightly too
small.

Without a GPU, the program runs tiny sizes on virtual CPU devices, which only checks that the
program works.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

from jax_moe_a2a._src.group import native

from . import operations, record, suite, timing
from . import run as runs
from .operations import BACKWARD, COMBINE, EXCHANGE, ROUND_TRIP, ROUND_TRIP_ROUTED, ROUTE, Op
from .run import Run
from .workload import TINY, Setting, draw

SAMPLES = 9
LEAST_GAIN = 0.02
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)  # of the multiprocessors
TUNING_H = record.ROOT / "cuda" / "tuning.h"

Taken = dict[Any, list[list[float]]]
"""Microseconds [case][turn] by value."""


def cases(op: Op, *sizes: tuple[int, int], **options: Any) -> tuple[tuple[Op, Setting], ...]:
    """Return a case (op, setting) for each size, which is (tokens, hidden size)."""
    return tuple((op, Setting(*each, top_k=8, experts=256, **options)) for each in sizes)


H = 7168
LIMITS = cases(ROUND_TRIP_ROUTED, (256, H), (1024, H), (2048, H), (4096, 2048), (8192, 4096))
ROUTES = cases(ROUTE, (512, 1024), (4096, 1024), (16384, 1024))
FP8 = cases(EXCHANGE, (4096, H), format="BlockwiseFp8", formatted="rows")
FP8 += cases(COMBINE, (4096, H), format="BlockwiseFp8", formatted="sums")
# For each number: (timed cases, candidates), where () means the SHARES.
NUMBERS: dict[str, tuple[tuple[tuple[Op, Setting], ...], tuple[int, ...]]] = dict(
    DEFAULT_NUM_SMS=(cases(ROUND_TRIP_ROUTED, (8192, H), (16384, 4096)), ()),  # > FEW_BYTES
    FEW_NUM_SMS=(cases(ROUND_TRIP, (8, H), (128, H), (512, H)), ()),
    WEIGHTED_NUM_SMS=(cases(BACKWARD, (4096, H)), ()),
    FORMAT_NUM_SMS=(FP8, ()),
    FEW_TOKENS=(LIMITS, (128, 512, 1024, 2048)),
    FEW_BYTES=(LIMITS, tuple(mib << 20 for mib in (32, 64, 128, 256, 512))),
    ROUTE_CHUNKS=(ROUTES, (16, 32, 64)),
    ROUTE_LEAST_TOKENS=(ROUTES, (32, 64, 128)),
    ROUTE_MOST_TOKENS=(ROUTES, (128, 256)),
)


def measure(run: Run, name: str, timed_cases: Any, values: Sequence[int], chosen: Any) -> Taken:
    """Return the times of each value with correct results. Today's value is first."""
    tuning = lambda value: mock.patch.dict(native.TUNING, {**chosen, name: value})
    taken: Taken = {value: [] for value in values}
    for op, setting in timed_cases:
        run.check_time()
        tolerance = operations.FORMAT_TOLERANCE.get(setting.format, operations.TOLERANCE)
        workload = draw(setting, run.mesh.size)
        plan = suite.Plan(workload, tolerance=tolerance, program_us=2500, most_reps=32)
        inputs = suite.make_inputs(run.mesh, workload)
        portable = suite.compile_variant(run, plan, "ours", dict(implementation="portable"), ())
        variants = {}
        for value in taken:
            with tuning(value):
                variants[value] = suite.compile_variant(run, plan, "ours", {}, (op,))
        run.wait()
        expected = portable.run_once.result()(*inputs)
        samplers: dict[str, Callable[[], float]] = {}  # by text, because programs may be equal
        state = None
        for value, variant in variants.items():
            if variant.text in samplers:
                continue
            with run.attempt(f"{name} = {value}, {setting}"), tuning(value):
                prepared = suite.case_of(run, variant, inputs, expected).check()
                (timed,) = variant.programs
                state = timed.operation.state(prepared) if state is None else state
                samplers[variant.text] = run.sampler(timed.program, state)
        if variants[values[0]].text not in samplers:
            raise RuntimeError("today's value failed")
        us = timing.take_turns(samplers, run.samples)
        taken = {value: taken[value] for value in taken if variants[value].text in us}
        for value, turns in taken.items():
            turns.append(us[variants[value].text])
            row = dict(method=f"{name} = {value}", sweep="tune", number=name, value=value, op=op[0])
            row |= suite.describe(workload) | timing.Timing.of(turns[-1]).row()
            run.add(row | dict(turns_us=[round(each, 3) for each in turns[-1]]))
    return taken


def judge(name: str, taken: Taken) -> dict[str, Any]:
    """Choose today's or the best value. A turn's gain is the geometric mean over cases."""
    today, *_ = taken

    def gains(value: Any) -> list[float]:
        turns = zip(zip(*taken[value]), zip(*taken[today]))
        ratios = ([new / old for new, old in zip(*turn, strict=True)] for turn in turns)
        return [round(1 - statistics.geometric_mean(turn), 4) for turn in ratios]

    by_value = {value: gains(value) for value in taken}
    best = max(by_value, key=lambda value: statistics.median(by_value[value]))
    gain, least, most = timing.Timing.of(by_value[best])
    keep = gain < LEAST_GAIN or least <= 0
    return dict(number=name, today=today, best=best, gain=gain, least=least, most=most, keep=keep)


def in_words(numbers: Sequence[Mapping[str, Any]], architecture: str, what: str) -> str:
    text = TUNING_H.read_text()
    names = dict(re.findall(r'\{"(\w+)", Tuning::(k\w+)\}', text))
    lines = ["| number | today | best | gain | in single turns | |", "| --- " * 6 + "|"]
    changes = []
    for n in numbers:
        name = names[n["number"]]
        gain = f"{n['gain']:+.1%} | {n['least']:+.1%} to {n['most']:+.1%}"
        verdict = "keep" if n["keep"] else "change"
        lines.append(f"| {name} | {n['today']} | {n['best']} | {gain} | {verdict} |")
        if not n["keep"]:
            changes.append(f"  static constexpr int {name} = {n['best']};")
    if not changes:
        return "\n".join([*lines, "", "All measured numbers keep their values."])
    struct, others = f"Sm{architecture}", re.findall(r"^struct (Sm\d+)", text, re.MULTILINE)
    base = "" if struct in others else f" : {others[-1]}"
    lines += ["", f"For cuda/tuning.h, whose first comment says how to name {struct}:", ""]
    return "\n".join([*lines, f"struct {struct}{base} {{  // {what}", *changes, "};"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = runs.make_parser("benchmarks.tune", __doc__)
    every = tuple(NUMBERS)
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="NUMBER")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Return 1 after failures, otherwise 0."""
    args = parse(argv)
    num_gpus = runs.set_platform(args.ranks)
    if num_gpus == 1:
        raise SystemExit("benchmarks.tune needs two or more GPUs, because one GPU has no links")
    run = runs.open_run(args, num_gpus, ["tune"], "tune", SAMPLES if num_gpus else 1)
    architecture, num_sms = "90", 132  # without GPUs, any numbers
    if num_gpus:
        gpu = run.mesh.devices.flat[0]
        architecture, num_sms = gpu.compute_capability.replace(".", ""), gpu.core_count
    if num_gpus and (path := run.group().path) != "cuda":
        print(f"The {path} path would run; python -m jax_moe_a2a says why.")
        return 1
    numbers = run.record["numbers"] = []
    chosen: dict[str, int] = {}
    for name, (timed_cases, values) in NUMBERS.items():
        if name not in args.only:
            continue
        if not num_gpus:
            (op, setting), tiny = timed_cases[0], dict(TINY, tokens=16, hidden=128)
            timed_cases = ((op, dataclasses.replace(setting, **tiny)),)
        values = values or tuple(round(share * num_sms) for share in SHARES)
        values = tuple(dict.fromkeys((native.tuning(name), *values)))  # today's is the first
        with run.attempt(name):
            numbers.append(judge(name, measure(run, name, timed_cases, values, chosen)))
            if not numbers[-1]["keep"]:
                chosen[name] = numbers[-1]["best"]
    run.save()
    what = f"{run.record['gpus']}, {run.record['date']}"
    print("", in_words(numbers, architecture, what), "", sep="\n")
    print(f"record: {run.path}" if num_gpus else runs.NOT_GPU)
    for failure in run.record["failures"]:
        print(f"FAILED {failure}")
    return 1 if run.record["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
