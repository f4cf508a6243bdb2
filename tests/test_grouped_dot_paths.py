"""Test which arguments `grouped_dot` accepts, and which products run a kernel."""

import functools
import logging
import pathlib
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_calls import calls, needs_kernel

import jax_moe_a2a as ma
from jax_moe_a2a._src import paths
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.grouped import lowering, quantized

pytestmark = [pytest.mark.one_process("each process would do the same"), pytest.mark.exchanges(0)]


ROWS = jnp.zeros((8, 16), jnp.bfloat16)
W = jnp.zeros((2, 16, 24), jnp.bfloat16)
SIZES = np.array([3, 4])


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, r"rows must have a floating dtype; got int32\[8,16\]",
         dict(rows=ROWS.astype(int))),
        (TypeError, r"w must have a floating dtype; got int32", dict(w=W.astype(int))),
        (TypeError, r"w must have the dtype of rows, bfloat16; got float32\[2,16,24\]",
         dict(w=W.astype(jnp.float32))),
        (ValueError, r"rows must have the shape \[C, K\]; got bfloat16\[8\]",
         dict(rows=ROWS[:, 0])),
        (ValueError, r"w must have the shape \[L, 16, N\].*got bfloat16\[2,15,24\]",
         dict(w=W[:, 1:])),
        (ValueError, r"w must have the shape \[L, 16, N\].*got bfloat16\[16,24\]", dict(w=W[0])),
        (TypeError, r"group_sizes must be integers; got float32\[2\]",
         dict(group_sizes=np.ones(2, np.float32))),
        (ValueError, r"group_sizes must have the shape \[2\].*got int64\[3\]",
         dict(group_sizes=np.ones(3, np.int64))),
        (ValueError, r"sum of group_sizes must be at most 8, the number of rows; got 9",
         dict(group_sizes=np.array([5, 4]))),
        (ValueError, r"sum of group_sizes must be at most 8, the number of rows; got 4294967296",
         dict(group_sizes=np.array([2**31, 2**31]))),
        (ValueError, r"sum of group_sizes must be at most 8, the number of rows; got 9",
         dict(group_sizes=jnp.array([5, 4]))),
        (ValueError, r"group_sizes must be at least 0; got -1",
         dict(group_sizes=np.array([-1, 4]))),
        (ValueError, r'tail must be "zero" or "unspecified"; got \'nothing\'',
         dict(tail="nothing")),
        (TypeError, r"num_sms must be an int; got 1.5", dict(num_sms=1.5)),
        (ValueError, r"num_sms must be at least 1; got 0", dict(num_sms=0)),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(error, message, change):
    arguments = dict(rows=ROWS, w=W, group_sizes=SIZES) | change
    with pytest.raises(error, match=message):
        ma.grouped_dot(**arguments)
    known = {name: arguments.pop(name) for name in ("tail", "num_sms") if name in arguments}
    if not isinstance(change.get("group_sizes"), jax.Array):
        sizes = arguments.pop("group_sizes")  # constants of the traced call
        with pytest.raises(error, match=message):
            jax.jit(lambda **others: ma.grouped_dot(group_sizes=sizes, **known, **others))(
                **arguments
            )


def products(fn, *args):
    """Return the attribute `product` of each call of the kernel."""
    found = [call.attributes for call in calls(fn, *args) if call.target == "grouped_gemm"]
    return [int(attributes["product"]) for attributes in found]


def num_fp8_products(fn, *args):
    return sum(call.target == "fp8_gemm" for call in calls(fn, *args))


def gradients(rows, w, sizes):
    return jax.grad(lambda *args: ma.grouped_dot(*args, sizes).astype(jnp.float32).sum(), (0, 1))(
        rows, w
    )


def avals(num_rows=512, groups=4, k=64, n=128, dtype="bfloat16", lead=()):
    return (
        jax.ShapeDtypeStruct((*lead, num_rows, k), dtype),
        jax.ShapeDtypeStruct((*lead, groups, k, n), dtype),
        jax.ShapeDtypeStruct((*lead, groups), jnp.int32),
    )


def fp8_avals(num_rows=512, groups=4, k=256, n=200, lead=()):
    shape = lambda dtype, *axes: jax.ShapeDtypeStruct((*lead, *axes), dtype)
    rows = shape(E4M3, num_rows, k), shape("float32", num_rows, k // 128)
    experts = shape(E4M3, groups, n, k), shape("float32", groups, -(-n // 128), k // 128)
    return ma.Quantized(*rows), ma.QuantizedExperts(*experts), shape("int32", groups)


def why_not(*avals):
    """Return why a `grouped_dot` does not run the kernel on Hopper GPUs ('' if it does)."""
    calls = ma.explain(ma.grouped_dot, *avals, device=None if harness.ON_GPU else "9.0")
    return next(call.why for call in calls if call.name.startswith("grouped product"))


E4M3 = jnp.dtype("float8_e4m3fn")


@needs_kernel
def test_each_product_in_fp8_is_one_call(hopper):
    in_float32 = functools.partial(ma.grouped_dot, preferred_element_type="float32")
    for dot in (ma.grouped_dot, in_float32):
        assert num_fp8_products(dot, *fp8_avals()) == 1
        assert products(dot, *fp8_avals()) == []
    assert num_fp8_products(jax.vmap(ma.grouped_dot), *fp8_avals(lead=(3,))) == 1
    nested = jax.vmap(jax.vmap(ma.grouped_dot))
    assert num_fp8_products(nested, *fp8_avals(lead=(3, 2))) == 1
    assert why_not(*fp8_avals()) == ""
    floats = jax.ShapeDtypeStruct((512, 256), "bfloat16")
    assert num_fp8_products(ma.grouped_dot, floats, *fp8_avals()[1:]) == 1
    assert why_not(floats, *fp8_avals()[1:]) == ""


@needs_kernel
def test_other_gpus_decode_products_in_fp8(monkeypatch):
    jax.clear_caches()
    monkeypatch.setattr(lowering, "_why_other_gpu", lambda: "the kernel needs other GPUs")
    assert why_not(*fp8_avals()) == "the kernel needs other GPUs"
    for dtype in ("bfloat16", "float32"):
        dot = functools.partial(ma.grouped_dot, preferred_element_type=dtype)
        assert calls(dot, *fp8_avals()) == []
    jax.clear_caches()


@needs_kernel
def test_each_product_is_one_call(hopper):
    forward, transposed, gradient = range(3)
    assert products(ma.grouped_dot, *avals()) == [forward]
    assert sorted(products(gradients, *avals())) == [transposed, gradient]
    assert products(jax.vmap(ma.grouped_dot), *avals(lead=(3,))) == [forward]
    assert sorted(products(jax.vmap(gradients), *avals(lead=(3,)))) == [transposed, gradient]


@pytest.fixture
def blackwell(monkeypatch):
    """Lower for a GPU of compute capability 10.0, and return a function that sets cuBLASLt's
    version."""
    if harness.ON_GPU:
        pytest.skip("this process has real GPUs")
    jax.clear_caches()
    monkeypatch.setattr(native, "local_gpus", lambda: [paths.NamedGpu("10.0")])
    monkeypatch.setattr(native, "register_targets", lambda: None)
    yield lambda *version: monkeypatch.setattr(native, "library_version", lambda: version)
    jax.clear_caches()


def by_library(fn, *args):
    """Return (product, mean rows) of each cuBLASLt call."""
    found = [call.attributes for call in calls(fn, *args) if call.target == "library_gemm"]
    return sorted((int(each["product"]), int(each["mean_rows"])) for each in found)


@needs_kernel
def test_blackwell_gpus_multiply_by_cublas_lt(blackwell):
    blackwell(13, 6, 1)
    forward, transposed, gradient = range(3)
    assert by_library(ma.grouped_dot, *avals()) == [(forward, 103)]
    whole = functools.partial(ma.grouped_dot, tail="unspecified")
    assert by_library(whole, *avals()) == [(forward, 128)]
    assert by_library(gradients, *avals()) == [(transposed, 103), (gradient, 128)]
    assert by_library(jax.vmap(whole), *avals(lead=(3,))) == [(forward, 128)]
    assert products(gradients, *avals()) == []
    (call,) = ma.explain(ma.grouped_dot, *avals(), device="10.0")
    assert call.path == "cuBLASLt 13.6.1" and "needs GPUs of compute capability 9.0" in call.why
    assert by_library(ma.grouped_dot, *avals(dtype="float32")) == []
    assert by_library(ma.grouped_dot, *avals(k=60)) == []


@needs_kernel
@pytest.mark.parametrize(
    ("version", "found"),
    [((13, 2, 9), "13.2.9"), ((13, 7, 0), "13.7.0"), ((0, 0, 0), "none in this process")],
)
def test_versions_of_cublas_lt_with_wrong_products_are_not_used(blackwell, version, found):
    blackwell(*version)
    assert calls(gradients, *avals()) == []
    (call,) = ma.explain(ma.grouped_dot, *avals(), device="10.0")
    assert call.path == "lax.ragged_dot"
    assert call.why.endswith(f"cuBLASLt needs nvidia-cublas>=13.3,<13.7 on this GPU; found {found}")


@needs_kernel
@pytest.mark.parametrize(
    ("why", "arguments"),
    [
        ("needs bfloat16 or float16; got float32", avals(dtype="float32")),
        ("columns in multiples of 8; got weights of 60 by 128", avals(k=60)),
        ("columns in multiples of 8; got weights of 64 by 12", avals(n=12)),
        ("no rows, no groups or no columns", avals(num_rows=0)),
        ("so large a product; got 3000000 rows", avals(num_rows=3_000_000)),
        ("N in multiples of 8; got weights of 256 by 12", fp8_avals(n=12)),
        ("no rows, no groups or no columns", fp8_avals(num_rows=0)),
        ("so large a product; got 3000000 rows", fp8_avals(num_rows=3_000_000)),
    ],
)
def test_what_the_kernel_cannot_do_takes_another_path(hopper, caplog, why, arguments):
    in_fp8 = isinstance(arguments[0], ma.Quantized)
    other_path = "decoded to bfloat16" if in_fp8 else "lax.ragged_dot"
    assert why in why_not(*arguments)
    with caplog.at_level(logging.INFO, logger="jax_moe_a2a"):
        assert calls(ma.grouped_dot, *arguments) == []
    assert any(f"{other_path}, because" in m and why in m for m in caplog.messages)


def test_a_kernel_that_was_not_built_is_no_call(hopper, monkeypatch):
    monkeypatch.setattr(native, "has_grouped_gemm", lambda: False)
    assert "built without" in why_not(*avals())
    assert products(gradients, *avals()) == []
    assert "built without" in why_not(*fp8_avals())
    assert num_fp8_products(ma.grouped_dot, *fp8_avals()) == 0


@pytest.mark.gpu
def test_the_kernel_is_called_on_this_gpu():
    if jax.local_devices()[0].compute_capability != "9.0":
        pytest.skip("the kernel needs compute capability 9.0")
    rows, w, sizes = avals()
    assert why_not(rows, w, sizes) == ""
    text = jax.jit(gradients).lower(rows, w, sizes).as_text()
    assert text.count("@moe_a2a_grouped_gemm") == 2
    compiled = jax.jit(ma.grouped_dot).lower(rows, w, sizes).compile().as_text()
    assert "moe_a2a_grouped_gemm" in compiled
    assert why_not(*fp8_avals()) == ""
    compiled = jax.jit(ma.grouped_dot).lower(*fp8_avals()).compile().as_text()
    assert quantized.TARGET in compiled and "bf16[4,200,256]" not in compiled


def test_tiles_of_weight_gradients_have_the_sizes_of_the_kernels():
    text = (pathlib.Path(__file__).parents[1] / "cuda" / "tuning.h").read_text()
    (sizes,) = re.findall(r"kWeightGradient = \{(\d+), (\d+),", text)
    assert tuple(map(int, sizes)) == (lowering.TILE_ROWS, 2 * lowering.TILE_ROWS)
