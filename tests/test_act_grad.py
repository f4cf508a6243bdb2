"""Compare `act_grad`, which computes gradients of activations and encodes them to FP8, with
float64."""

import functools

import format_oracle
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import calls
from test_act_encode import (
    BLOCK,
    CASES,
    FMT,
    GATED,
    PATHS,
    assert_batch_is_its_elements,
    assert_same_bits,
    both_dtypes,
    draw,
    on_path,
    without_nan,
)
from test_experts import CLAMPED, PLAIN, SWIGLU, name_of

from jax_moe_a2a._src.experts import act_grad
from jax_moe_a2a._src.experts.act_grad import bind_act_grad
from jax_moe_a2a._src.experts.activations import KINDS, FusedActivation

pytestmark = [
    pytest.mark.one_process("each process would compute the same on its own devices"),
    pytest.mark.exchanges(0),
]
WHY_NO_ACT_GRAD = act_grad.why_no_act_encode


def operands(case, activation, dtype):
    """Return ct_h, pre, weights and sizes; rows without a token are NaN and have weight 0."""
    pre, weights, sizes = draw(case, activation, dtype)
    rng = np.random.default_rng(len(pre) + 1)
    ct = rng.normal(size=(len(pre), CASES[case][1])) * 2.0 ** rng.integers(-9, 9, (len(pre), 1))
    ct[3::7] = np.nan
    return ct.astype(pre.dtype), pre, weights, sizes


def run(*args, activation, num_sms=None):
    fn = functools.partial(bind_act_grad, activation=activation, num_sms=num_sms)
    return harness.numpy_of(tuple(jax.tree.leaves(jax.jit(fn)(*map(jnp.asarray, args)))))


@pytest.fixture(scope="module", params=PATHS)
def path(request):
    with on_path(request.param, act_grad) as name:
        yield name


def exact(ct, pre, weights, activation):
    """Return ct_pre, h and ct_weights in float64, and the magnitudes to which their errors are
    relative."""
    x, ct = (array.astype(np.float64) for array in (pre, ct))
    with jax.enable_x64(True):
        act, transpose = jax.vjp(activation, jnp.asarray(x))
        act, slopes = map(np.asarray, (act, transpose(jnp.ones_like(act))[0]))
    gate, up = np.split(x, 2, axis=1) if activation.gated else (x, np.zeros_like(x))
    wide = np.concatenate([ct, ct], axis=1) if activation.gated else ct
    scale = weights.astype(np.float64)[:, None]
    power = 2 if activation.kind == "squared_relu" else 1
    near = np.abs(gate) ** power  # no term of the activation is larger
    near_slopes = (1 + power * near) * (np.abs(up) + 1), near
    near_slopes = np.concatenate(near_slopes, axis=1)[:, : x.shape[1]]
    near = near * (np.abs(up) + 1)
    found = wide * slopes * scale, act * scale, (ct * act).sum(1)
    sizes = np.abs(wide * near_slopes * scale), near * scale, np.abs(ct * near).sum(1)
    return [np.where(x != 0, value, 0) for x, value in zip((scale, scale, 1), found)], sizes


@pytest.mark.parametrize(
    "activation_and_case, dtype",
    both_dtypes(
        [*((SWIGLU, case) for case in CASES), *((a, "many") for a in (*PLAIN, *GATED, CLAMPED))]
    ),
    ids=lambda x: x if isinstance(x, str) else f"{name_of(x[0])}-{x[1]}",
)
def test_gradients_are_close_and_encoded(path, activation_and_case, dtype):
    activation, case = activation_and_case
    ct, pre, weights, sizes = operands(case, activation, dtype)
    *found, values, scales = run(ct, pre, weights, sizes, activation=activation)
    assert values.shape == pre.shape and scales.shape == (len(pre), pre.shape[1] // BLOCK)
    end = sum(sizes)
    has_token = np.arange(end) % 7 != 3
    inexact = 2.0**-6 if dtype == "bfloat16" else 2.0**-14
    (ct, pre, weights, *found), (values, scales) = (
        [np.asarray(x)[:end] for x in each]
        for each in ((ct, pre, weights, *found), (values, scales))
    )
    for one, right, size in zip(found, *exact(ct, pre, weights, activation), strict=True):
        one, right, size = (np.asarray(x, np.float64) for x in (one, right, size))
        if right.ndim == 1:  # for rows without a token, ct_weights may be anything
            one, right, size = (x[has_token] for x in (one, right, size))
        bound = inexact * np.where(np.isnan(size), 0, size) + 1e-37
        assert (np.abs(one - right) <= bound).all(), np.nanmax(np.abs(one - right) / bound)
    assert_same_bits((values, scales), format_oracle.encode(FMT, found[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", (1, 3, 1000))
def test_any_number_of_multiprocessors(path, num_sms):
    args = operands("many", SWIGLU, "bfloat16")
    found, expected = (run(*args, activation=SWIGLU, num_sms=n) for n in (num_sms, None))
    assert_same_bits(found, expected, sum(args[3]))


@pytest.mark.parametrize("shares_sizes", (False, True))
def test_a_batch_is_one_call_of_the_same_rows(path, shares_sizes):
    *floats, sizes = operands("many", SWIGLU, "bfloat16")
    floats = [without_nan(np.stack([each, each[::-1]])) for each in floats]
    bind = functools.partial(bind_act_grad, activation=SWIGLU, num_sms=None)
    run_one = functools.partial(run, activation=SWIGLU)
    assert_batch_is_its_elements(bind, run_one, floats, sizes, shares_sizes)


def test_derivatives_are_those_of_the_gradients():
    """The tangents of `act_grad` equal those of plain JAX, also in rows of weight 0."""
    *floats, sizes = (jnp.asarray(x) for x in operands("no_tail", SWIGLU, "float32"))
    floats = [jnp.where(jnp.isnan(x), 0.5, x) for x in floats]
    of_primitive = lambda *floats: bind_act_grad(*floats, sizes, activation=SWIGLU, num_sms=None)[
        :3
    ]
    plain = functools.partial(act_grad.gradients, activation=SWIGLU, selects=False)
    ones = list(map(jnp.ones_like, floats))
    pairs = zip(*(jax.jvp(fn, floats, ones)[1] for fn in (of_primitive, plain)), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)


def test_the_pass_is_one_call_with_the_attributes_of_the_activation(hopper, monkeypatch):
    monkeypatch.setattr(act_grad, "why_no_act_encode", WHY_NO_ACT_GRAD)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    floats = array("bfloat16", 512, 256), array("bfloat16", 512, 512), array("float32", 512)
    fn = functools.partial(bind_act_grad, activation=CLAMPED, num_sms=7)
    ((target, attributes, types),) = calls(fn, *floats, array("int32", 4))
    numbers = {name: float(attributes.pop(name)) for name in ("alpha", "limit")}
    assert target == "act_grad" and numbers == pytest.approx(dict(alpha=1.3, limit=0.7))
    code = str(list(KINDS).index("clamped_swiglu"))
    assert attributes == dict(activation=code, gated="1", num_sms="7")
    assert types == (
        "(tensor<1x512x512xbf16>, tensor<3x4xi32>, tensor<1x512xf32>, tensor<1x512x256xbf16>) -> "
        "(tensor<1x512x512xf8E4M3FN>, tensor<1x512x4xf32>, tensor<1x512x512xbf16>, "
        "tensor<1x512x256xbf16>, tensor<1x512xf32>)"
    )
    plain = functools.partial(bind_act_grad, activation=FusedActivation("relu"), num_sms=None)
    lead = jax.tree.map(lambda x: array(x.dtype, 3, 2, *x.shape), (floats[0], floats[0], floats[2]))
    ((_, attributes, types),) = calls(jax.vmap(jax.vmap(plain)), *lead, array("int32", 3, 2, 4))
    assert attributes["gated"] == "0" and types.startswith("(tensor<6x512x256xbf16>, tensor<3x24x")
