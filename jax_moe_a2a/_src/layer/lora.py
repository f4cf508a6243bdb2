"""Define ``LoRA``: low-rank adapters of the weights of experts (Hu et al., arXiv:2106.09685).

A layer computes ``rows W + scale (rows a) b`` from frozen weights W [K, N] and their adapter (a,
b). Therefore W may be in FP8, and ``a b`` is never computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ..ad import accumulation_dtype
from ..checks import as_array, check_factor, check_int, short
from ..grouped.weights import QuantizedExperts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LoRA:
    """A low-rank adapter of weights W of ``Experts``: the layer uses ``W + scale * a b``.

    ``a`` and ``b`` have the dtype of the tokens. For a shared expert, they have no axis E.
    """

    a: Any
    """[E, K, r], where K is H for ``lora_in``, and I for ``lora_out``."""
    b: Any
    """``b`` has the shape of W with r in place of K, such as [E, r, 2, I] for ``lora_in``."""
    _: dataclasses.KW_ONLY
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))
    """A number above 0, called alpha / r in the paper."""

    def replace(self, **fields: Any) -> LoRA:
        """Return a copy with some fields replaced."""
        return dataclasses.replace(self, **fields)


def draw_lora(
    key: jax.Array, w: Any, num_lead: int, rank: int, scale: float, dtype: DTypeLike
) -> LoRA:
    """Return an adapter with random a and zero b, for weights with ``num_lead`` axes before K."""
    check_int("rank", rank, least=1)
    *lead, k = w.shape[: num_lead + 1]
    a = jax.random.normal(key, (*lead, k, rank), dtype) * k**-0.5
    return LoRA(a, jnp.zeros((*lead, rank, *w.shape[num_lead + 1 :]), dtype), scale=scale)


def add_product(
    product: jax.Array, rows: Any, lora: LoRA | None, dot: Callable[..., jax.Array]
) -> jax.Array:
    """Return ``product`` plus the product of rows and the adapter, computed with ``dot``."""
    return product if lora is None else product + dot(dot(rows, lora.a) * lora.scale, lora.b)


def merge(w: Any, lora: LoRA | None, num_lead: int) -> jax.Array:
    """Return ``W + scale * a b``. The weights have ``num_lead`` axes before K."""
    if isinstance(w, QuantizedExperts):
        raise TypeError(
            "merge_lora needs float weights; got QuantizedExperts. Merge, then quantize"
        )
    if lora is None:
        return w
    dtype = accumulation_dtype(w.dtype)
    lead, columns = "abcd"[:num_lead], "gn"[num_lead + 1 - w.ndim :]
    a, b, subscripts = lora.a, lora.b, f"{lead}kr,{lead}r{columns}->{lead}k{columns}"
    product = jnp.einsum(subscripts, a.astype(dtype), b.astype(dtype), precision="highest")
    return (w.astype(dtype) + lora.scale * product).astype(w.dtype)


def check_lora(name: str, lora: Any, w: Any, num_lead: int, x: Any) -> LoRA:
    """Return the adapter with JAX arrays. Raise an error if it does not fit ``w`` and ``x``."""
    if not isinstance(lora, LoRA):
        raise TypeError(f"{name} must be a LoRA or None; got {type(lora).__name__}")
    check_factor(f"the scale of {name}", lora.scale)
    parts, rank = {"a": as_array(lora.a), "b": as_array(lora.b)}, (jnp.shape(lora.a) or (0,))[-1]
    first, columns = w.shape[: num_lead + 1], w.shape[num_lead + 1 :]
    for part, shape in {"a": (*first, rank), "b": (*first[:-1], rank, *columns)}.items():
        array, is_shape = parts[part], parts[part].shape == shape and rank > 0
        if not is_shape or array.dtype != x.dtype:
            raise (TypeError if is_shape else ValueError)(
                f"{name}.{part} must be {x.dtype}{list(shape)} with r={rank}, because x has this "
                f"dtype and its weights have the shape {list(w.shape)}; got {short(array)}"
                f"{'. Cast the adapters, or pass dtype= to with_lora' if is_shape else ''}"
            )
    return lora.replace(**jax.tree.map(jnp.asarray, parts))


def spec_of(lora: LoRA | None, weights: P, num_lead: int) -> LoRA | None:
    """Return the adapter's ``PartitionSpec`` from the ``PartitionSpec`` of the weights."""
    if lora is None:
        return None
    lead, k, columns = weights[:num_lead], weights[num_lead], weights[num_lead + 1 :]
    return lora.replace(a=P(*lead, k, None), b=P(*lead, None, *columns))
