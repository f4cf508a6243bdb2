"""What is under way between the start of an exchange and its done, and work beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from . import compat
from .group import Group
from .split import tie


class InFlight:
    """An exchange that ``dispatch_start`` or ``combine_start`` has started.

    It ends in the ``dispatch_done`` or ``combine_done`` of the same function, once. It does not go
    into or out of ``jit``, ``scan``, ``cond``, ``while_loop`` or ``checkpoint``, neither as an
    argument, a result or a carry, nor by a closure. Start and done may both be in a function under
    any of these.
    """

    def __init__(
        self,
        operation: str,
        arrays: Sequence[Any],
        finish: Callable[[Sequence[Any]], Any],
        group: Group,
    ):
        self._operation = operation
        self._arrays: Sequence[Any] | None = arrays
        self._finish = finish
        self._group = group
        self._function = compat.traced_function()

    def __repr__(self) -> str:
        state = "done" if self._arrays is None else "in flight"
        return f"InFlight({self._operation}, {state}, group={self._group})"

    def _take(self, user: str) -> Sequence[Any]:
        """The arrays, once."""
        if self._arrays is None:
            raise ValueError(
                f"inflight must be used once; {user} got one that is done, or that ma.overlap has "
                "returned anew"
            )
        if compat.traced_function() is not self._function:
            raise ValueError(
                f"inflight must be done where it was started: {user} got one that came into or out "
                "of jit, scan, cond, while_loop or checkpoint. Call start and done in the same "
                "function, inside or outside of these"
            )
        arrays, self._arrays, self._function = self._arrays, None, None
        return arrays


def check_place(operation: str, group: Group) -> None:
    """Checks that an exchange may be started here."""
    if compat.traced_function() is None and group.path == "cuda":
        raise ValueError(
            f"{operation}_start must be called under jax.jit where the CUDA kernels run: only "
            "within one program do arrays stay in place while they are read; got none around"
        )


def finish_exchange(inflight: InFlight, operation: str) -> Any:
    """What ``<operation>_done`` returns."""
    if not isinstance(inflight, InFlight) or inflight._operation != operation:
        got = inflight if isinstance(inflight, InFlight) else type(inflight).__name__
        raise TypeError(f"inflight must be what {operation}_start returned; got {got}")
    return inflight._finish(inflight._take(f"{operation}_done"))


def overlap(inflight: InFlight, fn: Callable[..., Any], *args: Any) -> tuple[InFlight, Any]:
    """Runs ``fn(*args)`` while an exchange is in flight: after its start, and before its done.

    Without this XLA may put the work of ``fn`` before the start or behind the done. The backward
    pass is tied in the same way: the gradient of ``fn`` is computed while that of the exchange is
    in flight.

    Args:
      inflight: what is in flight; it is used up, and what is returned takes its place.
      fn: the work. What it reads should come by ``args``: what it closes over is not tied behind
        the start. It may hold exchanges of its own.
      *args: pytrees; leaves that are no arrays are passed as they are.

    Returns:
      (what is in flight, what ``fn`` returned).

    Raises:
      TypeError, ValueError: something else than what is in flight here.
    """
    if not isinstance(inflight, InFlight):
        raise TypeError(f"inflight must be an InFlight; got {type(inflight).__name__}")
    arrays = inflight._take("overlap")
    arrays, args = _tied(arrays, args)
    arrays, out = _tied(arrays, fn(*args))
    return InFlight(inflight._operation, arrays, inflight._finish, inflight._group), out


def _tied(arrays: Sequence[Any], tree: Any) -> tuple[Sequence[Any], Any]:
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    others = [leaf for leaf, is_tied in zip(leaves, is_array, strict=True) if is_tied]
    tied = iter(tie(*arrays, *others))
    arrays = [next(tied) for _ in arrays]
    leaves = [
        next(tied) if is_tied else leaf for leaf, is_tied in zip(leaves, is_array, strict=True)
    ]
    return arrays, jax.tree.unflatten(treedef, leaves)


def _refuse(inflight: InFlight) -> Any:
    raise TypeError(
        f"{inflight!r} must stay in the function that started it: it cannot be an argument, a "
        "result or a carry of jit, scan, cond, while_loop, vmap, grad or checkpoint"
    )


# A pytree whose flattening says why it is none.
jax.tree_util.register_pytree_node(InFlight, _refuse, lambda of, _: of)
