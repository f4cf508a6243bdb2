"""The public functions: validate, canonicalise, bind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import compat, two_level
from .arguments import as_array, check_bool, check_int, short
from .formats import Encoding, NvFp4, TokenFormat, paired
from .group import Group
from .inflight import InFlight, check_place, finish_exchange
from .primitives import (
    bind_exchange,
    bind_route,
    bind_routed_dispatch,
    carries_tangent,
    combine_done_p,
    combine_p,
    combine_start_p,
    dispatch_done_p,
    dispatch_p,
    dispatch_start_p,
    weighted_combine_done_p,
    weighted_combine_p,
    weighted_combine_start_p,
)
from .reference import own_rank
from .routing import (
    ROUTING_CHECKPOINT_NAME,
    STATIC_FIELDS,
    RoutePlan,
    Routing,
    check_top_k,
    default_capacity,
    planned_ids,
)
from .two_level import AnyRouting, TwoLevelRouting

# By measurement (benchmarks/NOTES.md): so many tokens of a rank are routed and dispatched at once.
FUSED_MAX_TOKENS = 256
# Every rank has an array with an entry for each of its experts.
MAX_LOCAL_EXPERTS = 2**20


class SourceInfo(NamedTuple):
    """Where each row came from; int32 [C] each, -1 where a row carries no token.

    ``k`` is K for a row of the shared expert; ``rank`` is 0 where tokens are replicated.
    """

    rank: jax.Array
    token: jax.Array
    k: jax.Array


@dataclasses.dataclass(frozen=True)
class Recv:
    """What a rank has after ``dispatch``. C rows (capacity), L local experts, of which a shared
    expert is the first.

    Rows lie by local expert, then source rank, token and k. Rows that carry no token (alignment
    padding, the tail) are zero.
    """

    rows: Any
    """Like ``x``, with leading axis C; ``Quantized`` in place of arrays if a format is given."""
    weights: jax.Array | None
    """[C] float32 (float64 if given so): each row's router weight; None if none were given."""
    group_sizes: jax.Array
    """[L] int32: rows of each local expert, alignment padding included; as ``ragged_dot`` wants."""
    row_offsets: jax.Array
    """[L + 1] int32: first row of each local expert, and the end of the last."""
    expert_ids: jax.Array
    """[L] int32: global ids of the local experts; -1 for the shared expert."""
    src_info: SourceInfo
    """Source rank, token and choice index of each row."""
    num_rows: jax.Array
    """[] int32: rows that carry a token."""
    num_dropped: jax.Array
    """[] int32: rows dropped here because they did not fit the capacity."""
    num_invalid: jax.Array
    """[] int32: ids of this rank outside [-1, num_experts)."""
    routing: AnyRouting
    """The routing, to use again."""


jax.tree_util.register_dataclass(
    Recv, data_fields=[f.name for f in dataclasses.fields(Recv)], meta_fields=[]
)


def route(
    topk_ids: Any,
    *,
    group: Group,
    num_experts: int,
    capacity: int | None = None,
    alignment: int = 1,
    shared_expert: bool = False,
    replicated: bool = False,
) -> AnyRouting:
    """Computes where every token of this rank goes and where every row of this rank comes from.

    Expert ``e`` lives on rank ``e // (num_experts // group.size)``. Must run where the group's axes
    are in scope (``jax.shard_map``, or ``jax.vmap`` with ``axis_name``), on every rank alike.

    Args:
      topk_ids: integers [T, K] of any dtype, K <= 32: global expert ids of this rank's tokens. -1
        drops a choice; other ids outside [0, num_experts) do too, and are counted. A token may
        name an expert twice.
      group: the ranks.
      num_experts: experts of all ranks together, shared ones not counted; divides by
        ``group.size``. At most 2**20 for each rank.
      capacity: rows here; ``None`` for the worst case (``default_capacity``). Rows that do not fit
        are dropped, last rows first, and counted.
      alignment: each local expert's rows start at a multiple of it.
      shared_expert: whether each rank has one more expert, which all its own tokens go to without
        leaving it. It is the first local expert; its rows come first, in the order of the tokens,
        and take their part of the capacity. It counts as choice K of each token: K <= 31 then.
      replicated: whether all ranks have the same tokens, ids and weights (tensor parallelism). Each
        keeps the rows of its own experts, and nothing is exchanged: a sum over the ranks
        (``lax.psum``) of what ``combine`` gives completes it. A shared expert gets a share of the
        tokens on each rank, ceil(T / group.size) in a row, so that the sum has each once.

    Returns:
      A ``Routing``, for ``dispatch`` and ``combine``; of a group of two levels a
      ``TwoLevelRouting``.

    Raises:
      TypeError, ValueError: an argument of the wrong type, shape or range, or axes not in scope.
    """
    return _route(
        *_check_route(topk_ids, group, num_experts, capacity, alignment, shared_expert, replicated)
    )


def _check_route(
    topk_ids: Any,
    group: Group,
    num_experts: int,
    capacity: int | None,
    alignment: int,
    shared_expert: bool,
    replicated: bool,
) -> tuple[jax.Array, dict[str, Any]]:
    """The arguments of ``route``: ids as int32 [T, K], and the static fields of its ``Routing``."""
    _check_scope(group)
    ids = as_array(topk_ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise (ValueError if jnp.issubdtype(ids.dtype, jnp.integer) else TypeError)(
            f"topk_ids must be an integer array [num_tokens, top_k]; got {short(ids)}"
        )
    if not all(isinstance(size, int) for size in ids.shape):
        raise ValueError(
            f"topk_ids must have a static shape [num_tokens, top_k]; got {short(ids)} with a "
            "symbolic size: use jax.export once for each number of tokens, or export for the "
            "largest number and fill up with tokens whose ids are -1"
        )
    modes = dict(shared_expert=shared_expert, replicated=replicated)
    for name, value in modes.items():
        check_bool(name, value)
    num_tokens, top_k = ids.shape
    check_top_k(top_k, shared_expert, of=f" in topk_ids {short(ids)}")
    num_experts = check_int("num_experts", num_experts, least=1)
    int32_max = int(np.iinfo(np.int32).max)
    largest = min(MAX_LOCAL_EXPERTS * group.size, int32_max - shared_expert * group.size)
    if num_experts % group.size or num_experts > largest:
        raise ValueError(
            f"num_experts must be a multiple of the group's size {group.size} and at most "
            f"{largest} ({MAX_LOCAL_EXPERTS} for each rank, which counts the rows of each expert); "
            f"got {num_experts}"
        )
    alignment = check_int("alignment", alignment, least=1)
    most_rows = default_capacity(num_tokens, top_k, group.size, num_experts, alignment, **modes)
    if most_rows > int32_max:  # they are counted before those that do not fit drop
        raise ValueError(
            "alignment and num_experts must keep the rows of a rank, with padding, below 2**31; "
            f"got alignment={alignment} and num_experts={num_experts}, by which {short(ids)} of "
            f"{group.size} ranks may make {most_rows}"
        )
    capacity = check_int("capacity", most_rows if capacity is None else capacity, least=0)

    # Clipped in its own dtype first: an id outside the range must stay outside as int32.
    limits = jnp.iinfo(ids.dtype)
    ids = ids.clip(max(int(limits.min), -2), min(int(limits.max), num_experts))
    ids = jnp.asarray(ids.astype(np.int32))
    static = dict(group=group, num_experts=num_experts, capacity=capacity, alignment=alignment)
    return ids, dict(static, **modes)


def _planned(ids: jax.Array, static: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
    """The ids that are routed, and the parameters of ``route_p``, of the static fields."""
    group, shared_expert = static["group"], static["shared_expert"]
    domain = group.alone if static["replicated"] else group
    local_experts = static["num_experts"] // group.size + shared_expert
    if shared_expert or static["replicated"]:
        ids = planned_ids(
            ids,
            own_rank(group),
            group_size=group.size,
            num_experts=static["num_experts"],
            shared_expert=shared_expert,
            replicated=static["replicated"],
        )
    return ids, dict(
        group=domain,
        num_experts=local_experts * domain.size,
        capacity=static["capacity"],
        alignment=static["alignment"],
    )


def _route(ids: jax.Array, static: dict[str, Any]) -> AnyRouting:
    planned, params = _planned(ids, static)
    if _has_levels(static):
        plan: Any = two_level.plan_levels(planned, **params)
    else:
        plan = bind_route(planned, emulated=False, **params)
    return _routing(compat.checkpoint_name(plan, ROUTING_CHECKPOINT_NAME), ids, static)


def _has_levels(static: dict[str, Any]) -> bool:
    """Whether a route is over two levels. Replicated tokens cross none."""
    return static["group"].two_level and not static["replicated"]


def _routing(plan: Any, ids: jax.Array, static: dict[str, Any]) -> AnyRouting:
    kind = Routing if isinstance(plan, RoutePlan) else TwoLevelRouting
    num_invalid = ((ids < -1) | (ids >= static["num_experts"])).sum(dtype=jnp.int32)
    num_invalid = compat.checkpoint_name(num_invalid, ROUTING_CHECKPOINT_NAME)
    return kind(**plan._asdict(), num_invalid=num_invalid, **static)


def _bind(primitive: Any, payload: Sequence[Any], routing: Any, **params: Any) -> list[Any]:
    """Binds an exchange by a routing, over both levels if it has them."""
    if isinstance(routing, TwoLevelRouting):
        return two_level.bind(primitive, payload, routing, **params)
    return bind_exchange(primitive, payload, routing.arrays, group=routing.domain, **params)


def dispatch(
    x: Any,
    topk_ids: Any,
    topk_weights: Any = None,
    *,
    group: Group | None = None,
    num_experts: int | None = None,
    capacity: int | None = None,
    alignment: int | None = None,
    shared_expert: bool | None = None,
    shared_weights: Any = None,
    replicated: bool | None = None,
    wire_dtype: Any = None,
    format: TokenFormat | None = None,
    decode: bool = False,
) -> Recv:
    """Sends every token to the ranks of its experts; returns the rows of this rank's experts.

    A token crosses to a rank once, however many of its experts live there, and becomes one row per
    choice. With two ranks, two experts (one on each) and ``topk_ids``

        rank 0: [[0, 1], [1, -1]]        rank 1: [[0, -1], [1, 0]]

    the rows, as (source rank, token, k), are

        rank 0: (0,0,0) (1,0,0) (1,1,1)   rank 1: (0,0,1) (0,1,0) (1,1,0)

    The transpose sums a token's rows like ``combine``, in float32 with one rounding on the wire, in
    ``wire_dtype``.

    With a ``format`` tokens are quantized before they cross, once each, and rows arrive as
    ``Quantized``: values and scales, which have no gradient. So do those that do not cross. With
    ``decode=True`` too they are decoded to the dtype of ``x`` where they arrive, and the gradient
    is straight-through: that of a dispatch without a format, as if nothing were rounded or
    saturated. On CUDA both are parts of the exchange.

    Args:
      x: array [T, ...], or a pytree of arrays that share the leading axis; any dtype. Floats of 8
        bits or fewer and integers are moved and have zero gradients.
      topk_ids: as in ``route``; or a ``Routing``, and then the arguments of ``route`` must be
        absent or equal to its own.
      topk_weights: floats [T, K], or None: router weights, which travel with the rows.
      group, num_experts, capacity, alignment, shared_expert, replicated: as in ``route``.
      shared_weights: floats [T] or a number, the weights of the shared expert's outputs; None for
        1. Only with ``topk_weights``.
      wire_dtype: dtype of the partial sums on the wire in the gradient, or a token format, as in
        ``combine``; None for the leaf's own.
      format: ``BlockwiseFp8()``, ``MxFp8()`` or ``NvFp4(...)``, for all arrays of ``x``, which must
        then be bfloat16, float16 or float32 [T, ..., H], H a multiple of the format's group size.
        None to move ``x`` as it is.
      decode: whether rows are decoded to the dtype of ``x``.

    Returns:
      A ``Recv``.

    Raises:
      TypeError, ValueError: an argument of the wrong type, shape or range, or axes not in scope.
    """
    call = _check_dispatch(_DispatchArguments(**locals()), split=False)
    routing = call.routing
    if routing is None:  # few tokens: it comes with the rows
        planned, route_params = _planned(call.ids, call.static)
        plan, moved = bind_routed_dispatch(planned, call.payload, **route_params, **call.params)
        routing = _routing(plan, call.ids, call.static)
    elif isinstance(routing, TwoLevelRouting):
        moved = two_level.bind(dispatch_p, call.payload, routing, **call.params_apart)
        return _finished(call, x, routing, moved)
    else:
        moved = bind_exchange(
            dispatch_p, call.payload, routing.arrays, group=routing.domain, **call.params
        )
    return _received(call, routing, moved)


class _Dispatch(NamedTuple):
    """The arguments of ``dispatch``, checked."""

    routing: AnyRouting | None  # None: it is to come with the rows
    ids: Any  # and static: of a route, where there are ids
    static: dict[str, Any]
    payload: list[jax.Array]  # the primitive's
    params: dict[str, Any]
    treedef: Any
    format: TokenFormat | None
    decode: bool
    is_widened: list[bool]  # for each leaf of x: its gradient is summed in a wider dtype

    @property
    def params_apart(self) -> dict[str, Any]:
        """The parameters where the exchange does not quantize. Then values and scales move, without
        a gradient; what is decoded has its own."""
        return dict(self.params, wire_dtype=None) if self.format is not None else self.params


class _DispatchArguments(NamedTuple):
    """The arguments of ``dispatch`` as they were given."""

    x: Any
    topk_ids: Any
    topk_weights: Any
    group: Group | None
    num_experts: int | None
    capacity: int | None
    alignment: int | None
    shared_expert: bool | None
    shared_weights: Any
    wire_dtype: Any
    format: TokenFormat | None
    decode: bool
    replicated: bool | None = None  # not among those of dispatch_start


def _check_dispatch(given: _DispatchArguments, *, split: bool) -> _Dispatch:
    """``split``: for ``dispatch_start``, whose exchange neither routes nor quantizes, as one of two
    levels does not."""
    routing: AnyRouting | None = None
    ids: Any = None
    static: dict[str, Any] = {}
    format, decode = given.format, given.decode
    if isinstance(given.topk_ids, AnyRouting):
        routing = given.topk_ids
        _check_scope(routing.group)
        routing.check("topk_ids")
        for name in STATIC_FIELDS:
            _check_same(name, getattr(given, name), getattr(routing, name))
    else:
        if given.group is None or given.num_experts is None:
            missing = "group" if given.group is None else "num_experts"
            raise ValueError(f"{missing} must be given with topk_ids; got None")
        ids, static = _check_route(
            given.topk_ids,
            given.group,
            given.num_experts,
            given.capacity,
            1 if given.alignment is None else given.alignment,
            False if given.shared_expert is None else given.shared_expert,
            False if given.replicated is None else given.replicated,
        )
        if split or len(ids) > FUSED_MAX_TOKENS or _has_levels(static):
            routing = _route(ids, static)
    is_apart = split or isinstance(routing, TwoLevelRouting)
    num_tokens, top_k = ids.shape if routing is None else (routing.num_tokens, routing.top_k)
    has_shared = static["shared_expert"] if routing is None else routing.shared_expert

    leaves, treedef = jax.tree.flatten(given.x)
    if not leaves:
        raise ValueError(f"x must have at least one array; got {given.x!r}")
    leaves = [_check_leaf("x", leaf, "num_tokens", num_tokens) for leaf in leaves]
    _check_format(format, decode, leaves)
    wire = _check_wire_dtype(given.wire_dtype, "x", leaves)
    has_levels = isinstance(routing, TwoLevelRouting)
    is_widened = [
        has_levels and carries_tangent(leaf.dtype) and two_level.is_widened(leaf, wire)
        for leaf in leaves
    ]
    if format is None:  # such leaves move without their gradient, which has a way of its own
        leaves = [lax.stop_gradient(x) if wide else x for x, wide in zip(leaves, is_widened)]
    if format is not None and is_apart:
        leaves = [part for leaf in leaves for part in format.travelling.encode(leaf)]
    scalars = []
    if given.topk_weights is not None:
        shape = (num_tokens, top_k)
        scalars = [_check_weights("topk_weights", given.topk_weights, "[num_tokens, top_k]", shape)]
    if given.shared_weights is not None and not (scalars and has_shared):
        raise ValueError(
            "shared_weights must be None without topk_weights and a shared expert; "
            f"got {given.shared_weights!r}"
        )
    if scalars and has_shared:
        scalars = [_with_shared_weights(scalars[0], given.shared_weights)]
    params: dict[str, Any] = dict(
        num_leaves=len(leaves),
        num_scalars=len(scalars),
        wire_dtype=wire,
    )
    payload = leaves + scalars
    if format is not None and not is_apart:
        params["encoding"], token_scales = _encoding(format, decode, num_tokens)
        payload += token_scales
    return _Dispatch(routing, ids, static, payload, params, treedef, format, decode, is_widened)


def _check_same(name: str, value: Any, own: Any) -> None:
    """Checks an argument beside a ``Routing`` that has it already."""
    if value is None:
        return
    if isinstance(own, bool):  # first: 1 == True
        check_bool(name, value)
    elif isinstance(own, int):
        value = check_int(name, value, least=0)
    if value != own:
        raise ValueError(
            f"{name} must be absent or equal that of the Routing, {own!r}; got {value!r}"
        )


def _received(call: _Dispatch, routing: AnyRouting, moved: Sequence[Any]) -> Recv:
    num_rows = len(moved) - call.params["num_scalars"]
    rows: list[Any] = list(moved[:num_rows])
    if call.format is not None and not call.decode:
        rows = [call.format.laid_out(pair) for pair in paired(rows)]
    num_local_experts = routing.num_experts // routing.group.size
    first_expert = own_rank(routing.group) * num_local_experts
    expert_ids = first_expert + jnp.arange(num_local_experts, dtype=jnp.int32)
    if routing.shared_expert:
        expert_ids = jnp.concatenate([jnp.full_like(expert_ids[:1], -1), expert_ids])
    ends = jnp.cumsum(routing.group_sizes, dtype=jnp.int32)
    return Recv(
        rows=jax.tree.unflatten(call.treedef, rows),
        weights=moved[-1] if call.params["num_scalars"] else None,
        group_sizes=routing.group_sizes,
        row_offsets=jnp.concatenate([jnp.zeros_like(ends[:1]), ends]),
        expert_ids=expert_ids,
        src_info=SourceInfo(rank=routing.row_rank, token=routing.row_token, k=routing.row_k),
        num_rows=routing.num_rows,
        num_dropped=routing.num_dropped,
        num_invalid=routing.num_invalid,
        routing=routing,
    )


def combine(
    y: Any,
    recv: Recv | AnyRouting,
    *,
    weights: Any = "recv",
    wire_dtype: Any = None,
) -> Any:
    """Brings the experts' outputs home: for each token the sum over its choices of weight * row.

    Summed in float32 (float64 for float64 rows) in a fixed order: over k where the rows are,
    rounded once to ``wire_dtype``, then over ranks where the token is. Choices without a row
    (dropped, or -1) add nothing. A shared expert's output is the last term of the own rank's sum.
    With replicated tokens the result is this rank's part of the sum: ``lax.psum`` adds them up.
    Of a group of two levels the sum over the ranks of a host is rounded before it crosses, too.

    Args:
      y: floats [capacity, ...]; or a pytree of such arrays if nothing weighs them.
      recv: what ``dispatch`` returned, or a ``Routing`` (which has no weights).
      weights: ``"recv"`` for ``recv.weights`` (unweighted if there are none), None for unweighted,
        or floats [capacity].
      wire_dtype: dtype of the partial sums on the wire; None for that of ``y``. Or a token format,
        ``BlockwiseFp8()``, ``MxFp8()`` or an ``NvFp4`` with a float as its scale, by which they are
        quantized in its place; the last axis of ``y`` must then divide by its groups. The gradient
        is as without one.

    Returns:
      Like ``y``, with leading axis num_tokens.

    Raises:
      TypeError, ValueError: an argument of the wrong type, shape or range, or axes not in scope.
    """
    call = _check_combine(y, recv, weights, wire_dtype)
    primitive = combine_p if call.weights is None else weighted_combine_p
    return call.summed(_bind(primitive, call.payload, call.routing, **call.params))


class _Combine(NamedTuple):
    """The arguments of ``combine``, checked."""

    payload: list[jax.Array]  # the arrays of y, then the weights, if there are any
    weights: jax.Array | None
    routing: AnyRouting
    params: dict[str, Any]
    treedef: Any
    dtypes: list[Any]  # of y

    def summed(self, sums: Sequence[Any]) -> Any:
        sums = [x.astype(dtype) for x, dtype in zip(sums, self.dtypes, strict=True)]
        return jax.tree.unflatten(self.treedef, sums)


def _check_combine(y: Any, recv: Any, weights: Any, wire_dtype: Any) -> _Combine:
    if not isinstance(recv, Recv | AnyRouting):
        raise TypeError(f"recv must be a Recv or a Routing; got {type(recv).__name__}")
    routing = recv.routing if isinstance(recv, Recv) else recv
    _check_scope(routing.group)
    routing.check("recv")
    if isinstance(weights, str):
        if weights != "recv":
            raise ValueError(f"weights must be 'recv', None or an array; got {weights!r}")
        weights = recv.weights if isinstance(recv, Recv) else None

    leaves, treedef = jax.tree.flatten(y)
    leaves = [_check_leaf("y", leaf, "capacity", routing.capacity) for leaf in leaves]
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize < 2:
            raise TypeError(f"y must hold floats of 16 bits or more; got {short(leaf)}")
    wire = _check_wire_dtype(wire_dtype, "y", leaves)
    params: dict[str, Any] = dict(num_leaves=len(leaves), num_scalars=0, wire_dtype=wire)
    dtypes = [leaf.dtype for leaf in leaves]
    if isinstance(routing, TwoLevelRouting):
        leaves = [two_level.widened(leaf, wire) for leaf in leaves]
    if weights is None:
        if not leaves:
            raise ValueError(f"y must have at least one array; got {y!r}")
        return _Combine(leaves, None, routing, params, treedef, dtypes)
    if not jax.tree_util.treedef_is_leaf(treedef):
        raise TypeError(f"y must be one array where weights are given; got {treedef}")
    weights = _check_weights("weights", weights, "[capacity]", (routing.capacity,))
    return _Combine([*leaves, weights], weights, routing, params, treedef, dtypes)


def dispatch_start(
    x: Any,
    topk_ids: Any,
    topk_weights: Any = None,
    *,
    group: Group | None = None,
    num_experts: int | None = None,
    capacity: int | None = None,
    alignment: int | None = None,
    shared_expert: bool | None = None,
    shared_weights: Any = None,
    wire_dtype: Any = None,
    format: TokenFormat | None = None,
    decode: bool = False,
) -> InFlight:
    """Starts a ``dispatch``; ``dispatch_done`` of what it returns has the rows.

    Between the two the tokens travel, on the CUDA path on a stream of the package's own, beside
    other work of the program (``overlap``). Any number of exchanges may be in flight, and be done
    in any order. Ids are routed before the start returns. Its transpose is ``combine_done``, that
    of ``dispatch_done`` is ``combine_start``: the backward pass is split as well.

    With a ``format`` tokens are quantized before the start, and decoded behind the end, not by the
    exchange; the gradient of what is decoded is a whole ``combine``.

    Args, raises: as ``dispatch``, but that replicated tokens, which do not travel, are refused.
    Also ValueError where the CUDA kernels run and no ``jax.jit`` is around.

    Returns:
      An ``InFlight``, to be used once in the same function.
    """
    call = _check_dispatch(_DispatchArguments(**locals()), split=True)
    routing = call.routing
    assert routing is not None
    _check_travels("dispatch", routing)
    params = call.params_apart

    def finish(in_flight: Sequence[Any]) -> Recv:
        return _finished(call, x, routing, _bind(dispatch_done_p, in_flight, routing, **params))

    in_flight = _bind(dispatch_start_p, call.payload, routing, **params)
    return InFlight("dispatch", in_flight, finish, routing.group)


def _finished(call: _Dispatch, x: Any, routing: AnyRouting, moved: Sequence[Any]) -> Recv:
    """What has moved in an exchange that did not quantize, decoded if it should be."""
    x = [jnp.asarray(leaf) for leaf in jax.tree.leaves(x)]
    wire, num_rows = call.params["wire_dtype"], call.params["num_leaves"]
    rows, moved = list(moved[:num_rows]), moved[num_rows:]
    if call.decode:
        assert call.format is not None
        pairs = zip(paired(rows), x, strict=True)
        rows = [call.format.travelling.decode(pair, leaf.dtype) for pair, leaf in pairs]
        rows = _with_derivatives(rows, x, routing, wire)
    elif call.format is None and any(call.is_widened):
        wide = [i for i, is_wide in enumerate(call.is_widened) if is_wide]
        given = [rows[i] for i in wide], [x[i] for i in wide]
        for i, row in zip(wide, _with_derivatives(*given, routing, wire), strict=True):
            rows[i] = row
    return _received(call, routing, [*rows, *moved])


def _with_derivatives(
    rows: Sequence[Any], x: Sequence[Any], routing: AnyRouting, wire_dtype: Any
) -> list[Any]:
    """The rows, which have come from x by another way, with the derivatives of a dispatch."""
    params = dict(num_leaves=len(x), num_scalars=0, wire_dtype=wire_dtype)

    @jax.custom_jvp
    def through(rows: Any, x: Any, routing: Any) -> Any:
        del x, routing
        return rows

    @through.defjvp
    def through_jvp(primals: Any, tangents: Any) -> Any:
        rows, routing = through(*primals), primals[2]  # again through: for the next derivative
        dx = tangents[1]
        if isinstance(routing, TwoLevelRouting):
            dx = [two_level.widened(leaf, wire_dtype) for leaf in dx]
        moved = _bind(dispatch_p, dx, routing, **params)
        # Rows may vary over more mesh axes: over those of the router weights beside them.
        moved = [
            compat.align_varying([dx.astype(row.dtype), row], ())[0] for dx, row in zip(moved, rows)
        ]
        return rows, moved

    return through(rows, x, routing)


def _check_travels(operation: str, routing: AnyRouting) -> None:
    if routing.replicated:
        raise ValueError(
            f"{operation}_start must have a routing without replicated tokens, which do not "
            f"travel: use {operation}; got replicated=True"
        )
    for level in routing.group.levels:
        check_place(operation, level)


def dispatch_done(inflight: InFlight) -> Recv:
    """Waits for what ``dispatch_start`` has started, and returns what ``dispatch`` would have.

    Raises:
      TypeError: it is something else.
      ValueError: it was used before, or started in another function.
    """
    return finish_exchange(inflight, "dispatch")


def combine_start(
    y: Any,
    recv: Recv | AnyRouting,
    *,
    weights: Any = "recv",
    wire_dtype: Any = None,
) -> InFlight:
    """Starts a ``combine``; ``combine_done`` of what it returns has the sums.

    As ``dispatch_start`` in all else; its transpose is ``dispatch_done``.

    Args, raises: as ``combine``. Also ValueError where the CUDA kernels run and no ``jax.jit`` is
    around.

    Returns:
      An ``InFlight``, to be used once in the same function.
    """
    call = _check_combine(y, recv, weights, wire_dtype)
    _check_travels("combine", call.routing)
    plain = call.weights is None

    def bind(primitive: Any, payload: Sequence[Any]) -> list[Any]:
        return _bind(primitive, payload, call.routing, **call.params)

    def finish(in_flight: Sequence[Any]) -> Any:
        if plain:
            return call.summed(bind(combine_done_p, in_flight))
        return call.summed(bind(weighted_combine_done_p, [*in_flight, *call.payload]))

    in_flight = bind(combine_start_p if plain else weighted_combine_start_p, call.payload)
    return InFlight("combine", in_flight, finish, call.routing.group)


def combine_done(inflight: InFlight) -> Any:
    """Waits for what ``combine_start`` has started, and returns what ``combine`` would have.

    Raises:
      TypeError: it is something else.
      ValueError: it was used before, or started in another function.
    """
    return finish_exchange(inflight, "combine")


def _check_leaf(name: str, leaf: Any, axis: str, size: int) -> jax.Array:
    try:
        leaf = jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold arrays; got {type(leaf).__name__}") from error
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} must hold arrays of numbers or booleans; got {short(leaf)}")
    if leaf.ndim < 1 or leaf.shape[0] != size:
        raise ValueError(
            f"{name} must hold arrays with leading axis {axis}={size}; got {short(leaf)}"
        )
    return leaf


def _check_weights(name: str, weights: Any, axes: str, shape: tuple[int, ...]) -> jax.Array:
    weights = jnp.asarray(weights)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise TypeError(f"{name} must be a float array {axes}={list(shape)}; got {short(weights)}")
    if weights.shape != shape:
        raise ValueError(f"{name} must be a float array {axes}={list(shape)}; got {short(weights)}")
    return weights if weights.dtype == jnp.float64 else weights.astype(jnp.float32)


def _with_shared_weights(topk_weights: jax.Array, shared_weights: Any) -> jax.Array:
    """[T, K] -> [T, K + 1], the shared expert's weights last."""
    num_tokens = len(topk_weights)
    weights = jnp.asarray(1.0 if shared_weights is None else shared_weights)
    if weights.ndim == 0:
        weights = jnp.broadcast_to(weights, num_tokens)
    weights = _check_weights("shared_weights", weights, "[num_tokens]", (num_tokens,))
    return jnp.concatenate([topk_weights, weights[:, None]], axis=1)


def _check_wire_dtype(
    wire_dtype: Any, name: str, leaves: Sequence[jax.Array]
) -> np.dtype | TokenFormat | None:
    if wire_dtype is None:
        return None
    if isinstance(wire_dtype, TokenFormat):
        if isinstance(getattr(wire_dtype, "global_scale", None), jax.Array):
            raise TypeError("wire_dtype must have a float as global_scale; got an array")
        fmt = wire_dtype.travelling
        for leaf in leaves:
            if not carries_tangent(leaf.dtype):
                continue
            if leaf.ndim < 2:
                raise ValueError(
                    f"{name} must hold arrays of two axes or more with a token format as "
                    f"wire_dtype; got {short(leaf)}"
                )
            fmt.check_numbers(leaf, name)
        return fmt
    try:
        dtype = jnp.dtype(wire_dtype)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"wire_dtype must be a float dtype, a token format or None; got {wire_dtype!r}"
        )
    return dtype


def _check_format(format: Any, decode: Any, leaves: Sequence[jax.Array]) -> None:
    check_bool("decode", decode)
    if format is None:
        if decode:
            raise ValueError("decode must be False without a format; got True")
        return
    if not isinstance(format, TokenFormat):
        raise TypeError(
            f"format must be a BlockwiseFp8, an MxFp8, an NvFp4 or None; got {format!r}"
        )
    for leaf in leaves:
        if leaf.ndim < 2:
            raise ValueError(
                f"x must hold arrays [num_tokens, ..., hidden] with a format; got {short(leaf)}"
            )
        format.check_numbers(leaf)


def _encoding(
    format: TokenFormat, decode: bool, num_tokens: int
) -> tuple[Encoding, list[jax.Array]]:
    """The static part of a format; and its part that may be traced, for each token."""
    format = format.travelling
    if not isinstance(format, NvFp4) or not isinstance(format.global_scale, jax.Array):
        return Encoding(format, decode, has_token_scales=False), []
    scales = jnp.broadcast_to(format.global_scale, (num_tokens,))
    return Encoding(NvFp4(), decode, has_token_scales=True), [scales]


def _check_scope(group: Any) -> None:
    """Checks that the group's axes are in scope here and are those of its mesh."""
    if not isinstance(group, Group):
        raise TypeError(f"group must be a Group; got {type(group).__name__}")
    sizes = []
    for axis in group.axes:
        try:
            sizes.append(lax.axis_size(axis))
        except NameError:
            raise ValueError(
                f"group must have axes in scope, by jax.shard_map or jax.vmap(axis_name=...); "
                f"got {group}, and {axis!r} is not in scope"
            ) from None
    size = int(np.prod(sizes))
    if size != group.size:
        raise ValueError(
            f"group must match the axes in scope, {dict(zip(group.axes, sizes, strict=True))}; "
            f"got {group} with size {group.size}"
        )
    for level, level_size in zip(group.levels if group.two_level else (), sizes):
        if level.size != level_size:
            raise ValueError(
                f"group must have as many hosts, and ranks of each, as the axes in scope have, "
                f"{dict(zip(group.axes, sizes, strict=True))}; got {level.size} along "
                f"{level.axis_name!r}"
            )
    mesh = jax.sharding.get_abstract_mesh()
    if group.mesh is not None and set(group.axes) <= set(mesh.manual_axes):
        here, own = list(mesh.shape.items()), list(group.mesh.shape.items())
        if here != own:
            raise ValueError(
                f"group must match the mesh in scope, {dict(here)}; got a group of the mesh "
                f"{dict(own)}"
            )
    if group.implementation == "cuda" and group.why_portable:
        raise ValueError(
            "implementation must be None or 'portable' where the CUDA kernels cannot run "
            f"({group.why_portable}); got implementation='cuda'"
        )
