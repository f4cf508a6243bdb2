"""The operations that are timed, made from a method; and the check that the method is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .methods import Method
from .workload import Workload

OPS = ("route", "dispatch", "combine", "round_trip", "backward")

# bfloat16 has 8 bits; a method may round partial sums of each rank, and their sum.
TOLERANCE = 1e-2


class Operation(NamedTuple):
    """Something to repeat."""

    op: str
    includes_route: bool
    state: Callable[[dict[str, Any]], Any]
    """What it starts from, out of what ``prepare`` gave."""
    step: Callable[[Any], Any]
    """State of one rank -> results."""


def round_trip(method: Method, x: jax.Array, ids: Any, weights: jax.Array) -> jax.Array:
    """Dispatch and combine, with experts that return their rows: gives x, for weights sum to 1."""
    dispatched = method.dispatch(x, ids, weights)
    return method.combine(dispatched.rows, dispatched.state)


def prepare(method: Method) -> tuple[Callable[..., dict[str, Any]], list[Operation]]:
    """A function of one rank that runs everything once, and the operations to time after it.

    The function takes (x, ids, weights). It must be traced before the operations are.
    """
    vjp_treedef = None

    def run_once(x: jax.Array, ids: jax.Array, weights: jax.Array) -> dict[str, Any]:
        nonlocal vjp_treedef
        routed = method.route(ids) if method.route else ids
        dispatched = method.dispatch(x, routed, weights)
        out, vjp = jax.vjp(lambda x, weights: round_trip(method, x, routed, weights), x, weights)
        residuals, vjp_treedef = jax.tree.flatten(vjp)
        dx, d_weights = vjp(x)
        return dict(
            x=x,
            ids=ids,
            weights=weights,
            routed=routed,
            rows=dispatched.rows,
            group_sizes=dispatched.group_sizes,
            state=dispatched.state,
            residuals=residuals,
            out=out,
            dx=dx,
            d_weights=d_weights,
        )

    def pick(*names: str) -> Callable[[dict[str, Any]], Any]:
        return lambda prepared: tuple(prepared[name] for name in names)

    def dispatch(state: Any) -> Any:
        dispatched = method.dispatch(*state)
        return dispatched.rows, dispatched.weights, dispatched.group_sizes

    def backward(state: Any) -> Any:
        residuals, cotangent = state
        return jax.tree.unflatten(vjp_treedef, residuals)(cotangent)

    def whole(state: Any) -> Any:
        return round_trip(method, *state)

    given = pick("x", "ids", "weights")
    operations = [
        Operation("dispatch", True, given, dispatch),
        Operation("combine", False, pick("rows", "state"), lambda state: method.combine(*state)),
        Operation("round_trip", True, given, whole),
        Operation("backward", False, pick("residuals", "x"), backward),
    ]
    if method.route is not None:
        route = method.route

        def only_route(state: Any) -> Any:
            routing = route(*state)
            return routing.arrays, routing.group_sizes

        routed = pick("x", "routed", "weights")
        operations = [
            Operation("route", True, pick("ids"), only_route),
            Operation("dispatch", False, routed, dispatch),
            Operation("round_trip", False, routed, whole),
            *operations,
        ]
    return run_once, operations


def wire_bytes(op: str, workload: Workload) -> int:
    """Bytes of token rows that leave the rank that sends most."""
    return {
        "route": 0,
        "dispatch": workload.leaving_bytes,
        "combine": workload.entering_bytes,  # the same rows, the other way
        "round_trip": workload.leaving_bytes + workload.entering_bytes,
        "backward": workload.leaving_bytes + workload.entering_bytes,
    }[op]


def crossings(op: str) -> int:
    """How often the rows cross the wire, one way."""
    return {"route": 0, "dispatch": 1, "combine": 1, "round_trip": 2, "backward": 2}[op]


@jax.jit
def _errors(prepared: dict[str, Any]) -> dict[str, jax.Array]:
    x = prepared["x"].astype(jnp.float32)
    exact = dict(out=x, dx=x, d_weights=(x * x).sum(axis=-1, keepdims=True))

    def error(name: str) -> jax.Array:
        difference = prepared[name].astype(jnp.float32) - exact[name]
        expected = jnp.broadcast_to(exact[name], difference.shape)
        return jnp.sqrt((difference**2).sum() / (expected**2).sum())

    return {name: error(name) for name in exact}


@jax.jit
def _are_equal(a: Any, b: Any) -> jax.Array:
    return jnp.stack([jnp.array_equal(*pair) for pair in zip(a, b, strict=True)]).all()


def check(prepared: dict[str, Any], reference: dict[str, Any] | None) -> None:
    """Checks what ``prepare``'s function gave, for all ranks.

    The experts return their rows and the cotangent is x, so the output and its gradient are x, and
    every weight's gradient is <x, x>. Rows and group sizes must equal the reference's bit for bit.

    Raises:
      AssertionError: something is wrong.
    """
    for name, error in _errors({k: prepared[k] for k in ("x", "out", "dx", "d_weights")}).items():
        if not float(error) < TOLERANCE:
            raise AssertionError(
                f"{name} is wrong: relative error {float(error):.2e}, {TOLERANCE:.0e} allowed"
            )
    if reference is not None:
        rows = [(p["rows"], p["group_sizes"]) for p in (prepared, reference)]
        if not bool(_are_equal(*rows)):
            raise AssertionError("rows or group sizes differ from ours")
