"""Test that tracing a call raises an error if a pytree was made for a different group, size or
form. No program runs."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)

TOKENS, TOP_K, EXPERTS, HIDDEN = 4, 2, 8, 128
AXES = ("host", "ep")


def group_of(hosts, ranks, axes=AXES, **options):
    return ma.Group(AbstractMesh((hosts, ranks), axes), axes, implementation="portable", **options)


def zeros(shapes):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def trace(fn, group):
    found = []

    def on_rank():
        found.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), fn()))

    no_specs = dict(in_specs=(), out_specs=PartitionSpec())
    jax.eval_shape(jax.shard_map(on_rank, mesh=group.mesh, check_vma=False, **no_specs))
    return found[0]


X, IDS = jnp.zeros((TOKENS, HIDDEN)), jnp.zeros((TOKENS, TOP_K), jnp.int32)
W_OUT = jnp.zeros((1, HIDDEN, HIDDEN))
OWN = ma.Experts(jnp.zeros((1, HIDDEN, 2, HIDDEN)), W_OUT)


def recv_of(group, experts=EXPERTS, split=False):
    def dispatched():
        options = dict(group=group, num_experts=experts)
        if split:
            return ma.dispatch_done(ma.dispatch_start(X, IDS, **options))
        return ma.dispatch(X, IDS, **options)

    return trace(dispatched, group)


def stacked(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), tree)


def raises(call, group, *patterns):
    with pytest.raises((TypeError, ValueError)) as error:
        trace(call, group)
    for pattern in patterns:
        assert re.search(pattern, str(error.value)), f"no {pattern!r} in: {error.value}"


def unweighted(ids):
    return ma.RouterChoices(ids, None)


FLAT, TWO_LEVEL = group_of(2, 4, two_level=False), group_of(2, 4, two_level=True)
USES = {
    "dispatch": lambda recv: ma.dispatch(X, recv.routing),
    "dispatch_start": lambda recv: ma.dispatch_done(ma.dispatch_start(X, recv.routing)),
    "combine": lambda recv: ma.combine(recv.rows, recv),
    "combine_start": lambda recv: ma.combine_done(ma.combine_start(recv.rows, recv)),
    "moe_mlp": lambda recv: ma.moe_mlp(X, unweighted(recv.routing), OWN),
    "expert_load": ma.expert_load,
}
FITTING = {
    "flat": (recv_of(FLAT), FLAT),
    "two levels": (recv_of(TWO_LEVEL), TWO_LEVEL),
    "split": (recv_of(FLAT, split=True), FLAT),
}
OTHERS = {
    "4 ranks": recv_of(group_of(2, 2, two_level=False)),
    "4 ranks in two levels": recv_of(group_of(2, 2, two_level=True)),
    "4 hosts": recv_of(group_of(4, 2, two_level=True)),
    "other axes": recv_of(group_of(2, 4, ("data", "model"), two_level=False)),
    "all ranks": stacked(recv_of(FLAT)),
    "all ranks of two levels": stacked(recv_of(TWO_LEVEL)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_routing_of_another_group_is_refused_by_each_call(use):
    for recv, group in FITTING.values():
        trace(lambda recv=recv: use(zeros(recv)), group)
    for recv in OTHERS.values():
        raises(lambda recv=recv: use(zeros(recv)), FLAT, "group|recv|topk_ids", "; got", r"\. ")


DAMAGES = {
    "float32": lambda a: a.astype(jnp.float32),
    "uint32": lambda a: a.astype(jnp.uint32),
    "shorter": lambda a: a[..., :-1] if a.ndim else a[None],
    "longer": lambda a: jnp.concatenate([a, a]) if a.ndim else jnp.stack([a, a]),
    "more_axes": lambda a: a[..., None],
    "scalar": lambda a: a.ravel()[0] if a.ndim else a[None],
}
ARRAYS = (
    *("token_slot", "slot_token", "choice_rank", "slot_rows"),
    *("row_rank", "row_slot", "row_k", "row_token"),
    *("group_sizes", "num_rows", "num_dropped", "num_invalid", "topk_ids"),
)
LEVEL_ARRAYS = (
    *(f"{level}.{name}" for level in ("hosts", "ranks") for name in ARRAYS[:7]),
    *("row_rank", "row_token", "group_sizes", "num_rows", "num_dropped", "num_invalid", "topk_ids"),
)


def replaced(routing, name, damage):
    """Return the routing with its array `name` (or `level.array`) replaced by `damage(array)`."""
    level, _, array = name.rpartition(".")
    if not level:
        return dataclasses.replace(routing, **{name: damage(getattr(routing, name))})
    arrays = getattr(routing, level)
    arrays = arrays._replace(**{array: damage(getattr(arrays, array))})
    return dataclasses.replace(routing, **{level: arrays})


def assert_all_damages_are_refused(name, group):
    """The kernels would read outside of an array that has a wrong dtype or shape."""
    recv = recv_of(group)

    def layer():
        rows, routing = zeros(recv.rows), zeros(recv.routing)
        for damage in DAMAGES.values():
            damaged = replaced(routing, name, damage)
            for use, argument in (
                (lambda: ma.dispatch(X, damaged), "topk_ids"),
                (lambda: ma.combine(rows, damaged), "recv"),
            ):
                with pytest.raises(TypeError) as refusal:
                    use()
                message = str(refusal.value)
                for pattern in (rf"^{argument} must", re.escape(name), "int32", "; got "):
                    assert re.search(pattern, message), f"no {pattern!r} in: {message}"
        return X

    trace(layer, group)


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_another_dtype_or_shape_is_refused_by_its_name(name):
    assert_all_damages_are_refused(name, FLAT)


@pytest.mark.parametrize("name", LEVEL_ARRAYS)
def test_an_array_of_a_level_is_refused_by_its_name(name):
    assert_all_damages_are_refused(name, TWO_LEVEL)


def test_a_routing_of_numpy_arrays_is_accepted():
    """The arrays of a restored checkpoint are numpy arrays."""
    recv = recv_of(FLAT)
    routing = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), recv.routing)
    assert trace(lambda: ma.dispatch(X, routing).rows, FLAT).shape == recv.rows.shape


def plan(experts=EXPERTS, **options):
    return ma.plan_placement(np.arange(experts), **dict(num_ranks=8, spare=1) | options)


SLOTS = 2 * EXPERTS
OF_EXPERTS, OF_SLOTS = recv_of(FLAT), recv_of(FLAT, SLOTS)
HOME, SERVING = plan(), plan(home=False)
WRONG_PLANS = {
    "4 ranks": (plan(num_ranks=4, spare=2), "8 experts on 8 ranks; got one with 8 .*on 4"),
    "2 ranks": (plan(num_ranks=2, spare=4), "8 experts on 8 ranks; got one with 8 .*on 2"),
    "one rank": (plan(num_ranks=1, spare=8), "8 experts on 8 ranks; got one with 8 .*on 1"),
    "layers": (jax.tree.map(lambda x: x[None], HOME), "placement of one layer"),
    "a table": (HOME.slot_experts, "must be a Placement"),
}


def mlp(placement, ids=IDS, experts=OWN, group=FLAT, num_experts=EXPERTS, **options):
    options |= dict(group=group, num_experts=num_experts, placement=placement)
    return ma.moe_mlp(X, unweighted(ids), experts, **options)


def routed(placement, recv=OF_SLOTS):
    return mlp(placement, zeros(recv.routing), group=None, num_experts=None)


PLACED = {
    "choose_slots": lambda plan: ma.choose_slots(IDS, plan, rank=0, num_ranks=8),
    "fetch_experts": lambda plan: ma.fetch_experts(W_OUT, plan, group=FLAT),
    "moe_mlp": mlp,
    "moe_mlp in chunks": lambda plan: mlp(plan, exchange=ma.Exchange(num_chunks=2)),
    "moe_mlp of a Routing": routed,
    "expert_load": lambda plan: ma.expert_load(zeros(OF_SLOTS), placement=plan),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_placement_for_other_ranks_is_refused_also_if_its_arrays_are_traced(name):
    use = PLACED[name]
    for known in (True, False):
        of = (lambda plan: plan) if known else zeros  # zeros() returns a tracer
        trace(lambda: use(of(HOME)), FLAT)
        for placement, message in WRONG_PLANS.values():
            raises(lambda placement=placement: use(of(placement)), FLAT, "placement", message)


def test_a_placement_that_moves_home_experts_needs_the_weights_of_all_slots():
    names = "fetch_experts", "moe_mlp", "moe_mlp in chunks", "moe_mlp of a Routing"
    for name in names:
        message = "placement must have the home form.*home=True"
        raises(lambda name=name: PLACED[name](zeros(SERVING)), FLAT, message)
    of_slots = jax.tree.map(lambda w: jnp.concatenate([w, w]), OWN)
    for placement in (HOME, SERVING):
        trace(lambda placement=placement: mlp(zeros(placement), experts=of_slots), FLAT)


def test_a_placement_of_other_experts_is_refused():
    other = plan(16, spare=0)  # it has equally many slots
    raises(lambda: mlp(zeros(other)), FLAT, "num_experts must be 16")
    raises(lambda: routed(HOME, OF_EXPERTS), FLAT, "Routing of the 16 slots.*one of 8 experts")
    load = lambda: ma.expert_load(zeros(OF_EXPERTS), placement=HOME)
    raises(load, FLAT, "must have the 8 slots.*got 16")


def test_moe_refuses_each_wrong_plan_as_an_argument_of_jit():
    mesh = jax.make_mesh((1,), ("ep",))
    params = ma.init_moe(jax.random.key(0), ma.MoEConfig(8, 4, EXPERTS, ma.TopK(2)))
    layer = lambda plan: ma.moe(jnp.zeros((2, 8)), **params, axes="ep", placement=plan)
    of_one = plan(num_ranks=1, spare=2)
    with jax.set_mesh(mesh):
        jax.eval_shape(layer, of_one)
        for wrong in (HOME, plan(num_ranks=2), plan(16, num_ranks=1, spare=2)):
            with pytest.raises(ValueError, match="placement must have 8 experts on 1 ranks"):
                jax.eval_shape(layer, wrong)
        with pytest.raises(ValueError, match="home form"):
            jax.eval_shape(layer, plan(num_ranks=1, spare=2, home=False))


def test_transforms_may_put_any_objects_into_a_placement():
    leaves, treedef = jax.tree.flatten(HOME)
    assert len(leaves) == 4
    assert jax.tree.unflatten(treedef, [object()] * 4).num_ranks == 8
    assert jax.tree.structure(SERVING) != treedef
    assert jax.tree.structure(plan(num_ranks=4, spare=2)) != treedef
    layers = ma.plan_placement(np.arange(16).reshape(2, 8), num_ranks=8, spare=1)
    assert jax.tree.structure(layers) == treedef
    sums = jax.vmap(lambda plan: plan.num_replicas.sum())(layers)
    assert jax.lax.map(lambda plan: plan.num_replicas.sum(), layers).tolist() == sums.tolist()


def quantized(w, **options):
    return jax.eval_shape(lambda: ma.quantize_experts(w, **options))


def test_quantized_weights_of_another_form_are_refused():
    frozen, both = quantized(OWN), quantized(OWN, transposed=True)
    trained, plain = quantized(OWN, trainable=True), quantized(W_OUT)
    for experts in (frozen, both, trained):
        trace(lambda experts=experts: mlp(None, experts=zeros(experts)), FLAT)
    dot = lambda w: ma.grouped_dot(X, w, jnp.zeros(1, jnp.int32))
    two = quantized(jnp.concatenate([W_OUT, W_OUT]))
    for w in (frozen.w_in, two, stacked(plain)):
        raises(lambda w=w: dot(zeros(w)), FLAT, r"\bw\b|group_sizes", "; got")
    stored = ma.QuantizedExperts(both.w_in.transposed, both.w_in.scales)  # [L, K, 2, I]
    other = dict(values=plain.values, scales=plain.scales, transposed=OWN.w_in, source=W_OUT)
    others = [dataclasses.replace(trained.w_in, **{name: a}) for name, a in other.items()]
    refused = {"w_in": [frozen.replace(w_in=w) for w in (stored, two, stacked(frozen.w_in))]}
    refused["w_in"] += [trained.replace(w_in=w) for w in (*others, OWN.w_in)]
    refused["w_out"] = [frozen.replace(w_out=W_OUT), trained.replace(w_out=plain)]
    for name, wrong in refused.items():
        for experts in wrong:
            call = lambda experts=experts: mlp(None, experts=zeros(experts))
            raises(call, FLAT, f"experts.{name}", "; got")
    raises(lambda: mlp(HOME, experts=zeros(trained)), FLAT, "not be quantized .* placement")


@pytest.mark.parametrize("fmt", (ma.MxFp8(), ma.NvFp4()))
def test_rows_in_another_format_are_refused_by_products_in_fp8(fmt):
    rows = jax.eval_shape(lambda: fmt.encode(X))
    w = quantized(W_OUT)
    product = lambda rows: ma.grouped_dot(zeros(rows), zeros(w), jnp.zeros(1, jnp.int32))
    trace(lambda: product(jax.eval_shape(lambda: ma.BlockwiseFp8().encode(X))), FLAT)
    raises(lambda: product(rows), FLAT, "rows", "; got")
