"""Exchange tokens with this package and with plain JAX.

A ``Method`` has two functions of the arrays of one rank. ``dispatch(x, ids, weights)`` returns rows
grouped by local expert. All methods return the rows in the same order. ``combine(rows, state)``
returns the weighted sums. The functions are differentiable in x, rows and weights.

The methods in plain JAX gather rows by a permutation. Their gradients gather rows by the inverse
permutation, because gathers are faster than scatters. These methods only accept valid ids.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jax_moe_a2a as ma

from .workload import DTYPE, Workload

GLOBAL_SCALE = 0.002  # of NvFp4, whose largest number is 2688 times this scale


class Dispatched(NamedTuple):
    rows: Any
    """[capacity, hidden], zero after the last group. With a format: encoded values and scales."""
    weights: jax.Array | None
    """[capacity] if the method sends router weights to the experts' ranks, otherwise None."""
    group_sizes: jax.Array
    """[local experts] int32."""
    state: Any


class Method(NamedTuple):
    """A way to exchange tokens."""

    dispatch: Callable[[jax.Array, Any, jax.Array], Dispatched]
    """(x [T, H], ids [T, K] or the result of ``route``, weights [T, K])."""
    combine: Callable[[jax.Array, Any], jax.Array]
    """(rows [capacity, H], state) -> [T, H]."""
    route: Callable[[jax.Array], Any] | None = None
    decode: Callable[[Any], jax.Array] = lambda rows: rows
    """Maps the rows that ``dispatch`` returns to rows that ``combine`` accepts."""


def ours(workload: Workload, group: ma.Group) -> Method:
    setting = workload.setting
    formats: dict[str, ma.TokenFormat] = dict(
        BlockwiseFp8=ma.BlockwiseFp8(), MxFp8=ma.MxFp8(), NvFp4=ma.NvFp4(global_scale=GLOBAL_SCALE)
    )
    fmt, wire_dtype = formats.get(setting.format), None
    if setting.formatted == "sums":
        fmt, wire_dtype = None, fmt
    exchange = ma.Exchange(capacity=workload.capacity, token_format=fmt, wire_dtype=wire_dtype)
    options: dict[str, Any] = dict(group=group, num_experts=setting.experts, exchange=exchange)
    decode = setting.formatted == "decoded"

    def dispatch(x: Any, ids: Any, weights: jax.Array) -> Dispatched:
        recv = ma.dispatch(x, ids, weights, decode=decode, **options)
        return Dispatched(recv.rows, recv.weights, recv.group_sizes, (recv.routing, recv.weights))

    def combine(rows: jax.Array, state: Any) -> jax.Array:
        routing, weights = state
        return ma.combine(rows, routing, weights=weights, wire_dtype=wire_dtype)

    method = Method(dispatch, combine, lambda ids: ma.route(ids, **options))
    if setting.formatted != "rows":
        return method
    assert fmt is not None
    return method._replace(decode=lambda rows: fmt.decode(rows, jnp.dtype(DTYPE)))


def all_gather(workload: Workload, group: ma.Group) -> Method:
    axis, local_experts = group.axis_name, workload.setting.experts // group.size

    def dispatch(x: jax.Array, ids: jax.Array, weights: jax.Array) -> Dispatched:
        x, ids, weights = (lax.all_gather(a, axis, tiled=True) for a in (x, ids, weights))
        own = ids - lax.axis_index(axis) * local_experts
        keys = jnp.where((own >= 0) & (own < local_experts), own, local_experts)
        row_choice, choice_row, sizes = sort_by_key(keys.ravel(), local_experts, workload.capacity)
        links = Links(row_choice, choice_row.reshape(ids.shape))
        return Dispatched(spread(x, links), None, sizes, (weights, links))

    def combine(rows: jax.Array, state: Any) -> jax.Array:
        return lax.psum_scatter(weighted_sum(rows, *state), axis, tiled=True)

    return Method(dispatch, combine)


def dense(workload: Workload, group: ma.Group) -> Method:
    """Exchange rows by ``lax.all_to_all``. Each pair of ranks is padded to the busiest pair."""
    setting, axis, ranks = workload.setting, group.axis_name, group.size
    local_experts, pair_capacity = setting.experts // ranks, workload.pair_capacity

    def dispatch(x: jax.Array, ids: jax.Array, weights: jax.Array) -> Dispatched:
        flat = ids.ravel()
        order, place, sizes = sort_by_key(flat, setting.experts, flat.size)
        sizes = sizes.reshape(ranks, local_experts).sum(axis=1)  # choices for each rank
        starts = jnp.cumsum(sizes) - sizes
        slot = jnp.arange(pair_capacity)[None, :]
        slot_choice = order.at[starts[:, None] + slot].get(mode="clip")
        slot_choice = jnp.where(slot < sizes[:, None], slot_choice, -1)
        rank = flat // local_experts
        slot_in_rank = place - starts[rank]
        choice_slot = rank * pair_capacity + slot_in_rank
        choice_slot = jnp.where(slot_in_rank < pair_capacity, choice_slot, -1)
        links = Links(slot_choice.ravel(), choice_slot.reshape(ids.shape))

        labels = jnp.where(slot_choice >= 0, flat[slot_choice] % local_experts, local_experts)
        sent = spread(x, links).reshape(ranks, pair_capacity, -1)
        landed = lax.all_to_all(sent, axis, 0, 0).reshape(ranks * pair_capacity, -1)
        labels = lax.all_to_all(labels, axis, 0, 0).ravel()
        order, place, sizes = sort_by_key(labels, local_experts, workload.capacity)
        return Dispatched(
            permute(landed, order, place), None, sizes, (weights, links, order, place)
        )

    def combine(rows: jax.Array, state: Any) -> jax.Array:
        weights, links, order, place = state
        sent = permute(rows, place, order).reshape(ranks, pair_capacity, -1)
        returned = lax.all_to_all(sent, axis, 0, 0).reshape(ranks * pair_capacity, -1)
        return weighted_sum(returned, weights, links)

    return Method(dispatch, combine)


def ragged(workload: Workload, group: ma.Group, updates: int = 1) -> Method:
    """Send a row for each choice with ``lax.ragged_all_to_all``. The rows for a peer are divided
    into ``updates`` parts, because XLA copies a part with only one thread block."""
    setting, axis, ranks = workload.setting, group.axis_name, group.size
    local_experts = setting.experts // ranks

    def exchange(rows: jax.Array, length: int, sends: Any, there: Any, receives: Any) -> jax.Array:
        """Send ``sends[p]`` rows to row ``there[p]`` of peer p, which has ``length`` rows."""

        def cut(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
            edges = counts[:, None] * jnp.arange(updates + 1)[None] // updates
            return edges[:, :-1], jnp.diff(edges, axis=1).ravel()

        first, sent = cut(sends)
        here = (jnp.cumsum(sends) - sends)[:, None] + first
        there = there[:, None] + first
        out = jnp.zeros((length, setting.hidden), rows.dtype)
        sizes = here.ravel(), sent, there.ravel(), cut(receives)[1]
        return lax.ragged_all_to_all(rows, out, *sizes, axis_name=axis)

    def dispatch(x: jax.Array, ids: jax.Array, weights: jax.Array) -> Dispatched:
        flat = ids.ravel()
        order, place, sizes = sort_by_key(flat, setting.experts, flat.size)
        links = Links(order, place.reshape(ids.shape))
        all_sizes = lax.all_gather(sizes, axis).reshape(ranks, ranks, local_experts)
        rows_from_to = all_sizes.sum(axis=2)
        me = lax.axis_index(axis)
        sends, receives = rows_from_to[me], rows_from_to[:, me]
        there = (jnp.cumsum(rows_from_to, axis=0) - rows_from_to)[me]  # my first row at each peer
        at_home = (jnp.cumsum(rows_from_to, axis=1) - rows_from_to)[:, me]
        landed = exchange(spread(x, links), workload.capacity, sends, there, receives)
        labels = jnp.repeat(
            jnp.tile(jnp.arange(local_experts), ranks),
            all_sizes[:, me].ravel(),
            total_repeat_length=workload.capacity,
        )
        is_row = jnp.arange(workload.capacity) < receives.sum()
        labels = jnp.where(is_row, labels, local_experts)
        order, place, sizes = sort_by_key(labels, local_experts, workload.capacity)
        state = (weights, links, order, place, sends, receives, at_home)
        return Dispatched(permute(landed, order, place), None, sizes, state)

    def combine(rows: jax.Array, state: Any) -> jax.Array:
        weights, links, order, place, sends, receives, at_home = state
        sorted_by_source = permute(rows, place, order)
        returned = exchange(sorted_by_source, links.row_choice.size, receives, at_home, sends)
        return weighted_sum(returned, weights, links)

    return Method(dispatch, combine)


METHODS: dict[str, Callable[..., Method]] = dict(
    ours=ours,
    all_gather=all_gather,
    dense=dense,
    ragged=ragged,
    ragged32=functools.partial(ragged, updates=32),
)


class Links(NamedTuple):
    """The choice (token * top_k + k) of each row, and the row of each choice. -1 means none."""

    row_choice: jax.Array
    choice_row: jax.Array


def sort_by_key(
    keys: jax.Array, num_keys: int, length: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return int32 arrays: indices of ``keys`` in stable order [length], the place of each key in
    this order [N], and how often each key occurs [num_keys]. -1 means none."""
    indices = jnp.arange(keys.size, dtype=jnp.int32)
    order = jnp.argsort(keys, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(indices).at[order].set(indices, unique_indices=True)
    place = jnp.where((keys < num_keys) & (place < length), place, -1)
    sizes = jnp.bincount(keys, length=num_keys).astype(jnp.int32)
    order = jnp.pad(order[:length], (0, max(0, length - keys.size)), constant_values=-1)
    order = jnp.where(jnp.arange(length) < sizes.sum(), order, -1)
    return order, place, sizes


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@jax.custom_vjp
def spread(x: jax.Array, links: Links) -> jax.Array:
    """Return the token of each row's choice, [N, H] from [T, H]."""
    top_k = links.choice_row.shape[1]
    return take_rows(x, links.row_choice // top_k)  # -1 stays -1


def _spread_backward(links: Links, g: jax.Array) -> tuple[jax.Array, None]:
    total = sum(
        take_rows(g, links.choice_row[:, k]).astype(jnp.float32)
        for k in range(links.choice_row.shape[1])
    )
    return jnp.asarray(total).astype(g.dtype), None


spread.defvjp(lambda x, links: (spread(x, links), links), _spread_backward)


def permute(x: jax.Array, order: jax.Array, place: jax.Array) -> jax.Array:
    """Return ``x[order]``; ``place`` is the inverse of ``order``."""
    return spread(x, Links(order, place[:, None]))


@jax.custom_vjp
def weighted_sum(rows: jax.Array, weights: jax.Array, links: Links) -> jax.Array:
    """Return [T, H], computed in float32."""
    total = sum(
        weights[:, k, None] * take_rows(rows, links.choice_row[:, k]).astype(jnp.float32)
        for k in range(weights.shape[1])
    )
    return jnp.asarray(total).astype(rows.dtype)


def _weighted_sum_backward(
    residuals: tuple[jax.Array, jax.Array, Links], g: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, weights, links = residuals
    top_k = weights.shape[1]
    row_weights = take_rows(weights.ravel(), links.row_choice)
    d_rows = row_weights[:, None] * take_rows(g, links.row_choice // top_k).astype(jnp.float32)
    wide = g.astype(jnp.float32)
    d_weights = [
        (take_rows(rows, links.choice_row[:, k]).astype(jnp.float32) * wide).sum(axis=1)
        for k in range(top_k)
    ]
    return d_rows.astype(rows.dtype), jnp.stack(d_weights, axis=1), None


weighted_sum.defvjp(
    lambda rows, weights, links: (weighted_sum(rows, weights, links), (rows, weights, links)),
    _weighted_sum_backward,
)
