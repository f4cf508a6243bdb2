"""Activations are recognized, however a user writes them."""

import contextlib
import functools
import math

import harness  # noqa: F401  # chooses the devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jax_moe_a2a as ma
from jax_moe_a2a._src.experts.activations import FusedActivation, recognize

pytestmark = [pytest.mark.one_process("it traces functions"), pytest.mark.exchanges(0)]


partial = functools.partial
SPELLINGS = {
    "silu": dict(
        jax_silu=jax.nn.silu,
        jax_swish=jax.nn.swish,
        sigmoid=lambda x: x * jax.nn.sigmoid(x),
        logistic=lambda x: lax.logistic(x) * x,
        jit=jax.jit(jax.nn.silu),
        checkpoint_free_float32=lambda x: jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype),
    ),
    "gelu_tanh": dict(
        jax_gelu=jax.nn.gelu,
        approximate=partial(jax.nn.gelu, approximate=True),
        by_hand=lambda x: (
            0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi).item() * (x + 0.044715 * x**3)))
        ),
    ),
    "gelu": dict(
        exact=partial(jax.nn.gelu, approximate=False),
        in_a_lambda=lambda x: jax.nn.gelu(x, approximate=False),
        by_hand=lambda x: 0.5 * x * (1 + lax.erf(x / math.sqrt(2))),
    ),
    "relu": dict(
        jax_relu=jax.nn.relu,
        maximum=lambda x: jnp.maximum(x, 0),
        maximum_of_float=lambda x: jnp.maximum(0.0, x),
        where=lambda x: jnp.where(x > 0, x, 0),
        max=lambda x: lax.max(x, jnp.zeros_like(x)),
    ),
    "squared_relu": dict(
        square=lambda x: jnp.square(jax.nn.relu(x)),
        power=lambda x: jax.nn.relu(x) ** 2,
        product=lambda x: jax.nn.relu(x) * jax.nn.relu(x),
        of_maximum=lambda x: jnp.square(jnp.maximum(x, 0)),
    ),
}


@pytest.mark.promotes("users' functions mix numbers and arrays")
@pytest.mark.parametrize(
    ("kind", "spelling"), [(kind, name) for kind, names in SPELLINGS.items() for name in names]
)
def test_each_spelling_is_recognized(kind, spelling):
    activation = SPELLINGS[kind][spelling]
    for dtype in ("bfloat16", "float32"):
        rows = jax.ShapeDtypeStruct((7, 12), jnp.dtype(dtype))
        assert recognize(activation, rows) == FusedActivation(kind)
        assert recognize(ma.gated(activation), rows) == FusedActivation(kind, gated=True)


def test_the_first_half_is_the_gate():
    gate_and_up = jnp.array([[1.0, -2.0, 10.0, 20.0]])
    for activation in (ma.gated(jax.nn.relu), FusedActivation("relu", gated=True)):
        assert activation(gate_and_up).tolist() == [[10, 0]]
    with pytest.raises(ValueError, match=r"gate and up side by side; got float32\[1,3\]"):
        ma.gated(jax.nn.relu)(gate_and_up[:, :3])


def by_split(act):
    def gated(x):
        gate, up = jnp.split(x, 2, axis=-1)
        return act(gate) * up

    return gated


def by_slices(act):
    def gated(x):
        half = x.shape[-1] // 2
        return x[..., half:] * act(x[..., :half])

    return gated


def in_float32(act):
    return lambda x: by_slices(act)(x.astype(jnp.float32)).astype(x.dtype)


def halves_in_float32(act):
    def gated(x):
        gate, up = (half.astype(jnp.float32) for half in jnp.split(x, 2, axis=-1))
        return (act(gate) * up).astype(x.dtype)

    return gated


@pytest.mark.promotes("users' functions mix numbers and arrays")
@pytest.mark.parametrize("kind", SPELLINGS)
@pytest.mark.parametrize("gate_by", (by_split, by_slices, in_float32, halves_in_float32))
def test_a_function_that_divides_its_argument_is_gated(kind, gate_by):
    for name, activation in SPELLINGS[kind].items():
        for dtype in ("bfloat16", "float32"):
            rows = jax.ShapeDtypeStruct((7, 12), jnp.dtype(dtype))
            found = recognize(gate_by(activation), rows)
            assert found == FusedActivation(kind, gated=True), (name, dtype)


@pytest.mark.parametrize(
    "activation",
    (
        lambda x: jax.nn.silu(x[..., ::2]) * x[..., 1::2],
        lambda x: jax.nn.silu(x[..., 6:]) * x[..., :6],
        lambda x: jax.nn.silu(x[..., :6]) * x[..., 5:11],
        lambda x: jax.nn.silu(x[..., :6]) * x[..., :6],
        lambda x: jax.nn.silu(x[..., :6]) + x[..., 6:],
        lambda x: jax.nn.silu(x[..., :6]) * x[..., 6:] * 2,
        lambda x: jax.nn.silu(x[..., :6]),
        lambda x: jax.nn.silu(x.reshape(7, 6, 2)[..., 0]) * x[..., 6:],
    ),
)
def test_other_divisions_are_not_recognized(activation):
    assert recognize(activation, jax.ShapeDtypeStruct((7, 12), jnp.dtype("float32"))) is None


@pytest.mark.promotes("a user's function mixes numbers and arrays")
def test_each_mesh_has_its_own_programs():
    """Broadcasts contain the mesh around a call, so an activation may first be seen in one mesh and
    then in another."""
    rows = jax.ShapeDtypeStruct((7, 12), jnp.dtype("bfloat16"))
    meshes = [jax.sharding.AbstractMesh((2,), ("x",), (kind,)) for kind in AxisType]
    for mesh in (None, *meshes, None):
        with jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
            for activation in (jax.nn.relu, SPELLINGS["relu"]["where"], SPELLINGS["relu"]["max"]):
                assert recognize(activation, rows) == FusedActivation("relu"), mesh


def test_the_activation_of_gpt_oss_is_a_value():
    rows = jax.ShapeDtypeStruct((7, 12), jnp.dtype("bfloat16"))
    act = ma.clamped_swiglu(limit=5, alpha=1.5)
    assert recognize(act, rows) is act and act == ma.clamped_swiglu(5.0, 1.5)
    x = jnp.array([[9.0, -9.0, 2.0, 9.0, -9.0, 0.5]])
    gate, up = np.array([5.0, -9.0, 2.0]), np.array([5.0, -5.0, 0.5])
    np.testing.assert_allclose(act(x)[0], gate / (1 + np.exp(-1.5 * gate)) * (up + 1), rtol=1e-5)
    with pytest.raises(ValueError, match="limit must be a finite number above 0; got -1"):
        ma.clamped_swiglu(limit=-1)
    with pytest.raises(ValueError, match="gate and up side by side"):
        act(jnp.ones((2, 3)))


@jax.custom_jvp
def with_own_derivative(x):
    return jax.nn.relu(x)


with_own_derivative.defjvp(lambda x, dx: (jax.nn.relu(*x), jnp.where(x[0] > 0, 1, 0.1) * dx[0]))


@jax.custom_vjp
def with_own_transpose(x):
    return jax.nn.relu(x)


with_own_transpose.defvjp(lambda x: (jax.nn.relu(x), x), lambda x, ct: (ct,))


@pytest.mark.promotes("users' functions mix numbers and arrays")
@pytest.mark.parametrize(
    "activation",
    (
        jnp.tanh,
        jax.nn.leaky_relu,
        lambda x: x * jax.nn.sigmoid(1.702 * x),  # quick_gelu
        lambda x: jnp.square(x),
        lambda x: jax.nn.silu(x) * jnp.arange(6.0),
        lambda x: jax.nn.silu(x[:, ::-1]),
        lambda x: jax.nn.silu(x) if x.shape[0] < 5 else jnp.tanh(x),
        lambda x: [x],
        with_own_derivative,
        with_own_transpose,
        None,
    ),
)
def test_other_functions_are_not_recognized(activation):
    rows = jax.ShapeDtypeStruct((7, 6), jnp.dtype("float32"))
    assert recognize(activation, rows) is None
    assert recognize(ma.gated(activation), jax.ShapeDtypeStruct((7, 12), rows.dtype)) is None


def test_functions_of_traced_arrays_are_not_recognized():
    rows = jax.ShapeDtypeStruct((7, 6), jnp.dtype("float32"))

    def outer(slope):
        assert recognize(lambda x: jax.nn.silu(x * slope), rows) is None
        assert recognize(jax.nn.silu, rows) is not None
        return slope

    jax.jit(outer)(1.0)
    jax.vmap(outer)(jnp.ones(3))
    jax.grad(outer)(1.0)


LISTED = {kind: next(iter(spellings.values())) for kind, spellings in SPELLINGS.items()}


@pytest.mark.several_devices("types vary over a mesh axis only if it has several devices")
@pytest.mark.parametrize(
    "name", ("gated silu", "gelu", "gated gelu_tanh", "gated squared_relu", "clamped_swiglu")
)
def test_every_listed_activation_has_gradients_in_a_layer(name):
    """JAX 0.12.0.1 refuses its derivatives of erf and erfc in a shard_map that checks types."""
    kind, is_gated = name.removeprefix("gated "), " " in name or name == "clamped_swiglu"
    act = ma.clamped_swiglu() if name == "clamped_swiglu" else LISTED[kind]
    act = ma.gated(act) if " " in name else act

    def loss(params, x):
        if in_fp8:
            params = params | dict(experts=params["experts"].in_fp8())
        return ma.moe(x, **params, axes="ep")[0].sum()

    with jax.set_mesh(harness.mesh_of(2)):
        for size, in_fp8 in ((8, False), (128, True)):
            config = ma.MoEConfig(size, size, 2, ma.TopK(1), shared_hidden=size)
            params = ma.init_moe(jax.random.key(0), config)
            for part in ("experts", "shared"):
                w_in = params[part].w_in if is_gated else params[part].w_in[..., 0, :]
                params[part] = params[part].replace(w_in=w_in, activation=act)
            gradient = jax.grad(loss)
            if not in_fp8:  # the second derivative
                first = gradient
                gradient = jax.grad(lambda p, x: first(p, x)["experts"].w_out.sum())
            jax.make_jaxpr(gradient)(params, jnp.ones((4, size)))


@pytest.mark.parametrize("order", (0, 1, 2, 3))
def test_derivatives_of_the_exact_gelu_are_those_of_jax(order):
    own, of_jax = FusedActivation("gelu"), functools.partial(jax.nn.gelu, approximate=False)
    for _ in range(order):
        own, of_jax = (jax.grad(lambda x, f=f: f(x).sum()) for f in (own, of_jax))
    x = jnp.linspace(-9, 9, 181)
    np.testing.assert_allclose(own(x), of_jax(x), rtol=1e-5, atol=1e-7)
