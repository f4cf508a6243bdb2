"""Compare balance losses, quantile balancing and `stats.summary()` with numpy formulas."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import quickly
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

pytestmark = harness.OF_SEVERAL_AXES
EXPERTS, TOP_K, HIDDEN = 8, 3, 4
MICRO_BATCHES, SEQUENCES, LENGTH = 3, 4, 5
axis_types = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)


def dense_loss(scores, ids, earlier=0):
    """Return E * sum(f * P) of scores [..., E] and ids [..., K], in float64."""
    scores, ids = scores.reshape(-1, EXPERTS), ids.reshape(len(scores.reshape(-1, EXPERTS)), -1)
    counts = np.array([(ids == e).sum() for e in range(EXPERTS)]) + earlier
    mean = scores[(ids >= 0).any(axis=1)].mean(axis=0)
    return EXPERTS * (counts / counts.sum() * mean).sum()


def dense_losses(kernel, x, ids):
    """Return three losses of each micro-batch: one that includes the counts of earlier
    micro-batches, one that is a mean over sequences, and one of only the first choices."""
    logits = x.astype(np.float64) @ kernel
    scores = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    counts, losses = np.zeros(EXPERTS), []
    for p, chosen in zip(scores, ids):
        of_sequences = [dense_loss(*sequence) for sequence in zip(p, chosen)]
        first = dense_loss(p, chosen[..., :1])
        losses.append([dense_loss(p, chosen, counts), np.mean(of_sequences), first])
        counts += np.bincount(chosen[chosen >= 0], minlength=EXPERTS)
    return np.array(losses)


@axis_types
def test_losses_over_micro_batches_equal_dense_losses(axis_type):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    experts = ma.Experts(draw(EXPERTS, HIDDEN, 2, 1), draw(EXPERTS, 1, HIDDEN))
    kernel, x = draw(HIDDEN, EXPERTS), draw(MICRO_BATCHES, SEQUENCES, LENGTH, HIDDEN)
    mask = rng.random(x.shape[:-1]) < 0.8
    factors = np.array([1, 2, 3], np.float32)

    def losses(kernel, x, mask):
        router = ma.Router(kernel, choose=ma.TopK(TOP_K))

        def micro_batch(counts, batch):
            x, mask = batch
            axes, outputs = ma.Axes("ep", data="data"), ("logits", "choices")
            _, stats = ma.moe(x, router, experts, axes=axes, mask=mask, outputs=outputs)
            scores, ids = jax.nn.softmax(stats.logits), stats.choices.ids
            running = ma.load_balancing_loss(scores, ids, counts=counts)
            of_sequences = jax.vmap(ma.load_balancing_loss)(scores, ids).mean()
            first = ma.load_balancing_loss(scores, ids[..., :1])
            counts += stats.load.wanted_per_expert
            return counts, (jnp.stack([running, of_sequences, first]), ids)

        found, ids = lax.scan(micro_batch, jnp.zeros(EXPERTS, jnp.int32), (x, mask))[1]
        return (found * factors[None]).sum(), (found, ids)

    with jax.set_mesh(harness.mesh_over(axis_type, data=2, ep=2)):
        gradient, (found, ids) = quickly(jax.grad(losses, has_aux=True))(kernel, x, mask)
    ids = np.asarray(ids)
    np.testing.assert_array_equal((ids >= 0).all(axis=-1), mask)
    np.testing.assert_allclose(found, dense_losses(kernel, x, ids), rtol=1e-5)
    for i in np.ndindex(kernel.shape):
        step = np.zeros(kernel.shape)
        step[i] = 1e-5
        ends = (dense_losses(kernel + sign * step, x, ids) * factors for sign in (1, -1))
        difference = (next(ends).sum() - next(ends).sum()) / 2e-5
        np.testing.assert_allclose(gradient[i], difference, rtol=1e-4, atol=1e-6)


def test_counts_of_earlier_micro_batches_enter_the_loss_and_have_no_gradient():
    rng = np.random.default_rng(1)
    scores = rng.random((2, 6, EXPERTS)).astype(np.float32)
    scores /= scores.sum(axis=-1, keepdims=True)
    ids, counts = rng.integers(0, EXPERTS, (2, 6, TOP_K)), rng.random(EXPERTS).astype(np.float32)

    def of(counts):
        own = lambda *arrays: ma.load_balancing_loss(*arrays, counts=counts, axis_name="ep")
        return jax.vmap(own, axis_name="ep", out_axes=None)(scores, ids)

    found, gradient = jax.value_and_grad(of)(counts)
    np.testing.assert_allclose(found, dense_loss(scores, ids, counts), rtol=1e-6)
    assert not gradient.any()


def dense_histogram(scores, bias, k, num_bins):
    """Return the biases [T, E] above which tokens choose experts, and each expert's histogram of
    these biases."""
    cutoffs = np.sort(scores + bias, axis=1)[:, -k - 1, None]
    edges = np.linspace(bias.min() - 1, bias.max() + 1, num_bins + 1)
    biases = cutoffs - scores
    return biases, np.stack([np.histogram(of_expert, edges)[0] for of_expert in biases.T])


def dense_next_bias(bias, histogram, k):
    """Return the quantile k / E of each histogram, minus the mean of these quantiles."""
    width = (bias.max() - bias.min() + 2) / histogram.shape[1]
    found = []
    for counts in histogram:
        wanted = counts.sum() * k / len(bias)
        i = int(np.argmax(np.cumsum(counts) >= wanted))
        found.append((i + (wanted - counts[:i].sum()) / counts[i]) * width)
    return np.array(found) - np.mean(found)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("score, num_bins", [("sigmoid", 50), ("softmax", 200)])
def test_the_next_bias_is_the_centered_quantile_of_the_biases_that_tokens_need(score, num_bins):
    """The next bias is the histogram's quantile, or the old bias if the histogram is empty."""
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(4, 37, EXPERTS)).astype(np.float32) + np.arange(EXPERTS, dtype="f")
    mask = rng.random((4, 37)) < 0.9
    bias = rng.normal(size=EXPERTS).astype(np.float32) / 9
    choose = ma.TopK(TOP_K, score=score)
    scores = np.asarray(getattr(jax.nn, score)(logits), np.float64)[mask]
    assert len(scores) * TOP_K % EXPERTS
    biases, expected = dense_histogram(scores, bias.astype(np.float64), TOP_K, num_bins)

    logits = np.where(mask[..., None], logits, np.nan)
    histogram = quickly(functools.partial(choose.bias_histogram, num_bins=num_bins))(
        logits, select_bias=bias, mask=mask
    )
    assert np.abs(histogram - expected).sum() <= 4  # float32 may round across the edge of a bin
    found = quickly(functools.partial(ma.quantile_select_bias, k=TOP_K))(bias, histogram)
    right = dense_next_bias(bias.astype(np.float64), np.asarray(histogram), TOP_K)
    np.testing.assert_allclose(found, right, atol=1e-5)
    exact = np.quantile(biases, TOP_K / EXPERTS, axis=0)
    width = (bias.max() - bias.min() + 2) / num_bins
    np.testing.assert_allclose(found, exact - exact.mean(), atol=2 * width)

    empty = ma.quantile_select_bias(bias, np.zeros_like(histogram), TOP_K)
    np.testing.assert_array_equal(empty, bias)


@pytest.mark.exchanges(0)
def test_counts_of_many_tokens_have_an_exact_quantile():
    """The quantile 2 / 3 of 2**31 - 1 tokens is in a bin of three tokens."""
    whole = 2 * (2**31 - 1) // 3
    histogram = np.array([[whole, 3, 2**31 - 4 - whole], [1, 0, 0], [0, 1, 0]], np.int32)
    found = ma.quantile_select_bias(jnp.zeros(3), histogram, k=2)
    right = np.array([1 + (2 / 3) / 3, 2 / 3, 1 + 2 / 3]) * 2 / 3
    np.testing.assert_allclose(found, right - right.mean(), rtol=1e-6)


@axis_types
@pytest.mark.exchanges(0)
def test_quantile_balancing_counts_the_tokens_of_all_ranks(axis_type):
    logits = np.random.default_rng(3).normal(size=(12, EXPERTS)).astype(np.float32)
    bias = np.linspace(-0.2, 0.2, EXPERTS, dtype=np.float32)
    choose = ma.TopK(TOP_K, score="sigmoid")

    def update(logits, bias, axis_name=None):
        histogram = choose.bias_histogram(logits, select_bias=bias, num_bins=64)
        return ma.quantile_select_bias(bias, histogram, TOP_K, axis_name=axis_name)

    right = quickly(update)(logits, bias)
    mesh = harness.mesh_over(axis_type, data=2, ep=2)
    with jax.set_mesh(mesh):
        divided = jax.device_put(logits, NamedSharding(mesh, P(("data", "ep"))))
        on_ranks = jax.shard_map(
            functools.partial(update, axis_name=("data", "ep")),
            in_specs=(P(("data", "ep")), P()),
            out_specs=P(),
        )
        for fn in update, on_ranks:
            np.testing.assert_allclose(quickly(fn)(divided, bias), right, atol=1e-6)


@pytest.mark.exchanges(0)
def test_histograms_of_micro_batches_add_up_for_each_layer():
    logits = np.random.default_rng(5).normal(size=(2, 2, 6, EXPERTS)).astype(np.float32)
    bias = np.stack([np.linspace(-x, x, EXPERTS, dtype=np.float32) for x in (0.1, 0.3)])
    count = lambda x, bias: ma.TopK(TOP_K).bias_histogram(x, select_bias=bias, num_bins=64)

    @quickly
    def update(logits):  # [layers, micro-batches, tokens, E]
        add = lambda total, x: (total + jax.vmap(count)(x, bias), None)
        zeros = jnp.zeros((2, EXPERTS, 64), jnp.int32)
        histogram, _ = lax.scan(add, zeros, logits.swapaxes(0, 1))
        return ma.quantile_select_bias(bias, histogram, TOP_K)

    each = [ma.quantile_select_bias(b, count(x, b), TOP_K) for x, b in zip(logits, bias)]
    np.testing.assert_allclose(update(logits), each, atol=1e-6)


@pytest.mark.exchanges(0)
def test_a_skewed_router_is_balanced_in_four_steps():
    rng = np.random.default_rng(4)
    logits = (rng.normal(size=(512, 16)) + np.linspace(-2, 2, 16)).astype(np.float32)
    choose = ma.TopK(2, score="sigmoid")

    @quickly
    def step(bias):
        counts = jax.nn.one_hot(choose(logits, select_bias=bias).ids, 16).sum(axis=(0, 1))
        histogram = choose.bias_histogram(logits, select_bias=bias)
        bias = ma.quantile_select_bias(bias, histogram, k=2)
        return bias, counts.max() / counts.mean()

    bias, history = jnp.zeros(16), []
    for _ in range(5):
        bias, ratio = step(bias)
        history.append(float(ratio))
    assert history[0] > 3 and history[-1] < 1.1, history


def test_the_summary_has_scalars_inside_and_outside_of_jit():
    experts = ma.Experts(np.zeros((4, 1, 2, 1), np.float32), np.zeros((4, 1, 1), np.float32))
    ids = np.array([[0], [0], [0], [1], [0], [1], [9], [-1]], np.int32)

    def layer(ids):
        choices, exchange = ma.RouterChoices(ids, None), ma.Exchange(capacity=3)
        _, stats = ma.moe(jnp.zeros((8, 1)), choices, experts, axes="ep", exchange=exchange)
        return stats, stats.summary()

    with jax.set_mesh(harness.mesh_over(ep=2)), pytest.warns(UserWarning, match="capacity"):
        stats, found = jax.device_get(quickly(layer)(ids))
    shares = np.array([4, 2]) / 6
    right = dict(balance_loss=0, z_loss=0, max_over_mean=2, expert_max_over_mean=4 * 4 / 6)
    right |= dict(entropy=-(shares * np.log(shares)).sum() / np.log(4), num_idle=2, num_invalid=1)
    right |= dict(num_dropped=3, dropped_share=0.5)
    assert found == pytest.approx(right)
    assert jax.device_get(stats.summary()) == found
    of_steps = jax.tree.map(lambda x: np.stack([x, x, x]), stats).summary()
    assert {name: value.tolist() for name, value in of_steps.items()} == {
        name: [value] * 3 for name, value in found.items()
    }
