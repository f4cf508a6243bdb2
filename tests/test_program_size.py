"""Test that programs of the portable path have few operations, because XLA:CPU compiles each
one."""

import harness
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange.reference import MAX_UNROLLED_TERMS

pytestmark = [
    pytest.mark.one_process("it lowers for CPU and runs nothing"),
    pytest.mark.skipif(
        harness.ON_GPU, reason="it needs several CPU devices, and runs nothing on GPUs"
    ),
]


def lowered(fn, ranks, *avals):
    mesh = Mesh(np.array(jax.devices("cpu")[:ranks]), "ep")
    group, split = ma.Group(mesh=mesh, axis_name="ep"), PartitionSpec("ep")

    def step(*args):
        return fn(*args, group=group)

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split)).lower(*avals)


def aval(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def num_operations(num_layers, *, ranks, top_k, tokens=16):
    def loss(floats, ids, group):
        x, topk_weights = floats
        for _ in range(num_layers):
            recv = ma.dispatch(x, ids, topk_weights, group=group, num_experts=16)
            x = ma.combine(recv.rows, recv)
        return x.sum()

    floats = aval(ranks * tokens, 8), aval(ranks * tokens, top_k)
    ids = aval(ranks * tokens, top_k, dtype="int32")
    return lowered(jax.grad(loss), ranks, floats, ids).as_text().count("stablehlo.")


def of_one_layer(**sizes):
    return num_operations(2, **sizes) - num_operations(1, **sizes)


def test_a_layer_is_a_few_hundred_operations_whatever_its_sizes_are():
    """Sums over many choices or ranks are loops."""
    few = of_one_layer(ranks=2, top_k=1)
    assert few <= 620
    assert of_one_layer(ranks=2, top_k=1, tokens=1024) <= few + 5
    assert of_one_layer(ranks=4, top_k=1) <= few + 20
    assert of_one_layer(ranks=2, top_k=8) <= few + 60
    assert of_one_layer(ranks=2, top_k=MAX_UNROLLED_TERMS + 1) <= few + 20
