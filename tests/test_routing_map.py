"""choices_from_map: the ids and weights of a routing map, against numpy loops of its own."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)  # of tests without a layer

DTYPES = ("bfloat16", "float16", "float32", "float64")
# tokens, experts, top_k
SHAPES = ((7, 6, 2), (5, 6, 6), (4, 3, 8), (1, 1, 1), (33, 40, 32), (0, 4, 2))


def expected(routing_map, probs, top_k):
    """Return ids, weights and the number of dropped choices, one token and expert after the
    other."""
    ids = np.full((len(routing_map), top_k), -1, np.int32)
    weights = np.zeros((len(routing_map), top_k), probs.dtype)
    dropped = 0
    for token, row in enumerate(routing_map):
        k = 0
        for expert, chosen in enumerate(row):
            if not chosen:
                continue
            if k < top_k:
                ids[token, k], weights[token, k] = expert, probs[token, expert]
                k += 1
            else:
                dropped += 1
    return ids, weights, np.int32(dropped)


def expected_gradient(routing_map, cotangent, top_k):
    """Return the cotangent of the weights at the chosen places of the map; zero elsewhere."""
    gradient = np.zeros(routing_map.shape, cotangent.dtype)
    for token, row in enumerate(routing_map):
        for k, expert in enumerate(np.flatnonzero(row)[:top_k]):
            gradient[token, expert] = cotangent[token, k]
    return gradient


def inputs(shape, *, density=0.4, dtype="float32", seed=0):
    """Return a map, with an empty and a full row if there is room; probs, NaN where it is False."""
    rng = np.random.default_rng([seed, *shape])
    routing_map = rng.random(shape) < density
    if len(routing_map) > 2:
        routing_map[1], routing_map[2] = False, True
    probs = rng.normal(size=shape).astype(jnp.dtype(dtype))
    probs[~routing_map] = np.nan  # nothing may be read there
    return routing_map, probs


@functools.partial(jax.jit, static_argnames="top_k")
def compiled(routing_map, probs, top_k):
    return ma.choices_from_map(routing_map, probs, top_k=top_k)


def check(found, routing_map, probs, top_k):
    choices, num_dropped = found
    assert choices.scores is None
    found = choices.ids, choices.weights, num_dropped
    for actual, wanted in zip(found, expected(routing_map, probs, top_k), strict=True):
        harness.assert_same_bytes(actual, wanted)


@pytest.mark.parametrize("density", (0.0, 0.1, 0.5, 1.0))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choices_are_those_of_the_map(shape, density):
    *shape, top_k = shape
    for seed in range(3):
        routing_map, probs = inputs(shape, density=density, seed=seed)
        check(compiled(routing_map, probs, top_k), routing_map, probs, top_k)


def test_the_example_of_the_docstring():
    routing_map = np.array([[0, 1, 1], [0, 0, 0], [1, 1, 1]], bool)
    choices, num_dropped = ma.choices_from_map(routing_map, top_k=2)
    assert choices.ids.tolist() == [[1, 2], [-1, -1], [0, 1]]
    assert choices.weights is None
    assert (num_dropped, num_dropped.shape) == (1, ())


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_gradients_have_the_dtype_of_the_probs(dtype):
    with jax.enable_x64(dtype == "float64"):
        routing_map, probs = inputs((6, 9), density=0.3, dtype=dtype)
        cotangent = np.random.default_rng(1).normal(size=(6, 3)).astype(probs.dtype)
        cotangent[expected(routing_map, probs, 3)[0] < 0] = np.nan  # of nothing, so it goes nowhere

        def weights(probs):
            found = ma.choices_from_map(routing_map, probs, top_k=3)
            return found[0].weights, found

        @jax.jit
        def gradient_and_choices(probs, cotangent):
            _, vjp, choices = jax.vjp(weights, probs, has_aux=True)
            return *vjp(cotangent), choices

        gradient, choices = gradient_and_choices(probs, cotangent)
        check(choices, routing_map, probs, 3)
        wanted = expected_gradient(routing_map, cotangent, 3)
        assert gradient.dtype == wanted.dtype
        np.testing.assert_array_equal(gradient, wanted)


def test_vmap_is_a_loop():
    maps, probs = zip(*(inputs((6, 5), seed=seed) for seed in range(4)), strict=True)
    batched = jax.vmap(functools.partial(ma.choices_from_map, top_k=2))
    choices = jax.jit(batched)(np.stack(maps), np.stack(probs))
    for i in range(4):
        check(jax.tree.map(lambda leaf: leaf[i], choices), maps[i], probs[i], 2)


@pytest.mark.several_devices("it splits tokens over a mesh")
def test_a_map_that_is_split_over_the_tokens_of_a_mesh_is_taken_as_it_is():
    mesh = jax.make_mesh(
        (harness.FEW,),
        ("ep",),
        (jax.sharding.AxisType.Explicit,),
        devices=harness.devices(harness.FEW),
    )
    routing_map, probs = inputs((8, 5))
    with jax.set_mesh(mesh):
        placed = harness.put((routing_map, probs), NamedSharding(mesh, PartitionSpec("ep")))
        check(compiled(*placed, 2), routing_map, probs, 2)


def permuted(x, routing_map, probs, num_rows, pad_multiple):
    """Permute like Megatron, for each rank. Return the tokens [R, T, H] of each local expert,
    source by source and in order, each expert padded to `pad_multiple`, all to `num_rows`; their
    probs, the experts' sizes, and (expert, source, token) of each row."""
    ranks, tokens, num_experts = routing_map.shape
    local_experts = num_experts // ranks
    rows = np.zeros((ranks, num_rows, x.shape[-1]), x.dtype)
    row_probs = np.zeros((ranks, num_rows), probs.dtype)
    sizes = np.zeros((ranks, local_experts), np.int32)
    places = []
    for rank in range(ranks):
        row = 0
        for local in range(local_experts):
            first, expert = row, rank * local_experts + local
            for source, token in np.argwhere(routing_map[:, :, expert]):
                rows[rank, row] = x[source, token]
                row_probs[rank, row] = probs[source, token, expert]
                places.append((rank, row, expert, source, token))
                row += 1
            row = -(-row // pad_multiple) * pad_multiple
            sizes[rank, local] = row - first
    return rows, row_probs, sizes, places


@pytest.mark.exchanges(3)
@pytest.mark.parametrize("pad_multiple", (1, 8))
def test_rows_are_those_of_a_permutation_by_expert_with_padding_and_a_fixed_number(pad_multiple):
    """The probs travel with the rows. A routing that is used again, with other tokens and probs,
    has the same rows. The gradient of the probs comes back to the map's places."""
    ranks, tokens, hidden, top_k, num_rows = harness.SEVERAL, 6, 4, 3, 57
    num_experts = 2 * ranks
    group = harness.group_of(ranks)
    rng = np.random.default_rng(5)
    routing_map = np.zeros((ranks, tokens, num_experts), bool)
    for row in routing_map.reshape(-1, num_experts):
        row[rng.choice(num_experts, rng.integers(0, top_k + 1), replace=False)] = True
    x, others = rng.normal(size=(2, ranks, tokens, hidden)).astype(np.float32)
    probs, other_probs = rng.random((2, *routing_map.shape)).astype(np.float32)
    cotangent = rng.normal(size=(ranks, num_rows)).astype(np.float32)

    def of_one_rank(routing_map, x, others, probs, other_probs, cotangent):
        def first(probs):
            choices, _ = ma.choices_from_map(routing_map, probs, top_k=top_k)
            route_args = dict(num_experts=num_experts, capacity=num_rows, alignment=pad_multiple)
            recv = ma.dispatch(x, *choices[:2], group=group, **harness.exchanging(route_args))
            return jnp.sum(recv.weights * cotangent), recv

        gradient, recv = jax.grad(first, has_aux=True)(probs)
        choices, _ = ma.choices_from_map(routing_map, other_probs, top_k=top_k)
        return gradient, recv, ma.dispatch(others, recv.routing, choices.weights)

    args = (routing_map, x, others, probs, other_probs, cotangent)
    gradient, recv, again = harness.on_each_rank(of_one_rank, harness.mesh_of(ranks))(*args)
    wanted = np.zeros(probs.shape, np.float32)
    for result, tokens_of, probs_of in ((recv, x, probs), (again, others, other_probs)):
        rows, row_probs, sizes, places = permuted(
            tokens_of, routing_map, probs_of, num_rows, pad_multiple
        )
        harness.assert_same_bytes(result.rows, rows)
        harness.assert_same_bytes(result.weights, row_probs)
        harness.assert_same_bytes(result.group_sizes, sizes)
        assert not result.num_dropped.any()
    for rank, row, expert, source, token in places:
        wanted[source, token, expert] = cotangent[rank, row]
    np.testing.assert_array_equal(gradient, wanted)


MAP = np.ones((4, 6), bool)


@pytest.mark.parametrize(
    ("routing_map", "probs", "top_k", "error", "message"),
    [
        (MAP[0], None, 2, ValueError, r"routing_map must be a bool array .*; got bool\[6\]"),
        (MAP[:, :0], None, 2, ValueError, r"routing_map must have an expert .*; got bool\[4,0\]"),
        (MAP.astype(np.int32), None, 2, TypeError, r"routing_map must be .*; got int32\[4,6\]"),
        (MAP, MAP, 2, TypeError, r"probs must be a float array .*=\[4, 6\].*; got bool\[4,6\]"),
        (MAP, np.ones((4, 6), np.int32), 2, TypeError, r"probs must be .*; got int32\[4,6\]"),
        (MAP, jnp.ones((4, 6), jnp.float8_e5m2), 2, TypeError, r"16 bits .*; got float8_e5m2"),
        (MAP, np.ones((4, 7)), 2, ValueError, r"probs must be .*=\[4, 6\].*; got float64\[4,7\]"),
        (MAP, np.ones((6, 4)), 2, ValueError, r"probs must be .*=\[4, 6\].*; got float64\[6,4\]"),
        (MAP, np.ones(6), 2, ValueError, r"probs must be .*; got float64\[6\]"),
        (MAP, None, 0, ValueError, "top_k must be at least 1; got 0"),
        (MAP, None, 33, ValueError, "top_k must be at most 32; got 33"),
        (MAP, None, 2.0, TypeError, "top_k must be an int; got 2.0"),
        (MAP, None, True, TypeError, "top_k must be an int; got True"),
        (MAP, None, None, TypeError, "top_k must be an int; got None"),
    ],
)
def test_errors_name_argument_expectation_and_value(routing_map, probs, top_k, error, message):
    with pytest.raises(error, match=message):
        ma.choices_from_map(routing_map, probs, top_k=top_k)
