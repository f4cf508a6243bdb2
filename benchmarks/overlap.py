"""Time what runs between the start and the done of a split exchange.

    python -m benchmarks.overlap                     dispatch, combine, a layer's backward pass
    python -m benchmarks.overlap --num-sms 24 32     with this number of SMs for the exchange

An exchange of 4,096 tokens, and the matrix products of a shared expert of about the same length:
each alone, and the products between the start of the exchange and its done. The backward pass is
that of a layer with such products during its dispatch and during its combine; its experts are the
identity. Each repetition uses the products of the previous one as its x. Ties, 1 to 2 us, are in
all figures.
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
SAMPLES = 5
NUM_SMS = (16, 24, 32, 48)
PAIRS = 4  # of products; in a backward pass, of half the columns
COLUMNS = 1152  # of a matrix: on an H200, four pairs take as long as a dispatch with 24 SMs
EXPECTED_US = 700.0
TOKENS = 4096


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = runs.make_parser("benchmarks.overlap", __doc__)
    parser.add_argument("--num-sms", type=int, nargs="+", help="SM budgets of the exchange")
    parser.add_argument("--columns", type=int, default=COLUMNS, help="of the matrices")
    parser.add_argument("--only", nargs="+", choices=OPS, default=OPS, help="default: all")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run it; return the exit status: 1 if anything failed."""
    args = parse(argv)
    num_gpus = runs.set_platform(args.ranks)
    is_brief = args.quick or not num_gpus
    samples = runs.QUICK_SAMPLES if is_brief else SAMPLES
    run = runs.open_run(args, num_gpus, ["overlap"], "overlap", samples)
    setting = Setting(TOKENS, **FULL) if num_gpus else Setting(8, **TINY)
    bench = Bench(run, draw(setting, run.mesh.size), args.columns if num_gpus else 32)
    for op in args.only:
        with run.attempt(op):
            bench.run_op(op, args.num_sms or (NUM_SMS[1:2] if is_brief else NUM_SMS))
    return runs.finish(run.record, run.path, not args.no_plot)


class Repeated(NamedTuple):
    """Something to repeat."""

    exchanges: int
    step: Callable[..., tuple[Any, ...]]
    """(state, fixed arguments) -> results, the first of which is the next x."""
    state: tuple[Any, ...]
    """x first."""
    fixed: tuple[Any, ...] = ()
    tied_axes: int | None = 2
    """For ``timing.chain``."""


class Bench:
    """What all measurements of a run share."""

    def __init__(self, run: Run, workload: Workload, columns: int):
        self.run, self.workload, self.columns = run, workload, columns
        self.x, self.ids, self.weights = suite.make_inputs(run.mesh, workload)
        self.whole = run.group()
        prepared = run.per_rank(self.prepare)(self.x, self.ids, self.weights)
        self.routing, self.received, self.row_weights, self.out = prepared

    def prepare(self, x: Any, ids: Any, weights: Any) -> Any:
        """Return routing, rows, their weights and the sums, by whole exchanges."""
        workload = self.workload
        sizes = dict(num_experts=workload.setting.experts, capacity=workload.capacity)
        routing = ma.route(ids, group=self.whole, **sizes)
        recv = ma.dispatch(x, routing, weights)
        return routing, recv.rows, recv.weights, ma.combine(recv.rows, recv)

    def matrices(self, columns: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
        """Return [R, hidden, columns] and [R, columns, hidden], which keep the size of x."""
        ranks, hidden = self.run.mesh.size, self.workload.setting.hidden
        shapes = (ranks, hidden, columns), (ranks, columns, hidden)

        def draw_both() -> Any:
            keys = jax.random.split(jax.random.key(seed))
            return [
                (jax.random.normal(key, shape) * shape[1] ** -0.5).astype(jnp.bfloat16)
                for key, shape in zip(keys, shapes, strict=True)
            ]

        return tuple(jax.jit(draw_both, out_shardings=self.x.sharding)())

    def program(self, op: str, num_sms: int | None, pairs: int) -> Repeated:
        """Return an operation with pairs of products next to it; without a number of SMs, only the
        products."""
        group = self.run.group(num_sms=num_sms)
        if op == "backward":
            return self.backward(group, pairs, has_exchanges=num_sms is not None)
        matrices = self.matrices(self.columns) if pairs else ()
        next_to = functools.partial(products, pairs=pairs)

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

        if num_sms is None:
            only_products = lambda state, *matrices: (next_to(state[0], *matrices),)
            return Repeated(0, only_products, (self.x, self.weights), matrices)
        if op == "dispatch":
            return Repeated(1, dispatch, (self.x, self.weights, self.routing), matrices)
        state = (self.x, self.row_weights, self.routing)
        return Repeated(1, combine, state, (self.received, *matrices))

    def backward(self, group: ma.Group, pairs: int, has_exchanges: bool) -> Repeated:
        """Return the backward pass of a layer with products, or of one of both."""
        # Each product has two transposes: half as many columns.
        first, second = (self.matrices(max(1, self.columns // 2), seed) for seed in (1, 2))
        next_to = functools.partial(products, pairs=pairs)
        treedef = None

        def layer(x: Any, weights: Any, routing: Any, first: Any, second: Any) -> Any:
            inflight = ma.dispatch_start(x, with_group(routing, group), weights)
            inflight, shared = ma.overlap(inflight, next_to, x, *first)
            recv = ma.dispatch_done(inflight)
            inflight = ma.combine_start(recv.rows, recv)
            inflight, shared = ma.overlap(inflight, next_to, shared, *second)
            return ma.combine_done(inflight) + shared

        def forward(x: Any, weights: Any, routing: Any, first: Any, second: Any) -> Any:
            nonlocal treedef

            def run(x: Any, weights: Any, first: Any, second: Any) -> Any:
                if has_exchanges:
                    return layer(x, weights, routing, first, second)
                return next_to(next_to(x, *first), *second)

            residuals, treedef = jax.tree.flatten(jax.vjp(run, x, weights, first, second)[1])
            return residuals

        args = (self.x, self.weights, self.routing, first, second)
        residuals = self.run.per_rank(forward)(*args)

        def step(state: Any) -> Any:
            cotangent, _, residuals = state
            d_x, d_weights, *d_matrices = jax.tree.unflatten(treedef, residuals)(cotangent)
            found = [d_weights] * has_exchanges + d_matrices * bool(pairs)
            return d_x, *jax.tree.leaves(found)

        state = (self.x, self.weights, residuals)
        return Repeated(2 * has_exchanges, step, state, tied_axes=None)

    def run_op(self, op: str, budgets: tuple[int, ...]) -> None:
        """Measure an operation with every budget."""
        kinds = [(None, PAIRS), *((sms, pairs) for sms in budgets for pairs in (0, PAIRS))]
        programs = {kind: self.program(op, *kind) for kind in kinds}
        expected_us = EXPECTED_US * (3 if op == "backward" else 1)
        started = {
            kind: self.run.start(
                *(one.step, one.state, *one.fixed),
                reps=timing.repetitions(expected_us),
                exchanges=one.exchanges,
                tied_axes=one.tied_axes,
                carries=True,
            )
            for kind, one in programs.items()
        }
        say(f"{op}: compiling")
        self.run.wait()
        self.check(op, programs[budgets[0], 0 if op == "backward" else PAIRS])
        taken = {}
        for kind, one in programs.items():
            taken[kind], _ = self.run.time(started[kind], one.state, *one.fixed)
        for num_sms in budgets:
            alone = taken[num_sms, 0], taken[None, PAIRS]
            self.add(op, num_sms, *alone, taken[num_sms, PAIRS])

    def check(self, op: str, program: Repeated) -> None:
        """Compare a program's results with whole exchanges.

        The results of a backward pass without products are known: its experts are the identity, and
        weights sum to 1.

        Raises:
          AssertionError: if they differ.
        """
        results = self.run.per_rank(program.step)(program.state, *program.fixed)
        if op == "backward":
            norms = lambda x: jnp.square(x.astype(jnp.float32)).sum(-1, keepdims=True)
            squares = self.run.per_rank(operations.squares)
            exact = dict(x=2 * self.x, weights=self.run.per_rank(norms)(self.x))
            pairs = zip(exact, results, exact.values(), strict=True)
            operations.check_errors({f"d_{name}": squares(*pair) for name, *pair in pairs})
            return
        expected = (self.received, self.row_weights) if op == "dispatch" else (self.out,)
        for i, (actual, whole) in enumerate(zip(results[1:], expected, strict=True)):
            if not np.array_equal(actual, whole):
                raise AssertionError(f"result {i} of a split {op} is not the whole one's")

    def add(self, op: str, num_sms: int, exchange: Any, alone: Any, together: Any) -> None:
        """Add a row to the record."""
        row = dict(
            op=op,
            method="ours",
            sweep="overlap",
            **suite.describe(self.workload),
            path=self.whole.path,
            num_sms=num_sms,
            pairs=PAIRS,
            columns=self.columns,
            **together.row(),
            exchange_us=round(exchange.median_us, 3),
            products_us=round(alone.median_us, 3),
            ratio_to_longer=round(together.median_us / max(exchange.median_us, alone.median_us), 3),
            samples=self.run.samples,
        )
        self.run.add(row)
        say(f"{row['ratio_to_longer']:.2f} x the longer")


def products(x: Any, *matrices: Any, pairs: int) -> Any:
    """Return x after this many pairs of products."""
    for _ in range(pairs):
        w_in, w_out = matrices
        x = (x @ w_in) @ w_out
    return x


def with_group(routing: Any, group: Any) -> Any:
    """Return the routing for a group of the same ranks with another budget."""
    return dataclasses.replace(routing, group=group)


if __name__ == "__main__":
    raise SystemExit(main())
