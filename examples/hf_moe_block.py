"""Compare expert-parallel blocks with the blocks of Hugging Face transformers.

    python examples/hf_moe_block.py

For each supported model family, the program builds a small PyTorch block with random weights. It
converts the weights, and applies the block with tokens and experts split over ranks. It compares
the output, and the gradients of tokens and weights, with PyTorch. Read `expert_parallel_block`
first.

JAX uses all GPUs of a host, or 8 virtual CPU devices if there are no GPUs. PyTorch uses the CPU.
Tested with transformers 5.24. With 5.5, DeepSeek-V2 with groups raises an error.
"""

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

# JAX reads XLA_FLAGS when it starts. This flag affects only the CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(
        f"{error}\nThis example needs PyTorch and transformers 5.24 or newer: "
        'pip install ".[transformers]"'
    )

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma
from jax_moe_a2a.integrations import transformers as hf

SEQUENCES, LENGTH, HIDDEN, EXPERT_HIDDEN = 4, 64, 64, 96

# Differences are divided by the largest absolute value of PyTorch's array. float32 rounds at 6e-8,
# so sums of a few hundred numbers in another order differ by a few times 1e-7. The tolerance is
# more than ten times as large. A mistake in a router, such as a missing renormalisation, causes a
# difference of 1e-2 or more. Rounding changes no choice of experts: the score of a chosen expert is
# higher than the next score by 2e-5 or more.
TOLERANCE = 1e-5

Weights = dict[str, Any]


def expert_parallel_block(x: jax.Array, weights: Weights) -> jax.Array:
    """Apply the block to the tokens of all ranks, under jax.set_mesh.

    Args:
      x: float32 [tokens, hidden].
      weights: the result of `hf.from_state_dict`: a router, experts, and perhaps a shared expert.

    Returns:
      float32 [tokens, hidden]: for each token, the weighted sum of its experts' outputs, plus the
      output of a shared expert.
    """
    # The default capacity drops no row. The blocks of transformers also drop none.
    y, _ = ma.moe(x, **weights, axes="ep")
    return y


# ------------------------------------------------------------------------------- the originals


class Model(NamedTuple):
    name: str
    block: str  # the class of the block in transformers
    fields: dict[str, Any]  # fields of the configuration, in addition to `sizes`
    kind: str = ""  # the model type in transformers, if it differs from the name

    def config_and_block(self) -> tuple[Any, torch.nn.Module]:
        kind = self.kind or self.name.split()[0]
        module = importlib.import_module(
            f"transformers.models.{kind.removesuffix('_text')}.modeling_{kind.removesuffix('_text')}"
        )
        # transformers 5 has several ways to run experts, and a block outside of a model must select
        # one.
        sizes = dict(hidden_size=HIDDEN, hidden_act="silu", experts_implementation="eager")
        config = transformers.AutoConfig.for_model(kind, **sizes, **self.fields)
        return config, getattr(module, self.block)(config).eval()


WIDE, NARROW = dict(intermediate_size=EXPERT_HIDDEN), dict(moe_intermediate_size=EXPERT_HIDDEN)
QWEN = dict(num_experts=16, num_experts_per_tok=4, **NARROW)
WITH_SHARED = dict(shared_expert_intermediate_size=2 * EXPERT_HIDDEN, **QWEN)
DEEPSEEK = dict(
    n_routed_experts=16,
    n_shared_experts=2,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    **NARROW,
)
LOCAL = dict(num_local_experts=16, num_experts_per_tok=4, **WIDE)
MODELS = [
    Model("mixtral", "MixtralSparseMoeBlock", LOCAL),
    Model("minimax_m2", "MiniMaxM2SparseMoeBlock", LOCAL),
    Model("olmoe", "OlmoeSparseMoeBlock", dict(num_experts=16, num_experts_per_tok=4, **WIDE)),
    # Without norm_topk_prob, the router weights of a token do not sum to one.
    Model("qwen3_moe", "Qwen3MoeSparseMoeBlock", QWEN | dict(norm_topk_prob=True)),
    Model("qwen3_moe, raw", "Qwen3MoeSparseMoeBlock", QWEN, "qwen3_moe"),
    Model("qwen2_moe", "Qwen2MoeSparseMoeBlock", WITH_SHARED),
    Model("qwen3_next", "Qwen3NextSparseMoeBlock", WITH_SHARED),
    Model("deepseek_v2", "DeepseekV2Moe", DEEPSEEK | dict(topk_method="group_limited_greedy")),
    Model("deepseek_v3", "DeepseekV3MoE", DEEPSEEK),
    Model("glm4_moe", "Glm4MoeMoE", DEEPSEEK),
    Model("kimi_k2", "DeepseekV3MoE", DEEPSEEK | dict(n_group=1, topk_group=1), "deepseek_v3"),
    Model(
        "ernie4_5_moe",
        "Ernie4_5_MoeSparseMoeBlock",
        dict(moe_num_experts=16, moe_num_shared_experts=2, moe_k=4, **NARROW),
    ),
    Model("gpt_oss", "GptOssMLP", LOCAL),
    Model("llama4_text", "Llama4TextMoe", LOCAL),
]


def weights_of(block: torch.nn.Module, pick: Callable, config: Any) -> Weights:
    """Apply `pick` to the block's tensors, and convert the results to arguments of `ma.moe`.

    Args:
      block: a PyTorch block.
      pick: a function that is applied to each tensor of the block, for example to get its gradient.
      config: the model's configuration.
    """
    tensors = block.state_dict(keep_vars=True)
    return hf.from_state_dict({name: pick(x) for name, x in tensors.items()}, config)


def random_block(model: Model) -> tuple[Any, torch.nn.Module]:
    """Return a configuration, and a PyTorch block with random weights. transformers initializes
    weights only in complete models."""
    config, block = model.config_and_block()
    generator = torch.Generator().manual_seed(0)
    # The tensors of experts differ between versions of transformers. Generate the router before the
    # experts (reverse order of names), so that it is equal in all versions.
    for name, values in sorted(block.state_dict().items(), reverse=True):
        # Biases are large enough to change some choices. Other weights preserve the size of inputs.
        std = 0.1 if name.endswith("bias") else values.shape[-1] ** -0.5
        values.normal_(std=std, generator=generator)
    return config, block


# --------------------------------------------------------------------------------- the comparison


def original(
    block: torch.nn.Module, config: Any, x: np.ndarray, dy: np.ndarray
) -> dict[str, np.ndarray]:
    """Run the block and its backward pass in PyTorch, for tokens x and the gradient dy of the
    output.

    x and dy are float32 [tokens, hidden]. The result is a dict: `output` [tokens, hidden], `tokens`
    (the gradient of x), and the gradient of each weight with its name as key.
    """
    tokens = torch.tensor(x).requires_grad_()
    y = block(tokens.reshape(SEQUENCES, LENGTH, HIDDEN))
    y = y[0] if isinstance(y, tuple) else y  # some versions also return logits
    y.backward(torch.tensor(dy).reshape(y.shape))

    def gradient(p: torch.Tensor) -> torch.Tensor:
        # p.grad is None if the output does not depend on p (a bias, or an expert without tokens).
        return torch.zeros_like(p) if p.grad is None else p.grad

    return {
        "output": y.detach().reshape(x.shape).numpy(),
        "tokens": tokens.grad.numpy(),
        **by_name(weights_of(block, gradient, config)),
    }


def by_name(weights: Weights) -> dict[str, Any]:
    """Return a dict of the arrays in `weights`, with keys such as `experts.w_in`."""
    leaves = jax.tree.leaves_with_path(weights)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def expert_parallel(
    weights: Weights, x: np.ndarray, dy: np.ndarray, mesh: jax.sharding.Mesh
) -> dict[str, np.ndarray]:
    """Return the results that `original` returns, but compute them with `expert_parallel_block`."""

    @jax.jit
    def output_and_gradients(x: jax.Array, weights: Weights, dy: jax.Array) -> dict:
        y, pullback = jax.vjp(expert_parallel_block, x, weights)
        dx, dweights = pullback(dy)
        return {"output": y, "tokens": dx, **by_name(dweights)}

    specs = P("ep"), ma.moe_partition_specs(weights, "ep"), P("ep")
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):  # GPUs otherwise use TF32
        args = jax.device_put((x, weights, dy), jax.tree.map(partial(NamedSharding, mesh), specs))
        return jax.device_get(output_and_gradients(*args))


def differences(model: Model, mesh: jax.sharding.Mesh) -> dict[str, float]:
    """Return the largest relative difference from PyTorch for the output, and for the gradients of
    tokens, router, experts and shared expert."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, SEQUENCES * LENGTH, HIDDEN), np.float32)
    config, block = random_block(model)
    if model.name == "kimi_k2":  # tests the model type kimi_k2
        config = config.to_dict() | dict(model_type="kimi_k2")
    theirs = original(block, config, x, dy)
    weights = weights_of(block, torch.Tensor.detach, config)
    ours = expert_parallel(weights, x, dy, mesh)
    found: dict[str, float] = {}
    for name, value in theirs.items():
        # A bias that only affects choices has a zero gradient, also in PyTorch: do not divide by 0.
        difference = float(abs(ours[name] - value).max() / (abs(value).max() or 1))
        kind = name.partition(".")[0]
        found[kind] = float(np.max([difference, found.get(kind, 0.0)]))  # keeps a NaN
    return found


def main() -> int:
    devices = jax.devices()
    ranks = max(n for n in (1, 2, 4, 8) if n <= len(devices))  # divides the number of experts
    mesh = jax.make_mesh((ranks,), ("ep",), devices=devices[:ranks])
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, jax "
        f"{jax.__version__}: {SEQUENCES * LENGTH} tokens, {ranks} ranks, "
        f"{ma.Group(mesh, 'ep').path} path"
    )
    print("largest difference of the output and of the gradients, relative to the original's")
    kinds = "output", "tokens", "router", "experts", "shared"
    print(f"{'':16}", *(f"{kind:>8}" for kind in kinds))
    found = []
    for model in MODELS:
        row = differences(model, mesh)
        print(f"{model.name:16}", *(f"{row[k]:8.1e}" if k in row else f"{'-':>8}" for k in kinds))
        found += row.values()
    worst = np.max(found)  # NaN if a difference is NaN, so that the check fails
    agree = worst <= TOLERANCE
    print(f"check: {'ok' if agree else 'FAILED'}: at most {worst:.1e} (tolerance {TOLERANCE:.0e})")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
