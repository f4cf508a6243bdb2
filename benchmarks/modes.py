"""What the modes cost, beside what one writes without them: ``python -m benchmarks.modes``.

Replicated tokens beside a sort and gathers in plain JAX, without the sum over ranks, which both
need alike; a shared expert in the exchange beside own tokens that are put in front of the rows and
added behind. Round trips with experts that return their rows, and their backward passes.
Prints a table, and a JSON file with ``--out``. On a CPU the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

AXIS = "ep"
REPS = 16
SAMPLES = 7
CHECKED_TOKENS = 64
TOLERANCE = 2e-2  # of bfloat16, summed in other orders


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modes", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 4096])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file")
    return parser.parse_args(argv)


def round_trips(workload: Any, group: Any) -> dict[str, tuple[bool, Callable[..., Any]]]:
    """By name: whether tokens are replicated, and (x, ids, weights) of one rank -> its sums."""
    import jax.numpy as jnp
    from jax import lax

    import jax_moe_a2a as ma

    from . import methods

    setting = workload.setting
    local_experts = setting.experts // group.size
    options: dict[str, Any] = dict(group=group, num_experts=setting.experts)
    replicated_rows = replicated_capacity(workload)

    # Of all rows at once, as a grouped product wants them: nothing is fused through it.
    experts = lax.optimization_barrier

    def replicated(x: Any, ids: Any, weights: Any) -> Any:
        recv = ma.dispatch(x, ids, weights, replicated=True, capacity=replicated_rows, **options)
        return ma.combine(experts(recv.rows), recv)

    def replicated_plain(x: Any, ids: Any, weights: Any) -> Any:
        local = ids - lax.axis_index(AXIS) * local_experts
        keys = jnp.where((local >= 0) & (local < local_experts), local, local_experts)
        order, place, _ = methods.sort_by_key(keys.ravel(), local_experts, replicated_rows)
        links = methods.Links(order, place.reshape(ids.shape))
        return methods.weighted_sum(experts(methods.spread(x, links)), weights, links)

    def shared(x: Any, ids: Any, weights: Any) -> Any:
        capacity = workload.capacity + len(x)
        recv = ma.dispatch(x, ids, weights, shared_expert=True, capacity=capacity, **options)
        return ma.combine(experts(recv.rows), recv)

    def shared_apart(x: Any, ids: Any, weights: Any) -> Any:
        recv = ma.dispatch(x, ids, weights, capacity=workload.capacity, **options)
        rows = experts(jnp.concatenate([x, recv.rows]))  # of one grouped product
        return rows[: len(x)] + ma.combine(rows[len(x) :], recv)

    return {
        "replicated": (True, replicated),
        "replicated, plain JAX": (True, replicated_plain),
        "shared expert": (False, shared),
        "shared expert apart": (False, shared_apart),
    }


def replicated_capacity(workload: Any) -> int:
    """Rows of the fullest rank, where the tokens of rank 0 are those of all."""
    import numpy as np

    from .workload import CAPACITY_MULTIPLE, round_up

    rank = workload.ids[0] // (workload.setting.experts // workload.ranks)
    return round_up(int(np.bincount(rank.ravel()).max()), CAPACITY_MULTIPLE)


def measure(tokens: int, args: argparse.Namespace, mesh: Any) -> list[dict[str, Any]]:
    """Checks and times all round trips of one number of tokens."""
    import jax
    import numpy as np

    import jax_moe_a2a as ma

    from . import suite, timing
    from .workload import Setting, draw

    setting = Setting(tokens, hidden=args.hidden, top_k=args.top_k, experts=args.experts)
    workload = draw(setting, mesh.size)
    group = ma.Group(mesh, AXIS, timeout=suite.TIMEOUT_SECONDS)
    own = suite.make_inputs(mesh, workload)
    same = jax.tree.map(
        lambda a: jax.device_put(np.stack([np.asarray(a[0])] * mesh.size), a.sharding), own
    )
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    reps = REPS if on_gpu else 1
    rows, last = [], None
    for name, (is_replicated, round_trip) in round_trips(workload, group).items():

        def backward(x: Any, ids: Any, weights: Any, round_trip: Any = round_trip) -> Any:
            out, vjp = jax.vjp(lambda x, w: round_trip(x, ids, w), x, weights)
            return out, *vjp(x)

        inputs = same if is_replicated else own
        results = [
            np.asarray(a[:, :CHECKED_TOKENS], np.float32)
            for a in timing.per_rank(backward, mesh)(*inputs)
        ]
        if name in ("replicated", "shared expert"):
            last = results
        for actual, expected in zip(results, last or results, strict=True):
            error = np.abs(actual - expected).max() / np.abs(expected).max()
            if not error < TOLERANCE:
                raise AssertionError(f"{name} differs from the one before it by {error:.1e}")
        us = {}
        for op, fn in (("round trip", round_trip), ("round trip and backward", backward)):
            repeated = timing.chain(lambda state, fn=fn: fn(*state), reps, None)
            program = timing.per_rank(repeated, mesh).lower(inputs).compile()
            us[op] = round(timing.measure(program, (inputs,), reps, SAMPLES).median_us, 1)
        rows.append(dict(tokens=tokens, name=name, path=group.path, us=us))
        print(f"| {tokens} | {name} | " + " | ".join(f"{value:,}" for value in us.values()) + " |")
    return rows


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    import jax
    import numpy as np
    from jax.sharding import Mesh

    devices = jax.devices()[:4]
    mesh = Mesh(np.array(devices), (AXIS,))
    print(f"{len(devices)} x {devices[0].device_kind}, us on the device, ties included")
    print("| tokens | | round trip | and backward |\n| --- | --- | --- | --- |")
    rows = [row for tokens in args.tokens for row in measure(tokens, args, mesh)]
    if args.out:
        args.out.write_text(json.dumps(dict(device=devices[0].device_kind, rows=rows), indent=1))


if __name__ == "__main__":
    main()
