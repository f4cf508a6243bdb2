"""Test that `move_experts` copies weights bit for bit, and that training continues as without the
move."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma
from jax_moe_a2a._src.placement import move

pytestmark = [
    pytest.mark.exchanges(0),
    pytest.mark.one_process("each process would move the same"),
]
EXPERTS = 8
# TWO has replicas and an empty slot; FOUR has each expert once.
TWO = ma.Placement.from_slots([3, 0, 5, 5, 1, -1, 2, 7, 6, 4, 3, 0], EXPERTS, num_ranks=2)
FOUR = ma.Placement.from_slots([7, 2, 0, 3, 1, 6, 5, 4], EXPERTS, num_ranks=4)


def weights():
    rng = np.random.default_rng(0)
    return dict(
        w=rng.normal(size=(EXPERTS, 4, 3)).astype(np.float32),
        fp8=np.asarray(jnp.asarray(rng.normal(size=(EXPERTS, 6)), jnp.float8_e4m3fn)),
        count=np.arange(EXPERTS, dtype=np.int32),
    )


def in_slots(w, placement):
    slots = placement.slot_experts
    return jax.tree.map(
        lambda x: np.stack([x[e] if e >= 0 else np.zeros_like(x[0]) for e in slots]), w
    )


assert_same = functools.partial(jax.tree.map, harness.assert_same_bytes)


def test_weights_move_into_slots_and_back():
    w = weights()
    for moved in (ma.move_experts, jax.jit(ma.move_experts)):
        for placement in (TWO, FOUR):
            slots = moved(w, target=placement)
            assert_same(slots, in_slots(w, placement))
            assert_same(moved(slots, source=placement), w)
        assert_same(moved(in_slots(w, TWO), source=TWO, target=FOUR), in_slots(w, FOUR))
    assert isinstance(ma.move_experts(w, target=TWO)["w"], np.ndarray)


@pytest.mark.several_devices("a mesh of several devices")
@pytest.mark.parametrize("axis_type", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_moved_weights_keep_their_placement_over_the_mesh(axis_type):
    mesh, w = harness.mesh_over(axis_type, ep=4, data=2), weights()
    specs = dict(w=P("ep", "data"), fp8=P("ep"), count=P(("ep",)))
    put = functools.partial(jax.tree.map, lambda x, s: jax.device_put(x, NamedSharding(mesh, s)))
    with jax.set_mesh(mesh):
        placed = put(w, specs)
        moves = {
            "out of jit": ma.move_experts,
            "in jit": jax.jit(ma.move_experts, out_shardings=put(w, specs)["w"].sharding),
        }
        for how, moved in moves.items():
            given = placed if how == "out of jit" else placed["w"]
            expected = w if how == "out of jit" else w["w"]
            for placement in (TWO, FOUR):
                slots = moved(given, target=placement)
                assert_same(slots, in_slots(expected, placement))
                back = moved(slots, source=placement)
                assert_same(back, expected)
                for a, b, c in zip(*map(jax.tree.leaves, (slots, back, given)), strict=True):
                    assert a.sharding.is_equivalent_to(c.sharding, c.ndim)
                    assert b.sharding.is_equivalent_to(c.sharding, c.ndim)


@pytest.mark.several_devices("a mesh of several devices")
def test_no_device_holds_all_experts_during_a_move():
    sharding = NamedSharding(harness.mesh_over(ep=4), P("ep"))
    w = jax.device_put(np.zeros((EXPERTS * 2, 5), np.float32), sharding)
    target = ma.Placement.from_slots(np.arange(16)[::-1], 16, num_ranks=4)
    program = jax.jit(move._take, static_argnums=2, out_shardings=sharding)
    text = program.lower(w, target.slot_experts, 4).compile().as_text()
    assert "f32[4,5]" in text and "f32[16,5]" not in text


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(), ValueError, "source or target must be a Placement; got None for both"),
        (dict(target=3), TypeError, "placement must be a Placement; got int"),
        (
            dict(source=TWO),
            ValueError,
            r"w must hold arrays \[12, ...\], .* slots of source; got",
        ),
        (
            dict(source=TWO, target=ma.Placement.from_slots(range(4), 4, num_ranks=2)),
            ValueError,
            "placement must have 8 experts on 2 ranks; got one with 4 experts",
        ),
    ],
    ids=("none", "type", "size", "experts"),
)
def test_an_error_names_the_argument(options, error, message):
    with pytest.raises(error, match=message):
        ma.move_experts(weights(), **options)
