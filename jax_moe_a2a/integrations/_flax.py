"""Choose and apply experts inside ``jax.shard_map``, for the Flax modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
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
        axis = self.group.axis_name
        tokens = P((*self.data_axes, *((axis,) if isinstance(axis, str) else axis)))
        layer = jax.shard_map(
            self._on_rank,
            mesh=self.group.mesh,
            in_specs=(tokens, tokens, P(axis), P(axis), P(axis)),
            out_specs=(tokens, P()),
        )
        return layer(x, logits, w_in, w_out, biases)

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
