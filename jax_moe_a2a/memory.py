"""What a choice of shapes costs, before it is made; and what a workspace has mapped."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .formats import TokenFormat
from .routing import check_top_k, default_capacity, plan_shapes

RING_DEPTH = 2  # landing zones per operation, so that two exchanges may be in flight
HEADER_BYTES = 6 << 20  # flags, credits and counters in front of them
WEIGHT_BYTES = 4  # of a router weight


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Sizes per rank, in bytes where not said otherwise."""

    capacity: int
    """Rows that ``dispatch`` returns."""
    rows_bytes: int
    """The rows and their weights, 4 bytes a row."""
    routing_bytes: int
    """The integer arrays of one ``Routing``."""
    workspace_bytes: int
    """Landing zones of the CUDA path, shared by all layers of a group."""
    worst_case_capacity: int
    """Rows at which nothing is ever dropped."""
    wire_bytes: int
    """Row bytes expected to leave a rank in one dispatch, if routing is uniform over experts."""
    network_bytes: int = 0
    """Where ranks lie beyond the host, what NVSHMEM is asked for: landing zones in steps of size,
    and as much for what goes out; headers not counted. It takes the place of the workspace; of two
    levels, of that between hosts. 0 but in what ``Group.reserve`` returns, which knows where ranks
    lie."""
    levels: tuple[MemoryEstimate, ...] = ()
    """Of two levels: of the exchange between hosts, whose rows are the relayed tokens, and of that
    within the host. The workspace, the routing and the wire are the sums of both."""

    @property
    def slot_bytes(self) -> int:
        """Landing zones of one exchange: the workspace has ``RING_DEPTH`` of them."""
        return self.workspace_bytes // RING_DEPTH

    def __str__(self) -> str:
        lines = [
            f"capacity:    {self.capacity} rows (worst case {self.worst_case_capacity})",
            f"rows:        {readable(self.rows_bytes)}",
            f"routing:     {readable(self.routing_bytes)}",
            f"workspace:   {readable(self.workspace_bytes)}",
            f"on the wire: {readable(self.wire_bytes)} per exchange, if routing is uniform",
        ]
        if self.network_bytes:
            lines.append(f"by NVSHMEM:  {readable(self.network_bytes)}")
        if self.levels:
            between, within = (readable(level.wire_bytes) for level in self.levels)
            lines += [
                f"relayed:     {readable(self.levels[0].rows_bytes)}",
                f"of the wire: {between} between hosts, {within} within",
            ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What a group has mapped on one of its devices, in bytes: ``mapped_bytes`` is a header, and
    ``ring_depth`` ring slots of ``slot_bytes``, rounded up to the driver's pages."""

    device: jax.Device
    header_bytes: int
    """Flags, credits and counters."""
    slot_bytes: int
    """Landing zones of one exchange: of the largest that was reserved or compiled so far."""
    ring_depth: int
    """Exchanges that may be under way between two ranks."""
    mapped_bytes: int
    """All of it. Outside of XLA's pool."""

    def __str__(self) -> str:
        return (
            f"{self.device}: {readable(self.mapped_bytes)} = header "
            f"{readable(self.header_bytes)} + {self.ring_depth} x landing zones "
            f"{readable(self.slot_bytes)}"
        )


def memory_estimate(
    *,
    num_tokens: int,
    hidden: int,
    top_k: int,
    num_experts: int,
    group_size: int | tuple[int, int],
    dtype: Any = jnp.bfloat16,
    format: Any = None,
    wire_dtype: Any = None,
    capacity: int | None = None,
    alignment: int = 1,
    shared_expert: bool = False,
    replicated: bool = False,
) -> MemoryEstimate:
    """Estimates what one dispatch of ``[num_tokens, hidden]`` per rank takes, per rank.

    Args:
      num_tokens: tokens of each rank; those of the whole batch under ``vmap``.
      hidden: elements of a token.
      top_k: choices of each token, counted as distinct experts where there are enough of them.
      num_experts: experts of all ranks together.
      group_size: ranks; (hosts, ranks of each) for a group of two levels.
      dtype: of a token, and of the sums that come back.
      format, wire_dtype: as in ``dispatch`` and ``combine``.
      capacity: rows at each rank; ``None`` for the worst case.
      alignment, shared_expert, replicated: as in ``dispatch``.

    Raises:
      ValueError: a size out of range, or experts that do not divide by the ranks.
    """
    sizes = dict(num_tokens=num_tokens, hidden=hidden, top_k=top_k)
    for name, value in dict(sizes, capacity=capacity or 0).items():
        if value < 0:
            raise ValueError(f"{name} must not be negative; got {value}")
    hosts, ranks_of_host = group_size if isinstance(group_size, tuple) else (1, group_size)
    num_ranks = hosts * ranks_of_host
    for name, value in dict(group_size=min(hosts, ranks_of_host), alignment=alignment).items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    check_top_k(top_k, shared_expert)
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a positive multiple of group_size={num_ranks}; got {num_experts}"
        )
    modes = dict(shared_expert=shared_expert, replicated=replicated)
    worst_case = default_capacity(num_tokens, top_k, num_ranks, num_experts, alignment, **modes)
    capacity = worst_case if capacity is None else capacity
    row_bytes = _row_bytes(hidden, dtype, format)
    is_format = isinstance(wire_dtype, TokenFormat)
    sum_bytes = _row_bytes(
        hidden,
        dtype if is_format or wire_dtype is None else wire_dtype,
        wire_dtype if is_format else None,
    )
    token_bytes = sum(row_bytes)
    num_choices = top_k + shared_expert

    def of_exchange(
        num_tokens: int,
        num_ranks: int,
        num_choices: int,
        num_local_experts: int,
        capacity: int,
        *,
        chance: float,
        weights: int = num_choices,
    ) -> MemoryEstimate:
        """``chance``: that a token goes to a given rank; ``weights``: that go with it."""
        shapes = plan_shapes(num_tokens, num_choices, num_ranks, num_local_experts, capacity)
        # The largest: rows with weights on the way there, or sums, and the weights' gradient.
        zones = (
            sum(_array_bytes(num_tokens, b) for b in (*rows, weights * WEIGHT_BYTES))
            for rows in (row_bytes, sum_bytes)
        )
        landing_bytes = num_ranks * max(zones) if num_ranks > 1 else 0
        return MemoryEstimate(
            capacity=capacity,
            rows_bytes=capacity * (token_bytes + WEIGHT_BYTES),
            routing_bytes=4 * (sum(math.prod(shape) for shape in shapes.values()) + 1),
            workspace_bytes=RING_DEPTH * landing_bytes,
            worst_case_capacity=worst_case,
            wire_bytes=round(num_tokens * (num_ranks - 1) * chance * token_bytes),
        )

    num_local_experts = num_experts // num_ranks
    here = num_local_experts + shared_expert
    chance = chance_of_rank(top_k, num_experts, num_local_experts)
    if replicated:
        return of_exchange(num_tokens, 1, num_choices, here, capacity, chance=chance)
    if not isinstance(group_size, tuple):
        return of_exchange(num_tokens, num_ranks, num_choices, here, capacity, chance=chance)
    most_hosts = min(num_choices, hosts)
    between = of_exchange(
        num_tokens,
        hosts,
        most_hosts,
        1,
        hosts * num_tokens,
        chance=chance_of_rank(top_k, num_experts, num_experts // hosts),
        weights=most_hosts * num_choices,
    )
    within = of_exchange(
        hosts * num_tokens, num_ranks // hosts, num_choices, here, capacity, chance=chance
    )
    return dataclasses.replace(
        within,
        # What a relayed token is at its source is said of each row besides.
        routing_bytes=between.routing_bytes + within.routing_bytes + 4 * capacity,
        workspace_bytes=between.workspace_bytes + within.workspace_bytes,
        wire_bytes=between.wire_bytes + within.wire_bytes,
        levels=(between, within),
    )


def _row_bytes(hidden: int, dtype: Any, format: TokenFormat | None) -> list[int]:
    """Bytes of a row: of its values and of its scales, where it is quantized."""
    if format is None:
        return [hidden * jnp.dtype(dtype).itemsize]
    token = jax.ShapeDtypeStruct((1, hidden), dtype)
    parts = jax.eval_shape(format.travelling.encode, token)
    return [part.size * part.dtype.itemsize for part in jax.tree.leaves(parts)]


def _array_bytes(num_slots: int, row_bytes: int) -> int:
    """Bytes that landed rows of one payload array take: ``array_bytes`` of ``cuda/layout.h``."""
    return -(-num_slots * (-(-row_bytes // 16) * 16) // 128) * 128


def chance_of_rank(top_k: int, num_experts: int, num_local_experts: int) -> float:
    """How likely a token has any of its experts on a given rank."""
    elsewhere = num_experts - num_local_experts
    if top_k > num_experts:  # experts must repeat: take them as independent
        return 1 - (elsewhere / num_experts) ** top_k
    return 1 - math.comb(elsewhere, top_k) / math.comb(num_experts, top_k)


def readable(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
