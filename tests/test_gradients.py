"""Gradients against the dense layer on one device, finite differences, and the oracle's sums."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jax_moe_a2a as ma

LAYER = cases.Layout("layer", tokens=6, top_k=3, local_experts=2, alignment=4, hidden=5)
CUT_LAYER = cases.Layout(
    "cut_layer", tokens=6, top_k=3, local_experts=2, capacity=9, alignment=4, hidden=5
)
WIDTH = 4


def layer_of_one_rank(layout, group, x, ids, topk_weights, w_in, w_out):
    recv = ma.dispatch(x, ids, topk_weights, **layout.route_args(group))
    hidden = jnp.tanh(jax.lax.ragged_dot(recv.rows, w_in, recv.group_sizes))
    return ma.combine(jax.lax.ragged_dot(hidden, w_out, recv.group_sizes), recv)


def layer_of_all_ranks(layout, ranks):
    """Return the layer as a function of all ranks' arrays: x [R, T, H], w_in [R, L, H, F]."""
    group = harness.group_of(ranks)
    return harness.over_ranks(functools.partial(layer_of_one_rank, layout, group), group.mesh)


def dense_layer(x, ids, topk_weights, w_in, w_out, kept):
    """Compute the same function on one device: every expert on every token, then a choice."""
    hidden, width = w_in.shape[-2:]
    w_in, w_out = w_in.reshape(-1, hidden, width), w_out.reshape(-1, width, hidden)
    every = jnp.einsum(
        "etf,efh->teh", jnp.tanh(jnp.einsum("th,ehf->etf", x.reshape(-1, hidden), w_in)), w_out
    )
    chosen = jax.nn.one_hot(ids.reshape(-1, ids.shape[-1]), len(w_in), dtype=x.dtype)
    weights = jnp.where(kept, topk_weights, 0).reshape(-1, ids.shape[-1])
    return jnp.einsum("tk,tke,teh->th", weights, chosen, every).reshape(x.shape)


def layer_arguments(layout, routing, ranks, dtype, seed=0):
    """Return ((x, topk_weights, w_in, w_out), ids, kept, cotangent or direction of the result)."""
    rng = np.random.default_rng([seed, ranks])
    ids = cases.Case(layout, routing).ids(ranks, seed)
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)
    local = (ranks, layout.local_experts)
    x = cases.normal(rng, (ranks, layout.tokens, layout.hidden), dtype)
    topk_weights = cases.normal(rng, ids.shape, dtype)
    w_in = cases.normal(rng, (*local, layout.hidden, WIDTH), dtype)
    w_out = cases.normal(rng, (*local, WIDTH, layout.hidden), dtype)
    cotangent = cases.normal(rng, x.shape, dtype)
    return (x, topk_weights, w_in, w_out), ids, expected.choice_row >= 0, cotangent


@functools.cache
def layer_program(layout, ranks):
    """Return a jitted (arguments, directions, ids, cotangent) -> value, tangent, gradients."""
    layer = layer_of_all_ranks(layout, ranks)

    def program(args, directions, ids, cotangent):
        def of(x, topk_weights, w_in, w_out):
            return layer(x, ids, topk_weights, w_in, w_out)

        value, tangent = jax.jvp(of, args, directions)
        return value, tangent, jax.grad(lambda *a: jnp.vdot(of(*a), cotangent), (0, 1, 2, 3))(*args)

    return harness.jit(program, exchanges=6)  # two each: value, tangent, gradients


@jax.jit
def dense_program(args, directions, ids, kept, cotangent):
    def of(x, topk_weights, w_in, w_out):
        return dense_layer(x, ids, topk_weights, w_in, w_out, kept)

    value, tangent = jax.jvp(of, args, directions)
    return value, tangent, jax.grad(lambda *a: jnp.vdot(of(*a), cotangent), (0, 1, 2, 3))(*args)


@pytest.mark.parametrize(
    "ranks, layout",
    [(harness.FEW, CUT_LAYER), (harness.MANY, CUT_LAYER), (harness.SEVERAL, LAYER)],
    ids=lambda value: getattr(value, "name", None),
)
def test_gradients_and_tangents_equal_those_of_the_dense_layer(ranks, layout):
    """The gradients of x, router weights and experts; masked, invalid, repeated and dropped choices
    too."""
    with jax.default_matmul_precision("highest"):
        for routing in (
            "uniform",
            "masked",
            "repeated",
            "first_expert_only",
            "invalid",
            "all_masked",
        ):
            args, ids, kept, g = layer_arguments(layout, routing, ranks, "float32")
            directions = layer_arguments(layout, routing, ranks, "float32", seed=1)[0]
            actual = layer_program(layout, ranks)(args, directions, ids, g)
            expected = dense_program(args, directions, ids, kept, g)
            names = ("value", "tangent", ("x", "topk_weights", "w_in", "w_out"))
            for name, a, e in zip(*map(jax.tree.leaves, (names, actual, expected)), strict=True):
                np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-4, err_msg=f"{routing}: {name}")


def test_gradients_equal_finite_differences_in_float64():
    """Central differences along random directions, for the value itself and for the gradient."""
    ranks, layout, step = harness.SEVERAL, CUT_LAYER, 1e-5
    layer = layer_of_all_ranks(layout, ranks)
    with jax.enable_x64(True):
        # Sums of float64 are portable: tokens and gradients are dispatched.
        @functools.partial(harness.jit, exchanges=2)
        def loss_and_grad(args, ids, g):
            def loss(x, topk_weights, w_in, w_out):
                return jnp.vdot(jnp.sin(layer(x, ids, topk_weights, w_in, w_out)), g)

            return jax.value_and_grad(loss, (0, 1, 2, 3))(*args)

        for routing in ("uniform", "masked", "repeated", "invalid"):
            args, ids, _, g = layer_arguments(layout, routing, ranks, "float64")
            assert loss_and_grad(args, ids, g)[0].dtype == np.float64
            grads = loss_and_grad(args, ids, g)[1]
            for i, name in enumerate(("x", "topk_weights", "w_in", "w_out")):
                direction = np.random.default_rng(i).standard_normal(args[i].shape)
                ends = []
                for sign in (1, -1):
                    moved = [*args]
                    moved[i] = args[i] + sign * step * direction
                    ends.append(loss_and_grad(tuple(moved), ids, g)[0])
                difference = (ends[0] - ends[1]) / (2 * step)
                np.testing.assert_allclose(
                    np.vdot(grads[i], direction),
                    difference,
                    rtol=1e-6,
                    atol=1e-8,
                    err_msg=f"{routing}: {name}",
                )


@pytest.mark.exchanges(7)
def test_second_derivatives_equal_those_of_the_dense_layer():
    """Forward over reverse: the Hessian times a direction."""
    ranks, layout = harness.SEVERAL, CUT_LAYER
    layer = layer_of_all_ranks(layout, ranks)
    args, ids, kept, g = layer_arguments(layout, "masked", ranks, "float32")
    directions = layer_arguments(layout, "masked", ranks, "float32", seed=1)[0]

    def hessian_times(of):
        def loss(x, topk_weights, w_in, w_out):
            return jnp.vdot(jnp.sin(of(x, topk_weights, w_in, w_out)), g)

        grad = jax.grad(loss, (0, 1, 2, 3))
        return harness.jit(lambda args, directions: jax.jvp(grad, args, directions)[1])(
            args, directions
        )

    with jax.default_matmul_precision("highest"):
        actual = hessian_times(lambda x, w, *experts: layer(x, ids, w, *experts))
        expected = hessian_times(lambda x, w, *experts: dense_layer(x, ids, w, *experts, kept))
    for name, a, e in zip(("x", "topk_weights", "w_in", "w_out"), actual, expected):
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-3, err_msg=name)


def transpose_of_dispatch(layout, ranks, wire_dtype):
    """Return a function (ids, x, topk_weights, cotangents of rows and of weights) -> cotangents of
    x and topk_weights."""
    group = harness.group_of(ranks)

    def transposed(ids, x, topk_weights, ct_rows, ct_weights):
        def dispatch(x, topk_weights):
            recv = ma.dispatch(
                x, ids, topk_weights, **layout.route_args(group), wire_dtype=wire_dtype
            )
            return recv.rows, recv.weights

        return jax.vjp(dispatch, x, topk_weights)[1]((ct_rows, ct_weights))

    # A combine for each of the three dtypes; what is dispatched is not used.
    return harness.on_each_rank(transposed, harness.mesh_of(ranks), exchanges=4)


@pytest.mark.parametrize(
    "layout, wire_dtype",
    [(cases.PADDED, None), (cases.PADDED, "float32"), (cases.CUT, None)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_gradient_of_dispatch_sums_as_combine_does(layout, wire_dtype):
    """Exactly the oracle's sum; NaN cotangents of rows without a token reach nothing."""
    ranks = harness.SEVERAL
    program = transpose_of_dispatch(layout, ranks, wire_dtype)
    rng = np.random.default_rng(0)
    tokens, rows = (ranks, layout.tokens, 7), (ranks, layout.rows(ranks), 7)
    for routing in ("skewed", "masked", "repeated", "first_expert_only"):
        (ids, _, weights, _), expected = harness.exchange_inputs(cases.Case(layout, routing), ranks)
        x = {name: cases.normal(rng, tokens, name) for name in cases.SUMMED_DTYPES}
        ct_rows = {name: cases.normal(rng, rows, name) for name in cases.SUMMED_DTYPES}
        ct_weights = cases.normal(rng, (ranks, layout.rows(ranks)), "float32")
        for cotangent in (*ct_rows.values(), ct_weights):
            cotangent[expected.row_token < 0] = np.nan
        ct_x, ct_topk = program(ids, x, weights, ct_rows, ct_weights)
        for name, rows_of in ct_rows.items():
            wire = cases.dtype(wire_dtype or name)
            sums = oracle.combine(rows_of, expected, None, wire)
            harness.assert_sums_agree(ct_x[name], *sums, f"{routing}: {name}")
        back = oracle.combine_choices(ct_weights, expected)
        harness.assert_same_bytes(ct_topk, back, routing)


@pytest.mark.exchanges(8)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_the_gradient_of_a_weighted_combine_is_exact(dtype):
    """dy = w * G rounded once, dw = <y, G> in float32, zero where a row carries no token, whatever
    lies there.
    """
    layout, ranks = cases.CUT, harness.SEVERAL
    group = harness.group_of(ranks)

    def transposed(ids, y, weights, g):
        routing = ma.route(ids, **layout.route_args(group))
        return jax.vjp(lambda y, w: ma.combine(y, routing, weights=w), y, weights)[1](g)

    program = harness.on_each_rank(transposed, harness.mesh_of(ranks))
    rng = np.random.default_rng(0)
    for routing in ("skewed", "masked", "repeated", "first_expert_only"):
        ids = cases.Case(layout, routing).ids(ranks)
        expected = oracle.route(ids, layout.num_experts(ranks), layout.capacity, layout.alignment)
        y = cases.normal(rng, (ranks, layout.capacity, 33), dtype)
        weights = cases.normal(rng, (ranks, layout.capacity), "float32")
        y[expected.row_token < 0] = np.nan
        weights[expected.row_token < 0] = np.nan
        g = cases.normal(rng, (ranks, layout.tokens, 33), dtype)
        ct_y, ct_weights = program(ids, y, weights, g)
        expected_y, expected_weights = oracle.combine_transpose(g, y, expected, weights)
        # One product, one rounding: the same value everywhere (-0 may be 0).
        np.testing.assert_array_equal(
            ct_y.astype(np.float32), expected_y.astype(np.float32), err_msg=routing
        )
        assert ct_weights.dtype == np.float32
        # A sum of 33 products in float32, in any order.
        np.testing.assert_allclose(
            ct_weights, expected_weights, rtol=1e-5, atol=1e-4, err_msg=routing
        )


@pytest.mark.exchanges(6)
def test_the_gradient_of_a_combine_is_a_dispatch():
    """Without weights, each row gets the bits of its token's cotangent, and other rows are zero."""
    layout, ranks = cases.CUT, harness.SEVERAL
    group = harness.group_of(ranks)

    def transposed(ids, y, g):
        routing = ma.route(ids, **layout.route_args(group))
        return jax.vjp(lambda y: ma.combine(y, routing), y)[1](g)[0]

    program = harness.on_each_rank(transposed, harness.mesh_of(ranks))
    rng = np.random.default_rng(0)
    for routing in ("skewed", "masked", "repeated"):
        ids = cases.Case(layout, routing).ids(ranks)
        expected = oracle.route(ids, layout.num_experts(ranks), layout.capacity, layout.alignment)
        y = np.full((ranks, layout.capacity, 7), np.nan, np.float32)
        g = cases.normal(rng, (ranks, layout.tokens, 7), "float32")
        harness.assert_same_bytes(program(ids, y, g), oracle.dispatch(g, expected), routing)


def test_dropped_choices_have_no_gradient():
    """The weights of masked, invalid and overflowing choices have zero gradient; so has x of a
    token that has no other choices.
    """
    ranks = harness.MANY
    for routing in ("masked_tokens", "invalid", "first_expert_only"):
        args, ids, kept, g = layer_arguments(CUT_LAYER, routing, ranks, "float32")
        assert not kept.all()
        with jax.default_matmul_precision("highest"):
            _, _, (ct_x, ct_weights, _, _) = layer_program(CUT_LAYER, ranks)(args, args, ids, g)
        assert (np.asarray(ct_weights)[~kept] == 0).all(), routing
        assert (np.asarray(ct_x)[~kept.any(axis=-1)] == 0).all(), routing


def payload_gradient(x, ids, floats, ranks):
    """Return the gradient of a payload dict with respect to its leaves, through the sum of only its
    `floats` rows."""
    group = harness.group_of(ranks)

    def gradient(x, ids):
        def loss(x):
            recv = ma.dispatch(x, ids, group=group, num_experts=3 * ranks, capacity=20)
            return sum(jnp.sum(recv.rows[name].astype(jnp.float32)) for name in floats)

        grads = jax.grad(loss, allow_int=True)(x)
        return {n: g for n, g in grads.items() if g.dtype != jax.dtypes.float0}

    return harness.on_each_rank(gradient, harness.mesh_of(ranks))(x, ids)


@pytest.mark.exchanges(2)
def test_integers_in_a_payload_do_not_disturb_its_gradient():
    ranks, layout = harness.SEVERAL, cases.TIGHT
    ids = cases.Case(layout, "uniform").ids(ranks)
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks))
    rng = np.random.default_rng(0)
    x = {
        "values": cases.normal(rng, (ranks, layout.tokens, 5), "float32"),
        "position": cases.any_bits(rng, (ranks, layout.tokens), "int32"),
        "flag": cases.any_bits(rng, (ranks, layout.tokens, 2), "bool"),
    }
    grads = payload_gradient(x, ids, ("values",), ranks)
    assert set(grads) == {"values"}
    kept = (expected.choice_row >= 0).sum(axis=-1).astype(np.float32)[..., None]
    np.testing.assert_array_equal(grads["values"], np.broadcast_to(kept, x["values"].shape))


@pytest.mark.exchanges(2)
@pytest.mark.parametrize("dtype", ("float8_e4m3fn",))
def test_8_bit_floats_in_a_payload_have_zero_gradients(dtype):
    """Their sums would mean nothing, and JAX would make NaN of them: gradients belong to the
    formats.
    """
    ranks, layout = harness.SEVERAL, cases.TIGHT
    ids = cases.Case(layout, "repeated").ids(ranks)
    rng = np.random.default_rng(0)
    x = {
        "values": cases.normal(rng, (ranks, layout.tokens, 5), dtype),
        "scale": cases.normal(rng, (ranks, layout.tokens), "float32"),
    }
    grads = payload_gradient(x, ids, ("values", "scale"), ranks)
    assert (grads["values"].astype(np.float32) == 0).all()
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks))
    np.testing.assert_array_equal(grads["scale"], (expected.choice_row >= 0).sum(axis=-1))


@pytest.mark.exchanges(0)
def test_a_training_step_moves_rows_once_each_way():
    """The whole gradient has a dispatch and a weighted combine, then one movement back for each of
    them.
    """
    layout, ranks = LAYER, 2
    group = harness.emulated_group(ranks)
    (x, topk_weights, w_in, w_out), ids, _, g = layer_arguments(layout, "uniform", ranks, "float32")

    def layer(x, ids, topk_weights, w_in, w_out):
        recv = ma.dispatch(x, ids, topk_weights, group=group, num_experts=layout.num_experts(ranks))
        # No matrix products: vmap of a ragged one is not what is looked at here.
        return ma.combine(jnp.tanh(recv.rows * w_in[0, 0, 0]) * w_out[0, 0, 0], recv)

    def loss(x, topk_weights, w_in, w_out):
        out = jax.vmap(layer, axis_name=harness.AXIS)(x, ids, topk_weights, w_in, w_out)
        return jnp.vdot(out, g)

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(x, topk_weights, w_in, w_out)
    assert harness.count_primitives(jaxpr) == {
        "routed_dispatch": 1,
        "weighted_combine": 1,
        "weighted_dispatch": 1,
        "combine": 1,
    }


@pytest.mark.exchanges(8)
def test_two_layers_on_one_routing_have_the_dense_gradient():
    """The routing is made once; the exchanges of both layers and their transposes use it."""
    layout, ranks = LAYER, harness.SEVERAL
    group = harness.group_of(ranks)
    (x, topk_weights, w_in, w_out), ids, kept, g = layer_arguments(
        layout, "masked", ranks, "float32"
    )

    def body(x, ids, topk_weights, w_in, w_out):
        routing = ma.route(
            ids, group=group, num_experts=layout.num_experts(ranks), alignment=layout.alignment
        )
        for _ in range(2):
            recv = ma.dispatch(x, routing, topk_weights)
            hidden = jnp.tanh(jax.lax.ragged_dot(recv.rows, w_in, recv.group_sizes))
            x = ma.combine(jax.lax.ragged_dot(hidden, w_out, recv.group_sizes), recv)
        return x

    layers = harness.over_ranks(body, group.mesh)

    def dense(x, ids, *weights):
        once = dense_layer(x, ids, *weights, kept)
        return dense_layer(once, ids, *weights, kept)

    with jax.default_matmul_precision("highest"):
        actual, expected = (
            harness.jit(jax.grad(lambda *a: jnp.vdot(of(a[0], ids, *a[1:]), g), (0, 1, 2, 3)))(
                x, topk_weights, w_in, w_out
            )
            for of in (layers, dense)
        )
    for name, a, e in zip(("x", "topk_weights", "w_in", "w_out"), actual, expected):
        np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-3, err_msg=name)
