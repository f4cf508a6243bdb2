"""Test the promises of docs/reproducibility.md that no other file tests."""

import re
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_moe_a2a as ma

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reproducibility.md"
RANKS, TOKENS, HIDDEN, TOP_K = harness.SEVERAL, 6, 16, 3
EXPERTS = 2 * RANKS


@pytest.mark.exchanges(0)
def test_every_line_of_the_page_names_tests_that_exist():
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    lines = [line for line in lines if not re.match(r"\| (what changes|---)", line)]
    assert len(lines) > 20
    for line in lines:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)
        assert named or line.endswith("| the same test |"), line
        for file, name in named:
            assert f"def {name}(" in (ROOT / file).read_text(), name


@pytest.mark.exchanges(3 * 2)
def test_the_sum_of_a_token_does_not_depend_on_the_capacity_or_on_other_tokens():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(RANKS, TOKENS, HIDDEN)).astype(jnp.bfloat16)
    ids = rng.integers(0, EXPERTS, (RANKS, TOKENS, TOP_K), np.int32)
    weights = rng.random((RANKS, TOKENS, TOP_K), np.float32)

    def sums(capacity, *args):
        def of_rank(x, ids, weights):
            options = dict(group=harness.group_of(RANKS), num_experts=EXPERTS, capacity=capacity)
            recv = ma.dispatch(x, ids, weights, **harness.exchanging(options))
            return ma.combine(recv.rows, recv)

        return harness.jit(harness.over_ranks(of_rank, harness.mesh_of(RANKS)))(*args)

    worst = RANKS * TOKENS * TOP_K
    expected = sums(worst, x, ids, weights)
    harness.assert_same_bytes(sums(worst + 8, x, ids, weights), expected)
    kept = slice(None), slice(0, TOKENS - 2)
    harness.assert_same_bytes(sums(worst, x[kept], ids[kept], weights[kept]), expected[kept])


@pytest.mark.one_process("ma.moe makes the group of a mesh")
@pytest.mark.several_devices("ma.moe makes the group of a mesh")
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_two_runs_of_a_training_step_return_the_same_bytes(dtype):
    with jax.set_mesh(harness.mesh_of(RANKS)):
        config = ma.MoEConfig(64, 32, EXPERTS, ma.TopK(2), shared_hidden=32, dtype=dtype)
        params = ma.init_moe(jax.random.key(0), config)
        x = jax.random.normal(jax.random.key(1), (4 * RANKS, 64), dtype)

        @jax.jit
        def step(params, x):
            def loss(params, x):
                y, stats = ma.moe(
                    x, **params, axes="ep", exchange=ma.Exchange(capacity_factor=1.25)
                )
                return (y.astype(jnp.float32) ** 2).sum() + stats.balance_loss + stats.z_loss

            return jax.value_and_grad(loss, (0, 1))(params, x)

        jax.tree.map(harness.assert_same_bytes, step(params, x), step(params, x))
