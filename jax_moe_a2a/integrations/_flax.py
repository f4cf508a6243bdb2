"""Define ``Layer``, which both Flax modules call, and the names of their parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

import jax_moe_a2a as ma

from .._src.layer.axes import AxesLike as AxesLike

Fp8: TypeAlias = Literal["train", "frozen"]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A function that calls ``moe`` with the options of a Flax module."""

    config: ma.MoEConfig
    axes: AxesLike
    exchange: ma.Exchange | None
    outputs: tuple[str, ...]
    dtype: DTypeLike
    fp8: Fp8 | None

    def __post_init__(self) -> None:
        if self.fp8 not in (None, *get_args(Fp8)):
            raise ValueError(f'fp8 must be "train", "frozen" or None; got {self.fp8!r}')

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Return random parameters, which are placed over the mesh if one is in scope."""
        return named(self._draw(key, self.axes if mesh_in_scope() else None))

    def shapes(self) -> dict[str, Any]:
        """Return the shapes and dtypes of the parameters of ``moe``."""
        return jax.eval_shape(lambda key: self._draw(key, None), jax.random.key(0))

    def specs(self) -> dict[str, P]:
        return named(ma.moe_partition_specs(self.shapes(), self.axes))

    def experts(self, arrays: Mapping[str, jax.Array]) -> ma.Experts:
        """Return the experts with their arrays from ``arrays``, cast to ``dtype``."""
        return self._arguments(arrays)["experts"]

    def __call__(
        self,
        arrays: Mapping[str, jax.Array],
        x: jax.Array,
        *,
        select_bias: jax.Array | None,
        replay: ArrayLike | None = None,
        per_token: object = None,
        whole: object = None,
        experts: ma.Experts | None = None,
        **options: Any,
    ) -> tuple[jax.Array, ma.MoEStatistics]:
        """Apply the layer. ``options`` are arguments of ``moe``. The router's parameters keep their
        dtype. The router computes in float32, or in float64 if an operand is float64."""
        arguments = self._arguments(arrays)
        router = arguments["router"]
        router = router.replace(select_bias=select_bias, per_token=per_token, whole=whole)
        arguments["router"] = router if replay is None else router.replay(replay)
        if experts is not None:
            arguments["experts"] = experts
        elif self.fp8 == "train":
            arguments["experts"] = arguments["experts"].in_fp8()
        return ma.moe(
            x.astype(self.dtype),
            **arguments,
            axes=self.axes,
            exchange=self.exchange,
            outputs=self.outputs,
            **options,
        )

    def _draw(self, key: jax.Array, axes: AxesLike | None) -> dict[str, Any]:
        params = ma.init_moe(key, self.config, axes)
        if self.fp8 == "frozen":
            params["experts"] = ma.quantize_experts(params["experts"])
        return params

    def _arguments(self, arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
        """Return the arguments ``router``, ``experts`` and ``shared`` of ``moe``."""
        in_fp8 = lambda w: isinstance(w, ma.QuantizedExperts)
        cast = lambda w: w if in_fp8(w) else w.astype(self.dtype)
        params = jax.tree_util.tree_map_with_path(
            lambda path, _: arrays[_name_of(path)], self.shapes()
        )
        router = params.pop("router")  # keeps its dtype
        return {"router": router, **jax.tree.map(cast, params, is_leaf=in_fp8)}


def named(params: Mapping[str, object]) -> dict[str, Any]:
    """Return a dict of the arrays in ``params``, with their names in a Flax module as keys."""
    return {_name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _name_of(path: jax.tree_util.KeyPath) -> str:
    """Return ``router_kernel`` for ``router.kernel``, ``w_in`` for ``experts.w_in``, and
    ``shared_w_in`` for ``shared.w_in``. Values of ``QuantizedExperts`` get the weights' name.
    """
    name = jax.tree_util.keystr(path, simple=True, separator="_")
    return name.removeprefix("experts_").removesuffix("_values")


def mesh_in_scope() -> bool:
    return not jax.sharding.get_abstract_mesh().empty
