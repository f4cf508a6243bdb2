"""Compile programs for four H100 GPUs on a machine without a GPU. Import this module before jax."""

import ctypes
import os
import sys

from . import plugin

RANKS = 4
DESCRIPTION = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# Remove variables that the user or CI has set, because they could change tests/compiled/table.txt.
for name in [name for name in os.environ if name.startswith(("JAX_", "XLA_", "MOE_A2A_"))]:
    del os.environ[name]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
sys.path[:0] = [str(plugin.FOLDER), str(plugin.ROOT / "tests")]

import host_extension

host_extension.pretend()

import jax
from jax._src import xla_bridge

import jax_moe_a2a as ma
from jax_moe_a2a._src.group import native
from jax_moe_a2a._src.grouped import lowering


def devices():
    """Return four GPUs that only the compiler knows, and make the package accept them."""
    jax.devices()  # registers jax's plugins
    topology = xla_bridge.make_pjrt_topology(
        "cuda", "", target_config=DESCRIPTION, topology=f"1x1x{RANKS}"
    )
    ma.Group._why_portable = ""
    lowering._why_other_gpu = native.why_no_local_kernel = lambda: ""
    # Give each GPU 64 GiB in the fake driver: the package checks that a call fits into its memory.
    library = ctypes.CDLL(native._native.__file__)
    for index in range(RANKS):
        native._native.add_device(index, 0, index)
        library.fake_set_room(index, ctypes.c_int64(1 << 36))
    return topology._make_compile_only_devices()


def lower(function, args, mesh):
    with jax.set_mesh(mesh):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
