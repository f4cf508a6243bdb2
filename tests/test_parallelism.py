"""Test outputs and gradients of an expert layer against the dense layer, with the parallelism,
gradient accumulation and rematerialization of real models."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_layer import dense, experts_of, swiglu
from harness import mesh_over as mesh_of
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

pytestmark = harness.OF_SEVERAL_AXES
EXPERTS, TOP_K, HIDDEN, WIDTH = 4, 2, 8, 8


def arguments(*lead, dtype="float32", seed=0):
    """Return random x [*lead, H], router logits [*lead, E], w_in [E, H, 2 I] and w_out [E, I,
    H]."""
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
    top_logits, ids = lax.top_k(logits, top_k)
    return jax.nn.softmax(top_logits, axis=-1), ids


def dense_layer(x, logits, w_in, w_out):
    return dense(x, *choose(logits), w_in, w_out, swiglu)


def value_and_grads(layer, *args, argnums=(0, 1, 2, 3)):
    def loss(*args):
        y = layer(*args)
        return jnp.sum(jnp.sin(y)), y

    (_, y), grads = harness.quickly(jax.value_and_grad(loss, argnums, has_aux=True))(*args)
    return y, *grads


def assert_close(actual, expected, tolerance=2e-5):
    actual, expected = map(jax.tree.leaves, (actual, expected))
    assert len(actual) == len(expected)
    for i, (a, e) in enumerate(zip(actual, expected)):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        scale = np.max(np.abs(e), initial=1e-6)
        np.testing.assert_allclose(a / scale, e / scale, atol=tolerance, err_msg=f"leaf {i}")


def test_the_portable_path_sends_a_block_of_all_tokens_to_every_rank():
    """On TPUs, the dispatch and the combine each have one all-to-all."""

    def on_rank(x, logits):
        recv = ma.dispatch(
            x,
            *choose(logits)[::-1],
            group=group,
            num_experts=4,
            exchange=ma.Exchange(capacity_factor=1.0),
        )
        return ma.combine(recv.rows, recv)

    mesh = mesh_of(ep=4)
    group = ma.Group(mesh, "ep")
    layer = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    program = layer.trace(*arguments(4 * 300)[:2]).lower(lowering_platforms=("tpu",)).as_text()
    sent = [line for line in program.splitlines() if "all_to_all" in line]
    with_rows = [line for line in sent if f"4x300x{HIDDEN}xf32" in line]
    assert len(with_rows) == 2


def expert_layer(x, logits, w_in, w_out, group="expert", **options):
    weights, ids = choose(logits)
    tokens, ids, weights = (a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
    options = dict(group=group, num_experts=EXPERTS, **harness.exchanging(options))
    choices, experts = ma.RouterChoices(ids, weights), experts_of(w_in, w_out)
    return ma.moe_mlp(tokens, choices, experts, **options).reshape(*x.shape[:-1], HIDDEN)


def on_mesh(body, mesh, *in_specs, out_spec=None, **options):
    return jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_spec or in_specs[0], **options
    )


BATCH = P("expert")


def test_ep_tp_and_fsdp_together():
    """Weights are divided over three mesh axes, and gathered over fsdp."""

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


def test_pipeline_stages_are_a_vmap_with_spmd_axis_name():
    mesh = mesh_of(stage=2, expert=2)
    layer = on_mesh(expert_layer, mesh, *[BATCH] * 4)
    stages = jax.vmap(layer, spmd_axis_name="stage")
    args = [jnp.stack(pair) for pair in zip(arguments(2, 3), arguments(2, 3, seed=1))]
    args = jax.device_put(args, NamedSharding(mesh, P("stage", "expert")))
    results = value_and_grads(stages, *args)
    assert_close(results, value_and_grads(jax.vmap(dense_layer), *args))
    assert results[0].sharding.spec[:2] == ("stage", "expert")


POLICIES = (
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(ma.ROUTING_CHECKPOINT_NAME),
)


@pytest.mark.parametrize("policy", POLICIES, ids=("dots", "routing"))
def test_blocks_with_context_parallelism_fsdp_and_remat_accumulate_gradients(policy):
    """A scan over micro-batches contains a scan over blocks of attention and experts."""

    def body(x, router, w_in, w_out):
        logits = x @ lax.all_gather(router, "expert", tiled=True)
        return expert_layer(x, logits, w_in, w_out)

    tokens = P("expert", "context")
    parallel = on_mesh(body, mesh_of(context=2, expert=2), tokens, *[BATCH] * 3)
    expected = lambda x, router, *w: dense_layer(x, x @ router, *w)

    def loss(layer, params, x):
        def block(x, own):
            q, *own = own
            x = x + jax.nn.softmax(jnp.einsum("bsh,bth->bst", x @ q, x), axis=-1) @ x
            return x + layer(x, *own), None

        return jnp.sum(jnp.sin(lax.scan(jax.checkpoint(block, policy=policy), x, params)[0]))

    @harness.quickly
    def accumulated(params, batches):
        def add(total, x):
            found = jax.value_and_grad(functools.partial(loss, parallel))(params, x)
            return jax.tree.map(jnp.add, total, found), None

        return lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, params)), batches)[0]

    batches, _, w_in, w_out = arguments(3, 2, 4)
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), (2, HIDDEN, *shape))
    q, router = 0.3 * draw(3, HIDDEN), draw(4, EXPERTS)
    params = q, router, jnp.stack([w_in, -w_in]), jnp.stack([w_out, w_out])
    of_all = harness.quickly(jax.value_and_grad(functools.partial(loss, expected)))
    right = of_all(params, batches.reshape(-1, *batches.shape[2:]))
    assert_close(accumulated(params, batches), right, 1e-4)


@pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("replicated", (False, True))
def test_a_program_under_another_mesh_runs_with_a_group_of_its_own(replicated, axis_type):
    mesh = mesh_of(axis_type, expert=2, tensor=1)
    outer = Mesh(mesh.devices.reshape(1, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    tokens = P() if replicated else BATCH
    specs = tokens, tokens, BATCH, BATCH

    def program(*args, group="expert"):
        def body_of_rank(*args):
            y = expert_layer(*args, group=group, replicated=replicated)
            return lax.psum(y, "expert") if replicated else y

        layer = on_mesh(body_of_rank, mesh, *specs, check_vma=False)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            if axis_type is AxisType.Explicit:
                args = [jax.sharding.reshard(a, spec) for a, spec in zip(args, specs)]
            y = layer(*args)
        return jax.sharding.reshard(y, NamedSharding(outer, P()))

    args = arguments(8)
    with jax.set_mesh(outer):
        results = harness.quickly(program)(*jax.device_put(args, NamedSharding(outer, P())))
        group = ma.Group(axis_name="expert", size=2, timeout=7.0)
        with_group = functools.partial(program, group=group)
        assert "timeout=7.0" in str(jax.make_jaxpr(with_group)(*args))
    assert_close(results, dense_layer(*args))
