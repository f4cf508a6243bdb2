"""Convert weights of mixture-of-experts blocks of Hugging Face transformers, in both directions.

The module needs neither PyTorch nor transformers.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import jax_moe_a2a as ma

from .._src.checks import short

Config: TypeAlias = Mapping[str, Any] | object  # of transformers, or the content of config.json


@dataclasses.dataclass(frozen=True)
class _Model:
    """The names that a model's block and its configuration have."""

    width: str = "moe_intermediate_size"
    """I in the configuration."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of one expert."""
    is_deepseek: bool = False
    """True for a selection bias and a shared expert."""
    is_gpt_oss: bool = False
    """True for biases, and tensors [inputs, outputs] in which gate and up alternate."""


_MODELS = {
    "mixtral": _Model("intermediate_size", ("w1", "w3", "w2")),
    "qwen3_moe": _Model(),
    "deepseek_v3": _Model(is_deepseek=True),
    "gpt_oss": _Model("intermediate_size", is_gpt_oss=True),
}
_OF_ROUTER = {"kernel": "router", "bias": "router_bias", "select_bias": "select_bias"}
"""Fields of a ``Router``, and their names among arrays."""
_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def from_state_dict(
    state_dict: Mapping[str, Any], config: Config, prefix: str = ""
) -> dict[str, Any]:
    """Return the parameters of one block of Mixtral, Qwen3-MoE, DeepSeek-V3 or GPT-OSS.

    A block has one tensor for all experts, as in transformers 5, or one for each expert, as in
    transformers 4 and in published files. The function accepts both. Values and dtypes are
    unchanged, and the result shares no memory with the state dict.

    Args:
      state_dict: tensors by name: PyTorch, numpy or JAX arrays of floats of 16 bits or more. Names
        without the prefix are ignored. Gradients by name are converted in the same way.
      config: the model's configuration: an object of transformers, or the content of its
        ``config.json`` as a dict.
      prefix: the name of the block, such as ``"model.layers.3.mlp"``, or in files of Mixtral
        ``"model.layers.3.block_sparse_moe"``. Omit it if the state dict holds one block only.

    Returns:
      Arguments of ``ma.moe`` by name, of numpy arrays, for H features and E experts of width I:
      ``router``, a ``Router`` with a kernel [H, E] and the ``TopK`` of ``top_k``, ``w_gate_up``
      [E, H, 2, I] with the gate at index 0, and ``w_down`` [E, I, H]. DeepSeek-V3 also has the
      router's ``select_bias`` [E], and the shared expert ``shared_gate_up`` [H, 2, J] and
      ``shared_down`` [J, H]. GPT-OSS also has the router's ``bias`` [E], ``b_gate_up`` [E, 2, I]
      and ``b_down`` [E, H]. ``w_in`` of ``ma.moe_mlp`` is ``w_gate_up`` reshaped to
      [E, H, 2 * I]. The bfloat16 of the arrays is that of ``jax.numpy``.

    Raises:
      TypeError: if a tensor does not hold floats of 16 bits or more, or if the tensors of one
        array have different dtypes.
      ValueError: if the model is unknown, a name is missing or unexpected, or a tensor does not
        have the shape that the configuration implies.

    Example:
      A block of Qwen3-MoE that has one expert of width 3 for tokens with two features:

      ```python
      import numpy as np
      from jax_moe_a2a.integrations import transformers as hf

      config = dict(model_type="qwen3_moe", hidden_size=2, moe_intermediate_size=3, num_experts=1)
      config |= dict(num_experts_per_tok=1, norm_topk_prob=True)
      state_dict = {
          "mlp.gate.weight": np.zeros((1, 2)),
          "mlp.experts.gate_up_proj": np.arange(12).reshape(1, 6, 2) / 1,
          "mlp.experts.down_proj": np.zeros((1, 2, 3)),
      }
      gate, up = hf.from_state_dict(state_dict, config, "mlp")["w_gate_up"][0, 0]
      print(gate, up)
      ```

      ```text
      [0. 2. 4.] [ 6.  8. 10.]
      ```
    """
    model, sizes, prefix = _model_of(config), _sizes_of(config), _with_dot(prefix)
    names = {name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)}
    if not names:
        raise ValueError(
            f"state_dict must have names that begin with prefix={prefix!r}; got none of them. "
            + _known_prefixes(state_dict)
        )
    per_expert = any(re.match(r"experts\.\d+\.", name) for name in names)
    expected = _tensors(model, sizes, per_expert)
    _check_names("state_dict", names, expected, _remedy(names, state_dict))

    arrays: dict[str, np.ndarray] = {}
    shapes = _shapes(model, sizes)
    for name, tensor in expected.items():
        value = _checked(prefix + name, state_dict[prefix + name], tensor.shape, sizes)
        if tensor.param not in arrays:
            arrays[tensor.param] = np.empty(shapes[tensor.param], value.dtype)
        array = arrays[tensor.param]
        if array.dtype != value.dtype:
            raise TypeError(
                f"{prefix + name} must have the dtype {array.dtype}, as other tensors of "
                f"{tensor.param} have; got {short(value)}. Cast it"
            )
        view = tensor.view(array)
        view[...] = value.reshape(view.shape)
    own = (arrays.pop(name, None) for name in _OF_ROUTER.values())
    return {"router": ma.Router(*own, choose=top_k(config)), **arrays}


def to_state_dict(
    params: Mapping[str, Any], config: Config, prefix: str = "", *, per_expert: bool = False
) -> dict[str, np.ndarray]:
    """Return the tensors of one block by name, as transformers has them.

    This is the inverse of ``from_state_dict``: it returns the same names, bits and dtypes.

    Args:
      params: parameters with numpy or JAX arrays, as ``from_state_dict`` returns them. The arrays
        of gate and up may also be tuples (gate, up).
      config: as in ``from_state_dict``.
      prefix: as in ``from_state_dict``.
      per_expert: True for tensors of each expert, as in transformers 4 and in published files;
        False for tensors of all experts, as in transformers 5. GPT-OSS always has the latter.

    Returns:
      numpy arrays by name. ``to_torch`` makes PyTorch tensors of them.

    Raises:
      TypeError: if an array does not hold floats of 16 bits or more.
      ValueError: if the model is unknown, an array is missing or unexpected, or an array does not
        have the shape that the configuration implies.
    """
    model, sizes, prefix = _model_of(config), _sizes_of(config), _with_dot(prefix)
    arrays, shapes = dict(params), _shapes(model, sizes)
    if isinstance(arrays.get("router"), ma.Router):
        router = arrays.pop("router")
        own = {name: getattr(router, field) for field, name in _OF_ROUTER.items()}
        arrays |= {name: array for name, array in own.items() if array is not None}
    _check_names("params", arrays, shapes, "Pass all arrays that from_state_dict returns")
    for name, shape in shapes.items():
        array = arrays[name]
        if isinstance(array, tuple | list) and len(array) == 2 and name.endswith("gate_up"):
            gate, up = (_checked(name, part, (*shape[:-2], shape[-1]), sizes) for part in array)
            array = np.stack([gate, up], axis=-2)
        arrays[name] = _checked(name, array, shape, sizes)
    return {
        prefix + name: np.array(tensor.view(arrays[tensor.param]), order="C").reshape(tensor.shape)
        for name, tensor in _tensors(model, sizes, per_expert).items()
    }


def to_torch(state_dict: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return PyTorch tensors that share the memory of numpy arrays, bfloat16 included.

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
        return torch.from_numpy(array)

    return {name: tensor(array) for name, array in state_dict.items()}


def top_k(config: Config) -> ma.TopK:
    """Return how a model's router chooses experts: ``choose`` of ``ma.Router``.

    Noise on logits, which Mixtral can have in training, is not included.

    Args:
      config: as in ``from_state_dict``.

    Raises:
      ValueError: if the model is unknown, or the configuration lacks a field.

    Example:
      ```python
      from jax_moe_a2a.integrations import transformers as hf

      print(hf.top_k(dict(model_type="mixtral", num_experts_per_tok=2)))
      ```

      ```text
      TopK(k=2, score='softmax', num_groups=None, top_groups=None, renormalize=True, scale=1.0)
      ```
    """
    model, k = _model_of(config), _field(config, "num_experts_per_tok")
    if model in (_MODELS["mixtral"], _MODELS["gpt_oss"]):
        return ma.TopK(k, renormalize=True)
    options = dict(renormalize=_field(config, "norm_topk_prob"))
    if model.is_deepseek:
        options |= dict(score="sigmoid", scale=_field(config, "routed_scaling_factor"))
        if _field(config, "n_group", default=1) > 1:
            groups = {"num_groups": "n_group", "top_groups": "topk_group"}
            options |= {name: _field(config, field) for name, field in groups.items()}
    return ma.TopK(k, **options)


def expert_activation(config: Config) -> Callable[[jax.Array], jax.Array]:
    """Return the activation of a model's experts, with gate and up side by side.

    Args:
      config: as in ``from_state_dict``.

    Returns:
      A function [..., 2I] -> [..., I]: ``activation`` of ``ma.moe`` and ``ma.moe_mlp``.

    Raises:
      ValueError: if the model or its activation is unknown.
    """
    if _model_of(config).is_gpt_oss:
        return ma.clamped_swiglu(
            _field(config, "swiglu_limit", default=7.0),
            _field(config, "swiglu_alpha", default=1.702),
        )
    name = _field(config, "hidden_act")
    if name not in _ACTIVATIONS:
        raise ValueError(
            f"hidden_act of config must be one of {', '.join(_ACTIVATIONS)}; got {name!r}. For "
            "another function act, pass activation=ma.gated(act)"
        )
    return ma.gated(_ACTIVATIONS[name])


# --------------------------------------------------------------------------------- configuration


class _Sizes(NamedTuple):
    """Sizes of a block."""

    experts: int
    hidden: int
    width: int
    shared_width: int

    def __str__(self) -> str:
        sizes = f"{self.experts} experts, hidden size {self.hidden}, expert width {self.width}"
        return sizes + (f", shared width {self.shared_width}" if self.shared_width else "")


def _field(config: Config, *names: str, default: Any = None) -> Any:
    """Return the first of the fields that a configuration has, or raise an error."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    if default is None:
        raise ValueError(
            f"config must have the field {' or '.join(names)}; got "
            f"{config if isinstance(config, Mapping) else type(config).__name__} without it. Pass "
            "the configuration of the language model, or the content of its config.json"
        )
    return default


def _model_of(config: Config) -> _Model:
    """Return the names of the model of a configuration, or raise an error."""
    kind = _field(config, "model_type")
    if kind not in _MODELS:
        raise ValueError(
            f"model_type of config must be one of {', '.join(_MODELS)}; got {kind!r}. If the model "
            "has the same block as one of them, pass the configuration with that model_type"
        )
    return _MODELS[kind]


def _sizes_of(config: Config) -> _Sizes:
    """Return the sizes of a block, or raise an error."""
    model = _model_of(config)
    width = _field(config, model.width)
    shared_width = width * _field(config, "n_shared_experts") if model.is_deepseek else 0
    return _Sizes(_field(config, *_NUM_EXPERTS), _field(config, "hidden_size"), width, shared_width)


# --------------------------------------------------------------------------- names, shapes, views


def _shapes(model: _Model, sizes: _Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters by name."""
    e, h, i, s = sizes
    shapes = {"router": (h, e), "w_gate_up": (e, h, 2, i), "w_down": (e, i, h)}
    if model.is_deepseek:
        shapes |= {"select_bias": (e,), "shared_gate_up": (h, 2, s), "shared_down": (s, h)}
    if model.is_gpt_oss:
        shapes |= {"router_bias": (e,), "b_gate_up": (e, 2, i), "b_down": (e, h)}
    return shapes


class _Tensor(NamedTuple):
    """The place of a tensor's values among the parameters."""

    param: str
    """Name of the parameter."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    view: Callable[[np.ndarray], np.ndarray]
    """Returns a view of the parameter. The tensor is this view with some axes merged."""


def _tensors(model: _Model, sizes: _Sizes, per_expert: bool) -> dict[str, _Tensor]:
    """Return all tensors of a block by name."""
    e, h, i, s = sizes
    swapped, whole, every = lambda w: w.swapaxes(-1, -2), lambda w: w, slice(None)
    if model.is_gpt_oss:
        return {
            "router.weight": _Tensor("router", (e, h), swapped),
            "router.bias": _Tensor("router_bias", (e,), whole),
            "experts.gate_up_proj": _Tensor("w_gate_up", (e, h, 2 * i), swapped),
            "experts.gate_up_proj_bias": _Tensor("b_gate_up", (e, 2 * i), swapped),
            "experts.down_proj": _Tensor("w_down", (e, i, h), whole),
            "experts.down_proj_bias": _Tensor("b_down", (e, h), whole),
        }
    found = {"gate.weight": _Tensor("router", (e, h), swapped)}
    gate, up, down = (f"{name}.weight" for name in model.projections)
    if per_expert:
        for k in range(e):
            of = f"experts.{k}."
            found[of + gate] = _Tensor("w_gate_up", (i, h), _matrix(k, every, 0))
            found[of + up] = _Tensor("w_gate_up", (i, h), _matrix(k, every, 1))
            found[of + down] = _Tensor("w_down", (h, i), _matrix(k))
    else:
        found |= {
            "experts.gate_up_proj": _Tensor(
                "w_gate_up", (e, 2 * i, h), lambda w: w.transpose(0, 2, 3, 1)
            ),
            "experts.down_proj": _Tensor("w_down", (e, h, i), swapped),
        }
    if model.is_deepseek:
        of, first = "shared_experts.", "shared_gate_up"
        found |= {
            "gate.e_score_correction_bias": _Tensor("select_bias", (e,), whole),
            of + gate: _Tensor(first, (s, h), _matrix(every, 0)),
            of + up: _Tensor(first, (s, h), _matrix(every, 1)),
            of + down: _Tensor("shared_down", (h, s), swapped),
        }
    return found


def _matrix(*index: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that returns a transposed matrix of an array."""
    return lambda array: array[index].T


# ------------------------------------------------------------------------------------------ checks


def _with_dot(prefix: str) -> str:
    return prefix if not prefix or prefix.endswith(".") else prefix + "."


def _as_numpy(name: str, value: Any) -> np.ndarray:
    """Return a PyTorch, JAX or numpy array of floats as a numpy array, or raise an error."""
    bfloat16 = np.dtype(jnp.bfloat16)
    if type(value).__module__.split(".")[0] == "torch":
        torch = importlib.import_module("torch")
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            return value.view(torch.int16).numpy().view(bfloat16)
        is_float = value.dtype.is_floating_point and value.dtype.itemsize >= 2
        found = f"{value.dtype}{list(value.shape)}"
        value = value.numpy() if is_float else value
    else:
        value = np.asarray(value)
        is_float = value.dtype.itemsize >= 2 and jnp.issubdtype(value.dtype, jnp.floating)
        found = short(value)
    if not is_float:
        raise TypeError(
            f"{name} must hold floats of 16 bits or more; got {found}. Cast it, or dequantize the "
            "model first"
        )
    return value


def _checked(name: str, value: Any, shape: tuple[int, ...], sizes: _Sizes) -> np.ndarray:
    """Return an array as a numpy array, or raise an error unless it has this shape."""
    array = _as_numpy(name, value)
    if array.shape != shape:
        raise ValueError(
            f"{name} must have the shape {list(shape)}, because config has {sizes}; got "
            f"{short(array)}. Pass the configuration of this model"
        )
    return array


def _check_names(argument: str, names: Iterable[str], expected: Iterable[str], remedy: str) -> None:
    """Raise an error unless the names are those that are expected."""
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


def _remedy(names: set[str], state_dict: Mapping[str, Any]) -> str:
    """Return what to do if the names of a block are wrong."""
    if any(re.search("_(blocks|scales|scale_inv)$", name) for name in names):
        return "The model is quantized: dequantize it first"
    if any(name.startswith(("experts.", "gate.", "router.")) for name in names):
        return "Pass config and state_dict of the same model, with all tensors of the block"
    return _known_prefixes(state_dict)


def _known_prefixes(state_dict: Mapping[str, Any]) -> str:
    """Return a message that names the first blocks of a state dict."""
    found = (re.match(r"(.*?)\.?\bexperts\.", name) for name in state_dict)
    prefixes = list(dict.fromkeys(match[1] for match in found if match))
    if not prefixes:
        return "No name of the state dict has experts: it has no block of these models"
    more = f" and {len(prefixes) - 2} more" if len(prefixes) > 2 else ""
    return f"Pass the prefix of a block: {', '.join(map(repr, prefixes[:2]))}{more}"
