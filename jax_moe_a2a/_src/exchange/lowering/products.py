"""Name the calls of grouped products, which combines may run next to."""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

GROUPED_GEMM = "moe_a2a_grouped_gemm"
# GroupedProduct in cuda/gemm/grouped_gemm.h (tests/test_layout.py compares).
FORWARD, FORWARD_FEW, TRANSPOSED, WEIGHT_GRADIENT = range(4)
# These operations may be between a product and a combine. They keep the elements in their order.
PASSING = ("stablehlo.optimization_barrier", "stablehlo.reshape")


def passes(op: ir.Operation) -> bool:
    """Return whether an operation only passes its operand on."""
    return op.name in PASSING and len(op.operands) == 1


def target_of(op: ir.Operation) -> str:
    """Return the target of a custom call, or "" for another operation."""
    if op.name != "stablehlo.custom_call":
        return ""
    return ir.StringAttr(op.attributes["call_target_name"]).value


def attributes_of(call: ir.Operation) -> dict[str, Any]:
    """Return the attributes of a call that are integers."""
    config = ir.DictAttr(call.attributes["mhlo.backend_config"])
    named = ((config[i].name, config[i].attr) for i in range(len(config)))
    return {name: ir.IntegerAttr(x).value for name, x in named if isinstance(x, ir.IntegerAttr)}
