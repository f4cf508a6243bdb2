"""Choose the path of each primitive. One function decides for both the lowering and ``explain``.

A *chooser* of a primitive has the arguments of a lowering rule, but ``explain`` passes types in
place of values. A chooser returns a ``Choice``. It has no side effects before lowering.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from . import compat

NOT_FOR_GPUS = "the program is not for NVIDIA GPUs"
KERNEL = "CUDA kernel"

logger = logging.getLogger("jax_moe_a2a")


class Choice(NamedTuple):
    """A path of a call."""

    path: str
    """The path in words; '' if the call only binds primitives in ``within``."""
    why: str
    """Why the kernel does not run, or ''."""
    lower: Callable[[], Any]
    within: Callable[..., Any] | None = None
    """A function of the operands, which may bind primitives that choose their own paths."""


class NamedGpu(NamedTuple):
    """A GPU that ``explain`` assumes. It need not exist."""

    compute_capability: str
    platform: str = "gpu"

    def __str__(self) -> str:
        return f"a GPU of compute capability {self.compute_capability}"


class Unknown(Exception):
    """The reason why this process cannot tell ``explain`` the path of a call."""


choosers: dict[compat.Primitive, Callable[..., Choice]] = {}
compositions: dict[compat.Primitive, Callable[..., Any]] = {}
"""Maps each primitive that always runs as other primitives to the function that binds them."""

_explained: ContextVar[NamedGpu | bool] = ContextVar("explained", default=False)


def lowering(primitive: compat.Primitive, choose: Callable[..., Choice]) -> Callable[..., Any]:
    """Register the chooser of a primitive for NVIDIA GPUs, and return the lowering rule."""
    choosers[primitive] = choose

    def lower(ctx: compat.Context, *operands: Any, **params: object) -> Any:
        choice = choose(ctx, *operands, **params)
        if choice.why:
            logger.info("%s: %s, because %s", primitive, choice.path, choice.why)
        return choice.lower()

    return lower


@contextlib.contextmanager
def explaining(gpu: NamedGpu | None) -> Iterator[None]:
    """Return a context in which choosers neither wait for other processes nor announce this
    process. With ``gpu``, choosers assume that all devices are GPUs like ``gpu`` and reach each
    other's memory."""
    token = _explained.set(gpu or True)
    try:
        yield
    finally:
        _explained.reset(token)


def is_explaining() -> bool:
    return bool(_explained.get())


def named_gpu() -> NamedGpu | None:
    found = _explained.get()
    return found if isinstance(found, NamedGpu) else None
