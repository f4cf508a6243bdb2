"""Runs functions on every rank, and the cases of the catalogue through few compiled programs."""

import collections
import functools
import os
import types

import cases
import jax
import numpy as np
import oracle
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_moe_a2a as ma

AXIS = "ep"
IMPLEMENTATION = os.environ.get("MOE_A2A_TEST_IMPLEMENTATION") or None
ON_GPU = os.environ.get("MOE_A2A_TEST_GPU") == "1"
NUM_DEVICES = len(jax.devices())

if ON_GPU:
    RANK_COUNTS = tuple(n for n in (2, 4, 8) if n <= NUM_DEVICES) or (1,)
else:
    RANK_COUNTS = (1, 2, 4, 8)
# For tests that need several ranks, but one number of them only; and the ends of what is several.
SEVERAL = max(n for n in RANK_COUNTS if n <= 4)
FEW = min(2, RANK_COUNTS[-1])
MANY = RANK_COUNTS[-1]


@functools.cache
def mesh_of(ranks):
    return Mesh(np.array(jax.devices()[:ranks]), (AXIS,))


def group_of(ranks):
    return ma.Group(mesh_of(ranks), AXIS, implementation=IMPLEMENTATION)


def poison(aval, sharding):
    """An array that no correct result looks like: NaN, or 0xA5 in every byte of an integer."""
    dtype = np.dtype(aval.dtype)
    byte = 1 if dtype == np.bool_ else 0xA5 if dtype.kind in "iu" else 0xFF
    raw = np.full((*aval.shape, dtype.itemsize), byte, np.uint8)
    array = raw.view(dtype).reshape(aval.shape)
    return jax.device_put(array, sharding, may_alias=False)


def on_each_rank(fn, mesh=None, check_vma=True):
    """`fn` of one rank's arrays as a function of all ranks' arrays, compiled; numpy in, numpy out.

    Arguments and results are pytrees whose leaves carry a leading rank axis. Results are written
    into donated buffers that are full of poison, so that whatever a kernel leaves out shows.
    """
    spec = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)

    def of_one_rank(*args):
        results = fn(*jax.tree.map(lambda leaf: leaf[0], args))
        return jax.tree.map(lambda leaf: leaf[None], results)

    mapped = jax.jit(
        jax.shard_map(of_one_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    )

    @functools.partial(
        jax.jit, donate_argnums=0, keep_unused=True, in_shardings=sharding, out_shardings=sharding
    )
    def poisoned(results, args):
        del results
        return mapped(*args)

    def run(*args):
        args = jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), args)
        results = jax.tree.map(lambda aval: poison(aval, sharding), jax.eval_shape(mapped, *args))
        return jax.tree.map(np.asarray, poisoned(results, args))

    return run


def emulated(fn):
    """`fn` of one rank's arrays as a function of all ranks' arrays, by vmap over the group's axis
    on one device.
    """
    compiled = jax.jit(jax.vmap(fn, axis_name=AXIS))
    return lambda *args: jax.tree.map(np.asarray, compiled(*args))


def emulated_group(ranks):
    return ma.Group(axis_name=AXIS, size=ranks)


def exchange_fn(layout, group):
    """A dispatch and its combines, unweighted and weighted, as a function of one rank's arrays."""

    def exchange(ids, x, topk_weights, y):
        recv = ma.dispatch(
            x,
            ids,
            topk_weights,
            group=group,
            num_experts=layout.num_experts(group.size),
            capacity=layout.capacity,
            alignment=layout.alignment,
        )
        return {
            "recv": recv,
            "sum": ma.combine(y, recv, weights=None),
            "weighted": ma.combine(y, recv),
        }

    return exchange


@functools.cache
def exchange_program(layout, ranks):
    return on_each_rank(exchange_fn(layout, group_of(ranks)), mesh_of(ranks))


@functools.cache
def emulated_exchange_program(layout, ranks):
    return emulated(exchange_fn(layout, emulated_group(ranks)))


def exchange_inputs(case, ranks, seed=0):
    """Arguments of `exchange_fn` for all ranks, NaN where nothing may be read; expected routing."""
    layout = case.layout
    rng = np.random.default_rng([seed, ranks, layout.tokens])
    ids = case.ids(ranks, seed)
    routing = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)
    x = {
        "rows": cases.any_bits(rng, (ranks, layout.tokens, layout.hidden), "bfloat16"),
        "position": cases.any_bits(rng, (ranks, layout.tokens), "int32"),
    }
    topk_weights = cases.normal(rng, ids.shape, "float32")
    topk_weights[routing.choice_row < 0] = np.nan
    y = cases.normal(rng, (ranks, layout.rows(ranks), layout.hidden), "bfloat16")
    y[routing.row_token < 0] = np.nan
    return (ids, x, topk_weights, y), routing


@functools.lru_cache(maxsize=4)
def run_case(case, ranks, seed=0, emulate=False):
    """The results of a case with its inputs and its expected routing."""
    (ids, x, topk_weights, y), routing = exchange_inputs(case, ranks, seed)
    program = (emulated_exchange_program if emulate else exchange_program)(case.layout, ranks)
    results = program(ids, x, topk_weights, y)
    return types.SimpleNamespace(
        ids=ids, x=x, topk_weights=topk_weights, y=y, expected=routing, **results
    )


def changing_routings(layout, ranks):
    """Runs one program again and again, each time with another routing; yields the results."""
    names = list(cases.ROUTINGS)
    for seed in range(100 if ON_GPU else len(names)):
        yield run_case(cases.Case(layout, names[seed % len(names)]), ranks, seed)


def assert_same_bytes(actual, expected, what=""):
    """Same shape, dtype and bits: NaN equals the same NaN, and 0 is not -0."""
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    np.testing.assert_array_equal(cases.bits(actual), cases.bits(expected), err_msg=what)


def assert_sums_agree(actual, expected, slack, what=""):
    """Within the slack that `oracle.combine` grants: none for unweighted sums."""
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected), err_msg=what)
    too_far = np.abs(actual - expected) > slack
    assert not too_far.any(), (
        f"{what}: {too_far.sum()} of {too_far.size} sums are too far away, "
        f"first at {np.argwhere(too_far)[0]}: "
        f"{actual[too_far][0]} for {expected[too_far][0]}, slack {slack[too_far][0]}"
    )


def assert_routing_is(actual, expected):
    """Every field of a package Routing [R, ...] equals the oracle's, as int32."""
    for field in oracle.FIELDS:
        assert_same_bytes(np.asarray(getattr(actual, field)), getattr(expected, field), field)


def equations(jaxpr):
    """All equations of a jaxpr, nested ones included, in program order."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for nested in nested_jaxprs(eqn):
            yield from equations(nested)


def nested_jaxprs(eqn):
    """The jaxprs among the parameters of an equation."""
    for param in jax.tree.leaves(
        list(eqn.params.values()),
        is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr"),
    ):
        if hasattr(param, "jaxpr") or hasattr(param, "eqns"):
            yield param


def count_primitives(jaxpr, prefix="moe_a2a_"):
    """How often each primitive with that prefix stands in a jaxpr, nested ones included."""
    names = (eqn.primitive.name for eqn in equations(jaxpr))
    return dict(
        collections.Counter(name.removeprefix(prefix) for name in names if name.startswith(prefix))
    )
