"""Run programs together, as the processes of one JAX job."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

GRACE = 30  # seconds between the ends of processes
STALLED = "the deadline was over"


def free_address() -> str:
    """Return an address of this host whose port is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def met_by_chance(*printed: str) -> bool:
    """Return True if processes failed of what deserves one more try.

    Another program may take a free port before its use. And once in hundreds of runs processes
    stalled, on two busy cores with jax 0.10.2; calls in different orders would stall them every
    time.
    """
    return any(told in text for text in printed for told in ("already in use", STALLED))


def run_together(
    folder: pathlib.Path,
    programs: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    deadline: float,
) -> tuple[list[str], list[str], list[str]]:
    """Run programs together; run them once more if they failed by chance.

    Args:
      folder: for their output.
      programs: each is a command, which accepts ``--coordinator``, ``--num-processes`` and
        ``--process-id``, and the additions to its environment.
      deadline: seconds.

    Returns:
      What went wrong, as sentences; the output of each; the error output of each.
    """

    def start(process: int, address: str, out: pathlib.Path, err: pathlib.Path) -> subprocess.Popen:
        command, environment = programs[process]
        flags = f"--coordinator={address}", f"--num-processes={len(programs)}"
        command = [*command, *flags, f"--process-id={process}"]
        with out.open("w") as stdout, err.open("w") as stderr:
            return subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=stdout, stderr=stderr
            )

    outs, errs = (
        [folder / f"{process}.{stream}" for process in range(len(programs))]
        for stream in ("out", "err")
    )
    for may_repeat in (True, False):
        address = free_address()
        workers = [start(i, address, *files) for i, files in enumerate(zip(outs, errs))]
        problems = wait_for(workers, deadline)
        printed, complaints = ([file.read_text() for file in files] for files in (outs, errs))
        if not (may_repeat and met_by_chance(*problems, *printed, *complaints)):
            break
    return problems, printed, complaints


def how_it_ended(code: int) -> str:
    """Return a return code in words."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def wait_for(
    workers: Sequence[subprocess.Popen], deadline: float, grace: float = GRACE
) -> list[str]:
    """Wait until all have ended, and kill those that are late; return what went wrong.

    A process is late after ``deadline`` seconds, or ``grace`` seconds after another has ended.
    """
    problems: list[str] = []
    end, first = time.monotonic() + deadline, None
    while (running := [w for w in workers if w.poll() is None]) and time.monotonic() < end:
        if len(running) < len(workers) and first is None:
            first = [i for i, w in enumerate(workers) if w.poll() is not None]
            end = min(end, time.monotonic() + grace)
        time.sleep(0.1)
    for process, worker in enumerate(workers):
        if worker in running:
            worker.kill()
            worker.wait()
            when = f"after process {first[0]} had ended" if first else f"when {STALLED}"
            problems.append(f"process {process} was still running {when}, and was killed")
        elif worker.returncode:
            problems.append(f"process {process} {how_it_ended(worker.returncode)}")
    return problems
