"""Test that `Exchange` checks its options when it is made, and is a pytree whose only leaf is a
traced global scale."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)  # a vmap emulates the ranks

GROUP = ma.Group(axis_name="ep", size=2, implementation="portable")
HIDDEN = 32
X = np.random.default_rng(0).normal(size=(2, 3, HIDDEN)).astype(np.float32)
IDS = np.array([[[0, 3], [1, 2], [2, -1]], [[3, 0], [0, 1], [1, 3]]], np.int32)
SCALED = ma.Exchange(token_format=ma.NvFp4(global_scale=jnp.float32(0.5)), alignment=4)


def rows_of(exchange, x=X):
    """Return the decoded rows of both ranks."""

    def on_rank(x, ids):
        given = dict(group=GROUP, num_experts=4, exchange=exchange)
        return ma.dispatch(x, ids, **given, decode=exchange.token_format is not None).rows

    return jax.vmap(on_rank, axis_name="ep")(x, IDS)


@pytest.mark.parametrize(
    "options, error, says",
    [
        (dict(capacity=-1), ValueError, "capacity must be at least 0; got -1. Omit capacity"),
        (dict(capacity=20.0), TypeError, r"capacity must be an int; got 20.0: use int\(...\)"),
        (dict(capacity="20"), TypeError, r"capacity must be an int; got '20': use int\(...\)"),
        (dict(capacity=True), TypeError, "capacity must be an int; got True"),
        (dict(capacity_factor="1"), TypeError, r"must be a number; got '1': use float\(...\)"),
        (dict(capacity_factor=True), TypeError, "capacity_factor must be a number; got True"),
        (dict(capacity_factor=0), ValueError, "finite number above 0; got 0"),
        (dict(capacity_factor=-1.5), ValueError, "above 0; got -1.5. Omit capacity_factor to drop"),
        (dict(capacity_factor=np.nan), ValueError, "finite number above 0; got nan"),
        (dict(capacity_factor=np.inf), ValueError, "finite number above 0; got inf"),
        (
            dict(capacity=4, capacity_factor=1.5),
            ValueError,
            "capacity must be None with a capacity_factor; got 4 and 1.5. Pass one of them",
        ),
        (dict(alignment=0), ValueError, "alignment must be at least 1; got 0"),
        (dict(alignment=True), TypeError, "alignment must be an int; got True"),
        (dict(replicated="yes"), TypeError, "replicated must be a bool; got 'yes'"),
        (
            dict(wire_dtype="bf16"),
            TypeError,
            "wire_dtype .*jnp.bfloat16 or 'bfloat16'.* got 'bf16'",
        ),
        (dict(wire_dtype=jnp.int8), TypeError, "wire_dtype must be a float dtype"),
        (dict(wire_dtype=SCALED.token_format), TypeError, "wire_dtype must have a float as glob"),
        (dict(token_format="fp8"), TypeError, "token_format must be a BlockwiseFp8.*got 'fp8'"),
        (dict(token_format=ma.MxFp8), TypeError, "token_format must be .* got <class"),
        (dict(num_chunks=0), ValueError, "num_chunks must be at least 1; got 0"),
        (dict(num_chunks=2.0), TypeError, "num_chunks must be an int; got 2.0"),
    ],
    ids=str,
)
def test_a_wrong_option_is_an_error_when_the_exchange_is_made(options, error, says):
    with pytest.raises(error, match=says):
        ma.Exchange(**options)
    (name, value), *others = options.items()
    with pytest.raises(error, match=says):
        dataclasses.replace(ma.Exchange(**dict(others)), **{name: value})


def test_options_are_passed_by_name_only():
    with pytest.raises(TypeError, match="positional"):
        ma.Exchange(4)


@pytest.mark.parametrize(
    "exchange, text",
    [
        (ma.Exchange(), "Exchange()"),
        (ma.Exchange(capacity=np.int64(3), replicated=False), "(capacity=3, replicated=False)"),
        (ma.Exchange(wire_dtype=jnp.bfloat16), "Exchange(wire_dtype='bfloat16')"),
        (ma.Exchange(token_format=ma.MxFp8()), "Exchange(token_format=MxFp8())"),
    ],
    ids=str,
)
def test_an_exchange_prints_only_what_is_set(exchange, text):
    assert repr(exchange).endswith(text)


def test_equal_options_are_equal_static_arguments():
    options = dict(capacity_factor=1.5, alignment=8, token_format=ma.NvFp4(global_scale=0.5))
    one = ma.Exchange(**options, wire_dtype="bfloat16")
    other = ma.Exchange(**dict(options, capacity_factor=np.float64(1.5)), wire_dtype=jnp.bfloat16)
    assert one == other and hash(one) == hash(other)
    assert one != dataclasses.replace(one, alignment=16)
    assert jax.tree.structure(one) == jax.tree.structure(other) and not jax.tree.leaves(one)
    assert jax.tree.structure(one) != jax.tree.structure(ma.Exchange())


def test_the_only_leaf_is_a_scale_that_is_an_array():
    ((path, leaf),) = jax.tree_util.tree_leaves_with_path(SCALED)
    assert jax.tree_util.keystr(path) == ".token_format.global_scale" and leaf == 0.5
    doubled = jax.tree.map(lambda scale: 2 * scale, SCALED)
    assert doubled.token_format.global_scale == 1 and doubled.alignment == 4
    # JAX may replace leaves by any object, so `Exchange` does not check its options in `tree.map`.
    strange = jax.tree.map(lambda _: "no scale", SCALED)
    assert jax.tree.leaves(strange) == ["no scale"]


def test_an_exchange_may_be_an_argument_of_a_compiled_function():
    expected = rows_of(SCALED)
    run = jax.jit(rows_of)
    np.testing.assert_array_equal(run(SCALED), expected)
    finer = jax.tree.map(lambda scale: 0.3 * scale, SCALED)
    np.testing.assert_array_equal(run(finer), rows_of(finer))
    assert run._cache_size() == 1, "a new scale compiled a new program"
    assert not np.array_equal(run(finer), expected)
    np.testing.assert_array_equal(jax.jit(functools.partial(rows_of, SCALED))(), expected)


def test_an_exchange_may_be_mapped_scanned_and_differentiated():
    scales = jnp.float32([0.5, 0.15])
    several = jax.tree.map(lambda _: scales, SCALED)
    each = [jax.tree.map(lambda _, i=i: scales[i], SCALED) for i in range(2)]
    expected = np.stack([rows_of(one) for one in each])
    assert not np.array_equal(*expected)
    np.testing.assert_array_equal(jax.vmap(rows_of)(several), expected)
    _, scanned = jax.lax.scan(lambda carry, exchange: (carry, rows_of(exchange)), 0, several)
    np.testing.assert_array_equal(scanned, expected)
    loss = lambda x, exchange: rows_of(exchange, x).sum()
    gradient = jax.jit(jax.grad(loss))(X, SCALED)
    np.testing.assert_array_equal(gradient, jax.grad(loss)(X, ma.Exchange(alignment=4)))


@pytest.mark.parametrize("fn", (ma.route, ma.dispatch, ma.dispatch_start))
def test_a_single_exchange_refuses_chunks(fn):
    args = (X,) * (fn is not ma.route) + (IDS,)
    given = dict(group=GROUP, num_experts=4, exchange=ma.Exchange(num_chunks=2))
    with pytest.raises(ValueError, match="num_chunks must be None .*; got 2. Only moe_mlp and moe"):
        jax.vmap(lambda *args: fn(*args, **given), axis_name="ep")(*args)


ACCEPTING = (ma.route, ma.dispatch, ma.dispatch_start, ma.moe_mlp, ma.moe, ma.memory_estimate)


@pytest.mark.parametrize("fn", ACCEPTING, ids=lambda fn: fn.__name__)
def test_options_are_in_the_exchange_and_nowhere_else(fn):
    own = {field.name for field in dataclasses.fields(ma.Exchange)}
    parameters = inspect.signature(fn).parameters
    assert parameters["exchange"].default is None and not own & set(parameters)


@pytest.mark.parametrize("exchange", (1.25, dict(capacity=4), ma.Exchange, ma.MxFp8()), ids=str)
def test_anything_else_is_refused(exchange):
    with pytest.raises(TypeError, match="exchange must be an Exchange or None; got .*ma.Exchange"):
        ma.memory_estimate(4, 4, 2, num_experts=4, group_size=2, exchange=exchange)
