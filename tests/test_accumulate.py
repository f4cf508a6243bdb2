"""Test that `ma.accumulate_grads` adds gradients to totals, and that products add the gradients of
their weights directly."""

import dataclasses
import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma
from jax_moe_a2a._src.grouped.totals import add_outer_p

pytestmark = [
    pytest.mark.several_devices("a mesh of two axes"),
    pytest.mark.exchanges(0),
    pytest.mark.usefixtures("exact_products"),
]

HIDDEN, WIDTH, EXPERTS, TOP_K = 8, 4, 4, 2
START = 100.0  # so large that a total that is added twice or never is an error


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
    """Return how many products add their result to an array, and how many of these arrays are
    zeros."""

    def count(jaxpr):
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        for eqn in jaxpr.eqns:
            if eqn.primitive is add_outer_p:
                made = [e.primitive.name for e in jaxpr.eqns if eqn.invars[0] in e.outvars]
                yield 1, made == ["broadcast_in_dim"]
            for nested in harness.nested_jaxprs(eqn):
                yield from count(nested)

    found = list(count(jax.make_jaxpr(fn)(*args)))
    return len(found), sum(is_zero for _, is_zero in found)


def assert_sums(loss, params, *args, tolerance=1e-4, has_aux=True):
    """Check that totals are START plus the gradients of `jax.grad`; return the result of
    `num_added`."""
    totals = jax.tree.map(lambda zero: zero + START, zeros_like(params))
    add = ma.accumulate_grads(loss, has_aux=has_aux)
    found, result = harness.quickly(add)(totals, params, *args)
    value, gradients = harness.quickly(jax.value_and_grad(loss, has_aux=has_aux))(params, *args)
    expected = jax.tree.map(lambda t, g: t + g.astype(t.dtype), totals, gradients)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), found, expected
    )
    first = lambda x: x[0] if has_aux else x
    np.testing.assert_allclose(first(result), first(value), 1e-5)
    return num_added(add, totals, params, *args)


# Functions of (axes, parameters of a layer, tokens) that return (loss, statistics or totals).


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


def of_a_branch(axes, params, x, is_taken=True):
    none = lambda params, x: (x.sum(), params["experts"].totals)
    taken = lambda params, x: (lambda v, s: (v, s.totals))(*once(axes, params, x))
    return lax.cond(jnp.isfinite(x).all() == is_taken, taken, none, params, x)


def of_the_other_branch(axes, params, x):
    return of_a_branch(axes, params, x, is_taken=False)


def in_a_loop(axes, params, x):
    def step(carry, _):
        x, totals = carry
        own = dict(params, experts=params["experts"].replace(totals=totals))
        y, stats = layer(own, x, axes)
        return (jnp.sin(y), stats.totals), None

    (x, totals), _ = lax.scan(step, (x, params["experts"].totals), length=3)
    return x.sum(), totals


def casts(axes, params, x):
    own = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    y, stats = layer(own, x.astype(jnp.bfloat16), axes)
    return jnp.sin(y.astype(jnp.float32)).sum(), stats


def scales(axes, params, x):
    experts = params["experts"]
    experts = experts.replace(w_in=2 * experts.w_in)
    value, stats = once(axes, dict(params, experts=experts), x)
    return value + (experts.w_out**2).sum(), stats


TOLERANCES = {casts: dict(tolerance=2e-2)}
# The result of `num_added` for each loss function, on a mesh without a data axis.
LOSSES = {
    once: (2, 0),
    in_chunks: (2, 0),
    returns_nothing: (2, 2),
    twice: (4, 0),
    twice_apart: (4, 2),
    of_a_batch: (2, 2),
    checkpointed: (2, 0),
    of_the_other_branch: (2, 0),
    of_a_branch: (2, 0),
    in_a_loop: (2, 0),
    casts: (0, 0),
    scales: (0, 0),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_totals_are_the_sums_of_gradients(mesh, loss):
    found = assert_sums(
        functools.partial(loss, mesh), params_of(), tokens(8), **TOLERANCES.get(loss, {})
    )
    if mesh.data is None:
        assert found == LOSSES[loss]


@pytest.mark.parametrize("mesh", [1], indirect=True)
def test_totals_of_layers_in_a_scan(mesh):
    def loss(params, x):
        @jax.checkpoint
        def step(x, own):
            y, stats = layer(own, x, mesh)
            return jnp.sin(x + y), stats.totals

        x, totals = lax.scan(step, x, params)
        return x.sum(), totals

    assert assert_sums(loss, params_of(3), tokens(8)) == (2, 0)


@pytest.mark.parametrize("mesh", [1], indirect=True)
def test_totals_of_experts_that_are_trained_in_fp8(mesh):
    params = params_of(hidden=128, width=128)
    quantized = ma.quantize_experts(params["experts"], transposed=True)

    def loss(params, x, before):
        experts = params["experts"]
        if before:
            with_source = lambda name: dataclasses.replace(
                getattr(quantized, name), source=getattr(experts, name)
            )
            fields = dict(w_in=with_source("w_in"), w_out=with_source("w_out"))
            experts = experts.replace(**fields, totals=experts.totals)
        else:
            experts = experts.in_fp8()
        return once(mesh, dict(params, experts=experts), x)

    for before in (False, True):
        fn = functools.partial(loss, before=before)
        assert assert_sums(fn, params, tokens(8, hidden=128), tolerance=1e-3) == (2, 0)


@pytest.mark.parametrize("mesh", [1], indirect=True)
def test_a_scan_over_micro_batches_inside_shard_map(mesh):
    """Totals equal the sums of `jax.grad` over micro-batches; both products add to the totals."""
    params, batches = params_of(), tokens(3, 8)
    rng = np.random.default_rng(5)
    ids = jnp.asarray(rng.integers(-1, EXPERTS, (3, 8, TOP_K)), jnp.int32)
    weights = jnp.asarray(rng.random((3, 8, TOP_K)), jnp.float32)
    specs = jax.tree.map(lambda _: P("ep"), params["experts"])

    def loss(experts, batch):
        x, *choices = batch
        call = functools.partial(ma.moe_mlp, group="ep", num_experts=EXPERTS)
        y, totals = call(x, ma.RouterChoices(*choices), experts, return_totals=True)
        return jnp.sin(y).sum(), totals

    def step(totals, experts, batches):
        add = ma.accumulate_grads(loss, has_aux=True)
        return lax.scan(lambda t, batch: (add(t, experts, batch)[0], None), totals, batches)[0]

    def plain(totals, experts, batches):
        def of_one(totals, batch):
            gradients = jax.grad(loss, has_aux=True)(experts, batch)[0]
            return jax.tree.map(jnp.add, totals, gradients), None

        return lax.scan(of_one, totals, batches)[0]

    zeros, of_tokens = zeros_like(params["experts"]), P(None, "ep")
    mapped = lambda fn: jax.shard_map(fn, in_specs=(specs, specs, of_tokens), out_specs=specs)
    args = zeros, params["experts"], (batches, ids, weights)
    found, expected = (harness.quickly(mapped(fn))(*args) for fn in (step, plain))
    close = lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4)
    jax.tree.map(close, found, expected)
    assert num_added(mapped(step), *args) == (2, 0)


@pytest.mark.parametrize("mesh", [1], indirect=True)
def test_tangents_of_totals_are_those_of_gradients(mesh):
    loss = functools.partial(once, mesh)
    params, x, directions = params_of(), tokens(8), params_of(seed=2)
    totals = zeros_like(params)
    add = lambda params: ma.accumulate_grads(loss, has_aux=True)(totals, params, x)[0]
    plain = lambda params: jax.grad(loss, has_aux=True)(params, x)[0]
    found, expected = (
        harness.quickly(lambda p, d, fn=fn: jax.jvp(fn, (p,), (d,)))(params, directions)
        for fn in (add, plain)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-3), found, expected)


def test_what_accumulate_grads_refuses():
    add = ma.accumulate_grads(lambda params: params["w"].sum())
    params = dict(w=jnp.ones(3, jnp.bfloat16))
    with pytest.raises(ValueError, match=r"totals\['w'\] must be float32\[3\].*got bfloat16"):
        add(params, params)
    with pytest.raises(ValueError, match=r"totals\['w'\] must be float32\[3\].*got float32\[4\]"):
        add(dict(w=jnp.zeros(4)), params)
    with pytest.raises(ValueError, match=r"Call add\(totals, params, \*args\)"):
        add(params, dict(w=jnp.zeros(3)))
    with pytest.raises(TypeError, match="must return a scalar; got a tuple. Pass has_aux=True"):
        ma.accumulate_grads(lambda params: (params["w"].sum(), 1))(dict(w=jnp.zeros(3)), params)
    with pytest.raises(TypeError, match=r"params\['w'\] must be floats; got int32"):
        add(dict(w=jnp.zeros(3)), dict(w=jnp.arange(3)))
