"""Compare combine's argument `add` with the oracle: exactly, or within the slack of
`oracle.combine` for weighted sums."""

import functools

import cases
import format_oracle
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.interpreters import partial_eval

import jax_moe_a2a as ma

RANKS = harness.SEVERAL
FORMATS = dict(blockwise=ma.BlockwiseFp8(), mx=ma.MxFp8(), nv=ma.NvFp4(global_scale=0.0625))


def combine(group, layout, ids, y, weights, addend, wire_dtype=None):
    routing = ma.route(ids, **layout.route_args(group))
    return ma.combine(y, routing, weights=weights, wire_dtype=wire_dtype, add=addend)


@functools.cache
def program(layout, ranks, wire_dtype=None, weighted=True):
    """Return a program (ids, y, weights, addend) -> (sums, weighted sums)."""
    group = harness.group_of(ranks)

    def both(ids, y, weights, addend):
        of = functools.partial(combine, group, layout, ids, y, wire_dtype=wire_dtype)
        return [of(None, addend), of(weights, addend)] if weighted else [of(None, addend)]

    mesh = harness.mesh_of(ranks)
    return harness.on_each_rank(both, mesh, exchanges=(2 + weighted) * layout.has_rows(ranks))


def inputs(case, ranks, dtype="bfloat16", trailing=None, seed=0):
    """Return the arguments of `program` and the routing; rows without a token are NaN."""
    layout = case.layout
    rng = np.random.default_rng([seed, ranks, layout.tokens])
    ids = case.ids(ranks, seed)
    routing = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)
    trailing = (layout.hidden,) if trailing is None else trailing
    y = cases.normal(rng, (ranks, layout.rows(ranks), *trailing), dtype)
    weights = cases.normal(rng, y.shape[:2], "float32")
    y[routing.row_token < 0] = np.nan
    weights[routing.row_token < 0] = np.nan
    addend = cases.normal(rng, (ranks, layout.tokens, *trailing), dtype)
    return (ids, y, weights, addend), routing


def assert_adds(sums, y, weights, addend, routing, wire_dtype=None, what=""):
    for actual, of_rows in zip(sums, (None, weights), strict=False):
        expected = oracle.combine(y, routing, of_rows, wire_dtype, addend)
        harness.assert_sums_agree(actual, *expected, what)


# One routing is enough, because the addition does not depend on it.
LAYOUTS = ("plain", "alignment_8_capacity_19", "capacity_0", "no_tokens", "top_32", "many_tokens")
CASES = [cases.Case(layout, "masked") for layout in cases.LAYOUTS if layout.name in LAYOUTS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_addend_is_added_to_the_sums_of_every_layout(case):
    args, routing = inputs(case, RANKS)
    assert_adds(program(case.layout, RANKS)(*args), *args[1:], routing)


# Kernels have separate code for rows of 16-byte words, rows with a partial word, and one element.
@pytest.mark.parametrize(
    "trailing", ((6, 8), (32,), (33,), ())[: None if harness.ON_GPU else 1], ids=str
)
@pytest.mark.parametrize("wire_dtype", (None, "float32"))
@pytest.mark.parametrize("dtype", cases.SUMMED_DTYPES)
def test_every_dtype_and_wire_dtype_rounds_once(dtype, wire_dtype, trailing):
    for routing_name in ("skewed", "masked_tokens"):
        case = cases.Case(cases.CUT, routing_name)
        args, routing = inputs(case, RANKS, dtype, trailing)
        wire = cases.dtype(wire_dtype or dtype)
        sums = program(case.layout, RANKS, wire_dtype)(*args)
        assert_adds(sums, *args[1:], routing, wire, routing_name)


@pytest.mark.parametrize("name, dtype", list(zip(FORMATS, cases.SUMMED_DTYPES)))
def test_partial_sums_may_travel_in_a_format(name, dtype):
    """If a format represents all rows exactly, partial sums in this format equal the oracle's."""
    fmt = FORMATS[name]
    layout = cases.Layout("format", tokens=9, top_k=2, local_experts=2, capacity=14)
    trailing = (3 * fmt.group_size,)
    for routing_name in ("skewed", "masked_tokens"):
        case = cases.Case(layout, routing_name)
        (ids, y, _, addend), routing = inputs(case, RANKS, dtype, trailing)
        rng = np.random.default_rng(1)
        y = rng.integers(-1, 2, y.shape).astype(y.dtype)
        y[..., :: fmt.group_size] = 6 / 16 if name == "nv" else 1
        y[routing.row_token < 0] = np.nan
        ones = np.ones(y.shape[:2], np.float32)

        def coded(partial, fmt=fmt):
            found = format_oracle.decode(fmt, *format_oracle.encode(fmt, partial), "float32")
            return found.reshape(partial.shape)

        for actual in program(layout, RANKS, fmt)(ids, y, ones, addend):
            expected = oracle.combine(y, routing, None, coded, addend)
            harness.assert_sums_agree(actual, *expected, routing_name)


def test_the_addend_is_added_last_and_rounded_with_the_sum():
    """In float32, 1 - big + big is 0, but big - big + 1 is 1."""
    layout = cases.Layout("last", tokens=1, top_k=2, local_experts=2)
    ids = np.broadcast_to(np.array([0, 1], np.int32), (RANKS, 1, 2)).copy()
    expected = oracle.route(ids, layout.num_experts(RANKS), layout.rows(RANKS))

    def sums(first, second, addend, dtype, wire_dtype=None):
        y = np.zeros((RANKS, expected.capacity, 1), cases.dtype(dtype))
        for *_, k, rank, row in oracle.choices(expected):
            y[rank, row] = (first, second)[k]
        addend = np.full((RANKS, 1, 1), addend, y.dtype)
        (out,) = program(layout, RANKS, wire_dtype, weighted=False)(ids, y, None, addend)
        np.testing.assert_array_equal(out, oracle.combine(y, expected, None, wire_dtype, addend)[0])
        return out.astype(np.float32)

    big = 4.0 / oracle.epsilon("float32")
    np.testing.assert_array_equal(sums(big, -big, 1.0, "float32"), 1)
    np.testing.assert_array_equal(sums(1.0, -big, big, "float32"), 0)
    # 1 + 2^-8 + 2^-16 rounds up to 1 + 2^-7. Without 2^-16, the sum would round down to 1.
    np.testing.assert_array_equal(sums(2.0**-8, 2.0**-16, 1.0, "bfloat16", "float32"), 1 + 2.0**-7)


def test_a_pytree_has_an_addend_for_each_of_its_arrays():
    case, ranks = cases.Case(cases.TIGHT, "skewed"), harness.FEW
    group = harness.group_of(ranks)
    shapes = dict(a=("float32", ()), b=("bfloat16", (33,)), c=("float32", (2, 16)))
    y, addends = {}, {}
    for name, (dtype, trailing) in shapes.items():
        (ids, y[name], _, addends[name]), routing = inputs(case, ranks, dtype, trailing)
    fn = lambda ids, y, addends: combine(group, case.layout, ids, y, None, addends)
    out = harness.on_each_rank(fn, group.mesh, exchanges=1 + 2)(ids, y, addends)
    for name, actual in out.items():
        expected = oracle.combine(y[name], routing, None, None, addends[name])
        harness.assert_sums_agree(actual, *expected, name)


@pytest.mark.exchanges(0)
def test_a_constant_addend_does_not_change_other_tangents():
    group, rng = harness.emulated_group(2), np.random.default_rng(0)
    ids = np.array([[[0], [1]], [[1], [1]]], np.int32)
    y, d_y = rng.normal(size=(2, 2, 4, 8)).astype(np.float32)
    addend, constant, d_addend = rng.normal(size=(3, 2, 2, 8)).astype(np.float32)

    def tangents(ids, y, d_y, addend, constant, d_addend):
        routing = ma.route(ids, group=group, num_experts=2)
        without = ma.combine(d_y, routing)
        fn = lambda y, addend: ma.combine([y, y], routing, add=[addend, constant])
        return jax.jvp(fn, (y, addend), (d_y, d_addend))[1], [without + d_addend, without]

    on_ranks = jax.jit(jax.vmap(tangents, axis_name=harness.AXIS))
    found, expected = on_ranks(ids, y, d_y, addend, constant, d_addend)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("weighted", (False, True), ids=("sum", "weighted"))
def test_gradients_and_tangents_of_a_combine_are_those_of_the_oracle(weighted, dtype):
    """Rows without a token, which are NaN, affect no tangent or gradient."""
    group = harness.group_of(RANKS)

    def on_rank(floats, directions, g, ids):
        def fn(y, addend, weights=None):
            return combine(group, cases.CUT, ids, y, weights, addend)

        tangent = jax.jvp(fn, floats, directions)[1]
        return tangent, jax.vjp(fn, *floats)[1](g)

    # The route, the combine, its tangent and its transpose are one exchange each.
    run = harness.on_each_rank(on_rank, group.mesh, exchanges=1 + 3)
    for name in ("skewed", "masked", "repeated", "first_expert_only"):
        case = cases.Case(cases.CUT, name)
        (ids, y, weights, addend), routing = inputs(case, RANKS, dtype)
        (_, d_y, d_weights, d_addend), _ = inputs(case, RANKS, dtype, seed=1)
        d_y[routing.row_token < 0], d_weights[routing.row_token < 0] = np.nan, np.nan
        g = cases.normal(np.random.default_rng(2), addend.shape, dtype)
        floats, directions = (y, addend, weights), (d_y, d_addend, d_weights)
        given = 2 + weighted
        tangent, found = run(floats[:given], directions[:given], g, ids)
        pairs = [(d_y, weights), (y, d_weights)] if weighted else [(d_y, None)]
        expected = oracle.combine_pairs(pairs, routing, None, d_addend)
        harness.assert_sums_agree(tangent, *expected, name)
        harness.assert_same_bytes(found[1], g, name)
        if not weighted:
            harness.assert_same_bytes(found[0], oracle.dispatch(g, routing), name)
            continue
        # An element of `of_weights` is a sum of 7 products, in any order.
        of_y, of_weights = oracle.combine_transpose(g, y, routing, weights)
        harness.assert_same_bytes(found[0], of_y, name)
        assert found[2].dtype == np.float32
        np.testing.assert_allclose(found[2], of_weights, rtol=1e-5, atol=1e-4, err_msg=name)


def traced(fn, *avals):
    """Trace `fn` for two ranks, and remove dead code. Return the counts of primitives, and each
    exchange's number of addends."""
    stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), avals)
    jaxpr = jax.make_jaxpr(jax.vmap(fn, axis_name=harness.AXIS))(*stacked)
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    options = [eqn.params.get("options") for eqn in harness.equations(jaxpr)]
    return harness.count_primitives(jaxpr), [of.num_addends for of in options if of is not None]


def arrays(*trailing):
    layout = cases.CUT
    shapes = (layout.capacity, *trailing), (layout.capacity,), (layout.tokens, *trailing)
    ids = jax.ShapeDtypeStruct((layout.tokens, layout.top_k), jnp.int32)
    return ids, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("weighted", (False, True), ids=("sum", "weighted"))
def test_only_what_has_a_tangent_is_exchanged(weighted):
    group = harness.emulated_group(2)
    name = "weighted_combine" if weighted else "combine"

    def tangents(of, ids, y, weights, addend):
        def fn(y, addend):
            return combine(group, cases.CUT, ids, y, weights if weighted else None, addend)

        args = {"y": y, "addend": addend}
        moved = {name: args[name] for name in of}
        return jax.jvp(lambda moved: fn(**(args | moved)), (moved,), (moved,))[1]

    counts = lambda *of: traced(functools.partial(tangents, of), *arrays(4))
    assert counts("y", "addend") == ({"route": 1, name: 1}, [1])
    assert counts("y") == ({"route": 1, name: 1}, [0])
    assert counts("addend") == ({}, [])


@pytest.mark.parametrize("weighted", (False, True), ids=("sum", "weighted"))
@pytest.mark.parametrize("batched", ("y", "addend", "all"))
def test_a_batch_is_one_exchange(batched, weighted):
    case, batch = cases.Case(cases.CUT, "masked"), 3
    group = harness.group_of(RANKS)
    elements = [inputs(case, RANKS, trailing=(8,), seed=seed) for seed in range(batch)]
    axes = [0 if batched in (name, "all") else None for name in ("ids", "y", "addend")]
    in_axes = (axes[0], axes[1], axes[0], axes[2])  # weights are batched if ids are
    args = [
        np.stack([e[0][i] for e in elements], axis=1) if axis == 0 else elements[0][0][i]
        for i, axis in enumerate(in_axes)
    ]

    def on_rank(ids, y, weights, addend):
        fn = lambda ids, y, weights, addend: combine(
            group, case.layout, ids, y, weights if weighted else None, addend
        )
        return jax.vmap(fn, in_axes)(ids, y, weights, addend)

    out = harness.on_each_rank(on_rank, group.mesh, exchanges=2)(*args)
    for b in range(batch):
        ids, y, weights, addend = (
            x[:, b] if axis == 0 else x for x, axis in zip(args, in_axes, strict=True)
        )
        routing = elements[b if axes[0] == 0 else 0][1]
        expected = oracle.combine(y, routing, weights if weighted else None, None, addend)
        harness.assert_sums_agree(out[:, b], *expected, f"element {b}")
