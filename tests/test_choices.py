"""Test `ma.moe` with given choices, replayed choices or a user's router against a layer without
exchange."""

import functools
import math

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_layer import dense_experts
from harness import mesh_over as mesh_of
from harness import quickly
from jax.sharding import AxisType
from small_layer import assert_close

import jax_moe_a2a as ma

pytestmark = harness.OF_SEVERAL_AXES
HIDDEN, WIDTH, EXPERTS, TOP_K, LEAD = 6, 4, 8, 2, (3, 5)
Auto, Explicit = AxisType.Auto, AxisType.Explicit
POSITIONS = np.arange(math.prod(LEAD)).reshape(LEAD)
MASK = POSITIONS % 7 != 3
TABLE = np.random.default_rng(2).integers(0, EXPERTS, (math.prod(LEAD), TOP_K))


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = normal(0, *LEAD, HIDDEN)
OWN = ma.Experts(normal(1, EXPERTS, HIDDEN, 2, WIDTH) / 2, normal(2, EXPERTS, WIDTH, HIDDEN) / 2)
KERNEL, BIAS = normal(3, HIDDEN, EXPERTS), normal(4, EXPERTS)
TOPK = ma.Router(KERNEL, BIAS, choose=ma.TopK(TOP_K, score="sigmoid", scale=2.0))


def axes_of(mesh):
    return ma.Axes("ep", data="data") if "data" in mesh.shape else "ep"


def reference(params, x, read=None, mask=None):
    """Compute every expert for every token, after one call of the router for all tokens."""
    flat = lambda array: array.reshape(-1, *array.shape[len(LEAD) :])
    router, tokens = params["router"], flat(x if read is None else read)
    logits = tokens @ router.kernel + (0 if router.bias is None else router.bias[None])
    per_token = jax.tree.map(flat, router.per_token)
    ids, weights, _ = router.choose(tokens, logits, per_token, router.whole)
    weights = jnp.ones(ids.shape) if weights is None else weights
    y = dense_experts(flat(x), weights, ids, params["experts"]).reshape(x.shape)
    return y if mask is None else jnp.where(mask[..., None], y, 0)


def value_and_grads(layer, params, x):
    is_float = lambda a: jnp.issubdtype(jnp.asarray(a).dtype, jnp.floating)
    leaves, treedef = jax.tree.flatten(params)
    floats = {i: leaf for i, leaf in enumerate(leaves) if is_float(leaf)}

    def loss(floats, x):
        y = layer(treedef.unflatten([floats.get(i, leaf) for i, leaf in enumerate(leaves)]), x)
        return jnp.sum(jnp.sin(y)), y

    (_, y), grads = quickly(jax.value_and_grad(loss, (0, 1), has_aux=True))(floats, x)
    return y, grads


def sum_of(fn):
    return lambda *args: jnp.sum(jnp.sin(fn(*args)))


def options_of(options):
    table = options.get("placement")
    placement = table and ma.Placement.from_slots(table, EXPERTS, num_ranks=2)
    return harness.exchanging(options, placement=placement)


REPLICAS = [0, 1, 2, 3, 4, 0, 4, 5, 6, 7, 0, -1]  # for 2 ranks


@pytest.mark.parametrize(
    "mesh, options",
    [
        (dict(ep=2, axis_type=Explicit), dict(mask=MASK, num_chunks=3)),
        (dict(ep=2), dict(placement=REPLICAS)),
        (dict(ep=2, axis_type=Explicit), dict(replicated=True)),
        (dict(data=2, ep=4), dict(mask=MASK)),
    ],
    ids=["2 in chunks", "2 with replicas", "2 replicated", "2 by 4 masked"],
)
def test_replayed_and_given_choices_equal_those_of_the_router(mesh, options):
    """With replayed or given choices, a layer has the outputs of the layer whose router chose them.
    With replayed choices, it also has the statistics and gradients of that layer."""
    mesh, options = mesh_of(**mesh), options_of(options)
    mask = options.get("mask", np.ones(LEAD, bool))

    def layer(router, experts, x):
        outputs = ("choices",)
        return ma.moe(x, router, experts, axes=axes_of(mesh), outputs=outputs, **options)

    def loss(router_of, router, experts, x):
        y, stats = layer(router_of(router), experts, x)
        return jnp.sum(jnp.sin(y)) + stats.balance_loss + stats.z_loss, (y, stats)

    @quickly
    def run(router, experts, x):
        args = router, experts, x
        grad = functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
        expected = grad(functools.partial(loss, lambda router: router))(*args)
        ids, weights, _ = expected[0][1][1].choices
        replayed = grad(functools.partial(loss, lambda router: router.replay(ids)))(*args)
        of_weights = lambda weights: ma.RouterChoices(ids, weights)
        given = grad(functools.partial(loss, of_weights))(weights, experts, x)
        return expected, replayed, given

    with jax.set_mesh(mesh):
        x = np.where(mask[..., None], X, np.nan)
        expected, replayed, given = run(TOPK, OWN, x)
    assert_close(replayed, expected, tolerance=1e-6)
    (_, (y, stats)), (of_weights, *of_experts) = given
    (_, (y_router, of_router)), of_all = expected
    ids, weights, _ = jax.device_get(stats.choices)
    assert ids.shape == weights.shape == (*LEAD, TOP_K)
    right = y_router, of_router.choices, of_router.load
    assert_close((y, stats.choices, stats.load), right, tolerance=1e-6)
    assert_close(of_experts[0], of_all[1], tolerance=1e-6)
    assert float(stats.balance_loss) == float(stats.z_loss) == 0 < float(of_router.balance_loss)
    assert (ids[~mask] == -1).all() and (weights[~mask] == 0).all()
    assert np.isfinite(jax.tree.leaves(jax.tree.map(jnp.sum, of_all))).all()
    of_choices = lambda weights: dense_experts(X, weights, ids, OWN)
    assert_close((y, of_weights), (of_choices(weights), jax.grad(sum_of(of_choices))(weights)))


def weigh(scores, ids):
    """Return choices of `ids` whose weights are their scores, divided by the sum of the scores."""
    weights = jnp.sum(jax.nn.one_hot(ids, scores.shape[-1]) * scores[:, None], axis=-1)
    return ma.RouterChoices(ids, weights / weights.sum(axis=-1, keepdims=True))


def hashed(tokens, logits, token_ids, table):
    return weigh(jax.nn.sigmoid(logits), table[token_ids])


def sqrt_softplus(tokens, logits, _, bias):
    scores = jnp.sqrt(jax.nn.softplus(logits)) * jnp.exp(bias)[None]
    return weigh(scores, ma.TopK(TOP_K)(scores).ids)._replace(scores=scores)


def with_identity(tokens, logits, _, __):
    """Replace the last two experts, which compute nothing, by -1 in the choices."""
    choices = weigh(jax.nn.softmax(logits), ma.TopK(3)(logits).ids)
    return choices._replace(ids=jnp.where(choices.ids < EXPERTS, choices.ids, -1))


def scaled(tokens, logits, per_token, whole):
    """Scale each token's logits, then choose experts; the scales of masked tokens are NaN."""
    choices = ma.TopK(TOP_K)(logits * jnp.sqrt(per_token["scale"])[:, None])
    return choices._replace(weights=choices.weights * jnp.cos(tokens[:, :1]))


def unweighted(tokens, logits, _, __):
    return ma.RouterChoices(ma.TopK(1)(logits).ids.astype(jnp.uint8), None)


SCALES = np.where(MASK, 1 + POSITIONS, np.nan).astype(np.float32)
ROUTERS = {
    "hash layer": ma.Router(KERNEL, choose=hashed, per_token=POSITIONS, whole=TABLE),
    "sqrt of softplus": ma.Router(KERNEL, BIAS, choose=sqrt_softplus, whole=BIAS / 4),
    "more logits": ma.Router(normal(5, HIDDEN, EXPERTS + 2), choose=with_identity),
    "scales": ma.Router(KERNEL, choose=scaled, per_token=dict(scale=SCALES)),
    "unweighted": ma.Router(KERNEL, choose=unweighted),
}


@pytest.mark.parametrize(
    "name, mesh, options",
    [
        ("hash layer", dict(ep=1), {}),
        ("hash layer", dict(ep=8, axis_type=Explicit), dict(mask=MASK)),
        ("sqrt of softplus", dict(ep=2, axis_type=Explicit), dict(num_chunks=2)),
        ("more logits", dict(data=2, ep=4, axis_type=Explicit), {}),
        ("more logits", dict(ep=2), dict(placement=REPLICAS)),
        ("scales", dict(data=2, ep=4), dict(mask=MASK)),
        ("unweighted", dict(ep=2), dict(mask=MASK)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_router_of_the_users_reads_the_arrays_of_its_tokens(name, mesh, options):
    mesh, options = mesh_of(**mesh), options_of(options)
    params = dict(router=ROUTERS[name], experts=OWN)
    layer = lambda params, x: ma.moe(x, **params, axes=axes_of(mesh), **options)[0]
    with jax.set_mesh(mesh):
        found = value_and_grads(layer, params, X)
    mask = options.get("mask")
    if name == "scales":
        params["router"] = params["router"].replace(
            per_token=dict(scale=jnp.nan_to_num(SCALES, nan=1))
        )
    expected = value_and_grads(lambda *args: reference(*args, mask=mask), params, X)
    assert_close(found, expected)


def test_zero_computation_experts_weigh_the_token_outside_of_the_layer():
    """In the statistics, choices of -1 have weights, but add nothing to `num_invalid` or loads."""
    params = dict(router=ROUTERS["more logits"], experts=OWN)
    with jax.set_mesh(mesh_of(ep=2)):
        layer = lambda params: ma.moe(X, **params, axes="ep", outputs=("choices", "logits"))
        y, stats = quickly(layer)(params)
    ids, weights, scores = stats.choices
    assert scores is None and stats.logits.shape == (*LEAD, EXPERTS + 2)
    assert (ids == -1).any() and (np.asarray(weights)[ids == -1] > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    assert stats.num_invalid == 0
    assert int(stats.load.wanted_per_expert.sum()) == int((ids >= 0).sum())


def noisy(tokens, logits, positions, key):
    draw = lambda position: jax.random.normal(jax.random.fold_in(key, position), (EXPERTS,))
    return ma.TopK(TOP_K)(logits + jax.vmap(draw)(positions))


def test_noise_of_a_key_that_is_folded_by_the_position_does_not_depend_on_the_mesh():
    router = ma.Router(KERNEL, choose=noisy, per_token=POSITIONS, whole=jax.random.key(0))
    layer = lambda router, x: ma.moe(x, router, OWN, axes="ep", outputs=("choices",))
    found = []
    for size, axis_type in ((1, Auto), (8, Explicit)):
        with jax.set_mesh(mesh_of(axis_type, ep=size)):
            y, stats = quickly(layer)(router, X)
        found.append(jax.device_get((y, *stats.choices[:2])))
    noiseless = TOPK.replace(bias=None).choose(X @ KERNEL).ids
    assert (np.asarray(noiseless) != found[0][1]).any()
    np.testing.assert_array_equal(found[1][1], found[0][1])
    assert_close(found[1], found[0])


def test_the_router_reads_another_array_than_the_experts():
    read = normal(6, *LEAD, 9)
    choose = lambda tokens, logits, *_: TOPK.choose(logits)
    params = dict(router=ma.Router(normal(7, 9, EXPERTS), choose=choose), experts=OWN)
    call = lambda router: lambda params, arrays: ma.moe(
        arrays[0],
        **params | dict(router=router(params["router"])),
        router_input=jnp.where(MASK[..., None], arrays[1], jnp.nan),
        axes="ep",
        mask=MASK,
    )[0]  # fmt: skip
    with jax.set_mesh(mesh_of(Explicit, ep=2)):
        found = value_and_grads(call(lambda router: router), params, (X, read))
        same = value_and_grads(call(lambda r: r.replace(choose=TOPK.choose)), params, (X, read))
    of_all = lambda params, arrays: reference(params, *arrays, mask=MASK)
    assert_close(found, value_and_grads(of_all, params, (X, read)))
    assert_close(same, found, tolerance=1e-6)


@pytest.mark.parametrize("lead", ((), (0, 2)), ids=str)
def test_any_number_of_tokens_has_choices(lead):
    ids, weights = np.zeros((*lead, 1), np.int64) + 3, np.ones((*lead, 1), np.float32)
    x = np.broadcast_to(X[0, 0], (*lead, HIDDEN))
    with jax.set_mesh(mesh_of(Explicit, ep=2)):
        for router in (ma.RouterChoices(ids, weights), TOPK.replay(ids)):
            layer = lambda router: ma.moe(x, router, OWN, axes="ep")
            y, stats = quickly(layer)(router)
            assert stats.load.wanted_per_expert[3] == math.prod(lead)
    scale = TOPK.choose.replay(x @ KERNEL + BIAS, ids).weights
    assert_close(y, dense_experts(x, scale, ids, OWN))


def test_ids_of_no_expert_compute_nothing():
    """Ids outside of the valid range, also beyond int32, are counted as invalid and compute
    nothing."""
    bad = np.array([2**32, 2**40 + 1, -7, EXPERTS, -1])
    ids = np.where(POSITIONS < 5, np.resize(bad, LEAD), 1)[..., None]
    with jax.set_mesh(mesh_of(ep=1)):
        for router in (ma.RouterChoices(ids), TOPK.replay(ids)):
            y, stats = quickly(lambda router=router: ma.moe(X, router, OWN, axes="ep"))()
            assert stats.num_invalid == 4 and not y[0].any() and y[1:].all()


@pytest.mark.exchanges(0)
def test_placements_of_stacked_layers_are_refused():
    stacked = dict(experts=jax.tree.map(lambda w: w[None], OWN))
    with pytest.raises(ValueError, match=r"of one layer .*experts.w_out=\[1, 8, 4, 6\].*None"):
        ma.moe_partition_specs(stacked, "ep")
    with pytest.raises(ValueError, match="names router, experts and shared; got 'weights'"):
        ma.moe_partition_specs(dict(weights=KERNEL), "ep")
