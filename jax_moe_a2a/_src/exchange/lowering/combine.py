"""Choose the kernel calls of a combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...formats.formats import TokenFormat
from ...group import native
from ...group.group import Group
from .budgets import FORMAT_NUM_SMS
from .exchange import KernelCall
from .payload import FORMAT_CODES, SUMMED_DTYPES, global_scale, is_sub_byte, row_bytes, sum_bytes
from .site import Site

TARGET = "moe_a2a_combine"
WARP_LANES = 32


def combine_calls(
    site: Site, payload: Sequence[Any], top_k: int, params: dict[str, Any]
) -> list[KernelCall] | None:
    """Return the calls of a combine, whole or split. Each call sums the leaves of one dtype, and
    the first call also moves the choice scalars."""
    num_leaves, wire = params["num_leaves"], params["wire_dtype"]
    leaves, scalars = payload[:num_leaves], payload[num_leaves:]
    if (
        len(payload) > native.limit("MAX_ARRAYS")
        or not all(_wire_applies(aval, wire, top_k, site.group) for aval in leaves)
        or any(is_sub_byte(aval) for aval in scalars)
    ):
        return None
    calls = []
    scalars_left = list(range(num_leaves, len(payload)))
    for dtype in dict.fromkeys(aval.dtype for aval in leaves) or [None]:  # None: scalars only
        mine = [i for i in range(num_leaves) if leaves[i].dtype == dtype]
        landed = [sum_bytes(leaves[i], wire) for i in mine]
        landed += [top_k * row_bytes(payload[i]) for i in scalars_left]
        arrays = mine + scalars_left
        calls.append(
            _call(site, arrays, arrays, landed, dtype, wire, num_scalars=len(scalars_left))
        )
        scalars_left = []
    return calls


def weighted_combine_calls(
    site: Site, payload: Sequence[Any], top_k: int, params: dict[str, Any]
) -> list[KernelCall] | None:
    """Return the call of a weighted combine, whole or split. The rank of the rows scales and sums
    them."""
    num_pairs, wire = params["num_leaves"], params["wire_dtype"]
    rows, weights = payload[:num_pairs], payload[num_pairs:]
    if (
        num_pairs > (1 if isinstance(wire, TokenFormat) else native.limit("MAX_PAIRS"))
        or not _wire_applies(rows[0], wire, top_k, site.group)
        or any(aval.dtype != rows[0].dtype for aval in rows)
        or any(aval.dtype != jnp.float32 for aval in weights)
    ):
        return None
    landed = [sum_bytes(rows[0], wire)]
    arrays = range(len(payload))
    return [_call(site, arrays, [0], landed, rows[0].dtype, wire, num_pairs=num_pairs)]


def _wire_applies(aval: Any, wire: Any, top_k: int, group: Group) -> bool:
    """Return True if the kernels support partial sums of such rows in the wire dtype. The wire
    dtype must be float32, the dtype of the rows, or a token format. In a token format, the lanes of
    a warp must hold the choices and ranks of a token."""
    if aval.dtype not in SUMMED_DTYPES:
        return False
    if isinstance(wire, TokenFormat):
        return top_k + group.size <= WARP_LANES
    return wire is None or wire in (aval.dtype, jnp.float32)


def _call(
    site: Site,
    arrays: Sequence[int],
    results: Sequence[int],
    landed_bytes: list[int],
    dtype: Any,
    wire: Any,
    *,
    num_scalars: int = 0,
    num_pairs: int = 0,
) -> KernelCall:
    """Return a call whose partial sums of ``dtype`` rows travel in the wire dtype ``wire``."""
    fmt = wire if isinstance(wire, TokenFormat) else None
    attributes = dict(
        num_scalars=np.int64(num_scalars),
        num_pairs=np.int64(num_pairs),
        float32_wire=fmt is None and wire is not None and wire != dtype,
        wire_format=np.int64(FORMAT_CODES[type(fmt)] if fmt else 0),
        global_scale=global_scale(fmt),
    )
    num_sms = None
    if fmt and site.group.size > 1:
        num_sms = site.group.sms_of("combine") or FORMAT_NUM_SMS
    return KernelCall(TARGET, arrays, results, landed_bytes, attributes, num_sms)
