"""A combine next to the product of its rows: which programs have the common call, and that neither
results nor gradients change by a bit."""

import logging
import re

import cases
import jax.numpy as jnp
import pytest
from next_to_products import (
    DROPS,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    SWIGLU,
    TOKENS,
    WORST,
    arguments,
    assert_same_bits,
    by_hand,
    in_checkpoint,
    in_scan,
    layer,
    lower_for_gpus,
    lowers,
    of_batch,
    on_gpu,
    program,
    text_of,
    text_on_one_gpu,
)

import jax_moe_a2a as ma

CALL = "moe_a2a_dot_combine"


@on_gpu
@pytest.mark.parametrize("layout", (WORST, DROPS), ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    ("fn", "dtype", "num_sms"),
    [(layer, "bfloat16", 16), (layer, "float16", 40), (by_hand, "bfloat16", 16)],
)
def test_results_and_gradients_have_the_same_bits(fn, layout, dtype, num_sms):
    next_to, found = program(fn, layout, dtype, dot_combine=num_sms)
    after, none = program(fn, layout, dtype)
    assert (found, none) == ([0, 2], [0, 0])
    for seed, routing in enumerate((*cases.ROUTINGS, "uniform", "skewed")):
        args = arguments(layout, routing, dtype, seed)
        assert_same_bits(next_to(*args), after(*args), routing)


@on_gpu
def test_many_calls_in_a_row_have_the_same_bits():
    next_to, _ = program(layer, WORST, "bfloat16", True, dot_combine=16)
    after, _ = program(layer, WORST, "bfloat16", True)
    for seed in range(60):
        args = arguments(WORST, "skewed" if seed % 2 else "uniform", "bfloat16", seed)
        # Many executions are under way before any is compared.
        for each in [next_to(*args) for _ in range(5)]:
            assert_same_bits(each, after(*args), seed)


# Which programs have the call: lowering for GPUs needs none.


@pytest.fixture
def gpus(monkeypatch):
    lower_for_gpus(monkeypatch)


@lowers
def test_forward_and_backward_have_one_call_each(gpus):
    calls = [line for line in text_of().splitlines() if f"@{CALL}" in line]
    assert [re.search(r"transposed = (\d)", call)[1] for call in calls] == ["0", "1"]
    # Router weights travel with the gradients of tokens.
    assert [re.search(r"num_choice_arrays = (\d)", call)[1] for call in calls] == ["0", "1"]
    rows = 8 * TOKENS * EXPERTS
    assert f"(tensor<{rows}x64xbf16>, tensor<2x64x1024xbf16>, tensor<6xi32>" in calls[0]
    assert f"(tensor<{rows}x128xbf16>, tensor<2x1024x128xbf16>, tensor<6xi32>" in calls[1]
    assert all("num_sms = 16" in call for call in calls)
    assert "moe_a2a_combine" not in text_of()


@lowers
def test_a_product_that_is_read_later_is_computed_once(gpus):
    def read_later(x, ids, weights, w_in, w_out, **options):
        recv = ma.dispatch(x, ids, weights, **options)
        y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
        return ma.combine(y, recv.routing) + y.sum().astype(x.dtype)

    text = text_of(read_later, gradients=False)
    assert text.count(f"@{CALL}") == 1
    product = re.search(r"(%\d+):2 = stablehlo.custom_call @moe_a2a_grouped_gemm", text)[1]
    assert f"{product}#0" not in text  # XLA removes a call that nothing reads


def read_before(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
    total = y.sum().astype(x.dtype)
    return ma.combine(y, recv.routing) + total


def scaled(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
    return ma.combine(2 * y, recv.routing)


def limited(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes, num_sms=40)
    return ma.combine(y, recv.routing)


def of_two_axes(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
    return ma.combine(y.reshape(-1, 2, HIDDEN // 2), recv.routing).reshape(x.shape)


def with_addend(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows[:, :INTERMEDIATE], w_out, recv.group_sizes)
    return ma.combine(y, recv.routing, add=x)


def in_fp8(x, ids, weights, w_in, w_out, **options):
    options["wire_dtype"] = ma.BlockwiseFp8()
    return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options)


def in_float32(x, ids, weights, w_in, w_out, **options):
    options["wire_dtype"] = jnp.float32
    return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options)


def with_bias(x, ids, weights, w_in, w_out, **options):
    bias = jnp.zeros((EXPERTS, HIDDEN), x.dtype)
    return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, b_out=bias, **options)


@lowers
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(change=read_before), None),
        (dict(change=scaled), None),
        (dict(change=with_bias), None),
        (dict(change=with_addend), None),
        (dict(change=in_float32), "partial sums travel as float32"),
        (dict(change=in_fp8), "partial sums travel as BlockwiseFp8"),
        (dict(change=limited), "num_sms=40 limits the product"),
        (dict(change=of_two_axes), "needs rows and products of two axes"),
        (dict(hidden=768), "at least one tile of 256 columns in each of 4 slices; got"),
        (dict(ranks=2), "the group has few ranks or tokens"),
        (dict(tokens=TOKENS - 8), "the group has few ranks or tokens"),
        (dict(num_sms={"dot_combine": 0}), "or num_sms says so"),
        (dict(ranks=2, num_sms=32), "the group has few ranks or tokens"),
    ],
)
def test_other_combines_follow_their_product(gpus, caplog, options, why):
    with caplog.at_level(logging.INFO, "jax_moe_a2a"):
        text = text_of(gradients=False, **options)
    assert f"@{CALL}" not in text
    assert "@moe_a2a_combine" in text
    if why is not None:
        assert "moe_a2a_combine: after its product, because" in caplog.text
        assert why in caplog.text


@lowers
def test_few_rows_in_each_group_have_a_product_without_slices(gpus, caplog):
    def few(x, ids, weights, w_in, w_out, **options):
        options["capacity"] = 64
        return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options)

    with caplog.at_level(logging.INFO, "jax_moe_a2a"):
        assert f"@{CALL}" not in text_of(few, gradients=False)
    assert "the product has few rows in each group" in caplog.text


@lowers
def test_a_group_may_ask_for_the_call(gpus):
    group = dict(num_sms={"dot_combine": 24})
    calls = [line for line in text_of(ranks=2, tokens=128, **group).splitlines() if CALL in line]
    assert len(calls) == 2
    assert all("num_sms = 24" in call for call in calls)


@lowers
@pytest.mark.parametrize(
    ("num_sms", "expected"),
    [(64, 16), (8, 8), ({"combine": 8}, 8), ({"dispatch": 8}, 16)],
)
def test_a_limit_of_exchanges_is_one_of_the_call(gpus, num_sms, expected):
    (call,) = (
        line for line in text_of(gradients=False, num_sms=num_sms).splitlines() if CALL in line
    )
    assert f"num_sms = {expected} " in call


# Transforms are not known to the lowering, so each of them may have the call.


@lowers
@pytest.mark.parametrize("change", (in_scan, in_checkpoint, of_batch))
def test_transforms_have_one_call_forward_and_one_backward(gpus, change):
    text = text_of(change, tokens=2 * TOKENS)
    assert text.count(f"@{CALL}") == 2
    assert "moe_a2a_combine" not in text


@lowers
def test_ranks_that_share_a_gpu_have_an_axis_in_the_call(gpus):
    (call,) = (line for line in text_on_one_gpu(dot_combine=16).splitlines() if f"@{CALL}" in line)
    operands, results = call.rsplit(" : ", 1)[1].split(" -> ")
    rows = 4 * TOKENS * EXPERTS
    assert operands.startswith(
        f"(tensor<4x{rows}x64xbf16>, tensor<4x2x64x1024xbf16>, tensor<4x6xi32>"
    )
    products = f"tensor<4x{rows}x1024xbf16>"
    assert results == f"(tensor<4x{TOKENS}x1024xbf16>, {products}, tensor<4x5xi32>)"


@lowers
def test_weights_that_ranks_of_a_gpu_share_follow_one_another(gpus, caplog):
    """Four matrices are one for each rank in memory, and the table says which of them a group has.
    Two matrices have no such form."""
    assert "tensor<4x1x64x1024xbf16>" in text_on_one_gpu(None, 4, dot_combine=16)
    with caplog.at_level(logging.INFO, "jax_moe_a2a"):
        assert f"@{CALL}" not in text_on_one_gpu(None, 2, dot_combine=16)
    assert "ranks that share a GPU share the weights, too" in caplog.text
