"""Compare routers and balance losses with numpy formulas."""

import dataclasses
import functools
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)

TOKENS, EXPERTS, TOP_K = 24, 16, 4
BIAS = np.linspace(-0.2, 0.2, EXPERTS, dtype=np.float32)
GROUPS = dict(num_groups=4, top_groups=2)
ROUTERS = {
    "softmax": {},
    "softmax, not renormalized": dict(renormalize=False),
    "sigmoid": dict(score="sigmoid", renormalize=False, scale=2.0),
    "sigmoid with groups": dict(score="sigmoid", select_bias=BIAS, scale=2.5, **GROUPS),
    "softmax with groups": dict(renormalize=False, scale=16.0, top_in_group=1, **GROUPS),
}
all_routers = pytest.mark.parametrize("options", ROUTERS.values(), ids=ROUTERS)


def choose(logits, k, *, select_bias=None, mask=None, **options):
    return ma.TopK(k, **options)(logits, select_bias=select_bias, mask=mask)


route = jax.jit(
    choose,
    static_argnames=[field.name for field in dataclasses.fields(ma.TopK)],
)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logits_of(seed, *batch):
    shape = (*batch, TOKENS, EXPERTS)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def objective(logits, mask=None, **options):
    found = choose(logits, TOP_K, mask=mask, **options)
    factors = jnp.arange(1, TOP_K + 1, dtype=found.weights.dtype)
    balance = ma.load_balancing_loss(found.scores, found.ids)
    return (found.weights**2).sum(0) @ factors + balance + ma.router_z_loss(logits, mask=mask)


@pytest.mark.parametrize(
    "top_k, renormalize, sums_to_1", ((TOP_K, None, True), (TOP_K, False, False), (1, None, False))
)
def test_softmax_scores(top_k, renormalize, sums_to_1):
    """A single weight is not normalized, because the router would then get no gradient."""
    logits = logits_of(1)
    found = route(logits, top_k, renormalize=renormalize)
    scores = softmax(logits.astype(np.float64))
    ids = np.argsort(-scores, -1)[:, :top_k]
    weights = np.take_along_axis(scores, ids, -1)
    if sums_to_1:
        weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-5)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)


@pytest.mark.parametrize("top_in_group", (1, 2, 3))
def test_sigmoid_scores_with_bias_and_groups(top_in_group):
    logits = logits_of(2)
    options = ROUTERS["sigmoid with groups"] | dict(top_in_group=top_in_group)
    found = route(logits, TOP_K, **options)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    biased = (scores + BIAS).reshape(TOKENS, 4, -1)
    group_scores = np.sort(biased, -1)[..., -top_in_group:].sum(-1)
    best = np.argsort(-group_scores, -1)[:, :2]
    allowed = np.zeros((TOKENS, 4), bool)
    np.put_along_axis(allowed, best, True, -1)
    selectable = np.where(allowed[..., None], biased, -np.inf).reshape(TOKENS, EXPERTS)
    ids = np.argsort(-selectable, -1)[:, :TOP_K]
    weights = np.take_along_axis(scores, ids, -1)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(
        found.weights, 2.5 * weights / weights.sum(-1, keepdims=True), rtol=1e-5
    )


def test_losses():
    logits = logits_of(3)
    found = route(logits, TOP_K)
    scores = softmax(logits.astype(np.float64))
    share = np.bincount(np.asarray(found.ids).ravel(), minlength=EXPERTS) / (TOKENS * TOP_K)
    np.testing.assert_allclose(
        ma.load_balancing_loss(found.scores, found.ids),
        EXPERTS * (share * scores.mean(0)).sum(),
        rtol=1e-5,
    )
    lse = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(ma.router_z_loss(logits), (lse**2).mean(), rtol=1e-5)


def test_a_token_whose_scores_are_all_zero_counts_with_equal_shares():
    scores, ids = np.array([[1, 3], [0, 0]], np.float32), np.array([[1], [1]])
    value, gradient = jax.value_and_grad(ma.load_balancing_loss)(scores, ids)
    assert value == 2 * (3 / 4 + 1 / 2) / 2
    assert np.isfinite(gradient).all() and not gradient[1].any()


@all_routers
def test_derivatives_are_those_of_finite_differences(options):
    fn = functools.partial(objective, **options)
    with jax.enable_x64(True):
        logits, direction = (jnp.asarray(logits_of(seed), "float64") for seed in (5, 6))

        @jax.jit
        def derivatives(logits):
            slope = lambda x: jax.jvp(fn, (x,), (direction,))[1]
            along = lambda gradient: jnp.vdot(gradient, direction)
            reverse = along(jax.grad(fn)(logits)), along(jax.grad(slope)(logits))
            return fn(logits), slope(logits), *reverse

        step = 1e-5  # so small that the choices stay the same
        before, here, after = (derivatives(logits + n * step * direction) for n in (-1, 0, 1))
        first, second = ((after[n] - before[n]) / (2 * step) for n in (0, 1))
        np.testing.assert_allclose(here[1:], (first, first, second), rtol=1e-6)


def test_the_selection_bias_has_no_gradient():
    def weights(bias):
        found = choose(logits_of(7), TOP_K, score="sigmoid", select_bias=bias)
        return found.weights.sum() + found.scores.sum()

    np.testing.assert_array_equal(jax.grad(weights)(BIAS), 0)


@pytest.mark.parametrize("name", ("softmax", "sigmoid with groups"))
def test_masked_tokens_take_no_part(name):
    options, mask = ROUTERS[name], np.arange(TOKENS) % 3 > 0
    logits = np.where(mask[:, None], logits_of(4), np.nan)
    fn = jax.jit(jax.value_and_grad(functools.partial(objective, **options)))
    found, gradient = fn(logits, mask)
    expected, expected_gradient = fn(logits[mask])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient[mask], expected_gradient, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(gradient[~mask], 0)
    choices = route(logits, TOP_K, mask=mask, **options)
    np.testing.assert_array_equal((np.asarray(choices.ids) == -1).all(-1), ~mask)
    np.testing.assert_array_equal(choices.ids[mask], route(logits[mask], TOP_K, **options).ids)
    for array in choices.weights, choices.scores:
        np.testing.assert_array_equal(array[~mask], 0)
    nothing, gradient = fn(np.full_like(logits, np.nan), np.zeros_like(mask))
    assert nothing == 0
    np.testing.assert_array_equal(gradient, 0)


@all_routers
def test_batches(options):
    logits, mask = logits_of(8, 3), np.arange(3 * TOKENS).reshape(3, TOKENS) % 5 > 0
    on_batch = lambda logits, mask: route(logits, TOP_K, mask=mask, **options)
    expected = [on_batch(*element) for element in zip(logits, mask, strict=True)]
    for found in jax.vmap(on_batch)(logits, mask), on_batch(logits, mask):
        for array, right in zip(found, map(jnp.stack, zip(*expected, strict=True)), strict=True):
            np.testing.assert_allclose(array, right, rtol=1e-5)


@pytest.mark.several_devices("Explicit axes need a mesh")
def test_explicit_axes():
    mesh = harness.mesh_over(jax.sharding.AxisType.Explicit, data=harness.SEVERAL)
    logits, mask = logits_of(13), np.arange(TOKENS) % 3 > 0
    fn = functools.partial(objective, **ROUTERS["sigmoid with groups"])
    expected = jax.jit(jax.value_and_grad(fn))(logits, mask)
    with jax.set_mesh(mesh):
        found = harness.jit(jax.value_and_grad(fn))(
            *harness.put((logits, mask), jax.NamedSharding(mesh, jax.P("data")))
        )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, found, expected)


def test_equal_scores_choose_the_lowest_ids():
    zeros = np.zeros((2, EXPERTS), np.float32)
    for options in {}, dict(score="sigmoid"), GROUPS, dict(select_bias=0 * BIAS):
        found = route(zeros, TOP_K, **options)
        np.testing.assert_array_equal(found.ids, np.tile(np.arange(TOP_K), (2, 1)))
        np.testing.assert_allclose(found.weights, 1 / TOP_K)
    loss = ma.load_balancing_loss(found.scores, route(zeros, EXPERTS).ids)
    np.testing.assert_allclose(loss, 1)


def test_zeros_of_both_signs_are_equal():
    zeros = np.array([[-0.0, 0.0, -1.0, -0.0]], np.float32)
    for options in {}, dict(select_bias=zeros[0]), dict(num_groups=2, top_groups=2):
        assert route(zeros, 3, **options).ids.tolist() == [[0, 1, 3]]


@pytest.mark.several_devices("Auto axes need a mesh")
@pytest.mark.parametrize("options", ({}, GROUPS), ids=("all", "groups"))
def test_ids_alone_are_right_over_auto_axes(options):
    """On GPUs, XLA returns zeros for the ids of a lax.top_k whose values are unused."""
    mesh = harness.mesh_over(data=harness.SEVERAL)
    logits = logits_of(14)
    ids_of = jax.jit(lambda logits: choose(logits, TOP_K, **options).ids)
    put = harness.put(logits, jax.NamedSharding(mesh, jax.P("data")))
    found = harness.numpy_of(ids_of(put))
    np.testing.assert_array_equal(found, route(logits, TOP_K, **options).ids)
    text = ids_of.lower(put).compile().as_text()
    assert re.search("topk|sort", text, re.IGNORECASE)
    assert "minimum" in text, "XLA has removed the minimum, which prevents zeros on GPUs"


@pytest.mark.parametrize("score", ("softmax", "sigmoid"))
@pytest.mark.parametrize(
    "logits", ([0, 300, 100, 200], [-300, -120, -200, -150]), ids=("high", "low")
)
def test_scores_that_round_to_the_same_number_keep_their_order(score, logits):
    logits = jnp.array([logits], jnp.float32)
    found = route(logits, 3, score=score)
    assert found.ids.tolist() == np.argsort(-logits)[:, :3].tolist()
    np.testing.assert_allclose(found.weights.sum(), 1, rtol=1e-6)
    weights = lambda x: route(x, 3, score=score).weights
    assert np.isfinite(jax.jit(jax.jacobian(weights))(logits)).all()


@pytest.mark.parametrize("shift", (0, -80, -95, -300))
def test_the_balance_loss_has_no_reward_for_scores_that_are_too_small_for_float32(shift):
    """Logits below -88 have float32 sigmoids of 0, but exact shares that are not 0."""
    logits = logits_of(16) + np.float32(shift)

    def loss(logits):
        found = choose(logits, TOP_K, score="sigmoid")
        return ma.load_balancing_loss(found.scores, found.ids)

    found = jax.jit(jax.value_and_grad(loss))(logits)
    exact = logits.astype(np.float64)
    log_scores = -np.logaddexp(0, -exact)
    shares = softmax(log_scores)
    ids = np.argsort(-exact, -1)[:, :TOP_K]
    of_experts = EXPERTS * np.bincount(ids.ravel(), minlength=EXPERTS) / ids.size
    value = (shares @ of_experts).mean()
    by_score = shares * (of_experts - (shares @ of_experts)[:, None]) / TOKENS
    expected = value, by_score * (1 - np.exp(log_scores))
    assert value > 1
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-7)


def test_logits_of_bfloat16_are_routed_in_float32():
    def weights_and_scores(logits, options):
        found = route(logits, TOP_K, **options)
        return (found.weights**2).sum() + (found.scores**2).sum(), found

    @jax.jit
    def all_routers(logits):
        gradient = jax.grad(weights_and_scores, has_aux=True)
        return [gradient(logits, options) for options in ROUTERS.values()]

    logits = jnp.asarray(logits_of(10), jnp.bfloat16)
    expected = jax.tree.map(np.asarray, all_routers(logits.astype(jnp.float32)))
    for (gradient, found), (right_gradient, right) in zip(
        all_routers(logits), expected, strict=True
    ):
        jax.tree.map(harness.assert_same_bytes, found, right)
        harness.assert_same_bytes(gradient, right_gradient.astype(jnp.bfloat16))


def balance(logits, axis_name=None):
    """Return the sum of both losses, and (balance loss, z-loss, next selection bias)."""
    found = choose(logits, TOP_K)
    counts = jax.nn.one_hot(found.ids, EXPERTS).sum(axis=(0, 1))
    balance_loss = ma.load_balancing_loss(found.scores, found.ids, axis_name=axis_name)
    z_loss = ma.router_z_loss(logits, axis_name=axis_name)
    bias = ma.update_select_bias(jnp.asarray(BIAS), counts, axis_name=axis_name)
    return balance_loss + z_loss, (balance_loss, z_loss, bias)


def assert_balance_is_that_of_all_tokens(on_ranks, logits, put=jnp.asarray):
    gradient, found = harness.jit(jax.grad(on_ranks, has_aux=True))(put(logits))
    tokens = logits.reshape(-1, EXPERTS)
    expected_gradient, expected = jax.jit(jax.grad(balance, has_aux=True))(tokens)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected)
    gradient = np.reshape(gradient, tokens.shape)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-7)


def test_losses_and_bias_of_all_ranks():
    mesh = harness.mesh_of(harness.SEVERAL)
    on_ranks = functools.partial(balance, axis_name=harness.AXIS)
    assert_balance_is_that_of_all_tokens(
        harness.over_ranks(on_ranks, mesh, out_axes=None),
        logits_of(11, harness.SEVERAL),
        put=lambda logits: harness.put(logits, harness.placement(mesh)),
    )


def test_losses_and_bias_over_two_axes():
    on_ranks = functools.partial(balance, axis_name=("data", "ep"))
    for name in "ep", "data":
        on_ranks = jax.vmap(on_ranks, axis_name=name, out_axes=None)
    assert_balance_is_that_of_all_tokens(on_ranks, logits_of(12, 2, 3))


def test_bias_follows_the_choices_before_drops():
    """A count of only the rows that are not dropped would also lower the bias of expert 2."""
    group, bias = harness.emulated_group(2), jnp.zeros(4)
    ids = np.array([[[0], [0], [0], [0]], [[0], [1], [2], [3]]], np.int32)

    def load(ids):
        return ma.expert_load(
            ma.route(ids, group=group, num_experts=4, exchange=ma.Exchange(capacity=1))
        )

    load = jax.jit(jax.vmap(load, axis_name=harness.AXIS, out_axes=None))(ids)
    assert load.rows_per_expert.tolist() == [1, 0, 1, 0]
    assert load.wanted_per_expert.tolist() == [5, 1, 1, 1]
    updated = ma.update_select_bias(bias, load.wanted_per_expert, rate=0.5)
    assert updated.tolist() == [-0.5, 0.5, 0.5, 0.5]
    layers = ma.update_select_bias(jnp.zeros((2, 2)), jnp.array([[3, 1], [2, 2]]), rate=0.5)
    assert layers.tolist() == [[-0.5, 0.5], [0, 0]]


@pytest.mark.parametrize("dtype", ("int32", "uint8", "float32"))
def test_experts_at_the_mean_keep_their_bias(dtype):
    """A float32 mean is a product with 1/E, which may differ from an exact count."""
    for experts in 7, 14, 28, 56, 60, 256:
        counts = np.full(experts, 3, dtype)
        counts[0] += 1
        counts[1] -= 1
        updated = ma.update_select_bias(np.zeros(experts, np.float32), counts, rate=1.0)
        assert updated.tolist() == [-1, 1] + [0] * (experts - 2)


def test_any_integers_are_compared_with_their_mean_exactly():
    large = 2**31 // 8
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 4, (20, 7)).astype(np.int32)
    counts[-1] = [large, large - 1, large + 1, large, large, large, large - 1]
    difference = counts.sum(-1, keepdims=True, dtype=np.int64) - 7 * counts.astype(np.int64)
    updated = ma.update_select_bias(np.zeros((20, 7), np.float32), counts, rate=1.0)
    np.testing.assert_array_equal(updated, np.sign(difference))


def test_a_recentered_bias_has_the_mean_zero_and_the_same_differences():
    counts = np.array([9, 1, 1, 1])
    drifted = ma.update_select_bias(BIAS[:4], counts, rate=0.5)
    centered = ma.update_select_bias(BIAS[:4], counts, rate=0.5, recenter=True)
    assert abs(drifted.mean()) > 0.05
    np.testing.assert_allclose(centered, drifted - drifted.mean(), atol=1e-7)
    np.testing.assert_allclose(centered.mean(), 0, atol=1e-7)


LOGITS = np.zeros((TOKENS, EXPERTS), np.float32)
MASK = np.ones(TOKENS, bool)
IDS = np.zeros((TOKENS, TOP_K), np.int32)


OF_CHOICE = (
    (dict(logits=LOGITS.astype(int)), ("logits must hold floats", "int", "Cast")),
    (dict(logits=np.float32(1)), (r"logits must be .*\[\.\.\., num_experts\]", r"float32\[\]")),
    (dict(k=0), ("k must be at least 1; got 0",)),
    (dict(k=2.0), (r"k must be an int; got 2.0", "use int")),
    (dict(k=17), ("k of TopK must be at most the number of experts, 16; got 17", "last axis")),
    (dict(logits=np.zeros((2, 64), "f"), k=33), ("^k must", "32", "33")),
    (dict(score="tanh"), ('score must be "softmax" or "sigmoid"; got \'tanh\'',)),
    (dict(select_bias=BIAS[:4]), (r"select_bias must .* \[16\]", r"float32\[4\]", "one layer")),
    (dict(select_bias=BIAS.astype(int)), ("select_bias must hold floats", "Cast")),
    (dict(num_groups=4), ("num_groups and top_groups must both", "num_groups=4", "top_groups")),
    (dict(num_groups=5, top_groups=2), ("num_groups must divide the 16 exp", "got 5", "Omit")),
    (dict(num_groups=16, top_groups=4), ("num_groups must divide", "2 or more; got 16")),
    (dict(top_in_group=5, **GROUPS), ("num_groups must divide", "5 or more; got 4")),
    (dict(top_in_group=0), ("top_in_group must be at least 1; got 0",)),
    (dict(num_groups=8, top_groups=1), ("top_groups must be at least 2", "k=4", "got 1")),
    (dict(num_groups=8, top_groups=9), ("at most num_groups=8; got 9",)),
    (dict(renormalize=1), ("renormalize must be a bool; got 1",)),
    (dict(scale=0), ("scale must be a finite number above 0; got 0",)),
    (dict(mask=MASK[:4]), (r"mask must have a boolean for each token, \[24\]", r"bool\[4\]")),
    (dict(mask=IDS[:, 0]), ("mask must hold booleans", "int32", "mask != 0")),
)
balance_of = functools.partial(dict, scores=LOGITS, ids=IDS)
update_of = functools.partial(dict, bias=BIAS, counts=BIAS)
counting = functools.partial(dict, logits=LOGITS, select_bias=BIAS)
quantile_of = functools.partial(dict, bias=BIAS, histogram=np.zeros((EXPERTS, 9), np.int32), k=2)
OF_OTHERS = (
    (ma.load_balancing_loss, balance_of(ids=IDS[:4]), (r"ids must .* \[24, K\]", r"int32\[4,4\]")),
    (ma.load_balancing_loss, balance_of(scores=IDS), ("scores must hold floats", "int32", "Cast")),
    (ma.load_balancing_loss, balance_of(ids=LOGITS), ("ids must hold integers", "float32")),
    (ma.load_balancing_loss, balance_of(counts=IDS[0]), (r"counts must .* \[16\]", r"int32\[4\]")),
    (ma.router_z_loss, dict(logits=LOGITS, mask=MASK[:4]), ("mask must", r"\[24\]", r"bool\[4\]")),
    (ma.router_z_loss, dict(logits=LOGITS, axis_name=0), ("axis_name must be a name", "got 0")),
    (ma.router_z_loss, dict(logits=LOGITS, axis_name=("ep",)), ("axes in scope", "'ep' is not")),
    (ma.update_select_bias, update_of(counts=IDS[0]), ("counts and bias .* shape", r"int32\[4\]")),
    (ma.update_select_bias, update_of(bias=BIAS.astype("f2")), ("32 bits", "float16", "Keep the")),
    (ma.update_select_bias, update_of(counts=BIAS > 0), ("counts must hold integers", "bool")),
    (ma.update_select_bias, update_of(recenter=1), ("recenter must be a bool; got 1",)),
    (ma.update_select_bias, update_of(rate=-1), ("rate must be a finite number above 0; got -1",)),
    (ma.TopK(16).bias_histogram, counting(), ("k below the number of experts, 16", "k=16", "Use")),
    (ma.TopK(2, **GROUPS).bias_histogram, counting(), ("without groups", "num_groups=4")),
    (ma.TopK(2).bias_histogram, counting(num_bins=0), ("num_bins must be at least 1; got 0",)),
    (ma.TopK(2).bias_histogram, counting(select_bias=BIAS[:4]), (r"select_bias must .* \[16\]",)),
    (ma.quantile_select_bias, quantile_of(k=16), ("k must be below .* 16; got 16",)),
    (
        ma.quantile_select_bias,
        quantile_of(bias=BIAS[:4]),
        (r"histogram .* \[4\]", r"int32\[16,9\]"),
    ),
    (ma.quantile_select_bias, quantile_of(histogram=LOGITS), ("histogram must hold int", "scale")),
)
ERRORS = [(choose, dict(logits=LOGITS, k=TOP_K) | own, naming) for own, naming in OF_CHOICE]


@pytest.mark.parametrize("function, arguments, naming", (*ERRORS, *OF_OTHERS))
def test_bad_arguments_are_refused(function, arguments, naming):
    with pytest.raises((TypeError, ValueError)) as refusal:
        jax.eval_shape(functools.partial(function, **arguments))
    for pattern in naming:
        assert re.search(pattern, str(refusal.value)), f"no {pattern!r} in: {refusal.value}"


@all_routers
def test_a_replay_has_the_weights_scores_and_gradients_of_the_choice(options):
    """An id that is no expert has weight 0, and is not in the sum of a token's weights."""
    options = dict(options)
    select_bias = options.pop("select_bias", None)
    topk, mask = ma.TopK(TOP_K, **options), np.arange(TOKENS) % 5 > 0
    logits = np.where(mask[:, None], logits_of(8), np.nan)

    def results(logits, ids=None):
        choices = topk(logits, select_bias=select_bias, mask=mask)
        if ids is not None:
            choices = topk.replay(logits, ids, mask=mask)
        return (choices.weights**2).sum() + (choices.scores**2).sum(), choices

    @jax.jit
    def both(logits):
        of = functools.partial(jax.value_and_grad, has_aux=True)
        expected = of(results)(logits)
        return expected, of(results)(logits, expected[0][1].ids)

    expected, found = both(logits)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, found, expected)
    ids = np.asarray(expected[0][1].ids).copy()
    ids[:, 1:], ids[1] = -1, EXPERTS
    (_, few), gradient = jax.jit(jax.value_and_grad(results, has_aux=True))(logits, ids)
    assert np.isfinite(gradient).all()
    weights = np.asarray(few.weights)
    assert (weights[:, 1:] == 0).all() and (weights[1] == 0).all()
    if options.get("renormalize", True):
        np.testing.assert_allclose(weights[mask][1:, 0], options.get("scale", 1.0), rtol=1e-6)
