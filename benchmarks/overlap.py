"""What runs beside a split exchange: ``python -m benchmarks.overlap``.

    python -m benchmarks.overlap                     dispatch, combine, a layer's backward pass
    python -m benchmarks.overlap --num-sms 24 32     with so many SMs for the exchange
    python -m benchmarks.overlap --pairs 1 4         one large pair of products, or four small ones
    python -m benchmarks.overlap --trace FOLDER      also a profile of one call of each

An exchange of 4096 tokens, and the products of a shared expert of about the same length: each
alone, and the products between the start of the exchange and its done. The goal is what the longer
one takes alone. Products are made in several ways, for it depends on them what they lose where some
SMs are taken: by XLA's choice (cuBLAS mostly) and by Triton, in one pair or in several small ones.
Beside three times as many products an exchange should cost nothing: what it costs them is the SMs
and the memory's time that it takes.

The backward pass is that of a layer with such products beside its dispatch and beside its combine;
its experts are the identity. Results are checked against those of whole exchanges.

Repetitions depend on each other: the products' result is the next one's x, and a comparison of the
results is added to the router weights, which the next exchange reads.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import glob
import gzip
import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from . import __main__ as command
from . import record as records
from .workload import FULL, TINY, Setting, Workload, draw

OPS = ("dispatch", "combine", "backward")
TARGET = 1.3  # times the longer of the two alone
LONG = 3  # times as many products, where the exchange should not show
SAMPLES = 5
NUM_SMS = (16, 24, 32, 48, 64)
PAIRS = (1, 4)
CALIBRATED_BY = 2048  # columns of the products that the others are chosen by
EXPECTED_US = 700.0
# How XLA makes the products.
COMPILERS: dict[str, dict[str, Any]] = {
    "default": {},
    "triton": {"xla_gpu_triton_gemm_any": True, "xla_gpu_cublas_fallback": False},
}

say = command.say


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num-sms", type=int, nargs="+", help="SM budgets of the exchange")
    parser.add_argument("--only", nargs="+", choices=OPS, default=OPS, help="default: all")
    parser.add_argument("--pairs", type=int, nargs="+", help="pairs of products; default: 1 and 4")
    parser.add_argument("--compilers", nargs="+", choices=COMPILERS, default=tuple(COMPILERS))
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
    parser.add_argument("--no-long", action="store_true", help="not beside longer products")
    parser.add_argument("--trace", type=pathlib.Path, help="a folder for the profiler's traces")
    command.common_options(parser)
    parser.set_defaults(wire="none", no_plot=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs it; returns the exit status: 1 if anything failed."""
    args = parse(argv)
    num_gpus = command.set_platform(args.ranks)
    mesh = command.start_jax(num_gpus, args.ranks)
    setting = Setting(args.tokens, **FULL) if num_gpus else Setting(8, **TINY)
    bench = Bench(mesh, args, draw(setting, mesh.size), bool(num_gpus))
    record = dict(
        command.describe_run(mesh, num_gpus, None),
        cuda_graphs="default",
        sweeps=["overlap"],
        failures=bench.failures,
        rows=bench.rows,
    )
    path = command.choose_path(args, mesh, "overlap")
    for op in args.only:
        try:
            bench.run(op)
        except Exception as error:
            bench.fail(op, error)
        if path is not None:
            records.write(record, path)
    print(table(bench.rows), flush=True)
    return command.finish(args, record, path)


# What the SMs are given to: (operation, how products are made, pairs of them, SM budget), all but
# the first None where it does not matter.
Key = tuple[str, str | None, int | None, int | None]


@dataclasses.dataclass
class Program:
    """Something to time: (x, scalars, fixed arguments) -> (the next x, results)."""

    step: Callable[..., tuple[Any, tuple[Any, ...]]]
    x: Any
    scalars: Any
    fixed: tuple[Any, ...] = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Compiling:
    """A program on its way through the compiler."""

    program: Program
    reps: int
    compiled: concurrent.futures.Future

    @property
    def args(self) -> tuple[Any, ...]:
        return self.program.x, self.program.scalars, *self.program.fixed


def chain(step: Callable[..., Any], reps: int) -> Callable[..., list[Any]]:
    """``step`` so many times, each with the x of the one before and behind all of its results."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from .timing import first_element

    step = jax.jit(step)  # traced once, inlined by XLA

    def repeated(x: Any, scalars: Any, *fixed: Any) -> list[Any]:
        for _ in range(reps):
            # The barrier keeps XLA from computing only the elements that are taken.
            x, *results = lax.optimization_barrier((*_flat(step(x, scalars, *fixed)),))
            is_huge = [first_element(r).astype(jnp.float32) > 3e38 for r in (x, *results)]
            scalars = scalars + functools.reduce(jnp.logical_or, is_huge).astype(scalars.dtype)
        return [first_element(x), first_element(scalars)]

    return repeated


def _flat(stepped: Any) -> list[Any]:
    import jax

    x, results = stepped
    return [x, *jax.tree.leaves(results)]


class Bench:
    """What the parts of a run share. Imports JAX when it is made."""

    def __init__(self, mesh: Any, args: argparse.Namespace, workload: Workload, on_gpu: bool):
        from . import suite

        self.mesh, self.args, self.workload, self.on_gpu = mesh, args, workload, on_gpu
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.samples = args.samples or (SAMPLES if on_gpu else 1)
        self.pairs = args.pairs or (PAIRS if on_gpu else PAIRS[:1])
        self.compilers = args.compilers if on_gpu else ["default"]
        self.pool = concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1))
        self.x, self.ids, self.weights = suite.make_inputs(mesh, workload)
        self.whole = self.group(None)
        prepared = self.per_rank(self.prepare)(self.x, self.ids, self.weights)
        self.routing, self.received, self.row_weights, self.out = prepared
        self.columns = 0  # of a single pair

    def fail(self, what: str, error: Exception) -> None:
        """Notes a failure and goes on."""
        text = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
        say(f"FAILED {text}")
        self.failures.append(text)

    def group(self, num_sms: int | None) -> Any:
        """The group with that budget."""
        import jax_moe_a2a as ma

        from . import suite

        return ma.Group(self.mesh, suite.AXIS, num_sms=num_sms, timeout=suite.TIMEOUT_SECONDS)

    def per_rank(self, fn: Callable[..., Any]) -> Any:
        from . import timing

        return timing.per_rank(fn, self.mesh)

    # Of one rank

    def prepare(self, x: Any, ids: Any, weights: Any) -> Any:
        """Routing, rows, their weights and the sums, by whole exchanges."""
        import jax_moe_a2a as ma

        workload = self.workload
        routing = ma.route(
            ids,
            group=self.whole,
            num_experts=workload.setting.experts,
            capacity=workload.capacity,
        )
        recv = ma.dispatch(x, routing, weights)
        return routing, recv.rows, recv.weights, ma.combine(recv.rows, recv)

    def layer(self, group: Any, pairs: int) -> Callable[..., Any]:
        """x, weights, routing and two pairs of matrices -> sums, with products if there are any."""
        import jax_moe_a2a as ma

        def run(x: Any, weights: Any, routing: Any, first: Any, second: Any) -> Any:
            inflight = ma.dispatch_start(x, with_group(routing, group), weights)
            inflight, shared = ma.overlap(inflight, products, x, *first, pairs)
            recv = ma.dispatch_done(inflight)
            inflight = ma.combine_start(recv.rows, recv)
            inflight, shared = ma.overlap(inflight, products, shared, *second, pairs)
            return ma.combine_done(inflight) + shared

        return run

    # Programs

    def matrices(self, pairs: int, seed: int = 0) -> tuple[Any, Any]:
        """[R, hidden, columns] and [R, columns, hidden], that keep the size of what they are
        multiplied with; so many pairs of products take as long as a single one of all columns."""
        import jax
        import jax.numpy as jnp

        hidden, ranks = self.workload.setting.hidden, self.mesh.size
        columns = rounded(self.columns / pairs)

        def draw_both() -> tuple[Any, Any]:
            keys = jax.random.split(jax.random.key(seed))
            shapes = (ranks, hidden, columns), (ranks, columns, hidden)
            first, second = (
                (jax.random.normal(key, shape) * shape[1] ** -0.5).astype(jnp.bfloat16)
                for key, shape in zip(keys, shapes, strict=True)
            )
            return first, second

        return jax.jit(draw_both, out_shardings=self.x.sharding)()

    def exchange(self, op: str, num_sms: int | None, pairs: int = 0, times: int = 1) -> Program:
        """Dispatch or combine, with products between its start and its done."""
        import jax_moe_a2a as ma

        group, count = self.group(num_sms), pairs * times

        def dispatch(x: Any, weights: Any, routing: Any, *matrices: Any) -> Any:
            inflight = ma.dispatch_start(x, with_group(routing, group), weights)
            inflight, x = ma.overlap(inflight, products, x, *matrices, count)
            recv = ma.dispatch_done(inflight)
            return x, (recv.rows, recv.weights)

        def combine(x: Any, weights: Any, routing: Any, rows: Any, *matrices: Any) -> Any:
            inflight = ma.combine_start(rows, with_group(routing, group), weights=weights)
            inflight, x = ma.overlap(inflight, products, x, *matrices, count)
            return x, (ma.combine_done(inflight),)

        matrices = self.matrices(pairs) if pairs else (self.ids, self.ids)
        if op == "dispatch":
            return Program(dispatch, self.x, self.weights, (self.routing, *matrices))
        return Program(combine, self.x, self.row_weights, (self.routing, self.received, *matrices))

    def only_products(self, pairs: int, times: int = 1) -> Program:
        def run(x: Any, weights: Any, *matrices: Any) -> Any:
            return products(x, *matrices, pairs * times), ()

        return Program(run, self.x, self.weights, self.matrices(pairs))

    def backward(self, num_sms: int | None, pairs: int, exchanges: bool) -> Program:
        """The backward pass of the layer, of its exchanges, or of its products alone."""
        import jax

        # Of each product there are two transposes: half as many columns.
        first, second = (self.matrices(2 * max(pairs, 1), seed) for seed in (1, 2))
        layer = self.layer(self.group(num_sms), pairs)
        treedef = None

        def forward(x: Any, weights: Any, routing: Any, first: Any, second: Any) -> Any:
            nonlocal treedef

            def run(x: Any, weights: Any, first: Any, second: Any) -> Any:
                if exchanges:
                    return layer(x, weights, routing, first, second)
                return products(products(x, *first, pairs), *second, pairs)

            _, vjp = jax.vjp(run, x, weights, first, second)
            residuals, treedef = jax.tree.flatten(vjp)
            return residuals

        args = (self.x, self.weights, self.routing, first, second)
        residuals = self.per_rank(forward)(*args)

        def run(cotangent: Any, weights: Any, residuals: Any) -> Any:
            del weights
            d_x, d_weights, d_first, d_second = jax.tree.unflatten(treedef, residuals)(cotangent)
            return d_x, (d_weights,) * exchanges + (d_first, d_second) * bool(pairs)

        return Program(run, self.x, self.weights, (residuals,))

    # Measuring

    def submit(self, program: Program, expected_us: float, compiler: str = "default") -> Compiling:
        """Hands a program to the compiler's threads."""
        from . import timing

        reps = timing.repetitions(expected_us) if self.on_gpu else 1
        args = (program.x, program.scalars, *program.fixed)
        lowered = self.per_rank(chain(program.step, reps)).lower(*args)
        options = COMPILERS[compiler] if self.on_gpu else {}
        return Compiling(
            program, reps, self.pool.submit(lambda: lowered.compile(compiler_options=options))
        )

    def time(self, submitted: Compiling) -> Any:
        from . import timing

        compiled = submitted.compiled.result()
        return timing.measure(compiled, submitted.args, submitted.reps, self.samples)

    def calibrate(self) -> None:
        """Chooses products that take as long as a dispatch with the default budget."""
        self.columns = CALIBRATED_BY if self.on_gpu else 32
        if not self.on_gpu:
            return
        both = [
            self.submit(self.exchange("dispatch", None), EXPECTED_US),
            self.submit(self.only_products(1), EXPECTED_US),
        ]
        exchange, alone = (self.time(each).median_us for each in both)
        self.columns = rounded(CALIBRATED_BY * exchange / alone)
        say(
            f"a dispatch takes {exchange:.0f} us, products of {CALIBRATED_BY} columns {alone:.0f}: "
            f"{self.columns} columns beside it"
        )

    def run(self, op: str) -> None:
        """Measures an operation with every budget."""
        if not self.columns:
            self.calibrate()
        budgets = self.args.num_sms or (NUM_SMS if self.on_gpu else (None,))
        is_backward = op == "backward"
        expected = EXPECTED_US * (3 if is_backward else 1)
        found: dict[Key, Compiling] = {}

        def add(key: Key, program: Program, times: int = 1) -> None:
            found[key] = self.submit(program, expected * times, key[1] or "default")

        for num_sms in budgets:
            alone = self.backward(num_sms, 0, True) if is_backward else self.exchange(op, num_sms)
            add(("exchange", None, None, num_sms), alone)
        for pairs in self.pairs:
            for compiler in self.compilers:
                if is_backward:
                    add(("products", compiler, pairs, None), self.backward(None, pairs, False))
                else:
                    add(("products", compiler, pairs, None), self.only_products(pairs))
                    if not self.args.no_long:
                        more = self.only_products(pairs, LONG)
                        add(("long", compiler, pairs, None), more, LONG)
                for num_sms in budgets:
                    if is_backward:
                        both = self.backward(num_sms, pairs, True)
                    else:
                        both = self.exchange(op, num_sms, pairs)
                    add(("together", compiler, pairs, num_sms), both)
                    if not is_backward and not self.args.no_long:
                        both = self.exchange(op, num_sms, pairs, LONG)
                        add(("beside", compiler, pairs, num_sms), both, LONG)
        # Nothing is timed beside the compiler, which tries products out on the same GPUs.
        concurrent.futures.wait([each.compiled for each in found.values()])
        if not is_backward:
            self.check(op, self.exchange(op, budgets[0], self.pairs[0]))
        us = {}
        for key, submitted in found.items():
            try:
                us[key] = self.time(submitted)
            except Exception as error:  # a compiler that lacks an option, say
                self.fail(f"{op}, {key}", error)
        for pairs in self.pairs:
            for compiler in self.compilers:
                for num_sms in budgets:
                    self.add_row(op, compiler, pairs, num_sms, us)
        if self.args.trace:
            self.trace(op, found["together", self.compilers[0], self.pairs[-1], budgets[-1]])

    def check(self, op: str, program: Program) -> None:
        """Checks a program's results against whole exchanges.

        Raises:
          AssertionError: they differ.
        """
        import numpy as np

        args = (program.x, program.scalars, *program.fixed)
        _, results = self.per_rank(program.step)(*args)
        expected = (self.received, self.row_weights) if op == "dispatch" else (self.out,)
        for i, (actual, whole) in enumerate(zip(results, expected, strict=True)):
            same = np.asarray(self.per_rank(lambda a, b: (a == b).all())(actual, whole))
            if not same.all():
                raise AssertionError(f"result {i} of a split {op} is not the whole one's")

    def add_row(
        self, op: str, compiler: str, pairs: int, num_sms: int | None, us: dict[Key, Any]
    ) -> None:
        """Appends a row to the record, if all of its parts were measured."""
        from . import suite

        parts = (
            us.get(("exchange", None, None, num_sms)),
            us.get(("products", compiler, pairs, None)),
            us.get(("together", compiler, pairs, num_sms)),
        )
        if None in parts:
            return
        exchange, alone, together = parts
        long = us.get(("long", compiler, pairs, None))
        beside = us.get(("beside", compiler, pairs, num_sms))
        setting = self.workload.setting
        columns = rounded(self.columns / pairs)
        # Of one pair; in the backward pass of half the columns, of four pairs.
        flops = (
            4 * setting.tokens * setting.hidden * columns * pairs * (2 if op == "backward" else 1)
        )
        row = dict(
            op=op,
            method="ours",
            sweep="overlap",
            **suite.describe(self.workload),
            path=self.whole.path,
            num_sms=num_sms,
            products=compiler,
            pairs=pairs,
            columns=columns,
            us=round(together.median_us, 3),
            min_us=round(together.min_us, 3),
            max_us=round(together.max_us, 3),
            exchange_us=round(exchange.median_us, 3),
            products_us=round(alone.median_us, 3),
            tflops=round(flops / alone.median_us / 1e6, 1),
            ratio_to_longer=round(together.median_us / max(exchange.median_us, alone.median_us), 3),
            cost_us=round(beside.median_us - long.median_us, 3) if beside and long else None,
            samples=self.samples,
        )
        self.rows.append(row)
        say(in_words(row))

    def trace(self, op: str, submitted: Compiling) -> None:
        """A profile of one call, and what of it is on the first GPU."""
        import jax

        folder = self.args.trace / op
        compiled = submitted.compiled.result()
        for line in schedule(compiled.as_text())[:12]:
            print(f"  in order: {line}")
        with jax.profiler.trace(str(folder)):
            jax.block_until_ready(compiled(*submitted.args))
        events = gpu_events(folder)
        for event in events[:60]:
            print(
                f"  {event['stream']:24} {event['start_us']:10.1f} to {event['end_us']:10.1f} us  "
                f"{event['name'][:70]}"
            )
        folder.with_suffix(".json").write_text(json.dumps(events))
        try:
            draw_events(events, folder.with_suffix(".svg"))
        except ImportError:
            print("no plot: matplotlib is not installed")


def products(x: Any, w_in: Any, w_out: Any, pairs: int) -> Any:
    """x through so many pairs of products."""
    for _ in range(pairs):
        x = (x @ w_in) @ w_out
    return x


def with_group(routing: Any, group: Any) -> Any:
    """The routing for a group of the same ranks with another budget."""
    return dataclasses.replace(routing, group=group)


def rounded(columns: float) -> int:
    """Columns that tiles divide."""
    return max(128, round(columns / 128) * 128) if columns >= 64 else round(columns)


def schedule(text: str) -> list[str]:
    """The halves of exchanges, and the products, of a compiled program in their order."""
    wanted = re.compile(r'custom_call_target="([^"]+)"|"kind":"(__triton[^"]*gemm)"|= \S+ (dot)\(')
    entry = text[text.rfind("\nENTRY") :]
    return [next(filter(None, m.groups())) for m in map(wanted.search, entry.splitlines()) if m]


def gpu_events(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Kernels on the first GPU of a profile, with streams and times since the first of them."""
    found = sorted(glob.glob(str(folder / "**" / "*.trace.json.gz"), recursive=True))
    if not found:
        return []
    with gzip.open(found[-1]) as file:
        events = json.load(file)["traceEvents"]
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and "name" in event.get("args", {})
    }
    kernels = []
    for event in events:
        device = names.get(("process_name", event.get("pid"), None), "")
        stream = names.get(("thread_name", event.get("pid"), event.get("tid")), "")
        if event.get("ph") == "X" and "GPU:0" in device and stream.startswith("Stream"):
            kernels.append((event["ts"], event["dur"], stream, event["name"]))
    kernels.sort()
    return [
        dict(stream=stream, start_us=ts - kernels[0][0], end_us=ts + dur - kernels[0][0], name=name)
        for ts, dur, stream, name in kernels
    ]


def draw_events(events: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Plots the kernels between the beginnings of the second and the third exchange."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    starts = [event["start_us"] for event in events if "moe_a2a" in event["name"]]
    if len(starts) < 3:
        return
    # What was launched first for the same repetition belongs to it.
    begin, end = (start - 1 for start in starts[1:3])
    shown = [event for event in events if begin <= event["start_us"] < end]
    figure, axes = plt.subplots(figsize=(8, 1.6))
    lanes = {True: (1, "#2a6f97", "exchange"), False: (0, "#e09f3e", "products")}
    for event in shown:
        lane, colour, _ = lanes["moe_a2a" in event["name"]]
        left, width = event["start_us"] - begin, event["end_us"] - event["start_us"]
        axes.barh(lane, width, left=left, height=0.7, color=colour, edgecolor="white")
    axes.set_yticks([0, 1], ["XLA's stream:\nproducts", "side stream:\nexchange"])
    axes.set_xlabel("µs")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def in_words(row: dict[str, Any]) -> str:
    """A line of progress."""
    budget = "default" if row["num_sms"] is None else row["num_sms"]
    text = (
        f"{row['op']:9} {budget!s:>7} SMs, {row['pairs']} x {row['columns']} {row['products']:8}: "
        f"exchange {row['exchange_us']:7.1f} us, products {row['products_us']:7.1f} "
        f"({row['tflops']:.0f} TF/s), together {row['us']:7.1f} = {row['ratio_to_longer']:.2f} x"
    )
    if row["cost_us"] is not None:
        text += f"; costs longer products {row['cost_us']:6.1f} us"
    return text


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, and which reach the goal."""
    lines = [f"goal: at most {TARGET} x the longer of the two alone"]
    for row in rows:
        lines.append(
            in_words(row) + ("" if row["ratio_to_longer"] <= TARGET else "  (not reached)")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
