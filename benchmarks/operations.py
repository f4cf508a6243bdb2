from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .methods import Method
from .workload import Workload

Op = tuple[str, bool]
"""(name, includes routing)"""
ROUTE: Op = ("route", True)
DISPATCH: Op = ("dispatch", True)
EXCHANGE: Op = ("dispatch", False)
COMBINE: Op = ("combine", False)
ROUND_TRIP: Op = ("round_trip", True)
ROUND_TRIP_ROUTED: Op = ("round_trip", False)
BACKWARD: Op = ("backward", False)
STANDARD: tuple[Op, ...] = (
    *(ROUTE, EXCHANGE, ROUND_TRIP_ROUTED, DISPATCH, COMBINE, ROUND_TRIP, BACKWARD),
)

# A method may round each rank's partial sum and the total.
TOLERANCE = 1e-2
FORMAT_TOLERANCE = dict(BlockwiseFp8=5e-2, MxFp8=5e-2, NvFp4=0.2)


class Operation(NamedTuple):
    op: str
    includes_route: bool
    state: Callable[[dict[str, Any]], Any]
    """Maps the results of ``prepare``'s function to the argument of ``step``."""
    step: Callable[[Any], Any]
    tied_axes: int | None
    """For ``timing.pick_tied``."""


def round_trip(method: Method, x: jax.Array, ids: Any, weights: jax.Array) -> jax.Array:
    """Return x up to rounding: experts return their rows, and weights of a token have sum 1."""
    dispatched = method.dispatch(x, ids, weights)
    return method.combine(method.decode(dispatched.rows), dispatched.state)


def prepare(
    method: Method, ops: Collection[Op] = STANDARD
) -> tuple[Callable[..., dict[str, Any]], list[Operation]]:
    """Return a function (x, ids, weights) of one rank, and operations. Trace the function before
    the operations, because ``backward`` needs the structure of its ``vjp``."""
    vjp_treedef = None

    def run_once(x: jax.Array, ids: jax.Array, weights: jax.Array) -> dict[str, Any]:
        nonlocal vjp_treedef
        routed = method.route(ids) if method.route else ids
        dispatched = method.dispatch(x, routed, weights)
        found = dict(
            x=x,
            ids=ids,
            weights=weights,
            routed=routed,
            rows=dispatched.rows,
            group_sizes=dispatched.group_sizes,
            state=dispatched.state,
        )
        if BACKWARD in ops:
            out, vjp = jax.vjp(lambda x, w: round_trip(method, x, routed, w), x, weights)
            found["residuals"], vjp_treedef = jax.tree.flatten(vjp)
            dx, d_weights = vjp(x)
            norms = (x.astype(jnp.float32) ** 2).sum(axis=-1, keepdims=True)
            pairs = dict(out=(out, x), dx=(dx, x), d_weights=(d_weights, norms))
        else:
            pairs = dict(out=(round_trip(method, x, routed, weights), x))
        if ROUND_TRIP in ops:  # one launch routes and dispatches few tokens
            pairs["out_of_ids"] = (round_trip(method, x, ids, weights), x)
        found["errors"] = {name: squares(*pair) for name, pair in pairs.items()}
        return found

    pick = lambda *names: lambda prepared: tuple(prepared[name] for name in names)

    def dispatch(state: Any) -> Any:
        dispatched = method.dispatch(*state)
        return dispatched.rows, dispatched.weights, dispatched.group_sizes

    def backward(state: Any) -> Any:
        residuals, cotangent = state
        return jax.tree.unflatten(vjp_treedef, residuals)(cotangent)

    whole = lambda state: round_trip(method, *state)

    def only_route(state: Any) -> Any:
        assert method.route is not None
        routing = method.route(*state)
        return routing.arrays, routing.group_sizes

    given, routed = pick("x", "ids", "weights"), pick("x", "routed", "weights")
    makers: dict[Op, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
        ROUTE: (pick("ids"), only_route),
        EXCHANGE: (routed, dispatch),
        ROUND_TRIP_ROUTED: (routed, whole),
        DISPATCH: (given, dispatch),
        COMBINE: (pick("rows", "state"), lambda state: method.combine(*state)),
        ROUND_TRIP: (given, whole),
        BACKWARD: (pick("residuals", "x"), backward),
    }
    if method.route is None:
        for op in (ROUTE, EXCHANGE, ROUND_TRIP_ROUTED):
            del makers[op]

    # In plain JAX, parts of an operation may read different integer arrays: tie all of them.
    tied_axes = 2 if method.route is not None else None
    return run_once, [
        Operation(*op, *makers[op], tied_axes) for op in STANDARD if op in ops and op in makers
    ]


def squares(actual: jax.Array, exact: jax.Array) -> jax.Array:
    """Return two sums of squares, [2]: of ``actual - exact`` and of ``exact``."""
    exact = jnp.broadcast_to(exact.astype(jnp.float32), actual.shape)
    difference = actual.astype(jnp.float32) - exact
    return jnp.stack([(difference**2).sum(), (exact**2).sum()])


def parts(op: str) -> tuple[str, ...]:
    whole = {"route": (), "dispatch": ("dispatch",), "combine": ("combine",)}
    return whole.get(op, ("dispatch", "combine"))


def wire_bytes(op: str, workload: Workload) -> int:
    sent = dict(dispatch=workload.leaving_bytes, combine=workload.entering_bytes)
    return sum(sent[part] for part in parts(op))


def relative_error(squares: Any) -> float:
    """Return the relative error over all ranks from each rank's ``squares``."""
    difference, exact = np.asarray(squares, np.float64).reshape(-1, 2).sum(axis=0)
    return float(np.sqrt(difference / exact))


def check_errors(squares: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    for name, of_ranks in squares.items():
        error = relative_error(of_ranks)
        if not error < tolerance:
            raise AssertionError(
                f"{name} is wrong: relative error {error:.2e}, {tolerance:.0e} allowed"
            )


@jax.jit
def _are_equal(a: Any, b: Any) -> jax.Array:
    return jnp.stack(jax.tree.leaves(jax.tree.map(jnp.array_equal, a, b))).all()


def check(
    prepared: dict[str, Any], reference: dict[str, Any] | None, tolerance: float = TOLERANCE
) -> None:
    """Check the results of ``prepare``'s function on all ranks. The exact results are x for the
    output and for the gradient of x, and <x, x> for the gradient of each weight."""
    check_errors(prepared["errors"], tolerance)
    if reference is not None:
        rows = [(p["rows"], p["group_sizes"]) for p in (prepared, reference)]
        if not bool(_are_equal(*rows)):
            raise AssertionError("rows or group sizes differ from ours")
