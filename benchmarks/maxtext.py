"""Time MaxText's train step, with MaxText's MoE layers and with the layers of ``enable``.

    python -m benchmarks.maxtext --out maxtext.json               on this machine's GPUs
    python -m benchmarks.maxtext --geometries qwen3 --settings enable fsdp_tokamax
    python -m benchmarks.maxtext --ranks 4                        tiny sizes on CPU devices

MaxText and the packages that it imports must be on Python's path. Each setting of a geometry runs
in a separate process with a time limit. An error, a lack of memory or a deadlock therefore ends
only one setting, and the row of this setting has the error. All settings of a geometry start from
the same seed, and each step reads the same batch. Each row contains MaxText's options.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax

from jax_moe_a2a.integrations import maxtext

from . import maxtext_program, record

MEMORY_FRACTION = "0.85"  # our workspaces and NCCL's buffers need the rest
WARMUP = 3

SPARSE = dict(sparse_matmul=True, megablox=False)
TOKAMAX = dict(SPARSE, use_tokamax_gmm=True)
DENSE = dict(sparse_matmul=False, megablox=False, capacity_factor=1.25)
TRANSFORMER_ENGINE = dict(SPARSE, te_moe_block=True, te_gmm_quantization="te_no_quant")
# (True for expert parallelism, argument of `enable` or None, options of MaxText)
SETTINGS: dict[str, tuple[bool, str | None, dict[str, Any]]] = {
    "enable": (True, "", SPARSE),
    "enable_fp8": (True, "fp8", SPARSE),
    "fsdp_tokamax": (False, None, TOKAMAX),
    "fsdp_tokamax_tuned": (False, None, TOKAMAX),
    "dense_capacity_1.25": (True, None, DENSE),
    "ring_tokamax": (True, None, dict(TOKAMAX, use_ring_of_experts=True)),
    "ragged_all_to_all_tokamax": (True, None, TOKAMAX),
    "transformer_engine": (True, None, TRANSFORMER_ENGINE),
}
GEOMETRIES: dict[str, dict[str, Any]] = {
    "qwen3": dict(model_name="qwen3-30b-a3b", base_num_decoder_layers=8, vocab_size=25600),
    "mixtral": dict(model_name="mixtral-8x7b", base_num_decoder_layers=2, vocab_size=4096),
}
COMMON: dict[str, Any] = dict(
    per_device_batch_size=4,
    max_target_length=4096,
    dtype="bfloat16",
    weight_dtype="float32",
    remat_policy="full",
    scan_layers=True,
    learning_rate=3e-4,
    learning_rate_schedule_steps=1000,
    warmup_steps_fraction=0.002,
    load_balance_loss_weight=0.01,
)
TINY: dict[str, Any] = dict(
    base_emb_dim=128,
    base_num_query_heads=4,
    base_num_kv_heads=2,
    head_dim=32,
    base_mlp_dim=128,
    base_moe_mlp_dim=128,
    base_num_decoder_layers=2,
    vocab_size=256,
    per_device_batch_size=1,
    max_target_length=64,
    num_experts=8,
    num_experts_per_tok=2,
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.maxtext",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--geometries", nargs="+", choices=GEOMETRIES, default=list(GEOMETRIES))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a setting")
    parser.add_argument("--limit", type=float, default=180, help="seconds of a setting")
    parser.add_argument("--budget", type=float, default=3600, help="seconds of all settings")
    parser.add_argument("--ranks", type=int, help="tiny sizes on virtual CPU devices")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("maxtext.json"))
    parser.add_argument("--only", nargs=2, metavar=("GEOMETRY", "SETTING"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.only:
        return measure_one(args)
    deadline = time.monotonic() + args.budget
    command = " ".join(["python -m benchmarks.maxtext", *(argv or sys.argv[1:])])
    head: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for geometry in args.geometries:
        for setting in args.settings:
            seconds = min(args.limit, deadline - time.monotonic())
            found, row = in_own_process(args, geometry, setting, seconds)
            head = head or found
            rows.append(row)
            print(describe(row), flush=True)
            if head:  # from another process, because JAX would reserve GPU memory in this process
                record.write({**head, "command": command, "rows": rows}, args.out)
    print(table(rows))
    return 0


def in_own_process(
    args: argparse.Namespace, geometry: str, setting: str, seconds: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    row: dict[str, Any] = dict(sweep="maxtext", method=setting, geometry=geometry)
    if seconds < 20:
        return {}, row | dict(error="the time of all settings was spent")
    with tempfile.TemporaryDirectory() as folder:
        out, log = (pathlib.Path(folder, name) for name in ("out.json", "log"))
        command = [sys.executable, "-m", "benchmarks.maxtext", "--only", geometry, setting]
        command += ["--steps", str(args.steps), "--out", str(out)]
        command += ["--ranks", str(args.ranks)] if args.ranks else []
        with open(log, "w") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                ended = f"its process ended with {process.wait(timeout=seconds)}"
            except subprocess.TimeoutExpired:
                ended = f"it took more than {seconds:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if out.exists():
            found = json.loads(out.read_text())
            return found["head"], row | found["row"]
        return {}, row | dict(error=f"{ended}: {log.read_text()[-1500:]}")


def options_of(args: argparse.Namespace, geometry: str, setting: str, ranks: int) -> dict[str, Any]:
    has_experts, _, own = SETTINGS[setting]
    sharding = dict(
        ici_expert_parallelism=ranks if has_experts else 1,
        ici_fsdp_parallelism=1 if has_experts else ranks,
    )
    on_cpu = dict(hardware="cpu", attention="dot_product", **TINY)
    on_gpu = dict(hardware="gpu", attention="cudnn_flash_jax")
    return COMMON | GEOMETRIES[geometry] | own | sharding | (on_cpu if args.ranks else on_gpu)


def measure_one(args: argparse.Namespace) -> int:
    geometry, setting = args.only
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    if args.ranks:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.ranks)
    row: dict[str, Any] = {}
    try:
        options = options_of(args, geometry, setting, len(jax.devices()))
        row |= dict(options=options, xla_flags=os.environ.get("XLA_FLAGS", ""))
        row |= timed(args, setting, options)
    except BaseException as error:  # MaxText may exit
        row["error"] = f"{type(error).__name__}: {error}"[:1500]
    kind = jax.devices()[0].device_kind
    head = record.head(f"{len(jax.devices())} x {kind}", len(jax.devices()))
    head["versions"]["maxtext"] = maxtext_program.load().version.__version__
    head["versions"] |= record.versions_of("flax", "optax", "tokamax", "qwix")
    args.out.write_text(json.dumps(dict(head=head, row=row)))
    sys.stdout.flush()
    os._exit(0)  # do not wait for threads of libraries


def timed(args: argparse.Namespace, setting: str, options: dict[str, Any]) -> dict[str, Any]:
    enable = SETTINGS[setting][1]
    maxtext_program.load()
    if enable is not None:
        maxtext.enable(fp8=enable == "fp8")
    start = time.monotonic()
    with contextlib.ExitStack() as tuning:
        if setting.endswith("_tuned"):
            import tokamax

            fallback = tokamax.config.autotuning_cache_miss_fallback
            tuning.enter_context(fallback("autotune"))  # tokamax tunes its products
        program = maxtext_program.Program(options)
    compile_seconds = time.monotonic() - start
    losses, seconds = [], []
    for _ in range(WARMUP + args.steps):
        begin = time.perf_counter()
        metrics = program.step()
        jax.block_until_ready((metrics, program.state))
        seconds.append(time.perf_counter() - begin)
        losses.append(float(metrics["learning/loss"]))
    ms = [1e3 * s for s in seconds[WARMUP:]]
    median = statistics.median(ms)
    row = dict(
        ms=round(median, 3),
        min_ms=round(min(ms), 3),
        max_ms=round(max(ms), 3),
        tokens_per_s=round(program.tokens / median * 1e3),
        tflops=round(program.tflop / median * 1e3, 1),
        tflop_of_step=round(program.tflop, 3),
        tokens=program.tokens,
        losses=[round(loss, 6) for loss in losses],
        compile_s=round(compile_seconds, 1),
    )
    stats = program.compiled.memory_analysis()
    if stats is not None:
        held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        row["peak_gib"] = round((held + stats.temp_size_in_bytes) / 2**30, 2)
    return row


def describe(row: dict[str, Any]) -> str:
    name = f"{row['geometry']}, {row['method']}"
    if "error" in row:
        return f"{name}: {' '.join(row['error'][-300:].split())}"
    return f"{name}: {row['ms']:.1f} ms, {row['tflops']} TFLOP/s, losses {row['losses'][:5]}"


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| geometry | setting | ms a step | tokens/s/GPU | TFLOP/s/GPU | losses 1, 5, last |"]
    lines.append("| --- " * 6 + "|")
    for row in rows:
        if "error" in row:
            cells = ["did not run", "", "", ""]
        else:
            losses = (row["losses"][0], row["losses"][min(4, len(row["losses"]) - 1)])
            shown = ", ".join(f"{loss:.4f}" for loss in (*losses, row["losses"][-1]))
            cells = [f"{row['ms']:.1f}", f"{row['tokens_per_s']:,}", f"{row['tflops']:.0f}", shown]
        lines.append(f"| {row['geometry']} | {row['method']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
