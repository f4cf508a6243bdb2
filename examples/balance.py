"""Train a layer with four ways to balance its router, and compare the load of the experts.

    python examples/balance.py                 # trains four times and prints a table
    python examples/balance.py --out load.png  # also plots the load

Tokens belong to domains of different sizes, and the router at first prefers experts with low ids.
The program trains the layer four times: without balancing, with a loss, and with biases by the sign
rule of DeepSeek-V3 or by quantiles. It runs for less than a minute on all GPUs of a host, or on 8
virtual CPU devices if there are no GPUs. docs/recipes.md shows the figure.
"""

import argparse
import os
from functools import partial

# JAX reads XLA_FLAGS when it starts. This flag affects only the CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jax_moe_a2a as ma

TOKENS, HIDDEN, EXPERT_HIDDEN, NUM_EXPERTS, DOMAINS = 2048, 16, 16, 16, 32
CHOOSE = ma.TopK(2, score="sigmoid")
LOSS_COEFFICIENT, BIAS_RATE = 0.1, 0.01
METHODS = "none", "loss", "sign", "quantile"
LABELS = "no balancing", "auxiliary loss", "bias by the sign rule", "bias by quantiles"
OPTIMIZER = optax.adam(3e-3)


def draw_tokens(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return tokens [tokens, hidden], and the outputs that the layer should learn. Each domain has
    a different center and target function. Domain i is chosen with a probability proportional to 1
    / (i + 1)."""
    of_domains, of_step, noise = jax.random.split(key, 3)
    centers, turns = jax.random.normal(jax.random.key(1), (2, DOMAINS, HIDDEN))
    domain = jax.random.categorical(of_step, -jnp.log1p(jnp.arange(DOMAINS)), shape=(TOKENS,))
    x = centers[domain] + 0.5 * jax.random.normal(noise, (TOKENS, HIDDEN))
    return x, x * turns[domain]


def balance(method: jax.Array, stats: ma.MoEStatistics, bias: jax.Array) -> jax.Array:
    """Return the next ``select_bias`` of the router."""
    by_sign = ma.update_select_bias(bias, stats.load.wanted_per_expert, rate=BIAS_RATE)
    histogram = CHOOSE.bias_histogram(stats.logits, select_bias=bias)
    by_quantile = ma.quantile_select_bias(bias, histogram, CHOOSE.k)
    return jnp.stack([bias, bias, by_sign, by_quantile])[method]


@partial(jax.jit, static_argnames="steps")
def train(method: jax.Array, steps: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss (without the auxiliary loss) and the layer's statistics for each step."""
    config = ma.MoEConfig(HIDDEN, EXPERT_HIDDEN, NUM_EXPERTS, CHOOSE)
    params = ma.init_moe(jax.random.key(0), config, "ep")
    skew = jnp.linspace(2, -2, NUM_EXPERTS)
    params["router"] = params["router"].replace(bias=skew)

    def loss(params, bias, x, y):
        router = params["router"].replace(select_bias=bias)
        found, stats = ma.moe(x, router, params["experts"], axes="ep", outputs=("logits",))
        loss = jnp.mean((found - y) ** 2)
        coefficient = jnp.where(method == METHODS.index("loss"), LOSS_COEFFICIENT, 0)
        return loss + coefficient * stats.balance_loss, (loss, stats)

    def step(carry, key):
        params, state, bias = carry
        grads, (value, stats) = jax.grad(loss, has_aux=True)(params, bias, *draw_tokens(key))
        updates, state = OPTIMIZER.update(grads, state)
        bias = balance(method, stats, bias)
        return (optax.apply_updates(params, updates), state, bias), (value, stats.summary())

    start = params, OPTIMIZER.init(params), jnp.zeros(NUM_EXPERTS)
    return lax.scan(step, start, jax.random.split(jax.random.key(2), steps))[1]


def draw(path: str, ratios: dict[str, np.ndarray]) -> None:
    """Plot the largest load of an expert in each step, relative to the mean load."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for label, ratio in zip(LABELS, ratios.values()):
        axes.plot(ratio, label=label, linewidth=1)
    axes.axhline(1, color="black", linestyle=":", linewidth=1)
    axes.set(xlabel="step", ylabel="choices of the busiest expert / mean", ylim=(0.9, None))
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="more than 10")
    parser.add_argument("--out", help="file of the figure, which needs matplotlib")
    args = parser.parse_args()
    ratios = {}
    print(
        "Choices of the busiest expert / mean: first step, step 10, mean of the last 50; and loss"
    )
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("ep",))):
        for number, method in enumerate(METHODS):
            losses, found = jax.device_get(train(number, args.steps))
            ratio = ratios[method] = found["expert_max_over_mean"]
            numbers = ratio[0], ratio[10], ratio[-50:].mean(), losses[-50:].mean()
            print(f"{method:8}", *(f"{number:6.2f}" for number in numbers))
    if args.out:
        draw(args.out, ratios)


if __name__ == "__main__":
    main()
