"""Find the numbers of cuda/tuning.h for the exchange on this machine's GPUs.

    python -m benchmarks.tune                            numbers with which Python lowers programs
    python -m benchmarks.tune --compiled                 also constants of kernels; needs nvcc
    python -m benchmarks.tune --only FEW_NUM_SMS kStages

A candidate is another value of one number. Its rows must equal those of the portable path bit for
bit, and its sums must be within a tolerance. Today's value and all candidates of a number then take
samples in turns, in random order. The program writes a JSON record to benchmarks/results/, and
prints a table and the lines for tuning.h. A number keeps today's value unless another value is at
least 2 % faster, and faster in every turn. Times include the tie (timing.py), so short operations
gain slightly more than the table says.

With --compiled, nvcc builds the driver with each candidate into build/tune. All results must have
the same bits as those of the driver without a candidate. A machine without nvcc uses the drivers
that are there already, and a machine without a GPU only builds them. Each constant is measured
alone, and each other number with the values that earlier numbers got.

Two ranks share a single GPU, which has no links, so only the numbers of route are measured there.
Without a GPU, the program runs tiny sizes on virtual CPU devices, which only checks that the
program works.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import jax

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import native

from . import operations, record, suite, timing, wire
from . import run as runs
from .operations import BACKWARD, COMBINE, EXCHANGE, ROUND_TRIP, ROUND_TRIP_ROUTED, ROUTE, Op
from .run import Run, say
from .workload import TINY, Setting, draw

SAMPLES = 9
LEAST_GAIN = 0.02
RANKS_ON_ONE_GPU = 2
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)  # of the GPU's multiprocessors
TUNING_H = record.ROOT / "cuda" / "tuning.h"
DRIVER = record.ROOT / "tools" / "driver" / "kernels.cu"
SOURCES = ("cuda/runtime/*.cc", "cuda/kernels/*.c[uc]", "cuda/colocated/*.c[uc]")
BUILD_SECONDS, DRIVER_SECONDS = 3600, 120
LINE = re.compile(r"^(\w+) +tokens=(\d+) .* us=([\d.]+) .* bits=(\w+)$", re.MULTILINE)

Taken = dict[Any, list[list[float]]]
"""The microseconds by value, by case and by turn."""


def cases(op: Op, *sizes: tuple[int, int], **options: Any) -> tuple[tuple[Op, Setting], ...]:
    """Return an operation with several numbers of tokens and hidden sizes."""
    return tuple((op, Setting(*each, top_k=8, experts=256, **options)) for each in sizes)


H = 7168
LIMITS = cases(ROUND_TRIP_ROUTED, (256, H), (1024, H), (2048, H), (4096, 2048), (8192, 4096))
ROUTES = cases(ROUTE, (512, 1024), (4096, 1024), (16384, 1024))
FP8 = cases(EXCHANGE, (4096, H), format="BlockwiseFp8", formatted="rows")
FP8 += cases(COMBINE, (4096, H), format="BlockwiseFp8", formatted="sums")
# For each number of kLoweringTuning: what is timed, and the candidates, or () for shares of the
# GPU's multiprocessors. Only numbers of route are measured on a single GPU.
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
# Candidates of constants, in C++. A candidate may change a second constant, which then fits.
COMPILED: dict[str, tuple[str, ...]] = dict(
    **dict(kBytesPerTeam=("1024", "4096"), kLeastTeamsSmallRows=("2", "8")),
    **dict(kLeastTeamsLargeRows=("1", "4"), kFewItemsCombine=("4", "16")),
    **dict(kRowsPerSent=("2.", "4."), kCombineSenders=("1. / 2", "3. / 4")),
    **dict(kRoutedSenders=("0.125", "0.5"), kRoutedTeams=("2", "8")),
    **dict(kStages=("4, kSegmentBytes = 2560", "6, kSegmentBytes = 1536"), kLoadsAhead=("1",)),
    **dict(kSegmentBytes=("3072", "4096"), kLoadsOfVectors=("4", "16"), kPartWords=("1", "4")),
    **dict(kPlanLoads=("2", "8"), kPollsWithoutPause=("4", "64"), kPauseNs=("0", "100")),
    **dict(kZeroItemsPerBlock=("2", "8")),
)


class OnOneGpu(Run):
    """A run whose ranks share one GPU."""

    def group(self, **options: Any) -> ma.Group:
        """Return the group of all ranks with these options."""
        fixed = dict(axis_name="ep", size=RANKS_ON_ONE_GPU, timeout=runs.TIMEOUT_SECONDS)
        return ma.Group(**{**fixed, "implementation": "cuda", **options})

    def per_rank(self, fn: Callable[..., Any]) -> Any:
        """Return a function of one rank's arrays as a program of all ranks."""
        return jax.jit(jax.vmap(fn, axis_name="ep"))


# Numbers with which Python lowers programs


def measure(run: Run, name: str, timed_cases: Any, values: Sequence[int], chosen: Any) -> Taken:
    """Return the times by value, without values whose results are wrong. Today's value is the first
    of ``values``. ``chosen`` has the values of other numbers."""
    taken: Taken = {value: [] for value in values}
    for op, setting in timed_cases:
        run.check_time()
        ranks = RANKS_ON_ONE_GPU if isinstance(run, OnOneGpu) else run.mesh.size
        tolerance = operations.FORMAT_TOLERANCE.get(setting.format, operations.TOLERANCE)
        plan = suite.Plan(draw(setting, ranks), tolerance=tolerance, program_us=2500, most_reps=32)
        compile_variant = functools.partial(suite.compile_variant, run, plan, "ours")
        inputs = suite.make_inputs(run.mesh, plan.workload)
        portable = compile_variant(dict(implementation="portable"), ())
        variants: dict[str, suite.Variant] = {}  # by text: some values make the same program
        texts: dict[int, str] = {}
        for value in taken:
            with mock.patch.dict(native.TUNING, {**chosen, name: value}):
                method = suite.METHODS["ours"](plan.workload, run.group())
                run_once, _ = operations.prepare(method, (op,))
                texts[value] = run.per_rank(run_once).lower(*inputs).as_text()
                if texts[value] not in variants:
                    variants[texts[value]] = compile_variant({}, (op,))
        run.wait()
        expected = portable.run_once.result()(*inputs)
        samplers: dict[str, Callable[[], float]] = {}
        state = None
        for text, variant in variants.items():
            value = next(each for each in taken if texts[each] == text)
            tuning = mock.patch.dict(native.TUNING, {**chosen, name: value})
            with run.attempt(f"{name} = {value}, {setting}"), tuning:
                prepared = suite.case_of(run, variant, inputs, expected).check()
                (timed,) = variant.programs
                state = timed.operation.state(prepared) if state is None else state
                samplers[text], _ = run.sampler(timed.program, state)
        if texts[values[0]] not in samplers:
            raise RuntimeError("today's value failed")
        us = timing.take_turns(samplers, run.samples)
        taken = {value: taken[value] for value in taken if texts[value] in us}
        for value, turns in taken.items():
            turns.append(us[texts[value]])
            add(run, name, value, turns[-1], op=op[0], **suite.describe(plan.workload))
    return taken


def add(run: Run, name: str, value: Any, us: list[float], **entries: Any) -> None:
    """Add the row of a value to the record."""
    row = dict(method=f"{name} = {value}", sweep="tune", number=name, value=value, **entries)
    run.add(row | timing.Timing.of(us).row() | dict(turns_us=[round(each, 3) for each in us]))


# Constants of kernels


def build_drivers(names: Iterable[str], architecture: str) -> dict[str, pathlib.Path]:
    """Return the drivers by candidate ("" for today's numbers). Build missing drivers, if nvcc
    exists."""
    files = [*record.ROOT.glob("cuda/*/*"), *record.ROOT.glob("cuda/*.h"), *DRIVER.parent.iterdir()]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files)))
    folder = record.ROOT / "build" / "tune" / f"{digest.hexdigest()[:12]}-{architecture}"
    folder.mkdir(parents=True, exist_ok=True)
    candidates = ["", *(f"{name} = {value}" for name in names for value in COMPILED[name])]
    drivers = {each: folder / (re.sub(r"\W+", "-", each) or "today") for each in candidates}
    nvcc = wire.find_nvcc()
    sources = [str(path) for pattern in SOURCES for path in sorted(record.ROOT.glob(pattern))]
    sources.append(str(DRIVER))

    def build(candidate: str) -> str:
        made = drivers[candidate].with_suffix(".new")
        defines = [f"-DMOE_A2A_ARCHITECTURE={architecture}"]
        if candidate:  # nvcc divides a definition at its commas
            defines.append("-DMOE_A2A_CANDIDATE=" + candidate.replace(",", r"\,"))
        options = ["-std=c++17", "-O3", f"-arch=sm_{architecture}", f"-I{record.ROOT / 'cuda'}"]
        try:
            wire.run([str(nvcc), *options, *defines, "-o", str(made), *sources], BUILD_SECONDS)
        except RuntimeError as error:
            return f"{candidate or 'the driver'} is left out: {error}"
        made.rename(drivers[candidate])
        return f"built {drivers[candidate]}"

    missing = [each for each in candidates if nvcc and not drivers[each].exists()]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for text in pool.map(build, missing):
            say(text)
    return {candidate: path for candidate, path in drivers.items() if path.exists()}


def measure_drivers(
    run: Run, name: str, drivers: Mapping[str, pathlib.Path], num_sms: int
) -> Taken:
    """Return the times by value, without values whose results have other bits than today's."""
    options = ["--gpus", str(run.mesh.size), "--sms", str(num_sms), "--tokens", "128,4096"]
    options += ["--ops", "dispatch,combine,route,routed,weighted", "--samples", "1", "--check"]
    expected: list[tuple[str, ...]] = []

    def sample(driver: pathlib.Path) -> list[float]:
        lines = LINE.findall(wire.run([str(driver), *options], DRIVER_SECONDS))
        bits = [(op, tokens, found) for op, tokens, _, found in lines]
        expected[:] = expected or bits
        if bits != expected:
            raise AssertionError(f"the results must have the bits {expected}; got {bits}")
        return [float(us) for _, _, us, _ in lines]

    programs = {constants()[name][1]: drivers[""]}
    programs |= {v: drivers[c] for v in COMPILED[name] if (c := f"{name} = {v}") in drivers}
    samplers = {}
    for value, driver in programs.items():  # today's is the first, so its bits are expected
        with run.attempt(f"{name} = {value}"):
            run.check_time()
            if not sample(driver):
                raise RuntimeError("the driver printed no times")
            samplers[value] = functools.partial(sample, driver)
    if next(iter(programs)) not in samplers:
        raise RuntimeError("today's value failed")
    taken: Taken = {}
    for value, turns in timing.take_turns(samplers, run.samples).items():
        taken[value] = [list(case) for case in zip(*turns, strict=True)]
        add(run, name, value, [statistics.geometric_mean(turn) for turn in turns], op="driver")
    return taken


def constants() -> dict[str, tuple[str, str]]:
    """Return the types and values of tuning.h. A later struct replaces those of an earlier one."""
    statements = re.findall(r"static constexpr (\w+) ([^;{]+);", TUNING_H.read_text())
    return {
        name: (kind, value.strip())
        for kind, names in statements
        for name, value in re.findall(r"(k\w+) = ([^,]+)", names)
    }


# Results


def judge(name: str, taken: Taken) -> dict[str, Any]:
    """Return the best value of a number, and its gain over today's value, the first of ``taken``.
    The gain of a turn is the geometric mean over all cases."""
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
    """Return the table of all numbers, and the lines for tuning.h."""
    text, types = TUNING_H.read_text(), constants()
    names = dict(re.findall(r'\{"(\w+)", Tuning::(k\w+)\}', text))
    lines = ["| number | today | best | gain | in single turns | |", "| --- " * 6 + "|"]
    changes = []
    for n in numbers:
        name, keep = names.get(n["number"], n["number"]), n["keep"]
        found = f"{n['gain']:+.1%} | {n['least']:+.1%} to {n['most']:+.1%}"
        verdict = "keep" if keep else "change"
        lines.append(f"| {name} | {n['today']} | {n['best']} | {found} | {verdict} |")
        kind, _ = types.pop(name)
        if not keep:
            changes.append(f"  static constexpr {kind} {name} = {n['best']};")
    lines += ["", f"Not measured: {', '.join(sorted(types))}.", ""]
    if not changes:
        return "\n".join([*lines, "All measured numbers keep their values."])
    struct, others = f"Sm{architecture}", re.findall(r"^struct (Sm\d+)", text, re.MULTILINE)
    base = "" if struct in others else f" : {others[-1]}"
    lines += [f"For cuda/tuning.h, whose first comment says how to name {struct}:", ""]
    return "\n".join([*lines, f"struct {struct}{base} {{  // {what}", *changes, "};"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = runs.make_parser("benchmarks.tune", __doc__)
    every = (*NUMBERS, *COMPILED)
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="NUMBER")
    parser.add_argument("--compiled", action="store_true", help="also constants of kernels")
    parser.add_argument("--architecture", default="90", help="without a GPU: to build drivers for")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, and return the exit status: 1 if anything failed."""
    args = parse(argv)
    num_gpus = runs.set_platform(args.ranks)
    run = runs.open_run(args, num_gpus, ["tune"], "tune", SAMPLES if num_gpus else 1)
    gpu, architecture = run.mesh.devices.flat[0], args.architecture
    num_sms = 132  # without a GPU, any number
    if num_gpus:
        architecture, num_sms = gpu.compute_capability.replace(".", ""), gpu.core_count
    if num_gpus == 1:
        run = OnOneGpu(**vars(run))
        run.record["ranks_on_one_gpu"] = RANKS_ON_ONE_GPU
    if num_gpus and (path := run.group().path) != "cuda":
        print(f"The {path} path would run; python -m jax_moe_a2a says why.")
        return 1
    numbers = run.record["numbers"] = []
    chosen: dict[str, int] = {}
    for name, (timed_cases, values) in NUMBERS.items():
        if name not in args.only or (num_gpus == 1 and not name.startswith("ROUTE")):
            continue
        if args.quick or not num_gpus:
            timed_cases = timed_cases[:1]
        if not num_gpus:
            (op, setting), tiny = timed_cases[0], dict(TINY, tokens=16, hidden=128)
            timed_cases = ((op, dataclasses.replace(setting, **tiny)),)
        values = values or tuple(round(share * num_sms) for share in SHARES)
        values = tuple(dict.fromkeys((native.tuning(name), *values)))  # today's is the first
        with run.attempt(name):
            numbers.append(judge(name, measure(run, name, timed_cases, values, chosen)))
            if not numbers[-1]["keep"]:
                chosen[name] = numbers[-1]["best"]
    names = [name for name in COMPILED if name in args.only and args.compiled]
    drivers = build_drivers(names, architecture) if names else {}
    for name in names if num_gpus > 1 and "" in drivers else ():
        with run.attempt(name):
            many = chosen.get("DEFAULT_NUM_SMS", native.tuning("DEFAULT_NUM_SMS"))
            numbers.append(judge(name, measure_drivers(run, name, drivers, many)))
    run.save()
    what = f"{run.record['gpus']}, {run.record['date']}"
    print("", in_words(numbers, architecture, what), "", sep="\n")
    print(f"record: {run.path}" if num_gpus else runs.NOT_GPU)
    for failure in run.record["failures"]:
        print(f"FAILED {failure}")
    return 1 if run.record["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
