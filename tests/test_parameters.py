"""Test that a layer's parameters are pytrees with readable paths and the sizes of a static
config."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma

pytestmark = pytest.mark.exchanges(0)
SIZES = dict(hidden=128, expert_hidden=128, num_experts=2, choose=ma.TopK(1))


def drawn(**options):
    config = ma.MoEConfig(**SIZES | options)
    return jax.eval_shape(lambda: ma.init_moe(jax.random.key(0), config))


def paths(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]


def test_a_config_says_the_shapes_and_dtypes_of_parameters():
    params = drawn(bias=True, shared_hidden=64, dtype=jnp.bfloat16, activation=jnp.tanh)
    shapes = {path: w.shape for path, w in zip(paths(params), jax.tree.leaves(params))}
    assert shapes == {
        "['experts'].w_in": (2, 128, 2, 128),
        "['experts'].w_out": (2, 128, 128),
        "['experts'].b_in": (2, 2, 128),
        "['experts'].b_out": (2, 128),
        "['router'].kernel": (128, 2),
        "['router'].bias": (2,),
        "['shared'].w_in": (128, 2, 64),
        "['shared'].w_out": (64, 128),
    }
    dtypes = {name: {w.dtype.name for w in jax.tree.leaves(own)} for name, own in params.items()}
    assert dtypes == dict(experts={"bfloat16"}, router={"float32"}, shared={"bfloat16"})
    assert params["experts"].activation is params["shared"].activation is jnp.tanh
    assert drawn(router_dtype=jnp.bfloat16)["router"].kernel.dtype == jnp.bfloat16
    assert params["shared"].output_gate is None and not params["experts"].weigh_input
    params = drawn(shared_hidden=64, shared_gate=True, weigh_input=True, dtype=jnp.bfloat16)
    assert params["shared"].output_gate.shape == (128,) and params["experts"].weigh_input
    with pytest.raises(ValueError, match="shared_gate must be False without .*shared_hidden"):
        drawn(shared_gate=True)
    with pytest.raises(TypeError, match=r"choose must be .*; got 2. Pass ma.TopK\(2\)"):
        ma.MoEConfig(128, 128, 2, 2)
    assert set(drawn()) == {"router", "experts"} and drawn()["experts"].b_in is None


def test_a_config_is_static():
    config = ma.MoEConfig(**SIZES, activation=ma.gated(jax.nn.gelu), dtype=jnp.bfloat16)
    same = ma.MoEConfig(
        128, 128, 2, ma.TopK(k=1), activation=ma.gated(jax.nn.gelu), dtype="bfloat16"
    )
    assert config == same and hash(config) == hash(same)
    assert config != dataclasses.replace(config, bias=True)
    assert hash(ma.TopK(np.int32(2))) == hash(ma.TopK(2)) and ma.TopK(2) == ma.TopK(k=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden = 4


@pytest.mark.parametrize("name", ("hidden", "expert_hidden", "num_experts", "shared_hidden"))
def test_sizes_are_positive_ints(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0"):
        drawn(**{name: 0})
    with pytest.raises(TypeError, match=f"{name} must be an int"):
        drawn(**{name: 2.0})


KINDS = {
    "floats": lambda experts: experts,
    "frozen": ma.quantize_experts,
    "transposed": lambda experts: ma.quantize_experts(experts, transposed=True),
    "trainable": lambda experts: ma.quantize_experts(experts, trainable=True),
    "in_fp8": ma.Experts.in_fp8,
}


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_fp8_are_pytrees_whose_specs_have_their_structure(kind):
    params = drawn(bias=True, shared_hidden=64)
    params["experts"] = jax.eval_shape(KINDS[kind], params["experts"])
    fields = {
        "floats": [""],
        "frozen": [".values", ".scales"],
        "transposed": [".values", ".scales", ".transposed"],
        "trainable": [".values", ".scales", ".transposed", ".source"],
        "in_fp8": [".source"],
    }[kind]
    weights = [f".{name}{field}" for name in ("w_in", "w_out") for field in fields]
    assert paths(params["experts"]) == [*weights, ".b_in", ".b_out"]
    for tensor, fsdp in itertools.product((None, "tensor"), (None, ("data", "more"), "data")):
        specs = ma.moe_partition_specs(params, ma.Axes("ep", tensor=tensor, fsdp=fsdp))
        assert jax.tree.structure(specs) == jax.tree.structure(params)
        # XLA's specs have no entries for undivided last axes.
        assert not [spec for spec in jax.tree.leaves(specs) if spec and spec[-1] is None]
    of_shape = {
        (2, 128, 2, 128): P("ep", "data", None, "tensor"),
        (2, 2, 128, 128): P("ep", None, "tensor", "data"),  # the last axis is K
        (2, 2, 1, 1): P("ep", None, "tensor", "data"),
    }
    for w, spec in zip(*map(jax.tree.leaves, (params["experts"].w_in, specs["experts"].w_in))):
        assert spec == of_shape[w.shape]


def test_whole_experts_are_quantized_like_each_array():
    experts = ma.Experts(
        *(jnp.asarray(w) for w in np.random.default_rng(0).normal(size=(2, 1, 128, 128)))
    )
    experts = experts.replace(b_out=jnp.ones((1, 128)), activation=jnp.tanh)
    for options in ({}, dict(transposed=True), dict(trainable=True)):
        of_arrays = (ma.quantize_experts(w, **options) for w in (experts.w_in, experts.w_out))
        expected = experts.replace(**dict(zip(("w_in", "w_out"), of_arrays)))
        found = ma.quantize_experts(experts, **options)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert experts.in_fp8().w_in.source is experts.w_in and experts.in_fp8().w_in.values is None


@pytest.mark.promotes("optax mixes numbers and arrays")
def test_an_optimizer_decays_the_weights_that_paths_name():
    config = ma.MoEConfig(4, 4, 2, ma.TopK(1), bias=True, shared_hidden=4)
    params = ma.init_moe(jax.random.key(0), config)
    is_decayed = lambda path, _: ".w_" in jax.tree_util.keystr(path)
    mask = jax.tree.map_with_path(is_decayed, params)
    optimizer = optax.adamw(1e-3, mask=mask)
    state = optimizer.init(params)
    updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
    found = optax.apply_updates(params, updates)
    assert jax.tree.structure(found) == jax.tree.structure(state[0].mu) == jax.tree.structure(mask)
    is_changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), found, params)
    assert jax.tree.leaves(is_changed) == jax.tree.leaves(mask)
