"""What runs beside a split exchange: ``python -m benchmarks.overlap``.

    python -m benchmarks.overlap                     dispatch, combine, a layer's backward pass
    python -m benchmarks.overlap --num-sms 24 32     with so many SMs for the exchange
    python -m benchmarks.overlap --trace FOLDER      also a profile of one call of each

An exchange of 4096 tokens, and the two products of a shared expert of about the same length: each
alone, and the products between the start of the exchange and its done. The goal is what the longer
one takes alone. Beside products of three times that length an exchange should cost nothing: what it
costs is the SMs and the memory's time that it takes from them.

The backward pass is that of a layer with such products beside its dispatch and beside its combine;
its experts are the identity. Results are checked against those of whole exchanges.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

from . import __main__ as command
from . import record as records
from .workload import FULL, TINY, Setting, Workload, draw, round_up

OPS = ("dispatch", "combine", "backward")
TARGET = 1.3  # times the longer of the two alone
LONG = 3  # times as many products, where the exchange should not show
SAMPLES = 5
NUM_SMS = (16, 24, 32, 48, 64)
CALIBRATED_BY = 2048  # columns of the products that the others are chosen by

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
    parser.add_argument("--tokens", type=int, default=4096, help="per rank")
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


@dataclasses.dataclass
class Program:
    """Something to time: a step from a state and fixed arguments, of which the state is tied."""

    step: Callable[..., Any]
    state: Any
    fixed: tuple[Any, ...] = ()


class Bench:
    """What the parts of a run share. Imports JAX when it is made."""

    def __init__(self, mesh: Any, args: argparse.Namespace, workload: Workload, on_gpu: bool):
        import jax.numpy as jnp

        from . import suite

        self.mesh, self.args, self.workload, self.on_gpu = mesh, args, workload, on_gpu
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.samples = args.samples or (SAMPLES if on_gpu else 1)
        self.pool = concurrent.futures.ThreadPoolExecutor(min(16, os.cpu_count() or 1))
        self.x, self.ids, self.weights = suite.make_inputs(mesh, workload)
        # All of a state waits for the results of the repetition before; this is what is compared.
        self.tick = self.put(jnp.zeros((mesh.size, 8)))
        self.whole = self.group(None)
        prepared = self.per_rank(self.prepare)(self.x, self.ids, self.weights)
        self.routing, self.received, self.row_weights, self.out = prepared
        self.columns = 0

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

    def put(self, x: Any) -> Any:
        import jax

        return jax.device_put(x, self.x.sharding)

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

    def products(self, x: Any, w_in: Any, w_out: Any, times: int = 1) -> Any:
        for _ in range(times):
            x = (x @ w_in) @ w_out
        return x

    def layer(self, group: Any, beside: bool) -> Callable[..., Any]:
        """x, weights, routing and two pairs of matrices -> sums, with or without the products."""
        import jax_moe_a2a as ma

        def run(x: Any, weights: Any, routing: Any, first: Any, second: Any) -> Any:
            inflight = ma.dispatch_start(x, with_group(routing, group), weights)
            shared = x
            if beside:
                inflight, shared = ma.overlap(inflight, self.products, shared, *first)
            recv = ma.dispatch_done(inflight)
            inflight = ma.combine_start(recv.rows, recv)
            if beside:
                inflight, shared = ma.overlap(inflight, self.products, shared, *second)
            return ma.combine_done(inflight) + shared

        return run

    # Programs

    def matrices(self, columns: int, seed: int = 0) -> tuple[Any, Any]:
        """[R, hidden, columns] and [R, columns, hidden], that keep the size of what they are
        multiplied with."""
        import jax
        import jax.numpy as jnp

        hidden, ranks = self.workload.setting.hidden, self.mesh.size

        def draw_both() -> tuple[Any, Any]:
            keys = jax.random.split(jax.random.key(seed))
            shapes = (ranks, hidden, columns), (ranks, columns, hidden)
            first, second = (
                (jax.random.normal(key, shape) * shape[1] ** -0.5).astype(jnp.bfloat16)
                for key, shape in zip(keys, shapes, strict=True)
            )
            return first, second

        return jax.jit(draw_both, out_shardings=self.x.sharding)()

    def exchange(self, op: str, group: Any, times: int) -> Program:
        """Dispatch or combine between whose start and done are so many products."""
        import jax_moe_a2a as ma

        def dispatch(state: Any, routing: Any, w_in: Any, w_out: Any) -> Any:
            _, x, weights = state
            inflight = ma.dispatch_start(x, with_group(routing, group), weights)
            inflight, beside = ma.overlap(inflight, self.products, x, w_in, w_out, times)
            recv = ma.dispatch_done(inflight)
            return recv.rows, recv.weights, *((beside,) if times else ())

        def combine(state: Any, routing: Any, w_in: Any, w_out: Any) -> Any:
            _, x, rows, weights = state
            inflight = ma.combine_start(rows, with_group(routing, group), weights=weights)
            inflight, beside = ma.overlap(inflight, self.products, x, w_in, w_out, times)
            return ma.combine_done(inflight), *((beside,) if times else ())

        fixed = (self.routing, *self.matrices(self.columns))
        if op == "dispatch":
            return Program(dispatch, (self.tick, self.x, self.weights), fixed)
        return Program(combine, (self.tick, self.x, self.received, self.row_weights), fixed)

    def only_products(self, times: int, columns: int) -> Program:
        def run(state: Any, w_in: Any, w_out: Any) -> Any:
            _, x = state
            return (self.products(x, w_in, w_out, times),)

        return Program(run, (self.tick, self.x), self.matrices(columns))

    def backward(self, group: Any, exchanges: bool, beside: bool) -> Program:
        """The backward pass of the layer, of its exchanges, or of its products alone."""
        import jax

        columns = max(128, self.columns // 2 // 128 * 128)  # each product has two transposes
        first, second = self.matrices(columns, 1), self.matrices(columns, 2)
        treedef = None

        def forward(x: Any, weights: Any, routing: Any, first: Any, second: Any) -> Any:
            nonlocal treedef
            layer = self.layer(group, beside)

            def run(x: Any, weights: Any, first: Any, second: Any) -> Any:
                if exchanges:
                    return layer(x, weights, routing, first, second)
                return self.products(self.products(x, *first), *second)

            _, vjp = jax.vjp(run, x, weights, first, second)
            residuals, treedef = jax.tree.flatten(vjp)
            return residuals

        args = (self.x, self.weights, self.routing, first, second)
        residuals = self.per_rank(forward)(*args)

        def run(state: Any, residuals: Any) -> Any:
            d_x, d_weights, d_first, d_second = jax.tree.unflatten(treedef, residuals)(state[1])
            return (
                d_x,
                *((d_weights,) if exchanges else ()),
                *((d_first, d_second) if beside else ()),
            )

        return Program(run, (self.tick, self.x), (residuals,))

    # Measuring

    def submit(self, program: Program, expected_us: float) -> tuple[Any, Program, int]:
        """Hands a program to the compiler's threads."""
        from . import timing

        reps = timing.repetitions(expected_us) if self.on_gpu else 1
        repeated = timing.chain(program.step, reps, None)
        lowered = self.per_rank(repeated).lower(program.state, *program.fixed)
        return self.pool.submit(lowered.compile), program, reps

    def time(self, submitted: tuple[Any, Program, int]) -> Any:
        from . import timing

        compiling, program, reps = submitted
        args = (program.state, *program.fixed)
        return timing.measure(compiling.result(), args, reps, self.samples)

    def calibrate(self) -> None:
        """Chooses products that take as long as a dispatch with the default budget."""
        self.columns = CALIBRATED_BY if self.on_gpu else 32
        if not self.on_gpu:
            return
        both = [
            self.submit(self.exchange("dispatch", self.whole, 0), 700),
            self.submit(self.only_products(1, CALIBRATED_BY), 400),
        ]
        exchange, products = (self.time(each).median_us for each in both)
        self.columns = max(128, round_up(round(CALIBRATED_BY * exchange / products), 128))
        say(f"a dispatch takes {exchange:.0f} us; products of {self.columns} columns beside it")

    def run(self, op: str) -> None:
        """Measures an operation with every budget."""
        if not self.columns:
            self.calibrate()
        budgets = self.args.num_sms or (NUM_SMS if self.on_gpu else (None,))
        expected = 1500.0 if op == "backward" else 700.0
        named: dict[tuple[str, int | None], Any] = {}

        def add(name: str, num_sms: int | None, program: Program, times: int = 1) -> None:
            if name == "together" and num_sms == budgets[0] and op != "backward":
                self.check(op, program)
            named[name, num_sms] = self.submit(program, expected * times)

        if op == "backward":
            add("products", None, self.backward(self.whole, False, True))
            for num_sms in budgets:
                group = self.group(num_sms)
                add("exchange", num_sms, self.backward(group, True, False))
                add("together", num_sms, self.backward(group, True, True))
        else:
            add("products", None, self.only_products(1, self.columns))
            add("long_products", None, self.only_products(LONG, self.columns), LONG)
            for num_sms in budgets:
                group = self.group(num_sms)
                add("exchange", num_sms, self.exchange(op, group, 0))
                add("together", num_sms, self.exchange(op, group, 1))
                add("beside_long", num_sms, self.exchange(op, group, LONG), LONG)
        # Nothing is timed beside the compiler, which tries products out on the same GPUs.
        concurrent.futures.wait([compiling for compiling, _, _ in named.values()])
        us = {key: self.time(submitted) for key, submitted in named.items()}
        for num_sms in budgets:
            self.add_row(op, num_sms, us)
        if self.args.trace:
            self.trace(op, named["together", budgets[-1]])

    def check(self, op: str, program: Program) -> None:
        """Checks a program's results against whole exchanges.

        Raises:
          AssertionError: they differ.
        """
        import numpy as np

        results = self.per_rank(program.step)(program.state, *program.fixed)
        expected = (self.received, self.row_weights) if op == "dispatch" else (self.out,)
        for name, actual, whole in zip(("first", "second"), results, expected, strict=False):
            same = np.asarray(self.per_rank(lambda a, b: (a == b).all())(actual, whole))
            if not same.all():
                raise AssertionError(f"the {name} result of a split {op} is not the whole one's")

    def add_row(self, op: str, num_sms: int | None, us: dict[tuple[str, Any], Any]) -> None:
        """Appends a row to the record."""
        from . import suite

        exchange, together = us["exchange", num_sms], us["together", num_sms]
        products = us["products", None]
        longer = max(exchange.median_us, products.median_us)
        cost = None
        if ("beside_long", num_sms) in us:
            cost = us["beside_long", num_sms].median_us - us["long_products", None].median_us
        row = dict(
            op=op,
            method="ours",
            sweep="overlap",
            **suite.describe(self.workload),
            path=self.whole.path,
            num_sms=num_sms,
            columns=self.columns,
            us=round(together.median_us, 3),
            min_us=round(together.min_us, 3),
            max_us=round(together.max_us, 3),
            exchange_us=round(exchange.median_us, 3),
            products_us=round(products.median_us, 3),
            ratio_to_longer=round(together.median_us / longer, 3),
            cost_us=None if cost is None else round(cost, 3),
            samples=self.samples,
        )
        self.rows.append(row)
        say(in_words(row))

    def trace(self, op: str, submitted: tuple[Any, Program, int]) -> None:
        """A profile of one call."""
        import jax

        compiling, program, _ = submitted
        with jax.profiler.trace(str(self.args.trace / op)):
            jax.block_until_ready(compiling.result()(program.state, *program.fixed))


def with_group(routing: Any, group: Any) -> Any:
    """The routing for a group of the same ranks with another budget."""
    return dataclasses.replace(routing, group=group)


def in_words(row: dict[str, Any]) -> str:
    """A line of progress."""
    budget = "default" if row["num_sms"] is None else row["num_sms"]
    text = (
        f"{row['op']:9} {budget!s:>7} SMs: exchange {row['exchange_us']:8.1f} us, products "
        f"{row['products_us']:8.1f}, together {row['us']:8.1f} = {row['ratio_to_longer']:.2f} x"
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
