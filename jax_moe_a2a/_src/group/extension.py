"""Find and load the compiled extension, which contains the CUDA kernels.

A build from source installs the extension into this package. Wheels with kernels are separate
distributions, one for each major version of CUDA (extras ``cuda12`` and ``cuda13``).

A program in a clone of the repository imports the clone's sources. If the clone has no extension,
the program uses the installed package's extension, which must be built from the same sources.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

PACKAGE = "jax-moe-a2a"
WHEELS = ("jax-moe-a2a-cuda13", "jax-moe-a2a-cuda12")  # the first installed wheel is used
IMPORTED_AS = __name__.partition(".")[0]
VERSION: str = sys.modules[IMPORTED_AS].__version__
FOLDER = Path(str(sys.modules[IMPORTED_AS].__file__)).parent.resolve()
CUDA_SOURCES = FOLDER.parent / "cuda"  # exists only in a clone of the repository
NAME = f"{IMPORTED_AS}._native"


def load() -> ModuleType | None:
    """Return the extension, or None if there is no extension. Raise an ImportError if the extension
    was built from other sources, has another version, or cannot be loaded."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    spec = _find() or _find_wheel()
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if is_clone():
        _check_sources(module, Path(str(spec.origin)))
    sys.modules[spec.name] = module
    return module


def is_clone() -> bool:
    """Return True if this package is imported from a clone of the repository."""
    return (CUDA_SOURCES / "ext.cc").exists()


def other_installation() -> Path | None:
    """Return the folder of the installed package that this clone hides, or None."""
    folders = (Path(entry, IMPORTED_AS).resolve() for entry in sys.path)
    found = (each for each in folders if each != FOLDER and (each / "__init__.py").exists())
    return next(found, None)


def why_missing() -> str:
    """Return why there is no extension, with the folders that could contain it."""
    if not is_clone():
        return f"jax_moe_a2a in {FOLDER} was built without CUDA kernels"
    other = other_installation()
    found = f"the installed one in {other} has none" if other else "no other one is installed"
    return f"jax_moe_a2a in {FOLDER.parent} is a clone without CUDA kernels, and {found}"


@functools.cache
def warn_of_missing_kernels() -> None:
    warnings.warn(
        "jax_moe_a2a: this program for GPUs takes the portable path, which is several times slower "
        f"than the kernels, because {why_missing()}: {how_to_build()}, or ask for this path by "
        "Group(..., implementation='portable')",
        stacklevel=2,
    )


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find() -> ModuleSpec | None:
    """Return the extension of this package. In a clone, also look into other installations."""
    folders = [str(FOLDER)]
    if is_clone():
        folders += [str(Path(entry, IMPORTED_AS)) for entry in sys.path]
    # Editable installations add their own finder.
    found = (finder.find_spec(NAME, folders) for finder in sys.meta_path)
    return next(filter(None, found), None)


def _find_wheel() -> ModuleSpec | None:
    for wheel in WHEELS:
        module = wheel.replace("-", "_")
        if not importlib.util.find_spec(module):
            continue
        if (found := version_of(wheel)) != VERSION:
            raise ImportError(
                f"{PACKAGE} {VERSION} in {FOLDER} needs {wheel} of the same version; found "
                f"{found or 'no version'}: install both from the same folder of wheels, or "
                f"pip uninstall {wheel}"
            )
        return importlib.util.find_spec(f"{module}._native")
    return None


def _check_sources(module: ModuleType, file: Path) -> None:
    """Check that an extension was built from this clone's sources. If not, raise an error for an
    extension of another installation, and warn for an extension of this package."""
    if getattr(module, "sources", "") == sources_digest():
        return
    if file.parent.resolve() == FOLDER or not (file.parent / "__init__.py").exists():
        warnings.warn(
            f"{file} was not built from the present sources in {CUDA_SOURCES}, so its kernels may "
            f"be wrong for this Python code: {how_to_build()}",
            stacklevel=2,
        )
        return
    raise ImportError(
        f"{FOLDER} is a clone and not the installed jax_moe_a2a. The installed kernels, {file}, "
        f"were not built from the present sources in {CUDA_SOURCES}: {how_to_build()}. Or start "
        "Python in another folder, which uses the installed package"
    )


def sources_digest() -> str:
    """Return a digest of the extension's sources. CMakeLists.txt computes the same digest."""
    names = sorted(
        file.relative_to(CUDA_SOURCES).as_posix()
        for file in CUDA_SOURCES.rglob("*")
        if file.suffix in (".cc", ".cu", ".cuh", ".h")
    )
    lines = (
        f"{hashlib.sha256((CUDA_SOURCES / name).read_bytes()).hexdigest()} {name}\n"
        for name in names
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def how_to_build() -> str:
    """Return the command that builds and installs this package with kernels, from a clone."""
    command = "MOE_A2A_CUDA=ON pip install"
    clone = f"{command} {FOLDER.parent}"
    return clone if is_clone() else f"in a clone of the repository, {command} ."
