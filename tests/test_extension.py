"""Which compiled extension is used: this package's own, or that of an installed wheel."""

import re
import sys
import tomllib
from pathlib import Path

import jax
import pytest

from jax_moe_a2a._src import versions
from jax_moe_a2a._src.group import extension

pytestmark = [
    pytest.mark.exchanges(0),  # no program runs here
    pytest.mark.one_process("stand-ins for wheels are in this process alone"),
]
PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install stand-ins for distributions; those with kernels have a module, no library."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "jax_moe_a2a._native", None)  # this package has none

    def install(distribution, version):
        package = distribution.replace("-", "_")
        info = tmp_path / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")
        if distribution != extension.PACKAGE:
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").touch()
            (tmp_path / package / "_native.py").write_text(f"name = {distribution!r}\n")
            for module in (package, f"{package}._native"):
                monkeypatch.delitem(sys.modules, module, raising=False)

    yield install
    for wheel in extension.WHEELS:
        package = wheel.replace("-", "_")
        for module in (package, f"{package}._native"):
            sys.modules.pop(module, None)


def test_without_a_wheel_there_is_no_extension(install):
    assert extension.load() is None


@pytest.mark.parametrize("wheel", extension.WHEELS)
def test_the_extension_of_a_wheel_of_the_same_version_is_used(install, wheel):
    install(extension.PACKAGE, "1.2.3")
    install(wheel, "1.2.3")
    assert extension.load().name == wheel


def test_of_two_wheels_the_newer_cuda_is_used(install):
    install(extension.PACKAGE, "1.2.3")
    for wheel in reversed(extension.WHEELS):
        install(wheel, "1.2.3")
    assert extension.load().name == "jax-moe-a2a-cuda13"


def test_an_extension_of_this_package_comes_before_a_wheel(install, monkeypatch):
    own = object()
    install(extension.PACKAGE, "1.2.3")
    install("jax-moe-a2a-cuda13", "1.2.3")
    monkeypatch.setitem(sys.modules, "jax_moe_a2a._native", own)
    assert extension.load() is own


def test_a_wheel_of_another_version_is_an_error_that_says_what_to_install(install):
    install(extension.PACKAGE, "1.2.3")
    install("jax-moe-a2a-cuda13", "1.2.4")
    expected = (
        "jax-moe-a2a 1.2.3 needs jax-moe-a2a-cuda13 of the same version; found 1.2.4: "
        "pip install 'jax-moe-a2a[cuda13]==1.2.3'"
    )
    with pytest.raises(ImportError, match=re.escape(expected)):
        extension.load()


def test_a_wheel_next_to_sources_that_are_not_installed_is_an_error(install, monkeypatch):
    version_of = extension.version_of
    install("jax-moe-a2a-cuda12", "1.2.3")
    monkeypatch.setattr(
        extension,
        "version_of",
        lambda name: None if name == extension.PACKAGE else version_of(name),
    )
    with pytest.raises(ImportError, match=re.escape("jax-moe-a2a (not installed) needs")):
        extension.load()


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
