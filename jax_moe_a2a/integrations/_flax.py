"""Choose and apply experts inside ``jax.shard_map``, for the Flax modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

Activation = Callable[[jax.Array], jax.Array]
Router = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def softmax_of_top_k(logits: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Return router weights [T, K] (the softmax of the highest logits) and ids [T, K]."""
    top_logits, topk_ids = lax.top_k(logits.astype(jnp.float32), top_k)
    return jax.nn.softmax(top_logits), topk_ids


def shapes_of(num_experts: int, hidden: int, expert_hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the experts' parameters, for the experts of all ranks together."""
    return {
        "w_in": (num_experts, hidden, 2 * expert_hidden),
        "w_out": (num_experts, expert_hidden, hidden),
        "b_in": (num_experts, 2 * expert_hidden),
        "b_out": (num_experts, hidden),
    }


def check_num_experts(group: ma.Group, num_experts: int) -> None:
    """Raise an error if the ranks of a module cannot have equally many experts."""
    if num_experts % group.size:
        fewer = num_experts // group.size * group.size
        near = [number for number in (fewer, fewer + group.size) if number]
        raise ValueError(
            f"num_experts must be a multiple of the group's size {group.size}; got {num_experts}. "
            f"Use {' or '.join(map(str, near))}"
        )


@dataclasses.dataclass(frozen=True)
class ShardedExperts:
    """Hold the options of a module's experts, and apply the experts."""

    group: ma.Group
    num_experts: int
    top_k: int
    choose: Router | None
    activation: Activation | None
    capacity_factor: float | None
    data_axes: tuple[str, ...]

    def __call__(
        self,
        x: jax.Array,
        logits: jax.Array,
        w_in: jax.Array,
        w_out: jax.Array,
        biases: tuple[jax.Array, ...] | None,
    ) -> tuple[jax.Array, ma.ExpertLoad]:
        """Return the weighted sum of expert outputs for each token, and the load.

        Args:
          x: tokens of all ranks, [B, ..., H]; B is split over ``data_axes`` and the group's axes.
          logits: [B, ..., E].
          w_in: [E, H, 2 * I], split over the group's axes.
          w_out: [E, I, H], split over the same axes.
          biases: None, or [E, 2 * I] and [E, H], split over the same axes.

        Returns:
          Sums with the shape of ``x``, and the load of all experts and ranks, summed over
          ``data_axes``.
        """
        tokens, experts = (*self.data_axes, *self.group.axes), self.group.axes
        layer = jax.shard_map(
            self._on_rank,
            mesh=self.group.mesh,
            in_specs=(P(tokens), P(tokens), P(experts), P(experts), P(experts)),
            out_specs=(P(tokens), P()),
        )
        return layer(
            *self._placed((x, logits), tokens), *self._placed((w_in, w_out, biases), experts)
        )

    def _placed(self, arrays: Any, axes: tuple[str, ...]) -> Any:
        """Return arrays whose first dimension is split over those of the axes that are Explicit.

        Over Explicit axes, an array's type has its placement, and ``shard_map`` refuses another
        one. Over Auto axes, the compiler moves arrays.
        """
        here = jax.sharding.get_abstract_mesh()
        mesh = self.group.mesh or here
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        axes = tuple(axis for axis in axes if types.get(axis) is AxisType.Explicit)
        if not axes:
            return arrays
        if here.empty:
            raise ValueError(
                f"a module over Explicit mesh axes needs the mesh in scope; got {self.group} with "
                f"the Explicit axes {axes}, and no mesh. Call the module under jax.set_mesh(mesh), "
                "or make the mesh with jax.sharding.AxisType.Auto"
            )
        place = NamedSharding(mesh, P(axes))
        return jax.tree.map(lambda array: jax.sharding.reshard(array, place), arrays)

    def _on_rank(
        self,
        x: jax.Array,
        logits: jax.Array,
        w_in: jax.Array,
        w_out: jax.Array,
        biases: tuple[jax.Array, ...] | None,
    ) -> tuple[jax.Array, ma.ExpertLoad]:
        logits = logits.reshape(-1, self.num_experts)
        if self.choose is None:
            topk_weights, topk_ids = softmax_of_top_k(logits, self.top_k)
        else:
            topk_weights, topk_ids = self.choose(logits)
        routing = ma.route(
            topk_ids,
            group=self.group,
            num_experts=self.num_experts,
            capacity_factor=self.capacity_factor,
        )
        b_in, b_out = (None, None) if biases is None else biases
        y = ma.moe_mlp(
            x.reshape(-1, x.shape[-1]),
            routing,
            topk_weights,
            w_in,
            w_out,
            activation=self.activation or ma.gated(jax.nn.silu),
            b_in=b_in,
            b_out=b_out,
        )
        load = ma.expert_load(routing)
        return y.reshape(x.shape), lax.psum(load, self.data_axes) if self.data_axes else load
