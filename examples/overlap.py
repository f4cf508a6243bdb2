"""Compute a shared expert while tokens travel to their experts, or while results travel back.

    python examples/overlap.py

The program uses all GPUs of a host, or 8 virtual CPU devices if there are no GPUs. On CPUs, the
computation does not overlap with the exchange. docs/overlap.md says when overlap saves time.
"""

import os

# JAX reads XLA_FLAGS when it starts. This flag affects only the CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

NUM_EXPERTS, TOP_K, HIDDEN, EXPERT_HIDDEN, TOKENS = 16, 4, 64, 128, 512

mesh = jax.make_mesh((jax.device_count(),), ("ep",))
group = ma.Group(mesh, "ep")


def start(x: jax.Array, router: jax.Array) -> ma.InFlight:
    """Start to send this rank's tokens x [tokens, hidden] to their experts."""
    logits, topk_ids = jax.lax.top_k(x @ router, TOP_K)
    topk_weights = jax.nn.softmax(logits)
    return ma.dispatch_start(x, topk_ids, topk_weights, group=group, num_experts=NUM_EXPERTS)


def experts(recv: ma.Recv, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Apply this rank's experts."""
    h = jax.nn.gelu(ma.grouped_dot(recv.rows, w_in, recv.group_sizes))
    return ma.grouped_dot(h, w_out, recv.group_sizes)


def shared_expert(x: jax.Array, s_in: jax.Array, s_out: jax.Array) -> jax.Array:
    """Apply the shared expert to this rank's tokens."""
    return jax.nn.gelu(x @ s_in) @ s_out


def whole(x, router, w_in, w_out, s_in, s_out):
    """Compute the layer without overlap, for comparison."""
    recv = ma.dispatch_done(start(x, router))
    return ma.combine(experts(recv, w_in, w_out), recv) + shared_expert(x, s_in, s_out)


def with_dispatch_overlap(x, router, w_in, w_out, s_in, s_out):
    """Compute the shared expert while the tokens travel."""
    inflight = start(x, router)
    inflight, shared = ma.overlap(inflight, shared_expert, x, s_in, s_out)
    recv = ma.dispatch_done(inflight)
    return ma.combine(experts(recv, w_in, w_out), recv) + shared


def with_combine_overlap(x, router, w_in, w_out, s_in, s_out):
    """Compute the shared expert while the results of the experts travel back."""
    recv = ma.dispatch_done(start(x, router))
    weighted = experts(recv, w_in, w_out) * recv.weights[:, None]
    inflight = ma.combine_start(weighted, recv.routing)
    inflight, shared = ma.overlap(inflight, shared_expert, x, s_in, s_out)
    return ma.combine_done(inflight) + shared


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")  # otherwise GPUs use TF32
    shapes = (
        (TOKENS, HIDDEN),
        (HIDDEN, NUM_EXPERTS),
        (NUM_EXPERTS, HIDDEN, EXPERT_HIDDEN),
        (NUM_EXPERTS, EXPERT_HIDDEN, HIDDEN),
        (HIDDEN, EXPERT_HIDDEN),
        (EXPERT_HIDDEN, HIDDEN),
    )
    # Tokens and experts are split over the ranks. Each rank has the router and the shared expert.
    specs = (P("ep"), P(), P("ep"), P("ep"), P(), P())
    args = [
        jax.device_put(
            jax.random.normal(jax.random.key(i), shape) * (1 if i == 0 else shape[-2] ** -0.5),
            jax.NamedSharding(mesh, spec),
        )
        for i, (shape, spec) in enumerate(zip(shapes, specs))
    ]

    def value_and_grads(layer):
        on_ranks = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("ep"))

        def loss(*args):
            y = on_ranks(*args)
            return jnp.sum(jnp.sin(y)), y

        argnums = tuple(range(len(args)))
        (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums, has_aux=True))(*args)
        return jax.device_get((y, *grads))

    expected = value_and_grads(whole)
    print(f"{group.size} ranks, {group.path} path, {TOKENS} tokens")
    for layer in (with_dispatch_overlap, with_combine_overlap):
        error = max(
            abs(a - b).max() / abs(b).max() for a, b in zip(value_and_grads(layer), expected)
        )
        print(f"{layer.__name__:21} differs from the whole layer by {error:.1e}, with gradients")
        assert error < 1e-4, layer.__name__


if __name__ == "__main__":
    main()
