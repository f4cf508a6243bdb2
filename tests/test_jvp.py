"""Test that a layer's tangents and second derivatives equal those of the dense layer on one
device."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from small_layer import OF_FLOATS, route_args

import jax_moe_a2a as ma

RANKS = harness.SEVERAL


@functools.cache
def problem():
    """Return (layer, dense layer, floats, directions); both layers are functions of the floats."""
    floats, ids, kept = small_layer.arguments(RANKS)
    layer = small_layer.layer_of_all_ranks()
    return (
        lambda *floats: layer(*floats, ids),
        lambda *floats: small_layer.dense_layer(*floats, ids, kept),
        floats,
        small_layer.directions(RANKS),
    )


def assert_equal_to_dense(transform, **tolerance):
    layer, dense, floats, directions = problem()
    actual = small_layer.compiled(transform(layer))(floats, directions)
    expected = small_layer.compiled(transform(dense))(floats, directions)
    small_layer.assert_close(actual, expected, **tolerance)


@pytest.mark.exchanges(7)
def test_jvp_and_linearize_equal_those_of_the_dense_layer():
    def tangents(fn):
        def of(floats, directions):
            value, tangent_of = jax.linearize(fn, *floats)
            flipped = jax.tree.map(lambda leaf: -2 * leaf[::-1], directions)
            linear = value, tangent_of(*directions), tangent_of(*flipped)
            return jax.jvp(fn, floats, directions), linear

        return of

    assert_equal_to_dense(tangents)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("i", range(3), ids=small_layer.NAMES)
def test_the_tangent_of_one_argument_moves_nothing_of_the_others(i):
    layer, _, floats, directions = problem()

    def of_one(value):
        return layer(*floats[:i], value, *floats[i + 1 :])

    jaxpr = jax.make_jaxpr(lambda v, d: jax.jvp(of_one, (v,), (d,)))(floats[i], directions[i])
    names = "routed_dispatch", "dispatch"
    equations = [eqn for name in names for eqn in small_layer.equations(jaxpr, name)]
    dispatches = list(map(small_layer.payload, equations))
    tokens, hidden = small_layer.LAYOUT.tokens, small_layer.LAYOUT.hidden
    rows, weights = [(tokens, hidden)], [(tokens, small_layer.LAYOUT.top_k)]
    assert dispatches == [(rows, weights)] + {
        "x": [(rows, [])],
        "topk_weights": [([], weights)],
    }.get(small_layer.NAMES[i], [])
    assert len(small_layer.equations(jaxpr, "weighted_combine")) == 2
    assert len(small_layer.equations(jaxpr, "route")) <= 1


@pytest.mark.exchanges(9)
def test_forward_over_reverse_equals_that_of_the_dense_layer():
    def hessian_times(fn):
        grad = jax.grad(small_layer.loss_of(fn), OF_FLOATS)
        return lambda floats, directions: jax.jvp(grad, floats, directions)

    assert_equal_to_dense(hessian_times, tolerance=1e-4)


@pytest.mark.exchanges(2)
def test_integers_and_narrow_floats_of_a_payload_have_zero_tangents_and_gradients():
    """The tangents of integers have dtype float0, and no exchange sends them."""
    group = harness.group_of(RANKS)
    _, ids, _ = small_layer.arguments(RANKS)
    tokens = small_layer.LAYOUT.tokens
    rng = np.random.default_rng(0)
    x = {
        "wide": cases.normal(rng, (RANKS, tokens, 4), "float32"),
        "narrow": cases.normal(rng, (RANKS, tokens, 4), "float8_e4m3fn"),
        "position": cases.any_bits(rng, (RANKS, tokens), "int32"),
    }
    dx = {
        "wide": np.ones_like(x["wide"]),
        "narrow": np.ones_like(x["narrow"]),
        "position": np.zeros(x["position"].shape, jax.dtypes.float0),
    }

    def dispatch(x):
        return small_layer.on_all_ranks(
            lambda x, ids: ma.dispatch(x, ids, **route_args(group)).rows, group.mesh
        )(x, ids)

    def tangents(x, wide, narrow):
        d = dict(dx, wide=wide, narrow=narrow)
        _, out = jax.jvp(dispatch, (x,), (d,))
        assert out["position"].dtype == jax.dtypes.float0
        return out["wide"], out["narrow"]

    args = x, dx["wide"], dx["narrow"]
    jaxpr = jax.make_jaxpr(tangents)(*args)
    value, tangent = small_layer.equations(jaxpr, "dispatch")
    assert [len(small_layer.payload(eqn)[0]) for eqn in (value, tangent)] == [3, 1]
    wide, narrow = small_layer.compiled(tangents)(*args)
    is_row = small_layer.routing_of(ids).row_token >= 0
    np.testing.assert_array_equal(np.asarray(wide), np.where(is_row[..., None], np.ones(4), 0))
    assert not np.asarray(narrow, np.float32).any()

    def total(x):
        rows = dispatch(x)
        return jnp.sum(rows["wide"]) + jnp.sum(rows["narrow"].astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(total, allow_int=True))(x)
    (back,) = small_layer.equations(jaxpr, "combine")
    assert len(small_layer.payload(back)[0]) == 1
