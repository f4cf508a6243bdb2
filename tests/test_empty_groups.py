"""Test that the weights of experts without rows, and of empty expert slots, affect no result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_layer import experts_of

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)

RANKS, LOCAL, TOKENS, TOP_K = 2, 3, 5, 2
EMPTY = 1  # the local expert (on each rank) without rows
SWIGLU, FREEZE = ma.gated(jax.nn.silu), ma.quantize_experts
GROUP = ma.Group(axis_name="ep", size=RANKS, implementation="portable")
KINDS = {
    "fused": {},
    "bfloat16": dict(dtype=jnp.bfloat16),
    "no biases": dict(biases=False),
    "any activation": dict(activation=lambda x: SWIGLU(jnp.tanh(x))),
    "chunks": dict(exchange=ma.Exchange(num_chunks=TOKENS)),
    "replicated": dict(exchange=ma.Exchange(replicated=True)),
    "replicas": dict(placement=[0, 1, 2, -1, 3, 4, 5, 0]),
    "slots": dict(placement=[0, -1, 2, 1, 3, -1, 4, 5], slots=4),
    "trained in FP8": dict(change=ma.Experts.in_fp8, size=128),
    "frozen": dict(size=128, change=FREEZE),
    "frozen in bfloat16": dict(size=128, change=FREEZE, dtype=jnp.bfloat16),
    "frozen slots": dict(size=128, change=FREEZE, placement=[0, -1, 2, 1, 3, -1, 4, 5], slots=4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_experts_without_rows_reach_nothing(kind):
    options = dict(group=GROUP, num_experts=RANKS * LOCAL) | KINDS[kind]
    size, slots = options.pop("size", 8), options.pop("slots", LOCAL)
    dtype, change = options.pop("dtype", jnp.float32), options.pop("change", lambda own: own)
    activation = options.pop("activation", SWIGLU)
    has_biases, table = options.pop("biases", True), options.pop("placement", None)
    if table is not None:
        table = ma.Placement.from_slots(table, RANKS * LOCAL, num_ranks=RANKS)
        options["placement"] = table
    # In cases with "slots", the slot EMPTY has no expert, and all experts have rows.
    with_rows = [0, 2, 3, 5] if slots == LOCAL else np.arange(RANKS * LOCAL)
    rng = np.random.default_rng(0)
    ids = rng.choice(with_rows, (RANKS, TOKENS, TOP_K))
    ids[:, :TOP_K] = np.resize(with_rows, (RANKS, TOP_K, TOP_K))
    draw = lambda *shape: jnp.asarray(rng.normal(size=(RANKS, *shape)) / 4, dtype)
    x, topk_weights = draw(TOKENS, size), jnp.ones((RANKS, TOKENS, TOP_K), jnp.float32)
    weights = [draw(slots, size, 2 * size), draw(slots, size, size)]
    weights += [draw(slots, 2 * size), draw(slots, size)] if has_biases else []

    def on_rank(ids, x, topk_weights, *weights):
        experts = change(experts_of(*weights, activation=activation))
        return ma.moe_mlp(x, ma.RouterChoices(ids, topk_weights), experts, **options)

    layer = jax.vmap(on_rank, axis_name="ep")

    @jax.jit
    def run(x, topk_weights, *weights):
        if change is FREEZE:
            return layer(ids, x, topk_weights, *weights)
        of_ids = lambda *floats: jnp.sin(layer(ids, *floats).astype(jnp.float32)).sum()
        return jax.value_and_grad(of_ids, range(2 + len(weights)))(x, topk_weights, *weights)

    found, expected = (
        run(x, topk_weights, *(w.at[:, EMPTY].set(hole) for w in weights)) for hole in (np.nan, 0)
    )
    for ours, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(ours, right)
        assert not np.isnan(np.asarray(ours.astype(jnp.float32))).any()
    if change is not FREEZE:
        for gradient in found[1][2:]:
            assert (np.asarray(gradient[:, EMPTY].astype(jnp.float32)) == 0).all()
