"""Define ``grouped_dot``, which multiplies rows by the weights of their experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from .. import scopes
from ..checks import Tail, as_array, check_int, check_tail, is_known, short
from ..formats.formats import Quantized
from . import quantized
from .primitives import bind_dot
from .weights import QuantizedExperts, check_scales


@scopes.products
def grouped_dot(
    rows: ArrayLike | Quantized,
    w: ArrayLike | QuantizedExperts,
    group_sizes: ArrayLike,
    *,
    tail: Tail = "zero",
    num_sms: int | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Multiply the rows of each group by the weights of that group.

    The result is the product that ``lax.ragged_dot`` defines. On Hopper GPUs (compute capability
    9.0), a kernel of this package computes it in bfloat16 and float16. On GPUs of compute
    capability 10.x, cuBLASLt 13.3 to 13.6 computes it. Otherwise, ``lax.ragged_dot`` computes it.
    ``explain`` reports which implementation a program uses. All JAX transformations work, with
    derivatives of any order. A ``vmap`` over any argument is one kernel launch.

    No result or derivative depends on rows after the last group, or on weights of empty groups, so
    these may be NaN. Their gradient is zero. Sums are computed in float32 (float64 for float64
    arrays) and rounded once.

    Rows and weights may be quantized to ``BlockwiseFp8``. A ``dispatch`` with this format quantizes
    rows, and ``quantize_experts`` quantizes weights. docs/fp8.md defines the product of quantized
    arrays, which has no derivatives.

    Args:
      rows: [C, K] of a floating dtype, sorted by group, such as ``recv.rows`` of a ``dispatch``.
        With quantized weights, rows may be a ``Quantized`` with row-major scales, an object with
        ``qvalue`` and ``scale``, or bfloat16, float16 or float32, which the call quantizes.
      w: [L, K, N] with the dtype of ``rows``: the weights of each group; or ``QuantizedExperts``.
      group_sizes: integers [L]: the number of rows of each group (``recv.group_sizes``). If the
        sizes are known when the call is traced, they must not be negative, and their sum must be at
        most C. If sizes are traced, the call ignores rows of groups after row C, and treats a
        negative size as 0. Outside ``jax.jit``, the call checks the sizes, so it waits until the
        device has computed them.
      tail: the values of the result after the last group. With ``"zero"``, they are zeros. With
        ``"unspecified"``, they may be anything, including NaN, also in the gradient of ``rows``.
        This saves the time to write zeros. Use it if all functions that read the result ignore
        these rows, as ``combine`` and ``grouped_dot`` do.
      num_sms: the largest number of multiprocessors (SMs) that the kernel may use, or None for all.
        With 1, most products use 2, because the kernel never divides a cluster of two blocks.
        Other work can then run on the other SMs. Other implementations ignore ``num_sms``.
      preferred_element_type: dtype of the product of quantized arrays: bfloat16 or float32. None
          means bfloat16. It must be None for arrays that are not quantized.

    Returns:
      [C, N] with the dtype of ``rows``. For quantized arrays, the dtype is
      ``preferred_element_type``.

    Raises:
      TypeError: if an argument has the wrong type or dtype.
      ValueError: if an argument has the wrong shape or value. Values of ``group_sizes`` and of
        scales are checked only if they are known when the call is traced.
    """
    sizes = as_array(group_sizes)
    in_fp8 = quantized.is_quantized(rows, w)
    if in_fp8:
        pair, experts = quantized.check_operands(rows, w)
        dtype = quantized.check_dtype(preferred_element_type)
        x, weights = pair.values, experts.values
    else:
        x, weights = as_array(rows), as_array(w)
        _check_arrays(x, weights)
        if preferred_element_type is not None:
            raise ValueError(
                "preferred_element_type must be None for arrays that are not quantized; got "
                f"{preferred_element_type!r}. Cast the result"
            )
    num_rows, num_groups = x.shape[0], weights.shape[0]
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes must be integers; got {short(sizes)}")
    if sizes.shape != (num_groups,):
        raise ValueError(
            f"group_sizes must have the shape [{num_groups}], one number for each matrix of w "
            f"{short(weights)}; got {short(sizes)}. Inside jax.shard_map, w has the experts of "
            "this rank only: split it with in_specs"
        )
    _check_sizes(sizes, num_rows)
    tail = check_tail(tail)
    if num_sms is not None:
        num_sms = check_int("num_sms", num_sms, least=1)
    params: dict[str, Any] = dict(tail=tail, num_sms=num_sms)
    # Cast integers of less than 32 bits before the clip, because num_rows may be too large for
    # them. Cast larger integers after the clip, because large sizes would overflow.
    if sizes.dtype.itemsize < 4:
        sizes = sizes.astype(jnp.int32)
    clipped = jnp.clip(sizes, 0, num_rows).astype(jnp.int32)
    if in_fp8:
        if is_known(sizes):
            check_scales("rows", pair.scales[: int(np.sum(np.asarray(sizes), dtype=np.int64))])
        return quantized.bind_dot_fp8(pair, experts, clipped, dtype=dtype, **params)
    arrays = jnp.asarray(x), jnp.asarray(weights)
    return bind_dot(*arrays, clipped, transposed=False, dtype=x.dtype, **params)


def _check_arrays(rows: Any, w: Any) -> None:
    for each, array in (("rows", rows), ("w", w)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{each} must have a floating dtype; got {short(array)}")
    if rows.dtype != w.dtype:
        raise TypeError(
            f"w must have the dtype of rows, {rows.dtype}; got {short(w)}: cast one of them"
        )
    if len(rows.shape) != 2:
        raise ValueError(f"rows must have the shape [C, K]; got {short(rows)}")
    if len(w.shape) != 3 or w.shape[1] != rows.shape[1]:
        is_turned = len(w.shape) == 3 and w.shape[-1] == rows.shape[1]
        raise ValueError(
            f"w must have the shape [L, {rows.shape[1]}, N], because rows are {short(rows)}; "
            f"got {short(w)}"
            f"{'. Weights of PyTorch are [L, N, K]: w.transpose(0, 2, 1)' if is_turned else ''}"
        )


def _check_sizes(group_sizes: Any, num_rows: int) -> None:
    if not is_known(group_sizes):
        return
    known = np.asarray(group_sizes)
    if (known < 0).any():
        raise ValueError(f"group_sizes must be at least 0; got {known.min()}")
    if (total := int(known.sum(dtype=object))) > num_rows:
        raise ValueError(
            f"the sum of group_sizes must be at most {num_rows}, the number of rows; got {total}"
        )
