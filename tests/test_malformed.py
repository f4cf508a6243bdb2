"""Test that a malformed kernel call raises an error while it is lowered; the portable path must not
hide it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_experts
import test_grouped_dot_paths as products
import test_lowering
from cuda_calls import lowered as lowered_for_cuda
from cuda_calls import needs_kernel
from test_lowering import EXPERTS, RANKS, TOP_K, aval, calls, group_of, lower

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange import lowering as lowered
from jax_moe_a2a._src.experts.act_grad import bind_act_grad
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.grouped.act_encode import bind_act_encode
from jax_moe_a2a._src.placement import fill

pytestmark = test_lowering.pytestmark

# TOKENS is not RANKS, so that swapping token_slot [T, R] and slot_token [R, T] raises an error.
TOKENS = 6
IDS = aval(TOKENS, TOP_K, dtype="int32")
WEIGHTS = aval(TOKENS, TOP_K, dtype="float32")
X = aval(TOKENS, 128)
CAPACITY = harness.worst_case(TOKENS, TOP_K, RANKS, EXPERTS)
ROWS, ROW_WEIGHTS = aval(CAPACITY, 128), aval(CAPACITY, dtype="float32")
ANOTHER_DTYPE = jnp.dtype("complex64")  # no array of a call has this dtype


class Call(NamedTuple):
    target: str
    attributes: dict[str, Any]
    operands: list[Any]
    results: list[Any]
    lower: Callable[["Call"], Any]

    def error(self, damage):
        with pytest.raises(RuntimeError, match=f"malformed call of {self.target}: ") as error:
            self.lower(damage(self))
        return str(error.value)


def retyped(x):
    return jax.ShapeDtypeStruct(x.shape, ANOTHER_DTYPE)


def resized(call, i, axis):
    x = call.operands[i]
    shape = [size + (n == axis) for n, size in enumerate(x.shape)]
    larger = jax.ShapeDtypeStruct(shape, x.dtype)
    return call._replace(operands=replaced(call.operands, i, larger))


def replaced(arrays, i, array):
    return [array if n == i % len(arrays) else other for n, other in enumerate(arrays)]


def swapped(call, i, j):
    operands = replaced(call.operands, i, call.operands[j])
    return call._replace(operands=replaced(operands, j, call.operands[i]))


def without(call, name):
    return call._replace(attributes={n: v for n, v in call.attributes.items() if n != name})


def with_another_type(call, name):
    value = 1 if isinstance(call.attributes[name], str) else "another type"
    return call._replace(attributes=call.attributes | {name: value})


def without_an_operand(call):
    return call._replace(operands=call.operands[:-1])


DAMAGES = {
    "an operand is missing": without_an_operand,
    "an operand is too many": lambda c: c._replace(operands=[*c.operands, c.operands[0]]),
    "a result is missing": lambda c: c._replace(results=c.results[:-1]),
    "an operand has another dtype": lambda c: c._replace(
        operands=replaced(c.operands, -1, retyped(c.operands[-1]))
    ),
    "a result has another dtype": lambda c: c._replace(
        results=replaced(c.results, -1, retyped(c.results[-1]))
    ),
}


def patch_calls(patch, damaged):
    why_not, call_product = native.why_not, native.call_product

    def of_exchange(target, attributes, operands, results, *others):
        lower = lambda c: why_not(target, c.attributes, c.operands, c.results, *others)
        call = Call(target, dict(attributes), list(operands), list(results), lower)
        return lower(damaged(call))

    def of_product(target, results, operands, aliases=None, **attributes):
        lower = lambda c: call_product(target, c.results, c.operands, aliases, **c.attributes)
        return lower(damaged(Call(target, attributes, list(operands), list(results), lower)))

    patch.setattr(native, "why_not", of_exchange)
    patch.setattr(native, "call_product", of_product)


def check_every_damage(target, fn, monkeypatch, caplog, unchecked=()):
    """Assert that each damage to the call of `target` raises; return the undamaged call."""
    caplog.set_level("INFO", "jax_moe_a2a")
    seen = []

    def damaged(call):
        if call.target != target:
            return call
        seen.append(call)
        return without_an_operand(call)

    with monkeypatch.context() as patch:
        patch_calls(patch, damaged)
        with pytest.raises(RuntimeError, match=f"malformed call of {target}: "):
            fn()
    assert not [m for m in caplog.messages if "portable path" in m or "not fused" in m]
    call = seen[0]
    for name, damage in DAMAGES.items():
        if name not in unchecked:
            call.error(damage)
    for attribute in call.attributes:
        for damage in (without, with_another_type):
            error = call.error(lambda call: damage(call, attribute))
            assert f"the attribute {attribute} is missing or has another type" in error
    return call


def routing_of(ids):
    return ma.route(ids, group=group_of(), num_experts=EXPERTS)


def dispatched(x, ids, **options):
    return ma.dispatch(x, routing_of(ids), **harness.exchanging(options)).rows


def routed(x, ids, **options):
    return ma.dispatch(
        x, ids, group=group_of(), num_experts=EXPERTS, **harness.exchanging(options)
    ).rows


def split(x, ids):
    return ma.dispatch_done(ma.dispatch_start(x, routing_of(ids))).rows


def summed(y, ids, **options):
    return ma.combine(y, routing_of(ids), **options)


def weighted(y, weights, ids):
    return ma.combine(y, routing_of(ids), weights=weights)


def weighted_gradient(y, weights, ids, ct):
    return jax.vjp(lambda *pair: weighted(*pair, ids), y, weights)[1](ct)


FP8 = dict(token_format=ma.BlockwiseFp8())
EXCHANGES = {  # name: (target, program, types of the operands)
    "exchange": ("dispatch", dispatched, X, IDS),
    "exchange to tokens": ("combine", summed, ROWS, IDS),
    "split": ("dispatch", split, X, IDS),
    "weighted": ("combine", weighted, ROWS, ROW_WEIGHTS, IDS),
    "weighted gradient": ("weighted_dispatch", weighted_gradient, ROWS, ROW_WEIGHTS, IDS, X),
    "format": ("format_dispatch", lambda x, ids: dispatched(x, ids, **FP8).values, X, IDS),
    "decoded": ("format_dispatch", lambda x, ids: dispatched(x, ids, decode=True, **FP8), X, IDS),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_malformed_exchange_raises_while_it_is_lowered(name, monkeypatch, caplog):
    target, fn, *avals = EXCHANGES[name]
    call = check_every_damage(f"moe_a2a_{target}", lambda: lower(fn, *avals), monkeypatch, caplog)
    for first in range(-len(lowered.READ_BY_KERNELS), -1):
        error = call.error(lambda call: swapped(call, first, first + 1))
        assert any(name in error for name in lowered.READ_BY_KERNELS)


@pytest.mark.parametrize(
    ("target", "fn"),
    (
        ("route", lambda ids: routing_of(ids).row_token),
        ("routed_dispatch", lambda ids: routed(jnp.ones((TOKENS, 128)), ids)),
        ("routed_dispatch", lambda ids: routed(jnp.ones((TOKENS, 128)), ids, **FP8).values),
    ),
    ids=("route", "routed", "routed_in_a_format"),
)
def test_a_malformed_route_raises_while_it_is_lowered(target, fn, monkeypatch, caplog):
    """The checks omit the dtypes of a route's results."""
    args = f"moe_a2a_{target}", lambda: lower(fn, IDS), monkeypatch, caplog
    # The payload, the last operand of a routed dispatch, may have any dtype.
    unchecked = ["a result has another dtype"] if target == "route" else []
    unchecked += ["an operand has another dtype"] if target != "route" else []
    check_every_damage(*args, unchecked=unchecked).error(lambda call: swapped(call, 0, 1))


def test_routing_arrays_in_another_order_raise(monkeypatch):
    first, second, *others = lowered.READ_BY_KERNELS
    assert calls(lower(dispatched, X, IDS)) == {"route": 1, "dispatch": 1}
    monkeypatch.setattr(lowered, "READ_BY_KERNELS", (second, first, *others))
    for fn, args in ((dispatched, (X, IDS)), (summed, (ROWS, IDS)), (split, (X, IDS))):
        with pytest.raises(RuntimeError, match=r"bug.*token_slot must be S32.*Please report it"):
            lower(fn, *args)


def test_numbers_that_float32_rounds_are_attributes():
    fmt = ma.NvFp4(global_scale=0.3)
    text = lower(lambda x, ids: dispatched(x, ids, token_format=fmt).values, X, IDS)
    assert calls(text) == {"route": 1, "format_dispatch": 1}


def test_a_target_without_a_kernel_raises():
    group = group_of()
    with pytest.raises(RuntimeError, match="no kernel has the target 'moe_a2a_nothing'"):
        native.why_not("moe_a2a_nothing", {}, [], [], group.topology, False)


ROWS_FP8 = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
PRE_FP8 = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
ROW_WEIGHTS_FP8 = jax.ShapeDtypeStruct((512,), jnp.float32)
SIZES = jax.ShapeDtypeStruct((4,), jnp.int32)
PRODUCTS = {
    "grouped_gemm": (ma.grouped_dot, products.avals),
    "dot_act": (test_experts.forward, test_experts.avals),
    "act_dot_grad": (test_experts.backward, test_experts.avals),
    "fp8_gemm": (ma.grouped_dot, products.fp8_avals),
    "act_encode": (
        lambda rows, sizes: bind_act_encode(rows, None, sizes),
        lambda: (ROWS_FP8, SIZES),
    ),
    "act_grad": (
        partial(bind_act_grad, activation=test_experts.SWIGLU, num_sms=None),
        lambda: (ROWS_FP8, PRE_FP8, ROW_WEIGHTS_FP8, SIZES),
    ),
    "encode_squares": (
        ma.quantize_experts,
        lambda: (jax.ShapeDtypeStruct((2, 256, 128), jnp.bfloat16),),
    ),
}


@needs_kernel
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_malformed_product_raises_while_it_is_lowered(name, hopper, monkeypatch, caplog):
    fn, avals = PRODUCTS[name]

    def lower_it():
        jax.clear_caches()
        return lowered_for_cuda(fn, *avals())

    assert f"@moe_a2a_{name}(" in lower_it()
    args = f"moe_a2a_{name}", lower_it, monkeypatch, caplog
    # With one more operand, the call is valid: it has spare weights.
    too_many = "an operand is too many"
    call = check_every_damage(*args, unchecked=[too_many])
    call.error(lambda call: call._replace(operands=[*call.operands, *call.operands[:1] * 2]))
    for i, operand in enumerate(call.operands):
        if i:
            call.error(lambda call: swapped(call, i - 1, i))
        # The table [3, groups], an int32 operand, may have any number of groups.
        axis = 0 if operand.dtype == "int32" else operand.ndim - 1
        call.error(lambda call: resized(call, i, axis))


@needs_kernel
def test_a_malformed_plan_raises_while_it_is_lowered(monkeypatch, caplog):
    monkeypatch.setattr(fill, "why_no_kernel", lambda *sizes: "")

    def lower_it():
        jax.clear_caches()
        plan = partial(ma.plan_placement, num_ranks=4, spare=2)
        return lowered_for_cuda(plan, jax.ShapeDtypeStruct((16,), jnp.int32))

    call = check_every_damage("moe_a2a_fill_slots", lower_it, monkeypatch, caplog)
    for i in range(len(call.operands)):
        call.error(lambda call: resized(call, i, 2))


@needs_kernel
@pytest.mark.parametrize("is_masked", (False, True), ids=("all", "masked"))
def test_a_malformed_choice_raises_while_it_is_lowered(is_masked, monkeypatch, caplog):
    monkeypatch.setattr(native, "why_no_local_kernel", lambda: "")
    topk = ma.TopK(4, score="sigmoid", num_groups=4, top_groups=2)
    logits = jax.ShapeDtypeStruct((6, 32), jnp.float32)
    mask = jax.ShapeDtypeStruct((6,), jnp.bool_)

    def lower_it():
        jax.clear_caches()
        choice = lambda logits, mask: topk(logits, mask=mask if is_masked else None)[:2]
        return lowered_for_cuda(choice, logits, mask)

    call = check_every_damage("moe_a2a_choose", lower_it, monkeypatch, caplog)
    for wrong in dict(num_groups=3), dict(top_groups=5), dict(top_groups=0), dict(top_in_group=9):
        call.error(lambda call: call._replace(attributes=call.attributes | wrong))
    for i, operand in enumerate(call.operands):
        call.error(lambda call: resized(call, i, operand.ndim - 1))


@needs_kernel
def test_a_product_without_a_kernel_for_its_sizes_is_no_call(hopper):
    avals = products.avals(dtype="float32")
    assert "moe_a2a_grouped_gemm" not in lowered_for_cuda(ma.grouped_dot, *avals)
    call = native.call_product
    rows, w, _ = (np.zeros(x.shape, x.dtype) for x in avals)
    table = np.zeros((3, 4), np.int32)
    d, counter = jax.ShapeDtypeStruct((512, 128), "float32"), jax.ShapeDtypeStruct((1,), "int32")
    with pytest.raises(RuntimeError, match="the kernel needs bfloat16 or float16"):
        call("moe_a2a_grouped_gemm", [d, counter], [rows, w, table], product=0, num_sms=0)
