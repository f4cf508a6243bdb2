"""Run plans: compile their programs at the same time, check what they compute, time them.

Import it after the environment is set, because it imports JAX.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src.lowering import budgets
from jax_moe_a2a._src.lowering.custom_call import DEFAULT_CUDA_GRAPHS

from . import operations, timing, wire
from . import record as records
from .methods import CALLS_OURS, METHODS
from .operations import Op
from .workload import Setting, Workload

AXIS = "ep"
TIMEOUT_SECONDS = 10.0
MAX_THREADS = 32
MOST_OF_A_TIE = (
    0.4  # share of a measured time; a tie by itself takes as long as in a program, or longer
)
TIE_SIZES = (
    1 << 14,
    1 << 16,
    1 << 18,
    1 << 20,
)  # up to the first number, only launching takes time
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Hold one workload and what to time of it."""

    workload: Workload
    methods: tuple[str, ...] = ("ours",)
    ops: tuple[Op, ...] = operations.ALL
    plain_ops: tuple[Op, ...] = operations.ALL
    """The operations of the other methods."""
    options: tuple[Mapping[str, Any], ...] = ({},)
    """Our method runs once with each of these options of a group."""
    sweep: str = ""
    """The sweep that the table belongs to; "" for the standard settings."""
    reference: str = ""
    """A method that rows are compared with, which is not timed; "" for the first that is."""
    tolerance: float = operations.TOLERANCE
    """Relative error of sums and gradients."""
    program_us: float = timing.PROGRAM_US
    most_reps: int = timing.MAX_REPS


@dataclasses.dataclass(frozen=True)
class Run:
    """Hold what all plans of a run share, and their results."""

    mesh: Mesh
    record: dict[str, Any]
    """From ``cli.describe_run``, with ``rows`` and ``failures``."""
    path: pathlib.Path | None
    """Where the record goes."""
    samples: int
    sample_seconds: float
    deadline: float
    """``time.perf_counter()`` after which nothing more is timed."""
    say: Callable[[str], None]
    tie_us: dict[TieKey, float | None] = dataclasses.field(default_factory=dict)
    """Microseconds of a tie, by the arrays that it ties."""

    @property
    def on_gpu(self) -> bool:
        """Return True if the figures are meaningful."""
        return self.mesh.devices.flat[0].platform == "gpu"

    def add(self, row: Row) -> None:
        """Add a row and write the record, so that a run cut short leaves what it has."""
        self.record["rows"].append(row)
        if self.path is not None:
            records.write(self.record, self.path)

    def fail(self, what: str, error: Exception) -> None:
        """Note a failure in the record and go on, because the other figures stand."""
        text = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
        self.say(f"FAILED {text}")
        self.record["failures"].append(text)

    def check_time(self) -> None:
        """Raise TimeoutError if the time budget is spent."""
        if time.perf_counter() > self.deadline:
            raise TimeoutError("not run: the time budget is spent")


class TieKey(NamedTuple):
    """Name ties that take about the same time."""

    num_tied: int
    num_elements: int
    """Number of elements of the largest array that is tied."""
    num_results: int


class Program(NamedTuple):
    """Hold an operation and its future program."""

    operation: operations.Operation
    reps: int
    compiling: concurrent.futures.Future
    tie_key: TieKey
    compile_once: Callable[[], Any]
    """Compiles it with one repetition, which XLA cannot merge with another."""


class Variant(NamedTuple):
    """Hold a method with options, and its programs."""

    method: str
    group: ma.Group
    run_once: concurrent.futures.Future
    programs: list[Program]
    is_timed: bool

    @property
    def path(self) -> str:
        """Return the path of our calls, or ``"plain"`` for a method without them."""
        return self.group.path if self.method in CALLS_OURS else "plain"

    def sms(self, op: str, setting: Setting) -> int | None:
        """Return the SMs that our kernels may use, or None if they do not run."""
        if self.path != "cuda":
            return None
        return sms_of(self.group, op, setting)

    @property
    def cuda_graphs(self) -> bool | None:
        """Return True if XLA may capture our calls, or None if they do not run."""
        if self.path != "cuda":
            return None
        graphs = self.group.cuda_graphs
        return DEFAULT_CUDA_GRAPHS if graphs is None else graphs


class Compiled(NamedTuple):
    """Hold a plan and its future programs."""

    plan: Plan
    make_x: concurrent.futures.Future
    variants: list[Variant]


def why_portable(mesh: Mesh) -> str:
    """Return why our kernels do not run on the mesh, and which package says so; '' if they run."""
    why = ma.Group(mesh, AXIS).why_portable
    return why and f"{why} ({ma.__file__})"


def default_num_sms() -> dict[str, int]:
    """Return the package's default SM budgets."""
    return dict(
        many_tokens=budgets.DEFAULT_NUM_SMS,
        few_tokens=budgets.FEW_TOKENS_NUM_SMS,
        weighted_dispatch=budgets.WEIGHTED_NUM_SMS,
    )


def sms_of(group: ma.Group, op: str, setting: Setting) -> int:
    """Return the SMs that an operation may use: the most of any of its exchanges."""
    default = budgets.default_num_sms(setting.tokens)
    if op == "backward":
        default = max(default, budgets.WEIGHTED_NUM_SMS)
    if setting.formatted:
        default = budgets.FORMAT_NUM_SMS
    if setting.mode == "replicated":
        default = budgets.ALONE_NUM_SMS
    return max(group.sms_of(part) or default for part in operations.parts(op) or (op,))


def run_plans(run: Run, plans: Sequence[Plan]) -> None:
    """Compile all plans, then time them; add the rows to the run.

    Raises: TimeoutError: if the time budget is spent.
    """
    run.check_time()
    with concurrent.futures.ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        compiled = [start_compiling(run, pool, plan) for plan in plans]
        if len(plans) > 1:
            run.say(f"{len(plans)} workloads traced; compiling")
            # Timed only when the compiler is done: it would take the launching threads' cores.
            futures = [program.compiling for c in compiled for v in c.variants for program in v[3]]
            concurrent.futures.wait(futures + [v.run_once for c in compiled for v in c.variants])
    if run.on_gpu:
        measure_ties(run, compiled)
    for one in compiled:
        run_compiled(run, one)


def start_compiling(run: Run, pool: concurrent.futures.Executor, plan: Plan) -> Compiled:
    """Trace a plan's programs and hand them to the compiler's threads."""
    workload = plan.workload
    run.say(f"{workload.setting}: tracing (capacity {workload.capacity})")
    inputs = input_shapes(run.mesh, workload)
    x = inputs[0]
    drawing = jax.jit(lambda: draw_x(workload, x), out_shardings=x.sharding).lower()
    make_x = pool.submit(drawing.compile)
    variants: list[Variant] = []
    reference = [plan.reference] if plan.reference else []
    for method in reference + [m for m in METHODS if m in plan.methods]:
        is_timed = method != plan.reference
        for options in plan.options if method == "ours" else ({},):
            try:
                ops: tuple[Op, ...] = ()
                if is_timed:
                    ops = plan.ops if method == "ours" else plan.plain_ops
                variants.append(
                    compile_variant(run, pool, plan, method, options, ops, is_timed, inputs)
                )
            except Exception as error:  # of one method, must not end the run
                run.fail(f"{workload.setting}: {method}", error)
    return Compiled(plan, make_x, variants)


def input_shapes(mesh: Mesh, workload: Workload) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the shapes of x, ids and weights of all ranks."""
    setting = workload.setting
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for shape, dtype in (
            ((workload.ranks, setting.tokens, setting.hidden), jnp.dtype(setting.dtype)),
            (workload.ids.shape, workload.ids.dtype),
            (workload.weights.shape, workload.weights.dtype),
        )
    )


def draw_x(workload: Workload, x: jax.ShapeDtypeStruct) -> jax.Array:
    """Draw normal numbers, or bits if x has integers. Replicated tokens are those of rank 0."""
    key = jax.random.key(0)
    if workload.setting.mode == "replicated":
        return jnp.broadcast_to(jax.random.normal(key, x.shape[1:], x.dtype), x.shape)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jax.random.normal(key, x.shape, x.dtype)
    return jax.random.bits(key, x.shape, x.dtype)


def make_inputs(mesh: Mesh, workload: Workload) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw x, ids and weights of all ranks, each on its device."""
    x = input_shapes(mesh, workload)[0]
    drawn = jax.jit(lambda: draw_x(workload, x), out_shardings=x.sharding)()
    return drawn, *jax.device_put((workload.ids, workload.weights), x.sharding)


def compile_variant(
    run: Run,
    pool: concurrent.futures.Executor,
    plan: Plan,
    method: str,
    options: Mapping[str, Any],
    ops: tuple[Op, ...],
    is_timed: bool,
    inputs: tuple[Any, ...],
) -> Variant:
    """Trace a method's programs and hand them to the compiler's threads."""
    group = ma.Group(run.mesh, AXIS, **{"timeout": TIMEOUT_SECONDS, **options})
    run_once, todo = operations.prepare(METHODS[method](plan.workload, group), ops)
    lowered = timing.per_rank(run_once, run.mesh).lower(*inputs)
    prepared = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), lowered.out_info
    )
    compiling = pool.submit(lowered.compile)

    def lower_chain(operation: operations.Operation, reps: int) -> Any:
        repeated = timing.chain(operation.step, reps, operation.tied_axes)
        return timing.per_rank(repeated, run.mesh).lower(operation.state(prepared))

    def compile_once(operation: operations.Operation) -> Any:
        return lower_chain(operation, 1).compile()

    programs = []
    for operation in todo:
        # XLA drops optimization barriers early on CPU, and would merge what is repeated.
        reps = repetitions(method, operation, plan) if run.on_gpu else 1
        lowered = lower_chain(operation, reps)
        programs.append(
            Program(
                operation,
                reps,
                pool.submit(lowered.compile),
                tie_key(operation, operation.state(prepared), lowered.out_info),
                functools.partial(compile_once, operation),
            )
        )
    return Variant(method, group, compiling, programs, is_timed)


def tie_key(operation: operations.Operation, state: Any, results: Any) -> TieKey:
    """Return the key of a tie's time; sizes are rounded up, so that there are few keys."""
    leaves = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(state)]
    tied = [leaves[i] for i in timing.pick_tied(leaves, operation.tied_axes)]
    most = max(leaf.size for leaf in tied)
    num_elements = next(n for n in TIE_SIZES if n >= most or n == TIE_SIZES[-1])
    num_results = len(jax.tree.leaves(results))
    return TieKey(len(tied), num_elements, 1 << (num_results - 1).bit_length())


def repetitions(method: str, operation: operations.Operation, plan: Plan) -> int:
    """Return how often to repeat an operation in its program, from about how long it takes.

    Our repetitions are a few instructions of XLA's; those of plain JAX take it long to compile.
    """
    fixed_us, times_wire, most = {
        "all_gather": (100.0, 3.0, 8),
        "dense": (100.0, 5.0, 8),
        "ragged": (700.0, 90.0, 2),
        "local": (100.0, 0.0, 8),
    }.get(method, (10.0, 1.2, plan.most_reps))
    wire_us = operations.crossings(operation.op) * plan.workload.busiest_bytes / 340e3
    return timing.repetitions(fixed_us + times_wire * wire_us, most, plan.program_us)


def measure_ties(run: Run, compiled: Sequence[Compiled]) -> None:
    """Add to ``run.tie_us`` the time of a tie of each program; None if it is not known."""
    programs = [p for c in compiled for v in c.variants for p in v.programs]
    keys = [key for key in dict.fromkeys(p.tie_key for p in programs) if key not in run.tie_us]
    sharding = NamedSharding(run.mesh, PartitionSpec(run.mesh.axis_names))
    started = []
    with concurrent.futures.ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        for key in keys:
            run.tie_us[key] = None
            tied = jnp.ones((run.mesh.size, key.num_elements), jnp.int32)
            result = jnp.ones((run.mesh.size, 1), jnp.bfloat16)
            state = jax.device_put(([tied] * key.num_tied, [result] * key.num_results), sharding)
            ties = timing.per_rank(timing.chain_of_ties(timing.TIE_REPS), run.mesh)
            started.append((key, state, pool.submit(ties.lower(state).compile)))
    for key, state, compiling in started:
        try:
            program = compiling.result()
            if timing.count_fusions(program) < timing.TIE_REPS:
                raise RuntimeError("XLA merged the ties, so that what one takes is not known")
            timed = timing.measure(program, (state,), timing.TIE_REPS, 3, run.sample_seconds)
            run.tie_us[key] = timed.median_us
        except Exception as error:
            run.fail(f"tie of {key}", error)
    known = [us for us in run.tie_us.values() if us is not None]
    if known:
        run.say(f"a tie takes {min(known):.2f} to {max(known):.2f} us")


def run_compiled(run: Run, compiled: Compiled) -> None:
    """Time the variants of a plan, ours first, because the others are checked against it."""
    plan = compiled.plan
    run.say(str(plan.workload.setting))
    try:
        x = compiled.make_x.result()()
        ids_and_weights = jax.device_put((plan.workload.ids, plan.workload.weights), x.sharding)
    except Exception as error:
        run.fail(f"{plan.workload.setting}: inputs", error)
        return
    reference = None
    for variant in compiled.variants:
        rows = check_and_time(run, plan, variant, (x, *ids_and_weights), reference)
        is_reference = plan.reference == variant.method or (
            not plan.reference and variant.method == "ours"
        )
        if reference is None and is_reference:
            reference = rows


def check_and_time(
    run: Run,
    plan: Plan,
    variant: Variant,
    inputs: tuple[jax.Array, ...],
    reference: dict[str, jax.Array] | None,
) -> dict[str, jax.Array] | None:
    """Time the programs of a variant if its results are right; return its rows if so."""
    what = f"{plan.workload.setting}: {variant.method}"
    if variant.method == "ours":
        what += f", num_sms={variant.group.num_sms}" if variant.group.num_sms else ""
    try:
        run.check_time()
        prepared = variant.run_once.result()(*inputs)
        if variant.is_timed:
            operations.check(prepared, reference, plan.tolerance)
        variant.group.check()
    except Exception as error:
        run.fail(what, error)
        close(variant.group)
        return None
    for program in variant.programs:
        try:
            run.check_time()
            program, compiled = unmerged(run, plan, what, program)
            args = (program.operation.state(prepared),)
            result = timing.measure(compiled, args, program.reps, run.samples, run.sample_seconds)
            variant.group.check()
        except Exception as error:
            run.fail(f"{what} {program.operation.op}", error)
            close(variant.group)
            continue
        row = make_row(run, plan, variant, program, result)
        if (row["tie_us"] or 0.0) > MOST_OF_A_TIE * row["measured_us"]:
            op = program.operation.op
            run.say(f"{variant.method} {op}: left out, because most of its time may be the tie")
            continue
        run.add(row)
        run.say(in_words(row))
    return {name: prepared[name] for name in ("rows", "group_sizes")}


def unmerged(run: Run, plan: Plan, what: str, program: Program) -> tuple[Program, Any]:
    """Return the program compiled, with one repetition if XLA has merged some of several."""
    compiled = program.compiling.result()
    exchanges = max(1, operations.crossings(program.operation.op))
    if plan.workload.setting.mode == "replicated":
        exchanges = 0
    try:
        timing.check_unmerged(compiled, program.reps, exchanges)
    except RuntimeError as error:
        if program.reps == 1:
            raise
        run.say(f"{what} {program.operation.op}: {error}; one repetition instead")
        program = program._replace(reps=1)
        compiled = program.compile_once()
        timing.check_unmerged(compiled, 1, exchanges)
    return program, compiled


def close(group: ma.Group) -> None:
    """Close a group that may have failed; its failure is known already."""
    try:
        group.close()
    except Exception:  # the failure that led here is in the record
        pass


def make_row(
    run: Run, plan: Plan, variant: Variant, program: Program, result: timing.Timing
) -> Row:
    """Return a row of the record. ``us``, ``min_us`` and ``max_us`` are without the tie."""
    op, workload = program.operation.op, plan.workload
    tie_us = run.tie_us.get(program.tie_key)
    if tie_us is not None:
        tie_us *= (program.reps - 1) / program.reps  # there is none after the last
    us, low, high = (max(t - (tie_us or 0.0), 0.0) for t in tuple(result))
    row: Row = dict(
        op=op,
        method=variant.method,
        sweep=plan.sweep,
        **describe(workload),
        includes_route=program.operation.includes_route,
        path=variant.path,
        num_sms=variant.sms(op, workload.setting),
        cuda_graphs=variant.cuda_graphs,
        **timing.Timing(us, low, high).row(),
        measured_us=round(result.median_us, 3),
        tie_us=None if tie_us is None else round(tie_us, 3),
        reps=program.reps,
        samples=run.samples,
    )
    num_bytes = operations.wire_bytes(op, workload)
    row.update(wire_bytes=num_bytes, gb_per_s=round(num_bytes / us / 1e3, 2) if us else None)
    row.update(bounds(run, op, workload))
    row["ratio"] = round(us / row["wire_us"], 4) if row["wire_us"] else None
    return row


def bounds(run: Run, op: str, workload: Workload) -> dict[str, float | None]:
    """Return the least time of the busiest link and memory, and the greater of the two.

    For ``round_trip`` and ``backward`` it is that of a dispatch and a combine, one after the other.
    """
    parts = operations.parts(op)
    one_way_us = wire.microseconds(run.record["wire"], workload.busiest_bytes)
    local = wire.local_gb_per_s(run.record["wire"])
    found: dict[str, float | None] = dict(wire_us=None, memory_us=None, bound_us=None)
    if parts and one_way_us is not None:
        found["wire_us"] = round(operations.crossings(op) * one_way_us, 3)
        if local is not None:
            memory_us = [workload.memory_bytes[part] / local / 1e3 for part in parts]
            found["memory_us"] = round(sum(memory_us), 3)
            found["bound_us"] = round(sum(max(us, one_way_us) for us in memory_us), 3)
    return found


def wire_row(workload: Workload, measured: dict[str, Any]) -> Row:
    """Return the row of plain peer stores of a workload's bytes, one way."""
    return dict(
        op="dispatch",
        method="wire",
        sweep="",
        **describe(workload),
        includes_route=False,
        path="wire",
        num_sms=measured["blocks"],
        cuda_graphs=None,
        us=measured["median_us"],
        **{key: measured[key] for key in ("min_us", "max_us", "gb_per_s")},
        measured_us=measured["median_us"],
        tie_us=0.0,
        wire_bytes=workload.busiest_bytes,
        wire_us=measured["median_us"],
        ratio=1.0,
    )


def describe(workload: Workload) -> Row:
    """Return the entries of a row that say what was exchanged."""
    setting = workload.setting
    return dict(
        dataclasses.asdict(setting),
        routing=setting.routing,
        capacity_kind=setting.capacity,
        capacity=workload.capacity,
        busiest_bytes=workload.busiest_bytes,
    )


def in_words(row: Row) -> str:
    """Return a line of progress."""
    name = row["op"]
    if name in ("dispatch", "round_trip") and row["method"] == "ours" and not row["includes_route"]:
        name += " without route"
    text = f"{row['method']:10} {name:24} {row['us']:10.1f} us"
    text += f"  ({row['min_us']:.1f} to {row['max_us']:.1f})"
    if row.get("ratio") is not None:
        text += f"  {row['ratio']:.2f} x wire, {row['gb_per_s']:.0f} GB/s"
    if row["num_sms"] is not None:
        text += f"  {row['num_sms']} SMs"
    return text
