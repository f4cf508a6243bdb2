"""Define ``Experts``, the pytree with the weights of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from ..ad import accumulation_dtype, fixed
from ..checks import as_array, check_static, short
from ..experts.activations import gated
from ..formats.formats import Quantized
from ..grouped.quantized import RESULT_DTYPES, check_experts, is_quantized, without_gradient
from ..grouped.weights import (
    BLOCK,
    QArrayLike,
    QuantizedExperts,
    decode_experts,
    floats_to_train,
    quantize_weights,
)
from .lora import LoRA, check_lora, draw_lora, merge, spec_of

Activation: TypeAlias = Callable[[jax.Array], jax.Array]
Names: TypeAlias = str | tuple[str, ...] | None  # an entry of a ``PartitionSpec``
WEIGHTS = "w_in", "w_out"  # the fields that may be ``QuantizedExperts``
BIASES = "b_in", "b_out"
ADAPTERS = {"lora_in": "w_in", "lora_out": "w_out"}  # adapter: weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Totals:
    """The arrays to which products add the gradients of the weights of ``Experts``, in float32.
    ``accumulate_grads`` creates them. In the forward pass, they are zeros."""

    w_in: Any = None
    w_out: Any = None
    name: str = dataclasses.field(default="", metadata=dict(static=True))
    """A name that ``accumulate_grads`` gives to the ``Experts`` of these totals."""

    def of(self, experts: Experts) -> Totals:
        """Return a copy with the fields ``w_in`` and ``w_out`` of ``experts``."""
        return dataclasses.replace(self, w_in=experts.w_in, w_out=experts.w_out)

    def like(self, others: Totals) -> Totals:
        """Return the totals in the shapes of ``others``."""
        return jax.tree.map(lambda x, other: jnp.reshape(x, other.shape), self, others)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Experts:
    """The weights of experts, as a pytree. An expert is a network with two matrix products.

    Expert e maps a token to ``activation(x @ w_in[e] + b_in[e]) @ w_out[e] + b_out[e]``. The arrays
    are leaves of the pytree, and ``activation`` is static. A shared expert, which is applied to all
    tokens, has arrays without the axis E. Inside ``jax.shard_map``, the axis E has only the L
    experts of the rank.

    Both ``w_in`` and ``w_out`` are arrays with the dtype of the tokens, or both are
    ``QuantizedExperts``. With ``QuantizedExperts``, products are in FP8 (docs/fp8.md), tokens are
    bfloat16 or float32, and H and I of the weights are multiples of 128 (``padded``). Quantized
    weights of a shared expert keep the axis E, of size 1, and are decoded to the dtype of the
    tokens.
    """

    w_in: Any
    """The first weights: [E, H, 2, I] with the gate at index 0 and up at index 1, or [E, H, I] for
    experts without a gate; or ``QuantizedExperts`` of one of these shapes."""
    w_out: Any
    """The second weights: [E, I, H], or ``QuantizedExperts`` of this shape."""
    b_in: Any = None
    """Biases of the first product, [E, 2, I], or [E, I] without a gate; or None."""
    b_out: Any = None
    """Biases of the second product, [E, H], or None. Router weights multiply these biases, too."""
    output_gate: Any = None
    """[H] or None, only for a shared expert of ``moe``. ``sigmoid(x @ output_gate)`` multiplies the
    expert's outputs, as in Qwen2-MoE."""
    _: dataclasses.KW_ONLY
    activation: Activation | None = dataclasses.field(default=None, metadata=dict(static=True))
    """A function that maps floats [C, 2I], with gate and up side by side, to [C, I], such as
    ``gated(jax.nn.gelu)``. Without a gate, it maps [C, I] to [C, I], such as ``jax.nn.gelu``. A
    result row must depend only on its input row. None means ``gated(jax.nn.silu)``, and is an error
    without a gate. In ``moe_mlp``, the function may read arrays of the enclosing function, and
    these arrays get gradients. Input rows without a token contain the values of a row with a token,
    or 0.5 if no row has one. With a tensor axis, each rank passes only its columns, so the function
    must apply the same formula to all columns. Define the function once, because JAX traces a
    program again for each new function."""
    weigh_input: bool = dataclasses.field(default=False, metadata=dict(static=True))
    """True if router weights multiply the inputs of experts and not their outputs, as in Llama 4.
    The layer then computes the sum of ``f_e(weight_e * x)``, where ``f_e`` is expert e. Each
    product ``weight_e * x`` is rounded to the dtype of ``x``, and kept for the backward pass. If
    products are in FP8 and tokens arrive in FP8, the weights also multiply the row scales."""
    lora_in: LoRA | None = None
    """An adapter of ``w_in``, or None. If there is an adapter of ``w_in`` or ``w_out``, both
    weights are frozen: their gradients are zeros, and are not computed. Biases have gradients."""
    lora_out: LoRA | None = None
    """An adapter of ``w_out``, or None."""
    totals: Totals | None = None
    """The ``Totals`` that ``accumulate_grads`` creates, or None."""

    def replace(self, **fields: Any) -> Experts:
        """Return a copy with some fields replaced. A copy with other weights has no totals."""
        if not fields.keys().isdisjoint(WEIGHTS):
            fields.setdefault("totals", None)
        return dataclasses.replace(self, **fields)

    def in_fp8(self) -> Experts:
        """Return experts whose products are in FP8, for training.

        Each call of a layer quantizes the weights, and keeps the FP8 values, one byte per weight,
        for the backward pass. With ``num_chunks`` or fetched weights, the backward pass quantizes
        again instead. The derivative of quantization is defined as the identity, so the weights
        have gradients. To quantize once for several micro-batches, call ``quantize_experts(experts,
        trainable=True)`` instead. Both return ``padded`` experts.

        Raises:
          TypeError: if the weights are already in FP8.
        """
        floats = self.map_weights(floats_to_train).padded()
        return floats.map_weights(lambda w: QuantizedExperts(source=w))

    def padded(self, *, outputs: bool = True) -> Experts:
        """Return the experts with zeros appended, so that H and I are multiples of 128.

        Layers in FP8 accept padded experts with unpadded tokens. If the activation maps zeros to
        zeros, padding does not change results and gradients, and its gradients are zeros.

        Args:
          outputs: False to leave the last axis of ``w_out`` and ``b_out`` unpadded. Only the
            backward pass sums over this axis, so a forward pass alone does not need its padding.
        """
        first, last = self.w_out.ndim - self.w_in.ndim - 2, (-1,) * outputs
        axes = dict(w_in=(first, -1), w_out=(-2, *last), b_in=(-1,), b_out=last)
        found = {}
        for name, of_name in axes.items():
            array = getattr(self, name)
            if array is not None and any(array.shape[axis] % BLOCK for axis in of_name):
                widths = [(0, 0)] * array.ndim
                for axis in of_name:
                    widths[axis] = (0, -array.shape[axis] % BLOCK)
                found[name] = jnp.pad(array, widths)
        return self.replace(**found)

    def with_lora(
        self, key: jax.Array, *, rank: int, scale: float = 1.0, dtype: DTypeLike | None = None
    ) -> Experts:
        """Return the experts with new adapters of rank r for ``w_in`` and ``w_out``.

        As in the paper on LoRA, ``a`` is random with a normal distribution (variance 1 / K), and
        ``b`` is zero, so new adapters do not change the outputs of experts. The kernels can only
        compute products with adapters if r is a multiple of 8. Without ``dtype``, the adapters have
        the dtype of the weights, or bfloat16 if the weights are in FP8. ``moe_partition_specs``
        returns the placements of the adapters.
        """
        dtype = getattr(self.w_out, "dtype", jnp.bfloat16) if dtype is None else dtype
        lead, keys = len(self.w_out.shape) - 2, jax.random.split(key)
        draw = partial(draw_lora, num_lead=lead, rank=rank, scale=scale, dtype=dtype)
        return self.replace(lora_in=draw(keys[0], self.w_in), lora_out=draw(keys[1], self.w_out))

    def merge_lora(self) -> Experts:
        """Return the experts without adapters, after the adapters are added to the weights.

        The new weights ``w + scale * a b`` are computed in float32 (float64 for float64 weights),
        and rounded once. Weights in FP8 raise a TypeError.
        """
        lead = len(self.w_out.shape) - 2
        w_in, w_out = merge(self.w_in, self.lora_in, lead), merge(self.w_out, self.lora_out, lead)
        return self.replace(w_in=w_in, w_out=w_out, lora_in=None, lora_out=None)

    def map_weights(self, function: Callable[[Any], Any]) -> Experts:
        """Return the experts with ``function(w_in)`` and ``function(w_out)`` as weights."""
        w_in, w_out = function(self.w_in), function(self.w_out)
        return dataclasses.replace(self, w_in=w_in, w_out=w_out)

    @property
    def has_lora(self) -> bool:
        """Return True if there is an adapter, so that the weights are frozen."""
        return self.lora_in is not None or self.lora_out is not None

    @property
    def is_trained_in_fp8(self) -> bool:
        """Return True if the products are in FP8 and the weights have gradients."""
        return isinstance(self.w_in, QuantizedExperts) and self.w_in.source is not None


def quantize_experts(
    w: Experts | ArrayLike | Quantized | QArrayLike | QuantizedExperts,
    *,
    transposed: bool = False,
    trainable: bool = False,
) -> Experts | QuantizedExperts:
    """Quantize weights of experts to ``BlockwiseFp8``, for products in FP8.

    Each 128 x 128 block has one scale: the smallest power of two, at least 2**-117, for which no
    quotient of a weight and the scale exceeds 448. The call reads all weights, so call it once when
    weights are loaded, or once in a training step.

    Quantized values have no gradient. To train a parameter ``w``, call ``quantize_experts(w,
    trainable=True)`` inside the function that is differentiated. Layers then multiply in FP8, and
    ``w`` gets the gradients of the weights.

    Args:
      w: ``Experts``, or one array of weights. Weights of ``Experts`` are first ``padded``. An array
        is bfloat16, float16 or float32 [L, K, N] as in ``grouped_dot``, or [L, K, 2, I] as in
        ``Experts``, where K is a multiple of 128. A ``Quantized``, or an object with ``qvalue`` and
        ``scale`` like a ``QArray`` of qwix, is already quantized, and its values and scales do not
        change. Its values are float8_e4m3fn, shaped like an array of weights. Its scales are
        float32 [L, K / 128, N / 128 rounded up], or [L, K / 128, 2, I / 128 rounded up].
        ``QuantizedExperts`` without a ``source`` do not change, either.
      transposed: True to also return the values as [L, K, N], for the gradient of rows.
      trainable: True to return transposed values, and ``w`` as ``source``, which gets gradients.

    Returns:
      ``QuantizedExperts``, or ``Experts`` that contain them, placed like the weights over a mesh.
      If the size of a shard is not a multiple of 128, XLA may gather its axis. For several layers,
      use ``jax.vmap``. If the weights are already stored as [L, N, K], make a ``QuantizedExperts``
      from them directly.

    Raises:
      TypeError: if an array has the wrong dtype, or if ``trainable`` is True for quantized weights.
      ValueError: if an array has the wrong shape, or contains an infinity or a NaN. Inside
        ``jax.jit``, such a number raises no error, and products with its block are NaN.
    """
    quantize = partial(quantize_weights, transposed=transposed, trainable=trainable)
    if not isinstance(w, Experts):
        return quantize(w)
    if not is_quantized(w.w_in, w.w_out):
        if len(w.w_out.shape) == 2:
            raise ValueError(
                f"experts.w_out must have the shape [E, I, H]; got {short(w.w_out)}. Give a shared "
                "expert an axis E: shared.replace(w_in=shared.w_in[None], "
                "w_out=shared.w_out[None])"
            )
        w = w.padded(outputs=transposed or trainable)
    return w.map_weights(quantize)


def flat(experts: Experts) -> Experts:
    """Return experts without an activation, with gate and up side by side: [..., 2I]."""
    lead = len(experts.w_out.shape) - 2

    def merged(array: Any, axis: int) -> Any:
        return None if array is None else lax.collapse(array, axis, axis + 2)

    w_in, b_in, lora_in = experts.w_in, experts.b_in, experts.lora_in
    if len(w_in.shape) == lead + 3:
        b_in = merged(b_in, lead)
        if isinstance(w_in, QuantizedExperts):
            turned = (merged(x, lead) for x in (w_in.values, w_in.scales))
            w_in = QuantizedExperts(
                *turned, *(merged(x, lead + 1) for x in (w_in.transposed, w_in.source))
            )
        else:
            w_in = merged(w_in, lead + 1)
        if lora_in is not None:
            lora_in = lora_in.replace(b=merged(lora_in.b, lead + 1))
    biases = b_in, experts.b_out
    return Experts(w_in, experts.w_out, *biases, lora_in=lora_in, lora_out=experts.lora_out)


def totals_of(experts: Experts) -> Totals:
    """Return the totals in the shapes of ``flat(experts)``. If a cast of the weights has cast the
    totals, too, return ``Totals`` without arrays."""
    given = experts.totals
    if given is None or given.w_in.dtype != accumulation_dtype(given.w_in.dtype):
        return Totals()
    return given.like(given.of(flat(experts)))


def returned_totals(experts: Experts, totals: Totals) -> Totals | None:
    """Return new totals in the shapes of ``experts.totals``, or None."""
    given = experts.totals
    return given if given is None or not totals.name else totals.like(given)


def paired(home: Experts, spare: Experts) -> Experts:
    """Return ``Experts`` in which each array is replaced by a tuple (home array, spare array)."""
    pair = lambda name: (getattr(home, name), getattr(spare, name))
    biases = (None if getattr(home, name) is None else pair(name) for name in BIASES)
    lora: Any = (jax.tree.map(lambda *arrays: arrays, *pair(name)) for name in ADAPTERS)
    return Experts(*map(pair, WEIGHTS), *biases, **dict(zip(ADAPTERS, lora)))


def specs_of(
    experts: Experts, lead: tuple[Names, ...], tensor: Names, fsdp: Names = None
) -> Experts:
    """Return a ``PartitionSpec`` for each array. The axes in ``lead`` divide the axis E, if any."""
    gate = (None,) * (len(experts.w_in.shape) - len(lead) - 2)
    specs = dict(
        w_in=P(*lead, fsdp, *gate, tensor),
        w_out=P(*lead, tensor, fsdp),
        b_in=P(*lead, *gate, tensor),
        b_out=P(*lead, None),
        output_gate=P(None),
    )

    def spec(name: str) -> Any:
        given = getattr(experts, name)
        if given is None or not isinstance(given, QuantizedExperts):
            return None if given is None else specs[name]
        first, k, *others = specs[name]
        turned, own = P(first, *others, k), specs[name]
        every = dict(values=turned, scales=turned, transposed=own, source=own)
        held = {field: p for field, p in every.items() if getattr(given, field) is not None}
        return QuantizedExperts(**held)

    totals = experts.totals and experts.totals.of(Experts(specs["w_in"], specs["w_out"]))
    lora = {
        name: spec_of(getattr(experts, name), specs[w], len(lead)) for name, w in ADAPTERS.items()
    }
    return experts.replace(**{name: spec(name) for name in specs}, totals=totals, **lora)


def check_weights(
    experts: Any,
    x: Any,
    lead: tuple[int, ...] | None = None,
    *,
    name: str = "experts",
) -> Experts:
    """Return experts with JAX arrays. Raise an error if they do not fit the tokens [..., H].
    ``lead`` is (E,), or () for a shared expert, or None for any E."""
    check_type(experts, name)
    if experts.has_lora:
        experts = experts.map_weights(partial(jax.tree.map, fixed)).replace(totals=None)
    hidden = x.shape[-1]
    in_fp8 = any(isinstance(getattr(experts, field), QuantizedExperts) for field in WEIGHTS)
    found: dict[str, Any] = {}
    for field in WEIGHTS:
        w, label = getattr(experts, field), f"{name}.{field}"
        if isinstance(w, tuple | list):
            raise TypeError(
                f"{label} must be one array; got a {type(w).__name__} of {len(w)}. Put gate and up "
                "on an axis of their own: jnp.stack((gate, up), axis=-2)"
            )
        if in_fp8 and lead != ():
            found[field] = _check_quantized(label, w, may_be_pairs=field == "w_in")
        elif in_fp8:
            found[field] = _decoded(label, w, x.dtype)
        else:
            found[field] = as_array(w)
            check_static(label, found[field])
    w_in, w_out = found.values()
    lead = w_in.shape[:1] if lead is None else lead
    first = "E, " * len(lead)
    width = w_in.shape[-1] if w_in.shape else 0
    inputs = hidden + (-hidden % BLOCK if in_fp8 and lead != () else 0)
    gated_shape, plain_shape = (*lead, inputs, 2, width), (*lead, inputs, width)
    if w_in.shape not in (gated_shape, plain_shape):
        size = f"{lead[0]} experts and " if lead else ""
        remedy, half = "", w_in.shape[len(lead)] // 2 if len(w_in.shape) > len(lead) else 0
        if w_in.shape == (*lead, 2 * half, hidden) and half in w_out.shape:  # as in PyTorch
            split = ", ".join(map(str, (*lead, 2, half, hidden)))
            remedy = f". Transpose it: jnp.moveaxis({name}.w_in.reshape({split}), -1, -3)"
        raise ValueError(
            f"{name}.w_in must have the shape [{first}H, 2, I], or [{first}H, I] without a gate, "
            f"for {size}H={inputs}, because x is {short(x)}"
            f"{f' and FP8 needs multiples of {BLOCK}' * (inputs > hidden)}; got {_short(w_in)}"
            f"{remedy}"
        )
    is_gated = w_in.shape == gated_shape
    if w_out.shape not in ((*lead, width, hidden), (*lead, width, inputs)):
        side_by_side = not is_gated and w_out.shape == (*lead, width // 2, hidden)
        remedy = f". If {name}.w_in holds gate and up side by side, reshape it to [{first}H, 2, I]"
        raise ValueError(
            f"{name}.w_out must have the shape {[*lead, width, hidden]}, because {name}.w_in is "
            f"{_short(w_in)}; got {_short(w_out)}"
            f"{remedy if side_by_side else ''}"
        )
    gate = (2,) * is_gated
    if lead == () and experts.weigh_input:
        raise ValueError(f"{name}.weigh_input must be False for a shared expert; got True. Omit it")
    if lead != () and experts.output_gate is not None:
        raise ValueError(
            f"{name}.output_gate must be None except in the argument shared of moe; got "
            f"{short(as_array(experts.output_gate))}. Call moe, or multiply the outputs of your "
            "shared expert by jax.nn.sigmoid(x @ output_gate)"
        )
    shapes = dict(b_in=(*lead, *gate, width), b_out=(*lead, w_out.shape[-1]), output_gate=(hidden,))
    for field, shape in shapes.items():
        bias = getattr(experts, field)
        if bias is None:
            continue
        found[field] = bias = as_array(bias)
        if bias.shape != shape:
            raise ValueError(
                f"{name}.{field} must have the shape {list(shape)}, because {name}.w_in is "
                f"{_short(w_in)}; got {short(bias)}"
            )
    if in_fp8 and lead != ():
        _check_fp8(name, found, x)
    for field, array in found.items():
        own = array.source if isinstance(array, QuantizedExperts) else array
        if own is not None and own.dtype != x.dtype:
            raise TypeError(
                f"{name}.{field} must have the dtype of x, {x.dtype}; got {short(own)}. Cast it"
            )
    for field, w in ADAPTERS.items():
        if (lora := getattr(experts, field)) is not None:
            found[field] = check_lora(f"{name}.{field}", lora, found[w], len(lead), x)
    if experts.activation is None and not is_gated:
        raise ValueError(
            f"{name}.activation must be a function for {name}.w_in without a gate; got None. Pass "
            f"it, for example jax.nn.gelu, or pass w_in [{first}H, 2, I]; got {_short(w_in)}"
        )
    if not callable(activation_of(experts)):
        raise TypeError(f"{name}.activation must be a function; got {experts.activation!r}")
    return dataclasses.replace(experts, **jax.tree.map(jnp.asarray, found))


def activation_of(experts: Experts) -> Activation:
    return gated(jax.nn.silu) if experts.activation is None else experts.activation


def check_type(experts: object, name: str) -> None:
    if not isinstance(experts, Experts):
        got = short(experts) if hasattr(experts, "shape") else type(experts).__name__
        raise TypeError(f"{name} must be ma.Experts(w_in, w_out); got {got}")


def _check_quantized(name: str, w: object, *, may_be_pairs: bool) -> QuantizedExperts:
    """Return weights in FP8, or raise an error. Weights with a source may have no values."""
    if isinstance(w, QuantizedExperts) and w.values is None and w.source is not None:
        return QuantizedExperts(source=as_array(w.source))
    found = check_experts(name, w, may_be_pairs=may_be_pairs)
    # FP8 values must have no gradient, because an optimizer updates only the source.
    numbers = jax.tree.map(without_gradient, dataclasses.replace(found, source=None))
    return dataclasses.replace(numbers, source=found.source)


def _decoded(name: str, w: object, dtype: Any) -> jax.Array:
    """Return the decoded weights of a shared expert, or raise an error."""
    found = _check_quantized(name, w, may_be_pairs=True)
    if found.source is not None or found.shape[0] != 1:
        raise ValueError(
            f"{name} must be weights of one expert, [1, ...], without a source; got "
            f"{_short(found)}. Pass floats for a shared expert that is trained"
        )
    return jnp.moveaxis(decode_experts(found.values, found.scales, dtype), -1, 1)[0]


def _check_fp8(name: str, found: dict[str, QuantizedExperts], x: Any) -> None:
    """Raise an error if products in FP8 or their gradients do not support these weights."""
    if x.dtype not in RESULT_DTYPES:
        raise TypeError(
            f"x must be bfloat16 or float32 with products in FP8; got {short(x)}. Cast it"
        )
    are_trained = {found[field].source is not None for field in WEIGHTS}
    if len(are_trained) > 1:
        raise ValueError(
            f"{name}.w_in and {name}.w_out must both have a source or none; got one without. "
            "Quantize both in one call: ma.quantize_experts(experts)"
        )
    for field in WEIGHTS:
        _, k, *gate, n = found[field].shape
        sizes = (n,) * bool(gate) + (k, n) * any(are_trained)
        if any(size % BLOCK for size in sizes):
            raise ValueError(
                f"{name}.{field} must have rows and columns in multiples of {BLOCK} with a gate or "
                f"with gradients of weights in FP8; got {_short(found[field])}. Call "
                f"{name}.padded() before the weights are quantized"
            )


def _short(w: object) -> str:
    if isinstance(w, QuantizedExperts):
        return f"QuantizedExperts{list(w.shape)}"
    return short(w)
