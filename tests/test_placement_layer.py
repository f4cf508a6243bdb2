"""Test a layer with replicas of experts against the layer without a placement."""

import functools
import re

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer

import jax_moe_a2a as ma
from jax_moe_a2a._src.layer import fetch, placed

pytestmark = [pytest.mark.exchanges(0), pytest.mark.usefixtures("exact_products")]


def placement_of(rng, ranks, local, spare, kind="random"):
    """Return a placement in which ranks keep their experts, and spare slots are random or empty."""
    experts = ranks * local
    most = 31 if kind == "one" else 30
    spares = rng.integers(-1, experts, (ranks, spare))
    if kind == "one":
        spares[:] = 0
        spares.ravel()[most - 1 :] = -1
    home = np.arange(experts).reshape(ranks, local)
    table = np.concatenate([home, spares], axis=1).ravel()
    return ma.Placement.from_slots(table, experts, num_ranks=ranks), spares


def on_ranks(fn):
    return jax.jit(jax.vmap(fn, axis_name="ep"))


@pytest.mark.parametrize("ranks, spare", ((1, 2), (2, 0), (2, 1), (8, 3)))
def test_spare_slots_have_the_weights_of_their_experts(monkeypatch, ranks, spare):
    monkeypatch.setattr(fetch, "PIECE_ELEMENTS", 6)
    rng, local = np.random.default_rng(ranks), 2
    group = ma.Group(axis_name="ep", size=ranks, implementation="portable")
    w = dict(
        w=jnp.asarray(rng.normal(size=(ranks, local, 3, 8)), jnp.bfloat16),
        b=jnp.asarray(rng.normal(size=(ranks, local, 5)), jnp.float32),
        fp8=jnp.asarray(rng.normal(size=(ranks, local, 7)), jnp.float8_e4m3fn),
    )

    @on_ranks
    def fetched(w, placement):
        return ma.fetch_experts(w, placement, group=group)

    @on_ranks
    def gradient(w, cts, placement):
        of = lambda w: ma.fetch_experts(w, placement, group=group)
        return jax.vjp(of, w)[1](cts)[0]

    for _ in range(3):
        placement, spares = placement_of(rng, ranks, local, spare)
        each = jax.tree.map(lambda x: jnp.broadcast_to(x, (ranks, *x.shape)), placement)
        found = fetched(w, each)
        for name, x in w.items():
            flat = np.asarray(x.astype(jnp.float32)).reshape(ranks * local, *x.shape[2:])
            empty = (spares < 0).reshape(*spares.shape, *(1,) * (x.ndim - 2))
            expected = np.where(empty, 0, flat[spares])
            np.testing.assert_array_equal(np.asarray(found[name].astype(jnp.float32)), expected)
        cts = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), dict(found))
        cts["fp8"] = np.zeros(found["fp8"].shape, jax.dtypes.float0)
        if not spare:
            continue
        floats = {name: w[name] for name in ("w", "b")}
        of_floats = {name: cts[name] for name in floats}
        grads = gradient(floats, of_floats, each)
        for name, x in floats.items():
            sums = np.zeros((ranks * local, *x.shape[2:]), np.float32)
            for r in range(ranks):
                for s in range(spare):
                    if spares[r, s] >= 0:
                        sums[spares[r, s]] += np.asarray(cts[name][r, s].astype(jnp.float32))
            expected = jnp.asarray(sums.reshape(x.shape)).astype(x.dtype).astype(jnp.float32)
            actual = grads[name].astype(jnp.float32)
            np.testing.assert_allclose(
                actual, expected, rtol=1e-2 if name == "w" else 1e-6, atol=1e-6
            )
    assert fetched._cache_size() == 1


def test_gradients_of_fetched_weights_in_float64_are_exact():
    group = ma.Group(axis_name="ep", size=2, implementation="portable")
    placement = ma.Placement.from_slots([0, 1, 1, 2, 3, 1], 4, num_ranks=2)
    fetch_all = jax.vmap(
        lambda w: ma.fetch_experts(w, placement, group=group), axis_name="ep", axis_size=2
    )
    with jax.enable_x64(True):
        ct = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 3)))
        (found,) = jax.vjp(fetch_all, jnp.zeros((2, 2, 3)))[1](ct)
        assert found.dtype == jnp.float64
        np.testing.assert_array_equal(found[0, 1], ct[0, 0] + ct[1, 0])


RANKS, LOCAL, TOKENS, TOP_K, HIDDEN, WIDTH = 2, 2, 5, 2, 8, 4
LAYOUT = cases.Layout("placed", TOKENS, TOP_K, LOCAL, hidden=HIDDEN)
SWIGLU = ma.gated(jax.nn.silu)
GROUP = ma.Group(axis_name="ep", size=RANKS, implementation="portable")


def layer_arguments(rng, hostile=False):
    ids = rng.integers(-1, RANKS * LOCAL, (RANKS, TOKENS, TOP_K))
    if hostile:
        ids[:] = 0
    shapes = small_layer.shapes_of_moe(LAYOUT, 2 * WIDTH, WIDTH)
    floats = [jnp.asarray(rng.normal(size=(RANKS, *s)), jnp.float32) for s in shapes]
    return jnp.asarray(ids), floats


def problem(seed=0):
    rng = np.random.default_rng(seed)
    placement, _ = placement_of(rng, RANKS, LOCAL, 1)
    return *layer_arguments(rng), placement


def of_ranks(fn, **options):
    """Return a function of (ids, floats, placement) that runs `fn` on all ranks."""
    on_rank = functools.partial(fn, group=GROUP, **options)
    return jax.vmap(on_rank, axis_name="ep", in_axes=(0, 0, None))


def layer(ids, floats, placement, **options):
    options = dict(activation=SWIGLU, layout=LAYOUT, placement=placement) | options
    return small_layer.moe_layer(*floats, ids, **options)


def value_and_gradients(ids, floats, placement, **options):
    def loss(floats):
        y = layer(ids, floats, placement, **options)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))).sum(), y

    return jax.grad(loss, has_aux=True)(floats)


@pytest.mark.parametrize(
    "spare, options",
    (
        (1, dict(activation=lambda x: SWIGLU(jnp.tanh(x)))),
        (3, dict(alignment=4)),
    ),
    ids=("unfused", "aligned"),
)
def test_a_layer_with_replicas_equals_the_layer_without(spare, options):
    rng = np.random.default_rng(spare)
    run = jax.jit(of_ranks(value_and_gradients, **options))
    for kind in ("random", "one"):
        placement, _ = placement_of(rng, RANKS, LOCAL, spare, kind)
        ids, floats = layer_arguments(rng, kind == "one")
        actual, expected = run(ids, floats, placement), run(ids, floats, None)
        small_layer.assert_close(actual, expected, tolerance=2e-4)
    assert run._cache_size() == 2


def test_gradients_of_rows_of_other_experts_do_not_count():
    """The cotangent of a row that is not kept is NaN, but the row's gradient is zero."""
    is_kept = jnp.array([True, False])
    rows, of_rows = jax.vjp(lambda x: placed._with_gradients_of(x, is_kept), jnp.ones((2, 3)))
    (found,) = of_rows(jnp.full((2, 3), 5.0).at[1].set(jnp.nan))
    assert np.all(rows == 1) and found.tolist() == [[5] * 3, [0] * 3]


@pytest.mark.parametrize("kind", ("frozen, chunks", "trained"))
def test_replicas_compute_in_fp8(kind):
    """Replicas change the results only because sums have another order."""
    size, rng = 128, np.random.default_rng(5)
    placement, _ = placement_of(rng, RANKS, LOCAL, 2)
    ids, (_, topk_weights, *_) = layer_arguments(rng)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(RANKS, *shape)), jnp.float32)
    x, biases = draw(TOKENS, size), [draw(LOCAL, 2 * size), draw(LOCAL, size)]
    weights = [draw(LOCAL, size, 2 * size) / 10, draw(LOCAL, size, size) / 10]
    if "frozen" in kind:

        def run(ids, floats, placement, group):
            frozen = functools.partial(ma.quantize_experts, transposed=True)

            def of_others(x, topk_weights, *biases):
                given = [x, topk_weights, *floats[2:4], *biases]
                options = dict(group=group, num_chunks=TOKENS)
                return layer(ids, given, placement, change=frozen, **options)

            y, transpose = jax.vjp(of_others, *floats[:2], *floats[4:])
            return y, transpose(jnp.cos(y))

    else:
        run = functools.partial(value_and_gradients, change=ma.Experts.in_fp8)
    run = jax.jit(of_ranks(run))
    floats = [x, topk_weights, *weights, *biases]
    actual, expected = run(ids, floats, placement), run(ids, floats, None)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_chunks_fetch_once():
    # One dispatch fetches the weights, and one combine returns gradients. The loops over chunks,
    # whose bodies are counted once, contain two exchanges forward and three backward.
    found = exchanges_of(of_ranks(value_and_gradients, num_chunks=TOKENS), *problem())
    assert found == dict(combine=1 + 2, dispatch=1 + 1 + 2)


def exchanges_of(fn, *args):
    counted = harness.count_primitives(jax.make_jaxpr(fn)(*args))
    return {n: count for n, count in counted.items() if n.endswith(("dispatch", "combine"))}


@pytest.mark.several_devices("a mesh of two devices")
def test_moe_with_replicas_or_the_weights_of_all_slots_equals_moe_without():
    mesh = jax.make_mesh((2,), ("ep",))
    placement = ma.Placement.from_slots([0, 1, 3, 0, 2, 3, 0, -1], 4, num_ranks=2)
    config = ma.MoEConfig(8, 4, 4, ma.TopK(2), bias=True, shared_hidden=4)
    with jax.set_mesh(mesh):
        params = ma.init_moe(jax.random.key(0), config, axes="ep")
        x = jax.random.normal(jax.random.key(1), (12, 8))

        served = params | dict(experts=ma.move_experts(params["experts"], target=placement))
        layer = jax.jit(
            lambda params, placement: ma.moe(x, **params, axes="ep", placement=placement)
        )
        (right, right_stats), *all_found = (
            layer(*args) for args in ((params, None), (params, placement), (served, placement))
        )
    for found, stats in all_found:
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
        for name in ("wanted_per_expert", "rows_per_expert"):
            wanted = getattr(right_stats.load, name)
            np.testing.assert_array_equal(getattr(stats.load, name), wanted)


def test_the_backward_pass_fetches_again_and_no_program_joins_weights():
    ids, floats, placement = args = problem()
    forward, both = of_ranks(layer), of_ranks(value_and_gradients)
    assert exchanges_of(forward, *args) == dict(combine=1, dispatch=1, routed_dispatch=1)
    # Forward: one fetch of weights and two exchanges. Backward: a fetch, a return of gradients, and
    # two exchanges.
    found = exchanges_of(both, *args)
    assert found == dict(combine=1 + 2, dispatch=1 + 2 + 1)
    _, transpose = jax.vjp(lambda floats: forward(ids, floats, placement), floats)
    kept = [x.shape for x in jax.tree.leaves(transpose)]
    assert (RANKS, 1, WIDTH, HIDDEN) not in kept and (RANKS, LOCAL, WIDTH, HIDDEN) in kept
    joined = f"{LOCAL + 1}x{HIDDEN}x{2 * WIDTH}x"
    assert joined not in jax.jit(both).lower(*args).as_text()


@pytest.mark.parametrize("kind", ("bfloat16", "frozen"))
def test_kernels_read_home_and_fetched_weights_as_two_operands(hopper, kind):
    size, (ids, _, placement) = 128, problem()
    draw = lambda *shape: jnp.zeros((RANKS, *shape), jnp.bfloat16)
    weights = [draw(LOCAL, size, 2 * size), draw(LOCAL, size, size)]
    run = of_ranks(value_and_gradients)
    if kind == "frozen":
        run = of_ranks(layer, change=ma.quantize_experts)
    top_k = jnp.ones((RANKS, TOKENS, TOP_K), jnp.float32)
    floats = [draw(TOKENS, size), top_k, *weights, draw(LOCAL, 2 * size), draw(LOCAL, size)]

    def lowered(placement):
        traced = jax.jit(run).trace(ids, floats, placement)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        targets = r"custom_call @moe_a2a_(dot_act|act_dot_grad|fp8_gemm|act_encode)\("
        return sorted(re.findall(targets, text)), text

    calls, text = lowered(placement)
    expected = ["act_encode", "fp8_gemm", "fp8_gemm"]
    assert calls == (["act_dot_grad", "dot_act", "dot_act"] if kind == "bfloat16" else expected)
    assert calls == lowered(None)[0]
    joined = [line for line in text.splitlines() if "stablehlo.concatenate" in line]
    assert joined and not any(re.search(r"x128x(128|256)x|x256x128x", line) for line in joined)


def test_moved_experts_change_no_bit_and_second_derivatives_are_those_of_the_plain_layer():
    ids, floats, placement = problem(3)
    run = jax.jit(of_ranks(layer, capacity=6))  # both layers drop the same rows
    order = np.array([2, 0, 3, 1])
    moved = ma.Placement.from_slots(order, RANKS * LOCAL, num_ranks=RANKS)
    weights = [x.reshape(-1, *x.shape[2:])[order].reshape(x.shape) for x in floats[2:]]
    renamed = jnp.where(ids >= 0, jnp.asarray(np.argsort(order))[ids], -1)
    placed = [*floats[:2], *weights]
    expected = run(renamed, placed, None)
    np.testing.assert_array_equal(run(ids, placed, moved), expected)

    @jax.jit
    def second(floats, placement):
        tangents, of = jax.tree.map(jnp.cos, floats), of_ranks(value_and_gradients)
        return jax.jvp(lambda floats: of(ids, floats, placement)[0], (floats,), (tangents,))[1]

    small_layer.assert_close(second(floats, placement), second(floats, None), tolerance=1e-3)
