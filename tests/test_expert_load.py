"""Test that `ExpertLoad` equals the oracle's counts of rows, in every mode and under every
transform."""

import dataclasses
import functools
import re

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer

import jax_moe_a2a as ma
from jax_moe_a2a._src.layer.sums import sum_counts

LAYOUT = dataclasses.replace(cases.CUT, name="cut", tokens=7, capacity=17, alignment=4)
OTHERS = (
    dataclasses.replace(LAYOUT, name="cut_alignment_1", alignment=1),
    dataclasses.replace(LAYOUT, name="no_drops", capacity=None),
    cases.Layout("one_token", tokens=1, top_k=3, local_experts=2),
    cases.Layout("no_tokens", tokens=0, top_k=2, local_experts=2),
)


def assert_load_is(load, expected):
    names = [field.name for field in dataclasses.fields(ma.ExpertLoad)]
    for name, right in zip(names, expected, strict=True):
        harness.assert_same_bytes(getattr(load, name), right, name)


def load_of(ids, layout, group, **options):
    route_args = dict(num_experts=layout.num_experts(group.size), capacity=layout.capacity)
    recv = ma.dispatch(
        ids.astype(jnp.float32),
        ids,
        group=group,
        **harness.exchanging(route_args, options, alignment=layout.alignment),
    )
    return ma.expert_load(recv)


@functools.cache
def program(layout, ranks):
    """Return a jitted function from ids [R, T, K] to an ExpertLoad, equal on all ranks."""
    mesh = harness.mesh_of(ranks)
    load = functools.partial(load_of, layout=layout, group=harness.group_of(ranks))
    return harness.jit(harness.over_ranks(load, mesh, out_axes=None))


@pytest.mark.exchanges(8)
def test_figures_are_the_counts_of_rows(ranks):
    names = ("uniform", "skewed", "masked", "repeated", "invalid", "idle_rank", "all_masked")
    for name in (*names, "last_expert_only"):
        ids = cases.Case(LAYOUT, name).ids(ranks)
        args = harness.put(ids, harness.placement(harness.mesh_of(ranks)))
        load = program(LAYOUT, ranks)(args)
        assert_load_is(load, small_layer.expected_load(ids, LAYOUT))


# Without a capacity, no row is dropped, so the load depends only on ids and needs no exchange.
@pytest.mark.exchanges(lambda layout: 0 if layout.capacity is None else 3)
@pytest.mark.parametrize("layout", OTHERS, ids=lambda layout: layout.name)
def test_figures_with_and_without_a_capacity(ranks, layout):
    for name in ("uniform", "skewed", "invalid"):
        ids = cases.Case(layout, name).ids(ranks)
        args = harness.put(ids, harness.placement(harness.mesh_of(ranks)))
        assert_load_is(program(layout, ranks)(args), small_layer.expected_load(ids, layout))


@pytest.mark.exchanges(0)
def test_a_sum_of_many_choices_is_exact():
    counts = np.array([[2**24 + 1, 0, 3], [1, 2**29 - 1, 2**23], [2**24 - 1, 5, 0]], np.int32)
    most = int(counts.sum(0).max())
    for number, dtype in ((most, np.int32), (2**24, np.float32)):
        given = (counts % 2**22).astype(dtype) if dtype == np.float32 else counts
        found = jax.vmap(lambda x: sum_counts(("ep",), x, number), axis_name="ep")(given)
        harness.assert_same_bytes(found[0], given.astype(np.int32).sum(0, dtype=np.int32))


@pytest.mark.exchanges(0)
def test_ratios_are_those_of_the_counts():
    load = ma.ExpertLoad(
        *(np.array([6, 0, 3, 3]), np.array([6, 6])),
        *(np.array([4, 0]), np.array([7, 3, 3, 3]), np.array([0, 1])),
    )
    assert load.max_over_mean == pytest.approx(10 / 8)
    assert load.expert_max_over_mean == pytest.approx(7 / 4)
    assert load.dropped_share == pytest.approx(4 / 16)
    empty = jax.tree.map(np.zeros_like, load)
    assert empty.max_over_mean == empty.expert_max_over_mean == empty.dropped_share == 0


@pytest.mark.exchanges(0)
def test_replicated_tokens_count_once():
    ranks = 2
    group = ma.Group(axis_name="ep", size=ranks, implementation="portable")
    layout = cases.Layout("small", tokens=5, top_k=2, local_experts=2, alignment=4)
    ids = cases.Case(layout, "uniform").ids(ranks)

    @functools.partial(jax.jit, static_argnames="replicated")
    def load(ids, **modes):
        on_rank = functools.partial(load_of, layout=layout, group=group, **modes)
        return jax.vmap(on_rank, axis_name="ep", out_axes=None)(ids)

    same = np.broadcast_to(ids[:1], ids.shape)
    counts = np.bincount(ids[0].ravel(), minlength=4).astype(np.int32)
    per_rank = counts.reshape(ranks, -1).sum(axis=1, dtype=np.int32)
    none = np.zeros_like(per_rank)
    assert_load_is(load(same, replicated=True), (counts, per_rank, none, counts, none))
    same = np.where(same == ids[0, 0, 0], 4, same)  # there is no expert 4
    num_invalid = (same[0] == 4).sum(dtype=np.int32)
    found = load(same, replicated=True).invalid_per_rank
    np.testing.assert_array_equal(found, [num_invalid, 0])


@pytest.mark.exchanges(0)
def test_what_is_not_a_recv_is_refused():
    with pytest.raises(TypeError, match="a Recv, as dispatch returns it, or a Routing; got int"):
        ma.expert_load(3)


@pytest.mark.exchanges(0)
def test_all_counts_are_one_sum():
    group = harness.emulated_group(2)
    mesh = jax.sharding.AbstractMesh((2,), (group.axis_name,))

    def on_rank():
        ids = jnp.zeros((3, 1), jnp.int32)
        return ma.expert_load(ma.route(ids, group=group, num_experts=4))

    load = jax.shard_map(on_rank, mesh=mesh, in_specs=(), out_specs=jax.sharding.PartitionSpec())
    assert len(re.findall(r"= psum\w*\[", str(jax.make_jaxpr(load)()))) == 1
