"""Test the conversion of weights from and to Hugging Face transformers. Only the last test needs
PyTorch."""

import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_layer import dense_experts

import jax_moe_a2a as ma
from jax_moe_a2a.integrations import transformers as hf

pytestmark = pytest.mark.exchanges(0)

E, H, I = 4, 6, 3  # number of experts, hidden size, width of an expert
PREFIX = "model.layers.1.mlp."
LOCAL = dict(intermediate_size=I, num_local_experts=E, num_experts_per_tok=2)
QWEN = dict(moe_intermediate_size=I, num_experts=E, num_experts_per_tok=2, norm_topk_prob=False)
DEEPSEEK = dict(
    moe_intermediate_size=I,
    n_routed_experts=E,
    n_shared_experts=2,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
)
ERNIE = dict(moe_intermediate_size=I, moe_num_experts=E, moe_num_shared_experts=2, moe_k=2)
CONFIGS = {
    "mixtral": LOCAL,
    "minimax_m2": LOCAL,
    "olmoe": dict(intermediate_size=I, num_experts=E, num_experts_per_tok=2, norm_topk_prob=True),
    "qwen3_moe": QWEN,
    "qwen2_moe": QWEN | dict(shared_expert_intermediate_size=2 * I),
    "deepseek_v2": DEEPSEEK | dict(topk_method="group_limited_greedy"),
    "deepseek_v3": DEEPSEEK,
    "ernie4_5_moe": ERNIE,
    "gpt_oss": LOCAL,
    "llama4_text": LOCAL,
}
SAME = {"qwen3_next": "qwen2_moe", "glm4_moe": "deepseek_v3", "kimi_k2": "deepseek_v3"}
CONFIGS = {
    kind: dict(model_type=kind, hidden_size=H, hidden_act="silu") | fields
    for kind, fields in CONFIGS.items()
}
INPUTS_FIRST = "gpt_oss", "llama4_text"
FORMS = [
    (kind, per_expert)
    for kind in CONFIGS
    for per_expert in (False, True)
    if not (per_expert and kind in INPUTS_FIRST)
]


def projections_of(kind):
    is_short = kind in ("mixtral", "minimax_m2")
    return ("w1", "w3", "w2") if is_short else ("gate_proj", "up_proj", "down_proj")


def shapes_of(kind, per_expert):
    router = "router" if kind in INPUTS_FIRST else "gate"
    shapes = {f"{router}.weight": (E, H)}
    names = projections_of(kind)
    if kind in INPUTS_FIRST:
        shapes |= {"experts.gate_up_proj": (E, H, 2 * I), "experts.down_proj": (E, I, H)}
    elif per_expert:
        for expert in range(E):
            for name, shape in zip(names, [(I, H), (I, H), (H, I)], strict=True):
                shapes[f"experts.{expert}.{name}.weight"] = shape
    else:
        shapes |= {"experts.gate_up_proj": (E, 2 * I, H), "experts.down_proj": (E, H, I)}
    if kind == "gpt_oss":
        shapes |= {
            "router.bias": (E,),
            "experts.gate_up_proj_bias": (E, 2 * I),
            "experts.down_proj_bias": (E, H),
        }
    shapes |= {
        "deepseek_v3": {"gate.e_score_correction_bias": (E,)},
        "minimax_m2": {"e_score_correction_bias": (E,)},
        "ernie4_5_moe": {
            f"{'' if per_expert else 'gate.'}moe_statics.e_score_correction_bias": (1, E)
        },
        "qwen2_moe": {"shared_expert_gate.weight": (1, H)},
    }.get(kind, {})
    shared = {"qwen2_moe": "shared_expert", "llama4_text": "shared_expert"}
    shared |= dict.fromkeys(("deepseek_v2", "deepseek_v3", "ernie4_5_moe"), "shared_experts")
    if kind in shared:
        width = I if kind == "llama4_text" else 2 * I
        for name, shape in zip(names, [(width, H), (width, H), (H, width)], strict=True):
            shapes[f"{shared[kind]}.{name}.weight"] = shape
    return shapes


def block_of(kind, per_expert, dtype=np.float32, prefix=PREFIX):
    """As in published files, the selection bias is float32."""
    rng = np.random.default_rng(0)
    return {
        prefix + name: rng.normal(size=shape).astype(
            np.float32 if name.endswith("correction_bias") else dtype
        )
        for name, shape in shapes_of(kind, per_expert).items()
    }


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.tobytes()


@pytest.mark.parametrize(("kind", "per_expert"), FORMS)
def test_a_round_trip_returns_the_same_names_and_bits(kind, per_expert):
    dtype = np.float32 if per_expert else jnp.bfloat16
    block = block_of(kind, per_expert, dtype)
    down = max(name for name in block if "down" in name or "w2" in name)
    payload = np.array(-5 if dtype == np.float32 else 0x7F81).astype(f"i{block[down].itemsize}")
    block[down].reshape(-1)[0] = payload.view(dtype)  # a NaN with a payload
    others = {"model.layers.0.mlp.gate.weight": None, "model.layers.11.mlp.gate.weight": None}

    params = hf.from_state_dict(others | block, CONFIGS[kind], PREFIX[:-1])
    back = hf.to_state_dict(params, CONFIGS[kind], PREFIX, per_expert=per_expert)
    assert {name: bits(x) for name, x in back.items()} == {n: bits(x) for n, x in block.items()}
    specs = ma.moe_partition_specs(params, "ep")
    assert jax.tree.structure(specs) == jax.tree.structure(params)
    for array in jax.tree.leaves(params):
        assert not any(np.shares_memory(array, x) for x in [*block.values(), *back.values()])

    of_jax = jax.tree.map(jnp.asarray, params)
    again = hf.to_state_dict(of_jax, CONFIGS[kind], PREFIX, per_expert=per_expert)
    assert {name: bits(x) for name, x in again.items()} == {n: bits(x) for n, x in block.items()}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def choices_of(kind, block, token):
    weight = next(block[name] for name in ("gate.weight", "router.weight") if name in block)
    logits = weight @ token + block.get("router.bias", 0)
    is_sigmoid = kind in ("deepseek_v3", "minimax_m2", "llama4_text")
    scores = sigmoid(logits) if is_sigmoid else np.exp(logits) / np.exp(logits).sum()
    bias = [x.reshape(-1) for name, x in block.items() if name.endswith("correction_bias")]
    chosen_by = scores + (bias[0] if bias else 0)
    if kind.startswith("deepseek"):
        groups = chosen_by.reshape(2, 2)
        values = groups.max(axis=1) if kind == "deepseek_v2" else groups.sum(axis=1)
        chosen_by = np.where(np.repeat(values == values.max(), 2), chosen_by, -np.inf)
    ids = np.argsort(-chosen_by)[:2]
    weights = scores[ids]
    if kind not in ("qwen3_moe", "qwen2_moe", "deepseek_v2", "llama4_text"):
        weights = weights / weights.sum()
    return ids, weights * (2.5 if kind.startswith("deepseek") else 1)


def gated_expert(token, gate, up, down):
    gate = gate @ token
    return down @ (gate * sigmoid(gate) * (up @ token))


def original(kind, block, x):
    """Compute what a block of transformers 5 returns for tokens x, with numpy and loops."""
    y = np.zeros_like(x)
    shared = {
        name.split(".")[1]: w for name, w in block.items() if re.match(r"shared_experts?\.", name)
    }
    for token, out in zip(x, y, strict=True):
        for expert, weight in zip(*choices_of(kind, block, token), strict=True):
            first, second = (block[f"experts.{name}_proj"][expert] for name in ("gate_up", "down"))
            if kind == "gpt_oss":
                h = token @ first + block["experts.gate_up_proj_bias"][expert]
                gate, up = np.minimum(h[::2], 7), np.clip(h[1::2], -7, 7)
                h = (up + 1) * gate * sigmoid(1.702 * gate)
                out += weight * (h @ second + block["experts.down_proj_bias"][expert])
            elif kind == "llama4_text":
                out += gated_expert(weight * token, *np.split(first.T, 2), second.T)
            else:
                out += weight * gated_expert(token, *np.split(first, 2), second)
        if shared:
            own = gated_expert(token, *(shared[f"{name}_proj"] for name in ("gate", "up", "down")))
            is_gated = "shared_expert_gate.weight" in block
            out += own * (sigmoid(block["shared_expert_gate.weight"] @ token) if is_gated else 1)
    return y


def converted(params, x):
    router, zeros = params["router"], np.zeros(E, x.dtype)
    logits = x @ router.kernel + (zeros if router.bias is None else router.bias)[None]
    choices = router.choose(logits, select_bias=router.select_bias)
    y = dense_experts(x, choices.weights, choices.ids, params["experts"])
    if "shared" in params:
        zeros = np.zeros((len(x), 1), np.int32)
        y += dense_experts(x, 1 + zeros.astype(x.dtype), zeros, params["shared"])
    return y


def fused(kind, block):
    """Convert a state dict with one tensor per expert to one with one tensor for all experts."""
    gate, up, down = projections_of(kind)
    of_all = lambda name: np.stack([block[f"experts.{e}.{name}.weight"] for e in range(E)])
    gate_up = np.concatenate([of_all(gate), of_all(up)], axis=1)
    return block | {"experts.gate_up_proj": gate_up, "experts.down_proj": of_all(down)}


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(("kind", "per_expert"), FORMS)
def test_converted_weights_compute_what_the_block_computes(kind, per_expert):
    block = block_of(kind, per_expert, prefix="")
    if kind == "gpt_oss":
        block["experts.gate_up_proj"] *= 4  # so that both clamps have an effect
    x = np.random.default_rng(1).normal(size=(12, H)).astype(np.float32)
    config = types.SimpleNamespace(**CONFIGS[kind])  # as in transformers
    expected = original(kind, fused(kind, block) if per_expert else block, x)
    found = converted(hf.from_state_dict(block, config), x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_configuration_selects_router_and_activation():
    deepseek, gpt_oss = CONFIGS["deepseek_v3"], CONFIGS["gpt_oss"]
    top_k = ma.TopK(2, renormalize=True, score="sigmoid", scale=2.5)
    found = hf.moe_config(deepseek | dict(n_group=1))
    act = ma.gated(jax.nn.silu)
    assert found == ma.MoEConfig(H, I, E, top_k, activation=act, shared_hidden=2 * I)
    for fields, limit in (({}, 7.0), (dict(swiglu_limit=5.0), 5.0)):
        act = ma.clamped_swiglu(limit, 1.702)
        expected = ma.MoEConfig(H, I, E, ma.TopK(2, renormalize=True), activation=act, bias=True)
        assert hf.moe_config(gpt_oss | fields) == expected
    x = jnp.array([[0.5, -1.0, 2.0, 3.0]])
    for name, act in dict(
        gelu=lambda x: jax.nn.gelu(x, approximate=False), relu=jax.nn.relu
    ).items():
        found = hf.moe_config(CONFIGS["mixtral"] | dict(hidden_act=name)).activation(x)
        np.testing.assert_array_equal(found, ma.gated(act)(x))


@pytest.mark.parametrize("kind", SAME)
def test_families_with_the_same_block(kind):
    like = CONFIGS[SAME[kind]]
    config, block = like | dict(model_type=kind), block_of(SAME[kind], True, prefix="")
    assert hf.moe_config(config) == hf.moe_config(like)
    assert hf.to_state_dict(hf.from_state_dict(block, config), config, per_expert=True).keys() == (
        block.keys()
    )


def test_a_configuration_may_hold_that_of_the_language_model():
    inner = CONFIGS["llama4_text"]
    of_image_and_text = types.SimpleNamespace(
        model_type="llama4", hidden_size=1, text_config=types.SimpleNamespace(**inner)
    )
    assert hf.moe_config(of_image_and_text) == hf.moe_config(inner)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    {
        "missing": (
            "qwen3_moe",
            {"experts.down_proj": None},
            "state_dict must hold exactly the arrays of .*lacks experts.down_proj.*same model",
        ),
        "unexpected": ("mixtral", {"extra": np.ones(1)}, "has the unexpected extra.*same model"),
        "quantized": (
            "gpt_oss",
            {"experts.down_proj": None, "experts.down_proj_blocks": np.ones(1)},
            "lacks experts.down_proj, and it has the unexpected .*_blocks.*dequantize",
        ),
        "shape": (
            "deepseek_v3",
            {"gate.weight": np.ones((H, E))},
            r"layers.1.mlp.gate.weight must have the shape \[4, 6\].*4 experts, hidden size 6, "
            r"expert width 3, shared width 6; got float64\[6,4\].*configuration",
        ),
        "integers": (
            "mixtral",
            {"experts.down_proj": np.ones((E, H, I), np.int8)},
            r"mlp.experts.down_proj must hold floats of 16 bits or more; got int8\[4,6,3\].*Cast",
        ),
        "dtypes": (
            "deepseek_v3",
            {"shared_experts.up_proj.weight": np.ones((2 * I, H))},
            r"shared_experts.up_proj.weight must have the dtype float32, .*shared.w_in.*"
            r"float64\[6,6\].*Cast",
        ),
    }.values(),
)
def test_state_dicts_with_mistakes(kind, change, message):
    block = block_of(kind, False) | {PREFIX + name: x for name, x in change.items()}
    block = {name: x for name, x in block.items() if x is not None}
    with pytest.raises((TypeError, ValueError), match=message):
        hf.from_state_dict(block, CONFIGS[kind], PREFIX)


@pytest.mark.parametrize("prefix", ("", "model.layers.7.mlp", "model.layers.1"))
def test_a_prefix_without_a_block_names_the_blocks(prefix):
    block = block_of("mixtral", True) | block_of("mixtral", True, prefix="model.layers.2.mlp.")
    with pytest.raises(ValueError, match="Pass the prefix of a block: 'model.layers.1.mlp', 'mo"):
        hf.from_state_dict(block, CONFIGS["mixtral"], prefix)
    with pytest.raises(ValueError, match="No name of the state dict has experts"):
        hf.from_state_dict({"lm_head.weight": np.ones(1)}, CONFIGS["mixtral"], prefix)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        (dict(w_out=None), "params must hold exactly .*lacks experts.w_out.*from_state_dict"),
        (dict(b_out=np.ones(1)), "unexpected experts.b_out"),
        (dict(w_out=np.ones((E, H, I))), r"experts.w_out must .*\[4, 3, 6\].*got float64\[4,6,3\]"),
        (dict(w_in=np.ones((E, H, 2 * I))), r"experts.w_in .*\[4, 6, 2, 3\].*\[4,6,6\]"),
    ),
)
def test_parameters_with_mistakes(change, message):
    params = hf.from_state_dict(block_of("mixtral", True), CONFIGS["mixtral"], PREFIX)
    params["experts"] = params["experts"].replace(**change)
    with pytest.raises(ValueError, match=message):
        hf.to_state_dict(params, CONFIGS["mixtral"])


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    (
        (
            "mixtral",
            dict(model_type="mixtral2"),
            "one of mixtral, .*; got 'mixtral2'. If the",
        ),
        ("mixtral", dict(model_type=None), "config must have the field model_type.*config.json"),
        ("mixtral", dict(num_experts_per_tok=None), "the field num_experts_per_tok or moe_k; got"),
        ("qwen3_moe", dict(norm_topk_prob=None), "the field norm_topk_prob; got"),
        ("mixtral", dict(hidden_act="tanh"), "hidden_act .*silu.*got 'tanh'.*ma.gated"),
    ),
)
def test_configurations_with_mistakes(kind, change, message):
    config = CONFIGS[kind] | change
    with pytest.raises(ValueError, match=message):
        hf.moe_config(config)


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers", minversion="5", reason="converts its models")
    return pytest.importorskip("torch", reason="converts its models")


def model_of(kind, **fields):
    """Return a model of two layers, of which the first is dense in some model families."""
    import transformers

    more = dict(vocab_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    more |= dict(head_dim=4, pad_token_id=0, layer_types=["full_attention"] * 2)
    if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe"):
        more |= dict(first_k_dense_replace=1, q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=2)
    fields = CONFIGS[SAME.get(kind, kind)] | more | fields
    del fields["model_type"]
    config = transformers.AutoConfig.for_model(kind, **fields)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", sorted({*CONFIGS, *SAME} - {"kimi_k2"}))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_models_of_transformers_make_a_round_trip(kind, dtype, torch, tmp_path):
    from safetensors.torch import load_file

    model = model_of(kind, hidden_size=8).to(getattr(torch, dtype))
    for tensor in model.state_dict().values():
        tensor.normal_()
    state = model.state_dict()
    prefix = f"model.layers.1.{'feed_forward' if kind == 'llama4_text' else 'mlp'}."
    block = {name: x for name, x in state.items() if name.startswith(prefix)}

    params = hf.from_state_dict(state, model.config, prefix)
    back = hf.to_torch(hf.to_state_dict(params, model.config, prefix))
    assert back.keys() == block.keys()
    for name, tensor in back.items():
        assert tensor.dtype == block[name].dtype and torch.equal(tensor, block[name]), name
    model.load_state_dict({name: x.new_zeros(x.shape) for name, x in block.items()}, strict=False)
    model.load_state_dict(back, strict=False)
    for name, tensor in model.state_dict().items():
        assert name not in back or torch.equal(tensor, back[name]), name

    # Saved tensors have other names than those in memory, and config.json has other fields.
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    prefix = next(
        m[1] for name in files if (m := re.match(r"(model\.layers\.1\..*\.)experts", name))
    )
    from_files = hf.from_state_dict(files, config, prefix)
    assert jax.tree.structure(from_files) == jax.tree.structure(params)
    assert [*map(bits, jax.tree.leaves(from_files))] == [*map(bits, jax.tree.leaves(params))]
