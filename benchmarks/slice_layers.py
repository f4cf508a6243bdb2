"""Define the MoE layers of ``benchmarks.model``: functions (x [T, H], ids [T, K], weights [T, K],
experts) -> (sums [T, H], number of dropped choices)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import jax_moe_a2a as ma

from . import experts as products
from .methods import METHODS as MAKERS
from .methods import Links, sort_by_key, spread, weighted_sum
from .slices import MoE
from .workload import Workload, round_up

CAPACITY_FACTOR = 1.25  # of each expert
EXACT = 5e-3  # methods round at different places
ALONE = "self"  # a mesh axis of size one


class Layer(NamedTuple):
    make: Callable[[Workload], MoE]
    tolerance: float | None = EXACT
    """The largest difference of first losses from the reference. None: the layer is a bound, whose
    losses are different."""
    has_our_products: bool = True
    """True: the exchange takes the time of the layer minus the time of ``local``."""
    quantize: Callable[[Any], Any] | None = None


def no_layer(workload: Workload) -> MoE:
    return lambda x, ids, weights, experts: (x, 0)


def moe_mlp(workload: Workload, axis: str = "ep", in_fp8: bool = False) -> MoE:
    of_rank = workload.setting.experts // workload.ranks

    def layer(x: Any, ids: Any, weights: Any, experts: ma.Experts) -> Any:
        if in_fp8 and not isinstance(experts.w_in, ma.QuantizedExperts):
            experts = experts.in_fp8()
        routing = ma.route(ids, group=axis, num_experts=of_rank * lax.axis_size(axis))
        y = ma.moe_mlp(x, ma.RouterChoices(routing, weights), experts)
        return y, routing.num_dropped

    return layer


def local(workload: Workload) -> MoE:
    """Make a layer that replaces each choice by an expert of the token's rank."""
    layer = moe_mlp(workload, ALONE)
    return lambda x, ids, weights, experts: layer(x, ids % len(experts.w_in), weights, experts)


def multiply(dot: Any, rows: Any, sizes: Any, experts: ma.Experts) -> Any:
    """Return the experts' results. With biases, results after the last group are zero, otherwise
    undefined. Biases are added by one-hot products, so their gradients are products, too."""
    expert = jnp.repeat(jnp.arange(sizes.size), sizes, total_repeat_length=len(rows))
    one_hot = jax.nn.one_hot(expert, sizes.size, dtype=rows.dtype)
    is_row = (jnp.arange(len(rows)) < sizes.sum())[:, None]

    def product(x: Any, w: Any, bias: Any) -> Any:
        y = dot(x, w, sizes)
        return y if bias is None else jnp.where(is_row, y + one_hot @ bias, 0)

    w_in, b_in = of_plain_products(experts)
    return product(experts.activation(product(rows, w_in, b_in)), experts.w_out, experts.b_out)


def of_plain_products(experts: ma.Experts) -> Any:
    """Return (w_in, b_in or None), reshaped from [..., 2, I] to [..., 2 I]."""
    biases = None if experts.b_in is None else products.side_by_side(experts.b_in)
    return products.side_by_side(experts.w_in), biases


def exchanged(method: str, workload: Workload, with_mosaic: bool = False) -> MoE:
    made = MAKERS[method](workload, ma.Group(axis_name="ep", size=workload.ranks))
    dot = products.mosaic_product() if with_mosaic else products.grouped_dot

    def layer(x: Any, ids: Any, weights: Any, experts: ma.Experts) -> Any:
        rows, _, sizes, state = made.dispatch(x, ids, weights)
        return made.combine(multiply(dot, rows, sizes, experts), state), 0

    return layer


def fsdp(workload: Workload) -> MoE:
    """Make a layer in which every rank gathers the weights of all experts."""

    def layer(x: Any, ids: Any, weights: Any, experts: ma.Experts) -> Any:
        experts = jax.tree.map(lambda w: lax.all_gather(w, "ep", tiled=True), experts)
        order, place, sizes = sort_by_key(ids.ravel(), len(experts.w_in), ids.size)
        links = Links(order, place.reshape(ids.shape))
        rows = multiply(products.grouped_dot, spread(x, links), sizes, experts)
        return weighted_sum(rows, weights, links), 0

    return layer


def capacity(workload: Workload) -> MoE:
    """Make a layer in which each expert has a fixed capacity for each source rank."""
    ranks, num_experts = workload.ranks, workload.setting.experts

    def layer(x: Any, ids: Any, weights: Any, experts: ma.Experts) -> Any:
        flat, hidden = ids.ravel(), x.shape[1]
        rows = round_up(math.ceil(CAPACITY_FACTOR * flat.size / num_experts), 8)
        order, place, sizes = sort_by_key(flat, num_experts, flat.size)
        starts = jnp.cumsum(sizes) - sizes
        slot = jnp.arange(rows)[None]
        choice = order.at[starts[:, None] + slot].get(mode="clip")
        choice = jnp.where(slot < sizes[:, None], choice, -1)
        place -= starts[flat]
        is_kept = place < rows
        links = Links(
            choice.ravel(), jnp.where(is_kept, flat * rows + place, -1).reshape(ids.shape)
        )
        blocks = lax.all_to_all(spread(x, links).reshape(ranks, -1, rows, hidden), "ep", 0, 0)
        blocks = blocks.transpose(1, 0, 2, 3).reshape(-1, ranks * rows, hidden)
        biased = lambda y, bias: y if bias is None else y + bias[:, None]
        w_in, b_in = of_plain_products(experts)
        h = experts.activation(biased(jnp.einsum("lch,lhi->lci", blocks, w_in), b_in))
        y = biased(jnp.einsum("lci,lih->lch", h, experts.w_out), experts.b_out)
        y = y.reshape(-1, ranks, rows, hidden).transpose(1, 0, 2, 3)
        back = lax.all_to_all(y, "ep", 0, 0).reshape(-1, hidden)
        return weighted_sum(back, weights, links), jnp.sum(~is_kept)

    return layer


LAYERS = {
    "none": Layer(no_layer, None),
    "local": Layer(local, None),
    "moe_mlp": Layer(moe_mlp),
    "all_gather": Layer(functools.partial(exchanged, "all_gather")),
    "fsdp": Layer(fsdp),
    "moe_mlp_to_fp8": Layer(
        functools.partial(moe_mlp, in_fp8=True),
        **dict(tolerance=5e-2, has_our_products=False),
        quantize=jax.vmap(functools.partial(ma.quantize_experts, transposed=True)),
    ),
    "capacity": Layer(capacity, tolerance=5e-2, has_our_products=False),
    "mosaic": Layer(
        functools.partial(exchanged, "all_gather", with_mosaic=True), has_our_products=False
    ),
    "ragged32": Layer(functools.partial(exchanged, "ragged32")),
}
