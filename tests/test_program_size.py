"""The portable path emits a bounded number of operations, because XLA:CPU compiles each of them."""

import harness
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jax_moe_a2a as ma

pytestmark = pytest.mark.one_process("it lowers for CPU and runs nothing")


def num_operations(num_layers, *, ranks, top_k, tokens=16):
    """Return the number of StableHLO operations of layers and their gradients, on CPU."""
    mesh = Mesh(np.array(jax.devices("cpu")[:ranks]), "ep")
    group = ma.Group(mesh=mesh, axis_name="ep")

    def loss(floats, ids):
        x, topk_weights = floats
        for _ in range(num_layers):
            recv = ma.dispatch(x, ids, topk_weights, group=group, num_experts=16)
            x = ma.combine(recv.rows, recv)
        return x.sum()

    split = PartitionSpec("ep")
    step = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=split, out_specs=split)
    x = jax.ShapeDtypeStruct((ranks * tokens, 8), "float32")
    topk_weights = jax.ShapeDtypeStruct((ranks * tokens, top_k), "float32")
    ids = jax.ShapeDtypeStruct((ranks * tokens, top_k), "int32")
    return jax.jit(step).lower((x, topk_weights), ids).as_text().count("stablehlo.")


def of_one_layer(**sizes):
    return num_operations(2, **sizes) - num_operations(1, **sizes)


@pytest.mark.skipif(harness.ON_GPU, reason="it needs several CPU devices, and runs nothing on GPUs")
def test_a_layer_is_a_few_hundred_operations_whatever_its_sizes_are():
    """The layer has a route, a dispatch, a combine and their gradients."""
    few = of_one_layer(ranks=2, top_k=1)
    assert few <= 560
    assert of_one_layer(ranks=4, top_k=1) <= few + 5
    assert of_one_layer(ranks=2, top_k=8) <= few + 5
    assert of_one_layer(ranks=2, top_k=1, tokens=1024) <= few + 5
