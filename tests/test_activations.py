"""Test which activation functions the kernels compute, and the derivatives of these functions."""

import functools

import harness  # noqa: F401  # chooses the devices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jax_moe_a2a as ma
from jax_moe_a2a._src.experts.activations import FusedActivation, recognize

pytestmark = [pytest.mark.one_process("it traces functions"), pytest.mark.exchanges(0)]


FUNCTIONS = {
    "silu": (jax.nn.silu, jax.nn.swish, linen.swish, nnx.silu),
    "gelu_tanh": (
        jax.nn.gelu,
        nnx.gelu,
        functools.partial(jax.nn.gelu, approximate=True),
    ),
    "gelu": (functools.partial(jax.nn.gelu, approximate=False),),
    "relu": (jax.nn.relu, linen.relu),
    "squared_relu": (ma.squared_relu,),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_kernels_compute_functions_of_jax_and_flax(kind):
    for function in FUNCTIONS[kind]:
        assert recognize(function) == FusedActivation(kind)
        assert recognize(ma.gated(function)) == FusedActivation(kind, gated=True)


def test_the_first_half_is_the_gate():
    gate_and_up = jnp.array([[1.0, -2.0, 10.0, 20.0]])
    for activation in (ma.gated(jax.nn.relu), FusedActivation("relu", gated=True)):
        assert activation(gate_and_up).tolist() == [[10, 0]]
    with pytest.raises(ValueError, match=r"gate and up side by side; got float32\[1,3\]"):
        ma.gated(jax.nn.relu)(gate_and_up[:, :3])


def test_clamped_swiglu_is_comparable_and_equals_its_formula():
    act = ma.clamped_swiglu(limit=5, alpha=1.5)
    assert recognize(act) is act and act == ma.clamped_swiglu(5.0, 1.5)
    x = jnp.array([[9.0, -9.0, 2.0, 9.0, -9.0, 0.5]])
    gate, up = np.array([5.0, -9.0, 2.0]), np.array([5.0, -5.0, 0.5])
    np.testing.assert_allclose(act(x)[0], gate / (1 + np.exp(-1.5 * gate)) * (up + 1), rtol=1e-5)
    with pytest.raises(ValueError, match="limit must be a finite number above 0; got -1"):
        ma.clamped_swiglu(limit=-1)
    with pytest.raises(ValueError, match="gate and up side by side"):
        act(jnp.ones((2, 3)))


@pytest.mark.parametrize(
    "function",
    (
        jnp.tanh,
        jax.nn.leaky_relu,
        lambda x: jax.nn.silu(x),
        functools.partial(jax.nn.gelu, approximate=False, other=1),
        functools.partial(jax.nn.leaky_relu, negative_slope=0.1),
        [],
        None,
    ),
)
def test_no_kernel_computes_other_functions(function):
    assert recognize(function) is None
    assert recognize(ma.gated(function)) is None


LISTED = {kind: functions[0] for kind, functions in FUNCTIONS.items()}


@pytest.mark.several_devices("types vary over a mesh axis only if it has several devices")
@pytest.mark.parametrize(
    "name", ("gated silu", "gelu", "gated gelu_tanh", "gated squared_relu", "clamped_swiglu")
)
def test_every_listed_activation_has_gradients_in_a_layer(name):
    """The layers must trace, although JAX 0.12.0.1 cannot trace derivatives of `jax.lax.erf` in a
    shard_map with check_vma."""
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
            if not in_fp8:
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
