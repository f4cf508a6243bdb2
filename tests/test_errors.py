"""Test that wrong arguments raise errors at trace time that name the argument and its value."""

import contextlib
import functools
import re

import harness
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)  # no program runs here

RANKS, TOKENS, TOP_K, EXPERTS, CAPACITY, HIDDEN = 2, 6, 3, 4, 10, 5

IDS = jax.ShapeDtypeStruct((TOKENS, TOP_K), jnp.int32)
X = jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.bfloat16)
WEIGHTS = jax.ShapeDtypeStruct((TOKENS, TOP_K), jnp.float32)
Y = jax.ShapeDtypeStruct((CAPACITY, HIDDEN), jnp.bfloat16)


def array(shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def trace(fn, *args):
    stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((RANKS, *a.shape), a.dtype), args)
    return jax.eval_shape(jax.vmap(fn, axis_name=harness.AXIS), *stacked)


def assert_refuses(fn, *args, naming):
    with refuses(naming):
        trace(fn, *args)


@contextlib.contextmanager
def refuses(naming):
    with pytest.raises((ValueError, TypeError)) as refusal:
        yield
    for pattern in naming:
        assert re.search(pattern, str(refusal.value)), f"no {pattern!r} in: {refusal.value}"


def route_args(**changed):
    """Return valid arguments of route and dispatch with the changes; the value LEFT_OUT removes a
    key."""
    right = dict(
        group=harness.emulated_group(RANKS), num_experts=EXPERTS, capacity=CAPACITY, alignment=1
    )
    return harness.exchanging({k: v for k, v in (right | changed).items() if v is not LEFT_OUT})


LEFT_OUT = object()


def route(**changed):
    return lambda x, ids: ma.route(ids, **route_args(**changed))


def dispatch(**changed):
    return lambda x, ids, *weights: ma.dispatch(x, ids, *weights, **route_args(**changed))


def by_routing(**changed):
    given = harness.exchanging(changed)
    return lambda x, ids: ma.dispatch(x, ma.route(ids, **route_args()), **given)


def combine(*names, modes=(), **options):
    """Return a function (y, *arrays) that calls `ma.combine` with y, and with the arrays as the
    keyword arguments `names`."""

    def call(y, *arrays):
        x, ids, weights = (jnp.zeros(like.shape, like.dtype) for like in (X, IDS, WEIGHTS))
        recv = ma.dispatch(x, ids, weights, **route_args(**dict(modes)))
        return ma.combine(y, recv, **dict(zip(names, arrays)), **options)

    return call


def test_right_input_is_accepted():
    assert trace(combine(), Y).shape == (RANKS, TOKENS, HIDDEN)
    assert trace(combine("add", weights=None), Y, X).shape == (RANKS, TOKENS, HIDDEN)
    for call in (route(), dispatch()):
        trace(call, X, array((TOKENS, 32), "int32"))  # a token has at most 32 choices


SEQUENCES = (2, TOKENS // 2)  # [batch, sequence]


def mlp(x, ids, *, w_in=(2, HIDDEN, 3), w_out=(2, 3, HIDDEN)):
    options = dict(group=harness.emulated_group(RANKS), num_experts=EXPERTS)
    experts = ma.Experts(jnp.ones(w_in, x.dtype), jnp.ones(w_out, x.dtype), activation=jnp.tanh)
    return ma.moe_mlp(x, ma.RouterChoices(ids, None), experts, **options)


def ids_of(ids, *value):
    return [(call, (X, ids), ("topk_ids", *value)) for call in (route(), dispatch())]


def numbers(*naming, **changed):
    return [(call, (X, IDS), naming) for call in (route(**changed), dispatch(**changed))]


def tokens(x, *value):
    naming = r"\bx\b", "6", *value
    given = x, {"good": X, "bad": x}
    return [(call, (each, IDS), naming) for call in (dispatch(), by_routing()) for each in given]


def weights_of_choices(weights, *value):
    return [(dispatch(), (X, IDS, weights), ("topk_weights", *value))]


def wire(name):
    calls = (dispatch(wire_dtype=name), (X, IDS)), (combine(wire_dtype=name), (Y,))
    return [(*call, ("wire_dtype", name)) for call in calls]


def with_routing(**changed):
    return [(by_routing(**changed), (X, IDS), tuple(changed))]


def rows(y, *value):
    calls = combine(), combine(weights=None)
    return [(call, (y,), (r"\by\b", *value)) for call in calls]


def weights_of_rows(weights, *value):
    return [(combine("weights"), (Y, weights), ("weights", *value))]


def addend(add, *value):
    return [(combine("add", weights=None), (Y, add), ("^add must", "got", *value))]


ROUTED = functools.partial(ma.route, **route_args())
# Each value is a list of (call, its arguments, patterns in the error message).
REFUSED = {
    "ids of floats": ids_of(
        array((TOKENS, TOP_K)), "num_tokens, top_k", r"float32\[6,\s*3\]", r"astype\(jnp.int32\)"
    ),
    "ids of one axis": ids_of(array((TOKENS,), "int32"), "num_tokens, top_k", r"int32\[6\]"),
    "a routing map": ids_of(array((TOKENS, EXPERTS), "bool"), r"choices_of in docs/coming_from.md"),
    "ids of no array": [
        (lambda x, ids=ids: ROUTED(ids), (X,), ("topk_ids",))
        for ids in (None, "ids", {"ids": 1}, object())
    ],
    "too many choices": ids_of(array((TOKENS, 33), "int32"), "32", "33"),
    "5 experts": numbers("num_experts", "5", "2", "4 or 6 experts, or 1 rank", num_experts=5),
    "0 experts": numbers("num_experts", "0", num_experts=0),
    "4.0 experts": numbers("num_experts", r"4\.0", num_experts=4.0),
    "no number of experts": numbers("num_experts", num_experts=LEFT_OUT),
    "no group": numbers("group", group=LEFT_OUT),
    "another name as group": numbers("group", "other", "shard_map", "ma.moe", group="other"),
    "a list as group": numbers("group", "ep", "name", group=["ep"]),
    "a group of another size": numbers("4", "2", group=harness.emulated_group(4)),
    "another tail": [
        (
            functools.partial(call, tail="none", **route_args()),
            (X, IDS),
            ("tail must be .*zero.* or .*unspecified.*; got",),
        )
        for call in (ma.dispatch, ma.dispatch_start)
    ],
    "a scalar as x": tokens(array(()), r"\[\]"),
    "tokens more than ids": tokens(array((TOKENS + 1, HIDDEN)), "7"),
    "x without leaves": [
        (lambda ids, x=x: ma.dispatch(x, ids, **route_args()), (IDS,), (r"\bx\b",))
        for x in ({}, None, ())
    ],
    "wide weights": weights_of_choices(array((TOKENS, TOP_K + 2)), r"\[6,\s*5\]|\(6, 5\)"),
    "weights of all experts": weights_of_choices(
        array((TOKENS, EXPERTS)), r"jnp.take_along_axis\(probs, topk_ids, axis=1\)"
    ),
    "weights of integers": weights_of_choices(array((TOKENS, TOP_K), "int32"), "int32"),
    "integers on the wire": wire("int32"),
    "no dtype on the wire": wire("no_dtype"),
    "experts of another routing": with_routing(num_experts=8),
    "capacity of another routing": with_routing(capacity=CAPACITY + 1),
    "alignment of another routing": with_routing(alignment=2),
    "group of another routing": with_routing(group=harness.emulated_group(4)),
    "too many rows": rows(array((CAPACITY + 1, HIDDEN)), "11"),
    "tokens for rows": rows(array((TOKENS, HIDDEN)), "6"),
    "a scalar as rows": rows(array(()), r"\[\]|\(\)|scalar"),
    "rows of integers": rows(array((CAPACITY, HIDDEN), "int32"), "int32"),
    "too many row weights": weights_of_rows(array((CAPACITY + 1,)), "11"),
    "weights of choices for rows": weights_of_rows(
        WEIGHTS, r"\[6,\s*3\]|\(6, 3\)", "to dispatch as topk_weights"
    ),
    "row weights of integers": weights_of_rows(array((CAPACITY,), "int32"), "int32"),
    "a word as row weights": [(combine(weights="mine"), (Y,), ("weights", "mine"))],
    "weights for a tree": [
        (combine(), ({"a": Y, "b": Y},), ("weights",)),
        (combine("weights"), ({"a": Y, "b": Y}, array((CAPACITY,))), ("weights",)),
    ],
    "addend of more tokens": addend(
        array((TOKENS + 1, HIDDEN), "bfloat16"), "num_tokens=6", r"bfloat16\[7,5\]"
    ),
    "wide addend": addend(
        array((TOKENS, HIDDEN + 1), "bfloat16"), r"bfloat16\[6,5\]", r"bfloat16\[6,6\]", "shape"
    ),
    "addend of another dtype": addend(
        array((TOKENS, HIDDEN)), r"bfloat16\[6,5\]", r"float32\[6,5\]", "cast"
    ),
    "addend of sequences": addend(
        array((2, 3, HIDDEN), "bfloat16"), r"bfloat16\[2,3,5\]", r"add.reshape\(-1, 5\)"
    ),
    "addend of another structure": addend({"a": X}, "structure", r"'a'"),
    "addend of no array": [
        (combine(add=add), (Y,), ("^add must hold arrays", "got"))
        for add in ("residual", object(), 0.0)
    ],
    "addend of replicated tokens": [
        (
            combine("add", weights=None, modes=dict(replicated=True)),
            (Y, X),
            (
                "^add must be None",
                "psum",
                "once for each rank",
                r"got bfloat16\[6,5\]",
                "Add it to",
            ),
        )
    ],
    "no recv": [
        (lambda y, recv=recv: ma.combine(y, recv), (Y,), ("recv",)) for recv in (None, "recv", 3)
    ],
    "tokens in place of rows": [
        (lambda x, ids: ma.combine(x, ROUTED(ids)), (X, IDS), ("recv.rows",))
    ],
    "swapped": [
        (
            lambda x, ids: ma.combine(ROUTED(ids), x),
            (X, IDS),
            (r"swapped: call combine\(y, recv\)",),
        )
    ],
    "ids of sequences": [
        (dispatch(), (X, array((*SEQUENCES, TOP_K), "int32")), (r"topk_ids.reshape\(-1, 3\)",))
    ],
    "sequences": [(dispatch(), (array((*SEQUENCES, HIDDEN)), IDS), (r"x.reshape\(-1, 5\)",))],
    "weights of sequences": weights_of_choices(
        array((*SEQUENCES, TOP_K)), r"topk_weights.reshape\(-1, 3\)"
    ),
    "sequences in a layer": [(mlp, (array((TOKENS, 4, HIDDEN)), IDS), (r"x.reshape\(-1, 5\)",))],
    "all experts": [
        (
            functools.partial(mlp, w_in=(EXPERTS, HIDDEN, 3), w_out=(EXPERTS, 3, HIDDEN)),
            (X, IDS),
            (r"P\('.*'\) for experts",),
        )
    ],
    "all experts in a product": [
        (
            ma.grouped_dot,
            (Y, array((EXPERTS, HIDDEN, 3), "bfloat16"), array((2,), "int32")),
            ("experts of this rank only: split it with in_specs",),
        )
    ],
    "weights of PyTorch in a product": [
        (
            ma.grouped_dot,
            (Y, array((2, 3, HIDDEN), "bfloat16"), array((2,), "int32")),
            (r"w.transpose\(0, 2, 1\)",),
        )
    ],
    "weights of PyTorch": [
        (
            functools.partial(mlp, w_in=(2, 6, HIDDEN), w_out=(2, HIDDEN, 3)),
            (X, IDS),
            (r"jnp.moveaxis\(experts.w_in.reshape\(2, 2, 3, 5\), -1, -3\)",),
        )
    ],
    "gate and up side by side": [
        (functools.partial(mlp, w_in=(2, HIDDEN, 6)), (X, IDS), ("side by side.*reshape",))
    ],
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_its_name_and_value(case):
    for call, args, naming in REFUSED[case]:
        assert_refuses(call, *args, naming=naming)


@pytest.mark.parametrize("name", ("num_experts", "capacity", "alignment"))
def test_static_numbers_must_not_be_traced(name):
    value = array((), "int32")
    assert_refuses(
        lambda ids, value: ma.route(ids, **route_args(**{name: value})), IDS, value, naming=(name,)
    )


def test_numpy_integers_are_integers():
    for make in (np.int32, np.int64, np.uint8):
        changed = dict(num_experts=make(4), capacity=make(10), alignment=make(2))
        routing = trace(lambda ids, changed=changed: ma.route(ids, **route_args(**changed)), IDS)
        assert routing.row_rank.shape == (RANKS, 10)


@pytest.mark.parametrize("dispatch", (ma.dispatch, ma.dispatch_start))
@pytest.mark.parametrize(
    "changed",
    (dict(replicated=1), dict(alignment=True), dict(capacity=float(CAPACITY))),
    ids=lambda changed: next(iter(changed)),
)
def test_an_option_of_another_type_than_the_routings_is_refused(dispatch, changed):
    """An option of a dispatch must have the type of the Routing's option, not just its value."""
    (name,) = changed

    def call(x, ids):
        return dispatch(
            x, ma.route(ids, **route_args(replicated=True)), **harness.exchanging(changed)
        )

    with pytest.raises(TypeError, match=rf"{name} must be an? \w+; got {changed[name]}"):
        trace(call, X, IDS)


def test_padding_that_would_wrap_the_numbers_of_rows_is_refused():
    """With `alignment` 2^30, two local experts need more rows than int32 can count."""
    fits, wraps = (route_args(num_experts=4, alignment=alignment) for alignment in (2**29, 2**30))
    trace(lambda ids: ma.route(ids, **fits), IDS)
    naming = ("alignment", "num_experts", str(2**30), "4", r"int32\[6,3\]")
    assert_refuses(lambda ids: ma.route(ids, **wraps), IDS, naming=naming)
    assert_refuses(lambda x, ids: ma.dispatch(x, ids, **wraps), X, IDS, naming=naming)


def test_too_many_experts_are_refused():
    """A route accepts at most 2^20 experts on each rank."""
    most = 2**20
    for num_experts, is_refused in (
        (RANKS * most, False),
        (RANKS * (most + 1), True),
        (2**31 - 2, True),
        (2**40, True),
    ):
        call = lambda ids, n=num_experts: ma.route(ids, **route_args(num_experts=n))
        if is_refused:
            naming = ("num_experts", str(num_experts), str(most), "each rank")
            assert_refuses(call, IDS, naming=naming)
        else:
            trace(call, IDS)


def test_a_symbolic_number_of_tokens_is_refused_with_advice():
    """The error advises one export for each size."""
    naming = ("topk_ids", "symbolic", r"\[t,\s*3\]|\[6,\s*k\]", "export", "-1")
    for shape in ("t, 3", "6, k"):
        sizes = jax.export.symbolic_shape(shape)
        ids = jax.ShapeDtypeStruct(sizes, jnp.int32)
        x = jax.ShapeDtypeStruct((sizes[0], HIDDEN), jnp.float32)
        for capacity in (None, CAPACITY):
            assert_refuses(
                lambda i, c=capacity: ma.route(i, **route_args(capacity=c)), ids, naming=naming
            )
            assert_refuses(
                lambda x, i, c=capacity: ma.dispatch(x, i, **route_args(capacity=c)),
                *(x, ids),
                naming=naming,
            )


def test_another_symbolic_size_is_refused_with_advice():
    """XLA would crash when it runs an export with a symbolic hidden size."""
    (size,) = jax.export.symbolic_shape("h")
    naming = ("symbolic", r"h\]|h,", "jax.export once")
    x, y = array((TOKENS, size)), array((CAPACITY, size))
    assert_refuses(lambda x, i: ma.dispatch(x, i, **route_args()), x, IDS, naming=("x ", *naming))
    route = functools.partial(ma.route, **route_args())
    assert_refuses(lambda y, i: ma.combine(y, route(i)), y, IDS, naming=("y ", *naming))

    def layer(x, i, experts):
        return ma.moe_mlp(x, ma.RouterChoices(i, None), experts, **route_args())

    shapes = array((2, HIDDEN, size)), array((2, size, HIDDEN))
    experts, x = ma.Experts(*shapes, activation=jnp.tanh), array((TOKENS, HIDDEN))
    assert_refuses(layer, x, IDS, experts, naming=("experts.w_in ", *naming))


def test_a_timeout_that_nanoseconds_cannot_count_is_refused():
    """Twice the timeout in nanoseconds must not exceed int64."""
    for timeout in (1e10, 2**33, 1e300):
        for name in ("timeout", "first_timeout"):
            with pytest.raises(ValueError, match=rf"^{name} must be .*at most .* s.*; got "):
                ma.Group(axis_name="ep", size=2, **{name: timeout})
    assert ma.Group(axis_name="ep", size=2, timeout=10 * 365 * 86400).timeout == 10 * 365 * 86400


def test_the_groups_axis_must_be_in_scope():
    for group in (harness.emulated_group(RANKS), harness.group_of(harness.RANK_COUNTS[0])):
        with pytest.raises((ValueError, TypeError), match=harness.AXIS):
            ma.route(jnp.zeros((TOKENS, TOP_K), jnp.int32), **route_args(group=group))
        with pytest.raises((ValueError, TypeError), match=harness.AXIS):
            jax.eval_shape(lambda ids, g=group: ma.route(ids, **route_args(group=g)), IDS)
    other = ma.Group(axis_name="other", size=RANKS)
    assert_refuses(lambda ids: ma.route(ids, **route_args(group=other)), IDS, naming=("other",))


@pytest.mark.several_devices("it needs meshes of two sizes")
@pytest.mark.skipif(
    not {2, 4} <= set(harness.RANK_COUNTS), reason="needs meshes of 2 and of 4 devices"
)
def test_the_group_must_match_the_mesh_in_scope():
    group = harness.group_of(4)
    spec = PartitionSpec(harness.AXIS)
    for mesh in (
        harness.mesh_of(2),
        Mesh(np.array(harness.devices(4)).reshape(2, 2), ("dp", harness.AXIS)),
    ):

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
        def route(ids):
            return ma.route(ids, **route_args(group=group, num_experts=8)).group_sizes

        with pytest.raises((ValueError, TypeError), match="mesh|size"):
            jax.eval_shape(route, array((mesh.shape[harness.AXIS] * TOKENS, TOP_K), "int32"))


@pytest.mark.parametrize(
    "kwargs, naming",
    [
        (dict(), ("mesh|axis_name|size",)),
        (dict(axis_name="ep"), ("size|mesh",)),
        (dict(size=4), ("axis_name",)),
        (dict(axis_name="ep", size=0), ("size", "0")),
        (dict(axis_name="ep", size=2.0), ("size", r"2\.0")),
        (dict(axis_name=(), size=2), ("axis_name",)),
        (dict(axis_name=("ep", "ep"), size=4), ("axis_name", "ep")),
        (dict(axis_name="ep", size=2, num_sms=0), ("num_sms", "0")),
        (dict(axis_name="ep", size=2, num_sms={"dispatch": 0}), (r"num_sms\['dispatch'\]", "0")),
        (dict(axis_name="ep", size=2, num_sms={"send": 8}), ("num_sms", "'dispatch'", "'send'")),
        (dict(axis_name="ep", size=2, timeout=0), ("timeout", "0")),
        (dict(axis_name="ep", size=2, timeout="long"), ("timeout", "long")),
        (dict(axis_name="ep", size=2, first_timeout=True), ("first_timeout", "True")),
        (dict(axis_name="ep", size=2, on_failure="ignore"), ("on_failure", "'nan'", "ignore")),
        (dict(axis_name="ep", size=2, implementation="fast"), ("implementation", "fast")),
        (dict(mesh="mesh", axis_name="ep"), ("mesh",)),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items()) or "nothing"
        if isinstance(value, dict)
        else None
    ),
)
def test_a_group_must_make_sense(kwargs, naming):
    with refuses(naming):
        ma.Group(**kwargs)


@pytest.mark.several_devices("its group has a mesh")
def test_a_group_must_name_axes_of_its_mesh():
    mesh = harness.mesh_of(harness.FEW)
    with pytest.raises((ValueError, TypeError), match="(?s)axis_name.*nowhere"):
        ma.Group(mesh, "nowhere")
    with pytest.raises((ValueError, TypeError), match="(?s)size.*7"):
        ma.Group(mesh, harness.AXIS, size=7)


@pytest.mark.parametrize(
    "call, remedy",
    [
        (
            lambda: ma.load_balancing_loss(np.log([[0.5, 0.5]]), np.array([[0]])),
            r"scores must not be negative.*-0.693.*jax.nn.softmax\(logits\)",
        ),
        (lambda: ma.Group("ep"), r"mesh must be .*got 'ep'. Pass Group\(mesh, 'ep'\), or 'ep'"),
        (lambda: ma.Group(8, "ep"), "mesh must be .*got 8. Pass the result of jax.make_mesh"),
    ],
    ids=("logits for scores", "name for a group", "size for a mesh"),
)
def test_an_error_that_a_beginner_meets_names_the_remedy(call, remedy):
    with refuses([remedy]):
        call()


@pytest.mark.several_devices("its meshes have several devices")
def test_an_error_of_a_whole_layer_names_the_remedy():
    mesh = harness.mesh_of(harness.FEW)
    config = ma.MoEConfig(HIDDEN, 3, 3 * harness.FEW + 1, ma.TopK(2))
    params = ma.init_moe(jax.random.key(0), config)
    layer = lambda: ma.moe(jnp.ones((TOKENS, HIDDEN)), **params, axes="ep")[0]
    inside = jax.shard_map(layer, mesh=mesh, in_specs=(), out_specs=PartitionSpec())
    with refuses(["got 'ep' inside a jax.shard_map.*call moe_mlp inside with group='ep'"]):
        inside()
    with mesh, refuses([r"only the mesh of `with mesh:`.*`with jax.set_mesh\(mesh\):`"]):
        layer()
    with jax.set_mesh(mesh), refuses(["got 7. Use 6 or 8 experts, or 1 rank"]):
        layer()
