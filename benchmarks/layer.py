"""Time a whole MoE layer, exchange, experts and weighted combine, by ours and by plain JAX.

    python -m benchmarks.layer                     training and decode, on this machine's GPUs
    python -m benchmarks.layer --only decode       or training
    python -m benchmarks.layer --grouped "Mosaic GPU"
    python -m benchmarks.layer --shapes A B qwen3-30b deepseek-v3 --methods ours moe_mlp
    python -m benchmarks.layer --only training --methods moe_mlp --overlap-backward

``ours`` is written with dispatch, grouped products and combine. ``moe_mlp`` is the layer in one
call, without overlap; ``--overlap-backward`` adds the form with it. First this times the experts
alone (``experts.py``) on rows that are dispatched already; then the layer by each method with the
same experts. The router's choices are given. Training is forward alone, and forward with the
gradients of tokens, router weights and experts; decode is a few tokens, forward. Every result is
checked before it is timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from . import cli
from .cli import say
from .workload import LAYERS, Setting, Workload, draw, round_up

if TYPE_CHECKING:
    from . import suite

DECODE_TOKENS = (64, 8)
TINY_INTERMEDIATE = 32
TINY_LAYER: dict[str, Any] = dict(hidden=64, top_k=2, experts=16)
METHODS = ("all_gather", "ours", "moe_mlp", "dense", "ragged")  # compared with the first
OVERLAPPED = "moe_mlp, backward overlapped"
OF_MOE_MLP = {"moe_mlp": False, OVERLAPPED: True}  # method: overlap_backward
OURS = ("ours", *OF_MOE_MLP)
ALONE = "none"  # the method of rows of the experts alone
TOLERANCE = 2e-2  # bfloat16 has 8 bits, and sums are rounded where the methods sum
GROUPED_DOT = "grouped_dot"  # of experts.CANDIDATES
DECODE_REPS = 16
SAMPLES = 5


class Shape(NamedTuple):
    """Hold one layer to measure."""

    name: str
    workload: Workload
    intermediate: int
    is_training: bool

    @property
    def sweep(self) -> str:
        """Return the sweep of its rows."""
        return "layer" if self.is_training else "decode"

    @property
    def fullest(self) -> int:
        """Return the rows of the fullest expert, rounded up."""
        setting = self.workload.setting
        counts = [(self.workload.ids == e).sum() for e in range(setting.experts)]
        return round_up(int(max(counts)), 128 if self.is_training else 8)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = cli.make_parser("benchmarks.layer", __doc__)
    parser.add_argument("--only", choices=("training", "decode"), help="default: both")
    parser.add_argument("--shapes", nargs="+", choices=LAYERS, default=("A",))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--grouped", default=GROUPED_DOT, help="of experts.CANDIDATES")
    parser.add_argument(
        "--overlap-backward",
        action="store_true",
        help="also moe_mlp with a split combine of the token gradients, in training",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run it; return the exit status: 1 if anything failed."""
    args = parse(argv)
    num_gpus = cli.set_platform(args.ranks)
    sweeps = ["grouped", "layer", "decode"]
    run = cli.open_run(args, num_gpus, sweeps, "layer", SAMPLES if num_gpus else 1)
    bench = Bench(run, args)
    for shape in shapes(args, run.mesh.size, run.on_gpu):
        try:
            bench.run_shape(shape)
        except Exception as error:  # of one shape, must not end the run
            run.fail(f"{shape.sweep}, {shape.workload.setting}", error)
    return cli.finish(args, run.record, run.path)


def shapes(args: argparse.Namespace, ranks: int, on_gpu: bool) -> list[Shape]:
    """Return what to measure."""
    found = []
    for name in args.shapes:
        training, intermediate = LAYERS[name]
        decode = [dataclasses.replace(training, tokens=tokens) for tokens in DECODE_TOKENS]
        for setting in (training, *decode):
            is_training = setting is training
            if args.only not in (None, "training" if is_training else "decode"):
                continue
            if not on_gpu:
                setting = Setting(min(setting.tokens, 24 if is_training else 16), **TINY_LAYER)
                intermediate = TINY_INTERMEDIATE
            found.append(Shape(name, draw(setting, ranks), intermediate, is_training))
    return found


class Job(NamedTuple):
    """Hold a future program, of one method or of the experts alone."""

    op: str
    method: str
    compiling: concurrent.futures.Future
    reps: int = 1


class Bench:
    """Hold what the parts of a run share. Import JAX when it is made."""

    def __init__(self, run: suite.Run, args: argparse.Namespace):
        import jax_moe_a2a as ma

        from . import experts, suite

        self.run, self.mesh, self.args, self.on_gpu = run, run.mesh, args, run.on_gpu
        self.make_experts = experts.CANDIDATES[args.grouped]
        self.group = ma.Group(run.mesh, suite.AXIS, timeout=suite.TIMEOUT_SECONDS)
        self.pool = concurrent.futures.ThreadPoolExecutor(min(32, os.cpu_count() or 1))

    def run_shape(self, shape: Shape) -> None:
        """Measure the experts alone, then the layer."""
        say(
            f"{shape.name}, {shape.sweep}, {shape.workload.setting}: {shape.workload.capacity} rows"
        )
        state, *weights = make_inputs(self.mesh, shape)
        rows = dispatched_rows(self, shape, state)
        wanted = [m for m in self.args.methods if self.on_gpu or m != "ragged"]  # not on XLA:CPU
        if self.args.overlap_backward and shape.is_training:
            wanted.append(OVERLAPPED)
        if self.args.grouped != GROUPED_DOT:
            wanted = [m for m in wanted if m not in OF_MOE_MLP]
        alone = self.compile_experts(shape, rows, weights)
        jobs = {}
        for method in dict.fromkeys((METHODS[0], *wanted)):
            try:
                jobs[method] = self.compile_layer(shape, method, state, weights)
            except Exception as error:
                self.run.fail(f"{shape.sweep} by {method}", error)
        # Nothing is timed while the compiler runs, because it tries products out on the same GPUs.
        all_jobs = [*alone, *(job for of_one in jobs.values() for job in of_one)]
        concurrent.futures.wait([job.compiling for job in all_jobs])
        check, *timed = alone
        check_errors(check.compiling.result()(rows, *weights))
        for job in timed:
            self.add(shape, job, self.time(job, (rows, *weights)))
        reference = None
        for method, (check, *timed) in jobs.items():
            what = f"{shape.sweep}, {shape.workload.setting}, by {method}"
            try:
                found = check.compiling.result()(state, *weights)
                reference = found if reference is None else reference
                check_alike(found, reference)
                del found
                for job in timed if method in wanted else ():
                    try:
                        result = self.time(job, (state, *weights))
                    except RuntimeError as error:
                        if job.reps == 1:
                            raise
                        say(f"{what}: {error}; one repetition instead")
                        job = job._replace(compiling=check.compiling, reps=1)
                        result = self.time(job, (state, *weights))
                    self.add(shape, job, result)
                self.group.check()
            except Exception as error:
                from . import suite

                self.run.fail(what, error)
                suite.close(self.group)

    def compile_experts(self, shape: Shape, state: Any, weights: Any) -> list[Job]:
        """Return a program that checks the experts; then those to time."""
        from . import experts as of_rank

        experts = self.make_experts(shape.fullest)

        def forward(state: Any, w_in: Any, w_out: Any) -> Any:
            rows, sizes = state
            return experts(rows, w_in, w_out, sizes)

        def both(state: Any, w_in: Any, w_out: Any) -> Any:
            rows, sizes = state
            return of_rank.with_gradients(experts)(rows, w_in, w_out, sizes)

        def check(state: Any, w_in: Any, w_out: Any) -> Any:
            found = (both if shape.is_training else forward)(state, w_in, w_out)
            found = found if shape.is_training else (found,)
            named = dict(zip(of_rank.RESULTS, found, strict=False))
            return of_rank.errors(named, state[0], w_in, w_out, state[1], fullest=shape.fullest)

        programs = [("check", check, 1), ("experts", forward, self.reps(shape))]
        if shape.is_training:
            programs.append(("experts_and_gradients", both, 1))
        return [
            self.compile(op, ALONE, fn, reps, 2, (state, *weights)) for op, fn, reps in programs
        ]

    def compile_layer(self, shape: Shape, method: str, state: Any, weights: Any) -> list[Job]:
        """Return a program whose results are checked; then those to time."""
        import jax

        layer = self.layer(shape, method)

        def forward(state: Any, w_in: Any, w_out: Any) -> Any:
            x, ids, weights = state
            return layer(ids, x, weights, w_in, w_out)

        def both(state: Any, w_in: Any, w_out: Any) -> Any:
            x, ids, weights = state
            with_ids = functools.partial(layer, ids)
            out, vjp = jax.vjp(with_ids, x, weights, w_in, w_out)
            return out, *vjp(x)

        def job(op: str, fn: Any, reps: int) -> Job:
            tied_axes = 2 if method in OURS else None
            return self.compile(op, method, fn, reps, tied_axes, (state, *weights))

        one, reps = job("forward", forward, 1), self.reps(shape)
        if shape.is_training:
            two = job("forward_and_gradients", both, 1)
            return [two, one, two]
        return [one, one if reps == 1 else job("forward", forward, reps)]

    def layer(self, shape: Shape, method: str) -> Any:
        """Return the layer by a method, with the ids first."""
        import jax_moe_a2a as ma

        from . import experts, methods

        if method in OF_MOE_MLP:
            one_call = functools.partial(
                ma.moe_mlp,
                activation=experts.swiglu,
                group=self.group,
                num_experts=shape.workload.setting.experts,
                capacity=shape.workload.capacity,
                overlap_backward=OF_MOE_MLP[method],
            )
            return lambda ids, x, *rest: one_call(x, ids, *rest)
        of_rank = self.make_experts(shape.fullest)
        made = methods.METHODS[method](shape.workload, self.group)

        def layer(ids: Any, x: Any, weights: Any, w_in: Any, w_out: Any) -> Any:
            dispatched = made.dispatch(x, ids, weights)
            y = of_rank(dispatched.rows, w_in, w_out, dispatched.group_sizes)
            return made.combine(y, dispatched.state)

        return layer

    def reps(self, shape: Shape) -> int:
        """Return how often a forward pass is repeated in its program."""
        return 1 if shape.is_training or not self.on_gpu else DECODE_REPS

    def compile(
        self, op: str, method: str, fn: Any, reps: int, tied_axes: int | None, args: Any
    ) -> Job:
        """Trace a program and hand it to the compiler's threads."""
        from . import timing

        repeated = fn if reps == 1 else timing.chain(fn, reps, tied_axes)
        lowered = timing.per_rank(repeated, self.mesh).lower(*args)
        return Job(op, method, self.pool.submit(lowered.compile), reps)

    def time(self, job: Job, args: Any) -> Any:
        """Time a program; the tie of several repetitions is some 1 % of theirs, and stays in."""
        from . import timing

        self.run.check_time()
        compiled = job.compiling.result()
        if job.reps > 1:
            timing.check_unmerged(compiled, job.reps, 0 if job.method == ALONE else 2)
        return timing.measure(compiled, args, job.reps, self.run.samples)

    def add(self, shape: Shape, job: Job, result: Any) -> None:
        """Add a row to the record."""
        from . import suite

        is_ours = job.method in OURS
        setting = shape.workload.setting
        row = dict(
            op=job.op,
            method=job.method,
            sweep="grouped" if job.method == ALONE else shape.sweep,
            **suite.describe(shape.workload),
            shape=shape.name,
            intermediate=shape.intermediate,
            is_training=shape.is_training,
            grouped=self.args.grouped,
            fullest_expert=shape.fullest,
            path=self.group.path if is_ours else "plain",
            num_sms=suite.sms_of(self.group, job.op, setting) if is_ours else None,
            **result.row(),
            measured_us=round(result.median_us, 3),
            tie_us=None,
            reps=job.reps,
            samples=self.run.samples,
        )
        self.run.add(row)
        say(
            f"{job.method:28} {job.op:24} {row['us']:10.1f} us ({row['min_us']} to {row['max_us']})"
        )


def make_inputs(mesh: Any, shape: Shape) -> tuple[Any, Any, Any]:
    """Draw normal tokens, and experts that keep their size; all ranks, each on its device.

    Returns:
      (x [R, T, H], ids and weights [R, T, K]), w_in [R, L, H, 2 I], gate and up, and
      w_out [R, L, I, H].
    """
    import jax
    import jax.numpy as jnp

    from . import suite

    x, ids, weights = suite.make_inputs(mesh, shape.workload)
    setting, ranks = shape.workload.setting, mesh.size
    local = setting.experts // ranks

    def draw_experts() -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.key(1))
        sizes = (
            (ranks, local, setting.hidden, 2 * shape.intermediate),
            (ranks, local, shape.intermediate, setting.hidden),
        )
        drawn = [jax.random.normal(k, s, jnp.bfloat16) * s[2] ** -0.5 for k, s in zip(keys, sizes)]
        return tuple(w.astype(jnp.bfloat16) for w in drawn)

    w_in, w_out = jax.jit(draw_experts, out_shardings=x.sharding)()
    return (x, ids, weights), w_in, w_out


def dispatched_rows(bench: Bench, shape: Shape, state: Any) -> tuple[Any, Any]:
    """Return rows [R, C, H] and group sizes [R, L] as the experts get them, by plain JAX."""
    from . import methods, timing

    method = methods.METHODS[METHODS[0]](shape.workload, bench.group)

    def dispatch(state: Any) -> Any:
        dispatched = method.dispatch(*state)
        return dispatched.rows, dispatched.group_sizes

    return timing.per_rank(dispatch, bench.mesh)(state)


def check_errors(found: dict[str, Any]) -> None:
    """Check what ``experts.errors`` found on all ranks.

    Raises:
      AssertionError: an error is too large.
    """
    from . import operations

    for name, of_ranks in found.items():
        error = operations.relative_error(of_ranks)
        if not error < TOLERANCE:
            raise AssertionError(f"{name} of the experts is wrong: relative error {error:.2e}")


def check_alike(found: Any, reference: Any) -> None:
    """Check that the results of a method are those of the first.

    Raises:
      AssertionError: a result differs.
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


if __name__ == "__main__":
    raise SystemExit(main())
