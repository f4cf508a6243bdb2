"""Define the programs of tests/compiled/table.txt.

No other size may equal the capacity, because `hlo.py` finds arrays of rows by the capacity.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 2048, 768, 128, 8, 3072
FEW_TOKENS = 128
AXIS = "ep"


class Program(typing.NamedTuple):
    function: typing.Callable
    args: tuple
    mesh: Mesh
    rows: int
    """The capacity of a rank."""


def all_of(devices):
    """Return a dict from the name of each program to a function that makes the program."""
    auto, explicit = (
        Mesh(np.array(devices), AXIS, axis_types=(kind,))
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    return {
        "forward": lambda: of_moe(auto),
        "forward, statistics": lambda: of_moe(auto, statistics=True),
        "forward, 128 tokens (decode)": lambda: of_moe(auto, FEW_TOKENS),
        "forward, quantized weights": lambda: frozen(auto),
        "gradients": lambda: of_moe(auto, gradients=True),
        "gradients, statistics": lambda: of_moe(auto, gradients=True, statistics=True),
        "gradients, statistics, Explicit axes": lambda: of_moe(
            explicit, gradients=True, statistics=True
        ),
        "gradients, experts in FP8": lambda: of_moe(auto, gradients=True, in_fp8=True),
        "gradients, moe_mlp under checkpoint in scan": lambda: layers(auto),
        "gradients of 4 micro-batches in scan": lambda: micro_batches(auto),
    }


def argument(mesh, spec, shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def tokens(mesh, *lead, num=TOKENS):
    spec = P(*(None,) * len(lead), AXIS)
    return argument(mesh, spec, (*lead, mesh.size * num, HIDDEN))


def parameters(mesh):
    config = ma.MoEConfig(HIDDEN, INTERMEDIATE, EXPERTS, ma.TopK(TOP_K), dtype=jnp.bfloat16)
    shapes = jax.eval_shape(lambda: ma.init_moe(jax.random.key(0), config))
    specs = ma.moe_partition_specs(shapes, AXIS)
    return jax.tree.map(lambda w, spec: argument(mesh, spec, w.shape, w.dtype), shapes, specs)


def capacity(mesh, num_tokens=TOKENS):
    return ma.Exchange().rows_per_rank(num_tokens, TOP_K, group_size=mesh.size, num_experts=EXPERTS)


def moe(params, x, *, statistics, in_fp8=False):
    params = params | dict(experts=params["experts"].in_fp8()) if in_fp8 else params
    y, found = ma.moe(x, **params, axes=AXIS)
    return (y, found.balance_loss + found.z_loss, found.load) if statistics else y


def of_moe(mesh, num_tokens=TOKENS, *, gradients=False, statistics=False, **options):
    def with_gradients(params, x, ct):
        def losses(params, x):
            y, *others = jax.tree.leaves(layer(params, x))
            return (y, *others[:1]), others[1:]

        out, pullback, load = jax.vjp(losses, params, x, has_aux=True)
        return out, load, pullback((ct, *map(jnp.ones_like, out[1:])))

    layer = functools.partial(moe, statistics=statistics, **options)
    x = tokens(mesh, num=num_tokens)
    args = (parameters(mesh), x, x) if gradients else (parameters(mesh), x)
    rows = capacity(mesh, num_tokens)
    return Program(with_gradients if gradients else layer, args, mesh, rows)


def frozen(mesh):
    params = parameters(mesh)
    shapes = jax.eval_shape(ma.quantize_experts, params["experts"])
    of_ranks = lambda a: argument(mesh, P(AXIS), a.shape, a.dtype)
    params["experts"] = jax.tree.map(of_ranks, shapes)
    layer = functools.partial(moe, statistics=False)
    return Program(layer, (params, tokens(mesh)), mesh, capacity(mesh))


def layers(mesh):
    num_layers = 4
    saved = jax.checkpoint_policies.save_only_these_names(
        ma.ROWS_CHECKPOINT_NAME, ma.ROUTING_CHECKPOINT_NAME
    )

    @functools.partial(jax.checkpoint, policy=saved)
    def layer(x, weights):
        router, experts = weights
        choices = ma.TopK(TOP_K)(jnp.dot(x, router))
        y = ma.moe_mlp(x, choices, experts, group=AXIS, num_experts=EXPERTS)
        return x + y, None

    def on_rank(weights, x, ct):
        model = lambda weights, x: jax.lax.scan(layer, x, weights)[0]
        y, pullback = jax.vjp(model, weights, x)
        return y, pullback(ct)

    of_x, of_router, of_weights = P(AXIS), P(), P(None, AXIS)
    specs = (of_router, of_weights)
    model = jax.shard_map(on_rank, in_specs=(specs, of_x, of_x), out_specs=(of_x, (specs, of_x)))
    shapes = (EXPERTS, HIDDEN, 2, INTERMEDIATE), (EXPERTS, INTERMEDIATE, HIDDEN)
    experts = ma.Experts(*(argument(mesh, of_weights, (num_layers, *s)) for s in shapes))
    weights = argument(mesh, of_router, (num_layers, HIDDEN, EXPERTS)), experts
    return Program(model, (weights, tokens(mesh), tokens(mesh)), mesh, capacity(mesh))


def micro_batches(mesh):
    num_batches = 4

    def total(params, batches):
        def loss(params, x):
            y, stats = ma.moe(x, **params, axes=AXIS)
            return jnp.sum(y.astype(jnp.float32) ** 2), stats.totals

        add = ma.accumulate_grads(loss, has_aux=True)
        zeros = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), params)
        return jax.lax.scan(lambda totals, x: (add(totals, params, x)[0], None), zeros, batches)[0]

    return Program(total, (parameters(mesh), tokens(mesh, num_batches)), mesh, capacity(mesh))
