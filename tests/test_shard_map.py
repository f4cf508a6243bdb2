"""Test exchanges with and without check_vma, with Auto and Explicit axes, over several axes, and on
partial-manual meshes."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_layer import LAYOUT, route_args

import jax_moe_a2a as ma

pytestmark = pytest.mark.several_devices("it is about shard_map")

AXIS = harness.AXIS
RANKS = harness.SEVERAL
MANY = harness.MANY
DP = min(2, MANY)
P = PartitionSpec


def group_over(mesh, axes):
    return ma.Group(mesh, axes, implementation=harness.IMPLEMENTATION)


def assert_equals_dense(layer, arguments, place=lambda floats: floats):
    """Compare `layer`, a function of all ranks' arrays, and its gradients with the dense layer."""
    floats, ids, kept = arguments
    actual = small_layer.compiled(small_layer.value_and_grads(layer, ids))(*place(floats))
    small_layer.assert_close(actual, small_layer.dense_value_and_grads(floats, ids, kept))


def test_without_check_vma_the_layer_equals_the_dense_layer():
    layer = small_layer.layer_of_all_ranks(check_vma=False)
    assert_equals_dense(layer, small_layer.arguments(RANKS))


def test_all_that_dispatch_and_combine_return_is_typed_as_varying_over_the_group():
    """If a result were typed as not varying, shard_map would use one rank's result for all
    ranks."""
    group = harness.group_of(RANKS)
    varying = {}

    def of_one_rank(x, ids):
        recv = ma.dispatch(x, ids, jnp.ones(ids.shape), **route_args(group))
        sums = ma.combine(recv.rows, recv), ma.combine(recv.rows, recv, weights=None)
        for path, leaf in jax.tree_util.tree_leaves_with_path((recv, sums)):
            varying[jax.tree_util.keystr(path)] = AXIS in jax.typeof(leaf).mat.varying
        ma.expert_load(recv)
        return jax.tree.map(lambda leaf: leaf[None], (recv, sums))

    (x, _, _), ids, _ = small_layer.arguments(RANKS)
    mapped = jax.shard_map(
        of_one_rank, mesh=group.mesh, in_specs=(P(), P()), out_specs=P(AXIS), check_vma=True
    )
    jax.eval_shape(mapped, x[0], ids[0])
    replicated = {path for path, is_varying in varying.items() if not is_varying}
    assert replicated <= {path for path in varying if path.endswith((".num_invalid", ".topk_ids"))}
    assert len(varying) > 15


def test_a_mesh_of_an_explicit_axis_equals_the_dense_layer():
    mesh = harness.mesh_over(AxisType.Explicit, ep=RANKS)
    layer = small_layer.on_all_ranks(small_layer.layer_of(group_over(mesh, AXIS)), mesh)
    arguments = small_layer.arguments(RANKS)
    floats, ids = harness.put(arguments[:2], NamedSharding(mesh, P(AXIS)))
    with jax.set_mesh(mesh):
        actual = small_layer.compiled(
            lambda floats, ids: small_layer.value_and_grads(layer, ids)(*floats)
        )(floats, ids)
    small_layer.assert_close(actual, small_layer.dense_value_and_grads(*arguments))


def domains(num_domains, ranks):
    """Return random arguments of several domains (groups that exchange separately), which share
    w."""
    each = [small_layer.arguments(ranks, seed) for seed in range(num_domains)]
    x, topk_weights = small_layer.stacked(*(a.floats[:2] for a in each))
    ids, kept = (np.stack(arrays) for arrays in zip(*(a[1:] for a in each)))
    return (x, topk_weights, each[0].floats[2]), ids, kept


@small_layer.compiled
def dense_of_domains(floats, ids, kept):
    def dense(x, topk_weights, w, ids):
        parts = zip(x, topk_weights, ids, kept)
        return jnp.stack([small_layer.dense_layer(x, t, w, i, k) for x, t, i, k in parts])

    return small_layer.value_and_grads(dense, ids)(*floats)


@pytest.mark.parametrize("order", (("dp", "ep"), ("ep", "dp")), ids="_".join)
def test_every_row_of_a_dp_x_ep_mesh_is_a_domain_of_its_own(order):
    """The group's axis may have any position in the mesh."""
    ranks = MANY // DP
    sizes = dict(dp=DP, ep=ranks)
    mesh = harness.mesh_over(**{name: sizes[name] for name in order})
    layer = small_layer.layer_of(group_over(mesh, "ep"))
    floats, ids, kept = domains(DP, ranks)

    def of_one_rank(x, topk_weights, w, ids):
        return layer(x[0, 0], topk_weights[0, 0], w[0], ids[0, 0])[None, None]

    both = P("dp", "ep")
    mapped = jax.shard_map(
        of_one_rank, mesh=mesh, in_specs=(both, both, P("ep"), both), out_specs=both
    )
    actual = small_layer.compiled(small_layer.value_and_grads(mapped, ids))(*floats)
    small_layer.assert_close(actual, dense_of_domains(floats, ids, kept))


@pytest.mark.parametrize("axes", (("a", "b"), ("b", "a")), ids="".join)
def test_ranks_of_a_group_over_two_axes_count_row_major_in_the_groups_order(axes):
    mesh = harness.mesh_over(a=DP, b=MANY // DP)
    group = group_over(mesh, axes)
    assert group.size == MANY
    layer = small_layer.layer_of(group)
    # P(axes) divides the leading axis, the rank, in the group's order.
    arguments = small_layer.arguments(MANY)

    def of_one_rank(*args):
        return layer(*(arg[0] for arg in args))[None]

    mapped = jax.shard_map(of_one_rank, mesh=mesh, in_specs=P(axes), out_specs=P(axes))
    assert_equals_dense(mapped, arguments)


PARTIAL_MANUAL = {
    "hidden_over_tp": (P("ep", None, "tp"), P("ep"), P("ep", None, "tp")),
    "tokens_over_dp": (P("ep", "dp"), P("ep", "dp"), P("ep")),
    "both": (P("ep", "dp", "tp"), P("ep", "dp"), P("ep", None, "tp")),
}


@pytest.mark.parametrize(
    "specs, check_vma",
    [("hidden_over_tp", True), ("tokens_over_dp", False), ("both", True)],
    ids=PARTIAL_MANUAL,
)
def test_a_partial_manual_mesh_equals_the_dense_layer(specs, check_vma):
    """Inside shard_map, the axes dp and tp, which divide tokens, hidden or weights, are Auto."""
    dp, ep, tp = {8: (2, 2, 2), 4: (1, 2, 2), 2: (1, 2, 1), 1: (1, 1, 1)}[MANY]
    mesh = harness.mesh_over(dp=dp, ep=ep, tp=tp)
    layer = small_layer.layer_of(group_over(mesh, "ep"))
    spec = P("ep")

    def of_one_rank(x, *others):
        x = x[0]
        if specs == "both":
            # Without this constraint, the partitioner of jax 0.12.0.1 aborts at the gather.
            x = lax.with_sharding_constraint(x, P(None, P.UNCONSTRAINED))
        return layer(x, *(other[0] for other in others))[None]

    mapped = jax.shard_map(
        of_one_rank,
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names={"ep"},
        check_vma=check_vma,
    )

    def place(floats):
        pairs = zip(floats, PARTIAL_MANUAL[specs])
        return tuple(harness.put(array, NamedSharding(mesh, spec)) for array, spec in pairs)

    assert_equals_dense(mapped, small_layer.arguments(ep), place)


def test_a_payload_may_be_sharded_by_an_explicit_axis_that_is_not_the_groups():
    tp = 2 if MANY >= 4 else 1
    ranks = MANY // tp
    mesh = harness.mesh_over(AxisType.Explicit, ep=ranks, tp=tp)
    group = group_over(mesh, "ep")
    (x, _, _), ids, _ = small_layer.arguments(ranks)
    x = x.round(1)
    types = []

    def of_one_rank(x, ids):
        recv = ma.dispatch(x[0], ids[0], **route_args(group))
        out = ma.combine(2 * recv.rows, recv)
        types.extend(jax.typeof(a).sharding.spec for a in (recv.rows, out))
        return out[None]

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(of_one_rank, in_specs=P("ep"), out_specs=P("ep"), axis_names={"ep"})
        placed = harness.put(x, NamedSharding(mesh, P("ep", None, "tp")))
        ids_placed = harness.put(ids, NamedSharding(mesh, P("ep")))
        out = small_layer.compiled(mapped)(placed, ids_placed)
    assert [spec[-1] for spec in types] == ["tp", "tp"]
    kept = small_layer.kept_choices(ids).sum(axis=-1)[..., None]
    small_layer.assert_close(out, 2 * x * kept)


def test_two_groups_over_different_axes_of_one_mesh_exchange_in_one_program():
    mesh = harness.mesh_over(a=DP, b=MANY // DP)
    groups = [group_over(mesh, name) for name in ("a", "b")]
    rng = np.random.default_rng(0)
    shape = (DP, MANY // DP, LAYOUT.tokens)
    x = rng.integers(-8, 9, (*shape, LAYOUT.hidden)).astype(np.float32)
    ids = [rng.integers(0, 2 * group.size, (*shape, LAYOUT.top_k), np.int32) for group in groups]

    def of_one_rank(x, *ids):
        x = x[0, 0]
        for group, each in zip(groups, ids):
            recv = ma.dispatch(x, each[0, 0], group=group, num_experts=2 * group.size)
            expert = recv.expert_ids[
                (jnp.arange(len(recv.rows))[:, None] >= recv.row_offsets[None, 1:-1]).sum(axis=1)
            ]
            x = ma.combine(recv.rows * (expert + 1)[:, None].astype(x.dtype), recv)
        return x[None, None]

    both = P("a", "b")
    mapped = small_layer.compiled(
        jax.shard_map(of_one_rank, mesh=mesh, in_specs=both, out_specs=both)
    )
    expected = x
    for each in ids:
        expected = expected * (each + 1).sum(axis=-1)[..., None]
    np.testing.assert_array_equal(harness.numpy_of(mapped(x, *ids)), expected)
