"""Provide the extension where the package was built without it, so that tests lower programs for
CUDA on every machine with a C++ compiler.

The extension is the host code of `cuda`, compiled over the fake driver of `tests/emulation/host`.
It decides what kernels support and describes their calls. It has no kernels."""

import fcntl
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import PathFinder

import jax

ROOT = pathlib.Path(__file__).parents[1]
HOST = ROOT / "tests/emulation/host"
CUDA = ROOT / "cuda"
NAME = "jax_moe_a2a._native"
FAKES = ("fake_driver.cc", "fake_gemm.cc")


def provide():
    """Build the extension and make it importable, if there is none and g++ exists. Call this before
    jax_moe_a2a is imported."""
    package, _, module = NAME.partition(".")
    folders = [str(pathlib.Path(entry, package)) for entry in (str(ROOT), *sys.path)]
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    if any(finder.find_spec(NAME, folders) for finder in finders) or not shutil.which("g++"):
        return
    spec = PathFinder.find_spec(NAME, [str(built(module))])
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


def built(module):
    """Return the folder of the extension, which is compiled if its sources have changed."""
    import nanobind

    sources = [CUDA / "ext.cc", CUDA / "gemm/limits.cc", *(HOST / name for name in FAKES)]
    sources += sorted(CUDA.glob("runtime/*.cc")) + sorted(CUDA.glob("ffi/*.cc"))
    sources += [pathlib.Path(nanobind.source_dir()) / "nb_combined.cpp"]
    robin_map = pathlib.Path(nanobind.source_dir()).parent / "ext/robin_map/include"
    includes = (HOST, HOST / "include", CUDA, nanobind.include_dir(), robin_map)
    system = (jax.ffi.include_dir(), sysconfig.get_path("include"))
    flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-DNDEBUG"]
    flags += ["-DMOE_A2A_GROUPED_GEMM=1", '-DMOE_A2A_CUDA_BUILD="CUDA 13.0 for 90"']
    flags += ['-DMOE_A2A_SOURCES=""']
    flags += [f"-I{path}" for path in includes] + [f"-isystem{path}" for path in system]

    read = [*CUDA.rglob("*.*"), *HOST.rglob("*.*"), pathlib.Path(__file__)]
    digest = hashlib.sha256("".join(flags).encode())
    for path in sorted(filter(pathlib.Path.is_file, read)):
        digest.update(path.read_bytes())
    folder = ROOT / "build/host_extension" / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{module}{sysconfig.get_config_var('EXT_SUFFIX')}"

    def compiled(source):
        object_file = folder / f"{source.parent.name}-{source.name}.o"
        command = ["g++", *flags, "-c", source, "-o", object_file]
        subprocess.run(command, check=True)
        return object_file

    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes of a run, one builds
        if not library.exists():
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compiled, sources))
            linked = folder / "linked"
            options = ["-shared", "-ldl", "-pthread"]
            subprocess.run(["g++", "-o", linked, *objects, *options], check=True)
            linked.rename(library)
    return folder
