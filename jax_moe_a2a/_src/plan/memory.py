"""Estimate the memory of an exchange, and describe the memory that a workspace has mapped."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..formats.formats import NvFp4, TokenFormat
from .capacity import check_top_k
from .options import Exchange, check_exchange, without_capacity
from .plan import plan_shapes

RING_DEPTH = 2  # number of ring halves; exchanges use the halves in turn
HEADER_BYTES = 10 << 20  # flags, credits and counters, before the ring
WEIGHT_BYTES = 4  # bytes of a router weight


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory that one exchange needs on each rank."""

    capacity: int
    """Number of rows that ``dispatch`` returns."""
    rows_bytes: int
    """Bytes of the rows and their weights (4 bytes per row)."""
    routing_bytes: int
    """Bytes of the integer arrays of one routing, over all levels."""
    workspace_bytes: int
    """Bytes of the workspace on the CUDA path, without its header. All layers of a group share the
    workspace. With two levels, the number is for the workspace within a host."""
    worst_case_capacity: int
    """The smallest capacity that never drops a row."""
    collective_bytes: int = 0
    """With two levels: bytes of the buffers of XLA's collective between hosts. They are in XLA's
    memory pool during an exchange."""
    levels: tuple[MemoryEstimate, ...] = ()
    """With two levels: the estimates of the exchange between hosts and of the exchange within a
    host. The exchange between hosts returns relayed tokens as rows. If the kernels do not run
    between hosts, the first level's ``workspace_bytes`` are not needed."""

    @property
    def half_bytes(self) -> int:
        """Return the size of a ring half in bytes."""
        return self.workspace_bytes // RING_DEPTH

    def __str__(self) -> str:
        lines = [
            f"capacity:    {self.capacity} rows (worst case {self.worst_case_capacity})",
            f"rows:        {readable(self.rows_bytes)}",
            f"routing:     {readable(self.routing_bytes)}",
            f"workspace:   {readable(self.workspace_bytes)}",
        ]
        if self.levels:
            if self.collective_bytes:
                lines.append(f"collectives: {readable(self.collective_bytes)} between hosts")
            lines.append(f"relayed:     {readable(self.levels[0].rows_bytes)}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory that a group's workspace has mapped on a device, in bytes."""

    device: jax.Device
    header_bytes: int
    """Bytes of flags, credits and counters."""
    half_bytes: int
    """Bytes of a ring half, for the largest exchange that was reserved or compiled until now."""
    ring_depth: int
    """Number of ring halves, which exchanges use in turn."""
    mapped_bytes: int
    """Bytes of the header and of ``ring_depth`` ring halves, rounded up to the driver's pages. This
    memory is outside XLA's pool."""

    def __str__(self) -> str:
        return (
            f"{self.device}: {readable(self.mapped_bytes)} = header "
            f"{readable(self.header_bytes)} + {self.ring_depth} x landing zones "
            f"{readable(self.half_bytes)}"
        )


def memory_estimate(
    num_tokens: int,
    hidden: int,
    top_k: int,
    *,
    num_experts: int,
    group_size: int | tuple[int, int],
    dtype: DTypeLike = jnp.bfloat16,
    exchange: Exchange | None = None,
) -> MemoryEstimate:
    """Estimate the memory that one dispatch of ``[num_tokens, hidden]`` needs on each rank.

    Args:
      num_tokens: tokens of each rank; under ``vmap``, the tokens of the whole batch.
      hidden: elements of a token.
      top_k: choices of each token.
      num_experts: number of experts of all ranks together, a multiple of the number of ranks.
      group_size: number of ranks, or (hosts, ranks per host) for a group of two levels.
      dtype: dtype of the tokens, and of the sums that ``combine`` returns.
      exchange: an ``Exchange`` without chunks, which says how tokens travel.

    Returns:
      A ``MemoryEstimate``; print it for a summary.

    Example:
      Each of four ranks reserves 40,000 rows instead of the worst case:

      ```python
      import jax_moe_a2a as ma

      sizes = dict(num_tokens=4096, hidden=7168, top_k=8, num_experts=256)
      exchange = ma.Exchange(capacity=40_000)
      print(ma.memory_estimate(**sizes, group_size=4, exchange=exchange))
      ```

      ```text
      capacity:    40000 rows (worst case 131072)
      rows:        547.0 MiB
      routing:     1.5 MiB
      workspace:   449.0 MiB
      ```
    """
    sizes = dict(num_tokens=num_tokens, hidden=hidden, top_k=top_k)
    for name, value in sizes.items():
        if value < 0:
            raise ValueError(f"{name} must be at least 0; got {value}")
    hosts, ranks_of_host = group_size if isinstance(group_size, tuple) else (1, group_size)
    num_ranks = hosts * ranks_of_host
    if min(hosts, ranks_of_host) < 1:
        raise ValueError(f"group_size must be at least 1; got {group_size}")
    exchange = check_exchange(exchange)
    replicated = bool(exchange.replicated)
    check_top_k(top_k)
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of group_size={num_ranks}; got {num_experts}"
        )
    worst_case, capacity = (
        each.rows_per_rank(num_tokens, top_k, group_size=num_ranks, num_experts=num_experts)
        for each in (without_capacity(exchange), exchange)
    )
    fmt, wire_dtype = exchange.token_format, exchange.wire_dtype
    row_bytes = _row_bytes(hidden, dtype, fmt)
    sum_bytes = _row_bytes(
        hidden,
        dtype if isinstance(wire_dtype, TokenFormat | None) else wire_dtype,
        wire_dtype if isinstance(wire_dtype, TokenFormat) else None,
    )
    has_token_scales = fmt is not None and fmt.token_scales is not None
    token_bytes = sum(row_bytes) + has_token_scales * WEIGHT_BYTES
    # If the kernels do not decode rows, they send a token's global scale once for each choice.
    row_bytes.append(has_token_scales * top_k * WEIGHT_BYTES)

    def of_exchange(
        num_tokens: int,
        num_ranks: int,
        num_choices: int,
        num_local_experts: int,
        capacity: int,
        *,
        weights: int = top_k,
        num_ids: int = num_tokens * top_k,
    ) -> MemoryEstimate:
        """Estimate one level, with ``weights`` weights per token and ``num_ids`` ids."""
        shapes = plan_shapes(num_tokens, num_choices, num_ranks, num_local_experts, capacity)
        # A dispatch sends rows and weights. A combine sends sums and gradients of weights.
        zones = (
            sum(_array_bytes(num_tokens, b) for b in (*rows, weights * WEIGHT_BYTES))
            for rows in (row_bytes, sum_bytes)
        )
        landing_bytes = num_ranks * max(zones) if num_ranks > 1 else 0
        return MemoryEstimate(
            capacity=capacity,
            rows_bytes=capacity * (token_bytes + WEIGHT_BYTES),
            routing_bytes=4 * (sum(math.prod(shape) for shape in shapes.values()) + 1 + num_ids),
            workspace_bytes=RING_DEPTH * landing_bytes,
            worst_case_capacity=worst_case,
        )

    num_local_experts = num_experts // num_ranks
    if replicated or not isinstance(group_size, tuple):
        num_ranks = 1 if replicated else num_ranks
        return of_exchange(num_tokens, num_ranks, top_k, num_local_experts, capacity)
    relayed, most_hosts = hosts * num_tokens, min(top_k, hosts)
    weights = most_hosts * top_k
    between = of_exchange(num_tokens, hosts, most_hosts, 1, relayed, weights=weights)
    in_host = relayed, ranks_of_host, top_k, num_local_experts, capacity
    within = of_exchange(*in_host, num_ids=0)
    # A buffer of XLA's collective contains rows and weights, or sums and gradients of weights.
    buffer_bytes = max(token_bytes, sum(sum_bytes)) + weights * WEIGHT_BYTES
    return dataclasses.replace(
        within,
        # ``within.routing_bytes`` includes the index of each row's relayed token. The index of the
        # original token, ``row_token``, needs 4 more bytes per row.
        routing_bytes=between.routing_bytes + within.routing_bytes + 4 * capacity,
        collective_bytes=2 * relayed * buffer_bytes if hosts > 1 else 0,
        levels=(between, within),
    )


def _row_bytes(hidden: int, dtype: DTypeLike, fmt: TokenFormat | None) -> list[int]:
    """Return the bytes of a row: [values], or [values, scales] with a token format."""
    if fmt is None:
        return [hidden * jnp.dtype(dtype).itemsize]
    token = jax.ShapeDtypeStruct((1, hidden), dtype)
    if isinstance(fmt, NvFp4):
        fmt = NvFp4()  # the size does not depend on the global scale
    parts = jax.eval_shape(fmt.encode, token)
    return [part.size * part.dtype.itemsize for part in jax.tree.leaves(parts)]


def _array_bytes(num_slots: int, row_bytes: int) -> int:
    """Return the bytes of a payload array in its slots, like ``array_bytes`` in cuda/layout.h."""
    return -(-num_slots * (-(-row_bytes // 16) * 16) // 128) * 128


def readable(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
