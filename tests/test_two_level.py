"""Test that groups of two levels (between and within hosts) return the rows of a one-level group,
and send a token to each host only once."""

import dataclasses
import functools
import math
import re
import types

import cases
import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import small_layer
from exchanges import Count, shown_by_counters
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from small_layer import OF_FLOATS, route_args

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import value as group_value

pytestmark = pytest.mark.counts_by_itself("its groups are those within hosts")
of_devices = pytest.mark.several_devices("it only traces, or needs a mesh with devices")

RANKS = harness.MANY
HOSTS = min(4 if RANKS > 8 else 2, RANKS)
EVERY_HOSTS = tuple(hosts for hosts in (2, 4, 8, 1) if RANKS % hosts == 0)
AXES = ("host", harness.AXIS)
ON_ONE_GPU = harness.RANKS_ON_ONE_GPU > 0 and harness.ON_GPU
every_hosts = pytest.mark.parametrize("hosts", EVERY_HOSTS, ids=lambda n: f"{n}x{RANKS // n}")


@functools.cache
def mesh_of(hosts):
    if harness.RANKS_ON_ONE_GPU:
        return AbstractMesh((hosts, RANKS // hosts), AXES)
    return Mesh(np.array(harness.devices(RANKS)).reshape(hosts, -1), AXES)


def group_of(hosts, **options):
    options = dict(dict(two_level=True, implementation=harness.IMPLEMENTATION), **options)
    return ma.Group(mesh_of(hosts), AXES, **options)


def exchanged_within(hosts):
    """Read the number of exchanges within hosts from the counters that all hosts share."""
    return shown_by_counters(harness.group_of(RANKS // hosts))


def by_kernels(program):
    """Return the program with a check that a kernel runs, if all ranks share a GPU."""
    if not ON_ONE_GPU:
        return program

    @functools.wraps(program)
    def run(*args):
        before = [exchanged_within(hosts) for hosts in EVERY_HOSTS]
        results = program(*args)
        assert [exchanged_within(hosts) for hosts in EVERY_HOSTS] != before, "no kernel has run"
        return results

    return run


def on_each_rank(fn, mesh, has_rows=True):
    """Compile `fn`, with the check of `by_kernels` if there are rows and several ranks per host."""
    program = harness.on_each_rank(fn, mesh, compiler_options=harness.QUICKLY)
    is_alone = mesh is not None and mesh.shape[harness.AXIS] == 1
    return by_kernels(program) if has_rows and not is_alone else program


def compiled(fn):
    return by_kernels(small_layer.compiled(fn))


def flat_group(hosts=HOSTS):
    return harness.group_of(RANKS) if harness.RANKS_ON_ONE_GPU else group_of(hosts, two_level=False)


def combine(y, routing, hosts, weights=None, wire_dtype=None):
    return oracle.combine_of_hosts([(y, weights)], routing, hosts, wire_dtype)


@functools.cache
def exchange_program(layout, hosts):
    exchange = harness.exchange_fn(layout, group_of(hosts))
    return on_each_rank(exchange, mesh_of(hosts), layout.has_rows(RANKS))


def check_case(case, hosts):
    args, expected = harness.exchange_inputs(case, RANKS)
    results = exchange_program(case.layout, hosts)(*args)
    _, x, topk_weights, y = args
    harness.assert_recv_is(results["recv"], x, topk_weights, expected)
    weights = oracle.dispatch_choices(topk_weights, expected)
    harness.assert_sums_agree(results["sum"], *combine(y, expected, hosts), case.name)
    harness.assert_sums_agree(results["weighted"], *combine(y, expected, hosts, weights), case.name)


@pytest.mark.parametrize("layout", cases.few_layouts(), ids=lambda layout: layout.name)
def test_rows_are_those_of_the_flat_exchange_and_sums_those_of_hosts_in_order(layout):
    for case in cases.cases_of(layout):
        check_case(case, HOSTS)


@every_hosts
def test_any_number_of_hosts_returns_the_same_rows(hosts):
    for name in ("uniform", "idle_rank", "masked_tokens", "first_expert_only", "invalid"):
        check_case(cases.Case(cases.CUT, name), hosts)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_ONE_GPU, reason="of ranks that share one GPU")
@every_hosts
def test_each_exchange_within_hosts_is_one_launch(hosts):
    """A route, a dispatch and two combines are each one launch for all hosts."""
    if hosts == RANKS:
        pytest.skip("hosts of one rank")
    before = exchanged_within(hosts)
    check_case(cases.Case(cases.CUT, "uniform"), hosts)
    assert exchanged_within(hosts) - before == Count(whole=4)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.gpu_catalogue(), ids=lambda case: case.name)
def test_many_tokens_return_the_same_rows(case):
    check_case(case, HOSTS)


def test_a_token_crosses_to_each_host_once():
    layout, hosts = cases.PLAIN, HOSTS
    of_host, tokens = RANKS // hosts, layout.tokens
    group = group_of(hosts)

    def route(ids):
        return ma.route(ids, **route_args(group, layout))

    program = on_each_rank(route, group.mesh)
    for name in ("uniform", "skewed", "repeated", "masked", "invalid", "last_rank_only"):
        ids = cases.Case(layout, name).ids(RANKS)
        actual = program(ids).hosts
        crossing = 0
        for source, token in np.ndindex(RANKS, tokens):
            wanted = ids[source, token]
            wanted = wanted[(wanted >= 0) & (wanted < layout.num_experts(RANKS))]
            wanted = {int(e) // layout.local_experts // of_host for e in wanted}
            home, local = divmod(source, of_host)
            for host in range(hosts):
                sent = np.sum(actual.slot_token[source, host] == token)
                landed = actual.row_rank[host * of_host + local, token * hosts + home] == home
                assert sent == landed == (host in wanted), (name, source, token, host)
            crossing += len(wanted - {home})
        is_far = np.arange(RANKS)[:, None] // of_host != np.arange(hosts)
        assert (actual.slot_token >= 0)[is_far].sum() == crossing
        # A one-level group sends a token once for each destination rank.
        flat = oracle.route(ids, layout.num_experts(RANKS), 0).token_slot >= 0
        to_far = np.repeat(is_far, of_host, axis=1)[:, None]
        assert crossing <= (flat & to_far).sum()
        if name == "uniform" and of_host > 1 and hosts > 1:
            assert crossing < 0.8 * (flat & to_far).sum()


@of_devices
def test_a_layer_crosses_between_hosts_once_each_way():
    """Backward, the gradients of sums and of tokens are sent."""
    floats, ids, _ = small_layer.arguments(RANKS)
    layer = small_layer.on_all_ranks(small_layer.layer_of(group_of(HOSTS)), mesh_of(HOSTS))
    forward = jax.make_jaxpr(layer)(*floats, ids)

    def crossing(jaxpr):
        return [
            eqn.primitive.name.removeprefix("moe_a2a_")
            for eqn in harness.equations(jaxpr)
            if "group" in eqn.params and eqn.params["group"].axis_name == "host"
        ]

    assert crossing(forward) == ["dispatch", "dispatch", "combine"]
    assert harness.count_primitives(forward) == dict(
        dispatch=3, route=1, weighted_combine=1, combine=1
    )
    gradient = jax.make_jaxpr(jax.grad(small_layer.loss_of(layer, ids), OF_FLOATS))(*floats)
    backward = crossing(gradient)[3:]
    assert sorted(backward) == ["combine", "dispatch"]


def test_sums_are_rounded_to_the_wire_dtype_as_stated():
    hosts, layout, group = HOSTS, cases.PLAIN, group_of(HOSTS)
    rng = np.random.default_rng(0)
    y = {n: cases.normal(rng, (RANKS, layout.rows(RANKS), 9), n) for n in cases.SUMMED_DTYPES}

    def sums(ids, y):
        routing = ma.route(ids, **route_args(group, layout))
        return {
            w: ma.combine({n: y[n] for n in names}, routing, wire_dtype=w)
            for w, names in (("bfloat16", cases.SUMMED_DTYPES), ("float32", ("float32",)))
        }

    program = on_each_rank(sums, group.mesh)
    ids = cases.Case(layout, "skewed").ids(RANKS)
    expected = oracle.route(ids, layout.num_experts(RANKS), layout.rows(RANKS))
    for wire, sums_of_wire in program(ids, y).items():
        for name, out in sums_of_wire.items():
            sums = combine(y[name], expected, hosts, None, cases.dtype(wire))
            harness.assert_sums_agree(out, *sums, (wire, name))


EXCHANGES = {
    "dispatch": lambda x, ids, route, **options: ma.dispatch(
        x, ids, **harness.exchanging(route, options)
    ),
    "routed": lambda x, ids, route, **options: ma.dispatch(
        x, ma.route(ids, **harness.exchanging(route)), **harness.exchanging(options)
    ),
    "combine": lambda x, ids, route, **options: ma.combine(
        rows_like(x), ma.route(ids, **harness.exchanging(route)), **options
    ),
    "combine_start": lambda x, ids, route, **options: ma.combine_start(
        rows_like(x), ma.route(ids, **harness.exchanging(route)), **options
    ),
}


def rows_like(x):
    num_rows = cases.PLAIN.rows(RANKS)
    return [jnp.zeros((num_rows, *leaf.shape[1:]), leaf.dtype) for leaf in x]


def trace_exchange(name, dtypes, group, **options):
    def of_one_rank(ids):
        x = [jnp.zeros((len(ids), 32), dtype) for dtype in dtypes]
        EXCHANGES[name](x, ids, route_args(group, cases.PLAIN), **options)

    ids = jax.ShapeDtypeStruct((RANKS * cases.PLAIN.tokens, cases.PLAIN.top_k), jnp.int32)
    in_specs, out_specs = PartitionSpec(group.axis_name), PartitionSpec()
    program = jax.shard_map(of_one_rank, mesh=group.mesh, in_specs=in_specs, out_specs=out_specs)
    jax.eval_shape(program, ids)


@of_devices
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_wire_dtype_wider_than_the_rows_is_refused(name):
    """Sums within a host are rounded to the rows' dtype."""
    group = group_of(HOSTS)
    for dtypes in (["bfloat16"], ["float32", "float16"]):
        naming = (
            rf"wire_dtype must not .* float32 for {dtypes[-1]}\[.*wire_dtype=None, or cast [xy]"
        )
        with pytest.raises(ValueError, match=naming):
            trace_exchange(name, dtypes, group, wire_dtype="float32")
        trace_exchange(name, dtypes, flat_group(), wire_dtype="float32")
    for dtype, wire in (("bfloat16", "float16"), ("float32", "float32"), ("bfloat16", None)):
        trace_exchange(name, [dtype], group, wire_dtype=wire)


@of_devices
def test_a_wire_dtype_may_be_wider_than_what_is_only_moved():
    """A dispatch sums no integers and no 8-bit floats. No exchange sends replicated tokens."""
    moved = ["int8", "float8_e4m3fn", "float32"]
    trace_exchange("dispatch", moved, group_of(HOSTS), wire_dtype="float32")
    trace_exchange("dispatch", ["bfloat16"], group_of(HOSTS), wire_dtype="float32", replicated=True)


def assert_as_flat(exchange, *args, group=None):
    """Assert that `exchange(group)` returns the Recv of a one-level group, and its sums up to a few
    roundings."""
    group = group or group_of(HOSTS)
    actual, expected = (
        on_each_rank(exchange(each), each.mesh)(*args) for each in (group, flat_group())
    )
    for field in dataclasses.fields(ma.Recv):
        if field.name != "routing":
            mine, flats = (getattr(results[0], field.name) for results in (actual, expected))
            assert jax.tree.structure(mine) == jax.tree.structure(flats), field.name
            for a, e in zip(*map(jax.tree.leaves, (mine, flats)), strict=True):
                harness.assert_same_bytes(a, e, field.name)
    for a, e in zip(actual[1:], expected[1:], strict=True):
        small_layer.assert_close(a, e, tolerance=2 * float(ml_dtypes.finfo(a.dtype).eps))


FORMATTED = cases.Layout("formatted", tokens=6, top_k=3, local_experts=2, hidden=64)
FORMATS = {
    "mx": dict(token_format=ma.MxFp8()),
    "own_scale": dict(token_format=ma.NvFp4(global_scale=2.0), decode=True),
    "scales_of_tokens": dict(
        token_format=ma.NvFp4(global_scale=jnp.linspace(0.1, 2, FORMATTED.tokens))
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_quantize_once_and_rows_are_as_without_levels(name):
    (x, topk_weights, _), ids, _ = small_layer.arguments(RANKS, layout=FORMATTED)

    def exchange(group):
        def of_one_rank(ids, x, topk_weights):
            options = dict(route_args(group, FORMATTED), **FORMATS[name])
            return (ma.dispatch(x, ids, topk_weights, **harness.exchanging(options)),)

        return of_one_rank

    assert_as_flat(exchange, ids, x, topk_weights)


def test_start_and_done_are_the_whole_exchange():
    floats, ids, kept = small_layer.arguments(RANKS)
    group = group_of(HOSTS)

    def layer_of_one_rank(x, topk_weights, w, ids):
        inflight = ma.dispatch_start(x, ids, topk_weights, **route_args(group))
        inflight, beside = ma.overlap(inflight, jnp.sin, x)
        recv = ma.dispatch_done(inflight)
        y = small_layer.experts(recv.rows, recv.row_offsets, w)
        inflight = ma.combine_start(y * recv.weights[:, None], recv.routing)
        inflight, beside = ma.overlap(inflight, jnp.cos, beside)
        return ma.combine_done(inflight) + 0 * beside

    layer = small_layer.on_all_ranks(layer_of_one_rank, mesh_of(HOSTS))
    actual = compiled(small_layer.value_and_grads(layer, ids))(*floats)
    small_layer.assert_close(actual, small_layer.dense_value_and_grads(floats, ids, kept))


@pytest.mark.parametrize("hosts", EVERY_HOSTS[:1], ids=lambda n: f"{n}x{RANKS // n}")
def test_gradients_are_those_of_the_dense_layer(hosts):
    floats, ids, kept = small_layer.arguments(RANKS)
    layer = small_layer.on_all_ranks(small_layer.layer_of(group_of(hosts)), mesh_of(hosts))
    actual = compiled(small_layer.value_and_grads(layer, ids))(*floats)
    small_layer.assert_close(actual, small_layer.dense_value_and_grads(floats, ids, kept))


@pytest.mark.parametrize(
    ("policy", "routes", "dispatches"),
    [
        # Forward, ids and rows are exchanged at both levels; backward, the gradient of sums.
        (None, 2, 8),
        (jax.checkpoint_policies.save_only_these_names(ma.ROUTING_CHECKPOINT_NAME), 1, 7),
    ],
    ids=("no_policy", "routing"),
)
def test_rematerialization_keeps_the_routing_of_both_levels_if_its_policy_saves_it(
    policy, routes, dispatches
):
    floats, ids, kept = small_layer.arguments(RANKS)
    layer = jax.checkpoint(small_layer.layer_of(group_of(HOSTS)), policy=policy)
    layer = small_layer.on_all_ranks(layer, mesh_of(HOSTS))
    program = small_layer.value_and_grads(layer, ids)
    counts = small_layer.counts(program, *floats)
    counts["dispatch"] += counts.pop("weighted_dispatch")
    expected = dict(route=routes, dispatch=dispatches, weighted_combine=1, combine=3)
    assert counts == expected
    if policy is not None:
        expected = small_layer.dense_value_and_grads(floats, ids, kept)
        small_layer.assert_close(compiled(program)(*floats), expected)


@of_devices
def test_levels_are_groups_of_the_two_axes():
    group = group_of(HOSTS, num_sms=8, timeout=5.0)
    hosts, ranks = group.levels
    assert (hosts.axis_name, hosts.size) == ("host", HOSTS)
    assert ranks == ma.Group(
        mesh_of(HOSTS), "ep", num_sms=8, timeout=5.0, implementation=harness.IMPLEMENTATION
    )
    assert flat_group().levels == (flat_group(),)
    assert group != flat_group() and group_of(HOSTS, two_level=None) == flat_group()
    assert not group.single_rank.two_level


@of_devices
@pytest.mark.parametrize(
    ("arguments", "naming"),
    [
        (dict(axis_name="ep"), "axis_name names two axes.*'ep'"),
        (dict(axis_name=("dp", *AXES)), "two axes.*'dp'"),
        (dict(mesh=None, size=4), "without a mesh"),
        (dict(mesh=AbstractMesh((33, 1), AXES)), "32 hosts.*33 along 'host'"),
        (dict(two_level=1), "two_level must be a bool; got 1"),
        (dict(two_level="yes"), "two_level must be a bool; got 'yes'"),
    ],
)
def test_impossible_levels_are_refused(arguments, naming):
    right = dict(mesh=AbstractMesh((2, 2, 2), ("dp", *AXES)), axis_name=AXES, two_level=True)
    with pytest.raises((TypeError, ValueError), match=naming):
        ma.Group(**{**right, **arguments})


@of_devices
def test_axes_of_other_sizes_than_the_groups_are_refused():
    group = ma.Group(AbstractMesh((2, 4), AXES), AXES, two_level=True)
    route = functools.partial(ma.route, group=group, num_experts=8)
    mapped = jax.vmap(jax.vmap(route, axis_name="ep"), axis_name="host")
    with pytest.raises(ValueError, match=r"{'host': 4, 'ep': 2}; got .* 2 x 4"):
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((4, 2, 3, 1), jnp.int32))


@of_devices
def test_a_group_chooses_two_levels_where_each_row_of_ranks_is_another_host(monkeypatch):
    pays = group_value.are_hosts_and_ranks
    two_by_four = np.repeat([[[0], [1]]], 4, axis=2)
    assert pays(two_by_four)
    assert pays(np.concatenate([two_by_four, two_by_four + 2]))
    assert not pays(np.zeros((1, 2, 4)))  # only one host
    assert not pays(two_by_four.transpose(0, 2, 1))  # hosts not first
    assert not pays(two_by_four[:, :, :1])  # one rank per host
    assert not pays(two_by_four[:, :1])
    assert not pays(np.repeat([[[0], [1], [0]]], 4, axis=2))
    assert pays(np.repeat(np.arange(32), 8).reshape(1, 32, 8))
    assert not pays(np.repeat(np.arange(33), 8).reshape(1, 33, 8))

    hosts = np.repeat([[[0], [1]]], max(2, RANKS // 2), axis=2)
    monkeypatch.setattr(group_value, "hosts_of", lambda mesh, axes: hosts)
    assert group_of(HOSTS, two_level=None) == group_of(HOSTS)
    assert not group_of(HOSTS, two_level=False).two_level


@of_devices
@pytest.mark.parametrize("attribute", ("slice_index", "partition_index"))
def test_hosts_are_what_the_devices_say_in_the_order_of_the_groups_axes(attribute):
    devices = [types.SimpleNamespace(**{attribute: number // 4}) for number in range(16)]
    names, by_host = ("ep", "dp", "host"), np.reshape(np.array(devices), (2, 2, 4))
    mesh = types.SimpleNamespace(
        devices=by_host.transpose(2, 0, 1), axis_names=names, shape=dict(zip(names, (4, 2, 2)))
    )
    hosts = group_value.hosts_of(mesh, AXES)
    np.testing.assert_array_equal(hosts[:, :, 0], [[0, 1], [2, 3]])
    assert group_value.are_hosts_and_ranks(hosts)
    assert not group_value.are_hosts_and_ranks(group_value.hosts_of(mesh, AXES[::-1]))


@of_devices
def test_memory_is_that_of_both_levels():
    sizes = dict(num_tokens=128, hidden=64, top_k=4, num_experts=32)
    said = ma.memory_estimate(**harness.exchanging(sizes), group_size=(2, 4))
    flat = ma.memory_estimate(**harness.exchanging(sizes), group_size=8)
    between, within = said.levels
    assert (said.capacity, said.rows_bytes) == (flat.capacity, flat.rows_bytes)
    assert between.capacity == 2 * 128  # a rank relays 128 tokens from each of two hosts
    assert within.workspace_bytes == flat.workspace_bytes  # as many receive buffers
    assert said.workspace_bytes == within.workspace_bytes > 0
    assert "between hosts" in str(said) and "between hosts" not in str(flat)
    assert (
        ma.memory_estimate(**harness.exchanging(sizes, replicated=True), group_size=(2, 4)).levels
        == ()
    )

    group = group_of(HOSTS)
    sizes["num_experts"] = 4 * RANKS
    reserved = group.reserve(**harness.exchanging(sizes))
    estimate = ma.memory_estimate(**harness.exchanging(sizes), group_size=(HOSTS, RANKS // HOSTS))
    if group.path == "cuda":  # the emulated hosts share memory
        workspace = sum(level.workspace_bytes for level in estimate.levels)
        replaced = dict(workspace_bytes=workspace, collective_bytes=0)
        estimate = dataclasses.replace(estimate, **replaced)
    assert reserved == estimate
    assert bool(group.memory()) == (group.path == "cuda")
    group.check()
    group.close()
    assert group.memory() == ()


@of_devices
@pytest.mark.skipif(RANKS < 8, reason="tells levels apart by their sizes")
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_collective_bytes_are_those_that_xla_sends_and_receives_between_hosts(dtype):
    layout = dataclasses.replace(cases.PLAIN, hidden=40)
    group = group_of(HOSTS, implementation="portable")

    def exchange(ids, x, topk_weights):
        routing = ma.route(ids, **route_args(group, layout))
        recv = ma.dispatch(x, routing, topk_weights)
        return ma.combine(recv.rows, recv)

    spec, tokens = PartitionSpec(AXES), RANKS * layout.tokens
    mapped = jax.shard_map(exchange, mesh=group.mesh, in_specs=spec, out_specs=spec)
    choices = tokens, layout.top_k
    shapes = (choices, "int32"), ((tokens, 40), dtype), (choices, "float32")
    traced = jax.jit(mapped).trace(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = [  # bytes of ids, tokens, weights and sums
        2 * math.prod(map(int, shape[:-1].split("x"))) * int(bits) // 8
        for line in text.splitlines()
        if "all_to_all" in line
        for shape, bits in re.findall(rf"-> tensor<({HOSTS}x[\dx]+x)[a-z]+(\d+)>", line)
    ]
    _, *moved, sums = found
    said = ma.memory_estimate(
        num_tokens=layout.tokens,
        hidden=40,
        top_k=layout.top_k,
        num_experts=layout.num_experts(RANKS),
        group_size=(HOSTS, RANKS // HOSTS),
        dtype=dtype,
    )
    assert said.collective_bytes == sum(moved) > sums > 0
    assert "collectives: " in str(said)
    flat = ma.memory_estimate(num_tokens=1, hidden=1, top_k=1, num_experts=8, group_size=8)
    assert flat.collective_bytes == 0 and "collectives: " not in str(flat)
