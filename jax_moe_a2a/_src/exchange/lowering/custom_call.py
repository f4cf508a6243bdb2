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

from ... import compat, scopes
from ...group import native
from .. import reference
from .call_placement import CallPlacement, Refused, barrier

# True if XLA may capture the calls in CUDA graphs. This choice is measured (docs/history/speed.md).
DEFAULT_CUDA_GRAPHS = True

logger = logging.getLogger("jax_moe_a2a")


def half_bytes_of(
    target: str,
    attributes: dict[str, Any],
    call_placement: CallPlacement,
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
) -> int:
    """Return the bytes of a ring half that a call needs.

    Raises:
      Refused: if the kernels do not support the call.
    """
    operands, results = (map(call_placement.of_rank, avals) for avals in (avals_in, avals_out))
    why, half_bytes = native.why_not(
        target, attributes, operands, results, call_placement.topology, bool(call_placement.lead)
    )
    if why:
        raise Refused(why)
    return half_bytes


def custom_call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    call_placement: CallPlacement,
    attributes: dict[str, Any],
    *,
    num_sms: int,
    half_bytes: int,
    is_split: bool = False,
    aliases: dict[int, int] | None = None,
) -> list[Any]:
    """Emit the call of a handler with the attributes of all handlers: devices, SM budget, timeouts,
    and the bytes of a ring half to reserve."""
    native.register_targets()
    group, topology = call_placement.group, call_placement.topology
    where = f"devices {topology.devices}" if topology.devices else "one GPU"
    logger.info("%s: CUDA kernels for %d ranks on %s", target, topology.num_ranks, where)
    kind = native.SPLIT if is_split else native.WHOLE
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
        workspace_kind=np.int64(kind),
        num_sms=np.int64(num_sms),
        timeout_ns=np.int64(group.timeout * 1e9),
        first_timeout_ns=np.int64(group.patience * 1e9),
        raise_failures=group.on_failure == "raise",
        half_bytes=np.int64(half_bytes),
        scopes=_hash("/".join(scopes.of_user(ctx))),
        **{name: native.attribute(value) for name, value in attributes.items()},
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


def rank_aval(ctx: Any, call_placement: CallPlacement) -> Any:
    """Return the type of ``own_rank``: int32 [], or int32 [ranks] if the ranks share a GPU."""
    shape = (call_placement.group.size,) * call_placement.lead
    return compat.result_aval(ctx.avals_in[0], shape, jnp.dtype(jnp.int32))


def own_rank(ctx: Any, call_placement: CallPlacement) -> Any:
    """Return the rank of this device, or all ranks if they share a GPU."""
    size = call_placement.group.size

    def rank() -> Any:
        return (
            jnp.arange(size, dtype=jnp.int32)
            if call_placement.lead
            else reference.own_rank(call_placement.group)
        )

    avals_out = [rank_aval(ctx, call_placement)]
    return mlir.lower_fun(rank, multiple_results=False)(
        ctx.replace(avals_in=[], avals_out=avals_out)
    )
