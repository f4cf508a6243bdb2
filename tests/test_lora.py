"""Compare layers with low-rank adapters with layers whose weights include the adapters."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from dense_layer import dense_experts
from jax.sharding import AxisType, NamedSharding
from jax.test_util import check_grads
from test_fp8_layer import arguments as fp8_arguments
from test_fp8_layer import (
    frozen,
    of_all_ranks,
    on_one_device,
    relative_error,
    with_decoded_weights,
)
from test_fp8_layer import layer as fp8_layer
from test_moe import dense, draw, value_and_grads

import jax_moe_a2a as ma

pytestmark = pytest.mark.usefixtures("exact_products")
Auto, Explicit = AxisType.Auto, AxisType.Explicit
SCALE, LOW = 0.5, 3


def adapted(experts, num_lead=1, seed=0):
    rng = np.random.default_rng(seed)

    def lora(w):
        lead, k, columns = w.shape[:num_lead], w.shape[num_lead], w.shape[num_lead + 1 :]
        draw = lambda *shape: (rng.normal(size=shape) / 2).astype(experts.w_out.dtype)
        return ma.LoRA(draw(*lead, k, LOW), draw(*lead, LOW, *columns), scale=SCALE)

    return experts.replace(lora_in=lora(experts.w_in), lora_out=lora(experts.w_out))


def merged(experts):
    def add(w, lora):
        flat = lora.b.reshape(*lora.a.shape[:-2], lora.b.shape[lora.a.ndim - 2], -1)
        return jax.lax.stop_gradient(w) + SCALE * (lora.a @ flat).reshape(w.shape)

    w_in, w_out = add(experts.w_in, experts.lora_in), add(experts.w_out, experts.lora_out)
    return experts.replace(w_in=w_in, w_out=w_out, lora_in=None, lora_out=None)


@pytest.mark.one_process("meshes of several axes")
@pytest.mark.several_devices("meshes of several axes")
@pytest.mark.parametrize("axis_type", (Auto, Explicit), ids=str)
def test_moe_with_adapters_equals_the_dense_layer_of_merged_weights(axis_type):
    mesh = harness.mesh_over(axis_type, data=2, ep=2, tensor=2)
    fsdp = "data" if axis_type is Explicit else None
    axes = ma.Axes("ep", data="data", tensor="tensor", fsdp=fsdp)
    x, params = draw(8, 3)
    hidden = x.shape[-1]
    rng = np.random.default_rng(2)
    shared = [rng.normal(size=s).astype(np.float32) for s in ((hidden, 2, 6), (6, hidden))]
    params["shared"] = adapted(ma.Experts(*shared), num_lead=0)
    params["experts"] = adapted(params["experts"])

    def layer(params, x):
        y, stats = ma.moe(x, **params, axes=axes)
        return y, (stats.balance_loss, stats.z_loss)

    def of_dense(params, x):
        y, losses = dense(x, params | dict(experts=merged(params["experts"])))
        one = jnp.ones((*x.shape[:-1], 1)), jnp.zeros((*x.shape[:-1], 1), int)
        return y + dense_experts(x, *one, merged(params["shared"])), losses

    specs = ma.moe_partition_specs(params, axes)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), params, specs)
        found = value_and_grads(layer, placed, x)
        merge = lambda params: [params[name].merge_lora() for name in ("experts", "shared")]
        own = harness.quickly(merge)(placed)
    small_layer.assert_close(found, value_and_grads(of_dense, params, x), tolerance=1e-4)
    for name in ("lora_in", "lora_out"):
        of, placed_lora = (getattr(p["experts"], name) for p in (found[1][0], placed))
        for grad, p in zip(jax.tree.leaves(of), jax.tree.leaves(placed_lora)):
            assert grad.sharding.is_equivalent_to(p.sharding, p.ndim)
    small_layer.assert_close(own, [merged(params[name]) for name in ("experts", "shared")])


RANKS, TOKENS, TOP_K, HIDDEN, WIDTH, LOCAL = 2, 4, 2, 12, 4, 2
LAYOUT = cases.Layout("lora", TOKENS, TOP_K, LOCAL, hidden=HIDDEN)
SWIGLU = ma.gated(jax.nn.silu)
PLACEMENT = ma.Placement.from_slots([0, 1, 2, 2, 3, 0], 4, num_ranks=RANKS)
OPTIONS = dict(
    one=dict(),
    chunks=dict(num_chunks=2),
    replicas=dict(placement=PLACEMENT),
    chunks_of_replicas=dict(num_chunks=2, placement=PLACEMENT),
)


def problem(dtype=np.float32):
    """Return the ids, x, router weights and experts with adapters of all ranks."""
    rng = np.random.default_rng(0)
    ids = rng.integers(-1, RANKS * LOCAL, (RANKS, TOKENS, TOP_K))
    shapes = small_layer.shapes_of_moe(LAYOUT, 2 * WIDTH, WIDTH)
    x, weights, w_in, w_out, b_in, b_out = (
        (0.4 * rng.normal(size=(RANKS, *shape))).astype(dtype) for shape in shapes
    )
    gate = lambda w: w.reshape(*w.shape[:-1], 2, WIDTH)
    experts = ma.Experts(gate(w_in), w_out, gate(b_in), b_out)
    return ids, x, weights, adapted(experts, num_lead=2)


def of_ranks(ids, x, weights, experts, **options):
    group = harness.emulated_group(RANKS)

    def on_rank(ids, x, weights, experts):
        choices, options_ = ma.RouterChoices(ids, weights), small_layer.route_args(group, LAYOUT)
        return ma.moe_mlp(x, choices, experts, **harness.exchanging(options_, options))

    return jax.vmap(on_rank, axis_name=harness.AXIS)(ids, x, weights, experts)


def gradients(ids, x, weights, experts, change=lambda experts: experts, **options):
    """Return the gradients of x, weights and experts, and the layer's output."""

    def loss(x, weights, experts):
        y = of_ranks(ids, x, weights, change(experts), **options)
        return jnp.sin(y).sum(), y

    return jax.grad(loss, (0, 1, 2), has_aux=True)(x, weights, experts)


@functools.cache
def expected():
    return harness.quickly(functools.partial(gradients, change=merged))(*problem())


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_layer_with_adapters_equals_the_layer_of_merged_weights(name):
    found = harness.quickly(functools.partial(gradients, **OPTIONS[name]))(*problem())
    small_layer.assert_close(found, expected(), name, tolerance=1e-4)


@pytest.mark.exchanges(0)
def test_adapters_accumulate_gradients():
    ids, x, weights, experts = problem()

    def loss(experts):
        return jnp.sin(of_ranks(ids, x, weights, experts)).sum()

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape), experts)
    add = ma.accumulate_grads(loss)
    program = jax.make_jaxpr(add)(zeros, experts)
    assert not base_gradients(program)
    found, _ = harness.quickly(add)(zeros, experts)
    small_layer.assert_close(found, expected()[0][2], tolerance=1e-4)


def base_gradients(program):
    """Return a program's equations with a result that has the shape of a gradient of frozen
    weights."""
    of_base = {(HIDDEN, 2 * WIDTH), (WIDTH, HIDDEN)}
    names = "grouped_outer", "add_outer", "passing_dot"
    found = [eqn for name in names for eqn in small_layer.equations(program, name)]
    assert found
    found += [eqn for eqn in harness.equations(program) if eqn.primitive.name == "scan"]
    return [e for e in found if of_base & {v.aval.shape[-2:] for v in e.outvars}]


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("name", OPTIONS)
def test_no_gradient_of_frozen_weights_is_computed_or_sent(name):
    program = jax.make_jaxpr(functools.partial(gradients, **OPTIONS[name]))(*problem())
    assert not base_gradients(program)
    # If a combine sent gradients of weights, its rows would have as many numbers as an array of
    # weights.
    sent = [small_layer.payload(eqn)[0] for eqn in small_layer.equations(program, "combine")]
    sizes = {shape[-1] for shapes in sent for shape in shapes}
    assert not sizes & {HIDDEN * 2 * WIDTH, WIDTH * HIDDEN}
    assert ("replicas" in name) == (LOW * 2 * WIDTH in sizes)


@pytest.mark.exchanges(0)
def test_adapters_have_derivatives_of_finite_differences():
    with jax.enable_x64(True):
        ids, x, weights, experts = problem(np.float64)
        lora = jax.tree.map(jnp.asarray, dict(lora_in=experts.lora_in, lora_out=experts.lora_out))
        loss = lambda lora: of_ranks(ids, x, weights, experts.replace(**lora)).sum()
        check_grads(jax.jit(loss), (lora,), order=1, modes=("rev",), rtol=1e-5)


def gradients_of_all(fn, args):
    """Return the output, plus the gradients of FP8 weights (zeros), and all other gradients."""
    *floats, ids = args
    ct = jnp.asarray(cases.normal(np.random.default_rng(1), floats[0].shape, "float32"))
    y, transpose = jax.vjp(lambda *floats: fn(*floats, ids), *floats)
    of_x, of_weights, of_experts = transpose(ct)
    for zeros in jax.tree.leaves((of_experts.w_in, of_experts.w_out)):
        y += zeros.astype(jnp.float32).sum()
    of_others = of_experts.map_weights(lambda w: None)
    return jax.tree.leaves((y, of_x, of_weights, of_others))


def test_frozen_weights_in_fp8_with_adapters_have_the_gradients_of_decoded_ones():
    x, weights, experts, ids = fp8_arguments("float32")
    with_lora = adapted(experts, num_lead=2)
    args = frozen((x, weights, experts, ids))
    lora = dict(lora_in=with_lora.lora_in, lora_out=with_lora.lora_out)
    args = *args[:2], args[2].replace(**lora), ids

    def run(fn, exchanges):
        each = functools.partial(gradients_of_all, of_all_ranks(fn))
        return small_layer.compiled(each, exchanges=exchanges)(args)

    for one, right in zip(run(fp8_layer, 4), run(with_decoded_weights, 5), strict=True):
        assert relative_error(one, right) < (0.02 if harness.ON_GPU else 1e-5)


@pytest.mark.exchanges(0)
def test_adapters_of_zeros_change_no_bit_of_a_layer_in_fp8():
    x, weights, experts, ids = fp8_arguments("float32")
    zeros = jax.tree.map(jnp.zeros_like, adapted(experts, num_lead=2))
    lora = dict(lora_in=zeros.lora_in, lora_out=zeros.lora_out)

    @harness.quickly
    def run(x, weights, experts):
        of = lambda x, weights, w_in, w_out: on_one_device(in_fp8=True)(
            x, weights, experts.replace(w_in=w_in, w_out=w_out), ids
        )
        y, transpose = jax.vjp(of, x, weights, experts.w_in, experts.w_out)
        return y, transpose(jnp.cos(y))

    y, (of_x, of_weights, *of_base) = run(x, weights, experts.replace(**lora))
    right, (right_of_x, right_of_weights, *_) = run(x, weights, experts)
    small_layer.assert_same((y, of_x, of_weights), (right, right_of_x, right_of_weights))
    assert not any(map(np.any, of_base))


@pytest.mark.exchanges(0)
@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda lora: lora.a, TypeError, "experts.lora_in must be a LoRA or None; got"),
        (lambda lora: lora.replace(scale=0), ValueError, "the scale of experts.lora_in"),
        (lambda lora: lora.replace(a=lora.a[0]), ValueError, r"lora_in.a .*float32\[2, 12, 3\]"),
        (
            lambda lora: lora.replace(b=lora.b[..., 0]),
            ValueError,
            r"\[2, 3, 2, 4\] with .*\[2,3,2\]",
        ),
        (
            lambda lora: lora.replace(b=lora.b.astype(np.float16)),
            TypeError,
            r"lora_in.b must be float32\[2, 3, 2, 4\] with r=3, .*; got float16"
            r".* dtype= to with_lora",
        ),
    ],
    ids=("type", "scale", "a", "b", "dtype"),
)
def test_an_error_names_the_part_of_an_adapter(change, error, message):
    _, x, weights, experts = problem()
    own = jax.tree.map(lambda w: w[0], experts)
    with pytest.raises(error, match=message):
        ids = jnp.zeros(weights.shape[1:], jnp.int32)
        group = ma.Group(axis_name="ep", size=1)
        choices = ma.RouterChoices(ids, weights[0])
        ma.moe_mlp(
            x[0], choices, own.replace(lora_in=change(own.lora_in)), group=group, num_experts=2
        )


@pytest.mark.exchanges(0)
def test_new_adapters_change_nothing():
    config = ma.MoEConfig(128, 128, 4, ma.TopK(2), shared_hidden=6)
    params, key = ma.init_moe(jax.random.key(0), config), jax.random.key(1)
    for name in ("experts", "shared"):
        experts = params[name].with_lora(key, rank=LOW, scale=2.0)
        small_layer.assert_same(experts.merge_lora(), params[name])
        lead = (4,) * (name == "experts")
        assert (experts.lora_in.b.shape[:-1], experts.lora_in.scale) == ((*lead, LOW, 2), 2.0)
        assert float(experts.lora_in.a.std()) == pytest.approx(128**-0.5, rel=0.1)
    in_fp8 = ma.quantize_experts(params["experts"]).with_lora(key, rank=LOW)
    assert in_fp8.lora_out.a.dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="merge_lora needs float weights; got QuantizedExperts"):
        in_fp8.merge_lora()
    with pytest.raises(ValueError, match="rank must be at least 1; got 0"):
        params["experts"].with_lora(key, rank=0)
