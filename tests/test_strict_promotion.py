"""The package runs under jax_numpy_dtype_promotion='strict' and jax_numpy_rank_promotion='raise'.

Promotions happen when a program is traced and lowered, so no program here is compiled. One run of
CI runs all other tests with JAX_NUMPY_DTYPE_PROMOTION=strict and JAX_NUMPY_RANK_PROMOTION=raise.
"""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jax_moe_a2a as ma
from jax_moe_a2a._src import api

pytestmark = pytest.mark.exchanges(0)  # programs are lowered, and not run

HOSTS, RANKS, TOP_K, HIDDEN = 2, 4, 3, 128
EXPERTS = 2 * RANKS
FEW, MANY = 8, api.FUSED_MAX_TOKENS + 8  # routed and dispatched at once, and by two calls
AXES = ("host", harness.AXIS)
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
FORMATS = (ma.BlockwiseFp8(), ma.MxFp8(), ma.NvFp4(), ma.NvFp4(global_scale=0.5))

GROUPS = dict(
    flat=ma.Group(axis_name=harness.AXIS, size=RANKS),
    two_level=ma.Group(AbstractMesh((HOSTS, RANKS // HOSTS), AXES), AXES, two_level=True),
)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def lower(fn, group, *args):
    """Trace and lower fn of one rank's abstract arrays over all ranks on one device."""
    lead = (HOSTS, RANKS // HOSTS) if group.two_level else (RANKS,)
    for axis in reversed(group.axes):
        fn = jax.vmap(fn, axis_name=axis)
    stacked = [jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype) for a in args]
    # Without devices the portable path, by the compositions of the lowering for CUDA.
    jax.jit(fn).trace(*stacked).lower(lowering_platforms=("cuda",))


def arrays(tokens, dtype=jnp.bfloat16, ids=jnp.int32, weights=jnp.float32):
    return (
        jax.ShapeDtypeStruct((tokens, HIDDEN), dtype),
        jax.ShapeDtypeStruct((tokens, TOP_K), ids),
        jax.ShapeDtypeStruct((tokens, TOP_K), weights),
    )


def layer(group, x, ids, weights, *, dispatch=None, combine=None, **route_args):
    recv = ma.dispatch(
        x, ids, weights, group=group, num_experts=EXPERTS, **route_args, **(dispatch or {})
    )
    return ma.combine(2 * recv.rows, recv, **(combine or {}))


def split_layer(group, x, ids, weights, *, dispatch=None, combine=None, **route_args):
    inflight = ma.dispatch_start(
        x, ids, weights, group=group, num_experts=EXPERTS, **route_args, **(dispatch or {})
    )
    inflight, _ = ma.overlap(inflight, lambda a: a + a, x)
    recv = ma.dispatch_done(inflight)
    return ma.combine_done(ma.combine_start(2 * recv.rows, recv, **(combine or {})))


def gradient(fn):
    """Return the value and the gradients of a layer, in x and in the router weights."""

    def loss(x, weights, ids):
        return fn(x, ids, weights).astype(jnp.float32).sum()

    def run(x, ids, weights):
        return jax.value_and_grad(loss, argnums=(0, 1))(x, weights, ids)

    return run


every_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)


@every_group
@pytest.mark.parametrize("tokens", (FEW, MANY))
@pytest.mark.parametrize(
    "route_args",
    (
        dict(),
        dict(capacity=64, alignment=8),
        dict(shared_expert=True),
        dict(replicated=True),
        dict(replicated=True, shared_expert=True, alignment=4),
    ),
    ids=lambda route_args: "-".join(route_args) or "plain",
)
def test_the_modes(group, tokens, route_args):
    lower(gradient(functools.partial(layer, group, **route_args)), group, *arrays(tokens))


@every_group
def test_64_bit_numbers(group):
    with jax.enable_x64(True):
        for route_args in (dict(alignment=8), dict(replicated=True, shared_expert=True)):
            of_group = functools.partial(layer, group, **route_args)
            wide = arrays(FEW, jnp.float64, ids=jnp.int64, weights=jnp.float64)
            for args in (wide, arrays(FEW)):
                lower(gradient(of_group), group, *args)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.float64), ids=lambda dtype: dtype.__name__)
def test_shared_weights_of_another_width_than_the_router_weights(dtype):
    other = jnp.float32 if dtype == jnp.float64 else jnp.float64

    def weights_of(x, ids, weights, shared_weights=None):
        route_args = dict(group=GROUPS["flat"], num_experts=EXPERTS, shared_expert=True)
        recv = ma.dispatch(x, ids, weights, shared_weights=shared_weights, **route_args)
        return recv.weights

    def dtype_of(fn, *args):
        stacked = [jax.ShapeDtypeStruct((RANKS, *a.shape), a.dtype) for a in args]
        return jax.eval_shape(jax.vmap(fn, axis_name=harness.AXIS), *stacked).dtype

    with jax.enable_x64(True):
        args = arrays(FEW, weights=dtype)
        shared_weights = jax.ShapeDtypeStruct((FEW,), other)
        assert dtype_of(weights_of, *args, shared_weights) == jnp.float64
        for number in (None, 0.5):
            assert dtype_of(functools.partial(weights_of, shared_weights=number), *args) == dtype


@every_group
@pytest.mark.parametrize("ids", (np.int8, np.uint8, np.uint32))
def test_ids_of_any_integer_dtype(group, ids):
    lower(functools.partial(layer, group), group, *arrays(FEW, ids=ids))


@every_group
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_dtypes_of_tokens_weights_and_wire(group, dtype):
    widest = jnp.bfloat16 if group.two_level else jnp.float32
    for wire in (widest, ma.NvFp4()):
        options = dict(dispatch=dict(wire_dtype=wire), combine=dict(wire_dtype=wire))
        of_group = functools.partial(layer, group, **options)
        lower(gradient(of_group), group, *arrays(FEW, dtype, weights=dtype))


@every_group
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_sums_with_an_addend(group, dtype):
    def residual(weights_of, x, ids, weights):
        recv = ma.dispatch(x, ids, weights, group=group, num_experts=EXPERTS)
        return ma.combine(2 * recv.rows, recv, weights=weights_of, add=x)

    for weights_of in ("recv", None):
        lower(gradient(functools.partial(residual, weights_of)), group, *arrays(FEW, dtype))


@every_group
@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
@pytest.mark.parametrize("tokens", (FEW, MANY))
def test_tokens_in_a_format(group, fmt, tokens):
    options = dict(dispatch=dict(format=fmt, decode=True))
    lower(gradient(functools.partial(layer, group, **options)), group, *arrays(tokens))

    def quantized(x, ids, weights):
        recv = ma.dispatch(x, ids, weights, group=group, num_experts=EXPERTS, format=fmt)
        return fmt.decode(recv.rows, x.dtype), recv.weights

    lower(quantized, group, *arrays(tokens))


def test_a_global_scale_that_is_traced():
    group = GROUPS["flat"]

    def traced(x, ids, weights):
        scale = abs(x.astype(jnp.float32)).max()
        options = dict(format=ma.NvFp4(global_scale=scale), decode=True)
        return layer(group, x, ids, weights, dispatch=options)

    for tokens in (FEW, MANY):
        lower(gradient(traced), group, *arrays(tokens))


@every_group
@pytest.mark.parametrize(
    "route_args", (dict(), dict(shared_expert=True)), ids=("plain", "shared_expert")
)
def test_split_phases(group, route_args):
    for options in ({}, dict(dispatch=dict(format=ma.MxFp8(), decode=True))):
        of_group = functools.partial(split_layer, group, **route_args, **options)
        lower(gradient(of_group), group, *arrays(FEW))


@every_group
def test_batches_and_higher_derivatives(group):
    of_group = functools.partial(layer, group)

    def over_ids(x, ids, weights):
        stacked = jax.tree.map(lambda a: jnp.stack([a, a]), (x, ids, weights))
        return jax.vmap(gradient(of_group))(*stacked)

    def over_x(x, ids, weights):
        stacked = jnp.stack([x, x])
        return jax.vmap(gradient(of_group), in_axes=(0, None, None))(stacked, ids, weights)

    def tangents(x, ids, weights):
        of_floats = lambda x, weights: of_group(x, ids, weights)
        return jax.jvp(of_floats, (x, weights), (x, weights))

    def second(x, ids, weights):
        loss = lambda w: (of_group(x, ids, w).astype(jnp.float32) ** 2).sum()
        return jax.jvp(jax.grad(loss), (weights,), (weights,))

    for fn in (over_ids, over_x, tangents, second, jax.checkpoint(of_group)):
        lower(fn, group, *arrays(FEW, jnp.float32))


def test_payloads_of_many_kinds():
    group = GROUPS["flat"]

    def of_tree(x, ids, weights):
        tree = dict(
            rows=x,
            position=jnp.arange(len(x), dtype=jnp.int32),
            flag=x[:, 0] > 0,
            small=x.astype(jnp.float8_e4m3fn),
            complex=x.astype(jnp.complex64),
        )
        recv = ma.dispatch(
            tree,
            ids,
            weights,
            group=group,
            num_experts=EXPERTS,
            shared_expert=True,
            shared_weights=0.5,
        )
        return ma.combine(dict(a=recv.rows["rows"], b=recv.rows["rows"]), recv, weights=None), recv

    for tokens in (FEW, MANY):
        lower(of_tree, group, *arrays(tokens))


@pytest.mark.parametrize("fmt", (*FORMATS, ma.BlockwiseFp8(scale_layout="columns")), ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_formats_by_themselves(fmt, dtype):
    """With a test value: without jit, too."""
    x = jnp.linspace(-3, 3, 4 * HIDDEN, dtype=jnp.float32).reshape(4, HIDDEN).astype(dtype)
    quantized = fmt.encode(x)
    fmt.decode(quantized, dtype)
    if isinstance(fmt, ma.NvFp4):
        fmt.unpack(quantized.values)
    if not isinstance(fmt, ma.BlockwiseFp8):
        tiled = type(fmt)(scale_layout="tiles")
        tiled.decode(tiled.encode(x), dtype)
        tiled.laid_out(quantized)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.__name__)
def test_routing_maps(dtype):
    routing_map = np.eye(4, 6, dtype=bool)
    probs = jnp.ones((4, 6), dtype)

    def weights(probs):
        return ma.choices_from_map(routing_map, probs, top_k=2).topk_weights

    jax.grad(lambda probs: weights(probs).astype(jnp.float32).sum())(probs)
    ma.choices_from_map(routing_map, top_k=7)
