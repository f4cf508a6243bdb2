"""Define ``Exchange``: how tokens travel to their experts and back."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.typing import DTypeLike

from ..checks import check_bool, check_factor, check_int
from ..formats.formats import TokenFormat, as_wire_dtype
from .capacity import Sizes

KEEP_ALL = ". Omit {} to drop no row"  # for users who pass -1, as in some libraries


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Exchange:
    """The options of an exchange: how tokens travel to their experts and back.

    Functions that exchange tokens have an argument ``exchange``, and None stands for
    ``Exchange()``. ``route`` reads only ``capacity``, ``capacity_factor``, ``alignment`` and
    ``replicated``. With a ``Routing`` in place of ids, omit these options, or pass equal values.
    ``dataclasses.replace`` changes options.

    An ``Exchange`` is a pytree, so it may be an argument of a function under ``jax.jit``. Its only
    leaf is ``token_format.global_scale`` if that is an array. All other options are static. Without
    this leaf, an ``Exchange`` is hashable.

    Attributes:
      capacity: number of rows of each rank, or None for the worst case, which drops nothing. Rows
        that do not fit are dropped and counted. The last choices of all tokens are dropped first.
      capacity_factor: capacity as a multiple of the balanced load, in place of ``capacity``. The
        load is balanced if every rank receives the same number of rows: ``num_tokens * top_k``, or
        with replicated tokens ``num_tokens * top_k / group.size``. Padding for ``alignment`` is
        added. The capacity is at most the worst case. In GShard (arXiv:2006.16668), Switch and
        MaxText, the factor limits the rows of each expert. The load of an expert varies more than
        the load of a rank. Therefore a smaller factor is sufficient in this package.
      alignment: the rows of each local expert start at a multiple of this number. None means 1.
      replicated: True if all ranks have the same tokens, ids and weights (tensor parallelism). Then
        no token travels, and each rank makes the rows of its experts. Apply ``lax.psum`` to the
        result of ``combine`` or ``moe_mlp`` to complete the sums. None means False. ``moe`` applies
        ``lax.psum`` itself, and None there means that the number of tokens decides. Use True for
        inference with few tokens.
      wire_dtype: dtype or token format of partial sums while they travel, as in ``combine``. It
        applies to the sums of a layer's result and of the gradient of the tokens. None means the
        dtype of each array.
      token_format: the format in which tokens travel to their experts: ``BlockwiseFp8()``,
        ``MxFp8()`` or ``NvFp4(...)``. None sends tokens unchanged; layers whose products are in FP8
        then use ``BlockwiseFp8``. Tokens must be bfloat16, float16 or float32 [T, ..., H], and H a
        multiple of the format's group size. Products in FP8 read rows in ``BlockwiseFp8`` directly.
        Layers decode rows in other formats. The gradient is the same as without a format.
      num_chunks: for layers only: number of chunks into which each rank's tokens are divided. The
        chunks run one after the other, each under ``jax.checkpoint``. None means 1. Only one chunk
        at a time needs memory for its rows, so a worst-case capacity needs about ``1/num_chunks``
        of the memory. In ``moe_mlp``, the number must divide the number of tokens. Each chunk has a
        separate routing, so ``capacity`` and ``capacity_factor`` apply to a chunk, and a
        ``Routing`` is not accepted. The backward pass dispatches each chunk again, so a chunk makes
        two exchanges forward and three backward. Gradients of weights and biases are summed over
        chunks in float32, and rounded once.

    Example:
      This program prints the capacity for 1.25 times the balanced load of 1,024 tokens with 8
      choices. The second line also aligns the rows of 8 local experts:

      ```python
      import jax_moe_a2a as ma

      exchange = ma.Exchange(capacity_factor=1.25)
      aligned = ma.Exchange(capacity_factor=1.25, alignment=128)
      for e in exchange, aligned:
          print(e, e.rows_per_rank(1024, 8, group_size=4, num_experts=32))
      ```

      ```text
      Exchange(capacity_factor=1.25) 10240
      Exchange(capacity_factor=1.25, alignment=128) 11264
      ```
    """

    capacity: int | None = None
    capacity_factor: float | None = None
    alignment: int | None = None
    replicated: bool | None = None
    wire_dtype: DTypeLike | TokenFormat | None = None
    token_format: TokenFormat | None = None
    num_chunks: int | None = None

    def __post_init__(self) -> None:
        checks: dict[str, Any] = dict(
            capacity=partial(check_int, least=0, remedy=KEEP_ALL.format("capacity")),
            capacity_factor=partial(check_factor, remedy=KEEP_ALL.format("capacity_factor")),
            alignment=partial(check_int, least=1),
            replicated=check_bool,
            wire_dtype=lambda _, value: as_wire_dtype(value),
            token_format=_check_format,
            num_chunks=partial(check_int, least=1),
        )
        for name, value in self._given().items():
            object.__setattr__(self, name, checks[name](name, value))
        if self.capacity is not None and self.capacity_factor is not None:
            raise ValueError(
                f"capacity must be None with a capacity_factor; got {self.capacity} and "
                f"{self.capacity_factor}. Pass one of them"
            )

    def __repr__(self) -> str:
        shown = {name: getattr(value, "name", value) for name, value in self._given().items()}
        return f"Exchange({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def _given(self) -> dict[str, Any]:
        """Return the options that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def rows_per_rank(
        self, num_tokens: int, top_k: int, *, group_size: int, num_experts: int
    ) -> int:
        """Return the capacity: the number of rows that each rank reserves. Without ``capacity`` and
        ``capacity_factor``, this is the worst case: all tokens choose only experts of one rank.

        Args:
          num_tokens: number of tokens of each rank, or of each chunk with ``num_chunks``.
          top_k: number of choices of each token.
          group_size: number of ranks.
          num_experts: number of experts of all ranks together.
        """
        own = self.alignment or 1, bool(self.replicated)
        rows = Sizes(num_tokens, top_k, group_size, num_experts, *own).rows(self.capacity_factor)
        return rows if self.capacity is None else self.capacity


_STATIC = [f.name for f in dataclasses.fields(Exchange) if f.name != "token_format"]
jax.tree_util.register_dataclass(Exchange, ["token_format"], _STATIC)


def without_capacity(exchange: Exchange) -> Exchange:
    return dataclasses.replace(exchange, capacity=None, capacity_factor=None)


def check_exchange(exchange: Any, *, has_chunks: bool = False) -> Exchange:
    """Return the checked argument ``exchange``. Only layers accept ``num_chunks``."""
    if exchange is None:
        return Exchange()
    if not isinstance(exchange, Exchange):
        raise TypeError(
            f"exchange must be an Exchange or None; got {exchange!r}. Pass its options as "
            "ma.Exchange(...)"
        )
    if exchange.num_chunks is not None and not has_chunks:
        raise ValueError(
            "num_chunks must be None for a single exchange; got "
            f"{exchange.num_chunks}. Only moe_mlp and moe run in chunks: omit it, or call it for "
            "the tokens of each chunk"
        )
    return exchange


def _check_format(name: str, value: object) -> TokenFormat:
    if not isinstance(value, TokenFormat):
        raise TypeError(f"{name} must be a BlockwiseFp8, an MxFp8, an NvFp4 or None; got {value!r}")
    return value
