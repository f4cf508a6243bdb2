"""Define a mixture-of-experts layer as a Flax NNX module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import jax_moe_a2a as ma

from ._flax import Activation, Router, ShardedExperts, check_num_experts, shapes_of


class MoE(nnx.Module):
    """Route tokens to experts over a mesh axis, and sum the experts' weighted outputs.

    An expert is a gated network of two products. Parameters: ``router.kernel`` [H, E], ``w_in``
    [E, H, 2 * I] (gate first), ``w_out`` [E, I, H], and with ``expert_bias`` also ``b_in``
    [E, 2 * I] and ``b_out`` [E, H]. Shard the first dimension of the experts' arrays over the
    group's axes. With Explicit mesh axes, call the module under ``jax.set_mesh``. Mesh axes over
    which Flax or the compiler shards arrays must be Auto.

    Args:
      hidden: H, features of a token.
      expert_hidden: I, width of an expert.
      num_experts: E, number of experts of all ranks together; a multiple of ``group.size``.
      top_k: K, number of experts of each token, at most 32.
      group: the ranks. If the group has no mesh, call the layer under ``jax.set_mesh``.
      choose: a function that maps this rank's logits [T, E] to router weights [T, K] and ids
        [T, K]. None chooses the ``top_k`` highest logits and weighs them by their softmax.
      activation: a function that maps the first product [C, 2 * I] to [C, I]. None means
        ``silu(gate) * up``.
      capacity_factor: rows of a rank as a multiple of the balanced load. None drops no row.
      data_axes: mesh axes over which tokens are split in addition to the group's axes.
      expert_bias: True to add biases to both products.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      rngs: random number streams for the parameters.

    Raises:
      ValueError: if ``num_experts`` is not a multiple of ``group.size``.
    """

    def __init__(
        self,
        hidden: int,
        expert_hidden: int,
        num_experts: int,
        top_k: int,
        group: ma.Group,
        *,
        choose: Router | None = None,
        activation: Activation | None = None,
        capacity_factor: float | None = None,
        data_axes: tuple[str, ...] = (),
        expert_bias: bool = False,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_num_experts(group, num_experts)
        self.router = nnx.Linear(
            hidden, num_experts, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        init = nnx.initializers.lecun_normal(batch_axis=0)
        shapes = shapes_of(num_experts, hidden, expert_hidden)
        self.w_in = nnx.Param(init(rngs.params(), shapes["w_in"], param_dtype))
        self.w_out = nnx.Param(init(rngs.params(), shapes["w_out"], param_dtype))
        if expert_bias:
            self.b_in = nnx.Param(jnp.zeros(shapes["b_in"], param_dtype))
            self.b_out = nnx.Param(jnp.zeros(shapes["b_out"], param_dtype))
        self.expert_bias, self.dtype = expert_bias, dtype
        self.experts = ShardedExperts(
            group, num_experts, top_k, choose, activation, capacity_factor, data_axes
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, ma.ExpertLoad]:
        """Apply the layer to the tokens of all ranks.

        Args:
          x: floats [B, ..., H]. B is split over ``data_axes`` and the group's axes.

        Returns:
          Weighted sums in ``dtype`` with the shape of ``x``, and the ``ExpertLoad``, which counts
          drops.

        Raises:
          ValueError: if B is not a multiple of the number of ranks, or a mesh axis is Explicit and
            no mesh is in scope.
        """
        cast = lambda param: param[...].astype(self.dtype)
        biases = (cast(self.b_in), cast(self.b_out)) if self.expert_bias else None
        x = x.astype(self.dtype)
        return self.experts(x, self.router(x), cast(self.w_in), cast(self.w_out), biases)
