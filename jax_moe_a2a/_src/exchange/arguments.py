"""Check all arguments of a dispatch or combine, and hold the operands of its primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..checks import PyTree, Tail, check_tail, short
from ..formats.formats import Encoding, NvFp4, TokenFormat, WireDtype, paired
from ..routing.checks import CheckedIds, RouteArguments, check_ids_or_routing, check_scope
from ..routing.two_level import AnyRouting
from ..routing.types import RouteOptions
from .payload_checks import (
    check_format,
    check_leaves,
    check_weights,
    check_wire_dtype,
    with_shared_weights,
)
from .recv import Recv, recv_of
from .straight_through import decoded, encoded


class DispatchCall(NamedTuple):
    """Hold the checked arguments of ``dispatch`` or ``dispatch_start``.

    If the primitive applies the token format, bind it with ``payload`` and ``params``. If XLA
    applies the format before and after the primitive, use ``encoded_payload`` and
    ``encoded_params``.
    """

    source: CheckedIds | AnyRouting
    leaves: list[jax.Array]
    treedef: jax.tree_util.PyTreeDef
    scalars: list[jax.Array]  # the router weights, if there are any, with the shared expert's
    wire_dtype: WireDtype
    format: TokenFormat | None
    decode: bool
    tail: Tail

    @property
    def options(self) -> RouteOptions:
        """Return the static fields of the routing."""
        return self.source.options if isinstance(self.source, CheckedIds) else self.source

    @property
    def payload(self) -> list[jax.Array]:
        """Return the operands of a dispatch that quantizes, without the routing."""
        return [*self.leaves, *self.scalars, *self._token_scales]

    @property
    def params(self) -> dict[str, Any]:
        """Return the parameters of a dispatch that quantizes."""
        params = self._params(len(self.leaves), self.wire_dtype)
        if self.format is not None:
            # A traced global scale is an operand; the static format has the default in its place.
            has_token_scales = bool(self._token_scales)
            static = NvFp4() if has_token_scales else self.format.travelling
            params["encoding"] = Encoding(static, self.decode, has_token_scales)
        return params

    @property
    def _token_scales(self) -> list[jax.Array]:
        """Return the format's traced global scale for each token, [T]; [] without such a scale."""
        scale = getattr(self.format, "global_scale", None)
        if not isinstance(scale, jax.Array):
            return []
        return [jnp.broadcast_to(scale, self.leaves[0].shape[:1])]

    @property
    def encoded_payload(self) -> list[jax.Array]:
        """Return the operands of a dispatch that does not quantize, without the routing."""
        leaves = self.leaves if self.format is None else encoded(self.leaves, self.format)
        return [*leaves, *self.scalars]

    @property
    def encoded_params(self) -> dict[str, Any]:
        """Return the parameters of a dispatch that does not quantize."""
        if self.format is None:
            return self._params(len(self.leaves), self.wire_dtype)
        # The wire dtype is for the gradient, and values and scales have no gradient.
        return self._params(2 * len(self.leaves), None)

    def _params(self, num_leaves: int, wire_dtype: WireDtype) -> dict[str, Any]:
        """Return the parameters that every dispatch has."""
        params = dict(num_leaves=num_leaves, num_scalars=len(self.scalars), wire_dtype=wire_dtype)
        return params if self.tail == "zero" else dict(params, tail=self.tail)

    def recv(self, routing: AnyRouting, moved: Sequence[jax.Array]) -> Recv:
        """Return the ``Recv`` of the results of a dispatch that quantizes."""
        rows: list[Any] = list(moved[: len(moved) - len(self.scalars)])
        if self.format is not None and not self.decode:
            rows = [self.format.laid_out(pair) for pair in paired(rows)]
        weights = moved[-1] if self.scalars else None
        return recv_of(routing, jax.tree.unflatten(self.treedef, rows), weights)

    def recv_of_encoded(self, routing: AnyRouting, moved: Sequence[jax.Array]) -> Recv:
        """Return the ``Recv`` of the results of a dispatch that does not quantize."""
        if self.format is not None and self.decode:
            num_parts = 2 * len(self.leaves)
            rows = decoded(
                moved[:num_parts],
                self.leaves,
                routing,
                fmt=self.format,
                wire_dtype=self.wire_dtype,
                tail=self.tail,
            )
            moved = [*rows, *moved[num_parts:]]
        return self.recv(routing, moved)


def check_dispatch(
    x: PyTree,
    topk_ids: ArrayLike | AnyRouting,
    topk_weights: ArrayLike | None,
    route_arguments: RouteArguments,
    *,
    shared_weights: ArrayLike | None,
    wire_dtype: DTypeLike | TokenFormat | None,
    format: TokenFormat | None,
    decode: bool,
    tail: Tail,
) -> DispatchCall:
    """Check the arguments of ``dispatch`` or ``dispatch_start``, and raise their errors."""
    source = check_ids_or_routing(topk_ids, route_arguments)
    if isinstance(source, CheckedIds):
        options, (num_tokens, top_k) = source.options, source.ids.shape
    else:
        options, num_tokens, top_k = source, source.num_tokens, source.top_k

    leaves, treedef = check_leaves("x", x, "num_tokens", num_tokens)
    if not leaves:
        raise ValueError(f"x must have at least one array; got {x!r}")
    check_format(format, decode, leaves)
    wire = check_wire_dtype(wire_dtype, "x", leaves, has_levels=options.has_levels)
    scalars = []
    if topk_weights is not None:
        shape = (num_tokens, top_k)
        scalars = [check_weights("topk_weights", topk_weights, "[num_tokens, top_k]", shape)]
    has_shared_weights = bool(scalars) and options.shared_expert
    if shared_weights is not None and not has_shared_weights:
        raise ValueError(
            "shared_weights must be None without topk_weights and a shared expert; "
            f"got {shared_weights!r}. Pass topk_weights and shared_expert=True as well"
        )
    if has_shared_weights:
        scalars = [with_shared_weights(scalars[0], shared_weights)]
    tail = check_tail(tail)
    return DispatchCall(source, leaves, treedef, scalars, wire, format, decode, tail)


class CombineCall(NamedTuple):
    """Hold the checked arguments of ``combine`` or ``combine_start``."""

    routing: AnyRouting
    leaves: list[jax.Array]
    treedef: jax.tree_util.PyTreeDef
    weights: jax.Array | None
    wire_dtype: WireDtype

    @property
    def payload(self) -> list[jax.Array]:
        """Return the operands of the primitive, without the routing."""
        return self.leaves if self.weights is None else [*self.leaves, self.weights]

    @property
    def params(self) -> dict[str, Any]:
        """Return the parameters of the primitive."""
        return dict(num_leaves=len(self.leaves), num_scalars=0, wire_dtype=self.wire_dtype)

    def sums(self, sums: Sequence[jax.Array]) -> PyTree:
        """Return the results of the primitive as a pytree like ``y``."""
        return jax.tree.unflatten(self.treedef, sums)


def check_combine(
    y: PyTree,
    recv: Recv | AnyRouting,
    weights: ArrayLike | Literal["recv"] | None,
    wire_dtype: DTypeLike | TokenFormat | None,
) -> CombineCall:
    """Check the arguments of ``combine`` or ``combine_start``, and raise their errors."""
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
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype.itemsize < 2:
            raise TypeError(
                f"y must hold floats of 16 bits or more; got {short(leaf)}. Cast it first"
            )
    wire = check_wire_dtype(wire_dtype, "y", leaves, has_levels=routing.has_levels)
    if weights is None:
        if not leaves:
            raise ValueError(f"y must have at least one array; got {y!r}")
        return CombineCall(routing, leaves, treedef, None, wire)
    if not jax.tree_util.treedef_is_leaf(treedef):
        raise TypeError(
            f"y must be one array if weights apply; got {treedef}. Pass weights=None, or call "
            "combine once for each array"
        )
    weights = check_weights("weights", weights, "[capacity]", (routing.capacity,))
    return CombineCall(routing, leaves, treedef, weights, wire)
