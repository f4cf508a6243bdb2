"""Define ``Record``, which describes an exchange primitive for the rules of JAX transforms.

An exchange moves arrays (its payload) from tokens to rows (outward), or from rows to tokens. For a
fixed routing, an exchange is linear in its payload, or bilinear in rows and their weights. Dispatch
and combine are transposes of each other. So are weighted dispatch and weighted combine.

The operands are the payload, then the arrays of a ``RoutingArrays``. The parameters are:

- ``num_leaves``: the number of leaves: arrays [T, ...] at the tokens, and [C, ...] at the rows.
- ``num_choice_arrays``: the number of arrays [T, K, ...] at the tokens, and [C, ...] at the rows.
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

# A layout names the first axes of an operand or a result. All other axes are payload axes.
Layout = tuple[str, ...]
TOKEN: Layout = ("T",)
CHOICE: Layout = ("T", "K")
ROW: Layout = ("C",)


class Options(NamedTuple):
    """The options of an exchange, without the options of its routing. Derive new ``Options`` with
    ``_replace``, which keeps all other options."""

    wire_dtype: Any = None
    """The dtype or token format of partial sums while they travel. None means the array's dtype."""
    token_format: TokenFormat | None = None
    """The format in which a dispatch moves its leaves, or None. It is None in a combine."""
    decode: bool = False
    tail: Tail = "zero"
    keeps_encoded: bool = False
    """True if a dispatch with ``decode`` also returns the quantized rows."""
    has_token_scales: bool = False
    """True if the global scales are an operand, float32 [T], and not in ``token_format``."""
    num_addends: int = 0
    """Number of addends of a combine: one for each sum, or 0. Addends are the last payload
    operands. A combine adds an addend before it rounds the sum."""

    @property
    def results_per_leaf(self) -> int:
        """Return the number of results per leaf: floats (1), values and scales (2), or all (3)."""
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
    """The layouts of the payload operands and the results of an exchange."""

    operands: Sequence[Layout]
    results: Sequence[Layout]
    sources: Sequence[tuple[int, ...]]
    """For each result, the indices of its operands. The result has the payload axes and the dtype
    of its first operand. If ``vmap`` batches one operand of a result, all of them get batched."""


@dataclasses.dataclass(eq=False)
class Record:
    """An exchange primitive, with the functions that implement it.

    For split exchanges, ``split.add_halves`` adds two more records, ``start`` and ``done``. Between
    start and done, the payload is *in flight*. It then has two arrays for each result: one *at the
    tokens* (axes [T, ...]) and one *at the rows* (axes [C, ...]). The arrays at the tokens come
    first.
    """

    name: str
    is_outward: bool
    """True if the exchange moves tokens to rows; False if it moves rows to tokens."""
    reference: Callable[..., list[jax.Array]]
    """Computes the results from the operands and parameters, with jnp and lax."""
    layouts: Callable[..., Layouts]
    """Returns the ``Layouts`` for the parameters of the primitive."""
    kernel_calls: Callable[..., Any]
    """Returns a list of ``KernelCall`` from a ``CallPlacement``, the abstract payload of one rank
    and the parameters (see ``lowering.py``)."""
    unfused: Callable[..., Callable[..., list[jax.Array]] | None] = lambda **_: None
    """Maps the parameters to None, or to a function that computes the results with several
    exchanges. If no kernel supports a payload, GPUs run this function, or else ``reference``."""
    result_types: Callable[..., list[Any]] = lambda results, **_: results
    """Corrects the abstract values of results that do not have the type of their source."""
    primitive: Any = dataclasses.field(init=False)
    transpose: Record = dataclasses.field(init=False)
    """The transposed exchange, if this exchange is linear in all payload arrays."""
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
    """Return the mesh axes over which results vary even if operands do not vary over them."""
    return () if emulated or group.size == 1 else group.axes


def split_routing(operands: Sequence[Any]) -> tuple[list[Any], RoutingArrays]:
    return list(operands[:-NUM_ROUTING]), RoutingArrays(*operands[-NUM_ROUTING:])
