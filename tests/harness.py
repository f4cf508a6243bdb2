"""Run functions on every rank, run the cases of cases.py, and compare results with oracle.py."""

import collections
import contextlib
import dataclasses
import functools
import math
import os
import pickle
import types

import cases
import jax
import numpy as np
import oracle
import pytest
from exchanges import Count, shown_by_counters
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jax_moe_a2a as ma
from jax_moe_a2a._src import compat
from jax_moe_a2a._src.group import native

AXIS = "ep"
ON_GPU = os.environ.get("MOE_A2A_TEST_GPU") == "1"
# number of ranks that share one device (a vmap), or 0 if each rank has a device
RANKS_ON_ONE_GPU = cases.RANKS_ON_ONE_GPU
TIMES_SLOWER = max(1, RANKS_ON_ONE_GPU // 16)  # time limits are longer
IMPLEMENTATION = os.environ.get("MOE_A2A_TEST_IMPLEMENTATION") or None
if RANKS_ON_ONE_GPU and ON_GPU:
    IMPLEMENTATION = "cuda"  # the default is the portable path
NUM_DEVICES = len(jax.devices())
PROCESSES = jax.process_count()

if RANKS_ON_ONE_GPU:
    RANK_COUNTS = (RANKS_ON_ONE_GPU,)
elif ON_GPU:
    RANK_COUNTS = tuple(n for n in (2, 4, 8) if n <= NUM_DEVICES) or (1,)
else:
    RANK_COUNTS = tuple(n for n in (1, 2, 4, 8) if n <= NUM_DEVICES)
# All processes must have equally many ranks.
RANK_COUNTS = tuple(n for n in RANK_COUNTS if n % PROCESSES == 0)
SEVERAL = max((n for n in RANK_COUNTS if n <= 4), default=RANK_COUNTS[0])
FEW = min((n for n in RANK_COUNTS if n >= 2), default=1)
MANY = RANK_COUNTS[-1]


OF_EXCHANGE = tuple(field.name for field in dataclasses.fields(ma.Exchange))


def exchanging(*dictionaries, **options):
    """Merge dicts of keyword arguments, with all options of an exchange in one `Exchange`."""
    merged, own = {}, None
    for each in (*dictionaries, options):
        for name, value in each.items():
            if name in OF_EXCHANGE:
                own = (own or {}) | {name: value}
            elif name == "exchange":
                given = {n: v for n, v in vars(value).items() if v is not None} if value else {}
                own = (own or {}) | given
            else:
                merged[name] = value
    return merged if own is None else dict(merged, exchange=ma.Exchange(**own))


def worst_case(num_tokens, top_k, ranks, num_experts, **options):
    """Return the smallest capacity at which no rank ever drops rows."""
    exchange = ma.Exchange(**options)
    return exchange.rows_per_rank(num_tokens, top_k, group_size=ranks, num_experts=num_experts)


def devices(count):
    """Return `count` devices, the same number from each process."""
    each, rest = divmod(count, PROCESSES)
    assert not rest, f"{PROCESSES} processes do not share {count} devices"
    of_process = [[d for d in jax.devices() if d.process_index == p] for p in range(PROCESSES)]
    return [device for own in of_process for device in own[:each]]


@functools.cache
def mesh_of(ranks):
    """Return None if the ranks share one device."""
    return None if RANKS_ON_ONE_GPU else Mesh(np.array(devices(ranks)), (AXIS,))


def mesh_over(axis_type=AxisType.Auto, **sizes):
    """Skip the test if there are too few devices; `axis_type` may be a tuple."""
    count = math.prod(sizes.values())
    if count > NUM_DEVICES:
        pytest.skip(f"needs {count} devices")
    types = axis_type if isinstance(axis_type, tuple) else (axis_type,) * len(sizes)
    shape = tuple(sizes.values())
    return Mesh(np.array(devices(count)).reshape(shape), tuple(sizes), axis_types=types)


def group_of(ranks, **options):
    options = dict(implementation=IMPLEMENTATION) | options
    if RANKS_ON_ONE_GPU:
        return ma.Group(axis_name=AXIS, size=ranks, **options)
    return ma.Group(mesh_of(ranks), AXIS, **options)


def poison(aval, sharding):
    """Return an array of NaN, or of integers whose bytes are all 0xA5, which no correct result
    contains."""
    dtype = np.dtype(aval.dtype)
    byte = 1 if dtype == np.bool_ else 0xA5 if dtype.kind in "iu" else 0xFF
    raw = np.full((*aval.shape, dtype.itemsize), byte, np.uint8)
    array = raw.view(dtype).reshape(aval.shape)
    return put(array, sharding, may_alias=False)


def is_elsewhere(leaf):
    return isinstance(leaf, jax.Array) and not (
        leaf.is_fully_addressable or leaf.is_fully_replicated
    )


def put(tree, sharding, **options):
    """Put arrays, equal in all processes, on devices like `jax.device_put`, but keep every bit."""

    def put_parts(leaf):
        if is_elsewhere(leaf):
            return jax.device_put(leaf, sharding)
        leaf = np.asarray(leaf)
        parts = sharding.addressable_devices_indices_map(leaf.shape)
        arrays = [jax.device_put(leaf[index], d, **options) for d, index in parts.items()]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)

    if PROCESSES == 1:
        return jax.device_put(tree, sharding, **options)
    return jax.tree.map(put_parts, tree)


def numpy_of(tree):
    """Return numpy arrays, which include the shards of other processes; all processes must call."""
    leaves, structure = jax.tree.flatten(tree)
    elsewhere = [leaf for leaf in leaves if is_elsewhere(leaf)]
    whole = iter(gathered(elsewhere) if elsewhere else ())
    return structure.unflatten(
        [next(whole) if is_elsewhere(leaf) else np.asarray(leaf) for leaf in leaves]
    )


def jit(fn, exchanges=None, split=0, **options):
    """Compile like `jax.jit`, but with several processes return numpy arrays of all shards."""
    jitted = jax.jit(fn, **options)
    if RANKS_ON_ONE_GPU:
        return counted(jitted, exchanges, split)
    if PROCESSES == 1:
        return jitted

    @functools.wraps(fn)
    def run(*args, **kwargs):
        results = jitted(*args, **kwargs)
        is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(results))
        return results if is_traced else numpy_of(results)

    return run


def gathered(arrays):
    """Return `arrays` as numpy arrays; a JAX program copies their shards to all processes."""

    def parts(array, process):
        """Return the process's (device, index of its shard), sorted by device."""
        indices = array.sharding.devices_indices_map(array.shape).items()
        own = [(device, index) for device, index in indices if device.process_index == process]
        return sorted(own, key=lambda part: part[0].id)

    def num_bytes(array):
        return array.dtype.itemsize * int(np.prod(array.sharding.shard_shape(array.shape)))

    sizes = [sum(num_bytes(a) * len(parts(a, p)) for a in arrays) for p in range(PROCESSES)]
    # Each new size compiles a program, so the size is a power of two.
    sent = np.zeros(max(1 << 12, 1 << (max(sizes) - 1).bit_length()), np.uint8)
    own = []
    for array in arrays:
        shards = {shard.device: shard.data for shard in array.addressable_shards}
        own += [np.asarray(shards[d]).tobytes() for d, _ in parts(array, jax.process_index())]
    own = np.frombuffer(b"".join(own), np.uint8)
    sent[: len(own)] = own
    received = received_from_all(sent)
    results = [np.empty(array.shape, array.dtype) for array in arrays]
    for process in range(PROCESSES):
        start = 0
        for array, result in zip(arrays, results):
            for _, index in parts(array, process):
                part = received[process, start : start + num_bytes(array)]
                result[index] = part.view(array.dtype).reshape(result[index].shape)
                start += num_bytes(array)
    return results


@functools.cache
def gathering():
    """Return a mesh of one device per process, and a program that copies all shards to each."""
    first = [jax.local_devices(process)[0] for process in range(PROCESSES)]
    mesh = Mesh(np.array(first), ("process",))
    return mesh, jax.jit(lambda sent: sent, out_shardings=NamedSharding(mesh, PartitionSpec()))


def received_from_all(sent):
    """Send bytes [N] to all processes, and return the bytes of all processes, [processes, N]."""
    mesh, program = gathering()
    own = jax.device_put(sent[None], jax.local_devices()[0])
    sharding = NamedSharding(mesh, PartitionSpec("process"))
    shape = (PROCESSES, sent.size)
    with jax.set_mesh(mesh):  # a test may have set another mesh
        return np.asarray(program(jax.make_array_from_single_device_arrays(shape, sharding, [own])))


def of_all_processes(value):
    """Return the value that each process passes; a pickled value has at most 64 KiB."""
    if PROCESSES == 1:
        return [value]
    sent = np.zeros(1 << 16, np.uint8)
    pickled = pickle.dumps(value)
    sent[: len(pickled)] = np.frombuffer(pickled, np.uint8)
    return [pickle.loads(received.tobytes()) for received in received_from_all(sent)]


# Tests that mostly compile need half the time without optimizations.
QUICKLY = None if ON_GPU else {"xla_backend_optimization_level": 0}
# to check XLA's optimizations
THOROUGHLY = None if ON_GPU else {"xla_backend_optimization_level": 3}
quickly = functools.partial(jax.jit, compiler_options=QUICKLY)

OF_SEVERAL_AXES = [
    pytest.mark.one_process("meshes of several axes"),
    pytest.mark.several_devices("meshes of several axes"),
    pytest.mark.usefixtures("exact_products"),
]


def over_ranks(fn, mesh=None, in_axes=0, out_axes=0, check_vma=True):
    """Map `fn` over the ranks: with a shard_map over the mesh, or with a vmap on one device.

    An axis of None in `in_axes` or `out_axes` means that the array is equal on all ranks.
    """
    if RANKS_ON_ONE_GPU and mesh is not None:
        assert in_axes == out_axes == 0, "all rank axes must be the first axis"
        return over_axes(fn, mesh)
    if RANKS_ON_ONE_GPU:
        return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes, axis_name=AXIS)
    mesh = mesh or mesh_of(SEVERAL)

    def spec_of(axis):
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, mesh.axis_names)

    def of_one_rank(*args):
        axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
        own = [jax.tree.map(functools.partial(squeeze, axis=a), x) for x, a in zip(args, axes)]
        return jax.tree.map(lambda leaf: leaf if out_axes is None else leaf[None], fn(*own))

    def squeeze(leaf, axis):
        return leaf if axis is None else leaf[(slice(None),) * axis + (0,)]

    in_specs = tuple(map(spec_of, in_axes)) if isinstance(in_axes, tuple) else spec_of(in_axes)
    return jax.shard_map(
        of_one_rank,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=spec_of(out_axes),
        check_vma=check_vma,
    )


def over_axes(fn, mesh):
    """Map `fn` over the ranks on one device, with one vmap for each axis of an abstract mesh."""
    for axis in reversed(mesh.axis_names):
        fn = jax.vmap(fn, axis_name=axis)
    sizes = mesh.axis_sizes

    def divided(leaf):
        return leaf.reshape(*sizes, *leaf.shape[1:])

    def joined(leaf):
        return leaf.reshape(mesh.size, *leaf.shape[len(sizes) :])

    return lambda *args: jax.tree.map(joined, fn(*jax.tree.map(divided, args)))


def placement(mesh):
    if RANKS_ON_ONE_GPU:
        return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def on_each_rank(fn, mesh=None, check_vma=True, compiler_options=None, exchanges=None, split=0):
    """Compile `fn`, mapped over the ranks, as a function of numpy arrays with a leading rank axis.

    Results are written into donated buffers of `poison`, which detects elements that a kernel does
    not write.
    """
    sharding = placement(mesh)
    mapped = jax.jit(over_ranks(fn, mesh, check_vma=check_vma))

    @functools.partial(
        jax.jit,
        donate_argnums=0,
        keep_unused=True,
        in_shardings=sharding,
        out_shardings=sharding,
        compiler_options=compiler_options,
    )
    def poisoned(results, args):
        del results
        return mapped(*args)

    def run(*args):
        args = put(args, sharding)
        results = jax.tree.map(lambda aval: poison(aval, sharding), jax.eval_shape(mapped, *args))
        with stated(exchanges, split):
            return numpy_of(poisoned(results, args))

    return run


# the exchanges that the test has declared, in `num_statements` calls
ledger = types.SimpleNamespace(stated=Count(), num_statements=0)


def exchanged():
    return shown_by_counters(group_of(RANKS_ON_ONE_GPU))


def splits_fit():
    """Return False if so many ranks share a GPU that split exchanges cannot run."""
    if not (RANKS_ON_ONE_GPU and ON_GPU):
        return True
    num_sms = jax.devices()[0].core_count
    return native._native.colocated_blocks(RANKS_ON_ONE_GPU, num_sms, True) > 0


@contextlib.contextmanager
def expect_exchanges(whole, split=0):
    """Fail unless the block makes these numbers of exchanges on each rank of a shared GPU."""
    if not (RANKS_ON_ONE_GPU and ON_GPU):
        yield
        return
    before, stated_before = exchanged(), ledger.stated
    yield
    expected, actual = Count(whole, split), exchanged() - before
    assert actual == expected, f"the test expects {expected}; the counters show {actual}"
    ledger.stated = stated_before + expected
    ledger.num_statements += 1


def stated(exchanges, split):
    return contextlib.nullcontext() if exchanges is None else expect_exchanges(exchanges, split)


@contextlib.contextmanager
def every_exchange_is_stated():
    """Fail unless the test declares all its exchanges, even if it has none."""
    ledger.stated, ledger.num_statements = Count(), 0
    run_case.cache_clear()  # a cached case runs no exchange
    before = exchanged()
    yield
    actual = exchanged() - before
    assert ledger.num_statements, f"the test does not state that it makes {actual}"
    assert actual == ledger.stated, f"the test makes {actual} in all, but states {ledger.stated}"


def is_traced(*args):
    tracers = (isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args))
    return compat.traced_function() is not None or any(tracers)


def counted(jitted, exchanges, split):
    """Return a jitted function that waits for each run and checks its exchanges."""

    @functools.wraps(jitted)
    def run(*args, **kwargs):
        if is_traced(args, kwargs):
            return jitted(*args, **kwargs)  # the caller of the outer program declares them
        with stated(exchanges, split):
            return jax.block_until_ready(jitted(*args, **kwargs))

    return run


def eagerly(fn, exchanges=None, split=0):
    """Run `fn` without jit, and check the exchanges of each run."""

    def run(*args):
        with stated(exchanges, split):
            return jax.block_until_ready(fn(*args))

    return run


def emulated_group(ranks):
    """Return a group without devices: its ranks are a vmap, on the portable path."""
    implementation = "portable" if RANKS_ON_ONE_GPU else None
    return ma.Group(axis_name=AXIS, size=ranks, implementation=implementation)


def vmapped_group(ranks):
    """Return `emulated_group` or, if all ranks share one GPU, the group that runs the kernels."""
    return group_of(RANKS_ON_ONE_GPU) if RANKS_ON_ONE_GPU else emulated_group(ranks)


def exchange_fn(layout, group):
    """Return a function of one rank's arrays that makes a dispatch and two combines, one
    weighted."""

    def exchange(ids, x, topk_weights, y):
        recv = ma.dispatch(x, ids, topk_weights, **layout.route_args(group))
        return {
            "recv": recv,
            "sum": ma.combine(y, recv, weights=None),
            "weighted": ma.combine(y, recv),
        }

    return exchange


@functools.cache
def exchange_program(layout, ranks):
    exchanges = layout.exchanges_of_dispatch(ranks) + 2 * layout.has_rows(ranks)
    program = exchange_fn(layout, group_of(ranks))
    return on_each_rank(program, mesh_of(ranks), exchanges=exchanges)


def exchange_inputs(case, ranks, seed=0):
    """Return (all ranks' arguments of `exchange_fn`, the routing). Weights and rows that nothing
    may read are NaN."""
    layout = case.layout
    rng = np.random.default_rng([seed, ranks, layout.tokens])
    ids = case.ids(ranks, seed)
    routing = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)
    x = {
        "rows": cases.any_bits(rng, (ranks, layout.tokens, layout.hidden), "bfloat16"),
        "position": cases.any_bits(rng, (ranks, layout.tokens), "int32"),
    }
    topk_weights = cases.normal(rng, ids.shape, "float32")
    topk_weights[routing.choice_row < 0] = np.nan
    y = cases.normal(rng, (ranks, layout.rows(ranks), layout.hidden), "bfloat16")
    y[routing.row_token < 0] = np.nan
    return (ids, x, topk_weights, y), routing


@functools.lru_cache(maxsize=4)
def run_case(case, ranks, seed=0):
    """Return the results of a case, its inputs and the expected routing."""
    (ids, x, topk_weights, y), routing = exchange_inputs(case, ranks, seed)
    results = exchange_program(case.layout, ranks)(ids, x, topk_weights, y)
    return types.SimpleNamespace(
        ids=ids, x=x, topk_weights=topk_weights, y=y, expected=routing, **results
    )


def assert_same_bytes(actual, expected, what=""):
    """NaNs with equal bits are equal; 0 is not -0."""
    actual, expected = numpy_of((actual, expected))
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    np.testing.assert_array_equal(cases.bits(actual), cases.bits(expected), err_msg=what)


def assert_recv_is(recv, x, topk_weights, expected):
    """Compare a Recv [R, ...] of payload `x` (a dict) with the oracle, except its routing."""
    for name, leaf in x.items():
        assert_same_bytes(recv.rows[name], oracle.dispatch(leaf, expected), name)
    if topk_weights is None:
        assert recv.weights is None
    else:
        weights = oracle.dispatch_choices(topk_weights, expected)
        assert_same_bytes(recv.weights, weights, "weights")
    ranks, local_experts = expected.group_sizes.shape
    experts = np.arange(ranks * local_experts, dtype=np.int32).reshape(ranks, local_experts)
    assert_rows_are_described(recv, expected, experts)


def assert_rows_are_described(recv, expected, experts):
    """Compare the fields that describe rows; `experts` are the expected expert_ids [R, L]."""
    for name, value in {
        "group_sizes": expected.group_sizes,
        "row_offsets": expected.row_offsets,
        "expert_ids": experts,
        "num_rows": expected.num_rows,
        "num_dropped": expected.num_dropped,
        "num_invalid": expected.num_invalid,
    }.items():
        assert_same_bytes(getattr(recv, name), value, name)
    for name in ("rank", "token", "k"):
        assert_same_bytes(getattr(recv.src_info, name), getattr(expected, f"row_{name}"), name)


def assert_sums_agree(actual, expected, slack, what=""):
    """Assert that sums differ by at most `slack` (see `oracle.combine`)."""
    actual = numpy_of(actual)
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), err_msg=what)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, not > slack
        too_far = np.abs(actual - expected) > slack
    assert not too_far.any(), (
        f"{what}: {too_far.sum()} of {too_far.size} sums are too far away, "
        f"first at {np.argwhere(too_far)[0]}: "
        f"{actual[too_far][0]} for {expected[too_far][0]}, slack {slack[too_far][0]}"
    )


def assert_routing_is(actual, expected):
    for field in oracle.FIELDS:
        assert_same_bytes(getattr(actual, field), getattr(expected, field), field)


def equations(jaxpr):
    """Yield the equations of a jaxpr and of its nested jaxprs, in program order."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for nested in nested_jaxprs(eqn):
            yield from equations(nested)


def nested_jaxprs(eqn):
    for param in jax.tree.leaves(
        list(eqn.params.values()),
        is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr"),
    ):
        if hasattr(param, "jaxpr") or hasattr(param, "eqns"):
            yield param


def count_primitives(jaxpr, prefix="moe_a2a_"):
    names = (eqn.primitive.name for eqn in equations(jaxpr))
    return dict(
        collections.Counter(name.removeprefix(prefix) for name in names if name.startswith(prefix))
    )
