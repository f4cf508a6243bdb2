"""Test that a kernel launch has at most its budget of blocks, and at most as many as fit on the
GPU."""

import pytest

from jax_moe_a2a._src.exchange import lowering, routed
from jax_moe_a2a._src.group import native

pytestmark = [
    pytest.mark.skipif(
        not native.has_kernels(), reason="the extension was built without the CUDA kernels"
    ),
    pytest.mark.exchanges(0),
]

GPUS = {"H20": 78, "H100 PCIe": 114, "H100 SXM": 132, "B200": 148}
BUDGETS = (
    native.tuning("DEFAULT_NUM_SMS"),
    native.tuning("FEW_NUM_SMS"),
    native.tuning("WEIGHTED_NUM_SMS"),
    native.tuning("FORMAT_NUM_SMS"),
    native.tuning("SPLIT_NUM_SMS"),
    10_000,
)


@pytest.mark.parametrize("num_sms", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("num_ranks", (2, 8, 64, 128))
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_whole_and_a_split_exchange_leave_room_for_each_other(num_sms, num_ranks, budget):
    """A launch has its budget of blocks, but leaves a multiprocessor free for other launches."""
    blocks = min(budget, native._native.launch_blocks(num_ranks, num_sms))
    assert 1 <= blocks < num_sms
    assert blocks == budget or blocks == num_sms - 1


@pytest.mark.parametrize("num_sms", GPUS.values(), ids=GPUS)
def test_a_single_rank_may_fill_its_gpu(num_sms):
    blocks = min(lowering.ALL_SMS, native._native.launch_blocks(1, num_sms))
    assert blocks == num_sms


def test_few_tokens_or_few_bytes_get_few_num_sms():
    few, many = native.tuning("FEW_NUM_SMS"), native.tuning("DEFAULT_NUM_SMS")
    tokens, num_bytes = native.tuning("FEW_TOKENS"), native.tuning("FEW_BYTES")
    assert few != many
    assert lowering.default_num_sms(tokens, num_bytes + 1) == few
    assert lowering.default_num_sms(tokens + 1, num_bytes) == few
    assert lowering.default_num_sms(tokens + 1, num_bytes + 1) == many


def test_a_gpu_of_one_multiprocessor_has_no_room_for_several_ranks():
    assert native._native.launch_blocks(2, 1) == 0


@pytest.mark.parametrize(
    ("num_tokens", "chunks"),
    ((1, (64, 1)), (2048, (64, 32)), (2049, (128, 17)), (4096, (128, 32)), (16384, (256, 64))),
)
def test_the_chunks_of_route_grow_with_the_tokens(num_tokens, chunks):
    assert routed.route_chunks(num_tokens) == chunks
