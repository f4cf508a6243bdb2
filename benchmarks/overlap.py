"""Time what runs between the start and the done of a split exchange.

    python -m benchmarks.overlap                     dispatch, combine, a layer's backward pass
    python -m benchmarks.overlap --num-sms 24 32     with this number of SMs for the exchange

An exchange of 4096 tokens, and the products of a shared expert of about the same length: each
alone, and the products between the start of the exchange and its done. The goal is what the longer
one takes alone. What products lose if some SMs are taken depends on their number: one pair, or
several small ones. With three times as many products an exchange should cost nothing: what it
costs them is the SMs and the memory's time that it takes.

The backward pass is that of a layer with such products during its dispatch and during its combine;
its experts are the identity. Results are compared with those of whole exchanges.

Each repetition uses the products of the previous one as its x. Ties, 1 to 2 us, are in all figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_moe_a2a as ma

from . import operations, suite, timing
from . import run as runs
from .run import Run, say
from .workload import FULL, TINY, Setting, Workload, draw

OPS = ("dispatch", "combine", "backward")
TARGET = 1.3  # times the longer of the two by itself
LONG = 3  # times as many products, with which the exchange should cost nothing
SAMPLES = 5
NUM_SMS = (16, 24, 32, 48)
PAIRS = (4, 1)
QUICK_NUM_SMS, QUICK_PAIRS = (24,), (4,)
CALIBRATED_BY = 2048  # columns of the products from which the other sizes follow
EXPECTED_US = 700.0
TOKENS = 4096


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = runs.make_parser("benchmarks.overlap", __doc__)
    parser.add_argument("--num-sms", type=int, nargs="+", help="SM budgets of the exchange")
    parser.add_argument("--only", nargs="+", choices=OPS, default=OPS, help="default: all")
    parser.add_argument("--no-long", action="store_true", help="not during longer products")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run it; return the exit status: 1 if anything failed."""
    args = parse(argv)
    num_gpus = runs.set_platform(args.ranks)
    samples = SAMPLES if num_gpus and not args.quick else runs.QUICK_SAMPLES
    run = runs.open_run(args, num_gpus, ["overlap"], "overlap", samples)
    setting = Setting(TOKENS, **FULL) if num_gpus else Setting(8, **TINY)
    bench = Bench(run, args, draw(setting, run.mesh.size))
    say(f"goal: at most {TARGET} x the longer of the two alone")
    for op in args.only:
        with run.attempt(op):
            bench.run_op(op)
    return runs.finish(run.record, run.path, not args.no_plot)


class Repeated(NamedTuple):
    """Something to repeat."""

    exchanges: int
    tied_axes: int | None
    """For ``timing.chain``."""
    step: Callable[..., tuple[Any, ...]]
    """(state, fixed arguments) -> results, the first of which is the next x."""
    state: tuple[Any, ...]
    """x first."""
    fixed: tuple[Any, ...] = ()


class Key(NamedTuple):
    """What identifies a program."""

    op: str
    """Or "products", or "products, backward"."""
    num_sms: int | None = None
    pairs: int = 0
    times: int = 1


class Bench:
    """What all measurements of a run share."""

    def __init__(self, run: Run, args: argparse.Namespace, workload: Workload):
        self.run, self.args, self.workload = run, args, workload
        is_brief = args.quick or not run.on_gpu
        self.budgets = args.num_sms or (QUICK_NUM_SMS if is_brief else NUM_SMS)
        self.pairs = QUICK_PAIRS if is_brief else PAIRS
        self.started: dict[Key, tuple[Repeated, runs.Program]] = {}
        self.us: dict[Key, timing.Timing | None] = {}
        self.drawn: dict[tuple[int, int], tuple[Any, Any]] = {}  # by columns and seed
        self.residuals: dict[tuple[str, int], Any] = {}  # by operation and pairs
        self.x, self.ids, self.weights = suite.make_inputs(run.mesh, workload)
        self.whole = run.group()
        prepared = run.per_rank(self.prepare)(self.x, self.ids, self.weights)
        self.routing, self.received, self.row_weights, self.out = prepared
        self.columns = 0  # of a single pair

    # Arrays of one rank

    def prepare(self, x: Any, ids: Any, weights: Any) -> Any:
        """Return routing, rows, their weights and the sums, by whole exchanges."""
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
        """Return a function of x, weights, routing and two pairs of matrices, with products."""
        next_to = functools.partial(products, pairs=pairs)

        def run(x: Any, weights: Any, routing: Any, first: Any, second: Any) -> Any:
            inflight = ma.dispatch_start(x, with_group(routing, group), weights)
            inflight, shared = ma.overlap(inflight, next_to, x, *first)
            recv = ma.dispatch_done(inflight)
            inflight = ma.combine_start(recv.rows, recv)
            inflight, shared = ma.overlap(inflight, next_to, shared, *second)
            return ma.combine_done(inflight) + shared

        return run

    # Programs

    def matrices(self, pairs: int, seed: int = 0) -> tuple[Any, Any]:
        """Return [R, hidden, columns] and [R, columns, hidden], which keep the size of x.

        This many pairs of products take as long as a single pair with all columns.
        """
        ranks, hidden = self.run.mesh.size, self.workload.setting.hidden
        columns = rounded(self.columns / pairs)

        def draw_both() -> tuple[Any, Any]:
            keys = jax.random.split(jax.random.key(seed))
            shapes = (ranks, hidden, columns), (ranks, columns, hidden)
            first, second = (
                (jax.random.normal(key, shape) * shape[1] ** -0.5).astype(jnp.bfloat16)
                for key, shape in zip(keys, shapes, strict=True)
            )
            return first, second

        if (columns, seed) not in self.drawn:
            draw_on_devices = jax.jit(draw_both, out_shardings=self.x.sharding)
            self.drawn[columns, seed] = draw_on_devices()
        return self.drawn[columns, seed]

    def program(self, key: Key) -> Repeated:
        """Return the program of a key."""
        if "backward" in key.op:
            return self.backward(key)
        matrices = self.matrices(key.pairs) if key.pairs else ()
        next_to = functools.partial(products, pairs=key.pairs * key.times)
        if key.op == "products":
            state = (self.x, self.weights)
            return Repeated(0, 2, lambda state, *w: (next_to(state[0], *w),), state, matrices)
        return self.exchange(key.op, self.run.group(num_sms=key.num_sms), next_to, matrices)

    def exchange(
        self, op: str, group: Any, next_to: Callable[..., Any], matrices: tuple[Any, ...]
    ) -> Repeated:
        """Return dispatch or combine with products between its start and its done."""

        def dispatch(state: Any, *matrices: Any) -> Any:
            x, weights, routing = state
            inflight = ma.dispatch_start(x, with_group(routing, group), weights)
            inflight, x = ma.overlap(inflight, next_to, x, *matrices)
            recv = ma.dispatch_done(inflight)
            return x, recv.rows, recv.weights

        def combine(state: Any, rows: Any, *matrices: Any) -> Any:
            x, weights, routing = state
            inflight = ma.combine_start(rows, with_group(routing, group), weights=weights)
            inflight, x = ma.overlap(inflight, next_to, x, *matrices)
            return x, ma.combine_done(inflight)

        if op == "dispatch":
            return Repeated(1, 2, dispatch, (self.x, self.weights, self.routing), matrices)
        state = (self.x, self.row_weights, self.routing)
        return Repeated(1, 2, combine, state, (self.received, *matrices))

    def backward(self, key: Key) -> Repeated:
        """Return the backward pass of the layer, or of only its exchanges, or of only its
        products."""
        # Each product has two transposes: half as many columns.
        first, second = (self.matrices(2 * max(key.pairs, 1), seed) for seed in (1, 2))
        layer = self.layer(self.run.group(num_sms=key.num_sms), key.pairs)
        has_exchanges = key.op == "backward"
        treedef = None

        def forward(x: Any, weights: Any, routing: Any, first: Any, second: Any) -> Any:
            nonlocal treedef

            def run(x: Any, weights: Any, first: Any, second: Any) -> Any:
                if has_exchanges:
                    return layer(x, weights, routing, first, second)
                return products(products(x, *first, pairs=key.pairs), *second, pairs=key.pairs)

            _, vjp = jax.vjp(run, x, weights, first, second)
            residuals, treedef = jax.tree.flatten(vjp)
            return residuals

        args = (self.x, self.weights, self.routing, first, second)
        forward_of_all = self.run.per_rank(forward)
        jax.eval_shape(forward_of_all, *args)
        # The arguments are the same with every budget; the function is not.
        which = key.op, key.pairs
        if which not in self.residuals:
            self.residuals[which] = forward_of_all(*args)
        residuals = self.residuals[which]

        def step(state: Any) -> Any:
            cotangent, _, residuals = state
            d_x, d_weights, *d_matrices = jax.tree.unflatten(treedef, residuals)(cotangent)
            found = [d_weights] * has_exchanges + d_matrices * bool(key.pairs)
            return d_x, *jax.tree.leaves(found)

        return Repeated(2 * has_exchanges, None, step, (self.x, self.weights, residuals))

    # Measuring

    def start(self, key: Key) -> None:
        """Hand a program to the compiler's threads, once."""
        if key in self.started:
            return
        one = self.program(key)
        expected_us = EXPECTED_US * key.times * (3 if "backward" in key.op else 1)
        program = self.run.start(
            *(one.step, one.state, *one.fixed),
            reps=timing.repetitions(expected_us),
            exchanges=one.exchanges,
            tied_axes=one.tied_axes,
            carries=True,
        )
        self.started[key] = one, program

    def time(self, key: Key) -> timing.Timing | None:
        """Return the time of a program that was started, taken once; None if it failed."""
        if key not in self.us:
            self.us[key] = None
            with self.run.attempt(str(key)):
                one, program = self.started[key]
                self.us[key], _ = self.run.time(program, one.state, *one.fixed)
        return self.us[key]

    def calibrate(self) -> None:
        """Choose products that take as long as a dispatch with the default budget."""
        self.columns = CALIBRATED_BY if self.run.on_gpu else 32
        if not self.run.on_gpu:
            return
        keys = Key("dispatch"), Key("products", pairs=1)
        for key in keys:
            self.start(key)
        exchange, alone = (self.time(key)[0] for key in keys)
        del self.started[keys[1]], self.us[keys[1]]  # of other columns
        self.columns = rounded(CALIBRATED_BY * exchange / alone)
        say(
            f"a dispatch takes {exchange:.0f} us, products of {CALIBRATED_BY} columns {alone:.0f}: "
            f"{self.columns} columns next to it"
        )

    def run_op(self, op: str) -> None:
        """Measure an operation with every budget."""
        if not self.columns:
            self.calibrate()
        is_backward = op == "backward"
        alone = "products, backward" if is_backward else "products"
        times = (1,) if is_backward or self.args.no_long else (1, LONG)
        rows = []
        for pairs in self.pairs:
            for num_sms in self.budgets:
                keys = [Key(op, num_sms)]
                for n in times:
                    keys += [Key(alone, None, pairs, n), Key(op, num_sms, pairs, n)]
                rows.append(keys)
        for key in dict.fromkeys(key for keys in rows for key in keys):
            self.start(key)
        say(f"{op}: compiling")
        self.run.wait()
        self.check(op, self.started[rows[0][0 if is_backward else 2]][0])
        for keys in rows:
            found = [self.time(key) for key in keys]
            if None not in found:
                self.add(keys[2], *found)

    def check(self, op: str, program: Repeated) -> None:
        """Compare a program's results with whole exchanges.

        The results of a backward pass without products are known: its experts are the identity, and
        weights sum to 1.

        Raises:
          AssertionError: if they differ.
        """
        results = self.run.per_rank(program.step)(program.state, *program.fixed)
        if op == "backward":
            norms = self.run.per_rank(
                lambda x: jnp.square(x.astype(jnp.float32)).sum(-1, keepdims=True)
            )
            squares = self.run.per_rank(operations.squares)
            exact = dict(x=2 * self.x, weights=norms(self.x))
            pairs = zip(exact, results, exact.values(), strict=True)
            operations.check_errors({f"d_{name}": squares(*pair) for name, *pair in pairs})
            return
        expected = (self.received, self.row_weights) if op == "dispatch" else (self.out,)
        for i, (actual, whole) in enumerate(zip(results[1:], expected, strict=True)):
            same = np.asarray(self.run.per_rank(lambda a, b: (a == b).all())(actual, whole))
            if not same.all():
                raise AssertionError(f"result {i} of a split {op} is not the whole one's")

    def add(self, key: Key, exchange: Any, alone: Any, together: Any, *long: Any) -> None:
        """Add a row to the record."""
        setting = self.workload.setting
        columns = rounded(self.columns / key.pairs)
        # Sizes of one pair; in the backward pass of half the columns, of four pairs.
        flops = 4 * setting.tokens * setting.hidden * columns * key.pairs
        flops *= 2 if key.op == "backward" else 1
        row = dict(
            op=key.op,
            method="ours",
            sweep="overlap",
            **suite.describe(self.workload),
            path=self.whole.path,
            num_sms=key.num_sms,
            products="default",  # how XLA makes them
            pairs=key.pairs,
            columns=columns,
            **together.row(),
            exchange_us=round(exchange.median_us, 3),
            products_us=round(alone.median_us, 3),
            tflops=round(flops / alone.median_us / 1e6, 1),
            ratio_to_longer=round(together.median_us / max(exchange.median_us, alone.median_us), 3),
            cost_us=round(long[1].median_us - long[0].median_us, 3) if long else None,
            samples=self.run.samples,
        )
        self.run.add(row)
        ratio = row["ratio_to_longer"]
        say(f"{ratio:.2f} x the longer{' (not reached)' * (ratio > TARGET)}")


def products(x: Any, *matrices: Any, pairs: int) -> Any:
    """Return x after this many pairs of products."""
    for _ in range(pairs):
        w_in, w_out = matrices
        x = (x @ w_in) @ w_out
    return x


def with_group(routing: Any, group: Any) -> Any:
    """Return the routing for a group of the same ranks with another budget."""
    return dataclasses.replace(routing, group=group)


def rounded(columns: float) -> int:
    """Round columns to a multiple of the tiles' size."""
    return max(128, round(columns / 128) * 128) if columns >= 64 else round(columns)


if __name__ == "__main__":
    raise SystemExit(main())
