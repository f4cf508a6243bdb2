"""Test that `ma.moe` equals the dense layer, however its arrays are divided over mesh axes."""

import dataclasses
import functools
import inspect
import math

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from dense_layer import dense_experts, experts_of
from harness import mesh_over as mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_layer import assert_close

import jax_moe_a2a as ma
from jax_moe_a2a._src import compat
from jax_moe_a2a._src.group import value as group_value

pytestmark = harness.OF_SEVERAL_AXES
HIDDEN, WIDTH, EXPERTS, TOP_K = 8, 4, 4, 2
Auto, Explicit = AxisType.Auto, AxisType.Explicit


def draw(*lead, bias=True):
    """Return random tokens [*lead, H] and parameters, without sharding."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    router = ma.Router(normal(HIDDEN, EXPERTS) / 2, choose=ma.TopK(TOP_K))
    experts = ma.Experts(normal(EXPERTS, HIDDEN, 2, WIDTH) / 2, normal(EXPERTS, WIDTH, HIDDEN) / 2)
    router_bias = normal(EXPERTS)
    biases = dict(b_in=normal(EXPERTS, 2, WIDTH), b_out=normal(EXPERTS, HIDDEN))
    if bias:
        router, experts = router.replace(bias=router_bias), experts.replace(**biases)
    return normal(*lead, HIDDEN), dict(router=router, experts=experts)


def dense(x, params, mask=None):
    """Return what `moe` returns, except the load."""
    router = params["router"]
    logits = jnp.einsum("...h,he->...e", x, router.kernel)
    if router.bias is not None:
        logits += jnp.broadcast_to(router.bias, logits.shape)
    if isinstance(router.choose, ma.TopK):
        choices = router.choose(logits, select_bias=router.select_bias, mask=mask)
    else:
        chosen = router.choose(x, logits, None, None)
        nothing = ma.RouterChoices(*map(jnp.full_like, chosen, (-1, 0.0, 0.0)))
        choices = jax.tree.map(functools.partial(jnp.where, mask[..., None]), chosen, nothing)
    y = dense_experts(x, choices.weights, choices.ids, params["experts"])
    scores, ids = (a.reshape(-1, a.shape[-1]) for a in (choices.scores, choices.ids))
    losses = ma.load_balancing_loss(scores, ids), ma.router_z_loss(logits, mask=mask)
    return y, losses


def dense_layer(params, x):
    return dense(x, params)


def loss_of(y, losses):
    return jnp.sum(jnp.sin(y)) + losses[0] + losses[1] / 8


def value_and_grads(layer, params, x):
    """Return the gradients of params and x, and the layer's results (output, losses, ...)."""

    def loss(params, x):
        y, losses, *more = layer(params, x)
        return loss_of(y, losses), (y, losses, *more)

    (_, results), grads = harness.quickly(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    return results, grads


def layer_of(**options):
    def layer(params, x):
        y, stats = ma.moe(x, **params, **harness.exchanging(dict(axes="ep") | options))
        return y, (stats.balance_loss, stats.z_loss), stats

    return layer


@pytest.mark.parametrize(
    "axis_type, sizes",
    [
        (Auto, dict(data=2, ep=2, tensor=2)),
        (Explicit, dict(data=2, tensor=2, ep=2)),
        ((Auto, Explicit), dict(tensor=4, ep=2)),
    ],
    ids=str,
)
def test_equals_the_dense_layer_over_data_expert_and_tensor_axes(axis_type, sizes):
    mesh = mesh_of(axis_type, **sizes)
    x, params = draw(8, 3)
    mask = np.arange(24).reshape(8, 3) % 5 != 0
    select_bias = np.linspace(-0.3, 0.3, EXPERTS, dtype=np.float32)
    params["router"] = params["router"].replace(select_bias=select_bias)
    tensor = "tensor" if "tensor" in sizes else None
    data = ("data",) if "data" in sizes else ()
    # With Explicit axes, gradients are divided like weights (fsdp).
    axes = ma.Axes("ep", data=data, tensor=tensor, fsdp="data" if axis_type is Explicit else None)
    layer, specs = layer_of(axes=axes, mask=mask), ma.moe_partition_specs(params, axes)
    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), params, specs)
        spec = P((*data, "ep"))
        x_placed = jax.device_put(x, NamedSharding(mesh, spec))
        (y, losses, stats), grads = value_and_grads(layer, placed, x_placed)
    (y_dense, losses_dense), grads_dense = value_and_grads(
        lambda params, x: dense(x, params, mask), params, x
    )
    assert_close((y, losses, grads), (y_dense, losses_dense, grads_dense))
    assert y.sharding.is_equivalent_to(x_placed.sharding, y.ndim)
    for grad, p in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(placed)):
        assert grad.sharding.is_equivalent_to(p.sharding, p.ndim)
    assert int(stats.load.wanted_per_expert.sum()) == mask.sum() * TOP_K
    assert int(stats.num_dropped) == 0


@pytest.mark.parametrize(
    "axis_type, lead, grad",
    [
        (Auto, (), False),
        (Explicit, (1,), False),  # each device has the token
        (Explicit, (3,), False),  # fewer tokens than ranks
        (Explicit, (1, 6, 2), True),  # its second axis is divided
        (Explicit, (0, 2), True),
    ],
    ids=str,
)
def test_any_number_of_tokens(axis_type, lead, grad):
    mesh = mesh_of(axis_type, data=2, ep=2)
    x, params = draw(*lead, bias=False)
    with jax.set_mesh(mesh):
        layer = layer_of(axes=ma.Axes("ep", data="data"))
        if grad:
            (y, losses, stats), grads = value_and_grads(layer, params, x)
            assert_close(((y, losses), grads), value_and_grads(dense_layer, params, x))
        else:
            y, losses, stats = harness.quickly(layer)(params, x)
            assert_close((y, losses), harness.quickly(dense_layer)(params, x))
    assert y.shape == x.shape
    assert int(stats.load.wanted_per_expert.sum()) == math.prod(lead) * TOP_K
    assert int(stats.load.rows_per_rank.sum()) == math.prod(lead) * TOP_K


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("axis_type", [Auto, Explicit], ids=str)
def test_without_tokens_no_array_of_shard_map_is_empty(axis_type):
    """If an argument or result of shard_map is empty, jax 0.11.2 crashes when it compiles the
    gradient."""
    x, params = draw(0, bias=False)
    with jax.set_mesh(mesh_of(axis_type, ep=2)):
        loss = lambda params, x: loss_of(*layer_of()(params, x)[:2])
        program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(params, x)
    mapped = [eqn for eqn in harness.equations(program) if eqn.primitive.name == "shard_map"]
    assert len(mapped) == 2
    assert not [v for eqn in mapped for v in (*eqn.invars, *eqn.outvars) if 0 in v.aval.shape]


@pytest.mark.parametrize(
    "sizes, options",
    [
        (dict(data=2, ep=2), {}),
        (dict(data=2, ep=2), dict(capacity=9)),
        (dict(data=2, ep=2), dict(capacity=12, alignment=4, num_chunks=2)),
        (dict(host=2, ep=2), dict(capacity=9)),  # two levels
        (dict(ep=4), dict(capacity=9)),
    ],
    ids=str,
)
def test_load_and_balance_loss_are_those_of_the_oracle(sizes, options):
    layout = cases.Layout("load", tokens=6, top_k=2, local_experts=2)
    ranks, num_experts = 4, 8
    mesh = mesh_of(Auto, **sizes)
    of_group = sizes["ep"] * sizes.get("host", 1)
    axes = ma.Axes("ep", data="data" if "data" in sizes else ())
    if "host" in sizes:
        axes = ma.Axes(ma.Group(mesh, ("host", "ep"), two_level=True))
    experts = ma.Experts(np.zeros((num_experts, 1, 2, 1)), np.zeros((num_experts, 1, 1)))
    experts = jax.tree.map(np.float32, experts)
    scores = np.random.default_rng(0).uniform(size=(24, num_experts)).astype(np.float32)

    def layer(ids, scores):
        x, choices = jnp.zeros((24, 1)), ma.RouterChoices(ids, None, scores)
        return ma.moe(x, choices, experts, axes=axes, exchange=ma.Exchange(**options))[1]

    chunks = options.get("num_chunks", 1)
    capacity, alignment = options.get("capacity"), options.get("alignment", 1)
    sizes = dict(tokens=6 // chunks, top_k=2, local_experts=num_experts // of_group)
    of_chunk = cases.Layout("chunk", **sizes, capacity=capacity, alignment=alignment)
    with jax.set_mesh(mesh):
        program = harness.quickly(layer)
        for name in ("uniform", "skewed", "last_expert_only", "idle_rank", "masked", "invalid"):
            ids = cases.Case(layout, name).ids(ranks)
            stats = program(ids.reshape(24, 2), scores)
            load = stats.load
            right = [0] * 5
            for piece in ids.reshape(-1, of_group, chunks, 6 // chunks, 2).transpose(0, 2, 1, 3, 4):
                for chunk in piece:
                    counts = small_layer.expected_load(chunk, of_chunk)
                    right = [a + b for a, b in zip(right, counts, strict=True)]
            for field, expected in zip(dataclasses.fields(load), right, strict=True):
                found = getattr(load, field.name)
                np.testing.assert_array_equal(found, expected, f"{name}: {field.name}")
            flat = ids.reshape(24, 2)
            is_token = ((flat >= 0) & (flat < num_experts)).any(axis=1)
            mean = (scores / scores.sum(1, keepdims=True))[is_token].sum(0) / max(1, is_token.sum())
            expected = num_experts * (right[3] / max(1, right[3].sum()) * mean).sum()
            np.testing.assert_allclose(stats.balance_loss, expected, rtol=2e-6)


def test_statistics_add_what_the_capacity_of_each_chunk_drops():
    x, params = draw(2, 5)
    router, layer = params["router"], layer_of(num_chunks=3, capacity_factor=0.5)
    ids = router.choose(x @ router.kernel + router.bias[None, None]).ids
    with jax.set_mesh(mesh_of(ep=2)):
        stats = harness.quickly(layer)(params, x)[2]
    np.testing.assert_array_equal(
        stats.load.wanted_per_expert, np.bincount(np.ravel(ids), minlength=EXPERTS)
    )
    assert int(stats.num_dropped) + int(stats.load.rows_per_expert.sum()) == 10 * TOP_K
    assert int(stats.num_dropped) >= 10 * TOP_K // 3


def test_tokens_that_explicit_axes_divide_stay_where_they_are():
    mesh = mesh_of(Explicit, data=2, ep=2)
    x, params = draw(4, 4, bias=False)
    spec = P("ep", "data")  # by default, `moe` has another order of axes
    with jax.set_mesh(mesh):
        x_placed = jax.device_put(x, NamedSharding(mesh, spec))
        program = jax.make_jaxpr(layer_of(axes=ma.Axes("ep", data="data")))(params, x_placed)
        y, _, _ = harness.quickly(layer_of(axes=ma.Axes("ep", data="data")))(params, x_placed)
    (mapped,) = (eqn for eqn in program.eqns if eqn.primitive.name == "shard_map")
    assert mapped.params["in_specs"][0] == spec
    assert jax.typeof(y).sharding.spec == P("ep", "data", None)
    assert_close(y, harness.quickly(dense)(x, params)[0])


def test_experts_without_a_gate_under_vmap_with_a_group_that_has_the_mesh():
    x, params = draw(2, 3, bias=False)
    gated = params["experts"]
    experts = gated.replace(w_in=gated.w_in[:, :, 0], activation=jax.nn.relu)
    params["experts"], group = experts, ma.Group(mesh_of(ep=2), "ep")

    def layer(params, x):
        y, stats = jax.vmap(lambda x: ma.moe(x, **params, axes=group))(x)
        return y, (stats.balance_loss.sum(), stats.z_loss.sum()), stats

    def expected(params, x):
        logits = x @ params["router"].kernel
        choices = ma.TopK(TOP_K)(logits)
        y = dense_experts(x, choices.weights, choices.ids, params["experts"])
        balance = jax.vmap(ma.load_balancing_loss)(choices.scores, choices.ids)
        z = jax.vmap(ma.router_z_loss)(logits)
        return y, (balance.sum(), z.sum())

    y, losses, stats = harness.quickly(layer)(params, x)
    assert_close((y, losses), harness.quickly(expected)(params, x))
    assert stats.load.rows_per_rank.shape == (2, 2)


def sigmoid_router(tokens, logits, per_token, whole):
    scores, ids = jax.lax.top_k(logits, TOP_K)
    return ma.RouterChoices(ids, jax.nn.sigmoid(scores), jax.nn.softmax(logits))


def test_a_shared_expert_and_a_router_of_the_users():
    """The 9 tokens are padded, because both mesh axes divide them."""
    lead = (3, 3)
    x, params = draw(*lead, bias=False)
    rng = np.random.default_rng(3)
    shapes = (HIDDEN, 12), (6, HIDDEN), (12,), (HIDDEN,)
    arrays = (rng.normal(size=shape).astype(np.float32) / 2 for shape in shapes)
    params["router"] = params["router"].replace(choose=sigmoid_router)
    shared = experts_of(*arrays, ma.gated(jax.nn.gelu))
    params["shared"] = shared.replace(output_gate=np.linspace(-1, 1, HIDDEN, dtype="float32"))
    params["experts"] = params["experts"].replace(weigh_input=True)
    mask = np.arange(math.prod(lead)).reshape(lead) != 4

    def layer(params, x):
        y, stats = ma.moe(
            jnp.where(mask[..., None], x, jnp.nan),
            **params,
            axes=ma.Axes("ep", tensor="tensor"),
            mask=mask,
            outputs=("logits",),
            exchange=ma.Exchange(num_chunks=2, alignment=8),
        )
        return y, (stats.balance_loss, stats.z_loss), jnp.where(mask[..., None], stats.logits, 0)

    def expected(params, x):
        y, losses = dense(x, params, mask)
        weights = jnp.where(mask, 1.0, 0.0)[..., None]
        y += dense_experts(x, weights, jnp.zeros_like(weights, int), params["shared"])
        return y, losses, jnp.where(mask[..., None], x @ params["router"].kernel, 0)

    with jax.set_mesh(mesh_of(Explicit, ep=2, tensor=2)):
        found = value_and_grads(layer, params, x)
    assert_close(found, value_and_grads(expected, params, x))


@pytest.mark.exchanges(0)
def test_every_option_of_moe_mlp_is_an_option_of_moe():
    in_moe = {"choices": "router", "group": "axes", "num_experts": "router"}
    options = inspect.signature(ma.moe).parameters
    of_mlp = set(inspect.signature(ma.moe_mlp).parameters)
    for name in of_mlp - {"return_totals"}:  # `moe` returns totals in its statistics
        assert in_moe.get(name, name) in options


def test_under_another_axis_that_is_manual():
    """The other axis is a pipeline whose stages have different parameters."""
    mesh = mesh_of(pipe=2, ep=2)
    x, params = draw(2, 3, bias=False)
    both = jax.tree.map(lambda p: np.stack([p, -p]), params)

    with jax.set_mesh(mesh):
        pipelined = jax.shard_map(
            lambda params, x: layer_of()(jax.tree.map(lambda p: p[0], params), x)[0][None],
            in_specs=(P("pipe"), P()),
            out_specs=P("pipe"),
            axis_names={"pipe"},
        )
        y = harness.quickly(pipelined)(both, x)
    for of_stage, sign in zip(y, (1, -1)):
        stage = jax.tree.map(lambda p: sign * p, params)
        assert_close(of_stage, harness.quickly(dense)(x, stage)[0])


def traced(change=None, mesh=None, **options):
    """Trace `moe` with two ranks."""
    x, params = draw(2, 3)
    arguments = dict(x=x, **params, axes="ep") | (change or {}) | options
    with jax.set_mesh(mesh or mesh_of(ep=2)):
        return jax.eval_shape(lambda: ma.moe(**harness.exchanging(arguments)))


X, PARAMS = draw(2, 3)
KERNEL, IDS = PARAMS["router"].kernel, np.zeros((2, 3, TOP_K), np.int32)
OWN = PARAMS["experts"]


def routed(kernel=KERNEL, **fields):
    """Return a `change` for `traced`: a router with these fields."""
    return dict(router=ma.Router(kernel, **dict(choose=ma.TopK(TOP_K)) | fields))


def changed(**fields):
    return dict(experts=OWN.replace(**fields))


def shared(**fields):
    one = dict(w_in=OWN.w_in[0], w_out=OWN.w_out[0]) | fields
    return dict(shared=ma.Experts(**one))


@pytest.mark.exchanges(0)
def test_an_initializer_may_be_an_object_without_a_hash():
    @dataclasses.dataclass
    class Constant:
        value: float

        def __call__(self, key, shape, dtype):
            return jnp.full(shape, self.value, dtype)

    config = ma.MoEConfig(2, 3, 4, ma.TopK(2), initializer=Constant(0.5))
    params = ma.init_moe(jax.random.key(0), config)
    np.testing.assert_array_equal(params["experts"].w_out, 0.5)


@pytest.mark.exchanges(0)
def test_a_shared_expert_computes_in_float64_in_a_layer_of_float64():
    with jax.enable_x64(True), jax.set_mesh(mesh_of(ep=2)):
        x, params = jax.tree.map(np.float64, draw(4, bias=False))
        params["shared"] = ma.Experts(np.ones((HIDDEN, 2, 1)), np.ones((1, HIDDEN)))
        layer = lambda x: ma.moe(x, **params, axes="ep")[0]
        traced = compat.without_dead_code(jax.make_jaxpr(layer)(x))
    assert "new_dtype=float32" not in str(traced)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=X.astype(int)), r"x must be an array \[..., H\] of floats.*int"),
        (dict(x=X[..., :0]), r"with H > 0; got float32\[.*,0\]"),
        (dict(experts=OWN.w_in), r"experts must be .*Experts.*got float32\[4,8,2,4\]"),
        (changed(w_in=None), r"experts.w_in must .*None"),
        (dict(router=KERNEL), r"router must be a Router.*got float32\[8,4\]. Pass ma.Router"),
        (routed(KERNEL.T), r"kernel of the router must be .*\[H=8, E\].*float32\[4,8\]"),
        (routed(KERNEL[:, :3]), "multiple of the 2 ranks along 'ep'; got 3"),
        (routed(bias=KERNEL), r"bias of the router must have .* \[4\]; got float32\[8,4\]"),
        (routed(select_bias=KERNEL), r"select_bias must have a number for each expert, \[4\]"),
        (routed(choose=1), "choose of the router must be a TopK or a function; got 1"),
        (routed(whole=KERNEL), "whole of the router must be None with choose=TopK"),
        (routed(choose=sigmoid_router, select_bias=KERNEL[0]), "select_bias .* must be None with"),
        (
            routed(choose=sigmoid_router, per_token=dict(ids=KERNEL)),
            r"per_token\['ids'\] of the router must have the leading axes .*\[2, 3\]; got",
        ),
        (
            routed(choose=lambda *args: sigmoid_router(*args)[0]),
            "the result of choose must be RouterChoices; got ",
        ),
        (
            routed(choose=lambda *args: sigmoid_router(*args)._replace(ids=args[1])),
            "ids of the result of choose must hold integers",
        ),
        (
            dict(router=ma.Router(KERNEL, choose=sigmoid_router).replay(IDS)),
            "replay needs a router whose choose is a TopK.*ma.RouterChoices",
        ),
        (dict(router=PARAMS["router"].replay(IDS[0])), r"ids of the replay must be \[2, 3, K\]"),
        (dict(router=ma.RouterChoices(IDS, IDS)), "weights of router must hold floats"),
        (dict(router=ma.RouterChoices(IDS, X)), r"weights .* the shape of ids, \[2, 3, 2\]"),
        (dict(router=ma.RouterChoices(IDS, None, X[..., :3])), r"scores .*\[2, 3, 4\], a score"),
        (dict(router_input=X[0]), r"router_input must have the leading axes of x, \[2, 3\]"),
        (
            changed(w_in=OWN.w_in.reshape(4, 8, 8)),
            r"experts.w_out must have the shape \[4, 8, 8\].*side by side.*reshape",
        ),
        (
            dict(experts=jax.tree.map(lambda w: w[:2], OWN)),
            "experts must be the weights of E=4 .*; got those of 2",
        ),
        (changed(w_in=OWN.w_in[:, :, 0], b_in=None), "activation"),
        (changed(b_in=OWN.b_in[:, 0]), r"experts.b_in must have the shape \[4, 2, 4\]"),
        (changed(w_out=OWN.w_out.astype(np.float16)), "experts.w_out must have the dtype of x"),
        (dict(mask=np.ones((2, 3))), r"mask must hold a boolean.*mask.astype\(bool\)"),
        (
            dict(mask=np.ones(2, bool)),
            r"mask must hold a boolean for each token, \[2, 3\]"
            r".*jnp.broadcast_to\(mask\[..., None\], \(2, 3\)\)",
        ),
        (routed(choose=ma.TopK(5)), "k of TopK must be at most"),
        (dict(replicated="yes"), "replicated must be a bool"),
        (
            dict(axes="expert"),
            r"experts of axes must name axes of the mesh, which has \('ep',\).*Pass axes='ep'",
        ),
        (dict(axes=ma.Axes("ep", data="data")), "data of axes must name axes of the mesh"),
        (dict(axes=ma.Axes("ep", tensor="ep")), "must be different axes; got 'ep' twice"),
        (dict(axes=1), "axes must be a Group, the name"),
        (dict(shared=OWN.w_in), r"shared must be .*Experts.*got float32\[4,8,2,4\]"),
        (shared(w_in=OWN.w_in[0, :3]), r"shared.w_in must have .*float32\[3,2,4\]"),
        (shared(w_out=OWN.w_out), r"shared.w_out must have the shape \[4, 8\]"),
        (shared(output_gate=KERNEL), r"shared.output_gate must have the shape \[8\]"),
        (shared(weigh_input=True), "shared.weigh_input must be False for a shared expert"),
        (changed(output_gate=KERNEL[:, 0]), r"experts.output_gate must be None except .*\[8\]"),
        (
            dict(outputs="logits"),
            r"outputs must be a tuple of the names .*; got 'logits'. Write outputs=\('logits',\)",
        ),
        (
            dict(outputs=("logits",), router=ma.RouterChoices(IDS, None)),
            'outputs must not have "logits" if router is RouterChoices',
        ),
        (
            dict(placement=ma.Placement.from_slots([0, 2, -1, 1, 3, -1], 4, num_ranks=2)),
            "placement must have the home form",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_errors_name_the_argument(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        traced(change)


@pytest.mark.exchanges(0)
def test_a_mesh_with_devices_is_necessary():
    mesh = mesh_of(ep=2)
    layer = lambda group: jax.eval_shape(lambda: ma.moe(X, **PARAMS, axes=group))
    for group in ("ep", ma.Group(mesh.abstract_mesh, "ep"), ma.Group(axis_name="ep", size=2)):
        with pytest.raises(ValueError, match=r"got no mesh in scope.*jax.set_mesh\(mesh\)"):
            layer(group)
        with jax.set_mesh(mesh):
            layer(group)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        with pytest.raises(ValueError, match=r"got the abstract mesh.*jax.set_mesh\(mesh\)"):
            layer("ep")
    explicit = ma.Group(mesh_of(Explicit, ep=2), "ep")
    with pytest.raises(ValueError, match=r"Explicit axes \['ep'\].*jax.set_mesh\(mesh\)"):
        layer(explicit)
    inside = jax.shard_map(lambda: layer("ep")[0], mesh=mesh, in_specs=(), out_specs=P())
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="call moe_mlp inside with group='ep'"):
        inside()


@pytest.mark.exchanges(0)
def test_the_name_of_an_axis_is_a_group():
    """A call raises an error if its group is not the group of its Routing."""
    x, params = draw(2, 3, bias=False)
    ids = np.random.default_rng(1).integers(0, EXPERTS, (2, 3, TOP_K))

    def on_rank(x, ids, experts, group, **more):
        choices, options = ma.RouterChoices(ids, jnp.full(ids.shape, 0.5)), harness.exchanging(more)
        y = ma.moe_mlp(x, choices, experts, group=group, num_experts=EXPERTS, **options)
        routing = ma.route(ids, group=group, num_experts=EXPERTS)
        recv = ma.dispatch(x, routing, group=group)
        return y + ma.combine(recv.rows, recv)

    args = x, ids, jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), params["experts"])

    def in_vmap(group, **more):
        one = functools.partial(on_rank, group=group, **more)
        return str(jax.make_jaxpr(jax.vmap(one, axis_name="ep"))(*args))

    own = ma.Group(axis_name="ep", size=2)
    assert in_vmap("ep") == in_vmap(("ep",)) == in_vmap(own)
    assert in_vmap("ep", num_chunks=3) == in_vmap(own, num_chunks=3) != in_vmap(own)
    with pytest.raises(ValueError, match="got 'ep', and 'ep' is not in scope.*or call ma.moe"):
        ma.route(ids[0], group="ep", num_experts=EXPERTS)

    def other(ids):
        routing = ma.route(ids, group="ep", num_experts=EXPERTS)
        return ma.dispatch(ids, routing, group="other")

    with pytest.raises(ValueError, match="group must be omitted or equal to the Routing's group"):
        jax.vmap(other, axis_name="ep")(ids)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("axis_type", (Auto, Explicit))
def test_parameters_are_drawn_where_their_specs_say(axis_type):
    mesh = mesh_of(axis_type, data=2, ep=2, tensor=2)
    axes = ma.Axes("ep", tensor="tensor", fsdp="data")
    config = ma.MoEConfig(HIDDEN, WIDTH, EXPERTS, ma.TopK(TOP_K), bias=True, shared_hidden=6)
    init = functools.partial(ma.init_moe, jax.random.key(0), config)
    with jax.set_mesh(mesh):
        params = init(axes=axes)
    assert_close(params, init())
    is_stored = lambda p, spec: p.sharding.is_equivalent_to(NamedSharding(mesh, spec), p.ndim)
    assert all(
        jax.tree.leaves(jax.tree.map(is_stored, params, ma.moe_partition_specs(params, axes)))
    )
    assert params["router"].kernel.sharding.spec[0] == "data"
    for matrices in (params["experts"].w_out, params["experts"].w_in):
        assert 0.5 < float(matrices.std()) * matrices.shape[1] ** 0.5 < 1.5


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("router_dtype", ("bfloat16", "float16", "float32"))
def test_experts_in_16_bits_with_any_router(router_dtype):
    x, params = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), draw(4, 3))
    router = params["router"].replace(kernel=params["router"].kernel.astype(router_dtype))
    params["router"] = router.replace(select_bias=np.zeros(EXPERTS, np.float32))
    options = dict(axes=ma.Axes("ep", tensor="tensor"))
    options |= dict(num_chunks=2, capacity=8, wire_dtype=jnp.float32)
    with jax.set_mesh(mesh_of(Explicit, ep=2, tensor=2)):
        y, losses, stats = jax.eval_shape(layer_of(**options), params, x)
    assert (y.shape, y.dtype) == (x.shape, jnp.bfloat16)
    assert all(loss.dtype == jnp.float32 for loss in losses)
    assert stats.load.wanted_per_expert.dtype == jnp.int32


def test_an_axis_that_spans_hosts_is_divided_into_two_levels(monkeypatch):
    mesh, hosts = mesh_of(data=1, ep=4), 2

    def hosts_of(mesh, axes):
        sizes = [mesh.shape[axis] for axis in axes]
        return np.arange(4).reshape(1, *sizes) // (4 // hosts)

    x, params = draw(8, 3)

    def program(group):
        def loss(params, x):
            y, stats = ma.moe(x, **params, axes=group, exchange=ma.Exchange(capacity_factor=1.0))
            return jnp.sum(y**2), (y, stats.num_dropped)

        return jax.checkpoint(loss)

    def run():
        grads, (y, dropped) = harness.quickly(jax.grad(program("ep"), has_aux=True))(params, x)
        return jax.tree.map(np.asarray, (grads, y, dropped))

    def levels(group):
        jaxpr = jax.make_jaxpr(program(group))(params, x)
        groups = [eqn.params.get("group") for eqn in harness.equations(jaxpr)]
        return {group.axis_name for group in groups if group is not None}

    with jax.set_mesh(mesh):
        expected = run()
        assert levels("ep") == {"ep"}
        monkeypatch.setattr(group_value, "hosts_of", hosts_of)
        assert levels("ep") == {"host", "ep"}
        actual = run()
    assert levels(ma.Group(mesh, "ep", timeout=5.0)) == {"host", "ep"}
    assert expected[2] == actual[2] > 0
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5)
    jax.tree.map(close, actual, expected)
