"""Compare MaxText's training with and without ``maxtext.enable``, for five kinds of models.

The reference is MaxText's layer with ``sparse_matmul=False``, the only one that runs on CPUs and
drops no token. The optimizer is plain SGD, so the first update of parameters shows the gradients.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses
import pathlib
import sys

import jax
import numpy as np
import pytest

pytest.importorskip("maxtext", reason="MaxText is not installed: make test-maxtext installs it")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks import maxtext_program  # noqa: E402
from jax_moe_a2a.integrations import maxtext  # noqa: E402

maxtext_program.load()
RATE = 1.0
TINY = dict(
    hardware="cpu",
    attention="dot_product",
    dtype="float32",
    weight_dtype="float32",
    opt_type="sgd",
    learning_rate=RATE,
    warmup_steps_fraction=0.0,
    gradient_clipping_threshold=0.0,
    load_balance_loss_weight=0.01,
    ici_fsdp_parallelism=2,
    ici_expert_parallelism=4,
    per_device_batch_size=1,
    max_target_length=16,
    vocab_size=64,
    base_emb_dim=32,
    base_num_query_heads=2,
    base_num_kv_heads=2,
    head_dim=16,
    base_mlp_dim=32,
    base_moe_mlp_dim=32,
    base_num_decoder_layers=2,
    num_experts=8,
    num_experts_per_tok=2,
    remat_policy="full",
)
MODELS = dict(
    qwen3=dict(model_name="qwen3-30b-a3b"),
    mixtral=dict(model_name="mixtral-8x7b"),
    deepseek3=dict(
        model_name="deepseek3-671b",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_num_dense_layers=1,
        n_routing_groups=4,
        topk_routing_group=2,
        routed_bias_update_rate=0.01,
        load_balance_loss_weight=0.0,  # MaxText's dense layer includes the bias in this loss
    ),
    gpt_oss=dict(model_name="gpt-oss-20b"),
    llama4=dict(model_name="llama4-17b-16e", num_experts_per_tok=1, base_num_decoder_layers=4),
)
AS_IT_IS = dict(sparse_matmul=False, megablox=False, capacity_factor=-1.0)
ENABLED = dict(sparse_matmul=True, megablox=False)
METRICS = ("loss", "lm_loss", "moe_lb_loss", "grad_norm")


@dataclasses.dataclass
class Trained:
    metrics: np.ndarray
    """[step, metric], with the metrics in the order of METRICS."""
    updates: list[np.ndarray]
    """Changes of all parameters (also of the router's bias) in the first step."""


def train(options, steps=5):
    program = maxtext_program.Program(TINY | options)
    leaves = lambda: [np.asarray(a) for a in jax.tree.leaves(program.state) if is_float(a)]
    before, metrics, after = leaves(), [], None
    for _ in range(steps):
        found = program.step()
        after = after or leaves()
        metrics.append([float(found[f"learning/{name}"]) for name in METRICS])
    return Trained(np.array(metrics), [a - b for a, b in zip(after, before, strict=True)])


def is_float(array):
    return hasattr(array, "dtype") and jax.numpy.issubdtype(array.dtype, jax.numpy.floating)


@pytest.fixture
def enabled():
    maxtext.enable()
    yield
    maxtext.disable()


@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_of_maxtext(model):
    maxtext.disable()
    expected = train(MODELS[model] | AS_IT_IS)
    maxtext.enable()
    try:
        actual = train(MODELS[model] | ENABLED)
    finally:
        maxtext.disable()
    np.testing.assert_allclose(actual.metrics, expected.metrics, rtol=1e-4, atol=1e-6)
    for a, b in zip(actual.updates, expected.updates, strict=True):
        scale = max(np.abs(b).max(), 1e-4)
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-3)
    assert expected.metrics[-1, 0] < expected.metrics[0, 0]


def test_tensor_parallelism_and_token_chunks_do_not_change_training(enabled):
    """Biases that were added twice would change the losses of GPT-OSS."""
    model = MODELS["gpt_oss"] | ENABLED
    expected = train(model, steps=2)
    divided = dict(ici_fsdp_parallelism=1, ici_tensor_parallelism=2, per_device_batch_size=1)
    chunks = dict(use_ring_of_experts=True, num_moe_token_chunks=2, load_balance_loss_weight=0.0)
    actual = train(model | divided | chunks, steps=2)
    lm_loss = METRICS.index("lm_loss")
    np.testing.assert_allclose(
        actual.metrics[:, lm_loss], expected.metrics[:, lm_loss], rtol=1e-3, atol=1e-6
    )


def test_options_that_the_layer_does_not_have_are_refused(enabled):
    for options, message in (
        (dict(sparse_matmul=False), "sparse_matmul must be True .* got sparse_matmul=False"),
        (dict(quantization="int8"), "pass fp8=True to enable"),
    ):
        with pytest.raises(ValueError, match=message):
            train(MODELS["qwen3"] | ENABLED | options, steps=1)


def test_fp8_changes_losses_by_little():
    of_128 = dict(base_emb_dim=128, base_mlp_dim=128, base_moe_mlp_dim=128, dtype="bfloat16")
    losses = []
    for fp8 in (False, True):
        maxtext.enable(fp8=fp8)
        try:
            losses.append(train(MODELS["qwen3"] | ENABLED | of_128, steps=3).metrics[:, 0])
        finally:
            maxtext.disable()
    assert np.any(losses[0] != losses[1])
    np.testing.assert_allclose(*losses, rtol=2e-2)
