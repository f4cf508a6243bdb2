"""Test that dead-code elimination removes unused exchanges, and unused arrays of exchanges."""

import functools

import cases
import harness
import jax
import numpy as np
import pytest
import small_layer
from jax.interpreters import partial_eval
from small_layer import LAYOUT, route_args

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)  # programs are traced, not run

RANKS = harness.SEVERAL
ROWS = (LAYOUT.capacity, LAYOUT.hidden)


@functools.cache
def inputs():
    (x, topk_weights, _), ids, _ = small_layer.arguments(RANKS)
    rng = np.random.default_rng(0)
    payload = {"a": x, "position": cases.any_bits(rng, (RANKS, LAYOUT.tokens), "int32")}
    return payload, topk_weights, ids


def without_dead_code(fn, *args):
    """Count the primitives of fn(*args) that remain after JAX's dead-code elimination."""
    closed = jax.make_jaxpr(small_layer.on_all_ranks(fn))(*args)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return harness.count_primitives(jaxpr)


@pytest.mark.parametrize(
    "uses, expected",
    [
        (lambda recv: recv.rows["position"], {"routed_dispatch": 1}),
        (lambda recv: (ma.combine(recv.rows["a"], recv), recv.weights)[1], {"routed_dispatch": 1}),
        (lambda recv: recv.expert_ids, {}),
        (lambda recv: recv.num_invalid, {}),
    ],
    ids=("rows", "unused_combine", "expert_ids", "num_invalid"),
)
def test_only_exchanges_with_a_used_result_remain(uses, expected):
    def fn(payload, topk_weights, ids):
        return uses(ma.dispatch(payload, ids, topk_weights, **route_args(harness.group_of(RANKS))))

    assert without_dead_code(fn, *inputs()) == expected


@pytest.mark.parametrize(
    "of, dotted, scaled",
    [(0, [], [ROWS[:1]]), (1, [ROWS], []), ((0, 1), [ROWS], [ROWS[:1]])],
    ids=("rows", "weights", "both"),
)
def test_a_gradient_of_a_combine_computes_only_what_is_used(of, dotted, scaled):
    """A gradient of only the rows needs no dot products, and a gradient of only the weights does
    not multiply rows by weights."""

    def fn(y, weights, ids):
        routing = ma.route(ids, **route_args(harness.group_of(RANKS)))

        def loss(y, weights):
            return small_layer.loss(ma.combine(y, routing, weights=weights))

        return jax.grad(loss, of)(y, weights)

    _, _, ids = inputs()
    y = np.ones((RANKS, *ROWS), np.float32)
    jaxpr = jax.make_jaxpr(small_layer.on_all_ranks(fn))(y, y[..., 0], ids)
    (eqn,) = small_layer.equations(jaxpr, "weighted_dispatch")
    assert small_layer.payload(eqn) == (dotted, scaled)
