"""Define low-rank adapters of the weights of experts (LoRA, Hu et al., arXiv:2106.09685).

The adapter of weights W [K, N] is ``scale * a b`` with a [K, r] and b [r, N]. Rows are multiplied
by W and by the adapter one after the other: ``rows W + scale (rows a) b``. So no array of the shape
of W exists for the adapter or for its gradient, and W may be in FP8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..ad import accumulation_dtype
from ..checks import as_array, check_factor, short


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LoRA:
    """A low-rank adapter of weights W of ``Experts``: W becomes ``W + scale * a b``.

    W is then frozen. The arrays have the dtype of the tokens. The adapter of a shared expert has no
    axis E.
    """

    a: Any
    """[E, K, r], where K is H for ``lora_in``, and I for ``lora_out``."""
    b: Any
    """The axes of the weights with r in place of K: [E, r, 2, I] or [E, r, I] for ``lora_in``, and
    [E, r, H] for ``lora_out``."""
    _: dataclasses.KW_ONLY
    scale: float = dataclasses.field(default=1.0, metadata=dict(static=True))
    """A number above 0: alpha / r in the paper."""

    def replace(self, **fields: Any) -> LoRA:
        """Return the adapter with other fields."""
        return dataclasses.replace(self, **fields)


def add_product(
    product: jax.Array, rows: jax.Array, lora: LoRA | None, dot: Callable[..., jax.Array]
) -> jax.Array:
    """Return the product of rows and weights with that of their adapter. ``dot`` multiplies rows by
    arrays of the adapter."""
    if lora is None:
        return product
    return product + dot(dot(rows, lora.a) * lora.scale, lora.b)


def merge(w: jax.Array, lora: LoRA | None, num_lead: int) -> jax.Array:
    """Return weights with their adapter, computed in the dtype of sums and rounded once. Before K,
    they have ``num_lead`` axes."""
    if lora is None:
        return w
    dtype = accumulation_dtype(w.dtype)
    lead, columns = "e" * num_lead, "gn"[num_lead + 1 - w.ndim :]
    subscripts = f"{lead}kr,{lead}r{columns}->{lead}k{columns}"
    ab = jnp.einsum(subscripts, lora.a.astype(dtype), lora.b.astype(dtype), precision="highest")
    return (w.astype(dtype) + lora.scale * ab).astype(w.dtype)


def check_lora(name: str, lora: Any, w: Any, num_lead: int, x: Any) -> LoRA:
    """Return an adapter with JAX arrays that fits weights with ``num_lead`` axes before K and the
    dtype of tokens x, or raise an error."""
    if not isinstance(lora, LoRA):
        raise TypeError(f"{name} must be a LoRA or None; got {type(lora).__name__}")
    check_factor(f"the scale of {name}", lora.scale)
    a, b = as_array(lora.a), as_array(lora.b)
    *lead, k = w.shape[: num_lead + 1]
    rank = a.shape[-1] if a.ndim else 0
    for part, array, shape in (
        ("a", a, (*lead, k, rank)),
        ("b", b, (*lead, rank, *w.shape[num_lead + 1 :])),
    ):
        if array.shape != shape or not rank:
            sizes = [*shape[:-1], "r"] if part == "a" else list(shape)
            raise ValueError(
                f"{name}.{part} must have the shape [{', '.join(map(str, sizes))}], because its "
                f"weights have the shape {list(w.shape)}; got {short(array)}"
            )
        if array.dtype != x.dtype:
            raise TypeError(
                f"{name}.{part} must have the dtype of x, {x.dtype}; got {short(array)}. Cast it"
            )
    return lora.replace(a=jnp.asarray(a), b=jnp.asarray(b))


def spec_of(lora: LoRA | None, weights: P, num_lead: int) -> LoRA | None:
    """Return the placement of the adapter of weights with a placement."""
    if lora is None:
        return None
    every = tuple(weights)
    lead, others = every[:num_lead], every[num_lead + 1 :]
    return lora.replace(a=P(*lead, every[num_lead], None), b=P(*lead, None, *others))
