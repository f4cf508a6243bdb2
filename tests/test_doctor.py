"""Test the doctor (`python -m jax_moe_a2a`) with patched functions of the package, and with fake
drivers and GPUs."""

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path

import harness
import jax
import numpy as np
import processes
import pytest

import jax_moe_a2a as ma
from jax_moe_a2a import _doctor as doctor
from jax_moe_a2a._src import api
from jax_moe_a2a._src.group import extension, native
from jax_moe_a2a._src.group import value as group_value
from jax_moe_a2a._src.plan.memory import readable

pytestmark = [
    pytest.mark.one_process("the doctor looks at the devices of its own process"),
    pytest.mark.several_devices("the doctor examines the devices of a mesh"),
]
ROOT = Path(__file__).parents[1]
SMALL = ["--tokens", "8", "--hidden", "16", "--top-k", "2", "--experts", "16"]


def diagnose(capsys, *flags):
    """Return (exit status, output)."""
    status = doctor.main([*SMALL, *flags])
    return status, capsys.readouterr().out


def line_of(printed, name):
    """Return the verdict of the line that begins with `name`, such as "ok", and the line itself."""
    (line,) = [line for line in printed.splitlines() if line[6:].startswith(f"{name} ")]
    return line.split()[0], line


class Driver:
    def __init__(self, cuda="13.0", free=1 << 34):
        self.cuda, self.free = cuda, free

    def cuda_version(self):
        return self.cuda

    def free_bytes(self, device):
        return self.free


def gpus(number, capability="9.0"):
    return [
        types.SimpleNamespace(
            platform="gpu", device_kind="H", compute_capability=capability, local_hardware_id=i
        )
        for i in range(number)
    ]


@pytest.fixture
def one_device(monkeypatch):
    devices = jax.local_devices()[:1]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)


def test_a_machine_that_works_passes(capsys):
    status, printed = diagnose(capsys)
    assert status == 0
    nothing = "" if harness.ON_GPU else "No GPU here, nothing to do: a"
    assert printed.endswith(f"\n{nothing or 'A'}ll required checks passed.\n")
    assert "FAIL" not in printed
    for count in {harness.NUM_DEVICES, min(2, harness.NUM_DEVICES)}:
        assert line_of(printed, f"on {count}")[0] == "ok"
    for name in ("versions", "package", "devices", "kernels", "path", "memory"):
        assert line_of(printed, name)[0] in ("ok", "note")
    assert jax.__version__ in line_of(printed, "versions")[1]
    assert f"{harness.NUM_DEVICES} x " in line_of(printed, "devices")[1]


def test_the_path_is_that_of_a_group_and_says_why(one_device, capsys):
    group = ma.Group(harness.mesh_of(1), harness.AXIS)
    _, line = line_of(diagnose(capsys)[1], "path")
    assert group.path in line
    assert group._why_portable in line
    status, printed = diagnose(capsys, "--portable")
    assert status == 0
    assert "the group asks for the portable path" in line_of(printed, "path")[1]


def test_the_module_runs_by_itself_on_one_device():
    done = subprocess.run(
        [sys.executable, "-m", "jax_moe_a2a", *SMALL],
        env=dict(os.environ, JAX_PLATFORMS="cpu", XLA_FLAGS="", PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert line_of(done.stdout, "on 1")[0] == "ok"
    assert "xla_force_host_platform_device_count" in done.stdout


def broken_dispatch(break_rows):
    whole = api.dispatch

    def dispatch(*args, **kwargs):
        recv = whole(*args, **kwargs)
        return dataclasses.replace(recv, rows=break_rows(recv.rows))

    return dispatch


def test_an_exchange_that_moves_a_wrong_row_is_reported(monkeypatch, one_device, capsys):
    monkeypatch.setattr(api, "dispatch", broken_dispatch(lambda rows: rows.at[0].set(rows[1])))
    status, printed = diagnose(capsys)
    verdict, line = line_of(printed, "on 1")
    assert status == 1
    assert verdict == "FAIL"
    for name in ("sums", "the gradient of the weights"):
        assert f"{name} on 1 of 1 ranks" in line, line
    assert "what to do: run again with --portable" in printed
    assert "1 checks failed" in printed


BREAK_ROWS = """
import dataclasses
import importlib.util
from jax_moe_a2a._src import api
whole = api.dispatch

def dispatch(*args, group, **kwargs):
    recv = whole(*args, group=group, **kwargs)
    is_wrong = jax.process_index() == 1 and group.size > jax.local_device_count()
    return dataclasses.replace(recv, rows=2 * recv.rows) if is_wrong else recv

api.dispatch = dispatch
"""


def test_processes_exchange_with_each_other_and_each_looks_at_its_own_ranks(tmp_path):
    """Both processes fail if process 1 receives wrong rows: process 0 prints the table, process 1
    its failed check."""
    code = (
        f"import jax, sys\nfrom jax_moe_a2a import _doctor\n{BREAK_ROWS}\nsys.exit(_doctor.main())"
    )
    few = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = dict(JAX_PLATFORMS="cpu", XLA_FLAGS=few, PYTHONPATH=str(ROOT))
    program = [sys.executable, "-c", code, *SMALL], environment
    problems, (first, second), complaints = processes.run_together(tmp_path, [program] * 2, 150)
    expected = [f"process {process} ended with 1" for process in range(2)]
    assert problems == expected, first + second + "".join(complaints)
    assert line_of(first, "processes")[1].endswith("all 2, with 4 devices")
    assert line_of(first, "on 2")[0] == "ok", first
    assert not any(line.startswith(("ok", "note", "All")) for line in second.splitlines())
    assert "sums on 2 of 2 ranks" in line_of(first, "on 4")[1]
    assert "process 1: FAIL  on 4 " in second and "differs from numpy in sums on 2 of 2" in second
    assert "process 1: 1 checks failed" in second


def test_an_exchange_that_raises_is_reported_and_the_table_goes_on(monkeypatch, capsys):
    def raising(*args, **kwargs):
        raise RuntimeError("rank 0 waited 10 s for rank 1\nand more")

    monkeypatch.setattr(api, "dispatch", raising)
    status, printed = diagnose(capsys)
    assert status == 1
    assert "RuntimeError: rank 0 waited 10 s for rank 1" in printed
    assert line_of(printed, f"on {min(2, harness.NUM_DEVICES)}")[0] == "FAIL"
    assert "and more" not in printed


def test_gpus_that_jax_does_not_see_are_a_failure_unless_the_cpu_is_meant(monkeypatch):
    monkeypatch.setattr(doctor, "_run", lambda *command: "GPU 0: H\nGPU 1: H")
    cpus = [types.SimpleNamespace(platform="cpu", device_kind="cpu")] * 2
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert doctor._devices(cpus, None).ok
    monkeypatch.delenv("JAX_PLATFORMS")
    found = doctor._devices(cpus, None)
    assert found.ok is False
    assert "lists 2 GPUs" in found.said and "jax[cuda13]" in found.advice


@pytest.mark.parametrize(("cuda", "extra"), [("12.8", "cuda12"), ("14.1", "cuda13")])
def test_the_advice_for_unseen_gpus_fits_the_driver(cuda, extra):
    assert f"'jax[{extra}]'" in doctor._how_jax_sees_gpus(Driver(cuda=cuda))


def test_kernels_that_are_missing_fail_only_where_they_are_wanted(monkeypatch):
    monkeypatch.setattr(native, "has_kernels", lambda: False)
    assert doctor._kernels(Driver(), wanted=False).ok is None
    found = doctor._kernels(Driver(), wanted=True)
    assert found.ok is False and "CUDA kernels" in found.said
    assert extension.how_to_build() in found.advice
    assert all(map(doctor._can_run_kernels, gpus(2)))
    others = (gpu for capability in ("8.0", "12.0", "gfx942") for gpu in gpus(1, capability))
    assert not any(map(doctor._can_run_kernels, others))


@pytest.mark.parametrize(
    ("programs", "cuda", "steps"),
    [
        ({"g++"}, "13.0", "{build}"),
        (set(), "13.0", "install a C++ compiler (g++), then {build}"),
        ({"g++"}, "12.8", "update the driver to one for CUDA 13, or name an nvcc of CUDA 12"),
    ],
)
def test_the_advice_to_build_fits_the_machine(monkeypatch, programs, cuda, steps):
    monkeypatch.delenv("CXX", raising=False)
    which = lambda name: f"/bin/{name}" if name in programs else None
    monkeypatch.setattr(doctor.shutil, "which", which)
    advice = doctor._how_to_build(Driver(cuda=cuda))
    assert advice.startswith(steps.format(build=extension.how_to_build()))
    assert advice.endswith(extension.how_to_build())


def test_kernels_built_with_a_newer_cuda_than_the_driver_are_a_failure(monkeypatch):
    monkeypatch.setattr(native, "cuda_build", lambda: "CUDA 13.0.88 for 90")
    assert doctor._driver(Driver(cuda="13.0"), wanted=True).ok
    assert doctor._driver(Driver(cuda="12.8"), wanted=False).ok
    found = doctor._driver(Driver(cuda="12.8"), wanted=True)
    assert found.ok is False and "update the driver" in found.advice


def test_gpus_on_which_the_kernels_never_ran_are_named():
    assert doctor._untested(gpus(2)).ok
    found = doctor._untested([*gpus(1), *gpus(1, "10.0")])
    assert found.ok is None and "never run on 10.0, only on 9.0" in found.said


def test_the_path_must_be_that_of_the_kernels_where_they_are_wanted():
    group = doctor._group(harness.devices(2), portable=True)
    found = doctor._path(group, wanted=True)
    assert found.ok is False and "nvidia-smi topo" in found.advice
    assert doctor._path(group, wanted=False).ok is None


@pytest.mark.parametrize("enough", (True, False))
def test_the_workspace_must_fit_next_to_xlas_pool(monkeypatch, enough):
    """The memory check fails if one byte is missing for the workspace and its header."""
    sizes = dict(hidden=128, top_k=2)
    group = harness.group_of(harness.SEVERAL)
    estimate = ma.memory_estimate(num_tokens=64, num_experts=256, group_size=group.size, **sizes)
    workspace, header = estimate.workspace_bytes, 1 << 20
    monkeypatch.setattr(ma.Group, "path", "cuda")
    monkeypatch.setattr(native, "limit", lambda name: header)
    flags = types.SimpleNamespace(tokens=64, experts=None, **sizes)
    driver = Driver(free=workspace + header - (not enough))
    found = doctor._memory(driver, group, flags)
    assert found.ok is enough
    assert enough or "XLA_PYTHON_CLIENT_MEM_FRACTION" in found.advice
    assert doctor._memory(None, group, flags).ok is None


@pytest.mark.skipif(harness.MANY < 4, reason="needs two hosts of two")
def test_devices_on_several_hosts_are_checked_in_two_levels(monkeypatch):
    """The memory check of a two-level group includes the buffers of collectives."""
    ranks_of_host = harness.MANY // 2

    def hosts_of(mesh, axes):
        sizes = (mesh.shape[axis] for axis in axes)
        return (np.arange(harness.MANY) // ranks_of_host).reshape(1, *sizes)

    monkeypatch.setattr(group_value, "hosts_of", hosts_of)
    group = doctor._group(harness.devices(harness.MANY), portable=True, in_two_levels=True)
    assert group.two_level and not doctor._group(group.mesh.devices.flat, portable=True).two_level
    assert f"(2 hosts of {ranks_of_host}), because " in doctor._path(group, wanted=False).said
    found = doctor._exchange(group)
    assert found.ok, found

    sizes = dict(hidden=128, top_k=2)
    of_levels = dict(sizes, num_experts=256, group_size=(2, ranks_of_host))
    estimate = ma.memory_estimate(num_tokens=64, **of_levels)
    buffers = f"collectives between hosts {readable(estimate.collective_bytes)} in XLA's pool"
    flags = types.SimpleNamespace(tokens=64, experts=None, **sizes)
    portable = doctor._memory(None, group, flags)
    assert buffers in portable.said and portable.said.endswith("portable path")
    monkeypatch.setattr(ma.Group, "path", "cuda")
    monkeypatch.setattr(native, "limit", lambda name: 1 << 20)
    for missing in (0, 1):
        driver = Driver(free=estimate.levels[1].workspace_bytes + (1 << 20) - missing)
        found = doctor._memory(driver, group, flags)
        assert found.ok is not bool(missing)
        assert buffers in found.said and "workspace within a host " in found.said
