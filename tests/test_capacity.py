"""Test the number of rows of a `capacity_factor`, and the errors for wrong capacities and sizes."""

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


def rows_of(sizes=SIZES, **options):
    return ma.Exchange(**options).rows_per_rank(**sizes)


def test_without_alignment_a_factor_multiplies_the_rows_of_a_balanced_rank():
    assert rows_of(capacity_factor=1) == 8192
    assert rows_of(capacity_factor=1.25) == 10240
    assert rows_of(capacity_factor=0.5, replicated=True) == 1024


def test_a_factor_is_exact_in_decimal():
    """For 10 tokens, a factor of 1.1 means 11 rows, although 1.1 * 10 > 11 in floats."""
    assert rows_of(dict(SIZES, num_tokens=10, top_k=1), capacity_factor=1.1) == 11


def test_a_capacity_is_the_number_of_rows_whatever_the_sizes():
    assert rows_of(capacity=7) == rows_of(capacity=7, alignment=128, replicated=True) == 7


@pytest.mark.parametrize("alignment", (1, 3, 8, 128))
@pytest.mark.parametrize("routing", ("uniform", "skewed", "masked", "repeated", "idle_rank"))
def test_a_factor_of_the_busiest_rank_drops_nothing_with_any_alignment(routing, alignment):
    layout = cases.Layout("drawn", tokens=13, top_k=3, local_experts=5, alignment=alignment)
    ids = cases.Case(layout, routing).ids(RANKS)
    experts = layout.num_experts(RANKS)
    load = oracle.route(ids, experts, layout.rows(RANKS)).num_rows
    sizes = dict(num_tokens=13, top_k=3, group_size=RANKS, num_experts=experts)
    factor = load.max() / (13 * 3) * (1 + 1e-15)
    capacity = rows_of(sizes, capacity_factor=factor, alignment=alignment)
    assert capacity % alignment == 0
    assert oracle.route(ids, experts, capacity, alignment).num_dropped.sum() == 0
    if alignment == 1:
        assert oracle.route(ids, experts, capacity - 2).num_dropped.sum() > 0


@pytest.mark.parametrize(
    "modes",
    (dict(), dict(alignment=8), dict(replicated=True), dict(replicated=True, alignment=2)),
    ids=str,
)
def test_every_function_uses_the_capacity_of_the_factor(modes):
    group = harness.group_of(RANKS)
    tokens, top_k, experts = 6, 2, 3 * RANKS
    exchange = ma.Exchange(capacity_factor=1.5, **modes)
    rows = exchange.rows_per_rank(tokens, top_k, group_size=RANKS, num_experts=experts)

    def on_rank(ids, x):
        route_args = dict(group=group, num_experts=experts, exchange=exchange)
        routing = ma.route(ids, **route_args)
        recv = ma.dispatch(x, ids, **route_args)
        again = ma.dispatch(x, routing, exchange=ma.Exchange(capacity_factor=1.5))
        assert routing.capacity == recv.routing.capacity == again.routing.capacity == rows
        assert recv.rows.shape[0] == rows
        if not modes.get("replicated"):
            started = ma.dispatch_done(ma.dispatch_start(x, ids, **route_args))
            assert started.routing.capacity == rows
        return recv.num_rows

    ids = np.zeros((RANKS, tokens, top_k), np.int32)
    jax.eval_shape(
        harness.over_ranks(on_rank, harness.mesh_of(RANKS)), ids, ids[..., 0].astype(np.float32)
    )


def test_a_factor_that_contradicts_the_capacity_of_a_routing_is_refused():
    group = ma.Group(axis_name="ep", size=2, implementation="portable")

    def on_rank(ids):
        routing = ma.route(ids, group=group, num_experts=4)
        return ma.dispatch(ids, routing, exchange=ma.Exchange(capacity_factor=1)).rows

    says = "lead to the Routing's capacity, 20; got 1.0, which leads to 10. Omit it"
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(jax.vmap(on_rank, axis_name="ep"), jnp.zeros((2, 5, 2), int))


@pytest.mark.parametrize("name", ("capacity", "capacity_factor"))
def test_a_traced_number_is_an_error_that_names_static_argnums(name):
    with pytest.raises(TypeError, match=f"{name} must be .* static_argnums"):
        jax.eval_shape(lambda number: ma.Exchange(**{name: number}), 3)


@pytest.mark.parametrize("options", (dict(), dict(capacity_factor=1.25), dict(capacity=4)), ids=str)
@pytest.mark.parametrize(
    "changed, error, says",
    [
        (dict(num_tokens=-1), ValueError, "num_tokens must be at least 0; got -1"),
        (dict(top_k=2.0), TypeError, "top_k must be an int; got 2.0"),
        (dict(group_size=0), ValueError, "group_size must be at least 1; got 0"),
        (dict(num_experts=0), ValueError, "num_experts must be at least 1; got 0"),
    ],
    ids=str,
)
def test_a_size_that_is_out_of_range_is_named(options, changed, error, says):
    with pytest.raises(error, match=says):
        rows_of(dict(SIZES, **changed), **options)
