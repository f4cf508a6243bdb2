"""Define the record of an exchange primitive, which every rule reads.

An exchange moves a payload by a routing: from tokens to rows (outward), or from rows to tokens.
Given the routing (integers), it is linear in its payload, or bilinear in pairs of rows and weights.

Operands are the payload, then the arrays of a ``RoutingArrays``. Parameters of every exchange:

- ``num_leaves``, ``num_scalars``: arrays of the payload with an entry for each token, and arrays
  with an entry for each choice of a token.
- ``wire_dtype``: how partial sums travel: a dtype, a token format, or None for that of the array.
- ``group``, and ``emulated``: True if the group's own axis is a leading axis of every array, as
  ``vmap`` over that axis leaves it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from . import compat
from .group import Group
from .plan import RoutingArrays

NUM_ROUTING = len(RoutingArrays._fields)

# The axes of an operand or result that belong to the exchange; payload axes follow.
Layout = tuple[str, ...]
TOKEN: Layout = ("T",)
CHOICE: Layout = ("T", "K")
ROW: Layout = ("C",)


class Layouts(NamedTuple):
    """Hold the axes of all arrays of a payload, as the parameters determine them."""

    operands: Sequence[Layout]
    """The payload operands."""
    results: Sequence[Layout]
    sources: Sequence[tuple[int, ...]]
    """For each result, the operands that it is computed from. Its payload axes and dtype are those
    of the first one. Operands of one result are batched together."""


@dataclasses.dataclass(eq=False)
class Exchange:
    """Describe an exchange primitive.

    A primitive with split phases has two more records, which ``split.add_halves`` derives from it:
    ``start`` and ``done``. Between them, the payload is *in flight*: for each result one array in
    its form at the tokens, then for each result one in its form at the rows.
    """

    name: str
    is_outward: bool
    """True if it moves tokens to rows; False if it moves rows to tokens."""
    reference: Callable[..., list[jax.Array]]
    """Computes the results with jnp and lax; takes operands and parameters."""
    layouts: Callable[..., Layouts]
    """Takes the parameters by name, and ignores those that it does not need."""
    kernel_calls: Callable[..., Any]
    """Takes a site, the abstract payload of one rank, K and the parameters; returns the
    ``KernelCall`` s that make the exchange, or None (see ``lowering.exchange``)."""
    unfused: Callable[..., list[jax.Array]] | None = None
    """Computes the results with other primitives, for devices with kernels of which none applies.
    None for ``reference``."""
    result_types: Callable[..., list[Any]] | None = None
    """Changes the abstract values of results that are not like their sources."""
    keeps_payload: bool = False
    """True if the done reads the payload again, after what is in flight."""
    primitive: Any = dataclasses.field(init=False)
    transpose: Exchange = dataclasses.field(init=False)
    """The exchange that this one transposes to, if it is linear in all of its payload."""
    start: Exchange = dataclasses.field(init=False)
    done: Exchange = dataclasses.field(init=False)

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
        """Bind the primitive after casting all operands to vary over the same mesh axes."""
        operands = compat.align_varying([*payload, *routing], crossed_axes(group, emulated))
        return self.primitive.bind(*operands, group=group, emulated=emulated, **params)


def crossed_axes(group: Group, emulated: bool) -> tuple[str, ...]:
    """Return the mesh axes over which results vary even if operands do not.

    A group of one rank exchanges nothing: its results vary as its operands do.
    """
    return () if emulated or group.size == 1 else group.axes


def split_routing(operands: Sequence[Any]) -> tuple[list[Any], RoutingArrays]:
    """Split the operands of an exchange into payload and routing."""
    return list(operands[:-NUM_ROUTING]), RoutingArrays(*operands[-NUM_ROUTING:])
