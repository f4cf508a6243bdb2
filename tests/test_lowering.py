"""Test that programs lowered for CUDA have one custom call for each exchange, or use the portable
path."""

import collections
import functools
import logging
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import lowered as lowered_for_cuda
from jax.sharding import Mesh, PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src import api
from jax_moe_a2a._src.exchange import lowering as lowered
from jax_moe_a2a._src.exchange.lowering import DEFAULT_CUDA_GRAPHS
from jax_moe_a2a._src.exchange.record import Options
from jax_moe_a2a._src.exchange.weighted import WEIGHTED_COMBINE
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.plan.plan import NUM_RESULTS, plan_shapes

pytestmark = [
    pytest.mark.usefixtures("devices_pass_for_gpus"),
    pytest.mark.several_devices("it lowers for the devices of a mesh"),
    pytest.mark.skipif(
        not native.has_kernels(), reason="the extension was built without the CUDA kernels"
    ),
    pytest.mark.one_process("it lowers for pretended GPUs of one process"),
]

RANKS = harness.SEVERAL
EXPERTS = 2 * RANKS
TOKENS, TOP_K, HIDDEN = 8, 2, 16
ROWS = harness.worst_case(TOKENS, TOP_K, RANKS, EXPERTS)
COLLECTIVES = ("all_to_all", "all_gather")
OPERATIONS = {
    "route",
    "dispatch",
    "format_dispatch",
    "combine",
    "routed_dispatch",
    "weighted_dispatch",
}
APART = {"route": 1, "dispatch": 1}


def group_of(**options):
    return ma.Group(harness.mesh_of(RANKS), harness.AXIS, **options)


def aval(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct((RANKS * shape[0], *shape[1:]), dtype)


IDS = aval(TOKENS, TOP_K, dtype="int32")
WEIGHTS = aval(TOKENS, TOP_K, dtype="float32")


def lower(fn, *avals):
    spec = PartitionSpec(harness.AXIS)
    mapped = jax.shard_map(fn, mesh=harness.mesh_of(RANKS), in_specs=spec, out_specs=spec)
    return lowered_for_cuda(mapped, *avals)


def calls(text):
    """Count by name the kernel calls and the collectives of the portable path in a program."""
    called = re.findall(r"custom_call @moe_a2a_(\w+?)(?:_in_graph)?\(", text)
    called += re.findall(rf"stablehlo\.({'|'.join(COLLECTIVES)})\b", text)
    return dict(collections.Counter(called))


def is_portable(text, operation):
    found = calls(text)
    return operation not in found and any(name in found for name in COLLECTIVES)


def attribute(text, operation, name):
    line = next(line for line in text.splitlines() if f"@moe_a2a_{operation}" in line)
    return re.search(rf"\b{name} = ([^,}}]+|dense<[^>]*>)", line)[1].strip()


def signature(text, operation):
    """Return (operand types, result types) of the only kernel call of an operation."""
    (line,) = (line for line in text.splitlines() if f"@moe_a2a_{operation}" in line)
    operands, results = line.rsplit(" : ", 1)[1].split(" -> ")
    return re.findall(r"tensor<([^>]*)>", operands), re.findall(r"tensor<([^>]*)>", results)


def exchange(x, ids, weights, group=None):
    recv = ma.dispatch(x, ids, weights, group=group or group_of(), num_experts=EXPERTS)
    return ma.combine(recv.rows, recv)


def exchange_by_routing(x, ids, weights, group=None):
    recv = ma.dispatch(x, route(ids, group), weights)
    return ma.combine(recv.rows, recv)


def route(ids, group=None, num_experts=EXPERTS, capacity=None):
    return ma.route(
        ids,
        group=group or group_of(),
        num_experts=num_experts,
        exchange=ma.Exchange(capacity=capacity),
    )


def test_every_primitive_is_one_custom_call_and_no_collective():
    text = lower(exchange_by_routing, aval(TOKENS, HIDDEN), IDS, WEIGHTS)
    assert calls(text) == {"route": 1, "dispatch": 1, "combine": 1}


def test_few_tokens_are_routed_and_dispatched_by_one_custom_call():
    text = lower(exchange, aval(TOKENS, HIDDEN), IDS, WEIGHTS)
    assert calls(text) == {"routed_dispatch": 1, "combine": 1}
    operands, results = signature(text, "routed_dispatch")
    payload = [f"{TOKENS}x{HIDDEN}xbf16", f"{TOKENS}x{TOP_K}xf32"]
    assert operands == [f"{TOKENS}x{TOP_K}xi32", "i32", *payload]
    shapes = plan_shapes(TOKENS, TOP_K, RANKS, EXPERTS // RANKS, ROWS).values()
    plan = ["x".join([*map(str, shape), "i32"]) for shape in shapes]
    assert results == [*plan, f"{ROWS}x{HIDDEN}xbf16", f"{ROWS}xf32"]
    for name, value in dict(num_experts=EXPERTS, alignment=1, num_choice_arrays=1).items():
        assert attribute(text, "routed_dispatch", name) == f"{value} : i64"
    assert attribute(text, "routed_dispatch", "format") == '""'
    assert attribute(text, "combine", "workspace_kind") == "0 : i64"  # of unsplit exchanges


@pytest.mark.skipif(RANKS < 4, reason="needs two hosts of two")
@pytest.mark.parametrize("capacity", (None, TOKENS), ids=("worst_case", "drops"))
def test_two_levels_are_calls_of_the_kernels_along_each_axis(capacity):
    """Ids and rows are sent between hosts first, and sums in the reverse order."""
    axes, hosts = ("host", harness.AXIS), 2
    mesh = harness.mesh_over(host=hosts, ep=RANKS // hosts)
    group = ma.Group(mesh, axes, two_level=True, implementation="cuda")
    spec = PartitionSpec(axes)

    def fn(x, ids, weights):
        options = dict(group=group, num_experts=EXPERTS, capacity=capacity, alignment=2)
        recv = ma.dispatch(x, ids, weights, **harness.exchanging(options))
        return ma.combine(recv.rows, recv)

    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)
    text = lowered_for_cuda(mapped, aval(TOKENS, HIDDEN), IDS, WEIGHTS)
    assert calls(text) == {"route": 1, "dispatch": 3, "combine": 2}
    sizes = [
        int(re.search(r"\bnum_ranks = (\d+)", line)[1])
        for line in text.splitlines()
        if "custom_call @moe_a2a" in line
    ]
    assert sizes == [2, RANKS // 2, 2, RANKS // 2, RANKS // 2, 2]
    assert attribute(text, "route", "may_drop") == ("false" if capacity is None else "true")
    assert attribute(text, "route", "parts") == f"{hosts} : i64"
    ids = [d.id for d in harness.devices(RANKS)]
    assert group.levels[0].topology == (tuple(np.reshape(ids, (2, -1)).T.ravel()), 2)
    assert group.levels[1].topology == (tuple(ids), RANKS // 2)


@pytest.mark.parametrize(
    "dtype, given", (("bfloat16", "ids"), ("float16", "routing"), ("float32", "routing"))
)
@pytest.mark.parametrize("decode", (False, True))
@pytest.mark.parametrize("scale", (None, "static", "traced", "of_tokens"))
def test_a_format_is_a_part_of_the_custom_call(scale, dtype, decode, given):
    """If rows are not decoded, the ranks receive the tokens' global scales as a choice array."""
    has_token_scales, is_returned = scale in ("traced", "of_tokens"), scale == "of_tokens"
    is_returned = is_returned and not decode
    name = "routed_dispatch" if given == "ids" else "format_dispatch"
    static = ma.NvFp4(global_scale=0.5) if scale else ma.MxFp8()

    def dispatch(x, ids, weights, scale_of_rank):
        fmt = ma.NvFp4(global_scale=scale_of_rank[0]) if scale == "traced" else static
        if scale == "of_tokens":
            fmt = ma.NvFp4(global_scale=jnp.broadcast_to(scale_of_rank, (len(weights),)))
        options = dict(token_format=fmt, decode=decode)
        if given == "ids":
            options |= dict(group=group_of(), num_experts=EXPERTS)
        else:
            ids = route(ids)
        recv = ma.dispatch(x, ids, weights, **harness.exchanging(options))
        return recv.rows, recv.weights, recv.global_scales

    x = {"a": aval(TOKENS, 32, dtype=dtype), "b": aval(TOKENS, 3, 64, dtype=dtype)}
    text = lower(dispatch, x, IDS, WEIGHTS, aval(1, dtype="float32"))
    assert calls(text) == {name: 1} | ({} if given == "ids" else {"route": 1})
    operands, results = signature(text, name)
    mlir = dict(bfloat16="bf16", float16="f16", float32="f32")[dtype]
    leaves = [f"{TOKENS}x32x{mlir}", f"{TOKENS}x3x64x{mlir}", f"{TOKENS}x{TOP_K}xf32"]
    leaves += [f"{TOKENS}x{TOP_K}xui32"] * is_returned + [f"{TOKENS}xf32"] * has_token_scales
    if given == "ids":
        assert operands == [f"{TOKENS}x{TOP_K}xi32", "i32", *leaves]
        results = results[NUM_RESULTS:]
    else:
        assert operands[: len(leaves)] == leaves and len(operands) == len(leaves) + 5
    if decode:
        expected = [f"{ROWS}x32x{mlir}", f"{ROWS}x3x64x{mlir}"]
    elif scale:
        expected = [
            f"{ROWS}x{each}" for each in ("16xui8", "2xf8E4M3FN", "3x32xui8", "3x4xf8E4M3FN")
        ]
    else:
        expected = [
            f"{ROWS}x{each}"
            for each in ("32xf8E4M3FN", "1xf8E8M0FNU", "3x64xf8E4M3FN", "3x2xf8E8M0FNU")
        ]
    assert results == [*expected, f"{ROWS}xf32", *[f"{ROWS}xui32"] * is_returned]
    narrow = [line for line in text.splitlines() if re.search("f8E|f4E", line)]
    computed = [line for line in narrow if "stablehlo" in line and "barrier" not in line]
    assert all("custom_call" in line for line in computed)
    assert attribute(text, name, "format") == ('"NvFp4"' if scale else '"MxFp8"')
    attributes = dict(num_leaves=2, num_choice_arrays=1 + is_returned)
    for key, value in attributes.items():
        assert attribute(text, name, key) == f"{value} : i64"
    global_scale = 5.0e-01 if scale == "static" else 1.0
    assert float(attribute(text, name, "global_scale").split(" ")[0]) == global_scale
    assert attribute(text, name, "decode") == str(decode).lower()
    assert attribute(text, name, "has_token_scales") == str(has_token_scales).lower()
    bits, group = (4, 16) if scale else (8, 32)
    landed = [part for width in (32, 192) for part in (width * bits // 8, width // group)]
    landed += [4 * TOP_K] * (1 + is_returned) + [4] * (decode and has_token_scales)
    zone = sum(native._native.array_bytes(TOKENS, row_bytes) for row_bytes in landed)
    assert attribute(text, name, "half_bytes") == f"{RANKS * zone} : i64"


@pytest.mark.parametrize("in_axes", ((0, 0, 0), (0, None, None), (0, None, 0)))
def test_a_batch_is_encoded_by_the_call(in_axes):
    def dispatch(x, ids, scale):
        fmt = ma.NvFp4(global_scale=scale[0])
        return ma.dispatch(
            x, ids, group=group_of(), num_experts=EXPERTS, exchange=ma.Exchange(token_format=fmt)
        ).rows

    def of_batch(*args):
        args = (a if axis is None else jnp.stack([a, a + 1]) for a, axis in zip(args, in_axes))
        return jax.vmap(dispatch, in_axes)(*args)

    text = lower(of_batch, aval(TOKENS, 32), IDS, aval(1, dtype="float32"))
    assert calls(text) == {"route": 1, "format_dispatch": 1}


def test_a_batch_over_another_mesh_axis_keeps_one_scale_for_each_token():
    mesh = harness.mesh_over(dp=2, ep=RANKS // 2)
    group, spec = ma.Group(mesh, harness.AXIS), PartitionSpec(harness.AXIS)

    def rows(x, ids, scale):
        fmt = ma.NvFp4(global_scale=scale)
        return ma.dispatch(
            x, ids, group=group, num_experts=EXPERTS, exchange=ma.Exchange(token_format=fmt)
        ).rows.values

    in_specs = (spec, spec, PartitionSpec())
    mapped = jax.shard_map(rows, mesh=mesh, in_specs=in_specs, out_specs=spec)
    batched = jax.vmap(mapped, in_axes=(0, None, None), spmd_axis_name="dp")
    x = jax.ShapeDtypeStruct((4, RANKS * TOKENS, 32), "bfloat16")
    scale = jax.ShapeDtypeStruct((), "float32")
    text = lowered_for_cuda(batched, x, IDS, scale)
    tokens = 2 * TOKENS  # the group has half as many ranks as devices
    operands, _ = signature(text, "format_dispatch")
    assert operands[:2] == [f"{tokens}x2x32xbf16", f"{tokens}xf32"]


@pytest.mark.parametrize(
    "fmt, arrives",
    ((None, True), (ma.BlockwiseFp8(), True), (ma.MxFp8(), False)),
)
def test_training_in_fp8_reads_the_rows_that_arrive(hopper, fmt, arrives):
    """If the dispatch returns rows in a different format, a third call quantizes the rows."""

    def layer(x, ids, weights, *arrays):
        choices, experts = ma.RouterChoices(ids, weights), ma.Experts(*arrays).in_fp8()
        options = dict(group=group_of(), num_experts=EXPERTS)
        return ma.moe_mlp(x, choices, experts, exchange=ma.Exchange(token_format=fmt), **options)

    def gradients(x, ids, weights, *arrays):
        y, transpose = jax.vjp(lambda x, *arrays: layer(x, ids, weights, *arrays), x, *arrays)
        return transpose(y)

    arrays = aval(EXPERTS // RANKS, 128, 2, 256), aval(EXPERTS // RANKS, 256, 128)
    args = aval(TOKENS, 128), IDS, WEIGHTS, *arrays
    assert calls(lower(gradients, *args))["act_encode"] == 2 + (not arrives)
    encoded = [f"{ROWS}x128xf8E4M3FN", f"{ROWS}x1xf32"] * arrives
    for fn, name in ((gradients, "format_dispatch"), (layer, "routed_dispatch")):
        text = lower(fn, *args)
        assert attribute(text, name, "decode") == "true"
        assert attribute(text, name, "keeps_encoded") == str(arrives).lower()
        results = signature(text, name)[1][NUM_RESULTS * (fn is layer) :]
        assert results == [f"{ROWS}x128xbf16", *encoded, f"{ROWS}xf32"]


def combine_adding(y, ids, addend, weights=None, wire_dtype=None):
    return ma.combine(y, route(ids), weights=weights, wire_dtype=wire_dtype, add=addend)


@pytest.mark.parametrize("wire_dtype", (None, "float32", ma.MxFp8()))
@pytest.mark.parametrize("weighted", (False, True), ids=("sum", "weighted"))
def test_an_addend_is_the_last_operand_before_the_routing(weighted, wire_dtype):
    args = [aval(ROWS, 32), IDS, aval(TOKENS, 32)]
    args += [aval(ROWS, dtype="float32")] * weighted
    text = lower(functools.partial(combine_adding, wire_dtype=wire_dtype), *args)
    assert calls(text) == {"route": 1, "combine": 1}
    assert attribute(text, "combine", "num_addends") == "1 : i64"
    assert attribute(text, "combine", "num_pairs") == f"{int(weighted)} : i64"
    operands, results = signature(text, "combine")
    assert results == [f"{TOKENS}x32xbf16"]
    weights = [f"{ROWS}xf32"] * weighted
    assert operands[: 2 + weighted] == [f"{ROWS}x32xbf16", *weights, f"{TOKENS}x32xbf16"]


def test_each_call_of_a_combine_has_the_addends_of_its_dtype():
    shapes = [(HIDDEN, "bfloat16"), (4, "float32"), (3, "bfloat16")]
    y = [aval(ROWS, n, dtype=dtype) for n, dtype in shapes]
    add = [aval(TOKENS, n, dtype=dtype) for n, dtype in shapes]
    text = lower(combine_adding, y, IDS, add)
    assert calls(text) == {"route": 1, "combine": 2}
    lines = [line for line in text.splitlines() if "@moe_a2a_combine" in line]
    found = [re.findall(r"tensor<([^>]*)>", line.rsplit(" : ", 1)[1]) for line in lines]
    assert [re.search(r"num_addends = (\d)", line)[1] for line in lines] == ["2", "1"]
    assert found[0][2:4] == [f"{TOKENS}x{HIDDEN}xbf16", f"{TOKENS}x3xbf16"]
    assert found[1][1] == f"{TOKENS}x4xf32"


def test_weights_return_with_the_sums_of_the_first_dtype_only():
    def gradient(x, ids, weights, ct):
        def rows_of(x, weights):
            recv = ma.dispatch(x, ids, weights, group=group_of(), num_experts=EXPERTS)
            return recv.rows, recv.weights

        return jax.vjp(rows_of, x, weights)[1](ct)

    x, ct = ([aval(n, HIDDEN), aval(n, 4, dtype="float32")] for n in (TOKENS, ROWS))
    text = lower(gradient, x, IDS, WEIGHTS, (ct, aval(ROWS, dtype="float32")))
    lines = [line for line in text.splitlines() if "@moe_a2a_combine" in line]
    assert [re.search(r"num_choice_arrays = (\d)", line)[1] for line in lines] == ["1", "0"]


def gradients_of_mode(x, ids, weights, ct, **modes):
    def there_and_back(x, weights):
        recv = ma.dispatch(
            x, ids, weights, group=group_of(), num_experts=EXPERTS, **harness.exchanging(modes)
        )
        return ma.combine(recv.rows, recv)

    out, vjp = jax.vjp(there_and_back, x, weights)
    return out, vjp(ct)


def test_replicated_tokens_are_calls_with_single_rank_domains_and_no_zone():
    x = aval(TOKENS, HIDDEN)
    text = lower(functools.partial(gradients_of_mode, replicated=True), x, IDS, WEIGHTS, x)
    # The rows do not leave their rank, so no kernel multiplies them by weights.
    assert calls(text) == {"route": 1, "dispatch": 1, "combine": 2}
    assert attribute(text, "route", "num_experts") == f"{EXPERTS // RANKS} : i64"
    devices = re.findall(r" devices = dense<[^>]*> : tensor<(\d+)xi64>", text)
    assert set(devices) == {str(RANKS)}
    for operation in calls(text):
        assert attribute(text, operation, "num_ranks") == "1 : i64"
        assert attribute(text, operation, "half_bytes") == "0 : i64"


def test_xla_quantizes_the_tokens_of_a_single_rank():
    """A group of one rank has no receive buffers, which a kernel needs to quantize."""
    x, ids = aval(TOKENS, 64), aval(TOKENS, TOP_K, dtype="int32")

    def rows(x, ids, **modes):
        options = dict(group=group_of(), num_experts=EXPERTS, token_format=ma.MxFp8(), decode=True)
        return ma.dispatch(x, ids, **harness.exchanging(options, modes)).rows

    assert calls(lower(rows, x, ids)) == {"routed_dispatch": 1}
    alone = calls(lower(functools.partial(rows, replicated=True), x, ids))
    assert alone in ({"route": 1, "dispatch": 1}, {"routed_dispatch": 1})


def split_exchange(x, ids, weights, group=None, beside=jnp.sin):
    inflight = ma.dispatch_start(x, ids, weights, group=group or group_of(), num_experts=EXPERTS)
    inflight, shared = ma.overlap(inflight, beside, x)
    recv = ma.dispatch_done(inflight)
    y = jnp.tanh(recv.rows) * recv.weights[:, None].astype(recv.rows.dtype)
    inflight, shared = ma.overlap(ma.combine_start(y, recv.routing), beside, shared)
    return ma.combine_done(inflight) + shared


def split_gradients(x, ids, weights, ct):
    out, vjp = jax.vjp(lambda x, weights: split_exchange(x, ids, weights), x, weights)
    return out, vjp(ct)


def halves(text):
    """Return the lines of a program that call a start or a done."""
    return [line for line in text.splitlines() if re.search(r"@moe_a2a_\w+_(start|done)\(", line)]


def call_results(text):
    found = re.findall(r"(%\d+)(?::(\d+))? = stablehlo.custom_call @moe_a2a_", text)
    return [
        f"{name}#{i}" if number else name for name, number in found for i in range(int(number or 1))
    ]


def test_every_half_is_one_custom_call_forward_and_backward():
    x = aval(TOKENS, HIDDEN)
    text = lower(split_gradients, x, IDS, WEIGHTS, x)
    twice = ("dispatch_start", "dispatch_done", "combine_start", "combine_done")
    assert calls(text) == {"route": 1, **{name: 2 for name in twice}}
    for line in halves(text):
        assert "has_side_effect = true" in line and "workspace_kind = 1 : i64" in line, line
        assert f"num_sms = {native.tuning('SPLIT_NUM_SMS')} : i64" in line, line
    for operation in ("dispatch", "combine"):
        for name in ("half_bytes", "num_sms", "num_choice_arrays"):
            values = [attribute(text, f"{operation}_{half}", name) for half in ("start", "done")]
            assert values[0] == values[1], (operation, name)


def test_a_constant_enters_one_barrier_for_a_start_and_its_done():
    """Without the barrier, XLA would give each call a separate copy of the constant."""

    def ones(x, ids):
        recv = ma.dispatch_done(
            ma.dispatch_start(jnp.ones_like(x), ids, group=group_of(), num_experts=EXPERTS)
        )
        started = ma.combine_start(jnp.full_like(recv.rows, 2), recv)
        return recv.rows, ma.combine_done(started)

    text = lower(ones, aval(TOKENS, HIDDEN), IDS)
    constants = re.findall(r"(%\w+) = stablehlo.broadcast_in_dim .* -> tensor<\d+x\d+xbf16>", text)
    assert len(constants) == 2
    in_order = re.findall(r"(%\d+) = stablehlo.custom_call @LayoutConstraint\((%\w+)\)", text)
    laid_out = {given: found for found, given in in_order}
    for constant in constants:
        read = laid_out.get(constant, constant)
        assert len(re.findall(rf"optimization_barrier.*{read}[, ].*:", text)) == 1


def test_a_done_reads_what_its_start_reads_and_returns_what_the_start_returned():
    """A done reads the operands and then the results of its start, and returns these results."""
    text = lower(split_exchange, aval(TOKENS, HIDDEN), IDS, WEIGHTS)
    for operation in ("dispatch", "combine"):
        read, given = signature(text, f"{operation}_start(")
        operands, results = signature(text, f"{operation}_done(")
        assert operands == read + given and results == given
        (line,) = (line for line in halves(text) if f"{operation}_done(" in line)
        aliased = re.findall(r"operand_index = (\d+)", line)
        assert aliased == [str(len(read) + i) for i in range(len(given))]


def test_nothing_is_fused_with_a_half():
    """A fusion would copy the array in flight, and the done would not find it."""
    text = lower(split_gradients, x := aval(TOKENS, HIDDEN), IDS, WEIGHTS, x)
    (body,) = (part for part in text.split("func.func") if "_start(" in part)
    barriers = set(re.findall(r"(%\w+)(?::\d+)? = stablehlo.optimization_barrier", body))
    for line in halves(body):
        result, operands = re.match(r" *(%\w+)(?::\d+)? = [^(]*\(([^)]*)\)", line).groups()
        assert {operand.split("#")[0] for operand in operands.split(", ")} <= barriers, line
        users = [user for user in body.splitlines() if re.search(rf"= .*{result}\b", user)]
        assert users and all("optimization_barrier" in user for user in users), line


def test_the_budget_of_a_group_is_that_of_its_split_exchanges_too():
    group = group_of(num_sms={"combine": 20})
    text = lower(functools.partial(split_exchange, group=group), aval(TOKENS, HIDDEN), IDS, WEIGHTS)
    assert attribute(text, "combine_start", "num_sms") == "20 : i64"
    assert attribute(text, "dispatch_start", "num_sms") == f"{native.tuning('SPLIT_NUM_SMS')} : i64"


def test_halves_of_portable_exchanges_are_portable():
    """The kernels do not support sums in float64."""

    def combine(y, ids):
        return ma.combine_done(ma.combine_start(y, route(ids)))

    with jax.enable_x64(True):
        text = lower(combine, aval(ROWS, HIDDEN, dtype="float64"), IDS)
    assert calls(text) == {"route": 1, "all_to_all": 1}
    mixed = [aval(ROWS, HIDDEN), aval(ROWS, 3), aval(ROWS, HIDDEN, dtype="float32")]
    assert calls(lower(combine, mixed, IDS)) == {"route": 1, "combine_start": 2, "combine_done": 2}


def cotangents(y, weights, ct, ids, of=("rows", "weights")):
    routing = route(ids)

    def combine(values):
        given = dict(rows=y, weights=weights) | values
        return ma.combine(given["rows"], routing, weights=given["weights"])

    return jax.vjp(combine, {name: dict(rows=y, weights=weights)[name] for name in of})[1](ct)[0]


def cotangent_avals(dtype="bfloat16", hidden=HIDDEN, weights="float32"):
    y, ct = aval(ROWS, hidden, dtype=dtype), aval(TOKENS, hidden, dtype=dtype)
    return y, aval(ROWS, dtype=weights), ct, IDS


@pytest.mark.parametrize("of", (("rows", "weights"), ("rows",), ("weights",)), ids="_and_".join)
def test_a_weighted_dispatch_has_only_arrays_that_gradients_need(of):
    """The gradient of the rows needs the weights, and the gradient of the weights needs the
    rows."""
    text = lower(functools.partial(cotangents, of=of), *cotangent_avals())
    assert calls(text) == {"route": 1, "weighted_dispatch": 1}
    row, number, token = f"{ROWS}x{HIDDEN}xbf16", f"{ROWS}xf32", f"{TOKENS}x{HIDDEN}xbf16"
    operands, results = signature(text, "weighted_dispatch")
    read = [f"{TOKENS}x{RANKS}xi32", f"{RANKS}x{TOKENS}xi32", f"{TOKENS}x{TOP_K}xi32"]
    read += [f"{RANKS}x{TOKENS}x{TOP_K}xi32", f"{ROWS}xi32"]
    assert operands == [token, *[row] * ("weights" in of), *[number] * ("rows" in of), *read]
    assert results == [*[row] * ("rows" in of), *[number] * ("weights" in of)]
    assert attribute(text, "weighted_dispatch", "num_rows") == f"{int('weights' in of)} : i64"
    assert attribute(text, "weighted_dispatch", "num_weights") == f"{int('rows' in of)} : i64"
    zone = native._native.array_bytes(TOKENS, 2 * HIDDEN)
    assert attribute(text, "weighted_dispatch", "half_bytes") == f"{RANKS * zone} : i64"


@pytest.mark.parametrize(
    "dtype, hidden, others", (("bfloat16", 8, 4), ("float16", 24, 9), ("float32", 4, 5))
)
def test_rows_of_whole_vectors_are_weighed_by_the_call_and_others_after_it(dtype, hidden, others):
    text = lower(cotangents, *cotangent_avals(dtype, hidden))
    assert calls(text) == {"route": 1, "weighted_dispatch": 1}
    text = lower(cotangents, *cotangent_avals(dtype, others))
    assert calls(text) == {"route": 1, "dispatch": 1}


@pytest.mark.parametrize(
    "ids_axis, expected",
    ((0, {"route": 1, "weighted_dispatch": 1}), (None, {"route": 1, "dispatch": 1})),
    ids=("own_routings", "shared_routing"),
)
def test_a_batch_is_weighed_by_the_call_where_it_folds_into_one_routing(ids_axis, expected):
    def batched(*args):
        return jax.vmap(cotangents, in_axes=(0, 0, 0, ids_axis))(
            *(jnp.stack([v] * 3) for v in args[:3]),
            jnp.stack([args[3]] * 3) if ids_axis == 0 else args[3],
        )

    found = calls(lower(batched, *cotangent_avals()))
    assert found == expected


@pytest.mark.parametrize("in_axes", ((0, 0, 0), (0, None, None), (0, None, 0), (0, 0, None)))
def test_a_batch_is_one_custom_call_of_each_kind(in_axes):
    batch = 3

    def batched(x, ids, weights):
        return jax.vmap(exchange, in_axes=in_axes, out_axes=1)(
            *(
                jnp.stack([v] * batch) if axis == 0 else v
                for v, axis in zip((x, ids, weights), in_axes)
            )
        )

    text = lower(batched, aval(TOKENS, HIDDEN), IDS, WEIGHTS)
    assert calls(text) == {"route": 1, "dispatch": 1, "combine": 1}


@pytest.mark.parametrize("tokens", (TOKENS, api.FUSED_MAX_TOKENS + 1), ids=("few", "many"))
def test_a_call_for_the_only_rank_of_a_vmap_has_no_axis_of_ranks(tokens):
    group = ma.Group(axis_name=harness.AXIS, size=1, implementation="cuda")

    def layer(x, ids):
        recv = ma.dispatch(x, ids, group=group, num_experts=EXPERTS)
        split = ma.dispatch_done(ma.dispatch_start(x, recv.routing))
        return ma.combine(recv.rows + split.rows, recv)

    avals = [
        jax.ShapeDtypeStruct((1, tokens, HIDDEN), "bfloat16"),
        jax.ShapeDtypeStruct((1, tokens, TOP_K), "int32"),
    ]
    text = lowered_for_cuda(jax.vmap(layer, axis_name=harness.AXIS), *avals)
    x, ids = f"{tokens}x{HIDDEN}xbf16", f"{tokens}x{TOP_K}xi32"
    if tokens == TOKENS:
        assert signature(text, "routed_dispatch")[0] == [ids, "i32", x]
    else:
        assert signature(text, "route")[0] == [ids, "i32"]
        assert signature(text, "dispatch_in_graph")[0][0] == x
    assert signature(text, "dispatch_start")[0][0] == signature(text, "dispatch_done")[0][0] == x
    assert signature(text, "combine")[1] == [x]


def refused(*avals, of=None, **wire):
    """Return a function of (x, ids, group) that the kernels do not support, and the types of x and
    ids."""
    of = of or (lambda x, ids, group: ma.combine(x, route(ids, group), **wire))
    return of, avals


def rows_of(top_k=TOP_K, columns=32, dtype="bfloat16"):
    rows = harness.worst_case(TOKENS, top_k, RANKS, EXPERTS)
    return aval(rows, columns, dtype=dtype), aval(TOKENS, top_k, dtype="int32")


def dispatched(x, ids, group):
    return ma.dispatch(x, route(ids, group)).rows


def routed_to_many(x, ids, group):
    return route(ids, group, num_experts=RANKS * (native.limit("MAX_LOCAL_EXPERTS") + 1)).row_token


def tangent_of_sums(y, ids, group):
    sums = lambda y, w: ma.combine(y, route(ids, group), weights=w, wire_dtype=ma.MxFp8())
    primals = y, jnp.ones(len(y), jnp.float32)
    return jax.jvp(sums, primals, primals)[1]


# Each case is (primitive, program with it, types of its arguments, reason why no kernel supports
# it).
REFUSED = {
    "packed": ("dispatch", *refused(aval(TOKENS, 4, dtype="int4"), IDS, of=dispatched), "S4["),
    "arrays": ("dispatch", *refused([aval(TOKENS, 4)] * 17, IDS, of=dispatched), "at most 16"),
    "experts": ("route", *refused(aval(TOKENS, 4), IDS, of=routed_to_many), "got 1 batches of"),
    "sums": ("combine", *refused(*rows_of(dtype="float64")), "; got F64["),
    "wire": ("combine", *refused(*rows_of(), wire_dtype="float16"), "got 'F16' for rows BF16["),
    "pairs": ("weighted_combine", *refused(*rows_of(), of=tangent_of_sums), "at most one pair"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_has_one_reason_in_the_log_and_in_the_error(case, caplog):
    operation, of, avals, expected = REFUSED[case]
    with caplog.at_level(logging.INFO, logger="jax_moe_a2a"), jax.enable_x64(True):
        text = lower(functools.partial(of, group=group_of()), *avals)
    assert is_portable(text, operation)
    refusal = f"moe_a2a_{operation}: portable path, because "
    (why,) = {m.removeprefix(refusal) for m in caplog.messages if m.startswith(refusal)}
    assert expected in why
    with (
        jax.enable_x64(True),
        pytest.raises(ValueError, match=f"moe_a2a_{operation} that the kernels") as error,
    ):
        lower(functools.partial(of, group=group_of(implementation="cuda")), *avals)
    assert f"({why})" in str(error.value)


WIRE_FORMATS = {"blockwise": ma.BlockwiseFp8(), "mx": ma.MxFp8(), "nv": ma.NvFp4(global_scale=0.5)}


@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_sums_in_a_token_format_are_quantized_by_the_custom_call(name, dtype):
    fmt, hidden = WIRE_FORMATS[name], 3 * 128
    y, weights = aval(ROWS, hidden, dtype=dtype), aval(ROWS, dtype="float32")

    def weighted(y, weights, ids):
        return ma.combine(y, route(ids), weights=weights, wire_dtype=fmt)

    alone = lower(functools.partial(combine_alone, wire_dtype=fmt), y, IDS)
    for text in (alone, lower(weighted, y, weights, IDS)):
        assert calls(text) == {"route": 1, "combine": 1}
        assert attribute(text, "combine", "wire") == f'"{type(fmt).__name__}"'
        assert attribute(text, "combine", "num_sms") == f"{native.tuning('FORMAT_NUM_SMS')} : i64"
        given = float(attribute(text, "combine", "global_scale").split(" ")[0])
        assert given == getattr(fmt, "global_scale", 1)
        values, scales = (
            part.size * part.dtype.itemsize
            for part in jax.eval_shape(fmt.encode, jax.ShapeDtypeStruct((1, hidden), dtype))
        )
        zone = native._native.array_bytes(TOKENS, values + -(-scales // 16) * 16)
        assert attribute(text, "combine", "half_bytes") == f"{RANKS * zone} : i64"
        assert not re.search("f8E|f4E", text)


def test_the_halves_of_a_combine_in_a_token_format_are_calls_too():
    def combine(y, ids):
        return ma.combine_done(ma.combine_start(y, route(ids), wire_dtype=ma.BlockwiseFp8()))

    text = lower(combine, aval(ROWS, 128), IDS)
    assert calls(text) == {"route": 1, "combine_start": 1, "combine_done": 1}
    assert attribute(text, "combine_start", "wire") == '"BlockwiseFp8"'
    assert attribute(text, "combine_start", "num_sms") == f"{native.tuning('SPLIT_NUM_SMS')} : i64"


@pytest.mark.parametrize("top_k", (1, 32))
def test_sums_of_all_choices_are_in_a_format_for_any_number_of_ranks(top_k):
    combine = functools.partial(combine_alone, wire_dtype=ma.MxFp8())
    assert calls(lower(combine, *rows_of(top_k))) == {"route": 1, "combine": 1}


def combine_alone(y, ids, wire_dtype=None):
    return ma.combine(y, route(ids), wire_dtype=wire_dtype)


def dispatch_alone(x, ids):
    return ma.dispatch(x, ids, group=group_of(), num_experts=EXPERTS).rows


@pytest.mark.parametrize("dtype", ("bool", "int8", "uint16", "float8_e5m2", "complex64"))
def test_dtypes_of_whole_bytes_move_through_the_kernel(dtype):
    text = lower(dispatch_alone, aval(TOKENS, HIDDEN, dtype=dtype), IDS)
    assert calls(text) == {"routed_dispatch": 1}


def test_as_many_pairs_as_a_kernel_takes_are_one_custom_call_and_more_are_none():
    """In higher derivatives, a combine has several pairs (rows, weights)."""
    most = native.limit("MAX_PAIRS")

    def combine_pairs(rows, weights, ids):
        routing = route(ids)
        (out,) = WEIGHTED_COMBINE.bind(
            [*rows, *weights],
            routing.arrays,
            num_leaves=len(rows),
            num_choice_arrays=0,
            options=Options(),
            group=routing.group,
        )
        return out

    rows = [aval(ROWS, HIDDEN)] * (most + 1)
    weights = [aval(ROWS, dtype="float32")] * (most + 1)
    text = lower(combine_pairs, rows[:most], weights[:most], IDS)
    assert calls(text) == {"route": 1, "combine": 1}
    assert int(attribute(text, "combine", "num_pairs").split()[0]) == most
    assert is_portable(lower(combine_pairs, rows, weights, IDS), "combine")


@pytest.mark.parametrize("tokens, capacity", ((0, 4), (TOKENS, 0)))
def test_a_call_that_moves_nothing_is_no_custom_call(tokens, capacity):
    def exchange_nothing(x, ids):
        recv = ma.dispatch(
            x, ids, group=group_of(), num_experts=EXPERTS, exchange=ma.Exchange(capacity=capacity)
        )
        return ma.combine(recv.rows, recv)

    x, ids = aval(tokens, HIDDEN), aval(tokens, TOP_K, dtype="int32")
    assert not OPERATIONS & set(calls(lower(exchange_nothing, x, ids)))


def encoded_by_routing(x, ids):
    return ma.dispatch(x, route(ids), exchange=ma.Exchange(token_format=ma.MxFp8())).rows


def encoded_by_ids(x, ids):
    options = dict(group=group_of(), num_experts=EXPERTS, token_format=ma.MxFp8())
    return ma.dispatch(x, ids, **harness.exchanging(options)).rows


def batch_of_routes(ids):
    return jax.vmap(lambda ids: route(ids, capacity=8).row_token)(ids)


def route_to(local, capacity=None):
    return lambda ids: route(ids, num_experts=RANKS * local, capacity=capacity).row_token


def ids_of(*shape):
    return aval(*shape, dtype="int32")


# Each case is (limit, how much of it a step needs, program of n steps with its arguments, calls of
# the largest program within the limit, operation that is portable if the program has a step more).
LIMITS = {
    "arrays": ("MAX_ARRAYS", 1, lambda n: (dispatch_alone, [aval(TOKENS, 4)] * n, IDS),
               {"routed_dispatch": 1}, "dispatch"),
    "arrays of sums": ("MAX_ARRAYS", 1, lambda n: (combine_alone, [aval(ROWS, 4)] * n, IDS),
                       {"route": 1, "combine": 1}, "combine"),
    # A leaf is sent as two arrays, values and scales.
    "parts of a format": ("MAX_ARRAYS", 2, lambda n: (encoded_by_ids, [aval(TOKENS, 32)] * n, IDS),
                          {"routed_dispatch": 1}, "routed_dispatch"),
    "parts by a routing": (
        "MAX_ARRAYS", 2, lambda n: (encoded_by_routing, [aval(TOKENS, 32)] * n, IDS),
        {"route": 1, "format_dispatch": 1}, "format_dispatch"),
    # A batch element of one token has a separate flag.
    "flags": ("MAX_CHUNKS", 1, lambda n: (batch_of_routes, ids_of(n, 1, TOP_K)),
              {"route": 1}, "route"),
    "local experts": ("MAX_LOCAL_EXPERTS", 1, lambda n: (route_to(n), IDS), {"route": 1}, "route"),
    # With a capacity, the kernel counts the choices of each index k separately.
    "counts": ("MAX_ROUTE_COUNTS", TOP_K, lambda n: (route_to(n, 8), IDS), {"route": 1}, "route"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_as_much_as_the_kernels_take_is_a_custom_call_and_more_is_none(name):
    limit, of_step, program, expected, operation = LIMITS[name]
    most = native.limit(limit) // of_step
    assert calls(lower(*program(most))) == expected
    assert is_portable(lower(*program(most + 1)), operation)


def dispatch_to(local):
    options = dict(num_experts=RANKS * local, exchange=ma.Exchange(capacity=8))
    return lambda x, ids: ma.dispatch(x, ids, group=group_of(), **options).rows


def dispatch_of(tokens, top_k=TOP_K):
    return dispatch_alone, aval(tokens, HIDDEN), ids_of(tokens, top_k)


def most_choices(most_tokens):
    return native.limit("MAX_FUSED_CHOICES") // (RANKS * most_tokens)


# Each case has a limit of launches that route and dispatch, and a program of size n with arguments.
FUSED = {
    "tokens": (lambda most_tokens: most_tokens, lambda n, _: dispatch_of(n)),
    "choices": (most_choices, lambda n, most_tokens: dispatch_of(most_tokens, n)),
    "experts": (
        lambda _: native.limit("MAX_FUSED_EXPERTS"),
        lambda n, _: (dispatch_to(n), aval(TOKENS, HIDDEN), IDS),
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_as_much_as_one_launch_takes_is_one_custom_call_and_more_is_two(name, monkeypatch):
    most_tokens = native.limit("MAX_FUSED_TOKENS")
    assert api.FUSED_MAX_TOKENS <= most_tokens
    monkeypatch.setattr(api, "FUSED_MAX_TOKENS", most_tokens + 1)
    most_of, program = FUSED[name]
    most = most_of(most_tokens)
    for n, expected in ((most, {"routed_dispatch": 1}), (most + 1, APART)):
        assert calls(lower(*program(n, most_tokens))) == expected


@pytest.mark.parametrize("on_failure", ("raise", "nan"))
def test_a_call_carries_the_group_and_its_limits(on_failure):
    group = group_of(num_sms=7, timeout=2.5, on_failure=on_failure)
    avals = aval(TOKENS, HIDDEN), IDS, WEIGHTS
    text = lower(functools.partial(exchange_by_routing, group=group), *avals)
    text += lower(functools.partial(exchange, group=group), *avals)
    for operation in ("route", "dispatch", "combine", "routed_dispatch"):
        assert attribute(text, operation, "num_sms") == "7 : i64"
        assert attribute(text, operation, "timeout_ns") == "2500000000 : i64"
        assert attribute(text, operation, "first_timeout_ns") == "600000000000 : i64"
        assert attribute(text, operation, "num_ranks") == f"{RANKS} : i64"
        is_raised = attribute(text, operation, "raise_failures")
        assert is_raised == str(on_failure == "raise").lower()


@pytest.mark.parametrize(
    ("timeout", "first_timeout", "seconds"), ((2.0, 7.0, 7), (9.0, 7.0, 9), (900.0, None, 900))
)
def test_the_first_wait_for_a_peer_is_no_shorter_than_others(timeout, first_timeout, seconds):
    given = {} if first_timeout is None else dict(first_timeout=first_timeout)
    group = group_of(timeout=timeout, **given)
    text = lower(functools.partial(exchange, group=group), aval(TOKENS, HIDDEN), IDS, WEIGHTS)
    assert attribute(text, "combine", "timeout_ns") == f"{int(timeout)}000000000 : i64"
    assert attribute(text, "combine", "first_timeout_ns") == f"{seconds}000000000 : i64"


def test_a_program_has_the_tuning_of_the_time_when_it_is_lowered(monkeypatch):
    program = functools.partial(exchange_by_routing, group=group_of())
    avals = aval(TOKENS, HIDDEN), IDS, WEIGHTS
    before = lower(program, *avals)
    monkeypatch.setitem(native.TUNING, "FEW_NUM_SMS", 77)
    monkeypatch.setitem(native.TUNING, "ROUTE_LEAST_TOKENS", 32)
    after = lower(program, *avals)
    assert attribute(before, "dispatch", "num_sms") != attribute(after, "dispatch", "num_sms")
    assert attribute(after, "combine", "num_sms") == "77 : i64"
    assert attribute(after, "route", "tokens_per_chunk") == "32 : i64"


def test_the_budget_of_sms_may_differ_by_operation():
    group = group_of(num_sms={"dispatch": 5, "combine": 9})
    avals = aval(TOKENS, HIDDEN), IDS, WEIGHTS
    text = lower(functools.partial(exchange_by_routing, group=group), *avals)
    assert attribute(text, "dispatch", "num_sms") == "5 : i64"
    assert attribute(text, "combine", "num_sms") == "9 : i64"
    default = lowered.default_num_sms(TOKENS, 0)
    assert attribute(text, "route", "num_sms") == f"{default} : i64"


@pytest.mark.parametrize(
    ("hidden", "expected"),
    ((1 << 8, native.tuning("FEW_NUM_SMS")), (1 << 16, native.tuning("DEFAULT_NUM_SMS"))),
)
def test_the_default_of_sms_depends_on_the_bytes_of_a_call(hidden, expected):
    tokens = native.tuning("FEW_TOKENS") + 1
    ids, weights = (aval(tokens, TOP_K, dtype=dtype) for dtype in ("int32", "float32"))
    program = functools.partial(exchange_by_routing, group=group_of())
    text = lower(program, aval(tokens, hidden), ids, weights)
    for operation in ("dispatch", "combine"):
        assert attribute(text, operation, "num_sms") == f"{expected} : i64"


@pytest.mark.parametrize(
    ("cuda_graphs", "in_graph"), ((True, True), (False, False), (None, None)), ids=str
)
def test_calls_may_be_captured_in_graphs_unless_the_group_forbids_it(cuda_graphs, in_graph):
    group = group_of(cuda_graphs=cuda_graphs)
    text = lower(functools.partial(exchange, group=group), aval(TOKENS, HIDDEN), IDS, WEIGHTS)
    targets = re.findall(r"custom_call @(moe_a2a_\w+)\(", text)
    expected = DEFAULT_CUDA_GRAPHS if in_graph is None else in_graph
    assert targets and all(target.endswith("_in_graph") == expected for target in targets)


def test_devices_are_told_domain_after_domain():
    devices = harness.mesh_of(RANKS).devices.reshape(2, -1)
    for each, domains in (
        (Mesh(devices, ("data", harness.AXIS)), devices),
        (Mesh(devices, (harness.AXIS, "data")), devices.T),
    ):
        ids, num_ranks, *_ = ma.Group(each, harness.AXIS).topology
        assert num_ranks == domains.shape[1]
        assert list(ids) == [device.id for device in domains.flat]


def test_a_barrier_follows_every_call():
    """Without a barrier, XLA repeats a call whose result a loop both uses and stores in a larger
    array."""
    x = aval(TOKENS, HIDDEN)

    def exchange(x, ids, weights):
        recv = ma.dispatch(x, ids, weights, group=group_of(), num_experts=EXPERTS)
        return recv.rows, ma.combine(recv.rows, recv)

    text = lower(exchange, x, IDS, WEIGHTS)
    assert calls(text) == {"routed_dispatch": 1, "combine": 1}
    for result in call_results(text):
        users = [line for line in text.splitlines() if re.search(rf"= .*{result}\b", line)]
        assert len(users) == 1 and f"optimization_barrier {result} :" in users[0]
    assert text.count("optimization_barrier") == len(call_results(text))
