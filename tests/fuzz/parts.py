"""Run the fuzzer in several processes, which survive each other's end."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from . import fuzzer

HANGS_AFTER = 300  # seconds in one program
LINES = 15  # of the output of a process that ended


@dataclasses.dataclass
class Part:
    """A process that runs the programs `first`, `first` + step, ..., and its successors."""

    first: int
    folder: pathlib.Path
    kinds: list[str] | None = None  # only these
    process: subprocess.Popen | None = None
    done: fuzzer.Done = dataclasses.field(default_factory=fuzzer.Done)  # of ended processes

    @property
    def noted(self):
        return self.folder / f"{self.first}.json"

    @property
    def output(self):
        return self.folder / f"{self.first}.txt"

    def read(self):
        """Return what the process has noted, or None before its first program."""
        if not self.noted.exists():
            return None
        return fuzzer.Done.of_json(json.loads(self.noted.read_text()))


def fuzz(seed, seconds, processes, report, kinds=None):
    """Run programs of a seed in several processes for a number of seconds; return `fuzzer.Done`.

    If a process ends before its time or hangs in a program, that is a failure of the program, and
    another process continues with the next one.
    """
    begin = time.monotonic()
    end = begin + seconds
    with tempfile.TemporaryDirectory() as folder:
        parts = [Part(number, pathlib.Path(folder), kinds) for number in range(processes)]
        try:
            for part in parts:
                start(part, seed, part.first, seconds, processes)
            last, reported = time.monotonic(), 0
            while any([watch(part, seed, end, processes) for part in parts]):
                time.sleep(0.5)
                total = sum_of(parts)
                for text in total.failures[reported:]:
                    report(text)
                reported = len(total.failures)
                if time.monotonic() - last > fuzzer.REPORT_EVERY:
                    last = time.monotonic()
                    total.seconds = last - begin
                    report(total)
        finally:
            for part in parts:
                if part.process is not None:
                    part.process.kill()
        total = sum_of(parts)
        for text in total.failures[reported:]:
            report(text)
        total.seconds = time.monotonic() - begin
        return total


def start(part, seed, number, seconds, step):
    """Start a process with the programs number, number + step, ..."""
    part.noted.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "tests.fuzz",
        "--seed",
        str(seed),
        "--keep-going",
    ]
    command += ["--seconds", str(max(1, seconds)), "--first", str(number), "--step", str(step)]
    command += ["--kinds", *part.kinds] if part.kinds else []
    root = pathlib.Path(__file__).resolve().parents[2]
    with part.output.open("w") as output:
        part.process = subprocess.Popen(
            [*command, "--note", str(part.noted)],
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def watch(part, seed, end, step):
    """Continue after the end of a process, if it ended too early; return False if all is done."""
    if part.process is None:
        return False
    status, now = part.process.poll(), time.time()
    noted_at = part.noted.stat().st_mtime if part.noted.exists() else part.output.stat().st_ctime
    hangs = status is None and now - noted_at > HANGS_AFTER
    if status is None and not hangs:
        return True
    if hangs:
        part.process.kill()
        part.process.wait()
    part.process, done = None, part.read()
    if done is not None:
        part.done.add(done)
    # Its own exit status after failures is that of an exception, too.
    is_at_end = status == 0 or (status == 1 and done is not None and bool(done.failures))
    if is_at_end:
        return False
    lines = part.output.read_text(errors="replace").splitlines()[-LINES:]
    number = part.first if done is None else done.next
    what = f"hangs for {HANGS_AFTER} s" if hangs else f"ended its process with status {status}"
    text = f"which {what}:\n" + "\n".join(lines)
    part.done.failures.append(fuzzer.failure(seed, number, text))
    left = end - time.monotonic()
    if left <= 1 or done is None:  # a process that cannot even begin would fail again
        return False
    start(part, seed, number + step, left, step)
    return True


def sum_of(parts):
    """Return what all processes have noted so far."""
    total = fuzzer.Done()
    for part in parts:
        total.add(part.done)
        running = part.read() if part.process is not None else None
        if running is not None:
            total.add(running)
    return total
