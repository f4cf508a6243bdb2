"""Compare two ways to time an operation: repetitions without their ties, and JAX's profiler.

    python -m benchmarks.profiled --tokens 1 128 4096 --methods ours all_gather --rounds 5

It decides which of the two the benchmarks use. Each round measures every operation in both ways.
For the profiler an operation is a program of its own, without repetitions and ties. Its time is
from the start of its first kernel to the end of its last kernel, on the GPU that takes longest. The
way whose figures differ less between rounds and runs is more reliable. Without a GPU there is
nothing to profile, and the parsing alone is tested.
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
from typing import Any

import jax
from jax.profiler import ProfileData

from . import operations, suite
from . import run as runs
from .methods import METHODS
from .run import say
from .workload import FULL, TINY, Setting, draw

OPS = (operations.EXCHANGE, operations.COMBINE, operations.ROUND_TRIP)
CALLS, NOT_COUNTED = 16, 4  # of a profile; GPUs start at different times and fall into step


def spans_us(profile: ProfileData, calls: int) -> list[float]:
    """Return the microseconds of each call of a program, on the GPU that takes longest.

    Raises:
      RuntimeError: the profile has no kernels, or the calls do not have equally many.
    """
    gpus = [plane for plane in profile.planes if plane.name.startswith("/device:GPU:")]
    spans: list[list[float]] = []
    for gpu in gpus:
        kernels = sorted(
            (event.start_ns, event.end_ns)
            for line in gpu.lines
            if line.name.startswith("Stream")
            for event in line.events
        )
        each, rest = divmod(len(kernels), calls)
        if rest or not each:
            raise RuntimeError(
                f"{gpu.name} must have equally many kernels in each of {calls} calls; "
                f"it has {len(kernels)} kernels"
            )
        of_call = [kernels[i * each : (i + 1) * each] for i in range(calls)]
        spans.append([(max(end for _, end in c) - c[0][0]) / 1e3 for c in of_call])
    if not spans:
        names = [plane.name for plane in profile.planes]
        raise RuntimeError(f"the profile must have a plane of a GPU; it has {names}")
    return [max(of_gpus) for of_gpus in zip(*spans, strict=True)]


def profile_us(program: Any, state: Any) -> float:
    """Return the median time of a compiled program's calls, by the profiler."""
    jax.block_until_ready(program(state))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                out = program(state)
            jax.block_until_ready(out)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        return statistics.median(spans_us(ProfileData.from_file(str(path)), CALLS)[NOT_COUNTED:])


def main(argv: list[str] | None = None) -> int:
    """Run it; return the exit status: 1 if anything failed."""
    parser = runs.make_parser("benchmarks.profiled", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=(1, 128, 4096), help="per rank")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=("ours", "all_gather"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    num_gpus = runs.set_platform(args.ranks)
    run = runs.open_run(args, num_gpus, [], "profiled", runs.QUICK_SAMPLES)
    for tokens in args.tokens:
        workload = draw(Setting(tokens, **(FULL if num_gpus else TINY)), run.mesh.size)
        plan = suite.Plan(workload, methods=tuple(args.methods), ops=OPS, plain_ops=OPS)
        for variant in suite.start_compiling(run, plan):
            prepared = variant.run_once.result()(*suite.make_inputs(run.mesh, workload))
            for timed in variant.programs:
                try:
                    compare(run, variant, timed, prepared, args.rounds)
                except Exception as error:  # of one operation, must not end the run
                    run.fail(f"{variant} {timed.operation.op}", error)
    return 1 if run.record["failures"] else 0


def compare(run: Any, variant: Any, timed: Any, prepared: Any, rounds: int) -> None:
    """Measure an operation in both ways, and print the median and the range of the rounds."""
    state = timed.operation.state(prepared)
    alone = run.start(timed.operation.step, state, keeps_results=True).compiling.result()
    if run.on_gpu:
        suite.measure_ties(run, [timed.tie_key])
    found: dict[str, list[float]] = {"without ties": [], "profiler": []}
    for _ in range(rounds):
        row = suite.make_row(run, variant, timed, *run.time(timed.program, state))
        found["without ties"].append(row["us"])
        found["profiler"].append(profile_us(alone, state))
    ways = [
        f"{way} {statistics.median(us):9.2f} us ({min(us):.2f} to {max(us):.2f})"
        for way, us in found.items()
    ]
    name = f"{variant.method} {timed.operation.op}"
    say(f"{row['tokens']:5} tokens {name:22} {'; '.join(ways)}; tie {row['tie_us']} us")


if __name__ == "__main__":
    raise SystemExit(main())
