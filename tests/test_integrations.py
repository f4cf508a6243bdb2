"""The integrations equal our own versions of the layers that they replace, and the dense layer.

The forms of parallelism, routing and rematerialization here are those that models use around such
a layer. Each test compares the result and every gradient.
"""

import functools
import math

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_layers
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from reference_layers import dense, swiglu

import jax_moe_a2a as ma
from jax_moe_a2a.integrations import maxtext

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


# --------------------------------------------------------------------------------------- MaxText


def maxtext_experts(x, logits, w_in, w_out, *, biases=None, top_k=TOP_K, act=swiglu, **options):
    """Route, multiply and unroute as the body of MaxText's shard_map; x [B, S, H]."""
    weights, ids = options.pop("choose", choose)(logits, top_k)
    rows, routing = maxtext.ra2a_and_route(x, weights, ids, num_experts=EXPERTS, **options)
    dot = functools.partial(lax.ragged_dot, group_sizes=routing.group_sizes)
    hidden = dot(rows, w_in)
    if biases is not None:
        hidden += biases[0][routing.selected_experts]
    y = dot(act(hidden), w_out)
    if biases is not None:
        y += biases[1][routing.selected_experts]
    finish = options.pop("finish", lambda y: y)
    return maxtext.unsort_and_unpermute(
        finish(y), routing, batch_size=x.shape[0], sequence_length=x.shape[1]
    )


def on_mesh(body, mesh, *in_specs, out_spec=None, **options):
    return jax.shard_map(
        body, mesh=mesh, in_specs=in_specs, out_specs=out_spec or in_specs[0], **options
    )


BATCH = P("expert")


def test_maxtext_equals_an_exchange_of_one_row_per_choice():
    def reference(x, logits, w_in, w_out):
        rows, sizes, _, routing = reference_layers.route(x, *choose(logits), num_experts=EXPERTS)
        y = lax.ragged_dot(swiglu(lax.ragged_dot(rows, w_in, sizes)), w_out, sizes)
        return reference_layers.unroute(y, routing)

    args, mesh = arguments(4, 3), mesh_of(expert=4)
    layers = (on_mesh(body, mesh, *[BATCH] * 4) for body in (maxtext_experts, reference))
    ours, theirs = (value_and_grads(layer, *args) for layer in layers)
    assert_close(ours, theirs)
    assert_close(ours, value_and_grads(dense_layer, *args))


def test_ep_tp_and_fsdp_together():
    """Split weights over three axes: gather over fsdp, and keep a part of H on each rank of tp."""

    def body(x, logits, w_gate, w_up, w_out):
        gather = functools.partial(lax.all_gather, axis_name="fsdp", tiled=True)
        weights, ids = choose(logits)
        rows, routing = maxtext.ra2a_and_route(x, weights, ids, num_experts=EXPERTS)
        dot = functools.partial(lax.ragged_dot, group_sizes=routing.group_sizes)
        w_gate, w_up = gather(w_gate, axis=1), gather(w_up, axis=1)
        hidden = jax.nn.silu(dot(rows, w_gate)) * dot(rows, w_up)
        y = dot(hidden, gather(w_out, axis=2))
        y = lax.psum_scatter(y, "tp", scatter_dimension=1, tiled=True)
        return maxtext.unsort_and_unpermute(y, routing, batch_size=x.shape[0], sequence_length=3)

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
    layer = on_mesh(maxtext_experts, mesh, tokens, tokens, BATCH, BATCH)
    args = arguments(2, 4)
    assert_close(value_and_grads(layer, *args), value_and_grads(dense_layer, *args))


def test_pipeline_stages_are_a_vmap_with_spmd_axis_name():
    mesh = mesh_of(stage=2, expert=2)
    layer = on_mesh(maxtext_experts, mesh, *[BATCH] * 4)
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
        return maxtext_experts(x, x @ router, w_in, w_out)

    x, _, w_in, w_out = arguments(4, 3)
    args = x, jax.random.normal(jax.random.key(9), (HIDDEN, EXPERTS)), w_in, w_out
    layer = on_mesh(body, mesh_of(expert=4), *[BATCH] * 4)
    expected = lambda x, router, *w: dense_layer(x, x @ router, *w)
    assert_close(value_and_grads(layer, *args), value_and_grads(expected, *args))


def clipped_swiglu(hidden, alpha=1.702, limit=7.0):
    """Apply the activation of GPT-OSS: gate and up alternate, and up is shifted by one."""
    gate, up = jnp.minimum(hidden[..., ::2], limit), jnp.clip(hidden[..., 1::2], -limit, limit)
    return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


def test_gpt_oss_has_biases_of_experts_in_both_products():
    def body(x, logits, w_in, w_out, *biases):
        return maxtext_experts(x, logits, w_in, w_out, biases=biases, act=clipped_swiglu)

    def expected(x, logits, w_in, w_out, b_in, b_out):
        return dense(x, *choose(logits), w_in, w_out, clipped_swiglu, b_in, b_out)

    keys = jax.random.split(jax.random.key(5))
    biases = (
        jax.random.normal(keys[0], (EXPERTS, 2 * WIDTH)),
        jax.random.normal(keys[1], (EXPERTS, HIDDEN)),
    )
    args = *arguments(2, 3), *biases
    layer = on_mesh(body, mesh_of(expert=2), *[BATCH] * 6)
    of = functools.partial(value_and_grads, argnums=range(6))
    assert_close(of(layer, *args), of(expected, *args))


def group_limited(logits, bias, top_k=TOP_K, groups=2):
    """Choose within each token's better half of the experts; the bias is for the choice only."""
    scores = jax.nn.sigmoid(logits)
    biased = scores + jnp.broadcast_to(bias, scores.shape)
    in_groups = biased.reshape(*logits.shape[:-1], groups, -1)
    best = lax.top_k(in_groups, 2)[0].sum(-1).argmax(-1)
    eligible = jnp.where((jax.nn.one_hot(best, groups) > 0)[..., None], in_groups, -jnp.inf)
    ids = lax.top_k(eligible.reshape(logits.shape), top_k)[1]
    weights = jnp.take_along_axis(scores, ids, -1)
    return weights / weights.sum(-1, keepdims=True), ids


def test_deepseek_limits_routing_to_groups_and_updates_the_bias_from_the_load():
    def body(x, logits, w_in, w_out, bias):
        choose = lambda logits, _: group_limited(logits, bias)
        y = maxtext_experts(x, logits, w_in, w_out, choose=choose)
        load = jnp.bincount(choose(logits, None)[1].ravel(), length=EXPERTS)
        return y, lax.psum(load, "expert")

    def expected(x, logits, w_in, w_out, bias):
        weights, ids = group_limited(logits, bias)
        return dense(x, weights, ids, w_in, w_out, swiglu), jnp.bincount(
            ids.ravel(), length=EXPERTS
        )

    args = arguments(4, 3)
    args[1] += jnp.tile(jnp.array([1.0, 0, 0, 0.5]), (4, 3, 1))  # experts 0 and 3 are popular
    in_specs = *[BATCH] * 4, P()
    layer = on_mesh(body, mesh_of(expert=2), *in_specs, out_spec=(BATCH, P()))
    biases = []
    for of_all in (layer, expected):
        bias = jnp.zeros(EXPERTS)
        step = jax.jit(of_all)
        for _ in range(3):
            y, load = step(*args, bias)
            load = load.astype(bias.dtype)
            bias += 0.3 * jnp.sign(load.mean() - load)
        biases.append((y, load, bias))
    assert_close(*biases)
    assert np.any(biases[0][2])
    grads = [value_and_grads(lambda *a: of_all(*a, bias)[0], *args) for of_all in (layer, expected)]
    assert_close(*grads)


def test_llama_4_scales_what_goes_into_an_expert():
    def body(*args):
        raw = lambda logits, _: lax.top_k(logits, 1)
        return maxtext_experts(*args, choose=raw, scale_inputs=True)

    def expected(x, logits, w_in, w_out):
        scores, ids = lax.top_k(logits, 1)
        return dense(x * jax.nn.sigmoid(scores), jnp.ones_like(scores), ids, w_in, w_out, swiglu)

    args = arguments(2, 3)
    layer = on_mesh(body, mesh_of(expert=2), *[BATCH] * 4)
    assert_close(value_and_grads(layer, *args), value_and_grads(expected, *args))


def test_decoding_one_sequence_keeps_tokens_on_all_ranks():
    body = functools.partial(maxtext_experts, is_batch_sharded_by_expert=False)
    layer = on_mesh(body, mesh_of(expert=4), P(), P(), BATCH, BATCH)
    args = arguments(1, 3)
    assert_close(value_and_grads(layer, *args), value_and_grads(dense_layer, *args))


def test_maxtext_counts_what_ragged_buffer_factor_drops():
    def body(x):
        ids = jnp.zeros((*x.shape[:2], 1), jnp.int32)  # all choose the first expert
        weights = jnp.ones(ids.shape)
        rows, routing = maxtext.ra2a_and_route(
            x, weights, ids, num_experts=EXPERTS, ragged_buffer_factor=1.5
        )
        y = maxtext.unsort_and_unpermute(rows, routing, batch_size=x.shape[0], sequence_length=4)
        return y, routing.num_dropped[None]

    layer = jax.jit(on_mesh(body, mesh_of(expert=2), BATCH, out_spec=(BATCH, BATCH)))
    y, num_dropped = layer(jnp.ones((2, 4, HIDDEN)))
    assert num_dropped.tolist() == [2, 0]  # 8 rows, and room for 1.5 x 4
    assert int(jnp.sum(y)) == 6 * HIDDEN


@pytest.mark.parametrize("factor", (0, -1.0))
def test_a_ragged_buffer_factor_of_0_or_less_drops_nothing(factor):
    def rows_of(x):
        ids = jnp.zeros((*x.shape[:2], 1), jnp.int32)  # all choose the first expert
        given = dict(num_experts=EXPERTS, ragged_buffer_factor=factor, axis_name="ep")
        group = ma.Group(axis_name="ep", size=2)
        rows, routing = maxtext.ra2a_and_route(x, jnp.ones(ids.shape), ids, group=group, **given)
        return rows, routing.num_dropped

    x = jax.ShapeDtypeStruct((2, 1, 4, HIDDEN), "float32")
    rows, _ = jax.eval_shape(jax.vmap(rows_of, axis_name="ep"), x)
    assert rows.shape == (2, 8, HIDDEN)


def test_gradient_accumulation_over_micro_batches():
    mesh, (x, logits, *w) = mesh_of(expert=2), arguments(6, 4)
    layer = on_mesh(maxtext_experts, mesh, *[BATCH] * 4)

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

    layer = on_mesh(maxtext_experts, mesh_of(expert=2), *[BATCH] * 4)
    expected = grads_of(dense_layer, "no checkpoint")
    for policy in (
        None,
        POLICIES.dots_with_no_batch_dims_saveable,
        POLICIES.save_only_these_names(ma.ROUTING_CHECKPOINT_NAME),
    ):
        assert_close(grads_of(layer, policy), expected, 1e-4)


def maxtext_body(x, logits, w_in, w_out, group, batched=True):
    args = x[None], logits[None], w_in, w_out
    return maxtext_experts(*args, group=group, is_batch_sharded_by_expert=batched)[0]


@pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize(
    ("body", "tokens"),
    (
        (maxtext_body, P("expert")),
        (functools.partial(maxtext_body, batched=False), P()),
    ),
    ids=("maxtext", "maxtext decoding"),
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
