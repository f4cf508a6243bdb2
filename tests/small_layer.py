"""Define a small expert layer that compiles fast, and a dense layer with equal results.

Expert e maps a row r to tanh(r * w[e]). The arrays of one rank are x [T, H], topk_weights [T, K], w
[L, H] and ids [T, K].
"""

import functools
import typing

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from dense_layer import experts_of

import jax_moe_a2a as ma

# With the ids of `arguments`, some choices are masked, some are dropped, and some are repeated.
LAYOUT = cases.Layout(
    "small", tokens=6, top_k=3, local_experts=2, capacity=10, alignment=4, hidden=4
)


compiled = functools.partial(harness.jit, compiler_options=harness.QUICKLY)


def route_args(group, layout=LAYOUT):
    return layout.route_args(group)


def by_ids(x, ids, weights, group, layout, **options):
    return ma.dispatch(x, ids, weights, **harness.exchanging(route_args(group, layout), options))


def by_routing(x, ids, weights, group, layout, **options):
    return ma.dispatch(
        x, ma.route(ids, **route_args(group, layout)), weights, **harness.exchanging(options)
    )


def by_halves(x, ids, weights, group, layout, **options):
    started = ma.dispatch_start(
        x, ids, weights, **harness.exchanging(route_args(group, layout), options)
    )
    return ma.dispatch_done(started)


DISPATCHES = dict(ids=by_ids, routing=by_routing, halves=by_halves)


def experts(rows, row_offsets, w):
    row = jnp.arange(rows.shape[0], dtype=jnp.int32)
    expert = (row[:, None] >= row_offsets[None, 1:-1]).sum(axis=1)
    return jnp.tanh(rows * w[expert])


def layer_of(group, layout=LAYOUT):

    def layer(x, topk_weights, w, ids):
        recv = ma.dispatch(x, ids, topk_weights, **route_args(group, layout))
        return ma.combine(experts(recv.rows, recv.row_offsets, w), recv)

    return layer


def shapes_of_moe(layout, width, intermediate):
    """Return the shapes of one rank's float arrays in `moe_layer`; `width` is the number of columns
    of `w_in`."""
    experts = layout.local_experts
    return (
        (layout.tokens, layout.hidden),
        (layout.tokens, layout.top_k),
        (experts, layout.hidden, width),
        (experts, intermediate, layout.hidden),
        (experts, width),
        (experts, layout.hidden),
    )


def moe_layer(*args, activation=None, change=None, layout=LAYOUT, group=None, **options):
    """Call `ma.moe_mlp` on one rank. `args` are the arrays of `shapes_of_moe`, then ids; `change`
    changes the `ma.Experts`."""
    x, topk_weights, *arrays, ids = args
    of_layout = route_args(group or harness.group_of(harness.SEVERAL), layout)
    experts = experts_of(*arrays, activation=activation)
    experts = change(experts) if change else experts
    choices = ma.RouterChoices(ids, topk_weights)
    return ma.moe_mlp(x, choices, experts, **harness.exchanging(of_layout, options))


def dense_layer(x, topk_weights, w, ids, kept):
    w_of_choice = w.reshape(-1, w.shape[-1])[jnp.clip(ids, 0, w.shape[0] * w.shape[1] - 1)]
    weights = jnp.where(kept, topk_weights, 0)[..., None]
    return jnp.sum(weights * jnp.tanh(x[:, :, None] * w_of_choice), axis=2)


class Arguments(typing.NamedTuple):
    """The arguments of `dense_layer` for all ranks."""

    floats: tuple  # x [R, T, H], topk_weights [R, T, K], w [R, L, H]
    ids: np.ndarray  # [R, T, K]
    kept: np.ndarray  # [R, T, K]


def arguments(ranks, seed=0, dtype="float32", layout=LAYOUT):
    rng = np.random.default_rng([seed, ranks])
    ids = cases.skewed(rng, ranks, layout)
    ids = np.where(rng.random(ids.shape) < 0.2, np.int32(-1), ids)
    x = cases.normal(rng, (ranks, layout.tokens, layout.hidden), dtype)
    topk_weights = cases.normal(rng, ids.shape, dtype)
    w = cases.normal(rng, (ranks, layout.local_experts, layout.hidden), dtype)
    return Arguments((x, topk_weights, w), ids, kept_choices(ids, layout))


def kept_choices(ids, layout=LAYOUT):
    return routing_of(ids, layout).choice_row >= 0


def routing_of(ids, layout=LAYOUT):
    ranks = len(ids)
    return oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)


def expected_load(ids, layout):
    """Return the arrays of an `ExpertLoad`, in the order of its fields."""
    experts, routing = layout.num_experts(len(ids)), routing_of(ids, layout)
    rows = np.zeros(experts, np.int32)
    for source, token, k, _, _ in oracle.choices(routing):
        rows[ids[source, token, k]] += 1
    wanted = np.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts).astype(np.int32)
    assert wanted.sum() == routing.num_rows.sum() + routing.num_dropped.sum()
    return rows, routing.num_rows, routing.num_dropped, wanted, routing.num_invalid


def directions(ranks, seed=100):
    return arguments(ranks, seed).floats


def stacked(*trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


on_all_ranks = harness.over_ranks


def layer_of_all_ranks(ranks=harness.SEVERAL, layout=LAYOUT, **options):
    group = harness.group_of(ranks)
    return on_all_ranks(layer_of(group, layout), group.mesh, **options)


def loss(out):
    """Return a scalar that has nonzero derivatives of every order."""
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


def loss_of(fn, *others):
    return lambda *floats: loss(fn(*floats, *others))


def value_and_grads(fn, *others):
    """Return a function: floats -> (fn(*floats, *others), gradients of `loss` of this result)."""

    def of(*floats):
        def value(*floats):
            out = fn(*floats, *others)
            return loss(out), out

        grads, out = jax.grad(value, OF_FLOATS, has_aux=True)(*floats)
        return out, grads

    return of


@compiled
def dense_value_and_grads(floats, ids, kept):
    return value_and_grads(dense_layer, ids, kept)(*floats)


OF_FLOATS = (0, 1, 2)
NAMES = ("x", "topk_weights", "w")


def assert_close(actual, expected, what="", tolerance=2e-5):
    """The default tolerance is for float32 numbers near 1."""
    actual, expected = map(jax.tree.leaves, harness.numpy_of((actual, expected)))
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected)):
        np.testing.assert_allclose(
            np.asarray(a, np.float64),
            np.asarray(e, np.float64),
            rtol=tolerance,
            atol=tolerance,
            err_msg=f"{what} leaf {i}",
        )


def assert_same(actual, expected, what=""):
    """Assert that all leaves have equal dtypes, shapes and bits.

    On GPUs, float32 and float64 leaves may differ by a few roundings, because XLA's fusions and
    orders of sums depend on the program.
    """
    actual, expected = map(jax.tree.leaves, harness.numpy_of((actual, expected)))
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected)):
        where = f"{what} leaf {i}"
        if not (cases.ON_GPU and e.dtype in (np.float32, np.float64)):
            harness.assert_same_bytes(a, e, where)
            continue
        assert a.dtype == e.dtype, where
        largest = np.max(np.abs(e), initial=0, where=np.isfinite(e))
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5 * largest, err_msg=where)


def counts(fn, *args):
    return harness.count_primitives(jax.make_jaxpr(fn)(*args))


def equations(jaxpr, name):
    return [eqn for eqn in harness.equations(jaxpr) if eqn.primitive.name == f"moe_a2a_{name}"]


def shapes_of_one_rank(eqn):
    lead = int(eqn.params["emulated"])
    return [var.aval.shape[lead:] for var in eqn.invars]


def payload(eqn):
    """Return the shapes of an exchange's leaves and choice arrays, or the shapes of the rows and
    weights of a weighted dispatch."""
    num_leaves, num_choice_arrays = eqn.params["num_leaves"], eqn.params["num_choice_arrays"]
    shapes = shapes_of_one_rank(eqn)
    if eqn.primitive.name in ("moe_a2a_routed_dispatch", "moe_a2a_weighted_dispatch"):
        shapes = shapes[1:]  # without the first operand: ids, or the dispatched array
    return shapes[:num_leaves], shapes[num_leaves : num_leaves + num_choice_arrays]
