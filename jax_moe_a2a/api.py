"""The public functions: validate, canonicalise, bind."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import compat
from .arguments import as_array, check_int, short
from .formats import Encoding, NvFp4, Quantized, TokenFormat
from .group import Group
from .primitives import (
    bind_exchange,
    bind_route,
    bind_routed_dispatch,
    carries_tangent,
    combine_p,
    dispatch_p,
    weighted_combine_p,
)
from .routing import MAX_TOP_K, ROUTING_CHECKPOINT_NAME, RoutePlan, Routing, default_capacity

# By measurement (benchmarks/NOTES.md): so many tokens of a rank are routed and dispatched at once.
FUSED_MAX_TOKENS = 128


class SourceInfo(NamedTuple):
    """Where each row came from; int32 [C] each, -1 where a row carries no token."""

    rank: jax.Array
    token: jax.Array
    k: jax.Array


@dataclasses.dataclass(frozen=True)
class Recv:
    """What a rank has after ``dispatch``. C rows (capacity), L local experts.

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
    """[L] int32: global ids of the local experts."""
    src_info: SourceInfo
    """Source rank, token and choice index of each row."""
    num_rows: jax.Array
    """[] int32: rows that carry a token."""
    num_dropped: jax.Array
    """[] int32: rows dropped here because they did not fit the capacity."""
    num_invalid: jax.Array
    """[] int32: ids of this rank outside [-1, num_experts)."""
    routing: Routing
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
) -> Routing:
    """Computes where every token of this rank goes and where every row of this rank comes from.

    Expert ``e`` lives on rank ``e // (num_experts // group.size)``. Must run where the group's axes
    are in scope (``jax.shard_map``, or ``jax.vmap`` with ``axis_name``), on every rank alike.

    Args:
      topk_ids: integers [T, K] of any dtype, K <= 32: global expert ids of this rank's tokens. -1
        drops a choice; other ids outside [0, num_experts) do too, and are counted. A token may
        name an expert twice.
      group: the ranks.
      num_experts: experts of all ranks together; divides by ``group.size``.
      capacity: rows here; ``None`` for the worst case (``default_capacity``). Rows that do not fit
        are dropped, last rows first, and counted.
      alignment: each local expert's rows start at a multiple of it.

    Returns:
      A ``Routing``, for ``dispatch`` and ``combine``.

    Raises:
      TypeError, ValueError: an argument of the wrong type, shape or range, or axes not in scope.
    """
    return _route(*_check_route(topk_ids, group, num_experts, capacity, alignment))


def _check_route(
    topk_ids: Any, group: Group, num_experts: int, capacity: int | None, alignment: int
) -> tuple[jax.Array, dict[str, Any]]:
    """The arguments of ``route``: ids as int32 [T, K], and the static fields of its ``Routing``."""
    _check_scope(group)
    ids = as_array(topk_ids)
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise (ValueError if jnp.issubdtype(ids.dtype, jnp.integer) else TypeError)(
            f"topk_ids must be an integer array [num_tokens, top_k]; got {short(ids)}"
        )
    num_tokens, top_k = ids.shape
    if top_k > MAX_TOP_K:
        raise ValueError(f"topk_ids must have top_k <= {MAX_TOP_K}; got {short(ids)}")
    num_experts = check_int("num_experts", num_experts, least=1)
    if num_experts % group.size or num_experts > np.iinfo(np.int32).max:
        raise ValueError(
            f"num_experts must be an int32 multiple of the group's size {group.size}; "
            f"got {num_experts}"
        )
    alignment = check_int("alignment", alignment, least=1)
    if capacity is None:
        capacity = default_capacity(num_tokens, top_k, group.size, num_experts, alignment)
    capacity = check_int("capacity", capacity, least=0)

    # Clipped in its own dtype first: an id outside the range must stay outside as int32.
    limits = jnp.iinfo(ids.dtype)
    ids = ids.clip(max(int(limits.min), -2), min(int(limits.max), num_experts))
    ids = jnp.asarray(ids.astype(np.int32))
    return ids, dict(group=group, num_experts=num_experts, capacity=capacity, alignment=alignment)


def _route(ids: jax.Array, static: dict[str, Any]) -> Routing:
    plan = bind_route(ids, emulated=False, **static)
    return _routing(compat.checkpoint_name(plan, ROUTING_CHECKPOINT_NAME), ids, static)


def _routing(plan: RoutePlan, ids: jax.Array, static: dict[str, Any]) -> Routing:
    num_invalid = ((ids < -1) | (ids >= static["num_experts"])).sum(dtype=jnp.int32)
    num_invalid = compat.checkpoint_name(num_invalid, ROUTING_CHECKPOINT_NAME)
    return Routing(**plan._asdict(), num_invalid=num_invalid, **static)


def dispatch(
    x: Any,
    topk_ids: Any,
    topk_weights: Any = None,
    *,
    group: Group | None = None,
    num_experts: int | None = None,
    capacity: int | None = None,
    alignment: int | None = None,
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
    ``Quantized``: values and scales, which have no gradient. With ``decode=True`` too they are
    decoded to the dtype of ``x`` where they arrive, and the gradient is straight-through: that of a
    dispatch without a format, as if nothing were rounded or saturated. On CUDA both are parts of
    the exchange.

    Args:
      x: array [T, ...], or a pytree of arrays that share the leading axis; any dtype. Floats of 8
        bits or fewer and integers are moved and have zero gradients.
      topk_ids: as in ``route``; or a ``Routing``, and then the arguments of ``route`` must be
        absent or equal to its own.
      topk_weights: floats [T, K], or None: router weights, which travel with the rows.
      group, num_experts, capacity, alignment: as in ``route``.
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
    routing = None  # few tokens: it comes with the rows
    if isinstance(topk_ids, Routing):
        routing = topk_ids
        _check_scope(routing.group)
        given = dict(group=group, num_experts=num_experts, capacity=capacity, alignment=alignment)
        for name, value in given.items():
            if value is not None and value != getattr(routing, name):
                raise ValueError(
                    f"{name} must be absent or equal that of the Routing, "
                    f"{getattr(routing, name)!r}; got {value!r}"
                )
    else:
        if group is None or num_experts is None:
            missing = "group" if group is None else "num_experts"
            raise ValueError(f"{missing} must be given with topk_ids; got None")
        alignment = 1 if alignment is None else alignment
        ids, static = _check_route(topk_ids, group, num_experts, capacity, alignment)
        if len(ids) > FUSED_MAX_TOKENS:
            routing = _route(ids, static)
    num_tokens, top_k = ids.shape if routing is None else routing.choice_rank.shape

    leaves, treedef = jax.tree.flatten(x)
    if not leaves:
        raise ValueError(f"x must have at least one array; got {x!r}")
    leaves = [_check_leaf("x", leaf, "num_tokens", num_tokens) for leaf in leaves]
    _check_format(format, decode, leaves)
    scalars = []
    if topk_weights is not None:
        shape = (num_tokens, top_k)
        scalars = [_check_weights("topk_weights", topk_weights, "[num_tokens, top_k]", shape)]
    params: dict[str, Any] = dict(
        num_leaves=len(leaves),
        num_scalars=len(scalars),
        wire_dtype=_check_wire_dtype(wire_dtype, "x", leaves),
    )
    payload = leaves + scalars
    if format is not None:
        params["encoding"], token_scales = _encoding(format, decode, num_tokens)
        payload += token_scales
    if routing is None:
        plan, moved = bind_routed_dispatch(ids, payload, **static, **params)
        routing = _routing(plan, ids, static)
    else:
        moved = bind_exchange(dispatch_p, payload, routing.arrays, group=routing.group, **params)
    rows: list[Any] = moved[: len(moved) - len(scalars)]
    if format is not None and not decode:
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [format.laid_out(Quantized(*pair)) for pair in pairs]
    num_local_experts = routing.num_experts // routing.group.size
    first_expert = lax.axis_index(routing.group.axis_name) * num_local_experts
    ends = jnp.cumsum(routing.group_sizes, dtype=jnp.int32)
    return Recv(
        rows=jax.tree.unflatten(treedef, rows),
        weights=moved[-1] if scalars else None,
        group_sizes=routing.group_sizes,
        row_offsets=jnp.concatenate([jnp.zeros_like(ends[:1]), ends]),
        expert_ids=(first_expert + jnp.arange(num_local_experts)).astype(jnp.int32),
        src_info=SourceInfo(rank=routing.row_rank, token=routing.row_token, k=routing.row_k),
        num_rows=routing.num_rows,
        num_dropped=routing.num_dropped,
        num_invalid=routing.num_invalid,
        routing=routing,
    )


def combine(y: Any, recv: Recv | Routing, *, weights: Any = "recv", wire_dtype: Any = None) -> Any:
    """Brings the experts' outputs home: for each token the sum over its choices of weight * row.

    Summed in float32 (float64 for float64 rows) in a fixed order: over k where the rows are,
    rounded once to ``wire_dtype``, then over ranks where the token is. Choices without a row
    (dropped, or -1) add nothing.

    Args:
      y: floats [capacity, ...]; or a pytree of such arrays if nothing weighs them.
      recv: what ``dispatch`` returned, or a ``Routing`` (which has no weights).
      weights: ``"recv"`` for ``recv.weights`` (unweighted if there are none), None for unweighted,
        or floats [capacity].
      wire_dtype: dtype of the partial sums on the wire; None for that of ``y``. Or a token format,
        ``BlockwiseFp8()``, ``MxFp8()`` or an ``NvFp4`` with a float as its scale, by which they are
        quantized in its place; the last axis of ``y`` must then divide by its groups. The gradient
        is as without one. On CUDA a format takes the portable path.

    Returns:
      Like ``y``, with leading axis num_tokens.

    Raises:
      TypeError, ValueError: an argument of the wrong type, shape or range, or axes not in scope.
    """
    if not isinstance(recv, Recv | Routing):
        raise TypeError(f"recv must be a Recv or a Routing; got {type(recv).__name__}")
    routing = recv.routing if isinstance(recv, Recv) else recv
    _check_scope(routing.group)
    if isinstance(weights, str):
        if weights != "recv":
            raise ValueError(f"weights must be 'recv', None or an array; got {weights!r}")
        weights = recv.weights if isinstance(recv, Recv) else None

    leaves, treedef = jax.tree.flatten(y)
    leaves = [_check_leaf("y", leaf, "capacity", routing.capacity) for leaf in leaves]
    for leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize < 2:
            raise TypeError(f"y must hold floats of 16 bits or more; got {short(leaf)}")
    params: dict[str, Any] = dict(
        num_leaves=len(leaves),
        num_scalars=0,
        wire_dtype=_check_wire_dtype(wire_dtype, "y", leaves),
        group=routing.group,
    )
    if weights is None:
        if not leaves:
            raise ValueError(f"y must have at least one array; got {y!r}")
        return jax.tree.unflatten(
            treedef, bind_exchange(combine_p, leaves, routing.arrays, **params)
        )
    if not jax.tree_util.treedef_is_leaf(treedef):
        raise TypeError(f"y must be one array where weights are given; got {treedef}")
    weights = _check_weights("weights", weights, "[capacity]", (routing.capacity,))
    return bind_exchange(weighted_combine_p, [*leaves, weights], routing.arrays, **params)[0]


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


def _check_wire_dtype(
    wire_dtype: Any, name: str, leaves: Sequence[jax.Array]
) -> np.dtype | TokenFormat | None:
    if wire_dtype is None:
        return None
    if isinstance(wire_dtype, TokenFormat):
        if isinstance(getattr(wire_dtype, "global_scale", None), jax.Array):
            raise TypeError("wire_dtype must have a float as global_scale; got an array")
        fmt = dataclasses.replace(wire_dtype, scale_layout="rows")
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
    if not isinstance(decode, bool):
        raise TypeError(f"decode must be a bool; got {decode!r}")
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
    format = dataclasses.replace(format, scale_layout="rows")  # while they travel
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
