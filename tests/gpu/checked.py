"""Define programs that exchange tokens and check the results on the device.

All moved values are hashes of (step, rank, token, ...), so every rank can compute the values
that must arrive. They are small integers, so sums are exact in any dtype and order.

With MOE_A2A_TEST_RANKS_ON_ONE_GPU=N, all N ranks share one GPU, and programs map ranks by vmap.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import os
import threading
import time
from typing import NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_counters import epochs_of
from exchanges import Count, num_exchanges
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import native

ON_GPU = os.environ.get("MOE_A2A_TEST_GPU") == "1"
AXIS = "ep"
ONE_GPU = harness.RANKS_ON_ONE_GPU > 0
DEVICES = jax.devices()[:1] if ONE_GPU else harness.devices(harness.SEVERAL)
RANKS = harness.RANKS_ON_ONE_GPU or len(DEVICES)


def mesh_of(devices):
    """Return a mesh over the devices in this order, or None if all ranks share one GPU."""
    return None if ONE_GPU else Mesh(np.array(devices), (AXIS,))


# Tests in other folders use another order of devices, and therefore another workspace.
MESH = mesh_of(DEVICES[1::2] + DEVICES[::2])


def new_group(
    mesh=MESH,
    *,
    ranks=RANKS,
    timeout=2.0,
    first_timeout=None,
    cuda_graphs=False,
    implementation="cuda" if ON_GPU else None,
    **options,
):
    """Return a group that must run the kernels. `ranks` is used only if `mesh` is None."""
    return ma.Group(
        mesh,
        AXIS,
        size=ranks if mesh is None else None,
        timeout=timeout,
        first_timeout=timeout if first_timeout is None else first_timeout,
        cuda_graphs=cuda_graphs,
        implementation=implementation,
        **options,
    )


GROUP = new_group()


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of an exchange whose capacity is so large that no choice is dropped."""

    tokens: int = 128
    hidden: int = 256
    top_k: int = 4
    local_experts: int = 2
    dtype: str = "bfloat16"
    alignment: int = 1
    format: object = None  # an 8-bit token format, in which the tokens' integers are exact
    wire: object = None  # the format in which combine sends partial sums


def fitting(shape, gigabytes=4.0):
    """Return the shape, with fewer tokens if ring halves on one GPU would exceed `gigabytes`."""
    row_bytes = shape.hidden * jnp.dtype(shape.dtype).itemsize
    tokens = shape.tokens
    while ONE_GPU and 2 * RANKS**2 * tokens * row_bytes > gigabytes * 2**30:
        tokens //= 2
    return dataclasses.replace(shape, tokens=tokens)


enough_tokens_to_be_late = pytest.mark.skipif(
    ONE_GPU and RANKS > 16,
    reason="over 16 ranks on one GPU have few tokens, which arrive even before an early flag",
)


def enough_rows(shape, group):
    """Return a capacity that drops no choice: None, or on one GPU twice the mean number of rows."""
    if not ONE_GPU:
        return None
    choices = shape.tokens * shape.top_k
    padding = shape.local_experts * (shape.alignment - 1)
    return min(group.size * choices, 2 * choices + 128) + padding


SMALL = Shape()
ONE_CHUNK = Shape(tokens=16)
MANY_CHUNKS = Shape(tokens=512)


class Counts(NamedTuple):
    """Numbers of errors. On a rank, they are one int32 array [4]; on the host, four of [ranks]."""

    wrong: object  # elements that are wrong, but not NaN
    lost: object  # values that are NaN, and tags that are zero
    misplaced: object  # rows, sizes or counts that differ from the expected routing
    unsafe: object  # sizes and indices outside of their range


def counted(**found):
    return jnp.stack(
        [jnp.sum(jnp.asarray(found.get(name, 0)), dtype=jnp.int32) for name in Counts._fields]
    )


# The arguments of the next functions may be arrays, which broadcast.


def hashed(*values):
    mixed = jnp.uint32(0x2545F491)
    for value in values:
        mixed = (mixed ^ jnp.asarray(value).astype(jnp.uint32)) * jnp.uint32(0x9E3779B1)
        mixed = mixed ^ (mixed >> 15)
    mixed = mixed * jnp.uint32(0x7FEB352D)
    return mixed ^ (mixed >> 16)


def ids_at(shape, num_ranks, step, rank, token, k):
    """Return the expert of a choice, or -1 for one choice in eight."""
    mixed = hashed(1, step, rank, token, k)
    ids = (mixed >> 8) % jnp.uint32(num_ranks * shape.local_experts)
    return jnp.where(mixed % 8 == 0, -1, ids.astype(jnp.int32))


def tokens_at(shape, step, rank, token):
    """Return the elements of a token, [..., hidden]: integers from 0 to 3."""
    index = jnp.arange(shape.hidden)
    mixed = hashed(2, step, jnp.asarray(rank)[..., None], jnp.asarray(token)[..., None], index)
    return ((mixed >> 9) % 4).astype(shape.dtype)


def tags_at(step, rank, token):
    return hashed(3, step, rank, token) | jnp.uint32(1)


def weights_at(step, rank, token, k):
    return (1 + (hashed(4, step, rank, token, k) >> 7) % 2).astype(jnp.float32)


def own_ids(shape, group, step):
    token = jnp.arange(shape.tokens)[:, None]
    return ids_at(shape, group.size, step, my_rank(group), token, jnp.arange(shape.top_k))


def own_weights(shape, group, step):
    token = jnp.arange(shape.tokens)[:, None]
    return weights_at(step, my_rank(group), token, jnp.arange(shape.top_k))


def my_rank(group):
    return lax.axis_index(group.axis_name)


def route_args(shape, group):
    return dict(
        group=group,
        num_experts=group.size * shape.local_experts,
        exchange=ma.Exchange(
            capacity=enough_rows(shape, group),
            alignment=shape.alignment,
            token_format=shape.format,
        ),
    )


def route(shape, group, step):
    return ma.route(own_ids(shape, group, step), **route_args(shape, group))


def payload(shape, group, step):
    token = jnp.arange(shape.tokens)
    rank = my_rank(group)
    x = {"x": tokens_at(shape, step, rank, token)}
    if shape.format is None:
        x["tag"] = tags_at(step, rank, token)
    return x


def dispatch(shape, group, step, routing):
    x = payload(shape, group, step)
    decode = shape.format is not None
    weights = own_weights(shape, group, step)
    return ma.dispatch(
        x, routing, weights, exchange=ma.Exchange(token_format=shape.format), decode=decode
    )


def routed_dispatch(shape, group, step):
    """Route and dispatch in one call, which is one launch if there are few tokens."""
    return ma.dispatch(
        payload(shape, group, step),
        own_ids(shape, group, step),
        own_weights(shape, group, step),
        **route_args(shape, group),
        decode=shape.format is not None,
    )


def dispatch_start(shape, group, step, routing):
    x = payload(shape, group, step)
    return ma.dispatch_start(x, routing, own_weights(shape, group, step))


def mark_of(rank):
    return rank % 8


def expert_output(rows, routing, group):
    """Add the mark of this rank to rows. Rows that no kernel may read become NaN."""
    rows = rows + mark_of(my_rank(group)).astype(rows.dtype)
    return jnp.where(routing.row_rank[:, None] >= 0, rows, jnp.nan)


def combine(shape, group, recv):
    y = expert_output(recv.rows["x"], recv.routing, group)
    return ma.combine(y, recv, wire_dtype=shape.wire)


def combine_start(group, recv):
    y = expert_output(recv.rows["x"], recv.routing, group)
    return ma.combine_start(weighted(y, recv.weights), recv.routing)


def weighted(y, weights):
    """Return rows times weights. Products are exact, because weights are 1 or 2."""
    return y * weights[:, None].astype(y.dtype)


# Counts of errors


def compare(actual, expected):
    lost = jnp.isnan(actual)
    return counted(wrong=(actual != expected) & ~lost, lost=lost)


def count_rows(shape, step, recv):
    """Count wrong elements, tags and weights; rows without a token must be 0."""
    rank, token, k = recv.src_info
    is_row = rank >= 0
    tags = jnp.where(is_row, tags_at(step, rank, token), 0)
    found = recv.rows.get("tag", tags)  # payloads with a format have no tags
    lost_tags = (found == 0) & (tags != 0)
    wrong_tags = (found != tags) & ~lost_tags
    rows = jnp.where(is_row[:, None], tokens_at(shape, step, rank, token), 0)
    weights = jnp.where(is_row, weights_at(step, rank, token, k), 0)
    return (
        compare(recv.rows["x"], rows)
        + compare(recv.weights, weights)
        + counted(wrong=wrong_tags, lost=lost_tags)
    )


def count_sums(shape, group, step, ids, out):
    token = jnp.arange(shape.tokens)
    x = tokens_at(shape, step, my_rank(group), token).astype(jnp.float32)
    weights = jnp.where(ids >= 0, own_weights(shape, group, step), 0)
    ranks = ids // shape.local_experts

    def partial(rank):
        """Return the partial sums of one rank, or of all ranks if `rank` is None."""
        at = True if rank is None else ranks == rank
        mine = jnp.where(at, weights, 0)
        marked = [x + mark_of(ranks[:, k, None]) for k in range(shape.top_k)]
        return sum(mine[:, k, None] * marked[k] for k in range(shape.top_k))

    if shape.wire is None:
        total = partial(None)
    else:
        sent = (shape.wire.encode(partial(rank)) for rank in range(group.size))
        total = sum(shape.wire.decode(each, jnp.float32) for each in sent)
    return compare(out, total.astype(shape.dtype))


def count_routing(shape, group, step, routing):
    """Count wrong entries; rows must be sorted by expert, source rank, token and k."""
    num_ranks, capacity = group.size, routing.capacity
    expert = my_rank(group) * shape.local_experts + jnp.arange(shape.local_experts)
    rank, token, k = (
        lax.broadcasted_iota(jnp.int32, (num_ranks, shape.tokens, shape.top_k), axis)
        for axis in range(3)
    )
    all_ids = ids_at(shape, num_ranks, step, rank, token, k)
    sizes = jnp.sum(all_ids.ravel() == expert[:, None], axis=1, dtype=jnp.int32)
    padded = -(-sizes // shape.alignment) * shape.alignment
    ends = jnp.cumsum(padded)

    rank, token, k = routing.row_rank, routing.row_token, routing.row_k
    row = jnp.arange(capacity)
    local_expert = jnp.sum(row[:, None] >= ends, axis=1)  # after the last group: local_experts
    is_real = row[:, None] < (ends - padded + sizes)
    is_real = jnp.any(is_real & (local_expert[:, None] == jnp.arange(len(expert))), axis=1)
    is_own = ids_at(shape, num_ranks, step, rank, token, k) == expert[0] + local_expert
    key = (rank * shape.tokens + token) * shape.top_k + k
    follows = (local_expert[1:] == local_expert[:-1]) & is_real[1:] & is_real[:-1]
    misplaced = (
        jnp.sum(is_real != (rank >= 0))
        + jnp.sum(is_real & ~is_own)
        + jnp.sum(follows & (key[1:] <= key[:-1]))
        + jnp.sum(routing.group_sizes != padded)
        + (routing.num_rows != jnp.sum(sizes))
        + (routing.num_dropped != 0)
    )

    def outside(values, low, high):
        return jnp.sum((values < low) | (values >= high))

    unsafe = (
        outside(rank, -1, num_ranks)
        + outside(token, -1, shape.tokens)
        + outside(k, -1, shape.top_k)
        + outside(routing.row_slot, -2, shape.tokens)
        + outside(routing.token_slot, -1, shape.tokens)
        + outside(routing.slot_token, -1, shape.tokens)
        + outside(routing.choice_rank, -1, num_ranks)
        + outside(routing.slot_rows, -2, capacity)
        + outside(routing.group_sizes, 0, capacity + 1)
        + outside(jnp.sum(routing.group_sizes), 0, capacity + 1)
        + outside(routing.num_rows, 0, capacity + 1)
    )
    return counted(misplaced=misplaced, unsafe=unsafe)


def count_psum(group, step, size):
    index = jnp.arange(size)
    total = lax.psum(hashed(step, my_rank(group), index), group.axis_name)
    every = hashed(step, jnp.arange(group.size)[:, None], index)
    return counted(wrong=total != jnp.sum(every, axis=0, dtype=every.dtype))


# If all ranks share one GPU: number of ranks -> exchanges since the group's workspace was opened.
_noted = collections.defaultdict(Count)
_noting = threading.Lock()


def note(group, exchanges):
    with _noting:
        _noted[group.size] += exchanges


def close(group):
    group.close()
    _noted.pop(group.size, None)


def close_all():
    """Close the open groups of every size on one GPU. Their exchanges must have ended."""
    for size in range(2, native.limit("MAX_RANKS") + 1):
        group = ma.Group(axis_name=AXIS, size=size, implementation="cuda")
        if any(epochs_of(group.topology, kind) for kind in native.WORKSPACE_KINDS):
            close(group)
    _noted.clear()


def restart(group, **exchanges):
    with _noting:
        _noted[group.size] = dataclasses.replace(_noted[group.size], **exchanges)


def counters_of(group):
    """Return the numbers of exchanges that the counters show: zeros for a closed workspace."""
    return Count(*(num_exchanges(group.topology, kind) for kind in native.WORKSPACE_KINDS))


def assert_counted(group=GROUP):
    """If all ranks share one GPU, check that kernels have run every exchange that was called."""
    if not (ONE_GPU and ON_GPU):
        return
    noted, shown = _noted[group.size], counters_of(group)
    assert shown == noted, f"{noted} were called; the counters show {shown}"


class Noted:
    """A program that adds its exchanges to `_noted` in each call. If `exchanges` is None, the first
    call reads their number from the device's counters."""

    def __init__(self, program, group, exchanges=None):
        self.program, self.group, self.exchanges = program, group, exchanges

    def __call__(self, *args):
        if self.exchanges is None and ON_GPU:
            return self.counted(*args)
        results = self.program(*args)
        note(self.group, self.exchanges or Count())
        return results

    def counted(self, *args):
        jax.block_until_ready(args)
        before = counters_of(self.group)
        results = jax.block_until_ready(self.program(*args))
        self.exchanges = counters_of(self.group) - before
        calls = harness.count_primitives(self.program.trace(*args).jaxpr)
        if calls and self.group.implementation != "portable":
            assert self.exchanges != Count(), f"no kernel has run; the program has {calls}"
        note(self.group, self.exchanges)
        return results

    def lower(self, *args):
        return self.program.lower(*args)


# An *order* is a function (shape, group, step) that runs one step's exchanges and returns Counts.


def received(shape, group, step, recv):
    out = combine(shape, group, recv)
    return (
        count_routing(shape, group, step, recv.routing)
        + count_rows(shape, step, recv)
        + count_sums(shape, group, step, own_ids(shape, group, step), out)
    )


def whole(shape, group, step):
    routing = route(shape, group, step)
    return received(shape, group, step, dispatch(shape, group, step, routing))


def at_once(shape, group, step):
    return received(shape, group, step, routed_dispatch(shape, group, step))


def routed_dispatch_only(shape, group, step):
    recv = routed_dispatch(shape, group, step)
    return count_routing(shape, group, step, recv.routing) + count_rows(shape, step, recv)


def route_only(shape, group, step):
    return count_routing(shape, group, step, route(shape, group, step))


def dispatch_only(shape, group, step):
    """Count errors in rows. XLA eliminates the combine, because nothing uses its sums."""
    recv = dispatch(shape, group, step, route(shape, group, step))
    combine(shape, group, recv)
    return count_rows(shape, step, recv)


def two_dispatches_first(shape, group, step):
    """Run two dispatches, and combine the rows of the second one first."""
    steps = (2 * step, 2 * step + 1)
    recvs = [dispatch(shape, group, s, route(shape, group, s)) for s in steps]
    recvs = lax.optimization_barrier(recvs)
    second = combine(shape, group, recvs[1])
    first, second = lax.optimization_barrier((recvs[0], second))
    outs = combine(shape, group, first), second
    return sum(
        count_rows(shape, s, recv) + count_sums(shape, group, s, own_ids(shape, group, s), out)
        for s, recv, out in zip(steps, recvs, outs)
    )


# These orders also take the routing of step 0, which a separate program has made.


def dispatch_given(shape, group, step, routing):
    return count_rows(shape, step, dispatch(shape, group, step, routing))


def combine_given(shape, group, step, routing):
    rank, token, k = routing.row_rank, routing.row_token, routing.row_k
    y = expert_output(tokens_at(shape, step, rank, token), routing, group)
    weights = weights_at(step, rank, token, k)
    out = ma.combine(y, routing, weights=weights, wire_dtype=shape.wire)
    return count_sums(shape, group, step, own_ids(shape, group, 0), out)


# Programs


def mapped(fn, group):
    """Map `fn` over the ranks, axis 0: by vmap if they share one GPU, otherwise by shard_map."""
    if group.mesh is None:
        return jax.vmap(fn, axis_name=group.axis_name, axis_size=group.size)
    spec = PartitionSpec(group.mesh.axis_names)

    def on_rank(*args):
        results = fn(*jax.tree.map(lambda leaf: leaf[0], args))
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], results)

    return jax.shard_map(on_rank, mesh=group.mesh, in_specs=spec, out_specs=spec, check_vma=False)


def on_all_ranks(fn, group, exchanges=None, **jit_options):
    program = jax.jit(mapped(fn, group), **jit_options)
    if ONE_GPU:
        return Noted(program, group, exchanges)
    return program if harness.PROCESSES == 1 else MetProgram(program)


class MetProgram:
    """A program that all processes compile before the first call, because calls have timeouts."""

    def __init__(self, program):
        self.program, self.met = program, set()

    def __call__(self, *args):
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(args))
        if shapes not in self.met:
            self.program.lower(*args).compile()
            harness.of_all_processes(None)
            self.met.add(shapes)
        return self.program(*args)

    def lower(self, *args):
        return self.program.lower(*args)


def steps_of(order, num_steps):
    def once(state, _):
        step, counts = state
        return (step + 1, counts + order(step)), None

    def on_rank(state):
        if num_steps == 1:
            return once(state, None)[0]
        return lax.scan(once, state, length=num_steps)[0]

    return on_rank


def sum_program(group, shape=SMALL):
    """Return a program that maps a state to the sum of all dispatched rows of all ranks."""

    def on_rank(state):
        routing = route(shape, group, state[0])
        recv = dispatch(shape, group, state[0], routing)
        return lax.psum(jnp.sum(recv.rows["x"].astype(jnp.float32)), group.axis_name)

    return on_all_ranks(on_rank, group)


def new_program(shape=SMALL, group=GROUP, order=whole, num_steps=1):
    return on_all_ranks(steps_of(lambda step: order(shape, group, step), num_steps), group)


@functools.cache
def program(shape=SMALL, group=GROUP, order=whole):
    return new_program(shape, group, order)


@functools.cache
def routing_program(shape=SMALL, group=GROUP):
    """Return a function without arguments that returns the Routing of step 0 of all ranks."""
    run = on_all_ranks(lambda step: route(shape, group, step), group)
    return functools.partial(run, begin(group)[0])


@functools.cache
def program_with_routing(order, shape=SMALL, group=GROUP):
    def on_rank(state, routing):
        return steps_of(lambda step: order(shape, group, step, routing), 1)(state)

    return on_all_ranks(on_rank, group)


def compile_together(*calls):
    """Compile tuples (program, *arguments) in parallel."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda call: call[0].lower(*call[1:]).compile(), calls))


def sharding_of(group=GROUP):
    if group.mesh is None:
        return SingleDeviceSharding(DEVICES[0])
    return NamedSharding(group.mesh, PartitionSpec(group.mesh.axis_names))


def begin(group=GROUP, first_step=0):
    steps = np.full(group.size, first_step, np.int32)
    counts = np.zeros((group.size, len(Counts._fields)), np.int32)
    return harness.put((steps, counts), sharding_of(group))


def repeat(run, times, state=None, *args):
    state = begin() if state is None else state
    for _ in range(times):
        state = run(state, *args)
    return state


def assert_right(state, group=GROUP):
    found = outcome(lambda: state, group)
    if found.error:
        raise RuntimeError(found.error)
    assert found.is_right(), found.counts
    assert_counted(group)


@dataclasses.dataclass
class Outcome:
    counts: Counts | None  # None: the call raised an error
    error: str  # the error of the call or of a later `Group.check`, or ''
    seconds: float

    def is_right(self):
        return not self.error and not any(count.any() for count in self.counts)

    def is_never_wrong(self):
        """Return True if every wrong value is NaN (or a zero tag), and every index is in range."""
        counts = self.counts
        return counts is None or not (counts.wrong.any() or counts.unsafe.any())


def own_counts(state):
    found = {}
    for shard in jax.block_until_ready(state)[1].addressable_shards:
        first = shard.index[0].indices(1 << 20)[0]
        found.update(enumerate(np.asarray(shard.data), first))
    return found


def outcome(run, group=GROUP):
    """Call `run`, wait for its state, and return an outcome that is equal in all processes."""
    counts, error = None, ""
    start = time.perf_counter()
    try:
        counts = own_counts(run())
    except RuntimeError as raised:
        error = str(raised)
    seconds = time.perf_counter() - start
    try:
        if group is not None:
            group.check()
    except RuntimeError as raised:
        error = str(raised)

    counts, errors, seconds = zip(*harness.of_all_processes((counts, error, seconds)))
    if None in counts:
        counts = None
    else:
        by_rank = sorted((rank, own) for each in counts for rank, own in each.items())
        counts = Counts(*np.stack([own for _, own in by_rank]).T)
    # Prefer the error of the first failed rank. Ranks that this rank has stopped report "stopped:".
    error = min(filter(None, errors), key=lambda error: "stopped:" in error, default="")
    return Outcome(counts, error, max(seconds))


def assert_stopped(failed, run, group, shown="lost"):
    """Check that a failed call ended in time without a wrong number, and the next call raises."""
    assert failed.seconds < group.timeout + 1, failed
    assert failed.counts is not None and failed.is_never_wrong(), failed
    assert getattr(failed.counts, shown).all(), failed
    # The slow rank only learns that a different rank had a timeout.
    with pytest.raises(RuntimeError, match='timeout: |has reported "timeout"'):
        group.check()
    again = outcome(lambda: run(begin()), group)
    assert again.counts is None and "timeout: " in again.error, again
    assert again.seconds < group.timeout, again
