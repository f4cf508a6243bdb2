"""The Flax modules equal `ma.moe` and the dense layer, also under Flax's transforms."""

import functools
import inspect

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    dense,
    mesh_of,
    quick_jit,
    swiglu,
)

import jax_moe_a2a as ma
from jax_moe_a2a.integrations.linen import MoE as LinenMoE
from jax_moe_a2a.integrations.nnx import MoE as NnxMoE
from jax_moe_a2a.integrations.nnx import SelectBias

pytestmark = [
    pytest.mark.one_process("meshes of several axes"),
    pytest.mark.several_devices("meshes of several axes"),
    pytest.mark.promotes("Flax relies on it"),
    pytest.mark.usefixtures("exact_products"),
]
X = jax.random.normal(jax.random.key(1), (4, 3, HIDDEN))
SIZES = dict(expert_hidden=WIDTH, num_experts=EXPERTS, choose=ma.TopK(TOP_K))
MODULES = pytest.mark.parametrize("make", (NnxMoE, LinenMoE))


@jax.jit
def dense_module(params, x):
    w_in = params["w_gate_up"].reshape(*params["w_gate_up"].shape[:2], -1)
    return dense(x, *choose(x @ params["router"]), w_in, params["w_down"], swiglu)


def apply_and_params(make, mesh, x=X, call=None, **options):
    """Return a module as a function of parameters and tokens, and its parameters by name."""
    options, call = SIZES | options, call or {}
    with jax.set_mesh(mesh):
        if make is NnxMoE:
            model = NnxMoE(HIDDEN, axes="ep", rngs=nnx.Rngs(0), **options)
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            return lambda params, x: nnx.merge(graph, params, rest)(x, **call), params
        module = LinenMoE(axes="ep", **options)
        variables = quick_jit(module.init)(jax.random.key(0), x, **call)
        params, rest = variables.pop("params"), variables
        return lambda params, x: module.apply({"params": params, **rest}, x, **call), params


def plain(params):
    """Return the parameters of a module as arrays by name."""
    if isinstance(params, nnx.State):
        params = nnx.to_pure_dict(params)
    return jax.device_get(linen.unbox(params))


def loss_of(y):
    return jnp.sum(jnp.sin(y))


def value_and_grads(apply, params, x=X):
    """Return (result, statistics) and the gradients of parameters, by name."""

    def loss(params):
        y, stats = apply(params, x)
        return loss_of(y) + stats.balance_loss + stats.z_loss, (y, stats)

    (_, results), grads = quick_jit(jax.value_and_grad(loss, has_aux=True))(params)
    return results, plain(grads)


@MODULES
def test_a_module_runs_on_the_mesh_of_make_mesh(make):
    """Its axes are Explicit by default. The result is that of the dense layer."""
    if harness.NUM_DEVICES < 8:
        pytest.skip("needs 8 devices")
    mesh = jax.make_mesh((8,), ("ep",), devices=harness.devices(8))
    apply, params = apply_and_params(make, mesh, num_experts=8)
    for param in jax.tree.leaves(params):
        if make is NnxMoE and param.ndim > 2:
            assert param.sharding.is_equivalent_to(NamedSharding(mesh, P("ep")), param.ndim)
    with jax.set_mesh(mesh):
        (y, stats), grads = value_and_grads(apply, params)
    names = plain(params)
    assert_close(y, dense_module(names, X))
    assert_close(stats.logits, X @ names["router"])

    def expected(params):
        logits = (X @ params["router"]).reshape(-1, 8)
        scores, ids = jax.nn.softmax(logits), choose(logits)[1]
        losses = ma.load_balancing_loss(scores, ids) + ma.router_z_loss(logits)
        return loss_of(dense_module(params, X)) + losses

    assert_close(grads, quick_jit(jax.grad(expected))(names))
    assert int(stats.load.wanted_per_expert.sum()) == 12 * TOP_K


@MODULES
def test_a_module_with_all_parameters_is_moe(make):
    mesh = mesh_of(AxisType.Auto, data=2, ep=2, tensor=2)
    axes = ma.Axes("ep", data="data", tensor="tensor", fsdp="data")
    call = dict(mask=np.arange(12).reshape(4, 3) != 3, shared_weights=0.5)
    with jax.set_mesh(mesh):
        more = dict(bias=True, select_bias=True, shared_expert=True)
        make_module = functools.partial(make, **SIZES, axes=axes, dtype="bfloat16", **more)
        if make is NnxMoE:
            model = make_module(HIDDEN, rngs=nnx.Rngs(0))
            specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model)))
            model.select_bias[...] = jnp.arange(EXPERTS) / 4.0
            y, stats = nnx.jit(lambda model, x: model(x, **call))(model, X)
            names = plain(nnx.state(model))
            assert list(nnx.state(model, SelectBias)) == ["select_bias"]
            assert "select_bias" not in nnx.state(model, nnx.Param)
        else:
            module = make_module()
            variables = quick_jit(module.init)(jax.random.key(0), X)
            specs = linen.get_partition_spec(variables)
            specs = specs["params"] | specs["router_state"]
            variables["router_state"]["select_bias"] = jnp.arange(EXPERTS) / 4.0
            y, stats = quick_jit(lambda v, x: module.apply(v, x, **call))(variables, X)
            names = plain(variables)
            names = names["params"] | names["router_state"]
        own = [names.pop(name) for name in ("router", "router_bias", "select_bias")]
        params = {name: a.astype("bfloat16") for name, a in names.items()}
        params["router"] = ma.Router(*own, choose=ma.TopK(TOP_K))
        layer = lambda x: ma.moe(x, **params, **call, axes=axes, outputs=("logits",))
        expected = quick_jit(layer)(X.astype("bfloat16"))
    assert y.dtype == jnp.bfloat16
    assert_close((y, stats), expected, 1e-6)
    wanted = ma.moe_partition_specs(params, axes)
    router = wanted.pop("router")
    wanted |= dict(router=router.kernel, router_bias=router.bias, select_bias=router.select_bias)
    # NNX has an entry in each placement.
    assert {name: P(*spec if any(spec) else ()) for name, spec in specs.items()} == wanted


def test_nnx_scan_over_layers_without_a_mesh_in_scope():
    mesh = mesh_of(ep=2)

    metadata = {nnx.PARTITION_NAME: None}  # no axis of the mesh divides the layers

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=metadata)
    def create(rngs):
        axes = ma.Group(mesh, "ep")
        return NnxMoE(HIDDEN, **SIZES, axes=axes, select_bias=True, rngs=rngs)

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

    @quick_jit
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
    assert P(*specs["w_down"]) == P(None, "ep")
    assert P(*specs["select_bias"]) == P(None, None)


def test_linen_module_scans_over_layers_with_remat():
    mesh = mesh_of(AxisType.Explicit, ep=2)

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            y, _ = LinenMoE(**SIZES, axes="ep", name="moe")(x)
            return x + y, None

    layers = linen.scan(
        linen.remat(Block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
        metadata_params={linen.PARTITION_NAME: None},
    )()
    with jax.set_mesh(mesh):
        variables = quick_jit(layers.init)(jax.random.key(0), X, None)
        y, _ = quick_jit(layers.apply)(variables, X, None)
        unboxed = quick_jit(layers.apply)(linen.unbox(variables), X, None)[0]
    spec = linen.get_partition_spec(variables)["params"]["moe"]["w_down"]
    assert spec == P(None, "ep")
    params = plain(variables)["params"]["moe"]
    expected = X
    for i in range(2):
        expected += dense_module(jax.tree.map(lambda a: a[i], params), expected)
    assert_close((y, unboxed), (expected, expected))


@MODULES
@pytest.mark.exchanges(0)
def test_every_option_of_moe_and_moe_mlp_is_an_option_of_the_modules(make):
    renamed = {
        "x": "x",
        "router": "choose",
        "group": "axes",
        "choices": "choose",
        "w_gate_up": "expert_hidden",
        "w_down": "expert_hidden",
        "b_gate_up": "bias",
        "b_down": "bias",
        "shared_gate_up": "shared_expert",
        "shared_down": "shared_expert",
        "num_experts": "num_experts",
        "w_in": "expert_hidden",
        "w_out": "expert_hidden",
        "b_in": "bias",
        "b_out": "bias",
    }
    parameters = lambda function: inspect.signature(function).parameters
    options = {**parameters(make.__init__), **parameters(make.__call__)}
    for function in (ma.moe, ma.moe_mlp):
        names = {renamed.get(name, name) for name in parameters(function)}
        assert names <= set(options)
    own = "axes", "outputs", *renamed
    for name, parameter in parameters(ma.moe).items():
        assert name in own or parameter.default == options[name].default, name
    both = [set(parameters(module.__init__)) for module in (NnxMoE, LinenMoE)]
    assert both[0] ^ both[1] == {"hidden", "rngs", "name", "parent"}


@MODULES
@pytest.mark.exchanges(0)
def test_options_that_do_not_fit_are_refused_at_construction(make):
    more = dict(hidden=HIDDEN, rngs=nnx.Rngs(0)) if make is NnxMoE else {}
    axes = ma.Group(axis_name="ep", size=4)
    with pytest.raises(ValueError, match="multiple of the group's size 4; got 6. Use 4 or 8"):
        make(**dict(SIZES, num_experts=6), axes=axes, **more)
    with pytest.raises(ValueError, match="shared_hidden must be None without a shared expert"):
        make(**SIZES, axes=axes, shared_hidden=4, **more)


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
    for name, choose_with in (("replay", ma.TopK(TOP_K)), ("own", given_ids)):
        apply, params = apply_and_params(make, mesh, x=X, choose=choose_with, call=run[name])
        with jax.set_mesh(mesh):
            found[name] = quick_jit(lambda p, x, apply=apply: apply(p, x)[0])(params, X)
    assert_close(found["replay"], found["own"])


def given_ids(tokens, logits, ids, factor):
    chosen = jax.nn.one_hot(ids, EXPERTS) * logits[:, None, :]
    return ma.RouterChoices(ids, jax.nn.softmax(chosen.sum(-1)) * factor)
