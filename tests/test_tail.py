"""Test that a dispatch with tail="unspecified", which does not write the rows after the last group,
changes no other result. On the portable path, unwritten rows are NaN or extreme integers."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import small_layer

import jax_moe_a2a as ma
from jax_moe_a2a._src.grouped import frozen
from jax_moe_a2a._src.layer import forms

RANKS = harness.SEVERAL
IS_POISONED = harness.group_of(RANKS).path == "portable" and harness.IMPLEMENTATION != "cuda"
HIDDEN = 128  # a multiple of every format's group size
LAYOUT = cases.Layout("tail", tokens=9, top_k=3, local_experts=3, alignment=4, hidden=HIDDEN)
CUT = cases.Layout(
    "cut", tokens=9, top_k=3, local_experts=3, capacity=22, alignment=4, hidden=HIDDEN
)
MANY = cases.Layout("many", tokens=300, top_k=2, local_experts=2, alignment=8, hidden=HIDDEN)
PORTABLE = ma.Group(axis_name="ep", size=2, implementation="portable")


def route_args(layout, ranks=RANKS, group=None):
    return layout.route_args(group or harness.group_of(ranks))


# name of a dispatch in DISPATCHES, options
FORMS = dict(
    ids=("ids", {}),
    routing=("routing", {}),
    halves=("halves", {}),
    fp8=("ids", dict(token_format=ma.BlockwiseFp8())),
    fp4_decoded=("ids", dict(token_format=ma.NvFp4(), decode=True)),
    mxfp8_decoded_by_routing=("routing", dict(token_format=ma.MxFp8(), decode=True)),
)


def inputs(layout, routing="skewed", ranks=RANKS, dtype="float32"):
    rng = np.random.default_rng([ranks, layout.tokens])
    ids = cases.Case(layout, routing).ids(ranks)
    expected = small_layer.routing_of(ids, layout)
    x = cases.normal(rng, (ranks, layout.tokens, layout.hidden), dtype)
    return ids, x, cases.normal(rng, ids.shape, "float32"), expected


def assert_only_the_tail_differs(unspecified, zeroed, is_tail):
    """Assert that all rows before the tail are equal, and that padding rows are zero."""
    for actual, right in zip(jax.tree.leaves(unspecified), jax.tree.leaves(zeroed), strict=True):
        actual, right = (
            np.ascontiguousarray(array).view(np.uint8).reshape(*is_tail.shape, -1)
            for array in harness.numpy_of((actual, right))
        )
        np.testing.assert_array_equal(actual[~is_tail], right[~is_tail])
        assert not right[is_tail].any()
        if IS_POISONED and is_tail.any():
            assert actual[is_tail].any(axis=-1).all()


@pytest.mark.parametrize(
    "form, layout",
    [*((form, LAYOUT) for form in FORMS), ("ids", CUT), ("ids", MANY)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_form_writes_all_rows_but_the_tail(form, layout):
    dispatched_by, options = FORMS[form]

    def rows(ids, x, weights, tail):
        given = {"x": x, "half": x.astype(jnp.bfloat16)} if "token_format" not in options else x
        if "token_format" not in options:
            given["number"] = jnp.arange(len(x))
        dispatch, group = small_layer.DISPATCHES[dispatched_by], harness.group_of(RANKS)
        recv = dispatch(given, ids, weights, group, layout, tail=tail, **options)
        return recv.rows, recv.weights, recv.group_sizes

    mesh = harness.mesh_of(RANKS)
    *args, expected = inputs(layout)
    found = {}
    for tail in ("zero", "unspecified"):
        of_tail = functools.partial(rows, tail=tail)
        program = harness.on_each_rank(of_tail, mesh, compiler_options=harness.QUICKLY)
        with harness.expect_exchanges(*exchanges_of(form, layout)):
            *found[tail], group_sizes = program(*args)
        harness.assert_same_bytes(group_sizes, expected.group_sizes)
    assert layout is CUT or expected.is_tail.any()
    assert_only_the_tail_differs(found["unspecified"], found["zero"], expected.is_tail)


@pytest.mark.exchanges(1)
@pytest.mark.parametrize("tail", ("zero", "unspecified"))
def test_optimized_programs_move_every_bit(tail):
    """With AVX512_BF16, optimized code of XLA once flushed subnormals and changed NaNs."""
    rng = np.random.default_rng(3)
    ids, _, _, expected = inputs(LAYOUT)
    tokens = (RANKS, LAYOUT.tokens)
    leaves = [(name, size) for name in ("bfloat16", "float16") for size in (1, 2, 8, 33)]
    x = {f"{name}[{size}]": cases.any_bits(rng, (*tokens, size), name) for name, size in leaves}

    def rows(x, ids):
        return ma.dispatch(x, ids, **route_args(LAYOUT), tail=tail).rows

    program = harness.on_each_rank(
        rows, harness.mesh_of(RANKS), compiler_options=harness.THOROUGHLY
    )
    written = ~expected.is_tail | (tail == "zero")
    for name, actual in program(x, ids).items():
        harness.assert_same_bytes(
            actual[written], oracle.dispatch(x[name], expected)[written], name
        )


def exchanges_of(form, layout):
    if form == "halves":
        return 1, 1
    return 1 + (form.endswith("routing") or layout is MANY), 0


def assert_finite_and_same(actual, expected, atol):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = harness.numpy_of((a, b))
        assert np.isfinite(b).all() and np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)


@jax.custom_vjp
def unwriting_dot(rows, w, sizes):
    """Multiply rows as tokamax 0.0.17 does on Hopper: the tail of the result is NaN. The weight
    gradient multiplies rows by a mask of 0 and 1, so NaN stays NaN."""
    return unwritten(jax.lax.ragged_dot(rows, w, sizes), sizes)


def in_a_group(rows, sizes):
    return (jnp.arange(len(rows)) < jnp.sum(sizes))[:, None]


def unwritten(rows, sizes):
    return jnp.where(in_a_group(rows, sizes), rows, jnp.nan)


def unwriting_dot_backward(kept, ct):
    rows, w, sizes = kept
    ends = jnp.cumsum(sizes)
    row = jnp.arange(len(rows))[None]
    is_of_group = (row >= (ends - sizes)[:, None]) & (row < ends[:, None])  # a mask [L, C]
    ct_w = jnp.einsum("lch,cn->lhn", is_of_group[..., None].astype(rows.dtype) * rows[None], ct)
    ct = jnp.where(in_a_group(ct, sizes), ct, 0)
    ct_rows = jax.lax.ragged_dot(ct, w.swapaxes(1, 2), sizes)
    return unwritten(ct_rows, sizes), ct_w, None


unwriting_dot.defvjp(lambda *args: (unwriting_dot(*args), args), unwriting_dot_backward)


@pytest.mark.exchanges(15)
def test_rows_that_a_product_of_another_library_leaves_unwritten_reach_no_result():
    """A weight gradient that reads all rows needs a tail masked as in docs/api/grouped.md."""

    def of_product(multiply, x, weights, w, ids):
        def layer(x, weights, w):
            recv = ma.dispatch(x, ids, weights, **route_args(LAYOUT))
            h = jnp.tanh(multiply(recv.rows, w, recv.group_sizes))
            return ma.combine(multiply(h, w, recv.group_sizes), recv)

        y, pull = jax.vjp(layer, x, weights, w)
        return y, pull(jnp.cos(y))

    def masked(rows, w, sizes):
        keep = lambda rows: jnp.where(in_a_group(rows, sizes), rows, 0)
        return keep(unwriting_dot(keep(rows), w, sizes))

    found = {}
    ids, x, weights, _ = inputs(LAYOUT)
    shape = RANKS, LAYOUT.local_experts, HIDDEN, HIDDEN
    w = cases.normal(np.random.default_rng(0), shape, "float32") / 11
    for multiply in (ma.grouped_dot, masked, unwriting_dot):
        program = harness.on_each_rank(
            functools.partial(of_product, multiply),
            harness.mesh_of(RANKS),
            check_vma=False,
            compiler_options=harness.QUICKLY,
        )
        found[multiply] = program(x, weights, w, ids)
    # Sums have different orders, and on GPUs products round to TF32.
    same = functools.partial(assert_finite_and_same, atol=1e-2 if harness.ON_GPU else 1e-4)
    right_y, right_gradients = found[ma.grouped_dot]
    same(found[masked], (right_y, right_gradients))
    y, (ct_x, ct_weights, ct_w) = found[unwriting_dot]
    same((y, ct_x, ct_weights), (right_y, *right_gradients[:2]))
    assert np.isnan(harness.numpy_of(ct_w)).any()


@pytest.mark.exchanges(0)
def test_the_tail_is_nan_in_every_float_on_the_portable_path():
    """Narrow floats, although sent as integers, have NaN of their dtype."""
    ids, _, _, expected = inputs(LAYOUT, ranks=2)
    floats = [name for name in cases.MOVED_DTYPES if "float" in name]
    x = {name: np.ones((2, LAYOUT.tokens, 1), cases.dtype(name)) for name in floats}

    def on_rank(x, ids):
        return ma.dispatch(x, ids, **route_args(LAYOUT, 2, PORTABLE), tail="unspecified").rows

    for name, rows in jax.jit(jax.vmap(on_rank, axis_name="ep"))(x, ids).items():
        is_nan = np.isnan(np.asarray(rows).astype(np.float32))[..., 0]
        np.testing.assert_array_equal(is_nan, expected.is_tail, err_msg=name)


@pytest.mark.exchanges(0)
def test_a_tangent_leaves_the_tail_and_the_cotangent_of_a_combine_has_zeros_there():
    """Code before a combine may read all rows, so cotangents in the tail are zero."""
    ids, x, _, _ = inputs(LAYOUT, ranks=2)

    def on_rank(x, ids):
        routing = ma.route(ids, **route_args(LAYOUT, 2, PORTABLE))
        dispatch = lambda x: ma.dispatch(x, routing, tail="unspecified").rows
        tangent = jax.jvp(dispatch, (x,), (x,))[1]
        combine = lambda y: jnp.sum(ma.combine(y, routing))
        return tangent, jax.grad(combine)(tangent)

    on_ranks = jax.vmap(on_rank, axis_name="ep")
    tangent, cotangent = on_ranks(x, ids)
    expected = inputs(LAYOUT, ranks=2)[-1]
    assert np.isnan(tangent[expected.is_tail]).all()
    assert not np.asarray(cotangent)[expected.is_tail].any()
    dispatches = [
        eqn.params["options"].tail
        for eqn in harness.equations(jax.make_jaxpr(on_ranks)(x, ids))
        if eqn.primitive.name == "moe_a2a_dispatch"
    ]
    assert sorted(dispatches) == ["unspecified", "unspecified", "zero"]


@pytest.mark.exchanges(0)
def test_debug_nans_blames_the_program_and_not_the_tail():
    """With debug_nans, JAX runs operations one by one, and the dispatch must not be blamed."""
    options = dict(group=PORTABLE, num_experts=4)
    on_ranks = functools.partial(jax.vmap, axis_name="ep", in_axes=(0, None))
    ids = jnp.zeros((3, 2), int)  # rank 1 has only rows without a token
    x, w = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 4))

    @jax.jit
    @on_ranks
    def program(x, _):
        return jnp.log(
            -1 - ma.dispatch(x, ids, tail="unspecified", **harness.exchanging(options)).rows[0]
        )

    def layer(x, w, activation, **more):
        experts = ma.Experts(w, w, activation=activation)
        return ma.moe_mlp(x, ma.RouterChoices(ids, None), experts, **options, **more)

    def gradient(activation, **more):
        fn = on_ranks(functools.partial(layer, activation=activation, **more))
        return str(jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(fn(*args))))(x, w))

    program(x, w)  # compiled before debug_nans is on, and not again, so its tail has NaN
    assert "unspecified" in gradient(jnp.tanh)
    assert "moe_a2a_dot_act" in gradient(jax.nn.silu)
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match="in log"):
            program(x, w)
        assert "unspecified" not in gradient(jnp.tanh)
        replicas = ma.Placement.from_slots([0, 1, 2, 2, 3, 0], 4, num_ranks=2)
        assert "unspecified" not in gradient(jnp.tanh, placement=replicas)
        assert "moe_a2a_dot_act" not in gradient(jax.nn.silu)


def unwriting(product):
    """Wrap an FP8 product: its result is NaN in the tail, as a kernel may leave it."""

    def poisoned(rows, w, sizes, *args, **options):
        out = product(rows, w, sizes, *args, **options)
        num_rows = jax.tree.leaves(out)[0].shape[-2]
        row = jnp.expand_dims(jnp.arange(num_rows), range(sizes.ndim - 1))
        is_written = row < jnp.sum(sizes, -1, keepdims=True)
        nan = lambda x: jnp.full_like(x, jnp.nan)
        return jax.tree.map(lambda x: jnp.where(is_written[..., None], x, nan(x)), out)

    return poisoned


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("fetches, is_fused", ((True, True), (False, False)))
def test_nothing_unwritten_reaches_a_gradient_through_frozen_weights(
    monkeypatch, fetches, is_fused
):
    local, rng = LAYOUT.local_experts, np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32)
    silu = jax.nn.silu if is_fused else lambda x: jax.nn.silu(1 * x)
    if fetches:
        placement = ma.Placement.from_slots([0, 1, 2, 3, -1, 3, 4, 5, 0, 1], 6, num_ranks=2)
    else:
        placement, local = ma.Placement.from_slots([0, 1, 2, -1, 3, 4, 5, 0], 6, num_ranks=2), 4
    ids = jnp.asarray(np.where(inputs(LAYOUT, ranks=2)[0] == 2, 0, inputs(LAYOUT, ranks=2)[0]))
    arrays = (normal(local, HIDDEN, HIDDEN) / 11 for _ in range(2))
    experts = jax.jit(jax.vmap(ma.quantize_experts))(ma.Experts(*arrays, activation=silu))
    floats = normal(9, HIDDEN), normal(9, 3), normal(local, HIDDEN), normal(local, HIDDEN)

    def gradients(floats, experts):
        def of_rank(ids, experts, x, topk_weights, b_in, b_out):
            choices = ma.RouterChoices(ids, topk_weights)
            options = dict(group=PORTABLE, num_experts=6, exchange=ma.Exchange(alignment=4))
            own = experts.replace(b_in=b_in, b_out=b_out)
            return ma.moe_mlp(x, choices, own, placement=placement, **options)

        layers = jax.vmap(of_rank, axis_name="ep")
        y, transpose = jax.vjp(functools.partial(layers, ids, experts), *floats)
        return y, transpose(jnp.cos(y))

    expected = jax.jit(gradients)(floats, experts)
    for module, names in (
        (frozen, ("bind_dot_fp8", "bind_dot", "bind_act_encode")),
        (forms, ("bind_act_encode",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, unwriting(getattr(module, name)))
    # No row uses the weights of rank 0's local expert 2, or those of the empty slot.
    poisoned = jax.tree.map(lambda x: x.at[0, 2:].set(jnp.nan), experts)
    found = jax.jit(lambda *args: gradients(*args))(floats, poisoned)
    for one, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        # XLA may round differently in the two programs, up to a neighbouring FP8 value.
        assert np.isfinite(right).all() and np.abs(right).max() > 0
        np.testing.assert_allclose(one, right, rtol=0, atol=0.01 * np.abs(right).max())
