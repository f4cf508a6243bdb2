"""Compute expert layers in plain JAX without routing."""

import jax
import jax.numpy as jnp

import jax_moe_a2a as ma


def dense(x, weights, ids, w_in, w_out, activation, b_in=None, b_out=None):
    """Return the output [..., H] for x [..., H] and weights and ids [..., K]. In `w_in` and `b_in`,
    gate and up are side by side or on a separate axis."""
    hidden = jnp.einsum("...h,ehi->...ei", x, w_in.reshape(*w_in.shape[:2], -1))
    if b_in is not None:
        hidden += jnp.broadcast_to(b_in.reshape(len(b_in), -1), hidden.shape)
    y = jnp.einsum("...ei,eih->...eh", activation(hidden), w_out)
    y = y if b_out is None else y + jnp.broadcast_to(b_out, y.shape)
    of_choice = jax.nn.one_hot(ids, w_in.shape[0], dtype=y.dtype)  # zeros if the id is -1
    return jnp.einsum("...ke,...k,...eh->...h", of_choice, weights, y)


def dense_experts(x, weights, ids, experts):
    """Return the output of `dense` for `ma.Experts`; a shared expert first gets an expert axis."""
    if experts.output_gate is not None:
        weights = weights * jax.nn.sigmoid(x @ experts.output_gate)[..., None]
    if experts.w_out.ndim == 2:
        experts = jax.tree.map(lambda w: w[None], experts)
    activation = experts.activation or swiglu
    arrays = experts.w_in, experts.w_out, activation, experts.b_in, experts.b_out
    if experts.weigh_input:  # choice by choice: a token may choose an expert twice
        of_choice = lambda weight, k: dense(
            weight[..., None] * x, jnp.ones_like(weight)[..., None], ids[..., k : k + 1], *arrays
        )
        return sum(of_choice(weights[..., k], k) for k in range(ids.shape[-1]))
    return dense(x, weights, ids, *arrays)


def experts_of(w_in, w_out, b_in=None, b_out=None, activation=None):
    """Return `ma.Experts` with a separate axis for gate and up."""
    width = w_out.shape[-2]

    def divided(a):
        is_gated = a is not None and a.shape[-1] == 2 * width
        return a.reshape(*a.shape[:-1], 2, width) if is_gated else a

    return ma.Experts(divided(w_in), w_out, divided(b_in), b_out, activation=activation)


def swiglu(hidden):
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up
