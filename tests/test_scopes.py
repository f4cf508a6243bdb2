"""Test that a layer's operations in a compiled program, forward and backward, are in named
scopes."""

import re

import harness
import jax
import jax.numpy as jnp
import pytest

import jax_moe_a2a as ma
from jax_moe_a2a._src import scopes

pytestmark = [
    pytest.mark.several_devices("it compiles for the devices of a mesh"),
    pytest.mark.one_process("it compiles a program and does not run it"),
]

RANKS = harness.SEVERAL


@pytest.fixture(scope="module")
def names():
    """Return the operation names of a compiled program: a layer that has every named scope, and its
    gradient."""
    slots = [slot for expert in range(RANKS) for slot in (expert, -1)]
    placement = ma.Placement.from_slots(slots, RANKS, num_ranks=RANKS)
    config = ma.MoEConfig(128, 128, RANKS, ma.TopK(2), shared_hidden=128)
    group = ma.Group(harness.mesh_of(RANKS), harness.AXIS)

    def loss(params, x):
        with jax.named_scope("my_layer"):
            params = params | dict(experts=params["experts"].in_fp8())
            y, found = ma.moe(x, **params, axes=group, placement=placement)
        return jnp.sum(y) + found.balance_loss + found.z_loss, (y, found.load)

    params = jax.eval_shape(lambda: ma.init_moe(jax.random.key(0), config))
    x = jax.ShapeDtypeStruct((2 * RANKS + 1, config.hidden), jnp.float32)
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True)).lower(params, x).compile()
    return re.findall(r'op_name="([^"]+)"', compiled.as_text())


@pytest.mark.parametrize("name", sorted(scopes.NAMES))
def test_operations_have_the_name_of_what_they_are_for(names, name):
    assert any(re.search(rf"\b{name}\b", op_name) for op_name in names)


@pytest.mark.parametrize("name", sorted(scopes.NAMES - {"moe_load"}))
def test_derivatives_have_the_name_of_what_they_derive(names, name):
    backward = [op_name for op_name in names if "transpose(" in op_name]
    assert any(re.search(rf"\b{name}\b", op_name) for op_name in backward)


def test_scopes_of_the_user_stay_around_those_of_the_package(names):
    of_package = [op for op in names if re.search(rf"^jit.*\b({'|'.join(scopes.NAMES)})\b", op)]
    assert of_package and all("my_layer" in op_name for op_name in of_package)


def test_a_scope_is_not_in_itself(names):
    """The test omits backward operations, because JAX repeats names around a checkpoint. It also
    omits the additions of sums, whose names do not tell the pass."""
    of_passes = [op_name for op_name in names if op_name.startswith("jit(")]
    forward = [op_name for op_name in of_passes if "transpose(" not in op_name]
    assert forward
    assert not [op_name for op_name in forward if re.search(r"\b(moe_\w+)/\1\b", op_name)]
