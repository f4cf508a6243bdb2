"""Start, command and end the processes of a run. All are forked from one process that has imported
JAX and this package, so that a run takes a second or two."""

import dataclasses
import faulthandler
import functools
import multiprocessing
import os
import pathlib
import signal
import sys
import time
import traceback
from multiprocessing import forkserver
from unittest import mock

LIMIT = 240.0  # seconds that a worker lives at most
COLLECTIVE_SECONDS = 15  # that XLA's collectives on CPUs wait
FLAGS = (
    f"--xla_backend_optimization_level=0 --xla_cpu_collective_timeout_seconds={COLLECTIVE_SECONDS}"
)
ROOT = pathlib.Path(__file__).resolve().parents[2]


class Wrong(Exception):
    """A run whose outcome is a failure: a wrong result, a hang, a leak or an unclear error."""


@dataclasses.dataclass
class Reply:
    """The answer of a worker to a command: a value or an error, and after how many seconds."""

    value: object = None
    error: str = ""
    seconds: float = 0.0
    end: float = 0.0  # time.monotonic(), which is the same clock in all processes


@functools.cache
def forks():
    """Return the context whose server process has imported all that workers need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults.preload"])
    path = map(str, (ROOT, ROOT / "tests", *filter(None, [os.environ.get("PYTHONPATH")])))
    # The flags are those of `conftest.py`. Each worker has one device.
    environment = dict(PYTHONPATH=os.pathsep.join(path), XLA_FLAGS=FLAGS)
    if os.environ.get("MOE_A2A_TEST_GPU") != "1":
        environment["JAX_PLATFORMS"] = "cpu"
    with mock.patch.dict(os.environ, environment):
        forkserver.ensure_running()
    return context


def work(make, connection, log, arguments):
    """Answer commands until the connection ends. `make` returns the object that has them as
    methods."""
    os.setsid()  # so that all of its descendants are found
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
        except Exception as error:
            traceback.print_exc()
            reply.error = f"{type(error).__name__}: {error}"
        reply.end = time.monotonic()
        reply.seconds = reply.end - start
        connection.send(reply)


class Worker:
    """A worker from outside."""

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
        """Return the reply to the last command. No reply in time is a failure of the run."""
        try:
            if self.connection.poll(seconds):
                return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            raise Wrong(
                f"process {self.index} ended with {self.process.exitcode}: {self.tail()}"
            ) from None
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

    def end(self):
        """Let the worker end by itself, and kill it if it does not."""
        self.connection.close()
        self.process.join(20)
        if self.process.is_alive():
            self.kill()
            raise Wrong(f"process {self.index} did not end: {self.tail()}")


def descendants(leaders):
    """Return the ids of all processes in the sessions of these processes."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) in leaders and fields[0] != "Z":
                found.append(int(folder.name))
    return found


def sockets():
    """Return the names of this package's sockets on this host."""
    lines = pathlib.Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if "@jax_moe_a2a-" in line}


class Run:
    """The processes of one run, its random choices, and the place of its files."""

    def __init__(self, rng, folder, slack):
        self.rng = rng
        self.folder = pathlib.Path(folder)
        self.slack = slack  # seconds beyond a bound, for a busy machine
        self.workers = []
        self.started = []
        self.helpers = []  # ids of processes that a fault started on purpose
        self.error, self.seconds = "", None  # the clearest error, and how long it took

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
        """Command all living workers; return their replies, which must be no errors."""
        replies = self.replies(name, *given, seconds=seconds)
        for worker, reply in zip(self.alive(), replies):
            if reply.error:
                raise Wrong(f"{name} in process {worker.index}: {reply.error}")
        return [reply.value for reply in replies]

    def replies(self, name, *given, seconds=60.0):
        for worker in self.alive():
            worker.say(name, *given)
        return [worker.hear(seconds) for worker in self.alive()]

    def kill(self):
        """Kill all processes, and those that they started; return the ids of the latter."""
        for worker in self.started:
            worker.kill()
        time.sleep(0.02)
        found = descendants({worker.pid for worker in self.started})
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        return found

    def close(self):
        """Let all processes end; one that they leave is a failure."""
        for worker in self.alive():
            worker.end()
        if leaked := set(self.kill()) - set(self.helpers):
            raise Wrong(f"leaked processes: {leaked}")
