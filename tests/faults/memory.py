"""Inject faults while processes open, grow and close a group's workspace (`Member.churn`).

The host code runs over the fake driver with fake GPUs, and no kernel runs.
"""

import ctypes
import json
import os
import pathlib
import re
import signal
import socket
import time
import urllib.parse
from concurrent import futures

import jax
import numpy as np
from jax.sharding import Mesh
from pretended import Gpu

import jax_moe_a2a as ma
from jax_moe_a2a._src import compat
from jax_moe_a2a._src.group import native, processes

from . import leaks
from .workers import Inside, Wrong

MIB = 1 << 20
ROOM = 1 << 40
TIMEOUT = 2.0  # seconds
FIRST_TIMEOUT = 4.0
CLOSE = 5.0  # the bound of close(), in seconds
CYCLES = 24
MEMORY = "device memory"


class Member(Inside):
    def __init__(self, index, count, folder, gpus=1, timeout=TIMEOUT, damage=None):
        self.index, self.folder = index, pathlib.Path(folder)
        self.damage = damage or {}
        everywhere = [Gpu(i, i // gpus) for i in range(count * gpus)]
        mine = [gpu for gpu in everywhere if gpu.process_index == index]
        jax.process_index = lambda *_: index
        jax.process_count = lambda *_: count
        jax.devices = lambda *_: everywhere
        jax.local_devices = lambda *_, **__: mine
        compat.coordination_set, compat.coordination_get = self.publish, self.read
        self.driver = ctypes.CDLL(native._native.__file__)
        self.driver.fake_set_room.argtypes = [ctypes.c_int, ctypes.c_int64]
        for gpu in mine:
            self.driver.fake_set_room(gpu.id, ROOM)
        options = dict(timeout=timeout, first_timeout=FIRST_TIMEOUT)
        self.group = ma.Group(Mesh(np.array(everywhere), ("ep",)), "ep", **options)
        self.closes = 0
        self.holds_interrupts = False
        self.mark()
        self.before["socket:"] += 1  # not a leak: the socket that answers requests

    # These methods replace JAX's coordination service.

    def path_of(self, key):
        return self.folder / urllib.parse.quote(key, safe="")

    def publish(self, key, value):
        path = self.path_of(key)
        new = path.with_suffix(f".new{self.index}")
        new.write_text(json.dumps(json.loads(value) | self.damage))
        new.rename(path)

    def read(self, key, timeout):
        end = time.monotonic() + timeout
        while not self.path_of(key).exists():
            if time.monotonic() > end:
                return None
            time.sleep(0.01)
        return self.path_of(key).read_text()

    def path(self):
        return self.group.path, self.group._why_portable

    def reserve(self, tokens=64, split=False):
        group = self.group
        experts = 2 * group.size
        group.reserve(num_tokens=tokens, hidden=1024, top_k=2, num_experts=experts, split=split)
        memory = group.memory()
        assert memory, "nothing is mapped"
        return max(each.mapped_bytes for each in memory)

    def churn(self, plan, at=None, act=None, given=()):
        self.reach(0)
        self.holds_interrupts = False
        try:
            for cycle, (sizes, split) in enumerate(plan):
                if cycle == at:
                    getattr(self, act)(*given)
                for tokens in sizes:
                    self.reserve(tokens, split)
                    time.sleep(0.005)
                self.meet(cycle + 1)
                self.close()
        finally:
            self.holds_interrupts = True
            self.reach(len(plan))  # so that no process waits for this process

    def reach(self, cycle):
        (self.folder / f"reached{self.index}.new").write_text(str(cycle))
        (self.folder / f"reached{self.index}.new").rename(self.folder / f"reached{self.index}")

    def meet(self, cycle):
        """Wait for all other processes to reach a cycle, without an error if one is missing."""
        self.reach(cycle)
        end = time.monotonic() + self.group.timeout
        for index in set(range(jax.process_count())) - {self.index}:
            other = self.folder / f"reached{index}"
            while time.monotonic() < end:
                if other.exists() and int(other.read_text()) >= cycle:
                    break
                time.sleep(0.001)

    def close(self, timeout=CLOSE, times=1):
        for _ in range(times):
            held, self.holds_interrupts = self.holds_interrupts, True
            # After an interrupt between these two lines, `closes` would be wrong.
            self.group.close(timeout=timeout)
            self.closes += 1
            self.holds_interrupts = held
        return self.closes

    def mapped(self):
        lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
        return sorted({line.split()[4] for line in lines if MEMORY in line})

    def left(self):
        left = super().left()
        left["mapped files"] = len(self.mapped())
        left["allocations"] = self.driver.fake_allocations()
        left["bytes"] = sum(self.driver.fake_used_bytes(gpu.id) for gpu in jax.local_devices())
        return left

    # Faults.

    def fail_after(self, calls):
        self.driver.fake_fail_after(ctypes.c_long(calls))

    def limit_memory(self, mib):
        for gpu in jax.local_devices():
            self.driver.fake_set_room(gpu.id, mib * MIB if mib else ROOM)

    def be_busy(self, is_busy):
        self.driver.fake_be_busy(is_busy)

    def close_socket(self):
        name = json.loads(self.path_of(processes.KEY.format(self.index)).read_text())["socket"]
        target = leaks.sockets()[f"@{name}"]
        for number in [n for n, each in leaks.descriptors().items() if each == target]:
            with socket.socket(fileno=os.dup(number)) as listening:
                listening.shutdown(socket.SHUT_RDWR)

    def open_in_a_thread(self, split=False):
        self.opening = futures.ThreadPoolExecutor(1).submit(self.reserve, 64, split)

    def close_without_a_look(self, timeout):
        """Close the group, but skip its wait for threads that begin to open a workspace."""
        native.wait = lambda *_: None
        self.group.close(timeout=timeout)

    def join_thread(self):
        futures.wait([self.opening])

    def interrupt_once(self, seconds):
        """Raise KeyboardInterrupt after `seconds`, but not while `holds_interrupts` is True."""

        def interrupt(*_):
            if not self.holds_interrupts:
                raise KeyboardInterrupt
            signal.setitimer(signal.ITIMER_REAL, 0.001)

        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, seconds)


# Fields to replace in the notice by which the victim announces itself.
DAMAGES = (
    dict(socket=None),
    dict(socket=""),
    dict(socket="jax_moe_a2a-nowhere"),
    dict(pid=1),
    dict(secret="01234"),
    dict(secret="0" * 32),
)


# ---------------------------------------------------------------------------------- the campaign


def begin(run, count=None, victim_options=None, **options):
    count = count or run.rng.randint(2, 4)
    run.gpus = options.setdefault("gpus", run.rng.choice((1, 1, 2)))
    options = dict(options, count=count, folder=str(run.folder))
    run.options = options
    run.victim = run.rng.randrange(count)
    for index in range(count):
        mine = dict(options, **(victim_options or {} if index == run.victim else {}))
        run.workers.append(run.start_one(Member, index, **mine))
    for worker in run.workers:
        run.begin(worker)
    run.plan = plan_of(run.rng)
    return run.workers[run.victim]


def plan_of(rng):
    sizes = (16, 64, 256, 700)
    return [
        ([rng.choice(sizes) for _ in range(rng.randint(1, 3))], rng.random() < 0.3)
        for _ in range(CYCLES)
    ]


def churn(run, at=None, act=None, given=()):
    for worker in run.alive():
        mine = (at, act, given) if worker.index == run.victim else ()
        worker.say("churn", run.plan, *mine)


def settle(run, bound, but=()):
    """Return the replies of living members except `but`. All must arrive within `bound`."""
    replies = {}
    start = time.monotonic()
    for worker in run.alive():
        if worker.index not in but:
            left = bound + run.slack - (time.monotonic() - start)
            replies[worker.index] = worker.hear(max(left, 0.1))
    return replies


def bound_of(run):
    """Return the sum of all timeouts, because processes may wait for each other in a chain."""
    return run.options.get("timeout", TIMEOUT) * len(run.workers)


def judge(run, replies, start, *patterns, must_fail=False):
    """Return the outcome. Every error must name a process or match `patterns`. If other processes
    have errors and the victim has none, one of these errors must name the victim."""
    errors = {index: reply.error for index, reply in replies.items() if reply.error}
    victim = rf"process {run.victim}\b"
    for index, error in errors.items():
        if not any(re.search(pattern, error) for pattern in (r"process \d+\b", *patterns)):
            raise Wrong(f"unclear error in process {index}: {error}")
    of_others = {index: error for index, error in errors.items() if index != run.victim}
    naming = [i for i, error in of_others.items() if re.search(victim, error)]
    if of_others and not naming and run.victim not in errors:
        raise Wrong(f"no error names process {run.victim}: {errors}")
    if must_fail and not errors:
        raise Wrong("no process has noticed the fault")
    if errors:
        clearest = naming[0] if naming else next(iter(errors))
        run.error = errors[clearest]
        run.seconds = max(0.0, min(replies[i].end for i in errors) - start)
    return "error" if errors else "right"


def close_all(run):
    closed = run.replies("close")
    counts = [reply.value for reply in closed]
    for worker, reply in zip(run.alive(), closed):
        if reply.error:
            raise Wrong(f"close() in process {worker.index}: {reply.error}")
        if reply.seconds > CLOSE + run.slack:
            raise Wrong(f"close() in process {worker.index} took {reply.seconds:.1f} s")
    for worker, count in zip(run.alive(), counts):
        if count < max(counts):
            run_reply = worker.ask("close", CLOSE, max(counts) - count)
            if run_reply.error:
                raise Wrong(f"close() in process {worker.index}: {run_reply.error}")


def go_on(run):
    """Open the group again in all members, which must map the same memory."""
    close_all(run)
    run.all("reserve", 1000, True)
    sizes = run.all("reserve", 1000)
    mapped = run.all("mapped")
    if len(set(sizes)) != 1 or any(each != mapped[0] for each in mapped):
        raise Wrong(f"wrong: members map different memory: {sizes}, {mapped}")


def end(run, *, together=True):
    if together and len(run.alive()) == len(run.workers):
        go_on(run)
    close_all(run)


def at_random(run):
    return run.rng.uniform(0, 0.25)


def cycle_of(run):
    return run.rng.randrange(1, CYCLES - 1)


def in_the_middle(run, **options):
    """Return (victim, random time after the start of `churn`)."""
    victim = begin(run, **options)
    run.all("reserve")
    churn(run)
    time.sleep(at_random(run))
    return victim, time.monotonic()


def finish(run, start, *patterns, more=0.0, undo=None, together=True, **options):
    outcome = judge(run, settle(run, bound_of(run) + more), start, *patterns, **options)
    if undo:
        run.all(*undo)
    end(run, together=together)
    return outcome


def acts(act, given=lambda rng: (), *patterns, is_fault=True, must_tell=None, **options):
    """Return a kind of fault: the victim calls the method `act` of `Member` in a random cycle.

    Args:
      given: maps the random generator to the arguments of `act`.
      patterns: causes that an error may name instead of a process.
      is_fault: if False, no member may raise an error.
      must_tell: if not None, a member must raise an error that contains this text.
      options: options of `finish`.
    """

    def kind(run):
        begin(run)
        start = time.monotonic()
        churn(run, cycle_of(run), act, given(run.rng))
        outcome = finish(run, start, *patterns, must_fail=must_tell is not None, **options)
        if not is_fault and outcome != "right":
            raise Wrong(f"{act} is no fault: {run.error}")
        if must_tell and must_tell not in run.error:
            raise Wrong(f"unclear error: {run.error}")
        return outcome

    return kind


def killed(run):
    victim, start = in_the_middle(run)
    victim.kill()
    return finish(run, start)


def stopped_and_continued(run):
    victim, start = in_the_middle(run)
    victim.signal(signal.SIGSTOP)
    is_long = run.rng.random() < 0.4
    time.sleep(run.rng.uniform(*((TIMEOUT + 0.5, TIMEOUT + 1.5) if is_long else (0.05, 0.4))))
    victim.signal(signal.SIGCONT)
    return finish(run, start)


def damaged_notice(run):
    """An error names the victim, whose notice is damaged."""
    start = time.monotonic()
    begin(run, victim_options=dict(damage=run.rng.choice(DAMAGES)))
    time.sleep(at_random(run))
    replies = dict(enumerate(run.replies("path", seconds=60.0)))
    reasons = [r.value[1] for r in replies.values() if not r.error and r.value[0] != "cuda"]
    if reasons:
        raise Wrong(f"only some take the portable path: {reasons}")
    if any(reply.error for reply in replies.values()):
        outcome = judge(run, replies, start)
        end(run, together=False)
        return outcome
    churn(run)
    return finish(run, start, must_fail=True, together=False)


def restarted_peer(run):
    """All members can open the group after the victim was killed and started again."""
    victim, start = in_the_middle(run)
    victim.kill()
    outcome = judge(run, settle(run, bound_of(run)), start)
    new = run.start_one(Member, run.victim, **run.options)
    run.begin(new)
    run.workers[run.victim] = new
    first = new.ask("path")
    if first.error or first.value[0] != "cuda":
        raise Wrong(f"the new process: {first}")
    close_all(run)
    for worker in run.alive():  # may fail, because it may use the killed process's socket
        worker.say("reserve", 64)
    judge(run, settle(run, bound_of(run)), start)
    end(run)
    return outcome


def never_comes(run):
    begin(run)
    is_late = run.rng.random() < 0.5
    start = time.monotonic()
    for worker in run.alive():
        if worker.index != run.victim:
            worker.say("reserve")
    if is_late:
        time.sleep(run.rng.uniform(0, FIRST_TIMEOUT / 3))
        run.workers[run.victim].say("reserve")
    replies = settle(run, 2 * FIRST_TIMEOUT + bound_of(run), but=() if is_late else [run.victim])
    outcome = judge(run, replies, start, must_fail=not is_late)
    if not is_late and "announced itself" not in run.error:
        raise Wrong(f"unclear error: {run.error}")
    end(run)
    return outcome


def a_busy_device(run):
    """close() raises an error if the victim's device does not end its work."""
    victim = begin(run)
    run.all("reserve")
    start = time.monotonic()
    victim.ask("be_busy", True)
    victim.say("close", run.rng.uniform(0.1, 1.0))
    reply = victim.hear(CLOSE + run.slack)
    if "still at work" not in reply.error:
        raise Wrong(f"close() of a busy device: {reply}")
    run.error, run.seconds = reply.error, time.monotonic() - start
    victim.ask("be_busy", False)
    end(run)
    return "error"


def closes_while_it_opens(run):
    """close() does not wait long for a thread that opens the same group."""
    victim = begin(run, timeout=8.0)
    run.all("reserve")
    close_all(run)
    closer = run.workers[(run.victim + 1) % len(run.workers)]
    victim.signal(signal.SIGSTOP)
    closer.ask("open_in_a_thread")
    time.sleep(at_random(run))
    start = time.monotonic()
    closer.say("close", 0.5)
    reply = closer.hear(8.0 + run.slack)
    run.error, run.seconds = reply.error, time.monotonic() - start
    victim.signal(signal.SIGCONT)
    if reply.seconds > 4.0:
        raise Wrong(f"close(timeout=0.5) took {reply.seconds:.1f} s")
    closer.ask("join_thread")
    if reply.error and "another thread is still opening" not in reply.error:
        raise Wrong(f"unclear error: {reply.error}")
    end(run)
    return "error" if reply.error else "right"


def any_delay(rng):
    return (rng.choice((0.1, 0.5, TIMEOUT + 1)),)


KINDS = {
    "a killed process": killed,
    "a process that stops and continues": stopped_and_continued,
    "a delay": acts("sleep", any_delay, more=TIMEOUT + 1),
    "a program that raises": acts(
        "fail", lambda rng: (), "an error of the program", must_tell=""
    ),
    "a call of the driver that fails": acts(
        "fail_after", lambda rng: (rng.randrange(60),), "out of memory", undo=("fail_after", -1)
    ),
    "too little device memory": acts(
        "limit_memory", lambda rng: (rng.randint(1, 14),), "RESOURCE_EXHAUSTED.*out of memory",
        undo=("limit_memory", 0),
    ),
    "a full descriptor table": acts(
        "limit_descriptors", lambda rng: (rng.randint(0, 6),), "open files|out of memory",
        undo=("limit_descriptors", None),
    ),
    "a closed socket": acts("close_socket", together=False),
    "a damaged notice": damaged_notice,
    "a restarted peer": restarted_peer,
    "close() in one process only": acts("close", must_tell="closed the group"),
    "a process that never comes": never_comes,
    "a busy device": a_busy_device,
    "close() during an opening": closes_while_it_opens,
    "interrupting signals": acts(
        "interrupt", lambda rng: (0.001,), undo=("interrupt", 0), is_fault=False
    ),
    "an interrupt from the keyboard": acts(
        "interrupt_once", lambda rng: (rng.uniform(0, 0.05),), "KeyboardInterrupt",
        undo=("interrupt", 0),
    ),
}  # fmt: skip
