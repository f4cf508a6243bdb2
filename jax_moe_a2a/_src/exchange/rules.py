"""Register the lowering of exchanges, and define their abstract values and batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from .. import compat
from ..checks import check_unsharded
from ..group.group import Group
from ..plan.plan import RoutingArrays, fold_batch
from . import lowering
from .record import Layout, Record, split_routing


def register_exchange(exchange: Record) -> None:
    by_kernels = partial(lowering.lower_by_kernels, exchange, "")
    lowering.register(exchange.primitive, exchange.reference, by_kernels, exchange.unfused)
    register_shapes(exchange)


def register_shapes(exchange: Record) -> None:
    exchange.primitive.def_abstract_eval(partial(abstract, exchange))
    batching.fancy_primitive_batchers[exchange.primitive] = partial(batch, exchange)


def abstract(
    exchange: Record, *avals: Any, group: Group, emulated: bool, **params: object
) -> list[Any]:
    lead = (group.size,) if emulated else ()
    payload, routing = split_routing(avals)
    num_tokens, top_k = routing.choice_rank.shape[len(lead) :]
    sizes = {"T": num_tokens, "K": top_k, "C": routing.row_rank.shape[-1]}
    layouts = exchange.layouts(**params)
    for aval, layout in zip(payload, layouts.operands, strict=True):
        check_unsharded(f"operands of {exchange.primitive}", aval, len(lead) + len(layout))

    def result(layout: Layout, source: int) -> Any:
        aval, num_core = payload[source], len(lead) + len(layouts.operands[source])
        shape = (*lead, *(sizes[axis] for axis in layout), *aval.shape[num_core:])
        return compat.result_aval(aval, shape, aval.dtype, aval.sharding.spec[num_core:])

    results = [
        result(layout, sources[0])
        for layout, sources in zip(layouts.results, layouts.sources, strict=True)
    ]
    return exchange.result_types(results, lead=lead, **params)


def move_or_broadcast(x: jax.Array, dim: int | None, to: int, size: int) -> Any:
    """Move the batch axis ``dim`` of ``x`` to axis ``to``. If ``dim`` is None, repeat ``x`` along a
    new axis ``to``."""
    if dim is not None:
        return jnp.moveaxis(x, dim, to)
    return jnp.broadcast_to(jnp.expand_dims(x, to), (*x.shape[:to], size, *x.shape[to:]))


def is_own_axis(axis_data: Any, group: Group, emulated: bool) -> bool:
    """Return True if ``vmap`` is over the group's axis. A group of several axes raises an error."""
    if axis_data.name not in group.axes:
        return False
    if emulated or len(group.axes) > 1:
        raise NotImplementedError(
            f"jax.vmap over the group's axis needs a group of one axis; got {group.axes}. Use "
            "jax.shard_map, or a group of one axis"
        )
    return True


def batch(
    exchange: Record,
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[int | None],
    *,
    group: Group,
    emulated: bool,
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    """Bind one exchange for all elements of a batch.

    If ``vmap`` is over the group's axis, the primitive is bound with ``emulated``. If the routing
    has no batch axis, the batch becomes the first axis after the tokens or rows, so each row is
    larger. If the routing is batched, the batch is merged into the tokens and rows of one routing.
    """
    size = axis_data.size
    bind: Callable[..., list[Any]] = partial(exchange.bind, group=group, **params)
    layouts = exchange.layouts(**params)

    if is_own_axis(axis_data, group, emulated):
        args = [move_or_broadcast(x, d, 0, size) for x, d in zip(args, dims, strict=True)]
        payload, routing = split_routing(args)
        return bind(payload, routing, emulated=True), [0] * len(layouts.results)

    lead = int(emulated)
    payload, routing = split_routing(args)
    payload_dims, routing_dims = split_routing(dims)

    # If the tokens' global scales are batched, merge the batch into tokens and rows (see below).
    own_scales = params["options"].has_token_scales and payload_dims[-1] is not None
    if all(dim is None for dim in routing_dims) and not own_scales:
        batched = [dim is not None for dim in payload_dims]
        # With spmd_axis_name, one batched source makes all results vary over that mesh axis, but no
        # unbatched result may vary over it. Therefore one batched source makes all sources batched.
        together = layouts.sources
        if axis_data.spmd_name is not None:
            together = [tuple({i for sources in layouts.sources for i in sources})]
        for sources in together:
            if any(batched[i] for i in sources):
                for i in sources:
                    batched[i] = True
        payload = [
            move_or_broadcast(x, dim, lead + len(layout), size) if is_batched else x
            for x, dim, layout, is_batched in zip(
                payload, payload_dims, layouts.operands, batched, strict=True
            )
        ]
        return bind(payload, routing, emulated=emulated), [
            lead + len(layout) if batched[sources[0]] else None
            for layout, sources in zip(layouts.results, layouts.sources, strict=True)
        ]

    def to_lead(x: jax.Array, dim: Any) -> Any:
        return move_or_broadcast(x, dim, lead, size)

    def fold(x: jax.Array) -> Any:
        return x.reshape(*x.shape[:lead], size * x.shape[lead + 1], *x.shape[lead + 2 :])

    def unfold(x: jax.Array) -> Any:
        return x.reshape(*x.shape[:lead], size, x.shape[lead] // size, *x.shape[lead + 1 :])

    payload = [fold(to_lead(x, d)) for x, d in zip(payload, payload_dims, strict=True)]
    routing = RoutingArrays(*(to_lead(x, d) for x, d in zip(routing, routing_dims, strict=True)))
    routing = jax.vmap(fold_batch)(routing) if emulated else fold_batch(routing)
    out = bind(payload, routing, emulated=emulated)
    return [unfold(x) for x in out], [lead] * len(out)
