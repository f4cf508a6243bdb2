"""Test exchanges alongside NCCL collectives and matrix products that fill the GPU."""

import checked
import jax.numpy as jnp
import pytest
from alone import run_alone
from jax import lax

STEPS = 2000
# Rows and columns of each rank's matrix.
SIDE = (1024 if checked.ONE_GPU else 4096) if checked.ON_GPU else 64
SUMMED = 1 << 18  # integers in the psum of each step
# XLA's autotuning is off, because it would take longer than the test.
NO_SEARCH = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def run_beside_collectives_and_products(num_sms=None):
    # The timeout is long, because NCCL and the products start slowly and at different times.
    group = checked.new_group(num_sms=num_sms, timeout=10.0, cuda_graphs=None)

    def once(carry, _):
        (step, counts), ones = carry
        counts = counts + checked.whole(checked.SMALL, group, step)
        # The compiler does not know that the elements stay exactly one.
        ones = ones @ jnp.full((SIDE, SIDE), 1 / SIDE, ones.dtype)
        counts = counts + checked.count_psum(group, step, SUMMED) + checked.counted(wrong=ones != 1)
        return ((step + 1, counts), ones), None

    def on_rank(state, ones):
        return lax.scan(once, (state, ones), length=STEPS)[0][0]

    run = checked.on_all_ranks(on_rank, group, compiler_options=NO_SEARCH)
    state = checked.begin()
    ones = jnp.ones((checked.RANKS, SIDE, SIDE), jnp.bfloat16, device=state[0].sharding)
    checked.assert_right(run(state, ones), group)


def test_exchanges_on_all_multiprocessors_end_alongside_collectives_and_products():
    run_beside_collectives_and_products(num_sms=132)


@pytest.mark.one_process("it starts a process of its own")
def test_exchanges_end_alongside_collectives_with_a_single_hardware_queue():
    run_alone(run_beside_collectives_and_products, CUDA_DEVICE_MAX_CONNECTIONS="1")
