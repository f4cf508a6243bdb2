"""Define the record of an exchange primitive, which the rules of all its transforms read.

An exchange moves a payload by a routing: from tokens to rows (outward), or from rows to tokens.
For a fixed routing (integers), an exchange is linear in its payload, or bilinear in pairs of rows
and weights. Dispatch and combine are transposes of each other, and so are their weighted forms.

The operands are the payload, then the arrays of a ``RoutingArrays``. The parameters are:

- ``num_leaves``: the number of payload arrays with an entry for each token.
- ``num_choice_arrays``: the number of payload arrays with an entry for each choice of a token.
- ``options``: static ``Options``.
- ``group``.
- ``emulated``: True under ``vmap`` over the group's axis. Arrays then have a leading axis of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .. import compat
from ..checks import Tail
from ..formats.formats import TokenFormat
from ..group.group import Group
from ..plan.plan import RoutingArrays

NUM_ROUTING = len(RoutingArrays._fields)

# The first axes of an operand or result, which belong to the exchange. Payload axes follow.
Layout = tuple[str, ...]
TOKEN: Layout = ("T",)
CHOICE: Layout = ("T", "K")
ROW: Layout = ("C",)


class Options(NamedTuple):
    """The options of an exchange, without the options of its routing. A combine has no format.
    Derive options by ``_replace``, so that a new option reaches each part of an exchange."""

    wire_dtype: Any = None
    """How partial sums travel: a dtype, a token format, or None for the array's dtype."""
    token_format: TokenFormat | None = None
    """How a dispatch quantizes its leaves, or None."""
    decode: bool = False
    tail: Tail = "zero"
    keeps_encoded: bool = False
    """True if a dispatch that decodes also returns the rows in the format."""
    has_token_scales: bool = False
    """True if an operand float32 [T] replaces the ``global_scale`` of a static format."""
    num_addends: int = 0
    """The last payload operands of a combine: an addend for each of its sums, or none. An addend is
    added to its sum before the only rounding of the result."""

    @property
    def results_per_leaf(self) -> int:
        """Return the number of results of each leaf: 1 for floats, and 2 for values and scales."""
        has_floats = self.token_format is None or self.decode
        return has_floats + 2 * self.has_encoded

    @property
    def has_encoded(self) -> bool:
        """Return True if a dispatch returns values and scales."""
        return self.token_format is not None and (self.keeps_encoded or not self.decode)

    @property
    def unencoded(self) -> Options:
        return self._replace(
            token_format=None, decode=False, keeps_encoded=False, has_token_scales=False
        )


class Layouts(NamedTuple):
    """The axes of all operands and results of a payload, for the parameters of an exchange."""

    operands: Sequence[Layout]
    results: Sequence[Layout]
    sources: Sequence[tuple[int, ...]]
    """For each result, the operands from which it is computed. The result has the payload axes and
    the dtype of the first of these operands. All operands of a result are batched together."""


@dataclasses.dataclass(eq=False)
class Record:
    """The record of an exchange primitive.

    A primitive with split phases has two more records, which ``split.add_halves`` derives from it:
    ``start`` and ``done``. Between start and done, the payload is *in flight*. A payload in flight
    consists of two arrays for each result: first all arrays at the tokens, then all arrays at the
    rows.
    """

    name: str
    is_outward: bool
    """True if it moves tokens to rows; False if it moves rows to tokens."""
    reference: Callable[..., list[jax.Array]]
    """Computes the results with jnp and lax from the operands and parameters."""
    layouts: Callable[..., Layouts]
    """Returns the ``Layouts`` for the parameters of the primitive."""
    kernel_calls: Callable[..., Any]
    """Returns the kernel calls that make the exchange (see ``lowering.py``). It receives a
    ``CallPlacement``, the abstract payload of one rank and the parameters."""
    unfused: Callable[..., Callable[..., list[jax.Array]] | None] = lambda **_: None
    """Receives the parameters, and returns a function that computes the results with other
    exchanges, for GPUs whose kernels do not support this payload. None means ``reference``."""
    result_types: Callable[..., list[Any]] = lambda results, **_: results
    """Changes the abstract values of results whose type differs from the type of their source."""
    primitive: Any = dataclasses.field(init=False)
    transpose: Record = dataclasses.field(init=False)
    """The transposed exchange, if this exchange is linear in all of its payload."""
    start: Record = dataclasses.field(init=False)
    done: Record = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.primitive = compat.Primitive(f"moe_a2a_{self.name}")

    def bind(
        self,
        payload: Sequence[Any],
        routing: RoutingArrays,
        *,
        group: Group,
        emulated: bool = False,
        **params: Any,
    ) -> list[Any]:
        operands = compat.align_varying([*payload, *routing], crossed_axes(group, emulated))
        return self.primitive.bind(*operands, group=group, emulated=emulated, **params)


def crossed_axes(group: Group, emulated: bool) -> tuple[str, ...]:
    """Return the mesh axes over which results vary even if operands do not."""
    return () if emulated or group.size == 1 else group.axes


def split_routing(operands: Sequence[Any]) -> tuple[list[Any], RoutingArrays]:
    return list(operands[:-NUM_ROUTING]), RoutingArrays(*operands[-NUM_ROUTING:])
