"""The blocks of Hugging Face transformers, where torch and transformers are installed."""

import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import harness
import pytest

pytestmark = [
    pytest.mark.one_process("the example is a program of one process"),
    pytest.mark.several_devices("the example makes a mesh of all devices"),
    pytest.mark.promotes("a user's program, which has JAX's defaults"),
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
    number = r" +(?:\d\.\de-\d\d|0\.0e\+00|-)"
    rows = re.findall(f"^(.+?)((?:{number}){{5}})$", done.stdout, re.M)
    # Columns: Mixtral, Qwen3-MoE twice, DeepSeek-V3, GPT-OSS. The dash of "-07" is no cell.
    compared = {
        name.strip(): "".join(" x"[c != "-"] for c in cells.split()) for name, cells in rows
    }
    assert compared == {
        **dict.fromkeys(("output", "tokens", "router.kernel"), "xxxxx"),
        **dict.fromkeys(("experts.w_in", "experts.w_out"), "xxxxx"),
        **dict.fromkeys(("router.select_bias", "shared.w_in", "shared.w_out"), "   x "),
        **dict.fromkeys(("router.bias", "experts.b_in", "experts.b_out"), "    x"),
    }
    assert "check: ok" in done.stdout


WRONG_ROUTERS = {
    "Mixtral": dict(renormalize=False),
    "Qwen3-MoE, raw": dict(renormalize=True),
    "DeepSeek-V3": dict(top_groups=4),
    "GPT-OSS": dict(renormalize=False),
}


@needs_both
@pytest.mark.parametrize("name", WRONG_ROUTERS)
def test_a_mistake_in_a_router_is_noticed(example, name, monkeypatch):
    right = example.hf.moe_config

    def wrong(config):
        choose = dataclasses.replace(right(config).choose, **WRONG_ROUTERS[name])
        return dataclasses.replace(right(config), choose=choose)

    monkeypatch.setattr(example.hf, "moe_config", wrong)
    found = example.differences(model_called(example, name), harness.group_of(harness.FEW).mesh)
    # Far from the tolerance, as its comment says.
    assert found["output"] > 1e-2 and found["router.kernel"] > 1e-2


WEIGHTS_LEFT_OUT = {
    "DeepSeek-V3": ("router", "select_bias"),
    "DeepSeek-V3 without its shared expert": ("shared", None),
    "GPT-OSS": ("experts", "b_in"),
}


@needs_both
@pytest.mark.parametrize("name", WEIGHTS_LEFT_OUT)
def test_weights_left_out_are_noticed(example, name, monkeypatch):
    of, field = WEIGHTS_LEFT_OUT[name]

    def without_it(x, weights, *, block=example.expert_parallel_block):
        rest = {name: value for name, value in weights.items() if name != of}
        if field is not None:
            rest[of] = weights[of].replace(**{field: None})
        return block(x, rest)

    monkeypatch.setattr(example, "expert_parallel_block", without_it)
    model = model_called(example, name.split(" ")[0])
    found = example.differences(model, harness.group_of(harness.FEW).mesh)
    assert found["output"] > 1e-2
    if of == "shared":
        assert found["shared.w_in"] == found["shared.w_out"] == 1
        assert found["router.kernel"] < example.TOLERANCE


def test_where_torch_is_missing_the_example_says_what_to_install():
    hidden = "import runpy, sys; sys.modules['torch'] = None; "
    done = run("-c", hidden + f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')")
    assert done.returncode == 1
    assert 'pip install ".[transformers]"' in done.stderr and "Traceback" not in done.stderr
