"""Test that a call of `moe` that repeats work or loses tokens warns once, and that its statistics
show it."""

import re
import warnings

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import mesh_over as mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

pytestmark = [
    pytest.mark.exchanges(0),
    pytest.mark.one_process("it checks warnings of one process"),
    pytest.mark.several_devices("meshes of two and four devices"),
]

TOKENS, TOP_K, HIDDEN, EXPERTS = 8, 2, 8, 4
PARAMS = dict(
    router=ma.Router(np.eye(HIDDEN, EXPERTS, dtype=np.float32), choose=ma.TopK(TOP_K)),
    experts=ma.Experts(
        np.ones((EXPERTS, HIDDEN, 2, 4), np.float32), np.ones((EXPERTS, 4, HIDDEN), np.float32)
    ),
)


def warnings_of(mesh, x, known=False, **options):
    """Return the warnings that a user would see if a layer is traced twice."""
    layer = lambda x: ma.moe(x, **PARAMS, **harness.exchanging(dict(axes="ep") | options))[0]
    with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(2):  # JAX traces a new lambda again
            if known:
                jax.eval_shape(lambda: layer(x))
            else:
                jax.eval_shape(lambda x: layer(x), x)
    return [str(warning.message) for warning in found if warning.category is UserWarning]


REPEATED = re.escape(
    "do not have 'data' of size 2, so their devices repeat its work. If they divide the tokens, "
    "pass ma.Axes(..., data=('data',))"
)


def assert_warns_once(found, pattern):
    assert len(found) == 1 and re.search(pattern, found[0]), found


def test_an_axis_that_divides_tokens_and_is_in_no_argument_is_named_once():
    x = jnp.ones((TOKENS, HIDDEN))
    explicit, auto = (mesh_of(kind, data=2, ep=2) for kind in (AxisType.Explicit, AxisType.Auto))
    over = lambda mesh, *axes, x=x: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    for axes in (("data",), (("data", "ep"),), (None, "data")):
        assert_warns_once(warnings_of(explicit, over(explicit, *axes)), REPEATED)
        assert_warns_once(warnings_of(auto, over(auto, *axes), known=True), REPEATED)
    for axes in ((), ("ep",)):
        assert not warnings_of(explicit, over(explicit, *axes))
        assert not warnings_of(auto, over(auto, *axes), known=True)
    assert_warns_once(warnings_of(auto, over(auto)), REPEATED)  # "data" could divide the tokens
    for mesh in (explicit, auto):
        divided = over(mesh, "data")
        assert not warnings_of(mesh, divided, axes=ma.Axes("ep", data="data"))
        assert not warnings_of(mesh, divided, axes=ma.Axes("ep", tensor="data"))
        assert not warnings_of(mesh, divided, axes=("data", "ep"))
        assert not warnings_of(mesh, over(mesh, "data", x=jnp.ones((2, HIDDEN))))  # too few tokens
    three = mesh_of(AxisType.Explicit, data=2, more=2, ep=2)
    found = warnings_of(three, over(three, ("data", "more")), axes=ma.Axes("ep", data="data"))
    assert_warns_once(found, r"'more' of size 2.*data=\('data', 'more'\)")
    assert not warnings_of(mesh_of(data=1, ep=2), x)


def test_a_capacity_of_less_than_a_row_for_each_token_warns_once():
    mesh, x = mesh_of(ep=2), jnp.ones((TOKENS, HIDDEN))
    of = lambda **options: warnings_of(mesh, x, **options)
    rows = "rows for the experts of each of 2 ranks, and"
    assert_warns_once(of(capacity=0), f"capacity=0 leaves 0 {rows} each rank has 4 tokens")
    assert_warns_once(of(capacity_factor=0.01), f"capacity_factor=0.01 leaves 1 {rows}")
    assert_warns_once(of(capacity=1, num_chunks=2), f"leaves 1 {rows} each rank has 2 tokens")
    same = f"leaves 3 {rows} all ranks have the same 8 tokens"
    assert_warns_once(of(capacity=3, replicated=True), same)
    for enough in (dict(capacity=4), dict(capacity_factor=0.5), dict(capacity=2, num_chunks=2)):
        assert not of(**enough)
    assert not of(capacity=4, replicated=True) and not of()
    shared = jax.tree.map(lambda w: w[0], PARAMS["experts"])
    assert_warns_once(of(capacity=3, shared=shared), "leaves 3 rows")


def choose(tokens, logits, per_token, whole):
    num_tokens, num_experts = logits.shape
    seconds = jnp.array([num_experts, 7_000, -2, -1], jnp.int32)
    seconds = jnp.resize(seconds, num_tokens)
    ids = jnp.stack([jnp.zeros_like(seconds), seconds], axis=1)
    return ma.RouterChoices(ids, jnp.ones(ids.shape, logits.dtype), jax.nn.softmax(logits))


@pytest.mark.parametrize(
    "num_tokens, options, expected",
    (
        (5, {}, 5),  # one rank has 3 tokens, the other 2 tokens and padding
        (4, dict(mask=[True, False, True, True]), 3),
        (1, {}, 1),  # all ranks have the token
        (4, dict(num_chunks=2), 4),
        (4, dict(placement=[0, 1, 0, 2, 3, -1]), 4),
    ),
    ids=("padded", "masked", "replicated", "chunks", "placement"),
)
def test_statistics_count_ids_that_are_no_experts(num_tokens, options, expected):
    if "placement" in options:
        table = options["placement"]
        options = dict(placement=ma.Placement.from_slots(table, EXPERTS, num_ranks=2))
    if "mask" in options:
        options = dict(mask=np.array(options["mask"]))
    params = PARAMS | dict(router=ma.Router(PARAMS["router"].kernel, choose=choose))
    layer = lambda x: ma.moe(x, **params, axes="ep", **harness.exchanging(options))
    with jax.set_mesh(mesh_of(ep=2)):
        y, statistics = jax.jit(layer)(jnp.ones((num_tokens, HIDDEN)))
    assert statistics.num_invalid == expected
    assert statistics.num_dropped == 0
    kept = int(np.sum(options.get("mask", [True] * num_tokens)))
    assert statistics.load.wanted_per_expert.tolist() == [kept, 0, 0, 0]
    assert (np.abs(y).max(axis=1) > 0).sum() == kept
