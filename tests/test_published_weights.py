"""Test reading and writing published weights, FP8 in 128x128 blocks and MXFP4, against decoders in
numpy."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from format_oracle import E4M3, E8M0, encode_squares
from test_integrations_transformers import CONFIGS, bits

import jax_moe_a2a as ma
from jax_moe_a2a.integrations import transformers as hf

pytestmark = pytest.mark.exchanges(0)

E, H, I = 2, 256, 128
BLOCK = "model.layers.3.mlp."
SIZES = dict(hidden_size=H, moe_intermediate_size=I, n_routed_experts=E, num_experts=E)
NAMES = "gate_proj", "up_proj", "down_proj"
SHARED = "shared_experts."


def config_of(kind):
    return CONFIGS[kind] | SIZES | dict(n_group=1, topk_group=1)


def shapes_of(kind, per_expert=True):
    """Return a dict of the shapes [..., outputs, inputs] of a block's FP8 tensors."""
    of_expert = dict(zip(NAMES, [(I, H), (I, H), (H, I)], strict=True))
    if per_expert:
        shapes = {f"experts.{e}.{n}.weight": s for e in range(E) for n, s in of_expert.items()}
    else:
        shapes = {"experts.gate_up_proj": (E, 2 * I, H), "experts.down_proj": (E, H, I)}
    if kind == "deepseek_v3":  # two shared experts
        of_shared = dict(zip(NAMES, [(2 * I, H), (2 * I, H), (H, 2 * I)], strict=True))
        shapes |= {f"{SHARED}{name}.weight": shape for name, shape in of_shared.items()}
    return shapes


def block_of(kind, per_expert=True, scale_dtype=np.float32):
    """Return the tensors of a block, with random FP8 bytes (no NaN) and scales."""
    rng = np.random.default_rng(0)
    block = {"gate.weight": rng.normal(size=(E, H)).astype(jnp.bfloat16)}
    if kind == "deepseek_v3":
        block["gate.e_score_correction_bias"] = rng.normal(size=E).astype(np.float32)
    for name, shape in shapes_of(kind, per_expert).items():
        values = rng.integers(0, 254, size=shape).astype(np.uint8)
        block[name] = np.where(values < 127, values, values + 1).astype(np.uint8).view(E4M3)
        squares = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
        block[name + "_scale_inv"] = rng.uniform(1e-5, 1e-2, squares).astype(scale_dtype)
    return {BLOCK + name: tensor for name, tensor in block.items()}


def decoded(block, name):
    """Decode an FP8 tensor [..., outputs, inputs] to float64."""
    numbers = block[BLOCK + name].astype(np.float64)
    scales = block[BLOCK + name + "_scale_inv"].astype(np.float64)
    for index in np.ndindex(scales.shape):
        *lead, row, column = index
        square = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
        numbers[(*lead, *square)] *= scales[index]
    return numbers


def numbers_of(w):
    scales = np.repeat(np.repeat(w.scales.astype(np.float64), 128, -1), 128, -2)
    return np.moveaxis(w.values.astype(np.float64) * scales, -1, 1)


@pytest.mark.parametrize(
    ("kind", "per_expert"), [("deepseek_v3", True), ("deepseek_v3", False), ("qwen3_moe", True)]
)
def test_fp8_files_are_read_without_decoding_and_written_with_the_same_bits(kind, per_expert):
    config, block = config_of(kind), block_of(kind, per_expert)
    params = hf.from_state_dict(block, config, BLOCK)
    w_in, w_out = numbers_of(params["experts"].w_in), numbers_of(params["experts"].w_out)
    for e in range(E):
        if per_expert:
            gate, up, down = (decoded(block, f"experts.{e}.{name}.weight") for name in NAMES)
        else:
            gate, up = np.split(decoded(block, "experts.gate_up_proj")[e], 2)
            down = decoded(block, "experts.down_proj")[e]
        np.testing.assert_array_equal(w_in[e], np.stack([gate.T, up.T], axis=1))
        np.testing.assert_array_equal(w_out[e], down.T)
    if kind == "deepseek_v3":
        gate, up, down = (decoded(block, f"{SHARED}{name}.weight").T for name in NAMES)
        np.testing.assert_array_equal(numbers_of(params["shared"].w_in)[0], np.stack([gate, up], 1))
        np.testing.assert_array_equal(numbers_of(params["shared"].w_out)[0], down)

    of_jax = jax.tree.map(jnp.asarray, params)
    for each in (params, of_jax):
        back = hf.to_state_dict(each, config, BLOCK, per_expert=per_expert)
        assert {n: bits(x) for n, x in back.items()} == {n: bits(x) for n, x in block.items()}
    specs = ma.moe_partition_specs(params, ma.Axes("ep", tensor="tensor"))
    assert jax.tree.structure(specs) == jax.tree.structure(params)


def test_weights_quantized_here_are_written_as_fp8_files_with_their_bits():
    """The bits are those of a separate quantization in numpy."""
    config, rng = config_of("qwen3_moe"), np.random.default_rng(0)
    shapes = shapes_of("qwen3_moe") | {"gate.weight": (E, H)}
    floats = {BLOCK + n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    params = hf.from_state_dict(floats, config, BLOCK)
    params["experts"] = ma.quantize_experts(params["experts"])
    found = hf.to_state_dict(params, config, BLOCK, per_expert=True)
    for name, w in floats.items():
        if name.endswith("proj.weight"):
            values, scales = encode_squares(w.T[None])
            assert bits(found[name]) == bits(values[0])
            assert bits(found[name + "_scale_inv"]) == bits(scales[0])


def test_scales_in_bfloat16_become_float32():
    config, block = config_of("qwen3_moe"), block_of("qwen3_moe", scale_dtype=jnp.bfloat16)
    back = hf.to_state_dict(hf.from_state_dict(block, config, BLOCK), config, BLOCK)
    found, name = back[BLOCK + "experts.down_proj_scale_inv"], "experts.1.down_proj.weight"
    np.testing.assert_array_equal(found[1], block[f"{BLOCK}{name}_scale_inv"].astype(np.float32))


@pytest.mark.exchanges(6)
def test_a_layer_decodes_a_shared_expert_in_fp8_to_the_dtype_of_the_tokens():
    config = config_of("deepseek_v3")
    params = hf.from_state_dict(block_of("deepseek_v3"), config, BLOCK)
    w_in, w_out = numbers_of(params["shared"].w_in)[0], numbers_of(params["shared"].w_out)[0]
    activation = params["shared"].activation
    floats = ma.Experts(*(w.astype(np.float32) for w in (w_in, w_out)), activation=activation)
    x = np.random.default_rng(1).normal(size=(8, H)).astype(np.float32)
    explicit = (jax.sharding.AxisType.Explicit,) * 2  # decoded arrays then need shardings
    mesh = jax.make_mesh((1, 1), ("ep", "tensor"), explicit, devices=jax.devices()[:1])
    axes = ma.Axes("ep", tensor="tensor")
    with jax.set_mesh(mesh):
        layer = lambda x, params: ma.moe(x, **params, axes=axes)[0]
        run = jax.jit(layer, compiler_options=harness.QUICKLY)
        found, expected = (
            run(x, jax.tree.map(jax.device_put, each, ma.moe_partition_specs(each, axes)))
            for each in (params, params | {"shared": floats})
        )
    np.testing.assert_array_equal(found, expected)
    source = params["shared"].map_weights(lambda w: ma.QuantizedExperts(source=w.values[0]))
    two = params["shared"].map_weights(lambda w: jax.tree.map(lambda a: np.tile(a, 2), w))
    for shared in (source, two):
        with jax.set_mesh(mesh), pytest.raises(ValueError, match="shared"):
            ma.moe(x, **params | {"shared": shared}, axes=axes)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    {
        "nan": (lambda v, s: (np.full_like(v, np.nan), s), ValueError, "weight must hold finite"),
        "inf": (lambda v, s: (v, s * np.float32(np.inf)), ValueError, "_inv must hold finite"),
        "bfloat16": (
            lambda v, s: (v.astype(jnp.bfloat16), s),
            TypeError,
            "weight must be float8_e4m3fn, because experts.w_out.values is in FP8; got bfloat16",
        ),
        "float64": (
            lambda v, s: (v, s.astype(np.float64)),
            TypeError,
            "must be float32 or bfloat16, .*got float64",
        ),
        "shape": (lambda v, s: (v, s.T), ValueError, r"shape \[2, 1\].*\[1,2\]"),
        "no scales": (lambda v, s: (v, None), ValueError, "lacks experts.1.down_proj.weight_scale"),
    }.values(),
)
def test_fp8_files_with_mistakes(change, error, message):
    block, name = block_of("qwen3_moe"), BLOCK + "experts.1.down_proj.weight"
    block[name], block[name + "_scale_inv"] = change(block[name], block[name + "_scale_inv"])
    block = {name: tensor for name, tensor in block.items() if tensor is not None}
    with pytest.raises(error, match=message):
        hf.from_state_dict(block, config_of("qwen3_moe"), BLOCK)


def test_fp8_files_of_other_widths_are_refused():
    config = config_of("qwen3_moe") | dict(moe_intermediate_size=96)
    with pytest.raises(ValueError, match="of 128, because experts.w_in is in FP8; got 256 and 96"):
        hf.from_state_dict(block_of("qwen3_moe"), config, BLOCK)


def test_tensors_of_pytorch_in_fp8_make_a_round_trip():
    torch = pytest.importorskip("torch", reason="makes its tensors")
    config, block = config_of("qwen3_moe"), block_of("qwen3_moe")
    tensors = hf.to_torch(block)
    assert tensors[BLOCK + "experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    params = hf.from_state_dict(tensors, config, BLOCK)
    back = hf.to_state_dict(params, config, BLOCK, per_expert=True)
    assert {n: bits(x) for n, x in back.items()} == {n: bits(x) for n, x in block.items()}


def e2m1(nibble):
    """Decode a number of 4 bits (OCP MX specification v1.0, section 5.3.3)."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    magnitude = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -magnitude if sign else magnitude


def mxfp4(packed, scales):
    """Decode bytes [..., K / 32, 16] and scales [..., K / 32] to float64 [..., K]."""
    table = np.array([e2m1(nibble) for nibble in range(16)])
    numbers = np.stack([table[packed & 15], table[packed >> 4]], axis=-1)
    numbers = numbers.reshape(*scales.shape, 32) * 2.0 ** (scales[..., None].astype(int) - 127)
    return numbers.reshape(*scales.shape[:-1], -1)


def test_every_number_of_mxfp4_is_decoded_exactly():
    scales = np.repeat(np.arange(253, dtype=np.uint8)[:, None], 16, axis=1)  # 2**-127 to 2**125
    packed = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (253, 1, 1))
    expected = mxfp4(packed, scales)
    for given in (
        (packed, scales),
        (packed.reshape(253, 256).view(np.int8), scales.view(E8M0)),  # as DeepSeek-V4 and Kimi K3
        (jnp.asarray(packed), jnp.asarray(scales)),
    ):
        found = hf.decode_mxfp4(*given)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_array_equal(found.astype(np.float64), expected)
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def gpt_oss(scales_of):
    rng, hidden, width = np.random.default_rng(0), 64, 32
    sizes = dict(hidden_size=hidden, intermediate_size=width, num_local_experts=E)
    floats = {
        "router.weight": (E, hidden),
        "router.bias": (E,),
        "experts.gate_up_proj_bias": (E, 2 * width),
        "experts.down_proj_bias": (E, hidden),
    }
    block = {n: rng.normal(size=shape).astype(jnp.bfloat16) for n, shape in floats.items()}
    numbers = {}
    for name, n, k in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
        packed = rng.integers(0, 256, size=(E, n, k // 32, 16)).astype(np.uint8)
        scales = scales_of(rng, packed.shape[:-1]).astype(np.uint8)
        block |= {f"experts.{name}_blocks": packed, f"experts.{name}_scales": scales}
        numbers[name] = mxfp4(packed, scales)  # shape [E, outputs, inputs]
    block = {BLOCK + name: tensor for name, tensor in block.items()}
    return CONFIGS["gpt_oss"] | sizes, block, numbers


def test_mxfp4_experts_of_gpt_oss_are_decoded_exactly():
    config, block, numbers = gpt_oss(lambda rng, shape: rng.integers(110, 125, size=shape))
    other = {"model.layers.4.mlp.experts.down_proj_blocks": None}
    params = hf.from_state_dict(block | other, config, BLOCK)
    experts, gate_up = params["experts"], numbers["gate_up_proj"]
    assert experts.w_in.dtype == jnp.bfloat16
    expected = np.stack([gate_up[:, 0::2], gate_up[:, 1::2]], axis=1).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(experts.w_in.astype(np.float64), expected)
    expected = numbers["down_proj"].swapaxes(1, 2)
    np.testing.assert_array_equal(experts.w_out.astype(np.float64), expected)
    bias = block[BLOCK + "experts.gate_up_proj_bias"]
    np.testing.assert_array_equal(experts.b_in[:, 1], bias[:, 1::2])
    floats = hf.to_state_dict(params, config, BLOCK)  # transformers expects decoded weights
    found = floats[BLOCK + "experts.gate_up_proj"].astype(np.float64)
    np.testing.assert_array_equal(found, gate_up.swapaxes(1, 2))


@pytest.mark.parametrize("span", (14, 15))
def test_fp8_holds_mxfp4_exactly_if_the_scales_of_a_square_span_at_most_14(span):
    """FP8 represents numbers from 0.5 to 6 * 2**span exactly if `span` is 14, but not 15."""
    scales = np.random.default_rng(0).integers(127, 128 + span, size=(1, 128, 4)).astype(np.uint8)
    packed = np.random.default_rng(1).integers(0, 256, size=(1, 128, 4, 16)).astype(np.uint8)
    scales[0, 0, :2] = 127, 127 + span
    packed[0, 0, :2] = np.array([0x11, 0x77])[:, None]
    w = hf.decode_mxfp4(packed, scales).swapaxes(1, 2)
    quantized = jax.tree.map(np.asarray, ma.quantize_experts(w))
    is_exact = np.array_equal(numbers_of(quantized), w.astype(np.float64))
    assert is_exact == (span == 14)
    assert quantized.scales[0, 0, 0] == 2.0 ** (span - 6)


@pytest.mark.parametrize(
    ("packed", "scales", "error", "message"),
    (
        (np.zeros((2, 4, 16), np.int32), np.zeros((2, 4), np.uint8), TypeError, "packed must be"),
        (np.zeros((2, 4, 16), np.uint8), np.zeros((2, 4)), TypeError, "scales must be uint8 or"),
        (np.zeros((2, 32), np.uint8), np.zeros((2, 4), np.uint8), ValueError, "16 bytes for each"),
        (np.zeros((2, 4, 16), np.uint8), np.full((2, 4), 255, np.uint8), ValueError, "got 255"),
    ),
)
def test_mxfp4_with_mistakes(packed, scales, error, message):
    with pytest.raises(error, match=message):
        hf.decode_mxfp4(packed, scales)
