"""Test that a start and its done return the results of the unsplit exchange, and stay in one
program under every transform of JAX."""

import dataclasses
import functools
import inspect

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
import small_layer
from jax import lax
from jax.extend.core import Literal
from jax.interpreters import partial_eval
from small_layer import LAYOUT, OF_FLOATS, route_args

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange.dispatch_combine import DISPATCH
from jax_moe_a2a._src.exchange.record import Options

pytestmark = pytest.mark.exchanges(0)

RANKS = harness.SEVERAL
GROUP = harness.group_of(RANKS)
POLICIES = jax.checkpoint_policies
FORWARD_AND_BACKWARD = {"dispatch_start": 2, "combine_start": 2}


def split_layer(x, topk_weights, w, ids, group=GROUP, layout=LAYOUT):
    """Compute the layer with other work between each start and done."""
    inflight = ma.dispatch_start(x, ids, topk_weights, **route_args(group, layout))
    inflight, shared = ma.overlap(inflight, jnp.sin, x)
    recv = ma.dispatch_done(inflight)
    y = small_layer.experts(recv.rows, recv.row_offsets, w)
    inflight = ma.combine_start(y * recv.weights[:, None], recv.routing)
    inflight, shared = ma.overlap(inflight, lambda s: s * s, shared)
    return ma.combine_done(inflight) + shared


def whole_layer(x, topk_weights, w, ids, group=GROUP, layout=LAYOUT):
    return small_layer.layer_of(group, layout)(x, topk_weights, w, ids) + jnp.sin(x) ** 2


@functools.cache
def problem():
    floats, ids, _ = small_layer.arguments(RANKS)
    return jax.tree.map(jnp.asarray, (floats, ids, small_layer.directions(RANKS)))


FORMATTED = cases.Layout("formatted", tokens=6, top_k=3, local_experts=2, hidden=64)


@pytest.mark.exchanges(1 + 3, split=2)
@pytest.mark.parametrize("layout", (cases.PLAIN, cases.CUT), ids=lambda layout: layout.name)
def test_a_split_exchange_returns_the_bytes_of_the_whole_one(layout):
    (ids, x, topk_weights, y), _ = harness.exchange_inputs(cases.Case(layout, "skewed"), RANKS)

    def of_split(ids, x, topk_weights, y):
        inflight = ma.dispatch_start(x, ids, topk_weights, **route_args(GROUP, layout))
        recv = ma.dispatch_done(inflight)
        return {"recv": recv, "sum": ma.combine_done(ma.combine_start(y, recv.routing))}

    whole = harness.exchange_fn(layout, GROUP)
    actual, expected = (
        harness.on_each_rank(fn, harness.mesh_of(RANKS))(ids, x, topk_weights, y)
        for fn in (of_split, whole)
    )
    for path, own in jax.tree_util.tree_leaves_with_path(actual):
        leaf = dict(jax.tree_util.tree_leaves_with_path(expected))[path]
        harness.assert_same_bytes(own, leaf, str(path))


@pytest.mark.exchanges(9, split=4)
def test_a_format_has_the_second_derivatives_and_the_wire_dtype_of_the_whole_dispatch():
    layout = dataclasses.replace(FORMATTED, hidden=256)
    (x, topk_weights, _), ids, _ = small_layer.arguments(RANKS, layout=layout)
    fmt = ma.BlockwiseFp8()
    options = dict(wire_dtype=fmt, token_format=fmt, decode=True)
    options = harness.exchanging(route_args(GROUP, layout), options)

    def derivatives(dispatch):
        def of_one_rank(x, topk_weights, ids):
            def loss(x, topk_weights):
                recv = dispatch(x, ids, topk_weights, **options)
                return jnp.sum(jnp.sin(recv.rows)) + jnp.sum(recv.weights**2)

            gradient = jax.grad(loss, argnums=(0, 1))
            directions = jnp.ones_like(x), jnp.ones_like(topk_weights)
            return jax.jvp(gradient, (x, topk_weights), directions)

        return small_layer.compiled(small_layer.on_all_ranks(of_one_rank, check_vma=False))

    def of_split(*args, **options):
        return ma.dispatch_done(ma.dispatch_start(*args, **harness.exchanging(options)))

    actual, expected = (derivatives(fn)(x, topk_weights, ids) for fn in (of_split, ma.dispatch))
    small_layer.assert_same(actual, expected)
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(expected))


@pytest.mark.parametrize("name", ("dispatch", "combine"))
def test_a_start_has_the_parameters_of_the_whole_exchange(name):
    whole, start = (
        dict(inspect.signature(getattr(ma, which)).parameters) for which in (name, f"{name}_start")
    )
    whole.pop("replicated", None)  # nothing to split
    whole.pop("add", None)  # callers add it
    whole.pop("weights", None)  # callers multiply rows instead
    assert list(start.values()) == list(whole.values())


# Each transform below maps a layer of one rank's arrays to a function of all ranks' floats.


def outside(layer):
    return small_layer.value_and_grads(small_layer.on_all_ranks(layer), problem()[1])


def forward_over_reverse(layer):
    _, ids, directions = problem()
    grad = jax.grad(small_layer.loss_of(small_layer.on_all_ranks(layer), ids), OF_FLOATS)
    return lambda *floats: jax.jvp(grad, floats, directions)


def reverse_over_reverse(layer):
    grad = jax.grad(small_layer.loss_of(small_layer.on_all_ranks(layer), problem()[1]), OF_FLOATS)
    return jax.grad(lambda *floats: sum(jnp.sum(g * g) for g in grad(*floats)), OF_FLOATS)


def scanned(layer):
    _, ids, _ = problem()

    def of_one_rank(x, *args):
        layers = jax.checkpoint(layer)
        return lax.scan(lambda x, _: (x + layers(x, *args), None), x, length=2)[0]

    return jax.grad(small_layer.loss_of(small_layer.on_all_ranks(of_one_rank), ids), OF_FLOATS)


def in_a_branch(layer):
    _, ids, _ = problem()

    def of_one_rank(x, *args):
        always = lax.psum(1, GROUP.axis_name) > 0
        return lax.cond(always, lambda x: layer(x, *args), jnp.tanh, x)

    return jax.grad(small_layer.loss_of(small_layer.on_all_ranks(of_one_rank), ids), OF_FLOATS)


def batched(layer):
    _, ids, _ = problem()
    ids = jnp.stack([ids, ids[:, ::-1]], axis=1)

    def of_one_rank(x, topk_weights, w, ids):
        return jax.vmap(layer, in_axes=(None, None, None, 0))(x, topk_weights, w, ids)

    on_all = small_layer.on_all_ranks(of_one_rank)
    return jax.grad(lambda *floats: small_layer.loss(on_all(*floats, ids)), OF_FLOATS)


def emulated(layer):
    _, ids, _ = problem()
    of_one_rank = functools.partial(layer, group=harness.emulated_group(RANKS))
    on_all = jax.vmap(of_one_rank, axis_name=harness.AXIS)
    return jax.grad(small_layer.loss_of(on_all, ids), OF_FLOATS)


# For each transform: the starts in the split layer's jaxpr, and how many unsplit exchanges
# (including routes) and split exchanges run if the split layer and then the whole layer run.
TRANSFORMS = {
    outside: (FORWARD_AND_BACKWARD, 6, 4),
    forward_over_reverse: ({"dispatch_start": 4, "combine_start": 4}, 10, 8),
    reverse_over_reverse: ({"dispatch_start": 4, "combine_start": 4}, 10, 8),
    scanned: (dict(FORWARD_AND_BACKWARD, dispatch_start=3), 16, 10),
    in_a_branch: (FORWARD_AND_BACKWARD, 6, 4),
    batched: (FORWARD_AND_BACKWARD, 6, 4),
    emulated: (FORWARD_AND_BACKWARD, 0, 0),  # always on the portable path
}


@pytest.mark.exchanges(
    lambda transform: TRANSFORMS[transform][1], split=lambda transform: TRANSFORMS[transform][2]
)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.__name__)
def test_under_every_transform_a_split_layer_is_the_whole_one_and_every_done_has_its_start(
    transform,
):
    floats, _, _ = problem()
    jaxpr = jax.make_jaxpr(transform(split_layer))(*floats)
    assert pairs.num_pairs(jaxpr) == TRANSFORMS[transform][0]
    assert not {"dispatch", "combine", "weighted_combine"} & set(harness.count_primitives(jaxpr))
    actual, expected = (
        small_layer.compiled(transform(layer))(*floats) for layer in (split_layer, whole_layer)
    )
    small_layer.assert_close(actual, expected, tolerance=1e-4)


# On GPUs, XLA would fuse slices at multiples of 128 bytes with the call that reads or writes them.
# Worst-case rows grow with the square of the number of ranks.
NUM_LARGE = 128 if RANKS <= cases.MOST_RANKS else 32
LARGE = cases.Layout("large", tokens=NUM_LARGE, top_k=4, local_experts=2, hidden=64)


def sliced(layer):
    """Compute two micro-batches from slices of larger arrays, one after the other."""

    def of_one_rank(x, topk_weights, w, ids):
        parts = zip(*(jnp.split(array, 2) for array in (x, topk_weights, ids)))
        return jnp.concatenate([layer(part_x, weights, w, part) for part_x, weights, part in parts])

    return of_one_rank


def looped(layer):
    """Compute two micro-batches in a loop, which saves routings and rows for the backward pass."""

    def of_one_rank(x, topk_weights, w, ids):
        parts = [array.reshape(2, -1, array.shape[-1]) for array in (x, topk_weights, ids)]
        out = lax.map(lambda part: layer(part[0], part[1], w, part[2]), parts)
        return out.reshape(x.shape)

    return of_one_rank


@pytest.mark.exchanges(2, split=8)
@pytest.mark.parametrize("in_parts", (sliced, looped))
def test_micro_batches_of_larger_arrays_are_exchanged_right(in_parts):
    floats, ids, kept = jax.tree.map(jnp.asarray, small_layer.arguments(RANKS, layout=LARGE))

    def dense(x, topk_weights, w):
        return small_layer.dense_layer(x, topk_weights, w, ids, kept) + jnp.sin(x) ** 2

    on_all = small_layer.on_all_ranks(in_parts(functools.partial(split_layer, layout=LARGE)))
    actual, expected = (
        small_layer.compiled(small_layer.value_and_grads(fn, *others))(*floats)
        for fn, others in ((on_all, (ids,)), (dense, ()))
    )
    small_layer.assert_close(actual, expected, tolerance=1e-4)


# (policy, number of dispatch starts)
REMAT_POLICIES = {
    "nothing": (POLICIES.nothing_saveable, 3),
    "everything": (POLICIES.everything_saveable, 2),
    "routing": (POLICIES.save_only_these_names(ma.ROUTING_CHECKPOINT_NAME), 3),
    "starts": (lambda primitive, *_, **__: primitive.name.endswith("_start"), 3),
    "starts_and_ties": (lambda primitive, *_, **__: not primitive.name.endswith("_done"), 3),
    "dones": (lambda primitive, *_, **__: primitive.name.endswith("_done"), 2),
    "no_policy": (None, 3),
}


@pytest.mark.exchanges(
    lambda name: 6 if name == "starts_and_ties" else 0,
    split=lambda name: 5 if name == "starts_and_ties" else 0,
)
@pytest.mark.parametrize("name", REMAT_POLICIES)
def test_no_policy_of_remat_separates_a_done_from_its_start(name):
    policy, dispatches = REMAT_POLICIES[name]
    floats, _, _ = problem()
    program = outside(jax.checkpoint(split_layer, policy=policy))
    expected = dict(FORWARD_AND_BACKWARD, dispatch_start=dispatches)
    assert pairs.num_pairs(jax.make_jaxpr(program)(*floats)) == expected
    if name == "starts_and_ties":
        actual, whole = (small_layer.compiled(p)(*floats) for p in (program, outside(whole_layer)))
        small_layer.assert_close(actual, whole)


def test_integers_and_narrow_floats_travel_with_what_is_differentiated():
    """The backward pass sends nothing for integers and 8-bit floats."""

    def of_one_rank(x, ids):
        x = {"x": x, "position": jnp.arange(len(x)), "narrow": x.astype(jnp.float8_e4m3fn)}
        recv = ma.dispatch_done(ma.dispatch_start(x, ids, **route_args(GROUP)))
        return jnp.sin(recv.rows["x"]) * recv.rows["position"][:, None].astype(jnp.float32)

    (x, _, _), ids, _ = problem()
    jaxpr = jax.make_jaxpr(
        jax.grad(lambda x: small_layer.loss(small_layer.on_all_ranks(of_one_rank)(x, ids)))
    )(x)
    assert pairs.num_pairs(jaxpr) == {"dispatch_start": 1, "combine_start": 1}
    (back,) = small_layer.equations(jaxpr, "combine_start")
    assert small_layer.payload(back) == ([(LAYOUT.capacity, LAYOUT.hidden)], [])


def test_both_halves_move_all_leaves_where_only_one_has_a_gradient():
    def of_one_rank(x, other, ids):
        inflight = ma.dispatch_start([x, other], ids, **route_args(GROUP))
        inflight, other = ma.overlap(inflight, jnp.sin, other)
        rows, _ = ma.dispatch_done(inflight).rows
        return jnp.sum(jnp.sin(rows)) + jnp.sum(other)

    (x, _, _), ids, _ = problem()

    def total(x):
        return small_layer.on_all_ranks(of_one_rank)(x, problem()[0][0], ids).sum()

    for program in (jax.grad(total), lambda x: jax.jvp(total, (x,), (x,))):
        jaxpr = jax.make_jaxpr(program)(x)
        assert pairs.num_pairs(jaxpr)
        starts = [e for e in harness.equations(jaxpr) if e.primitive.name in pairs.STARTS]
        assert {len(small_layer.payload(e)[0]) for e in starts} == {2}


def test_a_done_is_batched_if_only_the_results_of_its_start_are():
    def of_one_rank(x, rows, ids, group):
        routing = ma.route(ids, **route_args(group)).arrays
        params = dict(num_leaves=1, num_choice_arrays=0, options=Options(), group=group)
        done = lambda rows: DISPATCH.done.bind([x, rows], routing, **params)[0]
        return jax.vmap(done)(rows)

    (x, _, _), ids, _ = problem()
    rows = np.arange(RANKS * 2 * LAYOUT.capacity * LAYOUT.hidden, dtype=np.float32)
    rows = rows.reshape(RANKS, 2, LAYOUT.capacity, LAYOUT.hidden)
    portable = harness.group_of(RANKS, implementation="portable")
    on_all = small_layer.on_all_ranks(functools.partial(of_one_rank, group=portable))
    small_layer.assert_same(small_layer.compiled(on_all)(x, rows, ids), rows)


def test_an_unused_exchange_is_neither_started_nor_done():
    def of_one_rank(x, topk_weights, w, ids):
        inflight = ma.dispatch_start(x, ids, topk_weights, **route_args(GROUP))
        inflight, beside = ma.overlap(inflight, jnp.sin, x)
        ma.dispatch_done(inflight)
        return beside

    floats, ids, _ = problem()
    closed = jax.make_jaxpr(small_layer.on_all_ranks(of_one_rank))(*floats, ids)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    assert set(harness.count_primitives(jaxpr)) == {"tie"}


def lies_between(eqn, jaxpr, start, done):
    def variables(atoms):
        return {atom for atom in atoms if not isinstance(atom, Literal)}

    behind, wanted = set(), set()
    for each in jaxpr.eqns:
        if each.primitive.name == f"moe_a2a_{start}" or behind & variables(each.invars):
            behind |= set(each.outvars)
    for each in reversed(jaxpr.eqns):
        if each.primitive.name == f"moe_a2a_{done}" or wanted & set(each.outvars):
            wanted |= variables(each.invars)
    return bool(behind & variables(eqn.invars)) and bool(wanted & set(eqn.outvars))


@pytest.mark.parametrize("is_tied", (True, False), ids=("tied", "untied"))
def test_overlap_puts_work_between_start_and_done_forward_and_backward(is_tied):
    """The work is lax.cumsum, whose transpose is a reverse running sum."""

    def of_one_rank(x, ids):
        inflight = ma.dispatch_start(x, ids, **route_args(GROUP))
        if is_tied:
            inflight, beside = ma.overlap(inflight, lax.cumsum, x)
        else:
            beside = lax.cumsum(x)
        return jnp.sum(ma.dispatch_done(inflight).rows ** 3) + jnp.sum(beside**2)

    (x, _, _), ids, _ = problem()

    def total(x):
        return small_layer.on_all_ranks(of_one_rank)(x, ids).sum()

    found = []
    for jaxpr in pairs.subjaxprs(jax.make_jaxpr(jax.grad(total))(x)):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "cumsum" and eqn.outvars[0].aval.dtype == jnp.float32:
                is_backward = eqn.params["reverse"]
                halves = ("combine" if is_backward else "dispatch") + "_start"
                ends = halves.replace("start", "done")
                found.append((is_backward, lies_between(eqn, jaxpr, halves, ends)))
    assert sorted(found) == [(False, is_tied), (True, is_tied)]


def done_twice(inflight, x):
    return ma.dispatch_done(inflight).rows, ma.dispatch_done(inflight).rows


def done_after_overlap_took_it(inflight, x):
    ma.overlap(inflight, jnp.sin, x)
    return ma.dispatch_done(inflight).rows


def out_of_cond(inflight, x):
    kept = []

    def branch(x):
        kept.append(ma.dispatch_start(x, jnp.zeros((len(x), 1), jnp.int32), **route_args(GROUP)))
        return x

    lax.cond(x[0, 0] > 0, branch, lambda x: x, x)
    return ma.dispatch_done(kept[0]).rows


def wrong_tokens(inflight, x):
    ma.dispatch_done(inflight)
    return ma.dispatch_start(x[1:], jnp.zeros((len(x), 1), jnp.int32), **route_args(GROUP))


ONCE = "inflight must be used once; dispatch_done got an InFlight that was"
OF_START = "inflight must be the result of combine_start; got InFlight"
CROSSES = "inflight must be used in the function that started it"
STAYS = "must stay in the function that started it"
MISUSES = {
    "twice": (done_twice, ValueError, ONCE),
    "after overlap": (done_after_overlap_took_it, ValueError, ONCE),
    "done of a dispatch": (lambda f, x: ma.combine_done(f), TypeError, OF_START),
    "done of a combine": (
        lambda f, x: ma.dispatch_done(ma.combine_start((recv := ma.dispatch_done(f)).rows, recv)),
        *(TypeError, "dispatch_start; got InFlight"),
    ),
    "overlap of an array": (
        *(lambda f, x: ma.overlap(x, jnp.sin, x), TypeError),
        "inflight must be an InFlight",
    ),
    "into scan": (
        lambda f, x: lax.scan(
            lambda c, _: (c + ma.dispatch_done(f).rows.sum(), None), x.sum(), length=2
        )[0],
        *(ValueError, CROSSES),
    ),
    "into cond": (
        lambda f, x: lax.cond(
            x[0, 0] > 0, lambda: ma.dispatch_done(f).rows, lambda: ma.dispatch_done(f).rows
        ),
        *(ValueError, CROSSES),
    ),
    "into checkpoint": (
        lambda f, x: jax.checkpoint(lambda: ma.dispatch_done(f).rows)(),
        *(ValueError, CROSSES),
    ),
    "by overlap into jit": (
        lambda f, x: jax.jit(lambda x: ma.overlap(f, jnp.sin, x)[1])(x),
        *(ValueError, CROSSES),
    ),
    "out of cond": (out_of_cond, ValueError, CROSSES),
    "carry": (lambda f, x: lax.scan(lambda c, _: (c, None), f, length=2), TypeError, STAYS),
    "result": (lambda f, x: f, TypeError, STAYS),
    "tokens": (wrong_tokens, ValueError, "x must hold arrays with leading axis num_tokens=6"),
    "rows": (
        lambda f, x: ma.combine_start(x[:, :1], ma.dispatch_done(f)),
        *(ValueError, "y must hold arrays with leading axis capacity=10"),
    ),
    "weights": (
        lambda f, x: ma.combine_start(x, dataclasses.replace(ma.dispatch_done(f), weights=x[:, 0])),
        *(ValueError, "recv must have no weights in combine_start; got weights float32.*routing"),
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_of_what_is_in_flight_is_refused(misuse):
    use, error, message = MISUSES[misuse]

    def of_one_rank(x, ids):
        return use(ma.dispatch_start(x, ids, **route_args(GROUP)), x)

    (x, _, _), ids, _ = problem()
    with pytest.raises(error, match=message):
        jax.make_jaxpr(small_layer.on_all_ranks(of_one_rank))(x, ids)


@pytest.mark.parametrize(
    "use",
    [
        lambda f, x: jax.grad(lambda x: jnp.sum(ma.dispatch_done(f).rows) * jnp.sum(x))(x),
        lambda f, x: jax.vmap(lambda x: ma.dispatch_done(f).rows.sum() + x)(x),
        lambda f, x: jax.vjp(lambda x: ma.dispatch_done(f).rows.sum() + x, x)[0],
    ],
    ids=("grad", "vmap", "vjp"),
)
def test_what_was_started_outside_a_derivative_or_a_batch_may_be_done_inside(use):
    def of_one_rank(x, ids):
        return use(ma.dispatch_start(x, ids, **route_args(GROUP)), x)

    (x, _, _), ids, _ = problem()
    jaxpr = jax.make_jaxpr(small_layer.on_all_ranks(of_one_rank))(x, ids)
    assert pairs.num_pairs(jaxpr) == {"dispatch_start": 1}


def test_start_and_done_work_outside_jit_on_the_portable_path():
    group = harness.emulated_group(2)
    x, ids = jnp.ones((2, 3, 4)), jnp.zeros((2, 3, 1), jnp.int32)

    def on_rank(x, ids):
        recv = ma.dispatch_done(ma.dispatch_start(x, ids, group=group, num_experts=2))
        return ma.combine_done(ma.combine_start(recv.rows, recv))

    small_layer.assert_same(jax.vmap(on_rank, axis_name=harness.AXIS)(x, ids), x)
