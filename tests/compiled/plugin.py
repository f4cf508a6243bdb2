"""Check for jax's CUDA plugin in a separate folder, where jax does not look for GPUs."""

import importlib.metadata
import pathlib
import shutil
import tomllib

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "build/compiled"


def requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["compiled"]
    return dict(requirement.split("==") for requirement in extra)


def why_not():
    """Return why this environment cannot make table.txt, or "" if it can."""
    found = importlib.metadata.distributions(path=[str(FOLDER)])
    installed = {distribution.name: distribution.version for distribution in found}
    for package, version in requirements().items():
        if installed.get(package) != version:
            return (
                f"{FOLDER.relative_to(ROOT)} must have {package} {version}; got "
                f"{installed.get(package)}: run `make compiled`"
            )
    jax = importlib.metadata.version("jax")
    if jax != version:
        return f"jax must be {version}, because other versions compile other kernels; got {jax}"
    if not shutil.which("g++"):
        return "the package needs g++ to be compiled over the fake driver"
    return ""
