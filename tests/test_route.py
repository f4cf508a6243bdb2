"""Test that ids of any integer dtype, valid or not, are routed as in oracle.py."""

import functools

import cases
import harness
import jax
import numpy as np
import oracle
import pytest

import jax_moe_a2a as ma


@functools.cache
def route_program(layout, ranks):
    group = harness.group_of(ranks)

    def route(ids):
        return ma.route(ids, **layout.route_args(group))

    exchanges = int(layout.has_rows(ranks))
    return harness.on_each_rank(route, harness.mesh_of(ranks), exchanges=exchanges)


def expected_routing(layout, ids):
    ranks = len(ids)
    return oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)


def test_invalid_ids_route_like_masked_ones():
    """An invalid id is routed like -1, but counted as invalid."""
    layout, ranks = cases.PADDED, harness.SEVERAL
    ids = cases.Case(layout, "invalid").ids(ranks)
    wild = (ids < -1) | (ids >= layout.num_experts(ranks))
    assert wild.any()
    program = route_program(layout, ranks)
    with_invalid, with_masked = program(ids), program(np.where(wild, np.int32(-1), ids))
    np.testing.assert_array_equal(with_invalid.num_invalid, wild.sum(axis=(1, 2)))
    narrow = program(ids.clip(-1000, 1000).astype(np.int16))
    np.testing.assert_array_equal(narrow.num_invalid, with_invalid.num_invalid)
    for field in oracle.FIELDS:
        if field != "num_invalid":
            harness.assert_same_bytes(
                getattr(with_invalid, field), getattr(with_masked, field), field
            )


@pytest.mark.parametrize("dtype", ("int8", "uint8", "int16"))
def test_ids_of_any_integer_dtype_route_alike(dtype):
    layout, ranks = cases.PLAIN, harness.SEVERAL
    ids = cases.Case(layout, "uniform").ids(ranks)
    ids = np.where(ids <= np.iinfo(dtype).max, ids, 0)  # int8 cannot represent all ids
    actual = route_program(layout, ranks)(ids.astype(dtype))
    harness.assert_routing_is(actual, expected_routing(layout, ids))


@pytest.mark.parametrize("dtype", ("uint32", "int64"))
def test_ids_that_int32_does_not_hold_are_invalid(dtype):
    """The uint32 bits of -1, and 64-bit ids with valid low bits, are invalid."""
    layout, ranks = cases.PLAIN, harness.SEVERAL
    ids = cases.Case(layout, "uniform").ids(ranks).astype(dtype)
    if dtype == "uint32":
        ids[:, ::3, 1], ids[:, 1::3, 0] = 0xFFFFFFFF, 0x80000000
    else:
        ids[:, ::3, 1] += 1 << 32
        ids[:, 1::3, 2] -= 1 << 33
    with jax.enable_x64(dtype == "int64"):
        actual = route_program(layout, ranks)(ids)
    harness.assert_routing_is(actual, expected_routing(layout, ids))
