"""The integrations equal our own versions of the layers that they replace, and the dense layer.

The forms of parallelism, routing and rematerialization here are those that models use around such
a layer. Each test compares the result and every gradient.
"""

import functools
import math
import pathlib
import sys
from unittest import mock

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_docs import snippets_of

import jax_moe_a2a as ma
from jax_moe_a2a.integrations import grug, sglang_jax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks import integrations, reference_layers  # noqa: E402
from benchmarks.reference_layers import dense, swiglu  # noqa: E402

pytestmark = [
    pytest.mark.one_process("meshes of several axes"),
    pytest.mark.several_devices("meshes of several axes"),
    pytest.mark.usefixtures("exact_products"),
]
EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 2, 8, 8
POLICIES = jax.checkpoint_policies
quick_jit = functools.partial(jax.jit, compiler_options=harness.QUICKLY)


def mesh_of(axis_type=AxisType.Auto, **sizes):
    count = math.prod(sizes.values())
    if count > harness.NUM_DEVICES:
        pytest.skip(f"needs {count} devices")
    devices = harness.devices(count)
    shape, axes = tuple(sizes.values()), tuple(sizes)
    return Mesh(np.array(devices).reshape(shape), axes, axis_types=(axis_type,) * len(axes))


def arguments(*lead, dtype="float32", seed=0):
    """Draw x [*lead, H], router logits [*lead, E], w_in [E, H, 2 I] and w_out [E, I, H]."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = (
        (*lead, HIDDEN),
        (*lead, EXPERTS),
        (EXPERTS, HIDDEN, 2 * WIDTH),
        (EXPERTS, WIDTH, HIDDEN),
    )
    scales = 1, 1, HIDDEN**-0.5, WIDTH**-0.5
    return [
        (jax.random.normal(key, shape) * scale).astype(dtype)
        for key, shape, scale in zip(keys, shapes, scales)
    ]


def choose(logits, top_k=TOP_K):
    """Return weights and ids of the highest logits."""
    top_logits, ids = lax.top_k(logits, top_k)
    return jax.nn.softmax(top_logits, axis=-1), ids


def dense_layer(x, logits, w_in, w_out):
    return dense(x, *choose(logits), w_in, w_out, swiglu)


def value_and_grads(layer, *args, argnums=(0, 1, 2, 3)):
    """Return the result of a layer, and the gradients of a number that depends on all of it."""

    def loss(*args):
        y = layer(*args)
        return jnp.sum(jnp.sin(y)), y

    (_, y), grads = quick_jit(jax.value_and_grad(loss, argnums, has_aux=True))(*args)
    return y, *grads


def assert_close(actual, expected, tolerance=2e-5):
    actual, expected = map(jax.tree.leaves, (actual, expected))
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected)):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        scale = np.max(np.abs(e), initial=1e-6)
        np.testing.assert_allclose(a / scale, e / scale, atol=tolerance, err_msg=f"leaf {i}")


def dispatches(fn, *args):
    """Count the dispatches in the program of ``fn``; a gradient of a combine is one, too."""
    return harness.count_primitives(jax.make_jaxpr(fn)(*args))["dispatch"]


def test_the_portable_path_sends_a_block_of_all_tokens_to_every_rank():
    """Check what the pages tell users of TPUs."""

    def on_rank(x, logits):
        recv = ma.dispatch(
            x, *choose(logits)[::-1], group=group, num_experts=4, capacity_factor=1.0
        )
        return ma.combine(recv.rows, recv)

    mesh = mesh_of(ep=4)
    group = ma.Group(mesh, "ep")
    layer = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    program = layer.trace(*arguments(4 * 300)[:2]).lower(lowering_platforms=("tpu",)).as_text()
    sent = [line for line in program.splitlines() if "all_to_all" in line]
    with_rows = [line for line in sent if f"4x300x{HIDDEN}xf32" in line]
    assert len(with_rows) == 2  # in the dispatch and in the combine


# ------------------------------------------------------------------------------------------ Grug


def grug_layer(mesh, experts=grug.moe_mlp, axes=("data", "expert"), **options):
    """Return a layer of all ranks that returns counts, too; the mesh may be abstract."""
    options = dict(activation_fn=jax.nn.silu, num_experts=EXPERTS, capacity_factor=8.0) | options

    def layer(x, logits, w13, w2, token_valid):
        weights, ids = choose(logits)
        run = jax.shard_map(
            functools.partial(experts, **options),
            mesh=mesh,
            in_specs=(P(axes), P(axes), P(axes), P(axes), P("expert"), P("expert")),
            out_specs=(P(axes), P()),
            check_vma=False,
        )
        return run(x, ids, weights, token_valid, w13, w2)

    return layer


def test_grug_equals_a_ring_under_an_explicit_mesh_of_which_only_the_abstract_one_is_known():
    mesh = mesh_of(AxisType.Explicit, data=2, expert=2)
    args = arguments(16)
    token_valid = jnp.arange(16) % 5 != 4
    specs = P(("data", "expert")), P(("data", "expert")), P("expert"), P("expert")
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)]
    token_valid = jax.device_put(token_valid, NamedSharding(mesh, specs[0]))
    with jax.set_mesh(mesh):
        results = []
        for experts in (grug.moe_mlp, reference_layers.ring):
            layer = grug_layer(jax.sharding.get_abstract_mesh(), experts)
            results.append(value_and_grads(lambda *args: layer(*args, token_valid)[0], *args))
        assert_close(*results)
        _, num_dropped = jax.jit(grug_layer(mesh.abstract_mesh))(*args, token_valid)
    assert num_dropped == 0
    assert not np.any(np.asarray(results[0][0])[4::5])  # padding has no output


def test_grug_counts_what_a_small_capacity_drops_over_all_ranks():
    args = arguments(16)
    args[1] = jnp.tile(jnp.array([0.0, 2, 1, -1]), (16, 1))  # all tokens choose experts 1 and 2
    layer = jax.jit(grug_layer(mesh_of(data=2, expert=2), capacity_factor=0.5))
    _, num_dropped = layer(*args, jnp.ones(16, bool))
    assert num_dropped == 16  # of 32 choices; each rank has room for half of a balanced load
    ring = jax.jit(
        grug_layer(mesh_of(expert=4), reference_layers.ring, ("expert",), capacity_factor=0.5)
    )
    assert ring(*args, jnp.ones(16, bool))[1] == 32 - 2 * 4


def test_grug_without_token_valid_and_with_one_rank_is_the_dense_layer():
    args = arguments(6)
    mesh = mesh_of(expert=1)

    def layer(x, logits, w13, w2):
        def on_rank(x, weights, ids, w13, w2):
            return grug.moe_mlp(x, ids, weights, None, w13, w2, num_experts=EXPERTS)[0]

        run = jax.shard_map(on_rank, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
        return run(x, *choose(logits), w13, w2)

    # One rank holds all rows: a factor above 1 drops nothing.
    assert_close(value_and_grads(layer, *args), value_and_grads(dense_layer, *args))


def test_grug_names_its_rows_and_routing_for_remat_policies():
    *args, valid = *arguments(8), jnp.ones(8, bool)
    layer = grug_layer(mesh_of(expert=2), axes=("expert",))

    def count(policy):
        loss = jax.checkpoint(lambda *args: layer(*args, valid)[0], policy=policy)
        return dispatches(jax.grad(lambda *args: jnp.sum(loss(*args)), (0, 2)), *args)

    saved = POLICIES.save_only_these_names(*grug.REMAT_SAVE_NAMES)
    assert (count(None), count(saved)) == (3, 2)  # the gradient of the combine is one of them


@pytest.mark.parametrize(
    ("num_experts", "axis", "message"),
    ((8, "expert", "4 ranks of axis 'expert'; got 8"), (4, "tp", "axis 'tp' must be in scope")),
)
def test_grug_says_what_does_not_fit(num_experts, axis, message):
    layer = grug_layer(mesh_of(expert=4), axes=("expert",), num_experts=num_experts, axis_name=axis)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(layer, *arguments(8), jnp.ones(8, bool))


def grug_backend(drops):
    """Return the wrapper for levanter of docs/integrations/grug.md; `drops` makes its counts."""
    (snippet,) = (s for s in snippets_of("docs/integrations/grug.md") if "CapacityDrops" in s.code)
    names = dict(grug=grug, jnp=jnp, CapacityDrops=drops)
    exec(snippet.code, names)
    return names["backend"]


def test_the_wrapper_for_levanter_accepts_what_levanter_passes():
    """levanter's `moe_mlp` calls the backend `ring` with these arguments (0.2.227)."""
    backend = functools.partial(grug_backend(dict), make_dispatch_combine=object())

    def experts(*args, **options):
        y, drops = backend(*args, token_sharding_axes=("expert",), **options)
        assert drops["sender_dropped"].shape == drops["receiver_dropped"].shape == ()
        return y, drops["receiver_dropped"]

    args = arguments(8)
    layer = grug_layer(mesh_of(expert=2), experts, axes=("expert",))
    y, num_dropped = quick_jit(layer)(*args, jnp.ones(8, bool))
    assert num_dropped == 0
    assert_close(y, dense_layer(*args))


@pytest.mark.promotes("levanter relies on it")
def test_grug_replaces_the_ring_of_an_installed_levanter():
    reason = "levanter is not installed: pip install marin-levanter, for a jax that it accepts"
    levanter = pytest.importorskip("levanter.grug.grug_moe", reason=reason)
    sharding = pytest.importorskip("levanter.grug.sharding")

    ours = grug_backend(levanter.CapacityDrops)
    x, logits, *w = arguments(16)
    with jax.set_mesh(sharding.compact_grug_mesh(expert_axis_size=2)):
        results = []
        for experts in (levanter._moe_mlp_ep_ring_local, ours):
            with mock.patch.object(levanter, "_moe_mlp_ep_ring_local", experts):
                layer = functools.partial(
                    levanter.moe_mlp, implementation="ring", capacity_factor=4
                )
                layer = lambda x, logits, *w, layer=layer: layer(x, *choose(logits)[::-1], *w)
                results.append(value_and_grads(layer, x, logits, *w))
    assert_close(*results)
    assert_close(results[0][0], dense_layer(x, logits, *w))


# ------------------------------------------------------------- forms of parallelism and training


def expert_layer(x, logits, w_in, w_out):
    """Apply experts inside a shard_map, as MaxText does; x [B, S, H]."""
    weights, ids = choose(logits)
    tokens, ids, weights = (a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
    options = dict(activation=swiglu, group="expert", num_experts=EXPERTS)
    return ma.moe_mlp(tokens, ids, weights, w_in, w_out, **options).reshape(*x.shape[:-1], HIDDEN)


def on_mesh(body, mesh, *in_specs, out_spec=None, **options):
    return jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_spec or in_specs[0], **options
    )


BATCH = P("expert")


def test_ep_tp_and_fsdp_together():
    """Split weights over three axes: gather over fsdp, and keep a part of H on each rank of tp."""

    def body(x, logits, w_gate, w_up, w_out):
        gather = functools.partial(lax.all_gather, axis_name="fsdp", tiled=True)
        w_in = jnp.concatenate([gather(w_gate, axis=1), gather(w_up, axis=1)], axis=-1)
        y = expert_layer(x, logits, w_in, gather(w_out, axis=2))
        return lax.psum_scatter(y, "tp", scatter_dimension=2, tiled=True)

    def layer(x, logits, w_in, w_out):
        tokens = P(("fsdp", "expert"))
        in_specs = tokens, tokens, *[P("expert", "fsdp", "tp")] * 2, P("expert", "tp", "fsdp")
        out_spec = P(("fsdp", "expert"), None, "tp")
        run = on_mesh(body, mesh_of(expert=2, tp=2, fsdp=2), *in_specs, out_spec=out_spec)
        return run(x, logits, *jnp.split(w_in, 2, axis=-1), w_out)

    args = arguments(4, 3)
    assert_close(value_and_grads(layer, *args), value_and_grads(dense_layer, *args))


def test_context_parallelism_splits_sequences_over_another_axis():
    mesh, tokens = mesh_of(context=2, expert=2), P("expert", "context")
    layer = on_mesh(expert_layer, mesh, tokens, tokens, BATCH, BATCH)
    args = arguments(2, 4)
    assert_close(value_and_grads(layer, *args), value_and_grads(dense_layer, *args))


def test_pipeline_stages_are_a_vmap_with_spmd_axis_name():
    mesh = mesh_of(stage=2, expert=2)
    layer = on_mesh(expert_layer, mesh, *[BATCH] * 4)
    stages = jax.vmap(layer, spmd_axis_name="stage")
    args = [jnp.stack(pair) for pair in zip(arguments(2, 3), arguments(2, 3, seed=1))]
    args = jax.device_put(args, NamedSharding(mesh, P("stage", "expert")))
    results = value_and_grads(stages, *args)
    assert_close(results, value_and_grads(jax.vmap(dense_layer), *args))
    assert results[0].sharding.spec[:2] == ("stage", "expert")


def test_fsdp_over_the_axis_of_the_experts():
    """The router is stored in parts on the ranks of the group, and gathered where it is used."""

    def body(x, router, w_in, w_out):
        router = lax.all_gather(router, "expert", tiled=True)
        return expert_layer(x, x @ router, w_in, w_out)

    x, _, w_in, w_out = arguments(4, 3)
    args = x, jax.random.normal(jax.random.key(9), (HIDDEN, EXPERTS)), w_in, w_out
    layer = on_mesh(body, mesh_of(expert=4), *[BATCH] * 4)
    expected = lambda x, router, *w: dense_layer(x, x @ router, *w)
    assert_close(value_and_grads(layer, *args), value_and_grads(expected, *args))


def test_gradient_accumulation_over_micro_batches():
    mesh, (x, logits, *w) = mesh_of(expert=2), arguments(6, 4)
    layer = on_mesh(expert_layer, mesh, *[BATCH] * 4)

    @jax.jit
    def accumulated(w):
        def add(total, batch):
            grads = jax.grad(lambda w: jnp.sum(jnp.sin(layer(*batch, *w))))(w)
            return jax.tree.map(jnp.add, total, grads), None

        batches = jax.tree.map(lambda a: a.reshape(3, 2, *a.shape[1:]), (x, logits))
        return lax.scan(add, jax.tree.map(jnp.zeros_like, w), batches)[0]

    assert_close(accumulated(w), value_and_grads(dense_layer, x, logits, *w)[3:])


def transformer(layer, policy, x, blocks):
    """Apply blocks of attention and experts with residuals, scanned; x [B, S, H]."""

    def block(x, params):
        q, router, w_in, w_out = params
        x = x + jax.nn.softmax(jnp.einsum("bsh,bth->bst", x @ q, x), axis=-1) @ x
        return x + layer(x, x @ router, w_in, w_out), None

    block = block if policy == "no checkpoint" else jax.checkpoint(block, policy=policy)
    return lax.scan(block, x, blocks)[0]


def test_gradients_of_a_transformer_are_the_same_with_every_remat_policy():
    x, _, w_in, w_out = arguments(2, 3)
    keys = jax.random.split(jax.random.key(3))
    q = jax.random.normal(keys[0], (2, HIDDEN, HIDDEN)) * 0.3
    router = jax.random.normal(keys[1], (2, HIDDEN, EXPERTS))
    blocks = q, router, jnp.stack([w_in, -w_in]), jnp.stack([w_out, w_out])

    def grads_of(layer, policy):
        loss = lambda *args: jnp.sum(jnp.sin(transformer(layer, policy, *args)))
        return quick_jit(jax.grad(loss, (0, 1)))(x, blocks)

    layer = on_mesh(expert_layer, mesh_of(expert=2), *[BATCH] * 4)
    expected = grads_of(dense_layer, "no checkpoint")
    for policy in (
        None,
        POLICIES.dots_with_no_batch_dims_saveable,
        POLICIES.save_only_these_names(ma.ROUTING_CHECKPOINT_NAME),
    ):
        assert_close(grads_of(layer, policy), expected, 1e-4)


# ------------------------------------------------------------------------------------ sglang-jax


@pytest.mark.parametrize("scatter", (False, True))
def test_sglang_jax_equals_experts_on_tokens_that_all_ranks_hold(scatter):
    mesh, (x, logits, w_in, wo) = mesh_of(expert=2, tensor=2), arguments(6)
    args = x, *choose(logits), *jnp.split(w_in, 2, axis=-1), wo
    wide = P("expert", None, "tensor")
    specs = P(), P(), P(), wide, wide, P("expert", "tensor")
    ours = functools.partial(sglang_jax.ep_moe, scatter_on_tensor=scatter)
    out_spec = P("tensor") if scatter else P()
    ours, theirs = (
        jax.jit(on_mesh(body, mesh, *specs, out_spec=out, check_vma=False))(*args)
        for body, out in ((ours, out_spec), (reference_layers.ep_moe, P()))
    )
    assert_close(ours, theirs)
    assert_close(ours, dense_layer(x, logits, w_in, wo))


def test_sglang_jax_accepts_tokens_of_several_sequences_in_bfloat16():
    mesh, (x, logits, w_in, wo) = mesh_of(expert=2, tensor=1), arguments(2, 3, dtype="bfloat16")
    args = x, *choose(logits), *jnp.split(w_in, 2, axis=-1), wo
    specs = *[P()] * 3, *[P("expert", None, "tensor")] * 2, P("expert", "tensor")
    y = jax.jit(on_mesh(sglang_jax.ep_moe, mesh, *specs, out_spec=P()))(*args)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert_close(y, dense_layer(*(a.astype("float32") for a in (x, logits, w_in, wo))), 0.02)


# ----------------------------------------------------------------------------- all integrations


def grug_body(x, logits, w_in, w_out, group):
    options = dict(num_experts=EXPERTS, capacity_factor=None, group=group)
    return grug.moe_mlp(x, *choose(logits)[::-1], None, w_in, w_out, **options)[0]


def sglang_body(x, logits, w_in, w_out, group):
    args = x, *choose(logits), *jnp.split(w_in, 2, axis=-1), w_out
    return sglang_jax.ep_moe(*args, group=group)


@pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize(
    ("body", "tokens"),
    (
        (grug_body, P("expert")),
        (sglang_body, P()),
    ),
    ids=("grug", "sglang-jax"),
)
def test_a_program_under_another_mesh_runs_with_a_group_of_its_own(body, tokens, axis_type):
    """Serving systems set a mesh for the model, and use another one for the experts."""
    mesh = mesh_of(axis_type, expert=2, tensor=1)
    outer = Mesh(mesh.devices.reshape(1, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    specs = tokens, tokens, P("expert"), P("expert")

    def program(*args, group=None):
        body_of_rank = functools.partial(body, group=group)
        layer = on_mesh(body_of_rank, mesh, *specs, check_vma=False)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            if axis_type is AxisType.Explicit:
                args = [jax.sharding.reshard(a, spec) for a, spec in zip(args, specs)]
            y = layer(*args)
        return jax.sharding.reshard(y, NamedSharding(outer, P()))

    args = arguments(8)
    with jax.set_mesh(outer):
        results = quick_jit(program)(*jax.device_put(args, NamedSharding(outer, P())))
        group = ma.Group(axis_name="expert", size=2, timeout=7.0)
        with_group = functools.partial(program, group=group)
        assert "timeout=7.0" in str(jax.make_jaxpr(with_group)(*args))
        wrong = functools.partial(program, group=ma.Group(axis_name="tensor", size=1))
        with pytest.raises(ValueError, match="group over the axis 'expert'.*got Group"):
            jax.eval_shape(wrong, *args)
    assert_close(results, dense_layer(*args))


def test_the_benchmark_compares_results_and_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr(integrations, "BLOCKS", 1)
    monkeypatch.setattr(integrations, "PAIRS", {"sglang-jax": integrations.PAIRS["sglang-jax"]})
    integrations.main("--tokens=4 --hidden=8 --width=8 --compilations=2 --steps=2".split())
    _, *table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == ["this package", "reference"]

    with pytest.raises(AssertionError):
        integrations.check([[np.ones(2)], [2 * np.ones(2)]])
