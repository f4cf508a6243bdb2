"""Test the attribute `scopes` of kernel calls, a hash of named scopes by which ranks detect that
they make different calls."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import test_lowering

import jax_moe_a2a as ma

pytestmark = test_lowering.pytestmark

X, IDS, WEIGHTS = test_lowering.aval(8, 16), test_lowering.IDS, test_lowering.WEIGHTS


def scopes(fn):
    """Return the hashes of all dispatches and of all combines that fn(x, ids, weights) makes."""
    text = test_lowering.lower(fn, X, IDS, WEIGHTS)
    found = re.findall(r"@moe_a2a_(\w+?)(?:_in_graph)?\(.*?\bscopes = (-?\d+) : i64", text)
    assert len(found) == text.count("custom_call @moe_a2a_")
    of = {"dispatch": [], "combine": []}
    for operation, scope in found:
        of["combine" if "combine" in operation else "dispatch"].append(scope)
    return of["dispatch"], of["combine"]


def layer(x, ids, weights, name="layer"):
    with jax.named_scope(name):
        return test_lowering.exchange(x, ids, weights)


def loss(x, ids, weights):
    return jnp.sum(layer(x, ids, weights).astype(jnp.float32))


def test_calls_in_scopes_of_other_names_differ():
    def twice(x, ids, weights):
        return layer(layer(x, ids, weights, "first"), ids, weights, "second")

    for first, second in scopes(twice):
        assert first != second
    same = scopes(lambda *args: layer(layer(*args), *args[1:]))
    for first, second in same:
        assert first == second


def test_a_call_and_its_repetition_in_a_derivative_have_the_same_names():
    def all_of_them(x, ids, weights):
        of_x = functools.partial(layer, ids=ids, weights=weights)
        again = jax.checkpoint(loss, policy=jax.checkpoint_policies.nothing_saveable)
        return (
            layer(x, ids, weights),
            jax.grad(loss)(x, ids, weights),
            jax.grad(again)(x, ids, weights),
            jax.jvp(of_x, (x,), (x,))[1],
            jax.jit(jax.linearize(of_x, x)[1])(x),
        )

    for of_operation in scopes(all_of_them):
        assert len(set(of_operation)) == 1


@pytest.mark.parametrize("wrap", (jax.checkpoint, jax.jit), ids=("checkpoint", "jit"))
def test_transforms_around_the_layer_do_not_change_its_names(wrap):
    """In a gradient through `jax.checkpoint` or `jax.jit`, forward and backward calls have equal
    hashes."""
    wrapped = wrap(loss)
    for of_operation in scopes(lambda *args: jax.grad(wrapped)(*args)):
        assert of_operation and len(set(of_operation)) == 1


PROGRAM = """
import re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec
import jax_moe_a2a as ma

ma.Group._why_portable = ""
mesh = Mesh(np.array(jax.devices()), "ep")
group = ma.Group(mesh, "ep")


@jax.jit
def layer(x, ids):
    recv = ma.dispatch(x, ids, group=group, num_experts=4)
    with jax.named_scope("home"):
        return ma.combine(recv.rows, recv)


def model(x, ids):
    with jax.named_scope("attention"):
        x = layer(x, ids)
    with jax.named_scope("mlp"):
        return layer(x, ids)


def text_of(fn):
    spec = PartitionSpec("ep")
    mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec))
    args = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((8, 2), jnp.int32)
    return mapped.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


if "warm" in sys.argv:
    text_of(lambda x, ids: layer(2 * layer(x, ids), ids))
    text_of(model)
print(*re.findall(r"scopes = (-?\\d+)", text_of(model)))
"""


def test_the_names_are_the_same_in_processes_of_other_folders_and_caches(tmp_path):
    package = os.path.dirname(os.path.dirname(ma.__file__))
    found = []
    for folder, name, *state in (("a", "one.py"), ("b/c", "other.py", "warm")):
        path = tmp_path / folder
        path.mkdir(parents=True)
        (path / name).write_text(PROGRAM)
        done = subprocess.run(
            [sys.executable, name, *state],
            cwd=path,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            },
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.split())
    assert found[0] == found[1] and len(set(found[0])) >= 2
