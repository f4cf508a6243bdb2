"""Work during an exchange: a shared expert in the forward pass, weight gradients in the backward.

    python examples/overlap.py

Runs on all GPUs of a host, or on 8 virtual CPU devices where there is none. There the program is
the same, but nothing overlaps. ``python -m benchmarks.overlap`` says what it brings.
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


def start(x: jax.Array, router: jax.Array) -> ma.InFlight:
    """Start to send tokens to their experts; x [tokens, hidden] are the tokens of this rank."""
    logits, topk_ids = jax.lax.top_k(x @ router, TOP_K)
    topk_weights = jax.nn.softmax(logits)
    return ma.dispatch_start(x, topk_ids, topk_weights, group=group, num_experts=NUM_EXPERTS)


def experts(recv: ma.Recv, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
    """Apply this rank's experts."""
    h = jax.nn.gelu(ma.grouped_dot(recv.rows, w_in, recv.group_sizes))
    return ma.grouped_dot(h, w_out, recv.group_sizes)


def shared_expert(x: jax.Array, s_in: jax.Array, s_out: jax.Array) -> jax.Array:
    """Apply the shared expert to all tokens, on their own rank."""
    return jax.nn.gelu(x @ s_in) @ s_out


def whole(x, router, w_in, w_out, s_in, s_out):
    """Compute the layer with no work during the exchanges. All other functions must equal it."""
    recv = ma.dispatch_done(start(x, router))
    return ma.combine(experts(recv, w_in, w_out), recv) + shared_expert(x, s_in, s_out)


def with_shared_expert(x, router, w_in, w_out, s_in, s_out):
    """Compute the shared expert while the tokens travel."""
    inflight = start(x, router)
    inflight, shared = ma.overlap(inflight, shared_expert, x, s_in, s_out)
    recv = ma.dispatch_done(inflight)
    return ma.combine(experts(recv, w_in, w_out), recv) + shared


# The backward pass ends with the combine of the token gradients. Under plain `jax.grad` nothing
# runs next to it, although both weight gradients could. This layer has a backward pass of its own.
# It has gradients of the first order only, and no forward mode.


def moe_forward(x, topk_ids, topk_weights, w_in, w_out):
    """Return the result of the layer, and what its backward pass needs."""
    recv = ma.dispatch(x, topk_ids, topk_weights, group=group, num_experts=NUM_EXPERTS)
    pre = ma.grouped_dot(recv.rows, w_in, recv.group_sizes)
    h, gelu_vjp = jax.vjp(jax.nn.gelu, pre)
    y = ma.grouped_dot(h, w_out, recv.group_sizes)
    combine = lambda y, weights: ma.combine(y, recv.routing, weights=weights)
    out, combine_vjp = jax.vjp(combine, y, recv.weights)
    return out, (recv, h, gelu_vjp, combine_vjp, (x, topk_weights, w_in, w_out))


def moe_backward(saved, ct):
    """Return the gradients. The gradient of the tokens travels while those of the weights are
    computed."""
    recv, h, gelu_vjp, combine_vjp, primals = saved
    sizes, (_, _, w_in, w_out) = recv.group_sizes, primals
    d_y, d_row_weights = combine_vjp(ct)
    (d_h,) = jax.linear_transpose(lambda h: ma.grouped_dot(h, w_out, sizes), h)(d_y)
    (d_pre,) = gelu_vjp(d_h)
    (d_rows,) = jax.linear_transpose(lambda r: ma.grouped_dot(r, w_in, sizes), recv.rows)(d_pre)

    # Transposed, this starts a combine of d_rows, computes the weight gradients from d_pre and d_y,
    # and finishes the combine.
    def transposed(x, topk_weights, w_in, w_out):
        inflight = ma.dispatch_start(x, recv.routing, topk_weights)
        products = lambda w_in, w_out: (
            ma.grouped_dot(recv.rows, w_in, sizes),
            ma.grouped_dot(h, w_out, sizes),
        )
        inflight, made = ma.overlap(inflight, products, w_in, w_out)
        moved = ma.dispatch_done(inflight)
        return moved.rows, moved.weights, *made

    cotangents = d_rows, d_row_weights, d_pre, d_y
    d_x, d_weights, d_in, d_out = jax.linear_transpose(transposed, *primals)(cotangents)
    return d_x, None, d_weights, d_in, d_out  # None: ids have no gradient


moe = jax.custom_vjp(lambda *args: moe_forward(*args)[0])
moe.defvjp(moe_forward, moe_backward)


def with_backward_overlap(x, router, w_in, w_out, s_in, s_out):
    """Compute the weight gradients while the token gradients travel back."""
    logits, topk_ids = jax.lax.top_k(x @ router, TOP_K)
    y = moe(x, topk_ids, jax.nn.softmax(logits), w_in, w_out)
    return y + shared_expert(x, s_in, s_out)


def main() -> None:
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would round to TF32
    shapes = (
        (TOKENS, HIDDEN),
        (HIDDEN, NUM_EXPERTS),
        (NUM_EXPERTS, HIDDEN, EXPERT_HIDDEN),
        (NUM_EXPERTS, EXPERT_HIDDEN, HIDDEN),
        (HIDDEN, EXPERT_HIDDEN),
        (EXPERT_HIDDEN, HIDDEN),
    )
    # Tokens and experts are split over the ranks; the router and the shared expert are replicated.
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
    for layer in (with_shared_expert, with_backward_overlap):
        error = max(
            abs(a - b).max() / abs(b).max() for a, b in zip(value_and_grads(layer), expected)
        )
        print(f"{layer.__name__:21} value and gradients {error:.1e} apart from the whole layer's")
        assert error < 1e-4, layer.__name__


if __name__ == "__main__":
    main()
