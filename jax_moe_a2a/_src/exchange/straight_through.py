"""Quantize before a dispatch, and decode after it, if its primitive does neither.

Split dispatches and dispatches over two levels use this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .. import compat
from ..formats.formats import TokenFormat, paired, with_global_scales
from ..routing.two_level import AnyRouting
from .bind import bind
from .dispatch_combine import DISPATCH
from .record import Options


def encoded(x: Sequence[jax.Array], fmt: TokenFormat) -> list[jax.Array]:
    """Return the values and the scales of each array, alternating."""
    return [part for leaf in x for part in fmt.travelling.encode(leaf)]


def decoded(
    parts: Sequence[jax.Array],
    x: Sequence[jax.Array],
    routing: AnyRouting,
    options: Options,
    global_scales: jax.Array | None,
) -> list[jax.Array]:
    """Return the rows of dispatched values and scales, with straight-through derivatives.

    Args:
      parts: the result of ``encoded`` after the dispatch.
      x: the arrays that were encoded.
      routing: the routing of the dispatch.
      options: of the dispatch. Its wire dtype is for the gradient.
      global_scales: the global scale of each row, [C], or None if it is the format's.

    Returns:
      An array [C, ...] for each array of ``x``, in its dtype.
    """
    pairs = zip(paired(parts), x, strict=True)
    assert options.token_format is not None
    fmt = with_global_scales(options.token_format.travelling, global_scales)
    rows = [fmt.decode(pair, leaf.dtype) for pair, leaf in pairs]
    params = dict(num_leaves=len(x), num_choice_arrays=0, options=options.unencoded)
    return _with_derivatives_of_dispatch(rows, list(x), routing, params)


# Let D be the dispatch by the routing, which is linear in x, and Q the rounding of the format. The
# rows are D Q(x), but their derivative is defined as the derivative of D x: d rows = D dx. The
# transpose is ct(x) = D^T ct(rows), a combine.
def _with_derivatives_of_dispatch(
    rows: list[jax.Array], x: list[jax.Array], routing: AnyRouting, params: dict[str, Any]
) -> list[jax.Array]:
    """Return ``rows`` unchanged, with the derivatives of a dispatch of ``x``."""

    @jax.custom_jvp
    def straight_through(rows: Any, x: Any, routing: Any) -> Any:
        del x, routing
        return rows

    @straight_through.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        rows = straight_through(*primals)  # not primals[0]: the next derivative needs the rule
        moved = bind(DISPATCH, tangents[1], primals[2], **params)
        # The rows may vary over more mesh axes: the axes of the router weights that moved with
        # them.
        pairs = zip(moved, rows, strict=True)
        return rows, [compat.align_varying([tangent, row], ())[0] for tangent, row in pairs]

    return straight_through(rows, x, routing)
