"""Dead code: arrays that the program does not use are not exchanged."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from jax import lax
from jax.interpreters import partial_eval
from small_layer import LAYOUT, route_args

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)  # programs are traced, not run

RANKS = harness.SEVERAL
TOKENS = (LAYOUT.tokens, LAYOUT.hidden)
ROWS = (LAYOUT.capacity, LAYOUT.hidden)
CHOICES = (LAYOUT.tokens, LAYOUT.top_k)


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
    "uses, leaves, choice_arrays",
    [
        (lambda recv: recv.rows["a"], [TOKENS], []),
        (lambda recv: recv.rows["position"], [(LAYOUT.tokens,)], []),
        (lambda recv: recv.weights, [], [CHOICES]),
        (lambda recv: (recv.rows["a"], recv.weights), [TOKENS], [CHOICES]),
        (lambda recv: (recv.rows["a"], recv.rows["b"]), [TOKENS, (LAYOUT.tokens, 2)], []),
    ],
    ids=("one_leaf", "integers", "weights", "leaf_and_weights", "two_leaves"),
)
def test_unused_leaves_and_weights_drop_out_of_a_dispatch(uses, leaves, choice_arrays):
    jaxpr = without_dead_code(of_recv(uses), *inputs())
    assert harness.count_primitives(jaxpr) == {"routed_dispatch": 1}
    (eqn,) = small_layer.equations(jaxpr, "routed_dispatch")
    assert small_layer.payload(eqn) == (leaves, choice_arrays)


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
@pytest.mark.parametrize("eliminated", (False, True), ids=("asked_for", "eliminated"))
def test_a_gradient_of_a_combine_weighs_only_for_what_is_wanted(of, dotted, scaled, eliminated):
    """The gradient of only the rows needs no dots, and that of only the weights no products. The
    other gradient is not requested, or is unused.
    """

    def fn(y, weights, ids):
        routing = ma.route(ids, **route_args(harness.group_of(RANKS)))

        def loss(y, weights):
            return small_layer.loss(ma.combine(y, routing, weights=weights))

        if not eliminated:
            return jax.grad(loss, of)(y, weights)
        both = jax.grad(loss, (0, 1))(y, weights)
        return both if of == (0, 1) else both[of]

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
        (("first", "second", "plain", "weighted"), [[ROWS, ROWS], [ROWS]], 1),
        (("second",), [[ROWS]], 0),
        (("plain", "weighted"), [[ROWS]], 1),
        (("weighted",), [], 1),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, tuple) else None,
)
def test_unused_combines_and_unused_leaves_of_them_go(used, combine, weighted):
    jaxpr = without_dead_code(of_recv(lambda recv: combines(recv, used)), *inputs())
    moved = [small_layer.payload(eqn)[0] for eqn in small_layer.equations(jaxpr, "combine")]
    assert moved == combine
    assert len(small_layer.equations(jaxpr, "weighted_combine")) == weighted
    (dispatch,) = small_layer.equations(jaxpr, "routed_dispatch")
    assert small_layer.payload(dispatch) == ([TOKENS], [CHOICES] if weighted else [])


def test_a_scan_exchanges_only_what_is_used_of_its_steps():
    """The weights and one leaf are not used by any step."""

    def fn(payload, topk_weights, ids):
        def step(total, shift):
            recv = of_recv(lambda recv: recv)(payload, topk_weights, jnp.roll(ids, shift, axis=0))
            return total + recv.rows["a"], recv.rows["b"]

        total, _ = lax.scan(step, jnp.zeros_like(payload["a"], shape=ROWS), jnp.arange(3))
        return total

    jaxpr = without_dead_code(fn, *inputs())
    (eqn,) = small_layer.equations(jaxpr, "routed_dispatch")
    assert small_layer.payload(eqn) == ([TOKENS], [])
