"""Define a mixture-of-experts layer as a Flax Linen module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import jax_moe_a2a as ma

from ._flax import AxesLike, Fp8, Layer, named


class MoE(linen.Module):
    """A Linen module with the layer of ``jax_moe_a2a.integrations.nnx.MoE``.

    ``nnx.MoE`` describes the attributes and the names of the parameters. In Linen, each parameter
    is a ``linen.Partitioned``, which contains its placement (``linen.get_partition_spec`` returns
    it). ``linen.scan`` and ``linen.vmap`` over layers therefore need
    ``metadata_params={linen.PARTITION_NAME: None}``, or a mesh axis in place of None. The module
    also accepts the arrays that ``linen.unbox`` returns. With ``select_bias``, the variable
    ``select_bias`` is in the collection ``"router_state"``.
    """

    config: ma.MoEConfig
    axes: AxesLike
    select_bias: bool = False
    exchange: ma.Exchange | None = None
    outputs: tuple[str, ...] = ("logits",)
    dtype: DTypeLike = jnp.float32
    fp8: Fp8 | None = None

    def __post_init__(self) -> None:
        _layer_of(self)  # raises errors for wrong options
        super().__post_init__()

    def experts(self, params: Mapping[str, Any]) -> ma.Experts:
        """Return the experts in ``dtype``. ``params`` is the module's collection ``"params"``."""
        return _layer_of(self).experts({name: _unboxed(param) for name, param in params.items()})

    @linen.compact
    def __call__(self, x: jax.Array, **options: Any) -> tuple[jax.Array, ma.MoEStatistics]:
        """Apply the layer to the tokens of all ranks. Arguments and results are as in ``nnx.MoE``.
        To quantize only once for several calls, quantize ``module.experts(params)``."""
        layer = _layer_of(self)
        shapes, specs = named(layer.shapes()), layer.specs()
        drawn = layer.init(self.make_rng("params")) if self.is_initializing() else {}

        def boxed(name: str) -> linen.Partitioned[Any]:
            value = drawn[name] if drawn else jnp.zeros(shapes[name].shape, shapes[name].dtype)
            return linen.Partitioned(value, names=tuple(specs[name]))

        arrays = {
            name: _unboxed(self.param(name, lambda _, name=name: boxed(name), unbox=False))
            for name in shapes
        }
        select_bias = None
        if self.select_bias:
            zeros = jnp.zeros(self.config.num_experts, jnp.float32)
            box: Any = linen.Partitioned(zeros, names=tuple(P()))
            variable: Any = self.variable("router_state", "select_bias", lambda: box, unbox=False)
            select_bias = _unboxed(variable.value)
        return layer(arrays, x, select_bias=select_bias, **options)


def _layer_of(module: MoE) -> Layer:
    options = module.exchange, module.outputs, module.dtype, module.fp8
    return Layer(module.config, module.axes, *options)


def _unboxed(value: linen.Partitioned[Any] | jax.Array) -> jax.Array:
    if isinstance(value, linen.Partitioned):
        # A sharding constraint is not needed, because moe reshards its arrays.
        return value.unbox(apply_constraint=False)
    return value
