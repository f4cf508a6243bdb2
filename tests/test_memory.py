"""Compare `memory_estimate` with the sizes of a program's arrays."""

import dataclasses
import itertools
import math

import cases
import harness
import jax
import jax.numpy as jnp
import oracle
import pytest

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)  # no test runs a program


def estimate(layout, ranks, dtype=jnp.bfloat16, **modes):
    return ma.memory_estimate(
        num_tokens=layout.tokens,
        hidden=layout.hidden,
        top_k=layout.top_k,
        num_experts=layout.num_experts(ranks),
        group_size=ranks,
        dtype=dtype,
        **harness.exchanging(modes, capacity=layout.capacity, alignment=layout.alignment),
    )


def traced_recv(layout, ranks, dtype, **modes):
    """Return a Recv of abstract arrays, which have a leading rank axis."""

    def dispatch(ids, x, topk_weights):
        return ma.dispatch(
            x,
            ids,
            topk_weights,
            **harness.exchanging(layout.route_args(harness.emulated_group(ranks)), modes),
        )

    return jax.eval_shape(
        jax.vmap(dispatch, axis_name=harness.AXIS),
        jax.ShapeDtypeStruct(cases.shape(ranks, layout), jnp.int32),
        jax.ShapeDtypeStruct((ranks, layout.tokens, layout.hidden), dtype),
        jax.ShapeDtypeStruct(cases.shape(ranks, layout), jnp.float32),
    )


def nbytes(tree, ranks):
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree)) // ranks


def assert_estimate_is_of_arrays(layout, ranks, dtype=jnp.bfloat16, **modes):
    said, recv = estimate(layout, ranks, dtype, **modes), traced_recv(layout, ranks, dtype, **modes)
    assert said.capacity == recv.routing.row_rank.shape[1]
    assert said.rows_bytes == nbytes((recv.rows, recv.weights), ranks)
    # The estimate may omit a few scalars of the routing.
    assert abs(said.routing_bytes - nbytes(recv.routing, ranks)) <= 64


@pytest.mark.parametrize("layout", cases.LAYOUTS, ids=lambda layout: layout.name)
def test_the_estimate_is_what_the_arrays_take(layout):
    for ranks, dtype in ((1, jnp.int8), (8, jnp.float32)):
        assert_estimate_is_of_arrays(layout, ranks, dtype)


@pytest.mark.parametrize(
    "modes",
    (
        dict(replicated=True),
        dict(token_format=ma.MxFp8()),
        dict(token_format=ma.NvFp4(global_scale=1.0)),
    ),
    ids=lambda modes: "-".join(modes),
)
def test_the_estimate_of_a_mode_is_what_its_arrays_take(modes):
    for layout in (cases.PADDED, cases.CUT):
        assert_estimate_is_of_arrays(dataclasses.replace(layout, hidden=64), 4, **modes)


SIZES = dict(num_tokens=128, hidden=64, top_k=4, num_experts=16, group_size=4)


def test_replicated_tokens_need_no_workspace():
    said = ma.memory_estimate(**harness.exchanging(SIZES, replicated=True))
    assert said.workspace_bytes == 0
    assert ma.memory_estimate(**harness.exchanging(SIZES | dict(group_size=1))).workspace_bytes == 0


def test_a_zone_holds_the_wider_of_rows_and_sums():
    """A quantized dispatch needs no smaller workspace, because the sums of its combine are not
    quantized. Sums in float32 need twice the bytes."""
    sizes = SIZES | dict(hidden=1024)
    of = lambda **options: ma.memory_estimate(**harness.exchanging(sizes, options))
    plain, quantized, wide = of(), of(token_format=ma.MxFp8()), of(wire_dtype=jnp.float32)
    assert plain.workspace_bytes == quantized.workspace_bytes == 2 * plain.half_bytes
    weights = 2 * 4 * 128 * 4 * 4
    assert wide.workspace_bytes - weights == 2 * (plain.workspace_bytes - weights)
    narrow = of(token_format=ma.MxFp8(), wire_dtype=ma.MxFp8())
    assert narrow.workspace_bytes < quantized.workspace_bytes


@pytest.mark.several_devices("its group has a mesh")
def test_a_group_without_kernels_estimates_and_reserves_nothing():
    group = ma.Group(harness.mesh_of(harness.FEW), harness.AXIS, implementation="portable")
    sizes = dict(num_tokens=128, hidden=64, top_k=4, num_experts=16)
    assert group.reserve(**harness.exchanging(sizes)) == ma.memory_estimate(
        **harness.exchanging(sizes), group_size=harness.FEW
    )
    assert group.memory() == ()
    assert harness.emulated_group(4).memory() == ()


@pytest.mark.parametrize("alignment", (1, 8, 128))
def test_the_default_capacity_is_the_stated_bound(alignment):
    sizes = itertools.product((0, 1, 5, 4096), (1, 8), (1, 4), (1, 3, 64))
    for tokens, top_k, ranks, local_experts in sizes:
        said = harness.worst_case(tokens, top_k, ranks, ranks * local_experts, alignment=alignment)
        assert said == oracle.default_capacity(ranks, tokens, top_k, local_experts, alignment)
        assert said % alignment == 0
        layout = cases.Layout("any", tokens, top_k, local_experts, alignment=alignment)
        assert estimate(layout, ranks).capacity == said
        assert estimate(layout, ranks).worst_case_capacity == said


@pytest.mark.parametrize(
    "changed",
    (
        dict(num_experts=10),
        dict(group_size=0),
        dict(top_k=33),
        dict(num_tokens=-1),
        dict(hidden=-1),
        dict(capacity=-1),
        dict(alignment=0),
    ),
    ids=str,
)
def test_an_estimate_of_nonsense_is_refused(changed):
    with pytest.raises((ValueError, TypeError), match=next(iter(changed))):
        ma.memory_estimate(**harness.exchanging(SIZES | changed))
