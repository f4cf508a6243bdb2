"""Test that jax.checkpoint repeats only exchanges whose results are not saved, and changes no
result."""

import functools

import harness
import jax
import pytest
import small_layer
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from small_layer import OF_FLOATS, route_args
from test_control_flow import dense_layers, of_all_ranks, problem, value_and_grads

import jax_moe_a2a as ma

RANKS = harness.SEVERAL
POLICIES = jax.checkpoint_policies


def saves_results_of(*names):
    return lambda primitive, *_, **__: primitive.name in [f"moe_a2a_{name}" for name in names]


# (policy, routes and dispatches of both passes together). ``ONCE`` counts all other exchanges.
ROUTING_ONLY = POLICIES.save_only_these_names(ma.ROUTING_CHECKPOINT_NAME)
CASES = {
    "nothing": (POLICIES.nothing_saveable, dict(route=2, dispatch=2)),
    "everything": (POLICIES.everything_saveable, dict(route=1, dispatch=1)),
    "routing": (ROUTING_ONLY, dict(route=1, dispatch=2)),
    "rows": (POLICIES.save_only_these_names("rows"), dict(route=2, dispatch=1)),
    "rows_and_routing": (
        POLICIES.save_only_these_names("rows", ma.ROUTING_CHECKPOINT_NAME),
        dict(route=1, dispatch=1),
    ),
    "route_primitive": (saves_results_of("route"), dict(route=1, dispatch=2)),
    "dispatch_primitive": (saves_results_of("dispatch"), dict(route=2, dispatch=1)),
    "combine_primitive": (saves_results_of("weighted_combine"), dict(route=2, dispatch=2)),
    "offloaded_routing": (
        POLICIES.save_and_offload_only_these_names(
            names_which_can_be_saved=["rows"],
            names_which_can_be_offloaded=[ma.ROUTING_CHECKPOINT_NAME],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        dict(route=1, dispatch=1),
    ),
    "no_policy": (None, dict(route=2, dispatch=2)),
}
ONCE = dict(weighted_combine=1, weighted_dispatch=1, combine=1)


def layer_of_one_rank(x, topk_weights, w, ids, routed_before=False):
    given = ma.route(ids, **route_args(harness.group_of(RANKS))) if routed_before else ids
    recv = ma.dispatch(x, given, topk_weights, **route_args(harness.group_of(RANKS)))
    rows, weights = checkpoint_name((recv.rows, recv.weights), "rows")
    return ma.combine(small_layer.experts(rows, recv.row_offsets, w), recv, weights=weights)


def checkpointed(policy, routed_before=False):
    layer = functools.partial(layer_of_one_rank, routed_before=routed_before)
    return small_layer.on_all_ranks(jax.checkpoint(layer, policy=policy))


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("routed_before", (False, True), ids=("ids", "routing"))
@pytest.mark.parametrize("name", CASES)
def test_a_policy_decides_what_is_exchanged_again_in_the_backward_pass(name, routed_before):
    """A dispatch of ids and a dispatch of a Routing have the same exchanges."""
    policy, expected = CASES[name]
    floats, ids, _ = small_layer.arguments(RANKS)
    layer = checkpointed(policy, routed_before)
    gradient = jax.value_and_grad(small_layer.loss_of(layer, ids), OF_FLOATS)
    assert small_layer.counts(gradient, *floats) == expected | ONCE


@pytest.mark.exchanges(lambda name: 18 if name == "routing" else 21)
@pytest.mark.parametrize("name", ("no_policy", "routing"))
def test_a_scan_over_checkpointed_layers_equals_the_dense_layers(name):
    policy, expected = CASES[name]
    floats, ids, kept = problem()

    # JAX's documentation says that prevent_cse is not needed in a scan.
    layer = jax.checkpoint(layer_of_one_rank, policy=policy, prevent_cse=False)

    def of_one_rank(x, *stacks):
        return lax.scan(lambda x, each: (x + layer(x, *each), None), x, stacks)[0]

    loss = small_layer.loss_of(of_all_ranks(of_one_rank), ids)
    gradient = jax.value_and_grad(loss, OF_FLOATS)
    assert small_layer.counts(gradient, *floats) == expected | ONCE
    actual = small_layer.compiled(gradient)(*floats)
    dense = value_and_grads(dense_layers, ids, kept)(*floats)
    small_layer.assert_close(actual, dense, tolerance=1e-4)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize("name", ("nothing", "routing", "rows"))
@pytest.mark.parametrize("is_inside", (False, True), ids=("around", "inside"))
def test_a_batch_makes_no_more_exchanges_around_and_inside_a_checkpoint(is_inside, name):
    policy, expected = CASES[name]
    floats, ids, _ = small_layer.stacked(*(small_layer.arguments(RANKS, seed) for seed in (0, 1)))
    if is_inside:
        layer = jax.checkpoint(jax.vmap(layer_of_one_rank), policy=policy)
        *floats, ids = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), (*floats, ids))
        gradient = small_layer.value_and_grads(small_layer.on_all_ranks(layer), ids)
        counted = small_layer.counts(gradient, *floats)
    else:
        layer = checkpointed(policy)
        gradient = lambda x, t, w, ids: small_layer.value_and_grads(layer, ids)(x, t, w)
        counted = small_layer.counts(jax.vmap(gradient), *floats, ids)
    assert counted == expected | ONCE
