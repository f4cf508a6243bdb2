"""The blocks of Hugging Face transformers, where torch and transformers are installed."""

import copy
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import harness
import jax
import pytest
from jax import lax

pytestmark = [
    pytest.mark.one_process("the example is a program of one process"),
    pytest.mark.several_devices("the example makes a mesh of all devices"),
]
EXAMPLE = Path(__file__).parents[1] / "examples" / "hf_moe_block.py"
MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
needs_both = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("hf_moe_block", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_called(example, name):
    return next(model for model in example.MODELS if model.name == name)


def run(*command):
    """Run Python in a process of its own."""
    return subprocess.run(
        [sys.executable, *command],
        # On GPUs this process has most of the memory already.
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=500,
    )


@needs_both
def test_outputs_and_gradients_are_those_of_the_originals():
    done = run(str(EXAMPLE))
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(f" {harness.MANY} ranks, ", done.stdout)
    rows = re.findall(r"^(.+?)((?: +(?:\d\.\de-\d\d|0\.0e\+00|-)){8})$", done.stdout, re.M)
    compared = {title.strip(): cells.count("e") for title, cells in rows}
    # Output, tokens, router, two of the experts; DeepSeek-V3 has two of the shared expert, a bias.
    assert compared == {
        "Mixtral": 5,
        "Qwen3-MoE": 5,
        "Qwen3-MoE, not normalised": 5,
        "DeepSeek-V3": 8,
    }
    assert "check: ok" in done.stdout


def with_config(router, **changes):
    """Return the router with another configuration than the original has."""

    def changed(logits, bias, config):
        config = copy.deepcopy(config)
        for name, value in changes.items():
            assert getattr(config, name) != value
            setattr(config, name, value)
        return router(logits, bias, config)

    return changed


WRONG_ROUTERS = {
    "Mixtral without renormalisation": lambda example: (
        lambda logits, bias, config: lax.top_k(jax.nn.softmax(logits), config.num_experts_per_tok)
    ),
    "Qwen3-MoE, not normalised, but with": lambda example: example.mixtral_router,
    "DeepSeek-V3 without bias": lambda example: (
        lambda logits, bias, config: example.deepseek_v3_router(logits, 0 * bias, config)
    ),
    "DeepSeek-V3 with experts of all groups": lambda example: with_config(
        example.deepseek_v3_router, topk_group=4
    ),
    "DeepSeek-V3 without scaling": lambda example: with_config(
        example.deepseek_v3_router, routed_scaling_factor=1.0
    ),
}


@needs_both
@pytest.mark.parametrize("mistake", WRONG_ROUTERS)
def test_a_mistake_in_a_router_is_noticed(example, mistake):
    name = re.match("Mixtral|Qwen3-MoE, not normalised|DeepSeek-V3", mistake)[0]
    model = model_called(example, name)._replace(router=WRONG_ROUTERS[mistake](example))
    found = example.differences(model, harness.group_of(harness.FEW))
    # Far from the tolerance, as its comment says.
    assert found["output"] > 1e-2 and found["router"] > 1e-2


@needs_both
def test_a_shared_expert_left_out_is_noticed(example, monkeypatch):
    def without_it(x, weights, *, block=example.expert_parallel_block, **options):
        rest = {name: w for name, w in weights.items() if not name.startswith("shared")}
        return block(x, rest, **options)

    monkeypatch.setattr(example, "expert_parallel_block", without_it)
    found = example.differences(model_called(example, "DeepSeek-V3"), harness.group_of(harness.FEW))
    assert found["output"] > 1e-2 and found["shared_gate_up"] == found["shared_down"] == 1
    assert found["router"] < example.TOLERANCE


@needs_both
@pytest.mark.parametrize("change", ("renamed", "added", "transposed"))
def test_weights_kept_in_another_way_are_an_error_that_names_the_version(example, change):
    import torch
    import transformers

    block = example.random_block(model_called(example, "DeepSeek-V3"))
    if change == "renamed":
        block.experts = torch.nn.Linear(2, 2)
    elif change == "added":
        block.gate.scale = torch.nn.Parameter(torch.ones(1))
    else:
        block.gate.weight = torch.nn.Parameter(block.gate.weight.T)
    with pytest.raises(TypeError, match=f"{re.escape(transformers.__version__)}.*DeepseekV3MoE"):
        example.weights_of(block, torch.Tensor.detach)


def test_where_torch_is_missing_the_example_says_what_to_install():
    hidden = "import runpy, sys; sys.modules['torch'] = None; "
    done = run("-c", hidden + f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')")
    assert done.returncode == 1
    assert "pip install torch" in done.stderr and "Traceback" not in done.stderr
