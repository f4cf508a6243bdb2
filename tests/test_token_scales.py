"""Test the format `NvFp4` with a global scale for each token against `format_oracle.py`."""

import dataclasses
import functools
import itertools

import cases
import format_oracle
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import small_layer
from small_layer import DISPATCHES, routing_of

import jax_moe_a2a as ma
from jax_moe_a2a._src import api

pytestmark = pytest.mark.exchanges(0)

# This layout drops choices and has a tail.
LAYOUT = cases.Layout(
    "scaled", tokens=6, top_k=3, local_experts=2, capacity=14, alignment=4, hidden=64
)
# more tokens than one kernel launch can route and dispatch
MANY = dataclasses.replace(LAYOUT, tokens=api.FUSED_MAX_TOKENS + 1, capacity=None)
RANKS = harness.FEW
PARTS = (*ma.Quantized._fields, "global_scales")
SPECIAL = np.float32([np.nan, np.inf, -np.inf, -1.0, -0.0, 0.0, 1e-40, 2.0**-120, 3e38])


def scales_of_tokens(ranks, tokens, special=True):
    """Return random scales [R, T], with `special` also invalid or extreme ones."""
    rng = np.random.default_rng([ranks, tokens])
    scales = (10.0 ** rng.uniform(-6, 3, (ranks, tokens))).astype(np.float32)
    if special:
        for rank, scale in zip(itertools.cycle(range(ranks)), SPECIAL):
            scales[rank, rng.integers(tokens)] = scale
    return scales


def tokens_of(scales, shape, dtype):
    """Return random tokens [R, T, *shape] in the range of their scales; some are zero, infinite or
    out of range."""
    rng = np.random.default_rng(scales.shape)
    x = rng.standard_normal((*scales.shape, *shape))
    sizes = np.where((scales > 1e-7) & (scales < 1e4), scales, 1) * 2688.0
    x *= (sizes * 10.0 ** rng.uniform(-4, 1, scales.shape)).reshape(
        *scales.shape, *[1] * len(shape)
    )
    x[0, 0] = 0
    x[-1, -1, ..., 5] = np.inf
    with np.errstate(over="ignore"):
        return x.astype(cases.dtype(dtype))


def assert_rows_are(rows, global_scales, x, scales, expected, written=...):
    parts = (*format_oracle.encode_tokens(x, scales), scales)
    assert isinstance(rows, ma.Quantized)
    for field, actual, part in zip(PARTS, (*rows, global_scales), parts, strict=True):
        of_oracle = oracle.dispatch(part, expected)
        harness.assert_same_bytes(np.asarray(actual)[written], of_oracle[written], field)


def assert_decoded_are(rows, x, scales, expected, written=...):
    decoded = format_oracle.decode_tokens(
        *format_oracle.encode_tokens(x, scales), scales, x.dtype.name
    )
    of_oracle = oracle.dispatch(decoded, expected)
    harness.assert_same_bytes(np.asarray(rows)[written], of_oracle[written], "decoded")


@pytest.mark.parametrize(
    ("dtype", "shape"), (("bfloat16", (64,)), ("float16", (2, 32)), ("float32", (2, 32)))
)
def test_encode_and_decode_use_the_scale_of_each_token(dtype, shape):
    scales = scales_of_tokens(1, 40)
    x = tokens_of(scales, shape, dtype)

    @jax.jit
    def there_and_back(x, scales):
        fmt = ma.NvFp4(global_scale=scales)
        quantized = fmt.encode(x)
        return quantized, fmt.decode(quantized, dtype)

    quantized, decoded = there_and_back(x[0], scales[0])
    parts = format_oracle.encode_tokens(x[0], scales[0])
    for field, actual, part in zip(PARTS, quantized, parts):
        harness.assert_same_bytes(np.asarray(actual), part, field)
    expected = format_oracle.decode_tokens(*parts, scales[0], dtype)
    harness.assert_same_bytes(np.asarray(decoded), expected)
    is_invalid = ~(scales[0] >= 0) | np.isinf(scales[0]) | np.signbit(scales[0])
    assert is_invalid.sum() >= 4 and np.isnan(expected[is_invalid].astype("float32")).all()


def whole_exchanges(form, layout=LAYOUT):
    """Return the number of unsplit exchanges of two dispatches and their shared route, if any."""
    if form == "halves":
        return 1
    return 3 if form == "routing" or layout is MANY else 2


def split_exchanges(form):
    return 2 * (form == "halves")


of_every_form = pytest.mark.parametrize("form", DISPATCHES)


@pytest.mark.exchanges(whole_exchanges, split=split_exchanges)
@pytest.mark.parametrize(
    ("form", "layout", "routing", "dtype", "tail"),
    (
        ("ids", LAYOUT, "masked", "bfloat16", "zero"),
        ("ids", MANY, "uniform", "bfloat16", "unspecified"),
        ("routing", LAYOUT, "skewed", "float32", "unspecified"),
        ("halves", LAYOUT, "masked", "float16", "unspecified"),
        ("halves", LAYOUT, "skewed", "float32", "zero"),
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_rows_and_their_scales_are_those_of_the_oracle(form, layout, routing, dtype, tail):
    """With tail="unspecified", the portable path sets the tail's scales to NaN."""
    ids = cases.Case(layout, routing).ids(RANKS)
    scales = scales_of_tokens(RANKS, layout.tokens)
    x, other = (tokens_of(scales, shape, dtype) for shape in ((64,), (2, 32)))
    weights = np.random.default_rng(0).random(ids.shape, np.float32)
    group, expected = harness.group_of(RANKS), routing_of(ids, layout)
    written = ~expected.is_tail | (tail == "zero")

    def rows(x, other, ids, weights, scales):
        options = dict(token_format=ma.NvFp4(global_scale=scales), tail=tail)
        run = functools.partial(
            DISPATCHES[form], (x, [other]), ids, weights, group, layout, **options
        )
        recvs = run(), run(decode=True)
        return [(recv.rows, recv.weights, recv.global_scales) for recv in recvs]

    program = harness.on_each_rank(rows, harness.mesh_of(RANKS), compiler_options=harness.QUICKLY)
    quantized, decoded = program(x, other, ids, weights, scales)
    (first, (second,)), of_rows, global_scales = quantized
    (first_decoded, (second_decoded,)), also_of_rows, none = decoded
    expected_weights = oracle.dispatch_choices(weights, expected)
    for found in (of_rows, also_of_rows):
        harness.assert_same_bytes(found[written], expected_weights[written])
    assert_rows_are(first, global_scales, x, scales, expected, written)
    assert_rows_are(second, global_scales, other, scales, expected, written)
    assert_decoded_are(first_decoded, x, scales, expected, written)
    assert_decoded_are(second_decoded, other, scales, expected, written)
    assert none is None
    if not harness.ON_GPU:
        assert np.isnan(global_scales[~written]).all()


VMAPPED = harness.RANKS_ON_ONE_GPU or 2


def emulated(fn):
    return small_layer.compiled(jax.vmap(fn, axis_name=harness.AXIS))


def small_arguments(elements=2):
    """Return ids [R, T, K], tokens [R, B, T, H] and scales [R, B, T]."""
    ids = cases.Case(LAYOUT, "masked").ids(VMAPPED)
    scales = scales_of_tokens(VMAPPED, elements * LAYOUT.tokens, special=False)
    x = tokens_of(scales, (64,), "float32")
    return (
        ids,
        np.where(np.isfinite(x), x, 1).reshape(VMAPPED, elements, LAYOUT.tokens, 64),
        scales.reshape(VMAPPED, elements, LAYOUT.tokens),
    )


def by_form(form, group, ids, **options):
    """Return a function from (x, scales) to decoded rows; without scales, it does not quantize."""

    def rows(x, scales):
        given = dict(options)
        if scales is not None:
            given |= dict(token_format=ma.NvFp4(global_scale=scales), decode=True)
        return DISPATCHES[form](x, ids, None, group, LAYOUT, **given).rows

    return rows


@pytest.mark.exchanges(
    lambda form: dict(ids=6, routing=5, halves=4)[form],
    split=lambda form: 3 * split_exchanges(form),
)
@of_every_form
def test_derivatives_are_those_of_a_dispatch_without_a_format(form):
    """The cotangents of the scales are zeros."""
    ids, x, scales = small_arguments()
    group = harness.vmapped_group(VMAPPED)

    def quadratic(fn):
        return lambda x: jnp.sum(fn(x) ** 3)

    def derivatives(ids, x, direction, scales):
        rows = by_form(form, group, ids)
        cotangent = jnp.sin(rows(direction, None))
        out, vjp = jax.vjp(rows, x, scales)
        _, plain_vjp = jax.vjp(lambda x: rows(x, None), x)
        found = [
            (lambda fn: jax.jvp(fn, (x,), (direction,))[1]),
            (lambda fn: jax.linearize(fn, x)[1](direction)),
            (lambda fn: jax.grad(lambda x: jnp.vdot(direction, jax.grad(quadratic(fn))(x)))(x)),
        ]

        plain, scaled = (lambda x: rows(x, None)), (lambda x: rows(x, scales))
        of_x, of_scales = vjp(cotangent)
        first = [(of_x, plain_vjp(cotangent)[0])] + [(f(scaled), f(plain)) for f in found[:2]]
        return first, of_scales, found[2](scaled), out

    first, of_scales, second, out = emulated(derivatives)(ids, *x.swapaxes(0, 1), scales[:, 0])
    for actual, expected in first:
        harness.assert_same_bytes(np.asarray(actual), np.asarray(expected))
    assert np.any(first[0][0]) and not np.any(of_scales)
    assert np.isfinite(second).all() and np.any(second)


@pytest.mark.exchanges(3)
def test_the_transpose_is_that_of_a_dispatch_without_a_format():
    ids, x, scales = small_arguments()
    group = harness.vmapped_group(VMAPPED)

    def transposes(ids, x, direction, scales):
        rows = by_form("ids", group, ids)
        cotangent = jnp.sin(rows(direction, None))
        fns = [functools.partial(rows, scales=s) for s in (None, scales, scales[0], 0.25)]
        return [jax.vjp(fn, x)[1](cotangent)[0] for fn in fns]

    expected, *found = emulated(transposes)(ids, *x.swapaxes(0, 1), scales[:, 0])
    assert np.any(expected)
    for actual in found:
        harness.assert_same_bytes(np.asarray(actual), np.asarray(expected))


@pytest.mark.exchanges(
    lambda form: 2 - (form == "halves"), split=lambda form: split_exchanges(form) // 2
)
@of_every_form
def test_quantized_rows_and_their_scales_have_no_gradient(form):
    ids, x, scales = small_arguments()
    group = harness.vmapped_group(VMAPPED)

    def gradients(ids, x, scales):
        def total(x, scales):
            fmt = ma.NvFp4(global_scale=scales)
            recv = DISPATCHES[form](x, ids, None, group, LAYOUT, token_format=fmt)
            decoded = ma.NvFp4(global_scale=recv.global_scales).decode(recv.rows, "float32")
            return jnp.sum(decoded) + jnp.sum(recv.global_scales)

        value, both = jax.value_and_grad(total, (0, 1))(x, scales)
        return value, both, jax.jvp(total, (x, scales), (x, scales))[1]

    value, both, tangent = emulated(gradients)(ids, x[:, 0], scales[:, 0])
    assert np.all(value != 0)
    assert not any(np.any(each) for each in (*both, tangent))


@pytest.mark.exchanges(
    lambda form: 1 if form == "halves" else 7, split=lambda form: 3 * split_exchanges(form)
)
@pytest.mark.parametrize(
    ("form", "axes"),
    (
        ("ids", (0, 0, 0)),
        ("ids", (None, None, 0)),
        ("ids", (None, 0, None)),
        ("halves", (None, None, 0)),
    ),
)
def test_a_batch_has_the_rows_of_each_element(form, axes):
    ids, x, scales = small_arguments()
    group = harness.vmapped_group(VMAPPED)

    def compare(ids, x, scales):
        def rows(ids, x, scales):
            fmt = ma.NvFp4(global_scale=scales)
            run = functools.partial(DISPATCHES[form], x, ids, None, group, LAYOUT, token_format=fmt)
            recv = run()
            return recv.rows, recv.global_scales, run(decode=True).rows

        args = [
            both if axis == 0 else both[0]
            for both, axis in zip((jnp.stack([ids, ids[::-1]]), x, scales), axes)
        ]
        each = [rows(*(a[i] if axis == 0 else a for a, axis in zip(args, axes))) for i in range(2)]
        return jax.vmap(rows, axes)(*args), jax.tree.map(lambda *a: jnp.stack(a), *each)

    batch, each = emulated(compare)(ids, x, scales)
    jax.tree.map(harness.assert_same_bytes, batch, each)


SCALES = ma.NvFp4(global_scale=jnp.ones(2, jnp.float32))
OPTIONS = dict(num_experts=2, token_format=SCALES)


def decode_with_scales_of_tokens(x, ids, **options):
    return SCALES.decode(ma.dispatch(x, ids, **harness.exchanging(options)).rows, "float32")


def layer_in_chunks(x, ids, **options):
    experts = ma.Experts(jnp.ones((1, 32, 2, 4)), jnp.ones((1, 4, 32)))
    options = harness.exchanging(options, num_chunks=2)
    return ma.moe_mlp(x, ma.RouterChoices(ids, None), experts, **options)


def fewer_scales_than_tokens(x, ids, **options):
    return ma.dispatch(jnp.ones((3, 32)), jnp.zeros((3, 1), int), **harness.exchanging(options))


def scales_of_two_axes(x, ids, **options):
    options["token_format"] = ma.NvFp4(global_scale=jnp.ones((2, 2)))
    return ma.dispatch(x.reshape(2, 2, 16), ids, **harness.exchanging(options))


REFUSALS = dict(
    dispatch=(
        fewer_scales_than_tokens,
        r"global_scale .*\[T\].*float32\[3,32\].*float32\[2\]",
    ),
    axes=(
        scales_of_two_axes,
        r"global_scale .*\[num_tokens\].*float32\[2,2\].*one scale for each token",
    ),
    decode=(
        decode_with_scales_of_tokens,
        r"global_scale .*uint8\[4,16\].*float32\[2\].*recv.global_scales",
    ),
    chunks=(layer_in_chunks, r"format .*global_scale.*num_chunks.*float32\[2\].*Omit"),
)


@pytest.mark.parametrize("case", REFUSALS)
def test_bad_input_is_refused(case):
    fn, message = REFUSALS[case]
    on_rank = functools.partial(fn, group=harness.emulated_group(2), **OPTIONS)
    mapped = jax.vmap(on_rank, axis_name=harness.AXIS, in_axes=(0, None))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, jnp.zeros((2, 2, 32)), jnp.zeros((2, 1), jnp.int32))


def test_a_layer_of_global_arrays_refuses_scales_of_tokens():
    mesh = jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1])
    message = r"format .*global_scale.*moe divides.*float32\[2\].*moe_mlp"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        params = ma.init_moe(jax.random.key(0), ma.MoEConfig(32, 8, 2, ma.TopK(1)), axes="ep")
        ma.moe(jnp.ones((2, 32)), **params, axes="ep", exchange=ma.Exchange(token_format=SCALES))


def test_the_estimate_counts_the_scales():
    sizes = dict(num_tokens=128, hidden=64, top_k=4, num_experts=16, group_size=4)
    plain = ma.memory_estimate(**harness.exchanging(sizes, token_format=ma.NvFp4()))
    fmt = ma.NvFp4(global_scale=jnp.ones(128, jnp.float32))
    scaled = ma.memory_estimate(**harness.exchanging(sizes, token_format=fmt))
    assert scaled.rows_bytes - plain.rows_bytes == 4 * plain.capacity
    # The choice array of scales needs 16 bytes for each token.
    wide = dict(sizes, wire_dtype=ma.NvFp4())
    added = [
        ma.memory_estimate(**harness.exchanging(wide, token_format=f)).workspace_bytes
        for f in (ma.NvFp4(), fmt)
    ]
    assert added[1] - added[0] == 2 * 4 * 128 * 16
