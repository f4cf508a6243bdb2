"""Test the kernel that chooses experts: it returns the ids of ``lax.top_k``, and is called only on
GPUs."""

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
from cuda_calls import calls, lowered
from emulation import runs

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.layer import choose
from jax_moe_a2a._src.layer.choose import Groups, Weighing

pytestmark = [
    pytest.mark.exchanges(0),
    pytest.mark.one_process("each process would compute the same on its own devices"),
]
WHY_NO_KERNEL = choose.why_no_kernel
SOFTMAX, SIGMOID = Weighing(True, False, 1.0), Weighing(True, True, 2.5)
AS_THEY_ARE = Weighing(False, False, 16.0)
# Each case is (experts, choices, groups, weighing).
CASES = {
    "Qwen3": (128, 8, None, SOFTMAX),
    "GPT-OSS": (32, 4, None, SOFTMAX),
    "DeepSeek-V3": (256, 8, Groups(8, 4, 2), SIGMOID),
    "DeepSeek-V2": (160, 6, Groups(8, 3, 1), AS_THEY_ARE),
    "one expert": (1, 1, None, AS_THEY_ARE),
    "odd": (37, 32, None, SOFTMAX),
    "odd groups": (105, 7, Groups(5, 2, 3), SIGMOID),
    "few finite keys": (63, 32, Groups(3, 2, 1), SOFTMAX),
    "a group for each lane": (64, 10, Groups(32, 5, 2), AS_THEY_ARE),
    "half of the most experts": (512, 12, None, SIGMOID),
    "the most experts": (1024, 8, Groups(2, 1, 4), SOFTMAX),
}


all_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
TOKENS = 40


def keys_of(experts):
    """Return keys [T, E]: no denormals, which XLA on CPUs flushes, and no NaNs on GPUs, where XLA
    defines no order."""
    rng = np.random.default_rng(experts)
    numbers = [-np.inf, -3, -1e-30, -0.0, 0.0, 1e-30, 2, np.inf]
    numbers += [] if harness.ON_GPU else [np.nan]
    shape = (TOKENS // 4, experts)
    keys = [rng.normal(size=shape), rng.integers(-2, 2, shape), rng.choice(numbers, shape)]
    keys.append(np.where(rng.random(shape) < 0.05, 1, -np.inf))
    return np.concatenate(keys).astype(np.float32)


def arrays_of(case):
    rng = np.random.default_rng(1)
    values = rng.normal(size=(TOKENS, case[0]), scale=3).astype(np.float32)
    return keys_of(case[0]), values, np.arange(TOKENS) % 5 > 0


def numpy_choice(keys, k, groups):
    """Return k ids in the order of `lax.top_k`: low ids first among equal keys, and NaN as the
    highest key."""
    keys = np.where(np.isnan(keys), np.inf, keys).astype(np.float32), np.isnan(keys)
    order = lambda keys: np.lexsort((np.arange(keys[0].shape[-1]), -keys[0], ~keys[1]))
    if groups is not None:
        assert not keys[1].any()
        grouped = keys[0].reshape(groups.num_groups, -1)
        highest = -np.sort(-grouped, axis=-1)[:, : groups.top_in_group]
        sums = functools.reduce(np.add, highest.T)
        best = order((sums, np.isnan(sums)))[: groups.top_groups]
        eligible = np.full_like(grouped, -np.inf)
        eligible[best] = grouped[best]
        keys = eligible.reshape(-1), keys[1]
    return order(keys)[:k]


@pytest.fixture(scope="module")
def emulated():
    """Return the path of a program that runs the kernel on a CPU, under ThreadSanitizer."""
    if harness.ON_GPU:
        pytest.skip("XLA gives a sum of infinities another sign on GPUs")
    runs.build("tsan/choose")
    return runs.OUT / "tsan/choose"


def run(emulated, case, keys, values, *masks):
    experts, k, groups, (renormalizes, is_sigmoid, scale) = case
    tokens = keys.shape[0]
    numbers = tokens, experts, k, len(masks), *(groups or (1, 1, 1)), renormalizes, is_sigmoid
    arrays = np.array(numbers, np.int32), np.float32(scale), keys, values, *masks
    done = subprocess.run(
        emulated,
        input=b"".join(x.tobytes() for x in arrays),
        env=os.environ | {"TSAN_OPTIONS": "atexit_sleep_ms=0"},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    ids, *floats = np.frombuffer(done.stdout, np.int32).reshape(3, tokens, k)
    return ids, *(x.view(np.float32) for x in floats)


def composed(case, *arrays):
    _, k, groups, weighing = case
    fn = functools.partial(choose._composition, k=k, groups=groups, weighing=weighing)
    return harness.jit(fn)(*map(jnp.asarray, arrays))


def assert_equal(found, expected):
    """Check that two results (ids, weights, chosen values) are equal, except weights, which are
    close."""
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[2], expected[2])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-30)


@all_cases
@pytest.mark.parametrize("is_masked", (False, True), ids=("all", "masked"))
def test_the_emulated_kernel_is_the_composition(emulated, case, is_masked):
    keys, values, mask = arrays_of(case)
    arrays = (keys, values, mask) if is_masked else (keys, values)
    assert_equal(run(emulated, case, *arrays), composed(case, *arrays))


@all_cases
def test_the_composition_has_the_order_of_a_sort(case):
    keys, values, _ = arrays_of(case)
    _, k, groups, _ = case
    # A group's sum must not be NaN, because the order of groups would be undefined.
    rows = keys if groups is None else np.where(np.isnan(keys) | (keys > 3e38), -5, keys)
    expected = [numpy_choice(row, k, groups) for row in rows]
    np.testing.assert_array_equal(composed(case, rows, values)[0], expected)


@pytest.mark.gpu
@all_cases
def test_the_kernel_of_the_gpu_is_the_composition(case):
    _, k, groups, weighing = case
    params = dict(k=k, groups=groups, weighing=weighing)
    fn = lambda *arrays: choose.choose_p.bind(*arrays, **params)
    arrays = arrays_of(case)
    for operands in (arrays, arrays[:2]):
        operands = [jnp.asarray(x) for x in operands]
        program = jax.jit(fn).lower(*operands)
        assert choose.TARGET in program.as_text(), WHY_NO_KERNEL(operands[0], groups)
        expected = jax.jit(lambda *arrays: choose._composition(*arrays, **params))(*operands)
        assert_equal(jax.tree.map(np.asarray, program.compile()(*operands)), expected)


# This is the router of DeepSeek-V3, with fewer groups and experts.
ROUTER = ma.TopK(4, score="sigmoid", num_groups=4, top_groups=2, scale=2.5)


def weights_of(logits, mask=None, topk=ROUTER):
    return topk(logits, select_bias=jnp.linspace(-0.2, 0.2, 32), mask=mask)[:2]


@pytest.fixture
def on_gpus(monkeypatch):
    if not native.has_kernels():
        pytest.skip("the extension, which checks the call, was not built")
    jax.clear_caches()
    monkeypatch.setattr(native, "why_no_local_kernel", lambda: "")
    monkeypatch.setattr(native, "register_targets", lambda: None)
    yield
    jax.clear_caches()


def aval(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def types_of(fn, *args):
    """Return the operand and result types of the kernel's calls in a program for GPUs."""
    found = calls(fn, *args)
    assert {call.target for call in found} <= {"choose"}
    return [re.sub("tensor<([^>]*)>", r"\1", call.types) for call in found]


def test_a_choice_on_gpus_is_one_call(on_gpus):
    results = "(6x4xi32, 6x4xf32, 6x4xf32)"
    assert types_of(weights_of, aval(6, 32)) == [f"(6x32xf32, 6x32xf32, 0xi1) -> {results}"]
    ((_, attributes, _),) = calls(weights_of, aval(6, 32))
    assert {name: float(x) for name, x in attributes.items()} == dict(
        num_groups=4, top_groups=2, top_in_group=2, renormalizes=1, is_sigmoid=1, scale=2.5
    )
    batch = aval(2, 3, 32), aval(2, 3, dtype="bool")
    expected = [f"(6x32xf32, 6x32xf32, 6xi1) -> {results}"]
    assert types_of(weights_of, *batch) == types_of(jax.vmap(weights_of), *batch) == expected
    loss = lambda logits: weights_of(logits)[1].sum()
    for fn in (jax.grad(loss), jax.grad(lambda x: jax.grad(loss)(x).sum())):
        assert len(types_of(fn, aval(6, 32))) == 1
    assert "top_k" not in lowered(jax.grad(loss), aval(6, 32))
    of_ranks = harness.over_ranks(weights_of, harness.mesh_of(harness.SEVERAL))
    assert len(types_of(of_ranks, aval(harness.SEVERAL, 6, 32))) == 1


@pytest.mark.parametrize(
    ("num_groups", "most", "least"), ((None, 1024, 1025), (5, 640, 645), (32, 1024, 1056))
)
def test_more_experts_than_the_kernel_holds_are_composed(on_gpus, caplog, num_groups, most, least):
    fn = ma.TopK(2, num_groups=num_groups, top_groups=num_groups and 2)
    assert len(types_of(fn, aval(6, most))) == 1
    with caplog.at_level(logging.INFO, logger="jax_moe_a2a"):
        assert types_of(fn, aval(6, least)) == []
    why = f"{choose.TARGET}: lax.top_k, because the kernel chooses from at most 32 groups and 1024"
    got = f"got {num_groups or 1} groups and {least} experts"
    assert any(why in message and got in message for message in caplog.messages)


@pytest.mark.several_devices("Auto axes need a mesh")
def test_xla_divides_the_composition_among_devices(on_gpus, caplog):
    """If XLA divides tokens among devices, the program does not call the kernel."""
    mesh = harness.mesh_of(harness.SEVERAL)
    logits = aval(8 * harness.SEVERAL, 32)
    program = jax.jit(weights_of, in_shardings=jax.NamedSharding(mesh, jax.P(harness.AXIS)))
    with caplog.at_level(logging.INFO, logger="jax_moe_a2a"):
        text = program.trace(logits).lower(lowering_platforms=("cuda",)).as_text()
    assert choose.TARGET not in text
    assert any("XLA divides the program among devices" in m for m in caplog.messages)


def test_explain_names_the_choice_and_the_reason_against_the_kernel(on_gpus):
    (call,) = ma.explain(weights_of, aval(6, 32), device="9.0")
    assert (call.name, call.path) == ("choice of experts", "CUDA kernel")
    assert call.sizes == "6 tokens, 4 of 32 experts"
    (call,) = ma.explain(weights_of, aval(6, 32), device="cpu")
    assert call.path == "portable path"
    with jax.enable_x64(True):
        (call,) = ma.explain(weights_of, aval(6, 32, dtype="float64"), device="9.0")
    assert (call.path, call.why) == (
        "lax.top_k",
        "the kernel compares float32 numbers; got float64[6,32]",
    )


@pytest.mark.parametrize("topk", (ROUTER, ma.TopK(4), ma.TopK(4, renormalize=False)), ids=repr)
def test_derivatives_and_transforms_are_those_of_the_composition(topk):
    logits = np.random.default_rng(2).normal(size=(3, 8, 32)).astype(np.float32)
    mask = np.arange(24).reshape(3, 8) % 5 > 0
    bias = jnp.linspace(-0.2, 0.2, 32)
    ids = topk(logits, select_bias=bias, mask=mask).ids

    def by_formula(logits):
        scores = jax.nn.sigmoid(logits) if topk.score == "sigmoid" else jax.nn.softmax(logits)
        chosen = jnp.take_along_axis(scores, jnp.maximum(ids, 0), axis=-1)
        if topk.renormalize is not False:
            chosen /= chosen.sum(axis=-1, keepdims=True)
        return jnp.where(mask[..., None], chosen * topk.scale, 0)

    def ours(logits):
        return jax.vmap(lambda *args: topk(args[0], select_bias=bias, mask=args[1]).weights)(
            logits, mask
        )

    def derivatives(fn):
        loss = lambda x: jnp.sin(fn(x) * jnp.arange(1.0, 5.0)[None, None]).sum()
        direction = jnp.cos(logits)
        along = lambda x: jax.jvp(loss, (x,), (direction,))[1]
        again = jax.checkpoint(loss)
        return loss(logits), along(logits), *(jax.grad(f)(logits) for f in (loss, along, again))

    found, expected = (harness.jit(lambda fn=fn: derivatives(fn))() for fn in (ours, by_formula))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not np.asarray(found[2])[~mask].any()


def test_no_tokens_choose_nothing():
    fn = jax.grad(lambda logits: ROUTER(logits).weights.sum())
    for logits in (jnp.zeros((0, 32)), jnp.zeros((2, 0, 32))):
        assert jax.jit(ROUTER)(logits).ids.shape == (*logits.shape[:-1], 4)
        assert jax.jit(fn)(logits).shape == logits.shape
