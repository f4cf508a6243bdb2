"""Build the extension without kernels, so that tests can lower programs for CUDA on any machine
with a C++ compiler."""

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

import jax

ROOT = pathlib.Path(__file__).parents[1]
HOST = ROOT / "tests/emulation/host"
CUDA = ROOT / "cuda"
PACKAGE = "jax_moe_a2a"
FAKES = ("fake_driver.cc", "fake_gemm.cc")


def provide():
    """If there is g++ and no extension, build one. Call this before the package is imported."""
    folders = [str(pathlib.Path(entry, PACKAGE)) for entry in (str(ROOT), *sys.path)]
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    is_there = any(finder.find_spec(f"{PACKAGE}._native", folders) for finder in finders)
    if is_there or not shutil.which("g++"):
        return
    folder = str(built())
    sys.path.append(folder)
    inherited = filter(None, (os.environ.get("PYTHONPATH"), folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(inherited)


def pretend():
    """Import the extension with the fake driver, before the package is imported."""
    name = f"{PACKAGE}._native"
    (library,) = pathlib.Path(built(), PACKAGE).glob("_native*")
    spec = importlib.util.spec_from_file_location(name, library)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def built():
    """Return a folder for `sys.path`; build only if the sources have changed."""
    import nanobind

    sources = [CUDA / "ext.cc", CUDA / "gemm/limits.cc", *(HOST / name for name in FAKES)]
    for folder in ("runtime", "ffi", "library"):
        sources += sorted(CUDA.glob(f"{folder}/*.cc"))
    sources += [pathlib.Path(nanobind.source_dir()) / "nb_combined.cpp"]
    robin_map = pathlib.Path(nanobind.source_dir()).parent / "ext/robin_map/include"
    includes = (HOST, HOST / "include", CUDA, nanobind.include_dir(), robin_map)
    system = (jax.ffi.include_dir(), sysconfig.get_path("include"))
    flags = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-DNDEBUG"]
    flags += ["-DMOE_A2A_GROUPED_GEMM=1", '-DMOE_A2A_CUDA_BUILD="CUDA 13.0 for 90"']
    flags += [f"-I{path}" for path in includes] + [f"-isystem{path}" for path in system]
    all_sources = f'-DMOE_A2A_SOURCES="{digest_of_cuda()}"'

    digest = hashlib.sha256("".join([*flags, all_sources]).encode())
    for path in sorted(filter(pathlib.Path.is_file, HOST.rglob("*"))):
        digest.update(path.read_bytes())
    folder = ROOT / "build/host_extension" / digest.hexdigest()[:16]
    library = folder / PACKAGE / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    library.parent.mkdir(parents=True, exist_ok=True)

    def compiled(source):
        object_file = folder / f"{source.parent.name}-{source.name}.o"
        # Only the object of ext.cc depends on the digest; a compiler cache can reuse the others.
        own = [all_sources] if source.name == "ext.cc" else []
        subprocess.run(["g++", *flags, *own, "-c", source, "-o", object_file], check=True)
        return object_file

    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds at a time
        if not library.exists():
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compiled, sources))
            linked = folder / "linked"
            options = ["-shared", "-ldl", "-pthread"]
            subprocess.run(["g++", "-o", linked, *objects, *options], check=True)
            linked.rename(library)
    return folder


def digest_of_cuda():
    """Return the digest as CMakeLists.txt and the package compute it."""
    files = (file for file in CUDA.rglob("*") if file.suffix in (".cc", ".cu", ".cuh", ".h"))
    named = sorted((file.relative_to(CUDA).as_posix(), file) for file in files)
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()} {name}\n" for name, file in named)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
