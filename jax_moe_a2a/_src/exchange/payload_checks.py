"""Check the payload of an exchange: arrays, weights, wire dtype and token format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..ad import carries_tangent
from ..checks import PyTree, check_bool, check_static, check_tail, merge_axes, short
from ..formats.formats import TokenFormat, WireDtype, as_wire_dtype
from .record import Options


def check_options(options: Options, leaves: Sequence[jax.Array], has_levels: bool) -> Options:
    """Return the checked options of a dispatch, or raise the errors of ``dispatch``."""
    check_bool("decode", options.decode)
    check_format(options.token_format, options.decode, leaves)
    wire = check_wire_dtype(options.wire_dtype, "x", leaves, has_levels=has_levels)
    return options._replace(wire_dtype=wire, tail=check_tail(options.tail))


def check_leaves(
    name: str, tree: PyTree, axis: str, size: int, *, remedy: str = ""
) -> tuple[list[jax.Array], jax.tree_util.PyTreeDef]:
    """Return the leaves of ``tree`` as arrays [size, ...], and its structure. The message about
    another leading axis ends with ``remedy``."""
    leaves, treedef = jax.tree.flatten(tree)
    return [_check_leaf(name, leaf, axis, size, remedy) for leaf in leaves], treedef


def _check_leaf(name: str, leaf: Any, axis: str, size: int, remedy: str) -> jax.Array:
    """Return ``leaf`` as an array, or raise the errors of ``check_leaves``."""
    try:
        leaf = jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold arrays; got {type(leaf).__name__}") from error
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise TypeError(f"{name} must hold arrays of numbers or booleans; got {short(leaf)}")
    check_static(name, leaf)
    if leaf.ndim < 1 or leaf.shape[0] != size:
        if leaf.ndim > 2 and leaf.shape[0] * leaf.shape[1] == size:
            remedy = merge_axes(name, leaf, leaf.ndim - 1)
        raise ValueError(
            f"{name} must hold arrays with leading axis {axis}={size}; got {short(leaf)}{remedy}"
        )
    return leaf


def check_weights(name: str, weights: ArrayLike, axes: str, shape: tuple[int, ...]) -> jax.Array:
    """Return weights as float32, or float64 if given as float64."""
    array = jnp.asarray(weights)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} must be a float array {axes}={list(shape)}; got {short(array)}")
    if array.shape != shape:
        raise ValueError(
            f"{name} must be a float array {axes}={list(shape)}; got {short(array)}"
            f"{merge_axes(name, array, len(shape))}"
        )
    return array if array.dtype == jnp.float64 else array.astype(jnp.float32)


def with_shared_weights(topk_weights: jax.Array, shared_weights: ArrayLike | None) -> jax.Array:
    """Return checked router weights [T, K] as [T, K + 1], with the shared expert's weights last.

    Raise the errors of ``check_weights``.
    """
    num_tokens = len(topk_weights)
    weights = jnp.asarray(1.0 if shared_weights is None else shared_weights)
    if weights.ndim == 0:
        weights = jnp.broadcast_to(weights, num_tokens)
    weights = check_weights("shared_weights", weights, "[num_tokens]", (num_tokens,))
    dtype = topk_weights.dtype  # also the dtype of a Python number
    if weights.dtype.itemsize > dtype.itemsize and not weights.weak_type:
        dtype = weights.dtype
    return jnp.concatenate([topk_weights.astype(dtype), weights.astype(dtype)[:, None]], axis=1)


def check_wire_dtype(
    wire_dtype: DTypeLike | TokenFormat | None,
    name: str,
    leaves: Sequence[jax.Array],
    *,
    has_levels: bool,
) -> WireDtype:
    """Return the wire dtype, or the token format with row-major scales, for sums of ``leaves``.

    With ``has_levels``, it must not be wider than the dtype of a leaf, to which the sum of a host
    is rounded.
    """
    dtype = as_wire_dtype(wire_dtype)
    if isinstance(dtype, TokenFormat):
        return _check_wire_format(dtype, name, leaves)
    if dtype is None or not has_levels:
        return dtype
    for leaf in leaves:
        is_summed = jnp.issubdtype(leaf.dtype, jnp.floating) and carries_tangent(leaf.dtype)
        if is_summed and dtype.itemsize > leaf.dtype.itemsize:
            raise ValueError(
                f"wire_dtype must not be wider than the dtype of {name} if the group has two "
                f"levels; got {dtype} for {short(leaf)}. Use wire_dtype=None, or cast {name} to "
                f"{dtype}"
            )
    return dtype


def _check_wire_format(fmt: TokenFormat, name: str, leaves: Sequence[jax.Array]) -> TokenFormat:
    """Return the format in which sums travel, or raise the errors of ``check_wire_dtype``."""
    fmt = fmt.travelling
    for leaf in leaves:
        if not carries_tangent(leaf.dtype):
            continue
        if leaf.ndim < 2:
            raise ValueError(
                f"{name} must hold arrays of two axes or more with a token format as wire_dtype; "
                f"got {short(leaf)}"
            )
        fmt.check_numbers(leaf, name)
    return fmt


def check_format(fmt: TokenFormat | None, decode: bool, leaves: Sequence[jax.Array]) -> None:
    """Raise an error if the format cannot quantize every leaf, or there is nothing to decode."""
    if fmt is None:
        if decode:
            raise ValueError(
                "decode must be False without a token_format; got True. Pass "
                "exchange=ma.Exchange(token_format=...)"
            )
        return
    for leaf in leaves:
        if leaf.ndim < 2:
            raise ValueError(
                "x must hold arrays [num_tokens, ..., hidden] with a token_format; got "
                f"{short(leaf)}"
            )
        fmt.check_numbers(leaf)
    if fmt.token_scales is not None and fmt.token_scales.ndim > 1:
        raise ValueError(
            "global_scale must be a float, or a float32 array [] or [num_tokens], in dispatch; got "
            f"{short(fmt.token_scales)}. Pass one scale for each token"
        )
