"""The layout that the kernels compute, read through the extension: Python says the same of it."""

import pytest

import jax_moe_a2a as ma
from jax_moe_a2a import memory, native
from jax_moe_a2a.routing import MAX_TOP_K

layout = pytest.importorskip("jax_moe_a2a._native", reason="the extension is not built")

SLOT_COUNTS = (0, 1, 7, 64, 1000, 1024, 4096, 8192, 100_000)


def test_a_zone_array_holds_every_slot_and_starts_aligned():
    for num_slots in SLOT_COUNTS:
        for row_bytes in (1, 14, 16, 4096, 14336):
            num_bytes = native.array_bytes(num_slots, row_bytes)
            assert num_bytes >= num_slots * row_bytes
            assert num_bytes % 128 == 0
            assert num_bytes <= num_slots * (row_bytes + 15) + 127


def test_there_are_flags_for_every_chunk():
    for num_slots in SLOT_COUNTS:
        per_chunk = layout.slots_per_chunk(num_slots)
        assert per_chunk >= 1
        assert -(-num_slots // per_chunk) <= layout.MAX_CHUNKS


def test_the_memory_estimate_knows_the_ring_and_the_zones():
    assert memory.RING_DEPTH == layout.RING_DEPTH
    ranks, tokens, hidden, top_k = 4, 4096, 7168, 8
    estimate = ma.memory_estimate(
        num_tokens=tokens, hidden=hidden, top_k=top_k, num_experts=256, group_size=ranks
    )
    zones = native.array_bytes(tokens, hidden * 2) + native.array_bytes(tokens, top_k * 4)
    assert estimate.workspace_bytes == layout.RING_DEPTH * ranks * zones


def test_a_token_has_no_more_choices_than_a_warp_has_lanes():
    assert MAX_TOP_K == layout.MAX_TOP_K


def test_the_header_is_small_and_ends_on_a_page():
    assert layout.HEADER_BYTES % (2 << 20) == 0
    assert layout.HEADER_BYTES <= 8 << 20
