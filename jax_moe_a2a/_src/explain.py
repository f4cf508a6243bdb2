"""Explain which path each exchange and product of a program takes, and why."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from . import compat, paths
from .exchange.lowering import check_platforms
from .exchange.record import split_routing

# Maps each primitive's name without "moe_a2a_" to the name that ``explain`` shows.
NAMES = dict(
    route="route",
    routed_dispatch="route and dispatch",
    dispatch="dispatch",
    combine="combine",
    weighted_dispatch="dispatch of weighted gradients",
    weighted_combine="combine with weights at the rows",
    grouped_dot="grouped product",
    grouped_outer="gradient of expert weights",
    add_outer="gradient of expert weights, added to a total",
    grouped_dot_fp8="grouped product in FP8",
    encode_squares="quantization of weights",
    dot_act="grouped product with activation",
    dot_bias="grouped product with bias",
    act_dot_grad="gradient of activation, with its product",
    act_encode="activation and quantization",
    act_grad="gradient of activation and quantization",
    unfused_activation="activation",
    fill_slots="placement of experts",
    choose="choice of experts",
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A row of an ``Explanation``: equal calls in a program."""

    name: str
    """The operation in words, for example "grouped product"."""
    count: int
    """Number of these calls on a rank; per iteration if ``where`` names a loop."""
    sizes: str
    """The sizes of the arrays on one rank."""
    path: str
    """The path in words: "CUDA kernel", "portable path", "lax.ragged_dot" and so on; "unknown" if
    this process cannot know the path, and "error" if lowering raises an error."""
    why: str
    """Why the kernel does not run, why the path is unknown, or the error; "" for a kernel."""
    where: str = ""
    """"per iteration of a while loop" or "in a branch of a conditional", if the total number of
    calls is not known."""


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """The calls of a program. An ``Explanation`` prints as a table, and iterates over ``calls``."""

    calls: tuple[Call, ...]
    notes: tuple[str, ...]
    """Sentences that say for which devices ``explain`` chose the paths."""

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        whys = list(dict.fromkeys(call.why for call in self.calls if call.why))
        rows = [("times", "call", "path", "sizes")]
        for call in self.calls:
            mark = f" [{whys.index(call.why) + 1}]" if call.why else ""
            name = f"{call.name}, {call.where}" if call.where else call.name
            rows.append((str(call.count), name, call.path + mark, call.sizes))
        of_calls = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "  ".join((row[0].rjust(of_calls[0]), *map(str.ljust, row[1:], of_calls[1:]))).rstrip()
            for row in rows
        ]
        reasons = [f"[{i}] because {why}" for i, why in enumerate(whys, 1)]
        if not self.calls:
            table = ["The program has no exchange and no product of jax_moe_a2a."]
        return "\n".join((*self.notes, *table, *reasons))


def explain(
    fn: Callable[..., Any], *args: object, device: str | None = None, **kwargs: object
) -> Explanation:
    """Return which path each exchange and product of a program takes, and why.

    JAX traces the program as under ``jax.jit``, but does not compile or run it. ``explain`` and the
    lowering of a program use the same functions to choose paths. Equal calls share a row.
    Calls inside ``jit``, ``shard_map``, loops, branches and derivatives are included. To include
    the backward pass, explain ``jax.grad(loss)``.

    Args:
      fn: a function, or a function under ``jax.jit``.
      *args: arguments of ``fn``: arrays, ``jax.ShapeDtypeStruct``, or pytrees of them.
      device: the devices to explain. None means the devices of the program's mesh, or of this
        process if the program has no mesh. A compute capability such as ``"9.0"`` means GPUs of one
        host that access each other's memory; ``"cpu"`` means devices other than NVIDIA GPUs. These
        devices need not exist.
      **kwargs: arguments of ``fn`` by name.

    Returns:
      An ``Explanation``, which prints as a table, and iterates over ``Call`` records. If this
      process alone cannot know a path, for example because the GPUs belong to several processes,
      the path is "unknown".
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function; got {fn!r}")
    is_capability = isinstance(device, str) and re.fullmatch(r"\d+\.\d", device)
    if device not in (None, "cpu") and not is_capability:
        expected = 'device must be None, "cpu" or a compute capability such as "9.0"'
        raise ValueError(f"{expected}; got {device!r}")
    traced: Any = fn if hasattr(fn, "trace") else jax.jit(fn)
    program = traced.trace(*args, **kwargs).jaxpr
    gpu = paths.NamedGpu(str(device)) if is_capability else None
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves((args, kwargs)))
    num_devices = max((s.num_devices for s in shardings if s is not None), default=1)
    walk = _Walk(device, num_devices)
    with paths.explaining(gpu):
        walk.visit(compat.without_dead_code(program), 1, "", None)
    calls = tuple(Call(name, num, *rest) for (name, *rest), num in walk.counts.items())
    if gpu:
        note = f"assumed: every device is {gpu}; those of a group reach each other's memory"
    elif device == "cpu":
        note = "assumed: no device is an NVIDIA GPU"
    elif jax.default_backend() == "cpu":
        note = 'devices: CPU; this process sees no GPU (name one, as in device="9.0")'
    else:
        note = f"devices: {jax.devices()[0].device_kind}"
    return Explanation(calls, (note,))


class _Walk:
    """Collects the calls of a jaxpr, in the order of its equations."""

    def __init__(self, device: str | None, num_devices: int) -> None:
        self.device, self.num_devices = device, num_devices
        self.counts: dict[tuple[str, str, str, str, str], int] = {}

    def visit(self, jaxpr: Any, times: int, where: str, mesh: Any) -> None:
        """Add the calls of a jaxpr. If a ``shard_map`` is around the jaxpr, ``mesh`` is the pair of
        its mesh and its manual axes."""
        for eqn in jaxpr.eqns:
            params, inner_where, inner_times, inner_mesh = eqn.params, where, times, mesh
            if eqn.primitive in paths.choosers or eqn.primitive in paths.compositions:
                self.add(eqn, times, where, mesh)
                continue
            if eqn.primitive.name == "scan":
                inner_times = times * params["length"]
            elif eqn.primitive.name == "while":
                inner_where = "per iteration of a while loop"
            elif eqn.primitive.name == "cond":
                inner_where = where or "in a branch of a conditional"
            elif eqn.primitive.name == "shard_map":
                outer = mesh[1] if mesh else frozenset()
                inner_mesh = params["mesh"], outer | params["newly_manual_axes"]
            for inner in compat.jaxprs_in_params(params):
                self.visit(inner, inner_times, inner_where, inner_mesh)

    def add(self, eqn: compat.Equation, times: int, where: str, mesh: Any) -> None:
        avals = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        if eqn.primitive in paths.compositions:
            path, why = "", ""
            within = lambda *xs: paths.compositions[eqn.primitive](*xs, **eqn.params)
        else:
            path, why, within = self._choose(eqn, avals, mesh)
        if path:
            key = _name(eqn.primitive), _sizes(eqn, *avals), path, why, where
            self.counts[key] = self.counts.get(key, 0) + times
        if within is not None:
            axes = mesh[0].shape if mesh else {}
            self.visit(compat.traced_in(within, avals[0], axes), times, where, mesh)

    def _choose(self, eqn: compat.Equation, avals: Any, mesh: Any) -> tuple:
        """Return ``path``, ``why`` and ``within`` of the ``Choice`` for a call."""
        devices, axes = None, SimpleNamespace(num_devices=self.num_devices)
        if mesh:
            devices = mesh[0] if isinstance(mesh[0], Mesh) else compat.mesh_in_context()
            axes = SimpleNamespace(mesh=devices or mesh[0], manual_axes=mesh[1])
        present = devices.devices.flat[0].platform if devices else jax.default_backend()
        is_gpu = present == "gpu" if self.device is None else self.device != "cpu"
        ctx = SimpleNamespace(
            primitive=eqn.primitive,
            avals_in=avals[0],
            avals_out=avals[1],
            module_context=SimpleNamespace(axis_context=axes),
        )
        try:
            if not is_gpu:
                if "group" in eqn.params:
                    check_platforms(eqn.params["group"], (self.device or present,))
                is_mark = _name(eqn.primitive) == NAMES["unfused_activation"]
                return ("" if is_mark else "portable path"), paths.NOT_FOR_GPUS, None
            choice = paths.choosers[eqn.primitive](ctx, *avals[0], **eqn.params)
        except paths.Unknown as unknown:
            return "unknown", str(unknown), None
        except ValueError as error:
            return "error", str(error), None
        return choice.path, choice.why, choice.within


def _name(primitive: compat.Primitive) -> str:
    name = primitive.name.removeprefix("moe_a2a_")
    whole = name.removesuffix("_start").removesuffix("_done")
    return NAMES[whole] + name.removeprefix(whole).replace("_", ", ")


def _sizes(eqn: compat.Equation, avals_in: Sequence[Any], avals_out: Sequence[Any]) -> str:
    name, params = eqn.primitive.name, eqn.params
    sizes: list[str] = []
    if "group" in params:
        payload, ids = avals_in, avals_in[0]
        if "plan_options" in params:
            num_tokens, top_k = ids.shape[-2:]
            options, payload = params["plan_options"], avals_in[1:]
            num_experts = options.num_local_experts * params["group"].size
            sizes += [f"{num_tokens} tokens of {top_k} choices", f"{num_experts} experts"]
            sizes += [f"{options.capacity} rows"]
        else:
            payload, routing = split_routing(avals_in)
            sizes.append(f"{routing.choice_rank.shape[-2]} tokens")
            sizes.append(f"{routing.row_slot.shape[-1]} rows")
        sizes += [f"{x.dtype} [{x.shape[-1]}]" for x in payload[: params.get("num_leaves", 0)]]
        return ", ".join([*sizes, f"{params['group'].size} ranks"])
    if name == "moe_a2a_choose":
        *lead, num_experts = avals_in[0].shape
        return f"{math.prod(lead)} tokens, {params['k']} of {num_experts} experts"
    arrays = [x for x in (*avals_in, *avals_out) if len(x.shape) > 1]
    if name == "moe_a2a_unfused_activation":
        return f"rows of {avals_in[0].shape[-1]}, {avals_in[0].dtype}"
    if not arrays or not jnp.issubdtype(arrays[0].dtype, jnp.floating):
        return ""
    rows, weights = (f(arrays, key=lambda x: len(x.shape)) for f in (min, max))
    if len(weights.shape) > len(rows.shape):
        num, k, n = weights.shape[-3:]
        return f"{rows.shape[-2]} rows, {num} experts of {k} x {n}, {rows.dtype}"
    if name == "moe_a2a_encode_squares":
        return f"{' x '.join(map(str, rows.shape))}, {rows.dtype}"
    return f"{rows.shape[-2]} rows of {rows.shape[-1]}, {rows.dtype}"
