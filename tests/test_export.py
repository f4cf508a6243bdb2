"""Test that exported and serialized programs with exchanges run on any platform."""

import functools

import harness
import jax
import pytest
import small_layer
from jax import export
from small_layer import OF_FLOATS, route_args

import jax_moe_a2a as ma

pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")

RANKS = harness.SEVERAL
TARGETS = [
    f"moe_a2a_{name}{suffix}"
    for name in ("route", "dispatch", "combine", "routed_dispatch", "weighted_dispatch")
    for suffix in ("", "_in_graph")
]
# JAX does not guarantee that custom calls are stable, so it exports them only without these checks.
CUSTOM_CALLS = [export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]

has_no_cpu_path = pytest.mark.several_devices("a group that names 'cuda' is not lowered for CPUs")


@functools.cache
def program():
    """Return the jitted layer of all ranks, a function of (x, topk_weights, w, ids)."""
    layer, sharding = small_layer.layer_of_all_ranks(), harness.placement(harness.mesh_of(RANKS))
    if harness.RANKS_ON_ONE_GPU:  # JAX cannot export the gradient of a program for one named device
        return jax.jit(layer)
    return jax.jit(layer, in_shardings=sharding, out_shardings=sharding)


def placed_arguments():
    floats, ids, kept = small_layer.arguments(RANKS)
    args = (*floats, ids)
    if not harness.RANKS_ON_ONE_GPU:
        args = harness.put(args, harness.placement(harness.mesh_of(RANKS)))
    return *args, kept


@functools.cache
def exported(platforms=None):
    *args, _ = placed_arguments()
    return export.export(program(), platforms=platforms, disabled_checks=CUSTOM_CALLS)(*args)


def run(fn, args):
    with harness.expect_exchanges(2):
        return jax.block_until_ready(fn(*args))


def test_an_exported_layer_equals_the_layer_after_a_round_trip_through_bytes():
    *args, _ = placed_arguments()
    data = exported().serialize()
    again = export.deserialize(data)
    assert again.nr_devices == (1 if harness.RANKS_ON_ONE_GPU else RANKS)
    small_layer.assert_same(run(jax.jit(again.call), args), run(program(), args))


def test_an_exported_layer_has_the_gradient_of_the_dense_layer():
    *args, ids, kept = placed_arguments()
    data = exported().serialize(vjp_order=1)
    again = export.deserialize(data)

    @jax.jit
    def gradient(floats, ids):
        return jax.grad(small_layer.loss_of(again.call, ids), OF_FLOATS)(*floats)

    expected = small_layer.dense_value_and_grads(tuple(args), ids, kept)[1]
    with harness.expect_exchanges(4):
        actual = jax.block_until_ready(gradient(args, ids))
    small_layer.assert_close(actual, expected)


@has_no_cpu_path
def test_one_export_serves_cpu_and_cuda():
    *args, _ = placed_arguments()
    # In jax 0.12.0.1, XLA:CPU aborts if a platform's branch has both jnp.cumsum (chlo.scan) and a
    # collective.
    group = harness.group_of(RANKS)
    route = jax.jit(small_layer.on_all_ranks(lambda ids: ma.route(ids, **route_args(group))))
    export_of = export.export(route, platforms=("cpu", "cuda"), disabled_checks=CUSTOM_CALLS)
    module = export_of(args[3]).mlir_module()
    assert "stablehlo.case" in module and "chlo.scan" not in module
    both = exported(platforms=("cpu", "cuda"))
    assert set(both.platforms) == {"cpu", "cuda"}
    again = export.deserialize(both.serialize())
    small_layer.assert_same(run(jax.jit(again.call), args), run(program(), args))


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("platform", (pytest.param("cpu", marks=has_no_cpu_path), "cuda"))
def test_an_export_calls_the_kernels_only_for_cuda_and_only_where_the_group_has_gpus(platform):
    """A program with kernels has two custom calls: a route with a dispatch, and a combine."""
    module = exported(platforms=(platform,)).mlir_module()
    called = {target for target in TARGETS if f"@{target}(" in module}
    group, expected = harness.group_of(RANKS), 0
    if platform == "cuda" and group.path == "cuda":
        expected = 2
    assert len(called) == expected


@pytest.mark.exchanges(0)
@pytest.mark.gpu
def test_an_export_of_kernels_needs_disabled_safety_checks():
    *args, _ = placed_arguments()
    with pytest.raises(ValueError, match="moe_a2a"):
        export.export(program(), platforms=("cuda",))(*args)
