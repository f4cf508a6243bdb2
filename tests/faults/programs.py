"""Inject faults while programs exchange tokens, with dispatch, experts and combine in several JAX
processes with one CPU device each. The portable path runs over gloo.
tests/gpu/test_processes_failures.py tests the kernels.

Each process compares every result with a sum that it computes without an exchange.
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
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_moe_a2a as ma

from .workers import FLAGS, Inside, Wrong

TIMEOUT = 5.0
CLOSE = 5.0
COLLECTIVE = 6.0  # seconds that gloo waits for another process in a collective
BOUND = 60.0  # seconds until gloo or a kernel reports that a process is missing
TOKENS, HIDDEN, TOP_K = 6, 8, 2
STEPS = 60
AXIS = "ep"


class Rank(Inside):
    """A process with one device, and a group over all of them, in two levels over several hosts."""

    def __init__(self, index, count, address, folder, hosts=1):
        options = dict(initialization_timeout=120, heartbeat_timeout_seconds=100)
        os.environ["XLA_FLAGS"] = f"{FLAGS} --xla_cpu_collective_timeout_seconds={COLLECTIVE:g}"
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_enable_recoverability", True)  # this process outlives the others
        jax.distributed.initialize(address, count, index, **options)
        self.index, self.count = index, count
        self.folder = pathlib.Path(folder)
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

    def compile(self, names):
        """Compile programs before any of them runs, because a process that compiles is late."""
        for name in names:
            self.program(name)

    def program(self, name):
        if name not in self.programs:
            spec = PartitionSpec(self.group.axis_name)
            body = globals()[name](self.group)
            mapped = jax.shard_map(body, mesh=self.mesh, in_specs=spec, out_specs=spec)
            self.programs[name] = jax.jit(mapped).lower(*self.operands(0)[1]).compile()
        return self.programs[name]

    def operands(self, step, damage=False):
        """Return the operands of this rank (with the weights of all experts), and of the program.
        The weights depend on the step, so that rows of another step are wrong."""
        rng = np.random.default_rng([step, self.index])
        experts = 2 * len(self.ranks)
        x = rng.standard_normal((TOKENS, HIDDEN), np.float32)
        ids = rng.integers(0, experts, (TOKENS, TOP_K), np.int32)
        if damage:  # an id outside the range of experts is not a choice
            ids[rng.random(ids.shape) < 0.5] = rng.choice([-7, experts, 2**31 - 1, -(2**31)])
        weights = 1 + np.arange(experts, dtype=np.float32) + step % 7
        first = 2 * self.ranks.index(self.index)
        sharding = NamedSharding(self.mesh, PartitionSpec(self.group.axis_name))
        shards = x, ids, weights[first : first + 2]
        arrays = [jax.make_array_from_process_local_data(sharding, each) for each in shards]
        return (x, ids, weights), arrays

    def prepare(self, *names):
        for name in names:
            self.call(name, 0)

    def call(self, name, step, damage=False):
        """Call a program, and compare this rank's result."""
        (x, ids, weights), arrays = self.operands(step, damage)
        experts = len(weights)
        (shard,) = self.program(name)(*arrays).addressable_shards
        y = np.asarray(shard.data)
        valid = (ids >= 0) & (ids < experts)
        scale = np.where(valid, weights[np.where(valid, ids, 0)], 0).sum(1, keepdims=True)
        if np.isnan(y).all():
            self.group.check()
            raise AssertionError("wrong: NaN without an error")
        assert np.allclose(y, x * scale, rtol=1e-5), f"wrong: {y} instead of {x * scale}"

    def churn(self, names, steps, at=None, act=None, given=()):
        """Call programs in turn, and return the number of steps. In step `at`, first call a method
        of this object."""
        step = 0
        while step < steps:
            made = getattr(self, act)(*given) if step == at else None
            if made:
                step, at = step + made, None
                continue
            self.call(names[step % len(names)], step)
            step += 1

    def close(self):
        self.group.close(timeout=CLOSE)

    # Faults.

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def damaged(self, name, step):
        self.call(name, step, damage=True)
        return 1

    def fails_in_trace(self):
        """Trace a program whose Python raises between a start and its done."""
        try:
            self.program("raises_between")
        except ValueError as error:
            assert "between start and done" in str(error)
        else:
            raise AssertionError("wrong: it has not raised")

    def exit_on_host(self, exits, name, step):
        """Call a program whose host callback may end this process."""
        global exits_on_host
        exits_on_host = exits
        self.call(name, step)
        return 1

    def second_group(self, steps):
        other = ma.Group(self.mesh, AXIS, timeout=TIMEOUT)
        first, self.group, self.programs = self.group, other, {}
        for step in range(steps):
            self.call("exchange", step)
        other.close(timeout=CLOSE)
        self.group, self.programs = first, {}


def experts_of(recv, weights):
    """Multiply the rows of each expert by its weight."""
    row = jnp.arange(recv.rows.shape[0], dtype=jnp.int32)
    local = jnp.sum(row[:, None] >= recv.row_offsets[None, 1:-1], axis=1, dtype=jnp.int32)
    return recv.rows * jnp.take(weights, local, mode="clip")[:, None]


def exchange(group):
    def on_rank(x, ids, weights):
        recv = ma.dispatch(x, ids, group=group, num_experts=2 * group.size)
        return ma.combine(experts_of(recv, weights), recv)

    return on_rank


def exchange_around(between, group, x, ids, weights):
    """Return the sums of an exchange in two halves, and `between(x)`, which is computed between
    start and done."""
    inflight = ma.dispatch_start(x, ids, group=group, num_experts=2 * group.size)
    inflight, result = ma.overlap(inflight, between, x)
    recv = ma.dispatch_done(inflight)
    return ma.combine(experts_of(recv, weights), recv), result


def layer(group):
    """Return a program with a split exchange, a product between start and done, and a psum."""

    def on_rank(x, ids, weights):
        y, product = exchange_around(lambda x: x @ x.T, group, x, ids, weights)
        return y + 0 * lax.psum(jnp.sum(product), group.axis_name)

    return on_rank


def raises_between(group):
    def on_rank(x, ids, weights):
        ma.dispatch_start(x, ids, group=group, num_experts=2 * group.size)
        raise ValueError("between start and done")

    return on_rank


exits_on_host = False  # whether host callbacks end this process


def on_host(x):
    if exits_on_host:
        os._exit(0)
    return x


def call_host(x):
    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def callback_between(group):
    """Return a program with a host callback between the start and the done of an exchange."""

    def on_rank(x, ids, weights):
        y, told = exchange_around(call_host, group, x, ids, weights)
        return y + 0 * told

    return on_rank


# ---------------------------------------------------------------------------------- the campaign


def reserved_port(run):
    """Return a port that no other program gets during the run. A socket that does not listen is
    bound to it, and accepts no connection. The coordinator's server can share the port, because
    gRPC sets SO_REUSEPORT."""
    keeper = run.kept.enter_context(socket.socket())
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    keeper.bind(("127.0.0.1", 0))
    return keeper.getsockname()[1]


def begin(run, *more_names, names=("exchange", "layer"), count=None, hosts=1):
    """Start processes that will churn through programs with these names. Choose the victim."""
    # Process 0 holds the coordination service. JAX ends all processes if it dies.
    count = count or run.rng.randint(2, 3)
    run.victim = run.rng.randrange(1, count)
    address = f"127.0.0.1:{reserved_port(run)}"
    options = dict(count=count, address=address, folder=str(run.folder), hosts=hosts)
    run.workers += [run.start_one(Rank, index, **options) for index in range(count)]
    for worker in run.workers:
        run.begin(worker)
    run.names = (*names, *more_names)
    run.all("compile", run.names, seconds=120.0)
    run.all("prepare", *run.names, seconds=60.0)
    run.all("mark")
    return run.workers[run.victim]


def churn(run, at=None, act=None, given=(), of_others=None, victims=()):
    """Let all processes call the programs. In step `at`, the victims first call `act`. If
    `of_others` has arguments, the other processes call it, too."""
    for worker in run.alive():
        own = given if worker.index in (victims or [run.victim]) else of_others
        worker.say("churn", run.names, STEPS, *([] if own is None else [at, act, own]))


def settle(run, *patterns, start=None):
    """Return the outcome, and close. An error must name a cause."""
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


# The messages of gloo and of a kernel about a missing process.
MISSING = (
    "connection (closed|reset) by peer",
    "connection refused|broken pipe",
    "gloo.*(timed? ?out|failed)",
    r"(rank|process) \d+",
)


def survivors_go_on(run):
    """Make a group over the remaining devices, and continue in this group."""
    ranks = [worker.index for worker in run.alive()]
    run.all("use", ranks)
    run.all("compile", ["exchange"], seconds=60.0)
    run.all("prepare", "exchange", seconds=60.0)
    run.all("churn", ["exchange"], 5)


def die(run, kill, start=None):
    """Let the victim end. The others continue after an error, or after they have finished."""
    kill(run.workers[run.victim])
    run.workers[run.victim].is_dead = True
    outcome = settle(run, *MISSING, start=start or time.monotonic())
    survivors_go_on(run)
    return outcome


def in_the_middle(run, **options):
    """Let all processes call the programs for a random time. Return the victim, and the time."""
    victim = begin(run, **options)
    churn(run)
    time.sleep(run.rng.uniform(0, 0.3))
    return victim, time.monotonic()


def acts(act, given, *patterns, of_others=None, undo=None, **options):
    """Return a kind in which the victim calls a method of `Rank` before a random step.

    Args:
      given: (the random choices, the step) -> the arguments of the method.
      patterns: causes that an error may name.
      of_others: arguments for the other processes, if they also call the method.
      undo: a method and arguments, called in all processes at the end.
      options: options of `begin`.
    """

    def kind(run):
        begin(run, **options)
        at = run.rng.randrange(STEPS)
        start = time.monotonic()
        churn(run, at, act, given(run.rng, at), of_others)
        outcome = settle(run, *patterns, start=start)
        if undo:
            run.all(*undo)
        return outcome

    return kind


def killed(run):
    _, start = in_the_middle(run)
    return die(run, lambda victim: victim.kill(), start)


def a_killed_host(run):
    """Kill the second of two hosts with two processes each."""
    _, start = in_the_middle(run, count=4, hosts=2)
    for victim in run.workers[2:]:
        victim.signal(signal.SIGKILL)
    for victim in run.workers[2:]:
        victim.kill()
    # The other host cannot continue, because a group over its processes would use the broken
    # communicator.
    return settle(run, *MISSING, start=start)


def a_late_host(run):
    """Let the second of two hosts arrive after the timeout of XLA's collectives."""
    begin(run, count=4, hosts=2)
    start = time.monotonic()
    churn(run, 1, "sleep", (COLLECTIVE + 3,), victims=(2, 3))
    return settle(run, *MISSING, start=start)


def exits_between_start_and_done(run):
    """Let the victim end in a host callback between the start and the done of an exchange."""
    name = "callback_between"
    begin(run, name)
    at = run.rng.randrange(1, STEPS)
    churn(run, at, "exit_on_host", (True, name, at), of_others=(False, name, at))
    return die(run, lambda victim: victim.process.join(60))


def stopped_and_continued(run):
    victim, _ = in_the_middle(run)
    victim.signal(signal.SIGSTOP)
    time.sleep(run.rng.uniform(0.1, 1.5))
    victim.signal(signal.SIGCONT)
    return settle(run)


def an_exception_between_start_and_done(run):
    begin(run)
    of_others = () if run.rng.random() < 0.5 else None
    churn(run, run.rng.randrange(STEPS), "fails_in_trace", of_others=of_others)
    return settle(run)


def any_delay(rng, at):
    return (rng.uniform(0, 2.0),)


KINDS = {
    "a killed process": killed,
    "a killed host": a_killed_host,
    "a host later than the bound": a_late_host,
    "a process that exits between start and done": exits_between_start_and_done,
    "a process that stops and continues": stopped_and_continued,
    "a delay": acts("sleep", any_delay),
    # The victim makes no more calls, and the other processes wait for it.
    "a program that raises": acts(
        "fail", lambda rng, at: (), "an error of the program", *MISSING
    ),
    "an exception between start and done": an_exception_between_start_and_done,
    "a damaged routing": acts(
        "damaged", lambda rng, at: ("exchange", at), names=("exchange",)
    ),
    "a second group": acts("second_group", lambda rng, at: (3,), of_others=(3,)),
    "close() in one process only": acts("close", lambda rng, at: ()),
    "interrupting signals": acts(
        "interrupt", lambda rng, at: (0.002,), undo=("interrupt", 0)
    ),
}  # fmt: skip
