"""Emit the custom call of a handler."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from ... import compat
from ...group import native, network
from .. import reference
from .site import Site, barrier

# True if XLA may capture the calls in CUDA graphs. This choice is measured (docs/history/speed.md).
DEFAULT_CUDA_GRAPHS = True

logger = logging.getLogger("jax_moe_a2a")


def custom_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    site: Site,
    *,
    num_sms: int,
    zone_bytes: int,
    is_split: bool = False,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> list[Any]:
    """Emit the call of a handler with the attributes of all handlers: devices, SM budget, timeouts,
    and the bytes of a zone to reserve."""
    native.register_targets()
    group, topology = site.group, site.topology
    where = f"devices {topology.devices}" if topology.devices else "one GPU"
    logger.info("%s: CUDA kernels for %d ranks on %s", target, topology.num_ranks, where)
    ring = native.SPLIT_RING if is_split else native.WHOLE_RING
    # The tokens of a single rank use no zone.
    slot_bytes = zone_bytes * topology.num_ranks if topology.num_ranks > 1 else 0
    if topology.is_wide:  # Handlers open other workspaces later.
        ring = network.open_workspace(topology, slot_bytes, group.patience, ring)
    if is_split:  # never merged, never dropped, never captured in a graph
        rule = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)
    else:
        graphs = DEFAULT_CUDA_GRAPHS if group.cuda_graphs is None else group.cuda_graphs
        rule = jax.ffi.ffi_lowering(target + "_in_graph" if graphs else target)
    results = rule(
        ctx,
        *operands,
        devices=np.array(topology.devices, np.int64),
        num_ranks=np.int64(topology.num_ranks),
        p2p_world_size=np.int64(topology.p2p_world_size),
        ring=np.int64(ring),
        num_sms=np.int64(num_sms),
        timeout_ns=np.int64(group.timeout * 1e9),
        first_timeout_ns=np.int64(group.patience * 1e9),
        raise_failures=group.on_failure == "raise",
        slot_bytes=np.int64(slot_bytes),
        scopes=_hash("/".join(compat.scopes_of(ctx))),
        **attributes,
    )
    # If a loop stores a result in a larger array, and the program also uses the result elsewhere,
    # XLA's dynamic_slice_fusion copies the call, and the exchange runs twice. A barrier prevents
    # the copy. Each result has a separate barrier, because XLA removes unused results from a shared
    # barrier. Two equal calls with different used results would then not be merged.
    alone = [ctx.replace(avals_in=[aval], avals_out=[aval]) for aval in ctx.avals_out]
    return [out for args in zip(alone, results, strict=True) for out in barrier(*args)]


def _hash(text: str) -> np.int64:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return np.int64(int.from_bytes(digest, "big", signed=True))


def own_rank(ctx: Any, site: Site) -> tuple[Any, Any]:
    """Return the aval and the value of this device's rank, int32 []; of all ranks, int32 [ranks],
    if they share a GPU."""
    size = site.group.size
    shape = (size,) * site.lead
    aval = compat.result_aval(ctx.avals_in[0], shape, jnp.dtype(jnp.int32))

    def rank() -> Any:
        return jnp.arange(size, dtype=jnp.int32) if site.lead else reference.own_rank(site.group)

    value = mlir.lower_fun(rank, multiple_results=False)(ctx.replace(avals_in=[], avals_out=[aval]))
    return aval, value
