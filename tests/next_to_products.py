"""Layers whose exchanges may run next to their grouped products, and their programs."""

import functools
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
SWIGLU = ma.gated(jax.nn.silu)
INTERMEDIATE = 64
TARGETS = {"dispatch_dot": "while_landing", "dot_combine": "moe_a2a_dot_combine"}
"""The name of each call contains this text."""
# More tokens than a dispatch computes the routing of.
WORST = cases.Layout("worst", tokens=320, top_k=3, local_experts=2, hidden=1024)
DROPS = cases.Layout("drops", tokens=320, top_k=3, local_experts=2, capacity=250, hidden=2048)


def layer(x, topk_weights, w_in, w_out, ids, *, group, layout):
    return ma.moe_mlp(
        x, ids, topk_weights, w_in, w_out, activation=SWIGLU, **layout.route_args(group)
    )


def with_options(x, topk_weights, w_in, w_out, ids, *, group, layout):
    """Compute a layer with biases, a shared expert, aligned groups and another activation, for a
    batch of two."""
    experts, _, intermediate = w_in.shape

    def of_one(x, weights, ids):
        return ma.moe_mlp(
            x,
            ids,
            weights,
            w_in,
            w_out[:, : intermediate // 2].repeat(2, axis=1),
            activation=jax.nn.gelu,
            b_in=w_in[:, 0],
            b_out=w_out[:, 0],
            alignment=16,
            group=group,
            num_experts=group.size * experts,
            capacity=2 * layout.capacity if layout.capacity else None,
        )

    halves = (a.reshape(2, -1, *a.shape[1:]) for a in (x, topk_weights, ids))
    return jax.vmap(of_one)(*halves).reshape(x.shape)


def twice(x, topk_weights, w_in, w_out, ids, *, group, layout):
    """Compute two layers in a loop, whose backward pass computes each again."""

    @jax.checkpoint
    def step(x, _):
        args = x, topk_weights, w_in, w_out, ids
        return x + layer(*args, group=group, layout=layout), None

    return jax.lax.scan(step, x, length=2)[0]


def by_hand(x, topk_weights, w_in, w_out, ids, *, group, layout):
    """Compute a layer whose program also reads the second product, after the combine."""
    recv = ma.dispatch(x, ids, topk_weights, **layout.route_args(group))
    dot = functools.partial(ma.grouped_dot, group_sizes=recv.group_sizes)
    h = SWIGLU(dot(recv.rows, w_in)) * recv.weights[:, None].astype(x.dtype)
    y = dot(h, w_out)
    return ma.combine(y, recv.routing) + y.sum().astype(x.dtype)


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
def program(fn, layout, dtype, graphs=None, dispatch_dot=0, dot_combine=0, **options):
    """Return a compiled function (floats, ids) -> value and gradients of all floats, and the number
    of each of its calls.

    Args:
      dispatch_dot, dot_combine: their SMs.
      options: of the group.
    """
    num_sms = dict(dispatch_dot=dispatch_dot, dot_combine=dot_combine)
    group = harness.group_of(RANKS, num_sms=num_sms, cuda_graphs=graphs, **options)
    of_ranks = small_layer.on_all_ranks(
        functools.partial(fn, group=group, layout=layout), harness.mesh_of(RANKS)
    )

    def run(floats, ids):
        out, transpose = jax.vjp(lambda *floats: of_ranks(*floats, ids), *floats)
        return out, *transpose(jnp.sin(7 * out.astype(jnp.float32)).astype(out.dtype))

    args = arguments(layout, "uniform", dtype)
    num_exchanges = {twice: 14}.get(fn, 5)  # with routes
    compiled = harness.jit(run, exchanges=num_exchanges)
    text = jax.jit(run).lower(*args).as_text()
    return compiled, [len(re.findall(rf"@\w*{name}", text)) for name in TARGETS.values()]


on_gpu = pytest.mark.skipif(not harness.ON_GPU, reason="only the kernels have the call")


def assert_same_bits(found, expected, what):
    for a, b in zip(found, expected, strict=True):
        a, b = (np.asarray(harness.numpy_of(x)) for x in (a, b))
        assert a.tobytes() == b.tobytes(), what


# Lowering for GPUs needs none.

lowers = pytest.mark.skipif(
    not native.has_grouped_gemm() or len(jax.devices()) < 8 or harness.PROCESSES > 1,
    reason="needs the extension and eight devices of one process",
)
TOKENS, HIDDEN, EXPERTS, TOP_K = 2048, 1024, 2, 2


def lower_for_gpus(monkeypatch):
    """Let programs be lowered for Hopper GPUs in this process."""
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


# Changes of `text_of`: transforms of a layer.


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


def text_on_one_gpu(axis_of_weights=0, experts=EXPERTS, **num_sms):
    """Return the program of a layer whose 4 ranks share a GPU."""
    ranks, array = 4, jax.ShapeDtypeStruct
    group = ma.Group(axis_name="ep", size=ranks, implementation="cuda", num_sms=num_sms)
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
