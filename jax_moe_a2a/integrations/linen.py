"""Define a mixture-of-experts layer as a Flax Linen module."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.typing import ArrayLike, DTypeLike

import jax_moe_a2a as ma

from ._flax import (
    Activation,
    AxesLike,
    Choose,
    Initializer,
    Layer,
    check_module,
    init_moe,
    specs_of,
)


class MoE(linen.Module):
    """A mixture of experts over a mesh axis: routes tokens, and sums the experts' weighted outputs.

    The layer, its parameters and its options are the same as in
    ``jax_moe_a2a.integrations.nnx.MoE``, except that the module infers the size of a token from
    ``x`` at initialization.

    Parameters are ``linen.Partitioned``: they carry their placement, which
    ``linen.get_partition_spec`` returns. Under ``jax.set_mesh``, they are placed so.
    ``linen.scan`` and ``linen.vmap`` over layers therefore need
    ``metadata_params={linen.PARTITION_NAME: None}``, or the name of a mesh axis. ``linen.unbox``
    returns plain arrays, which the module accepts, too.

    With ``select_bias``, the collection ``"router_state"`` has the variable ``select_bias``, which
    ``update_select_bias`` adjusts after a step.

    Attributes:
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

    Raises:
      ValueError: if ``num_experts`` is not a multiple of the size of a ``Group``, or
        ``shared_hidden`` is passed without ``shared_expert``. A call raises the errors of ``moe``.
    """

    expert_hidden: int
    num_experts: int
    choose: Choose
    axes: AxesLike
    activation: Activation | None = None
    bias: bool = False
    select_bias: bool = False
    shared_expert: bool = False
    shared_hidden: int | None = None
    exchange: ma.Exchange | None = None
    experts_format: ma.TokenFormat | None = None
    outputs: tuple[str, ...] = ("logits",)
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    router_dtype: DTypeLike = jnp.float32
    weights_format: ma.BlockwiseFp8 | None = None
    initializer: Initializer | None = None

    def __post_init__(self) -> None:
        check_module(vars(self))
        super().__post_init__()

    @linen.compact
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
        given = vars(self)
        specs, draw = (
            specs_of(x.shape[-1], given),
            partial(init_moe, hidden=x.shape[-1], given=given),
        )
        shapes = jax.eval_shape(draw, jax.random.key(0))
        drawn = draw(self.make_rng("params")) if self.is_initializing() else {}

        def boxed(name: str) -> linen.Partitioned[Any]:
            value = drawn[name] if drawn else jnp.zeros(shapes[name].shape, shapes[name].dtype)
            return linen.Partitioned(value, names=tuple(specs[name]))

        def unboxed(value: Any) -> jax.Array:
            # Without a constraint on the placement, because moe moves arrays where it needs them.
            is_boxed = isinstance(value, linen.Partitioned)
            return value.unbox(apply_constraint=False) if is_boxed else value

        params = {
            name: unboxed(self.param(name, lambda _, name=name: boxed(name), unbox=False))
            for name in shapes
        }
        if self.select_bias:
            zeros = jnp.zeros(self.num_experts, jnp.float32)
            box: Any = linen.Partitioned(zeros, names=tuple(specs["select_bias"]))
            variable = self.variable("router_state", "select_bias", lambda: box, unbox=False)
            params["select_bias"] = unboxed(variable.value)
        return Layer.of(given)(params, self.dtype, locals())
