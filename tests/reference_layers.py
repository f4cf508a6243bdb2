"""Small versions of the layers that ``jax_moe_a2a.integrations`` can replace, in plain JAX.

MaxText's exchange of one row for each choice is a dense all-to-all here, with blocks of the worst
case, because ``lax.ragged_all_to_all`` does not run on CPUs.
"""

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


def starts_of(sizes, axis=-1):
    return jnp.cumsum(sizes, axis) - sizes


def route(x, weights, ids, *, num_experts):
    """Move a row per choice to its expert: x [B, S, H] -> rows [ranks * B * S * K, H], routing."""
    ranks, me = lax.axis_size("expert"), lax.axis_index("expert")
    num_local, num_choices = num_experts // ranks, ids.size
    order = jnp.argsort(ids.ravel(), stable=True)
    sent = x.reshape(-1, x.shape[-1])[order // ids.shape[-1]]
    sizes = jnp.bincount(ids.ravel(), length=num_experts).astype(jnp.int32)
    of_source = lax.all_gather(sizes, "expert").reshape(ranks, ranks, num_local)[:, me]
    place = jnp.arange(num_choices, dtype=jnp.int32)
    first = starts_of(sizes.reshape(ranks, num_local).sum(1))
    blocks = sent.at[first[:, None] + place[None]].get(mode="fill", fill_value=0)
    received = lax.all_to_all(blocks, "expert", 0, 0).reshape(-1, x.shape[-1])
    expert = (place[None, :, None] >= jnp.cumsum(of_source, 1)[:, None]).sum(2).ravel()
    by_expert = jnp.argsort(expert, stable=True)
    rows = jnp.where((expert < num_local)[by_expert, None], received[by_expert], 0)
    routing = dict(order=order, by_expert=by_expert, first=first, sizes=sizes, weights=weights)
    return rows, of_source.sum(0), jnp.minimum(expert[by_expert], num_local - 1), routing


def unroute(rows, routing):
    """Move the experts' outputs back, and sum: rows [C, H] -> [B, S, H]."""
    ranks, weights = lax.axis_size("expert"), routing["weights"]
    blocks = jnp.zeros_like(rows).at[routing["by_expert"]].set(rows)
    back = lax.all_to_all(blocks.reshape(ranks, -1, rows.shape[-1]), "expert", 0, 0)
    place = jnp.arange(weights.size, dtype=jnp.int32)
    rank = (place[:, None] >= routing["first"][None, 1:]).sum(1)
    back = back[rank, place - routing["first"][rank]]
    choices = jnp.zeros_like(back).at[routing["order"]].set(back).reshape(*weights.shape, -1)
    return jnp.einsum("bskh,bsk->bsh", choices, weights.astype(rows.dtype))
