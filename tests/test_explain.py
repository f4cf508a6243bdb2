"""Test that `ma.explain` lists the calls of a program with their paths and reasons."""

import functools
import logging

import harness
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src import explain as explaining
from jax_moe_a2a._src import paths
from jax_moe_a2a._src.group import group as group_module
from jax_moe_a2a._src.group import native

pytestmark = [
    pytest.mark.several_devices("its groups have meshes"),
    pytest.mark.one_process("it explains pretended GPUs as devices of one process"),
    pytest.mark.skipif(harness.ON_GPU, reason="the tests name their devices"),
]
needs_kernels = pytest.mark.skipif(
    not native.has_kernels(), reason="the extension was built without the CUDA kernels"
)

RANKS = harness.SEVERAL
EXPERTS, TOKENS, TOP_K, HIDDEN = 2 * RANKS, 8, 2, 128
AXIS = harness.AXIS


def aval(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


X = aval(RANKS * TOKENS, HIDDEN)
IDS = aval(RANKS * TOKENS, TOP_K, dtype="int32")
WEIGHTS = aval(RANKS * TOKENS, TOP_K, dtype="float32")
EXPERT_WEIGHTS = aval(EXPERTS, HIDDEN, 2, HIDDEN), aval(EXPERTS, HIDDEN, HIDDEN)
ARGS = X, IDS, WEIGHTS, *EXPERT_WEIGHTS


def on_ranks(fn, **options):
    spec, mesh = PartitionSpec(AXIS), harness.mesh_of(RANKS)
    return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, **options)


def exchange(x, ids, **options):
    recv = ma.dispatch(x, ids, group=ma.Group(axis_name=AXIS, size=RANKS), num_experts=EXPERTS)
    return ma.combine(recv.rows, recv, **options)


def layer(*args, activation=jax.nn.silu, **options):
    options.update(group=AXIS, num_experts=EXPERTS)

    def on_rank(x, ids, weights, w_in, w_out):
        experts = ma.Experts(w_in, w_out, activation=ma.gated(activation))
        return ma.moe_mlp(x, ma.RouterChoices(ids, weights), experts, **options)

    return on_ranks(on_rank)(*args)


def loss(*args, **options):
    return layer(*args, **options).astype("float32").sum()


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(native, "has_grouped_gemm", lambda: True)


def paths_of(explanation):
    return {(call.name, call.path) for call in explanation}


def test_every_call_of_a_layer_is_portable_on_cpu():
    found = ma.explain(layer, *ARGS)
    assert {call.path for call in found} == {"portable path"}
    assert {call.why for call in found} == {paths.NOT_FOR_GPUS}
    assert "this process sees no GPU" in str(found)
    assert "no device is an NVIDIA GPU" in str(ma.explain(layer, *ARGS, device="cpu"))
    assert ma.explain(layer, *ARGS, device="cpu").calls == found.calls


@needs_kernels
def test_a_layer_and_its_gradient_run_kernels_on_hopper(kernel):
    kernels = lambda *names: {(name, "CUDA kernel") for name in names}
    forward = "route and dispatch", "grouped product with activation", "combine"
    found = paths_of(ma.explain(layer, *ARGS, device="9.0"))
    assert kernels(*forward) <= found and {path for _, path in found} == {"CUDA kernel"}
    gradient = jax.grad(loss, argnums=(0, 3, 4))
    found = ma.explain(gradient, *ARGS, device="9.0")
    backward = "gradient of activation, with its product", "gradient of expert weights", "dispatch"
    assert kernels(*backward) <= paths_of(found) and not any(call.why for call in found)


@pytest.mark.parametrize("device", ("9.0", "10.0", "cpu"))
def test_a_program_over_explicit_axes_is_explained(device):
    def loss(params, x):
        return ma.moe(x, **params, axes=AXIS)[0].astype("float32").sum()

    with jax.set_mesh(harness.mesh_over(jax.sharding.AxisType.Explicit, **{AXIS: RANKS})):
        config = ma.MoEConfig(HIDDEN, HIDDEN, EXPERTS, ma.TopK(TOP_K), dtype="bfloat16")
        params = ma.init_moe(jax.random.key(0), config, AXIS)
        assert ma.explain(jax.grad(loss), params, X, device=device).calls


@needs_kernels
def test_other_gpus_run_the_exchange_and_not_the_products(kernel):
    found = ma.explain(layer, *ARGS, device="10.0")
    assert {("combine", "CUDA kernel"), ("grouped product", "lax.ragged_dot")} <= paths_of(found)
    assert "compute capability 9.0; a GPU of compute capability 10.0 has 10.0" in str(found)
    for device, why in (("8.0", "older than Hopper"), ("12.0", "99 KiB of shared memory")):
        found = ma.explain(layer, *ARGS, device=device)
        assert not any(call.path == "CUDA kernel" for call in found)
        assert why in str(found)


def log_of(caplog, fn, *args):
    """Return the reasons that the log of lowering fn(*args) for CUDA contains."""
    jax.clear_caches()
    with caplog.at_level(logging.INFO, logger="jax_moe_a2a"):
        jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
    return {m.split(", because ", 1)[1] for m in caplog.messages if ", because " in m}


@needs_kernels
@pytest.mark.parametrize("case", ("wire", "tanh", "gradient", "float32"))
def test_the_table_has_the_reasons_that_the_lowering_logs(case, hopper, monkeypatch, caplog):
    fn, args = {
        "wire": (on_ranks(functools.partial(exchange, wire_dtype="float16")), (X, IDS)),
        "tanh": (functools.partial(layer, activation=jnp.tanh), ARGS),
        "gradient": (jax.grad(loss), ARGS),
        "float32": (
            jax.grad(loss),
            [x if x is IDS else x.update(dtype="float32") for x in ARGS],
        ),
    }[case]
    monkeypatch.setattr(ma.Group, "_why_portable", "")
    logged = log_of(caplog, fn, *args)
    explained = ma.explain(fn, *args, device="9.0")
    assert {call.why for call in explained} - {""} == logged
    assert (("activation", "passes over the rows") in paths_of(explained)) == (case == "tanh")
    assert bool(logged) == (case != "gradient")


def test_calls_of_loops_and_branches_are_counted():
    def program(x, ids):
        x, _ = jax.lax.scan(lambda x, _: (jax.checkpoint(exchange)(x, ids), None), x, length=32)
        x = jax.lax.cond(ids[0, 0] > 0, lambda x: exchange(x, ids), lambda x: x, x)
        return jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: exchange(x, ids), x)

    found = ma.explain(jax.jit(on_ranks(program, check_vma=False)), X, IDS)
    combines = [call for call in found if call.name == "combine"]
    assert [(call.count, call.where) for call in combines] == [
        (32, ""),
        (1, "in a branch of a conditional"),
        (1, "per iteration of a while loop"),
    ]
    sizes = combines[0].sizes
    assert sizes.startswith(f"{TOKENS} tokens") and f"bfloat16 [{HIDDEN}]" in sizes


def test_ranks_of_a_vmap_are_explained():
    batched = jax.vmap(exchange, axis_name=AXIS)
    args = aval(RANKS, TOKENS, HIDDEN), aval(RANKS, TOKENS, TOP_K, dtype="int32")
    for call in ma.explain(batched, *args, device="9.0"):
        assert "only with implementation='cuda'" in call.why or not native.has_kernels()


def test_implementation_cuda_on_cpu_is_an_error_in_the_table(monkeypatch):
    monkeypatch.setattr(ma.Group, "_why_portable", "")  # as on a machine with GPUs
    group = ma.Group(axis_name=AXIS, size=RANKS, implementation="cuda")
    route = lambda ids: ma.route(ids, group=group, num_experts=EXPERTS).group_sizes
    batched = jax.vmap(route, axis_name=AXIS)
    (call,) = ma.explain(batched, aval(RANKS, TOKENS, TOP_K, dtype="int32"), device="cpu")
    assert call.path == "error" and "implementation='cuda' needs a program" in call.why


@needs_kernels
def test_a_path_that_processes_decide_together_is_unknown(monkeypatch):
    monkeypatch.setattr(group_module, "_why_no_workspace", lambda group: "")
    monkeypatch.setattr(group_module, "spans_processes", lambda group: True)
    group = ma.Group(harness.mesh_of(RANKS), AXIS)
    with paths.explaining(None), pytest.raises(paths.Unknown, match="decide together"):
        _ = group.path


def test_every_primitive_with_a_path_has_a_public_name():
    names = {explaining._name(primitive) for primitive in paths.choosers}
    assert not any("moe_a2a" in name for name in names)
    assert "combine, start" in names


def test_a_program_without_calls_says_so():
    assert "no exchange and no product" in str(ma.explain(jnp.sin, 1.0))


@pytest.mark.parametrize("device", ("gpu", 9.0, "9"))
def test_other_devices_are_refused(device):
    with pytest.raises(ValueError, match='device must be None, "cpu" or a compute capability'):
        ma.explain(jnp.sin, 1.0, device=device)
