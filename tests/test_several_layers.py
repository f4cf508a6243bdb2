"""Layers with different numbers and dtypes on one group, in one program, in any order."""

import functools

import cases
import harness
import numpy as np
import oracle
import small_layer
from cases import Layout
from jax import lax
from small_layer import route_args

import jax_moe_a2a as ma

RANKS = harness.SEVERAL
LAYOUTS = (
    Layout("a", tokens=8, top_k=2, local_experts=1, hidden=4),
    Layout("b", tokens=8, top_k=4, local_experts=3, capacity=13, hidden=7),
    Layout("c", tokens=5, top_k=1, local_experts=2, alignment=8, hidden=1),
)
DTYPES = ("bfloat16", "float32", "float16")


@functools.cache
def inputs():
    """Return (x, weights, ids) of each layer, and its expected routing."""
    each = []
    for seed, (layout, dtype) in enumerate(zip(LAYOUTS, DTYPES)):
        rng = np.random.default_rng(seed)
        ids = small_layer.arguments(RANKS, seed, layout=layout).ids
        x = cases.normal(rng, (RANKS, layout.tokens, layout.hidden), dtype)
        weights = cases.normal(rng, ids.shape, "float32")
        each.append(((x, weights, ids), small_layer.routing_of(ids, layout)))
    return each


def send(group, i, layer_inputs):
    x, weights, ids = layer_inputs[i]
    return ma.dispatch(x, ids, weights, **route_args(group, LAYOUTS[i]))


def nested(group, layer_inputs):
    """Run all dispatches, then the combines, the last one first; each waits for the one before."""
    recvs, results = [], [None] * len(LAYOUTS)
    token = None
    for i in range(len(LAYOUTS)):
        (x, weights, ids) = layer_inputs[i]
        if token is not None:
            x, token = lax.optimization_barrier((x, token))
        recvs.append(send(group, i, {i: (x, weights, ids)}))
        token = recvs[-1].rows
    for i in reversed(range(len(LAYOUTS))):
        rows, token = lax.optimization_barrier((recvs[i].rows, token))
        token = ma.combine(rows, recvs[i])
        results[i] = recvs[i].rows, token
    return results


def interleaved(group, layer_inputs):
    """Dispatch the next layer before each combine, and the second layer twice."""
    recvs = [send(group, 0, layer_inputs), send(group, 1, layer_inputs)]
    results = [(recvs[0].rows, ma.combine(recvs[0].rows, recvs[0]))]
    recvs.append(send(group, 2, layer_inputs))
    again = send(group, 1, layer_inputs)
    results.append((again.rows, ma.combine(recvs[1].rows, again)))
    return [*results, (recvs[2].rows, ma.combine(recvs[2].rows, recvs[2]))]


def assert_layers_are_the_oracles(order):
    group = harness.group_of(RANKS)
    args = [layer_inputs for layer_inputs, _ in inputs()]
    # XLA merges the two equal dispatches of an order.
    program = harness.on_each_rank(
        functools.partial(order, group), group.mesh, exchanges=3 + len(LAYOUTS)
    )
    for (rows, out), ((x, weights, _), expected), layout in zip(program(args), inputs(), LAYOUTS):
        sent = oracle.dispatch(x, expected)
        harness.assert_same_bytes(rows, sent, layout.name)
        row_weights = oracle.dispatch_choices(weights, expected)
        harness.assert_sums_agree(out, *oracle.combine(sent, expected, row_weights), layout.name)


def test_layers_whose_combines_run_backwards_after_all_dispatches_are_the_oracles():
    assert_layers_are_the_oracles(nested)


def test_layers_that_interleave_are_the_oracles():
    assert_layers_are_the_oracles(interleaved)


def test_programs_of_different_layers_run_in_any_order_on_one_group():
    """And each returns what it returned before."""
    group = harness.group_of(RANKS)

    def there_and_back(i):
        def of_one_rank(*layer_inputs):
            recv = send(group, i, {i: layer_inputs})
            return recv.rows, ma.combine(recv.rows, recv, weights=None)

        return small_layer.compiled(small_layer.on_all_ranks(of_one_rank), exchanges=2)

    programs = [there_and_back(i) for i in range(len(LAYOUTS))]
    results = {}
    for i in (0, 1, 2, 1, 0, 0, 2, 1):
        layer_inputs, expected = inputs()[i]
        out = harness.numpy_of(programs[i](*layer_inputs))
        small_layer.assert_same(results.setdefault(i, out), out)
        sent = oracle.dispatch(layer_inputs[0], expected)
        harness.assert_same_bytes(out[0], sent)
        harness.assert_sums_agree(out[1], *oracle.combine(sent, expected))
