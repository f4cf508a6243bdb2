"""Test that the kernel that plans placements returns NumPy's results, and runs only on GPUs."""

import functools
import logging
import os
import re
import subprocess

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import runs
from test_expert_placement import loads

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.placement import fill

pytestmark = [
    pytest.mark.exchanges(0),
    pytest.mark.one_process("each process would compute the same on its own devices"),
]
# These (ranks, experts) include the kernel's largest number of ranks, and more experts per rank
# than a warp has lanes.
SIZES = ((1, 3), (2, 6), (3, 105), (8, 64), (64, 256), (72, 288), (128, 256))
WHY_NO_KERNEL = fill.why_no_kernel


def drawn(ranks, experts):
    """Return loads [N, E]: those of test_expert_placement.py, equal loads, and loads with ties."""
    ties = np.random.default_rng(ranks).integers(0, 4, (3, experts))
    return np.concatenate([loads(experts, ranks), np.full((1, experts), 5), ties]).astype(np.int32)


@pytest.fixture(scope="module")
def emulated():
    """Return the path of a program that runs the kernel on a CPU, under ThreadSanitizer."""
    runs.build("tsan/fill_slots")
    return runs.OUT / "tsan/fill_slots"


@pytest.mark.parametrize("spare", range(5))
@pytest.mark.parametrize(("ranks", "experts"), SIZES)
def test_the_emulated_kernel_fills_the_same_slots(emulated, ranks, experts, spare):
    rng = np.random.default_rng(spare)
    rows = drawn(ranks, experts).reshape(-1, ranks, experts // ranks)
    ids = np.stack([rng.permutation(experts).reshape(ranks, -1) for _ in rows]).astype(np.int32)
    for most, min_rows in ((31, 1), (max(1, ranks // 2), 40)):
        sizes = np.array([*rows.shape, spare, most, min_rows], np.int32)
        done = subprocess.run(
            emulated,
            input=b"".join(x.tobytes() for x in (sizes, ids, rows)),
            env=os.environ | {"TSAN_OPTIONS": "atexit_sleep_ms=0"},
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        found = np.frombuffer(done.stdout, np.int32).reshape(2, *rows.shape[:2], -1)
        options = dict(spare=spare, most=most, min_rows=min_rows)
        for i, args in enumerate(zip(ids, rows, strict=True)):
            for ours, theirs in zip(found[:, i], fill.fill_loop(np, *args, **options), strict=True):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("spare", range(5))
@pytest.mark.parametrize(("ranks", "experts"), SIZES)
@pytest.mark.gpu
def test_plans_of_the_gpu_are_those_of_numpy(ranks, experts, spare):
    plan = functools.partial(ma.plan_placement, num_ranks=ranks, spare=spare)
    many = drawn(ranks, experts)
    for min_rows in (1, 40):
        own = functools.partial(plan, min_rows=min_rows)
        expected = own(many)
        lowered = jax.jit(own).lower(jnp.asarray(many))
        assert fill.TARGET in lowered.as_text(), fill.why_no_kernel(ranks, experts)
        in_turn = jax.jit(lambda loads, own=own: jax.lax.map(own, loads))
        for found in (lowered.compile()(many), in_turn(many)):
            jax.tree.map(harness.assert_same_bytes, found, expected)


def calls(fn, *args):
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    lines = [line for line in text.splitlines() if f"@{fill.TARGET}(" in line]
    return [re.sub("tensor<|xi32>", "", line.rsplit(" : ", 1)[1]) for line in lines]


@pytest.fixture
def on_gpus(monkeypatch):
    if not native.has_kernels():
        pytest.skip("the extension, which checks the call, was not built")
    jax.clear_caches()
    monkeypatch.setattr(fill, "why_no_kernel", lambda *sizes: "")
    monkeypatch.setattr(native, "register_targets", lambda: None)
    yield
    jax.clear_caches()


def test_a_plan_on_gpus_is_one_call(on_gpus):
    plan = functools.partial(ma.plan_placement, num_ranks=4, spare=2)
    load = jax.ShapeDtypeStruct((3, 5, 16), np.int32)
    assert calls(plan, load.update(shape=(16,))) == ["(1x4x4, 1x4x4) -> (1x4x6, 1x4x6)"]
    assert calls(plan, load) == ["(15x4x4, 15x4x4) -> (15x4x6, 15x4x6)"]
    by_scan = lambda loads: jax.lax.map(plan, loads)
    assert calls(by_scan, load) == ["(5x4x4, 5x4x4) -> (5x4x6, 5x4x6)"]
    hosts = functools.partial(plan, num_hosts=2, home=False)
    assert calls(hosts, load) == ["(30x2x4, 30x2x4) -> (30x2x6, 30x2x6)"]
    ranks = harness.SEVERAL
    plan = functools.partial(ma.plan_placement, num_ranks=ranks, spare=1)
    of_ranks = harness.over_ranks(plan, harness.mesh_of(ranks))
    assert len(calls(of_ranks, load.update(shape=(ranks, 2 * ranks)))) == 1


def test_transforms_keep_the_plans():
    plan = functools.partial(ma.plan_placement, num_ranks=4, spare=2)
    many = loads(16, 4)[:6].reshape(2, 3, 16)
    expected = plan(many)
    of_layers = jax.vmap(lambda loads: jax.lax.map(plan, loads), in_axes=1, out_axes=1)

    def loss(x):
        found = jax.checkpoint(of_layers)(jnp.asarray(many))
        return x * found.share_ends.sum().astype(x.dtype), found

    for transform in (jax.grad(loss, has_aux=True), lambda x: jax.linearize(loss, x)[0]):
        _, found = harness.jit(transform)(np.float32(2))
        jax.tree.map(harness.assert_same_bytes, found, expected)


@pytest.mark.skipif(not native.has_kernels(), reason="the extension was built without kernels")
def test_the_reason_for_the_loop_is_logged(monkeypatch, caplog):
    class Gpu:
        compute_capability = "9.0"

    plan = functools.partial(ma.plan_placement, num_ranks=4, spare=2)
    load = jax.ShapeDtypeStruct((16,), np.int32)
    # Both patches must end before the fixtures, which read the exchange counters on GPUs.
    with monkeypatch.context() as patch:
        patch.setattr(native, "local_gpus", lambda: [Gpu()])
        assert WHY_NO_KERNEL(128, 4096) == ""
        assert "at most 128 ranks and 4096 experts; got 129 and 258" in WHY_NO_KERNEL(129, 258)
        assert "got 1 and 4097" in WHY_NO_KERNEL(1, 4097)
        patch.setattr(Gpu, "compute_capability", "8.0")
        assert "9.0 or newer" in WHY_NO_KERNEL(4, 16)
    jax.clear_caches()
    with (
        monkeypatch.context() as patch,
        caplog.at_level(logging.INFO, logger="jax_moe_a2a"),
    ):
        patch.setattr(native, "has_kernels", lambda: False)
        assert calls(plan, load) == []
    why = "jax_moe_a2a was built without kernels"
    assert f"{fill.TARGET}: a loop, because {why}" in caplog.messages
