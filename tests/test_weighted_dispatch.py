"""Test the weighted dispatch, the transpose of a weighted combine, against separate steps: G =
dispatch(g), weights * G, and the dot products <rows, G>."""

import dataclasses
import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from small_layer import LAYOUT, route_args

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange.record import Options
from jax_moe_a2a._src.exchange.weighted import WEIGHTED_DISPATCH

RANKS = harness.SEVERAL
TOKENS = (LAYOUT.tokens, LAYOUT.hidden)
ROWS = (LAYOUT.capacity, LAYOUT.hidden)


def fused(g, rows, weights, routing):
    """Return weights[i] * G and <rows[i], G> for all i, computed by one primitive."""
    results = WEIGHTED_DISPATCH.bind(
        [g, *rows, *weights],
        routing.arrays,
        num_leaves=len(rows),
        num_choice_arrays=len(weights),
        num_weight_axes=0,
        options=Options(),
        group=routing.group,
    )
    return results[: len(weights)], results[len(weights) :]


def separate(g, rows, weights, routing):
    moved = ma.dispatch(g, routing).rows.astype(jnp.float32)
    is_row = routing.row_rank >= 0
    scaled = [jnp.where(is_row[:, None], w[:, None] * moved, 0).astype(g.dtype) for w in weights]
    dotted = [(r.astype(jnp.float32) * moved).sum(axis=1) for r in rows]
    return scaled, [jnp.where(is_row, d, 0) for d in dotted]


@functools.cache
def weigh_program(weigh, layout, ranks):
    group = harness.group_of(ranks)

    def of_one_rank(ids, g, rows, weights):
        routing = ma.route(ids, **route_args(group, layout))
        return {
            "pairs": weigh(g, rows, weights, routing),
            "rows": weigh(g, (), weights[:1], routing),
            "weights": weigh(g, rows[:1], (), routing),
        }

    return harness.on_each_rank(of_one_rank, group.mesh)


# The kernel needs rows of whole 16-byte words.
IN_WORDS = (
    dataclasses.replace(cases.PLAIN, name="plain_in_words", hidden=24),
    dataclasses.replace(cases.CUT, name="cut_in_words", hidden=24),
)
LAYOUTS = (*cases.few_layouts(), *IN_WORDS[: None if harness.ON_GPU else 0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_weighted_dispatch_has_the_bits_of_the_separate_steps(layout):
    """Rows without a token, which are NaN, do not affect the results."""
    ranks = harness.SEVERAL
    rng = np.random.default_rng(0)
    # Both programs have a route. The kernel makes one exchange for each of the three results;
    # otherwise, XLA merges the dispatches into one.
    num_exchanges = (2 + (3 if layout.hidden == 24 else 1) + 1) * layout.has_rows(RANKS)
    for case in cases.cases_of(layout):
        ids = case.ids(ranks)
        row_token = small_layer.routing_of(ids, layout).row_token
        capacity = layout.rows(ranks)
        for dtype in ("bfloat16", "float32"):
            g = cases.normal(rng, (ranks, layout.tokens, layout.hidden), dtype)
            rows = [cases.normal(rng, (ranks, capacity, layout.hidden), dtype) for _ in range(2)]
            weights = [cases.normal(rng, (ranks, capacity), "float32") for _ in range(2)]
            for array in (*rows, *weights):
                array[row_token < 0] = np.nan
            args = ids, g, rows, weights
            programs = (weigh_program(f, layout, ranks) for f in (fused, separate))
            with harness.expect_exchanges(num_exchanges):
                actual, expected = (program(*args) for program in programs)
            small_layer.assert_same(actual, expected, f"{case.name} {dtype}")


# Small integers make sums exact in any order.


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-8, 9, (RANKS, *shape)).astype(np.float32)


@functools.cache
def arguments(seed=0):
    ids = small_layer.arguments(RANKS, seed).ids
    rows, weights = integers(*ROWS, seed=seed + 1), integers(LAYOUT.capacity, seed=seed + 2)
    return (integers(*TOKENS, seed=seed), (rows,), (weights,)), ids


def of_all_ranks(weigh):
    group = harness.group_of(RANKS)

    def of_one_rank(g, rows, weights, ids):
        return weigh(g, rows, weights, ma.route(ids, **route_args(group)))

    return small_layer.on_all_ranks(of_one_rank)


@pytest.mark.exchanges(20)
def test_tangents_are_those_of_the_separate_steps_and_move_once_each():
    args, ids = arguments()
    directions, _ = arguments(seed=10)

    def tangents(weigh, which):
        mapped = of_all_ranks(weigh)

        def of(args, directions):
            def of_moving(*moving):
                values = dict(enumerate(args)) | dict(zip(which, moving))
                return mapped(*values.values(), ids)

            return jax.jvp(of_moving, [args[i] for i in which], [directions[i] for i in which])

        return of

    for which, num_moved in (((0,), 2), ((1,), 1), ((2,), 1), ((0, 1, 2), 2)):
        actual, expected = (tangents(weigh, which) for weigh in (fused, separate))
        small_layer.assert_same(
            small_layer.compiled(actual)(args, directions),
            small_layer.compiled(expected)(args, directions),
        )
        counted = small_layer.counts(actual, args, directions)
        assert counted == {"route": 1, "dispatch": num_moved}


@pytest.mark.exchanges(0)
def test_cotangents_that_are_zero_move_nothing():
    (g, rows, weights), ids = arguments()

    def gradient(g, rows, weights, of):
        def loss(*args):
            scaled, dotted = of_all_ranks(fused)(*args, ids)
            return jnp.sum(scaled[0]) if of == "scaled" else jnp.sum(dotted[0])

        return jax.grad(loss, (1, 2))(g, rows, weights)

    for of in ("scaled", "dotted"):
        jaxpr = jax.make_jaxpr(functools.partial(gradient, of=of))(g, rows, weights)
        assert "combine" not in harness.count_primitives(jaxpr)


BATCH = 3


@pytest.mark.exchanges(2 + 2 * BATCH)
@pytest.mark.parametrize(
    "batched, counted",
    [
        ("giwr", {"route": 1, "weighted_dispatch": 1}),
        ("i", {"route": 1, "weighted_dispatch": 1}),
        ("gwr", {"route": 1, "dispatch": 1}),
        ("r", {"route": 1, "dispatch": 1}),
        ("w", {"route": 1, "dispatch": 1}),
        ("", {"route": 1, "weighted_dispatch": 1}),
    ],
    ids=lambda value: value or "none" if isinstance(value, str) else "",
)
def test_a_batch_is_one_exchange_with_the_bits_of_its_elements(batched, counted):
    each = [arguments(seed=5 * b) for b in range(BATCH)]

    def own(b, name):
        (g, rows, weights), ids = each[b if name in batched else 0]
        return dict(g=g, r=rows, w=weights, i=ids)[name]

    names = "grwi"
    stacked = [small_layer.stacked(*(own(b, name) for b in range(BATCH))) for name in names]
    axes = tuple(0 if name in batched else None for name in names)
    args = [s if name in batched else own(0, name) for s, name in zip(stacked, names)]
    weigh = of_all_ranks(fused)

    def mapped(*args):
        # `unused` is batched even if no other argument is.
        return jax.vmap(lambda unused, *args: weigh(*args), in_axes=(0, *axes))(
            np.zeros(BATCH), *args
        )

    assert small_layer.counts(mapped, *args) == counted
    out = small_layer.compiled(mapped)(*args)
    single = small_layer.compiled(of_all_ranks(separate))
    for b in range(BATCH):
        expected = single(*(own(b, name) for name in names))
        small_layer.assert_same(jax.tree.map(lambda leaf: leaf[b], out), expected, f"{batched} {b}")


@pytest.mark.exchanges(2)
def test_the_emulated_ranks_have_the_bits_of_real_ones():
    args, ids = arguments()
    group = harness.emulated_group(RANKS)

    def of_one_rank(g, rows, weights, ids):
        return fused(g, rows, weights, ma.route(ids, **route_args(group)))

    emulated = jax.vmap(of_one_rank, axis_name=harness.AXIS)
    expected = small_layer.compiled(of_all_ranks(separate))(*args, ids)
    small_layer.assert_same(small_layer.compiled(emulated)(*args, ids), expected)
    assert small_layer.counts(emulated, *args, ids) == {"route": 1, "weighted_dispatch": 1}
    for ids_axis in (0, None):
        batch = [jax.tree.map(lambda leaf: np.stack([leaf] * 2), arg) for arg in args]
        around = jax.vmap(emulated, in_axes=(0, 0, 0, ids_axis))
        out = small_layer.compiled(around)(*batch, np.stack([ids] * 2) if ids_axis == 0 else ids)
        for b in range(2):
            small_layer.assert_same(jax.tree.map(lambda leaf: leaf[b], out), expected)
