"""Define the options of the Flax modules, and the specs of their parameters."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

from .._src.checks import fitting_experts
from .._src.layer.axes import AxesLike as AxesLike
from .._src.layer.axes import as_axes
from .._src.layer.parameters import NUM_AXES
from .._src.layer.router import Choose as Choose

Activation = Callable[[jax.Array], jax.Array]
Initializer = Callable[..., jax.Array]

# Weights that a module may hold in FP8. Their scales are parameters with these names.
SCALES = {name: f"{name}_scales" for name in ("w_gate_up", "w_down")}
# Arrays of a module, or arguments of each of its calls.
OF_ROUTER = {"kernel": "router", "bias": "router_bias", "select_bias": "select_bias"}
PARAMETERS = *OF_ROUTER.values(), *NUM_AXES, *SCALES.values()
OF_A_CALL = "x", "mask", "router_input", "shared_weights", "quantized", "placement"
# Options of ``moe`` that the modules have, too.
OPTIONS = tuple(
    name for name in inspect.signature(ma.moe).parameters if name not in (*PARAMETERS, *OF_A_CALL)
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """``moe`` with the options of a module. Layers of equal options are equal."""

    choose: Choose
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Layer:
        """Return the layer whose options are among ``given``."""
        return cls(given["choose"], tuple((name, given[name]) for name in OPTIONS))

    def __call__(
        self, params: Mapping[str, jax.Array], dtype: Any, given: Mapping[str, Any]
    ) -> tuple[jax.Array, ma.MoEStatistics]:
        """Apply the layer in a dtype to the arguments of a call of the module, among ``given``. The
        router computes in the larger one of both dtypes."""
        arguments = dict(self.options) | {name: given[name] for name in OF_A_CALL}
        arguments["x"] = given["x"].astype(dtype)
        router = ma.Router(
            *(params.get(name) for name in OF_ROUTER.values()),
            choose=self.choose,
            per_token=given["per_token"],
            whole=given["whole"],
        )
        arguments["router"] = router if given["replay"] is None else router.replay(given["replay"])
        for name, param in params.items():
            scales = SCALES.get(name, "")
            if scales in params:
                arguments[name] = ma.QuantizedExperts(param, params[scales])
            elif name in NUM_AXES:
                arguments[name] = param.astype(dtype)
        return ma.moe(**arguments)


def specs_of(hidden: int, given: Mapping[str, Any]) -> dict[str, P]:
    """Return where the parameters of a module with these options belong."""
    shapes = jax.eval_shape(lambda key: _draw(key, hidden, given, None), jax.random.key(0))
    return _flat(ma.moe_partition_specs(shapes, given["axes"])) | {"select_bias": P()}


def mesh_in_scope() -> bool:
    """Return True if the program has a mesh, so that parameters can be placed."""
    return not jax.sharding.get_abstract_mesh().empty


def init_moe(key: jax.Array, hidden: int, given: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Draw the parameters of a module with these options, where they belong if a mesh is known."""
    return _flat(_draw(key, hidden, given, given["axes"] if mesh_in_scope() else None))


def _draw(
    key: jax.Array, hidden: int, given: Mapping[str, Any], axes: AxesLike | None
) -> dict[str, Any]:
    """Return the parameters of ``moe`` for a module with these options."""
    same = "expert_hidden", "num_experts", "choose", "router_dtype", "bias", "initializer"
    options = {name: given[name] for name in same} | dict(dtype=given["param_dtype"], axes=axes)
    if given["shared_expert"]:
        options["shared_hidden"] = given["shared_hidden"] or given["expert_hidden"]
    params = ma.init_moe(key, hidden, **options)
    if given["weights_format"] is not None:
        params |= {name: ma.quantize_experts(params[name]) for name in SCALES}
    return params


def _flat(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of ``moe`` or their placements, each array by its name in a module."""
    arrays = {name: getattr(params["router"], field) for field, name in OF_ROUTER.items()}
    found = dict(params) | arrays
    found = {name: array for name, array in found.items() if array is not None}
    for name, scales in SCALES.items():
        if isinstance(params[name], ma.QuantizedExperts):
            found[name], found[scales] = params[name].values, params[name].scales
    return found


def check_module(given: Mapping[str, Any]) -> None:
    """Raise an error if options of a module do not fit together."""
    group, num_experts = as_axes(given["axes"]).experts, given["num_experts"]
    fmt = given["weights_format"]
    if fmt is not None and not isinstance(fmt, ma.BlockwiseFp8):
        raise ValueError(f"weights_format must be BlockwiseFp8() or None; got {fmt!r}")
    if given["shared_hidden"] is not None and not given["shared_expert"]:
        raise ValueError(
            "shared_hidden must be None without a shared expert; got "
            f"{given['shared_hidden']}. Pass shared_expert=True as well"
        )
    if isinstance(group, ma.Group) and num_experts % group.size:
        raise ValueError(
            f"num_experts must be a multiple of the group's size {group.size}; got {num_experts}. "
            f"{fitting_experts(num_experts, group.size)}"
        )
