"""Check the arguments of dispatch and combine, and return the operands of their primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..ad import carries_tangent, with_tangent
from ..checks import (
    PyTree,
    Tail,
    check_bool,
    check_floats,
    check_static,
    check_tail,
    merge_axes,
    short,
)
from ..formats.formats import NvFp4, RowsInFp8, TokenFormat, WireDtype, as_wire_dtype, paired
from ..routing.checks import CheckedIds, RouteArguments, check_ids_or_routing, check_scope
from ..routing.two_level import AnyRouting
from ..routing.types import RouteOptions
from . import reference
from .bind import bind
from .dispatch_combine import DISPATCH
from .record import Options
from .recv import Recv, recv_of


class DispatchArguments(NamedTuple):
    """The checked arguments of ``dispatch`` or ``dispatch_start``.

    To quantize inside the primitive, bind ``payload`` with ``params``, and pass the results to
    ``recv``. To quantize before the primitive, bind ``encoded``, and use ``recv_of_encoded``."""

    source: CheckedIds | AnyRouting
    leaves: list[jax.Array]
    treedef: jax.tree_util.PyTreeDef
    choice_arrays: list[jax.Array]  # router weights, or empty
    options: Options

    @property
    def route_options(self) -> RouteOptions:
        return self.source.options if isinstance(self.source, CheckedIds) else self.source

    @property
    def payload(self) -> list[jax.Array]:
        """Return the payload operands of a dispatch primitive that applies the token format."""
        choice_arrays = [*self.choice_arrays, *self._scales_of_choices]
        return [*self.leaves, *choice_arrays, *self._token_scales]

    @property
    def params(self) -> dict[str, Any]:
        options, num_choice_arrays = self.options, len(self.choice_arrays)
        if options.token_format is not None:
            # If the global scale is an array, it is an operand, and not part of the static format.
            scaled = bool(self._token_scales)
            static = NvFp4() if scaled else options.token_format
            options = options._replace(token_format=static, has_token_scales=scaled)
            num_choice_arrays += len(self._scales_of_choices)
        return dict(
            num_leaves=len(self.leaves), num_choice_arrays=num_choice_arrays, options=options
        )

    @property
    def _token_scales(self) -> list[jax.Array]:
        """Return [the global scale of each token, float32 [T]], or [] if the scale is a float."""
        scale = getattr(self.options.token_format, "global_scale", None)
        if not isinstance(scale, jax.Array):
            return []
        return [jnp.broadcast_to(scale, self.leaves[0].shape[:1])]

    @property
    def _scales_of_choices(self) -> list[jax.Array]:
        """Return [the bits of each token's scale for each choice, uint32 [T, K]], or [] if rows are
        decoded or all tokens share a scale. As a choice array, the scales travel to the rows."""
        fmt, source = self.options.token_format, self.source
        if fmt is None or fmt.token_scales is None or self.options.decode:
            return []
        top_k = source.ids.shape[1] if isinstance(source, CheckedIds) else source.top_k
        bits = lax.bitcast_convert_type(fmt.token_scales, jnp.uint32)
        return [jnp.broadcast_to(bits[:, None], (bits.size, top_k))]

    @property
    def encoded(self) -> tuple[list[jax.Array], dict[str, Any]]:
        """Quantize the leaves. Return payload and parameters of a dispatch without token format."""
        if self.options.token_format is None:
            return self.payload, self.params
        return reference.encoded(self.payload, **self.params)

    def recv(self, routing: AnyRouting, moved: Sequence[jax.Array]) -> Recv:
        """Return a ``Recv`` from the results of a primitive that was bound with ``payload``."""
        scales_of_choices, options = self._scales_of_choices, self.options
        fmt = options.token_format
        end = len(moved) - len(scales_of_choices)
        first = end - len(self.choice_arrays)
        rows: Sequence[Any] = moved[:first]
        weights, bits = moved[first:end], moved[end:]
        if fmt is not None and options.has_encoded:
            num_floats = len(self.leaves) * options.decode
            floats, encoded = rows[:num_floats], paired(rows[num_floats:])
            rows = list(map(RowsInFp8, encoded, floats)) if options.decode else encoded
        scales = lax.bitcast_convert_type(bits[0], jnp.float32) if bits else None
        rows = jax.tree.unflatten(self.treedef, rows)
        return recv_of(routing, rows, weights[0] if weights else None, scales)

    def recv_of_encoded(self, routing: AnyRouting, moved: Sequence[jax.Array]) -> Recv:
        """Return a ``Recv`` from the results of a primitive that was bound with ``encoded``."""
        if self.options.decode:
            num_leaves, dtypes = len(self.leaves), [x.dtype for x in self.leaves]
            found = reference.decoded(moved, dtypes, self.params["options"])
            rows, rest = found[:num_leaves], found[num_leaves:]
            options = self.options.unencoded
            params = dict(num_leaves=num_leaves, num_choice_arrays=0, options=options)

            # Let D be the dispatch, and Q the rounding of the format. Rows are D Q(x), but their
            # derivative ignores Q: d rows = D dx. The transpose D^T is a combine.
            def tangent_of(primals: Any, tangents: Any) -> list[jax.Array]:
                return bind(DISPATCH, tangents[0], primals[1], **params)

            moved = [*with_tangent(rows, tangent_of, self.leaves, routing), *rest]
        return self.recv(routing, moved)


def check_dispatch(
    x: PyTree,
    topk_ids: ArrayLike | AnyRouting,
    topk_weights: ArrayLike | None,
    route_arguments: RouteArguments,
    *,
    decode: bool,
    tail: Tail,
) -> DispatchArguments:
    source = check_ids_or_routing(topk_ids, route_arguments)
    ids, route_options = source if isinstance(source, CheckedIds) else (source.topk_ids, source)
    num_tokens, top_k = ids.shape
    leaves, treedef = check_leaves("x", x, "num_tokens", num_tokens)
    if not leaves:
        raise ValueError(f"x must have at least one array; got {x!r}")
    exchange = route_arguments.exchange
    options = Options(exchange.wire_dtype, exchange.token_format, decode, tail)
    options = check_options(options, leaves, route_options.has_levels)
    choice_arrays = []
    if topk_weights is not None:
        shape, of_experts = (num_tokens, top_k), (num_tokens, route_options.num_experts)
        remedy = ". Take the chosen ones: jnp.take_along_axis(probs, topk_ids, axis=1)"
        given = "topk_weights", topk_weights, "[num_tokens, top_k]"
        choice_arrays = [check_weights(*given, shape, {of_experts: remedy})]
    return DispatchArguments(source, leaves, treedef, choice_arrays, options)


class CombineArguments(NamedTuple):
    """The checked arguments of ``combine`` or ``combine_start``."""

    routing: AnyRouting
    leaves: list[jax.Array]
    treedef: jax.tree_util.PyTreeDef
    weights: jax.Array | None
    options: Options
    addends: list[jax.Array]  # one for each leaf, or empty

    @property
    def payload(self) -> list[jax.Array]:
        weights = [] if self.weights is None else [self.weights]
        return [*self.leaves, *weights, *self.addends]

    @property
    def params(self) -> dict[str, Any]:
        options = self.options._replace(num_addends=len(self.addends))
        return dict(num_leaves=len(self.leaves), num_choice_arrays=0, options=options)

    def sums(self, results: Sequence[jax.Array]) -> PyTree:
        """Return the results of the primitive as a pytree like ``y``."""
        return jax.tree.unflatten(self.treedef, results)


def check_combine(
    y: PyTree,
    recv: Recv | AnyRouting,
    weights: ArrayLike | Literal["recv"] | None,
    wire_dtype: DTypeLike | TokenFormat | None,
    add: PyTree | None = None,
) -> CombineArguments:
    if not isinstance(recv, Recv | AnyRouting):
        is_swapped = isinstance(y, Recv | AnyRouting)
        raise TypeError(
            f"recv must be a Recv or a Routing; got {type(recv).__name__}"
            f"{'. The arguments are swapped: call combine(y, recv)' if is_swapped else ''}"
        )
    routing = recv.routing if isinstance(recv, Recv) else recv
    check_scope(routing.group)
    routing.check("recv")
    # The default is a string, because None already means an unweighted sum.
    if isinstance(weights, str):
        if weights != "recv":
            raise ValueError(f"weights must be 'recv', None or an array; got {weights!r}")
        weights = recv.weights if isinstance(recv, Recv) else None

    rows = ". Pass the experts' outputs, one for each of recv.rows, and not tokens"
    leaves, treedef = check_leaves("y", y, "capacity", routing.capacity, remedy=rows)
    for leaf in leaves:
        check_floats("y", leaf)
    wire = check_wire_dtype(wire_dtype, "y", leaves, has_levels=routing.has_levels)
    options = Options(wire_dtype=wire)
    addends = [] if add is None else _check_addends(add, routing, leaves, treedef)
    if weights is None:
        if not leaves:
            raise ValueError(f"y must have at least one array; got {y!r}")
        return CombineArguments(routing, leaves, treedef, None, options, addends)
    if not jax.tree_util.treedef_is_leaf(treedef):
        raise TypeError(
            f"y must be one array if weights apply; got {treedef}. Pass weights=None, or call "
            "combine once for each array"
        )
    shape, of_choices = (routing.capacity,), (routing.num_tokens, routing.top_k)
    remedy = (
        ". Pass router weights [T, K] to dispatch as topk_weights, because combine needs one "
        "weight for each row"
    )
    weights = check_weights("weights", weights, "[capacity]", shape, {of_choices: remedy})
    return CombineArguments(routing, leaves, treedef, weights, options, addends)


def _check_addends(
    add: PyTree,
    routing: AnyRouting,
    rows: Sequence[jax.Array],
    treedef: jax.tree_util.PyTreeDef,
) -> list[jax.Array]:
    leaves, structure = check_leaves("add", add, "num_tokens", routing.num_tokens)
    if routing.replicated:
        raise ValueError(
            "add must be None if tokens are replicated, because lax.psum of the results would add "
            f"it once for each rank; got {', '.join(map(short, leaves))}. Add it to the result of "
            "lax.psum"
        )
    if structure != treedef:
        raise TypeError(f"add must have the structure of y, {treedef}; got {structure}")
    for leaf, of_rows in zip(leaves, rows, strict=True):
        like = jax.ShapeDtypeStruct((routing.num_tokens, *of_rows.shape[1:]), of_rows.dtype)
        if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            error = TypeError if leaf.dtype != like.dtype else ValueError
            raise error(
                f"add must have the shape and the dtype of the result, {short(like)}; got "
                f"{short(leaf)}. Reshape or cast it"
            )
    return leaves


def check_options(options: Options, leaves: Sequence[jax.Array], has_levels: bool) -> Options:
    check_bool("decode", options.decode)
    check_format(options.token_format, options.decode, leaves)
    wire = check_wire_dtype(options.wire_dtype, "x", leaves, has_levels=has_levels)
    return options._replace(wire_dtype=wire, tail=check_tail(options.tail))


def check_leaves(
    name: str, tree: PyTree, axis: str, size: int, *, remedy: str = ""
) -> tuple[list[jax.Array], jax.tree_util.PyTreeDef]:
    """Return the leaves of ``tree`` as arrays [size, ...], and the structure of ``tree``. If a leaf
    has a wrong leading axis, the error ends with ``remedy``."""
    leaves, treedef = jax.tree.flatten(tree)
    return [_check_leaf(name, leaf, axis, size, remedy) for leaf in leaves], treedef


def _check_leaf(name: str, leaf: Any, axis: str, size: int, remedy: str) -> jax.Array:
    try:
        leaf = jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold arrays; got {type(leaf).__name__}") from error
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} must hold arrays of numbers or booleans; got {short(leaf)}")
    check_static(name, leaf)
    if leaf.ndim < 1 or leaf.shape[0] != size:
        if leaf.ndim > 2 and leaf.shape[0] * leaf.shape[1] == size:
            remedy = merge_axes(name, leaf, leaf.ndim - 1)
        raise ValueError(
            f"{name} must hold arrays with leading axis {axis}={size}; got {short(leaf)}{remedy}"
        )
    return leaf


def check_weights(
    name: str, weights: ArrayLike, axes: str, shape: tuple[int, ...], remedies: dict[Any, str]
) -> jax.Array:
    """Check the weights. Return them as float64 if they are float64, otherwise as float32. For a
    wrong shape among ``remedies``, the error ends with the remedy of this shape."""
    array = jnp.asarray(weights)
    message = f"{name} must be a float array {axes}={list(shape)}; got {short(array)}"
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(message)
    if array.shape != shape:
        raise ValueError(
            message + (remedies.get(array.shape) or merge_axes(name, array, len(shape)))
        )
    return array if array.dtype == jnp.float64 else array.astype(jnp.float32)


def check_wire_dtype(
    wire_dtype: DTypeLike | TokenFormat | None,
    name: str,
    leaves: Sequence[jax.Array],
    *,
    has_levels: bool,
) -> WireDtype:
    """Return the checked ``wire_dtype``. With two levels, a dtype with more bits than the dtype
    of a leaf is an error, because each host rounds its sum to the dtype of the leaf."""
    dtype = as_wire_dtype(wire_dtype)
    if isinstance(dtype, TokenFormat):
        for leaf in leaves:
            if carries_tangent(leaf.dtype):
                _check_quantizable(dtype, "wire_dtype", name, leaf)
        return dtype
    if dtype is None or not has_levels:
        return dtype
    for leaf in leaves:
        is_summed = jnp.issubdtype(leaf.dtype, jnp.floating) and carries_tangent(leaf.dtype)
        if is_summed and dtype.itemsize > leaf.dtype.itemsize:
            raise ValueError(
                f"wire_dtype must not be wider than the dtype of {name} if the group has two "
                f"levels; got {dtype} for {short(leaf)}. Use wire_dtype=None, or cast {name} to "
                f"{dtype}"
            )
    return dtype


def check_format(fmt: TokenFormat | None, decode: bool, leaves: Sequence[jax.Array]) -> None:
    if fmt is None:
        if decode:
            raise ValueError(
                "decode must be False without a token_format; got True. Pass "
                "exchange=ma.Exchange(token_format=...)"
            )
        return
    for leaf in leaves:
        _check_quantizable(fmt, "token_format", "x", leaf)
    if fmt.token_scales is not None and fmt.token_scales.ndim > 1:
        raise ValueError(
            "global_scale must be a float, or a float32 array [] or [num_tokens], in dispatch; got "
            f"{short(fmt.token_scales)}. Pass one scale for each token"
        )


def _check_quantizable(fmt: TokenFormat, option: str, name: str, leaf: jax.Array) -> None:
    if leaf.ndim < 2:
        raise ValueError(
            f"{name} must hold arrays [..., hidden] of two axes or more with a token format as "
            f"{option}; got {short(leaf)}"
        )
    fmt.check_numbers(leaf, name)
