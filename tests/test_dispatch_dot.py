"""A product that begins while its rows land: which programs have it, and that neither results nor
gradients change by a bit."""

import logging
import re

import cases
import pytest
from next_to_products import (
    DROPS,
    EXPERTS,
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
    twice,
    with_options,
)

import jax_moe_a2a as ma

MANY = cases.Layout("many", tokens=1536, top_k=4, local_experts=4, hidden=512)


@on_gpu
@pytest.mark.parametrize("layout", (WORST, DROPS, MANY), ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    ("fn", "dtype", "num_sms", "found"),
    [
        (layer, "bfloat16", dict(dispatch_dot=24), [2, 0]),
        (layer, "float16", dict(dispatch_dot=7, dot_combine=16), [2, 2]),
        (by_hand, "bfloat16", dict(dispatch_dot=32), [1, 0]),
        (with_options, "bfloat16", dict(dispatch_dot=16), [2, 0]),
        (twice, "bfloat16", dict(dispatch_dot=24), [3, 0]),
    ],
)
def test_results_and_gradients_have_the_same_bits(fn, layout, dtype, num_sms, found):
    while_landing, calls = program(fn, layout, dtype, **num_sms)
    after, none = program(fn, layout, dtype)
    # The second product of a layer with few columns has no slices.
    assert (calls, none) == ([found[0], found[1] * (layout is not MANY)], [0, 0])
    for seed, routing in enumerate((*cases.ROUTINGS, "uniform", "skewed")):
        args = arguments(layout, routing, dtype, seed)
        assert_same_bits(while_landing(*args), after(*args), routing)


@on_gpu
def test_many_calls_in_a_row_have_the_same_bits():
    args = layer, WORST, "bfloat16", True
    while_landing, _ = program(*args, dispatch_dot=24, dot_combine=16)
    after, _ = program(*args)
    for seed in range(60):
        args = arguments(WORST, "skewed" if seed % 2 else "uniform", "bfloat16", seed)
        # Many executions are under way before any is compared.
        for each in [while_landing(*args) for _ in range(5)]:
            assert_same_bits(each, after(*args), seed)


# Which programs have it.


@pytest.fixture
def gpus(monkeypatch):
    lower_for_gpus(monkeypatch)


def calls_of(text):
    """Return the lines of dispatches, and of products whose rows land."""
    return [
        [line for line in text.splitlines() if re.search(name, line)]
        for name in (r"@moe_a2a_dispatch\b|@moe_a2a_dispatch_in_graph", "_while_landing")
    ]


ASKED = dict(num_sms={"dispatch_dot": 24})


@lowers
def test_forward_and_backward_have_one_each(gpus):
    dispatches, products = calls_of(text_of(**ASKED))
    assert [re.search(r"@(\w+)_while", call)[1] for call in products] == [
        "moe_a2a_dot_act",
        "moe_a2a_act_dot_grad",
    ]
    for dispatch, product in zip(dispatches, products, strict=True):
        assert "lands = true" in dispatch and "num_sms = 24" in dispatch
        assert "@moe_a2a_dispatch(" in dispatch  # which is never captured
        assert re.search(r"landing = [1-9]", product)


@lowers
def test_the_dispatch_comes_right_before_its_product(gpus):
    """The dispatch depends on the product's other operands, so XLA computes them first. The product
    has all that the dispatch reads and writes, which XLA keeps until then."""
    for dispatch, product in zip(*calls_of(text_of(**ASKED)), strict=True):
        results = re.match(r" *(%\d+)", dispatch)[1]
        operands = [re.search(r"\((.*?)\)", call)[1].split(", ") for call in (dispatch, product)]
        num_kept = int(re.search(r"landing = (\d+)", product)[1])
        read, kept = operands[0], operands[1][-num_kept:]
        num_results = int(re.match(r" *%\d+:(\d+)", dispatch)[1])
        rows = [f"{results}#{i}" for i in range(num_results)]
        assert kept[0] == rows[-1] and kept[1:num_results] == rows[:-1]
        payload, routing = read[: num_results - 1], read[-6:]
        assert kept[num_results:] == [*payload, *routing]
        table = operands[1][2]
        assert table in read[num_results - 1 : -6]


def read_before(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    total = recv.rows.sum().astype(x.dtype)
    y = ma.grouped_dot(recv.rows, w_in, recv.group_sizes)
    return ma.combine(y, recv.routing) + total


def scaled(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(2 * recv.rows, w_in, recv.group_sizes)
    return ma.combine(y, recv.routing)


def limited(x, ids, weights, w_in, w_out, **options):
    recv = ma.dispatch(x, ids, weights, **options)
    y = ma.grouped_dot(recv.rows, w_in, recv.group_sizes, num_sms=40)
    return ma.combine(y, recv.routing)


def few(x, ids, weights, w_in, w_out, **options):
    options["capacity"] = 64
    return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options)


def in_a_format(x, ids, weights, w_in, w_out, **options):
    options["format"] = ma.BlockwiseFp8()
    return ma.moe_mlp(x, ids, weights, w_in, w_out, activation=SWIGLU, **options)


@lowers
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(change=read_before), "the program has read the dispatch before"),
        (dict(change=scaled), None),
        (dict(change=limited), "num_sms=40 limits the product"),
        (dict(change=few), "the product has few rows in each group"),
        (dict(change=in_a_format), None),
        (dict(num_sms={"dispatch_dot": 0}), "num_sms does not ask for the product next to it"),
        (
            dict(num_sms=None),
            "moe_a2a_dot_act: after the dispatch of its rows, because num_sms does not ask",
        ),
    ],
)
def test_other_products_follow_their_dispatch(gpus, caplog, options, why):
    group = dict(num_sms={"dispatch_dot": 32}) if "change" in options else {}
    with caplog.at_level(logging.INFO, "jax_moe_a2a"):
        text = text_of(gradients=False, **group, **options)
    assert "_while_landing" not in text
    assert "lands = true" not in text
    if why is not None:
        assert why in caplog.text


@lowers
@pytest.mark.parametrize(("change", "num"), [(in_scan, 2), (in_checkpoint, 3), (of_batch, 2)])
def test_transforms_have_it(gpus, change, num):
    assert len(calls_of(text_of(change, tokens=2 * TOKENS, **ASKED))[1]) == num


@lowers
def test_ranks_that_share_a_gpu_have_an_axis_in_the_dispatch(gpus):
    ranks = 4
    text = text_on_one_gpu(dispatch_dot=24)
    (dispatch,), (product,) = calls_of(text)
    capacity = ranks * TOKENS * EXPERTS
    assert f"tensor<4x{capacity // 128 + 1 + ranks * TOKENS}xi32>)" in dispatch
    assert f"landing_rows = {capacity}" in product
