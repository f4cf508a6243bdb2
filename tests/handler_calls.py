"""Run the package's FFI handlers on CPU with the fake driver in ``tests/emulation/host``, without
kernels."""

import ctypes
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from host_extension import HOST, ROOT, built

NUM_DEVICES = 2
MIB = 1 << 20
STATE = "moe_a2a_exchange_on_cpu"
# This call has only the attributes that all calls have.
DONE = "moe_a2a_dispatch_done"


ON_CPU = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
    "MOE_A2A_TEST_GPU": "0",
}
SECONDS = 120  # to start, compile and end


def can_build():
    return shutil.which("g++") is not None


def build(folder):
    """Return the host code of the extension, linked with the fake driver and ``calls.cc``."""
    library = folder / "libcalls.so"
    names_python = ("ext.cc.o", "nb_combined.cpp.o")
    objects = [path for path in built().glob("*.o") if not path.name.endswith(names_python)]
    includes = [f"-I{path}" for path in (HOST, HOST / "include", ROOT / "cuda")]
    options = ["-std=c++17", "-shared", "-fPIC", *includes, "-isystem", jax.ffi.include_dir()]
    options += ["-o", library, HOST / "calls.cc", *objects]
    subprocess.run(["g++", *options, "-ldl", "-pthread"], check=True)
    return library


def command_of(scenario, library_path):
    return [sys.executable, scenario.__code__.co_filename, scenario.__name__, str(library_path)]


def run(scenario, library_path):
    """Run a function of a test file in a new process, because a process cannot remove fake
    devices."""
    done = subprocess.run(
        command_of(scenario, library_path),
        env=os.environ | ON_CPU,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def load(path):
    library = ctypes.CDLL(str(path))
    library.set_room.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.used_bytes.restype = ctypes.c_int64
    library.target_name.restype = ctypes.c_char_p
    for name in ("target_instantiate", "state_type_id", "state_type_info"):
        getattr(library, name).restype = ctypes.c_void_p
    for name in ("num_launches", "num_allocations"):
        getattr(library, name).restype = ctypes.c_long
    library.add_devices(NUM_DEVICES)
    for device in range(NUM_DEVICES):
        library.set_room(device, 1 << 40)
    return library


def register(library):
    jax.devices()  # XLA needs the types before the targets
    registration = dict(
        type_id=jax.ffi.pycapsule(library.state_type_id()),
        type_info=jax.ffi.pycapsule(library.state_type_info()),
    )
    jax.ffi.register_ffi_type(STATE, registration, platform="cpu")
    instantiate = {
        library.target_name(i).decode(): jax.ffi.pycapsule(library.target_instantiate(i))
        for i in range(library.num_targets())
        if library.target_instantiate(i) is not None
    }
    for name, handler in instantiate.items():
        _register(name, "execute", library, handler)
    _register("checked_report", "report", library, instantiate[DONE])
    for name in ("fail", "close"):
        _register(f"checked_{name}", name, library)


def _register(target, name, library, instantiate=None):
    stages = {"execute": jax.ffi.pycapsule(getattr(library, f"call_{name}"))}
    if instantiate is not None:
        stages["instantiate"] = instantiate
    jax.ffi.register_ffi_target(target, stages, platform="cpu")


def attributes(*, half_bytes=MIB, raise_failures=True, split=False):
    """Return the attributes common to all custom calls, for an exchange between two devices."""
    return dict(
        devices=np.arange(NUM_DEVICES, dtype=np.int64),
        num_ranks=np.int64(NUM_DEVICES),
        workspace_kind=np.int64(split),
        num_sms=np.int64(8),
        timeout_ns=np.int64(10**9),
        first_timeout_ns=np.int64(10**9),
        half_bytes=np.int64(half_bytes),
        raise_failures=raise_failures,
        scopes=np.int64(0),
    )


def call(name="report", **options):
    """Make a custom call that returns float32 []: 1, or NaN after a failure."""
    result = jax.ShapeDtypeStruct((), jnp.float32)
    target = jax.ffi.ffi_call(f"checked_{name}", result, has_side_effect=True)
    return target(**attributes(**options))
