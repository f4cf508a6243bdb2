"""A whole MoE layer: exchange, experts and weighted combine, by ours and by plain JAX.

    python -m benchmarks.layer                     training and decode, on this machine's GPUs
    python -m benchmarks.layer --only decode       or training
    python -m benchmarks.layer --grouped "padded buckets"
    python -m benchmarks.layer --only training --grouped grouped_dot --overlap-backward

First it times what JAX users can take for the experts' products (``grouped.py``), alone on rows
that are dispatched already; then the layer by each method with the fastest of them. The router's
choices are given. Training is forward alone, and forward with the gradients of tokens, router
weights and experts; decode is a few tokens, forward. Every result is checked before it is timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from . import __main__ as command
from .workload import Setting, Workload, draw, round_up

if TYPE_CHECKING:
    from . import suite

INTERMEDIATE = 1536
LAYER: dict[str, Any] = dict(hidden=4096, top_k=8, experts=64)
TRAINING = Setting(4096, **LAYER)
DECODE = (Setting(64, **LAYER), Setting(8, **LAYER))
TINY_INTERMEDIATE = 32
TINY_LAYER: dict[str, Any] = dict(hidden=64, top_k=2, experts=16)
METHODS = ("all_gather", "ours", "dense", "ragged")  # the first is what the others are checked by
OVERLAPPED = "ours, backward overlapped"  # backward.py
OURS = ("ours", OVERLAPPED)
TOLERANCE = 2e-2  # bfloat16 has 8 bits, and sums are rounded where the methods sum
GROUPED_DOT = "grouped_dot"  # of grouped.CANDIDATES
DECODE_REPS = 16
SAMPLES = 5

say = command.say


class Shape(NamedTuple):
    """One layer to measure."""

    workload: Workload
    intermediate: int
    is_training: bool

    @property
    def sweep(self) -> str:
        """What its rows belong to."""
        return "layer" if self.is_training else "decode"

    @property
    def fullest(self) -> int:
        """Rows of the fullest expert, rounded up."""
        setting = self.workload.setting
        counts = [(self.workload.ids == e).sum() for e in range(setting.experts)]
        return round_up(int(max(counts)), 128 if self.is_training else 8)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("training", "decode"), help="default: both")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all")
    parser.add_argument("--grouped", help="this for the experts, instead of the fastest")
    parser.add_argument(
        "--overlap-backward",
        action="store_true",
        help="also a backward pass by hand, whose last combine travels next to weight gradients; "
        "with grouped_dot for the experts of training",
    )
    parser.add_argument(
        "--candidate-seconds", type=float, default=60, help="how long candidates may compile"
    )
    command.common_options(parser)
    parser.set_defaults(wire="none")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs it; returns the exit status: 1 if anything failed."""
    args = parse(argv)
    num_gpus = command.set_platform(args.ranks)
    sweeps = ["grouped", "layer", "decode"]
    run = command.open_run(args, num_gpus, sweeps, "layer", SAMPLES if num_gpus else 1)
    bench = Bench(run, args)
    for shape in shapes(args, run.mesh.size, run.on_gpu):
        bench.run_shape(shape)
    print(table(run.record["rows"]), flush=True)
    return command.finish(args, run.record, run.path)


def shapes(args: argparse.Namespace, ranks: int, on_gpu: bool) -> list[Shape]:
    """What to measure."""
    found = []
    for setting in (TRAINING, *DECODE):
        is_training = setting is TRAINING
        if args.only not in (None, "training" if is_training else "decode"):
            continue
        if not on_gpu:
            setting = Setting(min(setting.tokens, 24 if is_training else 16), **TINY_LAYER)
        intermediate = INTERMEDIATE if on_gpu else TINY_INTERMEDIATE
        found.append(Shape(draw(setting, ranks), intermediate, is_training))
    return found


class Job(NamedTuple):
    """A program on its way through the compiler, of one method or of the experts alone."""

    op: str
    method: str
    compiling: concurrent.futures.Future
    reps: int = 1


class Bench:
    """What the parts of a run share. Imports JAX when it is made."""

    def __init__(self, run: suite.Run, args: argparse.Namespace):
        import jax_moe_a2a as ma

        from . import suite

        self.run, self.mesh, self.args, self.on_gpu = run, run.mesh, args, run.on_gpu
        self.group = ma.Group(run.mesh, suite.AXIS, timeout=suite.TIMEOUT_SECONDS)
        self.pool = concurrent.futures.ThreadPoolExecutor(min(32, os.cpu_count() or 1))
        self.chosen: dict[bool, str] = {}  # candidate, by whether it is for training

    def run_shape(self, shape: Shape) -> None:
        """Measures the experts' candidates, where none is chosen yet, and then the layer."""
        what = f"{shape.sweep}, {shape.workload.setting}"
        say(f"{what}: experts alone, {shape.workload.capacity} rows, fullest {shape.fullest}")
        try:
            inputs = make_inputs(self.mesh, shape)
            dispatched = dispatched_rows(self, shape, inputs)
            name = self.run_candidates(shape, inputs, dispatched)
            if name is not None:
                say(f"{what}: the layer with {name}")
                self.run_layer(shape, inputs, name)
        except Exception as error:
            self.run.fail(what, error)

    def candidates(self, shape: Shape) -> list[str]:
        """Names of what to try for the experts."""
        from . import grouped

        if self.args.grouped:
            return [self.args.grouped]
        if shape.is_training in self.chosen:  # the first of the decode steps has chosen
            return [self.chosen[shape.is_training]]
        plain = ("ragged_dot", "padded buckets")
        return [c.name for c in grouped.CANDIDATES if self.on_gpu or c.name in plain]

    def run_candidates(self, shape: Shape, inputs: Inputs, dispatched: Any) -> str | None:
        """Times the experts alone by every candidate; returns the fastest that is right."""
        from . import grouped

        rows, sizes = dispatched
        state, fixed = (rows, sizes), (inputs.w_in, inputs.w_out)
        jobs: dict[str, list[Job]] = {}
        for name in self.candidates(shape):
            try:
                candidate = grouped.by_name(name)
                jobs[name] = self.compile_experts(shape, candidate, state, fixed)
            except Exception as error:
                self.run.fail(f"experts by {name}", error)
        futures = [job.compiling for of_one in jobs.values() for job in of_one]
        concurrent.futures.wait(futures, timeout=self.args.candidate_seconds)
        best: dict[str, float] = {}
        for name, of_one in jobs.items():
            try:
                if not all(job.compiling.done() for job in of_one):
                    raise TimeoutError("still compiling: left out")
                check, *timed = of_one
                compiled = check.compiling.result()
                check_errors(compiled(state, *fixed))
                for job in timed:
                    result = self.time(job, (state, *fixed))
                    self.add(shape, job, result, name)
                    best[name] = result.median_us  # the last: with gradients, in training
            except Exception as error:
                self.run.fail(f"{shape.sweep} experts by {name}", error)
        if not best:
            return None
        self.chosen[shape.is_training] = min(best, key=lambda name: best[name])
        return self.chosen[shape.is_training]

    def compile_experts(self, shape: Shape, candidate: Any, state: Any, fixed: Any) -> list[Job]:
        """A program that checks the experts; then those to time, what counts most last."""

        from . import grouped, timing

        experts = candidate.make(shape.fullest)

        def forward(state: Any, w_in: Any, w_out: Any) -> Any:
            rows, sizes = state
            return experts(rows, w_in, w_out, sizes)

        def both(state: Any, w_in: Any, w_out: Any) -> Any:
            rows, sizes = state
            return grouped.with_gradients(experts)(rows, w_in, w_out, sizes)

        def check(state: Any, w_in: Any, w_out: Any) -> Any:
            run = both if shape.is_training else forward
            found = run(state, w_in, w_out)
            found = found if shape.is_training else (found,)
            found = dict(zip(grouped.RESULTS, found, strict=False))
            return grouped.errors(found, state[0], w_in, w_out, state[1], fullest=shape.fullest)

        reps = 1 if shape.is_training or not self.on_gpu else DECODE_REPS
        programs = [("check", check, 1), ("experts", forward, reps)]
        if shape.is_training:
            programs.append(("experts_and_gradients", both, 1))
        jobs = []
        with candidate.tracing():
            for op, fn, count in programs:
                repeated = fn if count == 1 else timing.chain(fn, count)
                lowered = timing.per_rank(repeated, self.mesh).lower(state, *fixed)
                jobs.append(self.submit(op, "none", lowered, candidate, count))
        return jobs

    def submit(self, op: str, method: str, lowered: Any, candidate: Any, reps: int) -> Job:
        """Hands a program to the compiler's threads."""
        options = candidate.compiler_options if self.on_gpu else {}
        return Job(
            op, method, self.pool.submit(lambda: lowered.compile(compiler_options=options)), reps
        )

    def time(self, job: Job, args: Any) -> Any:
        """Times a program; the tie of several repetitions is some 1 % of theirs, and stays in."""
        from . import timing

        self.run.check_time()
        compiled = job.compiling.result()
        if job.reps > 1:
            timing.check_unmerged(compiled, job.reps, 0 if job.method == "none" else 2)
        return timing.measure(compiled, args, job.reps, self.run.samples)

    def add(self, shape: Shape, job: Job, result: Any, grouped: str) -> None:
        """Appends a row to the record."""
        from . import suite

        is_of_experts = job.method == "none"
        row = dict(
            op=job.op,
            method=job.method,
            sweep="grouped" if is_of_experts else shape.sweep,
            **suite.describe(shape.workload),
            intermediate=shape.intermediate,
            is_training=shape.is_training,
            grouped=grouped,
            fullest_expert=shape.fullest,
            path=self.group.path if job.method in OURS else "plain",
            num_sms=suite.sms_of(self.group, job.op, shape.workload.setting)
            if job.method in OURS
            else None,
            **result.row(),
            measured_us=round(result.median_us, 3),
            tie_us=None,
            reps=job.reps,
            samples=self.run.samples,
        )
        self.run.add(row)
        name = grouped if is_of_experts else job.method
        say(f"{name:20} {job.op:24} {row['us']:10.1f} us ({row['min_us']} to {row['max_us']})")

    def run_layer(self, shape: Shape, inputs: Inputs, name: str) -> None:
        """Times the layer by every method, with a candidate for the experts."""
        from . import grouped, methods

        candidate = grouped.by_name(name)
        wanted = [m for m in METHODS if m in (self.args.methods or METHODS)]
        if not self.on_gpu:  # XLA:CPU does not have it
            wanted = [method for method in wanted if method != "ragged"]
        if self.args.overlap_backward and shape.is_training and name == GROUPED_DOT:
            wanted.append(OVERLAPPED)
        jobs = {}
        for method in dict.fromkeys((METHODS[0], *wanted)):
            try:
                made = methods.METHODS[method.partition(",")[0]](shape.workload, self.group)
                jobs[method] = self.compile_layer(shape, candidate, method, made, inputs)
            except Exception as error:
                self.run.fail(f"{shape.sweep} by {method}", error)
        # Nothing is timed beside the compiler, which tries products out on the same GPUs.
        concurrent.futures.wait([job.compiling for of_one in jobs.values() for job in of_one])
        reference = None
        args = (inputs.state, inputs.w_in, inputs.w_out)
        for method, (check, *timed) in jobs.items():
            what = f"{shape.sweep}, {shape.workload.setting}, by {method}"
            try:
                found = check.compiling.result()(*args)
                if reference is None:
                    reference = found
                check_alike(found, reference)
                del found
                if method not in wanted:
                    continue
                for job in timed:
                    try:
                        result = self.time(job, args)
                    except RuntimeError as error:
                        if job.reps == 1:
                            raise
                        say(f"{what}: {error}; one repetition instead")
                        job = job._replace(compiling=check.compiling, reps=1)
                        result = self.time(job, args)
                    self.add(shape, job, result, name)
                self.group.check()
            except Exception as error:
                self.run.fail(what, error)
                try:
                    self.group.close()
                except Exception:  # the failure that led here is in the record
                    pass

    def compile_layer(
        self, shape: Shape, candidate: Any, method: str, made: Any, inputs: Inputs
    ) -> list[Job]:
        """A program whose results are checked; then those to time."""
        import jax

        from . import timing

        experts = candidate.make(shape.fullest)

        def layer(ids: Any, x: Any, weights: Any, w_in: Any, w_out: Any) -> Any:
            dispatched = made.dispatch(x, ids, weights)
            y = experts(dispatched.rows, w_in, w_out, dispatched.group_sizes)
            return made.combine(y, dispatched.state)

        if method == OVERLAPPED:
            layer = self.overlapped_layer(shape)

        def forward(state: Any, w_in: Any, w_out: Any) -> Any:
            x, ids, weights = state
            return layer(ids, x, weights, w_in, w_out)

        def both(state: Any, w_in: Any, w_out: Any) -> Any:
            x, ids, weights = state
            with_ids = functools.partial(layer, ids)
            out, vjp = jax.vjp(with_ids, x, weights, w_in, w_out)
            return out, *vjp(x)

        tied_axes = 2 if method in OURS else None
        reps = 1 if shape.is_training or not self.on_gpu else DECODE_REPS
        args = (inputs.state, inputs.w_in, inputs.w_out)
        with candidate.tracing():

            def job(op: str, fn: Any, count: int) -> Job:
                repeated = fn if count == 1 else timing.chain(fn, count, tied_axes)
                lowered = timing.per_rank(repeated, self.mesh).lower(*args)
                return self.submit(op, method, lowered, candidate, count)

            one, two = job("forward", forward, 1), None
            if shape.is_training:
                two = job("forward_and_gradients", both, 1)
                return [two, one, two]
            return [one, one if reps == 1 else job("forward", forward, reps)]

    def overlapped_layer(self, shape: Shape) -> Any:
        """The layer with a backward pass by hand, with the ids first."""
        import jax_moe_a2a as ma

        from . import backward, grouped

        product = functools.partial(ma.grouped_dot, tail="unspecified")
        setting, capacity = shape.workload.setting, shape.workload.capacity
        options = dict(group=self.group, num_experts=setting.experts, capacity=capacity)
        layer = backward.overlapped_layer(grouped.swiglu, product, **options)
        return lambda ids, x, *rest: layer(x, ids, *rest)


@dataclasses.dataclass
class Inputs:
    """Of all ranks, each on its device."""

    state: tuple[Any, Any, Any]
    """x [R, T, H], ids and weights [R, T, K]."""
    w_in: Any
    """[R, L, H, 2 I], gate and up."""
    w_out: Any
    """[R, L, I, H]."""


def make_inputs(mesh: Any, shape: Shape) -> Inputs:
    """Random normal tokens, and experts that keep their size."""
    import jax
    import jax.numpy as jnp

    from . import suite

    x, ids, weights = suite.make_inputs(mesh, shape.workload)
    setting, ranks = shape.workload.setting, mesh.size
    local = setting.experts // ranks

    def draw_experts() -> tuple[jax.Array, jax.Array]:
        keys = jax.random.split(jax.random.key(1))
        shapes = (
            (ranks, local, setting.hidden, 2 * shape.intermediate),
            (ranks, local, shape.intermediate, setting.hidden),
        )
        first, second = (
            jax.random.normal(key, size, jnp.bfloat16) * size[2] ** -0.5
            for key, size in zip(keys, shapes, strict=True)
        )
        return first.astype(jnp.bfloat16), second.astype(jnp.bfloat16)

    w_in, w_out = jax.jit(draw_experts, out_shardings=x.sharding)()
    return Inputs((x, ids, weights), w_in, w_out)


def dispatched_rows(bench: Bench, shape: Shape, inputs: Inputs) -> tuple[Any, Any]:
    """Rows [R, C, H] and group sizes [R, L] as the experts get them, by plain JAX."""
    from . import methods, timing

    method = methods.METHODS[METHODS[0]](shape.workload, bench.group)

    def dispatch(state: Any) -> Any:
        dispatched = method.dispatch(*state)
        return dispatched.rows, dispatched.group_sizes

    return timing.per_rank(dispatch, bench.mesh)(inputs.state)


def check_errors(found: dict[str, Any]) -> None:
    """Checks what ``grouped.errors`` found on all ranks.

    Raises:
      AssertionError: something is too far off.
    """
    from . import operations

    for name, of_ranks in found.items():
        error = operations.relative_error(of_ranks)
        if not error < TOLERANCE:
            raise AssertionError(f"{name} of the experts is wrong: relative error {error:.2e}")


def check_alike(found: Any, reference: Any) -> None:
    """Checks that a method gives what the first does.

    Raises:
      AssertionError: it does not.
    """
    import jax

    from . import operations

    squares = jax.jit(operations.squares)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(reference), strict=True)
    for i, pair in enumerate(pairs):
        error = operations.relative_error(squares(*pair)[None])
        if not error < TOLERANCE:
            raise AssertionError(
                f"result {i} differs from that of {METHODS[0]}: relative error {error:.2e}"
            )


def table(rows: list[dict[str, Any]]) -> str:
    """Medians in microseconds."""
    lines = [f"{'us on the device, median':40}"]
    for row in rows:
        name = f"experts by {row['grouped']}" if row["method"] == "none" else row["method"]
        size = f"{row['tokens']} x {row['hidden']}"
        lines.append(f"{row['sweep']:8} {size:14} {name:34} {row['op']:24} {row['us']:12,.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # without waiting for candidates that are still compiling
