"""`ma.accumulate_grads`: totals are the sums of all gradients, whatever transforms a loss has, and
the products of experts add to them."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jax_moe_a2a as ma

pytestmark = [pytest.mark.exchanges(0), pytest.mark.usefixtures("exact_products")]

HIDDEN, WIDTH, EXPERTS, TOP_K = 8, 4, 4, 2
START = 100.0  # of totals: an error that counts them twice, or not at all, is large
quickly = functools.partial(jax.jit, compiler_options=harness.QUICKLY)


def params_of(*lead, seed=0, dtype="float32", hidden=HIDDEN, width=WIDTH):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(0.5 * rng.normal(size=(*lead, *shape)), dtype)
    biases = dict(b_in=draw(EXPERTS, 2, width), b_out=draw(EXPERTS, hidden))
    experts = ma.Experts(draw(EXPERTS, hidden, 2, width), draw(EXPERTS, width, hidden), **biases)
    return dict(router=ma.Router(draw(hidden, EXPERTS), choose=ma.TopK(TOP_K)), experts=experts)


def tokens(*lead, seed=1, dtype="float32", hidden=HIDDEN):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*lead, hidden)), dtype)


def zeros_like(params):
    return optax.tree.zeros_like(params, dtype=jnp.float32)


def layer(params, x, axes="ep", **options):
    return ma.moe(x, **params, axes=axes, **options)


@pytest.fixture(params=[1, 2])
def mesh(request):
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    sizes = (1, 2) if request.param == 1 else (2, 2)
    with jax.set_mesh(jax.make_mesh(sizes, ("data", "ep"), axis_types=axis_types)):
        yield ma.Axes("ep", data="data") if request.param == 2 else ma.Axes("ep")


def num_added(fn, *args):
    """Return how many products add to a total that is not known to be zero."""
    return str(jax.make_jaxpr(fn)(*args)).count("moe_a2a_add_outer")


def assert_sums(loss, params, *args, tolerance=1e-4, has_aux=True):
    """Check totals, and return how many products add."""
    totals = jax.tree.map(lambda zero: zero + START, zeros_like(params))
    add = ma.accumulate_grads(loss, has_aux=has_aux)
    found, result = quickly(add)(totals, params, *args)
    value, gradients = quickly(jax.value_and_grad(loss, has_aux=has_aux))(params, *args)
    expected = jax.tree.map(lambda t, g: t + g.astype(t.dtype), totals, gradients)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), found, expected
    )
    first = lambda x: x[0] if has_aux else x
    np.testing.assert_allclose(first(result), first(value), 1e-5)
    return num_added(add, totals, params, *args)


# Losses: parameters of one layer, tokens -> loss, totals. Each says how many products may add to a
# given total on ranks that have all of their tokens.


def once(axes, params, x):
    y, stats = layer(params, x, axes)
    return jnp.sin(y).sum() + stats.balance_loss, stats


def in_chunks(axes, params, x):
    y, stats = layer(params, x, axes, exchange=ma.Exchange(num_chunks=2))
    return jnp.sin(y).sum(), stats


def returns_nothing(axes, params, x):
    return once(axes, params, x)[0], None


def twice(axes, params, x):
    y, stats = layer(params, x, axes)
    again = dict(params, experts=params["experts"].replace(totals=stats.totals))
    y, stats = layer(again, jnp.sin(y), axes)
    return jnp.sin(y).sum(), stats


def twice_apart(axes, params, x):
    y, stats = layer(params, x, axes)
    y, others = layer(params, jnp.sin(y), axes)
    return jnp.sin(y).sum(), (stats, others)


def of_a_batch(axes, params, x):
    value, stats = jax.vmap(lambda x: once(axes, params, x))(jnp.stack([x, 2 * x, -x]))
    return value.sum(), stats


def checkpointed(axes, params, x):
    return jax.checkpoint(functools.partial(once, axes))(params, x)


def of_the_other_branch(axes, params, x):
    none = lambda params, x: (x.sum(), params["experts"].totals)
    taken = lambda params, x: (lambda v, s: (v, s.totals))(*once(axes, params, x))
    is_taken = jnp.isnan(x).any()
    return lax.cond(is_taken, taken, none, params, x)


def of_a_branch(axes, params, x):
    none = lambda params, x: (x.sum(), params["experts"].totals)
    taken = lambda params, x: (lambda v, s: (v, s.totals))(*once(axes, params, x))
    return lax.cond(~jnp.isnan(x).any(), taken, none, params, x)


def in_a_loop(axes, params, x):
    """Use the same experts three times."""

    def step(carry, _):
        x, totals = carry
        own = dict(params, experts=params["experts"].replace(totals=totals))
        y, stats = layer(own, x, axes)
        return (jnp.sin(y), stats.totals), None

    (x, totals), _ = lax.scan(step, (x, params["experts"].totals), length=3)
    return x.sum(), totals


LOSSES = dict(
    once=once,
    in_chunks=in_chunks,
    returns_nothing=returns_nothing,
    twice=twice,
    twice_apart=twice_apart,
    of_a_batch=of_a_batch,
    checkpointed=checkpointed,
    of_the_other_branch=of_the_other_branch,
    of_a_branch=of_a_branch,
    in_a_loop=in_a_loop,
)


@pytest.mark.several_devices("a mesh of two axes")
@pytest.mark.parametrize("name", LOSSES)
def test_totals_are_the_sums_of_gradients(mesh, name):
    loss = functools.partial(LOSSES[name], mesh)
    assert_sums(loss, params_of(), tokens(8))
