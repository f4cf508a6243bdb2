"""Test layers next to independent NCCL collectives, as in FSDP. Layers must agree with the portable
path, and collectives with numbers that each rank computes alone.
"""

import checked
import jax.numpy as jnp
import numpy as np
import pytest
import routings
import test_hostile_layers as layers
from jax import lax
from routings import KERNELS, ROUTINGS

pytestmark = [
    pytest.mark.several_devices("NCCL has nothing to do on one GPU"),
    pytest.mark.skipif(len(checked.DEVICES) < 2, reason="NCCL has nothing to do on one GPU"),
]
GATHERED = 1 << (20 if checked.ON_GPU else 10)  # integers per rank in a collective
NAMES = list(ROUTINGS)
# Zeros for two sums: differences of layers, and wrong elements of each of the three collectives.
ZEROS = tuple(
    np.zeros((routings.RANKS, number), np.int32) for number in (len(layers.Differences._fields), 3)
)
ASYNCHRONOUS = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_all_gather_combine_threshold_bytes": 1,  # keeps XLA from merging collectives
    "xla_gpu_all_reduce_combine_threshold_bytes": 1,
}


def numbers(step, rank):
    return checked.hashed(50, step, rank, jnp.arange(GATHERED))


def collectives(step):
    """Return the numbers of wrong elements [3] of an all_gather, a psum and a psum_scatter."""
    axis, ranks = KERNELS.axis_name, jnp.arange(KERNELS.size)
    mine = numbers(step, checked.my_rank(KERNELS))
    every = numbers(step, ranks[:, None])
    total = jnp.sum(every, axis=0, dtype=mine.dtype)
    scattered = lax.psum_scatter(mine.reshape(KERNELS.size, -1), axis)
    wrong = (
        jnp.sum(lax.all_gather(mine, axis) != every, dtype=jnp.int32),
        jnp.sum(lax.psum(mine, axis) != total, dtype=jnp.int32),
        jnp.sum(
            scattered != total.reshape(KERNELS.size, -1)[checked.my_rank(KERNELS)], dtype=jnp.int32
        ),
    )
    return jnp.stack(wrong)


@pytest.mark.parametrize("layout", layers.LAYOUTS, ids=lambda layout: layout.name)
def test_layers_and_collectives_next_to_them_are_right_in_every_step(layout):
    def take_step(name_index, step):
        name_index = (name_index + step) % len(ROUTINGS)
        return layers.take_step(layout, name_index, step, is_broken=False), collectives(step)

    options = dict(compiler_options=ASYNCHRONOUS) if checked.ON_GPU else {}
    run = routings.program(take_step, **options)
    sums = routings.run_all_steps(run, NAMES[0], ZEROS)
    differences, wrong = (np.asarray(leaf).sum(axis=0) for leaf in sums)
    assert not differences.any(), layers.Differences(*differences)
    assert not wrong.any(), dict(zip(("all_gather", "psum", "psum_scatter"), wrong))
