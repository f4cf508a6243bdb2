"""A layer of experts that every token goes through, in plain JAX."""

import jax
import jax.numpy as jnp


def dense(x, weights, ids, w_in, w_out, activation, b_in=None, b_out=None):
    """Let every expert compute every token: x [..., H], weights and ids [..., K] -> [..., H]."""
    hidden = jnp.einsum("...h,ehi->...ei", x, w_in)
    hidden = hidden if b_in is None else hidden + jnp.broadcast_to(b_in, hidden.shape)
    y = jnp.einsum("...ei,eih->...eh", activation(hidden), w_out)
    y = y if b_out is None else y + jnp.broadcast_to(b_out, y.shape)
    of_choice = jax.nn.one_hot(ids, w_in.shape[0], dtype=y.dtype)  # an id of -1 is no expert
    return jnp.einsum("...ke,...k,...eh->...h", of_choice, weights, y)


def swiglu(hidden):
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up
