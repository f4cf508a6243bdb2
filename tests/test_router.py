"""Compare routers and balance losses with formulas written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)

TOKENS, EXPERTS, TOP_K = 24, 16, 4


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logits_of(seed):
    return np.random.default_rng(seed).normal(size=(TOKENS, EXPERTS)).astype(np.float32)


@pytest.mark.parametrize("renormalize", (True, False))
def test_softmax_scores(renormalize):
    logits = logits_of(1)
    found = jax.jit(lambda x: ma.top_k_router(x, TOP_K, renormalize=renormalize))(logits)
    scores = softmax(logits.astype(np.float64))
    ids = np.argsort(-scores, -1)[:, :TOP_K]
    weights = np.take_along_axis(scores, ids, -1)
    if renormalize:
        weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_array_equal(found.ids, ids)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-5)
    np.testing.assert_allclose(found.scores, scores, rtol=1e-5)


def test_sigmoid_scores_with_bias_and_groups():
    logits, bias = logits_of(2), np.linspace(-0.2, 0.2, EXPERTS, dtype=np.float32)
    found = ma.top_k_router(
        logits,
        TOP_K,
        score="sigmoid",
        select_bias=bias,
        num_groups=4,
        top_groups=2,
        renormalize=True,
        scale=2.5,
    )
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    biased = (scores + bias).reshape(TOKENS, 4, -1)
    group_scores = np.sort(biased, -1)[..., -2:].sum(-1)
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
    found = ma.top_k_router(logits, TOP_K)
    scores = softmax(logits.astype(np.float64))
    share = np.bincount(np.asarray(found.ids).ravel(), minlength=EXPERTS) / (TOKENS * TOP_K)
    np.testing.assert_allclose(
        ma.load_balancing_loss(found.scores, found.ids),
        EXPERTS * (share * scores.mean(0)).sum(),
        rtol=1e-5,
    )
    lse = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    np.testing.assert_allclose(ma.router_z_loss(logits), (lse**2).mean(), rtol=1e-5)


def test_masked_tokens_choose_nothing():
    logits, mask = logits_of(4), np.arange(TOKENS) % 3 > 0
    found = ma.top_k_router(logits, TOP_K, mask=jnp.asarray(mask))
    np.testing.assert_array_equal((np.asarray(found.ids) == -1).all(-1), ~mask)
    kept = ma.top_k_router(logits[mask], TOP_K)
    np.testing.assert_array_equal(np.asarray(found.ids)[mask], kept.ids)
    np.testing.assert_allclose(
        ma.load_balancing_loss(found.scores, found.ids),
        ma.load_balancing_loss(kept.scores, kept.ids),
        rtol=1e-5,
    )
