"""Test that equal `Group` objects are interchangeable, and that making one asks no device or
process."""

import inspect
import pickle
import socket
import threading

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from pretended import Gpu

import jax_moe_a2a as ma
from jax_moe_a2a._src import compat
from jax_moe_a2a._src.group import native, processes

pytestmark = [
    pytest.mark.one_process("it pretends several processes in one process"),
    pytest.mark.several_devices("it pretends processes with a device each"),
]


def mesh_of(*shape):
    """Return a mesh of fake GPUs with the axes "host" and "ep"."""
    gpus = [Gpu(i, process_index=i) for i in range(np.prod(shape))]
    return Mesh(np.array(gpus).reshape(shape), ("host", "ep"))


@pytest.fixture
def nothing_acts(monkeypatch):
    def refuse(name):
        return lambda *args, **kwargs: pytest.fail(f"{name} was called")

    for module in (native, processes):
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                monkeypatch.setattr(module, name, refuse(f"{module.__name__}.{name}"))
    monkeypatch.setattr(processes, "publish", refuse("processes.publish"))
    for name in ("set", "get", "barrier"):
        monkeypatch.setattr(compat, f"coordination_{name}", refuse(f"coordination_{name}"))
    monkeypatch.setattr(jax, "process_index", refuse("jax.process_index"))
    monkeypatch.setattr(jax, "local_devices", refuse("jax.local_devices"))
    monkeypatch.setattr(jax, "devices", refuse("jax.devices"))
    monkeypatch.setattr(threading.Thread, "start", refuse("a thread"))
    monkeypatch.setattr(socket, "socket", refuse("a socket"))


@pytest.mark.parametrize("implementation", (None, "cuda"))
@pytest.mark.parametrize("two_level", (False, True))
def test_a_group_over_processes_is_made_compared_and_printed_without_them(
    nothing_acts, implementation, two_level
):
    def new_group(mesh):
        return ma.Group(
            mesh, ("host", "ep"), implementation=implementation, two_level=two_level, timeout=5.0
        )

    group = new_group(mesh_of(2, 2))
    assert group == new_group(mesh_of(2, 2)) and hash(group) == hash(new_group(mesh_of(2, 2)))
    assert group != new_group(mesh_of(1, 4))
    assert len({group, new_group(mesh_of(2, 2)), *group.levels, group.single_rank}) == (
        4 if two_level else 2
    )
    assert "Mesh" in repr(group) and "Mesh" in str(group)
    assert (group.axes, group.size, group.single_rank.size) == (("host", "ep"), 4, 1)
    assert [level.size for level in group.levels] == ([2, 2] if two_level else [4])
    assert (group.patience, group.sms_of("route")) == (600.0, None)
    abstract = new_group(AbstractMesh((2, 2), ("host", "ep")))
    assert abstract != group and abstract.placed_on(mesh_of(2, 2)) == group
    assert pickle.loads(pickle.dumps(group)) == group
    for name in ("timeout", "tiemout"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(group, name, 3.0)


def test_levels_and_the_single_rank_group_are_groups():
    group = ma.Group(AbstractMesh((2, 4), ("host", "ep")), ("host", "ep"), two_level=True)
    assert {type(each) for each in (*group.levels, group.single_rank)} == {ma.Group}
    assert [level.path for level in group.levels] == ["portable", "portable"]


MESH = AbstractMesh((2, 4), ("host", "ep"))
HEAD = "Group(mesh=AbstractMesh({'host': 2, 'ep': 4}), axis_name="


@pytest.mark.parametrize(
    "group, text",
    (
        (lambda: ma.Group(axis_name="ep", size=8), "Group(axis_name='ep', size=8)"),
        (
            lambda: ma.Group(MESH, ("host", "ep"), timeout=60, cuda_graphs=False, two_level=False),
            f"{HEAD}('host', 'ep'), size=8, timeout=60.0, cuda_graphs=False)",
        ),
        (
            lambda: ma.Group(MESH, "ep", num_sms={"route": 8, "combine": 16}),
            f"{HEAD}'ep', size=4, num_sms={{'combine': 16, 'route': 8}})",
        ),
        (
            lambda: ma.Group(mesh_of(1, 2), "ep").single_rank,
            "Group(mesh=Mesh({'host': 1, 'ep': 2}), ",
        ),
    ),
)
def test_a_group_prints_what_differs_from_the_defaults(group, text):
    assert repr(group()).startswith(text) and str(group()) == repr(group())
    if text.endswith(")"):
        assert repr(group()) == text
