"""Define a mixture-of-experts layer as a Flax Linen module."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import DTypeLike

import jax_moe_a2a as ma

from ._flax import Activation, Router, ShardedExperts, check_num_experts, shapes_of


class MoE(linen.Module):
    """Route tokens to experts over a mesh axis, and sum the experts' weighted outputs.

    The layer, its parameters and its options are the same as in
    ``jax_moe_a2a.integrations.nnx.MoE``, except that the module infers the size of a token from
    ``x`` at initialization.

    Attributes:
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

    Raises:
      ValueError: if ``num_experts`` is not a multiple of ``group.size``.
    """

    expert_hidden: int
    num_experts: int
    top_k: int
    group: ma.Group
    choose: Router | None = None
    activation: Activation | None = None
    capacity_factor: float | None = None
    data_axes: tuple[str, ...] = ()
    expert_bias: bool = False
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        check_num_experts(self.group, self.num_experts)
        super().__post_init__()

    @linen.compact
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
        shapes = shapes_of(self.num_experts, x.shape[-1], self.expert_hidden)

        def param(name: str) -> jax.Array:
            is_bias = name.startswith("b")
            zeros, normal = linen.initializers.zeros, linen.initializers.lecun_normal(batch_axis=0)
            init = zeros if is_bias else normal
            return self.param(name, init, shapes[name], self.param_dtype).astype(self.dtype)

        router = linen.Dense(
            self.num_experts,
            use_bias=False,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            name="router",
        )
        experts = ShardedExperts(
            self.group,
            self.num_experts,
            self.top_k,
            self.choose,
            self.activation,
            self.capacity_factor,
            self.data_axes,
        )
        biases = (param("b_in"), param("b_out")) if self.expert_bias else None
        x = x.astype(self.dtype)
        return experts(x, router(x), param("w_in"), param("w_out"), biases)
