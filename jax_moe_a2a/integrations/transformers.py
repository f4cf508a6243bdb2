"""Convert weights of mixture-of-experts blocks from and to Hugging Face transformers."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

import jax_moe_a2a as ma

from .._src.checks import short
from . import _quantized
from ._quantized import decode_mxfp4 as decode_mxfp4

Config: TypeAlias = Mapping[str, object] | object  # an object or a dict


@dataclasses.dataclass(frozen=True)
class _Family:
    """The names that a model family uses in its configuration and in the tensors of a block.

    A *field* is an entry of the configuration. All other names are parts of the tensors' names.
    """

    width: str = "moe_intermediate_size"
    """The field that contains I, the number of columns of an expert."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The names of the gate, up and down projections of one expert."""
    router: str = "gate"
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool | str = "norm_topk_prob"
    """True if each token's weights are divided by their sum, or the field with this bool."""
    scale: str | None = None
    """The field with the factor that multiplies the router weights, or None."""
    top_in_group: int = 0
    """As in ``TopK``, or 0 for a router without groups."""
    select_bias: tuple[str, str] | None = None
    """The names of the selection bias: in files with one tensor for all experts, and in files with
    a tensor for each expert."""
    shared: str | None = None
    shared_width: tuple[str, ...] = ()
    """The fields whose product is J, the number of columns of the shared expert."""
    shared_gate: str | None = None
    """The name of the tensor with the ``output_gate`` of the shared expert."""
    weigh_input: bool = False
    inputs_first: bool = False
    """True if tensors are [E, inputs, outputs]. Such a tensor always contains all experts."""
    is_gpt_oss: bool = False
    """True for biases, a clamped activation, and alternating columns of gate and up."""


_MIXTRAL = _Family("intermediate_size", ("w1", "w3", "w2"), renormalize=True)
_QWEN_WITH_SHARED = _Family(
    shared="shared_expert",
    shared_width=("shared_expert_intermediate_size",),
    shared_gate="shared_expert_gate.weight",
)
_DEEPSEEK = _Family(
    score="sigmoid",
    scale="routed_scaling_factor",
    top_in_group=2,
    select_bias=("gate.e_score_correction_bias",) * 2,
    shared="shared_experts",
    shared_width=("moe_intermediate_size", "n_shared_experts"),
)
_FAMILIES = {
    "mixtral": _MIXTRAL,
    "minimax_m2": dataclasses.replace(
        _MIXTRAL, score="sigmoid", select_bias=("e_score_correction_bias",) * 2
    ),
    "olmoe": _Family("intermediate_size"),
    "qwen3_moe": _Family(),
    "qwen2_moe": _QWEN_WITH_SHARED,
    "qwen3_next": _QWEN_WITH_SHARED,
    "deepseek_v2": dataclasses.replace(
        _DEEPSEEK, score="softmax", renormalize=False, top_in_group=1, select_bias=None
    ),
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "ernie4_5_moe": _Family(
        renormalize=True,
        select_bias=(
            "gate.moe_statics.e_score_correction_bias",
            "moe_statics.e_score_correction_bias",
        ),
        shared="shared_experts",
        shared_width=("moe_intermediate_size", "moe_num_shared_experts"),
    ),
    "gpt_oss": _Family(
        "intermediate_size", router="router", renormalize=True, inputs_first=True, is_gpt_oss=True
    ),
    "llama4_text": _Family(
        "intermediate_size",
        router="router",
        score="sigmoid",
        renormalize=False,
        shared="shared_expert",
        shared_width=("intermediate_size",),
        weigh_input=True,
        inputs_first=True,
    ),
}
_NUM_EXPERTS = "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def from_state_dict(
    state_dict: Mapping[str, object], config: Config, prefix: str = ""
) -> dict[str, Any]:
    """Return the parameters of one block of a model, as arguments of ``ma.moe``.

    docs/integrations/transformers.md lists the supported models. A block may have one tensor for
    all experts, as in transformers 5, or a tensor for each expert, as in transformers 4 and in
    published files. Values are copied bit for bit.

    Files in FP8 like those of DeepSeek-V3 have a tensor ``weight_scale_inv`` with a scale for each
    block of 128 x 128 weights. For such files, the returned experts are in FP8. MXFP4 weights of
    GPT-OSS are decoded to bfloat16 with ``decode_mxfp4``.

    Args:
      state_dict: tensors by name: PyTorch, numpy or JAX arrays of floats of 16 bits or more, or
        tensors in FP8 or MXFP4 as above. Tensors without the prefix are ignored. A dict of
        gradients with the same names is converted in the same way.
      config: the model's configuration: an object of transformers, or the content of its
        ``config.json`` as a dict. If it has a ``text_config``, the call reads that.
      prefix: the name of the block, such as ``"model.layers.3.mlp"``, or in files of Mixtral
        ``"model.layers.3.block_sparse_moe"``. Omit it if the state dict contains only the tensors
        of the block.

    Returns:
      A dict of arguments of ``ma.moe`` with numpy arrays, for H features and E experts with I
      columns. ``router`` is a ``Router`` with a kernel [H, E]. ``experts`` are ``Experts`` with
      ``w_in`` [E, H, 2, I] (gate at index 0) and ``w_out`` [E, I, H]. The router's ``choose`` and
      the experts' ``activation`` are as in ``moe_config``. Some model families also have the
      router's ``select_bias`` [E], or a shared expert ``shared``, which has an ``output_gate`` [H]
      in Qwen2-MoE and Qwen3-Next. GPT-OSS has the router's ``bias`` [E] and the experts' ``b_in``
      [E, 2, I] and ``b_out`` [E, H]. Arrays in bfloat16 have the dtype ``jax.numpy.bfloat16``.
      Weights in FP8 are ``QuantizedExperts``. Scales in bfloat16 become float32.

    Raises:
      TypeError: if a tensor has an unexpected dtype, or if tensors that form one array have
        different dtypes.
      ValueError: if the model is unknown, if a tensor is missing or unexpected, if a shape does not
        fit the configuration, or if quantized weights contain a NaN or an infinity.
    """
    sizes, prefix = moe_config(config), _with_dot(prefix)
    state_dict = _quantized.decoding(state_dict, prefix)
    names = {name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)}
    if not names:
        raise ValueError(
            f"state_dict must have names that begin with prefix={prefix!r}; got none of them. "
            + _known_prefixes(state_dict)
        )
    per_expert = any(re.match(r"experts\.\d+\.", name) for name in names)
    expected, params = _block(config, sizes, per_expert, names)
    _check_names("state_dict", names, expected, _remedy(names, state_dict))

    arrays: dict[str, np.ndarray] = {}
    shapes = _by_name(params)
    for name, tensor in expected.items():
        value = state_dict[prefix + name]
        value = _checked(prefix + name, value, tensor.shape, sizes, tensor.param)
        if tensor.param not in arrays:
            arrays[tensor.param] = np.empty(shapes[tensor.param].shape, value.dtype)
        array = arrays[tensor.param]
        if array.dtype != value.dtype:
            raise TypeError(
                f"{prefix + name} must have the dtype {array.dtype}, as other tensors of "
                f"{tensor.param} have; got {short(value)}. Cast it"
            )
        view = tensor.view(array)
        view[...] = value.reshape(view.shape)
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[_name_of(path)], params)


def to_state_dict(
    params: Mapping[str, object], config: Config, prefix: str = "", *, per_expert: bool = False
) -> dict[str, np.ndarray]:
    """Return the tensors of one block by name, in the format of transformers.

    This is the inverse of ``from_state_dict``: names, bits and dtypes are the same.

    Args:
      params: parameters with numpy or JAX arrays, as ``from_state_dict`` returns them.
      config: as in ``from_state_dict``.
      prefix: as in ``from_state_dict``.
      per_expert: True for a tensor for each expert, as in transformers 4 and in published files;
        False for one tensor for all experts, as in transformers 5. GPT-OSS and Llama 4 always have
        one tensor.

    Returns:
      numpy arrays by name. ``to_torch`` converts them to PyTorch tensors.

    Raises:
      TypeError: if an array has an unexpected dtype.
      ValueError: if the model is unknown, if an array is missing or unexpected, or if a shape does
        not fit the configuration.
    """
    sizes, prefix = moe_config(config), _with_dot(prefix)
    given = _by_name(params)
    expected, shapes_of = _block(config, sizes, per_expert, given)
    shapes = _by_name(shapes_of)
    _check_names("params", given, shapes, "Pass all arrays that from_state_dict returns")
    arrays = {
        name: _checked(name, given[name], shape.shape, sizes, name)
        for name, shape in shapes.items()
    }
    return {
        prefix + name: np.array(tensor.view(arrays[tensor.param]), order="C").reshape(tensor.shape)
        for name, tensor in expected.items()
    }


def to_torch(state_dict: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return PyTorch tensors that use the memory of numpy arrays. bfloat16 and FP8 are supported.

    Args:
      state_dict: the result of ``to_state_dict``.

    Returns:
      Tensors by name, for ``torch.nn.Module.load_state_dict``.

    Raises:
      ImportError: if PyTorch is not installed.
    """
    torch = importlib.import_module("torch")

    def tensor(array: np.ndarray) -> Any:
        if array.dtype == jnp.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == jnp.float8_e4m3fn:
            return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
        return torch.from_numpy(array)

    return {name: tensor(array) for name, array in state_dict.items()}


def moe_config(config: Config) -> ma.MoEConfig:
    """Return sizes, router and activation of a model's block, for example for the Flax modules.

    The noise that Mixtral and MiniMax-M2 can add to tokens in training is not supported.

    Args:
      config: as in ``from_state_dict``.

    Raises:
      ValueError: if the model or its activation is unknown, or if a field is missing.
    """
    family = _family_of(config)
    shared_width = math.prod(_field(config, name, default=0) for name in family.shared_width)
    has_shared = family.shared is not None and shared_width > 0
    return ma.MoEConfig(
        _field(config, "hidden_size"),
        _field(config, family.width),
        _field(config, *_NUM_EXPERTS),
        _top_k(config, family),
        activation=_activation(config, family),
        bias=family.is_gpt_oss,
        shared_hidden=shared_width if has_shared else None,
        shared_gate=has_shared and family.shared_gate is not None,
        weigh_input=family.weigh_input,
    )


def _value(config: Config, name: str) -> Any:
    """Return a field of a configuration (of its ``text_config`` if it has one), or None."""
    get = lambda of, name: of.get(name) if isinstance(of, Mapping) else getattr(of, name, None)
    text = get(config, "text_config")
    return get(config if text is None else text, name)


def _field(config: Config, *names: str, default: float | None = None) -> Any:
    """Return the first of these fields that the configuration has, or the default."""
    for name in names:
        value = _value(config, name)
        if value is not None:
            return value
    if default is None:
        raise ValueError(
            f"config must have the field {' or '.join(names)}; got "
            f"{config if isinstance(config, Mapping) else type(config).__name__} without it. Pass "
            "the configuration of the language model, or the content of its config.json"
        )
    return default


def _family_of(config: Config) -> _Family:
    kind = _field(config, "model_type")
    if kind in _FAMILIES:
        return _FAMILIES[kind]
    raise ValueError(
        f"model_type of config must be one of {', '.join(_FAMILIES)}; got {kind!r}. If the model "
        "has the block of one of them, pass the configuration with that model_type"
    )


def _top_k(config: Config, family: _Family) -> ma.TopK:
    has_groups = family.top_in_group > 0 and _field(config, "n_group", default=1) > 1
    has_groups = has_groups and _value(config, "topk_method") != "greedy"
    groups: dict[str, int] = {}
    if has_groups:
        groups = dict(
            num_groups=_field(config, "n_group"),
            top_groups=_field(config, "topk_group"),
            top_in_group=family.top_in_group,
        )
    is_sum_one = family.renormalize
    return ma.TopK(
        _field(config, "num_experts_per_tok", "moe_k"),
        score=family.score,
        renormalize=_field(config, is_sum_one) if isinstance(is_sum_one, str) else is_sum_one,
        scale=1.0 if family.scale is None else _field(config, family.scale),
        **groups,
    )


def _activation(config: Config, family: _Family) -> Callable[[jax.Array], jax.Array]:
    if family.is_gpt_oss:
        return ma.clamped_swiglu(
            _field(config, "swiglu_limit", default=7.0),
            _field(config, "swiglu_alpha", default=1.702),
        )
    name = _field(config, "hidden_act")
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"hidden_act of config must be one of {', '.join(_ACTIVATIONS)}; got {name!r}. For "
            "another function act, pass one of them, and replace the activation of the result: "
            "experts.replace(activation=ma.gated(act))"
        )
    return ma.gated(_ACTIVATIONS[name])


def _by_name(params: Mapping[str, object]) -> dict[str, Any]:
    """Return a dict of the arrays in ``params``, with keys such as ``experts.w_in``."""
    return {_name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _name_of(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


class _Tensor(NamedTuple):
    """A tensor in a file: which parameter or part of a parameter it contains, and its shape."""

    param: str
    shape: tuple[int, ...]
    view: Callable[[np.ndarray], np.ndarray]
    """Maps the parameter's array to a view of this tensor's elements, in the tensor's order."""


def _tensors(family: _Family, sizes: ma.MoEConfig, per_expert: bool) -> dict[str, _Tensor]:
    e, h, i, s = sizes.num_experts, sizes.hidden, sizes.expert_hidden, sizes.shared_hidden
    swapped, whole, every = lambda w: w.swapaxes(-1, -2), lambda w: w, slice(None)
    gate, up, down = (f"{name}.weight" for name in family.projections)
    found = {f"{family.router}.weight": _Tensor("router.kernel", (e, h), swapped)}
    if family.inputs_first:
        turned = swapped if family.is_gpt_oss else whole
        found |= {
            "experts.gate_up_proj": _Tensor("experts.w_in", (e, h, 2 * i), turned),
            "experts.down_proj": _Tensor("experts.w_out", (e, i, h), whole),
        }
    elif per_expert:
        for k in range(e):
            of = f"experts.{k}."
            found[of + gate] = _Tensor("experts.w_in", (i, h), _matrix(k, every, 0))
            found[of + up] = _Tensor("experts.w_in", (i, h), _matrix(k, every, 1))
            found[of + down] = _Tensor("experts.w_out", (h, i), _matrix(k))
    else:
        found |= {
            "experts.gate_up_proj": _Tensor(
                "experts.w_in", (e, 2 * i, h), lambda w: w.transpose(0, 2, 3, 1)
            ),
            "experts.down_proj": _Tensor("experts.w_out", (e, h, i), swapped),
        }
    if family.is_gpt_oss:
        found |= {
            "router.bias": _Tensor("router.bias", (e,), whole),
            "experts.gate_up_proj_bias": _Tensor("experts.b_in", (e, 2 * i), swapped),
            "experts.down_proj_bias": _Tensor("experts.b_out", (e, h), whole),
        }
    if family.select_bias is not None:
        name = family.select_bias[per_expert]
        shape = (1, e) if "moe_statics" in name else (e,)
        found[name] = _Tensor("router.select_bias", shape, whole)
    if s is not None:
        of, first = f"{family.shared}.", "shared.w_in"
        found |= {
            of + gate: _Tensor(first, (s, h), _matrix(every, 0)),
            of + up: _Tensor(first, (s, h), _matrix(every, 1)),
            of + down: _Tensor("shared.w_out", (h, s), swapped),
        }
    if sizes.shared_gate:
        assert family.shared_gate is not None
        found[family.shared_gate] = _Tensor("shared.output_gate", (1, h), whole)
    return found


def _block(
    config: Config, sizes: ma.MoEConfig, per_expert: bool, names: Collection[str]
) -> tuple[dict[str, _Tensor], dict[str, Any]]:
    """Return a block's tensors and parameters. ``names`` determines which weights are in FP8."""
    family = _family_of(config)
    tensors = _tensors(family, sizes, per_expert)
    # Callers read only the structure and the shapes, not the dtypes.
    params = jax.eval_shape(lambda key: ma.init_moe(key, sizes), jax.random.key(0))
    if family.select_bias is not None:
        bias = jax.ShapeDtypeStruct((sizes.num_experts,), jnp.float32)
        params["router"] = params["router"].replace(select_bias=bias)
    return (tensors, params) if family.inputs_first else _quantized.in_fp8(tensors, params, names)


def _matrix(*index: int | slice) -> Callable[[np.ndarray], np.ndarray]:
    return lambda array: array[index].T


def _with_dot(prefix: str) -> str:
    return prefix if not prefix or prefix.endswith(".") else prefix + "."


def _as_numpy(name: str, value: object) -> np.ndarray:
    """Return a PyTorch, JAX or numpy array of floats as a numpy array."""
    array: Any
    if type(value).__module__.split(".")[0] == "torch":
        torch, tensor = importlib.import_module("torch"), cast(Any, value).detach().cpu()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        is_float = tensor.dtype.is_floating_point and tensor.dtype.itemsize >= 2
        found = f"{tensor.dtype}{list(tensor.shape)}"
        array = tensor.numpy() if is_float else None
    else:
        array = np.asarray(value)
        is_float = array.dtype.itemsize >= 2 and jnp.issubdtype(array.dtype, jnp.floating)
        found = short(array)
    if not is_float:
        raise TypeError(
            f"{name} must hold floats of 16 bits or more; got {found}. Cast it, or dequantize the "
            "model first"
        )
    return array


def _checked(
    name: str, value: object, shape: tuple[int, ...], sizes: ma.MoEConfig, param: str
) -> np.ndarray:
    value = _quantized.as_numpy(value)
    array = np.asarray(value) if param.endswith(".values") else _as_numpy(name, value)
    if param.endswith((".values", ".scales")):
        array = _quantized.checked(name, array, param)
    if array.shape != shape:
        known = f"{sizes.num_experts} experts, hidden size {sizes.hidden}, "
        known += f"expert width {sizes.expert_hidden}"
        known += f", shared width {sizes.shared_hidden}" if sizes.shared_hidden else ""
        raise ValueError(
            f"{name} must have the shape {list(shape)}, because config has {known}; got "
            f"{short(array)}. Pass the configuration of this model"
        )
    return array


def _check_names(argument: str, names: Iterable[str], expected: Iterable[str], remedy: str) -> None:
    missing, unexpected = sorted({*expected} - {*names}), sorted({*names} - {*expected})
    if not missing and not unexpected:
        return
    problems = [
        f"{kind} {', '.join(found[:4])}{f' and {len(found) - 4} more' if len(found) > 4 else ''}"
        for kind, found in (("lacks", missing), ("has the unexpected", unexpected))
        if found
    ]
    raise ValueError(
        f"{argument} must hold exactly the arrays of one block of the model of config; it "
        f"{', and it '.join(problems)}. {remedy}"
    )


def _remedy(names: set[str], state_dict: Mapping[str, object]) -> str:
    """Return the end of the error message for wrong names of tensors: what to do."""
    if any(re.search("_(blocks|scales|scale_inv)$", name) for name in names):
        return "The model is quantized: dequantize it first"
    if any(name.startswith(("experts.", "gate.", "router.")) for name in names):
        return "Pass config and state_dict of the same model, with all tensors of the block"
    return _known_prefixes(state_dict)


def _known_prefixes(state_dict: Mapping[str, object]) -> str:
    """Return the end of an error message that says which prefixes the state dict has."""
    found = (re.match(r"(.*?)\.?\bexperts\.", name) for name in state_dict)
    prefixes = list(dict.fromkeys(match[1] for match in found if match))
    if not prefixes:
        return "No name of the state dict has experts: it has no block of these models"
    more = f" and {len(prefixes) - 2} more" if len(prefixes) > 2 else ""
    return f"Pass the prefix of a block: {', '.join(map(repr, prefixes[:2]))}{more}"
