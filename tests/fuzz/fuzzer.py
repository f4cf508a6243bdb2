"""Run programs by number, each with several routings."""

import collections
import dataclasses
import itertools
import time
import traceback
import typing

import harness
import jax

from . import check, dots, draw, layers

RUNS = 16  # together, they take less time than the compilation
REPORT_EVERY = 30  # seconds
FORGET_EVERY = 50  # programs between two calls of `jax.clear_caches`


class Kind(typing.NamedTuple):
    share: float
    program: typing.Callable  # (seed, number, has_mesh) -> program
    compiled: typing.Callable  # program -> function
    inputs: typing.Callable  # (program, seed, number, run) -> inputs
    run: typing.Callable  # raises an AssertionError


KINDS = {
    "moe_mlp": Kind(0.42, layers.program, layers.compiled, layers.inputs, layers.run),
    "grouped_dot": Kind(0.26, dots.program, dots.compiled, dots.inputs, dots.run),
    "exchange": Kind(0.32, draw.program, check.compiled, draw.inputs, check.run),
}


def kind_of(seed, number):
    shares = [kind.share for kind in KINDS.values()]
    return list(KINDS)[draw.generator(seed, number, 2).choice(len(shares), p=shares)]


@dataclasses.dataclass
class Done:
    seconds: float = 0
    programs: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    cases: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: list[str] = dataclasses.field(default_factory=list)

    def __str__(self):
        cases = self.cases.total()
        kinds = ", ".join(f"{self.programs[kind]} {kind}" for kind in KINDS)
        return (
            f"{cases} cases of {self.programs.total()} programs ({kinds}) in {self.seconds:.0f} s "
            f"({60 * cases / max(1, self.seconds):.0f} per minute), {len(self.failures)} failed"
        )


def numbers_of(seed, kinds=None):
    return (n for n in itertools.count() if not kinds or kind_of(seed, n) in kinds)


def fuzz(seed, *, seconds=float("inf"), numbers=None, keep_going=False, report=print):
    """Run programs `numbers` (None: 0, 1, ...). Report a command that repeats each failure."""
    done, begin, last = Done(), time.monotonic(), time.monotonic()
    for number in numbers_of(seed) if numbers is None else numbers:
        if time.monotonic() - begin > seconds:
            break
        run_program(seed, number, done, report)
        if done.failures and not keep_going:
            break
        if done.programs.total() % FORGET_EVERY == 0:
            jax.clear_caches()
        if time.monotonic() - last > REPORT_EVERY:
            last = time.monotonic()
            done.seconds = last - begin
            report(done)
    done.seconds = time.monotonic() - begin
    return done


def run_program(seed, number, done, report):
    name = kind_of(seed, number)
    kind = KINDS[name]
    done.programs[name] += 1
    program, where = None, "before it runs"
    try:
        program = kind.program(seed, number, has_mesh=not harness.RANKS_ON_ONE_GPU)
        fn = kind.compiled(program)
        for run in range(RUNS):
            where = f"run {run}"
            given = kind.inputs(program, seed, number, run)
            where += f", {'+'.join(given.names)}"
            kind.run(program, given, fn)
            done.cases[name] += 1
    except Exception as error:
        told = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
        text = f"seed {seed}, program {number}, {where}, {name}:\n{program}\n{told.rstrip()}"
        repeat = f"python -m tests.fuzz --seed {seed} --program {number}"
        done.failures.append(f"{text}\nrepeat: {repeat}")
        report(done.failures[-1])
