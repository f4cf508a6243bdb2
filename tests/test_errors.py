"""Bad input gets a ValueError or TypeError at trace time that names argument and value."""

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
    """Trace fn of one rank's abstract arrays over two emulated ranks, without compiling."""
    stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((RANKS, *a.shape), a.dtype), args)
    return jax.eval_shape(jax.vmap(fn, axis_name=harness.AXIS), *stacked)


def assert_refuses(fn, *args, naming):
    """Assert that fn(*args) raises ValueError or TypeError, with every pattern of `naming` in its
    message."""
    with pytest.raises((ValueError, TypeError)) as refusal:
        trace(fn, *args)
    for pattern in naming:
        assert re.search(pattern, str(refusal.value)), f"no {pattern!r} in: {refusal.value}"


def route_args(**changed):
    """Return valid keyword arguments of route and dispatch, except those changed or LEFT_OUT."""
    right = dict(
        group=harness.emulated_group(RANKS), num_experts=EXPERTS, capacity=CAPACITY, alignment=1
    )
    return harness.exchanging({k: v for k, v in (right | changed).items() if v is not LEFT_OUT})


LEFT_OUT = object()


def test_right_input_is_accepted():
    """This call is valid. The other tests change one argument of it."""

    def layer(x, ids, weights, y):
        recv = ma.dispatch(x, ids, weights, **route_args())
        return ma.combine(y, recv)

    assert trace(layer, X, IDS, WEIGHTS, Y).shape == (RANKS, TOKENS, HIDDEN)


@pytest.mark.parametrize(
    "ids, value",
    [
        (array((TOKENS, TOP_K)), r"float32\[6,\s*3\]"),
        (array((TOKENS, TOP_K), "bool"), r"bool\[6,\s*3\]"),
        (array((TOKENS,), "int32"), r"int32\[6\]"),
        (array((TOKENS, TOP_K, 1), "int32"), r"int32\[6,\s*3,\s*1\]"),
        (array((), "int32"), r"int32\[\]"),
    ],
    ids=("float", "bool", "one_axis", "three_axes", "scalar"),
)
def test_ids_must_be_integers_of_two_axes(ids, value):
    naming = ("topk_ids", "num_tokens, top_k", value)
    assert_refuses(lambda ids: ma.route(ids, **route_args()), ids, naming=naming)
    x = array((*ids.shape[:1], HIDDEN)) if ids.shape else X
    assert_refuses(lambda x, ids: ma.dispatch(x, ids, **route_args()), x, ids, naming=naming)


def test_ids_that_are_no_array_are_refused():
    naming = ("topk_ids",)
    for ids in (None, "ids", {"ids": 1}, object()):
        assert_refuses(lambda x, ids=ids: ma.route(ids, **route_args()), X, naming=naming)


def test_top_k_over_the_limit_is_refused():
    ids = array((TOKENS, 33), "int32")
    assert_refuses(
        lambda ids: ma.route(ids, **route_args()), ids, naming=("top_k|topk_ids", "32", "33")
    )
    at_limit = array((TOKENS, 32), "int32")
    trace(lambda ids: ma.route(ids, **route_args()), at_limit)


@pytest.mark.parametrize(
    "changed, naming",
    [
        (dict(num_experts=5), ("num_experts", "5", "2")),
        (dict(num_experts=0), ("num_experts", "0")),
        (dict(num_experts=4.0), ("num_experts", r"4\.0")),
        (dict(num_experts=LEFT_OUT), ("num_experts",)),
        (dict(capacity=-1), ("capacity must be at least 0; got -1. Omit capacity to drop no row",)),
        (dict(capacity=2.5), ("capacity", r"2\.5")),
        (dict(alignment=0), ("alignment", "0")),
        (dict(alignment=1.5), ("alignment", r"1\.5")),
        (dict(group=LEFT_OUT), ("group",)),
        (dict(group="other"), ("group", "other", "scope", "shard_map", "ma.moe")),
        (dict(group=["ep"]), ("group", "ep", "name")),
        (dict(group=4), ("group", "4|int")),
    ],
    ids=lambda value: (
        "-".join(f"{k}={v}" for k, v in value.items() if v is not LEFT_OUT)
        if isinstance(value, dict)
        else None
    ),
)
def test_static_numbers_out_of_range_are_refused(changed, naming):
    assert_refuses(lambda ids: ma.route(ids, **route_args(**changed)), IDS, naming=naming)
    assert_refuses(
        lambda x, ids: ma.dispatch(x, ids, **route_args(**changed)), X, IDS, naming=naming
    )


@pytest.mark.parametrize("name", ("num_experts", "capacity", "alignment"))
def test_static_numbers_must_not_be_traced(name):
    """A traced value decides no shape: the message says which argument it was."""
    value = array((), "int32")
    assert_refuses(
        lambda ids, value: ma.route(ids, **route_args(**{name: value})), IDS, value, naming=(name,)
    )


def test_numpy_integers_are_integers():
    for make in (np.int32, np.int64, np.uint8):
        changed = dict(num_experts=make(4), capacity=make(10), alignment=make(2))
        routing = trace(lambda ids, changed=changed: ma.route(ids, **route_args(**changed)), IDS)
        assert routing.row_rank.shape == (RANKS, 10)


@pytest.mark.parametrize("x", (array(()), array((TOKENS + 1, HIDDEN))), ids=("scalar", "tokens"))
def test_every_leaf_of_x_must_have_the_token_axis(x):
    naming = (r"\bx\b", "6", str(x.shape[0]) if x.shape else r"\[\]")
    dispatch = lambda x, ids: ma.dispatch(x, ids, **route_args())
    by_routing = lambda x, ids: ma.dispatch(x, ma.route(ids, **route_args()))
    for call in (dispatch, by_routing):
        assert_refuses(call, x, IDS, naming=naming)
        assert_refuses(call, {"good": X, "bad": x}, IDS, naming=naming)


def test_a_payload_without_leaves_is_refused():
    for x in ({}, None, ()):
        assert_refuses(
            lambda ids, x=x: ma.dispatch(x, ids, **route_args()), IDS, naming=(r"\bx\b",)
        )


@pytest.mark.parametrize(
    "weights, value",
    [
        (array((TOKENS, TOP_K + 1)), r"\[6,\s*4\]|\(6, 4\)"),
        (array((TOKENS,)), r"\[6\]|\(6,\)"),
        (array((TOKENS, TOP_K, 1)), r"\[6,\s*3,\s*1\]|\(6, 3, 1\)"),
        (array((TOKENS, TOP_K), "int32"), "int32"),
        (array((TOKENS, TOP_K), "complex64"), "complex64"),
    ],
    ids=("wide", "one_axis", "three_axes", "integers", "complex"),
)
def test_topk_weights_must_be_a_float_of_each_choice(weights, value):
    assert_refuses(
        lambda x, ids, w: ma.dispatch(x, ids, w, **route_args()),
        X,
        IDS,
        weights,
        naming=("topk_weights", value),
    )


@pytest.mark.parametrize("wire_dtype", ("int32", "complex64", "no_dtype"))
def test_a_wire_dtype_is_a_float(wire_dtype):
    naming = ("wire_dtype", wire_dtype)
    assert_refuses(
        lambda x, ids: ma.dispatch(x, ids, **route_args(wire_dtype=wire_dtype)),
        X,
        IDS,
        naming=naming,
    )
    assert_refuses(
        lambda y, ids: ma.combine(y, ma.route(ids, **route_args()), wire_dtype=wire_dtype),
        Y,
        IDS,
        naming=naming,
    )


def test_numbers_given_with_a_routing_must_be_its_own():
    for name, value in {
        "num_experts": 8,
        "capacity": CAPACITY + 1,
        "alignment": 2,
        "group": harness.emulated_group(4),
    }.items():
        changed = route_args(**{name: value})
        assert_refuses(
            lambda x, ids, changed=changed: ma.dispatch(
                x, ma.route(ids, **route_args()), **changed
            ),
            X,
            IDS,
            naming=(name,),
        )


@pytest.mark.parametrize("dispatch", (ma.dispatch, ma.dispatch_start))
@pytest.mark.parametrize(
    "changed",
    (dict(shared_expert=1), dict(alignment=True), dict(capacity=float(CAPACITY))),
    ids=lambda changed: next(iter(changed)),
)
def test_what_only_equals_that_of_a_routing_is_refused(dispatch, changed):
    """1 == True, but 1 is not a bool."""
    (name,) = changed

    def call(x, ids):
        return dispatch(
            x, ma.route(ids, **route_args(shared_expert=True)), **harness.exchanging(changed)
        )

    with pytest.raises(TypeError, match=rf"{name} must be an? \w+; got {changed[name]}"):
        trace(call, X, IDS)


def test_padding_that_would_wrap_the_numbers_of_rows_is_refused():
    """2 local experts: a row of each makes twice the alignment."""
    fits, wraps = (route_args(num_experts=4, alignment=alignment) for alignment in (2**29, 2**30))
    trace(lambda ids: ma.route(ids, **fits), IDS)
    naming = ("alignment", "num_experts", str(2**30), "4", r"int32\[6,3\]")
    assert_refuses(lambda ids: ma.route(ids, **wraps), IDS, naming=naming)
    assert_refuses(lambda x, ids: ma.dispatch(x, ids, **wraps), X, IDS, naming=naming)


def test_experts_that_no_memory_could_count_are_refused():
    """Each rank counts the rows of each of its experts."""
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
    """The number decides the shapes of the exchange; jax.export has one program for each number."""
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
    """XLA ends the process that calls an export of such a program."""
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
    """The kernels take it as int64 nanoseconds; the deadline is a sum of two."""
    for timeout in (1e10, 2**33, 1e300):
        for name in ("timeout", "first_timeout"):
            with pytest.raises(ValueError, match=rf"^{name} must be .*at most .* s.*; got "):
                ma.Group(axis_name="ep", size=2, **{name: timeout})
    assert ma.Group(axis_name="ep", size=2, timeout=10 * 365 * 86400).timeout == 10 * 365 * 86400


def combine_with(y, weights="recv", with_weights=True, **kwargs):
    """Trace a combine of y after a valid dispatch."""

    def layer(x, ids, topk_weights, y, *array):
        recv = ma.dispatch(x, ids, topk_weights if with_weights else None, **route_args())
        return ma.combine(y, recv, weights=array[0] if array else weights, **kwargs)

    extra = (weights,) if isinstance(weights, jax.ShapeDtypeStruct) else ()
    return layer, (X, IDS, WEIGHTS, y, *extra)


@pytest.mark.parametrize(
    "y, value",
    [
        (array((CAPACITY + 1, HIDDEN)), "11"),
        (array((TOKENS, HIDDEN)), "6"),
        (array(()), r"\[\]|\(\)|scalar"),
        (array((CAPACITY, HIDDEN), "int32"), "int32"),
        (array((CAPACITY, HIDDEN), "bool"), "bool"),
    ],
    ids=("rows_too_many", "tokens", "scalar", "int32", "bool"),
)
@pytest.mark.parametrize("weights", ("recv", None), ids=("weighted", "sum"))
def test_y_must_hold_a_float_row_for_each_row_of_capacity(y, value, weights):
    fn, args = combine_with(y, weights)
    assert_refuses(fn, *args, naming=(r"\by\b", value))


@pytest.mark.parametrize(
    "weights, value",
    [
        (array((CAPACITY + 1,)), r"11"),
        (array((CAPACITY, 1)), r"\[10,\s*1\]|\(10, 1\)"),
        (array((TOKENS, TOP_K)), r"\[6,\s*3\]|\(6, 3\)"),
        (array((CAPACITY,), "int32"), "int32"),
        ("mine", "mine"),
        (3.5, r"3\.5|float"),
    ],
    ids=("long", "two_axes", "of_choices", "integers", "string", "number"),
)
def test_row_weights_must_be_a_float_for_each_row(weights, value):
    fn, args = combine_with(Y, weights)
    assert_refuses(fn, *args, naming=("weights", value))


def test_a_tree_of_rows_takes_no_weights():
    fn, args = combine_with({"a": Y, "b": Y})
    assert_refuses(fn, *args, naming=("weights",))
    fn, args = combine_with({"a": Y, "b": Y}, weights=array((CAPACITY,)))
    assert_refuses(fn, *args, naming=("weights",))


@pytest.mark.parametrize(
    "add, naming",
    [
        (X, ()),
        (array((TOKENS + 1, HIDDEN), "bfloat16"), ("num_tokens=6", r"bfloat16\[7,5\]")),
        (
            array((TOKENS, HIDDEN + 1), "bfloat16"),
            (r"bfloat16\[6,5\]", r"bfloat16\[6,6\]", "shape"),
        ),
        (array((TOKENS, HIDDEN)), (r"bfloat16\[6,5\]", r"float32\[6,5\]", "cast")),
        (array((2, 3, HIDDEN), "bfloat16"), (r"bfloat16\[2,3,5\]", r"add.reshape\(-1, 5\)")),
        ({"a": X}, ("structure", r"'a'")),
    ],
    ids=("right", "tokens", "hidden", "dtype", "sequences", "structure"),
)
def test_an_addend_is_like_the_result_of_combine(add, naming):
    def combine(y, ids, add):
        return ma.combine(y, ma.route(ids, **route_args()), add=add)

    if naming:
        assert_refuses(combine, Y, IDS, add, naming=("^add must", "got", *naming))
    else:
        assert trace(combine, Y, IDS, add).shape == (RANKS, *X.shape)


def test_an_addend_that_is_no_array_is_refused():
    for add in ("residual", object(), 0.0):
        fn, args = combine_with(Y, add=add)
        assert_refuses(fn, *args, naming=("^add must hold arrays", "got"))


def test_replicated_tokens_have_no_addend():
    def combine(y, ids, add):
        return ma.combine(y, ma.route(ids, **route_args(replicated=True)), add=add)

    naming = (
        "^add must be None",
        "psum",
        "once for each rank",
        r"got bfloat16\[6,5\]",
        "Add it to",
    )
    assert_refuses(combine, Y, IDS, X, naming=naming)


def test_combine_needs_a_recv_or_a_routing():
    for recv in (None, "recv", 3):
        assert_refuses(lambda y, recv=recv: ma.combine(y, recv), Y, naming=("recv",))


def test_the_groups_axis_must_be_in_scope():
    """Outside shard_map and vmap there is no rank to exchange with; the message names the axis."""
    for group in (harness.emulated_group(RANKS), harness.group_of(harness.RANK_COUNTS[0])):
        with pytest.raises((ValueError, TypeError), match=harness.AXIS):
            ma.route(jnp.zeros((TOKENS, TOP_K), jnp.int32), **route_args(group=group))
        with pytest.raises((ValueError, TypeError), match=harness.AXIS):
            jax.eval_shape(lambda ids, g=group: ma.route(ids, **route_args(group=g)), IDS)
    other = ma.Group(axis_name="other", size=RANKS)
    assert_refuses(lambda ids: ma.route(ids, **route_args(group=other)), IDS, naming=("other",))


def test_the_group_must_have_the_size_of_its_axis():
    group = harness.emulated_group(4)
    assert_refuses(lambda ids: ma.route(ids, **route_args(group=group)), IDS, naming=("4", "2"))


@pytest.mark.several_devices("it needs meshes of two sizes")
@pytest.mark.skipif(
    not {2, 4} <= set(harness.RANK_COUNTS), reason="needs meshes of 2 and of 4 devices"
)
def test_the_group_must_match_the_mesh_in_scope():
    group = harness.group_of(4)
    spec = PartitionSpec(harness.AXIS)
    for mesh in (
        harness.mesh_of(2),  # another size
        Mesh(np.array(harness.devices(4)).reshape(2, 2), ("dp", harness.AXIS)),  # more axes
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
        (dict(axis_name=3, size=2), ("axis_name", "3")),
        (dict(axis_name=(), size=2), ("axis_name",)),
        (dict(axis_name=("ep", "ep"), size=4), ("axis_name", "ep")),
        (dict(axis_name="ep", size=2, num_sms=0), ("num_sms", "0")),
        (dict(axis_name="ep", size=2, num_sms={"dispatch": 0}), ("num_sms", "{'dispatch': 0}")),
        (dict(axis_name="ep", size=2, num_sms={"send": 8}), ("num_sms", "'dispatch'", "'send'")),
        (dict(axis_name="ep", size=2, timeout=0), ("timeout", "0")),
        (dict(axis_name="ep", size=2, timeout="long"), ("timeout", "long")),
        (dict(axis_name="ep", size=2, first_timeout=0), ("first_timeout", "0")),
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
    with pytest.raises((ValueError, TypeError)) as refusal:
        ma.Group(**kwargs)
    for pattern in naming:
        assert re.search(pattern, str(refusal.value)), f"no {pattern!r} in: {refusal.value}"


@pytest.mark.several_devices("its group has a mesh")
def test_a_group_must_name_axes_of_its_mesh():
    mesh = harness.mesh_of(harness.FEW)
    with pytest.raises((ValueError, TypeError), match="(?s)axis_name.*nowhere"):
        ma.Group(mesh, "nowhere")
    with pytest.raises((ValueError, TypeError), match="(?s)size.*7"):
        ma.Group(mesh, harness.AXIS, size=7)


def test_groups_of_equal_content_are_equal():
    """Programs compiled for one group serve an equal group. No field of a group can be changed."""
    for make in (
        lambda: harness.emulated_group(RANKS),
        lambda: harness.group_of(harness.FEW),
        lambda: ma.Group(axis_name=("a", "b"), size=4, timeout=1.0),
    ):
        assert make() == make()
        assert hash(make()) == hash(make())
        for name in ("timeout", "tiemout"):
            with pytest.raises((AttributeError, TypeError)):
                setattr(make(), name, 3.0)
    assert harness.emulated_group(2) != harness.emulated_group(4)
    assert harness.emulated_group(2) != ma.Group(axis_name=harness.AXIS, size=2, timeout=1.0)


SEQUENCES = (2, TOKENS // 2)  # [batch, sequence]


def mlp(x, ids, *, w_in=(2, HIDDEN, 3), w_out=(2, 3, HIDDEN)):
    options = dict(group=harness.emulated_group(RANKS), num_experts=EXPERTS)
    experts = ma.Experts(jnp.ones(w_in, x.dtype), jnp.ones(w_out, x.dtype), activation=jnp.tanh)
    return ma.moe_mlp(x, ma.RouterChoices(ids, None), experts, **options)


@pytest.mark.parametrize(
    "fn, args, remedy",
    [
        (lambda x, ids: ma.combine(x, ma.route(ids, **route_args())), (X, IDS), "recv.rows"),
        (
            lambda x, ids: ma.combine(ma.route(ids, **route_args()), x),
            (X, IDS),
            r"swapped: call combine\(y, recv\)",
        ),
        (
            lambda x, ids: ma.dispatch(x, ids, **route_args()),
            (X, array((*SEQUENCES, TOP_K), "int32")),
            r"topk_ids.reshape\(-1, 3\)",
        ),
        (
            lambda x, ids: ma.dispatch(x, ids, **route_args()),
            (array((*SEQUENCES, HIDDEN)), IDS),
            r"x.reshape\(-1, 5\)",
        ),
        (
            lambda x, ids, weights: ma.dispatch(x, ids, weights, **route_args()),
            (X, IDS, array((*SEQUENCES, TOP_K))),
            r"topk_weights.reshape\(-1, 3\)",
        ),
        (mlp, (array((TOKENS, 4, HIDDEN)), IDS), r"x.reshape\(-1, 5\)"),
        (
            functools.partial(mlp, w_in=(EXPERTS, HIDDEN, 3), w_out=(EXPERTS, 3, HIDDEN)),
            (X, IDS),
            r"P\('.*'\) for experts",
        ),
        (
            lambda rows, w, sizes: ma.grouped_dot(rows, w, sizes),
            (Y, array((EXPERTS, HIDDEN, 3), "bfloat16"), array((2,), "int32")),
            "experts of this rank only: split it with in_specs",
        ),
        (
            lambda x, ids: ma.dispatch(x, ids, **route_args(wire_dtype="bf16")),
            (X, IDS),
            "jnp.bfloat16 or 'bfloat16'.*got 'bf16'",
        ),
        (
            functools.partial(mlp, w_in=(EXPERTS // RANKS, HIDDEN, 6)),
            (X, IDS),
            r"side by side.*reshape",
        ),
        (
            lambda ids: ma.route(ids, **route_args(num_experts=5)),
            (IDS,),
            "4 or 6 experts, or 1 rank",
        ),
        (
            lambda ids: ma.route(ids, **route_args(capacity=LEFT_OUT, capacity_factor=-1)),
            (IDS,),
            "capacity_factor must be .* above 0; got -1. Omit capacity_factor to drop no row",
        ),
        (
            lambda: ma.load_balancing_loss(np.log([[0.5, 0.5]]), np.array([[0]])),
            (),
            r"scores must not be negative.*-0.693.*jax.nn.softmax\(logits\)",
        ),
        (lambda: ma.Group("ep"), (), r"mesh must be .*got 'ep'. Pass Group\(mesh, 'ep'\), or 'ep'"),
        (lambda: ma.Group(8, "ep"), (), "mesh must be .*got 8. Pass the result of jax.make_mesh"),
    ],
    ids=(
        *("tokens for rows", "swapped", "ids of sequences", "sequences", "weights of sequences"),
        *("sequences in a layer", "all experts", "all experts in a product"),
        *("wire dtype", "gate and up side by side", "5 experts", "factor of -1"),
        *("logits for scores", "name for a group", "size for a mesh"),
    ),
)
def test_an_error_that_a_beginner_meets_names_the_remedy(fn, args, remedy):
    assert_refuses(fn, *args, naming=(remedy,)) if args else assert_raises(fn, remedy)


def assert_raises(fn, remedy):
    with pytest.raises((ValueError, TypeError), match=remedy):
        fn()


@pytest.mark.several_devices("its meshes have several devices")
def test_an_error_of_a_whole_layer_names_the_remedy():
    mesh = harness.mesh_of(harness.FEW)
    config = ma.MoEConfig(HIDDEN, 3, 3 * harness.FEW + 1, ma.TopK(2))
    params = ma.init_moe(jax.random.key(0), config)
    layer = lambda: ma.moe(jnp.ones((TOKENS, HIDDEN)), **params, axes="ep")[0]
    inside = jax.shard_map(layer, mesh=mesh, in_specs=(), out_specs=PartitionSpec())
    assert_raises(inside, "got 'ep' inside a jax.shard_map.*call moe_mlp inside with group='ep'")
    with mesh:
        assert_raises(layer, r"only the mesh of `with mesh:`.*`with jax.set_mesh\(mesh\):`")
    with jax.set_mesh(mesh):
        assert_raises(layer, r"got 7. Use 6 or 8 experts, or 1 rank")
