"""Time the stages of a MoE layer in separate programs, for ``python -m benchmarks.layer --stages``.
Decode is a program of several ``ma.moe`` layers with residuals."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_moe_a2a as ma
from jax_moe_a2a._src.layer.logits import router_logits

from . import experts, timing
from . import run as runs
from .run import Run, say
from .workload import LAYERS

TITLES = {"qwen3-30b": "Qwen3-30B-A3B", "deepseek-v3": "DeepSeek-V3"}
CHOOSE = {"deepseek-v3": ma.TopK(8, score="sigmoid", num_groups=8, top_groups=4, scale=2.5)}
TOKENS, DECODE_TOKENS = (4096, 128), (1, 8, 32, 128)
DECODE_LAYERS = 16
SAMPLES = 7
MLP, MOE = "`ma.moe_mlp`: exchange and experts", "`ma.moe`: the whole layer"
DECODE = "decode"
READ = f"{MOE}, statistics read"
_KERNEL = re.compile(r"\} (?:fusion|custom-call|copy|sort)\(|\) (?:fusion|custom-call)\(")


def main(args: argparse.Namespace) -> int:
    num_gpus = runs.set_platform(args.ranks)
    run = runs.open_run(args, num_gpus, ["stages"], "stages", SAMPLES if num_gpus else 1)
    shapes = [shape for shape in args.shapes if shape in TITLES] or list(TITLES)
    with jax.set_mesh(run.mesh):
        for shape in shapes:
            for tokens in args.tokens or sorted({*TOKENS, *DECODE_TOKENS}, reverse=True):
                with run.attempt(f"{shape}, {tokens} tokens"):
                    Layer(run, shape, tokens).measure(args.only)
    return runs.finish(run.record, run.path, not args.no_plot)


class Layer:
    def __init__(self, run: Run, shape: str, tokens: int):
        setting, intermediate = LAYERS[shape]
        sizes = setting.hidden, intermediate, setting.experts
        num_tokens = tokens * run.mesh.size
        if not run.on_gpu:
            num_tokens, sizes = min(num_tokens, 32), (128, 128, 32)
        choose = CHOOSE.get(shape, ma.TopK(setting.top_k))
        config = ma.MoEConfig(*sizes, choose, dtype=jnp.bfloat16)
        self.run, self.title, self.tokens, self.experts = run, TITLES[shape], tokens, sizes[2]
        self.params = ma.init_moe(jax.random.key(0), config, axes="ep")
        if choose.score == "sigmoid":
            bias = jnp.zeros(self.experts, jnp.float32)
            self.params["router"] = self.params["router"].replace(select_bias=bias)
        place = NamedSharding(run.mesh, P("ep"))
        draw = functools.partial(jax.random.normal, shape=(num_tokens, sizes[0]))
        self.x = jax.jit(draw, out_shardings=place)(jax.random.key(1)).astype(jnp.bfloat16)

    def measure(self, only: str | None) -> None:
        started: dict[tuple[str, str], tuple[Any, tuple[Any, ...], int]] = {}

        def start(panel: str, stage: str, program: Any, args: tuple[Any, ...], reps: int) -> None:
            with self.run.attempt(f"{self.title}, {self.tokens} tokens, {panel}, {stage}"):
                compiling = self.run.compile(jax.jit(program).lower(*args))
                started[panel, stage] = compiling, args, reps

        say(f"{self.title}, {self.tokens} tokens")
        if self.tokens in TOKENS and only != "decode":
            self.start_stages(start)
        if self.tokens in DECODE_TOKENS and only != "training":
            self.start_decode(start)
        self.run.wait()
        samplers, kernels = {}, {}
        for (panel, stage), (compiling, args, reps) in started.items():
            with self.run.attempt(f"{self.title}, {self.tokens} tokens, {panel}, {stage}"):
                self.run.check_time()
                compiled = compiling.result()
                samplers[panel, stage] = timing.sampler(
                    compiled, args, reps, self.run.sample_seconds
                )
                num_layers = reps if panel.startswith(DECODE) else 1
                kernels[panel, stage] = len(_KERNEL.findall(compiled.as_text())) / num_layers
        taken = timing.take_turns(samplers, self.run.samples)
        for (panel, stage), samples in taken.items():
            self.run.add(
                dict(
                    op=stage,
                    method="ours",
                    sweep="stages",
                    title=self.title,
                    panel=panel,
                    tokens_per_gpu=self.tokens,
                    kernels=round(kernels[panel, stage], 1),
                    **timing.Timing.of(samples).row(),
                )
            )

    def start_stages(self, start: Callable[..., None]) -> None:
        router, weights = self.params["router"], self.params["experts"]
        options: dict[str, Any] = dict(group="ep", num_experts=self.experts)

        def logits(a: Any) -> Any:
            return router_logits(a["x"], a["router"].kernel, a["router"].bias)

        def choice(a: Any) -> Any:
            return router.choose(a["logits"], select_bias=a["router"].select_bias)[:2]

        def both(a: Any) -> Any:
            return router.choose(logits(a), select_bias=a["router"].select_bias)

        def moe_mlp(a: Any) -> Any:
            choices = ma.RouterChoices(a["ids"], a["weights"])
            return ma.moe_mlp(a["x"], choices, a["experts"], **options)

        def products(a: Any) -> Any:
            made = a["experts"]
            return experts.fused(a["recv"].rows, made.w_in, made.w_out, a["recv"].group_sizes)

        def prepare(x: Any, router: Any, made: Any) -> Any:
            a = dict(x=x, router=router, experts=made)
            a["logits"] = logits(a)
            a["ids"], a["weights"] = choice(a)
            a["routing"] = ma.route(a["ids"], **options)
            a["recv"] = ma.dispatch(x, a["routing"], tail="unspecified")
            return a

        stages: dict[str, Callable[[Any], Any]] = {
            "logits of the router": logits,
            "choice of experts": choice,
            "route": lambda a: ma.route(a["ids"], **options),
            "dispatch": lambda a: ma.dispatch(a["x"], a["routing"], tail="unspecified").rows,
            "experts (two products)": products,
            "combine": lambda a: ma.combine(a["recv"].rows, a["recv"]),
            MLP: moe_mlp,
        }
        gradients = {
            "router (logits, choice)": (lambda a: both(a).weights, ("x", "router")),
            MLP: (moe_mlp, ("x", "weights", "experts")),
        }
        mesh, is_small = self.run.mesh, self.tokens < max(TOKENS)
        in_specs = P("ep"), P(), P("ep")
        on_ranks = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        lead = lambda fn: lambda *args: jax.tree.map(lambda leaf: leaf[None], fn(*args))
        prepared = jax.jit(on_ranks(lead(prepare), in_specs=in_specs, out_specs=P("ep")))
        args = (prepared(self.x, router, weights),)
        reps = 32 if is_small else 4
        panel = f"forward, {self.tokens:,} tokens per GPU"
        for stage, fn in stages.items():
            start(panel, stage, self.looped_on_ranks(fn, reps), args, reps)
        of_moe = {MOE: False, READ: True}
        for stage, read in of_moe.items():
            step = functools.partial(results_of_moe, read)
            start(panel, stage, self.looped(step, reps), (self.x, self.params), reps)
        if is_small:
            return
        panel = f"forward and gradients, {self.tokens:,} tokens per GPU"
        for stage, (fn, names) in gradients.items():
            step = functools.partial(gradients_of, fn, names)
            start(panel, stage, self.looped_on_ranks(step, 2), args, 2)
        for stage, read in of_moe.items():
            step = functools.partial(gradients_of_moe, read)
            start(panel, stage, self.looped(step, 2), (self.x, self.params), 2)

    def start_decode(self, start: Callable[..., None]) -> None:
        def layers(x: Any, params: Any) -> Any:
            for _ in range(DECODE_LAYERS if self.run.on_gpu else 1):
                x += ma.moe(x, **params, axes="ep")[0]
            return x

        panel = f"{DECODE}: ma.moe with its router, a layer of {DECODE_LAYERS} in one program"
        quantize = jax.shard_map(
            ma.quantize_experts, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
        )
        fp8 = self.params | dict(experts=jax.jit(quantize)(self.params["experts"]))
        reps = DECODE_LAYERS if self.run.on_gpu else 1
        words = f"{self.tokens} tokens per GPU" if self.tokens > 1 else "1 token per GPU"
        start(panel, f"{words}, bfloat16", layers, (self.x, self.params), reps)
        start(panel, f"{words}, weights in FP8", layers, (self.x, fp8), reps)

    def looped(self, step: Callable[..., Any], reps: int) -> Callable[..., Any]:
        ranks = self.run.mesh.size
        spec_of = lambda leaf: P("ep") if leaf.ndim and leaf.shape[0] % ranks == 0 else P()

        def program(*args: Any) -> Any:
            def add(place: Any, leaves: Any) -> Any:
                specs = P("ep"), [spec_of(leaf) for leaf in leaves]
                tie = jax.shard_map(tied, in_specs=specs, out_specs=P("ep"), check_vma=False)
                return tie(place, leaves)

            place = lax.with_sharding_constraint(
                jnp.zeros(ranks, jnp.int32), NamedSharding(self.run.mesh, P("ep"))
            )
            return loop(step, reps if self.run.on_gpu else 1, args, place, add)

        return program

    def looped_on_ranks(self, step: Callable[..., Any], reps: int) -> Callable[..., Any]:
        """Return a program whose arguments have a leading rank axis."""

        def program(args: Any) -> Any:
            own = jax.tree.map(lambda leaf: leaf[0], args)
            place = jnp.zeros(1, jnp.int32)
            return loop(step, reps if self.run.on_gpu else 1, (own,), place, tied)

        return jax.shard_map(
            program, mesh=self.run.mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
        )


def loop(
    step: Callable[..., Any], reps: int, args: Any, place: jax.Array, add: Callable[..., Any]
) -> jax.Array:
    """Repeat ``step(*args)``. ``add(place, results)`` must return ``place`` unchanged, but in a way
    that XLA does not recognize."""

    def body(_: Any, place: jax.Array) -> jax.Array:
        # XLA could otherwise move work out of the loop, or skip results.
        now, place = lax.optimization_barrier((args, place))
        return add(place, lax.optimization_barrier(jax.tree.leaves(step(*now))))

    return lax.fori_loop(0, reps, body, place)


def tied(place: jax.Array, results: list[jax.Array]) -> jax.Array:
    """Return ``place`` unchanged, but only after the results are computed."""
    return timing.tie([place], [0], [leaf for leaf in results if leaf.size])[0]


def gradients_of(fn: Callable[..., Any], names: tuple[str, ...], a: Any) -> Any:
    """Return ``fn(a)``, and gradients for the arrays ``a[name]``."""
    out, pullback = jax.vjp(lambda some: fn(a | some), {name: a[name] for name in names})
    return out, pullback(jax.tree.map(jnp.ones_like, out))


def results_of_moe(read: bool, x: Any, params: Any) -> Any:
    """Return the output and, if ``read``, the statistics."""
    y, stats = ma.moe(x, **params, axes="ep")
    return (y, stats.balance_loss + stats.z_loss, stats.load) if read else (y,)


def gradients_of_moe(read: bool, x: Any, params: Any) -> Any:
    def results(x: Any, params: Any) -> Any:
        found = results_of_moe(read, x, params)
        return found[:2], found[2:]

    out, pullback, load = jax.vjp(results, x, params, has_aux=True)
    return out, load, pullback(jax.tree.map(jnp.ones_like, out))
