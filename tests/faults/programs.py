"""Inject faults while JAX processes run dispatch, experts and combine over gloo.

Every result is compared with a sum that is computed without an exchange.
"""

import os
import pathlib
import re
import signal
import socket
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_moe_a2a as ma

from .workers import FLAGS, Inside, Wrong

TIMEOUT = 5.0
CLOSE = 5.0
COLLECTIVE = 6.0  # seconds that a process waits for the others in a collective of gloo
BOUND = 60.0  # seconds until gloo or a kernel reports that a process is missing
TOKENS, HIDDEN, TOP_K = 6, 8, 2
STEPS = 60
AXIS = "ep"


class Rank(Inside):
    def __init__(self, index, count, address, folder, hosts=1):
        options = dict(initialization_timeout=120, heartbeat_timeout_seconds=100)
        os.environ["XLA_FLAGS"] = f"{FLAGS} --xla_cpu_collective_timeout_seconds={COLLECTIVE:g}"
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_recoverability", True)
        jax.distributed.initialize(address, count, index, **options)
        self.index, self.count = index, count
        self.folder = pathlib.Path(folder)
        self.use(range(count), hosts)

    def use(self, ranks, hosts=1):
        devices = np.array([d for d in jax.devices() if d.process_index in ranks])
        self.ranks = list(ranks)
        axes = AXIS if hosts == 1 else ("host", AXIS)
        shape = devices.shape if hosts == 1 else (hosts, -1)
        self.mesh = Mesh(devices.reshape(shape), axes)
        self.group = ma.Group(self.mesh, axes, timeout=TIMEOUT, two_level=hosts > 1)

    def compile(self):
        """Compile before any call, because calls of other processes would wait for this process."""
        spec = PartitionSpec(self.group.axis_name)
        mapped = jax.shard_map(self.exchange, mesh=self.mesh, in_specs=spec, out_specs=spec)
        self.program = jax.jit(mapped).lower(*self.operands(0)[1]).compile()

    def exchange(self, x, ids, weights):
        recv = ma.dispatch(x, ids, group=self.group, num_experts=2 * self.group.size)
        row = jnp.arange(recv.rows.shape[0], dtype=jnp.int32)
        local = jnp.sum(row[:, None] >= recv.row_offsets[None, 1:-1], axis=1, dtype=jnp.int32)
        return ma.combine(recv.rows * jnp.take(weights, local, mode="clip")[:, None], recv)

    def operands(self, step):
        """Return (x, ids, weights of all experts) of this rank, and the program's global arrays."""
        rng = np.random.default_rng([step, self.index])
        experts = 2 * len(self.ranks)
        x = rng.standard_normal((TOKENS, HIDDEN), np.float32)
        ids = rng.integers(0, experts, (TOKENS, TOP_K), np.int32)
        weights = 1 + np.arange(experts, dtype=np.float32) + step % 7
        first = 2 * self.ranks.index(self.index)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.group.axis_name))
        shards = x, ids, weights[first : first + 2]
        arrays = [jax.make_array_from_process_local_data(sharding, each) for each in shards]
        return (x, ids, weights), arrays

    def call(self, step):
        (x, ids, weights), arrays = self.operands(step)
        (shard,) = self.program(*arrays).addressable_shards
        y = np.asarray(shard.data)
        scale = weights[ids].sum(1, keepdims=True)
        if np.isnan(y).all():
            self.group.check()
            raise AssertionError("wrong: NaN without an error")
        assert np.allclose(y, x * scale, rtol=1e-5), f"wrong: {y} instead of {x * scale}"

    def churn(self, steps, at=None, act=None, given=()):
        for step in range(steps):
            if step == at:
                getattr(self, act)(*given)
            self.call(step)

    def close(self):
        self.group.close(timeout=CLOSE)

    # Faults.

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------------------- the campaign


def reserved_port(run):
    """Return a port that a bound socket reserves; JAX's coordinator shares it by SO_REUSEPORT."""
    keeper = run.kept.enter_context(socket.socket())
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    keeper.bind(("127.0.0.1", 0))
    return keeper.getsockname()[1]


def begin(run, count=None, hosts=1):
    # The victim is not process 0, because JAX ends all processes if process 0 dies.
    count = count or run.rng.randint(2, 3)
    run.victim = run.rng.randrange(1, count)
    address = f"127.0.0.1:{reserved_port(run)}"
    options = dict(count=count, address=address, folder=str(run.folder), hosts=hosts)
    run.workers += [run.start_one(Rank, index, **options) for index in range(count)]
    for worker in run.workers:
        run.begin(worker)
    run.all("compile", seconds=120.0)
    run.all("call", 0, seconds=60.0)
    run.all("mark")
    return run.workers[run.victim]


def churn(run, at=None, act=None, given=(), victims=()):
    for worker in run.alive():
        is_victim = worker.index in (victims or [run.victim])
        worker.say("churn", STEPS, *([at, act, given] if is_victim else []))


def settle(run, *patterns, start=None):
    outcome, known = "right", "|".join(patterns) or "^$"
    for worker in run.alive():
        reply = worker.hear(BOUND + run.slack)
        if not reply.error:
            continue
        if "wrong" in reply.error or not re.search(known, reply.error, re.I):
            raise Wrong(f"unclear error in process {worker.index}: {reply.error}")
        outcome, run.error = "error", reply.error
        if start is not None:
            run.seconds = max(0.0, reply.end - start)
    close(run)
    return outcome


def close(run):
    for worker in run.alive():
        closed = worker.ask("close", seconds=3 * CLOSE + run.slack)
        if closed.error:
            raise Wrong(f"close() in process {worker.index}: {closed.error}")


MISSING = (
    "connection (closed|reset) by peer",
    "connection refused|broken pipe",
    "gloo.*(timed? ?out|failed)",
    r"(rank|process) \d+",
)


def survivors_go_on(run):
    ranks = [worker.index for worker in run.alive()]
    run.all("use", ranks)
    run.all("compile", seconds=60.0)
    run.all("churn", 5, seconds=60.0)


def die(run, kill, start=None):
    """End the victim by `kill`; the other processes continue with a smaller group."""
    kill(run.workers[run.victim])
    run.workers[run.victim].is_dead = True
    outcome = settle(run, *MISSING, start=start or time.monotonic())
    survivors_go_on(run)
    return outcome


def in_the_middle(run, **options):
    """Return (victim, random time after the start of `churn`)."""
    victim = begin(run, **options)
    churn(run)
    time.sleep(run.rng.uniform(0, 0.3))
    return victim, time.monotonic()


def acts(act, *patterns):
    """Return a kind of fault in which the victim calls its method `act` before a random step."""

    def kind(run):
        begin(run)
        start = time.monotonic()
        churn(run, run.rng.randrange(STEPS), act)
        return settle(run, *patterns, start=start)

    return kind


def killed(run):
    _, start = in_the_middle(run)
    return die(run, lambda victim: victim.kill(), start)


def a_killed_host(run):
    _, start = in_the_middle(run, count=4, hosts=2)
    for victim in run.workers[2:]:
        victim.signal(signal.SIGKILL)
    for victim in run.workers[2:]:
        victim.kill()
    # The fault has broken a communicator of gloo, which the first host would use.
    return settle(run, *MISSING, start=start)


def a_late_host(run):
    """Both processes of the second of two hosts arrive after the timeout of XLA's collectives."""
    begin(run, count=4, hosts=2)
    start = time.monotonic()
    churn(run, 1, "sleep", (COLLECTIVE + 3,), victims=(2, 3))
    return settle(run, *MISSING, start=start)


def stopped_and_continued(run):
    victim, _ = in_the_middle(run)
    victim.signal(signal.SIGSTOP)
    time.sleep(run.rng.uniform(0.1, 1.5))
    victim.signal(signal.SIGCONT)
    return settle(run)


KINDS = {
    "a killed process": killed,
    "a killed host": a_killed_host,
    "a host later than the bound": a_late_host,
    "a process that stops and continues": stopped_and_continued,
    "a program that raises": acts("fail", "an error of the program", *MISSING),
    "close() in one process only": acts("close"),
}
