"""A layer whose backward pass hides the combine of token gradients (benchmarks/backward.py)."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
import small_layer
from small_layer import LAYOUT, numbers

import jax_moe_a2a as ma
from benchmarks.backward import overlapped_layer

pytestmark = pytest.mark.exchanges(0)  # of tests that only trace programs

RANKS = harness.SEVERAL
GROUP = harness.group_of(RANKS)
WIDTH = 6


def plain_layer(x, ids, topk_weights, w_in, w_out):
    recv = ma.dispatch(x, ids, topk_weights, **numbers(GROUP))
    h = jnp.tanh(ma.grouped_dot(recv.rows, w_in, recv.group_sizes))
    return ma.combine(ma.grouped_dot(h, w_out, recv.group_sizes), recv)


overlapped = overlapped_layer(jnp.tanh, **numbers(GROUP))


@functools.cache
def problem():
    """Return floats and ids of all ranks; some choices are dropped."""
    (x, topk_weights, _), ids, _ = small_layer.arguments(RANKS)
    rng = np.random.default_rng(3)
    shape = RANKS, LAYOUT.local_experts, LAYOUT.hidden, WIDTH
    w_in, w_out = rng.normal(size=shape), rng.normal(size=shape).swapaxes(2, 3)
    floats = x, topk_weights, w_in.astype(np.float32), w_out.astype(np.float32)
    return jax.tree.map(jnp.asarray, (floats, ids))


def value_and_gradients(layer):
    """Return a function (x, topk_weights, w_in, w_out, ids of a rank) -> output, and gradients of a
    loss."""

    def run(x, topk_weights, w_in, w_out, ids):
        out, vjp = jax.vjp(lambda x, *rest: layer(x, ids, *rest), x, topk_weights, w_in, w_out)
        return out, *vjp(jnp.cos(out))

    return run


def batched(layer):
    def run(x, ids, topk_weights, w_in, w_out):
        batch = jnp.stack([x, 2 * x])
        of_one = lambda x: layer(x, ids, topk_weights, w_in, w_out)
        return jax.vmap(of_one)(batch).sum(0)

    return run


def scanned(layer):
    def run(x, ids, topk_weights, w_in, w_out):
        step = lambda x, _: (layer(x, ids, topk_weights, w_in, w_out), None)
        return jax.lax.scan(step, x, length=2)[0]

    return run


TRANSFORMS = {
    "plain": lambda layer: layer,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": scanned,
    "scan of checkpoint": lambda layer: scanned(jax.checkpoint(layer)),
    "vmap": batched,
}


# Exchanges of both layers together. One of the layers splits an exchange.
EXCHANGES = {
    "plain": (7, 1),
    "jit": (7, 1),
    "checkpoint": (9, 1),
    "scan": (18, 2),
    "scan of checkpoint": (22, 2),
    "vmap": (9, 1),
}


@pytest.mark.exchanges(lambda name: EXCHANGES[name][0], split=lambda name: EXCHANGES[name][1])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_are_those_of_the_plain_layer(name):
    floats, ids = problem()

    def found(layer):
        program = harness.over_ranks(value_and_gradients(TRANSFORMS[name](layer)), GROUP.mesh)
        return small_layer.compiled(program)(*floats, ids)

    actual, expected = found(overlapped), found(plain_layer)
    if name in ("plain", "jit") and not harness.ON_GPU:  # where XLA makes other fusions
        small_layer.assert_same(actual, expected)
    small_layer.assert_close(actual, expected, tolerance=2e-6)


def traced(layer):
    floats, ids = problem()
    return jax.make_jaxpr(harness.over_ranks(value_and_gradients(layer), GROUP.mesh))(*floats, ids)


def exchanges_of(jaxpr):
    return sum(
        count
        for name, count in harness.count_primitives(jaxpr).items()
        if ("dispatch" in name or "combine" in name) and not name.endswith("_done")
    )


@pytest.mark.parametrize("name", TRANSFORMS)
def test_there_are_as_many_exchanges_and_one_is_split(name):
    found, plain = (traced(TRANSFORMS[name](layer)) for layer in (overlapped, plain_layer))
    assert exchanges_of(found) == exchanges_of(plain)
    assert pairs.num_pairs(found) == {"combine_start": 1}
    assert pairs.num_pairs(plain) == {}


def test_both_weight_gradients_are_between_the_start_and_the_done():
    for jaxpr in pairs.subjaxprs(traced(overlapped)):
        names = [eqn.primitive.name for eqn in jaxpr.eqns]
        if "moe_a2a_combine_start" in names:
            break
    outers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "moe_a2a_grouped_outer"]
    start, done = (names.index(f"moe_a2a_combine_{half}") for half in ("start", "done"))
    assert len(outers) == 2
    behind = depends_on(jaxpr, set(jaxpr.eqns[start].outvars))
    assert all(eqn in behind for eqn in outers), "a weight gradient need not wait for the start"
    results = {var for eqn in outers for var in eqn.outvars}
    before_done = depends_on(jaxpr, results)
    assert jaxpr.eqns[done] in before_done, "the done need not wait for the weight gradients"


def depends_on(jaxpr, variables):
    """Return the equations that need one of these variables, directly or not."""
    found, variables = [], set(variables)
    for eqn in jaxpr.eqns:
        if any(not hasattr(atom, "val") and atom in variables for atom in eqn.invars):
            found.append(eqn)
            variables |= set(eqn.outvars)
    return found
