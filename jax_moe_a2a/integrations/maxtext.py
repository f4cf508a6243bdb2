"""Compute the routed experts of MaxText with ``moe_mlp``, without changes to MaxText's source."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import jax_moe_a2a as ma

from .._src.checks import check_bool
from .._src.layer.parameters import names_of
from .._src.plan.options import check_exchange


class _RoutedMoE(Protocol):
    """The attributes and methods of MaxText's ``RoutedMoE`` that this module uses."""

    mesh: Mesh
    config: Any
    dtype: DTypeLike
    rngs: Any
    num_experts: int
    is_hash_routing: bool
    activation_fn: Callable[[jax.Array], jax.Array]
    _expert_parallelism_name: str | tuple[str, ...]
    _tensor_parallelism_name: str
    _logical_to_mesh_axes: Callable[..., P | None]
    _maybe_shard_with_pspec: Callable[..., jax.Array]
    apply_ffn_activation: Callable[..., jax.Array]
    get_ragged_buffer_factor: Callable[[], float]
    get_topk: Callable[..., tuple[jax.Array, jax.Array]]
    load_balance_loss: Callable[..., Any]
    megatron_seq_aux_loss: Callable[..., jax.Array]
    should_update_load_balance: Callable[[], bool]


_KERNELS = "w0_kernel w1_kernel wo_kernel w0_bias w1_bias wo_bias"
# The supported version of MaxText, and the parameters of the methods that this module uses.
_VERSION = "0.2.5"
_SIGNATURES = {
    "_logical_to_mesh_axes": "logical_name",
    "_maybe_shard_with_pspec": "inputs pspec logical_axes",
    "apply_ffn_activation": "layer_w0 layer_w1",
    "should_update_load_balance": "",
    "sparse_matmul": f"inputs gate_logits pre_bias_logits {_KERNELS} input_ids "
    "forced_routed_experts",
    "get_topk": "gate_logits pre_bias_logits rngs input_ids forced_routed_experts",
    "load_balance_loss": "top_k_indices logits density_prob",
    "megatron_seq_aux_loss": "scores",
    "get_ragged_buffer_factor": "",
}

_ENABLED = "while jax_moe_a2a computes the experts"
# Options of MaxText's config that this module supports only with these values.
_REQUIRED: dict[str, Any] = dict(
    sparse_matmul=True,
    te_moe_block=False,
    use_batch_split_schedule=False,
    quantization="",
    moe_quantize_token_all_gather=False,
    moe_quantize_combine_bwd_method="",
    moe_dropless_fallback=None,
    defer_small_all_reduces=False,
    log_required_ragged_buffer_factor=False,
    moe_log_max_load_ratio=False,
    ici_pipeline_parallelism=1,
    dcn_pipeline_parallelism=1,
    enable_diloco=False,
)
_REMEDIES = dict(
    quantization="For experts in FP8, pass fp8=True to enable. ",
    moe_quantize_token_all_gather="For tokens that travel in FP8, pass "
    "exchange=ma.Exchange(token_format=ma.BlockwiseFp8()) to enable. ",
    moe_quantize_combine_bwd_method="For partial sums of another dtype, pass "
    "exchange=ma.Exchange(wire_dtype=...) to enable. ",
    moe_dropless_fallback="With ragged_buffer_factor=-1, no token is dropped. ",
)


class _Options(NamedTuple):
    """The arguments of ``enable``."""

    fp8: bool
    exchange: ma.Exchange
    group: Mapping[str, Any]
    """Arguments of ``Group``."""


_replaced: dict[str, Any] = {}
"""The original methods of ``RoutedMoE`` that ``enable`` has replaced, by name."""


def enable(
    *,
    fp8: bool = False,
    exchange: ma.Exchange | None = None,
    **group_options: Any,
) -> None:
    """Make all MaxText models of this process compute their routed experts with ``moe_mlp``.

    The call imports MaxText if necessary, and replaces ``RoutedMoE.sparse_matmul`` in the imported
    module. Call it before MaxText builds its model or traces its train step. A second call replaces
    the arguments of the first one. Programs that JAX has already traced do not change.

    Args:
      fp8: True for training with products in FP8, as with ``Experts.in_fp8``; False for products in
        MaxText's ``dtype``.
      exchange: how tokens travel, an ``Exchange`` with ``token_format``, ``wire_dtype`` or
        ``alignment``. MaxText's config determines all other options of the exchange.
      **group_options: arguments of ``Group``, for example ``num_sms`` or ``timeout``.

    Raises:
      ImportError: if MaxText 0.2.5 is not installed.
      TypeError: if an option of the group is unknown, or another argument has the wrong type.
      ValueError: if ``exchange`` sets an option that MaxText's config determines.
    """
    ma.Group(axis_name="expert", size=1, **group_options)
    exchange = check_exchange(exchange, has_chunks=True)
    for name in ("capacity", "capacity_factor", "replicated", "num_chunks"):
        if (value := getattr(exchange, name)) is not None:
            raise ValueError(
                f"{name} must be omitted in the exchange of enable, because MaxText's config "
                f"decides it; got {value!r}. Set it in the config"
            )
    routed_moe = _supported_layer()
    disable()
    options = _Options(check_bool("fp8", fp8), exchange, group_options)
    init, call = routed_moe.__init__, routed_moe.__call__

    @functools.wraps(init)
    def checked_init(self: _RoutedMoE, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        _check_config(self)  # already here, because some schedules never call the layer's methods

    @functools.wraps(call)
    def checked_call(self: _RoutedMoE, *args: object, **kwargs: object) -> Any:
        _check_config(self)  # for layers that were created before ``enable``
        return call(self, *args, **kwargs)

    @functools.wraps(routed_moe.sparse_matmul)
    def sparse_matmul(self: _RoutedMoE, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        return _sparse_matmul(options, self, *args, **kwargs)

    methods: dict[str, Callable[..., Any]] = {
        "__init__": checked_init,
        "__call__": checked_call,
        "sparse_matmul": sparse_matmul,
    }
    for name, method in methods.items():
        _replaced[name] = getattr(routed_moe, name)
        setattr(routed_moe, name, method)


def disable() -> None:
    """Restore the original methods of MaxText if ``enable`` has replaced them."""
    while _replaced:
        name, method = _replaced.popitem()
        setattr(importlib.import_module("maxtext.layers.moe").RoutedMoE, name, method)


def _supported_layer() -> Any:
    """Return MaxText's class ``RoutedMoE``, or raise an error if its version is not supported."""
    needed = f"enable needs MaxText {_VERSION}"
    try:
        found = importlib.import_module("maxtext.version").__version__
    except ImportError as error:
        remedy = f"pip install maxtext=={_VERSION}"
        raise ImportError(f"{needed}; found none that Python can import: {remedy}") from error
    if found != _VERSION:
        raise ImportError(f"{needed}; found {found}. Install that version")
    layer = importlib.import_module("maxtext.layers.moe").RoutedMoE
    for name, expected in _SIGNATURES.items():
        method = _replaced.get(name) or getattr(layer, name, None)
        names = "none" if method is None else " ".join(inspect.signature(method).parameters)
        names = names.removeprefix("self").strip()
        if names != expected:
            raise ImportError(
                f"{needed}, where RoutedMoE.{name} has the parameters "
                f"({expected.replace(' ', ', ')}); found a MaxText that says it is {found} with "
                f"({names.replace(' ', ', ')}). Install that version"
            )
    return layer


def _check_config(layer: _RoutedMoE) -> None:
    """Raise an error if this module does not support an option of MaxText's config."""
    own = "call disable() to use MaxText's own implementation"
    for name, expected in _REQUIRED.items():
        value = getattr(layer.config, name, expected)
        if (value or expected) and value != expected:  # False, "" and None are equal here
            raise ValueError(
                f"{name} must be {expected!r} {_ENABLED}; got {name}={value!r}. "
                f"{_REMEDIES.get(name, '')}Set it to {expected!r}, or {own}"
            )
    attention = str(getattr(layer.config, "attention", ""))
    if attention.startswith("vllm"):
        raise ValueError(
            f"attention must not be that of vLLM, which has experts of its own, {_ENABLED}; got "
            f"attention={attention!r}. Set another attention, or {own}"
        )


class _Axes(NamedTuple):
    """The mesh axes that divide the experts, the columns and the tokens of a layer."""

    expert: tuple[str, ...]
    tensor: tuple[str, ...]
    tokens: P
    """The ``PartitionSpec`` of tokens [batch, sequence]."""
    is_replicated: bool
    """True if all ranks along the expert axes have the same tokens, as in decoding."""

    @property
    def divided(self) -> tuple[str, ...]:
        """Return the mesh axes that divide the tokens."""
        return tuple(axis for entry in self.tokens for axis in names_of(entry))


def _axes_of(layer: _RoutedMoE, batch_size: int) -> _Axes:
    """Return the axes of a layer for ``batch_size`` sequences, or raise an error."""
    size = lambda axes: math.prod(layer.mesh.shape[axis] for axis in axes)
    present = lambda names: tuple(axis for axis in names_of(names) if axis in layer.mesh.shape)
    expert = present(layer._expert_parallelism_name)
    if not expert:
        raise ValueError(
            f"mesh_axes must have the axis {layer._expert_parallelism_name!r} {_ENABLED}; got "
            f"{tuple(layer.mesh.shape)}. Without expert parallelism, its size is 1"
        )
    # As in MaxText, treat a batch of one sequence as decoding.
    batch = "activation_batch" if batch_size > 1 else "decode_batch_moe"
    spec = layer._logical_to_mesh_axes((batch, "activation_norm_length", None)) or P()
    first, second, *_ = (*tuple(spec), None, None)
    if size(expert) == 1 and batch_size % size(names_of(first)):
        first = None
    tokens = P(first, second)
    divided = {axis for entry in tokens for axis in names_of(entry)}
    missing = [axis for axis in expert if axis not in divided and layer.mesh.shape[axis] > 1]
    if missing and divided & {axis for axis in expert if layer.mesh.shape[axis] > 1}:
        raise ValueError(
            f"logical_axis_rules must divide tokens over all axes of the experts {expert} or over "
            f"none of them {_ENABLED}; got {tokens} for the axes {batch!r} and "
            "'activation_norm_length'. Change the rules of these axes"
        )
    return _Axes(expert, present(layer._tensor_parallelism_name), tokens, bool(missing))


def _sparse_matmul(
    options: _Options,
    layer: _RoutedMoE,
    inputs: jax.Array,
    gate_logits: jax.Array,
    pre_bias_logits: jax.Array | None,
    *weights: jax.Array | None,
    input_ids: jax.Array | None = None,
    forced_routed_experts: jax.Array | None = None,
    **named: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return the results of ``RoutedMoE.sparse_matmul``: outputs, balance loss and bias updates."""
    _check_config(layer)  # a subclass may override the checked __call__
    named |= dict(zip(_KERNELS.split(), weights))
    axes = _axes_of(layer, inputs.shape[0])
    tensor = axes.tensor or None
    columns, rows = P(axes.expert, None, tensor), P(axes.expert, tensor)
    given: dict[str, jax.Array | None] = dict(
        inputs=inputs,
        gate_logits=gate_logits,
        pre_bias_logits=pre_bias_logits,
        input_ids=input_ids,
        forced_routed_experts=forced_routed_experts,
    )
    specs = dict.fromkeys(given, axes.tokens)
    specs |= dict(w0_kernel=columns, w1_kernel=columns, wo_kernel=rows)
    specs |= dict(w0_bias=rows, w1_bias=rows, wo_bias=P(axes.expert))
    # Cast weights before they are gathered over data axes, so that fewer bytes travel.
    given |= {n: None if w is None else w.astype(layer.dtype) for n, w in named.items()}
    arrays = {n: array for n, array in given.items() if array is not None}
    placed = {n: layer._maybe_shard_with_pspec(array, specs[n]) for n, array in arrays.items()}
    body = jax.shard_map(
        functools.partial(_moe_body, options, layer, axes),
        mesh=layer.mesh,
        in_specs=({n: specs[n] for n in placed}, P()),
        out_specs=(P(*axes.tokens, tensor), P(), P()),
        check_vma=layer.config.check_vma,
    )
    output, loss, updates = body(placed, layer.rngs)
    if _has_loss(layer) and _is_loss_of_sequences(layer):
        # Compute this loss outside of shard_map, because the mesh may divide the sequences.
        scores = gate_logits if pre_bias_logits is None else pre_bias_logits
        loss = layer.megatron_seq_aux_loss(scores)
    return output, loss, updates


def _moe_body(
    options: _Options, layer: _RoutedMoE, axes: _Axes, arrays: dict[str, jax.Array], rngs: object
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Compute the results of ``sparse_matmul`` on a rank, inside ``jax.shard_map``."""
    config, get = layer.config, arrays.get
    x, gate_logits = arrays["inputs"], arrays["gate_logits"]
    pre_bias_logits = get("pre_bias_logits")
    choice = get("input_ids"), get("forced_routed_experts")
    weights, ids = layer.get_topk(gate_logits, pre_bias_logits, rngs, *choice)
    if choice[1] is not None:  # in MaxText, an id outside [0, E) means no expert
        ids = jnp.where((ids >= 0) & (ids < layer.num_experts), ids, -1)

    # MaxText ignores num_moe_token_chunks without use_ring_of_experts.
    num_chunks = config.num_moe_token_chunks if config.use_ring_of_experts else 1
    scores = gate_logits if pre_bias_logits is None else pre_bias_logits
    loss = _balance_loss(layer, scores, ids, num_chunks, axes.divided)
    updates = _bias_updates(layer, ids, axes.divided)

    batch_size, length, _ = x.shape
    top_k = ids.shape[-1]
    tokens, ids, weights = (a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
    row_weights: jax.Array | None = weights
    if _block(layer) == "llama4":
        if top_k != 1:
            raise ValueError(
                "num_experts_per_tok must be 1 for the decoder block llama4, which scales the "
                f"inputs of the experts {_ENABLED}; got num_experts_per_tok={top_k}"
            )
        scale = jax.nn.sigmoid(weights.astype(jnp.float32))
        tokens, row_weights = (tokens.astype(jnp.float32) * scale).astype(layer.dtype), None
    b_out = get("wo_bias")
    if b_out is not None and axes.tensor:
        # The sum over the tensor axis must include the bias only once.
        b_out = jnp.where(lax.axis_index(axes.tensor) == 0, b_out, 0)
    gate_and_up = lambda *names: jnp.stack([arrays[name] for name in names], axis=-2)
    experts = ma.Experts(
        gate_and_up("w0_kernel", "w1_kernel"),
        arrays["wo_kernel"],
        gate_and_up("w0_bias", "w1_bias") if "w0_bias" in arrays else None,
        b_out,
        activation=_activation(layer),
    )
    y: Any = ma.moe_mlp(
        tokens,
        ma.RouterChoices(ids, row_weights),
        experts.in_fp8() if options.fp8 else experts,
        group=ma.Group(layer.mesh, axes.expert, **options.group),
        num_experts=layer.num_experts,
        exchange=dataclasses.replace(
            options.exchange,
            capacity_factor=_capacity_factor(layer),
            replicated=axes.is_replicated,
            num_chunks=num_chunks,
        ),
    )
    if axes.is_replicated:
        y = lax.psum(y, axes.expert)
    if axes.tensor:
        y = lax.psum_scatter(y, axes.tensor, scatter_dimension=1, tiled=True)
    return y.reshape(batch_size, length, -1).astype(layer.dtype), loss, updates


def _block(layer: _RoutedMoE) -> str:
    block = layer.config.decoder_block
    return str(getattr(block, "value", block))


def _activation(layer: _RoutedMoE) -> Callable[[jax.Array], jax.Array]:
    config, block = layer.config, _block(layer)
    limit = config.mlp_activations_limit
    if block == "gpt_oss" and config.mlp_activations[0] == "sigmoid":
        return ma.clamped_swiglu(limit)
    if block == "gpt_oss" or (block in ("deepseek", "deepseek4") and limit > 0):
        return lambda rows: layer.apply_ffn_activation(*jnp.split(rows, 2, axis=-1))
    return ma.gated(layer.activation_fn)


def _capacity_factor(layer: _RoutedMoE) -> float | None:
    """Return the capacity of a rank as a multiple of the balanced load, or None to drop no rows."""
    if getattr(layer, "force_dropless", False):
        return None
    factor = layer.get_ragged_buffer_factor()
    return factor if factor > 0 else None


def _has_loss(layer: _RoutedMoE) -> bool:
    return layer.config.load_balance_loss_weight > 0 and not layer.is_hash_routing


def _is_loss_of_sequences(layer: _RoutedMoE) -> bool:
    """Return True if the balance loss is Megatron-LM's loss for each sequence."""
    selected = getattr(layer.config, "moe_use_megatron_seq_aux_loss", False)
    return selected and layer.config.routed_score_func == "sigmoid"


def _balance_loss(
    layer: _RoutedMoE, scores: jax.Array, ids: jax.Array, num_chunks: int, axes: tuple[str, ...]
) -> jax.Array | None:
    """Return the balance loss, averaged over chunks. Return None if there is no loss, or if
    ``_sparse_matmul`` computes a loss for each sequence."""
    if not _has_loss(layer) or _is_loss_of_sequences(layer):
        return None
    probabilities = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(layer.dtype)
    chunks = zip(*(jnp.split(a, num_chunks, axis=1) for a in (ids, probabilities)))
    loss = sum(layer.load_balance_loss(*chunk) for chunk in chunks) / num_chunks
    return lax.pmean(loss, axes) if axes else loss


def _bias_updates(layer: _RoutedMoE, ids: jax.Array, axes: tuple[str, ...]) -> jax.Array | None:
    """Return what to add to the router's selection bias, or None if it is not updated. If gradients
    are accumulated over steps, return the number of choices of each expert instead."""
    if not layer.should_update_load_balance():
        return None
    config = layer.config
    counts = jnp.sum(jax.nn.one_hot(ids.reshape(-1), layer.num_experts, dtype=jnp.int32), axis=0)
    counts = lax.psum(counts, axes) if axes else counts
    if config.gradient_accumulation_steps > 1:
        return counts
    load = counts.astype(jnp.float32)
    return jnp.sign(jnp.mean(load) - load) * config.routed_bias_update_rate
