"""Lowering rules for CUDA: the custom call of each primitive, or the portable path where the
kernels do not apply.

Every rule asks ``_site`` where the call runs, and ends in ``_call``, which adds what all handlers
want: the devices of the ranks, their SM budget and timeout, and the bytes of landing zone to
reserve. Ranks are logical throughout: a device finds its rank in the mesh, and ``route`` checks it
against the running program's. Ranks that share a GPU are all in one call, whose arrays have a
leading axis of ranks; the rules see them as one rank does.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import Mesh

from . import compat, formats, native, network, reference
from .formats import Encoding, NvFp4, TokenFormat
from .group import Group
from .plan import RoutingArrays
from .reference import split_routing

SUMMED_DTYPES = tuple(jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))
# cuda/tuning.h says why. The handler reduces budgets to what a GPU has.
DEFAULT_NUM_SMS = native.tuning("DEFAULT_NUM_SMS")
FEW_TOKENS = native.tuning("FEW_TOKENS")
FEW_TOKENS_NUM_SMS = native.tuning("FEW_TOKENS_NUM_SMS")
WEIGHTED_NUM_SMS = native.tuning("WEIGHTED_NUM_SMS")
ALONE_NUM_SMS = native.tuning("ALONE_NUM_SMS")  # of a domain of one rank
SPLIT_NUM_SMS = native.tuning("SPLIT_NUM_SMS")  # of a split exchange
FORMAT_NUM_SMS = native.tuning("FORMAT_NUM_SMS")
# By measurement (benchmarks/NOTES.md): whether XLA may capture the calls in CUDA graphs.
DEFAULT_CUDA_GRAPHS = True
INT32_BYTES = 4
FLOAT32_BYTES = 4
VECTOR_BYTES = 16  # what a thread loads at once
FORMAT_CODES = {getattr(formats, name): code for name, code in native.format_codes().items()}
WARP_LANES = 32
MAX_ASSIGN_BLOCKS = 65535  # of a rank that shares its GPU: a grid's second dimension

logger = logging.getLogger("jax_moe_a2a")


class _Site(NamedTuple):
    """Hold where the kernels run a call."""

    group: Group
    """With the devices of the program, where each rank has its own."""
    topology: native.Topology
    lead: int
    """1 if the arrays have a leading axis of ranks, which then share a GPU; otherwise 0."""

    def of_rank(self, avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the arrays as one rank sees them."""
        return [jax.ShapeDtypeStruct(aval.shape[self.lead :], aval.dtype) for aval in avals]


def _site(ctx: Any, params: dict[str, Any]) -> _Site | None:
    """Return where the kernels run a call; None for the portable path, and for a call without
    tokens or rows, which moves nothing.

    Raises:
      ValueError: a group that asks for the kernels, in a program whose devices are not known.
    """
    group: Group = params["group"].placed_by(compat.mesh_of_program(ctx))
    if any(0 in aval.shape for aval in ctx.avals_in):
        return None
    has_devices = isinstance(group.mesh, Mesh)
    if params["emulated"] or (group.size == 1 and not has_devices):
        if group.implementation != "cuda":
            return None
        if has_devices:
            raise ValueError(
                "implementation='cuda' needs a group without a mesh inside jax.vmap over its axis; "
                f"got {group} with a mesh: use Group(axis_name={group.axis_name!r}, "
                f"size={group.size}, implementation='cuda')"
            )
        topology = native.on_one_gpu(None, group.size)
        return _Site(group, topology, lead=int(params["emulated"]))
    if has_devices and group.path == "cuda":
        return _Site(group, group.topology, lead=0)
    if group.implementation == "cuda":
        raise ValueError(
            "implementation='cuda' needs a program whose devices are known when it is lowered; got "
            f"{group} in jax.shard_map over an abstract mesh: call jax.set_mesh(mesh) first, or "
            "give shard_map or the group the mesh"
        )
    return None


def on_other_platforms(reference_path: Callable[..., Any]) -> Callable[..., Any]:
    """Return the lowering for platforms without kernels.

    Raises:
      ValueError: when a group asks for the kernels.
    """
    lower = _portable(reference_path)

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        if params["group"].implementation == "cuda":
            raise ValueError(
                "implementation='cuda' needs a program for NVIDIA GPUs; got one that is lowered "
                f"for {', '.join(ctx.module_context.platforms)}: use implementation=None there"
            )
        return lower(ctx, *operands, **params)

    return rule


def route_cuda(ctx: Any, ids: Any, **params: Any) -> Any:
    """``route_p``: two launches behind one call. The exchange also wants this device's rank."""
    site = _site(ctx, params)
    if site is None:
        return _portable(reference.route)(ctx, ids, **params)
    group = site.group
    (of_rank,) = site.of_rank(ctx.avals_in)
    *lead, num_tokens, top_k = of_rank.shape
    batch = math.prod(lead)
    local_experts = params["num_experts"] // group.size
    tokens_per_chunk, chunks = route_chunks(num_tokens)
    may_drop = params["first_choice"] is not None
    levels = top_k if may_drop else 1
    if (
        0 in (params["capacity"], local_experts)
        or (may_drop and params["parts"] > 1)
        or levels * local_experts > native.limit("MAX_ROUTE_COUNTS")
        or batch * chunks > native.limit("MAX_CHUNKS")
        or local_experts > native.limit("MAX_LOCAL_EXPERTS")
        or (site.lead and batch * chunks * group.size > MAX_ASSIGN_BLOCKS)
    ):
        return _portable(reference.route)(ctx, ids, **params)
    aval = ctx.avals_in[0]

    def int32(*shape: int) -> Any:
        shape = (*aval.shape[: site.lead], *shape)
        return compat.result_aval(aval, shape, jnp.dtype(jnp.int32))

    scratch = [
        int32(group.size, batch * num_tokens * top_k),  # ids of all ranks
        # choices per expert, for each number of choices if rows may drop; tokens for me
        int32(batch, group.size, chunks, levels * local_experts + 1),
        int32(batch, chunks, group.size),  # own tokens per destination
    ]
    rank_aval, rank = _own_rank(ctx, site)
    results = _call(
        ctx.replace(avals_in=[aval, rank_aval], avals_out=[*ctx.avals_out, *scratch]),
        "moe_a2a_route",
        [ids, *rank],
        site,
        num_sms=_num_sms(group, "route", num_tokens),
        zone_bytes=native.array_bytes(1, batch * num_tokens * top_k * INT32_BYTES),
        num_experts=np.int64(params["num_experts"]),
        alignment=np.int64(params["alignment"]),
        tokens_per_chunk=np.int64(tokens_per_chunk),
        first_choice=_first_choice(params),
        parts=np.int64(params["parts"]),
    )
    return results[: len(ctx.avals_out)]


def dispatch_cuda(composition: Callable[..., Any], ctx: Any, *operands: Any, **params: Any) -> Any:
    """``dispatch_p``: all payload arrays in one call, moved as bytes. With an encoding the leaves
    are quantized by the call that sends them; or by ``composition``, around a call without."""
    if params.get("encoding") is not None:
        return _format_dispatch_cuda(composition, ctx, *operands, **params)
    site = _site(ctx, params)
    options = _dispatch_options(site, ctx.avals_in, params)
    if site is None or options is None:
        return _portable(reference.dispatch)(ctx, *operands, **params)
    return _call_exchange(ctx, "moe_a2a_dispatch", operands, site, **options)


def dispatch_start_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    """``dispatch_start_p``: the operands as they are, and the rows that are on their way."""
    site = _site(ctx, params)
    options = _dispatch_options(site, ctx.avals_in, params)
    if site is None or options is None:
        return _portable(reference.dispatch_start)(ctx, *operands, **params)
    held = _held(ctx, operands)
    payload, _ = split_routing(held)
    rows = _call_exchange(
        ctx.replace(avals_out=ctx.avals_out[len(payload) :]),
        "moe_a2a_dispatch",
        held,
        site,
        phase="start",
        **options,
    )
    return [*payload, *rows]


def dispatch_done_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    """``dispatch_done_p``: the rows, which are there now."""
    in_flight, routing = split_routing(operands)
    in_flight_avals, routing_avals = split_routing(ctx.avals_in)
    num_arrays = len(in_flight) // 2
    start_ctx = ctx.replace(avals_in=[*in_flight_avals[:num_arrays], *routing_avals])
    site = _site(start_ctx, params)
    options = _dispatch_options(site, start_ctx.avals_in, params)
    if site is None or options is None:
        return _portable(reference.dispatch_done)(ctx, *operands, **params)
    return _call_exchange(
        start_ctx,
        "moe_a2a_dispatch",
        [*in_flight[:num_arrays], *routing],
        site,
        phase="done",
        in_flight=in_flight[num_arrays:],
        **options,
    )


def _held(ctx: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the operands of a start as its done, too, is to read them. XLA copies a constant for
    each barrier that it enters, and the done must find the memory that the start has read."""
    return list(barrier(ctx.replace(avals_out=ctx.avals_in), *operands))


def _dispatch_options(
    site: _Site | None, avals: Sequence[Any], params: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the options of the call of a dispatch; None where the kernels do not apply."""
    if site is None:
        return None
    payload_avals, _ = split_routing(site.of_rank(avals))
    return _moving_options(payload_avals, params)


def _moving_options(payload_avals: Sequence[Any], params: dict[str, Any]) -> dict[str, Any] | None:
    """Of a call that moves arrays as they are: what lands of a token, and the attributes. None
    where the kernels move no such payload."""
    if len(payload_avals) > native.limit("MAX_ARRAYS") or any(map(_is_sub_byte, payload_avals)):
        return None
    return dict(
        landed_bytes=[_row_bytes(aval) for aval in payload_avals],
        num_scalars=np.int64(params["num_scalars"]),
        leaves_tail=params.get("tail") == "unspecified",
    )


def _format_dispatch_cuda(
    composition: Callable[..., Any],
    ctx: Any,
    *operands: Any,
    encoding: Encoding,
    **params: Any,
) -> Any:
    site = _site(ctx, params)
    options = None
    if site is not None:
        payload_avals, _ = split_routing(site.of_rank(ctx.avals_in))
        options = _encoding_options(site, payload_avals, encoding, params)
    if site is None or options is None:
        return _portable(composition)(ctx, *operands, encoding=encoding, **params)
    return _call_exchange(
        ctx,
        "moe_a2a_format_dispatch",
        operands,
        site,
        num_sms=site.group.sms_of("dispatch") or FORMAT_NUM_SMS,
        **options,
    )


def _encoding_options(
    site: _Site, payload_avals: Sequence[Any], encoding: Encoding, params: dict[str, Any]
) -> dict[str, Any] | None:
    """Of a call that encodes leaves: what lands of a token, and the attributes. None where the
    kernels encode no such payload."""
    fmt, num_leaves = encoding.format, params["num_leaves"]
    leaves, scalars = payload_avals[:num_leaves], payload_avals[num_leaves:]
    if encoding.has_token_scales:
        scalars = scalars[:-1]
    landed = [part for aval in leaves for part in _encoded_row_bytes(aval, fmt)]
    landed += [_row_bytes(aval) for aval in scalars]
    if encoding.has_token_scales and encoding.decode:
        landed.append(FLOAT32_BYTES)
    if (
        site.topology.num_ranks == 1  # has no zones, in which own tokens would land here
        or site.topology.is_wide
        or len(landed) > native.limit("MAX_ARRAYS")
        or any(aval.dtype != leaves[0].dtype for aval in leaves)
        or any(_is_sub_byte(aval) for aval in scalars)
    ):
        return None
    return dict(
        landed_bytes=landed,
        num_leaves=np.int64(num_leaves),
        num_scalars=np.int64(len(scalars)),
        format=np.int64(FORMAT_CODES[type(fmt)]),
        decode=encoding.decode,
        has_token_scales=encoding.has_token_scales,
        global_scale=_global_scale(fmt),
        leaves_tail=params.get("tail") == "unspecified",
    )


def _encoded_row_bytes(aval: Any, fmt: TokenFormat) -> list[int]:
    """Bytes of the values and of the scales of a row."""
    numbers = math.prod(aval.shape[1:])
    values, scales = numbers // fmt.values_per_item, numbers // fmt.group_size
    return [values, scales * jnp.dtype(fmt.scale_dtype).itemsize]


def _encoded_stride(aval: Any, fmt: TokenFormat) -> int:
    """Bytes that both take in a slot: ``encoded_stride`` of ``cuda/token_format.h``."""
    parts = _encoded_row_bytes(aval, fmt)
    return sum(-(-part // VECTOR_BYTES) * VECTOR_BYTES for part in parts)


def _global_scale(fmt: TokenFormat | None) -> np.float32:
    return np.float32(fmt.global_scale if isinstance(fmt, NvFp4) else 1)


def combine_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    """``combine_p``: leaves are summed, choice scalars moved; one call for each dtype of leaves."""
    site = _site(ctx, params)
    calls = _combine_calls(site, ctx.avals_in, params)
    if site is None or calls is None:
        return _portable(reference.combine)(ctx, *operands, **params)
    payload, routing = split_routing(operands)
    return _combine_by_calls(ctx, calls, payload, routing, site, ctx.avals_out)


def combine_start_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    """``combine_start_p``: the sums that are on their way, and the operands as they are."""
    site = _site(ctx, params)
    calls = _combine_calls(site, ctx.avals_in, params)
    if site is None or calls is None:
        return _portable(reference.combine_start)(ctx, *operands, **params)
    payload, routing = split_routing(_held(ctx, operands))
    homes = ctx.avals_out[: len(payload)]
    sums = _combine_by_calls(ctx, calls, payload, routing, site, homes, phase="start")
    return [*sums, *payload]


def combine_done_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    """``combine_done_p``: the sums, which are there now."""
    in_flight, routing = split_routing(operands)
    in_flight_avals, routing_avals = split_routing(ctx.avals_in)
    num_arrays = len(in_flight) // 2
    start_ctx = ctx.replace(avals_in=[*in_flight_avals[num_arrays:], *routing_avals])
    site = _site(start_ctx, params)
    calls = _combine_calls(site, start_ctx.avals_in, params)
    if site is None or calls is None:
        return _portable(reference.combine_done)(ctx, *operands, **params)
    return _combine_by_calls(
        start_ctx,
        calls,
        in_flight[num_arrays:],
        routing,
        site,
        ctx.avals_out,
        phase="done",
        in_flight=in_flight[:num_arrays],
    )


def _combine_calls(
    site: _Site | None, avals: Sequence[Any], params: dict[str, Any]
) -> list[tuple[list[int], dict[str, Any]]] | None:
    """The calls that make a combine: which payload arrays each takes, and its options. None where
    the kernels do not apply."""
    if site is None:
        return None
    num_leaves = params["num_leaves"]
    payload_avals, routing_avals = split_routing(site.of_rank(avals))
    leaves, scalars = payload_avals[:num_leaves], payload_avals[num_leaves:]
    top_k = routing_avals.choice_rank.shape[1]
    wire = params["wire_dtype"]
    if (
        len(payload_avals) > native.limit("MAX_ARRAYS")
        or not all(_wire_applies(aval, wire, top_k, site.group) for aval in leaves)
        or any(_is_sub_byte(aval) for aval in scalars)
    ):
        return None
    calls = []
    scalars_left = list(range(num_leaves, len(payload_avals)))
    for dtype in dict.fromkeys(aval.dtype for aval in leaves) or [None]:  # None: scalars alone
        mine = [i for i in range(num_leaves) if leaves[i].dtype == dtype]
        options = dict(
            landed_bytes=[_sum_bytes(leaves[i], wire) for i in mine]
            + [top_k * _row_bytes(payload_avals[i]) for i in scalars_left],
            num_scalars=np.int64(len(scalars_left)),
            num_pairs=np.int64(0),
            **_wire_options(dtype, wire, site.group),
        )
        calls.append((mine + scalars_left, options))
        scalars_left = []  # they go with the first call
    return calls


def _combine_by_calls(
    ctx: Any,
    calls: Sequence[tuple[list[int], dict[str, Any]]],
    payload: Sequence[Any],
    routing: RoutingArrays,
    site: _Site,
    avals_out: Sequence[Any],
    *,
    phase: str = "",
    in_flight: Sequence[Any] = (),
) -> list[Any]:
    """The results [T, ...] of a combine, or of a half of one, by the calls that make it."""
    payload_avals, routing_avals = split_routing(ctx.avals_in)
    results: list[Any] = [None] * len(payload)
    for arrays, options in calls:
        call_results = _call_exchange(
            ctx.replace(
                avals_in=[*(payload_avals[i] for i in arrays), *routing_avals],
                avals_out=[avals_out[i] for i in arrays],
            ),
            "moe_a2a_combine",
            [*(payload[i] for i in arrays), *routing],
            site,
            phase=phase,
            in_flight=[in_flight[i] for i in arrays] if in_flight else (),
            **options,
        )
        for i, result in zip(arrays, call_results, strict=True):
            results[i] = result
    return results


def weighted_combine_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    """``weighted_combine_p``: the pairs are scaled and summed where the rows are."""
    site = _site(ctx, params)
    options = _weighted_options(site, ctx.avals_in, params)
    if site is None or options is None:
        return _portable(reference.weighted_combine)(ctx, *operands, **params)
    return _call_exchange(ctx, "moe_a2a_combine", operands, site, **options)


def weighted_combine_start_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    """``weighted_combine_start_p``: the sums that are on their way, and the first rows."""
    site = _site(ctx, params)
    options = _weighted_options(site, ctx.avals_in, params)
    if site is None or options is None:
        return _portable(reference.weighted_combine_start)(ctx, *operands, **params)
    sums = _call_exchange(
        ctx.replace(avals_out=ctx.avals_out[:1]),
        "moe_a2a_combine",
        operands,
        site,
        phase="start",
        **options,
    )
    return [*sums, operands[0]]


def weighted_combine_done_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    """``weighted_combine_done_p``: the sums, which are there now."""
    sums, _, *read = operands
    start_ctx = ctx.replace(avals_in=ctx.avals_in[2:])
    site = _site(start_ctx, params)
    options = _weighted_options(site, start_ctx.avals_in, params)
    if site is None or options is None:
        return _portable(reference.weighted_combine_done)(ctx, *operands, **params)
    return _call_exchange(
        start_ctx,
        "moe_a2a_combine",
        read,
        site,
        phase="done",
        in_flight=[sums],
        **options,
    )


def _weighted_options(
    site: _Site | None, avals: Sequence[Any], params: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the options of the call of a weighted combine; None where the kernels do not apply."""
    if site is None:
        return None
    num_pairs = params["num_leaves"]
    payload_avals, routing_avals = split_routing(site.of_rank(avals))
    rows, weights = payload_avals[:num_pairs], payload_avals[num_pairs:]
    wire, group, top_k = params["wire_dtype"], site.group, routing_avals.choice_rank.shape[1]
    if (
        num_pairs > (1 if isinstance(wire, TokenFormat) else native.limit("MAX_PAIRS"))
        or not _wire_applies(rows[0], wire, top_k, group)
        or any(aval.dtype != rows[0].dtype for aval in rows)
        or any(aval.dtype != jnp.float32 for aval in weights)
    ):
        return None
    return dict(
        landed_bytes=[_sum_bytes(rows[0], wire)],
        num_scalars=np.int64(0),
        num_pairs=np.int64(num_pairs),
        **_wire_options(rows[0].dtype, wire, group),
    )


def weighted_dispatch_cuda(
    composition: Callable[..., Any], ctx: Any, *operands: Any, **params: Any
) -> Any:
    """``weighted_dispatch_p``: one call that weighs rows as they arrive, of one pair of rows and
    weights in whole vectors; else ``composition``, whose dispatch is a call of its own.

    Of a rank alone, where nothing arrives, XLA's fusion of all of it is faster (NOTES.md)."""
    if params["group"].size == 1:
        return _portable(reference.weighted_dispatch)(ctx, *operands, **params)
    site = _site(ctx, params)
    if site is None:
        return _portable(composition)(ctx, *operands, **params)
    (g, *payload), _ = split_routing(site.of_rank(ctx.avals_in))
    rows, weights = payload[: params["num_leaves"]], payload[params["num_leaves"] :]
    if (
        len(rows) > 1
        or len(weights) > 1
        or params["num_weight_axes"] > 0
        or g.dtype not in SUMMED_DTYPES
        or any(aval.dtype != g.dtype for aval in rows)
        or any(aval.dtype != jnp.float32 for aval in weights)
        or _row_bytes(g) % VECTOR_BYTES
    ):
        return _portable(composition)(ctx, *operands, **params)
    return _call_exchange(
        ctx,
        "moe_a2a_weighted_dispatch",
        operands,
        site,
        landed_bytes=[_row_bytes(g)],
        num_sms=site.group.sms_of("dispatch") or WEIGHTED_NUM_SMS,
        scaled=bool(weights),
        dotted=bool(rows),
    )


def routed_dispatch_cuda(
    composition: Callable[..., Any], ctx: Any, ids: Any, *payload: Any, **params: Any
) -> Any:
    """``routed_dispatch_p``: one launch, as ``route_p`` and ``dispatch_p`` are two calls; else
    ``composition``, their own lowerings."""
    encoding, site = params.get("encoding"), _site(ctx, params)
    if site is None:
        return _portable(composition)(ctx, ids, *payload, **params)
    group = site.group
    of_rank, *payload_avals = site.of_rank(ctx.avals_in)
    num_tokens, top_k = of_rank.shape
    local_experts = params["num_experts"] // group.size
    applies = (
        not site.topology.is_wide
        and 0 not in (params["capacity"], local_experts)
        and num_tokens <= native.limit("MAX_FUSED_TOKENS")
        and group.size * num_tokens * top_k <= native.limit("MAX_FUSED_CHOICES")
        and local_experts <= native.limit("MAX_FUSED_EXPERTS")
    )
    options = None
    if applies and encoding is not None:
        options = _encoding_options(site, payload_avals, encoding, params)
    elif applies:
        options = _moving_options(payload_avals, params)
    if options is None:
        return _portable(composition)(ctx, ids, *payload, **params)
    rank_aval, rank = _own_rank(ctx, site)
    landed = options.pop("landed_bytes")
    options.setdefault("format", np.int64(0))  # none
    return _call(
        ctx.replace(avals_in=[ctx.avals_in[0], rank_aval, *ctx.avals_in[1:]]),
        "moe_a2a_routed_dispatch",
        [ids, *rank, *payload],
        site,
        num_sms=_num_sms(group, "dispatch", num_tokens),
        zone_bytes=sum(native.array_bytes(num_tokens, row_bytes) for row_bytes in landed),
        num_experts=np.int64(params["num_experts"]),
        alignment=np.int64(params["alignment"]),
        first_choice=_first_choice(params),
        **options,
    )


def _first_choice(params: dict[str, Any]) -> np.int64:
    """Return the attribute of a route; -1 if the capacity holds any routing."""
    return np.int64(-1 if params["first_choice"] is None else params["first_choice"])


def route_chunks(num_tokens: int) -> tuple[int, int]:
    """Tokens that share a flag of route, and how many flags that makes."""
    few = num_tokens <= native.tuning("ROUTE_FEW_TOKENS")
    tokens_per_chunk = native.tuning(
        "ROUTE_TOKENS_PER_CHUNK" if few else "ROUTE_MANY_TOKENS_PER_CHUNK"
    )
    return tokens_per_chunk, max(1, -(-num_tokens // tokens_per_chunk))


def default_num_sms(num_tokens: int) -> int:
    """SMs of a route, dispatch or combine of a group that names none."""
    return FEW_TOKENS_NUM_SMS if num_tokens <= FEW_TOKENS else DEFAULT_NUM_SMS


def _num_sms(group: Group, operation: str, num_tokens: int) -> int:
    if group.size == 1:  # local memory takes what all can give, and nobody waits for a peer
        return group.sms_of(operation) or ALONE_NUM_SMS
    return group.sms_of(operation) or default_num_sms(num_tokens)


def _own_rank(ctx: Any, site: _Site) -> tuple[Any, Any]:
    """Return the aval and the value of this device's rank, int32 []; of all ranks [ranks]."""
    size = site.group.size
    shape = (size,) * site.lead
    aval = compat.result_aval(ctx.avals_in[0], shape, jnp.dtype(jnp.int32))

    def rank() -> Any:
        return jnp.arange(size, dtype=jnp.int32) if site.lead else reference.own_rank(site.group)

    value = mlir.lower_fun(rank, multiple_results=False)(ctx.replace(avals_in=[], avals_out=[aval]))
    return aval, value


def _portable(meaning: Callable[..., Any]) -> Callable[..., Any]:
    """Return the lowering of a function of jnp and lax."""
    lower = mlir.lower_fun(meaning, multiple_results=True)

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        if ctx.primitive is not None:
            logger.info("%s: portable path", ctx.primitive)
        return lower(ctx, *operands, **params)

    return rule


barrier = mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays), multiple_results=True)
"""The lowering of a function that gives all of its operands as they are, and none before all."""


def _is_sub_byte(aval: Any) -> bool:
    dtype = aval.dtype
    bits = jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8
    if jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    return bits < 8


def _row_bytes(aval: Any, itemsize: int | None = None) -> int:
    return math.prod(aval.shape[1:]) * (itemsize or aval.dtype.itemsize)


def _wire_applies(aval: Any, wire: Any, top_k: int, group: Group) -> bool:
    """Whether the kernels make partial sums of rows that cross so: in float32, as they are, or in a
    token format, where a warp's lanes must hold what is summed for a token."""
    if aval.dtype not in SUMMED_DTYPES:
        return False
    if isinstance(wire, TokenFormat):
        return top_k + group.size <= WARP_LANES
    return wire is None or wire in (aval.dtype, jnp.float32)


def _wire_options(dtype: Any, wire: Any, group: Group) -> dict[str, Any]:
    """The attributes of a combine that say how its partial sums cross."""
    fmt = wire if isinstance(wire, TokenFormat) else None
    options = dict(
        float32_wire=fmt is None and wire is not None and wire != dtype,
        wire_format=np.int64(FORMAT_CODES[type(fmt)] if fmt else 0),
        global_scale=_global_scale(fmt),
    )
    if fmt and group.size > 1:
        options["num_sms"] = group.sms_of("combine") or FORMAT_NUM_SMS
    return options


def _sum_bytes(aval: Any, wire: Any) -> int:
    """Bytes that a partial sum of a row takes in its slot."""
    if isinstance(wire, TokenFormat):
        return _encoded_stride(aval, wire)
    return _row_bytes(aval, itemsize=None if wire is None else jnp.dtype(wire).itemsize)


def _call_exchange(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    site: _Site,
    *,
    landed_bytes: Sequence[int],
    num_sms: int | None = None,
    phase: str = "",
    in_flight: Sequence[Any] = (),
    **attributes: Any,
) -> Any:
    """Calls dispatch or combine, which read five of the routing arrays; or, as ``phase`` says, the
    start or the done of one. A done has the operands of its start, so that XLA keeps them in place,
    and what is in flight, which becomes its results."""
    payload, routing = split_routing(operands)
    payload_avals, routing_avals = split_routing(ctx.avals_in)
    group, num_slots = site.group, routing_avals.choice_rank.shape[site.lead]
    read = [*payload, *_read_by_kernels(routing)]
    read_avals = [*payload_avals, *_read_by_kernels(routing_avals)]
    operation = target.removeprefix("moe_a2a_")
    if phase:
        target, num_sms = f"{target}_{phase}", group.sms_of(operation) or SPLIT_NUM_SMS
    return _call(
        ctx.replace(avals_in=[*read_avals, *ctx.avals_out[: len(in_flight)]]),
        target,
        [*read, *in_flight],
        site,
        num_sms=num_sms or _num_sms(group, operation, num_slots),
        zone_bytes=sum(native.array_bytes(num_slots, row_bytes) for row_bytes in landed_bytes),
        is_split=bool(phase),
        aliases={len(read) + i: i for i in range(len(in_flight))},
        **attributes,
    )


def _read_by_kernels(routing: RoutingArrays) -> list[Any]:
    return [
        routing.token_slot,
        routing.slot_token,
        routing.choice_rank,
        routing.slot_rows,
        routing.row_slot,
    ]


def _hash(text: str) -> np.int64:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return np.int64(int.from_bytes(digest, "big", signed=True))


def _call(
    ctx: Any,
    target: str,
    operands: Sequence[Any],
    site: _Site,
    *,
    num_sms: int,
    zone_bytes: int,
    is_split: bool = False,
    aliases: dict[int, int] | None = None,
    **attributes: Any,
) -> Any:
    native.register_targets()
    group, topology = site.group, site.topology
    where = f"devices {topology.devices}" if topology.devices else "one GPU"
    logger.info("%s: CUDA kernels for %d ranks on %s", target, topology.num_ranks, where)
    ring = native.SPLIT_RING if is_split else native.WHOLE_RING
    # A rank alone has own tokens only, which never enter a zone.
    slot_bytes = zone_bytes * topology.num_ranks if topology.num_ranks > 1 else 0
    if topology.is_wide:  # Others open when the program is loaded, without the other processes.
        ring = network.open_workspace(topology, slot_bytes, group.patience, ring)
    if is_split:  # never merged, never dropped, never captured in a graph
        rule = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)
        # Nor fused with slices of what it reads, or with the update of a part of a larger array by
        # what it gives (XLA's dynamic_slice_fusion): what is in flight would be copied there, and a
        # done finds its start by the address.
        operands = barrier(ctx.replace(avals_out=ctx.avals_in), *operands)
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
    # If a loop stores a result in a larger array, and something else uses it too, that fusion takes
    # a copy of the call, and the exchange is made twice. Each result has a barrier of its own: from
    # one around all, XLA takes what nothing uses, and equal calls of which a program uses other
    # results would not be merged.
    alone = [ctx.replace(avals_in=[aval], avals_out=[aval]) for aval in ctx.avals_out]
    return [out for args in zip(alone, results, strict=True) for out in barrier(*args)]
