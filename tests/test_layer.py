"""Compare the expert layer with the dense layer on one device, and its exchanges with
docs/concepts.md. On the portable path, rows after the last group are NaN."""

import functools

import cases
import harness
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import small_layer
from dense_layer import dense_experts, experts_of

import jax_moe_a2a as ma

pytestmark = pytest.mark.usefixtures("exact_products")

RANKS = harness.SEVERAL
INTERMEDIATE = 3
SWIGLU = ma.gated(jax.nn.silu)
NAMES = ("x", "topk_weights", "w_in", "w_out", "b_in", "b_out")
SMALL = cases.Layout("small", tokens=6, top_k=3, local_experts=2, alignment=4, hidden=5)
CUT = cases.Layout(
    "cut", tokens=6, top_k=3, local_experts=2, capacity=10, alignment=4, hidden=5
)  # this layout drops rows
UNFUSED = lambda rows: SWIGLU(jnp.tanh(rows))
ACTIVATIONS = pytest.mark.parametrize("activation", (SWIGLU, UNFUSED), ids=("fused", "unfused"))


def arguments(layout=SMALL, routing="skewed", dtype="float32", width=2 * INTERMEDIATE, seed=0):
    """Return random (floats in the order of NAMES, ids, which choices have a row) of all ranks."""
    rng = np.random.default_rng([seed, layout.tokens])
    ids = cases.Case(layout, routing).ids(RANKS, seed)
    shapes = small_layer.shapes_of_moe(layout, width, INTERMEDIATE)
    floats = [0.5 * cases.normal(rng, (RANKS, *shape), "float32") for shape in shapes]
    x, topk_weights, *weights = (array.astype(cases.dtype(dtype)) for array in floats)
    floats = x, 2 * topk_weights.astype(np.float32), *weights
    kept = small_layer.kept_choices(ids, layout)
    return jax.tree.map(jnp.asarray, (floats, ids, kept))


layer = functools.partial(small_layer.moe_layer, activation=SWIGLU, layout=SMALL)


def of_all_ranks(fn=layer, **options):
    return small_layer.on_all_ranks(functools.partial(fn, **options), harness.mesh_of(RANKS))


def dense(*args, activation=SWIGLU, change=lambda experts: experts):
    x, topk_weights, *arrays, ids, kept = args
    experts = experts_of(*(w.reshape(-1, *w.shape[2:]) for w in arrays), activation=activation)
    weights, ids = jnp.where(kept, topk_weights, 0), jnp.where(kept, ids, -1)
    return dense_experts(x, weights, ids, change(experts))


def value_and_grads(fn):
    """Return a function (floats, *others) -> (output, gradients of a loss with respect to all
    floats)."""

    def run(floats, *others):
        def value(*floats):
            out = fn(*floats, *others)
            return small_layer.loss(out), out

        grads, out = jax.grad(value, tuple(range(len(floats))), has_aux=True)(*floats)
        return out, *grads

    return run


@functools.cache
def program(layout, **options):
    return small_layer.compiled(value_and_grads(of_all_ranks(layout=layout, **options)))


dense_program = small_layer.compiled(value_and_grads(dense), exchanges=0)


def assert_is_dense(layout, routing):
    floats, ids, kept = arguments(layout, routing)
    with harness.expect_exchanges(5):
        actual = program(layout)(floats, ids)
    small_layer.assert_close(actual, dense_program(floats, ids, kept), routing, tolerance=5e-5)


@pytest.mark.parametrize("layout", (SMALL, CUT), ids=lambda layout: layout.name)
def test_results_and_gradients_are_those_of_the_dense_layer(layout):
    for routing in ("uniform", "skewed", "first_expert_only", "idle_rank", "silent_rank"):
        assert_is_dense(layout, routing)
    for routing in ("masked", "all_masked", "repeated", "invalid"):
        assert_is_dense(layout, routing)


def test_weights_of_choices_may_multiply_the_inputs_of_experts():
    """With `weigh_input`, a dropped choice adds nothing to a token's output."""
    change = lambda experts: experts.replace(weigh_input=True)
    expected = small_layer.compiled(
        value_and_grads(functools.partial(dense, change=change)), exchanges=0
    )
    for routing in ("skewed", "repeated", "invalid"):
        floats, ids, kept = arguments(CUT, routing)
        with harness.expect_exchanges(5):
            actual = program(CUT, change=change)(floats, ids)
        small_layer.assert_close(actual, expected(floats, ids, kept), routing, tolerance=5e-5)


@pytest.mark.exchanges(0)
def test_without_tokens_gradients_of_weights_are_zero():
    """The test runs on one device, because in a shard_map a constant gradient is an error in
    XLA."""
    layout = cases.Layout("none", tokens=0, top_k=2, local_experts=2, hidden=5)
    floats, ids, _ = arguments(layout)
    fn = functools.partial(layer, layout=layout, group=harness.vmapped_group(RANKS))
    run = value_and_grads(jax.vmap(fn, axis_name=harness.AXIS))
    out, *grads = small_layer.compiled(run)(floats, ids)
    assert out.shape == (RANKS, 0, 5)
    assert not any(np.any(grad) for grad in harness.numpy_of(grads))


@pytest.mark.exchanges(0)
def test_rows_without_a_token_add_nothing_to_gradients_of_arrays_that_an_activation_reads():
    """At h = 0, the derivative of slope * log(abs(h)) with respect to slope is infinite."""
    group = ma.Group(axis_name=harness.AXIS, size=RANKS, implementation="portable")

    def of_ranks(*args, **options):
        *args, _ = args
        on_rank = functools.partial(layer, group=group, **options)
        return jax.vmap(on_rank, axis_name=harness.AXIS)(*args)

    def grads_of(fn):
        def loss(slope, *args):
            activation = lambda h: slope * jnp.log(jnp.abs(h))
            return small_layer.loss(fn(*args, activation=activation))

        return small_layer.compiled(jax.grad(loss, (0, 1, 3)), exchanges=0)

    programs = grads_of(of_ranks), grads_of(dense)
    for routing in ("masked", "all_masked"):
        floats, ids, kept = arguments(SMALL, routing, width=INTERMEDIATE)
        grads = [run(jnp.float32(0.5), *floats[:4], ids, kept) for run in programs]
        small_layer.assert_close(*grads, routing, tolerance=1e-4)


@pytest.mark.several_devices("if all ranks share a GPU, the other tests cover this")
def test_the_layer_is_the_same_with_all_ranks_on_one_device():
    floats, ids, kept = arguments(CUT, "repeated")
    group = harness.emulated_group(RANKS)
    fn = functools.partial(layer, layout=CUT, group=group)
    actual = small_layer.compiled(value_and_grads(jax.vmap(fn, axis_name=harness.AXIS)))(
        floats, ids
    )
    small_layer.assert_close(actual, dense_program(floats, ids, kept), tolerance=5e-5)


POLICIES = jax.checkpoint_policies
ROUTING, ROWS = ma.ROUTING_CHECKPOINT_NAME, ma.ROWS_CHECKPOINT_NAME
PRODUCTS = ma.PRODUCTS_CHECKPOINT_NAME
save = POLICIES.save_only_these_names
# Each case is (policy, numbers of routes, token exchanges and first products in a forward and a
# backward pass), as in docs/concepts.md.
REMAT = {
    "no checkpoint": (None, dict(route=1, exchange=4, product=1)),
    "nothing": (POLICIES.nothing_saveable, dict(route=2, exchange=5, product=2)),
    "routing": (save(ROUTING), dict(route=1, exchange=5, product=2)),
    "rows": (save(ROWS), dict(route=2, exchange=4, product=2)),
    "routing and rows": (save(ROUTING, ROWS), dict(route=1, exchange=4, product=2)),
    "routing and products": (save(ROUTING, PRODUCTS), dict(route=1, exchange=5, product=1)),
    "three names": (save(ROUTING, ROWS, PRODUCTS), dict(route=1, exchange=4, product=1)),
    "everything": (POLICIES.everything_saveable, dict(route=1, exchange=4, product=1)),
}


def num_exchanges(counted):
    return sum(count for name, count in counted.items() if "dispatch" in name or "combine" in name)


def checkpointed_program(policy, activation=SWIGLU):
    fn = functools.partial(layer, activation=activation)
    if policy != "no checkpoint":
        fn = jax.checkpoint(fn, policy=REMAT[policy][0])
    return value_and_grads(of_all_ranks(fn))


@pytest.mark.exchanges(0)
@ACTIVATIONS
@pytest.mark.parametrize("policy", REMAT)
def test_there_are_two_exchanges_forward_and_two_backward_and_a_policy_decides_on_more(
    policy, activation
):
    floats, ids, _ = arguments()
    jaxpr = jax.make_jaxpr(checkpointed_program(policy, activation))(floats, ids)
    counted = harness.count_primitives(jaxpr)
    expected = dict(REMAT[policy][1])
    again = expected.pop("product") - 1
    assert dict(route=counted["route"], exchange=num_exchanges(counted)) == expected, counted
    # Without a fused activation, repeating a product with its bias takes two grouped products.
    if activation is UNFUSED:
        assert counted["grouped_dot"] == 7 + 2 * again, counted
    else:
        expected = dict(grouped_dot=2, dot_act=1 + again, dot_bias=1, act_dot_grad=1)
        assert {name: counted[name] for name in expected} == expected, counted


@pytest.mark.exchanges(0)
def test_no_exchange_writes_rows_after_the_last_group():
    floats, ids, _ = arguments()
    jaxpr = jax.make_jaxpr(checkpointed_program("no checkpoint"))(floats, ids)
    outward = [eqn for eqn in harness.equations(jaxpr) if eqn.primitive.name == "moe_a2a_dispatch"]
    assert [eqn.params["options"].tail for eqn in outward] == ["unspecified"] * 2


@pytest.mark.exchanges(0)
@ACTIVATIONS
@pytest.mark.parametrize("policy", [name for name in REMAT if name != "everything"])
def test_the_backward_pass_keeps_rows_and_first_products_or_what_a_policy_saves(policy, activation):
    """Without a policy and without a fused activation, the weighted activations are kept, too."""
    floats, ids, _ = arguments(SMALL, "uniform")
    floats = floats[:4]
    group = harness.emulated_group(RANKS)
    fn = functools.partial(layer, group=group, activation=activation)
    if policy != "no checkpoint":
        fn = jax.checkpoint(fn, policy=REMAT[policy][0])
    backward = lambda *args: jax.vjp(lambda *floats: fn(*floats, args[-1]), *args[:-1])[1]
    kept = jax.eval_shape(jax.vmap(backward, axis_name=harness.AXIS), *floats, ids)
    rows = SMALL.rows(RANKS)
    columns = [
        leaf.shape[2]
        for leaf in jax.tree.leaves(kept)
        if leaf.shape[1:2] == (rows,) and leaf.ndim == 3
    ]
    has_rows, has_products = (
        policy in ("no checkpoint", "three names", f"routing and {name}", name)
        for name in ("rows", "products")
    )
    expected = [SMALL.hidden] * has_rows + [2 * INTERMEDIATE] * has_products
    if activation is UNFUSED and policy == "no checkpoint":
        expected.append(INTERMEDIATE)
    assert sorted(columns) == sorted(expected)


@ACTIVATIONS
@pytest.mark.exchanges(23)
def test_saved_products_change_no_gradient(activation):
    floats, ids, _ = arguments()
    fn = functools.partial(layer, group=harness.vmapped_group(RANKS), activation=activation)

    def gradients(policy):
        remat = fn if policy is None else jax.checkpoint(fn, policy=policy)
        run = value_and_grads(jax.vmap(remat, axis_name=harness.AXIS))
        return small_layer.compiled(run)(floats, ids)

    expected = gradients(None)
    for policy in (save(PRODUCTS), save(ROUTING, PRODUCTS), save(ROUTING, ROWS, PRODUCTS)):
        small_layer.assert_close(gradients(policy), expected, tolerance=1e-6)


@pytest.mark.exchanges(0)
def test_the_forward_pass_alone_has_two_exchanges():
    floats, ids, _ = arguments()
    counted = harness.count_primitives(jax.make_jaxpr(of_all_ranks())(*floats, ids))
    assert counted == dict(routed_dispatch=1, combine=1, experts=1)


@pytest.mark.exchanges(0)
@pytest.mark.parametrize(
    "wanted, expected",
    [
        ((0,), dict(route=1, dispatch=2, combine=2)),
        ((1,), dict(route=1, dispatch=2, combine=2)),
        ((2, 3, 4, 5), dict(routed_dispatch=1, dispatch=1, combine=1)),
    ],
    ids=("x", "topk_weights", "experts"),
)
def test_gradients_that_are_not_requested_are_not_exchanged(wanted, expected):
    floats, ids, _ = arguments()
    loss = lambda *floats: small_layer.loss(of_all_ranks()(*floats, ids))
    counted = harness.count_primitives(jax.make_jaxpr(jax.grad(loss, wanted))(*floats))
    products = "grouped", "dot_act", "dot_bias", "act_dot"
    moved = {n: count for n, count in counted.items() if not n.startswith(products)}
    assert moved == expected


@pytest.mark.exchanges(0)
@pytest.mark.parametrize(
    "changed, error, naming",
    [
        (dict(x=(6,)), ValueError, ["x must", "[num_tokens, hidden]", "float32[6]"]),
        (dict(w_in=(3, 5, 2, 3), w_out=(3, 3, 5)), ValueError, ["experts must", "L=2", "got 3"]),
        (dict(w_in=(2, 6, 2, 3)), ValueError, ["experts.w_in must", "H=5", "float32[2,6,2,3]"]),
        (dict(activation=jax.nn.gelu), ValueError, ["activation", "must", "I=3", "float32[36,6]"]),
        (dict(activation=1), TypeError, ["activation", "must be a function", "got 1"]),
        (dict(activation=lambda h: h > 0), ValueError, ["activation", "must", "floats", "bool"]),
        (dict(num_experts=3), ValueError, ["num_experts must", "3"]),
        (dict(group=None), ValueError, ["group must"]),
        (dict(weights=(6, 2)), ValueError, ["topk_weights must", "float32[6,2]"]),
        (dict(num_chunks=4), ValueError, ["num_chunks must divide", "4 for x float32[6,5]"]),
        (dict(num_chunks=0), ValueError, ["num_chunks must be at least 1; got 0"]),
        (dict(num_chunks=2.0), TypeError, ["num_chunks must be an int", "2.0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_an_error_names_the_argument_and_what_it_must_be(changed, error, naming):
    shapes = dict(x=(6, 5), weights=(6, 3), w_in=(2, 5, 2, 3), w_out=(2, 3, 5))
    shapes |= {name: value for name, value in changed.items() if isinstance(value, tuple)}
    options = dict(group=harness.emulated_group(2), num_experts=4, activation=SWIGLU)
    options |= {name: value for name, value in changed.items() if name not in shapes}
    activation = options.pop("activation")

    def fn(arrays):
        x, weights, ids = arrays.pop("x"), arrays.pop("weights"), jnp.zeros((6, 3), int)
        experts = ma.Experts(**arrays, activation=activation)
        choices = ma.RouterChoices(ids, weights)
        return ma.moe_mlp(x, choices, experts, **harness.exchanging(options))

    arrays = {name: jax.ShapeDtypeStruct((2, *s), "float32") for name, s in shapes.items()}
    with pytest.raises(error) as caught:
        jax.eval_shape(jax.vmap(fn, axis_name=harness.AXIS), arrays)
    for text in naming:
        assert text in str(caught.value), caught.value


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_chunks_of_tokens_are_layers_whose_gradients_are_summed_in_float32(dtype):
    """Only tokens of one chunk compete for the capacity."""
    floats, ids, _ = arguments(CUT, dtype=dtype)
    chunk = cases.Layout("chunk", 2, 3, local_experts=2, capacity=6, alignment=4, hidden=5)
    parts = [slice(2 * i, 2 * i + 2) for i in range(3)]
    kept = [small_layer.kept_choices(np.asarray(ids[:, part]), chunk) for part in parts]
    assert not all(map(np.all, kept))
    fn = of_all_ranks(layout=chunk, num_chunks=3)
    run = value_and_grads(fn)
    jaxpr = jax.make_jaxpr(run)(floats, ids)
    assert num_exchanges(harness.count_primitives(jaxpr)) == 5
    scans = [eqn for eqn in harness.equations(jaxpr) if eqn.primitive.name == "scan"]
    backward = [eqn for eqn in scans if eqn.params["reverse"]]
    results = [v.aval for eqn in backward for v in eqn.outvars]
    # The loop carries the gradient sum of one rank, or of all ranks if they share a device.
    of_w_in = [aval for aval in results if aval.shape in (floats[2].shape[1:], floats[2].shape)]
    assert [aval.dtype for aval in of_w_in] == ["float32"]
    found = small_layer.compiled(run, exchanges=21)(floats, ids)
    assert [leaf.dtype for leaf in found[1:]] == [leaf.dtype for leaf in floats]
    wide = jax.tree.map(lambda leaf: leaf.astype("float32"), floats)
    expected = dense_program(wide, ids, jnp.concatenate(kept, 1))
    tolerance = 5e-5 if dtype == "float32" else 4e-2
    for name, actual, right in zip(("out", *NAMES), *map(harness.numpy_of, (found, expected))):
        error = np.abs(actual.astype(np.float32) - right).max()
        assert error <= tolerance * max(1, np.abs(right).max()), name


@pytest.mark.exchanges(0)
def test_a_routing_is_not_divided():
    (x, weights, *arrays), ids, _ = arguments()
    group = harness.emulated_group(RANKS)

    def fn(x, weights, arrays, ids):
        routing = ma.route(ids, group=group, num_experts=2 * RANKS)
        choices, exchange = ma.RouterChoices(routing, weights), ma.Exchange(num_chunks=2)
        return ma.moe_mlp(x, choices, experts_of(*arrays), exchange=exchange)

    with pytest.raises(TypeError, match="topk_ids must be integers .* num_chunks.*got a Routing"):
        jax.eval_shape(jax.vmap(fn, axis_name=harness.AXIS), x, weights, arrays, ids)
