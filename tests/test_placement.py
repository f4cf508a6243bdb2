"""Test that kernels run on the devices of their program, and that ranks can share one GPU. The
tests only lower programs for CUDA, which needs no GPU."""

import re

import harness
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import group as group_module
from jax_moe_a2a._src.group import native

pytestmark = [
    pytest.mark.skipif(
        not native.has_kernels(), reason="the extension was built without the CUDA kernels"
    ),
    pytest.mark.one_process("it lowers for GPUs that are not there, as devices of one process"),
    pytest.mark.several_devices("it lowers for GPUs that are not there, which stand for several"),
]

RANKS = 4
TOKENS, TOP_K, HIDDEN, EXPERTS = 8, 2, 16, 2 * RANKS


def mesh_of(devices, axis_types=None):
    return Mesh(np.array(devices), ("ep",), axis_types=axis_types)


def exchange(group):
    def on_rank(x, ids):
        recv = ma.dispatch(x, ids, group=group, num_experts=EXPERTS)
        return ma.combine(recv.rows, recv, weights=None)

    return on_rank


def on_mesh(group, mesh):
    spec = PartitionSpec("ep")
    return jax.shard_map(exchange(group), mesh=mesh, in_specs=spec, out_specs=spec)


def on_one_gpu(group):
    return jax.vmap(exchange(group), axis_name="ep")


def avals(*lead, mesh=None):
    """Return the types of the tokens and ids of all ranks, sharded if there is a mesh."""
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec("ep"))
    return (
        jax.ShapeDtypeStruct((*lead, HIDDEN), jnp.bfloat16, sharding=sharding),
        jax.ShapeDtypeStruct((*lead, TOP_K), jnp.int32, sharding=sharding),
    )


def lowered(fn, args, platform="cuda"):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def calls(text):
    return re.findall(r"custom_call @moe_a2a_(\w+?)(?:_in_graph)?\(", text)


def devices_of(text):
    """Return the list of devices of each kernel call in a program."""
    found = re.findall(r"devices = (?:array<i64: ([\d, ]*)>|dense<\[?([\d, ]*)\]?>)", text)
    return [[int(n) for n in (a or b).split(",") if n.strip()] for a, b in found]


def test_ranks_on_one_gpu_are_one_call_that_names_no_device(devices_pass_for_gpus):
    group = ma.Group(axis_name="ep", size=RANKS, implementation="cuda")
    text = lowered(on_one_gpu(group), avals(RANKS, TOKENS))
    assert calls(text) == ["routed_dispatch", "combine"]
    assert devices_of(text) == [[], []]
    assert text.count(f"num_ranks = {RANKS}") == 2


def test_ranks_on_one_gpu_without_implementation_stay_portable(devices_pass_for_gpus):
    group = ma.Group(axis_name="ep", size=RANKS)
    assert calls(lowered(on_one_gpu(group), avals(RANKS, TOKENS))) == []


def test_a_group_with_a_mesh_cannot_share_a_gpu_and_says_so(devices_pass_for_gpus):
    group = ma.Group(mesh_of(jax.devices()[:RANKS]), "ep", implementation="cuda")
    with pytest.raises(ValueError, match=r"without a mesh inside jax.vmap.*use Group\(axis_name"):
        lowered(on_one_gpu(group), avals(RANKS, TOKENS))


def test_asking_for_the_kernels_on_another_platform_is_an_error(devices_pass_for_gpus):
    group = ma.Group(axis_name="ep", size=RANKS, implementation="cuda")
    with pytest.raises(ValueError, match="implementation='cuda' needs a program for NVIDIA GPUs"):
        lowered(on_one_gpu(group), avals(RANKS, TOKENS), platform="cpu")


@pytest.mark.skipif(harness.ON_GPU, reason="there are GPUs here")
def test_asking_for_the_kernels_without_a_gpu_is_an_error_when_traced():
    group = ma.Group(axis_name="ep", size=RANKS, implementation="cuda")
    assert group._why_portable == "JAX sees no GPU"
    with pytest.raises(ValueError, match="implementation.*JAX sees no GPU"):
        jax.eval_shape(on_one_gpu(group), *avals(RANKS, TOKENS))


def test_more_ranks_than_the_kernels_serve_are_refused_with_the_numbers():
    group = ma.Group(axis_name="ep", size=129, implementation="cuda")
    assert group._why_portable == "the group has 129 ranks, more than 128"


class Gpu:
    """A fake GPU with few multiprocessors."""

    compute_capability = "9.0"
    core_count = 48

    def __repr__(self):
        return "cuda:0"


def test_more_ranks_than_multiprocessors_are_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(native, "default_gpu", Gpu)
    group = ma.Group(axis_name="ep", size=49, implementation="cuda")
    assert group._why_portable == (
        "49 ranks on one GPU need 49 streaming multiprocessors; cuda:0 has 48"
    )
    assert ma.Group(axis_name="ep", size=48, implementation="cuda")._why_portable == ""


def test_whole_and_split_exchanges_of_all_ranks_fit_on_the_gpu_together():
    for num_sms in (1, 48, 78, 114, 132, 148):
        for num_ranks in range(1, 65):
            whole, split = (
                native._native.colocated_blocks(num_ranks, num_sms, is_split)
                for is_split in (False, True)
            )
            assert num_ranks * (whole + split) <= num_sms
            assert (whole > 0) == (num_ranks <= num_sms)
            assert (split > 0) == (2 * num_ranks <= num_sms)


GROUPS = {
    "without_a_mesh": lambda mesh: ma.Group(axis_name="ep", size=RANKS),
    "of_an_abstract_mesh": lambda mesh: ma.Group(mesh.abstract_mesh, "ep"),
}


@pytest.mark.parametrize("group_of", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_a_group_takes_its_devices_from_the_mesh_of_shard_map(
    devices_pass_for_gpus, group_of, axis_type
):
    devices = jax.devices()[:RANKS][::-1]
    mesh = mesh_of(devices, (axis_type,))
    text = lowered(on_mesh(group_of(mesh), mesh), avals(RANKS * TOKENS, mesh=mesh))
    assert calls(text) == ["routed_dispatch", "combine"]
    assert devices_of(text) == [[device.id for device in devices]] * 2


def test_a_model_with_an_abstract_mesh_runs_the_kernels_on_the_mesh_of_set_mesh(
    devices_pass_for_gpus,
):
    def model(x, ids):
        mesh = jax.sharding.get_abstract_mesh()
        return on_mesh(ma.Group(mesh, "ep"), mesh)(x, ids)

    for devices in (jax.devices()[:RANKS], jax.devices()[:RANKS][::-1]):
        mesh = mesh_of(devices, (AxisType.Explicit,))
        with jax.set_mesh(mesh):
            text = lowered(model, avals(RANKS * TOKENS, mesh=mesh))
        assert calls(text) == ["routed_dispatch", "combine"]
        assert devices_of(text) == [[device.id for device in devices]] * 2


def test_an_abstract_mesh_without_devices_is_portable_or_an_error(devices_pass_for_gpus):
    mesh = mesh_of(jax.devices()[:RANKS]).abstract_mesh
    text = lowered(on_mesh(ma.Group(mesh, "ep"), mesh), avals(RANKS * TOKENS))
    assert calls(text) == []
    group = ma.Group(mesh, "ep", implementation="cuda")
    with pytest.raises(ValueError, match=r"abstract mesh: call jax.set_mesh\(mesh\) first"):
        lowered(on_mesh(group, mesh), avals(RANKS * TOKENS))


@pytest.mark.parametrize("tokens", (0, TOKENS))
def test_every_lowering_for_gpus_announces_this_process_even_if_no_kernel_runs(monkeypatch, tokens):
    """Other processes, which may have kernels, wait for this process's announcement."""
    announced = []
    monkeypatch.setattr(group_module, "announce", announced.append)
    mesh = mesh_of(jax.devices()[:RANKS])
    group = ma.Group(mesh.abstract_mesh, "ep")
    assert calls(lowered(on_mesh(group, mesh), avals(RANKS * tokens, mesh=mesh))) == []
    assert announced and set(announced) == {ma.Group(mesh, "ep")}
