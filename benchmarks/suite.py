from __future__ import annotations

import concurrent.futures
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_moe_a2a as ma
from jax_moe_a2a._src.exchange import lowering
from jax_moe_a2a._src.group import native

from . import operations, timing, wire
from .methods import METHODS
from .operations import Op
from .run import Case, Job, Program, Row, Run, say
from .workload import DTYPE, Setting, Workload

# Rows are left out if the tie has a larger share, because it may take less time than was measured.
MOST_OF_A_TIE = 0.4
TIE_SAMPLES = 3
# Elements of the largest tied array. Smaller ties take as long as the first size.
TIE_SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 20)
# (`a`, `b`, `most`): a repetition takes `a` µs plus `b` times the link limit. More repetitions than
# `most` compile too slowly.
PLAIN_COSTS = dict(
    all_gather=(100.0, 3.0, 8),
    dense=(100.0, 5.0, 8),
    ragged=(700.0, 90.0, 2),
    ragged32=(700.0, 8.0, 8),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    workload: Workload
    methods: tuple[str, ...] = ("ours",)
    ops: tuple[Op, ...] = operations.STANDARD
    plain_ops: tuple[Op, ...] = operations.STANDARD
    options: tuple[Mapping[str, Any], ...] = ({},)
    """``ours`` is timed with each set of options of ``ma.Group``."""
    sweep: str = ""
    """"": the standard settings."""
    tolerance: float = operations.TOLERANCE
    """The largest relative error of sums and gradients."""
    program_us: float = timing.PROGRAM_US
    most_reps: int = timing.MAX_REPS


class TieKey(NamedTuple):
    """The sizes of a tie. Ties of equal sizes take about equally long."""

    num_tied: int
    num_elements: int
    """The number of elements of the largest array."""
    num_results: int


class Timed(NamedTuple):
    operation: operations.Operation
    program: Program
    tie_key: TieKey


class Variant(NamedTuple):
    plan: Plan
    method: str
    group: ma.Group
    run_once: concurrent.futures.Future
    programs: list[Timed]
    text: str
    """The program's text before compilation."""

    def __str__(self) -> str:
        sms = f", num_sms={self.group.num_sms}" if self.group.num_sms else ""
        return f"{self.plan.workload.setting}: {self.method}{sms}"


def run_plans(run: Run, plans: Sequence[Plan]) -> None:
    run.check_time()
    compiled = [start_compiling(run, plan) for plan in plans]
    say(f"{len(plans)} workloads traced; compiling")
    run.wait()
    if run.on_gpu:
        measure_ties(run, [t.tie_key for of_plan in compiled for v in of_plan for t in v.programs])
    for plan, variants in zip(plans, compiled, strict=True):
        say(str(plan.workload.setting))
        with run.attempt(f"{plan.workload.setting}: inputs"):
            inputs = make_inputs(run.mesh, plan.workload)
            reference: Row = {}
            run.measure([case_of(run, variant, inputs, reference) for variant in variants])
            del inputs


def start_compiling(run: Run, plan: Plan) -> list[Variant]:
    workload = plan.workload
    say(f"{workload.setting}: tracing (capacity {workload.capacity})")
    variants: list[Variant] = []
    for method in (method for method in METHODS if method in plan.methods):
        ops = plan.ops if method == "ours" else plan.plain_ops
        for options in plan.options if method == "ours" else ({},):
            with run.attempt(f"{workload.setting}: {method}"):
                variants.append(compile_variant(run, plan, method, options, ops))
    return variants


def compile_variant(
    run: Run, plan: Plan, method: str, options: Mapping[str, Any], ops: tuple[Op, ...]
) -> Variant:
    group = run.group(**options)
    run_once, todo = operations.prepare(METHODS[method](plan.workload, group), ops)
    lowered = run.per_rank(run_once).lower(*input_shapes(run.mesh, plan.workload))
    prepared = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), lowered.out_info
    )
    compiling = run.compile(lowered)
    programs = []
    for operation in todo:
        exchanges = max(1, len(operations.parts(operation.op)))
        state = operation.state(prepared)
        program = run.start(
            operation.step,
            state,
            reps=repetitions(method, operation, plan),
            exchanges=exchanges,
            tied_axes=operation.tied_axes,
        )
        programs.append(Timed(operation, program, tie_key(operation, state, program.num_results)))
    return Variant(plan, method, group, compiling, programs, lowered.as_text())


def repetitions(method: str, operation: operations.Operation, plan: Plan) -> int:
    """Return how many repetitions take ``plan.program_us``."""
    fixed_us, times_wire, most = PLAIN_COSTS.get(method, (10.0, 1.2, plan.most_reps))
    wire_us = len(operations.parts(operation.op)) * plan.workload.busiest_bytes / 340e3
    expected_us = fixed_us + times_wire * wire_us
    return max(1, min(round(plan.program_us / expected_us), most))


def sharding_of(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def input_shapes(mesh: Mesh, workload: Workload) -> tuple[jax.ShapeDtypeStruct, ...]:
    setting = workload.setting
    x = (workload.ranks, setting.tokens, setting.hidden), jnp.dtype(DTYPE)
    given = ((array.shape, array.dtype) for array in (workload.ids, workload.weights))
    sharding = sharding_of(mesh)
    return tuple(jax.ShapeDtypeStruct(*info, sharding=sharding) for info in (x, *given))


def make_inputs(mesh: Mesh, workload: Workload) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, *_ = input_shapes(mesh, workload)
    draw = lambda: jax.random.normal(jax.random.key(0), x.shape, x.dtype)
    put = jax.device_put((workload.ids, workload.weights), x.sharding)
    return jax.jit(draw, out_shardings=x.sharding)(), *put


def tie_key(operation: operations.Operation, state: Any, num_results: int) -> TieKey:
    """Return the sizes of a tie, rounded up so that fewer ties are measured."""
    leaves = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(state)]
    tied = [leaves[i] for i in timing.pick_tied(leaves, operation.tied_axes)]
    most = max(leaf.size for leaf in tied)
    num_elements = next(n for n in TIE_SIZES if n >= most or n == TIE_SIZES[-1])
    return TieKey(len(tied), num_elements, 1 << (num_results - 1).bit_length())


def measure_ties(run: Run, keys: Sequence[TieKey]) -> None:
    """Set ``run.tie_us[key]``, with None after a failure."""
    started = []
    for key in dict.fromkeys(keys):
        if key in run.tie_us:
            continue
        run.tie_us[key] = None
        shapes = (key.num_elements, jnp.int32), (1, jnp.bfloat16)

        def ones(shapes: Any = shapes, key: TieKey = key) -> Any:
            tied, result = (jnp.ones((run.mesh.size, n), dtype) for n, dtype in shapes)
            return [tied] * key.num_tied, [result] * key.num_results

        state = jax.jit(ones, out_shardings=sharding_of(run.mesh))()
        ties = run.per_rank(timing.chain_of_ties(timing.TIE_REPS))
        started.append((key, state, run.compile(ties.lower(state))))
    for key, state, compiling in started:
        with run.attempt(f"tie of {key}"):
            program = compiling.result()
            if timing.count_fusions(program) < timing.TIE_REPS:
                raise RuntimeError("XLA merged the ties, so the time of a tie is not known")
            args = (state,), timing.TIE_REPS, run.sample_seconds
            sample_us = timing.sampler(program, *args)
            run.tie_us[key] = statistics.median(sample_us() for _ in range(TIE_SAMPLES))
    known = [us for us in run.tie_us.values() if us is not None]
    if known:
        say(f"a tie takes {min(known):.2f} to {max(known):.2f} us")


def case_of(
    run: Run, variant: Variant, inputs: tuple[jax.Array, ...], reference: dict[str, jax.Array]
) -> Case:
    """Return a case. The first variant of ``ours`` stores its rows in ``reference``. The rows of
    later variants must equal these rows."""

    def check() -> dict[str, Any]:
        prepared = variant.run_once.result()(*inputs)
        operations.check(prepared, reference or None, variant.plan.tolerance)
        variant.group.check()
        if variant.method == "ours" and not reference:
            reference.update({name: prepared[name] for name in ("rows", "group_sizes")})
        return prepared

    def job_of(timed: Timed) -> Job:
        def row(result: timing.Timing) -> Row | None:
            made = make_row(run, variant, timed, result)
            if (made["tie_us"] or 0.0) <= MOST_OF_A_TIE * made["measured_us"]:
                return made
            say(f"{timed.operation.op}: left out, because most of its time may be the tie")
            return None

        args = lambda prepared: (timed.operation.state(prepared),)
        return Job(timed.operation.op, timed.program, args, row)

    return Case(str(variant), check, list(map(job_of, variant.programs)), variant.group)


def make_row(run: Run, variant: Variant, timed: Timed, result: timing.Timing) -> Row:
    """Return a row, in which only ``measured_us`` includes the tie."""
    operation, workload, reps = timed.operation, variant.plan.workload, timed.program.reps
    op, group = operation.op, variant.group
    tie_us = run.tie_us.get(timed.tie_key)
    if tie_us is not None:
        tie_us *= (reps - 1) / reps  # XLA drops the last tie
    us, low, high = (max(t - (tie_us or 0.0), 0.0) for t in tuple(result))
    path = group.path if variant.method == "ours" else "plain"
    graphs = lowering.DEFAULT_CUDA_GRAPHS if group.cuda_graphs is None else group.cuda_graphs
    row: Row = dict(
        op=op,
        method=variant.method,
        sweep=variant.plan.sweep,
        **describe(workload),
        includes_route=operation.includes_route,
        path=path,
        num_sms=sms_of(group, op, workload.setting) if path == "cuda" else None,
        cuda_graphs=graphs if path == "cuda" else None,
        **timing.Timing(us, low, high).row(),
        measured_us=round(result.median_us, 3),
        tie_us=None if tie_us is None else round(tie_us, 3),
        reps=reps,
        samples=run.samples,
    )
    num_bytes = operations.wire_bytes(op, workload)
    row.update(wire_bytes=num_bytes, gb_per_s=round(num_bytes / us / 1e3, 2) if us else None)
    one_way_us = wire.microseconds(run.record["wire"], workload.busiest_bytes)
    ways = len(operations.parts(op))
    wire_us = None if one_way_us is None or not ways else round(ways * one_way_us, 3)
    row.update(wire_us=wire_us, ratio=round(us / wire_us, 4) if wire_us else None)
    return row


def describe(workload: Workload) -> Row:
    setting = workload.setting
    return dict(
        dataclasses.asdict(setting),
        dtype=DTYPE,
        routing=setting.routing,
        capacity_kind=setting.capacity,
        capacity=workload.capacity,
        busiest_bytes=workload.busiest_bytes,
        fan_out=round(workload.fan_out, 3),
        load=round(workload.load, 3),
    )


def sms_of(group: ma.Group, op: str, setting: Setting) -> int:
    """Return the largest number of SMs of any exchange in an operation."""
    sizes = dict(num_tokens=setting.tokens, hidden=setting.hidden, top_k=setting.top_k)
    memory = ma.memory_estimate(**sizes, num_experts=setting.experts, group_size=group.size)
    default = lowering.default_num_sms(setting.tokens, memory.half_bytes)
    if op == "backward":
        default = max(default, native.tuning("WEIGHTED_NUM_SMS"))
    if setting.formatted:
        default = native.tuning("FORMAT_NUM_SMS")
    return max(group.sms_of(part) or default for part in operations.parts(op) or (op,))
