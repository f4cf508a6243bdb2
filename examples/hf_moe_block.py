"""Compare expert-parallel blocks with the originals in Hugging Face transformers.

    python examples/hf_moe_block.py

Builds the block of Mixtral, Qwen3-MoE, DeepSeek-V3 and GPT-OSS in PyTorch with small random
weights, converts the weights, runs the block with tokens and experts split over ranks, and compares
the output and the gradients of the tokens and of every weight with PyTorch's. Read
`expert_parallel_block` first.

Runs on all GPUs of a host, or on 8 virtual CPU devices without GPUs. PyTorch runs on the CPU.
Tried with transformers 4.57 and 5.23.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

# Read when JAX starts; it concerns the CPU only.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

try:
    import torch
    import transformers
    from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
except ImportError as error:
    sys.exit(
        f"{error}\nThis example needs PyTorch and transformers 4.57 or newer: "
        'pip install ".[transformers]"'
    )

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma
from jax_moe_a2a.integrations import transformers as hf

SEQUENCES, LENGTH, HIDDEN, EXPERT_HIDDEN = 4, 64, 64, 96

# Differences are relative to the largest value of the original's array. float32 rounds at 6e-8,
# and sums over a few hundred features or tokens, added in another order, differ by a few times
# 1e-7. The tolerance leaves a factor of ten and more. A mistake in a router, such as a missing
# renormalisation, causes 1e-2 or more. Rounding could cause as much by changing a choice between
# two experts, but with these weights the scores of the closest choice differ by 2e-5.
TOLERANCE = 1e-5

Weights = dict[str, Any]


def expert_parallel_block(x: jax.Array, weights: Weights) -> jax.Array:
    """Apply the block to the tokens of all ranks, under jax.set_mesh.

    Args:
      x: float32 [tokens, hidden].
      weights: what `hf.from_state_dict` returns: a router, experts, and a shared expert if there is
        one.

    Returns:
      float32 [tokens, hidden]: for each token the weighted sum of its experts' outputs, and the
      output of the shared expert if there is one.
    """
    # The default capacity has room for every row, because the original drops none.
    y, _ = ma.moe(x, **weights, axes="ep")
    return y


# ------------------------------------------------------------------------------- the originals


class Model(NamedTuple):
    name: str
    block: type  # of transformers; a torch.nn.Module made from the configuration
    config: Any


# Version 5 has several ways to run experts, and a block outside of a model must be told which.
SIZES = dict(hidden_size=HIDDEN, hidden_act="silu", experts_implementation="eager")
QWEN3 = SIZES | dict(moe_intermediate_size=EXPERT_HIDDEN, num_experts=16, num_experts_per_tok=4)
MODELS = [
    Model(
        "Mixtral",
        MixtralSparseMoeBlock,
        MixtralConfig(
            **SIZES, intermediate_size=EXPERT_HIDDEN, num_local_experts=8, num_experts_per_tok=2
        ),
    ),
    Model("Qwen3-MoE", Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(**QWEN3, norm_topk_prob=True)),
    # "raw": the router weights of a token do not sum to one.
    Model("Qwen3-MoE, raw", Qwen3MoeSparseMoeBlock, Qwen3MoeConfig(**QWEN3, norm_topk_prob=False)),
    Model(
        "DeepSeek-V3",
        DeepseekV3MoE,
        DeepseekV3Config(
            **SIZES,
            moe_intermediate_size=EXPERT_HIDDEN,
            n_routed_experts=16,
            n_shared_experts=2,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        ),
    ),
    Model(
        "GPT-OSS",
        GptOssMLP,
        GptOssConfig(
            **SIZES, intermediate_size=EXPERT_HIDDEN, num_local_experts=16, num_experts_per_tok=4
        ),
    ),
]


def weights_of(block: torch.nn.Module, pick: Callable, config: Any) -> Weights:
    """Return the block's weights for `expert_parallel_block`, or their gradients.

    Args:
      block: the original.
      pick: a function that maps a tensor of the block to the tensor to return for it, for example
        to its gradient.
      config: the model's configuration.
    """
    tensors = block.state_dict(keep_vars=True)
    return hf.from_state_dict({name: pick(x) for name, x in tensors.items()}, config)


def random_block(model: Model) -> torch.nn.Module:
    """Make the original with random weights, which transformers sets in whole models only."""
    block = model.block(model.config).eval()
    generator = torch.Generator().manual_seed(0)
    # In reverse order of names, the router comes before the experts, which differ between versions
    # of transformers. All versions then have the same router and choose the same experts.
    for name, values in sorted(block.state_dict().items(), reverse=True):
        # The bias of DeepSeek-V3 changes choices; the other weights keep the size of activations.
        std = 0.1 if name.endswith("bias") else values.shape[-1] ** -0.5
        values.normal_(std=std, generator=generator)
    return block


# --------------------------------------------------------------------------------- the comparison


def original(
    block: torch.nn.Module, config: Any, x: np.ndarray, dy: np.ndarray
) -> dict[str, np.ndarray]:
    """Run the block and its backward pass in PyTorch, for tokens x and the output gradient dy.

    x and dy are float32 [tokens, hidden]. Returns `output` and `tokens`, the gradient of x, both
    [tokens, hidden], and the gradient of each weight by name.
    """
    tokens = torch.tensor(x).requires_grad_()
    y = block(tokens.reshape(SEQUENCES, LENGTH, HIDDEN))
    y = y[0] if isinstance(y, tuple) else y  # some versions return the router's logits as well
    y.backward(torch.tensor(dy).reshape(y.shape))

    def gradient(p: torch.Tensor) -> torch.Tensor:
        # It is None if the output does not depend on p: the bias, or an expert that no token chose.
        return torch.zeros_like(p) if p.grad is None else p.grad

    return {
        "output": y.detach().reshape(x.shape).numpy(),
        "tokens": tokens.grad.numpy(),
        **by_name(weights_of(block, gradient, config)),
    }


def by_name(weights: Weights) -> dict[str, Any]:
    """Return each array of the weights, or of their gradients, by name."""
    leaves = jax.tree.leaves_with_path(weights)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def expert_parallel(
    weights: Weights, x: np.ndarray, dy: np.ndarray, mesh: jax.sharding.Mesh
) -> dict[str, np.ndarray]:
    """Return the same results as `original`, computed by `expert_parallel_block` on all ranks."""

    @jax.jit
    def output_and_gradients(x: jax.Array, weights: Weights, dy: jax.Array) -> dict:
        y, pullback = jax.vjp(expert_parallel_block, x, weights)
        dx, dweights = pullback(dy)
        return {"output": y, "tokens": dx, **by_name(dweights)}

    specs = P("ep"), ma.moe_partition_specs(weights, "ep"), P("ep")
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):  # GPUs would round to TF32
        args = jax.device_put((x, weights, dy), jax.tree.map(partial(NamedSharding, mesh), specs))
        return jax.device_get(output_and_gradients(*args))


def differences(model: Model, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Return the largest difference of each result, relative to the original's largest value."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, SEQUENCES * LENGTH, HIDDEN), np.float32)
    block = random_block(model)
    theirs = original(block, model.config, x, dy)
    weights = weights_of(block, torch.Tensor.detach, model.config)
    ours = expert_parallel(weights, x, dy, mesh)
    return {
        # The gradient of the bias is zero on both sides, so it is not divided by its largest value.
        name: float(abs(ours[name] - value).max() / (abs(value).max() or 1))
        for name, value in theirs.items()
    }


def main() -> int:
    devices = jax.devices()
    ranks = max(n for n in (1, 2, 4, 8) if n <= len(devices))  # all divide the numbers of experts
    mesh = jax.make_mesh((ranks,), ("ep",), devices=devices[:ranks])
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, jax "
        f"{jax.__version__}: {SEQUENCES * LENGTH} tokens, {ranks} ranks, "
        f"{ma.Group(mesh, 'ep').path} path"
    )
    print("largest difference of the output and of the gradients, relative to the original's")
    found = {model.name: differences(model, mesh) for model in MODELS}
    print(f"{'':18}", *(f"{name:>16}" for name in found))
    for row in dict.fromkeys(row for column in found.values() for row in column):
        cells = (f"{column[row]:.1e}" if row in column else "-" for column in found.values())
        print(f"{row:18}", *(f"{cell:>16}" for cell in cells))
    # NaN if there is any, which is a failure.
    worst = np.max([value for column in found.values() for value in column.values()])
    agree = worst <= TOLERANCE
    print(f"check: {'ok' if agree else 'FAILED'}: at most {worst:.1e} (tolerance {TOLERANCE:.0e})")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
