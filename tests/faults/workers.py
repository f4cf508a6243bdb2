"""Start, command and end the workers of a run, as forks of a process that has imported JAX."""

import contextlib
import dataclasses
import faulthandler
import functools
import multiprocessing
import os
import pathlib
import resource
import signal
import sys
import time
import traceback
from multiprocessing import forkserver

import environment

from . import leaks

LIMIT = 240.0  # maximum lifetime of a worker, in seconds
FLAGS = "--xla_backend_optimization_level=0"
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Wrong(Exception):
    """The failure of a run: a wrong result, a hang, a leak or an unclear error."""


class Ended(Wrong):
    def __init__(self, index, status, told):
        super().__init__(f"process {index} ended with {status}: {told}")


@dataclasses.dataclass
class Reply:
    value: object = None
    error: str = ""
    seconds: float = 0.0
    end: float = 0.0  # time.monotonic(), which is the same clock in all processes


@functools.cache
def forks():
    leaks.mark()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.preload"])
    path = map(str, (ROOT, ROOT / "tests", *filter(None, [os.environ.get("PYTHONPATH")])))
    # FLAGS are XLA's flags in `conftest.py`, but with one device in each process.
    variables = dict(PYTHONPATH=os.pathsep.join(path), XLA_FLAGS=FLAGS, JAX_PLATFORMS="cpu")
    with environment.restored():
        os.environ.update(variables)
        forkserver.ensure_running()
        first = context.Process(target=os.getpid)  # starts when the server has imported all
        first.start()
        first.join()
        first.close()
    return context


class Inside:
    """The campaign calls these methods in the worker process."""

    def mark(self):
        self.before = leaks.by_sort(leaks.descriptors())

    def left(self):
        """Count the descriptors that are new since the last `mark`."""
        end = time.monotonic() + 3.0  # a thread may not have closed its connection yet
        while True:
            more = leaks.by_sort(leaks.descriptors()) - self.before
            if not more or time.monotonic() > end:
                return dict(more)
            time.sleep(0.02)

    def sleep(self, seconds):
        time.sleep(seconds)

    def fail(self):
        raise ValueError("an error of the program")

    def limit_descriptors(self, more):
        """Allow at most `more` more open descriptors; None removes the limit."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        most = min(hard, 1024) if more is None else max(leaks.descriptors()) + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))

    def interrupt(self, seconds):
        """Send a signal to this process every `seconds`; 0 stops the signals."""
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, seconds, seconds)


def work(make, connection, log, arguments):
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1), os.dup2(output, 2), os.close(output)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    try:
        assert "faults.preload" in sys.modules, "the server could not import faults.preload"
        worker = make(**arguments)
        connection.send(Reply())
    except BaseException:
        connection.send(Reply(error=traceback.format_exc()))
        os._exit(1)
    while True:
        try:
            name, given = connection.recv()
        except EOFError:
            os._exit(0)
        start, reply = time.monotonic(), Reply()
        try:
            reply.value = getattr(worker, name)(*given)
        except (Exception, KeyboardInterrupt) as error:
            traceback.print_exc()
            reply.error = f"{type(error).__name__}: {error}"
        reply.end = time.monotonic()
        reply.seconds = reply.end - start
        connection.send(reply)


class Worker:
    def __init__(self, index, make, log, arguments):
        self.index = index
        self.log = log
        self.connection, theirs = forks().Pipe()
        given = make, theirs, str(log), arguments
        self.process = forks().Process(target=work, args=given, daemon=True)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid
        self.is_dead = False

    def say(self, name, *given):
        self.connection.send((name, given))

    def hear(self, seconds):
        try:
            if self.connection.poll(seconds):
                return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            self.is_dead = True
            raise Ended(self.index, self.process.exitcode, self.tail(10_000)) from None
        raise Wrong(f"hang: process {self.index} was silent for {seconds:g} s: {self.tail()}")

    def ask(self, name, *given, seconds=60.0):
        self.say(name, *given)
        return self.hear(seconds)

    def tail(self, size=1500):
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self.is_dead = True
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(30)

    def release(self):
        self.connection.close()
        self.process.close()

    def end(self):
        self.connection.close()
        self.process.join(20)
        if self.process.is_alive():
            self.kill()
            raise Wrong(f"process {self.index} did not end: {self.tail()}")


class Run:
    def __init__(self, rng, folder, slack):
        self.rng = rng
        self.folder = pathlib.Path(folder)
        self.slack = slack  # seconds to add to each bound, for a busy machine
        self.workers = []
        self.started = []
        self.kept = contextlib.ExitStack()
        self.error, self.seconds = "", None  # an error, and seconds from the fault to the error

    def start_one(self, make, index, **arguments):
        log = self.folder / f"{index}.log"
        worker = Worker(index, make, log, dict(arguments, index=index))
        self.started.append(worker)
        return worker

    def begin(self, worker):
        reply = worker.hear(90.0)
        if reply.error:
            raise Wrong(f"process {worker.index} could not start: {reply.error}")

    def alive(self):
        return [worker for worker in self.workers if not worker.is_dead]

    def all(self, name, *given, seconds=60.0):
        replies = self.replies(name, *given, seconds=seconds)
        for worker, reply in zip(self.alive(), replies):
            if reply.error:
                raise Wrong(f"{name} in process {worker.index}: {reply.error}")
        return [reply.value for reply in replies]

    def replies(self, name, *given, seconds=60.0):
        for worker in self.alive():
            worker.say(name, *given)
        return [worker.hear(seconds) for worker in self.alive()]

    def kill(self, but=()):
        """Kill the workers. Kill leaked processes, except those in `but`, and return their ids."""
        for worker in self.started:
            worker.kill()
        found = leaks.processes() - set(but)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def close(self, but=()):
        """End the workers. Fail if a descriptor, or a process that is not in `but`, remains."""
        for worker, left in zip(self.alive(), self.all("left")):
            if any(left.values()):
                raise Wrong(f"leak in process {worker.index}: {left}")
        for worker in self.alive():
            worker.end()
        if leaked := self.kill(but):
            raise Wrong(f"leaked processes: {leaked}")
