"""Test a build's choice of nvcc, its requests from pip, and the files of each wheel's project."""

import ast
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_moe_a2a._src.group import native

pytestmark = [
    pytest.mark.exchanges(0),
    pytest.mark.one_process("looks at the file system and the environment only"),
]
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import nvcc  # noqa: E402
import wheels  # noqa: E402


@pytest.fixture(autouse=True)
def empty_machine(monkeypatch, tmp_path):
    for name in ("CUDACXX", "CUDA_PATH", "MOE_A2A_CUDA", "CMAKE_ARGS", "SKBUILD_CMAKE_DEFINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.chdir(ROOT)


def compiler(folder, release):
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvcc"
    program.write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


@pytest.mark.parametrize(("release", "fits"), [("11.8", 0), ("12.0", 0), ("12.1", 1), ("13.0", 1)])
def test_nvcc_on_path_is_used_if_it_is_new_enough(tmp_path, release, fits):
    on_path = compiler(tmp_path / "bin", release)
    assert nvcc.of_machine() == (on_path if fits else None)


def test_the_folder_of_cuda_path_comes_before_path(tmp_path, monkeypatch):
    on_path = compiler(tmp_path / "bin", "12.8")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda"))
    assert nvcc.of_machine() == on_path
    named = compiler(tmp_path / "cuda" / "bin", "13.0")
    assert nvcc.of_machine() == named


def test_a_compiler_that_the_user_names_is_used_whatever_it_is(tmp_path, monkeypatch):
    compiler(tmp_path / "bin", "13.0")
    old = compiler(tmp_path / "old", "11.8")
    monkeypatch.setenv("CUDACXX", old)
    assert nvcc.of_machine() == old


def test_pypis_toolkit_is_used_only_if_it_is_complete(tmp_path, monkeypatch):
    toolkit = tmp_path / "nvidia" / "cu13"
    named = compiler(toolkit / "bin", "13.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert nvcc.of_pypi() is None  # incomplete, like that of jax[cuda13]
    for needed in nvcc.NEEDED_BESIDE_NVCC:
        (toolkit / needed).parent.mkdir(parents=True, exist_ok=True)
        (toolkit / needed).touch()
    assert nvcc.of_pypi() == named


KERNELS = ("cuda-toolkit", "nanobind", "jaxlib")


def requirements(monkeypatch, settings=None):
    pytest.importorskip("scikit_build_core", reason="of the extra test; pip builds elsewhere")
    import backend

    monkeypatch.setattr(nvcc, "is_on_pypi", lambda: True)
    hooks = (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable)
    wheel, editable = (
        [name for name in hook(settings) if name.startswith(KERNELS)] for hook in hooks
    )
    assert wheel == editable
    return wheel


def test_a_build_asks_for_pypis_toolkit_only_if_this_machine_has_no_nvcc(tmp_path, monkeypatch):
    assert requirements(monkeypatch)[-1] == nvcc.PYPI_TOOLKIT
    compiler(tmp_path / "bin", "11.8")
    assert requirements(monkeypatch)[-1] == nvcc.PYPI_TOOLKIT
    compiler(tmp_path / "bin", "13.0")
    assert requirements(monkeypatch) == ["nanobind>=2.4", "jaxlib==0.10.2"]


def test_a_build_without_kernels_asks_for_nothing_of_them(monkeypatch):
    assert requirements(monkeypatch, {"cmake.define.MOE_A2A_CUDA": "OFF"}) == []
    assert requirements(monkeypatch, {"wheel.cmake": "false"}) == []
    assert nvcc.PYPI_TOOLKIT in requirements(monkeypatch, {"cmake.define.MOE_A2A_CUDA": "ON"})
    monkeypatch.setenv("MOE_A2A_CUDA", "OFF")
    assert requirements(monkeypatch) == []
    import backend

    assert backend.get_requires_for_build_wheel() == []  # no C++ compiler
    monkeypatch.setenv("MOE_A2A_CUDA", "AUTO")
    assert nvcc.PYPI_TOOLKIT in requirements(monkeypatch)
    monkeypatch.setattr(nvcc, "is_on_pypi", lambda: False)
    assert backend.for_kernels(None) == backend.KERNELS_NEED


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ("", [90]),
        ("8.0", [90]),
        ("9.0\n9.0", [90]),
        ("10.0\n9.0", [90, 100]),
        ("10.3", [100]),
        ("12.0", [100]),
    ],
)
def test_the_build_is_for_the_gpus_of_the_machine(tmp_path, gpus, expected):
    program = Path(compiler(tmp_path / "bin", "12.8"))
    program.write_text("#!/bin/sh\necho compute_80 compute_90 compute_100\n")
    if gpus:
        smi = tmp_path / "bin/nvidia-smi"
        smi.write_text(f"#!/bin/sh\necho '{gpus}'\n")
        smi.chmod(program.stat().st_mode)
    assert nvcc.architectures(str(program)) == expected


@pytest.mark.parametrize(
    ("system", "machine", "libc", "is_there"),
    [
        ("linux", "x86_64", "glibc", True),
        ("linux", "aarch64", "glibc", True),
        ("linux", "ppc64le", "glibc", False),
        ("linux", "x86_64", "", False),
        ("darwin", "arm64", "", False),
    ],
)
def test_pypi_has_the_toolkit_for_two_processors_with_glibc(
    monkeypatch, system, machine, libc, is_there
):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(nvcc.platform, "machine", lambda: machine)
    monkeypatch.setattr(nvcc.platform, "libc_ver", lambda: (libc, "2.36"))
    assert nvcc.is_on_pypi() is is_there


@pytest.mark.parametrize("major", wheels.MAJORS.values())
def test_the_project_of_a_wheel_has_the_version_of_the_package_and_all_sources(
    tmp_path, monkeypatch, major
):
    monkeypatch.setattr(wheels, "STAGE", tmp_path)
    folder = wheels.stage(major, ("90", "100-real"))
    main = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    written = tomllib.loads((folder / "pyproject.toml").read_text())
    project, package = written["project"], f"jax_moe_a2a_cuda{major}"
    assert project["name"] == f"jax-moe-a2a-cuda{major}"
    assert project["version"] == main["version"]
    assert project["dependencies"] == [f"jax-moe-a2a=={main['version']}"]
    assert project["requires-python"] == main["requires-python"]
    assert written["tool"]["scikit-build"]["cmake"]["define"] == {
        "MOE_A2A_CUDA": "ON",
        "MOE_A2A_PACKAGE": package,
        "CMAKE_CUDA_ARCHITECTURES": "90;100-real",
    }
    assert (folder / package / "__init__.py").exists()
    assert (folder / "tools" / "backend.py").exists()
    sources = [path.relative_to(ROOT) for path in (ROOT / "cuda").glob("**/*.cu")]
    assert sources and all((folder / source).exists() for source in sources)


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("80 86 90 100 103 110 120 121", ["90", "100-real", "103-real", "120-real"]),
        ("80 86 89 90", ["90"]),
        ("90 100", ["90", "100-real"]),
    ],
)
def test_wheels_are_for_the_architectures_that_the_compiler_offers(tmp_path, listed, expected):
    program = Path(compiler(tmp_path / "bin", "12.8"))
    lines = "".join(f"echo compute_{number}\n" for number in listed.split())
    program.write_text(f"#!/bin/sh\n{lines}")
    assert wheels.offered(str(program)) == expected


def test_a_wheel_is_built_with_nvcc_of_its_major_version(tmp_path, monkeypatch):
    pip = []
    monkeypatch.setattr(wheels, "STAGE", tmp_path)
    monkeypatch.setattr(wheels, "TOOLKITS", tmp_path)
    monkeypatch.setattr(wheels, "run", lambda *command: pip.append(command[-1]))
    assert wheels.compiler_of(12, "python3") is None
    on_path = compiler(tmp_path / "bin", "12.9")
    assert wheels.compiler_of(12, "python3") == on_path
    assert not pip
    of_pypi = str(tmp_path / "toolkit" / "nvidia" / "cu13" / "bin" / "nvcc")
    assert wheels.compiler_of(13, "python3") == of_pypi
    assert pip == [nvcc.PYPI_TOOLKIT]
    installed = compiler(tmp_path / "cuda-13.1" / "bin", "13.1")
    assert wheels.compiler_of(13, "python3") == installed


def test_the_sources_of_a_release_have_absolute_links_to_where_ci_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "STAGE", tmp_path)
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://host")
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    folder = wheels.stage_sources()
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == "https://host/owner/name"
    targets = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text())
    assert targets and all(target.startswith("https://") for target in targets)
    assert (folder / "jax_moe_a2a" / "__init__.py").exists() and not (folder / "build").exists()


def test_the_build_compiles_for_the_gpus_that_the_package_accepts():
    assert nvcc.OLDEST_GPU == 10 * native.OLDEST_CAPABILITY


def test_cmake_reads_the_path_as_one_line(tmp_path):
    named = compiler(tmp_path / "bin", "12.9")
    command = [sys.executable, "-I", str(ROOT / "tools" / "nvcc.py")]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=True)
    assert done.stdout == f"{named}\n"


def test_the_citation_has_the_version_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()


def test_ci_compiles_for_each_architecture_of_the_wheels():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (listed,) = re.findall(r"architecture: (\[.*\])", text)
    assert tuple(ast.literal_eval(listed)) == wheels.ARCHITECTURES


def test_a_release_is_tried_on_each_python_that_it_names():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (listed,) = re.findall(r"python: (\[.*\])", text)
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [each.rpartition(" ")[2] for each in classifiers if ":: Python :: 3." in each]
    assert ast.literal_eval(listed) == named


def test_the_conda_recipe_has_the_version_and_the_requirements_of_the_project():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, recipe = pyproject["project"], (ROOT / "tools" / "conda" / "recipe.yaml").read_text()
    _, host, run = re.split(r"^  (?:host|run):\n", recipe.partition("\ntests:")[0], flags=re.M)
    listed = lambda text: set(re.findall(r"^    - (.*)$", text, re.M))
    spaced = lambda names: {re.sub(r"(?=[<>=])", " ", name, count=1) for name in names}
    python = {f"python {project['requires-python']}"}
    assert f'version: "{project["version"]}"' in recipe and f"name: {project['name']}" in recipe
    assert listed(run) == python | spaced(project["dependencies"])
    assert listed(host) == python | {"pip"} | spaced(pyproject["build-system"]["requires"])
