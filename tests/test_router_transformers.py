"""Compare losses of routers with those of Hugging Face transformers, if it is installed.

test_hf_moe_block.py compares the routers, within their blocks."""

import importlib

import jax
import numpy as np
import pytest

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)

TOKENS, HIDDEN, EXPERTS, TOP_K = 40, 8, 16, 4
REASON = "compares with the routers of PyTorch and transformers 5 or newer"


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers", minversion="5", reason=REASON)
    return pytest.importorskip("torch", reason=REASON)


def published(model):
    """Return the module of a model in transformers."""
    return importlib.import_module(f"transformers.models.{model}.modeling_{model}")


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("masked", (False, True))
def test_the_balance_loss_of_all_layers_has_a_factor_of_top_k(masked, torch):
    """transformers takes the mean of shares and scores over the tokens of all layers first."""
    module = published("mixtral")
    logits = random(3, TOKENS, EXPERTS, seed=4)
    mask = np.arange(TOKENS) % 3 > 0 if masked else np.ones(TOKENS, bool)
    expected = module.load_balancing_loss_func(
        tuple(torch.tensor(logits)), EXPERTS, TOP_K, torch.tensor(mask)[None] if masked else None
    )
    found = ma.TopK(TOP_K)(logits, mask=np.tile(mask, (3, 1)))
    loss = ma.load_balancing_loss(found.scores, found.ids)
    np.testing.assert_allclose(TOP_K * loss, expected, rtol=1e-5)


def test_losses_of_switch(torch):
    """Its balance loss is the mean over sequences, each with its own shares."""
    module = published("switch_transformers")
    logits = 3 * random(2, TOKENS, EXPERTS, seed=5)
    np.testing.assert_allclose(
        ma.router_z_loss(logits), module.router_z_loss_func(torch.tensor(logits)), rtol=1e-5
    )
    found = ma.TopK(1)(logits)
    probs, ids = torch.softmax(torch.tensor(logits), -1), torch.tensor(np.array(found.ids[..., 0]))
    np.testing.assert_allclose(
        jax.vmap(ma.load_balancing_loss)(found.scores, found.ids).mean(),
        module.load_balancing_loss_func(probs, ids),
        rtol=1e-5,
    )
