"""Routing against the oracle: every field of it, for every case of the catalogue."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
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


@pytest.mark.parametrize("case", cases.catalogue(), ids=lambda case: case.name)
def test_routing_is_the_oracles(case):
    result = harness.run_case(case, harness.SEVERAL)
    harness.assert_routing_is(result.recv.routing, result.expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases.gpu_catalogue(), ids=lambda case: case.name)
def test_routing_of_many_tokens_is_the_oracles(case):
    ids = case.ids(harness.SEVERAL)
    actual = route_program(case.layout, harness.SEVERAL)(ids)
    harness.assert_routing_is(actual, expected_routing(case.layout, ids))


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("routing", ("uniform", "repeated", "invalid", "first_expert_only"))
def test_routing_emulated_by_vmap_is_the_oracles_on_three_ranks(routing):
    """With three ranks, no size is a power of two."""
    result = harness.run_case(cases.Case(cases.CUT, routing), 3, emulate=True)
    harness.assert_routing_is(result.recv.routing, result.expected)


def test_routing_may_change_at_every_call(ranks):
    """One compiled program runs every kind of routing. No state of an earlier call may remain."""
    for result in harness.changing_routings(cases.CUT, ranks):
        harness.assert_routing_is(result.recv.routing, result.expected)


def test_two_runs_return_the_same_routing():
    case = cases.Case(cases.CUT, "repeated")
    ids = case.ids(harness.SEVERAL)
    program = route_program(cases.CUT, harness.SEVERAL)
    for first, second in zip(jax.tree.leaves(program(ids)), jax.tree.leaves(program(ids))):
        harness.assert_same_bytes(first, second)


def test_every_expert_starts_at_a_multiple_of_the_alignment():
    result = harness.run_case(cases.Case(cases.PADDED, "skewed"), harness.SEVERAL)
    offsets = result.recv.row_offsets
    assert (offsets % cases.PADDED.alignment == 0).all()
    assert (np.diff(offsets) == result.recv.group_sizes).all()
    assert (result.recv.group_sizes.sum(axis=1) > result.recv.num_rows).any(), "no padding seen"


def test_group_sizes_never_exceed_the_capacity(ranks):
    for result in harness.changing_routings(cases.CUT, ranks):
        assert (result.recv.group_sizes.sum(axis=1) <= cases.CUT.capacity).all()


def test_the_default_capacity_drops_nothing():
    ranks = harness.SEVERAL
    for layout in (cases.PLAIN, cases.PADDED):
        for routing in ("first_expert_only", "last_rank_only", "repeated", "skewed"):
            ids = cases.Case(layout, routing).ids(ranks)
            actual = route_program(layout, ranks)(ids)
            assert (actual.num_dropped == 0).all(), (layout.name, routing)
            assert actual.num_rows.sum() == ids.size, (layout.name, routing)


def test_every_choice_is_kept_dropped_masked_or_invalid(ranks):
    for result in harness.changing_routings(cases.CUT, ranks):
        masked = (result.ids == -1).sum()
        counted = result.recv.num_rows + result.recv.num_dropped + result.recv.num_invalid
        assert counted.sum() + masked == result.ids.size


def test_invalid_ids_route_like_masked_ones():
    """An id out of range changes nothing but its own rank's count of invalid ids."""
    layout, ranks = cases.PADDED, harness.SEVERAL
    ids = cases.Case(layout, "invalid").ids(ranks)
    wild = (ids < -1) | (ids >= layout.num_experts(ranks))
    assert wild.any()
    program = route_program(layout, ranks)
    with_invalid, with_masked = program(ids), program(np.where(wild, np.int32(-1), ids))
    np.testing.assert_array_equal(with_invalid.num_invalid, wild.sum(axis=(1, 2)))
    for field in oracle.FIELDS:
        if field != "num_invalid":
            harness.assert_same_bytes(
                getattr(with_invalid, field), getattr(with_masked, field), field
            )


@pytest.mark.parametrize("dtype", ("int8", "uint8", "int16"))
def test_ids_of_any_integer_dtype_route_alike(dtype):
    layout, ranks = cases.PLAIN, harness.SEVERAL
    ids = cases.Case(layout, "uniform").ids(ranks)
    ids = np.where(ids <= np.iinfo(dtype).max, ids, 0)  # many ranks have experts that no int8 holds
    actual = route_program(layout, ranks)(ids.astype(dtype))
    harness.assert_routing_is(actual, expected_routing(layout, ids))


def test_a_large_unsigned_id_is_invalid_and_not_masked():
    """4294967295 has the bits of -1, yet it is out of range."""
    layout, ranks = cases.PLAIN, harness.SEVERAL
    ids = cases.Case(layout, "uniform").ids(ranks).astype(np.uint32)
    ids[:, ::3, 1] = 0xFFFFFFFF
    ids[:, 1::3, 0] = 0x80000000
    harness.assert_routing_is(route_program(layout, ranks)(ids), expected_routing(layout, ids))


def test_a_64_bit_id_does_not_wrap_around_to_a_valid_one():
    layout, ranks = cases.PLAIN, harness.SEVERAL
    ids = cases.Case(layout, "uniform").ids(ranks).astype(np.int64)
    ids[:, ::3, 1] += 1 << 32
    ids[:, 1::3, 2] -= 1 << 33
    with jax.enable_x64(True):
        actual = route_program(layout, ranks)(ids)
    harness.assert_routing_is(actual, expected_routing(layout, ids))


def test_routing_made_in_one_program_serves_in_another():
    layout, ranks = cases.PADDED, harness.SEVERAL
    (ids, x, weights, y), expected = harness.exchange_inputs(cases.Case(layout, "masked"), ranks)
    routing = route_program(layout, ranks)(ids)
    again = jax.tree.unflatten(jax.tree.structure(routing), jax.tree.leaves(routing))
    recv, out = harness.on_each_rank(
        lambda routing, x, y: (ma.dispatch(x, routing), ma.combine(y, routing)),
        harness.mesh_of(ranks),
        exchanges=2,
    )(again, x, y)
    harness.assert_same_bytes(recv.rows["rows"], oracle.dispatch(x["rows"], expected))
    harness.assert_sums_agree(out, *oracle.combine(y, expected))
    assert recv.weights is None


def test_layers_with_other_experts_and_top_k_share_a_group():
    """Two routings, interleaved in one program, on one group."""
    ranks = harness.SEVERAL
    group = harness.group_of(ranks)
    layouts = cases.PLAIN, cases.Layout("other", tokens=12, top_k=2, local_experts=5, alignment=4)
    ids = [cases.Case(layout, "uniform").ids(ranks) for layout in layouts]
    expected = [expected_routing(layout, i) for layout, i in zip(layouts, ids)]

    def two_layers(ids_a, ids_b, x):
        routings = [
            ma.route(i, group=group, num_experts=l.num_experts(ranks), alignment=l.alignment)
            for i, l in zip((ids_a, ids_b), layouts)
        ]
        received = [ma.dispatch(x, routing) for routing in routings]
        return routings, [r.rows for r in received], [ma.combine(r.rows, r) for r in received]

    x = cases.normal(np.random.default_rng(0), (ranks, 12, 7), "float32")
    program = harness.on_each_rank(two_layers, harness.mesh_of(ranks), exchanges=6)
    routings, rows, sums = program(*ids, x)
    for i in range(2):
        harness.assert_routing_is(routings[i], expected[i])
        sent = oracle.dispatch(x, expected[i])
        harness.assert_same_bytes(rows[i], sent)
        harness.assert_sums_agree(sums[i], *oracle.combine(sent, expected[i]))


def test_routing_works_without_jit():
    """shard_map and vmap run eagerly as well."""
    layout, ranks = cases.TIGHT, harness.SEVERAL
    group = harness.group_of(ranks)
    ids = cases.Case(layout, "skewed").ids(ranks)

    def route(ids):
        return ma.route(
            ids,
            group=group,
            num_experts=layout.num_experts(ranks),
            capacity=layout.capacity,
        )

    program = harness.eagerly(harness.over_ranks(route, group.mesh), exchanges=1)
    actual = program(jnp.asarray(ids))
    harness.assert_routing_is(actual, expected_routing(layout, ids))
