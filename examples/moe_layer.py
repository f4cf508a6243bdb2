"""Compare the output and gradients of a mixture-of-experts layer with a computation on one device.

    python examples/moe_layer.py

The program uses all GPUs of a host, or 8 virtual CPU devices if there are no GPUs.
"""

import os
from typing import Any

# JAX reads XLA_FLAGS when it starts. This flag affects only the CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

import jax_moe_a2a as ma

NUM_EXPERTS, TOP_K, HIDDEN, EXPERT_HIDDEN, TOKENS = 16, 4, 64, 128, 512

mesh = jax.make_mesh((jax.device_count(),), ("ep",))
Params = dict[str, Any]  # keys: router, experts


def moe(params: Params, x: jax.Array) -> tuple[jax.Array, ma.ExpertLoad]:
    """Apply the layer to the tokens x [tokens, hidden] of all ranks, under jax.set_mesh.

    Each rank has room for twice the rows of a balanced load. The load counts dropped rows.
    """
    y, stats = ma.moe(x, **params, axes="ep", exchange=ma.Exchange(capacity_factor=2.0))
    return y, stats.load


def dense_moe(params: Params, x: jax.Array) -> tuple[jax.Array, None]:
    """Apply the layer on one device: every expert computes every token."""
    choices = ma.TopK(TOP_K)(x @ params["router"].kernel)
    weights = jnp.einsum("tke,tk->et", jax.nn.one_hot(choices.ids, NUM_EXPERTS), choices.weights)
    gate, up = jnp.unstack(jnp.einsum("th,ehgi->geti", x, params["experts"].w_in))
    y = (jax.nn.silu(gate) * up) @ params["experts"].w_out
    return jnp.einsum("et,eth->th", weights, y), None


def value_and_grads(layer, params: Params, x: jax.Array) -> tuple[dict, ma.ExpertLoad | None]:
    """Return a dict with the output and all gradients, and the load."""

    def loss(params, x):
        y, load = layer(params, x)
        return jnp.sum(jnp.sin(y)), (y, load)

    (_, (y, load)), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    router, experts = grads[0]["router"], grads[0]["experts"]
    found = {"y": y, "x": grads[1], "router": router.kernel}
    return jax.device_get(found | {"w_in": experts.w_in, "w_out": experts.w_out}), load


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")  # otherwise GPUs use TF32
    config = ma.MoEConfig(HIDDEN, EXPERT_HIDDEN, NUM_EXPERTS, ma.TopK(TOP_K))
    params = ma.init_moe(jax.random.key(0), config)
    x = jax.random.normal(jax.random.key(1), (TOKENS, HIDDEN))
    dense, _ = value_and_grads(dense_moe, params, x)
    with jax.set_mesh(mesh):
        ours, load = value_and_grads(moe, params, x)
    print(f"{mesh.size} ranks, {NUM_EXPERTS} experts, top-{TOP_K}, {TOKENS} tokens")
    print(
        f"rows of each rank: {load.rows_per_rank}, the busiest {load.max_over_mean:.2f} x the mean;"
        f" dropped: {load.dropped_per_rank.sum()}"
    )
    for name, array in ours.items():
        error = abs(array - dense[name]).max() / abs(dense[name]).max()
        name = name if name == "y" else f"d{name}"
        print(f"{name:10} {array.shape!s:16} error relative to the dense computation: {error:.1e}")
        assert error < 1e-4, name


if __name__ == "__main__":
    main()
