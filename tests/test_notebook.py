"""The cells of the notebook run in order, without a Jupyter kernel, and have outputs."""

import json
from pathlib import Path

import jax
import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot

pytestmark = [
    pytest.mark.one_process("the notebook is a program of one process"),
    pytest.mark.several_devices("the notebook makes a mesh of several devices"),
    pytest.mark.promotes("a reader's program, which has JAX's defaults"),
]
NOTEBOOK = Path(__file__).parents[1] / "examples/tour.ipynb"


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
    assert len(pyplot.get_fignums()) == 3  # rows, drops by capacity, and the load
    assert len(names["figure"].axes) >= 2  # the load of experts and of ranks
    pyplot.close("all")
    assert names["difference"] < 1e-4 and names["worst"] < 1e-4
    even, uneven = (np.array(shares) for shares in names["shares"].values())
    assert np.all(np.diff(even) <= 0) and np.all(even <= uneven)
    assert even[-1] == 0 and uneven[0] > 40
    assert names["RANKS"] == min(4, jax.device_count())
