"""Time whole training steps of slices of real MoE models, with interchangeable MoE layers.

    python -m benchmarks.model                                   on this machine's GPUs
    python -m benchmarks.model --geometries qwen3 --methods moe_mlp all_gather --rows 4096
    python -m benchmarks.model --rows 4096 512 2048 --routing uniform learned --micro-batches 1 8
    python -m benchmarks.model --geometries dsv3 --layers 2 --profile moe_mlp

A step is a forward pass, gradients, clipping and AdamW. The methods differ only in the MoE layer.
``slices.py`` has the models, and ``slice_layers.py`` has the MoE layers. ``--rows`` is the mean
rows per expert in a micro-batch. It determines the tokens of a rank. With ``uniform`` routing, the
expert ids are inputs, and every expert is equally likely. With ``learned`` routing, a router that
was trained for 60 steps chooses them. The first setting has the first values of ``--rows``,
``--routing`` and ``--micro-batches``. Each further setting replaces one of these values.

All methods start from the same state and batches, and their first losses must agree. Then the
methods are timed in turns, in random order, on one state whose weights do not change. After each
turn, the program writes the record.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_moe_a2a as ma

from . import kernels, slices, timing
from . import run as runs
from .report import percent
from .run import Run, say
from .slice_layers import ALONE, EXACT, LAYERS
from .workload import Setting, draw

# Of bfloat16 products without sparsity, by `device_kind`.
PEAK_TFLOPS = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H200": 989}
MEMORY_FRACTION = "0.88"  # our workspaces and NCCL's buffers need the rest
RATE = 3e-4
CHECKED_STEPS = 3
SAMPLES = 7
SAMPLE_SECONDS = 0.6
COMPILE_SECONDS = 240
TURNS_SECONDS = 90  # three turns always run
TRAINED_STEPS = 60
BATCHES = 4
ROUTINGS = ("uniform", "learned")
OURS = ("moe_mlp", "moe_mlp_to_fp8", "local")
TINY_ROWS = 16
# A new row replaces an old row of the record if both have equal entries for these keys.
KEYS = ("geometry", "layers", "rows", "routing", "micro_batches", "method")
ON_GPU = ("mosaic", "ragged32")


class Step(NamedTuple):
    geometry: str
    rows: int
    """The mean rows per expert in a micro-batch."""
    routing: str
    micro_batches: int

    def __str__(self) -> str:
        parts = f"{self.rows} rows per expert", self.routing, f"{self.micro_batches} micro-batches"
        return ", ".join((self.geometry, *parts))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = runs.make_parser("benchmarks.model", __doc__)
    geometries, methods = tuple(slices.GEOMETRIES), tuple(LAYERS)
    parser.add_argument("--geometries", nargs="+", choices=geometries, default=geometries[:2])
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--rows", nargs="+", type=int, default=(4096,), help="per expert")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=ROUTINGS[:1])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=(1,))
    parser.add_argument("--layers", type=int, help="of a slice; default: what fits into 80 GiB")
    parser.add_argument(
        "--append", type=pathlib.Path, help="begin with the rows of this record, of the same GPUs"
    )
    parser.add_argument(
        "--profile", nargs="+", choices=methods, default=(), help="list their kernels"
    )
    return parser.parse_args(argv)


def steps(args: argparse.Namespace) -> list[Step]:
    first = args.rows[0], args.routing[0], args.micro_batches[0]
    varied = [first]
    varied += [(first[0], routing, first[2]) for routing in args.routing[1:]]
    varied += [(rows, *first[1:]) for rows in args.rows[1:]]
    varied += [(*first[:2], number) for number in args.micro_batches[1:]]
    first_of_all = [Step(name, *first) for name in args.geometries]
    return first_of_all + [Step(name, *v) for name in args.geometries for v in varied[1:]]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    num_gpus = runs.set_platform(args.ranks)
    run = runs.open_run(args, num_gpus, ["model"], "model", SAMPLES if num_gpus else 1)
    mesh = Mesh(run.mesh.devices[:, None], ("ep", ALONE))
    run = dataclasses.replace(run, mesh=mesh, sample_seconds=SAMPLE_SECONDS if num_gpus else 0)
    if args.append:
        old = json.loads(args.append.read_text())
        if old["gpus"] != run.record["gpus"]:
            raise SystemExit(
                f"--append must name a record of {run.record['gpus']}; got one of {old['gpus']}"
            )
        run.record["rows"] += old["rows"]
    longest = 0.0
    for step in steps(args):
        start = time.perf_counter()
        if start + 0.7 * longest > run.deadline:
            say(f"not run, because too little of the time budget is left: {step}")
            continue
        with run.attempt(str(step)):
            bench = Bench(run, args, step)
            bench.compile_all()
            bench.measure()
        longest = max(longest, time.perf_counter() - start)
    return runs.finish(run.record, run.path, not args.no_plot)


class Bench:
    def __init__(self, run: Run, args: argparse.Namespace, step: Step):
        self.run, self.args, self.step = run, args, step
        g, rows = slices.GEOMETRIES[step.geometry], step.rows
        if args.layers:
            g = dataclasses.replace(g, layers=args.layers)
        if not run.on_gpu:
            g, rows = slices.tiny(g), min(rows, TINY_ROWS)
        tokens = g.tokens(rows, run.mesh.size)
        self.length = min(g.length, tokens)
        self.g, self.tokens = g, tokens // self.length * self.length
        self.methods = [m for m in args.methods if run.on_gpu or m not in ON_GPU]
        if g.hidden % ma.BlockwiseFp8.group_size:  # GPT-OSS
            self.methods = [m for m in self.methods if m != "moe_mlp_to_fp8"]
        self.programs: dict[str, Any] = {}

        place = lambda *axes: NamedSharding(run.mesh, PartitionSpec(*axes))
        self.shardings = slices.shardings(g, run.mesh)
        init = jax.jit(slices.init, static_argnums=0, out_shardings=self.shardings)
        self.init = functools.partial(init, g)
        self.placed = (self.shardings, place(None, "ep"), place("ep"), place())

    def compile_all(self) -> None:
        g, step, ranks = self.g, self.step, self.run.mesh.size
        setting = Setting(self.tokens, g.hidden, g.top_k, g.experts, capacity="worst")
        self.workload = draw(setting, ranks)
        sequences = ranks * self.tokens // self.length
        shape = step.micro_batches, sequences, self.length + 1
        self.batches = slices.batches(g, shape, BATCHES)
        self.given = self.workload.ids.reshape(sequences, self.length, g.top_k)
        self.given = self.given if step.routing == "uniform" else None
        say(f"{step}: {g.layers} layers, {self.tokens} tokens a rank; compiling")
        futures, deadline = {}, time.perf_counter() + COMPILE_SECONDS
        for method in self.methods:
            with self.run.attempt(f"{step}, {method}: tracing"):
                futures[method] = self.run.pool.submit(self.lower(method).compile)
        for method, future in futures.items():
            with self.run.attempt(f"{step}, {method}: compiling"):
                self.programs[method] = future.result(max(1, deadline - time.perf_counter()))

    def lower(self, method: str) -> Any:
        layer, g = LAYERS[method], self.g
        attention = "cudnn" if self.run.on_gpu else "xla"
        quantize = layer.quantize if self.step.micro_batches > 1 else None
        moe = layer.make(self.workload)
        model = slices.Model(g, self.run.mesh, moe, attention, quantize)
        state = jax.eval_shape(functools.partial(slices.init, g))
        outs = self.shardings, None
        jitted = jax.jit(model.step, donate_argnums=0, in_shardings=self.placed, out_shardings=outs)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            # jax.nn.dot_product_attention promotes implicitly.
            return jitted.lower(state, self.batches[0], self.given, rate)

    def measure(self) -> None:
        say(f"{self.step}: comparing losses")
        _, *more = self.placed
        put = lambda a, sharding: None if a is None else jax.device_put(a, sharding)
        self.data = [put(batch, more[0]) for batch in self.batches]
        self.inputs = put(self.given, more[1])
        self.rates = [jax.device_put(np.float32(rate), more[2]) for rate in (RATE, 0)]
        rows: dict[str, dict[str, Any]] = {}
        reference = None
        is_exact = lambda method: LAYERS[method].tolerance == EXACT  # no FP8, drops or bounds
        for method in sorted(self.programs, key=lambda m: (m != "all_gather", not is_exact(m))):
            with self.run.attempt(f"{self.step}, {method}"):
                rows[method] = self.check(method, reference)
                reference = reference or (rows[method] if is_exact(method) else None)
        if not rows:
            return
        self.state = None
        self.state = self.init()
        trainer = "moe_mlp" if "moe_mlp" in rows else next(iter(rows))
        train = TRAINED_STEPS if self.run.on_gpu else 2
        for i in range(train if self.step.routing == "learned" else 1):
            self.advance(self.programs[trainer], i, self.rates[0])
        _, counts = jax.device_get(self.advance(self.programs[trainer], 0, self.rates[1])[1:])
        of_ranks = counts.reshape(len(counts), self.run.mesh.size, -1).sum(-1)
        load = [round(float(x), 3) for x in of_ranks.max(1) / of_ranks.mean(1)]
        self.take_turns(rows, dict(load=round(float(np.mean(load)), 3), most_load=max(load)))
        for method in set(self.args.profile) & rows.keys():
            with self.run.attempt(f"{self.step}, {method}: profile"):
                self.list_kernels(method)

    def advance(self, program: Any, i: int, rate: Any) -> Any:
        state, results = program(self.state, self.data[i % len(self.data)], self.inputs, rate)
        self.state = state
        return results

    def check(self, method: str, reference: Any) -> dict[str, Any]:
        """Return a row without times. Raise AssertionError if the losses differ too much from
        ``reference``."""
        program, layer = self.programs[method], LAYERS[method]
        self.state = None  # frees memory
        self.state = self.init()
        results = [self.advance(program, i, self.rates[0]) for i in range(CHECKED_STEPS)]
        nats, dropped = zip(*(jax.device_get(r[:2]) for r in results))
        losses = [round(float(x), 5) for x in nats]
        say(f"{method:15} losses {losses}")
        if reference and layer.tolerance:
            worst = max(abs(a - b) for a, b in zip(losses, reference["losses"]))
            if not worst <= layer.tolerance:
                raise AssertionError(
                    f"losses must be within {layer.tolerance:g} of those of "
                    f"{reference['method']}, {reference['losses']}; got {losses}"
                )
        g, step = self.g, self.step
        return dict(
            **dict(op="step", method=method, sweep="model", geometry=step.geometry, title=g.title),
            **dict(layers=g.layers, of_layers=g.of_layers, tokens=self.tokens, hidden=g.hidden),
            **dict(experts=g.experts, top_k=g.top_k, rows=step.rows, routing=step.routing),
            **dict(micro_batches=step.micro_batches, losses=losses, dropped=int(max(dropped))),
            **dict(is_bound=layer.tolerance is None, **self.memory(method, program)),
        )

    def memory(self, method: str, program: Any) -> dict[str, float]:
        """Return GiB of one GPU, with our workspace."""
        stats, g = program.memory_analysis(), self.g
        used = stats.argument_size_in_bytes + stats.output_size_in_bytes
        used += stats.temp_size_in_bytes - stats.alias_size_in_bytes
        sizes = dict(num_tokens=self.tokens, top_k=g.top_k, num_experts=g.experts)
        if method in OURS:
            ranks = 1 if method == "local" else self.run.mesh.size
            estimate = ma.memory_estimate(hidden=g.hidden, group_size=ranks, **sizes)
            used += estimate.workspace_bytes
        return dict(peak_gib=round(used / 2**30, 2))

    def take_turns(self, rows: dict[str, dict[str, Any]], more: dict[str, Any]) -> None:
        samplers = {method: self.sampler(self.programs[method]) for method in rows}
        taken: dict[str, list[float]] = {method: [] for method in samplers}
        orders, start = random.Random(0), time.perf_counter()
        for turn in range(self.run.samples):
            now = time.perf_counter()
            if (turn and now > self.run.deadline) or (turn >= 3 and now > start + TURNS_SECONDS):
                say(f"ends after {turn} turns, because its time is spent")
                break
            for method in orders.sample(list(samplers), len(samplers)):
                taken[method].append(samplers[method]())
            for method, us in taken.items():
                rows[method] |= timing.Timing.of(us).row() | dict(samples=len(us)) | more
            for row in rows.values():
                row |= self.figures(row, rows.get("local"))
            is_new = lambda old: any(all(old[k] == row[k] for k in KEYS) for row in rows.values())
            kept = [old for old in self.run.record["rows"] if not is_new(old)]
            self.run.record["rows"][:] = [*kept, *rows.values()]
            self.run.save()
        for row in rows.values():
            mfu = percent(row["mfu"])
            say(f"{runs.in_words(row)}  {row['tokens_per_s']:,.0f} tokens/s, MFU {mfu}")

    def sampler(self, program: Any) -> Callable[[], float]:
        def seconds(number: int) -> float:
            start = time.perf_counter()
            for i in range(number):
                self.advance(program, i, self.rates[1])
            jax.block_until_ready(self.state)
            return time.perf_counter() - start

        seconds(1)
        number = max(1, round(self.run.sample_seconds / seconds(1)))

        def sample_us() -> float:
            if number > 1:
                seconds(1)  # a warm-up
            return seconds(number) / number * 1e6

        return sample_us

    def figures(self, row: dict[str, Any], bound: dict[str, Any] | None) -> dict[str, Any]:
        seconds, layer = row["us"] / 1e6, LAYERS[row["method"]]
        everything, of_experts = slices.flops(self.g, self.length)
        tokens_per_s = self.tokens * self.step.micro_batches / seconds
        tflops = tokens_per_s * (everything - of_experts * (row["method"] == "none")) / 1e12
        has_exchange = bound is not None and layer.has_our_products and not row["is_bound"]
        exposed = round(row["us"] - bound["us"], 1) if bound and has_exchange else None
        return dict(
            **dict(tokens_per_s=round(tokens_per_s), tflops=round(tflops, 2), exposed_us=exposed),
            mfu=mfu_of(tflops, self.run.mesh.devices.flat[0].device_kind),
        )

    def list_kernels(self, method: str) -> None:
        program = self.programs[method]
        step = lambda: jax.block_until_ready(self.advance(program, 0, self.rates[1]))
        text = f"{self.step}, {method}\n{kernels.in_words(kernels.kernels_of(step))}"
        print(text, flush=True)
        if self.run.path is not None:
            what = f"kernels-{self.step.geometry}-{self.step.rows}-{method}"
            self.run.path.with_name(f"{self.run.path.stem}-{what}.txt").write_text(text)


def mfu_of(tflops: float, device_kind: str) -> float | None:
    """Return the share of the GPU's peak, or None if the peak is not known."""
    peak = PEAK_TFLOPS.get(device_kind)
    return round(tflops / peak, 4) if peak else None


if __name__ == "__main__":
    raise SystemExit(main())
