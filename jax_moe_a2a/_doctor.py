"""Check a machine before a run: ``python -m jax_moe_a2a``.

The doctor prints one line for each requirement of an exchange on this process's devices. If a
required check fails, the doctor prints advice and exits with 1, otherwise with 0. The doctor needs
neither the extension nor a GPU.

With several processes, each process checks its own devices, and then all processes check the
exchange between them. If JAX detects the launcher, use ``--distributed``. Otherwise use
``--coordinator``, ``--num-processes`` and ``--process-id``. Process 0 prints all its lines; the
other processes print only failures.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._src import api, compat
from ._src.group import extension, native
from ._src.group.group import Group
from ._src.plan.memory import memory_estimate, readable

AXIS = "ep"
TIMEOUT = 10.0  # seconds that a kernel of the small exchange waits for another rank
MEETING_SECONDS = 60.0  # seconds that a process waits for other processes
NEWEST_CUDA = 13  # the newest CUDA for which JAX and this package have wheels
TESTED = ("9.0",)  # compute capabilities on which the kernels have run
GUIDE = 'docs/troubleshooting.md, "What each failure looks like"'


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the output. ``ok`` is None for a note, which never counts as a failure."""

    name: str
    said: str
    ok: bool | None = True
    advice: str = ""

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAIL", None: "note"}[self.ok]
        line = f"{verdict:<5} {self.name:<12} {self.said}"
        return line + (f"\n{'':<18} what to do: {self.advice}" if self.advice else "")


def _failed(name: str, said: str, advice: str, *, wanted: bool = True) -> Finding:
    """Return the finding for a missing requirement: a failure if ``wanted``, otherwise a note."""
    return Finding(name, said, ok=False, advice=advice) if wanted else Finding(name, said, ok=None)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings. Return 0 if all required checks pass, otherwise 1."""
    parser = argparse.ArgumentParser(prog="python -m jax_moe_a2a", description=__doc__)
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens of each rank (%(default)s)"
    )
    parser.add_argument("--hidden", type=int, default=7168, help="bfloat16 elements (%(default)s)")
    parser.add_argument("--top-k", type=int, default=8, help="choices of a token (%(default)s)")
    parser.add_argument("--experts", type=int, help="of all ranks (256, or the next multiple)")
    parser.add_argument("--portable", action="store_true", help="check the portable path only")
    parser.add_argument(
        "--distributed", action="store_true", help="several processes, which JAX finds itself"
    )
    parser.add_argument("--coordinator", help="several processes: host:port of process 0")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    flags = parser.parse_args(argv)
    flags.distributed |= bool(flags.coordinator)
    if flags.distributed and not jax.distributed.is_initialized():
        jax.distributed.initialize(flags.coordinator, flags.num_processes, flags.process_id)
    process = compat.process_id() if flags.distributed else 0
    failed = 0
    for finding in findings(flags):
        if process == 0:
            print(finding, flush=True)
        elif finding.ok is False:
            print(f"process {process}: {finding}", flush=True)
        failed += finding.ok is False
    of_process = f"process {process}: " if process else "\n"
    if failed:
        print(f"{of_process}{failed} checks failed. See {GUIDE}.")
    elif process == 0:
        if jax.local_devices()[0].platform == "cpu" and not _num_gpus():
            print("\nNo GPU here, nothing to do: all required checks passed.")
        else:
            print("\nAll required checks passed.")
    return 1 if failed else 0


def findings(flags: argparse.Namespace) -> Iterator[Finding]:
    """Run all checks, and yield each line before the next check runs.

    Without ``--portable``, a missing requirement of the kernels is a failure on Hopper and newer
    GPUs. In all other cases, a missing requirement is only a note.
    """
    yield _versions()
    yield _package()
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        said = f"JAX finds no device: {_first_line(error)}"
        yield _failed("devices", said, "check JAX_PLATFORMS, CUDA_VISIBLE_DEVICES and the driver")
        return
    wanted = not flags.portable and all(map(_can_run_kernels, devices))
    driver = _Driver.open()
    yield _devices(devices, driver)
    yield _kernels(driver, wanted)
    if devices[0].platform == "gpu":
        yield _driver(driver, wanted)
        if wanted and native.has_kernels():
            yield _untested(devices)
    group = _group(devices, flags.portable)
    yield _path(group, wanted and native.has_kernels())
    yield _memory(driver, group, flags)
    for count in sorted({len(devices), min(2, len(devices))}, reverse=True):
        yield _exchange(_group(devices[:count], flags.portable))
    if flags.distributed and jax.process_count() > 1:
        yield from _together(driver, flags)


def _together(driver: _Driver | None, flags: argparse.Namespace) -> Iterator[Finding]:
    """Check the exchange between all processes. Every process must call this function, because
    XLA's collectives would wait forever for a missing process."""
    count = jax.process_count()
    if why := compat.coordination_barrier("jax_moe_a2a/doctor", MEETING_SECONDS):
        yield _failed("processes", why, "read the output of the missing processes")
        return
    yield Finding("processes", f"all {count}, with {jax.device_count()} devices")
    group = _group(jax.devices(), flags.portable, in_two_levels=True)
    try:
        yield _path(group, wanted=False)
    except RuntimeError as error:
        yield _failed("path", _first_line(error), f"see {GUIDE}")
        return
    yield _memory(driver, group, flags)
    yield _exchange(group)


def _versions() -> Finding:
    of_jax = [f"{name} {extension.version_of(name)}" for name in ("jax", "jaxlib")]
    said = (f"Python {platform.python_version()}", *of_jax, f"jax-moe-a2a {extension.VERSION}")
    return Finding("versions", ", ".join(said))


def _package() -> Finding:
    """Report the folder of the imported package, and the installed package that a clone hides."""
    if not extension.is_clone():
        return Finding("package", str(extension.FOLDER))
    hidden = extension.other_installation()
    not_it = f", not the installed package {hidden}" if hidden else ""
    return Finding("package", f"the clone {extension.FOLDER}{not_it}")


def _devices(devices: Sequence[jax.Device], driver: _Driver | None) -> Finding:
    first = devices[0]
    said = f"{len(devices)} x {first.device_kind}, platform {first.platform}"
    if first.platform == "gpu":
        capabilities = sorted({str(device.compute_capability) for device in devices})
        said += f", compute capability {', '.join(capabilities)}"
    if jax.process_count() > 1:
        said += f"; process {jax.process_index()} of {jax.process_count()}"
    unseen = _num_gpus() if first.platform == "cpu" else 0
    if unseen and "JAX_PLATFORMS" not in os.environ:
        said += f"; nvidia-smi lists {unseen} GPUs that JAX does not see"
        return _failed("devices", said, _how_jax_sees_gpus(driver))
    if first.platform == "cpu" and len(devices) == 1:
        said += " (XLA_FLAGS=--xla_force_host_platform_device_count=8 makes 8)"
    return Finding("devices", said)


def _num_gpus() -> int:
    """Return how many GPUs nvidia-smi lists; 0 if the machine has no nvidia-smi."""
    return _run("nvidia-smi", "-L").count("GPU ")


def _how_jax_sees_gpus(driver: _Driver | None) -> str:
    cuda = min(NEWEST_CUDA, max(12, _supported_cuda(driver)))
    return (
        f"pip install 'jax[cuda{cuda}]', without plugins of JAX for another CUDA, or set "
        "JAX_PLATFORMS=cpu"
    )


def _supported_cuda(driver: _Driver | None) -> int:
    return int(driver.cuda_version().split(".")[0]) if driver else NEWEST_CUDA


def _can_run_kernels(device: Any) -> bool:
    """Return True if the kernels run on ``device``. Capabilities of AMD GPUs are not numbers."""
    capability = str(getattr(device, "compute_capability", ""))
    is_number = re.fullmatch(r"\d+\.\d+", capability) is not None
    return is_number and not native.why_no_exchange([device])


def _kernels(driver: _Driver | None, wanted: bool) -> Finding:
    if native.has_kernels():
        hooks = ", with the hooks of the tests" if native.has_test_hooks() else ""
        return Finding("kernels", f"built with {native.cuda_build()}{hooks}; {native.origin()}")
    said = f"none, so the portable path runs: {extension.why_missing()}"
    return _failed("kernels", said, _how_to_build(driver), wanted=wanted)


def _how_to_build(driver: _Driver | None) -> str:
    """Return how to build the kernels on this machine. The driver must support the CUDA version of
    nvcc. If the machine has no nvcc, pip downloads the nvcc of ``NEWEST_CUDA``."""
    steps = []
    if not os.environ.get("CXX") and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        steps.append("install a C++ compiler (g++)")
    if (supported := _supported_cuda(driver)) < NEWEST_CUDA:
        steps.append(
            f"update the driver to one for CUDA {NEWEST_CUDA}, or name an nvcc of CUDA {supported} "
            f"in CUDACXX (CUDACXX=/usr/local/cuda-{supported}/bin/nvcc)"
        )
    return ", then ".join((*steps, extension.how_to_build()))


def _driver(driver: _Driver | None, wanted: bool) -> Finding:
    if driver is None:
        return Finding("driver", "libcuda.so.1 cannot be loaded", ok=None)
    release = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")
    said = f"supports CUDA {driver.cuda_version()}" + (f", release {release[0]}" * bool(release[0]))
    built = re.match(r"CUDA (\d+)", native.cuda_build())
    if wanted and built and int(built[1]) > _supported_cuda(driver):
        said += f"; the kernels were built with {native.cuda_build()}"
        return _failed("driver", said, f"update the driver, or {_how_to_build(driver)}")
    return Finding("driver", said)


def _untested(devices: Sequence[jax.Device]) -> Finding:
    untested = sorted({str(device.compute_capability) for device in devices} - {*TESTED})
    if not untested:
        return Finding("architecture", "tests and benchmarks ran on it")
    said = f"the kernels have never run on {', '.join(untested)}, only on {', '.join(TESTED)}"
    advice = (
        "compare your program with Group(implementation='portable'); please report what works and "
        "what fails"
    )
    return Finding("architecture", said, ok=None, advice=advice)


def _group(devices: Sequence[jax.Device], portable: bool, *, in_two_levels: bool = False) -> Group:
    """Return a group of ``devices``. With ``in_two_levels``, several hosts form two levels."""
    mesh = Mesh(np.array(devices), (AXIS,))
    implementation = "portable" if portable else None
    group = Group(mesh, AXIS, timeout=TIMEOUT, first_timeout=TIMEOUT, implementation=implementation)
    if in_two_levels and (divided := group.divided_by_hosts(mesh)):
        mesh, group = divided
        return group.placed_on(mesh)
    return group


def _path(group: Group, wanted: bool) -> Finding:
    """Report whether the group runs the kernels. If ``wanted``, the portable path is a failure."""
    where = "local devices" if group.size == jax.local_device_count() else "devices"
    said = f"{group.path} for a group of all {group.size} {where}"
    if group.two_level:
        hosts, ranks = group.levels
        said += f" ({hosts.size} hosts of {ranks.size})"
    if group._why_portable:
        said += f", because {group._why_portable}"
    if group.path.startswith("cuda"):
        return Finding("path", said)
    advice = (
        "`nvidia-smi topo -p2p rw` shows which GPUs reach each other; IOMMU, ACS and virtual "
        "machines switch peer access off. Or use a mesh of GPUs that reach each other, or "
        "--portable here and Group(implementation='portable') in the program"
    )
    return _failed("path", said, advice, wanted=wanted)


def _memory(driver: _Driver | None, group: Group, flags: argparse.Namespace) -> Finding:
    """Check that the workspace fits into the GPU memory outside of XLA's pool. With two levels,
    check only the workspace within a host."""
    experts = flags.experts or -(-256 // group.size) * group.size
    shape = f"{flags.tokens} x {flags.hidden} bfloat16, top-{flags.top_k} of {experts}"
    levels = group.levels
    try:
        estimate = memory_estimate(
            num_tokens=flags.tokens,
            hidden=flags.hidden,
            top_k=flags.top_k,
            num_experts=experts,
            group_size=(levels[0].size, levels[1].size) if group.two_level else group.size,
        )
    except ValueError as error:
        return _failed("memory", str(error), "choose another shape with the flags")
    said = f"{shape}: rows {readable(estimate.rows_bytes)} at worst-case capacity"
    if group.two_level:
        said += f", collectives between hosts {readable(estimate.collective_bytes)} in XLA's pool"
    if levels[-1].path != "cuda":
        return Finding("memory", f"{said}; no workspace on the portable path", ok=None)
    needed = estimate.workspace_bytes + native.limit("HEADER_BYTES")
    said += f", workspace {'within a host ' * group.two_level}{readable(needed)}"
    assert group.mesh is not None
    devices = list(group.mesh.local_devices)
    for device in devices:  # XLA allocates its pool at the first allocation
        jax.block_until_ready(jax.device_put(np.zeros(1), device))
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in devices]
    said += f"; XLA's pool {readable(min(limits))}"
    if driver is None:
        return Finding("memory", f"{said}; free memory outside of it is unknown", ok=None)
    free = min(driver.free_bytes(device.local_hardware_id) for device in devices)
    said += f", free outside of it {readable(free)}"
    if free >= needed:
        return Finding("memory", said)
    fraction = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75, the default")
    return _failed(
        "memory",
        said,
        f"lower XLA_PYTHON_CLIENT_MEM_FRACTION (now {fraction}), or end other programs "
        "that use memory of these GPUs, or use fewer tokens per call",
    )


def _exchange(group: Group) -> Finding:
    name = f"on {group.size}"
    what = "dispatch, experts, combine and gradients"
    try:
        problem = exchange_problem(group)
    except Exception as error:  # the next checks run after any error
        problem = f"{type(error).__name__}: {_first_line(error)}"
    if not problem:
        return Finding(name, f"{what} agree with numpy")
    return _failed(
        name,
        f"{what}: {problem}",
        "run again with --portable. If that passes, Group(implementation='portable') avoids "
        "the kernels; if it fails too, the cause is JAX or the machine",
    )


def exchange_problem(group: Group) -> str:
    """Run a small exchange, and return how its results differ from NumPy's, or ''. Each expert
    multiplies its rows by its id plus one. Sums are exact, because all numbers are small multiples
    of 1/4."""
    ranks, tokens, hidden, top_k, local_experts = group.size, 24, 40, 3, 2
    experts = ranks * local_experts
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, (ranks, tokens, hidden)).astype(np.float32)
    ids = rng.integers(-1, experts, (ranks, tokens, top_k)).astype(np.int32)
    weights = rng.integers(-4, 5, ids.shape).astype(np.float32) / 4
    cotangent = rng.integers(-4, 5, x.shape).astype(np.float32)

    def on_rank(x: Any, ids: Any, weights: Any, cotangent: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            recv = api.dispatch(x, ids[0], weights, group=group, num_experts=experts)
            factors = jnp.repeat(
                recv.expert_ids + 1, recv.group_sizes, total_repeat_length=len(recv.rows)
            )
            return api.combine(factors[:, None].astype(x.dtype) * recv.rows, recv)

        out, transpose = jax.vjp(layer, x[0], weights[0])
        return jax.tree.map(lambda leaf: leaf[None], (out, *transpose(cotangent[0])))

    mesh, spec = group.mesh, PartitionSpec(group.axes)
    assert mesh is not None
    program = jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec))
    try:
        sharding = NamedSharding(mesh, spec)
        placed = [
            jax.make_array_from_callback(whole.shape, sharding, whole.__getitem__)
            for whole in (x, ids, weights, cotangent)
        ]
        actual = jax.block_until_ready(program(*placed))
        group.check()
    finally:
        group.close()

    factors = np.where(ids < 0, 0, ids + 1).astype(np.float32)
    scale = (weights * factors).sum(-1, keepdims=True)
    inner = (x * cotangent).sum(-1, keepdims=True)
    expected = (scale * x, scale * cotangent, factors * inner)
    names = ("sums", "the gradient of x", "the gradient of the weights")
    wrong = []
    for name, found, exact in zip(names, actual, expected, strict=True):
        here = found.addressable_shards  # only this process's shards
        if bad := sum(not np.array_equal(shard.data, exact[shard.index]) for shard in here):
            wrong.append(f"{name} on {bad} of {len(here)} ranks")
    return f"differs from numpy in {', '.join(wrong)}" if wrong else ""


class _Driver:
    """The CUDA driver, queried directly because the extension may be missing."""

    def __init__(self, library: Any):
        self._library = library

    @classmethod
    def open(cls) -> _Driver | None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
        return cls(library) if library.cuInit(0) == 0 else None

    def cuda_version(self) -> str:
        """Return the newest CUDA version that the driver supports, as in "13.0"."""
        number = ctypes.c_int()
        self._library.cuDriverGetVersion(ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def free_bytes(self, device: int) -> int:
        """Return the free bytes of a device, whose primary context JAX has already created."""
        free, total, context = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
        if self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
            return 0
        self._library.cuCtxPushCurrent_v2(context)
        self._library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        self._library.cuCtxPopCurrent_v2(ctypes.byref(context))
        self._library.cuDevicePrimaryCtxRelease_v2(device)
        return free.value


def _run(*command: str) -> str:
    """Return the output of a command; '' if the command does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
