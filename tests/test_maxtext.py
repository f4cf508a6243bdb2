"""Test ``enable`` with a fake of MaxText's layer. ``make test-maxtext`` trains with the real
MaxText."""

import functools
import sys
import types

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_layer import dense
from harness import mesh_over as mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma
from jax_moe_a2a.integrations import maxtext

pytestmark = harness.OF_SEVERAL_AXES
EXPERTS, HIDDEN, WIDTH, LENGTH, RATE = 4, 8, 8, 4, 0.01
CONFIG = dict(
    check_vma=False,
    decoder_block="qwen3_moe",
    gradient_accumulation_steps=1,
    load_balance_loss_weight=0.0,
    mlp_activations=["silu", "linear"],
    mlp_activations_limit=-1.0,
    num_moe_token_chunks=1,
    routed_bias=False,
    routed_bias_update_rate=RATE,
    routed_score_func="",
    sparse_matmul=True,
    use_ring_of_experts=False,
)


class RoutedMoE:
    rngs = None
    num_experts = EXPERTS
    dtype = jnp.float32
    activation_fn = staticmethod(jax.nn.silu)
    _tensor_parallelism_name = "tensor"

    def __init__(self, mesh, top_k=2, expert_axes="expert", table=None, factor=-1.0, **options):
        self.mesh, self.top_k, self.table, self.factor = mesh, top_k, table, factor
        self.config = types.SimpleNamespace(**CONFIG | options)
        self.is_hash_routing = table is not None
        self._expert_parallelism_name = expert_axes

    def __call__(self, *args):
        return self.sparse_matmul(*args)

    def sparse_matmul(
        self, inputs, gate_logits, pre_bias_logits, w0_kernel, w1_kernel, wo_kernel, w0_bias,
        w1_bias, wo_bias, input_ids=None, forced_routed_experts=None,
    ):  # fmt: skip
        return "MaxText's own result"

    def get_topk(
        self, gate_logits, pre_bias_logits, rngs=None, input_ids=None, forced_routed_experts=None
    ):
        ids = forced_routed_experts
        if ids is None and self.is_hash_routing:
            ids = self.table[input_ids]
        if ids is None:
            ids = lax.top_k(gate_logits, self.top_k)[1]
        scores = jnp.take_along_axis(gate_logits, jnp.clip(ids, 0, EXPERTS - 1), -1)
        is_llama = self.config.decoder_block == "llama4"
        return scores if is_llama else jax.nn.softmax(scores, -1), ids

    def load_balance_loss(self, top_k_indices, logits, density_prob=None):
        share = jax.nn.one_hot(top_k_indices, EXPERTS).sum(2).mean(1)
        return jnp.mean(share * logits.mean(1)) * self.config.load_balance_loss_weight

    def megatron_seq_aux_loss(self, scores):
        raise NotImplementedError

    def should_update_load_balance(self):
        return self.config.routed_bias

    def get_ragged_buffer_factor(self):
        return self.factor

    def apply_ffn_activation(self, layer_w0, layer_w1):
        raise NotImplementedError

    def _logical_to_mesh_axes(self, logical_name):
        decodes = logical_name[0] == "decode_batch_moe"
        batch = [a for a in ("fsdp", "expert") if a in self.mesh.shape and not decodes]
        return P(tuple(batch) or None, "context" if "context" in self.mesh.shape else None)

    def _maybe_shard_with_pspec(self, inputs, pspec, logical_axes=None):
        return inputs


@pytest.fixture
def install(monkeypatch):
    """Return a function that installs a fake MaxText of some version."""

    def install(version="0.2.5", **methods):
        layer = type("RoutedMoE", (RoutedMoE,), methods)
        modules = {"maxtext": {}, "maxtext.layers": {}, "maxtext.version": {"__version__": version}}
        for name, content in (modules | {"maxtext.layers.moe": {"RoutedMoE": layer}}).items():
            module = types.ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        return layer

    maxtext.disable()
    yield install
    maxtext.disable()


def arguments(batch, has_biases=False):
    keys = iter(jax.random.split(jax.random.key(0), 8))
    draw = lambda *shape: jax.random.normal(next(keys), shape)
    x, logits = draw(batch, LENGTH, HIDDEN), draw(batch, LENGTH, EXPERTS)
    w = draw(EXPERTS, HIDDEN, WIDTH), draw(EXPERTS, HIDDEN, WIDTH), draw(EXPERTS, WIDTH, HIDDEN)
    biases = (draw(EXPERTS, WIDTH), draw(EXPERTS, WIDTH), draw(EXPERTS, HIDDEN))
    return x, logits, *w, *(biases if has_biases else ())


def expected_of(layer, batch, x, logits, w0, w1, wo, *biases, **given):
    weights, ids = layer.get_topk(logits, None, **given)
    ids = jnp.where((ids >= 0) & (ids < EXPERTS), ids, -1)
    if layer.config.decoder_block == "llama4":
        x, weights = x * jax.nn.sigmoid(weights), jnp.ones_like(weights)
    is_gpt_oss = layer.config.decoder_block == "gpt_oss"
    activation = ma.clamped_swiglu(2.0) if is_gpt_oss else ma.gated(jax.nn.silu)
    side_by_side = lambda *arrays: jnp.concatenate(arrays, axis=-1)
    b_in, b_out = (side_by_side(*biases[:2]), biases[2]) if biases else (None, None)
    y = dense(x, weights, ids, side_by_side(w0, w1), wo, activation, b_in, b_out)
    loss = layer.load_balance_loss(ids, jax.nn.softmax(logits)) if batch > 1 else jnp.zeros(())
    return y, loss


CASES = dict(
    gpt_oss_on_three_axes=(
        dict(fsdp=2, expert=2, tensor=2),
        dict(
            decoder_block="gpt_oss",
            mlp_activations=["sigmoid", "linear"],
            mlp_activations_limit=2.0,
            load_balance_loss_weight=0.1,
            routed_bias=True,
        ),
        4,
    ),
    llama4_on_a_tuple_of_axes=(
        dict(context=2, expert=2),
        dict(decoder_block="llama4", top_k=1, expert_axes=("context", "expert")),
        2,
    ),
    decoding_with_hash_routing=(dict(fsdp=1, expert=4), dict(table=True), 1),
    forced_experts_in_chunks=(
        dict(fsdp=2, expert=1),
        dict(use_ring_of_experts=True, num_moe_token_chunks=2),
        3,  # sequences, which fsdp=2 does not divide
    ),
)


@pytest.mark.parametrize("name", CASES)
def test_the_layer_equals_products_of_all_tokens_with_all_experts(install, name):
    sizes, options, batch = CASES[name]
    given = {}
    if options.get("table"):
        table = jnp.array([[0, 3], [2, 1], [1, 0]])
        options = options | dict(table=table)
        given = dict(input_ids=jnp.arange(batch * LENGTH).reshape(batch, LENGTH) % 3)
    if name.startswith("forced"):
        ids = jax.random.randint(jax.random.key(4), (batch, LENGTH, 2), 0, EXPERTS)
        given = dict(forced_routed_experts=ids.at[0, 0, 0].set(-1).at[1, 1, 1].set(EXPERTS))
    layer = install()(mesh_of(**sizes), **options)
    maxtext.enable()
    args = arguments(batch, has_biases=layer.config.decoder_block == "gpt_oss")
    updates = []

    def ours(x, logits, *w):
        w = (*w, *(None,) * (6 - len(w)))
        y, loss, found = layer.sparse_matmul(x, logits, None, *w, **given)
        updates.append(found)
        return y, jnp.zeros(()) if loss is None else loss

    results = []
    for fn in (ours, functools.partial(expected_of, layer, batch, **given)):

        def total(*args, fn=fn):
            y, loss = fn(*args)
            return jnp.sum(jnp.sin(y)) + loss, (y, loss)

        grad = jax.value_and_grad(total, tuple(range(len(args))), has_aux=True)
        results.append(jax.jit(grad, compiler_options=harness.QUICKLY)(*args))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)
    assert (updates[0] is not None) == layer.config.routed_bias


@pytest.mark.parametrize("steps", (1, 2))
def test_bias_updates_count_the_tokens_of_all_ranks(install, steps):
    """If MaxText accumulates gradients, the layer returns counts, which MaxText adds before it
    updates the bias."""
    options = dict(routed_bias=True, gradient_accumulation_steps=steps)
    layer = install()(mesh_of(fsdp=2, expert=2), **options)
    maxtext.enable()
    x, logits, *w = arguments(4)
    run = jax.jit(lambda *args: layer.sparse_matmul(*args, None, None, None)[2])
    counts = np.bincount(layer.get_topk(logits, None)[1].ravel(), minlength=EXPERTS)
    expected = counts if steps > 1 else RATE * np.sign(counts.mean() - counts)
    np.testing.assert_allclose(run(x, logits, None, *w), expected, rtol=1e-6)


def test_enable_can_be_repeated_and_undone(install):
    layer = install()
    methods = lambda: (layer.__init__, layer.__call__, layer.sparse_matmul)
    own = methods()
    maxtext.enable()
    maxtext.enable(timeout=7.0)
    assert not set(own) & set(methods())
    x, logits, *w = arguments(2)
    args = x, logits, None, *w, None, None, None
    call = layer(mesh_of(fsdp=1, expert=2)).sparse_matmul
    assert "timeout=7.0" in str(jax.make_jaxpr(lambda x: call(x, *args[1:])[0])(x))
    maxtext.disable()
    maxtext.disable()
    assert methods() == own
    assert layer(None).sparse_matmul(*args) == "MaxText's own result"


def test_versions_and_signatures_that_are_not_supported_are_refused(install):
    install("0.1.9")
    with pytest.raises(ImportError, match=r"needs MaxText 0\.2\.5; found 0\.1\.9"):
        maxtext.enable()
    layer = install("0.2.5", get_topk=lambda self, gate_logits: None)
    with pytest.raises(ImportError, match=r"RoutedMoE\.get_topk has .* \(gate_logits\)"):
        maxtext.enable()
    assert layer.sparse_matmul is RoutedMoE.sparse_matmul


@pytest.mark.parametrize(
    "options, message",
    (
        (dict(quantization="int8"), "quantization must be '' .* got quantization='int8'. For exp"),
        (dict(moe_dropless_fallback="step"), "moe_dropless_fallback must be None .* got .*'step'"),
        (dict(ici_pipeline_parallelism=2), "ici_pipeline_parallelism must be 1 .* Set it to 1"),
        (dict(decoder_block="llama4"), "num_experts_per_tok must be 1 .* num_experts_per_tok=2"),
        (dict(expert_axes="model"), "mesh_axes must have the axis 'model'"),
    ),
)
def test_options_that_ask_for_another_result_are_refused(install, options, message):
    layer = install()(mesh_of(fsdp=1, expert=2), **options)
    maxtext.enable()
    x, logits, *w = arguments(2)
    with pytest.raises(ValueError, match=message):
        layer(x, logits, None, *w, None, None, None)


def test_another_implementation_of_the_layer_is_refused(install):
    of_class = install()
    layer = of_class(None, sparse_matmul=False)
    maxtext.enable()
    with pytest.raises(ValueError, match="sparse_matmul must be True"):
        of_class(None, sparse_matmul=False)
    with pytest.raises(ValueError, match="sparse_matmul must be True .* got sparse_matmul=False"):
        layer()
    layer.config.sparse_matmul, layer.config.attention = True, "vllm_rpa"
    with pytest.raises(ValueError, match="attention must not be that of vLLM.* call disable"):
        layer()


def test_an_exchange_sets_only_what_the_config_leaves_open(install):
    of_class = install()
    maxtext.enable(exchange=ma.Exchange(wire_dtype=jnp.float32, alignment=8))
    assert of_class.sparse_matmul.__wrapped__
    with pytest.raises(ValueError, match="capacity must be omitted .* got 8. Set it in the config"):
        maxtext.enable(exchange=ma.Exchange(capacity=8))
    with pytest.raises(TypeError, match="exchange must be an Exchange or None"):
        maxtext.enable(exchange=ma.MxFp8())
    with pytest.raises(TypeError, match="fp8 must be a bool"):
        maxtext.enable(fp8=ma.BlockwiseFp8())
