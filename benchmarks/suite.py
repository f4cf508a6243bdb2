"""Runs a workload by every method: compiles its programs side by side, checks them, times them.

Imported once the environment is set, for it imports JAX.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a import lowering

from . import operations, timing
from .methods import METHODS
from .workload import DTYPE, Setting, Workload

AXIS = "ep"
TIMEOUT_SECONDS = 10.0
Row = dict[str, Any]


class Run(NamedTuple):
    """What all workloads of a run share."""

    mesh: Mesh
    wire_us: dict[int, float]
    """Measured microseconds for these many bytes out of every GPU."""
    choose_methods: Callable[[Setting], list[str]]
    num_sms: list[int | None]
    cuda_graphs: bool | None
    samples: int
    say: Callable[[str], None]
    rows: list[Row]
    failures: list[str]

    @property
    def on_gpu(self) -> bool:
        """Whether the figures mean anything."""
        return self.mesh.devices.flat[0].platform == "gpu"


class Program(NamedTuple):
    """An operation, on its way through the compiler."""

    operation: operations.Operation
    reps: int
    compiling: concurrent.futures.Future


class Variant(NamedTuple):
    """A method, and ours once per SM budget."""

    method: str
    group: ma.Group
    run_once: concurrent.futures.Future
    programs: list[Program]

    @property
    def sms(self) -> int | None:
        """SMs that our kernels may use; None where they do not run."""
        if self.method != "ours" or self.group.path != "cuda":
            return None
        return self.group.num_sms or lowering.DEFAULT_NUM_SMS


def why_portable(mesh: Mesh) -> str:
    """Why our kernels do not run on the mesh, and which package says so; '' where they do."""
    why = ma.Group(mesh, AXIS).why_portable
    return why and f"{why} ({ma.__file__})"


def run_workload(run: Run, workload: Workload) -> None:
    """Appends to ``run.rows`` what every method takes for this workload, ours first."""
    run.say(f"{workload.setting}: compiling (capacity {workload.capacity})")
    inputs = make_inputs(run.mesh, workload)
    variants = []
    with concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for method in run.choose_methods(workload.setting):
            for num_sms in run.num_sms if method == "ours" else [None]:
                try:
                    variants.append(start_compiling(run, pool, method, num_sms, workload, inputs))
                except Exception as error:  # of one method, must not end the run
                    note_failure(run, f"{workload.setting}: {method}", error)
    reference = None
    for variant in variants:
        rows = check_and_time(run, variant, workload, inputs, reference)
        if reference is None and variant.method == "ours":
            reference = rows


def make_inputs(mesh: Mesh, workload: Workload) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x (random normal), ids and weights of all ranks, each on its device."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (*workload.ids.shape[:2], workload.setting.hidden)
    draw = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), shape, jnp.dtype(DTYPE)),
        out_shardings=sharding,
    )
    return draw(), *jax.device_put((workload.ids, workload.weights), sharding)


def start_compiling(
    run: Run,
    pool: concurrent.futures.Executor,
    method: str,
    num_sms: int | None,
    workload: Workload,
    inputs: tuple[jax.Array, ...],
) -> Variant:
    """Traces a method's programs and hands them to the compiler's threads."""
    group = ma.Group(
        run.mesh, AXIS, num_sms=num_sms, timeout=TIMEOUT_SECONDS, cuda_graphs=run.cuda_graphs
    )
    run_once, todo = operations.prepare(METHODS[method](workload, group))
    lowered = timing.per_rank(run_once, run.mesh).lower(*inputs)
    prepared = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), lowered.out_info
    )
    compiling = pool.submit(lowered.compile)
    programs = []
    for operation in todo:
        # XLA drops optimization barriers early on CPU, and would merge what is repeated.
        reps = repetitions(method, operation, workload) if run.on_gpu else 1
        repeated = timing.per_rank(timing.chain(operation.step, reps), run.mesh)
        lowered = repeated.lower(operation.state(prepared))
        programs.append(Program(operation, reps, pool.submit(lowered.compile)))
    return Variant(method, group, compiling, programs)


def repetitions(method: str, operation: operations.Operation, workload: Workload) -> int:
    """How often an operation is repeated in its program, by about how long it takes.

    Our repetitions are a few instructions of XLA's; those of plain JAX take it long to compile.
    """
    fixed_us, times_wire, most = {
        "ours": (10.0, 1.2, 64),
        "all_gather": (100.0, 3.0, 8),
        "dense": (100.0, 5.0, 8),
        "ragged": (700.0, 90.0, 2),
    }[method]
    wire_us = operations.crossings(operation.op) * workload.busiest_bytes / 340e3
    return timing.repetitions(fixed_us + times_wire * wire_us, most)


def check_and_time(
    run: Run,
    variant: Variant,
    workload: Workload,
    inputs: tuple[jax.Array, ...],
    reference: dict[str, jax.Array] | None,
) -> dict[str, jax.Array] | None:
    """Times the programs of a variant that computes what it should; returns its rows if so."""
    what = f"{workload.setting}: {variant.method}"
    if variant.sms is not None:
        what += f" on {variant.sms} SMs"
    try:
        prepared = variant.run_once.result()(*inputs)
        operations.check(prepared, reference)
        variant.group.check()
    except Exception as error:
        note_failure(run, what, error)
        variant.group.close()
        return None
    for program in variant.programs:
        try:
            compiled = program.compiling.result()
            timing.check_unmerged(compiled, program.reps)
            state = program.operation.state(prepared)
            result = timing.measure(compiled, (state,), program.reps, run.samples)
            variant.group.check()
        except Exception as error:
            note_failure(run, f"{what} {program.operation.op}", error)
            variant.group.close()
            continue
        row = make_row(run, variant, workload, program, result)
        run.rows.append(row)
        run.say(in_words(row))
    return {name: prepared[name] for name in ("rows", "group_sizes")}


def note_failure(run: Run, what: str, error: Exception) -> None:
    """Notes it in the record and goes on: the other figures stand."""
    text = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    run.say(f"FAILED {text}")
    run.failures.append(text)


def make_row(
    run: Run, variant: Variant, workload: Workload, program: Program, result: timing.Timing
) -> Row:
    """A row of the record."""
    op = program.operation.op
    num_bytes = operations.wire_bytes(op, workload)
    one_way_us = run.wire_us.get(workload.busiest_bytes)
    wire_us = None
    if one_way_us is not None and operations.crossings(op):
        wire_us = operations.crossings(op) * one_way_us
    return dict(
        op=op,
        method=variant.method,
        **describe(workload),
        includes_route=program.operation.includes_route,
        path=variant.group.path if variant.method == "ours" else "plain",
        num_sms=variant.sms,
        median_us=round(result.median_us, 3),
        min_us=round(result.min_us, 3),
        max_us=round(result.max_us, 3),
        wire_bytes=num_bytes,
        wire_us=None if wire_us is None else round(wire_us, 3),
        ratio=None if wire_us is None else round(result.median_us / wire_us, 4),
        gb_per_s=round(num_bytes / result.median_us / 1e3, 2),
        reps=program.reps,
        samples=run.samples,
    )


def wire_row(workload: Workload, measured: dict[str, Any]) -> Row:
    """The row of what plain peer stores take for a workload's bytes, one way."""
    keys = ("median_us", "min_us", "max_us", "gb_per_s")
    return dict(
        op="dispatch",
        method="wire",
        **describe(workload),
        includes_route=False,
        path="wire",
        num_sms=measured["blocks"],
        **{key: measured[key] for key in keys},
        wire_bytes=workload.busiest_bytes,
        wire_us=measured["median_us"],
        ratio=1.0,
    )


def describe(workload: Workload) -> Row:
    """The part of a row that says what was exchanged."""
    setting = workload.setting
    return dict(
        tokens=setting.tokens,
        hidden=setting.hidden,
        top_k=setting.top_k,
        experts=setting.experts,
        dtype=DTYPE,
        routing=setting.routing,
        capacity=workload.capacity,
        busiest_bytes=workload.busiest_bytes,
    )


def in_words(row: Row) -> str:
    """A line of progress."""
    name = row["op"]
    if name in ("dispatch", "round_trip") and row["method"] == "ours" and not row["includes_route"]:
        name += " without route"
    text = f"{row['method']:10} {name:24} {row['median_us']:10.1f} us"
    text += f"  ({row['min_us']:.1f} to {row['max_us']:.1f})"
    if row["ratio"] is not None:
        text += f"  {row['ratio']:.2f} x wire, {row['gb_per_s']:.0f} GB/s"
    if row["num_sms"] is not None:
        text += f"  {row['num_sms']} SMs"
    return text


def table(rows: list[Row]) -> str:
    """Medians in microseconds, and how many times the wire's limit they are."""
    columns = {
        "route": ("route", True),
        "dispatch": ("dispatch", True),
        "exchange alone": ("dispatch", False),
        "combine": ("combine", False),
        "round trip": ("round_trip", True),
        "backward": ("backward", False),
    }
    lines: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda r: (r["routing"] != "uniform", -r["hidden"], r["tokens"])):
        size = f"{row['tokens']} x {row['hidden']}"
        size += "" if row["routing"] == "uniform" else f" {row['routing']}"
        method = row["method"]
        if method == "ours" and row["num_sms"] is not None:
            method += f", {row['num_sms']} SMs"
        cell = f"{row['median_us']:.1f}"
        if row["ratio"] is not None:
            cell += f" ({row['ratio']:.2f})"
        lines.setdefault((size, method), {})[row["op"], row["includes_route"]] = cell
    text = ["us on the device, median (times the wire's limit)"]
    text.append(f"{'tokens x hidden':20}{'':14}" + "".join(f"{name:>19}" for name in columns))
    for (size, method), cells in lines.items():
        line = "".join(f"{cells.get(column, ''):>19}" for column in columns.values())
        text.append(f"{size:20}{method:14}{line}")
    return "\n".join(text)
