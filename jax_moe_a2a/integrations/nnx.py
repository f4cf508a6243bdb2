"""Define a mixture-of-experts layer as a Flax NNX module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

import jax_moe_a2a as ma

from ._flax import (
    PARAMETERS,
    Activation,
    AxesLike,
    Choose,
    Initializer,
    Layer,
    check_module,
    init_moe,
    mesh_in_scope,
    specs_of,
)


class SelectBias(nnx.Variable):
    """The variable of a router's selection bias, which is no parameter: it has no gradient."""


class MoE(nnx.Module):
    """A mixture of experts over a mesh axis: routes tokens, and sums the experts' weighted outputs.

    The module holds the parameters of ``moe`` and applies it, so the layer is described there, and
    all its options are here. An expert is a gated network of two products. Parameters:
    ``router`` [H, E], ``w_gate_up`` [E, H, 2, I] (gate at index 0), ``w_down`` [E, I, H]; with
    ``bias`` also ``router_bias`` [E], ``b_gate_up`` [E, 2, I] and ``b_down`` [E, H]; and with
    ``shared_expert`` also ``shared_gate_up`` [H, 2, J] and ``shared_down`` [J, H]. With
    ``select_bias``, the module has a variable ``select_bias`` [E] of type ``SelectBias``, which is
    not an ``nnx.Param``. Update it after a step::

        load = statistics.load.wanted_per_expert
        model.select_bias[...] = ma.update_select_bias(model.select_bias[...], load, rate=1e-3)

    Parameters carry their placement as metadata, which ``nnx.get_partition_spec`` returns
    (``moe_partition_specs``). Under ``jax.set_mesh``, they are placed so when the module is made,
    unless Flax's eager sharding is off. Call the module under ``jax.set_mesh``, or pass a ``Group``
    with a mesh of Auto axes.

    Args:
      hidden: H, features of a token.
      expert_hidden: I, width of an expert.
      num_experts: E, number of experts of all ranks together; a multiple of the group's size.
      choose: a ``TopK``, or a function, as in ``Router``.
      axes: as in ``moe``. Parameters are stored where ``moe_partition_specs`` says.
      activation: as in ``moe``. None means ``silu(gate) * up``.
      bias: True to add biases to the router and to both products of the experts.
      select_bias: True to choose experts with the variable ``select_bias``, which starts at 0.
      shared_expert: True to add an expert that all tokens have.
      shared_hidden: J, width of the shared expert; None means ``expert_hidden``.
      exchange: how tokens travel, an ``Exchange``, as in ``moe``.
      experts_format: as in ``moe``.
      outputs: as in ``moe``, but ``("logits",)`` by default.
      dtype: dtype of the experts' computation and of the result.
      param_dtype: dtype of the experts' parameters.
      router_dtype: dtype of the router's parameters.
      weights_format: ``BlockwiseFp8()`` to hold ``w_gate_up`` and ``w_down`` in FP8 for inference:
        the values of ``QuantizedExperts``, with ``w_gate_up_scales`` and ``w_down_scales`` as
        further parameters; or None.
      initializer: as in ``init_moe``.
      rngs: random number streams for the parameters.

    Raises:
      TypeError: if a size is not an int.
      ValueError: if ``num_experts`` is not a multiple of the size of a ``Group``, or
        ``shared_hidden`` is passed without ``shared_expert``. A call raises the errors of ``moe``.
    """

    def __init__(
        self,
        hidden: int,
        expert_hidden: int,
        num_experts: int,
        choose: Choose,
        axes: AxesLike,
        *,
        activation: Activation | None = None,
        bias: bool = False,
        select_bias: bool = False,
        shared_expert: bool = False,
        shared_hidden: int | None = None,
        exchange: ma.Exchange | None = None,
        experts_format: ma.TokenFormat | None = None,
        outputs: tuple[str, ...] = ("logits",),
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        router_dtype: DTypeLike = jnp.float32,
        weights_format: ma.BlockwiseFp8 | None = None,
        initializer: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        given = dict(locals())
        check_module(given)
        # Flax removes the axis of layers from metadata, but adds none to metadata without axes.
        specs = {name: spec or P(None) for name, spec in specs_of(hidden, given).items()}
        # Without a mesh in scope, the placement is metadata only.
        options = {} if mesh_in_scope() else {"eager_sharding": False}
        for name, param in init_moe(rngs.params(), hidden, given).items():
            setattr(self, name, nnx.Param(param, out_sharding=specs[name], **options))
        if select_bias:
            zeros = jnp.zeros(num_experts, jnp.float32)
            spec = specs["select_bias"]
            self.select_bias = SelectBias(zeros, out_sharding=spec, **options)
        self.layer, self.dtype = Layer.of(given), dtype

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: ArrayLike | None = None,
        router_input: ArrayLike | None = None,
        replay: ArrayLike | None = None,
        per_token: Any = None,
        whole: Any = None,
        shared_weights: ArrayLike | None = None,
        quantized: tuple[ma.QuantizedExperts, ma.QuantizedExperts] | None = None,
        placement: ma.Placement | None = None,
    ) -> tuple[jax.Array, ma.MoEStatistics]:
        """Apply the layer to the tokens of all ranks.

        Args:
          x: floats [..., H].
          mask: as in ``moe``.
          router_input: as in ``moe``.
          replay: ids of the experts to use, as in ``Router.replay``; or None.
          per_token: arrays for the function ``choose``, as in ``Router``.
          whole: arrays for the function ``choose``, as in ``Router``.
          shared_weights: as in ``moe``.
          quantized: as in ``moe``, of the parameters in ``dtype``.
          placement: as in ``moe``, in the home form, because parameters have E experts.

        Returns:
          Weighted sums in ``dtype`` with the shape of ``x``; and ``MoEStatistics`` with the losses,
          the load, which counts drops, and ``outputs``.
        """
        params = {name: getattr(self, name)[...] for name in PARAMETERS if hasattr(self, name)}
        return self.layer(params, self.dtype, locals())
