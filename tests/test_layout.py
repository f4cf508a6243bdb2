"""Test that Python and the kernels in the extension agree on the memory layout and the order of
arrays."""

import jax.numpy as jnp
import pytest

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange.lowering import READ_BY_KERNELS
from jax_moe_a2a._src.experts import activations
from jax_moe_a2a._src.experts import lowering as experts
from jax_moe_a2a._src.formats import formats
from jax_moe_a2a._src.group import extension, native
from jax_moe_a2a._src.grouped import lowering as grouped
from jax_moe_a2a._src.plan import memory, plan
from jax_moe_a2a._src.plan.capacity import MAX_TOP_K

pytestmark = pytest.mark.exchanges(0)  # no program runs here

layout = pytest.importorskip("jax_moe_a2a._native", reason="the extension is not built")

SLOT_COUNTS = (0, 1, 7, 64, 1000, 1024, 4096, 8192, 100_000)


def test_the_extension_says_from_which_sources_it_was_built():
    assert layout.sources == extension.sources_digest()


def test_a_zone_array_holds_every_slot_and_starts_aligned():
    for num_slots in SLOT_COUNTS:
        for row_bytes in (1, 14, 16, 4096, 14336):
            num_bytes = native._native.array_bytes(num_slots, row_bytes)
            assert num_bytes >= num_slots * -(-row_bytes // 16) * 16  # slots of 16-byte words
            assert num_bytes % 128 == 0
            assert num_bytes <= num_slots * (row_bytes + 15) + 127


def test_there_are_flags_for_every_chunk():
    for num_slots in SLOT_COUNTS:
        per_chunk = layout.slots_per_chunk(num_slots)
        assert per_chunk >= 1
        assert -(-num_slots // per_chunk) <= layout.MAX_CHUNKS


def test_the_memory_estimate_knows_the_ring_and_the_zones():
    assert memory.RING_DEPTH == layout.RING_DEPTH
    assert memory.HEADER_BYTES == layout.HEADER_BYTES
    for num_slots in SLOT_COUNTS:
        for row_bytes in (0, 1, 14, 16, 4096, 14336):
            expected = native._native.array_bytes(num_slots, row_bytes)
            assert memory._array_bytes(num_slots, row_bytes) == expected
    ranks, tokens, hidden, top_k = 4, 4096, 7168, 8
    estimate = ma.memory_estimate(
        num_tokens=tokens, hidden=hidden, top_k=top_k, num_experts=256, group_size=ranks
    )
    zones = native._native.array_bytes(tokens, hidden * 2) + native._native.array_bytes(
        tokens, top_k * 4
    )
    assert estimate.workspace_bytes == layout.RING_DEPTH * ranks * zones


def test_a_token_has_no_more_choices_than_a_warp_has_lanes():
    assert MAX_TOP_K == layout.MAX_TOP_K


def test_the_fields_of_a_routing_have_one_order():
    """Kernels identify an array by its position in the macros of ``cuda/params.h``."""
    fields = [*plan.RoutingArrays._fields, *plan.RoutePlan._fields[1:]]
    assert fields == layout.PLAN_ARRAYS
    shapes = plan.plan_shapes(num_tokens=1, top_k=1, num_ranks=1, num_local_experts=1, capacity=1)
    assert list(shapes) == layout.PLAN_ARRAYS
    assert list(READ_BY_KERNELS) == layout.ROUTING_ARRAYS
    assert plan.TAIL_ROW == layout.TAIL_ROW


def test_token_formats_agree():
    classes = {
        name
        for name, found in vars(formats).items()
        if isinstance(found, type)
        and issubclass(found, formats.TokenFormat)
        and hasattr(found, "group_size")
    }
    assert {name for name, *_ in layout.TOKEN_FORMATS} == classes
    for name, group, value_bits, scale_bytes in layout.TOKEN_FORMATS:
        fmt = getattr(formats, name)
        assert fmt.group_size == group
        assert 8 // fmt.values_per_item == value_bits
        assert jnp.dtype(fmt.scale_dtype).itemsize == scale_bytes


def test_workspace_kinds_have_the_numbers_of_the_kernels():
    assert native.WORKSPACE_KINDS == (native.WHOLE, native.SPLIT) == layout.WORKSPACE_KINDS


@pytest.mark.skipif(not native.has_grouped_gemm(), reason="the extension has no products")
def test_products_have_the_numbers_of_the_kernels():
    names = ("FORWARD", "TRANSPOSED", "WEIGHT_GRADIENT")
    assert {name: getattr(grouped, name) for name in names} == layout.PRODUCTS
    codes = {
        kind: activations.FusedActivation(kind).attributes["activation"]
        for kind in activations.KINDS
    }
    assert codes | dict(scaled_bias=experts.SCALED_BIAS) == layout.ACTIVATIONS
    assert grouped.CAPABILITY == layout.GEMM_CAPABILITY
    assert formats.BlockwiseFp8.group_size == layout.FP8_BLOCK


def test_the_header_is_small_and_ends_on_a_page():
    assert layout.HEADER_BYTES % (2 << 20) == 0
    assert layout.HEADER_BYTES <= 10 << 20
