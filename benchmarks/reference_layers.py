"""Our own small versions of the layers that ``jax_moe_a2a.integrations`` can replace.

They have the interfaces of the code bases and exchange tokens as those do, in plain JAX: Marin's
Grug gathers all tokens and scatters the sums, and sglang-jax keeps tokens on all ranks.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax


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


# --------------------------------------------------------------------------------- Grug: a ring


def ring(x, ids, weights, token_valid, w13, w2, *, activation_fn, num_experts, capacity_factor):
    """Gather all tokens, let each rank compute its experts' choices, and scatter the sums."""
    x, ids, weights, token_valid = (
        lax.all_gather(a, "expert", tiled=True) for a in (x, ids, weights, token_valid)
    )
    num_local, top_k = w13.shape[0], ids.shape[1]
    capacity = math.ceil(capacity_factor * ids.size * num_local / num_experts)
    local = ids - lax.axis_index("expert") * num_local
    is_local = token_valid[:, None] & (local >= 0) & (local < num_local)
    local = jnp.where(is_local, local, num_local).ravel()
    choices = jnp.argsort(local, stable=True)[:capacity]
    group_sizes = jnp.bincount(local[choices], length=num_local + 1)[:-1].astype(jnp.int32)
    kept = jnp.where(local[choices] < num_local, weights.ravel()[choices], 0).astype(x.dtype)
    tokens = choices // top_k
    gate, up = jnp.split(lax.ragged_dot(x[tokens], w13, group_sizes), 2, axis=-1)
    rows = lax.ragged_dot(activation_fn(gate) * up, w2, group_sizes)
    sums = jnp.zeros_like(x).at[tokens].add(rows * kept[:, None])
    num_dropped = jnp.sum(is_local, dtype=jnp.int32) - jnp.sum(group_sizes)
    y = lax.psum_scatter(sums, "expert", scatter_dimension=0, tiled=True)
    return y, lax.psum(num_dropped, "expert")


# ----------------------------------------------------------- sglang-jax: tokens on all ranks


def ep_moe(x, weights, ids, wi_0, wi_1, wo):
    """Sort all choices, let each rank compute its experts' choices, and sum over all ranks."""
    num_local, top_k = wi_0.shape[0], ids.shape[1]
    local = ids.ravel() - lax.axis_index("expert") * num_local
    local = jnp.where((local >= 0) & (local < num_local), local, num_local)
    order = jnp.argsort(local, stable=True)
    group_sizes = jnp.bincount(local, length=num_local + 1)[:-1].astype(jnp.int32)
    rows = x[order // top_k]
    hidden = jax.nn.silu(lax.ragged_dot(rows, wi_0, group_sizes))
    hidden *= lax.ragged_dot(rows, wi_1, group_sizes)
    rows = lax.ragged_dot(hidden, wo, group_sizes)
    kept = jnp.where(local[order] < num_local, weights.ravel()[order], 0).astype(rows.dtype)
    y = jnp.zeros_like(x).at[order // top_k].add(rows * kept[:, None])
    return lax.psum(y, ("expert", "tensor"))
