"""Run the fuzzer in several processes. If a process ends, the others continue."""

import faulthandler
import multiprocessing
import os
import pathlib
import tempfile
import time
from multiprocessing.connection import wait

import conftest  # noqa: F401  the devices that tests have, before jax is imported
import jax

from . import fuzzer

HANGS_AFTER = 300  # seconds in one program
LINES = 15  # of the output of a process that ended


class Part:
    """A process that runs the programs whose numbers it receives."""

    def __init__(self, seed, output):
        context = multiprocessing.get_context("spawn")
        self.output = output
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(seed, theirs, output), daemon=True)
        self.process.start()
        theirs.close()
        self.number, self.since = None, time.monotonic()

    def run(self, number):
        self.number, self.since = number, time.monotonic()
        self.connection.send(number)

    def end(self):
        self.process.kill()
        self.process.join()
        self.connection.close()


def work(seed, connection, output):
    """Send an empty result first, and then the result of each program whose number arrives."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    connection.send(fuzzer.Done())
    for count, number in enumerate(iter(connection.recv, None), 1):
        connection.send(fuzzer.fuzz(seed, numbers=[number]))
        if count % fuzzer.FORGET_EVERY == 0:
            jax.clear_caches()


def fuzz(seed, seconds, processes, report, kinds=None):
    """Run programs of a seed in several processes for a number of seconds; return `fuzzer.Done`.

    If a process ends or hangs in a program, the program has failed, and a new process continues
    with the next program.
    """
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    numbers, total = fuzzer.numbers_of(seed, kinds), fuzzer.Done()
    begin = reported = time.monotonic()
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number in range(processes):
                parts.append(Part(seed, pathlib.Path(folder, f"{number}.txt")))
            while parts:
                ready = wait([part.connection for part in parts], timeout=1)
                for part in list(parts):
                    done = watch(part, seed, part.connection in ready)
                    if done is None:
                        continue
                    total.add(done)
                    for text in done.failures:
                        report(text)
                    parts.remove(part)
                    if time.monotonic() - begin > seconds:
                        part.end()
                        continue
                    if not part.process.is_alive():
                        part = Part(seed, part.output)
                    else:
                        part.run(next(numbers))
                    parts.append(part)
                total.seconds = time.monotonic() - begin
                if time.monotonic() - reported > fuzzer.REPORT_EVERY:
                    reported = time.monotonic()
                    report(total)
        finally:
            for part in parts:
                part.end()
    return total


def watch(part, seed, is_ready):
    """Return the result of a process, or None while it runs a program. End a process that hangs."""
    if is_ready:
        try:
            return part.connection.recv()
        except (EOFError, ConnectionResetError):
            part.process.join()
            what = f"ended its process with status {part.process.exitcode}"
    elif time.monotonic() - part.since < HANGS_AFTER:
        return None
    else:
        what = f"hangs for {HANGS_AFTER} s"
    part.end()
    lines = part.output.read_text(errors="replace").splitlines()[-LINES:]
    text = f"which {what}:\n" + "\n".join(lines)
    if part.number is None:  # a new process would not start either
        raise RuntimeError(f"a process {text}")
    return fuzzer.Done(failures=[fuzzer.failure(seed, part.number, text)])
