"""Lower a combine together with the grouped product that computes its rows.

If the rows of a combine are the result of a grouped product in the same block of the program, one
call replaces both. The product computes slices of columns, and the combine sends and sums a slice
while the product computes the next ones (docs/protocol_split.md, "Slices of a product"). Results do
not change. This happens when a program is lowered, so no transformation knows of it. It finds the
products of user code, of the layer, and of the backward pass, whose last combine sums products with
transposed weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from ... import compat
from ...group import native
from .budgets import num_sms_of_dot_combine
from .call_placement import CallPlacement, Refused
from .custom_call import custom_call, half_bytes_of
from .products import FORWARD, GROUPED_GEMM, TRANSPOSED, attributes_of, passes, target_of

TARGET = "moe_a2a_dot_combine"
NUM_COUNTERS = 5  # DotCombineCall::kNumCounters

logger = logging.getLogger("jax_moe_a2a")


class Product(NamedTuple):
    """The call of a product in a program."""

    call: ir.Operation
    passing: Sequence[ir.Operation]
    """The operations from the product to the combine, in this order."""

    def becomes(self, rows: ir.Value) -> None:
        """Let all that reads the product later read ``rows``, so that it is computed once."""
        last = stablehlo.reshape(self.call.results[0].type, rows)
        for op in self.passing:
            op.move_after(last.owner)
            op.operands[0] = last
            (last,) = op.results


def product_of(rows: ir.Value) -> Product | None:
    """Return the product that computes ``rows`` if the program has not read it otherwise so far."""
    passing: list[ir.Operation] = []
    while not isinstance(rows.owner, ir.Block) and len(list(rows.uses)) == min(1, len(passing)):
        op = rows.owner.operation
        if op.block != ir.InsertionPoint.current.block:
            return None
        if not passes(op):
            has_spare = len(op.operands) > 3
            is_product = passing and target_of(op) == GROUPED_GEMM and not has_spare
            return Product(op, passing) if is_product else None
        passing.insert(0, op)
        (rows,) = op.operands
    return None


def dot_combine(
    ctx: Any,
    call_placement: CallPlacement,
    operands: Sequence[ir.Value],
    avals: Sequence[Any],
    attributes: dict[str, Any],
) -> list[Any] | None:
    """Emit the call of a combine and of the product that computes its rows. Return its results, or
    None if the combine is a call of its own.

    Args:
      operands: the payload of the combine, and the routing arrays that the kernels read.
      avals: their types.
      attributes: of the call of the combine.
    """
    num_sums = len(ctx.avals_out) - attributes["num_choice_arrays"]
    has_one_array = num_sums == 1 and attributes["num_pairs"] <= 1
    product = product_of(operands[0]) if has_one_array else None
    if product is None:
        return None
    try:
        return _emit(ctx, call_placement, product, operands, avals, attributes)
    except Refused as why:
        logger.info("%s: after its product, because %s", ctx.primitive, why)
        return None


def _emit(
    ctx: Any,
    call_placement: CallPlacement,
    product: Product,
    operands: Sequence[ir.Value],
    avals: Sequence[Any],
    of_combine: dict[str, Any],
) -> list[Any]:
    sums, *moved = ctx.avals_out
    ranks = sums.shape[: call_placement.lead]
    num_sms = num_sms_of_dot_combine(call_placement.group, sums.shape[len(ranks)])
    if num_sms == 0:
        raise Refused("the group has few ranks or tokens, or num_sms says so")
    of_product = attributes_of(product.call)
    kind = of_product["product"]
    if kind not in (FORWARD, TRANSPOSED):
        raise Refused("the product has few rows in each group")
    if limit := of_product["num_sms"]:
        raise Refused(f"num_sms={limit} limits the product")
    if (wire := of_combine["wire"]) != native.type_name(sums.dtype):
        raise Refused(f"partial sums travel as {wire}")
    rows, weights, table = product.call.operands
    indices = avals[-1]  # of the routing
    operands_of_product = [
        _of_ranks(rows, ranks, sums),
        _of_ranks(weights, ranks, sums),
        _of_ranks(_reshaped(table, (-1,)), ranks, indices),
    ]
    values, types = zip(*operands_of_product, strict=True)
    counters = compat.result_aval(sums, (*ranks, NUM_COUNTERS), indices.dtype)
    avals_in, avals_out = [*types, *avals[1:]], [sums, avals[0], counters, *moved]
    numbers = {name: of_combine[name] for name in ("num_choice_arrays", "num_pairs", "num_addends")}
    attributes = dict(transposed=int(kind == TRANSPOSED), **numbers)
    out, products, _, *moved = custom_call(
        ctx.replace(avals_in=avals_in, avals_out=avals_out),
        TARGET,
        [*values, *operands[1:]],
        call_placement,
        attributes,
        num_sms=num_sms,
        half_bytes=half_bytes_of(TARGET, attributes, call_placement, avals_in, avals_out),
        may_be_captured=False,
    )
    product.becomes(products)
    return [out, *moved]


def _of_ranks(value: ir.Value, ranks: tuple[int, ...], like: Any) -> tuple[ir.Value, Any]:
    """Return an operand of a product and its type, with an axis of ranks if they share a GPU.

    Args:
      like: a type with its dtype.
    """
    first, *others = ir.RankedTensorType(value.type).shape
    if first % math.prod(ranks):
        raise Refused("ranks that share a GPU share the weights, too")
    shape = (*ranks, first // math.prod(ranks), *others)
    return _reshaped(value, shape), compat.result_aval(like, shape, like.dtype)


def _reshaped(value: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Return a value with another shape. A size of -1 is that of all elements."""
    old = ir.RankedTensorType(value.type)
    new = [math.prod(old.shape) if size < 0 else size for size in shape]
    if new == list(old.shape):
        return value
    return stablehlo.reshape(ir.RankedTensorType.get(new, old.element_type), value)
