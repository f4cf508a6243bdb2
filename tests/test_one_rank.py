"""Test that results of a group of one rank are typed as varying only if an input is varying."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from jax.sharding import PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src import compat

pytestmark = [
    pytest.mark.one_process("a mesh of one device"),
    pytest.mark.several_devices("its groups have meshes"),
]

TOKENS, TOP_K, HIDDEN, EXPERTS = 6, 2, 4, 4
AXES = ("host", harness.AXIS)
GROUPS = dict(
    one_axis=lambda: ma.Group(harness.mesh_over(ep=1), harness.AXIS),
    two_axes=lambda: ma.Group(harness.mesh_over(host=1, ep=1), AXES),
    two_level=lambda: ma.Group(harness.mesh_over(host=1, ep=1), AXES, two_level=True),
)


def split(x, ids, weights, **route_args):
    recv = ma.dispatch_done(ma.dispatch_start(x, ids, weights, **route_args))
    rows = recv.rows * recv.weights[:, None].astype(recv.rows.dtype)
    return ma.combine_done(ma.combine_start(rows, recv.routing)), recv


def whole(x, ids, weights, **route_args):
    recv = ma.dispatch(x, ids, weights, **route_args)
    return ma.combine(recv.rows, recv), recv


@pytest.mark.parametrize("make_group", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("layer, tokens", ((whole, TOKENS), (whole, 300), (split, TOKENS)))
def test_replicated_inputs_have_replicated_results(make_group, layer, tokens):
    group, replicated = make_group(), PartitionSpec()
    route_args = dict(group=group, num_experts=EXPERTS)

    def of_rank(x, ids, weights):
        def loss(x, weights):
            out, recv = layer(x, ids, weights, **route_args)
            return jnp.sum(out**2), (out, recv)

        grads, (out, recv) = jax.grad(loss, (0, 1), has_aux=True)(x, weights)
        for leaf in jax.tree.leaves((grads, out, recv)):
            assert not compat.varying_axes(leaf)
        return grads, out, recv

    mapped = jax.shard_map(
        of_rank, mesh=group.mesh, in_specs=replicated, out_specs=replicated, check_vma=True
    )
    x = np.arange(tokens * HIDDEN, dtype=np.float32).reshape(tokens, HIDDEN) / 64
    ids = np.arange(tokens * TOP_K, dtype=np.int32).reshape(tokens, TOP_K) % EXPERTS
    weights = np.full((tokens, TOP_K), 0.5, np.float32)
    grads, out, _ = small_layer.compiled(mapped)(x, ids, weights)
    small_layer.assert_close(out, x)
    small_layer.assert_close(grads[0], 2 * x)


def test_inputs_that_vary_have_results_that_vary():
    group = GROUPS["one_axis"]()
    spec = PartitionSpec(harness.AXIS)

    @functools.partial(
        jax.shard_map, mesh=group.mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
    )
    def of_rank(x, ids):
        recv = ma.dispatch(x, ids, group=group, num_experts=EXPERTS)
        assert compat.varying_axes(recv.rows) == {harness.AXIS}
        assert not compat.varying_axes(recv.group_sizes)
        return ma.combine(recv.rows, recv)

    x = jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.float32)
    jax.eval_shape(of_rank, x, jax.ShapeDtypeStruct((TOKENS, TOP_K), jnp.int32))
