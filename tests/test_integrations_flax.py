"""Compare the Flax modules with `ma.moe` and a dense layer, also under Flax's transforms."""

import functools
from dataclasses import replace

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from dense_layer import dense_experts
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_parallelism import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    WIDTH,
    assert_close,
    choose,
    mesh_of,
)

import jax_moe_a2a as ma
from jax_moe_a2a.integrations.linen import MoE as LinenMoE
from jax_moe_a2a.integrations.nnx import MoE as NnxMoE
from jax_moe_a2a.integrations.nnx import SelectBias

pytestmark = [
    pytest.mark.one_process("meshes of several axes"),
    pytest.mark.several_devices("meshes of several axes"),
    pytest.mark.promotes("Flax relies on promotion"),
    pytest.mark.usefixtures("exact_products"),
]
X = jax.random.normal(jax.random.key(1), (4, 3, HIDDEN))
CONFIG = ma.MoEConfig(HIDDEN, WIDTH, EXPERTS, ma.TopK(TOP_K))
MODULES = pytest.mark.parametrize("make", (NnxMoE, LinenMoE))


@jax.jit
def dense_module(params, x):
    experts = ma.Experts(params["w_in"], params["w_out"])
    return dense_experts(x, *choose(x @ params["router_kernel"]), experts)


def apply_and_params(make, mesh, x=X, call=None, config=CONFIG, **options):
    """Return a function of (parameters, tokens) that calls a module, and the module's
    parameters."""
    call = call or {}
    with jax.set_mesh(mesh):
        if make is NnxMoE:
            model = NnxMoE(config, "ep", rngs=nnx.Rngs(0), **options)
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            return lambda params, x: nnx.merge(graph, params, rest)(x, **call), params
        module = LinenMoE(config, "ep", **options)
        variables = harness.quickly(module.init)(jax.random.key(0), x, **call)
        params, rest = variables.pop("params"), variables
        return lambda params, x: module.apply({"params": params, **rest}, x, **call), params


def by_name(params):
    return nnx.to_pure_dict(params) if isinstance(params, nnx.State) else linen.unbox(params)


def plain(params):
    return jax.device_get(by_name(params))


def loss_of(y):
    return jnp.sum(jnp.sin(y))


@MODULES
def test_a_module_runs_on_the_mesh_of_make_mesh(make):
    """`jax.make_mesh` makes Explicit axes."""
    if harness.NUM_DEVICES < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((8,), ("ep",), devices=harness.devices(8))
    apply, params = apply_and_params(make, mesh, config=replace(CONFIG, num_experts=8))
    for param in jax.tree.leaves(params):
        if make is NnxMoE and param.ndim > 2:
            assert param.sharding.is_equivalent_to(NamedSharding(mesh, P("ep")), param.ndim)
    with jax.set_mesh(mesh):
        y, stats = harness.quickly(apply)(params, X)
    names = plain(params)
    assert_close(y, dense_module(names, X))
    assert_close(stats.logits, X @ names["router_kernel"])
    assert int(stats.load.wanted_per_expert.sum()) == 12 * TOP_K


@MODULES
def test_a_module_with_all_parameters_is_moe(make):
    mesh = mesh_of(AxisType.Auto, data=2, ep=2, tensor=2)
    axes = ma.Axes("ep", data="data", tensor="tensor", fsdp="data")
    call = dict(mask=np.arange(12).reshape(4, 3) != 3, router_input=X[::-1])
    config = replace(CONFIG, bias=True, shared_hidden=WIDTH)
    options = dict(exchange=ma.Exchange(wire_dtype=jnp.float32), dtype=jnp.bfloat16)
    with jax.set_mesh(mesh):
        make_module = functools.partial(make, config, axes, select_bias=True, **options)
        if make is NnxMoE:
            model = make_module(rngs=nnx.Rngs(0))
            specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model)))
            model.select_bias[...] = jnp.arange(EXPERTS) / 4.0
            y, stats = nnx.jit(lambda model, x: model(x, **call))(model, X)
            names = plain(nnx.state(model))
            assert list(nnx.state(model, SelectBias)) == ["select_bias"]
            assert "select_bias" not in nnx.state(model, nnx.Param)
        else:
            module = make_module()
            variables = harness.quickly(module.init)(jax.random.key(0), X)
            specs = linen.get_partition_spec(variables)
            specs = specs["params"] | specs["router_state"]
            variables["router_state"]["select_bias"] = jnp.arange(EXPERTS) / 4.0
            y, stats = harness.quickly(lambda v, x: module.apply(v, x, **call))(variables, X)
            names = plain(variables)
            names = names["params"] | names["router_state"]
        router = names["router_kernel"], names["router_bias"], names["select_bias"]
        params = dict(
            router=ma.Router(*router, choose=config.choose),
            experts=experts_of(names),
            shared=experts_of(names, "shared_"),
        )
        options = dict(axes=axes, exchange=options["exchange"], outputs=("logits",))
        layer = lambda x: ma.moe(x, **params, **call, **options)
        expected = harness.quickly(layer)(X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert_close((y, stats), expected, 1e-6)
    # NNX's specs have an entry for each axis, even if no axis is divided.
    specs = {name: P(*spec if any(spec) else ()) for name, spec in specs.items()}
    router = specs["router_kernel"], specs["router_bias"], specs["select_bias"]
    as_stored = dict(
        router=ma.Router(*router, choose=config.choose),
        experts=experts_of(specs),
        shared=experts_of(specs, "shared_"),
    )
    wanted = ma.moe_partition_specs(params, axes)
    assert jax.tree.structure(as_stored) == jax.tree.structure(wanted)
    assert jax.tree.leaves(as_stored) == jax.tree.leaves(wanted)


def experts_of(names, prefix=""):
    cast = lambda a: a.astype(jnp.bfloat16) if hasattr(a, "astype") else a
    every = "w_in", "w_out", "b_in", "b_out"
    return ma.Experts(*(cast(names[prefix + n]) for n in every if prefix + n in names))


def test_nnx_scan_over_layers_without_a_mesh_in_scope():
    mesh = mesh_of(ep=2)

    metadata = {nnx.PARTITION_NAME: None}  # layers are not divided over the mesh

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=metadata)
    def create(rngs):
        axes = ma.Group(mesh, "ep")
        return NnxMoE(CONFIG, axes, select_bias=True, rngs=rngs)

    @nnx.jit
    def step(models, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), transform_metadata=metadata)
        def layer(x, model):
            y, stats = model(x)
            return x + y, stats.load.rows_per_rank

        def loss(models):
            y, rows = layer(x, models)
            return loss_of(y), rows

        return nnx.value_and_grad(loss, has_aux=True)(models)

    @harness.quickly
    @jax.value_and_grad
    def expected(params):
        y = X
        for i in range(2):
            y += dense_module(jax.tree.map(lambda a: a[i], params), y)
        return loss_of(y)

    models = create(nnx.Rngs(0))
    (loss, rows), grads = step(models, X)
    assert_close((loss, plain(grads)), expected(plain(nnx.state(models, nnx.Param))))
    assert rows.shape == (2, 2)
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(models)))
    assert P(*specs["w_out"]) == P(None, "ep")
    assert P(*specs["select_bias"]) == P(None, None)


def test_linen_module_scans_over_layers_with_remat():
    mesh = mesh_of(AxisType.Explicit, ep=2)

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            y, _ = LinenMoE(CONFIG, "ep", name="moe")(x)
            return x + y, None

    layers = linen.scan(
        linen.remat(Block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
        metadata_params={linen.PARTITION_NAME: None},
    )()
    with jax.set_mesh(mesh):
        variables = harness.quickly(layers.init)(jax.random.key(0), X, None)
        y, _ = harness.quickly(layers.apply)(variables, X, None)
        unboxed = harness.quickly(layers.apply)(linen.unbox(variables), X, None)[0]
    spec = linen.get_partition_spec(variables)["params"]["moe"]["w_out"]
    assert spec == P(None, "ep")
    params = plain(variables)["params"]["moe"]
    expected = X
    for i in range(2):
        expected += dense_module(jax.tree.map(lambda a: a[i], params), expected)
    assert_close((y, unboxed), (expected, expected))


@MODULES
@pytest.mark.exchanges(0)
def test_options_that_do_not_fit_are_refused_at_construction(make):
    more = dict(rngs=nnx.Rngs(0)) if make is NnxMoE else {}
    with pytest.raises(ValueError, match='fp8 must be "train", "frozen" or None; got True'):
        make(CONFIG, "ep", fp8=True, **more)


@MODULES
@pytest.mark.exchanges(0)
def test_a_call_without_a_mesh_names_set_mesh(make):
    apply, params = apply_and_params(make, mesh_of(ep=2))
    with pytest.raises(ValueError, match=r"got no mesh in scope.*jax.set_mesh\(mesh\)"):
        jax.eval_shape(apply, params, X)


@MODULES
def test_a_module_replays_choices_and_passes_arrays_to_a_router(make):
    mesh = mesh_of(AxisType.Explicit, ep=2)
    ids = np.arange(12 * TOP_K).reshape(4, 3, TOP_K) % EXPERTS
    run = {"replay": dict(replay=ids), "own": dict(per_token=ids, whole=np.float32(1))}
    found = {}
    for name, config in (("replay", CONFIG), ("own", replace(CONFIG, choose=given_ids))):
        apply, params = apply_and_params(make, mesh, call=run[name], config=config)
        with jax.set_mesh(mesh):
            found[name] = harness.quickly(lambda p, x, apply=apply: apply(p, x)[0])(params, X)
    assert_close(found["replay"], found["own"])


def given_ids(tokens, logits, ids, factor):
    chosen = jax.nn.one_hot(ids, EXPERTS) * logits[:, None, :]
    return ma.RouterChoices(ids, jax.nn.softmax(chosen.sum(-1)) * factor)


WIDE = ma.MoEConfig(128, 128, 4, ma.TopK(2), bias=True)


@MODULES
def test_frozen_weights_are_those_of_quantize_experts(make):
    x = jax.random.normal(jax.random.key(1), (6, 128), jnp.bfloat16)
    options = dict(config=WIDE, fp8="frozen", dtype=jnp.bfloat16)
    apply, params = apply_and_params(make, mesh_of(ep=2), x, **options)
    with jax.set_mesh(mesh_of(ep=2)):
        y, _ = harness.quickly(apply)(params, x)
        params = by_name(params)
        frozen = [ma.QuantizedExperts(params[n], params[f"{n}_scales"]) for n in ("w_in", "w_out")]
        experts = ma.Experts(*frozen, *(params[n].astype(x.dtype) for n in ("b_in", "b_out")))
        router = ma.Router(params["router_kernel"], params["router_bias"], choose=WIDE.choose)
        run = harness.quickly(lambda *args: ma.moe(*args, axes="ep")[0])
        np.testing.assert_array_equal(y, run(x, router, experts))
    assert params["w_in"].dtype == jnp.float8_e4m3fn
    assert params["w_in"].sharding.spec[0] == params["w_out_scales"].sharding.spec[0] == "ep"


@MODULES
@pytest.mark.exchanges(0)
def test_training_in_fp8_reads_weights_that_were_quantized_once(make):
    x = jax.random.normal(jax.random.key(1), (6, 128))
    options = dict(fp8="train", exchange=ma.Exchange(num_chunks=2))
    with jax.set_mesh(mesh_of(ep=2)):
        if make is NnxMoE:
            model = NnxMoE(WIDE, "ep", **options, rngs=nnx.Rngs(0))
            graph, params = nnx.split(model)
            apply = lambda params, once: nnx.merge(graph, params)(x, experts=once)[0]
            experts = model.experts
        else:
            module = LinenMoE(WIDE, "ep", **options)
            params = harness.quickly(module.init)(jax.random.key(0), x)
            apply = lambda params, once: module.apply(params, x, experts=once)[0]
            experts = module.experts(params["params"])
        quantize = functools.partial(ma.quantize_experts, trainable=True)
        once = jax.eval_shape(quantize, experts)
        counts = [small_layer.counts(apply, params, given) for given in (once, None)]
    assert experts.b_in.shape == (4, 2, 128)
    assert [each.get("encode_squares", 0) for each in counts] == [0, 2]
