"""Trace a layer with gradients, and draw when each GPU runs which kernel.

    python -m benchmarks.timeline --out timeline.png           Qwen3-30B-A3B's layer, 4,096 tokens
    python -m benchmarks.timeline --graphs off --hidden 7168   without CUDA graphs

docs/profile.md explains the picture.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jax_moe_a2a as ma

from .kernels import KINDS, kind_of, launches_of

SIZES = dict(hidden=2048, expert_hidden=768, experts=128, top_k=8, tokens=4096)
COLORS = dict(zip(KINDS, ("C1", "C2", "C3", "C4", "C0", "C5", "C7", "C9")))
LABELLED = 0.03  # a bar of at least this share of the width has a name


class Launch(NamedTuple):
    """A kernel on the timeline."""

    gpu: str
    kind: str
    name: str
    scope: str
    start: float
    us: float


def main() -> None:
    """Draw the timeline of one call on all GPUs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--graphs", choices=("on", "off"), default="on", help="CUDA graphs")
    parser.add_argument("--out", type=pathlib.Path, default="timeline.png")
    args = parser.parse_args()
    if args.graphs == "off":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer="
    launches = last_launches(layer(args))
    draw(launches, args.out)
    print(f"{len(launches)} kernels, {args.out}")
    for launch in launches:
        if launch.gpu == launches[0].gpu:
            print(f"{launch.start:9.1f} {launch.us:8.1f} us  {launch.name[:60]:60} {launch.scope}")


def layer(args: argparse.Namespace) -> Callable[[], None]:
    """Return a compiled layer with gradients, as a function without arguments."""
    mesh = jax.make_mesh((jax.device_count(),), ("ep",))
    choose = ma.TopK(args.top_k)
    config = ma.MoEConfig(args.hidden, args.expert_hidden, args.experts, choose=choose)
    exchange = ma.Exchange(capacity_factor=1.5)
    with jax.set_mesh(mesh):
        params = ma.init_moe(jax.random.key(0), config, "ep")
        params["experts"] = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params["experts"])
        shape = jax.device_count(), args.tokens, args.hidden
        x = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("ep")))

    @jax.jit
    def gradients(params: Any, x: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            y, stats = ma.moe(x, **params, axes="ep", exchange=exchange)
            return (y.astype(jnp.float32) ** 2).mean() + 0.01 * stats.balance_loss

        return jax.grad(loss, argnums=(0, 1))(params, x)

    def call() -> None:
        with jax.set_mesh(mesh):
            jax.block_until_ready(gradients(params, x))

    return call


def last_launches(call: Callable[[], None]) -> list[Launch]:
    """Run a call four times, and return the kernels of the last call in the order of their start.
    GPU names are short, and times are in µs."""
    call(), call()
    found = sorted(launches_of(lambda: (call(), call())), key=lambda launch: launch[1])
    found = found[len(found) // 2 :]
    return [
        Launch(
            gpu[len("/device:") :], kind_of(name), name, of, (start - found[0][1]) / 1e3, ns / 1e3
        )
        for gpu, start, ns, name, of in found
    ]


def draw(launches: list[Launch], out: pathlib.Path) -> None:
    """Draw a line of bars for each GPU, in the colors of kinds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    gpus = sorted({launch.gpu for launch in launches})
    width = max(launch.start + launch.us for launch in launches)
    figure, axis = plt.subplots(figsize=(14, 1.2 + 0.9 * len(gpus)), layout="constrained")
    for launch in launches:
        y = gpus.index(launch.gpu)
        axis.barh(y, launch.us, left=launch.start, height=0.7, color=COLORS[launch.kind])
        if launch.us > LABELLED * width:
            ours = re.search(r"moe_a2a::(?:\w+::)*(\w+)", launch.name)
            text = ours[1] if ours else launch.kind
            axis.text(launch.start + launch.us / 2, y, text, fontsize=7, ha="center", va="center")
    kinds = [kind for kind in KINDS if any(launch.kind == kind for launch in launches)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[kind]) for kind in kinds]
    axis.legend(
        handles, kinds, ncols=len(kinds), fontsize=8, loc="lower left", bbox_to_anchor=(0, 1)
    )
    axis.set_yticks(range(len(gpus)), gpus)
    axis.invert_yaxis()
    axis.set_xlabel("µs")
    figure.savefig(out, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
