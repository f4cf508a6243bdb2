"""A capacity by a factor: the number of rows, in all functions that accept it, and the errors."""

import functools
import math
from fractions import Fraction

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)  # programs are traced, not run
RANKS = harness.SEVERAL
SIZES = dict(num_tokens=1024, top_k=8, group_size=4, num_experts=32)


def test_without_alignment_a_factor_multiplies_the_rows_of_a_balanced_rank():
    assert ma.capacity(1, **SIZES) == 8192
    assert ma.capacity(1.25, **SIZES) == 10240
    assert ma.capacity(0.5, **SIZES, replicated=True) == 1024
    assert ma.capacity(2.0, **dict(SIZES, num_tokens=5), shared_expert=True) == 85


def test_a_factor_is_the_number_that_was_written():
    """In floats 1.1 * 10 is more than 11."""
    assert ma.capacity(1.1, **dict(SIZES, num_tokens=10, top_k=1)) == 11


def test_a_factor_of_the_number_of_ranks_is_the_worst_case():
    for alignment in (1, 128):
        sizes = dict(SIZES, alignment=alignment)
        assert ma.capacity(4, **sizes) == ma.default_capacity(**sizes)
        assert ma.capacity(1e9, **sizes) == ma.default_capacity(**sizes)


@pytest.mark.parametrize("alignment", (1, 3, 8, 128))
@pytest.mark.parametrize("routing", ("uniform", "skewed", "masked", "repeated", "idle_rank"))
def test_a_factor_of_the_busiest_rank_drops_nothing_with_any_alignment(routing, alignment):
    layout = cases.Layout("drawn", tokens=13, top_k=3, local_experts=5, alignment=alignment)
    ids = cases.Case(layout, routing).ids(RANKS)
    experts = layout.num_experts(RANKS)
    load = oracle.route(ids, experts, layout.rows(RANKS)).num_rows
    sizes = dict(num_tokens=13, top_k=3, group_size=RANKS, num_experts=experts)
    factor = Fraction(int(load.max()), 13 * 3)
    capacity = ma.capacity(float(factor) * (1 + 1e-15), **sizes, alignment=alignment)
    assert capacity % alignment == 0
    assert oracle.route(ids, experts, capacity, alignment).num_dropped.sum() == 0
    if alignment == 1:  # one row less is too little
        assert oracle.route(ids, experts, capacity - 2).num_dropped.sum() > 0


MODES = [
    dict(),
    dict(alignment=8),
    dict(shared_expert=True, alignment=4),
    dict(replicated=True),
    dict(replicated=True, shared_expert=True, alignment=2),
]


@pytest.mark.parametrize("modes", MODES, ids=str)
def test_every_function_makes_rows_of_the_factor(modes):
    group = harness.group_of(RANKS)
    tokens, top_k, experts = 6, 2, 3 * RANKS
    route_args = dict(num_experts=experts, **modes)
    rows = ma.capacity(1.5, num_tokens=tokens, top_k=top_k, group_size=RANKS, **route_args)

    def on_rank(ids, x):
        other_args = dict(route_args, group=group, capacity_factor=1.5)
        routing = ma.route(ids, **other_args)
        recv = ma.dispatch(x, ids, **other_args)
        again = ma.dispatch(x, routing, capacity_factor=1.5)
        assert routing.capacity == recv.routing.capacity == again.routing.capacity == rows
        assert recv.rows.shape[0] == rows
        if not modes.get("replicated"):
            started = ma.dispatch_done(ma.dispatch_start(x, ids, **other_args))
            assert started.routing.capacity == rows
        return recv.num_rows

    ids = np.zeros((RANKS, tokens, top_k), np.int32)
    jax.eval_shape(
        harness.over_ranks(on_rank, harness.mesh_of(RANKS)), ids, ids[..., 0].astype(np.float32)
    )


def trace(**route_args):
    """Trace a route and a dispatch by its Routing with these arguments."""

    def on_rank(ids):
        routing = ma.route(ids, group=group, num_experts=4)
        ma.dispatch(ids, routing, **route_args) if route_args.pop(
            "by_routing", False
        ) else ma.route(ids, group=group, num_experts=4, **route_args)
        return ids

    group = ma.Group(axis_name="ep", size=2, implementation="portable")
    jax.eval_shape(jax.vmap(on_rank, axis_name="ep"), jnp.zeros((2, 5, 2), int))


@pytest.mark.parametrize(
    "route_args, error, says",
    [
        (dict(capacity=20.0), TypeError, r"capacity must be an int; got 20.0: use int\(...\)"),
        (dict(capacity="20"), TypeError, r"capacity must be an int; got '20': use int\(...\)"),
        (dict(capacity=True), TypeError, "capacity must be an int; got True"),
        (dict(capacity=None, capacity_factor="1"), TypeError, r"got '1': use float\(...\)"),
        (dict(capacity_factor=True), TypeError, "capacity_factor must be a number; got True"),
        (dict(capacity_factor=0), ValueError, "finite number above 0; got 0"),
        (dict(capacity_factor=-1.5), ValueError, "finite number above 0; got -1.5"),
        (dict(capacity_factor=math.nan), ValueError, "finite number above 0; got nan"),
        (dict(capacity_factor=math.inf), ValueError, "finite number above 0; got inf"),
        (
            dict(capacity=20, capacity_factor=1.5),
            ValueError,
            "capacity must be None with a capacity_factor; got 20 and 1.5. Pass one of them",
        ),
        (
            dict(by_routing=True, capacity_factor=1),
            ValueError,
            "lead to the Routing's capacity, 20; got 1, which leads to 10. Omit it",
        ),
        (dict(by_routing=True, capacity=20, capacity_factor=2), ValueError, "Pass one of them"),
    ],
    ids=str,
)
def test_an_error_says_what_to_do(route_args, error, says):
    with pytest.raises(error, match=says):
        trace(**route_args)


@pytest.mark.parametrize("name", ("capacity", "capacity_factor"))
def test_a_traced_number_is_an_error_that_names_static_argnums(name):
    with pytest.raises(TypeError, match=f"{name} must be .* static_argnums"):
        jax.eval_shape(lambda number: trace(**{name: number}), 3)


def test_an_estimate_with_a_factor_is_that_of_its_capacity():
    sizes = dict(SIZES, alignment=16)
    by_factor = ma.memory_estimate(hidden=64, capacity_factor=1.25, **sizes)
    by_rows = ma.memory_estimate(hidden=64, capacity=ma.capacity(1.25, **sizes), **sizes)
    assert by_factor == by_rows and by_factor.capacity == ma.capacity(1.25, **sizes)
    with pytest.raises(ValueError, match="Pass one of them"):
        ma.memory_estimate(hidden=64, capacity=4, capacity_factor=1.0, **sizes)
    with pytest.raises(TypeError, match="use int"):
        ma.memory_estimate(hidden=64, capacity=4.0, **sizes)


@pytest.mark.parametrize("rows_of", (ma.default_capacity, functools.partial(ma.capacity, 1.25)))
@pytest.mark.parametrize(
    "changed, error, says",
    [
        (dict(num_tokens=-1), ValueError, "num_tokens must be at least 0; got -1"),
        (dict(top_k=2.0), TypeError, "top_k must be an int; got 2.0"),
        (dict(group_size=0), ValueError, "group_size must be at least 1; got 0"),
        (dict(num_experts=0), ValueError, "num_experts must be at least 1; got 0"),
        (dict(alignment=0), ValueError, "alignment must be at least 1; got 0"),
    ],
    ids=str,
)
def test_a_size_that_is_out_of_range_is_named(rows_of, changed, error, says):
    with pytest.raises(error, match=says):
        rows_of(**dict(SIZES, **changed))
