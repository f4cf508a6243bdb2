"""Choose how each primitive runs. The lowering and ``explain`` call the same functions.

A *chooser* of a primitive has the arguments of a lowering rule, and returns a ``Choice``.
``explain`` passes abstract values as operands. Only ``Choice.lower`` emits operations.
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
    """How a call of a primitive runs."""

    path: str
    """The path in words; '' if the call only runs the primitives of ``within``."""
    why: str
    """Why the kernel does not run, or ''."""
    lower: Callable[[], Any]
    within: Callable[..., Any] | None = None
    """A function of the operands that replaces the call. Its primitives have choosers, too."""


class NamedGpu(NamedTuple):
    """A GPU that ``explain`` assumes. It need not exist."""

    compute_capability: str
    platform: str = "gpu"

    def __str__(self) -> str:
        return f"a GPU of compute capability {self.compute_capability}"


class Unknown(Exception):
    """Raised under ``explain`` if this process cannot know a path. The text says why."""


choosers: dict[compat.Primitive, Callable[..., Choice]] = {}
compositions: dict[compat.Primitive, Callable[..., Any]] = {}
"""For each primitive that only runs other primitives: the function that binds these primitives."""

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
    """Return a context for ``explain``, in which choosers do not contact other processes. With
    ``gpu``, choosers assume that all devices are such GPUs and access each other's memory."""
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
