"""The public functions: validate, canonicalise, bind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from . import compat, two_level
from .arguments import PyTree, Tail, as_array, check_bool, check_int, check_tail, short
from .capacity import check_top_k, chosen_capacity, default_capacity
from .formats import Encoding, NvFp4, TokenFormat, paired
from .group import Group
from .inflight import InFlight, check_place, finish_exchange
from .plan import RoutePlan, planned_ids
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
from .routing import ROUTING_CHECKPOINT_NAME, STATIC_FIELDS, Routing
from .two_level import AnyRouting, TwoLevelRouting

# By measurement (docs/history/speed.md): at most so many tokens are routed and dispatched at once.
FUSED_MAX_TOKENS = 256
# Every rank has an array with an entry for each of its experts.
MAX_LOCAL_EXPERTS = 2**20


class SourceInfo(NamedTuple):
    """Hold the origin of each row: three int32 arrays [C], -1 for a row without a token.

    ``k`` is K for a row of the shared expert. ``rank`` is 0 if tokens are replicated.
    """

    rank: jax.Array
    token: jax.Array
    k: jax.Array


@dataclasses.dataclass(frozen=True)
class Recv:
    """Hold what a rank has after ``dispatch``; a pytree.

    C is the capacity and L the number of local experts; a shared expert is the first of them. Rows
    are sorted by local expert, then source rank, token and choice. Rows without a token (alignment
    padding, and the tail after the last group) are zero; the tail only if it was not given up with
    ``tail="unspecified"``.
    """

    rows: PyTree
    """Like ``x``, with leading axis C; with a token format, each array is a ``Quantized``."""
    weights: jax.Array | None
    """[C] float32 (float64 if given as float64): router weight of each row; None if not given."""
    group_sizes: jax.Array
    """[L] int32: rows of each local expert, padding included, as ``grouped_dot`` and
    ``lax.ragged_dot`` expect."""
    row_offsets: jax.Array
    """[L + 1] int32: first row of each local expert, and the end of the last expert."""
    expert_ids: jax.Array
    """[L] int32: global id of each local expert; -1 for the shared expert."""
    src_info: SourceInfo
    """Source rank, token and choice of each row."""
    num_rows: jax.Array
    """[] int32: rows that hold a token."""
    num_dropped: jax.Array
    """[] int32: rows of this rank that were dropped because the capacity was too small."""
    num_invalid: jax.Array
    """[] int32: ids of this rank's tokens outside [-1, num_experts); they send nothing."""
    routing: AnyRouting
    """The routing, which another ``dispatch`` or ``combine`` accepts."""

    @property
    def row_experts(self) -> jax.Array:
        """Return the local expert of each row, [C] int32; -1 for a row without a token.

        It is computed from ``row_offsets`` when it is read: use it for a bias or a scale of each
        expert. Rows of a ``Recv`` that is an element of a batch, not of a batch of them.
        """
        rows = jnp.arange(self.src_info.rank.shape[0], dtype=jnp.int32)
        ends = self.row_offsets[1:]
        expert = jnp.sum(rows[:, None] >= ends[None], axis=-1, dtype=jnp.int32)
        return jnp.where(self.src_info.rank < 0, jnp.int32(-1), expert)


jax.tree_util.register_dataclass(
    Recv, data_fields=[f.name for f in dataclasses.fields(Recv)], meta_fields=[]
)


def route(
    topk_ids: ArrayLike,
    *,
    group: Group,
    num_experts: int,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    alignment: int = 1,
    shared_expert: bool = False,
    replicated: bool = False,
) -> AnyRouting:
    """Compute where every token of this rank goes and where every row of this rank comes from.

    Expert ``e`` lives on rank ``e // (num_experts // group.size)``. Call it where the group's axes
    are in scope (inside ``jax.shard_map``, or inside ``jax.vmap`` with ``axis_name``), on every
    rank.

    Args:
      topk_ids: integers [T, K] of any integer dtype, K <= 32: global expert ids of this rank's
        tokens. An id of -1 sends nothing. Other ids outside [0, num_experts) send nothing either,
        and are counted. A token may name an expert twice.
      group: the ranks.
      num_experts: number of experts of all ranks together, without shared experts; a multiple of
        ``group.size``, and at most 2**20 for each rank.
      capacity: number of rows of each rank, or None for the worst case (``default_capacity``). Rows
        that do not fit are dropped and counted: later choices of a token before its earlier ones.
      capacity_factor: capacity as a multiple of the balanced load (see ``ma.capacity``), in place
        of ``capacity``.
      alignment: the rows of each local expert start at a multiple of this number.
      shared_expert: True if each rank has one more expert, which receives all tokens of its own
        rank. It is the first local expert. Its rows come first, in token order, and use part of the
        capacity. It counts as choice K of each token, so K must be at most 31.
      replicated: True if all ranks hold the same tokens, ids and weights (tensor parallelism).
        Nothing is exchanged, each rank keeps the rows of its own experts, and ``lax.psum`` of the
        result of ``combine`` completes the sum. A shared expert receives ceil(T / group.size)
        consecutive tokens on each rank.

    Returns:
      A ``Routing``, or a ``TwoLevelRouting`` if the group has two levels. ``dispatch`` accepts it
      in place of ``topk_ids``, and ``combine`` in place of a ``Recv``.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape or range, or the group's axes are not in scope.

    Example:
      Two ranks with one expert each. Both experts have three choices:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      group = ma.Group(axis_name="ep", size=2)
      ids = jnp.array([[[0, 1], [1, -1]], [[0, -1], [1, 0]]])  # [ranks, tokens, choices]
      route = lambda ids: ma.route(ids, group=group, num_experts=2)
      routing = jax.vmap(route, axis_name="ep")(ids)
      print(routing.num_rows, routing.capacity)
      ```

      ```text
      [3 3] 8
      ```
    """
    return _route(
        *_check_route(
            topk_ids,
            group,
            num_experts,
            capacity,
            capacity_factor,
            alignment,
            shared_expert,
            replicated,
        )
    )


def _check_route(
    topk_ids: Any,
    group: Group,
    num_experts: int,
    capacity: int | None,
    capacity_factor: float | None,
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
            f"got alignment={alignment} and num_experts={num_experts}, with which {short(ids)} of "
            f"{group.size} ranks may need {most_rows} rows. Use a smaller alignment"
        )
    sizes = num_tokens, top_k, group.size, num_experts, alignment
    capacity = chosen_capacity(capacity, capacity_factor, *sizes, **modes)

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
    num_tokens, top_k = ids.shape
    most_rows = default_capacity(
        num_tokens,
        top_k,
        group.size,
        static["num_experts"],
        static["alignment"],
        shared_expert=shared_expert,
        replicated=static["replicated"],
    )
    first_choice = None  # where nothing can drop
    if static["capacity"] < most_rows:
        first_choice = top_k if shared_expert else 0  # the shared expert's, or the router's
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
        first_choice=first_choice,
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
    x: PyTree,
    topk_ids: ArrayLike | AnyRouting,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group | None = None,
    num_experts: int | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    alignment: int | None = None,
    shared_expert: bool | None = None,
    shared_weights: ArrayLike | None = None,
    replicated: bool | None = None,
    wire_dtype: DTypeLike | TokenFormat | None = None,
    format: TokenFormat | None = None,
    decode: bool = False,
    tail: Tail = "zero",
) -> Recv:
    """Send every token to the ranks of its experts, and return the rows of this rank's experts.

    A token crosses to a rank once, even if several of its experts live there, and becomes one row
    per choice. Rows are sorted by local expert, then source rank, token and choice. The gradient of
    ``x`` sums a token's rows like ``combine``: in float32, with one rounding to ``wire_dtype``.

    With a ``format``, each token is quantized once before it travels, and rows arrive as
    ``Quantized`` (values and scales), which have no gradient. With ``decode=True``, rows arrive in
    the dtype of ``x``, and the gradient is straight-through: that of a dispatch without a format.

    Args:
      x: array [T, ...], or a pytree of arrays with the same first axis; any dtype. Integers and
        floats of 8 bits or fewer are moved and have zero gradients.
      topk_ids: integers [T, K] as in ``route``; or a ``Routing``. With a ``Routing``, omit the
        arguments of ``route``, or pass equal values.
      topk_weights: router weights, floats [T, K], or None. They travel with the rows.
      group: the ranks.
      num_experts: number of experts of all ranks together, as in ``route``.
      capacity: number of rows of each rank, or None for the worst case, as in ``route``.
      capacity_factor: capacity as a multiple of the balanced load, as in ``route``.
      alignment: the rows of each local expert start at a multiple of this number. None means 1.
      shared_expert: True if each rank has one more expert for its own tokens, as in ``route``.
      shared_weights: weights of the shared expert's outputs: floats [T], a number, or None for 1.
        Needs ``topk_weights``.
      replicated: True if all ranks hold the same tokens, as in ``route``.
      wire_dtype: dtype of partial sums while they travel in the gradient, or a token format, as in
        ``combine``. None means the dtype of each array.
      format: ``BlockwiseFp8()``, ``MxFp8()`` or ``NvFp4(...)``, or None to send ``x`` unchanged.
        With a format, all arrays of ``x`` must be bfloat16, float16 or float32 [T, ..., H], and H
        must be a multiple of the format's group size.
      decode: True to decode rows to the dtype of ``x``. Needs a ``format``.
      tail: what ``rows`` and ``weights`` of the ``Recv`` hold after the last group. "zero": zeros.
        "unspecified": anything, NaN included. This saves the time to write them, and suits experts
        that read ``group_sizes``, as ``grouped_dot`` does. Padding within groups is always zero.
        Gradients do not depend on these rows, but code of your own that reads all rows does.

    Returns:
      A ``Recv`` with rows [C, ...], group_sizes [L] and more, for capacity C and L local experts.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape or range, or the group's axes are not in scope.

    Example:
      Two ranks with one expert each and two tokens each. Rank 0 receives three rows from the tokens
      10 (of rank 0), 30 and 40 (of rank 1) for expert 0; the fourth row holds no token:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      group = ma.Group(axis_name="ep", size=2)
      x = jnp.array([[[10.0], [20.0]], [[30.0], [40.0]]])  # [ranks, tokens, hidden]
      ids = jnp.array([[[0, 1], [1, -1]], [[0, -1], [1, 0]]])  # [ranks, tokens, choices]

      def on_rank(x, ids):
          recv = ma.dispatch(x, ids, group=group, num_experts=2, capacity=4)
          return recv.rows[:, 0], recv.src_info.rank

      rows, source_ranks = jax.vmap(on_rank, axis_name="ep")(x, ids)
      print(rows.tolist(), source_ranks.tolist())
      ```

      ```text
      [[10.0, 30.0, 40.0, 0.0], [10.0, 20.0, 40.0, 0.0]] [[0, 1, 1, -1], [0, 0, 1, -1]]
      ```
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
    capacity_factor: float | None
    alignment: int | None
    shared_expert: bool | None
    shared_weights: Any
    wire_dtype: Any
    format: TokenFormat | None
    decode: bool
    tail: Tail
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
        _check_same_factor(given.capacity, given.capacity_factor, routing)
    else:
        if given.group is None or given.num_experts is None:
            missing = "group" if given.group is None else "num_experts"
            raise ValueError(
                f"{missing} must be given with topk_ids; got None. Pass it, or pass a Routing in "
                "place of topk_ids"
            )
        ids, static = _check_route(
            given.topk_ids,
            given.group,
            given.num_experts,
            given.capacity,
            given.capacity_factor,
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
            f"got {given.shared_weights!r}. Pass topk_weights and shared_expert=True as well"
        )
    if scalars and has_shared:
        scalars = [_with_shared_weights(scalars[0], given.shared_weights)]
    params: dict[str, Any] = dict(
        num_leaves=len(leaves),
        num_scalars=len(scalars),
        wire_dtype=wire,
    )
    check_tail(given.tail)
    if given.tail != "zero":
        params["tail"] = given.tail
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
            f"{name} must be omitted or equal to the Routing's {name}, {own!r}; got {value!r}. "
            "Omit it, or pass topk_ids in place of the Routing"
        )


def _check_same_factor(capacity: Any, factor: Any, routing: AnyRouting) -> None:
    """Checks a capacity_factor beside a ``Routing``: it must lead to the Routing's capacity."""
    if factor is None:
        return
    rows = chosen_capacity(
        capacity,
        factor,
        routing.num_tokens,
        routing.top_k,
        routing.group.size,
        routing.num_experts,
        routing.alignment,
        shared_expert=routing.shared_expert,
        replicated=routing.replicated,
    )
    if rows != routing.capacity:
        raise ValueError(
            "capacity_factor must be omitted or lead to the Routing's capacity, "
            f"{routing.capacity}; got {factor!r}, which leads to {rows}. Omit it, or pass topk_ids "
            "in place of the Routing"
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
    y: PyTree,
    recv: Recv | AnyRouting,
    *,
    weights: ArrayLike | str | None = "recv",
    wire_dtype: DTypeLike | TokenFormat | None = None,
) -> PyTree:
    """Bring the experts' outputs back, and return for each token the sum of weight * output.

    Sums are in float32 (float64 for float64 rows) and in a fixed order: first over the choices
    where the rows are (the partial sum, rounded once to ``wire_dtype``), then over the ranks where
    the token is. A dropped choice adds nothing. A shared expert's output is the last term of its
    rank's partial sum. If tokens are replicated, the result is this rank's part: complete it with
    ``lax.psum``. A group of two levels rounds the sum of each host once more.

    Args:
      y: the experts' outputs, floats [C, ...] of 16 bits or more, in the order of ``recv.rows``.
        May be a pytree of such arrays if no weights apply.
      recv: the ``Recv`` of the dispatch, or a ``Routing``, which has no weights.
      weights: ``"recv"`` for ``recv.weights`` (unweighted if ``dispatch`` got no weights), None for
        an unweighted sum, or floats [C].
      wire_dtype: float dtype of the partial sums while they travel. None means the dtype of ``y``.
        May be a token format (``BlockwiseFp8()``, ``MxFp8()``, or an ``NvFp4`` with a float as
        scale); the last axis of ``y`` must then be a multiple of its group size. It does not change
        the gradient.

    Returns:
      Like ``y``, with leading axis T.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape or range, or the group's axes are not in scope.

    Example:
      Two ranks with one expert each. Each expert adds its id plus 1 to its rows:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      group = ma.Group(axis_name="ep", size=2)
      x = jnp.array([[[10.0], [20.0]], [[30.0], [40.0]]])  # [ranks, tokens, hidden]
      ids = jnp.array([[[0, 1], [1, -1]], [[0, -1], [1, 0]]])  # [ranks, tokens, choices]
      weights = jnp.full((2, 2, 2), 0.5)

      def on_rank(x, ids, weights):
          recv = ma.dispatch(x, ids, weights, group=group, num_experts=2)
          return ma.combine(recv.rows + recv.expert_ids[0] + 1, recv)

      print(jax.vmap(on_rank, axis_name="ep")(x, ids, weights)[..., 0].tolist())
      ```

      ```text
      [[11.5, 11.0], [15.5, 41.5]]
      ```
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
            raise TypeError(
                f"y must hold floats of 16 bits or more; got {short(leaf)}. Cast it first"
            )
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
        raise TypeError(
            f"y must be one array if weights apply; got {treedef}. Pass weights=None, or call "
            "combine once for each array"
        )
    weights = _check_weights("weights", weights, "[capacity]", (routing.capacity,))
    return _Combine([*leaves, weights], weights, routing, params, treedef, dtypes)


def dispatch_start(
    x: PyTree,
    topk_ids: ArrayLike | AnyRouting,
    topk_weights: ArrayLike | None = None,
    *,
    group: Group | None = None,
    num_experts: int | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    alignment: int | None = None,
    shared_expert: bool | None = None,
    shared_weights: ArrayLike | None = None,
    wire_dtype: DTypeLike | TokenFormat | None = None,
    format: TokenFormat | None = None,
    decode: bool = False,
    tail: Tail = "zero",
) -> InFlight:
    """Start a ``dispatch``, and return what ``dispatch_done`` needs to finish it.

    On the CUDA path, tokens travel between start and done on a stream of the package's own; use
    ``overlap`` to run other work meanwhile. Several exchanges can be outstanding and can finish in
    any order. The ids are routed before the start returns. The gradient of ``dispatch_start`` is
    ``combine_done`` and the gradient of ``dispatch_done`` is ``combine_start``, so the backward
    pass is split too. With a ``format``, XLA quantizes before the start and decodes after the done,
    and with ``decode=True`` the gradient is an ordinary ``combine``.

    Args:
      x: as in ``dispatch``.
      topk_ids: as in ``dispatch``.
      topk_weights: as in ``dispatch``.
      group: as in ``dispatch``.
      num_experts: as in ``dispatch``.
      capacity: as in ``dispatch``.
      capacity_factor: as in ``dispatch``.
      alignment: as in ``dispatch``.
      shared_expert: as in ``dispatch``.
      shared_weights: as in ``dispatch``.
      wire_dtype: as in ``dispatch``.
      format: as in ``dispatch``.
      decode: as in ``dispatch``.
      tail: as in ``dispatch``.

    Returns:
      An ``InFlight``. Pass it to ``dispatch_done`` once, in the same function.

    Raises:
      TypeError: as ``dispatch``.
      ValueError: as ``dispatch``; also if tokens are replicated, because they do not travel; also
        on the CUDA path outside ``jax.jit``.

    Example:
      A shared computation runs while tokens travel:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      group = ma.Group(axis_name="ep", size=2)

      def on_rank(x, ids):
          inflight = ma.dispatch_start(x, ids, group=group, num_experts=2)
          inflight, shared = ma.overlap(inflight, jnp.square, x)
          recv = ma.dispatch_done(inflight)
          return shared + ma.combine(recv.rows, recv)

      x, ids = jnp.full((2, 3, 4), 3.0), jnp.ones((2, 3, 1), int)
      print(jax.vmap(on_rank, axis_name="ep")(x, ids)[0, 0])
      ```

      ```text
      [12. 12. 12. 12.]
      ```
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
    tail = call.params.get("tail", "zero")
    rows, moved = list(moved[:num_rows]), moved[num_rows:]
    if call.decode:
        assert call.format is not None
        pairs = zip(paired(rows), x, strict=True)
        rows = [call.format.travelling.decode(pair, leaf.dtype) for pair, leaf in pairs]
        rows = _with_derivatives(rows, x, routing, wire, tail)
    elif call.format is None and any(call.is_widened):
        wide = [i for i, is_wide in enumerate(call.is_widened) if is_wide]
        given = [rows[i] for i in wide], [x[i] for i in wide]
        for i, row in zip(wide, _with_derivatives(*given, routing, wire, tail), strict=True):
            rows[i] = row
    return _received(call, routing, [*rows, *moved])


def _with_derivatives(
    rows: Sequence[Any], x: Sequence[Any], routing: AnyRouting, wire_dtype: Any, tail: str
) -> list[Any]:
    """The rows, which have come from x by another way, with the derivatives of a dispatch."""
    params = dict(num_leaves=len(x), num_scalars=0, wire_dtype=wire_dtype)
    if tail != "zero":
        params["tail"] = tail

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
            f"{operation}_start must have a routing without replicated tokens, because they do not "
            f"travel; got replicated=True. Use {operation}"
        )
    for level in routing.group.levels:
        check_place(operation, level)


def dispatch_done(inflight: InFlight) -> Recv:
    """Wait for a ``dispatch_start``, and return the ``Recv`` that ``dispatch`` would have returned.

    Args:
      inflight: the result of ``dispatch_start``, or of an ``overlap`` with it.

    Returns:
      A ``Recv``.

    Raises:
      TypeError: if ``inflight`` is anything else.
      ValueError: if ``inflight`` was already used, or was started in another function.
    """
    return finish_exchange(inflight, "dispatch")


def combine_start(
    y: PyTree,
    recv: Recv | AnyRouting,
    *,
    weights: ArrayLike | str | None = "recv",
    wire_dtype: DTypeLike | TokenFormat | None = None,
) -> InFlight:
    """Start a ``combine``, and return what ``combine_done`` needs to finish it.

    Works like ``dispatch_start``. The gradient of ``combine_start`` is ``dispatch_done``.

    Args:
      y: as in ``combine``.
      recv: as in ``combine``.
      weights: as in ``combine``.
      wire_dtype: as in ``combine``.

    Returns:
      An ``InFlight``. Pass it to ``combine_done`` once, in the same function.

    Raises:
      TypeError: as ``combine``.
      ValueError: as ``combine``; also if tokens are replicated; also on the CUDA path outside
        ``jax.jit``.
    """
    call = _check_combine(y, recv, weights, wire_dtype)
    _check_travels("combine", call.routing)
    plain = call.weights is None
    # As `lowering._held`: the done of a weighted combine reads the payload, too.
    payload = call.payload if plain else lax.optimization_barrier(call.payload)

    def bind(primitive: Any, payload: Sequence[Any]) -> list[Any]:
        return _bind(primitive, payload, call.routing, **call.params)

    def finish(in_flight: Sequence[Any]) -> Any:
        if plain:
            return call.summed(bind(combine_done_p, in_flight))
        return call.summed(bind(weighted_combine_done_p, [*in_flight, *payload]))

    in_flight = bind(combine_start_p if plain else weighted_combine_start_p, payload)
    return InFlight("combine", in_flight, finish, call.routing.group)


def combine_done(inflight: InFlight) -> PyTree:
    """Wait for a ``combine_start``, and return the sums that ``combine`` would have returned.

    Args:
      inflight: the result of ``combine_start``, or of an ``overlap`` with it.

    Returns:
      Like ``y`` of ``combine_start``, with leading axis T.

    Raises:
      TypeError: if ``inflight`` is anything else.
      ValueError: if ``inflight`` was already used, or was started in another function.
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
    dtype = topk_weights.dtype  # also that of a Python number
    if weights.dtype.itemsize > dtype.itemsize and not weights.weak_type:
        dtype = weights.dtype
    return jnp.concatenate([topk_weights.astype(dtype), weights.astype(dtype)[:, None]], axis=1)


def _check_wire_dtype(
    wire_dtype: Any, name: str, leaves: Sequence[jax.Array]
) -> np.dtype | TokenFormat | None:
    if wire_dtype is None:
        return None
    if isinstance(wire_dtype, TokenFormat):
        if isinstance(getattr(wire_dtype, "global_scale", None), jax.Array):
            raise TypeError(
                "wire_dtype must have a float as global_scale; got an array. Pass "
                "NvFp4(global_scale=...) with a number"
            )
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
            raise ValueError("decode must be False without a format; got True. Pass format=...")
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
                f"group must have its axes in scope; got {group}, and {axis!r} is not in scope. "
                "Call this inside jax.shard_map or inside jax.vmap(..., axis_name=...)"
            ) from None
    size = int(np.prod(sizes))
    if size != group.size:
        raise ValueError(
            f"group must match the axes in scope, {dict(zip(group.axes, sizes, strict=True))}; "
            f"got {group} with size {group.size}. Make the group from the mesh in scope"
        )
    for level, level_size in zip(group.levels if group.two_level else (), sizes):
        if level.size != level_size:
            raise ValueError(
                f"group must have the hosts and ranks per host of the axes in scope, "
                f"{dict(zip(group.axes, sizes, strict=True))}; got {level.size} along "
                f"{level.axis_name!r}"
            )
    mesh = jax.sharding.get_abstract_mesh()
    if group.mesh is not None and set(group.axes) <= set(mesh.manual_axes):
        here, own = list(mesh.shape.items()), list(group.mesh.shape.items())
        if here != own:
            raise ValueError(
                f"group must match the mesh in scope, {dict(here)}; got a group of the mesh "
                f"{dict(own)}. Make the group from the mesh of the shard_map"
            )
    if group.implementation == "cuda" and group.why_portable:
        raise ValueError(
            "implementation must be None or 'portable' where the CUDA kernels cannot run "
            f"({group.why_portable}); got implementation='cuda'"
        )
