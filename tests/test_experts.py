"""Compare the primitives that compute experts with dense experts; rows after the last group are NaN
or infinite."""

import functools
import itertools
import logging

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import calls, needs_kernel

import jax_moe_a2a as ma
from jax_moe_a2a._src.experts import lowering as lowered_experts
from jax_moe_a2a._src.experts import primitives as experts
from jax_moe_a2a._src.experts.activations import KINDS, FusedActivation

pytestmark = [
    pytest.mark.one_process("each process would compute the same experts on its own devices"),
    pytest.mark.exchanges(0),
    pytest.mark.usefixtures("exact_products"),
]

ROWS, HIDDEN, INTERMEDIATE, SIZES = 11, 6, 5, (4, 0, 4)
IN_USE = sum(SIZES)
CLAMPED = ma.clamped_swiglu(limit=0.7, alpha=1.3)
SWIGLU = FusedActivation("silu", gated=True)
PLAIN = [FusedActivation(kind) for kind in KINDS if kind != "clamped_swiglu"]
ACTIVATIONS = [*PLAIN, *(FusedActivation(act.kind, True) for act in PLAIN), CLAMPED]
GELU = FusedActivation("gelu")
NAMES = ("rows", "w_in", "b_in", "weights", "w_out", "b_out")
OF_ALL = tuple(range(len(NAMES)))


def name_of(activation):
    return "gated " * activation.gated + activation.kind


def operands(
    activation,
    seed=0,
    dtype="float32",
    sizes=SIZES,
    rows=ROWS,
    hidden=HIDDEN,
    intermediate=INTERMEDIATE,
):
    """Return random operands in the order of NAMES; one row in a group has the weight 0."""
    rng = np.random.default_rng(seed)
    width = activation.width(intermediate)
    shapes = (
        (rows, hidden),
        (len(sizes), hidden, width),
        (len(sizes), width),
        (rows,),
        (len(sizes), intermediate, hidden),
        (len(sizes), hidden),
    )
    drawn = [0.7 * rng.normal(size=shape) for shape in shapes]
    for i, length in ((1, hidden), (4, intermediate)):
        drawn[i] *= min(1, 2.5 / length**0.5)
    drawn[0][sum(sizes) :: 2], drawn[0][sum(sizes) + 1 :: 2] = np.nan, np.inf
    drawn[3][1:2], drawn[3][sum(sizes) :] = 0, 0
    dtypes = (dtype, dtype, dtype, "float32", dtype, dtype)
    return [jnp.asarray(x, dtype) for x, dtype in zip(drawn, dtypes, strict=True)]


def fused(*args, activation=SWIGLU, sizes=SIZES):
    all_args = experts.ExpertOperands(*args, jnp.array(sizes, jnp.int32))
    y, _ = experts.bind_experts(all_args, activation=activation)
    return y[: sum(sizes)]


def dense(*args, activation=SWIGLU, sizes=SIZES):
    rows, w_in, b_in, weights, w_out, b_out = args
    end, expert = sum(sizes), np.repeat(np.arange(len(sizes)), sizes)
    pre = jnp.einsum("ck,ckn->cn", rows[:end], w_in[expert]) + b_in[expert]
    scale = weights[:end, None]
    h = activation(pre) * scale
    return jnp.einsum("ci,cih->ch", h, w_out[expert]) + scale * b_out[expert]


def value_and_grads(fn, wanted=OF_ALL):
    def run(*args):
        grads, y = jax.grad(lambda *args: (jnp.sum(jnp.sin(fn(*args))), fn(*args)), wanted, True)(
            *args
        )
        return y, *grads

    return run


def in_use(results):
    """Remove the rows after the last group from results and gradients."""
    return [x[:IN_USE] if x.shape[:1] == (ROWS,) else x for x in jax.tree.leaves(results)]


def assert_close(actual, right, tolerance=2e-5):
    for found, expected in zip(in_use(actual), in_use(right), strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# On CPUs, one ungated activation is enough, because gated activations contain the ungated ones.
@pytest.mark.parametrize(
    "activation", ACTIVATIONS if harness.ON_GPU else [GELU, *ACTIVATIONS[len(PLAIN) :]], ids=name_of
)
def test_each_activation_is_that_of_dense_experts(activation):
    args = operands(activation)
    of = lambda fn: harness.quickly(value_and_grads(functools.partial(fn, activation=activation)))
    assert_close(of(fused)(*args), of(dense)(*args))


def test_derivatives_of_any_order_are_those_of_dense_experts():
    args, tangents = operands(SWIGLU), operands(SWIGLU, seed=1)
    clean = lambda xs: [jnp.where(jnp.isfinite(x), x, 1.0) for x in xs]

    def everything(fn):
        gradients = lambda *args: value_and_grads(fn)(*args)[1:]

        def size_of_gradients(*args):
            return sum(jnp.sum(jnp.sin(g)) for g in in_use(gradients(*args)))

        def run(args, tangents):
            linear = jax.linearize(fn, *args)[1](*tangents)
            of_tangent = lambda *args: jax.jvp(fn, args, tangents)[1]
            forward_over_reverse = jax.jvp(gradients, args, tangents)[1]
            reverse_over_reverse = jax.grad(size_of_gradients, OF_ALL)(*args)
            reverse_over_forward = jax.grad(
                lambda *args: jnp.sum(jnp.sin(of_tangent(*args))), OF_ALL
            )(*args)
            third = jax.jvp(lambda *args: jax.jvp(of_tangent, args, tangents)[1], args, tangents)[1]
            reverse = reverse_over_reverse, reverse_over_forward
            return of_tangent(*args), linear, forward_over_reverse, *reverse, third

        return harness.quickly(run)(tuple(args), tuple(clean(tangents)))

    assert_close(everything(fused), everything(dense), 5e-4)


@functools.cache
def of_dense_experts():
    return harness.quickly(value_and_grads(dense))(*operands(SWIGLU))


@pytest.mark.parametrize("wanted", [(0,), (3,), (2, 5), (1, 4)], ids=str)
def test_any_subset_of_gradients(wanted):
    y, *grads = of_dense_experts()
    found = harness.quickly(value_and_grads(fused, wanted))(*operands(SWIGLU))
    assert_close(found, (y, *(grads[i] for i in wanted)))


# In 16-bit floats, GPUs compute these rows with the kernels: in their only form, in that for few
# rows, and in that for many rows.
@pytest.mark.parametrize(
    ("dtype", "rows", "sizes"),
    [
        ("float32", ROWS, SIZES),
        ("bfloat16", 200, (8, 0, 4)),
        ("bfloat16", 300, (8, 0, 4)),
        ("bfloat16", 300, (128, 0, 128)),
        ("float16", 300, (128, 0, 128)),
    ],
)
@pytest.mark.parametrize("activation", [SWIGLU, GELU], ids=name_of)
def test_rows_of_weight_zero_are_exact_zeros_whatever_they_hold(activation, dtype, rows, sizes):
    hidden, intermediate = (HIDDEN, INTERMEDIATE) if dtype == "float32" else (64, 40)
    in_use = sum(sizes)
    rows, w_in, b_in, weights, w_out, _ = operands(
        activation, 0, dtype, sizes, rows, hidden, intermediate
    )
    rows = rows.at[1].set(jnp.nan).at[5].set(jnp.inf)
    weights = weights.at[5].set(0)
    sizes = jnp.array(sizes, jnp.int32)
    params = dict(activation=activation)
    product = experts.Product(rows, w_in, b_in, weights, sizes)
    h, pre = experts._bind(experts.dot_act_p, product, keep=True, **params)
    ct = jnp.ones_like(rows).at[5].set(jnp.nan)
    ct_pre, again, _ = experts._bind(
        experts.act_dot_grad_p, experts.Gradient(ct, pre, weights, w_out, sizes), **params
    )
    assert np.isnan(pre[1]).any()
    for x in (h, ct_pre, again):
        assert not np.any(x[jnp.array([1, 5])])
        assert np.isfinite(x[:in_use]).all()


def test_gradients_of_router_weights_are_summed_in_float32():
    """The gradient is the square of 129/128, which needs 15 bits; bfloat16 has only 8."""
    x = jnp.full((1, 1), 129 / 128, "bfloat16")
    sizes, ones = jnp.ones(1, jnp.int32), jnp.ones(1, jnp.float32)
    gradient = experts.Gradient(x, x, ones, jnp.ones((1, 1, 1), x.dtype), sizes)
    params = dict(activation=FusedActivation("relu"))
    found = experts._bind(experts.act_dot_grad_p, gradient, **params)
    assert found[2].tolist() == [(129 / 128) ** 2]


@pytest.mark.parametrize(("rows", "sizes"), [(1, (0, 1)), (0, (0, 0)), (3, ())], ids=str)
def test_one_row_and_no_rows(rows, sizes):
    args = operands(SWIGLU, rows=rows, sizes=sizes)
    of = lambda fn: value_and_grads(functools.partial(fn, sizes=sizes), (1, 4))
    assert_close(*(jax.jit(of(fn))(*args) for fn in (fused, dense)), 1e-5)


def with_cotangents(fn):
    """Return a compiled function that returns fn's result and the operands' cotangents."""

    def run(*args):
        y, transpose = jax.vjp(fn, *args)
        return y, *transpose(jnp.cos(y))

    return harness.quickly(run)


def large_operands(activation, dtype, sizes, hidden=72, rows=300):
    shapes = dict(rows=rows, hidden=hidden, intermediate=328)
    return operands(activation, dtype=dtype, sizes=sizes, **shapes)


def assert_near(actual, right, num_rows, tolerance):
    """Compare results of `with_cotangents` by the norm of the difference, without rows after the
    last group."""
    for name, x, expected in zip(("y", *NAMES), actual, right, strict=True):
        # Arrays of experts have fewer indices than there are rows.
        x, expected = (np.asarray(a[:num_rows], np.float32) for a in (x, expected))
        assert np.linalg.norm(x - expected) <= tolerance * np.linalg.norm(expected), name


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(act, "bfloat16") for act in (ACTIVATIONS if harness.ON_GPU else (CLAMPED,))]
    + [(SWIGLU, "float16")],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
# With the larger hidden size, the kernel of the first product chooses its form for few rows. With
# 240 rows, the kernels have only this form.
@pytest.mark.parametrize(
    ("hidden", "rows"), ((72, 300), (840, 300), (72, 240))[: 3 if harness.ON_GPU else 1]
)
def test_16_bit_floats(activation, dtype, hidden, rows):
    sizes = (150, 0, 70, 1)
    args = large_operands(activation, dtype, sizes, hidden, rows)
    of = lambda fn: with_cotangents(functools.partial(fn, activation=activation, sizes=sizes))
    found = of(fused)(*args)
    assert [x.dtype for x in found[1:]] == [x.dtype for x in args]
    right = of(dense)(*(x.astype(jnp.float32) for x in args))
    # Rounding moves a few numbers across a jump of the activation's derivative.
    has_jumps = "relu" in activation.kind or activation is CLAMPED
    tolerance = 0.1 if has_jumps else 2 * float(jnp.finfo(dtype).eps)
    assert_near(found, right, sum(sizes), tolerance)


def of_one_element(*args):
    """Return a sum over the rows of all groups, and the gradients of this sum."""
    *floats, sizes = args
    in_use = jnp.arange(ROWS)[:, None] < sizes.sum()

    def value(*floats):
        y, _ = experts.bind_experts(experts.ExpertOperands(*floats, sizes), activation=SWIGLU)
        return jnp.sum(jnp.where(in_use, jnp.sin(y), 0))

    value, (d_rows, *others) = jax.value_and_grad(value, OF_ALL)(*floats)
    return value, jnp.where(in_use, d_rows, 0), *others


program_of_one_element = harness.quickly(of_one_element)


@pytest.mark.parametrize(
    "batched",
    ["rows", "w_in and b_out", "b_in and w_out", "weights", "sizes", "rows and weights"],
)
def test_vmap_over_any_operand(batched):
    each = [operands(SWIGLU, seed) for seed in range(2)]
    sizes = jnp.array([SIZES, (1, 2, 3)], jnp.int32)
    has = [name in batched.split(" and ") for name in (*NAMES, "sizes")]
    stacked = [jnp.stack(xs) for xs in zip(*each)] + [sizes]
    args = [x if is_batched else x[0] for x, is_batched in zip(stacked, has, strict=True)]
    axes = [0 if is_batched else None for is_batched in has]
    found = harness.quickly(jax.vmap(of_one_element, axes))(*args)
    for i in range(2):
        own = [x[i] if is_batched else x for x, is_batched in zip(args, has, strict=True)]
        for actual, expected in zip(found, program_of_one_element(*own), strict=True):
            np.testing.assert_allclose(actual[i], expected, rtol=2e-5, atol=2e-5)


def passes(jaxpr, shape):
    """Return the names of the operations, except the package's, that have a result [*shape,
    columns]."""
    containers = ("jit", "closed_call", "name")
    return [
        eqn.primitive.name
        for eqn in harness.equations(jaxpr)
        if not eqn.primitive.name.startswith("moe_a2a_")
        and eqn.primitive.name not in containers
        and any(
            v.aval.ndim > len(shape) and v.aval.shape[: len(shape)] == shape for v in eqn.outvars
        )
    ]


def test_the_layer_makes_no_pass_over_rows():
    ranks, capacity = 2, 36
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(ranks, *shape)), jnp.float32)
    own = ma.Experts(draw(2, HIDDEN, 2, INTERMEDIATE), draw(2, INTERMEDIATE, HIDDEN))
    floats = draw(6, HIDDEN), draw(6, 3), own
    ids = jnp.asarray(rng.integers(0, 4, (ranks, 6, 3)), jnp.int32)

    def run(x, weights, own, ids):
        options = dict(group=harness.emulated_group(ranks), num_experts=4)
        choices, exchange = ma.RouterChoices(ids, weights), ma.Exchange(capacity=capacity)
        return ma.moe_mlp(x, choices, own, exchange=exchange, **options)

    every = jax.vmap(run, axis_name=harness.AXIS)
    forward = jax.make_jaxpr(every)(*floats, ids)
    both = jax.make_jaxpr(
        lambda *floats: jax.vjp(lambda *floats: every(*floats, ids), *floats)[1](floats[0])
    )(*floats)
    assert passes(forward, (ranks, capacity)) == passes(both, (ranks, capacity)) == []
    biased = own.replace(b_in=draw(2, 2, INTERMEDIATE), b_out=draw(2, HIDDEN))
    assert passes(jax.make_jaxpr(every)(*floats[:2], biased, ids), (ranks, capacity)) == []
    # An activation that the package does not recognize is a separate operation, which `passes`
    # returns.
    unfused = own.replace(activation=ma.gated(jnp.tanh))
    jaxpr = jax.make_jaxpr(every)(*floats[:2], unfused, ids)
    assert "tanh" in passes(jaxpr, (ranks, capacity))


def avals(rows=512, groups=4, hidden=64, intermediate=320, dtype="bfloat16", lead=(), gated=True):
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct((*lead, *shape), dtype)
    width = intermediate * (1 + gated)
    return (
        array(rows, hidden),
        array(groups, hidden, width),
        array(groups, width),
        array(rows, dtype="float32"),
        array(groups, intermediate, hidden),
        array(groups, hidden),
        array(groups, dtype="int32"),
    )


def forward(*args, activation=SWIGLU):
    return experts.bind_experts(experts.ExpertOperands(*args), activation=activation)[0]


def backward(*args, activation=SWIGLU):
    fn = lambda *floats: forward(*floats, args[-1], activation=activation)
    y, transpose = jax.vjp(fn, *args[:-1])
    return transpose(y)


@needs_kernel
def test_each_product_is_one_call_with_the_attributes_of_the_activation(hopper):
    first, second = calls(functools.partial(forward, activation=CLAMPED), *avals())
    assert [first[0], second[0]] == ["dot_act", "dot_act"]
    assert second[1]["activation"] == str(lowered_experts.SCALED_BIAS)
    assert second[2].startswith("(tensor<512x320xbf16>, tensor<4x320x64xbf16>, tensor<3x4xi32>, ")
    assert "tensor<4x64xbf16>, tensor<512xf32>) -> (tensor<512x64xbf16>, " in second[2]
    numbers = {name: float(first[1].pop(name)) for name in ("alpha", "limit")}
    assert numbers == pytest.approx(dict(alpha=1.3, limit=0.7))
    code = str(list(KINDS).index("clamped_swiglu"))
    assert first[1] == dict(activation=code, gated="1", num_sms="0")
    assert first[2] == (
        "(tensor<512x64xbf16>, tensor<4x64x640xbf16>, tensor<3x4xi32>, tensor<4x640xbf16>, "
        "tensor<512xf32>) -> (tensor<512x320xbf16>, tensor<0xbf16>, tensor<1xi32>)"
    )
    by_name = {}
    for name, attributes, types in calls(backward, *avals()):
        by_name.setdefault(name, []).append((attributes, types))
    assert {name: len(each) for name, each in by_name.items()} == dict(
        dot_act=2, grouped_gemm=6, act_dot_grad=1
    )
    assert "tensor<512x640xbf16>, tensor<1xi32>)" in by_name["dot_act"][0][1]
    ((attributes, types),) = by_name["act_dot_grad"]
    assert (attributes["activation"], attributes["gated"], attributes["num_sms"]) == ("0", "1", "0")
    assert types == (
        "(tensor<512x64xbf16>, tensor<4x320x64xbf16>, tensor<3x4xi32>, tensor<512x640xbf16>, "
        "tensor<512xf32>) -> (tensor<512x640xbf16>, tensor<512x320xbf16>, tensor<2x512xf32>, "
        "tensor<1xi32>)"
    )


@needs_kernel
def test_no_gate_no_bias_and_a_batch_are_one_call(hopper):
    plain = FusedActivation("relu")
    fn = functools.partial(forward, activation=plain)
    (_, attributes, _), _ = calls(fn, *avals(gated=False))
    assert attributes["activation"] == "3"
    no_bias = lambda rows, w_in, _, *args: forward(rows, w_in, None, *args[:2], None, args[-1])
    (_, _, types), (second, *_) = calls(no_bias, *avals())
    assert "tensor<0xbf16>, tensor<512xf32>)" in types and second == "grouped_gemm"
    (_, _, types), _ = calls(jax.vmap(forward), *avals(lead=(3,)))
    assert types.startswith("(tensor<1536x64xbf16>, tensor<12x64x640xbf16>, tensor<3x12xi32>")
    names = [name for name, *_ in calls(jax.vmap(backward), *avals(lead=(3,)))]
    assert (names.count("dot_act"), names.count("act_dot_grad")) == (2, 1)
    # One index selects a group's weights and its bias, so batched biases need batched weights.
    shared = jax.vmap(forward, (0, None, 0, 0, None, None, None))
    rows, w_in, bias, weights, w_out, b_out, sizes = avals()
    more = lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype)
    (_, _, types), _ = calls(
        shared, more(rows), w_in, more(bias), more(weights), w_out, b_out, sizes
    )
    assert "tensor<8x64x640xbf16>, tensor<3x8xi32>, tensor<8x640xbf16>" in types


@needs_kernel
@pytest.mark.parametrize(
    ("why", "options"),
    [
        ("needs bfloat16 or float16; got float32", dict(dtype="float32")),
        ("columns in multiples of 8; got weights of 60 by 640", dict(hidden=60)),
        ("columns in multiples of 8; got weights of 64 by 324", dict(intermediate=324)),
    ],
)
def test_what_the_kernel_does_not_support_is_the_composition(hopper, caplog, why, options):
    args = avals(**options)
    with caplog.at_level(logging.INFO, logger="jax_moe_a2a"):
        names = [name for name, *_ in calls(backward, *args)]
    assert set(names) <= {"grouped_gemm"}
    assert any("dot_act: not fused, because" in m and why in m for m in caplog.messages)


def in_pairs(args, num):
    """Divide each array of weights or biases into a pair: the first `num` groups, and the other
    groups."""
    return [(x[:num], x[num:]) if i in (1, 2, 4, 5) else x for i, x in enumerate(args)]


PAIRS = (
    ["float32", "bfloat16", "float16"],
    [SWIGLU, CLAMPED, GELU],
    [(150, 0, 70, 1), (0, 0, 3, 200), (8, 0, 5, 0)],
)


@pytest.mark.parametrize(
    ("dtype", "activation", "sizes"),
    list(itertools.product(*PAIRS) if harness.ON_GPU else zip(*PAIRS)),
)
def test_two_arrays_of_weights_equal_one(dtype, activation, sizes):
    args = large_operands(activation, dtype, sizes)
    both = with_cotangents(functools.partial(fused, activation=activation, sizes=sizes))
    found = [jnp.concatenate(x) if isinstance(x, tuple) else x for x in both(*in_pairs(args, 2))]
    tolerance = 1e-5 if dtype == "float32" else 2 * float(jnp.finfo(dtype).eps)
    assert_near(found, both(*args), sum(sizes), tolerance)
