"""Let a grouped product begin while the dispatch of its rows is under way.

If the rows of a grouped product are the result of a dispatch in the same block of the program, the
product waits for its rows tile by tile, and the dispatch runs next to it on few SMs
(docs/protocol_split.md, "Rows that land during a product"). Both stay calls of their own, one right
after the other. Results do not change. This happens when a program is lowered, so no transformation
knows of it. It finds products of user code, of the layer, and of the backward pass, which
dispatches gradients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from ... import compat
from ...group import native
from .budgets import num_sms_next_to_product
from .call_placement import CallPlacement, Refused
from .custom_call import READ_BY_KERNELS, half_bytes_of
from .products import (
    ACT_DOT_GRAD,
    DOT_ACT,
    FORWARD,
    GROUPED_GEMM,
    TRANSPOSED,
    attributes_of,
    call_of,
    passes,
    target_of,
)

NUM_READ = len(READ_BY_KERNELS)
DISPATCH = "moe_a2a_dispatch"
# The operands of products that may be results of the dispatch: rows, and the weights of rows.
PRODUCTS = {GROUPED_GEMM: {0}, DOT_ACT: {0, 4}, ACT_DOT_GRAD: {0}}
LANDING_ROWS = 128  # kLandingRows in cuda/params.h
CONFIG = "mhlo.backend_config"

logger = logging.getLogger("jax_moe_a2a")


def landing_attributes(
    call_placement: CallPlacement,
    attributes: dict[str, Any],
    avals_in: Sequence[Any],
    avals_out: Sequence[Any],
) -> dict[str, int]:
    """Return attributes of a dispatch for ``next_to_dispatch``. They say what the dispatch needs
    next to a product: SMs (0: it runs alone), the columns that the product must have, the bytes of
    a ring half, the ranks and their rows, and the words of the result that counts rows.

    Args:
      attributes: of the dispatch.
      avals_in, avals_out: the types of its operands and results.
    """
    alone = dict(landing_sms=0)
    lead, capacity = call_placement.lead, avals_out[0].shape[call_placement.lead]
    token_slot = avals_in[-NUM_READ]
    num_tokens, num_ranks = token_slot.shape[lead:]
    num_sms = num_sms_next_to_product(call_placement.group, "dispatch_dot", num_tokens)
    if num_sms == 0 or not native.has_grouped_gemm():
        return alone
    words = -(-capacity // LANDING_ROWS) + 1 + num_ranks * num_tokens
    landed = compat.result_aval(token_slot, (*token_slot.shape[:lead], words), token_slot.dtype)
    try:
        half_bytes = half_bytes_of(
            DISPATCH,
            dict(attributes, lands=True),
            call_placement,
            avals_in,
            [*avals_out, landed],
        )
    except Refused as why:
        logger.info("%s: before the product of its rows, because %s", DISPATCH, why)
        return alone
    return dict(
        landing_sms=num_sms,
        landing_half_bytes=half_bytes,
        landing_ranks=num_ranks if lead else 1,
        landing_rows=capacity,
        landing_words=words,
    )


def next_to_dispatch(results: Sequence[Any]) -> None:
    """Let a product that has just been lowered begin while its rows land, if they are those of a
    dispatch that nothing has read before.

    Args:
      results: of the product's lowering.
    """
    product = call_of(results[0], PRODUCTS)
    if product is None:
        return
    dispatch = call_of(product.operands[0], (DISPATCH, f"{DISPATCH}_in_graph"))
    if dispatch is None or dispatch.block != product.block:
        return
    try:
        _join(dispatch, product)
    except Refused as why:
        logger.info("%s: after the dispatch of its rows, because %s", target_of(product), why)


def _join(dispatch: ir.Operation, product: ir.Operation) -> None:
    config, of_product = attributes_of(dispatch), attributes_of(product)
    if not config.get("landing_sms"):
        raise Refused("num_sms does not ask for the product next to it")
    # The gradient of activations is a transposed product.
    kind = of_product.get("product", TRANSPOSED)
    if kind not in (FORWARD, TRANSPOSED):
        raise Refused("the product has few rows in each group, or computes gradients of weights")
    if limit := of_product["num_sms"]:
        raise Refused(f"num_sms={limit} limits the product")
    passing, read = _between(dispatch, product)
    if not read <= PRODUCTS[target_of(product)]:
        raise Refused("other operands of the product come from the dispatch, too")
    lead = [config["landing_ranks"]] if config["landing_ranks"] > 1 else []
    int32 = ir.IntegerType.get_signless(32)
    counts = ir.RankedTensorType.get([*lead, config["landing_words"]], int32)
    with ir.InsertionPoint(product):
        # All that the product needs comes before the dispatch, so that nothing comes between them.
        others = [x for i, x in enumerate(product.operands) if i not in read]
        before = [_with_lead(x, lead) for x in others if 0 not in _shape(x)]
        operands = list(dispatch.operands)
        operands[-NUM_READ:-NUM_READ] = before
        landing = _copy(
            dispatch,
            DISPATCH,
            operands,
            [*(result.type for result in dispatch.results), counts],
            lands=True,
            num_sms=config["landing_sms"],
            half_bytes=config["landing_half_bytes"],
        )
        *rows, landed = landing.results
        for old, new in zip(dispatch.results, rows, strict=True):
            old.replace_all_uses_with(new)
        for op in passing:
            op.move_before(product)
        kept = [landed, *rows, *dispatch.operands]
        multiplied = _copy(
            product,
            f"{target_of(product)}_while_landing",
            [*product.operands, *kept],
            [result.type for result in product.results],
            landing=len(kept),
            landing_rows=config["landing_rows"],
            landing_timeout_ns=_timeout_ns(config),
        )
    for old, new in zip(product.results, multiplied.results, strict=True):
        old.replace_all_uses_with(new)
    logger.info("%s: while its rows land", target_of(product))
    product.erase()
    dispatch.erase()


def _timeout_ns(config: dict[str, Any]) -> int:
    """Return a bound of the product's wait, longer than a successful dispatch may take: each peer
    may begin late, and then wait for its own peers."""
    for_each_rank = config["timeout_ns"] + config["first_timeout_ns"]
    return min((1 + config["num_ranks"]) * for_each_rank, 2**62)


def _between(dispatch: ir.Operation, product: ir.Operation) -> tuple[list[ir.Operation], set[int]]:
    """Return the operations between a dispatch and a product, in their order, and which operands of
    the product come from the dispatch.

    Raises:
      Refused: if anything else has read the dispatch.
    """
    passing: list[ir.Operation] = []
    read: set[int] = set()
    left = list(dispatch.results)
    while left:
        for use in left.pop(0).uses:
            user = use.owner.operation
            if user == product:
                read.add(use.operand_number)
            elif user.block == product.block and passes(user):
                passing.append(user)
                left += user.results
            else:
                raise Refused("the program has read the dispatch before")
    return passing, read


def _copy(
    call: ir.Operation,
    target: str,
    operands: Sequence[ir.Value],
    results: Sequence[ir.Type],
    **config: int,
) -> ir.Operation:
    """Return a copy of a call with another target, operands, results and attributes, all arrays in
    row-major layout."""
    old = ir.DictAttr(call.attributes[CONFIG])
    new = {old[i].name: old[i].attr for i in range(len(old))}
    int64 = ir.IntegerType.get_signless(64)
    for name, value in config.items():
        is_bool = isinstance(value, bool)
        new[name] = ir.BoolAttr.get(bool(value)) if is_bool else ir.IntegerAttr.get(int64, value)
    attributes = {
        call.attributes[i].name: call.attributes[i].attr for i in range(len(call.attributes))
    }
    attributes |= {
        "call_target_name": ir.StringAttr.get(target),
        CONFIG: ir.DictAttr.get(new),
        "operand_layouts": _layouts(x.type for x in operands),
        "result_layouts": _layouts(results),
    }
    return ir.Operation.create(
        "stablehlo.custom_call", results=results, operands=operands, attributes=attributes
    )


def _layouts(types: Any) -> ir.ArrayAttr:
    ranks = (len(ir.RankedTensorType(t).shape) for t in types)
    index = ir.IndexType.get()
    orders: Any = (np.arange(rank - 1, -1, -1, dtype=np.int64) for rank in ranks)
    return ir.ArrayAttr.get([ir.DenseIntElementsAttr.get(order, type=index) for order in orders])


def _shape(value: ir.Value) -> list[int]:
    return ir.RankedTensorType(value.type).shape


def _with_lead(value: ir.Value, lead: Sequence[int]) -> ir.Value:
    """Return a value with a leading axis of ranks, as all operands of an exchange have it."""
    if not lead:
        return value
    size = math.prod(_shape(value))
    if size % lead[0]:
        raise Refused("ranks that share a GPU share an operand of the product, too")
    element = ir.RankedTensorType(value.type).element_type
    return stablehlo.reshape(ir.RankedTensorType.get([*lead, size // lead[0]], element), value)
