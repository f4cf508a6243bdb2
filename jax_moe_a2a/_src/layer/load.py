"""Count the rows of each rank and of each expert, for example for a training log."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from .. import scopes
from ..exchange.recv import Recv
from ..exchange.reference import own_rank
from ..placement.types import Placement, check_placement
from ..routing.checks import check_scope
from ..routing.two_level import AnyRouting
from .choose import one_hot
from .sums import sum_counts


@dataclasses.dataclass(frozen=True)
class ExpertLoad:
    """A pytree of int32 arrays: how many rows and choices each expert and each rank has.

    E is the number of experts of all ranks, and R is the number of ranks. All ranks have equal
    arrays. Leading axes are possible, for example for layers or for training steps.
    """

    rows_per_expert: jax.Array
    """[..., E]: number of rows of each expert, without padding and dropped rows."""
    rows_per_rank: jax.Array
    """[..., R]: number of rows of each rank, without padding and dropped rows."""
    dropped_per_rank: jax.Array
    """[..., R]: number of rows that each rank dropped because its capacity was too small."""
    wanted_per_expert: jax.Array
    """[..., E]: number of choices of each expert on all ranks, including dropped choices. Update a
    router's bias with this array, because ``rows_per_expert`` does not include dropped rows."""
    invalid_per_rank: jax.Array
    """[..., R]: number of ids outside [-1, E) of each rank's tokens. Such ids choose no expert. If
    all ranks have the same tokens, only rank 0 counts these ids."""

    @property
    def max_over_mean(self) -> jax.Array:
        """Return the largest load of a rank, divided by the mean load of ranks, [...] float32.

        The load includes dropped rows. The result is 1 if all ranks have the same load, and 0 if no
        rank has load. With a capacity factor of ``max_over_mean`` or more, no row would have been
        dropped.
        """
        return _max_over_mean(self.rows_per_rank + self.dropped_per_rank)

    @property
    def expert_max_over_mean(self) -> jax.Array:
        """Return the largest number of choices of an expert, divided by the mean over experts,
        [...] float32. The choices include dropped choices."""
        return _max_over_mean(self.wanted_per_expert)

    @property
    def entropy(self) -> jax.Array:
        """Return the entropy of the experts' shares of the choices, divided by ``log(E)``, [...]
        float32. It is 1 if all experts have equal shares, and 0 if one expert has all choices. The
        choices include dropped choices."""
        wanted = jnp.asarray(self.wanted_per_expert, jnp.float32)
        shares = wanted / jnp.maximum(wanted.sum(axis=-1, keepdims=True), jnp.float32(1))
        return jax.scipy.special.entr(shares).sum(axis=-1) / math.log(max(shares.shape[-1], 2))

    @property
    def num_idle(self) -> jax.Array:
        """Return the number of experts that no token chose, [...] int32."""
        return (jnp.asarray(self.wanted_per_expert) == 0).sum(axis=-1, dtype=jnp.int32)

    @property
    def dropped_share(self) -> jax.Array:
        """Return the number of dropped rows divided by the number of wanted rows, [...] float32."""
        dropped, rows = (
            jnp.sum(jnp.asarray(array, jnp.float32), axis=-1)
            for array in (self.dropped_per_rank, self.rows_per_rank)
        )
        return dropped / jnp.maximum(dropped + rows, jnp.float32(1))


jax.tree_util.register_dataclass(
    ExpertLoad, [field.name for field in dataclasses.fields(ExpertLoad)], []
)


@scopes.load
def expert_load(recv: Recv | AnyRouting, *, placement: Placement | None = None) -> ExpertLoad:
    """Count the rows of all experts and ranks after a ``dispatch``, on every rank.

    Call ``expert_load`` on every rank, where the group's axes are in scope. The call makes one
    ``lax.psum`` of E + R counts, or of 2E + 3R counts if rows may be dropped.

    Args:
      recv: the result of ``dispatch`` or ``dispatch_done``; or a ``Routing``, for example the
        routing that ``moe_mlp`` received.
      placement: the placement, if the routing has slots in place of experts; else None. With a
        placement, the counts of an expert are sums over the expert's slots.

    Returns:
      An ``ExpertLoad`` with arrays [E], [R], [R], [E] and [R]. Functions under ``jax.jit``,
      ``jax.vmap``, ``lax.scan`` or ``jax.shard_map`` (with ``out_specs=P()``) may return it.

    Raises:
      TypeError: if ``recv`` is neither a ``Recv`` nor a ``Routing``, or its arrays have another
        dtype or shape.
      ValueError: if the group's axes are not in scope, or the placement has other ranks or slots.

    Example:
      Two ranks have two experts each. Expert 0 receives most of the tokens:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      group = ma.Group(axis_name="ep", size=2)
      ids = jnp.array([[[0, 1], [0, 2]], [[0, 1], [0, 3]]])  # [ranks, tokens, choices]

      def on_rank(ids):
          exchange = ma.Exchange(capacity_factor=1.25)
          recv = ma.dispatch(ids, ids, group=group, num_experts=4, exchange=exchange)
          return ma.expert_load(recv)

      load = jax.vmap(on_rank, axis_name="ep", out_axes=None)(ids)
      print(load.rows_per_expert, load.rows_per_rank, load.dropped_per_rank, load.max_over_mean)
      print(load.wanted_per_expert)
      ```

      ```text
      [4 1 1 1] [5 2] [1 0] 1.5
      [4 2 1 1]
      ```
    """
    routing = recv.routing if isinstance(recv, Recv) else recv
    if not isinstance(routing, AnyRouting):
        raise TypeError(
            f"recv must be a Recv, as dispatch returns it, or a Routing; got {type(recv).__name__}"
        )
    group = check_scope(routing.group)
    routing.check("recv")
    if placement is not None:
        check_placement(placement, group.size, or_none=True)
    sizes = group.size, routing.num_experts
    counts = sum_choices(group.axes, columns_of(routing), rows_of(routing), sum(sizes))
    return load_of(counts, sizes, placement)


def most_choices(axes: tuple[str, ...], ids: jax.Array) -> int:
    """Return a number that no count of choices, rows or dropped rows, over all ranks, exceeds."""
    return math.prod(map(lax.axis_size, axes)) * ids.shape[0] * (ids.shape[1] + 1)


def sum_choices(
    axes: tuple[str, ...], columns: jax.Array, rows: jax.Array, num_columns: int
) -> jax.Array:
    """Return one int32 array of sums over mesh axes: first how often each column occurs
    [num_columns], then ``rows``. See ``columns_of`` and ``rows_of``."""
    own = one_hot(columns, num_columns).sum(axis=(0, 1), dtype=jnp.int32)
    return sum_counts(axes, jnp.concatenate([own, rows]), most_choices(axes, columns))


@scopes.load
def columns_of(routing: AnyRouting) -> jax.Array:
    """Return the index of the counter of each choice, int32 [T, K]: e for expert e, E + r for an
    invalid id on rank r, and -1 for no counter. No choice is counted by two ranks."""
    rank, ids, num_experts = own_rank(routing.group), routing.topk_ids, routing.num_experts
    is_valid = (ids >= 0) & (ids < num_experts)
    columns = jnp.where(is_valid, ids, jnp.where(ids == -1, -1, num_experts + rank))
    if routing.replicated:  # all ranks have the same ids
        per_rank = num_experts // routing.group.size
        is_own = jnp.where(is_valid, ids // per_rank == rank, rank == 0)
        columns = jnp.where(is_own, columns, -1)
    return columns


@scopes.load
def rows_of(routing: AnyRouting) -> jax.Array:
    """Return int32 [R * (L + 2)]: L + 2 counts of this rank, and zeros for all other ranks. The
    counts are the rows of each of its L experts, the number of its rows, and its dropped rows.

    If no row can be dropped, the array is empty, because the choices then determine the rows.
    """
    if not routing.may_drop(*routing.topk_ids.shape):
        return jnp.zeros(0, jnp.int32)
    here = routing.group_sizes
    if routing.alignment > 1:
        # In each group, padding follows the rows with a token. Group sizes include the padding.
        row = jnp.arange(routing.capacity, dtype=jnp.int32)[:, None]
        ends = jnp.cumsum(here, dtype=jnp.int32)[None]
        is_row = (routing.row_rank >= 0)[:, None] & (row >= ends - here[None]) & (row < ends)
        here = is_row.sum(axis=0, dtype=jnp.int32)
    rows = jnp.concatenate([here, jnp.stack([routing.num_rows, routing.num_dropped])])
    ranks = jnp.arange(routing.group.size, dtype=jnp.int32)[:, None]
    return jnp.where(ranks == own_rank(routing.group), rows[None], 0).ravel()


@scopes.load
def load_of(counts: jax.Array, sizes: tuple[int, int], placement: Placement | None) -> ExpertLoad:
    """Return the load from ``sum_choices``. ``sizes`` is (R, E), or (R, P) with a placement."""
    num_ranks, num_experts = sizes
    wanted, invalid, rows = jnp.split(counts, (num_experts, num_experts + num_ranks))
    if rows.size:
        rows = rows.reshape(num_ranks, -1)
        per_expert, num_rows, num_dropped = rows[:, :-2].reshape(-1), rows[:, -2], rows[:, -1]
    else:
        per_expert, num_rows = wanted, wanted.reshape(num_ranks, -1).sum(axis=1, dtype=jnp.int32)
        num_dropped = jnp.zeros_like(num_rows)
    if placement is not None:
        per_expert, wanted = (_of_experts(x, placement) for x in (per_expert, wanted))
    return ExpertLoad(per_expert, num_rows, num_dropped, wanted, invalid)


def _of_experts(counts: jax.Array, placement: Placement) -> jax.Array:
    """Return the counts of experts [E], as sums over the counts of their slots [P]."""
    if counts.shape != (placement.num_slots,):
        raise ValueError(
            f"placement must have the {counts.shape[0]} slots that were routed as experts; got "
            f"{placement.num_slots}. Pass the placement of this dispatch"
        )
    slots = jnp.asarray(placement.expert_slots)
    of_replicas = jnp.where(slots >= 0, counts[jnp.maximum(slots, 0)], 0)
    return of_replicas.sum(axis=-1, dtype=jnp.int32)


def _max_over_mean(load: jax.Array) -> jax.Array:
    load = jnp.asarray(load, jnp.float32)
    mean = load.mean(axis=-1)
    return load.max(axis=-1) / jnp.where(mean > 0, mean, jnp.float32(1))
