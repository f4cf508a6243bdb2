"""Run only the mixture-of-experts layer, forward and gradient, and compare it with a dense one.

    python examples/moe_layer.py

Runs on all GPUs of a host, or on 8 virtual CPU devices without GPUs.
"""

import os

# Read when JAX starts; it concerns the CPU only.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

NUM_EXPERTS, TOP_K, HIDDEN, EXPERT_HIDDEN, TOKENS = 16, 4, 64, 128, 512

mesh = jax.make_mesh((jax.device_count(),), ("ep",))
group = ma.Group(mesh, "ep")


def choose(x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each token's TOP_K experts and their weights, which sum to one."""
    logits, topk_ids = jax.lax.top_k(x @ router, TOP_K)
    return jax.nn.softmax(logits), topk_ids


def moe(
    x: jax.Array, router: jax.Array, w_in: jax.Array, w_out: jax.Array
) -> tuple[jax.Array, ma.ExpertLoad]:
    """Apply the layer to this rank's tokens x [tokens, hidden], inside shard_map.

    w_in and w_out hold the weights of this rank's experts.
    Each rank has room for twice the rows of a balanced load; the load says whether rows dropped.
    """
    topk_weights, topk_ids = choose(x, router)
    routing = ma.route(topk_ids, group=group, num_experts=NUM_EXPERTS, capacity_factor=2.0)
    y = ma.moe_mlp(x, routing, topk_weights, w_in, w_out, activation=jax.nn.gelu)
    return y, ma.expert_load(routing)


def dense_moe(
    x: jax.Array, router: jax.Array, w_in: jax.Array, w_out: jax.Array
) -> tuple[jax.Array, None]:
    """Apply the layer on one device: every expert computes every token."""
    topk_weights, topk_ids = choose(x, router)
    weights = jnp.einsum("tke,tk->et", jax.nn.one_hot(topk_ids, NUM_EXPERTS), topk_weights)
    y = jax.nn.gelu(x @ w_in) @ w_out
    return jnp.einsum("et,eth->th", weights, y), None


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would round to TF32
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (TOKENS, HIDDEN))
    router = jax.random.normal(keys[1], (HIDDEN, NUM_EXPERTS))
    w_in = jax.random.normal(keys[2], (NUM_EXPERTS, HIDDEN, EXPERT_HIDDEN)) * HIDDEN**-0.5
    w_out = jax.random.normal(keys[3], (NUM_EXPERTS, EXPERT_HIDDEN, HIDDEN)) * EXPERT_HIDDEN**-0.5
    args = (x, router, w_in, w_out)

    # Tokens and experts are split over the ranks; the router is replicated.
    specs = (P("ep"), P(), P("ep"), P("ep"))
    layer = jax.shard_map(moe, mesh=mesh, in_specs=specs, out_specs=(P("ep"), P()))
    sharded = [jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip(args, specs)]

    def value_and_grads(f, args):
        def loss(*args):
            y, load = f(*args)
            return jnp.sum(jnp.sin(y)), (y, load)

        (_, aux), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*args)
        y, load = jax.device_get(aux)
        return (y, *jax.device_get(grads)), load

    (ours, load), (dense, _) = value_and_grads(layer, sharded), value_and_grads(dense_moe, args)
    print(f"{group.size} ranks, {NUM_EXPERTS} experts, top-{TOP_K}, {TOKENS} tokens")
    print(
        f"rows of each rank: {load.rows_per_rank}, the busiest {load.max_over_mean:.2f} x the mean;"
        f" dropped: {load.dropped_per_rank.sum()}"
    )
    for name, a, b in zip(("y", "dx", "drouter", "dw_in", "dw_out"), ours, dense):
        error = abs(a - b).max() / abs(b).max()
        print(f"{name:8} {str(a.shape):15} error relative to the dense computation: {error:.1e}")
        assert error < 1e-4, name


if __name__ == "__main__":
    main()
