"""Weights of Hugging Face transformers, converted in both directions.

State dicts are written by hand, so that most tests run without PyTorch. The last test converts
models of transformers, and `test_examples.py` compares outputs and gradients.
"""

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

E, H, I = 4, 6, 3  # experts, hidden size, width of an expert
PREFIX = "model.layers.1.mlp."
CONFIGS = {
    "mixtral": dict(intermediate_size=I, num_local_experts=E, num_experts_per_tok=2),
    "qwen3_moe": dict(
        moe_intermediate_size=I, num_experts=E, num_experts_per_tok=2, norm_topk_prob=False
    ),
    "deepseek_v3": dict(
        moe_intermediate_size=I,
        n_routed_experts=E,
        n_shared_experts=2,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    "gpt_oss": dict(intermediate_size=I, num_local_experts=E, num_experts_per_tok=2),
}
CONFIGS = {
    kind: dict(model_type=kind, hidden_size=H, hidden_act="silu") | fields
    for kind, fields in CONFIGS.items()
}
FORMS = [(kind, per_expert) for kind in CONFIGS for per_expert in (False, True)][:-1]


def shapes_of(kind, per_expert):
    """Return the shape of each tensor of a block, as transformers has it."""
    if kind == "gpt_oss":
        return {
            "router.weight": (E, H),
            "router.bias": (E,),
            "experts.gate_up_proj": (E, H, 2 * I),
            "experts.gate_up_proj_bias": (E, 2 * I),
            "experts.down_proj": (E, I, H),
            "experts.down_proj_bias": (E, H),
        }
    shapes = {"gate.weight": (E, H)}
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    if per_expert:
        for expert in range(E):
            for name, shape in zip(names, [(I, H), (I, H), (H, I)], strict=True):
                shapes[f"experts.{expert}.{name}.weight"] = shape
    else:
        shapes |= {"experts.gate_up_proj": (E, 2 * I, H), "experts.down_proj": (E, H, I)}
    if kind == "deepseek_v3":
        shapes["gate.e_score_correction_bias"] = (E,)
        for name, shape in zip(names, [(2 * I, H), (2 * I, H), (H, 2 * I)], strict=True):
            shapes[f"shared_experts.{name}.weight"] = shape
    return shapes


def block_of(kind, per_expert, dtype=np.float32, prefix=PREFIX):
    """Return the state dict of a block. The bias that chooses experts is float32, as published."""
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
@pytest.mark.parametrize("dtype", (np.float32, jnp.bfloat16))
def test_a_round_trip_returns_the_same_names_and_bits(kind, per_expert, dtype):
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


def original(kind, block, x):
    """Return what a block of transformers 5 computes for tokens, with numpy and loops."""
    y = np.zeros_like(x)
    router = "router" if kind == "gpt_oss" else "gate"
    for token, out in zip(x, y, strict=True):
        logits = block[f"{router}.weight"] @ token + block.get("router.bias", 0)
        probs = np.exp(logits) / np.exp(logits).sum()
        scores = chosen_by = sigmoid(logits) if kind == "deepseek_v3" else probs
        if kind == "deepseek_v3":  # two groups of two experts, of which the best one counts
            chosen_by = scores + block["gate.e_score_correction_bias"]
            sums = np.repeat(chosen_by.reshape(2, 2).sum(axis=1), 2)
            chosen_by = np.where(sums == sums.max(), chosen_by, -np.inf)
        ids = np.argsort(-chosen_by)[:2]
        weights = scores[ids] / (1 if kind == "qwen3_moe" else scores[ids].sum())
        weights *= 2.5 if kind == "deepseek_v3" else 1
        for expert, weight in zip(ids, weights, strict=True):
            first, second = (block[f"experts.{name}_proj"][expert] for name in ("gate_up", "down"))
            if kind == "gpt_oss":
                h = token @ first + block["experts.gate_up_proj_bias"][expert]
                gate, up = np.minimum(h[::2], 7), np.clip(h[1::2], -7, 7)
                h = (up + 1) * gate * sigmoid(1.702 * gate)
                out += weight * (h @ second + block["experts.down_proj_bias"][expert])
            else:
                gate, up = np.split(first @ token, 2)
                out += weight * (second @ (gate * sigmoid(gate) * up))
        if kind == "deepseek_v3":
            gate, up, down = (
                block[f"shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            gate = gate @ token
            out += down @ (gate * sigmoid(gate) * (up @ token))
    return y


def converted(params, x):
    """Return the same, with the converted weights, the router of the package and all experts."""
    router, zeros = params["router"], np.zeros(E, x.dtype)
    logits = x @ router.kernel + (zeros if router.bias is None else router.bias)[None]
    choices = router.choose(logits, select_bias=router.select_bias)
    y = dense_experts(x, choices.weights, choices.ids, params["experts"])
    if "shared" in params:
        zeros = np.zeros((len(x), 1), np.int32)
        y += dense_experts(x, 1 + zeros.astype(x.dtype), zeros, params["shared"])
    return y


def fused(kind, block):
    """Return a block with tensors of each expert as one with tensors of all experts."""
    gate, up, down = (
        ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    of_all = lambda name: np.stack([block[f"experts.{e}.{name}.weight"] for e in range(E)])
    gate_up = np.concatenate([of_all(gate), of_all(up)], axis=1)
    return block | {"experts.gate_up_proj": gate_up, "experts.down_proj": of_all(down)}


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize(("kind", "per_expert"), FORMS)
def test_converted_weights_compute_what_the_block_computes(kind, per_expert):
    block = block_of(kind, per_expert, prefix="")
    if kind == "gpt_oss":
        block["experts.gate_up_proj"] *= 4  # so that both clamps change values
    x = np.random.default_rng(1).normal(size=(12, H)).astype(np.float32)
    config = types.SimpleNamespace(**CONFIGS[kind])  # an object, as in transformers
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
            dict(model_type="qwen2_moe"),
            "model_type of config .*gpt_oss; got 'qwen2_moe'",
        ),
        ("mixtral", dict(model_type=None), "config must have the field model_type.*config.json"),
        ("mixtral", dict(num_experts_per_tok=None), "the field num_experts_per_tok; got"),
        ("qwen3_moe", dict(norm_topk_prob=None), "the field norm_topk_prob; got"),
        ("mixtral", dict(hidden_act="tanh"), "hidden_act .*silu.*got 'tanh'.*ma.gated"),
    ),
)
def test_configurations_with_mistakes(kind, change, message):
    config = CONFIGS[kind] | change
    with pytest.raises(ValueError, match=message):
        hf.moe_config(config)


# ------------------------------------------------------------------------------- with transformers


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers", minversion="4.57", reason="converts its models")
    return pytest.importorskip("torch", reason="converts its models")


def model_of(kind, **fields):
    """Return a tiny model of transformers with two layers; a dense one first in DeepSeek-V3."""
    import transformers

    (name,) = [
        name for name in dir(transformers) if name.lower() == f"{kind.replace('_', '')}config"
    ]
    more = dict(vocab_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    if kind == "deepseek_v3":
        more |= dict(first_k_dense_replace=1, q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=2)
    fields = CONFIGS[kind] | more | dict(head_dim=4, pad_token_id=0) | fields
    del fields["model_type"]
    config = getattr(transformers, name)(**fields)
    return getattr(transformers, name.replace("Config", "ForCausalLM"))(config)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_models_of_transformers_make_a_round_trip(kind, dtype, torch, tmp_path):
    from safetensors.torch import load_file

    model = model_of(kind, hidden_size=8).to(getattr(torch, dtype))
    for tensor in model.state_dict().values():
        tensor.normal_()
    state = model.state_dict()
    per_expert = any(re.search(r"experts\.\d", name) for name in state)
    prefix = f"model.layers.1.{'block_sparse_moe' if kind == 'mixtral' and per_expert else 'mlp'}."
    block = {name: x for name, x in state.items() if name.startswith(prefix)}

    params = hf.from_state_dict(state, model.config, prefix)
    back = hf.to_torch(hf.to_state_dict(params, model.config, prefix, per_expert=per_expert))
    assert back.keys() == block.keys()
    for name, tensor in back.items():
        assert tensor.dtype == block[name].dtype and torch.equal(tensor, block[name]), name
    model.load_state_dict({name: x.new_zeros(x.shape) for name, x in block.items()}, strict=False)
    model.load_state_dict(back, strict=False)
    for name, tensor in model.state_dict().items():
        assert name not in back or torch.equal(tensor, back[name]), name

    # The names in files differ from the names of a model in memory, and the fields of config.json
    # differ from the fields of its config.
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    prefix = next(
        m[1] for name in files if (m := re.match(r"(model\.layers\.1\..*\.)experts", name))
    )
    from_files = hf.from_state_dict(files, config, prefix)
    assert jax.tree.structure(from_files) == jax.tree.structure(params)
    assert [*map(bits, jax.tree.leaves(from_files))] == [*map(bits, jax.tree.leaves(params))]
