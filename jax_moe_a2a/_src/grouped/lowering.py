"""Lower grouped products on NVIDIA GPUs to a kernel, cuBLASLt, or ``lax.ragged_dot``.

One launch computes a product with all leading axes *B: it reads rows [*B, C, K] as [B C, K].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..group import native
from ..paths import Choice
from . import reference
from .reference import groups_of, sum_lead

TARGET = "moe_a2a_grouped_gemm"
# The values of GroupedProduct in cuda/gemm/grouped_gemm.h (tests/test_layout.py compares them).
FORWARD, TRANSPOSED, WEIGHT_GRADIENT = range(3)
# A tile of a weight gradient has TILE_ROWS rows, and twice as many columns.
TILE_ROWS = 128
CAPABILITY = "9.0"  # kGemmCapability in cuda/gemm/grouped_gemm.h
# For each major compute capability: the first version of cuBLAS that is used, and the first later
# version that is not. In versions before 13.3, gradients of groups without rows are wrong. From
# 13.7 on, products on Blackwell are wrong, as release notes and users report.
LIBRARY_VERSIONS = {"10": ((13, 3), (13, 7))}
NO_WEIGHTS = -1  # the index of weights of a group whose results are zeros


def why_no_kernel(dtype: jnp.dtype, num_rows: int, num_groups: int, k: int, n: int) -> str:
    """Return why this process's GPUs cannot run the kernel, or ''. A group's weights are [k, n]."""
    # 2 * num_groups: each batch element may have one more group, the rows after its last group.
    return why_no_call(num_rows, num_groups, k, n) or native.why_not_grouped_gemm(
        dtype, num_rows, 2 * num_groups, k, n
    )


def why_no_fp8_kernel(num_rows: int, num_groups: int, k: int, n: int) -> str:
    """Return why this process's GPUs cannot run the FP8 kernel, or ''. Weights are [n, k]."""
    return why_no_call(num_rows, num_groups, k, n) or native.why_not_fp8_gemm(
        num_rows, 2 * num_groups, k, n
    )


def why_no_call(*sizes: int) -> str:
    """Return '' if kernels of this package can compute products of these sizes, else the reason."""
    if not native.has_grouped_gemm():
        return "jax_moe_a2a was built without the kernel of grouped_dot"
    if why := _why_other_gpu():
        return why
    return "there are no rows, no groups or no columns" if 0 in sizes else ""


def _why_other_gpu() -> str:
    """Return '' if this process's GPUs have compute capability 9.0, else what is wrong."""
    gpus = native.local_gpus()
    if not gpus:
        return "JAX sees no GPU"
    others = [gpu for gpu in gpus if gpu.compute_capability != CAPABILITY]
    if not others:
        return ""
    return (
        f"the kernel needs GPUs of compute capability {CAPABILITY}; "
        f"{others[0]} has {others[0].compute_capability}"
    )


def library_versions() -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the entry of ``LIBRARY_VERSIONS`` for this process's GPUs, or None if these GPUs do
    not use cuBLASLt."""
    majors = {gpu.compute_capability.split(".")[0] for gpu in native.local_gpus()}
    return LIBRARY_VERSIONS.get(majors.pop()) if len(majors) == 1 else None


def why_no_library(dtype: jnp.dtype, num_rows: int, num_groups: int, k: int, n: int) -> str:
    """Return why cuBLASLt cannot compute these products on this process's GPUs, or ''."""
    assert (versions := library_versions())
    oldest, wrong = versions
    if not oldest <= (version := native.library_version()) < wrong:
        found = _dotted(version) if any(version) else "none in this process"
        return (
            f"cuBLASLt needs nvidia-cublas>={_dotted(oldest)},<{_dotted(wrong)} on this GPU; "
            f"found {found}"
        )
    return native.why_not_grouped_gemm(dtype, num_rows, 2 * num_groups, k, n)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def sizes_of(rows: Any, sizes: Any, weights: Sequence[int]) -> tuple[int, int, int, int]:
    """Return the sizes for ``why_no_kernel``: the numbers of rows and of groups over all leading
    axes, and the last two sizes of the weights."""
    batch, (k, n) = math.prod(rows.shape[:-2]), weights[-2:]
    return batch * rows.shape[-2], batch * sizes.shape[-1], k, n


def dot_cuda(ctx: Any, *operands: compat.Value, **params: object) -> Choice:
    rows, w, sizes, *_ = ctx.avals_in
    sizes = sizes_of(rows, sizes, w.shape)
    return _choose(ctx, operands, params, sizes, kernel_dot, reference.dot)


def outer_cuda(ctx: Any, *operands: compat.Value, **params: object) -> Choice:
    x, y, sizes = ctx.avals_in
    sizes = sizes_of(x, sizes, (x.shape[-1], y.shape[-1]))
    return _choose(ctx, operands, params, sizes, kernel_outer, reference.outer)


def why_no_add_outer(total: Any, x: Any, _: object, sizes: Any, **__: object) -> str:
    """Return '' if the kernel can compute ``add_outer_p`` for these types, else the reason."""
    why = why_no_kernel(x.dtype, *sizes_of(x, sizes, total.shape))
    return why or ("" if total.shape[:-3] == x.shape[:-2] else "the batch shares the total")


def _choose(
    ctx: Any,
    operands: Sequence[compat.Value],
    params: dict[str, Any],
    sizes: tuple[int, int, int, int],
    kernel: Callable[..., Any],
    reference: Callable[..., Any],
) -> Choice:
    dtype = ctx.avals_in[0].dtype
    why = why_no_kernel(dtype, *sizes)
    if why and 0 not in sizes and native.has_grouped_gemm() and library_versions():
        if not (why_no := why_no_library(dtype, *sizes)):
            by_library = functools.partial(kernel, by_library=True)
            chosen = native.choose_kernel(ctx, operands, params, by_library)
            path = f"cuBLASLt {_dotted(native.library_version())}"
            return chosen._replace(path=path, why=why)
        why = f"{why}; {why_no}"
    return native.choose_kernel(ctx, operands, params, kernel, why, reference, "lax.ragged_dot")


def by_kernel(
    why_not: Callable[..., str],
    kernel: Callable[..., Any],
    composition: Callable[..., Any],
    what: str = "not fused",
) -> Callable[..., Choice]:
    """Return a function for ``paths.lowering`` that chooses the implementation. ``why_not`` maps
    types of operands and parameters to '', or to the reason against the kernel."""

    def choose(ctx: compat.Context, *operands: compat.Value, **params: object) -> Choice:
        why = why_not(*ctx.avals_in, **params)
        return native.choose_kernel(ctx, operands, params, kernel, why, composition, what)

    return choose


def kernel_dot(
    rows: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    *spare: jax.Array,
    transposed: bool,
    dtype: jnp.dtype,
    tail: str,
    num_sms: int | None,
    by_library: bool = False,
) -> jax.Array:
    """Compute ``grouped_dot_p`` with the kernel or with cuBLASLt."""
    num_rows, columns = rows.shape[-2], w.shape[-2 if transposed else -1]
    product = TRANSPOSED if transposed else FORWARD
    leads = [x.shape[:-2] for x in (w, *spare)]
    groups = table(sizes, rows.shape[:-2], num_rows, *leads, has_tail=tail == "zero")
    rows2, *ws = flat(rows, 2), *(flat(x, 3) for x in (w, *spare))
    out = jax.ShapeDtypeStruct((rows2.shape[0], columns), dtype)
    result = _gemm(out, (rows2, ws[0], groups, *ws[1:]), num_sms, product, by_library)
    return result.reshape(*rows.shape[:-1], columns)


def _gemm(
    out: jax.ShapeDtypeStruct,
    operands: Sequence[jax.Array],
    num_sms: int | None,
    product: int,
    by_library: bool,
) -> jax.Array:
    if not by_library:
        return call(TARGET, [out], operands, num_sms, product=product)[0]
    rows, _, groups, *_ = operands
    num_groups = groups.shape[1]
    attributes: dict[str, Any] = dict(product=product, mean_rows=-(-rows.shape[0] // num_groups))
    attributes["counters"] = native.library_scratch(num_groups)
    return call("moe_a2a_library_gemm", [out], operands, num_sms, **attributes)[0]


def kernel_outer(
    x: jax.Array,
    y: jax.Array,
    sizes: jax.Array,
    *,
    parts: tuple[tuple[int, ...], ...],
    dtype: jnp.dtype,
    num_sms: int | None,
    by_library: bool = False,
    **_: object,
) -> list[jax.Array]:
    """Compute ``grouped_outer_p`` in one launch per result, for the groups of this result."""
    if y.shape[-1] <= TILE_ROWS < x.shape[-1]:  # y would fill at most half the columns of a tile
        options: dict[str, Any] = dict(parts=parts, dtype=dtype, num_sms=num_sms)
        transposed = kernel_outer(y, x, sizes, by_library=by_library, **options)
        return [jnp.swapaxes(part, -2, -1) for part in transposed]
    batch, nums = x.shape[:-2], [num for *_, num in parts]
    leads = [(*batch, num) for num in nums]
    groups = table(sizes, batch, x.shape[-2], *leads, has_tail=False)
    by_batch = groups.reshape(3, -1, sum(nums))
    found, first = [], 0
    for *lead, num in parts:
        if len(parts) > 1:
            groups = by_batch[..., first : first + num].reshape(3, -1)
            groups -= np.array([[0], [0], [math.prod(batch) * first]], np.int32)
        own = (num, x.shape[-1], y.shape[-1])
        shape = jax.ShapeDtypeStruct((math.prod(batch) * num, *own[1:]), dtype)
        operands = flat(x, 2), flat(y, 2), groups
        out = _gemm(shape, operands, num_sms, WEIGHT_GRADIENT, by_library)
        found.append(sum_lead(out.reshape(*batch, *own), tuple(lead)))
        first += num
    return found


def add_outer(total: jax.Array, x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    """Compute ``add_outer_p`` with the kernel. The result overwrites the total in memory."""
    batch = x.shape[:-2]
    groups = table(sizes, batch, x.shape[-2], (*batch, sizes.shape[-1]), has_tail=False)
    flat_total = flat(total, 3)
    out = jax.ShapeDtypeStruct(flat_total.shape, total.dtype)
    operands = flat(x, 2), flat(y, 2), groups, flat_total
    (found,) = call(TARGET, [out], operands, None, {3: 0}, product=WEIGHT_GRADIENT)
    return found.reshape(total.shape)


def flat(x: jax.Array, num_axes: int) -> jax.Array:
    """Return an array with ``num_axes`` axes: its leading axes are merged with the next axis."""
    return x.reshape(-1, *x.shape[x.ndim - num_axes + 1 :])


def aligned(w: jax.Array, other: Any, axes: int) -> tuple[tuple[int, ...], jax.Array, jax.Array]:
    """Flatten weights [..., L, K, N] and ``other`` [..., L, ...], which has ``axes`` axes from L
    on. A group gets the same index in both. Return the shape (..., L), and both flat arrays."""
    lead = np.broadcast_shapes(w.shape[:-3], other.shape[:-axes])
    w3, flat_other = (
        flat(jnp.broadcast_to(x, (*lead, *x.shape[-n:])), n) for x, n in ((w, 3), (other, axes))
    )
    return (*lead, w.shape[-3]), w3, flat_other


def table(
    sizes: jax.Array,
    batch: tuple[int, ...],
    num_rows: int,
    *leads: tuple[int, ...],
    has_tail: bool,
) -> jax.Array:
    """Return a table of G groups, int32 [3, G]: first rows, numbers of rows, indices of weights.

    With ``has_tail``, the rows after the last group are one more group, without weights. Each of
    ``leads`` is the shape (..., L) of an array of weights without its last two axes.
    """
    num_groups = sizes.shape[-1]
    starts, sizes = (jnp.broadcast_to(x, (*batch, num_groups)) for x in groups_of(sizes, num_rows))
    indices, first = [], 0
    for lead in leads:
        index = np.arange(first, first + math.prod(lead), dtype=np.int32).reshape(lead)
        indices.append(np.broadcast_to(index, (*batch, lead[-1])))
        first += index.size
    weights = np.concatenate(indices, axis=-1)
    if has_tail:
        end = starts[..., -1:] + sizes[..., -1:]
        starts = jnp.concatenate([starts, end], axis=-1)
        sizes = jnp.concatenate([sizes, num_rows - end], axis=-1)
        weights = np.concatenate([weights, np.full_like(weights[..., :1], NO_WEIGHTS)], axis=-1)
    first_rows = np.arange(math.prod(batch), dtype=np.int32).reshape(*batch, 1) * np.int32(num_rows)
    table = jnp.stack([starts + first_rows, sizes, jnp.asarray(weights)])
    return table.reshape(3, -1)


def call(
    target: str,
    results: Sequence[Any],
    operands: Sequence[jax.Array],
    num_sms: int | None,
    aliases: dict[int, int] | None = None,
    counters: int = 1,
    **attributes: Any,
) -> list[jax.Array]:
    """Call a kernel. Return its results without the last one, which contains counters."""
    all_results = [*results, jax.ShapeDtypeStruct((counters,), jnp.int32)]
    attributes["num_sms"] = num_sms or 0
    return native.call_product(target, all_results, operands, aliases, **attributes)[:-1]
