"""Wrap the compiled extension, if it exists, for the rest of the package.

Only this module uses the extension, which ``extension.py`` finds. Functions that say what is
available, such as ``has_kernels``, also work without the extension.
"""

from __future__ import annotations

import functools
import pathlib
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from .. import compat, paths
from ..paths import Choice
from . import extension

_native: Any = extension.load()  # if None, only the portable path runs


class Topology(NamedTuple):
    """The devices of a group. The fields are equal to the fields of ``Topology`` in
    ``cuda/runtime/workspace.h``, and have the order of the extension's arguments."""

    devices: tuple[int, ...]
    """Ids of the devices of all domains, domain after domain in the order of ranks. If ranks share
    a GPU, its id is repeated. If the program decides which GPU they share, the tuple is empty."""
    num_ranks: int
    """Number of ranks of a domain."""


def on_one_gpu(device_id: int, num_ranks: int) -> Topology:
    """Return the topology of ranks that share a GPU."""
    introduce_devices()
    return Topology((device_id,) * num_ranks, num_ranks)


WHOLE: int = 0  # the kinds of workspaces of a topology: ``WorkspaceKind`` in ``cuda/layout.h``
SPLIT: int = 1
WORKSPACE_KINDS = (WHOLE, SPLIT)


def has_kernels() -> bool:
    """Return True if the extension, which contains the CUDA kernels, is installed."""
    return _native is not None


def cuda_build() -> str:
    """Return the CUDA version and the architectures of the kernels as text; '' without kernels."""
    return _native.cuda_build if has_kernels() else ""


def origin() -> str:
    """Return text that says where the extension comes from; '' without an extension."""
    if _native is None:
        return ""
    package = _native.__name__.partition(".")[0]
    if package != extension.IMPORTED_AS:
        return f"wheel {package.replace('_', '-')}"
    folder = pathlib.Path(_native.__file__).parent.resolve()
    is_own = folder == extension.FOLDER
    return "built with this package" if is_own else f"built from these sources, in {folder}"


def has_test_hooks() -> bool:
    """Return True if the kernels were built with test hooks, which cause faults on purpose."""
    return has_kernels() and _native.has_test_hooks


def has_grouped_gemm() -> bool:
    return has_kernels() and _native.has_grouped_gemm


def why_not_grouped_gemm(dtype: DTypeLike, num_rows: int, num_groups: int, k: int, n: int) -> str:
    """Return why the kernel of grouped products does not support these sizes, or ''."""
    why, _ = _native.why_not_grouped_gemm(jnp.dtype(dtype).name, num_rows, num_groups, k, n)
    return why


def why_not_fp8_gemm(num_rows: int, num_groups: int, k: int, n: int) -> str:
    """Return why the kernel of grouped products in FP8 does not support these sizes, or ''."""
    why, _ = _native.why_not_fp8_gemm(num_rows, num_groups, k, n)
    return why


def library_version() -> tuple[int, ...]:
    """Return the major, minor and patch version of cuBLASLt in this process. Return zeros if
    cuBLASLt is missing or has no grouped products."""
    version = _native.library_version()
    return version // 10_000, version // 100 % 100, version % 100


def library_scratch(num_groups: int) -> int:
    """Return the size of the scratch array, int32, that cuBLASLt needs for a grouped product."""
    return int(_native.library_scratch(num_groups))


@functools.cache
def register_targets() -> None:
    """Register all kernels with XLA, once, when a call of a kernel is first lowered."""
    for name, registration in _native.state_types().items():  # first, because targets use them
        jax.ffi.register_ffi_type(name, registration, platform="CUDA")
    for name, stages in _native.targets().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")
    if local_gpus():
        introduce_devices()


def choose_kernel(
    ctx: compat.Context,
    operands: Sequence[compat.Value],
    params: dict[str, Any],
    kernel: Callable[..., Any],
    why: str = "",
    composition: Callable[..., Any] | None = None,
    what: str = "not fused",
) -> Choice:
    """Choose the function ``kernel`` if ``why`` is ''. Otherwise choose ``composition``, which
    binds other primitives. ``explain`` then shows ``what`` as the path."""
    if why:
        assert composition is not None
        lower = functools.partial(compat.lower_fun, ctx, composition, operands, params)
        return Choice(what, why, lower, functools.partial(composition, **params))

    def lower_kernel() -> Any:
        register_targets()
        paths.logger.info("%s: the kernel", ctx.primitive)
        return compat.lower_fun(ctx, kernel, operands, params)

    return Choice(paths.KERNEL, "", lower_kernel)


def call_product(
    target: str,
    results: Sequence[Any],
    operands: Sequence[jax.Array],
    aliases: dict[int, int] | None = None,
    **attributes: int | float,
) -> list[jax.Array]:
    """Call a kernel that does not use other ranks (``cuda/calls/products.h``)."""
    arrays = ([(type_name(x.dtype), list(x.shape)) for x in each] for each in (operands, results))
    if why := _native.why_not_product(target, attributes, *arrays):
        raise malformed(target, why)
    kernel = jax.ffi.ffi_call(target, results, input_output_aliases=aliases)
    found = kernel(*operands, **{name: attribute(value) for name, value in attributes.items()})
    # The barrier prevents a second call, as in ``custom_call`` of exchange/lowering.py.
    return [lax.optimization_barrier(x) for x in found]


def attribute(value: object) -> Any:
    """Convert an attribute of a custom call to the type that its handler reads."""
    if isinstance(value, int) and not isinstance(value, bool):
        return np.int64(value)
    return np.float32(value) if isinstance(value, float) else value


def protocol_version() -> int:
    """Return the protocol version, which must be equal in all processes; 0 without kernels."""
    return _native.PROTOCOL_VERSION if has_kernels() else 0


def limit(name: str) -> int:
    """Return a limit of the kernels. ``cuda/layout.h`` has the names (``MAX_ARRAYS``, ...)."""
    return getattr(_native, name)


TUNING: dict[str, int] = dict(_native.tuning) if _native is not None else {}
"""The numbers of ``kLoweringTuning`` in ``cuda/tuning.h``. ``benchmarks.tune`` varies most."""


def tuning(name: str) -> int:
    """Return a number of ``TUNING``; 0 without the extension. Call it at each lowering."""
    return TUNING.get(name, 0)


_XLA_LETTERS = dict(bfloat="BF", float="F", int="S", uint="U", complex="C", bool="PRED")


def type_name(dtype: DTypeLike) -> str:
    name = jnp.dtype(dtype).name
    rest = name.lstrip(string.ascii_lowercase)
    letters = _XLA_LETTERS[name.removesuffix(rest)]
    return letters + rest.replace("_", "").upper()


def why_not(
    target: str,
    attributes: Mapping[str, Any],
    operands: Iterable[Any],
    results: Iterable[Any],
    topology: Topology,
    is_colocated: bool,
) -> tuple[str, int]:
    """Return a pair: why the kernels do not support a call, or ''; and the bytes of the ring half
    for the call (``cuda/calls/why_not.h``). Operands and results are the arrays of one rank."""
    arrays = ([(type_name(x.dtype), list(x.shape)) for x in each] for each in (operands, results))
    why, is_unsupported, half_bytes = _native.why_not(
        target, dict(attributes), *arrays, topology.num_ranks, is_colocated
    )
    if why and not is_unsupported:
        raise malformed(target, why)
    return why, half_bytes


def malformed(target: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"jax_moe_a2a has a bug: it lowered a malformed call of {target}: {why}. Please report it "
        "with the program"
    )


def local_gpus() -> list[Any]:
    """Return the GPUs of this process, or the GPU that ``explain`` assumes."""
    if gpu := paths.named_gpu():
        return [gpu]
    try:
        return jax.local_devices(backend="gpu")
    except RuntimeError:  # no such backend
        return []


OLDEST_CAPABILITY = 9.0  # the build compiles for this capability and later ones (tools/nvcc.py)


def is_new_enough(gpu: jax.Device) -> bool:
    """Return True if the build has code for the compute capability of ``gpu``."""
    return float(gpu.compute_capability) >= OLDEST_CAPABILITY


def why_no_local_kernel() -> str:
    """Return why the GPUs of this process cannot run kernels of a single rank, or ''."""
    if not has_kernels():
        return "jax_moe_a2a was built without kernels"
    gpus = local_gpus()
    if gpus and all(map(is_new_enough, gpus)):
        return ""
    oldest = OLDEST_CAPABILITY
    return f"the kernel needs GPUs of compute capability {oldest} or newer; JAX sees {gpus}"


def why_no_exchange(gpus: Iterable[Any]) -> str:
    """Return why a GPU cannot run the kernels of exchanges, or ''."""
    for gpu in gpus:
        if not is_new_enough(gpu):
            return f"{gpu} is older than Hopper (compute capability {OLDEST_CAPABILITY})"
        # CUDA C++ Programming Guide, "Compute Capabilities": a block has 99 KiB of shared memory on
        # 12.x, and 227 KiB (kMaxSharedBytes in cuda/tuning.h) on 9.0, 10.x and 11.0.
        if gpu.compute_capability.startswith("12."):
            return f"{gpu} has 99 KiB of shared memory for a block, less than the kernels need"
    return ""


def default_gpu() -> jax.Device | None:
    """Return the GPU for programs without devices: JAX's default device, or the first GPU."""
    gpus = local_gpus()
    default = getattr(jax.config, "jax_default_device", None)  # jax 0.10 has no type for it
    return default if default in gpus else next(iter(gpus), None)


def why_not_on_one_gpu(num_ranks: int) -> str:
    """Return why ``num_ranks`` ranks cannot share the default GPU, or ''."""
    device = default_gpu()
    if device is None:
        return "JAX sees no GPU"
    if why := why_no_exchange([device]):
        return why
    num_sms = getattr(device, "core_count", None)
    if num_sms is not None and not _native.colocated_blocks(num_ranks, num_sms, False):
        return (
            f"{num_ranks} ranks on one GPU need {num_ranks} streaming multiprocessors; "
            f"{device} has {num_sms}"
        )
    return ""


@functools.cache
def why_unreachable(topology: Topology) -> str:
    """Return why devices of this process cannot access the memory of each other, or ''."""
    introduce_devices()
    why, _ = _native.check_access(*topology)
    return why


def why_no_gpus() -> str:
    """Return why this process's GPUs cannot exchange with other processes' GPUs, or ''."""
    if not has_kernels():
        return "has no CUDA kernels"
    own = tuple(device.id for device in local_gpus())
    unreachable = why_unreachable(Topology(own, len(own)))
    return f"says that {unreachable}" if unreachable else ""


def failure(topology: Topology) -> str:
    """Return the first failure of an exchange over this topology in this process, or ''."""
    if not has_kernels():
        return ""
    for kind in WORKSPACE_KINDS:
        problem, failure = _native.failure(*topology, kind)
        _raise(problem)
        if failure:
            return failure
    return ""


@compat.per_job
def introduce_devices() -> None:
    """Register the GPUs of all processes with the extension, before it gets a topology."""
    for device in jax.devices("gpu"):
        is_here = device.process_index == jax.process_index()
        ordinal = device.local_hardware_id if is_here else _native.ELSEWHERE
        _native.add_device(device.id, device.process_index, ordinal)


def add_process(index: int, socket: str, secret: str, pid: int) -> None:
    """Register another process of this host. It answers requests for memory at ``socket``. ``pid``
    is 0 if the process id is unknown."""
    _native.add_process(index, socket, secret, pid)


def has_ended(index: int) -> bool:
    """Return True if a request for memory found that the process had ended."""
    return _native.has_ended(index)


@functools.cache
def listen() -> tuple[str, str]:
    """Start to answer requests for memory. Return the socket, and the secret that requests need."""
    problem, socket, secret = _native.listen()
    _raise(problem)
    return socket, secret


def reserved_bytes(topology: Topology, kind: int = WHOLE) -> int:
    """Return the size of a ring half in bytes; 0 while the workspace is closed."""
    return _native.reserved_bytes(*topology, kind)


def mapped_bytes(topology: Topology, kind: int = WHOLE) -> list[int]:
    """Return the number of bytes that each device has mapped; 0 while the workspace is closed."""
    return _native.mapped_bytes(*topology, kind)


def reserve(topology: Topology, half_bytes: int, timeout: float, kind: int = WHOLE) -> None:
    """Open or grow the workspace so that every ring half has at least ``half_bytes``. Wait at most
    ``timeout`` seconds for the answers of other processes."""
    _raise(_native.reserve(*topology, kind, half_bytes, int(timeout * 1e9)))


def wait(topology: Topology, timeout: float) -> None:
    """If the workspace is open, wait until the devices of this process have finished their work.
    After the timeout, raise a RuntimeError that names the unfinished work of each device."""
    if has_kernels():
        for kind in WORKSPACE_KINDS:
            _raise(_native.wait(*topology, kind, int(timeout * 1e9)))


def close(topology: Topology, timeout: float) -> None:
    """Wait for the devices like ``wait``, then free their workspaces. If the wait fails, the
    workspaces stay open. A signal such as Ctrl-C does not interrupt ``close``."""
    if has_kernels():
        _raise(_native.close(*topology, list(WORKSPACE_KINDS), int(timeout * 1e9)))


def _raise(problem: tuple[str, bool]) -> None:
    text, lacks_memory = problem
    if lacks_memory:
        raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: jax_moe_a2a: {text}")
    if text:
        raise RuntimeError(f"jax_moe_a2a: {text}")
