"""Time a whole MoE layer (exchange, experts and weighted combine) of this package and of plain JAX.

    python -m benchmarks.layer                     training and decode, on this machine's GPUs
    python -m benchmarks.layer --only training --methods moe_mlp all_gather mosaic
    python -m benchmarks.layer --shapes A B --methods moe_mlp --capacities tight worst 1.25
    python -m benchmarks.layer --tokens 8 128 1024 4096 --sigma 0 1.1
    python -m benchmarks.layer --stages            whole layers of models, stage by stage

The method ``ours`` consists of dispatch, grouped products and combine. ``moe_mlp`` is the layer in
one call. ``moe_mlp_fp8`` reads quantized weights, which get no gradients. ``moe_mlp_to_fp8``
quantizes rows and weights for the products, with gradients. ``all_gather`` exchanges in plain JAX,
and ``mosaic`` also uses JAX's Mosaic GPU kernels. Expert ids are inputs. Training is a forward
pass, once without and once with the gradients of tokens, router weights and experts. Decode is a
forward pass of up to 128 tokens. Results must equal those of ``all_gather`` within a tolerance. If
the capacity drops rows, the reference is ``ours``, because plain JAX would drop other rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jax_moe_a2a as ma

from . import experts, operations, stages, suite, timing
from . import run as runs
from .methods import METHODS as MAKERS
from .run import Case, Job, Program, Row, Run, say
from .workload import LAYERS, Workload, draw

DECODE_TOKENS = (64, 8)
MOST_DECODE_TOKENS = 128
TINY_INTERMEDIATE = 128
TINY_LAYER: dict[str, Any] = dict(hidden=128, top_k=2, experts=16)
METHODS = ("all_gather", "ours", "moe_mlp", "moe_mlp_fp8", "moe_mlp_to_fp8")
METHODS += ("dense", "ragged", "ragged32", "mosaic")
FROZEN = "moe_mlp_fp8"  # its weights get no gradients
OF_MOE_MLP = {
    "moe_mlp": ma.Experts,
    FROZEN: ma.Experts,
    "moe_mlp_to_fp8": lambda w_in, w_out: ma.Experts(w_in, w_out).in_fp8(),
}
OURS = ("ours", *OF_MOE_MLP)
ON_GPU = ("ragged", "ragged32", "mosaic")
TOLERANCE = 2e-2  # bfloat16 has 8 bits, and methods round different partial sums
FP8_TOLERANCE = 0.1  # a single FP8 product of random numbers has an error of 3.7 %
DECODE_REPS = 16
SAMPLES = 5


class Shape(NamedTuple):
    name: str
    workload: Workload
    intermediate: int
    is_training: bool

    @property
    def sweep(self) -> str:
        return "layer" if self.is_training else "decode"

    @property
    def reference(self) -> str:
        return "ours" if self.workload.dropped else "all_gather"

    @property
    def reps(self) -> int:
        return 1 if self.is_training else DECODE_REPS


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = runs.make_parser("benchmarks.layer", __doc__)
    parser.add_argument("--only", choices=("training", "decode"), help="default: both")
    parser.add_argument("--stages", action="store_true", help="router, exchange and products")
    parser.add_argument("--shapes", nargs="+", choices=LAYERS, default=("A",))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS[:-1])
    parser.add_argument("--tokens", nargs="+", type=int, help="per rank, of training and decode")
    parser.add_argument("--sigma", nargs="+", type=float, default=(0.0,), help="Setting.sigma")
    parser.add_argument(
        "--capacities",
        nargs="+",
        type=lambda text: text if text in ("tight", "worst") else str(float(text)),
        default=("tight",),
        help="tight, worst (the default of the package) or a capacity factor",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.stages:
        return stages.main(args)
    num_gpus = runs.set_platform(args.ranks)
    run = runs.open_run(args, num_gpus, ["layer", "decode"], "layer", SAMPLES if num_gpus else 1)
    benches = []
    for shape in shapes(args, run.mesh.size, run.on_gpu):
        with run.attempt(f"{shape.sweep}, {shape.workload.setting}"):
            bench = Bench(run, shape)
            bench.start(methods(args, shape, run.on_gpu))
            benches.append(bench)
    for bench in benches:
        bench.measure()
    return runs.finish(run.record, run.path, not args.no_plot)


def shapes(args: argparse.Namespace, ranks: int, on_gpu: bool) -> list[Shape]:
    found = []
    for name in args.shapes:
        training, intermediate = LAYERS[name]
        tokens = args.tokens or (training.tokens, *DECODE_TOKENS)
        for values in itertools.product(tokens, args.sigma, args.capacities):
            varied = dict(zip(("tokens", "sigma", "capacity"), values))
            setting = dataclasses.replace(training, **varied)
            is_training = setting.tokens > MOST_DECODE_TOKENS
            if args.only not in (None, "training" if is_training else "decode"):
                continue
            if not on_gpu:
                few = min(setting.tokens, 24 if is_training else 16)
                setting = dataclasses.replace(setting, tokens=few, **TINY_LAYER)
                intermediate = TINY_INTERMEDIATE
            found.append(Shape(name, draw(setting, ranks), intermediate, is_training))
    return found


def methods(args: argparse.Namespace, shape: Shape, on_gpu: bool) -> list[str]:
    wanted = [*args.methods]
    if not on_gpu:
        wanted = [method for method in wanted if method not in ON_GPU]
    if shape.workload.dropped:  # plain JAX would drop other rows
        wanted = [method for method in wanted if method in OURS]
    return wanted


class Bench:
    def __init__(self, run: Run, shape: Shape):
        self.run, self.shape = run, shape
        self.group = run.group()
        self.state, *self.weights = jax.eval_shape(lambda: make_inputs(run.mesh, shape))
        self.reference: Any = None
        self.cases: list[Case] = []

    def start(self, wanted: list[str]) -> None:
        shape = self.shape
        setting, capacity = shape.workload.setting, shape.workload.capacity
        say(f"{shape.name}, {shape.sweep}, {setting}: {capacity} rows, compiling")
        for method in dict.fromkeys((shape.reference, *wanted)):
            with self.run.attempt(f"{shape.sweep} by {method}"):
                case = self.layer_case(method)
                self.cases.append(case if method in wanted else case._replace(jobs=[]))

    def measure(self) -> None:
        shape = self.shape
        self.run.wait()
        say(f"{shape.name}, {shape.sweep}, {shape.workload.setting}")
        with self.run.attempt(f"{shape.sweep}, {shape.workload.setting}: inputs"):
            self.state, *self.weights = make_inputs(self.run.mesh, shape)
            self.run.measure(self.cases)
        self.state = self.weights = self.reference = None  # frees memory

    def layer_case(self, method: str) -> Case:
        layer = self.layer(method)
        is_frozen = method == FROZEN
        prepare = self.run.per_rank(quantized) if is_frozen else lambda weights: weights
        shapes = jax.eval_shape(prepare, self.weights)

        def forward(state: Any, w_in: Any, w_out: Any) -> Any:
            x, ids, weights = state
            return layer(ids, x, weights, w_in, w_out)

        def both(state: Any, w_in: Any, w_out: Any) -> Any:
            x, ids, weights = state
            if is_frozen:
                of_trained = lambda x, weights: layer(ids, x, weights, w_in, w_out)
                out, vjp = jax.vjp(of_trained, x, weights)
            else:
                out, vjp = jax.vjp(functools.partial(layer, ids), x, weights, w_in, w_out)
            return out, *vjp(x)

        def start(fn: Callable[..., Any], reps: int = 1) -> Program:
            options: dict[str, Any] = dict(exchanges=2, tied_axes=2 if method in OURS else None)
            options.update(reps=reps, keeps_results=reps == 1)
            return self.run.start(fn, self.state, *shapes, **options)

        # With more repetitions, XLA would quantize the weights only once for all of them.
        reps = 1 if method == "moe_mlp_to_fp8" else self.shape.reps
        timed = start(forward, reps)
        jobs = [self.job("forward", method, timed)]
        checked = timed if reps == 1 else start(forward)
        if self.shape.is_training:
            checked = start(both)
            jobs.append(self.job("forward_and_gradients", method, checked))

        def check() -> tuple[Any, ...]:
            args = self.state, *prepare(self.weights)
            found = jax.tree.leaves(checked.compiling.result()(*args))
            self.reference = found if self.reference is None else self.reference
            squares = jax.jit(operations.squares)
            pairs = zip(found, self.reference, strict=not is_frozen)
            errors = {f"result {i}": squares(*pair) for i, pair in enumerate(pairs)}
            operations.check_errors(errors, FP8_TOLERANCE if "fp8" in method else TOLERANCE)
            return args

        what = f"{self.shape.sweep}, {self.shape.workload.setting}, by {method}"
        return Case(what, check, jobs, self.group)

    def layer(self, method: str) -> Callable[..., jax.Array]:
        """Return a function (ids, tokens, router weights, w_in, w_out) -> sums."""
        workload = self.shape.workload
        if method in OF_MOE_MLP:
            one_call = functools.partial(
                ma.moe_mlp,
                group=self.group,
                num_experts=workload.setting.experts,
                exchange=ma.Exchange(capacity=workload.capacity),
            )
            make = OF_MOE_MLP[method]
            return lambda ids, x, weights, w_in, w_out: one_call(
                x, ma.RouterChoices(ids, weights), make(w_in, w_out)
            )
        is_mosaic = method == "mosaic"
        made = MAKERS["all_gather" if is_mosaic else method](workload, self.group)
        compute = experts.by_product(experts.mosaic_product() if is_mosaic else experts.grouped_dot)

        def layer(ids: Any, x: Any, weights: Any, w_in: Any, w_out: Any) -> Any:
            dispatched = made.dispatch(x, ids, weights)
            y = compute(dispatched.rows, w_in, w_out, dispatched.group_sizes)
            return made.combine(y, dispatched.state)

        return layer

    def job(self, op: str, method: str, program: Program) -> Job:
        shape, is_ours = self.shape, method in OURS

        def row(result: timing.Timing) -> Row:
            num_sms = suite.sms_of(self.group, op, shape.workload.setting) if is_ours else None
            return dict(
                op=op,
                method=method,
                sweep=shape.sweep,
                **suite.describe(shape.workload),
                shape=shape.name,
                intermediate=shape.intermediate,
                dropped=round(shape.workload.dropped, 5),
                is_training=shape.is_training,
                path=self.group.path if is_ours else "plain",
                num_sms=num_sms,
                **result.row(),
                measured_us=round(result.median_us, 3),
                reps=program.reps,
                samples=self.run.samples,
            )

        return Job(op, program, lambda args: args, row)


def quantized(weights: list[jax.Array]) -> list[Any]:
    experts = ma.quantize_experts(ma.Experts(*weights))
    return [experts.w_in, experts.w_out]


def make_inputs(mesh: Any, shape: Shape) -> tuple[Any, Any, Any]:
    """Return (x [R, T, H], ids and weights [R, T, K]), w_in [R, L, H, 2, I] and w_out [R, L, I,
    H]."""
    x, ids, weights = suite.make_inputs(mesh, shape.workload)
    setting, ranks = shape.workload.setting, mesh.size
    sizes = (setting.hidden, 2, shape.intermediate), (shape.intermediate, setting.hidden)

    def draw_expert(key: jax.Array) -> list[jax.Array]:
        drawn = zip(jax.random.split(key), sizes)
        return [jax.random.normal(k, s, jnp.bfloat16) * s[0] ** -0.5 for k, s in drawn]

    def draw_experts(rank: jax.Array) -> list[jax.Array]:  # one by one, to save memory
        key = jax.random.fold_in(jax.random.key(1), rank)
        return lax.map(draw_expert, jax.random.split(key, setting.experts // ranks))

    w_in, w_out = timing.per_rank(draw_experts, mesh)(np.arange(ranks))
    return (x, ids, weights), w_in, w_out


if __name__ == "__main__":
    raise SystemExit(main())
