"""Times dispatch with each token format, rows quantized and decoded, beside one without.

    python -m benchmarks.formats                    # 4096 and 128 tokens on this machine's GPUs
    python -m benchmarks.formats --out record.json

Times are on the device, without the tie of repetitions (see ``timing``). ``ratio`` is to the
dispatch of bfloat16 of the same run, tokens and routing. Before anything is timed, decoded rows are
compared with those of a dispatch of tokens that were encoded and decoded before, bit for bit.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from . import record as records
from .__main__ import FULL, TINY, Setting, describe_run, draw, say, set_platform, start_jax

SWEEP = "formats"


def forms() -> dict[str, dict[str, Any]]:
    """What is timed, by name: the options of ``dispatch``."""
    import jax_moe_a2a as ma

    found: dict[str, dict[str, Any]] = {"bfloat16": {}}
    for fmt in (ma.BlockwiseFp8(), ma.MxFp8(), ma.NvFp4(global_scale=0.002)):
        name = type(fmt).__name__
        found[name] = dict(format=fmt)
        found[f"{name}, decoded"] = dict(format=fmt, decode=True)
    return found


def make_dispatch(options: dict[str, Any]) -> Callable[..., Any]:
    """A dispatch of one rank with such options, of (x, ids or a routing, weights)."""
    import jax_moe_a2a as ma

    def dispatch(x: Any, ids: Any, weights: Any, **static: Any) -> Any:
        recv = ma.dispatch(x, ids, weights, **static, **options)
        return recv.rows, recv.weights, recv.group_sizes

    return dispatch


def check(options: dict[str, Any], run: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Raises AssertionError if decoded rows are not those of tokens that were quantized before."""
    import jax
    import jax.numpy as jnp

    fmt = options["format"]
    rows = run(make_dispatch(options))(*inputs)[0]
    x, *others = inputs
    before = jax.jit(lambda x: fmt.decode(fmt.encode(x), x.dtype))(x)
    expected = run(make_dispatch({}))(before, *others)[0]
    if not bool(jax.jit(jnp.array_equal)(rows, expected)):
        raise AssertionError(f"{options} gives other rows than a dispatch of quantized tokens")


def time_setting(setting: Setting, mesh: Any, samples: int, on_gpu: bool) -> list[dict[str, Any]]:
    """Rows of the record for one setting."""
    import jax
    import jax.numpy as jnp

    import jax_moe_a2a as ma

    from . import suite, timing

    workload = draw(setting, mesh.size)
    group = ma.Group(mesh, suite.AXIS, timeout=suite.TIMEOUT_SECONDS)
    static: dict[str, Any] = dict(
        group=group, num_experts=setting.experts, capacity=workload.capacity
    )
    inputs = suite.make_inputs(mesh, workload)

    def once(dispatch: Callable[..., Any]) -> Callable[..., Any]:
        return timing.per_rank(lambda *args: dispatch(*args, **static), mesh)

    for options in forms().values():
        if options.get("decode"):
            check(options, once, inputs)
    x, ids, weights = inputs
    routing = timing.per_rank(lambda ids: ma.route(ids, **static), mesh)(ids)
    reps = timing.repetitions(10 + 1.2 * workload.busiest_bytes / 340e3) if on_gpu else 1
    sample_seconds = 0.015 if on_gpu else 0.002

    def microseconds(step: Callable[..., Any], state: Any, reps: int) -> float:
        program = timing.per_rank(step, mesh).lower(state).compile()
        return timing.measure(program, (state,), reps, samples, sample_seconds).median_us

    stand_in = jax.device_put(jnp.ones((mesh.size, 1), jnp.bfloat16), x.sharding)
    ties = timing.TIE_REPS if on_gpu else 1
    tie_us = microseconds(timing.chain_of_ties(ties), ([routing.choice_rank], [stand_in] * 3), ties)
    rows: list[dict[str, Any]] = []
    for includes_route, state in ((False, (x, routing, weights)), (True, (x, ids, weights))):
        for name, options in forms().items():
            dispatch = make_dispatch(options)

            def step(state: Any, dispatch: Any = dispatch, routed: bool = includes_route) -> Any:
                return dispatch(*state, **(static if routed else {}))

            us = microseconds(timing.chain(step, reps), state, reps) - tie_us
            base = rows[-1]["bfloat16_us"] if name != "bfloat16" else us
            rows.append(
                dict(
                    sweep=SWEEP,
                    method="ours",
                    op="dispatch",
                    includes_route=includes_route,
                    format=name,
                    tokens=setting.tokens,
                    hidden=setting.hidden,
                    top_k=setting.top_k,
                    experts=setting.experts,
                    capacity=workload.capacity,
                    us=us,
                    tie_us=tie_us,
                    bfloat16_us=base,
                    ratio=us / base,
                )
            )
            route = "with route" if includes_route else "without route"
            say(f"{setting.tokens} tokens, {route}, {name}: {us:.1f} us, {us / base:.2f}")
    return rows


def main(argv: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", help="per rank (default: 4096 128)")
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="the record; default: results/")
    args = parser.parse_args(argv)
    num_gpus = set_platform(args.ranks)
    mesh = start_jax(num_gpus, args.ranks)
    sizes = FULL if num_gpus else dict(TINY, hidden=128)
    record = dict(describe_run(mesh, num_gpus, None), failures=[], rows=[])
    path = args.out
    if path is None and num_gpus:
        path = records.default_path(mesh.size, mesh.devices.flat[0].device_kind, SWEEP)
    for tokens in args.tokens or ((4096, 128) if num_gpus else (16,)):
        record["rows"] += time_setting(Setting(tokens, **sizes), mesh, args.samples, bool(num_gpus))
        if path is not None:
            records.write(record, path)
    if path is not None:
        print(f"record: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
