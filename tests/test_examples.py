"""Run each example in its own process, and the notebook's cells in this one, without a Jupyter
kernel."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import harness
import jax
import matplotlib
import numpy as np
import processes
import pytest
import test_integrations_transformers
from matplotlib import pyplot

import jax_moe_a2a as ma

pytestmark = [
    pytest.mark.one_process("it starts processes of its own"),
    pytest.mark.several_devices("the examples make meshes of all devices"),
    pytest.mark.promotes("users' programs use JAX's defaults"),
]
EXAMPLES = Path(__file__).parents[1] / "examples"


def program(name: str, *args: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of an example, and the environment variables to add."""
    # This process has already reserved most of the GPUs' memory.
    more = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return [sys.executable, str(EXAMPLES / name), *args], more | environment


def run(name: str, *args: str, status: int = 0, **environment: str) -> str:
    command, beside = program(name, *args, **environment)
    done = subprocess.run(
        command, env=os.environ | beside, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def step_losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"^step +\d+  loss (\S+)", printed, re.M)]


def test_training_names_its_path_lowers_the_loss_and_leaves_plot_and_sample(tmp_path):
    plot = tmp_path / "plot.png"
    small = "--layers=1 --steps=12 --sequences=8 --sample=8 --seed=1 --log-every=1".split()
    printed = run("train_moe.py", *small, f"--out={plot}")
    on_gpu, on_cpu = r"CUDA kernels on 1 x \d GPUs", "portable path on 1 x 8 virtual CPU devices"
    assert re.search(f"^exchange: {on_gpu if harness.ON_GPU else on_cpu}$", printed, re.M)
    losses = step_losses(printed)
    assert len(losses) == 12
    assert losses[0] > 5.5 and losses[-1] < losses[0] - 0.5
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "--- the model:" in printed


# With these flags, no choice is dropped, so losses are equal on every mesh and with dense experts.
FEW_STEPS = "--layers=1 --steps=3 --sequences=8 --micro-batches=2 --log-every=1".split()
FEW_STEPS += "--balance=bias --capacity-factor=0 --dtype=float32".split()


@pytest.fixture(scope="module")
def dense_losses(tmp_path_factory):
    plot = tmp_path_factory.mktemp("dense") / "a.png"
    of_dense = "--experts=dense", "--mesh=1,2", "--sample=0", f"--out={plot}"
    # On GPUs, XLA rounds float32 operands to TF32, so the losses are less exact.
    losses = step_losses(run("train_moe.py", *FEW_STEPS, *of_dense))
    return pytest.approx(losses, abs=5e-3 if harness.ON_GPU else 1e-4)


@pytest.mark.skipif(importlib.util.find_spec("orbax") is None, reason="orbax is not installed")
@pytest.mark.skipif(harness.NUM_DEVICES < 4, reason="needs two meshes of four devices")
def test_a_training_that_continues_on_another_mesh_equals_the_dense_reference(
    tmp_path, dense_losses
):
    def train(*args: str) -> list[float]:
        own = "--sample=0", f"--checkpoint={tmp_path}/saved", f"--out={tmp_path}/a.png"
        return step_losses(run("train_moe.py", *FEW_STEPS, *own, *args))

    first, then = train("--mesh=2,2", "--stop=2"), train("--mesh=1,4")
    assert len(first) == 2 and len(then) == 1
    assert first + then == dense_losses


@pytest.mark.skipif(harness.NUM_DEVICES < 2, reason="needs a device for each process")
def test_two_processes_train_like_the_dense_reference_in_one(tmp_path, dense_losses):
    flags = os.environ.get("XLA_FLAGS", "")  # of a repeated flag, XLA uses the last value
    flags += " --xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    programs = [
        program(
            "train_moe.py",
            *FEW_STEPS,
            "--sample=1",
            f"--out={tmp_path}/{process}.png",
            JAX_LOCAL_DEVICE_IDS=str(process),
            XLA_FLAGS=flags,
        )
        for process in range(2)
    ]
    problems, (printed, of_second), complaints = processes.run_together(tmp_path, programs, 250)
    assert problems == [], printed + of_second + "".join(complaints)
    assert " of 2 processes\n" in printed and "--- the model:" in printed
    assert "loss" not in of_second and not (tmp_path / "1.png").exists()
    assert step_losses(printed) == dense_losses


def test_each_way_to_balance_a_router_has_the_load_that_the_recipes_state(tmp_path):
    figure = tmp_path / "load.png"
    printed = run("balance.py", "--steps=11", f"--out={figure}", MPLBACKEND="agg")
    recipes = (EXAMPLES.parent / "docs/recipes.md").read_text()
    for name in "none", "loss", "sign", "quantile":
        found = re.search(rf"^{name} +(\S+) +(\S+)", printed, re.M).groups()
        stated = re.search(rf"^\| `{name}`.* \| (\S+) \| (\S+) \| \S+ \|$", recipes, re.M).groups()
        assert [*map(float, found)] == pytest.approx([*map(float, stated)], abs=0.15), name
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_layer_equals_the_dense_computation():
    assert run("moe_layer.py").count("relative to the dense computation") == 5


def test_work_during_the_exchange_changes_no_value_and_no_gradient():
    assert run("overlap.py").count("differs from the whole layer by") == 2


@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="flax is not installed")
def test_flax_module_learns():
    assert len(re.findall(r"^step +\d+  loss ", run("flax_nnx_moe.py"), re.M)) == 6


MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
needs_both = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@needs_both
def test_blocks_of_transformers_have_the_outputs_and_gradients_of_the_originals():
    printed = run("hf_moe_block.py")
    assert re.search(f" {harness.MANY} ranks, ", printed)
    number = r" +(?:\d\.\de-\d\d|0\.0e\+00)"
    rows = re.findall(f"^([a-z].+?)(?:{number}){{4}}({number}| +-)$", printed, re.M)
    # The last column is for the shared expert.
    families = {name.split(",")[0]: of_shared.strip() != "-" for name, of_shared in rows}
    configs, same = test_integrations_transformers.CONFIGS, test_integrations_transformers.SAME
    assert families.keys() == {*configs, *same}
    without = {"mixtral", "minimax_m2", "olmoe", "qwen3_moe", "gpt_oss"}
    assert {name for name, has_shared in families.items() if not has_shared} == without
    assert "check: ok" in printed


@needs_both
@pytest.mark.exchanges(0)
def test_losses_are_those_of_transformers_up_to_factors_and_means():
    """Mixtral's loss in transformers is one loss of all layers' tokens, and Switch's is the mean
    over sequences."""
    import torch

    mixtral, switch = (
        importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        for model in ("mixtral", "switch_transformers")
    )
    logits = np.random.default_rng(4).normal(size=(3, 40, 16)).astype(np.float32)
    for mask in (None, np.arange(40) % 3 > 0):
        given = None if mask is None else torch.tensor(mask)[None]
        expected = mixtral.load_balancing_loss_func(tuple(torch.tensor(logits)), 16, 4, given)
        found = ma.TopK(4)(logits, mask=None if mask is None else np.tile(mask, (3, 1)))
        loss = ma.load_balancing_loss(found.scores, found.ids)
        np.testing.assert_allclose(4 * loss, expected, rtol=1e-5)
    of_torch, found = torch.tensor(logits), ma.TopK(1)(logits)
    np.testing.assert_allclose(
        ma.router_z_loss(logits), switch.router_z_loss_func(of_torch), rtol=1e-5
    )
    ids = torch.tensor(np.array(found.ids[..., 0]))
    np.testing.assert_allclose(
        jax.vmap(ma.load_balancing_loss)(found.scores, found.ids).mean(),
        switch.load_balancing_loss_func(torch.softmax(of_torch, -1), ids),
        rtol=1e-5,
    )


def test_where_torch_is_missing_the_example_says_what_to_install():
    command, _ = program("hf_moe_block.py")
    hidden = "import runpy, sys; sys.modules['torch'] = None; "
    code = hidden + f"runpy.run_path({command[1]!r}, run_name='__main__')"
    done = subprocess.run([command[0], "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 1
    assert 'pip install ".[transformers]"' in done.stderr and "Traceback" not in done.stderr


NOTEBOOK = EXAMPLES / "tour.ipynb"


def code_cells():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_with_outputs():
    """Before you commit a change of the notebook, run all cells in Jupyter on CPU devices."""
    drawn = [cell for cell in code_cells() if "figure" in "".join(cell["source"])]
    for cell in code_cells():
        kinds = [output["output_type"] for output in cell["outputs"]]
        assert kinds, "a cell without an output"
        assert ("display_data" in kinds) == (cell in drawn)


def test_the_cells_run_and_draw(monkeypatch):
    matplotlib.use("agg")
    pyplot.close("all")
    monkeypatch.setattr(pyplot, "show", lambda: None)
    names = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells()):
        exec(
            compile("".join(cell["source"]), f"{NOTEBOOK.name}, code cell {number}", "exec"), names
        )
    assert len(pyplot.get_fignums()) == 3  # plots of rows, of drops by capacity, and of loads
    assert len(names["figure"].axes) >= 2  # plots of the load of experts and of ranks
    pyplot.close("all")
    assert names["difference"] < 1e-4 and names["worst"] < 1e-4
    even, uneven = (np.array(shares) for shares in names["shares"].values())
    assert np.all(np.diff(even) <= 0) and np.all(even <= uneven)
    assert even[-1] == 0 and uneven[0] > 40
    assert names["RANKS"] == min(4, jax.device_count())
