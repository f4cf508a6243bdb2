"""Test FP8 experts with a size that is no multiple of 128 against an oracle that does not pad. All
inputs are integers, so sums are exact in any order."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from dense_layer import experts_of
from format_oracle import E4M3, encode_power_of_two
from test_fp8_layer import relative_error

import jax_moe_a2a as ma

RANKS = harness.SEVERAL
HIDDEN, WIDTH = 136, 72  # groups of a row: [H] 128 and 8, [I] 72
LAYOUT = cases.Layout("padded", tokens=6, top_k=2, local_experts=2, hidden=HIDDEN)
RELU = ma.gated(jax.nn.relu)
FIELDS = "w_in", "w_out", "b_in", "b_out"


def arguments(activation=RELU):
    """Return random x, topk_weights, experts and ids of all ranks."""
    rng = np.random.default_rng(0)
    experts = LAYOUT.local_experts

    def integers(*shape, density=1.0):
        found = rng.integers(-3, 4, size=(RANKS, *shape)) * (rng.random((RANKS, *shape)) < density)
        return found.astype(np.float32)

    x = 2 * integers(LAYOUT.tokens, HIDDEN) + 1  # odd, so FP8 rounds them in groups with large ones
    x[..., ::40] *= 100
    x[..., HIDDEN - 1] = 3  # a scale of its own for the last group
    w_in = integers(experts, HIDDEN, 2 * WIDTH, density=0.05)
    w_out = integers(experts, WIDTH, HIDDEN, density=0.2)
    biases = integers(experts, 2 * WIDTH), integers(experts, HIDDEN)
    topk_weights = 2.0 ** rng.integers(-1, 2, size=(RANKS, LAYOUT.tokens, LAYOUT.top_k))
    ids = cases.Case(LAYOUT, "masked").ids(RANKS, 0)
    floats = experts_of(w_in, w_out, *biases, activation)
    return x, topk_weights.astype(np.float32), floats, ids


def rounded(row):
    """Round a row to FP8 in groups of at most 128 numbers, and return it as float64."""
    groups = []
    for group in np.split(row, range(128, len(row), 128)):
        codes, scales = encode_power_of_two(ma.BlockwiseFp8(), np.abs(group)[None])
        groups.append(np.sign(group) * codes[0].view(E4M3).astype(np.float64) * scales[0])
    return np.concatenate(groups)


def oracle(x, topk_weights, experts, ids):
    w_in, w_out, b_in, b_out = (
        np.concatenate(getattr(experts, name)).astype(np.float64) for name in FIELDS
    )
    y = np.zeros(x.shape)
    for rank, token, choice in np.ndindex(ids.shape):
        e, weight = ids[rank, token, choice], topk_weights[rank, token, choice]
        if e < 0:
            continue
        row = rounded(x[rank, token].astype(np.float64))
        gate, up = np.einsum("h,hgi->gi", row, w_in[e]) + b_in[e]
        h = rounded(np.maximum(gate, 0) * up * weight)
        y[rank, token] += h @ w_out[e] + weight * b_out[e]
    return y


def layer(x, topk_weights, experts, ids, *, wrap=lambda experts: experts, group=None, **options):
    route_args = small_layer.route_args(group or harness.group_of(RANKS), LAYOUT)
    options = harness.exchanging(route_args, options)
    return ma.moe_mlp(x, ma.RouterChoices(ids, topk_weights), wrap(experts), **options)


WRAPS = dict(
    frozen=ma.quantize_experts,
    transposed=functools.partial(ma.quantize_experts, transposed=True),
    in_fp8=lambda experts: experts.in_fp8(),
)


@pytest.mark.parametrize("name", WRAPS)
def test_padding_changes_no_number(name):
    args = arguments()
    layers = harness.over_ranks(functools.partial(layer, wrap=WRAPS[name]), harness.mesh_of(RANKS))
    found = small_layer.compiled(layers, exchanges=2)(*args)
    expected = oracle(*args)
    assert np.abs(expected).max() > 1000
    if harness.ON_GPU:  # tensor cores sum less precisely
        assert relative_error(found, expected) < 0.01
    else:
        np.testing.assert_array_equal(found, expected)


@functools.cache
def gradients(name, *, is_padded=False, num_chunks=None):
    """Return the gradients of x, router weights and, unless they are frozen, experts."""
    x, topk_weights, experts, ids = arguments()
    if is_padded:
        experts = jax.vmap(lambda experts: experts.padded())(experts)
    options = dict(wrap=WRAPS.get(name, lambda experts: experts), num_chunks=num_chunks)
    on_rank = functools.partial(layer, group=harness.emulated_group(RANKS), **options)
    layers = jax.vmap(on_rank, axis_name=harness.AXIS)
    ct = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    loss = lambda *args: jnp.sum(layers(*args, ids) * ct)
    argnums = (0, 1) if name in ("frozen", "transposed") else (0, 1, 2)
    grad = harness.quickly(jax.grad(loss, argnums))
    return jax.tree.leaves(grad(x, topk_weights, experts))


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("name", WRAPS)
def test_gradients_through_padded_experts_are_those_of_the_layer(name):
    found = gradients(name, num_chunks=2 if name == "transposed" else None)
    assert len(found) == (6 if name == "in_fp8" else 2)
    for one, right in zip(found, gradients("in the dtype of x"), strict=False):
        assert one.shape == right.shape and relative_error(one, right) < 0.1


@pytest.mark.exchanges(0)
def test_parameters_that_were_padded_train_alike_and_their_zeros_stay_zeros():
    for one, right in zip(gradients("in_fp8", is_padded=True), gradients("in_fp8"), strict=True):
        expected = np.pad(right, [(0, n - m) for n, m in zip(one.shape, right.shape, strict=True)])
        np.testing.assert_array_equal(one, expected)
    padded = arguments()[2].map_weights(lambda w: w[0]).replace(b_in=None, b_out=None).padded()
    assert padded.w_in.shape[1:] == (256, 2, 128) and padded.w_out.shape[1:] == (128, 256)
    assert padded.padded().w_in is padded.w_in


@pytest.mark.exchanges(6)
def test_a_whole_layer_has_a_router_and_a_shared_expert_of_the_true_width():
    """A user who pads the tokens and the router gets the same result."""
    config = ma.MoEConfig(HIDDEN, WIDTH, 4, ma.TopK(2), bias=True, shared_hidden=24)
    params = ma.init_moe(jax.random.key(0), config)
    params["experts"] = ma.quantize_experts(params["experts"])
    x = jax.random.normal(jax.random.key(1), (6, HIDDEN))
    specs = ma.moe_partition_specs(params, "ep")
    assert jax.tree.structure(specs) == jax.tree.structure(params)

    def wide(params, x):
        rows = lambda w: jnp.pad(w, [(0, 256 - HIDDEN)] + [(0, 0)] * (w.ndim - 1))
        last = lambda w: jnp.pad(w, [(0, 0)] * (w.ndim - 1) + [(0, 256 - HIDDEN)])
        router, experts, shared = (params[name] for name in ("router", "experts", "shared"))
        w_out = jax.tree.map(np.asarray, experts.w_out)
        w_out = ma.QuantizedExperts(np.pad(w_out.values, ((0, 0), (0, 120), (0, 0))), w_out.scales)
        return last(x), dict(
            router=router.replace(kernel=rows(router.kernel)),
            experts=experts.replace(w_out=w_out, b_out=last(experts.b_out)),
            shared=shared.replace(w_in=rows(shared.w_in), w_out=last(shared.w_out)),
        )

    mesh = jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        layer = lambda x, params: ma.moe(x, **params, axes="ep")[0]
        run = harness.quickly(layer)
        found, (wide_x, wide_params) = run(x, params), wide(params, x)
        expected = run(wide_x, wide_params)
    assert found.shape == x.shape
    np.testing.assert_allclose(found, expected[:, :HIDDEN], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(expected[:, HIDDEN:], 0)


@pytest.mark.exchanges(0)
def test_tokens_that_do_not_fit_to_padded_experts_are_refused():
    x, topk_weights, experts, ids = jax.tree.map(lambda a: a[0], arguments())
    group = harness.emulated_group(RANKS)
    for cut, wrap, size in ((8, WRAPS["frozen"], 128), (0, lambda experts: experts.padded(), 136)):
        with pytest.raises(ValueError, match=f"experts.w_in must have .* H={size}, because x is"):
            layer(x[:, cut:], topk_weights, wrap(experts), ids, group=group)
