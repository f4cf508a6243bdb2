"""Test that the wheels of a release work in a new environment without compiler, CUDA toolkit and
sources.

``make wheels test-wheels`` sets MOE_A2A_WHEELS (a folder) and MOE_A2A_WHEEL_PYTHONS.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = os.environ.get("MOE_A2A_WHEELS", "")
PYTHONS = os.environ.get("MOE_A2A_WHEEL_PYTHONS", sys.executable).split()
WHEELS = sorted(path.name for path in Path(FOLDER).glob("*.whl")) if FOLDER else []
MAJORS = [major for major in (12, 13) if any(f"_cuda{major}-" in name for name in WHEELS)]

pytestmark = [
    pytest.mark.exchanges(0),
    pytest.mark.one_process("installs packages, and runs programs of its own"),
    pytest.mark.skipif(not FOLDER, reason="needs wheels: make wheels test-wheels"),
]


@pytest.mark.parametrize("major", [None, *MAJORS])
@pytest.mark.parametrize("python", PYTHONS)
def test_the_quick_start_and_the_doctor_run_from_wheels_alone(python, major):
    command = [python, str(ROOT / "tools" / "try_wheels.py"), FOLDER]
    done = subprocess.run(
        [*command, *(["--cuda", str(major)] if major else [])],
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "portable path, dropped rows: 0" in done.stdout
    assert "all required checks passed." in done.stdout.lower()


def test_there_is_one_wheel_without_kernels_for_all_platforms():
    (name,) = (name for name in WHEELS if name.startswith("jax_moe_a2a-"))
    assert name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize("major", MAJORS)
def test_wheels_with_kernels_are_for_python_3_11_and_for_3_12_and_newer(major):
    tags = [name.split("-")[2:4] for name in WHEELS if f"_cuda{major}-" in name]
    assert sorted(tags) == [["cp311", "cp311"], ["cp312", "abi3"]]
    assert all("-manylinux_2_" in name for name in WHEELS if f"_cuda{major}-" in name)
