"""Properties that hold for every routing, searched by hypothesis over a few compiled shapes.

Shapes come from a short list, since each is a compilation; routings, dtypes and values are free.
"""

import functools

import cases
import harness
import hypothesis
import numpy as np
import oracle
from hypothesis import strategies as st

import jax_moe_a2a as ma

LAYOUTS = (
    cases.Layout("small", tokens=5, top_k=3, local_experts=2, hidden=3),
    cases.Layout("tight", tokens=7, top_k=2, local_experts=3, capacity=11, alignment=3, hidden=5),
    cases.Layout("wide", tokens=2, top_k=9, local_experts=1, capacity=13, alignment=8, hidden=1),
)
# Dtypes of one payload, so that every example tries several of them in one program.
PAYLOAD = ("bool", "int16", "float8_e4m3fn", "bfloat16", "float32", "complex64")


@st.composite
def routings(draw, ranks, layouts=LAYOUTS):
    """Draw (layout, ids [ranks, tokens, top_k]): ids from a drawn set of experts, so that experts
    crowd, repeat and miss."""
    layout = draw(st.sampled_from(layouts))
    experts = layout.num_experts(ranks)
    valid = st.integers(0, experts - 1)
    wild = st.sampled_from([-1, -1, experts, -2, cases.INT32.max, cases.INT32.min])
    pool = draw(st.lists(st.one_of(valid, valid, wild), min_size=1, max_size=experts + 3))
    size = ranks * layout.tokens * layout.top_k
    ids = draw(st.lists(st.sampled_from(pool), min_size=size, max_size=size))
    return layout, np.array(ids, np.int32).reshape(cases.shape(ranks, layout))


seeds = st.integers(0, 2**32 - 1)


@functools.cache
def there_and_back(layout, ranks):
    """Return a function (ids, x, y, w) -> Recv of x with weights, the unweighted and the weighted
    combine of y."""
    group = harness.group_of(ranks)

    def program(ids, x, topk_weights, y):
        recv = ma.dispatch(x, ids, topk_weights, **layout.route_args(group))
        return recv, ma.combine(y, recv, weights=None), ma.combine(y["float32"], recv)

    # The dispatch, a combine for each dtype, and the weighted one.
    exchanges = 1 + len(cases.SUMMED_DTYPES) + 1
    return harness.on_each_rank(program, harness.mesh_of(ranks), exchanges=exchanges)


def inputs(layout, ranks, seed):
    rng = np.random.default_rng(seed)
    x = {n: cases.any_bits(rng, (ranks, layout.tokens, layout.hidden), n) for n in PAYLOAD}
    topk_weights = cases.normal(rng, cases.shape(ranks, layout), "float32")
    rows = (ranks, layout.rows(ranks), layout.hidden)
    return x, topk_weights, {n: cases.normal(rng, rows, n) for n in cases.SUMMED_DTYPES}


@hypothesis.given(routings(harness.SEVERAL), seeds)
def test_every_exchange_is_the_oracles(routing, seed):
    ranks = harness.SEVERAL
    layout, ids = routing
    x, topk_weights, y = inputs(layout, ranks, seed)
    expected = oracle.route(ids, layout.num_experts(ranks), layout.rows(ranks), layout.alignment)
    for leaf in y.values():
        leaf[expected.row_token < 0] = np.nan
    recv, sums, weighted = there_and_back(layout, ranks)(ids, x, topk_weights, y)
    harness.assert_routing_is(recv.routing, expected)
    for name in PAYLOAD:
        harness.assert_same_bytes(recv.rows[name], oracle.dispatch(x[name], expected), name)
    weights = oracle.dispatch_choices(topk_weights, expected)
    harness.assert_same_bytes(recv.weights, weights, "weights")
    for name in cases.SUMMED_DTYPES:
        harness.assert_sums_agree(sums[name], *oracle.combine(y[name], expected), name)
    harness.assert_sums_agree(
        weighted, *oracle.combine(y["float32"], expected, weights), "weighted"
    )
