"""Define ``InFlight``, a split exchange between start and done, and ``overlap``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from .. import compat
from ..ad import select, spread
from ..checks import PyTree
from ..group.group import Group
from ..routing.types import RouteOptions
from .split import tie

T = TypeVar("T")


class InFlight:
    """An exchange that ``dispatch_start`` or ``combine_start`` has started.

    Pass an ``InFlight`` to ``dispatch_done`` or ``combine_done`` exactly once, in the function that
    started the exchange. An ``InFlight`` cannot enter or leave ``jit``, ``scan``, ``cond``,
    ``while_loop`` or ``checkpoint`` as an argument, a result, a carry or a value of a closure.
    Start and done may both be inside one of these transforms.
    """

    def __init__(
        self,
        operation: str,
        arrays: Sequence[jax.Array],
        finish: Callable[[Sequence[jax.Array]], Any],
        group: Group,
    ):
        self._operation = operation
        self._arrays: Sequence[jax.Array] | None = arrays
        self._finish = finish
        self._group = group
        self._function = compat.traced_function()

    def __repr__(self) -> str:
        state = "done" if self._arrays is None else "in flight"
        return f"InFlight({self._operation}, {state}, group={self._group})"

    def _take(self, user: str) -> Sequence[jax.Array]:
        """Return the arrays. A second call raises an error, which names ``user`` as the caller."""
        if self._arrays is None:
            raise ValueError(
                f"inflight must be used once; {user} got an InFlight that was already used. After "
                "ma.overlap, use the InFlight that ma.overlap returned"
            )
        if compat.traced_function() is not self._function:
            raise ValueError(
                f"inflight must be used in the function that started it; {user} got an InFlight "
                "that entered or left jit, scan, cond, while_loop or checkpoint. Call start and "
                "done in the same function"
            )
        arrays, self._arrays, self._function = self._arrays, None, None
        return arrays


def check_start(operation: str, routing: RouteOptions) -> None:
    """Raise a ValueError if replicated tokens or eager execution forbid a start."""
    if routing.replicated:
        raise ValueError(
            f"{operation}_start must have a routing without replicated tokens, because replicated "
            f"tokens do not travel; got replicated=True. Use {operation}"
        )
    if compat.traced_function() is None and routing.group.path == "cuda":
        raise ValueError(
            f"{operation}_start must be called under jax.jit on the CUDA path, because arrays must "
            "stay in place while other ranks read them; got a call outside jax.jit. Wrap the "
            "program in jax.jit"
        )


def finish_exchange(inflight: InFlight, operation: str) -> Any:
    if not isinstance(inflight, InFlight) or inflight._operation != operation:
        got = inflight if isinstance(inflight, InFlight) else type(inflight).__name__
        raise TypeError(f"inflight must be the result of {operation}_start; got {got}")
    return inflight._finish(inflight._take(f"{operation}_done"))


def overlap(inflight: InFlight, fn: Callable[..., T], *args: PyTree) -> tuple[InFlight, T]:
    """Run ``fn(*args)`` after the start of an exchange and before its done.

    Without ``overlap``, XLA may move ``fn`` before the start or after the done. In the backward
    pass, the gradient of ``fn`` also runs while the exchange of the gradient is in flight.

    Args:
      inflight: the result of ``dispatch_start``, ``combine_start`` or another ``overlap``. After
        the call, use only the returned ``InFlight``.
      fn: the function to run. It may contain exchanges. Pass the arrays that ``fn`` reads through
        ``args``, because work on arrays from a closure may run before the start.
      *args: pytrees of arrays for ``fn``. Leaves that are not arrays are passed unchanged.

    Returns:
      A pair: the ``InFlight`` to finish, and the result of ``fn``.

    Example:
      Two computations run during one combine:

      ```python
      import jax
      import jax.numpy as jnp
      import jax_moe_a2a as ma

      group = ma.Group(axis_name="ep", size=2)

      def on_rank(x, ids):
          recv = ma.dispatch(x, ids, group=group, num_experts=2)
          inflight = ma.combine_start(recv.rows, recv)
          inflight, a = ma.overlap(inflight, jnp.square, x)
          inflight, b = ma.overlap(inflight, jnp.add, x, a)
          return b + ma.combine_done(inflight)

      x, ids = jnp.full((2, 3, 4), 3.0), jnp.ones((2, 3, 1), int)
      print(jax.vmap(on_rank, axis_name="ep")(x, ids)[0, 0])
      ```

      ```text
      [15. 15. 15. 15.]
      ```
    """
    if not isinstance(inflight, InFlight):
        raise TypeError(f"inflight must be an InFlight; got {type(inflight).__name__}")
    arrays = inflight._take("overlap")
    arrays, args = _tied(arrays, args)
    arrays, out = _tied(arrays, fn(*args))
    return InFlight(inflight._operation, arrays, inflight._finish, inflight._group), out


def _tied(arrays: Sequence[jax.Array], tree: T) -> tuple[Sequence[jax.Array], T]:
    """Return the arguments. Each returned array depends on all arrays of both arguments."""
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
    tied = tie(*arrays, *select(is_array, leaves))
    arrays, leaves = tied[: len(arrays)], spread(is_array, tied[len(arrays) :], leaves)
    return arrays, jax.tree.unflatten(treedef, leaves)


def _refuse(inflight: InFlight) -> NoReturn:
    raise TypeError(
        f"{inflight!r} must stay in the function that started it; got an InFlight as argument, "
        "result or carry of jit, scan, cond, while_loop, vmap, grad or checkpoint. Call start and "
        "done in the same function"
    )


jax.tree_util.register_pytree_node(InFlight, _refuse, lambda of, _: of)
