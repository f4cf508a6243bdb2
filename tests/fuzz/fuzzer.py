"""Run the loop of the fuzzer: programs by number, each with several routings."""

import dataclasses
import itertools
import time
import traceback

import harness

from . import check, draw

RUNS = 8  # runs of a program, each with another routing; all take less time than its compilation
REPORT_EVERY = 30  # seconds


@dataclasses.dataclass
class Done:
    """Hold what has run."""

    seconds: float = 0
    programs: int = 0
    cases: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def __str__(self):
        rate = 60 * self.cases / max(1, self.seconds)
        return (
            f"{self.cases} cases of {self.programs} programs in {self.seconds:.0f} s "
            f"({rate:.0f} per minute), {len(self.failures)} failed"
        )


def fuzz(seed, *, seconds=float("inf"), numbers=None, keep_going=False, report=print):
    """Run programs of a seed for a number of seconds, or the programs with these numbers; return
    `Done`.

    A failure is reported with its program and the command that repeats it.
    """
    done, begin, last = Done(), time.monotonic(), time.monotonic()
    for number in itertools.count() if numbers is None else numbers:
        if time.monotonic() - begin > seconds:
            break
        program = draw.program(seed, number, has_mesh=not harness.RANKS_ON_ONE_GPU)
        done.programs += 1
        try:
            fn = check.compiled(program)
            for run in range(RUNS):
                where = f"run {run}"
                given = draw.inputs(program, seed, number, run)
                where += f", routing {'+'.join(given.names)}"
                check.run(program, given, fn)
                done.cases += 1
        except Exception as error:
            told = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
            done.failures.append(
                f"seed {seed}, program {number}, {where} (case {done.cases + 1}):\n{program}\n"
                f"{told.strip()}\nrepeat: python -m tests.fuzz --seed {seed} --program {number}"
            )
            report(done.failures[-1])
        done.seconds = time.monotonic() - begin
        if done.failures and not keep_going:
            break
        if time.monotonic() - last > REPORT_EVERY:
            last = time.monotonic()
            report(done)
    return done
