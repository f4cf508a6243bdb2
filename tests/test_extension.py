"""Test where the package finds its compiled extension: in its folder, in another installation, or
in an installed wheel."""

import re
import subprocess
import sys
import tomllib
import warnings
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path

import jax
import numpy as np
import pytest

import jax_moe_a2a as ma
from jax_moe_a2a._src import versions
from jax_moe_a2a._src.group import extension, native

pytestmark = [
    pytest.mark.exchanges(0),  # no program runs here
    pytest.mark.one_process("only this process has the pretended wheels"),
]
ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


STAND_IN = "sources = {sources!r}\nname = {name!r}\n"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Hide all installed extensions, and import the package from the first of two folders on
    sys.path."""
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other):
        (folder / "jax_moe_a2a").mkdir(parents=True)
        (folder / "jax_moe_a2a/__init__.py").touch()
    finders = (BuiltinImporter, FrozenImporter, PathFinder)  # no editable installations
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each in finders])
    others = [entry for entry in sys.path if not Path(entry, "jax_moe_a2a").exists()]
    monkeypatch.setattr(sys, "path", [str(here), str(other), *others])
    monkeypatch.setattr(extension, "FOLDER", here / "jax_moe_a2a")
    monkeypatch.setattr(extension, "CUDA_SOURCES", here / "cuda")
    monkeypatch.setattr(extension, "VERSION", "1.2.3")
    modules = (
        extension.NAME,
        *(f"{wheel.replace('-', '_')}._native" for wheel in extension.WHEELS),
    )
    for module in modules:
        for name in (module, module.rpartition(".")[0]):
            if name != extension.IMPORTED_AS:
                monkeypatch.setitem(sys.modules, name, None)
                del sys.modules[name]
    return here, other


def clone(folder):
    (folder / "cuda/ffi").mkdir(parents=True)
    (folder / "cuda/ext.cc").write_text("int a;\n")
    (folder / "cuda/ffi/b.h").write_text("int b;\n")


def build(folder, sources="", name="built"):
    """Write a fake extension into the package in a folder, and return its path."""
    file = folder / "jax_moe_a2a/_native.py"
    file.write_text(STAND_IN.format(sources=sources, name=name))
    return file


def install(folder, wheel, version):
    package = wheel.replace("-", "_")
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {wheel}\nVersion: {version}\n")
    (folder / package).mkdir()
    (folder / package / "__init__.py").touch()
    (folder / package / "_native.py").write_text(STAND_IN.format(sources="", name=wheel))


def test_without_an_extension_the_reason_names_the_folders(folders):
    here, other = folders
    assert extension.load() is None
    assert (
        extension.why_missing()
        == f"jax_moe_a2a in {here}/jax_moe_a2a was built without CUDA kernels"
    )
    clone(here)
    assert extension.load() is None
    assert f"jax_moe_a2a in {here} is a clone without CUDA kernels" in extension.why_missing()
    assert f"the installed one in {other}/jax_moe_a2a has none" in extension.why_missing()


def test_a_program_for_gpus_without_kernels_warns_once_how_to_build_them(monkeypatch):
    monkeypatch.setattr(native, "_native", None)
    extension.warn_of_missing_kernels.cache_clear()

    def lower(**options):
        group = ma.Group(axis_name="ep", size=2, **options)
        route = jax.vmap(lambda ids: ma.route(ids, group=group, num_experts=4), axis_name="ep")
        traced = jax.jit(route).trace(np.zeros((2, 4, 2), np.int32))
        traced.lower(lowering_platforms=("cuda",))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        lower(implementation="portable")
        assert not found
        lower()
        lower()
    assert [extension.how_to_build() in str(each.message) for each in found] == [True]


def test_a_clone_uses_the_installed_kernels_of_the_same_sources(folders):
    here, other = folders
    clone(here)
    build(other, extension.sources_digest())
    assert extension.load().name == "built"
    assert extension.load() is sys.modules["jax_moe_a2a._native"]
    assert extension.other_installation() == other / "jax_moe_a2a"


@pytest.mark.parametrize("changed", ("cuda/ext.cc", "cuda/ffi/new.h"))
def test_a_clone_with_other_sources_than_the_installed_kernels_is_an_error(folders, changed):
    here, other = folders
    clone(here)
    file = build(other, extension.sources_digest())
    (here / changed).write_text("int c;\n")
    with pytest.raises(ImportError, match="were not built from the present sources") as error:
        extension.load()
    for named in (here / "jax_moe_a2a", file, here / "cuda"):
        assert str(named) in str(error.value)
    assert f"MOE_A2A_CUDA=ON pip install {here}" in str(error.value)
    assert "jax_moe_a2a._native" not in sys.modules


def test_kernels_in_the_clone_that_are_older_than_its_sources_are_a_warning(folders):
    here, _ = folders
    clone(here)
    file = build(here, "others")
    with pytest.warns(UserWarning, match=re.escape(f"{file} was not built from the present")):
        assert extension.load().name == "built"


def test_an_installed_package_uses_no_other_installation(folders):
    _, other = folders
    build(other)
    assert extension.load() is None


@pytest.mark.parametrize("wheel", extension.WHEELS)
def test_the_extension_of_a_wheel_of_the_same_version_is_used(folders, wheel):
    install(folders[0], wheel, "1.2.3")
    assert extension.load().name == wheel


def test_an_extension_of_this_package_comes_before_a_wheel(folders):
    build(folders[0])
    install(folders[0], "jax-moe-a2a-cuda13", "1.2.3")
    assert extension.load().name == "built"


def test_a_wheel_of_another_version_is_an_error_that_says_what_to_do(folders):
    install(folders[0], "jax-moe-a2a-cuda13", "1.2.4")
    expected = (
        "needs jax-moe-a2a-cuda13 of the same version; found 1.2.4: install both from the same "
        "folder of wheels, or pip uninstall jax-moe-a2a-cuda13"
    )
    with pytest.raises(ImportError, match=re.escape(expected)):
        extension.load()


def test_the_version_is_that_of_the_project():
    assert ma.__version__ == PYPROJECT["project"]["version"]


def test_integrations_that_are_not_imported_say_how_to_import_them():
    with pytest.raises(AttributeError, match="has no attribute 'megatron'; it has maxtext, tr"):
        _ = ma.integrations.megatron
    code = "import jax_moe_a2a as ma; ma.integrations.nnx"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "import jax_moe_a2a.integrations.nnx, which needs Flax" in done.stderr


def test_the_extras_name_wheels_of_exactly_this_version():
    project = PYPROJECT["project"]
    for wheel in extension.WHEELS:
        extra = wheel.rpartition("-")[2]
        pinned = f"{wheel}=={project['version']}"
        assert pinned in project["optional-dependencies"][extra]


def test_a_jax_that_is_too_old_is_an_error_that_says_what_to_install(monkeypatch):
    oldest = ".".join(map(str, versions.OLDEST_JAX))
    assert f"jax>={oldest}" in PYPROJECT["project"]["dependencies"]
    versions.check_jax()
    monkeypatch.setattr(jax, "__version_info__", (0, 9, 9))
    with pytest.raises(ImportError, match=re.escape(f"pip install --upgrade 'jax>={oldest}'")):
        versions.check_jax()


def test_an_interpreter_without_the_gil_is_an_error_that_says_what_to_do(monkeypatch):
    for has_gil in (True, False):
        monkeypatch.setattr(sys, "_is_gil_enabled", lambda has_gil=has_gil: has_gil, raising=False)
        if has_gil:
            versions.check_gil()
        else:
            with pytest.raises(ImportError, match=r"needs the GIL; .* set PYTHON_GIL=1"):
                versions.check_gil()
