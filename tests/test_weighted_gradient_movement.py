"""The gradient of a layer moves rows once each way, forward and backward.

Counted in the program: routed dispatch, weighted combine | weighted dispatch, combine.
"""

import functools

import harness
import jax
import pytest
import small_layer
from small_layer import LAYOUT, OF_FLOATS, route_args

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)  # programs are traced, and not run

RANKS = harness.SEVERAL
WHOLE = {"routed_dispatch": 1, "weighted_combine": 1, "weighted_dispatch": 1, "combine": 1}
# For a batch, and for more tokens than are routed and dispatched at once.
APART = {"route": 1, "dispatch": 1, "weighted_combine": 1, "weighted_dispatch": 1, "combine": 1}

ROWS = [(LAYOUT.capacity, LAYOUT.hidden)]
ROW_WEIGHTS = [(LAYOUT.capacity,)]


@functools.cache
def gradient_program(of):
    floats, ids, _ = small_layer.arguments(RANKS)
    loss = small_layer.loss_of(small_layer.layer_of_all_ranks(), ids)
    return jax.make_jaxpr(jax.grad(loss, of))(*floats)


def test_the_gradient_of_a_layer_moves_rows_once_each_way():
    jaxpr = gradient_program(OF_FLOATS)
    assert harness.count_primitives(jaxpr) == WHOLE
    # Forward: rows and weights together. Backward: the gradient of the result, once, for both.
    tokens = (LAYOUT.tokens, LAYOUT.hidden)
    (dispatch,) = small_layer.equations(jaxpr, "routed_dispatch")
    assert small_layer.payload(dispatch) == ([tokens], [(LAYOUT.tokens, LAYOUT.top_k)])
    (back,) = small_layer.equations(jaxpr, "weighted_dispatch")
    assert small_layer.shapes_of_one_rank(back)[0] == tokens
    assert small_layer.payload(back) == (ROWS, ROW_WEIGHTS)
    (combine,) = small_layer.equations(jaxpr, "combine")
    assert small_layer.payload(combine) == (ROWS, ROW_WEIGHTS)
    (weighted,) = small_layer.equations(jaxpr, "weighted_combine")
    assert weighted.params["num_leaves"] == 1


@pytest.mark.parametrize(
    "of, back",
    [
        ((0,), [(ROWS, [])]),
        ((1,), [([], ROW_WEIGHTS)]),
        ((2,), []),
        ((0, 2), [(ROWS, [])]),
    ],
    ids=("x", "topk_weights", "w", "x_and_w"),
)
def test_the_gradient_of_some_arguments_moves_only_theirs(of, back):
    jaxpr = gradient_program(of)
    expected = dict(WHOLE, combine=len(back))
    assert harness.count_primitives(jaxpr) == {k: v for k, v in expected.items() if v}
    combines = small_layer.equations(jaxpr, "combine")
    assert [small_layer.payload(eqn) for eqn in combines] == back


def test_layers_in_a_row_move_rows_once_each_way_each_and_route_once_if_they_share_it():
    group = harness.group_of(RANKS)
    floats, ids, _ = small_layer.arguments(RANKS)

    def layers(x, topk_weights, w, ids, shared):
        routing = ma.route(ids, **route_args(group))
        for _ in range(3):
            args = (routing,) if shared else (ids,)
            recv = ma.dispatch(x, *args, topk_weights, **route_args(group))
            x = x + ma.combine(small_layer.experts(recv.rows, recv.row_offsets, w), recv)
        return x

    for shared in (True, False):
        of_all = small_layer.on_all_ranks(functools.partial(layers, shared=shared))
        gradient = jax.grad(small_layer.loss_of(of_all, ids), OF_FLOATS)
        expected = {name: 3 * count for name, count in (APART if shared else WHOLE).items()}
        expected["route"] = 1  # or it is unused, and still in the program
        assert small_layer.counts(gradient, *floats) == expected


def test_the_gradient_of_a_batch_moves_rows_once_each_way():
    layer = small_layer.layer_of(harness.group_of(RANKS))
    batch = [small_layer.arguments(RANKS, seed) for seed in range(3)]
    floats = small_layer.stacked(*(each.floats for each in batch))
    ids = small_layer.stacked(*(each.ids for each in batch))
    of_all = small_layer.on_all_ranks(layer)
    gradient = jax.vmap(
        lambda x, t, w, ids: jax.grad(small_layer.loss_of(of_all, ids), OF_FLOATS)(x, t, w)
    )
    assert small_layer.counts(gradient, *floats, ids) == APART


def test_second_derivatives_move_each_tangent_once():
    """Forward over reverse has the gradient's own movements, and those of its tangents."""
    floats, ids, _ = small_layer.arguments(RANKS)
    gradient = jax.grad(small_layer.loss_of(small_layer.layer_of_all_ranks(), ids), OF_FLOATS)
    jaxpr = jax.make_jaxpr(lambda *args: jax.jvp(gradient, args[:3], args[3:]))(
        *floats, *small_layer.directions(RANKS)
    )
    counted = harness.count_primitives(jaxpr)
    assert counted == {"routed_dispatch": 1, "dispatch": 3, "weighted_combine": 2, "combine": 2}
