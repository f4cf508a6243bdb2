"""The Flax modules equal the dense layer of their parameters, also under Flax's transforms."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_integrations import (
    EXPERTS,
    HIDDEN,
    TOP_K,
    WIDTH,
    assert_close,
    choose,
    dense,
    exact_products,  # noqa: F401  # a fixture
    mesh_of,
    quick_jit,
    swiglu,
)

import jax_moe_a2a as ma
from jax_moe_a2a.integrations.linen import MoE as LinenMoE
from jax_moe_a2a.integrations.nnx import MoE as NnxMoE

pytestmark = [
    pytest.mark.one_process("meshes of several axes"),
    pytest.mark.several_devices("meshes of several axes"),
    pytest.mark.promotes("Flax relies on it"),
]
X = jax.random.normal(jax.random.key(1), (4, 3, HIDDEN))
SIZES = dict(expert_hidden=WIDTH, num_experts=EXPERTS, top_k=TOP_K)


@jax.jit
def dense_module(params, x, biases=()):
    logits = x @ params["router"]["kernel"]
    return dense(x, *choose(logits), params["w_in"], params["w_out"], swiglu, *biases)


def nnx_moe(mesh, seed=0, **options):
    group = ma.Group(mesh, "ep")
    return NnxMoE(HIDDEN, **SIZES, group=group, rngs=nnx.Rngs(seed), **options)


def plain(state):
    return nnx.to_pure_dict(state)


def loss_of(y):
    return jnp.sum(jnp.sin(y))


def test_nnx_module_equals_the_dense_layer_and_counts_the_load_over_data_axes():
    model = nnx_moe(mesh_of(data=2, ep=2), data_axes=("data",))

    @nnx.jit
    def step(model, x):
        def loss(model):
            y, load = model(x)
            return loss_of(y), (y, load)

        return nnx.value_and_grad(loss, has_aux=True)(model)

    (_, (y, load)), grads = step(model, X)
    params = plain(nnx.state(model, nnx.Param))
    expected = quick_jit(jax.value_and_grad(lambda p: loss_of(dense_module(p, X))))(params)
    assert_close((loss_of(y), plain(grads)), expected)
    assert int(load.rows_per_expert.sum()) == X.shape[0] * X.shape[1] * TOP_K


def test_nnx_scan_over_layers():
    mesh = mesh_of(ep=2)

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs):
        return NnxMoE(HIDDEN, **SIZES, group=ma.Group(mesh, "ep"), rngs=rngs)

    @nnx.jit
    def step(models, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def layer(x, model):
            y, load = model(x)
            return x + y, load.rows_per_rank

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


def test_nnx_module_drops_and_says_so():
    model = nnx_moe(mesh_of(ep=2), capacity_factor=0.5)
    _, load = nnx.jit(lambda model, x: model(x))(model, X)
    assert int(load.dropped_per_rank.sum()) >= X.shape[0] * X.shape[1] * TOP_K // 2


def test_nnx_module_computes_in_its_dtype_with_a_router_of_the_users():
    seen = []

    def top_1(logits):
        seen.append(logits.shape)
        scores, ids = jax.lax.top_k(logits, 1)
        return jax.nn.sigmoid(scores), ids

    model = nnx_moe(mesh_of(ep=2), choose=top_1, dtype=jnp.bfloat16)
    y, load = nnx.jit(lambda model, x: model(x))(model, X)
    assert y.dtype == jnp.bfloat16 and model.w_in.dtype == jnp.float32
    assert int(load.rows_per_expert.sum()) == X.shape[0] * X.shape[1]
    assert seen[0] == (X.shape[0] // 2 * X.shape[1], EXPERTS)


@pytest.mark.parametrize("expert_bias", (False, True))
def test_linen_module_equals_the_dense_layer(expert_bias):
    group = ma.Group(mesh_of(ep=2), "ep")
    module = LinenMoE(**SIZES, group=group, expert_bias=expert_bias)
    params = jax.jit(module.init)(jax.random.key(0), X)["params"]
    if expert_bias:
        noise = functools.partial(jax.random.normal, jax.random.key(2))
        params |= {name: noise(params[name].shape) for name in ("b_in", "b_out")}

    def ours(params, x):
        y, load = module.apply({"params": params}, x)
        return loss_of(y), (y, load)

    def theirs(params, x):
        y = dense_module(params, x, [params[name] for name in ("b_in", "b_out") if name in params])
        return loss_of(y), y

    (_, (y, load)), grads = quick_jit(jax.value_and_grad(ours, has_aux=True))(params, X)
    (_, expected), expected_grads = quick_jit(jax.value_and_grad(theirs, has_aux=True))(params, X)
    assert_close((y, grads), (expected, expected_grads))
    assert load.dropped_per_rank.tolist() == [0, 0]


def test_linen_module_scans_over_layers_with_remat():
    group = ma.Group(mesh_of(ep=2), "ep")

    class Block(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            y, _ = LinenMoE(**SIZES, group=group, name="moe")(x)
            return x + y, None

    layers = linen.scan(
        linen.remat(Block, prevent_cse=False),
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=2,
    )()
    params = jax.jit(layers.init)(jax.random.key(0), X, None)
    y, _ = jax.jit(layers.apply)(params, X, None)
    expected = X
    for i in range(2):
        layer = jax.tree.map(lambda a: a[i], params["params"]["moe"])
        expected += dense_module(layer, expected)
    assert_close(y, expected)


@pytest.mark.parametrize("make", ("nnx", "linen"))
def test_a_module_runs_on_the_mesh_of_make_mesh_or_says_what_to_do(make):
    """Its axes are Explicit by default, and then the types of arrays have their placement."""
    mesh = jax.make_mesh((2,), ("ep",), devices=mesh_of(ep=2).devices.flat)
    x = jax.device_put(X, NamedSharding(mesh, P("ep")))
    if make == "nnx":
        graph, params = nnx.split(nnx_moe(mesh), nnx.Param)
        apply, names = lambda params, x: nnx.merge(graph, params)(x), plain(params)
    else:
        module = LinenMoE(**SIZES, group=ma.Group(mesh, "ep"))
        with jax.set_mesh(mesh):
            params = module.init(jax.random.key(0), X)
        apply, names = module.apply, params["params"]

    def loss(params, x):
        y, _ = apply(params, x)
        return loss_of(y), y

    gradient = quick_jit(jax.value_and_grad(loss, has_aux=True))
    with pytest.raises(ValueError, match=r"needs the mesh in scope; got .*jax.set_mesh\(mesh\)"):
        gradient(params, x)
    with jax.set_mesh(mesh):
        (_, y), grads = gradient(params, x)
    dense_loss = lambda params: loss_of(dense_module(params, X))
    names = jax.device_get(names)
    assert_close(y, dense_module(names, X))
    assert_close(grads, quick_jit(jax.grad(dense_loss))(names))


@pytest.mark.parametrize("make", (NnxMoE, LinenMoE))
def test_experts_that_ranks_cannot_share_are_refused_at_construction(make):
    options = dict(SIZES, num_experts=6, group=ma.Group(axis_name="ep", size=4))
    more = dict(hidden=HIDDEN, rngs=nnx.Rngs(0)) if make is NnxMoE else {}
    with pytest.raises(ValueError, match="multiple of the group's size 4; got 6. Use 4 or 8"):
        make(**options, **more)


def test_a_module_without_a_mesh_runs_under_set_mesh():
    mesh = mesh_of(AxisType.Explicit, ep=2)
    module = LinenMoE(**SIZES, group=ma.Group(axis_name="ep", size=2))
    with_mesh = LinenMoE(**SIZES, group=ma.Group(mesh_of(ep=2), "ep"))
    params = jax.jit(with_mesh.init)(jax.random.key(0), X)
    specs = {"router": P(), "w_in": P("ep"), "w_out": P("ep")}
    params = {
        name: jax.device_put(param, NamedSharding(mesh, specs[name]))
        for name, param in params["params"].items()
    }
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("ep")))
        y, _ = jax.jit(lambda params, x: module.apply({"params": params}, x))(params, x)
    assert_close(y, dense_module(jax.device_get(params), X))
