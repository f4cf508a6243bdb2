"""Inject random faults, each in a separate run, and check how the run ends.

The seed and the run's number choose the fault and the *victim*, which is the process with the
fault.
"""

import collections
import dataclasses
import os
import pathlib
import random
import tempfile
import time

from . import leaks, memory, programs
from .workers import Run, Wrong, forks

KINDS = {
    **{f"memory: {name}": kind for name, kind in memory.KINDS.items()},
    **{f"programs: {name}": kind for name, kind in programs.KINDS.items()},
}
SLACK = 12.0  # seconds by which a run may exceed each bound, on a busy machine
OUTCOMES = "right", "error", "FAILURE"


@dataclasses.dataclass
class Done:
    number: int
    kind: str
    outcome: str
    seconds: float
    error: str = ""
    to_error: float | None = None  # seconds from the fault to the error


def kind_of(seed, number, kinds):
    """Return a run's kind of fault; each round of len(kinds) runs has each kind once."""
    turn, place = divmod(number, len(kinds))
    return random.Random(f"{seed} {turn}").sample(sorted(kinds), len(kinds))[place]


def run_one(seed, number, kinds):
    kind = kind_of(seed, number, kinds)
    forks()  # start the fork server first: it outlives the run, and must not look like a leak
    start, before = time.monotonic(), leaks.Before()
    outcome, error, to_error = "FAILURE", "", None
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        run = Run(random.Random(f"{seed} {number} {kind}"), folder, SLACK)
        try:
            try:
                outcome = KINDS[kind](run)
                run.close(but=before.processes)
            finally:
                run.kill(but=before.processes)
                for worker in run.started:
                    worker.release()
                run.kept.close()
            error, to_error = run.error, run.seconds
            end = time.monotonic() + 3
            while left := before.left():
                if time.monotonic() > end:
                    raise Wrong(f"leak on this host: {'; '.join(left)}")
                time.sleep(0.05)
        except Exception as wrong:
            outcome, error = "FAILURE", f"{type(wrong).__name__}: {wrong}"
            keep = os.environ.get("MOE_A2A_TEST_LOGS")
            for log in sorted(pathlib.Path(folder).glob("*.log")) if keep else ():
                pathlib.Path(keep, f"{seed}-{number}-{log.name}").write_bytes(log.read_bytes())
    return Done(number, kind, outcome, time.monotonic() - start, error, to_error)


def run_many(seed, numbers, kinds=None, report=print):
    kinds = kinds or list(KINDS)
    found = []
    start = time.monotonic()
    for number in numbers:
        done = run_one(seed, number, kinds)
        found.append(done)
        told = "" if done.to_error is None else f" after {done.to_error:.1f} s"
        first = done.error.splitlines()[0] if done.error else ""
        report(
            f"{number:4} of {numbers[-1]} {done.kind:45} {done.outcome:8}{told} "
            f"({done.seconds:.1f} s) {done.error if done.outcome == 'FAILURE' else first[:160]}"
        )
    counts = collections.Counter(done.outcome for done in found)
    report(f"{dict(counts)} in {time.monotonic() - start:.0f} s")
    return found


def table(found):
    by_kind = collections.defaultdict(list)
    for done in found:
        by_kind[done.kind].append(done)
    yield "| kind | runs | " + " | ".join(OUTCOMES) + " | seconds to the error |"
    yield "| --- " * (3 + len(OUTCOMES)) + "|"
    for kind, runs in sorted(by_kind.items()):
        counts = [sum(done.outcome == outcome for done in runs) for outcome in OUTCOMES]
        times = sorted(done.to_error for done in runs if done.to_error is not None)
        span = f"{times[0]:.1f} to {times[-1]:.1f}" if times else ""
        yield f"| {kind} | {len(runs)} | " + " | ".join(map(str, counts)) + f" | {span} |"
