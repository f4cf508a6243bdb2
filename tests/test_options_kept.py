"""Test that all exchanges of a dispatch, forward and backward, get each static option of the
dispatch."""

import collections
import functools
import sys
import types

import cases
import harness
import jax
import jax.numpy as jnp
import pytest
import small_layer
from dense_layer import experts_of
from jax.sharding import PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange import arguments, record
from jax_moe_a2a._src.exchange.dispatch_combine import DISPATCH

pytestmark = [
    pytest.mark.several_devices("it traces for the devices of a mesh"),
    pytest.mark.one_process("each process would do the same"),
    pytest.mark.exchanges(0),
]

RANKS, TOKENS, TOP_K, HIDDEN, WIDTH, LOCAL = 4, 8, 2, 128, 128, 2
EXPERTS = RANKS * LOCAL
LAYOUT = cases.Layout("kept", TOKENS, TOP_K, LOCAL, hidden=HIDDEN)
MEANT = ("wire_dtype", "token_format", "decode", "tail", "keeps_encoded",
         "has_token_scales", "num_addends")  # fmt: skip
WIRE, FORMAT = jnp.dtype("float16"), ma.BlockwiseFp8()


@pytest.fixture(autouse=True)
def sentinels(monkeypatch):
    """Add the option `made_up`, set all options that are not in MEANT to sentinels, and return a
    dict of the sentinels."""
    old = record.Options
    defaults = [*old._field_defaults.values(), None]
    new = collections.namedtuple("Options", [*old._fields, "made_up"], defaults=defaults)
    new.__annotations__ = dict.fromkeys(new._fields, object)
    for name, value in vars(old).items():
        if isinstance(value, property | types.FunctionType) and not hasattr(new, name):
            setattr(new, name, value)
    for name, module in list(sys.modules.items()):
        if name.startswith("jax_moe_a2a.") and getattr(module, "Options", None) is old:
            monkeypatch.setattr(module, "Options", new)
    found = {name: f"the option {name}" for name in new._fields if name not in MEANT}
    check_options = arguments.check_options
    monkeypatch.setattr(
        arguments, "check_options", lambda *args: check_options(*args)._replace(**found)
    )
    return found


def group_of(two_level):
    if two_level:
        mesh = harness.mesh_over(host=2, ep=RANKS // 2)
        return ma.Group(mesh, mesh.axis_names, two_level=True)
    return ma.Group(harness.mesh_of(RANKS), harness.AXIS)


def dispatch(x, ids, weights, *_, by, group, num_experts, **options):
    dispatch = functools.partial(small_layer.DISPATCHES[by], tail="unspecified", **options)
    return dispatch(x, ids, weights, group, LAYOUT).rows


def layer(x, ids, weights, *arrays, in_fp8=False, **options):
    options.pop("decode", None)
    experts = experts_of(*arrays)
    experts = experts.in_fp8() if in_fp8 else experts
    return ma.moe_mlp(x, ma.RouterChoices(ids, weights), experts, **harness.exchanging(options))


DISPATCHES = {by: functools.partial(dispatch, by=by) for by in small_layer.DISPATCHES}
QUANTIZED = dict(token_format=FORMAT, decode=True)
FORMS = {
    f"{name}{', two levels' * two_level}{', format' * bool(options)}": (fn, two_level, options)
    for name, fn in (DISPATCHES | dict(layer=layer)).items()
    for two_level in (False, True)
    for options in ({}, QUANTIZED)
}
FORMS["layer, chunks"] = functools.partial(layer, num_chunks=2), False, {}
FORMS["layer, chunks, format"] = functools.partial(layer, num_chunks=2), False, QUANTIZED
FORMS["layer in FP8"] = functools.partial(layer, in_fp8=True), False, {}


def exchanges(jaxpr):
    """Yield a jaxpr's equations of exchanges, except the exchange of ids of a two-level group."""
    for eqn in harness.equations(jaxpr):
        of_ids = eqn.primitive is DISPATCH.primitive and eqn.invars[0].aval.dtype == jnp.int32
        if "options" in eqn.params and not of_ids:
            yield eqn


@pytest.mark.parametrize("form", FORMS)
def test_every_option_reaches_every_exchange(form, sentinels):
    fn, two_level, options = FORMS[form]
    group = group_of(two_level)
    options = dict(options, group=group, num_experts=EXPERTS, wire_dtype=WIRE)
    spec = PartitionSpec(group.axes)

    def gradient(x, ids, *others):
        of = lambda x, *others: fn(x, ids, *others, **options)
        rows, transpose = jax.vjp(of, x, *others)
        return transpose(rows)

    shapes = ((TOKENS, HIDDEN), (TOKENS, TOP_K), (TOKENS, TOP_K))
    shapes += ((LOCAL, HIDDEN, 2 * WIDTH), (LOCAL, WIDTH, HIDDEN))
    dtypes = ("bfloat16", "int32", "float32", "bfloat16", "bfloat16")
    args = [
        jax.ShapeDtypeStruct((RANKS * first, *shape), dtype)
        for (first, *shape), dtype in zip(shapes, dtypes)
    ]
    mapped = jax.shard_map(gradient, mesh=group.mesh, in_specs=spec, out_specs=spec)
    found = list(exchanges(jax.make_jaxpr(mapped)(*args).jaxpr))
    outward = [eqn for eqn in found if "dispatch" in eqn.primitive.name]
    inward = [eqn for eqn in found if "combine" in eqn.primitive.name]
    assert outward and inward and len(outward) + len(inward) == len(found)
    for eqn in found:
        for name, value in sentinels.items():
            assert getattr(eqn.params["options"], name) == value, eqn.primitive
    for eqn in outward:
        assert eqn.params["options"].tail == "unspecified", eqn.primitive
    # Router weights are not summed, so their exchanges have no wire dtype.
    wires = [eqn.params["options"].wire_dtype for eqn in inward if eqn.params["num_leaves"]]
    assert set(wires) == {WIRE}
    formats = [eqn.params["options"].token_format for eqn in outward]
    if "format" in form or "FP8" in form:
        by_exchange = "two levels" not in form and "halves" not in form
        assert (FORMAT in formats) == by_exchange
        if by_exchange:
            assert any(eqn.params["options"].decode for eqn in outward)
    else:
        assert set(formats) == {None}


def test_derived_options_keep_what_they_do_not_name(sentinels):
    options = record.Options(WIRE, FORMAT, True, "unspecified", True, True, **sentinels)
    kept = options.unencoded
    quantizing = dict(token_format=None, decode=False, keeps_encoded=False, has_token_scales=False)
    assert kept == options._replace(**quantizing)
