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

Activation = Callable[[jax.Array], jax.Array]
Choose = Callable[[jax.Array], ma.RouterChoices]
Initializer = Callable[..., jax.Array]
GroupOrAxes = ma.Group | str | tuple[str, ...]

# Weights that a module may hold in FP8. Their scales are parameters with these names.
SCALES = {name: f"{name}_scales" for name in ("w_gate_up", "w_down")}
# Arrays, which are parameters of a module, or arguments of each of its calls.
PARAMETERS = *ma.moe_partition_specs("ep"), *SCALES.values()
OF_A_CALL = "x", "mask", "shared_weights", "quantized", "placement"
# Options of ``moe`` that the modules have, too.
OPTIONS = tuple(
    name for name in inspect.signature(ma.moe).parameters if name not in (*PARAMETERS, *OF_A_CALL)
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """``moe`` with the options of a module. Layers of equal options are equal."""

    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Layer:
        """Return the layer whose options are among ``given``."""
        return cls(tuple((name, given[name]) for name in OPTIONS))

    def __call__(
        self, params: Mapping[str, jax.Array], dtype: Any, given: Mapping[str, Any]
    ) -> tuple[jax.Array, ma.MoEStatistics]:
        """Apply the layer in a dtype to the arguments of a call of the module, among ``given``. The
        router computes in the larger one of both dtypes."""
        keeps_dtype = "router", "router_bias", "select_bias"
        arguments = dict(self.options) | {name: given[name] for name in OF_A_CALL}
        arguments["x"] = given["x"].astype(dtype)
        for name, param in params.items():
            scales = SCALES.get(name, "")
            if scales in params:
                arguments[name] = ma.QuantizedExperts(param, params[scales])
            elif name not in SCALES.values():
                arguments[name] = param if name in keeps_dtype else param.astype(dtype)
        return ma.moe(**arguments)


def specs_of(given: Mapping[str, Any]) -> dict[str, P]:
    """Return where the parameters of a module with these options belong."""
    specs = ma.moe_partition_specs(
        given["group"],
        tensor_axis=given["tensor_axis"],
        fsdp_axes=given["fsdp_axes"],
        quantized=given["weights_format"] is not None,
    )
    return _with_scales(specs)


def mesh_in_scope() -> bool:
    """Return True if the program has a mesh, so that parameters can be placed."""
    return not jax.sharding.get_abstract_mesh().empty


def init_moe(key: jax.Array, hidden: int, given: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Draw the parameters of a module with these options, where they belong if a mesh is known."""
    specs = None
    if mesh_in_scope():
        specs = specs_of(dict(given, weights_format=None))
    same = "expert_hidden", "num_experts", "router_dtype", "bias", "initializer"
    options = {name: given[name] for name in same} | dict(dtype=given["param_dtype"], specs=specs)
    if given["shared_expert"]:
        options["shared_hidden"] = given["shared_hidden"] or given["expert_hidden"]
    params = ma.init_moe(key, hidden, **options)
    if given["weights_format"] is not None:
        params |= {name: ma.quantize_experts(params[name]) for name in SCALES}
    return _with_scales(params)


def _with_scales(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters or their placements by name, with those of scales next to values."""
    found = dict(params)
    for name, scales in SCALES.items():
        if isinstance(params[name], ma.QuantizedExperts):
            found[name], found[scales] = params[name].values, params[name].scales
    return found


def check_module(given: Mapping[str, Any]) -> None:
    """Raise an error if options of a module do not fit together."""
    group, num_experts = given["group"], given["num_experts"]
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
