"""Test that layers with FP8 weights have the results and gradients of layers with decoded
weights."""

import dataclasses
import functools
import pathlib
import re

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from dense_layer import experts_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_moe import mesh_of

import jax_moe_a2a as ma
from jax_moe_a2a._src.grouped.weights import decode_experts

RANKS = harness.SEVERAL
WIDTH = 128
LAYOUT = cases.Layout("fp8", tokens=6, top_k=2, local_experts=2, hidden=128)
SWIGLU = ma.gated(jax.nn.silu)


def arguments(dtype="bfloat16"):
    """Return random x, topk_weights, experts and ids of all ranks."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: cases.normal(rng, (RANKS, *shape), "float32")
    experts, hidden = LAYOUT.local_experts, LAYOUT.hidden
    ids = cases.Case(LAYOUT, "masked").ids(RANKS, 0)
    w_in, w_out = normal(experts, hidden, 2 * WIDTH) / 11, normal(experts, WIDTH, hidden) / 11
    floats = normal(LAYOUT.tokens, hidden), w_in, w_out, *map(normal, (experts,) * 2, (256, 128))
    x, *weights = (jnp.asarray(array, dtype) for array in floats)
    topk_weights = jnp.asarray(normal(LAYOUT.tokens, LAYOUT.top_k))
    return x, topk_weights, experts_of(*weights, SWIGLU), jnp.asarray(ids)


def frozen(args):
    x, topk_weights, experts, ids = args
    return x, topk_weights, jax.jit(jax.vmap(ma.quantize_experts))(experts), ids


def layer(*args, in_fp8=False, weigh_input=False, **options):
    x, topk_weights, experts, ids = args
    route_args = small_layer.route_args(harness.group_of(RANKS), LAYOUT)
    options = harness.exchanging(route_args, options)
    experts = experts.in_fp8() if in_fp8 else experts
    experts = experts.replace(weigh_input=weigh_input)
    return ma.moe_mlp(x, ma.RouterChoices(ids, topk_weights), experts, **options)


def of_all_ranks(fn=layer, **options):
    return small_layer.on_all_ranks(functools.partial(fn, **options), harness.mesh_of(RANKS))


def on_one_device(wrap=lambda fn: fn, **options):
    """Return a function that runs the layer of all ranks on one device."""
    on_rank = functools.partial(layer, **dict(group=harness.emulated_group(RANKS)) | options)
    return jax.vmap(wrap(on_rank), axis_name=harness.AXIS)


def relative_error(found, expected):
    found, expected = (x.astype(np.float64) for x in harness.numpy_of((found, expected)))
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.exchanges(0)
def test_a_recognized_activation_and_quantization_are_one_pass():
    args = frozen(arguments())
    counts = small_layer.counts(of_all_ranks(), *args)
    assert (counts["grouped_dot_fp8"], counts["act_encode"]) == (2, 1)
    other = args[2].replace(activation=lambda x: SWIGLU(1 * x))
    assert "act_encode" not in small_layer.counts(of_all_ranks(), *args[:2], other, args[3])
    with jax.debug_nans(True):  # unwritten rows are NaN, an error for debug_nans
        assert "act_encode" not in small_layer.counts(of_all_ranks(), *args)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("trainable", (False, True))
def test_gradients_of_numbers_in_fp8_are_refused(trainable):
    """An optimizer would update the float source of FP8 weights, but not the FP8 numbers."""
    layers = on_one_device()
    x, topk_weights, experts, ids = arguments()
    experts = jax.vmap(functools.partial(ma.quantize_experts, trainable=trainable))(experts)

    def loss(experts):
        return jnp.sum(layers(x, topk_weights, experts, ids).astype(jnp.float32))

    with pytest.raises(TypeError, match="trainable=True"):
        jax.eval_shape(jax.grad(loss), experts)


def rounded(x):
    fmt = ma.BlockwiseFp8()
    return fmt.decode(fmt.encode(x), x.dtype)


@jax.custom_vjp
def decoded_dot(rows, seen, w, sizes):
    """The gradient of `rows` rounds the cotangent to FP8; that of `w` uses `rows`, not `seen`."""
    return ma.grouped_dot(seen, w, sizes)


def decoded_dot_transpose(kept, ct):
    rows, _, w, sizes = kept
    of_rows = ma.grouped_dot(rounded(ct), jnp.swapaxes(w, 1, 2), sizes)
    of_w = jax.vjp(lambda w: ma.grouped_dot(rows, w, sizes), w)[1](ct)
    return of_rows, jnp.zeros_like(rows), *of_w, np.zeros(sizes.shape, jax.dtypes.float0)


decoded_dot.defvjp(lambda *args: (decoded_dot(*args), args), decoded_dot_transpose)


def with_decoded_weights(*args, weigh_input=False, in_fp8=False):
    x, topk_weights, weights, ids = args
    of_rows = lambda q: q.reshape(len(q), -1, q.shape[-1])

    def decoded(w):
        q = ma.quantize_experts(w) if in_fp8 else w
        found = decode_experts(of_rows(q.values), of_rows(q.scales), x.dtype)
        found = jnp.swapaxes(found, 1, 2)
        floats = w.reshape(found.shape) if in_fp8 else jnp.zeros_like(found)
        return floats + jax.lax.stop_gradient(found - floats)

    w_in, w_out = decoded(weights.w_in), decoded(weights.w_out)
    route_args = small_layer.route_args(harness.group_of(RANKS), LAYOUT)
    options = harness.exchanging(route_args, token_format=FP8)
    recv = ma.dispatch(x, ids, topk_weights, decode=True, **options)
    experts, has_token = jnp.clip(recv.row_experts, 0), recv.row_experts[:, None] >= 0
    b_in = weights.b_in.reshape(len(weights.b_in), -1)
    before, after = recv.weights[:, None], jnp.where(has_token, jnp.ones((), x.dtype), 0)
    before, after = (before, after) if weigh_input else (after, before)

    def product(rows, seen, w, lora):
        y = decoded_dot(rows, seen, w, recv.group_sizes)
        if lora is None:
            return y
        low = ma.grouped_dot(rows, lora.a, recv.group_sizes) * lora.scale
        return y + ma.grouped_dot(low, lora.b.reshape(*lora.b.shape[:2], -1), recv.group_sizes)

    rows = before * recv.rows
    h = SWIGLU(product(rows, rows, w_in, weights.lora_in) + b_in[experts])
    h = jnp.where(has_token, h * after, 0)
    seen = rounded(h)
    if not in_fp8:
        h += jax.lax.stop_gradient(seen - h)  # adapters multiply the rounded rows, too
    y = product(h, seen, w_out, weights.lora_out) + after * weights.b_out[experts]
    return ma.combine(y, recv, weights=None)


def frozen_gradients(fn, args):
    """Return the result of `fn`, and the gradients of x, router weights and biases."""
    x, topk_weights, experts, ids = args
    ct = jnp.asarray(cases.normal(np.random.default_rng(1), x.shape, "float32"))

    def of_floats(x, topk_weights, b_in, b_out):
        return fn(x, topk_weights, experts.replace(b_in=b_in, b_out=b_out), ids)

    y, transpose = jax.vjp(of_floats, x, topk_weights, experts.b_in, experts.b_out)
    return y, *transpose(ct.astype(y.dtype))


@pytest.mark.parametrize("weigh_input", (False, True))
def test_frozen_weights_have_the_gradients_of_decoded_ones(weigh_input):
    """Gradients with frozen FP8 weights and with decoded weights differ only by the order of
    float32 sums."""
    args = frozen(arguments("float32"))

    def run(fn, exchanges):
        gradients = functools.partial(frozen_gradients, of_all_ranks(fn, weigh_input=weigh_input))
        return small_layer.compiled(gradients, exchanges=exchanges)(args)

    for one, right in zip(run(layer, 4), run(with_decoded_weights, 5), strict=True):
        assert relative_error(one, right) < (0.02 if harness.ON_GPU else 1e-5)


@pytest.mark.parametrize("weigh_input", (False, True))
def test_training_has_the_gradients_of_decoded_numbers(weigh_input):
    """The first product and the gradient of its weights use the FP8 rows that the dispatch
    returned."""
    *floats, ids = arguments("float32")
    ct = jnp.cos(floats[0])
    options = dict(in_fp8=True, weigh_input=weigh_input)

    def run(fn, exchanges):
        gradients = functools.partial(value_and_grads, fn=fn, **options)
        return small_layer.compiled(gradients, exchanges=exchanges)(floats, ids, ct)

    for one, right in zip(run(layer, 5), run(with_decoded_weights, 5), strict=True):
        assert relative_error(one, right) < (0.02 if harness.ON_GPU else 1e-5)


@functools.cache
def emulated(variant=None):
    """Return the result and gradients of a layer with frozen FP8 weights on one device."""
    options = {}
    x, topk_weights, experts, ids = frozen(arguments("float32"))
    if variant == "unfused":
        experts = experts.replace(activation=lambda x: SWIGLU(1 * x))
    is_composed = variant == "transposed, checkpoint, chunks"
    if is_composed:
        options = dict(num_chunks=2, wrap=jax.checkpoint)
        turned = lambda w: dataclasses.replace(w, transposed=jnp.moveaxis(w.values, -1, 2))
        experts = experts.replace(w_in=turned(experts.w_in), w_out=turned(experts.w_out))
    fn = on_one_device(**options)
    run = lambda x: frozen_gradients(fn, (x, topk_weights, experts, ids))
    if variant != "vmap":
        return harness.quickly(run)(x)
    return [x[1] for x in harness.quickly(jax.vmap(run))(jnp.stack([0 * x, x]))]


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("variant", ("unfused", "transposed, checkpoint, chunks", "vmap"))
def test_frozen_weights_have_the_same_gradients_in_each_program(variant):
    for one, right in zip(emulated(variant), emulated(), strict=True):
        # With another order of sums, some activations are rounded to a neighbouring FP8 value.
        assert relative_error(one, right) < (1e-6 if variant != "unfused" else 0.01)


@pytest.mark.exchanges(0)
def test_frozen_weights_make_two_exchanges_and_products_in_fp8_for_gradients():
    args = frozen(arguments())
    counts = small_layer.counts(functools.partial(frozen_gradients, on_one_device()), args)
    assert counts["grouped_dot_fp8"] == 2 and counts["frozen_dot"] == 2
    assert counts["combine"] == 2 and counts["act_encode"] == 1


@pytest.mark.exchanges(0)
@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(token_format=ma.MxFp8()), ValueError, "token_format must be BlockwiseFp8"),
        (dict(x="float16"), TypeError, "x must be bfloat16 or float32"),
        (dict(w_out="bfloat16"), TypeError, "experts.w_out must be .*QuantizedExperts.*bfloat16"),
        (dict(num_experts=3 * RANKS), ValueError, "experts must .*L=3"),
        (dict(activation=jax.nn.silu), ValueError, "activation.* must return"),
    ],
    ids=("format", "x", "w_out", "experts", "activation"),
)
def test_an_error_names_the_argument(changed, error, message):
    options = dict(changed)
    x, weights, experts, ids = frozen(arguments())
    x = x.astype(options.pop("x", x.dtype))
    experts = experts.replace(activation=options.pop("activation", SWIGLU))
    if "w_out" in options:
        experts = experts.replace(w_out=arguments(options.pop("w_out"))[2].w_out)
    with pytest.raises(error, match=message):
        jax.eval_shape(on_one_device(**options), x, weights, experts, ids)


def value_and_grads(floats, ids, ct, *, fn=layer, **options):
    y, transpose = jax.vjp(lambda *floats: of_all_ranks(fn, **options)(*floats, ids), *floats)
    return y, *jax.tree.leaves(transpose(ct.astype(y.dtype)))


@functools.cache
def exact():
    """Return (floats, ids, a cotangent), and the `value_and_grads` of a layer in float32."""
    *floats, ids = arguments("bfloat16")
    ct = jnp.asarray(cases.normal(np.random.default_rng(1), floats[0].shape, "float32"))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), floats)
    return (floats, ids, ct), small_layer.compiled(value_and_grads, exchanges=5)(wide, ids, ct)


def errors(**options):
    """Return the relative errors of the output and of all gradients."""
    (floats, ids, ct), expected = exact()
    if options.get("frozen"):
        run = small_layer.compiled(of_all_ranks(), exchanges=2)
        found = [run(*frozen((*floats, ids)))]
    else:
        run = small_layer.compiled(functools.partial(value_and_grads, **options), exchanges=5)
        found = run(floats, ids, ct)
    return list(map(relative_error, found, expected))


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("columns", (100, 2))
def test_training_needs_multiples_of_128(columns):
    x, weights, experts, ids = arguments()
    cut = ma.Experts(experts.w_in[..., :columns], experts.w_out[..., :columns, :])
    cut = cut.map_weights(lambda w: ma.QuantizedExperts(source=w))
    with pytest.raises(ValueError, match=r"experts.w_in must have .* multiples? of 128.*padded"):
        jax.eval_shape(on_one_device(), x, weights, cut, ids)


@pytest.mark.exchanges(0)
def test_training_makes_two_combines_and_products_in_fp8():
    *floats, ids = arguments()
    ct = floats[0]
    run = functools.partial(value_and_grads, in_fp8=True)
    counts = small_layer.counts(run, floats, ids, ct)
    assert counts["straight_through_dot"] == 3  # the first product, and the gradients of rows
    assert counts["act_dot"] == counts["act_grad"] == 1 and counts["encode_squares"] == 2
    assert counts["combine"] == 2
    # Two arrays of weights and two biases each have a gradient.
    assert counts["grouped_outer"] == 4
    run = functools.partial(value_and_grads, in_fp8=True, num_chunks=2)
    counts = small_layer.counts(run, floats, ids, ct)
    assert counts["straight_through_dot"] >= 3 and counts["add_outer"] == 2


POLICIES = jax.checkpoint_policies
OF_QUANTIZED = POLICIES.save_only_these_names(ma.QUANTIZED_CHECKPOINT_NAME)
OF_ROWS = POLICIES.save_only_these_names(ma.ROWS_CHECKPOINT_NAME, ma.ROUTING_CHECKPOINT_NAME)
OF_PRODUCTS = POLICIES.save_only_these_names(ma.PRODUCTS_CHECKPOINT_NAME)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize(
    "in_fp8, policy",
    (
        (True, OF_QUANTIZED),
        (True, OF_PRODUCTS),
        (True, POLICIES.everything_saveable),
        (False, OF_ROWS),
    ),
    ids=("weights", "products", "everything", "frozen, rows"),
)
def test_a_policy_saves_all_numbers_in_fp8(in_fp8, policy):
    """Without the package's help, JAX would save float8_e4m3fn numbers of at least 256 as NaN."""
    x, topk_weights, experts, ids = arguments() if in_fp8 else frozen(arguments())

    def gradients(policy, x):
        wrap = functools.partial(jax.checkpoint, policy=policy)
        layers = on_one_device(wrap=wrap, in_fp8=in_fp8)
        loss = lambda x: jnp.sum(jnp.sin(layers(x, topk_weights, experts, ids)).astype(jnp.float32))
        return jax.grad(loss)(x)

    saving, again = (functools.partial(gradients, each) for each in (policy, None))
    if policy is OF_QUANTIZED:
        counts = (small_layer.counts(fn, x)["encode_squares"] for fn in (saving, again))
        assert tuple(counts) == (2, 4)  # once or twice for two arrays of weights
    if policy is OF_PRODUCTS:
        counts = (small_layer.counts(fn, x)["straight_through_dot"] for fn in (saving, again))
        assert tuple(counts) == (3, 4)  # with the policy, no product is repeated
    # Saved numbers are rounded to bfloat16, so some activations become a neighbouring FP8 value.
    assert relative_error(*(harness.quickly(fn)(x) for fn in (saving, again))) < 0.1


@pytest.mark.exchanges(0)
def test_chunks_quantize_weights_once_and_train_as_one():
    x, topk_weights, experts, ids = arguments("float32")
    batch = [jnp.stack([each, each[::-1]]) for each in (x, topk_weights, ids)]

    def gradients(x, topk_weights, ids, experts, num_chunks, once=False):
        layers = on_one_device(num_chunks=num_chunks, in_fp8=not once)
        of_batch = jax.vmap(layers, in_axes=(0, 0, None, 0))

        def loss(x, topk_weights, experts):
            if once:
                experts = jax.vmap(functools.partial(ma.quantize_experts, trainable=True))(experts)
            return jnp.sin(of_batch(x, topk_weights, experts, ids)).sum()

        return jax.grad(loss, (0, 1, 2))(x, topk_weights, experts)

    jaxpr = jax.make_jaxpr(functools.partial(gradients, num_chunks=2))(*batch, experts)
    loops = [eqn for eqn in harness.equations(jaxpr) if eqn.primitive.name == "scan"]
    assert loops and harness.count_primitives(jaxpr)["encode_squares"] > 0
    for loop in loops:
        assert "encode_squares" not in harness.count_primitives(loop.params["jaxpr"])
    one = [x[:1] for x in batch]

    @harness.quickly
    def both(one, experts):
        return gradients(*one, experts, 2), gradients(*one, experts, None, once=True)

    for a, b in zip(*map(jax.tree.leaves, both(one, experts)), strict=True):
        assert relative_error(a, b) < 1e-6


FP8 = ma.BlockwiseFp8()
ROWS = {  # the rows of the table in docs/fp8.md
    "bfloat16": dict(),
    "tokens in FP8": dict(token_format=FP8),
    "quantized weights": dict(frozen=True),
    "`in_fp8()`": dict(in_fp8=True),
}


@pytest.mark.parametrize("row", ROWS)
def test_errors_are_those_of_the_page(row):
    found = errors(**ROWS[row])
    text = (pathlib.Path(__file__).parent.parent / "docs/fp8.md").read_text()
    (cells,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", text, re.M)
    stated = [float(cell.strip(" %")) / 100 for cell in cells.split("|") if cell.strip()]
    assert len(found) == len(stated)
    # On GPUs, and with all ranks on one device, XLA omits other roundings than for the page.
    rtol = 0.25 if harness.ON_GPU or harness.RANKS_ON_ONE_GPU else 0.15
    np.testing.assert_allclose(found, stated, rtol=rtol, atol=0.001)


@pytest.mark.several_devices("meshes of several axes")
@pytest.mark.one_process("meshes of several axes")
def test_moe_over_expert_and_tensor_axes():
    mesh = mesh_of(AxisType.Auto, ep=2, tensor=2)
    config = ma.MoEConfig(128, 256, 4, ma.TopK(2), bias=True)
    params = jax.tree.map(np.asarray, ma.init_moe(jax.random.key(0), config))
    x = np.random.default_rng(1).normal(size=(6, 128)).astype(np.float32)
    experts = ma.quantize_experts(params["experts"])
    in_fp8 = params | dict(experts=experts)
    axes = ma.Axes("ep", tensor="tensor")
    options, specs = dict(axes=axes, num_chunks=2), ma.moe_partition_specs(in_fp8, axes)

    @harness.quickly
    def run(x, params):
        experts = params["experts"]

        def result(x, router, b_in, b_out):
            own = experts.replace(b_in=b_in, b_out=b_out)
            return ma.moe(x, router, own, **harness.exchanging(options))[0]

        y, transpose = jax.vjp(result, x, params["router"], experts.b_in, experts.b_out)
        return y, transpose(jnp.cos(y))

    with jax.set_mesh(mesh):
        placed = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), in_fp8, specs)
        found = run(x, placed)
        close = run(x, params)
        own = ma.Experts(np.ones((4, 128, 2, 128), np.float32), np.ones((4, 128, 128), np.float32))
        for narrow in (own.in_fp8(), ma.quantize_experts(own)):
            with pytest.raises(ValueError, match="experts.w_in must .* 128 times the size 2"):
                ma.moe(x, params["router"], narrow, **harness.exchanging(options))
    pairs = list(zip(*map(jax.tree.leaves, (found, close)), strict=True))
    assert len(pairs) == 6  # the result, and the gradients of x, both router arrays, and biases
    for i, (one, right) in enumerate(pairs):
        assert relative_error(one, right) < (0.08 if i == 0 else 0.1)
    assert placed["experts"].w_out.scales.sharding.spec == P("ep", None, "tensor")


@pytest.mark.several_devices("meshes of several axes")
@pytest.mark.one_process("meshes of several axes")
def test_moe_trains_micro_batches_with_weights_that_were_quantized_once():
    """Each device stores 192 rows of weights, which is no multiple of 128."""
    mesh = mesh_of(AxisType.Explicit, data=2, ep=2, tensor=2)
    axes = ma.Axes("ep", data="data", tensor="tensor", fsdp="data")
    x = np.random.default_rng(1).normal(size=(2, 16, 384)).astype(np.float32)

    def loss(params, x, once):
        """Return the sum of the losses of all micro-batches, and the layer's outputs."""
        own = params["experts"]
        experts = ma.quantize_experts(own, trainable=True) if once else own.in_fp8()

        def add(total, x):
            y, _ = ma.moe(x, params["router"], experts, axes=axes)
            return total + jnp.sin(y).sum(), y

        return jax.lax.scan(add, jnp.float32(0), x)

    with jax.set_mesh(mesh):
        config = ma.MoEConfig(384, 256, 4, ma.TopK(2))
        params = ma.init_moe(jax.random.key(0), config, axes)
        step = jax.value_and_grad(loss, has_aux=True)
        run = jax.jit(step, static_argnums=2, compiler_options=harness.QUICKLY)
        expected, found = (run(params, x, once) for once in (False, True))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
