"""Test that each collective of the portable path sends blocks between ranks correctly."""

import cases
import harness
import jax
import numpy as np
import pytest

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange import reference

pytestmark = [
    pytest.mark.skipif(harness.ON_GPU, reason="GPUs use one collective only"),
    pytest.mark.several_devices("blocks travel between devices"),
]

RANKS = harness.SEVERAL
DTYPES = [name for name in cases.MOVED_DTYPES if cases.dtype(name).itemsize > 2]
DTYPES += ["bool", "int8", "uint16", "bfloat16", "float16"]


@pytest.mark.parametrize(
    "sizes", [dict(ep=RANKS), dict(host=2, ep=RANKS // 2)], ids=("one_axis", "two_axes")
)
@pytest.mark.parametrize("limit", [0, reference.MAX_GATHERED_BYTES], ids=("large", "small"))
def test_blocks_arrive_in_the_order_of_ranks_bit_for_bit(monkeypatch, limit, sizes):
    monkeypatch.setattr(reference, "MAX_GATHERED_BYTES", limit)
    mesh = harness.mesh_over(**sizes)
    group = ma.Group(mesh, mesh.axis_names)
    rng = np.random.default_rng(0)
    sent = {n: cases.any_bits(rng, (group.size, group.size, 3, 5), n) for n in DTYPES}

    def exchange(blocks):
        return jax.tree.map(lambda x: reference.swap(x, group), blocks)

    text = jax.jit(harness.over_ranks(exchange, mesh)).lower(sent).as_text()
    collectives = "all_to_all" in text, "all_gather" in text
    assert collectives == ((True, False) if limit == 0 else (False, True))
    received = harness.on_each_rank(exchange, mesh)(sent)
    for name, blocks in sent.items():
        harness.assert_same_bytes(received[name], np.swapaxes(blocks, 0, 1), name)


def test_blocks_of_all_pairs_of_ranks_decide_which_collective_moves_them():
    mesh = harness.mesh_of(RANKS)
    group = ma.Group(mesh, harness.AXIS)
    most = reference.MAX_GATHERED_BYTES // (4 * group.size**2)

    def collective(size):
        fn = jax.jit(harness.over_ranks(lambda x: reference.swap(x, group), mesh))
        text = fn.lower(jax.ShapeDtypeStruct((group.size, group.size, size), "float32")).as_text()
        return [name for name in ("all_to_all", "all_gather") if name in text]

    assert collective(most) == ["all_gather"]
    assert collective(most + 1) == ["all_to_all"]
