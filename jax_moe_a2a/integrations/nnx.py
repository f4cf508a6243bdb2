"""Define a mixture-of-experts layer as a Flax NNX module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import jax_moe_a2a as ma

from ._flax import AxesLike, Fp8, Layer, mesh_in_scope


class SelectBias(nnx.Variable):
    """The selection bias of a router, which is not an ``nnx.Param``, because it has no gradient."""


class MoE(nnx.Module):
    """A mixture-of-experts layer: a Flax NNX module that stores the parameters of ``moe``.

    A call of the module calls ``moe``, whose documentation describes the layer. The parameters are
    ``router_kernel`` [H, E], ``w_in`` [E, H, 2, I] (gate at index 0) and ``w_out`` [E, I, H]. If
    ``config`` has a bias, the parameters include ``router_bias`` [E], ``b_in`` [E, 2, I] and
    ``b_out`` [E, H]. If ``config`` has a shared expert, the parameters include ``shared_w_in`` [H,
    2, J], ``shared_w_out`` [J, H] and, with ``shared_gate``, ``shared_output_gate`` [H]. With
    ``select_bias``, the module has a variable ``select_bias`` [E] of type ``SelectBias``, which is
    not an ``nnx.Param``. Update it after each training step::

        load = statistics.load.wanted_per_expert
        model.select_bias[...] = ma.update_select_bias(model.select_bias[...], load, rate=1e-3)

    The metadata of each parameter has its placement (``moe_partition_specs``). If the module is
    created under ``jax.set_mesh``, its parameters get this placement, unless Flax's eager sharding
    is off. Call the module under ``jax.set_mesh``, or pass a ``Group`` with a mesh of Auto axes.

    Args:
      config: sizes, router and activation, a ``MoEConfig``. It also sets the parameters' dtypes.
      axes: as in ``moe``. ``moe_partition_specs`` returns the placements of the parameters for
        these axes.
      select_bias: True to choose experts with the variable ``select_bias``, which starts at 0.
      exchange: how tokens travel, an ``Exchange``, as in ``moe``.
      outputs: as in ``moe``, but ``("logits",)`` by default.
      dtype: dtype of the result, and of the tokens and weights in the experts.
      fp8: None; ``"train"`` to train the experts with products in FP8 (``Experts.in_fp8``); or
        ``"frozen"`` to store their weights in FP8 for inference. With ``"frozen"``, ``w_in`` and
        ``w_out`` are the values of ``QuantizedExperts``, and the module also has ``w_in_scales``
        and ``w_out_scales``.
      rngs: random number streams for the parameters.

    Raises:
      TypeError: if ``config`` is not a ``MoEConfig``.
      ValueError: if ``fp8`` has another value. A call raises the errors of ``moe``.
    """

    def __init__(
        self,
        config: ma.MoEConfig,
        axes: AxesLike,
        *,
        select_bias: bool = False,
        exchange: ma.Exchange | None = None,
        outputs: tuple[str, ...] = ("logits",),
        dtype: DTypeLike = jnp.float32,
        fp8: Fp8 | None = None,
        rngs: nnx.Rngs,
    ):
        self.layer = Layer(config, axes, exchange, outputs, dtype, fp8)
        specs = self.layer.specs()
        # If no mesh is in scope, Flax cannot place the parameters.
        options = {} if mesh_in_scope() else {"eager_sharding": False}
        for name, param in self.layer.init(rngs.params()).items():
            # Use P(None), because Flax would not add an axis of layers to an empty P().
            spec = specs[name] or P(None)
            setattr(self, name, nnx.Param(param, out_sharding=spec, **options))
        zeros = jnp.zeros(config.num_experts, jnp.float32)
        bias = SelectBias(zeros, out_sharding=P(None), **options) if select_bias else None
        self.select_bias: SelectBias | None = bias

    @property
    def experts(self) -> ma.Experts:
        """Return the module's experts, cast to ``dtype``."""
        return self.layer.experts(self._arrays())

    def __call__(self, x: jax.Array, **options: Any) -> tuple[jax.Array, ma.MoEStatistics]:
        """Apply the layer to the tokens of all ranks.

        Args:
          x: floats [..., H].
          **options: ``mask``, ``router_input`` and ``placement`` as in ``moe``; ``per_token`` and
            ``whole`` as in ``Router``; ``replay``, the ids of ``Router.replay``; and ``experts``,
            in ``dtype``, in place of the module's experts. A placement must have the home form,
            because the module has the weights of E experts, not of P slots. To quantize only once
            for several calls, pass ``experts=ma.quantize_experts(model.experts, trainable=True)``.

        Returns:
          The output in ``dtype`` with the shape of ``x``, and ``MoEStatistics`` with the losses,
          the load and the arrays in ``outputs``.
        """
        bias = None if self.select_bias is None else self.select_bias[...]
        return self.layer(self._arrays(), x, select_bias=bias, **options)

    def _arrays(self) -> dict[str, jax.Array]:
        return {name: p[...] for name, p in vars(self).items() if isinstance(p, nnx.Param)}
