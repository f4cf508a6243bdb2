"""Faults while programs exchange tokens: dispatch, experts and combine in processes that JAX has
joined, with one device each. On CPUs gloo joins them and the portable path runs. With
MOE_A2A_TEST_GPU=1 the kernels run, on a GPU for each process, or all on the first one with
MOE_A2A_TEST_RANKS_ON_ONE_GPU.

Every result is compared with the sum that the process computes alone.
"""

import os
import re
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from processes import free_address

import jax_moe_a2a as ma

from .workers import COLLECTIVE_SECONDS, Wrong

ON_GPU = os.environ.get("MOE_A2A_TEST_GPU") == "1"
ON_ONE_GPU = int(os.environ.get("MOE_A2A_TEST_RANKS_ON_ONE_GPU", "0")) > 0
TIMEOUT = 5.0
CLOSE = 5.0
BOUND = 60.0  # seconds until gloo or a kernel tells that a process is missing
TOKENS, HIDDEN, TOP_K = 6, 8, 2
STEPS = 60
AXIS = "ep"


class Rank:
    """A process with one device, and a group over all of them, in two levels over several hosts."""

    def __init__(self, index, count, address, hosts):
        options = {}
        if ON_GPU:
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            options = dict(local_device_ids=[0 if ON_ONE_GPU else index])
        else:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_recoverability", True)  # this process outlives the others
        jax.distributed.initialize(address, count, index, heartbeat_timeout_seconds=100, **options)
        self.index, self.count = index, count
        self.use(range(count), hosts)

    def use(self, ranks, hosts=1):
        """Make a group over the devices of these processes, and its programs."""
        devices = np.array([d for d in jax.devices() if d.process_index in ranks])
        self.ranks = list(ranks)
        axes = AXIS if hosts == 1 else ("host", AXIS)
        shape = devices.shape if hosts == 1 else (hosts, -1)
        self.mesh = Mesh(devices.reshape(shape), axes)
        self.group = ma.Group(self.mesh, axes, timeout=TIMEOUT, two_level=hosts > 1)
        self.programs = {}

    def program(self, name):
        if name not in self.programs:
            spec = PartitionSpec(self.group.axis_name)
            body = globals()[name](self.group)
            mapped = jax.shard_map(body, mesh=self.mesh, in_specs=spec, out_specs=spec)
            self.programs[name] = jax.jit(mapped)
        return self.programs[name]

    def prepare(self, *names):
        for name in names:
            self.call(name, 0)

    def call(self, name, step, damage=False):
        """Call a program, and compare this rank's result."""
        rng = np.random.default_rng([step, self.index])
        experts = 2 * len(self.ranks)
        x = rng.standard_normal((TOKENS, HIDDEN), np.float32)
        ids = rng.integers(0, experts, (TOKENS, TOP_K), np.int32)
        if damage:  # ids that no expert has count as no choice
            ids[rng.random(ids.shape) < 0.5] = rng.choice([-7, experts, 2**31 - 1, -(2**31)])
        sharding = NamedSharding(self.mesh, PartitionSpec(self.group.axis_name))
        shards = [np.asarray(each) for each in (x, ids)]
        arrays = [jax.make_array_from_process_local_data(sharding, each) for each in shards]
        (shard,) = self.program(name)(*arrays).addressable_shards
        y = np.asarray(shard.data)
        valid = (ids >= 0) & (ids < experts)
        scale = np.where(valid, 1 + np.clip(ids, 0, experts), 0).sum(1, keepdims=True)
        if np.isnan(y).all():
            self.group.check()
            raise AssertionError("wrong: NaN without an error")
        assert np.allclose(y, x * scale, rtol=1e-5), f"wrong: {y} instead of {x * scale}"

    def churn(self, names, steps, at=None, act=None, given=()):
        """Call programs in turn; in step `at` call a method of this object first."""
        for step in range(steps):
            if step == at and getattr(self, act)(*given):
                continue
            self.call(names[step % len(names)], step)

    def close(self):
        self.group.close(timeout=CLOSE)

    # Faults.

    def sleep(self, seconds):
        time.sleep(seconds)

    def exit(self):
        os._exit(0)

    def damaged(self, name, step):
        self.call(name, step, damage=True)
        return True

    def fails_in_trace(self):
        """Trace a program whose Python raises between a start and its done."""
        try:
            self.program("raises_between")
            self.call("raises_between", 0)
        except ValueError as error:
            assert "between start and done" in str(error)
        else:
            raise AssertionError("wrong: it has not raised")

    def fails_in_callback(self, name, step):
        """Call a program whose host callback raises next to an exchange; the exchange ends."""
        try:
            self.call(name, step)
        except Exception as error:
            if "the callback has failed" not in str(error):
                raise
        else:
            raise AssertionError("wrong: the callback has not failed")
        return True

    def second_group(self, steps):
        other = ma.Group(self.mesh, AXIS, timeout=TIMEOUT)
        first, self.group, self.programs = self.group, other, {}
        for step in range(steps):
            self.call("exchange", step)
        other.close(timeout=CLOSE)
        self.group, self.programs = first, {}


def experts_of(recv, group):
    """Multiply the rows of expert e by 1 + e."""
    row = jnp.arange(recv.rows.shape[0], dtype=jnp.int32)
    local = jnp.sum(row[:, None] >= recv.row_offsets[None, 1:-1], axis=1, dtype=jnp.int32)
    expert = 1 + local + 2 * lax.axis_index(group.axis_name).astype(jnp.int32)
    return recv.rows * expert[:, None].astype(jnp.float32)


def exchange(group):
    def on_rank(x, ids):
        recv = ma.dispatch(x, ids, group=group, num_experts=2 * group.size)
        return ma.combine(experts_of(recv, group), recv)

    return on_rank


def layer(group):
    """The same in two halves, with a product in between, and a psum."""

    def on_rank(x, ids):
        inflight = ma.dispatch_start(x, ids, group=group, num_experts=2 * group.size)
        inflight, product = ma.overlap(inflight, lambda x: x @ x.T, x)
        recv = ma.dispatch_done(inflight)
        y = ma.combine(experts_of(recv, group), recv)
        total = lax.psum(jnp.sum(product), group.axis_name)
        return y + 0 * total

    return on_rank


def raises_between(group):
    def on_rank(x, ids):
        ma.dispatch_start(x, ids, group=group, num_experts=2 * group.size)
        raise ValueError("between start and done")

    return on_rank


def with_callback(group):
    """An exchange, next to a host callback that raises."""

    def fail(x):
        raise RuntimeError("the callback has failed")

    def on_rank(x, ids):
        y = exchange(group)(x, ids)
        told = jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y + 0 * told

    return on_rank


# ---------------------------------------------------------------------------------- the campaign


def begin(run, *names, count=None, hosts=1):
    # Process 0 holds the coordination service. JAX ends all processes if it dies.
    count = count or (2 if ON_ONE_GPU else run.rng.randint(2, 3))
    run.victim = run.rng.randrange(1, count)
    address = free_address()
    for index in range(count):
        run.workers.append(run.start_one(Rank, index, count=count, address=address, hosts=hosts))
    for worker in run.workers:
        run.begin(worker)
    run.all("prepare", *names, seconds=120.0)
    run.names = names
    return run.workers[run.victim]


def churn(run, at=None, act=None, given=(), everywhere=False, victims=()):
    for worker in run.alive():
        is_victim = worker.index in (victims or [run.victim])
        mine = (at, act, given) if everywhere or is_victim else ()
        worker.say("churn", run.names, STEPS, *mine)


def settle(run, *patterns, start=None):
    """Return the outcome. An error must name a cause."""
    outcome = "right"
    for worker in run.alive():
        reply = worker.hear(BOUND + run.slack)
        if not reply.error:
            continue
        outcome = "error"
        if "wrong" in reply.error or not re.search("|".join(patterns or ["^$"]), reply.error, re.I):
            raise Wrong(f"unclear error in process {worker.index}: {reply.error}")
        run.error = reply.error
        if start is not None:
            run.seconds = max(0.0, reply.end - start)
    for worker in run.alive():
        closed = worker.ask("close", seconds=3 * CLOSE + run.slack)
        if closed.error:
            raise Wrong(f"close() in process {worker.index}: {closed.error}")
    return outcome


# How gloo and a kernel tell that a process is missing.
MISSING = (
    "connection (closed|reset) by peer",
    "connection refused|broken pipe",
    "gloo.*(timed? ?out|failed)",
    r"(rank|process) \d+",
)


def survivors_go_on(run):
    """Make a group over the remaining devices, and go on in it."""
    ranks = [worker.index for worker in run.alive()]
    run.all("use", ranks)
    run.all("prepare", "exchange", seconds=60.0)
    run.all("churn", ["exchange"], 5)


def die(run, kill):
    victim = begin(run, "exchange", "layer")
    churn(run)
    time.sleep(run.rng.uniform(0, 0.3))
    start = time.monotonic()
    kill(victim)
    victim.is_dead = True
    outcome = settle(run, *MISSING, start=start)
    survivors_go_on(run)
    return outcome


def killed(run):
    return die(run, lambda victim: victim.kill())


def a_killed_host(run):
    """Kill the second of two hosts with two processes each."""
    begin(run, "exchange", "layer", count=4, hosts=2)
    churn(run)
    time.sleep(run.rng.uniform(0, 0.3))
    start = time.monotonic()
    for victim in run.workers[2:]:
        victim.signal(signal.SIGKILL)
    for victim in run.workers[2:]:
        victim.kill()
    # The other host cannot go on: a group over it has the communicator that broke within it.
    return settle(run, *MISSING, start=start)


def a_late_host(run):
    """Let the second of two hosts be later than the collectives of XLA wait."""
    begin(run, "exchange", "layer", count=4, hosts=2)
    start = time.monotonic()
    churn(run, 1, "sleep", (COLLECTIVE_SECONDS + 3,), victims=(2, 3))
    return settle(run, *MISSING, start=start)


def exits_normally(run):
    victim = begin(run, "exchange", "layer")
    churn(run, run.rng.randrange(1, STEPS), "exit")
    victim.process.join(60)
    start = time.monotonic()
    victim.is_dead = True
    outcome = settle(run, *MISSING, start=start)
    survivors_go_on(run)
    return outcome


def stopped_and_continued(run):
    victim = begin(run, "exchange", "layer")
    churn(run)
    time.sleep(run.rng.uniform(0, 0.3))
    victim.signal(signal.SIGSTOP)
    time.sleep(run.rng.uniform(0.1, 1.5))
    victim.signal(signal.SIGCONT)
    return settle(run)


def delayed(run):
    begin(run, "exchange", "layer")
    churn(run, run.rng.randrange(STEPS), "sleep", (run.rng.uniform(0, 2.0),))
    return settle(run)


def an_exception_between_start_and_done(run):
    begin(run, "exchange", "layer")
    everywhere = run.rng.random() < 0.5
    churn(run, run.rng.randrange(STEPS), "fails_in_trace", everywhere=everywhere)
    return settle(run)


def a_failing_callback(run):
    begin(run, "exchange", "layer")
    at = run.rng.randrange(STEPS)
    churn(run, at, "fails_in_callback", ("with_callback", at), everywhere=True)
    return settle(run)


def damaged_routing(run):
    begin(run, "exchange")
    at = run.rng.randrange(STEPS)
    churn(run, at, "damaged", ("exchange", at))
    return settle(run)


def a_second_group(run):
    begin(run, "exchange", "layer")
    churn(run, run.rng.randrange(STEPS), "second_group", (3,), everywhere=True)
    return settle(run)


def closes_alone(run):
    begin(run, "exchange", "layer")
    churn(run, run.rng.randrange(STEPS), "close")
    return settle(run, *([r"closed the group \d+ times"] if ON_GPU else []))


KINDS = {
    "a killed process": killed,
    "a killed host": a_killed_host,
    "a host later than the bound": a_late_host,
    "a process that exits normally": exits_normally,
    "a process that stops and continues": stopped_and_continued,
    "a delay": delayed,
    "an exception between start and done": an_exception_between_start_and_done,
    "a failing host callback": a_failing_callback,
    "a damaged routing": damaged_routing,
    "a second group": a_second_group,
    "close() in one process only": closes_alone,
}
