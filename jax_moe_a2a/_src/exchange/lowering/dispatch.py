"""Choose the kernel call of a dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ...formats.formats import Encoding
from ...group import native
from .budgets import FORMAT_NUM_SMS, WEIGHTED_NUM_SMS
from .exchange import KernelCall
from .payload import (
    FLOAT32_BYTES,
    FORMAT_CODES,
    SUMMED_DTYPES,
    VECTOR_BYTES,
    encoded_row_bytes,
    global_scale,
    is_sub_byte,
    row_bytes,
)
from .site import Site


class Landing(NamedTuple):
    """Hold the bytes that land for each token, of each array, and the attributes of the call."""

    landed_bytes: list[int]
    attributes: dict[str, Any]


def landing(site: Site, payload: Sequence[Any], params: dict[str, Any]) -> Landing | None:
    """Return the landing of a payload; None if the kernels do not move or encode the payload."""
    encoding = params.get("encoding")
    if encoding is None:
        return _landing_as_is(payload, params)
    return _landing_encoded(site, payload, encoding, params)


def _landing_as_is(payload: Sequence[Any], params: dict[str, Any]) -> Landing | None:
    if len(payload) > native.limit("MAX_ARRAYS") or any(map(is_sub_byte, payload)):
        return None
    attributes = dict(
        num_scalars=np.int64(params["num_scalars"]),
        leaves_tail=params.get("tail") == "unspecified",
    )
    return Landing([row_bytes(aval) for aval in payload], attributes)


def _landing_encoded(
    site: Site, payload: Sequence[Any], encoding: Encoding, params: dict[str, Any]
) -> Landing | None:
    fmt, num_leaves = encoding.format, params["num_leaves"]
    leaves, scalars = payload[:num_leaves], payload[num_leaves:]
    if encoding.has_token_scales:
        scalars = scalars[:-1]
    landed = [part for aval in leaves for part in encoded_row_bytes(aval, fmt)]
    landed += [row_bytes(aval) for aval in scalars]
    if encoding.has_token_scales and encoding.decode:
        landed.append(FLOAT32_BYTES)
    if (
        site.topology.num_ranks == 1  # a single rank has no zone, but encoded tokens need it
        or site.topology.is_wide
        or len(landed) > native.limit("MAX_ARRAYS")
        or any(aval.dtype != leaves[0].dtype for aval in leaves)
        or any(is_sub_byte(aval) for aval in scalars)
    ):
        return None
    attributes = dict(
        num_leaves=np.int64(num_leaves),
        num_scalars=np.int64(len(scalars)),
        format=np.int64(FORMAT_CODES[type(fmt)]),
        decode=encoding.decode,
        has_token_scales=encoding.has_token_scales,
        global_scale=global_scale(fmt),
        leaves_tail=params.get("tail") == "unspecified",
    )
    return Landing(landed, attributes)


def dispatch_calls(
    site: Site, payload: Sequence[Any], top_k: int, params: dict[str, Any]
) -> list[KernelCall] | None:
    """Return the call of a dispatch, whole or split. One call moves all arrays as bytes, and
    quantizes the leaves if there is an encoding."""
    del top_k
    found = landing(site, payload, params)
    if found is None:
        return None
    encoding: Encoding | None = params.get("encoding")
    arrays = range(len(payload))
    if encoding is None:
        return [KernelCall("moe_a2a_dispatch", arrays, arrays, *found)]
    num_results = encoding.results_per_leaf * params["num_leaves"] + params["num_scalars"]
    num_sms = site.group.sms_of("dispatch") or FORMAT_NUM_SMS
    return [KernelCall("moe_a2a_format_dispatch", arrays, range(num_results), *found, num_sms)]


def weighted_dispatch_calls(
    site: Site, payload: Sequence[Any], top_k: int, params: dict[str, Any]
) -> list[KernelCall] | None:
    """Return the call of a weighted dispatch, which weighs rows as they arrive. The kernel supports
    at most one pair of rows and weights, and rows of whole vectors."""
    del top_k
    g, *others = payload
    rows, weights = others[: params["num_leaves"]], others[params["num_leaves"] :]
    if (
        params["group"].size == 1  # XLA's fusion is faster (docs/history/speed.md)
        or len(rows) > 1
        or len(weights) > 1
        or params["num_weight_axes"] > 0
        or g.dtype not in SUMMED_DTYPES
        or any(aval.dtype != g.dtype for aval in rows)
        or any(aval.dtype != jnp.float32 for aval in weights)
        or row_bytes(g) % VECTOR_BYTES
    ):
        return None
    return [
        KernelCall(
            "moe_a2a_weighted_dispatch",
            range(len(payload)),
            range(len(others)),
            landed_bytes=[row_bytes(g)],
            attributes=dict(scaled=bool(weights), dotted=bool(rows)),
            num_sms=site.group.sms_of("dispatch") or WEIGHTED_NUM_SMS,
        )
    ]
