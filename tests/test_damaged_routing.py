"""A routing whose arrays have a wrong dtype or shape raises an error at trace time.

The kernels read the arrays of a routing with their expected sizes, so an array of a wrong dtype or
shape would be read out of bounds.
"""

import dataclasses
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)  # programs are traced, and not run

HOSTS, RANKS, TOKENS, TOP_K, CAPACITY, HIDDEN = 2, 4, 6, 3, 40, 5
EXPERTS = 2 * RANKS
AXES = ("host", harness.AXIS)

DAMAGES = {
    "float32": lambda a: a.astype(jnp.float32),
    "uint32": lambda a: a.astype(jnp.uint32),
    "shorter": lambda a: a[..., :-1] if a.ndim else a[None],
    "longer": lambda a: jnp.concatenate([a, a]) if a.ndim else jnp.stack([a, a]),
    "more_axes": lambda a: a[..., None],
    "scalar": lambda a: a.ravel()[0] if a.ndim else a[None],
}
ARRAYS = (
    *("token_slot", "slot_token", "choice_rank", "slot_rows"),
    *("row_rank", "row_slot", "row_k", "row_token"),
    *("group_sizes", "num_rows", "num_dropped", "num_invalid", "topk_ids"),
)
LEVEL_ARRAYS = (
    *(f"{level}.{name}" for level in ("hosts", "ranks") for name in ARRAYS[:7]),
    *("row_rank", "row_token", "group_sizes", "num_rows", "num_dropped", "num_invalid", "topk_ids"),
)


def flat_group():
    return ma.Group(axis_name=harness.AXIS, size=RANKS)


def two_level_group():
    return ma.Group(AbstractMesh((HOSTS, RANKS // HOSTS), AXES), AXES, two_level=True)


def trace(fn, group, *args):
    """Trace fn of one rank's abstract arrays over all ranks of the group; compile nothing."""
    lead = (RANKS,)
    for axis in reversed(group.axes):
        fn = jax.vmap(fn, axis_name=axis)
    if group.two_level:
        lead = (HOSTS, RANKS // HOSTS)
    stacked = [jax.ShapeDtypeStruct((*lead, *a.shape), a.dtype) for a in args]
    return jax.eval_shape(fn, *stacked)


def replaced(routing, name, damage):
    """Return the routing with one array damaged; `name` may be `level.array`."""
    level, _, array = name.rpartition(".")
    if not level:
        return dataclasses.replace(routing, **{name: damage(getattr(routing, name))})
    arrays = getattr(routing, level)
    arrays = arrays._replace(**{array: damage(getattr(arrays, array))})
    return dataclasses.replace(routing, **{level: arrays})


def dispatch(routing, x, y):
    return ma.dispatch(x, routing).rows


def dispatch_split(routing, x, y):
    return ma.dispatch_done(ma.dispatch_start(x, routing)).rows


def combine(routing, x, y):
    return ma.combine(y, routing)


def combine_split(routing, x, y):
    return ma.combine_done(ma.combine_start(y, routing))


USES = (dispatch, dispatch_split, combine, combine_split)


IDS = jax.ShapeDtypeStruct((TOKENS, TOP_K), jnp.int32)
X = jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.float32)
Y = jax.ShapeDtypeStruct((CAPACITY, HIDDEN), jnp.float32)


def trace_with_routing(fn, group):
    """Trace fn(routing, x, y)."""

    def layer(ids, x, y):
        exchange = ma.Exchange(capacity=CAPACITY)
        routing = ma.route(ids, group=group, num_experts=EXPERTS, exchange=exchange)
        return fn(routing, x, y)

    return trace(layer, group, IDS, X, Y)


def assert_all_damages_are_refused(name, uses, group):
    def layer(routing, x, y):
        for use in uses:
            argument = "topk_ids" if use in (dispatch, dispatch_split) else "recv"
            for damage in DAMAGES.values():
                with pytest.raises(TypeError) as refusal:
                    use(replaced(routing, name, damage), x, y)
                message = str(refusal.value)
                for pattern in (rf"^{argument} must", re.escape(name), "int32", "; got "):
                    assert re.search(pattern, message), f"no {pattern!r} in: {message}"
        return x

    trace_with_routing(layer, group)


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_another_dtype_or_shape_is_refused_by_its_name(name):
    assert_all_damages_are_refused(name, USES, flat_group())


@pytest.mark.parametrize("name", LEVEL_ARRAYS)
def test_an_array_of_a_level_is_refused_by_its_name(name):
    assert_all_damages_are_refused(name, (dispatch, combine), two_level_group())


def test_a_routing_of_numpy_arrays_is_accepted():
    """A restored checkpoint has numpy arrays."""
    group = flat_group()
    route = lambda ids: ma.route(
        ids, group=group, num_experts=EXPERTS, exchange=ma.Exchange(capacity=CAPACITY)
    )
    routing = jax.tree.map(lambda a: np.zeros(a.shape[1:], a.dtype), trace(route, group, IDS))
    rows = trace(lambda x: ma.dispatch(x, routing).rows, group, X)
    assert rows.shape == (RANKS, CAPACITY, HIDDEN)
