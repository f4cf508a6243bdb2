"""Dead code: an exchange whose results the program does not use is not made."""

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
    """Return (payload of three leaves, topk_weights, ids) of all ranks."""
    (x, topk_weights, _), ids, _ = small_layer.arguments(RANKS)
    rng = np.random.default_rng(0)
    payload = {
        "a": x,
        "b": cases.any_bits(rng, (RANKS, LAYOUT.tokens, 2), "bfloat16"),
        "position": cases.any_bits(rng, (RANKS, LAYOUT.tokens), "int32"),
    }
    return payload, topk_weights, ids


def without_dead_code(fn, *args):
    """Return the program of fn(*args) of one rank after JAX's elimination of dead code."""
    closed = jax.make_jaxpr(small_layer.on_all_ranks(fn))(*args)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return jaxpr


def of_recv(uses):
    """Return a function of one rank's inputs: dispatch, then what `uses` makes of the Recv."""

    def fn(payload, topk_weights, ids):
        return uses(ma.dispatch(payload, ids, topk_weights, **route_args(harness.group_of(RANKS))))

    return fn


@pytest.mark.parametrize(
    "uses, expected",
    [
        (lambda recv: recv.group_sizes, {"route": 1}),
        (lambda recv: recv.src_info, {"route": 1}),
        (lambda recv: recv.expert_ids, {}),
        (lambda recv: recv.num_invalid, {}),
    ],
    ids=("group_sizes", "src_info", "expert_ids", "num_invalid"),
)
def test_what_the_routing_tells_needs_no_dispatch_and_what_the_ids_tell_no_route(uses, expected):
    assert harness.count_primitives(without_dead_code(of_recv(uses), *inputs())) == expected


@pytest.mark.parametrize(
    "of, dotted, scaled",
    [(0, [], [ROWS[:1]]), (1, [ROWS], []), ((0, 1), [ROWS], [ROWS[:1]])],
    ids=("rows", "weights", "both"),
)
def test_a_gradient_of_a_combine_weighs_only_for_what_is_wanted(of, dotted, scaled):
    """The gradient of only the rows needs no dots, and that of only the weights no products."""

    def fn(y, weights, ids):
        routing = ma.route(ids, **route_args(harness.group_of(RANKS)))

        def loss(y, weights):
            return small_layer.loss(ma.combine(y, routing, weights=weights))

        return jax.grad(loss, of)(y, weights)

    _, _, ids = inputs()
    y = np.ones((RANKS, *ROWS), np.float32)
    jaxpr = without_dead_code(fn, y, y[..., 0], ids)
    assert harness.count_primitives(jaxpr) == dict(route=1, weighted_combine=1, weighted_dispatch=1)
    (eqn,) = small_layer.equations(jaxpr, "weighted_dispatch")
    assert small_layer.payload(eqn) == (dotted, scaled)


def combines(recv, used):
    """Combine one dispatch four times; use the results that are named."""
    rows = recv.rows["a"]
    trees = ma.combine({"first": rows, "second": 2 * rows}, recv, weights=None)
    results = {
        "first": trees["first"],
        "second": trees["second"],
        "plain": ma.combine(-rows, recv, weights=None),
        "weighted": ma.combine(rows, recv),
    }
    return {name: results[name] for name in used}


@pytest.mark.parametrize(
    "used, combine, weighted",
    [
        (("first", "second", "plain", "weighted"), 2, 1),
        (("second",), 1, 0),
        (("plain", "weighted"), 1, 1),
        (("weighted",), 0, 1),
        ((), 0, 0),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else None,
)
def test_unused_exchanges_go(used, combine, weighted):
    jaxpr = without_dead_code(of_recv(lambda recv: combines(recv, used)), *inputs())
    assert len(small_layer.equations(jaxpr, "combine")) == combine
    assert len(small_layer.equations(jaxpr, "weighted_combine")) == weighted
    assert len(small_layer.equations(jaxpr, "routed_dispatch")) == bool(used)
