"""A combine next to the product of its rows: which programs have the common call, and that neither
results nor gradients change by a bit."""

import functools
import logging
import re

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from jax.sharding import Mesh, PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.grouped import lowering as grouped

RANKS = harness.SEVERAL
CALL = "moe_a2a_dot_combine"
SWIGLU = ma.gated(jax.nn.silu)
INTERMEDIATE = 64
WORST = cases.Layout("worst", tokens=160, top_k=3, local_experts=2, hidden=1024)
DROPS = cases.Layout("drops", tokens=160, top_k=3, local_experts=2, capacity=128, hidden=2048)


def layer(x, topk_weights, w_in, w_out, ids, *, group, layout):
    return ma.moe_mlp(
        x, ids, topk_weights, w_in, w_out, activation=SWIGLU, **layout.route_args(group)
    )


def by_hand(x, topk_weights, w_in, w_out, ids, *, group, layout):
    """Compute a layer whose program also reads the second product, after the combine."""
    recv = ma.dispatch(x, ids, topk_weights, **layout.route_args(group))
    dot = functools.partial(ma.grouped_dot, group_sizes=recv.group_sizes)
    h = SWIGLU(dot(recv.rows, w_in)) * recv.weights[:, None].astype(x.dtype)
    y = dot(h, w_out)
    return ma.combine(y, recv.routing) + y.sum().astype(x.dtype)


def weighted(x, topk_weights, w_in, w_out, ids, *, group, layout):
    """Compute a layer whose combine applies the router weights and adds the tokens."""
    recv = ma.dispatch(x, ids, topk_weights, **layout.route_args(group))
    dot = functools.partial(ma.grouped_dot, group_sizes=recv.group_sizes)
    return ma.combine(dot(SWIGLU(dot(recv.rows, w_in)), w_out), recv, add=x)


def arguments(layout, routing, dtype, seed=0):
    rng = np.random.default_rng(seed)
    ids = cases.Case(layout, routing).ids(RANKS, seed)
    per_rank = RANKS, layout.local_experts
    shapes = (
        (RANKS, layout.tokens, layout.hidden),
        (RANKS, layout.tokens, layout.top_k),
        (*per_rank, layout.hidden, 2 * INTERMEDIATE),
        (*per_rank, INTERMEDIATE, layout.hidden),
    )
    x, weights, *experts = (cases.normal(rng, shape, "float32") for shape in shapes)
    x, w_in, w_out = (jnp.asarray(0.2 * a, dtype) for a in (x, *experts))
    return (x, jnp.asarray(weights), w_in, w_out), ids


@functools.cache
def program(fn, layout, dtype, num_sms, graphs=None):
    """Return a compiled function (floats, ids) -> value and gradients of all floats, and the number
    of its calls."""
    group = harness.group_of(RANKS, num_sms={"dot_combine": num_sms}, cuda_graphs=graphs)
    of_ranks = small_layer.on_all_ranks(
        functools.partial(fn, group=group, layout=layout), harness.mesh_of(RANKS)
    )

    def run(floats, ids):
        out, transpose = jax.vjp(lambda *floats: of_ranks(*floats, ids), *floats)
        return out, *transpose(jnp.sin(7 * out.astype(jnp.float32)).astype(out.dtype))

    args = arguments(layout, "uniform", dtype)
    compiled = harness.jit(run, exchanges=4)
    text = jax.jit(run).lower(*args).as_text()
    return compiled, text.count(f"@{CALL}")


on_gpu = pytest.mark.skipif(not harness.ON_GPU, reason="only the kernels have the call")


def assert_same_bits(found, expected, what):
    for a, b in zip(found, expected, strict=True):
        a, b = (np.asarray(harness.numpy_of(x)) for x in (a, b))
        assert a.tobytes() == b.tobytes(), what


@on_gpu
@pytest.mark.parametrize("layout", (WORST, DROPS), ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    ("fn", "dtype", "num_sms"),
    [
        (layer, "bfloat16", 16),
        (layer, "float16", 40),
        (by_hand, "bfloat16", 16),
        (weighted, "bfloat16", 16),
        (weighted, "float16", 16),
    ],
)
def test_results_and_gradients_have_the_same_bits(fn, layout, dtype, num_sms):
    next_to, found = program(fn, layout, dtype, num_sms)
    after, none = program(fn, layout, dtype, 0)
    assert (found, none) == (2, 0)
    for seed, routing in enumerate((*cases.ROUTINGS, "uniform", "skewed")):
        args = arguments(layout, routing, dtype, seed)
        assert_same_bits(next_to(*args), after(*args), routing)


@on_gpu
def test_many_calls_in_a_row_have_the_same_bits():
    next_to, _ = program(layer, WORST, "bfloat16", 16, graphs=True)
    after, _ = program(layer, WORST, "bfloat16", 0, graphs=True)
    for seed in range(60):
        args = arguments(WORST, "skewed" if seed % 2 else "uniform", "bfloat16", seed)
        # Many executions are under way before any is compared.
        for each in [next_to(*args) for _ in range(5)]:
            assert_same_bits(each, after(*args), seed)


# Which programs have the call: lowering for GPUs needs none.

lowers = pytest.mark.skipif(
    not native.has_grouped_gemm() or len(jax.devices()) < 8 or harness.PROCESSES > 1,
    reason="needs the extension and eight devices of one process",
)
TOKENS, HIDDEN, EXPERTS, TOP_K = 2048, 1024, 2, 2


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(ma.Group, "why_portable", "")
    monkeypatch.setattr(grouped, "_why_other_gpu", lambda: "")


def text_of(
    change=None,
    ranks=8,
    hosts=1,
    tokens=TOKENS,
    hidden=HIDDEN,
    dtype="bfloat16",
    gradients=True,
    **group,
):
    """Return the program of a layer for GPUs, of two levels if there are several hosts."""
    devices, axes = np.array(jax.devices()[:ranks]), ("ep",)
    if hosts > 1:
        devices, axes = devices.reshape(hosts, -1), ("host", "ep")
    mesh = Mesh(devices, axes)
    group = ma.Group(mesh, axes, two_level=hosts > 1, **group)

    def of_rank(x, ids, weights, w_in, w_out):
        options = dict(group=group, num_experts=ranks * EXPERTS)
        if change is not None:
            return change(x, ids, weights, w_in, w_out, **options)
        return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options)

    spec = PartitionSpec(axes)
    fn = jax.shard_map(of_rank, mesh=mesh, in_specs=spec, out_specs=spec)

    def run(x, ids, *floats):
        if not gradients:
            return fn(x, ids, *floats)
        out, transpose = jax.vjp(lambda x, *floats: fn(x, ids, *floats), x, *floats)
        return out, *transpose(out)

    array = jax.ShapeDtypeStruct
    args = (
        array((ranks * tokens, hidden), dtype),
        array((ranks * tokens, TOP_K), jnp.int32),
        array((ranks * tokens, TOP_K), jnp.float32),
        array((ranks * EXPERTS, hidden, 2 * INTERMEDIATE), dtype),
        array((ranks * EXPERTS, INTERMEDIATE, hidden), dtype),
    )
    return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@lowers
def test_forward_and_backward_have_one_call_each(gpus):
    calls = [line for line in text_of().splitlines() if f"@{CALL}" in line]
    assert [re.search(r"transposed = (\d)", call)[1] for call in calls] == ["0", "1"]
    # Router weights travel with the gradients of tokens.
    assert [re.search(r"num_choice_arrays = (\d)", call)[1] for call in calls] == ["0", "1"]
    rows = 8 * TOKENS * EXPERTS
    assert f"(tensor<{rows}x64xbf16>, tensor<2x64x1024xbf16>, tensor<6xi32>" in calls[0]
    assert f"(tensor<{rows}x128xbf16>, tensor<2x1024x128xbf16>, tensor<6xi32>" in calls[1]
    assert all("num_sms = 16" in call for call in calls)
    assert "moe_a2a_combine" not in text_of()


@lowers
@pytest.mark.parametrize("adds", (False, True))
@pytest.mark.parametrize("weighs", (False, True))
def test_the_combine_may_have_weights_and_an_addend(gpus, weighs, adds):
    def change(x, ids, weights, w_in, w_out, **options):
        recv = ma.dispatch(x, ids, weights, **options)
        y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
        return ma.combine(y, recv if weighs else recv.routing, add=x if adds else None)

    text = text_of(change, gradients=False)
    (call,) = (line for line in text.splitlines() if f"@{CALL}" in line)
    assert f"num_pairs = {int(weighs)} " in call
    assert f"num_addends = {int(adds)} " in call
    rows = 8 * TOKENS * EXPERTS
    # After the table, of the experts and the rows after the last one.
    others = [f"tensor<{rows}xf32>"] * weighs + [f"tensor<{TOKENS}x1024xbf16>"] * adds
    assert ", ".join(["tensor<9xi32>", *others, f"tensor<{TOKENS}x8xi32>"]) in call
    assert "@moe_a2a_combine" not in text


@lowers
def test_a_product_that_is_read_later_is_computed_once(gpus):
    def read_later(x, ids, weights, w_in, w_out, **options):
        recv = ma.dispatch(x, ids, weights, **options)
        y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
        return ma.combine(y, recv.routing) + y.sum().astype(x.dtype)

    text = text_of(read_later, gradients=False)
    assert text.count(f"@{CALL}") == 1
    product = re.search(r"(%\d+):2 = stablehlo.custom_call @moe_a2a_grouped_gemm", text)[1]
    assert f"{product}#0" not in text  # XLA removes a call that nothing reads


def read_before(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
    total = y.sum().astype(x.dtype)
    return ma.combine(y, recv.routing) + total


def scaled(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
    return ma.combine(2 * y, recv.routing)


def limited(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes, num_sms=40)
    return ma.combine(y, recv.routing)


def of_two_axes(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
    return ma.combine(y.reshape(-1, 2, HIDDEN // 2), recv.routing).reshape(x.shape)


def of_addend(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
    return ma.combine(y, recv, add=y[: len(x)])


def in_fp8(x, ids, weights, w_in, w_out, **options):
    options["wire_dtype"] = ma.BlockwiseFp8()
    return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options)


def in_float32(x, ids, weights, w_in, w_out, **options):
    options["wire_dtype"] = jnp.float32
    return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options)


def with_bias(x, ids, weights, w_in, w_out, **options):
    bias = jnp.zeros((EXPERTS, HIDDEN), x.dtype)
    return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, b_out=bias, **options)


@lowers
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(change=read_before), None),
        (dict(change=scaled), None),
        (dict(change=with_bias), None),
        (dict(change=of_addend), None),
        (dict(change=in_float32), "partial sums travel as F32"),
        (dict(change=in_fp8), "partial sums travel as BlockwiseFp8"),
        (dict(change=limited), "num_sms=40 limits the product"),
        (dict(change=of_two_axes), "needs rows and products of two axes"),
        (dict(hidden=768), "at least one tile of 256 columns in each of 4 slices; got"),
        (dict(ranks=2), "the group has few ranks or tokens"),
        (dict(tokens=TOKENS - 8), "the group has few ranks or tokens"),
        (dict(num_sms={"dot_combine": 0}), "or num_sms says so"),
        (dict(ranks=2, num_sms=32), "the group has few ranks or tokens"),
    ],
)
def test_other_combines_follow_their_product(gpus, caplog, options, why):
    with caplog.at_level(logging.INFO, "jax_moe_a2a"):
        text = text_of(gradients=False, **options)
    assert f"@{CALL}" not in text
    assert "@moe_a2a_combine" in text
    if why is not None:
        assert "moe_a2a_combine: after its product, because" in caplog.text
        assert why in caplog.text


@lowers
def test_few_rows_in_each_group_have_a_product_without_slices(gpus, caplog):
    def few(x, ids, weights, w_in, w_out, **options):
        options["capacity"] = 64
        return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options)

    with caplog.at_level(logging.INFO, "jax_moe_a2a"):
        assert f"@{CALL}" not in text_of(few, gradients=False)
    assert "the product has few rows in each group" in caplog.text


@lowers
def test_a_group_may_ask_for_the_call(gpus):
    group = dict(num_sms={"dot_combine": 24})
    calls = [line for line in text_of(ranks=2, tokens=128, **group).splitlines() if CALL in line]
    assert len(calls) == 2
    assert all("num_sms = 24" in call for call in calls)


@lowers
@pytest.mark.parametrize(
    ("num_sms", "expected"),
    [(64, 16), (8, 8), ({"combine": 8}, 8), ({"dispatch": 8}, 16)],
)
def test_a_limit_of_exchanges_is_one_of_the_call(gpus, num_sms, expected):
    (call,) = (
        line for line in text_of(gradients=False, num_sms=num_sms).splitlines() if CALL in line
    )
    assert f"num_sms = {expected} " in call


# Transforms are not known to the lowering, so each of them may have the call.


def in_scan(x, ids, weights, w_in, w_out, **options):
    def step(x, _):
        return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options), None

    return jax.lax.scan(step, x, length=2)[0]


def in_checkpoint(*args, **options):
    layer = functools.partial(ma.moe_mlp, activation=SWIGLU, **options)
    return jax.checkpoint(layer)(*args)


def of_batch(x, ids, weights, w_in, w_out, **options):
    def of_one(x, ids, weights):
        return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options)

    x, ids, weights = (a.reshape(2, -1, *a.shape[1:]) for a in (x, ids, weights))
    return jax.vmap(of_one)(x, ids, weights).reshape(-1, x.shape[-1])


@lowers
@pytest.mark.parametrize("change", (in_scan, in_checkpoint, of_batch))
def test_transforms_have_one_call_forward_and_one_backward(gpus, change):
    text = text_of(change, tokens=2 * TOKENS)
    assert text.count(f"@{CALL}") == 2
    assert "moe_a2a_combine" not in text


def text_on_one_gpu(axis_of_weights, experts):
    """Return the program of a layer whose 4 ranks share a GPU."""
    ranks, array = 4, jax.ShapeDtypeStruct
    asked = {"dot_combine": 16}
    group = ma.Group(axis_name="ep", size=ranks, implementation="cuda", num_sms=asked)
    layer = functools.partial(
        ma.moe_mlp, activation=SWIGLU, group=group, num_experts=ranks * experts
    )
    axes = (0, 0, 0, axis_of_weights, axis_of_weights)
    fn = jax.vmap(layer, axis_name="ep", in_axes=axes)
    lead = () if axis_of_weights is None else (ranks,)
    args = (
        array((ranks, TOKENS, HIDDEN), jnp.bfloat16),
        array((ranks, TOKENS, TOP_K), jnp.int32),
        array((ranks, TOKENS, TOP_K), jnp.float32),
        array((*lead, experts, HIDDEN, 2 * INTERMEDIATE), jnp.bfloat16),
        array((*lead, experts, INTERMEDIATE, HIDDEN), jnp.bfloat16),
    )
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@lowers
def test_ranks_that_share_a_gpu_have_an_axis_in_the_call(gpus):
    (call,) = (line for line in text_on_one_gpu(0, EXPERTS).splitlines() if f"@{CALL}" in line)
    operands, results = call.rsplit(" : ", 1)[1].split(" -> ")
    rows = 4 * TOKENS * EXPERTS
    assert operands.startswith(
        f"(tensor<4x{rows}x64xbf16>, tensor<4x2x64x1024xbf16>, tensor<4x6xi32>"
    )
    products = f"tensor<4x{rows}x1024xbf16>"
    assert results == f"(tensor<4x{TOKENS}x1024xbf16>, {products}, tensor<4x5xi32>)"


@lowers
def test_weights_that_ranks_of_a_gpu_share_follow_one_another(gpus, caplog):
    """Four matrices are one for each rank in memory, and the table says which of them a group has.
    Two matrices have no such form."""
    assert "tensor<4x1x64x1024xbf16>" in text_on_one_gpu(None, 4)
    with caplog.at_level(logging.INFO, "jax_moe_a2a"):
        assert f"@{CALL}" not in text_on_one_gpu(None, 2)
    assert "ranks that share a GPU share the weights, too" in caplog.text


@lowers
def test_other_gpus_have_combines_only(gpus, monkeypatch):
    monkeypatch.setattr(grouped, "_why_other_gpu", lambda: "the kernel needs newer GPUs")
    text = text_of()
    assert f"@{CALL}" not in text
    assert "@moe_a2a_combine" in text


@lowers
def test_with_two_levels_the_combine_within_a_host_has_the_call(gpus):
    text = text_of(hosts=2, gradients=False, num_sms={"dot_combine": 16})
    calls = [line for line in text.splitlines() if "custom_call @moe_a2a" in line]
    (call,) = (call for call in calls if CALL in call)
    assert "num_ranks = 4" in call
    across = [call for call in calls if "num_ranks = 2" in call]
    assert len(across) == 3  # ids and tokens, and sums
