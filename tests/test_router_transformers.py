"""Compare routers and losses with those of Hugging Face transformers, if it is installed."""

import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)

TOKENS, HIDDEN, EXPERTS, TOP_K = 40, 8, 16, 4
REASON = "compares with the routers of PyTorch and transformers 5 or newer"

# For each router: the module, the class, its configuration, and the arguments of top_k_router.
ROUTERS = {
    "Switch": (
        "switch_transformers",
        "SwitchTransformersTop1Router",
        dict(num_experts=EXPERTS, expert_capacity=TOKENS),
        dict(top_k=1),
    ),
    "Mixtral": (
        "mixtral",
        "MixtralTopKRouter",
        dict(num_local_experts=EXPERTS, num_experts_per_tok=TOP_K),
        dict(top_k=TOP_K),
    ),
    "Qwen3-MoE": (
        "qwen3_moe",
        "Qwen3MoeTopKRouter",
        dict(num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True),
        dict(top_k=TOP_K, renormalize=True),
    ),
    "Qwen3-MoE, not renormalized": (
        "qwen3_moe",
        "Qwen3MoeTopKRouter",
        dict(num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=False),
        dict(top_k=TOP_K, renormalize=False),
    ),
    "GPT-OSS": (
        "gpt_oss",
        "GptOssTopKRouter",
        dict(num_local_experts=EXPERTS, num_experts_per_tok=TOP_K),
        dict(top_k=TOP_K),
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        dict(n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, n_group=4, topk_group=2),
        dict(top_k=TOP_K, score="sigmoid", num_groups=4, top_groups=2, scale=2.5),
    ),
}


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers", minversion="5", reason=REASON)
    return pytest.importorskip("torch", reason=REASON)


def published(model):
    """Return the module of a model in transformers, and the class of its configuration."""
    package = f"transformers.models.{model}"
    config = vars(importlib.import_module(f"{package}.configuration_{model}"))
    (config,) = [
        c for name, c in config.items() if name.lower() == f"{model.replace('_', '')}config"
    ]
    return importlib.import_module(f"{package}.modeling_{model}"), config


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("name", ROUTERS)
def test_ids_weights_and_gradients_are_those_of(name, torch):
    model, router, numbers, arguments = ROUTERS[name]
    module, config = published(model)
    router = getattr(module, router)(config(hidden_size=HIDDEN, **numbers)).eval()
    arrays = {key: random(*old.shape, seed=1) for key, old in router.state_dict().items()}
    router.load_state_dict({key: torch.tensor(array) for key, array in arrays.items()})
    # A bias of this size changes the choice of most tokens.
    arrays = types.SimpleNamespace(**{key.split(".")[-1]: x for key, x in arrays.items()})
    if name == "DeepSeek-V3":
        arguments = arguments | dict(select_bias=arrays.e_score_correction_bias)

    x, cotangent = random(TOKENS, HIDDEN, seed=2), random(TOKENS, EXPERTS, seed=3)
    tokens = torch.tensor(x, requires_grad=True)
    if name == "Switch":
        one_hot, weights, logits = router(tokens[None])
        ids, weights, logits = one_hot[0].argmax(-1, keepdim=True), weights[0], logits[0]
    else:
        logits, weights, ids = router(tokens)
    dense = torch.zeros(TOKENS, EXPERTS).scatter(1, ids, weights)
    (dense * torch.tensor(cotangent)).sum().backward()

    def routed(x):
        logits = x @ arrays.weight.T + getattr(arrays, "bias", np.zeros(EXPERTS, np.float32))[None]
        found = ma.top_k_router(logits, **arguments)
        weights = jax.nn.one_hot(found.ids, EXPERTS) * found.weights[..., None]
        return weights.sum(axis=1), (found.ids, logits)

    found, transposed, (found_ids, found_logits) = jax.vjp(routed, x, has_aux=True)
    np.testing.assert_allclose(found_logits, logits.detach(), rtol=1e-4, atol=1e-5)
    # DeepSeek-V3 of transformers returns the choices of a token in no defined order.
    order = np.sort if name == "DeepSeek-V3" else np.asarray
    np.testing.assert_array_equal(order(found_ids), order(ids))
    np.testing.assert_allclose(found, dense.detach(), rtol=1e-4, atol=1e-6)
    (gradient,) = transposed(jnp.asarray(cotangent))
    np.testing.assert_allclose(gradient, tokens.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", (False, True))
def test_the_balance_loss_of_all_layers_has_a_factor_of_top_k(masked, torch):
    """transformers takes the mean of shares and scores over the tokens of all layers first."""
    module, _ = published("mixtral")
    logits = random(3, TOKENS, EXPERTS, seed=4)
    mask = np.arange(TOKENS) % 3 > 0 if masked else np.ones(TOKENS, bool)
    expected = module.load_balancing_loss_func(
        tuple(torch.tensor(logits)), EXPERTS, TOP_K, torch.tensor(mask)[None] if masked else None
    )
    found = ma.top_k_router(logits, TOP_K, mask=np.tile(mask, (3, 1)))
    loss = ma.load_balancing_loss(found.scores, found.ids)
    np.testing.assert_allclose(TOP_K * loss, expected, rtol=1e-5)


def test_losses_of_switch(torch):
    """Its balance loss is the mean over sequences, each with its own shares."""
    module, _ = published("switch_transformers")
    logits = 3 * random(2, TOKENS, EXPERTS, seed=5)
    np.testing.assert_allclose(
        ma.router_z_loss(logits), module.router_z_loss_func(torch.tensor(logits)), rtol=1e-5
    )
    found = ma.top_k_router(logits, 1)
    probs, ids = torch.softmax(torch.tensor(logits), -1), torch.tensor(np.array(found.ids[..., 0]))
    np.testing.assert_allclose(
        jax.vmap(ma.load_balancing_loss)(found.scores, found.ids).mean(),
        module.load_balancing_loss_func(probs, ids),
        rtol=1e-5,
    )
