"""Time models with our exchange and with our own versions of the exchanges that it replaces.

    python -m benchmarks.integrations            # the figures of docs/integrations

A model has a few blocks of a router, experts and a residual. Its program computes the loss and all
gradients (sglang-jax: the outputs). Compilations and steps of both kinds take turns, so that other
work on the machine meets both alike; the table has medians, and the range of the middle half.
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import argparse
import datetime
import functools
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_moe_a2a.integrations import grug, sglang_jax

from . import reference_layers, timing

RANKS, EXPERTS, TOP_K, BLOCKS = 4, 16, 4, 2


def choose(logits):
    top_logits, ids = lax.top_k(logits, TOP_K)
    return jax.nn.softmax(top_logits, axis=-1), ids


def grug_layer(experts):
    experts = functools.partial(
        experts, activation_fn=jax.nn.silu, num_experts=EXPERTS, capacity_factor=1.5
    )

    def layer(x, logits, w_in, w_out):
        weights, ids = choose(logits)
        return experts(x, ids, weights, jnp.ones(len(x), bool), w_in, w_out)[0]

    return layer


def sglang_layer(experts):
    def layer(x, logits, w_in, w_out):
        return experts(x, *choose(logits), *jnp.split(w_in, 2, axis=-1), w_out)

    return layer


PAIRS = {  # ours, the reference, and whether tokens are split over the ranks
    "Grug": (grug_layer(grug.moe_mlp), grug_layer(reference_layers.ring), True),
    "sglang-jax": (
        sglang_layer(sglang_jax.ep_moe),
        sglang_layer(reference_layers.ep_moe),
        False,
    ),
}


def program_of(layer, mesh, is_split):
    """Return a jitted function of x, the routers [blocks, ...] and the experts' weights."""
    tokens = P("expert") if is_split else P()
    experts = P(None, "expert")

    def on_rank(x, routers, w_in, w_out):
        for router, *w in zip(routers, w_in, w_out):
            x = x + layer(x, x @ router, *w)
        return x

    specs = tokens, P(), experts, experts
    model = jax.shard_map(on_rank, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    if not is_split:
        return jax.jit(model)
    return jax.jit(jax.value_and_grad(lambda *args: jnp.mean(jnp.sin(model(*args))), (0, 1, 2, 3)))


def arguments(mesh, is_split, tokens, hidden, width):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (
        (tokens * (RANKS if is_split else 1), hidden),
        (BLOCKS, hidden, EXPERTS),
        (BLOCKS, EXPERTS, hidden, 2 * width),
        (BLOCKS, EXPERTS, width, hidden),
    )
    specs = P("expert") if is_split else P(), P(), P(None, "expert"), P(None, "expert")
    return [
        jax.device_put(jax.random.normal(key, shape) * shape[-1] ** -0.5, NamedSharding(mesh, spec))
        for key, shape, spec in zip(keys, shapes, specs)
    ]


def seconds(fn):
    start = time.perf_counter()
    result = fn()
    return time.perf_counter() - start, result


def median_and_middle_half(samples, scale=1.0):
    low, middle, high = (scale * s for s in statistics.quantiles(samples, n=4))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def check(results):
    """Raise an error unless the exchanges compute the same."""
    ours, theirs = (jax.tree.leaves(jax.device_get(result)) for result in results)
    for a, b in zip(ours, theirs):
        assert abs(a - b).max() <= 1e-4 * abs(b).max()


def main(options=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="of each rank")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--width", type=int, default=64, help="of an expert")
    parser.add_argument("--compilations", type=int, default=7)
    parser.add_argument("--steps", type=int, default=51)
    args = parser.parse_args(options)
    axes = dict(axis_names=("expert", "tensor"), axis_types=(AxisType.Auto,) * 2)
    mesh = jax.make_mesh((RANKS, 1), devices=jax.devices()[:RANKS], **axes)
    print(
        f"{datetime.date.today()}, jax {jax.__version__}, {os.cpu_count()} CPU cores, {RANKS} "
        f"virtual devices; {args.tokens} tokens per rank, hidden {args.hidden}, width {args.width},"
        f" top-{TOP_K} of {EXPERTS} experts, {BLOCKS} blocks, float32\n"
        "| | exchange | trace and compile, s | step, ms |\n| --- | --- | --- | --- |"
    )
    for name, (*layers, is_split) in PAIRS.items():
        inputs = arguments(mesh, is_split, args.tokens, args.hidden, args.width)
        programs = [None, None]

        def compile_anew(i):
            jax.clear_caches()
            lowering = lambda: program_of(layers[i], mesh, is_split).lower(*inputs)
            taken, programs[i] = seconds(lambda: lowering().compile())
            return taken

        def step(i):
            return seconds(lambda: jax.block_until_ready(programs[i](*inputs)))[0]

        turns = lambda fn, samples: timing.take_turns(
            {i: functools.partial(fn, i) for i in (0, 1)}, samples
        )
        compiles = turns(compile_anew, args.compilations)
        check([program(*inputs) for program in programs])
        turns(step, 2)
        steps = turns(step, args.steps)
        for i, kind in enumerate(("this package", "reference")):
            times = median_and_middle_half(compiles[i]), median_and_middle_half(steps[i], 1e3)
            print(f"| {name} | {kind} | {times[0]} | {times[1]} |", flush=True)


if __name__ == "__main__":
    main()
