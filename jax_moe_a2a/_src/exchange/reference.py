"""Implement every exchange primitive with jnp and lax collectives, for any platform.

The functions from ``route`` to ``done`` accept the operands and parameters of the primitives of the
same names. An exchange has three steps: a sending half on each rank, a swap between the ranks, and
a receiving half. With ``emulated``, all arrays have a leading axis of ranks. The halves then run
for all ranks on one device, and the swap is a transposition.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from .. import compat
from ..ad import accumulation_dtype
from ..formats.formats import NvFp4, TokenFormat, paired
from ..group.group import Group
from ..plan.plan import TAIL_ROW, PlanOptions, RoutePlan, RoutingArrays, plan_route
from .record import Options, Record, split_routing

# A sum of few small terms is unrolled, because XLA:CPU compiles it in half the time of a loop. A
# loop adds many or large terms, because XLA might keep all terms of an unrolled sum in memory.
MAX_UNROLLED_TERMS = 16
MAX_UNROLLED_BYTES = 4 * 2**20


def route(
    ids: jax.Array, *, group: Group, emulated: bool, plan_options: PlanOptions
) -> list[jax.Array]:
    """Return the arrays of a ``RoutePlan``, with axes ``lead`` first, for ids [*lead, T, K]."""
    num_lead = ids.ndim - 2 - int(emulated)
    plan: Callable[..., RoutePlan] = partial(plan_route, options=plan_options)
    for _ in range(num_lead):
        plan = jax.vmap(plan, in_axes=(0, None))
    if emulated:
        all_ids, ranks = ids, jnp.arange(group.size, dtype=jnp.int32)
        plan = jax.vmap(plan, in_axes=(None, 0))
    elif group.size == 1:
        all_ids, ranks = ids[None], own_rank(group)
    else:
        all_ids, ranks = lax.all_gather(ids, group.axis_name), own_rank(group)
    return plan(jnp.moveaxis(all_ids, 0, num_lead), ranks).results


def dispatch(
    *operands: jax.Array,
    num_leaves: int,
    num_choice_arrays: int,
    options: Options,
    group: Group,
    emulated: bool,
) -> list[jax.Array]:
    """Dispatch leaves [T, ...] and choice arrays [T, K, ...]. Return all of them as [C, ...].

    With a format, return decoded rows [C, ...], or values and scales [C, ...], or all three. In the
    operands, global scales [T] may follow the choice arrays. With ``tail="unspecified"``, the tail
    contains NaN or extreme integers, so that tests detect code that reads the tail.
    """
    params: dict[str, Any] = dict(group=group, emulated=emulated)
    if options.token_format is not None:
        params.update(num_leaves=num_leaves, num_choice_arrays=num_choice_arrays, options=options)
        return encode_and_decode(dispatch, *operands, **params)
    payload, routing = split_routing(operands)

    def move(x: jax.Array, of_choices: bool) -> jax.Array:
        tail_value = _poison(x.dtype) if options.tail == "unspecified" else 0
        receive = partial(receive_rows, of_choices=of_choices, tail_value=tail_value)
        return _move(send_tokens, receive, x, routing=routing, **params)

    return [move(x, i >= num_leaves) for i, x in enumerate(payload)]


def encode_and_decode(
    dispatch: Callable[..., list[jax.Array]],
    *operands: jax.Array,
    num_leaves: int,
    num_choice_arrays: int,
    options: Options,
    **params: object,
) -> list[jax.Array]:
    """Quantize leaves, dispatch their values and scales like leaves, and decode the rows."""
    payload, routing = split_routing(operands)
    parts, of_parts = encoded(payload, num_leaves, num_choice_arrays, options)
    moved = dispatch(*parts, *routing, **of_parts, **params)
    return decoded(moved, [x.dtype for x in payload[:num_leaves]], options)


def encoded(
    payload: Sequence[jax.Array], num_leaves: int, num_choice_arrays: int, options: Options
) -> tuple[list[jax.Array], dict[str, Any]]:
    """Quantize leaves. Return the payload and parameters of a dispatch without token format, which
    moves values, scales, choice arrays and, if rows are decoded, the tokens' global scales."""
    leaves, rest = payload[:num_leaves], payload[num_leaves:]
    choice_arrays, token_scales = rest[:num_choice_arrays], rest[num_choice_arrays:]
    fmt = _format_of(options, token_scales)
    parts = [part for x in leaves for part in fmt.encode(x)]
    if options.decode:
        # Global scales travel as integers, because integers have no derivative.
        parts += [lax.bitcast_convert_type(x, jnp.uint32) for x in token_scales]
    # The wire dtype is for gradients, but values and scales have no gradient.
    options = options.unencoded._replace(wire_dtype=None)
    params = dict(num_leaves=len(parts), num_choice_arrays=num_choice_arrays, options=options)
    return [*parts, *choice_arrays], params


def decoded(
    moved: Sequence[jax.Array], dtypes: Sequence[DTypeLike], options: Options
) -> list[jax.Array]:
    """Convert ``moved``, the results of the dispatch of an ``encoded`` payload, to the results of a
    dispatch with a token format. ``dtypes`` has the dtype of each leaf."""
    if not options.decode:
        return list(moved)
    first = 2 * len(dtypes)
    end = first + options.has_token_scales
    scales = [lax.bitcast_convert_type(x, jnp.float32) for x in moved[first:end]]
    fmt = _format_of(options, scales)
    pairs = zip(paired(moved[:first]), dtypes, strict=True)
    rows = [fmt.decode(pair, dtype) for pair, dtype in pairs]
    return [*rows, *(moved[:first] if options.keeps_encoded else ()), *moved[end:]]


def _format_of(options: Options, scales: Sequence[jax.Array]) -> TokenFormat:
    fmt = options.token_format
    if scales:
        assert isinstance(fmt, NvFp4)
        return dataclasses.replace(fmt, global_scale=scales[0])
    assert fmt is not None
    return fmt


def combine(
    *operands: jax.Array,
    num_leaves: int,
    num_choice_arrays: int,
    options: Options,
    **params: object,
) -> list[jax.Array]:
    """Combine leaves and choice arrays [C, ...]. Return sums [T, ...], and choice arrays
    [T, K, ...]. Addends [T, ...], one for each sum, may follow the choice arrays."""
    payload, routing = split_routing(operands)
    leaves, rest = payload[:num_leaves], payload[num_leaves:]
    choice_arrays, addends = rest[:num_choice_arrays], rest[num_choice_arrays:]
    params.update(routing=routing)
    sums = [
        _partial_and_total_sums([(x, None)], addends[i : i + 1], options.wire_dtype, **params)
        for i, x in enumerate(leaves)
    ]
    return sums + [_move(send_row_choices, receive_choices, x, **params) for x in choice_arrays]


def weighted_combine(
    *operands: jax.Array,
    num_leaves: int,
    num_choice_arrays: int,
    options: Options,
    **params: object,
) -> list[jax.Array]:
    """Combine the array sum_i weights_i * rows_i, with rows_i [C, *W, ...] and weights_i [C, *W].
    Return [T, *W, ...]. An addend [T, *W, ...] may follow the weights."""
    del num_choice_arrays
    payload, routing = split_routing(operands)
    pairs = list(zip(payload[:num_leaves], payload[num_leaves : 2 * num_leaves], strict=True))
    addends = payload[2 * num_leaves :]
    params.update(routing=routing)
    return [_partial_and_total_sums(pairs, addends, options.wire_dtype, **params)]


def weighted_dispatch(
    dispatch: Callable[..., list[jax.Array]],
    *operands: jax.Array,
    num_leaves: int,
    num_choice_arrays: int,
    num_weight_axes: int,
    emulated: bool,
    **params: object,
) -> list[jax.Array]:
    """Dispatch g [T, *W, ...] to G [C, *W, ...]. Return weights_i * G for each weights_i [C, *W],
    in the dtype of g. After these products, return the dot product <rows_i, G> [C, *W] for each
    rows_i [C, *W, ...], in the accumulation dtype."""
    del num_choice_arrays
    (g, *payload), routing = split_routing(operands)
    params.update(num_leaves=1, num_choice_arrays=0, emulated=emulated)
    (moved,) = dispatch(g, *routing, **params)
    num_axes = int(emulated) + 1 + num_weight_axes
    acc_dtype = accumulation_dtype(moved.dtype)
    wide = moved.astype(acc_dtype)
    is_row = routing.row_rank >= 0  # rows without a token may be NaN

    def scaled(weights: jax.Array) -> jax.Array:
        product = expand_like(weights.astype(acc_dtype), wide) * wide
        return jnp.where(expand_like(is_row, wide), product, 0).astype(moved.dtype)

    def dotted(rows: jax.Array) -> jax.Array:
        dots = (rows.astype(acc_dtype) * wide).sum(axis=range(num_axes, wide.ndim))
        return jnp.where(expand_like(is_row, dots), dots, 0)

    rows, weights = payload[:num_leaves], payload[num_leaves:]
    return [scaled(w) for w in weights] + [dotted(r) for r in rows]


def routed_dispatch(
    ids: jax.Array,
    *payload: jax.Array,
    group: Group,
    emulated: bool,
    plan_options: PlanOptions,
    **params: Any,
) -> list[jax.Array]:
    """Return the arrays of a ``RoutePlan`` for int32 ids [T, K], and the dispatched payload."""
    results = route(ids, group=group, emulated=emulated, plan_options=plan_options)
    plan = RoutePlan.of_results(results)
    moved = dispatch(*payload, *plan.arrays, group=group, emulated=emulated, **params)
    return [*plan.results, *moved]


# Split exchanges. A dispatch moves data in its start, and a combine moves data in its done. Every
# done reads only the arrays in flight that are at the rows.


def start(exchange: Record, *operands: jax.Array, **params: Any) -> list[jax.Array]:
    """Compute the start of an exchange: payload, routing -> arrays in flight."""
    payload, routing = split_routing(operands)
    if exchange.is_outward:
        return [*payload, *exchange.reference(*operands, **params)]
    layouts, lead = exchange.layouts(**params), int(params["emulated"])
    rows = [payload[sources[0]] for sources in layouts.sources]
    at_tokens = []
    for x, layout in zip(rows, layouts.results, strict=True):
        core = routing.choice_rank.shape[lead : lead + len(layout)]
        at_tokens.append(jnp.zeros((*x.shape[:lead], *core, *x.shape[lead + 1 :]), x.dtype))
    return [*at_tokens, *rows]


def done(exchange: Record, *operands: jax.Array, **params: object) -> list[jax.Array]:
    """Compute the done of an exchange: arrays in flight, routing -> results."""
    payload, routing = split_routing(operands)
    num_results = len(exchange.layouts(**params).results)
    at_rows = payload[num_results:]
    if exchange.is_outward:
        return at_rows
    return exchange.reference(*at_rows, *routing, **params)


def own_rank(group: Group) -> jax.Array:
    """Return the rank of this device in ``group``, int32 []."""
    if group.size == 1:
        return jnp.int32(0)
    return lax.axis_index(group.axis_name).astype(jnp.int32)


def expand_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """Append axes of size one to ``x`` until it has as many axes as ``like``."""
    return x.reshape(x.shape + (1,) * (like.ndim - x.ndim))


def take_rows(x: jax.Array, index: jax.Array, otherwise: jax.Array | None = None) -> jax.Array:
    """Return ``x[index]`` along the leading axis. Where ``index`` is negative, return zeros, or the
    entry of ``otherwise``, which has the shape of ``index``."""
    taken = take_any_rows(x, index)
    filler = np.zeros((), x.dtype) if otherwise is None else expand_like(otherwise, taken)
    rows = jnp.where(expand_like(index >= 0, taken), taken, filler)
    if x.dtype not in (jnp.uint8, jnp.uint16):
        return rows
    # ``x`` may contain the bits of 8-bit or 16-bit floats. XLA:CPU selects these floats in float32,
    # even if the program selects integers and bitcasts the result. The conversion makes NaNs
    # canonical, and loses subnormals on CPUs with AVX512_BF16. Adding ``none`` prevents this.
    # ``none`` is 0, because every index is less than the number of rows, but XLA does not know it.
    none = jnp.maximum(index, x.shape[0]) - x.shape[0]
    return rows + expand_like(none.astype(x.dtype), rows)


def take_any_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return ``x[index]`` along the leading axis. A negative index returns an arbitrary row."""
    if x.shape[0] == 0:
        return jnp.zeros(index.shape + x.shape[1:], x.dtype)
    return x.at[jnp.maximum(index, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)


def send_tokens(x: jax.Array, routing: RoutingArrays) -> jax.Array:
    """Place tokens [T, ...] into slots [R, T, ...]. Unused slots contain arbitrary tokens, which no
    rank reads. They are not cleared, because XLA:CPU would compile the clearing once per rank."""
    return take_any_rows(x, routing.slot_token)


def receive_rows(
    landed: jax.Array, routing: RoutingArrays, *, of_choices: bool, tail_value: Any
) -> jax.Array:
    """Return rows [C, ...] from the slots [R, T, ...] of tokens. With ``of_choices``, return rows
    from the slots [R, T, K, ...] of a choice array. The tail has the value ``tail_value``."""
    index = routing.row_rank * landed.shape[1] + routing.row_slot
    if of_choices:
        index = index * landed.shape[2] + routing.row_k
    index = jnp.where(routing.row_rank >= 0, index, -1)
    without_token = None
    if tail_value != 0:
        of_tail, of_padding = np.array(tail_value, landed.dtype), np.zeros((), landed.dtype)
        without_token = jnp.where(routing.row_slot == TAIL_ROW, of_tail, of_padding)
    return take_rows(_merge(landed, 3 if of_choices else 2), index, without_token)


def _poison(dtype: DTypeLike) -> Any:
    """Return a value that tests recognize: NaN or its bits, True, or an extreme integer."""
    if dtype == jnp.bool_:
        return True
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return limits.max if jnp.issubdtype(dtype, jnp.unsignedinteger) else limits.min
    if not _travels_as_integers(dtype):
        return math.nan
    # In "fnuz" dtypes, NaN has the bits of a negative zero. In other dtypes, all bits set is a NaN.
    bits = jnp.finfo(dtype).bits
    return 1 << (bits - 1) if jnp.dtype(dtype).name.endswith("fnuz") else (1 << bits) - 1


def send_sums(
    pairs: Sequence[tuple[jax.Array, jax.Array | None]],
    routing: RoutingArrays,
    *,
    acc_dtype: jnp.dtype,
    wire_dtype: jnp.dtype | None,
) -> jax.Array:
    """Sum the rows of each slot in the order of k, in ``acc_dtype``. A pair has rows [C, ...], and
    weights [C, *W] or None. Return partial sums [R, T, ...], rounded to ``wire_dtype``."""
    num_ranks, num_tokens, _ = routing.slot_rows.shape
    zeros = _zeros_like_rows((num_ranks, num_tokens), pairs[0][0], 1, acc_dtype)
    given = (x for pair in pairs for x in pair if x is not None)
    zeros, *_ = compat.align_varying([zeros, *given], ())

    def terms(index: jax.Array) -> list[jax.Array]:
        terms = []
        for rows, weights in pairs:
            term = take_rows(rows, index).astype(acc_dtype)
            if weights is not None:
                term *= expand_like(take_rows(weights, index).astype(acc_dtype), term)
            terms.append(term)
        return terms

    # XLA fuses multiplications with additions differently inside and outside of a loop. Weighted
    # sums always use a loop, so that the bits of a sum do not depend on the size of the arrays.
    is_weighted = any(weights is not None for _, weights in pairs)
    indices = jnp.moveaxis(routing.slot_rows, 2, 0)
    return _sum_in_order(terms, indices, zeros, may_unroll=not is_weighted).astype(wire_dtype)


def _sum_in_order(
    terms: Callable[[jax.Array], list[jax.Array]],
    indices: jax.Array,
    zeros: jax.Array,
    *,
    may_unroll: bool = True,
) -> jax.Array:
    """Add the arrays ``terms(indices[i])`` to ``zeros``, for i = 0 to N - 1 in this order.
    ``indices`` is int32 [N, ...], and ``zeros`` is [..., *P]. ``terms`` maps an index array [...]
    to a list of arrays [..., *P]."""
    num_indices = len(indices)
    if num_indices == 0:  # a loop of length 0 would still trace its body, which reads an index
        return zeros
    may_unroll &= num_indices <= MAX_UNROLLED_TERMS
    if may_unroll and num_indices * zeros.nbytes <= MAX_UNROLLED_BYTES:
        sums, found = zeros, terms(indices)
        if num_indices > 1:
            # Add 0.0, because the sum of negative zeros must be a positive zero. XLA keeps the
            # addition, because it does not know that ``never`` is False for every index.
            never = indices[0] == np.iinfo(np.int32).min
            sums += expand_like(never.astype(zeros.dtype), zeros)
        for i in range(num_indices):
            for term in found:
                sums += term[i]
        return sums

    def add(i: Any, sums: jax.Array) -> jax.Array:
        index = lax.dynamic_index_in_dim(indices, i, keepdims=False)
        return functools.reduce(operator.add, terms(index), sums)

    return lax.fori_loop(np.int32(0), np.int32(num_indices), add, zeros)


def _zeros_like_rows(
    lead: tuple[int, ...], rows: jax.Array, num_lead: int, dtype: jnp.dtype
) -> Any:
    """Return zeros [*lead, *P], sharded like ``rows``, which has ``num_lead`` axes before P."""
    zeros = jnp.zeros((*lead, *rows.shape[num_lead:]), dtype)
    sharded = jax.typeof(rows).sharding.spec[num_lead:]
    if all(axis is None for axis in sharded):
        return zeros
    return jax.sharding.reshard(zeros, PartitionSpec(*(None,) * len(lead), *sharded))


def receive_sums(
    returned: jax.Array,
    routing: RoutingArrays,
    *addends: jax.Array,
    acc_dtype: jnp.dtype,
    dtype: DTypeLike,
) -> jax.Array:
    """Sum each token's partial sums [R, T, ...], in the order of the ranks on which the token has a
    slot. Then add the addends [T, ...]. Return [T, ...]."""
    num_ranks, num_tokens = returned.shape[:2]
    total = _zeros_like_rows((num_tokens,), returned, 2, acc_dtype)
    total, _ = compat.align_varying([total, returned], ())
    slots = routing.token_slot.T
    first = num_tokens * lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    sums = _merge(returned, 2)
    terms = lambda index: [take_rows(sums, index).astype(acc_dtype)]
    total = _sum_in_order(terms, jnp.where(slots >= 0, first + slots, -1), total)
    for addend in addends:
        total += addend.astype(acc_dtype)
    return total.astype(dtype)


def send_row_choices(x: jax.Array, routing: RoutingArrays) -> jax.Array:
    """Place a choice array [C, ...] into slots [R, T, K, ...]. Entries without a row are zero."""
    return take_rows(x, routing.slot_rows)


def receive_choices(returned: jax.Array, routing: RoutingArrays) -> jax.Array:
    """Return a choice array [T, K, ...] from the slots [R, T, K, ...] that the ranks sent back."""
    _, num_tokens, top_k = returned.shape[:3]
    rank = jnp.maximum(routing.choice_rank, 0)
    slot = rank * num_tokens + jnp.take_along_axis(routing.token_slot, rank, axis=1)
    index = slot * top_k + jnp.arange(top_k, dtype=jnp.int32)[None, :]
    return take_rows(_merge(returned, 3), jnp.where(routing.choice_rank >= 0, index, -1))


def _move(
    send: Callable[..., jax.Array], receive: Callable[..., jax.Array], x: jax.Array, **kwargs: Any
) -> jax.Array:
    """Move an array without changing a bit.

    Floats of fewer than 32 bits travel as integers, for three reasons. XLA:CPU converts such floats
    in selects and collectives, which makes signalling NaNs quiet. NCCL does not support all of
    these dtypes. Rows without a token must be zero bytes, but float8_e8m0fnu has no zero.
    """
    bits = _as_integers(x)
    moved = _exchange(send, receive, bits, **kwargs)
    return moved if bits is x else lax.bitcast_convert_type(moved, x.dtype)


def _partial_and_total_sums(
    pairs: Any, addends: Sequence[jax.Array], wire_dtype: jnp.dtype | None, **params: Any
) -> jax.Array:
    """Compute partial sums, round them once to ``wire_dtype``, and sum them with the addends."""
    dtype = pairs[0][0].dtype
    acc_dtype = accumulation_dtype(dtype)
    send = partial(send_sums, acc_dtype=acc_dtype)
    receive = partial(receive_sums, acc_dtype=acc_dtype, dtype=dtype)
    if isinstance(wire_dtype, TokenFormat):
        fmt = wire_dtype
        shapes = jax.eval_shape(fmt.encode, jax.ShapeDtypeStruct((fmt.group_size,), acc_dtype))

        def send_encoded(pairs: Any, routing: RoutingArrays) -> Any:
            sums = send(pairs, routing, wire_dtype=acc_dtype)
            return jax.tree.map(_as_integers, fmt.encode(sums))

        def receive_encoded(returned: Any, *others: jax.Array) -> jax.Array:
            quantized = jax.tree.map(
                lambda x, like: lax.bitcast_convert_type(x, like.dtype), returned, shapes
            )
            return receive(fmt.decode(quantized, acc_dtype), *others)

        return _exchange(send_encoded, receive_encoded, pairs, *addends, **params)
    if wire_dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        wire_dtype = dtype
    return _exchange(partial(send, wire_dtype=wire_dtype), receive, pairs, *addends, **params)


def _as_integers(x: jax.Array) -> jax.Array:
    if not _travels_as_integers(x.dtype):
        return x
    return lax.bitcast_convert_type(x, f"uint{jnp.finfo(x.dtype).bits}")


def _travels_as_integers(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _exchange(
    send: Callable[..., jax.Array],
    receive: Callable[..., jax.Array],
    x: jax.Array,
    *received_with: jax.Array,
    routing: RoutingArrays,
    group: Group,
    emulated: bool,
) -> jax.Array:
    """Run ``send``, and send entry r of its result [R, ...] to rank r. Return what ``receive``
    computes from the received entries [R, ...], the routing and ``received_with``."""
    if emulated:
        sent = jax.tree.map(lambda part: jnp.swapaxes(part, 0, 1), jax.vmap(send)(x, routing))
        return jax.vmap(receive)(sent, routing, *received_with)

    sent = jax.tree.map(partial(swap, group=group), send(x, routing))
    return receive(sent, routing, *received_with)


def _merge(x: jax.Array, num_axes: int) -> jax.Array:
    return x.reshape(math.prod(x.shape[:num_axes]), *x.shape[num_axes:])


# XLA:CPU compiles one copy kernel for each block of an all_to_all, and a concatenation with one
# operand per block. An all_gather compiles faster, but each rank receives the blocks of all ranks.
MAX_GATHERED_BYTES = 4 * 2**20

# The swap is a primitive, because CPUs need a different lowering. The primitive needs no derivative
# and no batching rule, because the portable path is traced only when a program is lowered.
swap_p = compat.Primitive("moe_a2a_swap")


def swap(blocks: jax.Array, group: Group) -> jax.Array:
    """Send block r of [R, ...] to rank r. Return the blocks from all ranks, [R, ...]. Bits change
    only if XLA computes collectives of the dtype in another dtype."""
    if blocks.size == 0 or group.size == 1:
        return blocks
    return swap_p.bind(blocks, axis_name=group.axis_name)


def _all_to_all(blocks: jax.Array, *, axis_name: str | tuple[str, ...]) -> jax.Array:
    return lax.all_to_all(blocks, axis_name, split_axis=0, concat_axis=0)


def _on_cpu(blocks: jax.Array, *, axis_name: str | tuple[str, ...]) -> jax.Array:
    if len(blocks) * blocks.nbytes > MAX_GATHERED_BYTES:
        return _all_to_all(blocks, axis_name=axis_name)
    every = lax.all_gather(blocks, axis_name)
    return lax.dynamic_index_in_dim(every, lax.axis_index(axis_name), 1, keepdims=False)


swap_p.def_abstract_eval(lambda blocks, **_: blocks)
mlir.register_lowering(swap_p, mlir.lower_fun(_all_to_all, multiple_results=False))
mlir.register_lowering(swap_p, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
