"""Compare expert-parallel blocks with the originals in Hugging Face transformers.

    python examples/hf_moe_block.py

Builds the block of Mixtral, Qwen3-MoE and DeepSeek-V3 in PyTorch with small random weights, takes
the weights over, runs the block with tokens and experts split over ranks, and compares the output
and the gradients of the tokens and of every weight with PyTorch's. Read `expert_parallel_block`
first; each model adds one router, a function from logits to chosen experts and their weights.

Runs on all GPUs of a host, or on 8 virtual CPU devices without GPUs. PyTorch runs on the CPU.
Tried with transformers 4.51, 4.57, 5.0 and 5.23. Version 4 has a module for each expert, version 5
one tensor for all experts; `weights_of` reads both, and raises an error for anything else.
"""

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

# Read when JAX starts; it concerns the CPU only.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

try:
    import torch
    import transformers
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
except ImportError as error:
    sys.exit(
        f"{error}\nThis example needs PyTorch and transformers 4.51 or newer: "
        'pip install torch "transformers>=4.51"'
    )

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

SEQUENCES, LENGTH, HIDDEN, EXPERT_HIDDEN = 4, 64, 64, 96

# Differences are relative to the largest value of the original's array. float32 rounds at 6e-8,
# and sums over a few hundred features or tokens, added in another order, differ by a few times
# 1e-7. The tolerance leaves a factor of ten and more. A mistake in a router, such as a missing
# renormalisation, causes 1e-2 or more. Rounding could cause as much by changing a choice between
# two experts, but with these weights the scores of the closest choice differ by 2e-5.
TOLERANCE = 1e-5

Weights = dict[str, Any]


# ------------------------------------------------------------------- the block, the same for all


def expert_parallel_block(
    x: jax.Array, weights: Weights, *, router: Callable, config: Any, group: ma.Group
) -> jax.Array:
    """Send this rank's tokens through the experts of all ranks, inside shard_map.

    Args:
      x: float32 [tokens, hidden], the tokens of this rank.
      weights: float32 arrays as `weights_of` names them. `gate_up` and `down` hold this rank's
        experts only; the others are the same on every rank.
      router: one of the routers below.
      config: the model's configuration, for the router.
      group: the ranks.

    Returns:
      float32 [tokens, hidden]: for each token the weighted sum of its experts' outputs, and the
      output of the shared expert if there is one.
    """
    num_experts = weights["router"].shape[1]
    topk_weights, topk_ids = router(x @ weights["router"], weights.get("bias"), config)

    # The default capacity has room for every row, because the original drops none.
    swiglu = ma.gated(jax.nn.silu)  # in each expert of all three models
    y = ma.moe_mlp(
        x,
        topk_ids,
        topk_weights,
        weights["gate_up"],
        weights["down"],
        activation=swiglu,
        group=group,
        num_experts=num_experts,
    )

    # Every token goes through the shared expert, which all ranks have, so no token has to travel.
    if "shared_gate_up" in weights:
        y += swiglu(x @ weights["shared_gate_up"]) @ weights["shared_down"]
    return y


# ---------------------------------------------------------------------------- a router for each
# Each takes logits, float32 [tokens, experts], and returns the weights, float32 [tokens, top_k],
# and the ids, int32 [tokens, top_k], of each token's experts. `bias` is for DeepSeek-V3 only.


def mixtral_router(logits: jax.Array, bias: None, config: Any) -> tuple[jax.Array, jax.Array]:
    """Choose the most probable experts; the weights are their probabilities, made to sum to one."""
    topk_weights, topk_ids = lax.top_k(jax.nn.softmax(logits), config.num_experts_per_tok)
    return topk_weights / topk_weights.sum(axis=-1, keepdims=True), topk_ids


def qwen3_moe_router(logits: jax.Array, bias: None, config: Any) -> tuple[jax.Array, jax.Array]:
    """Choose as Mixtral does; the configuration says whether the weights are made to sum to one."""
    topk_weights, topk_ids = lax.top_k(jax.nn.softmax(logits), config.num_experts_per_tok)
    if config.norm_topk_prob:
        topk_weights /= topk_weights.sum(axis=-1, keepdims=True)
    return topk_weights, topk_ids


def deepseek_v3_router(
    logits: jax.Array, bias: jax.Array, config: Any
) -> tuple[jax.Array, jax.Array]:
    """Choose by sigmoid scores among the experts of a token's best expert groups.

    `bias`, float32 [experts], changes the choice and not the weights. It balances the load and
    has no gradient. An expert group is `experts / n_group` experts
    in a row; a token ranks the groups by the sum of the two highest biased scores in each.
    """
    scores = jax.nn.sigmoid(logits)
    in_groups = (scores + bias).reshape(len(logits), config.n_group, -1)
    group_scores = lax.top_k(in_groups, 2)[0].sum(axis=-1)
    _, best_groups = lax.top_k(group_scores, config.topk_group)
    allowed = (best_groups[:, :, None] == jnp.arange(config.n_group)).any(axis=1)

    # Version 4 puts 0 where this has -inf. That is the same as long as enough biased scores are
    # positive, as they are here and in the published model.
    eligible = jnp.where(allowed[:, :, None], in_groups, -jnp.inf).reshape(logits.shape)
    _, topk_ids = lax.top_k(eligible, config.num_experts_per_tok)

    topk_weights = jnp.take_along_axis(scores, topk_ids, axis=-1)
    if config.norm_topk_prob:
        topk_weights /= topk_weights.sum(axis=-1, keepdims=True) + 1e-20  # as the model has it
    return topk_weights * config.routed_scaling_factor, topk_ids


# ------------------------------------------------------------------------------- the originals


class Model(NamedTuple):
    name: str
    block: type  # of transformers; a torch.nn.Module made from the configuration
    config: Any
    router: Callable


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
        mixtral_router,
    ),
    Model(
        "Qwen3-MoE",
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(**QWEN3, norm_topk_prob=True),
        qwen3_moe_router,
    ),
    Model(
        "Qwen3-MoE, not normalised",
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(**QWEN3, norm_topk_prob=False),
        qwen3_moe_router,
    ),
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
        deepseek_v3_router,
    ),
]


def weights_of(block: torch.nn.Module, pick: Callable) -> Weights:
    """Return the block's weights for `expert_parallel_block`, or their gradients.

    Args:
      block: the original.
      pick: a function that maps a tensor of the block to the tensor to return for it, for example
        to its gradient.

    Returns:
      float32 numpy arrays. `router` [hidden, experts], `gate_up` [experts, hidden,
      2 * expert hidden], `down` [experts, expert hidden, hidden]; and, if the model has them,
      `bias` [experts], `shared_gate_up` [hidden, 2 * shared hidden], `shared_down` [shared hidden,
      hidden].

    Raises:
      TypeError: if this version of transformers keeps the weights in an unknown way.
    """

    def matrix(parameter: torch.Tensor) -> np.ndarray:
        return pick(parameter).numpy().swapaxes(-1, -2)  # PyTorch has outputs before inputs

    def feed_forward(module: torch.nn.Module) -> tuple[np.ndarray, np.ndarray]:
        old = hasattr(module, "w1")  # Mixtral in version 4
        names = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (matrix(getattr(module, name).weight) for name in names)
        return np.concatenate([gate, up], axis=-1), down

    unknown = TypeError(
        f"transformers {transformers.__version__} keeps the weights of {type(block).__name__} in a "
        "way that this example does not know; it was tried with 4.51, 4.57, 5.0 and 5.23"
    )
    try:
        weights = {"router": matrix(block.gate.weight)}
        if isinstance(block.experts, torch.nn.ModuleList):  # version 4
            each = [feed_forward(expert) for expert in block.experts]
            weights["gate_up"], weights["down"] = map(np.stack, zip(*each, strict=True))
        else:
            weights["gate_up"] = matrix(block.experts.gate_up_proj)
            weights["down"] = matrix(block.experts.down_proj)
        if hasattr(block, "shared_experts"):
            shared = feed_forward(block.shared_experts)
            weights["shared_gate_up"], weights["shared_down"] = shared
    except AttributeError as error:
        raise unknown from error

    # A transposed matrix, or a parameter that is missing here, must raise an error.
    hidden, num_experts = weights["router"].shape
    expert_hidden = weights["down"].shape[1]
    if (
        weights["gate_up"].shape != (num_experts, hidden, 2 * expert_hidden)
        or weights["down"].shape != (num_experts, expert_hidden, hidden)
        or sum(w.size for w in weights.values()) != sum(p.numel() for p in block.parameters())
    ):
        raise unknown

    if hasattr(block.gate, "e_score_correction_bias"):  # a buffer, not a parameter
        weights["bias"] = pick(block.gate.e_score_correction_bias).numpy()
    return weights


def random_block(model: Model) -> torch.nn.Module:
    """Make the original with random weights, which transformers sets in whole models only."""
    block = model.block(model.config).eval()
    generator = torch.Generator().manual_seed(0)
    # In reverse order of names, the router comes before the experts, which differ between versions
    # of transformers. So all versions have the same router and choose the same experts.
    for name, values in sorted(block.state_dict().items(), reverse=True):
        # The bias of DeepSeek-V3 changes choices; the other weights keep the size of activations.
        std = 0.1 if name.endswith("bias") else values.shape[-1] ** -0.5
        values.normal_(std=std, generator=generator)
    return block


# --------------------------------------------------------------------------------- the comparison


def original(block: torch.nn.Module, x: np.ndarray, dy: np.ndarray) -> dict[str, np.ndarray]:
    """Run the block and its backward pass in PyTorch, for tokens x and the output gradient dy.

    x and dy are float32 [tokens, hidden]. Returns `output` and `tokens`, the gradient of x, both
    [tokens, hidden], and the gradient of each weight by its name in `weights_of`.
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
        **weights_of(block, gradient),
    }


def expert_parallel(
    model: Model, weights: Weights, x: np.ndarray, dy: np.ndarray, group: ma.Group
) -> dict[str, np.ndarray]:
    """Return the same results as `original`, computed by `expert_parallel_block` on all ranks."""
    on_rank = partial(expert_parallel_block, router=model.router, config=model.config, group=group)
    # Tokens and experts are split over the ranks; all other weights are replicated. Outside
    # shard_map a replicated weight is one array, so its gradient is already summed over the ranks.
    specs = {name: P("ep") if name in ("gate_up", "down") else P() for name in weights}
    layer = jax.shard_map(on_rank, mesh=group.mesh, in_specs=(P("ep"), specs), out_specs=P("ep"))

    @jax.jit
    def output_and_gradients(x: jax.Array, weights: Weights, dy: jax.Array) -> dict:
        y, pullback = jax.vjp(layer, x, weights)
        dx, dweights = pullback(dy)
        return {"output": y, "tokens": dx, **dweights}

    place = partial(NamedSharding, group.mesh)
    args = jax.device_put(
        (x, weights, dy), (place(P("ep")), jax.tree.map(place, specs), place(P("ep")))
    )
    with jax.default_matmul_precision("highest"):  # GPUs would round to TF32
        return jax.device_get(output_and_gradients(*args))


def differences(model: Model, group: ma.Group) -> dict[str, float]:
    """Return the largest difference of each result, relative to the original's largest value."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, SEQUENCES * LENGTH, HIDDEN), np.float32)
    block = random_block(model)
    theirs = original(block, x, dy)
    ours = expert_parallel(model, weights_of(block, torch.Tensor.detach), x, dy, group)
    return {
        # The gradient of the bias is zero on both sides, so it is not divided by its largest value.
        name: float(abs(ours[name] - value).max() / (abs(value).max() or 1))
        for name, value in theirs.items()
    }


COLUMNS = "output tokens router gate_up down shared_gate_up shared_down bias".split()


def print_row(title: str, cells: Iterable[str]) -> None:
    widths = (max(len(name), 7) for name in COLUMNS)
    print(f"{title:25}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths)), flush=True)


def main() -> int:
    devices = jax.devices()
    ranks = max(n for n in (1, 2, 4, 8) if n <= len(devices))  # all divide the numbers of experts
    group = ma.Group(jax.make_mesh((ranks,), ("ep",), devices=devices[:ranks]), "ep")
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, jax "
        f"{jax.__version__}: {SEQUENCES * LENGTH} tokens, {ranks} ranks, {group.path} path"
    )
    print("largest difference of the output and of the gradients, relative to the original's")
    print_row("", COLUMNS)
    worst = 0.0
    for model in MODELS:
        found = differences(model, group)
        print_row(model.name, (f"{found[c]:.1e}" if c in found else "-" for c in COLUMNS))
        worst = np.max([worst, *found.values()])  # NaN if there is any, which is a failure
    agree = worst <= TOLERANCE
    print(f"check: {'ok' if agree else 'FAILED'}: at most {worst:.1e} (tolerance {TOLERANCE:.0e})")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
