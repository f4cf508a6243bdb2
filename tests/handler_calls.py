"""The handlers of the kernels as custom calls on CPU, compiled over the fake driver of
``tests/emulation/host``: what XLA is told when a program is loaded and before it runs."""

import ctypes
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
HOST = ROOT / "tests/emulation/host"
NUM_DEVICES = 2
MIB = 1 << 20
CALLS = ("execute", "fail", "close")


def can_build():
    return shutil.which("g++") is not None


def build(folder):
    """Compile the library; return its path."""
    library = folder / "libcalls.so"
    sources = [HOST / "calls.cc", HOST / "fake_driver.cc"]
    # handlers.cc is a part of calls.cc.
    sources += sorted((ROOT / "cuda/runtime").glob("*.cc"))
    includes = [f"-I{path}" for path in (HOST, HOST / "include", ROOT / "cuda")]
    options = ["-std=c++17", "-shared", "-fPIC", *includes, "-isystem", jax.ffi.include_dir()]
    subprocess.run(["g++", *options, "-o", library, *sources, "-ldl", "-pthread"], check=True)
    return library


def load(path):
    """Load the library, with two devices, and tell XLA of its calls."""
    library = ctypes.CDLL(str(path))
    library.set_room.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.used_bytes.restype = ctypes.c_int64
    library.add_devices(NUM_DEVICES)
    for device in range(NUM_DEVICES):
        library.set_room(device, 1 << 40)
    instantiate = jax.ffi.pycapsule(library.moe_a2a_instantiate)
    for name in CALLS:
        stages = {"execute": jax.ffi.pycapsule(getattr(library, f"call_{name}"))}
        if name == "execute":
            stages["instantiate"] = instantiate
        jax.ffi.register_ffi_target(f"checked_{name}", stages, platform="cpu")
    return library


def call(name="execute", *, slot_bytes=MIB, raise_failures=True):
    """Make a call of an exchange between two devices.

    It returns float32 []: 1, or NaN after a failure.
    """
    result = jax.ShapeDtypeStruct((), jnp.float32)
    return jax.ffi.ffi_call(f"checked_{name}", result, has_side_effect=True)(
        devices=np.arange(NUM_DEVICES, dtype=np.int64),
        num_ranks=np.int64(NUM_DEVICES),
        p2p_world_size=np.int64(NUM_DEVICES),
        ring=np.int64(0),
        num_sms=np.int64(8),
        timeout_ns=np.int64(10**9),
        first_timeout_ns=np.int64(10**9),
        slot_bytes=np.int64(slot_bytes),
        raise_failures=raise_failures,
        scopes=np.int64(0),
    )
