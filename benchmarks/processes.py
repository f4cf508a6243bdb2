"""Time round trips in one process and in several, and to inter-node ranks.

    python -m benchmarks.processes                        every layout of this machine's GPUs
    python -m benchmarks.processes --tokens 128 4096
    python -m benchmarks.processes --layouts 1 4 4:1      processes:p2p_world_size[:hosts]

The GPUs are in one process, in several, in a process each as if on hosts of their own (by NVSHMEM,
which then moves bytes over NVLink), and in two levels as if on two hosts. Each layout has processes
of its own, started and ended here. All use the times that process 0 has measured, so that they
make the same calls. Ties, 1 to 2 us, are in all figures.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import sys
import tempfile
from typing import TYPE_CHECKING, Any, NamedTuple

from . import cli
from . import record as records
from .cli import say
from .plot import layout_in_words
from .together import run_together
from .workload import FULL, TINY, Setting, draw

if TYPE_CHECKING:
    import jax_moe_a2a as ma

SWEEP = "processes"
TOKENS = (8, 128, 1024, 4096)
CPU_TOKENS = (3, 16)
SAMPLES = 7
TIMEOUT_SECONDS = (
    20.0  # seconds of a wait in a kernel, because processes compile at different times
)
SECONDS_OF_LAYOUT = 150.0  # to start, to compile and to measure
Row = dict[str, Any]


class Layout(NamedTuple):
    """Hold how the ranks are divided into processes and hosts."""

    processes: int
    p2p_world_size: int = 0
    """Number of ranks that share memory; NVSHMEM reaches all others. 0: the ranks of the host."""
    hosts: int = 1
    """2: in two levels, as if on two hosts."""

    def __str__(self) -> str:
        return ":".join(map(str, self))


def layout_of(text: str) -> Layout:
    """Return the layout of ``processes[:p2p_world_size[:hosts]]``."""
    return Layout(*map(int, text.split(":")))


def all_layouts(num_devices: int, on_gpu: bool) -> list[Layout]:
    """Return one process and several; then GPUs as if on hosts of their own, and on two."""
    found = [Layout(n) for n in range(1, num_devices + 1) if num_devices % n == 0]
    has_two_hosts = num_devices >= 4 and num_devices % 2 == 0
    if on_gpu:
        half = [num_devices // 2] if has_two_hosts else []
        found += [Layout(num_devices, n) for n in (*half, 1)]
    if has_two_hosts:
        found.append(Layout(1, hosts=2))
    if has_two_hosts and on_gpu:
        found.append(Layout(num_devices, num_devices // 2, 2))
    return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = cli.make_parser("benchmarks.processes", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", help="per rank; default: 8 to 4096")
    parser.add_argument("--layouts", type=layout_of, nargs="+", help="default: all that there are")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # where work() writes what it finds
    for name, kind in dict(coordinator=str, num_processes=int, process_id=int).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=kind, help=argparse.SUPPRESS)  # of run_together()
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run it; return the exit status: 1 if anything failed."""
    args = parse(argv)
    if args.worker:
        return work(args)
    num_gpus = cli.set_platform(args.ranks)
    num_devices = num_gpus or args.ranks or cli.CPU_RANKS
    record: dict[str, Any] = {}
    failures, rows = [], []
    path = None
    for layout in args.layouts or all_layouts(num_devices, bool(num_gpus)):
        say(f"processes:p2p_world_size:hosts {layout}")
        try:
            found = run_layout(args, layout, num_devices, bool(num_gpus))
        except RuntimeError as error:  # of one layout, must not end the run
            say(f"FAILED {error}")
            failures.append(f"{layout}: {error}")
            continue
        for row in found["rows"]:
            where = f"{layout_in_words(row)}, {row['path']}"
            say(f"{row['tokens']:5} tokens: {row['us']:8.1f} us  ({where})")
        rows += found["rows"]
        record = dict(found["head"], sweeps=[SWEEP], failures=failures, rows=rows)
        path = path or (found["path"] and pathlib.Path(found["path"]))
        if path:
            records.write(record, path)
    if not record:
        return 1
    return cli.finish(args, record, path)


def run_layout(
    args: argparse.Namespace, layout: Layout, num_devices: int, on_gpu: bool
) -> dict[str, Any]:
    """Start the processes of a layout and return what process 0 has found.

    Raises:
      RuntimeError: if one of them failed, or if they did not end in time.
    """
    each, rest = divmod(num_devices, layout.processes)
    if rest:
        raise RuntimeError(f"{num_devices} devices are not to be shared by {layout.processes}")
    tokens = args.tokens or (TOKENS if on_gpu else CPU_TOKENS)[: 2 if args.quick else None]
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )

    def environment_of(process: int) -> dict[str, str]:
        if on_gpu:
            own = range(process * each, (process + 1) * each)
            return dict(JAX_LOCAL_DEVICE_IDS=",".join(map(str, own)))
        own_flags = f"{flags} --xla_force_host_platform_device_count={each}"
        return dict(XLA_FLAGS=own_flags, JAX_CPU_COLLECTIVES_IMPLEMENTATION="gloo")

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        found = folder / "found.json"
        program = [sys.executable, "-m", "benchmarks.processes", "--worker", str(found)]
        program += ["--layouts", str(layout), "--ranks", str(num_devices), "--tokens"]
        program += [*map(str, tokens), "--samples", str(args.samples or SAMPLES)]
        program += [] if args.out is None else ["--out", str(args.out)]
        programs = [(program, environment_of(process)) for process in range(layout.processes)]
        problems, _, complaints = run_together(folder, programs, SECONDS_OF_LAYOUT)
        if problems:
            ends = (" ".join(complaint[-400:].split()) for complaint in complaints)
            raise RuntimeError("; ".join([*problems, *filter(None, ends)]))
        return json.loads(found.read_text())


def work(args: argparse.Namespace) -> int:
    """Measure in a process of a layout; the first one writes the head and the rows of a record."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    import jax_moe_a2a as ma

    (layout,) = args.layouts
    if layout.processes > 1:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    devices = np.array(jax.devices()[: args.ranks])
    on_gpu = devices[0].platform == "gpu"
    mesh = Mesh(devices.reshape(layout.hosts, -1), ("host", "ep"))
    group = ma.Group(
        mesh,
        ("host", "ep"),
        p2p_world_size=layout.p2p_world_size or None,
        two_level=layout.hosts > 1,
        timeout=TIMEOUT_SECONDS,
    )
    if on_gpu and group.path != "cuda":
        raise RuntimeError(f"the kernels would not run: {group.why_portable}")
    sizes = FULL if on_gpu else TINY
    rows = [
        dict(measure(Setting(tokens, **sizes), group, args.samples), **layout._asdict())
        for tokens in args.tokens
    ]
    if args.process_id == 0:
        path = cli.choose_path(args, mesh, SWEEP)
        head = cli.describe_run(mesh, devices.size if on_gpu else 0)
        found = dict(head=head, rows=rows, path=path and str(path))
        pathlib.Path(args.worker).write_text(json.dumps(found))
    return 0


def measure(setting: Setting, group: ma.Group, samples: int) -> Row:
    """Measure a round trip with its routing; return a row of a record.

    Raises:
      RuntimeError: if its sums are wrong.
    """
    import jax
    import numpy as np

    from . import operations, suite, timing
    from .methods import METHODS

    mesh: Any = group.mesh
    workload = draw(setting, group.size)
    method = METHODS["ours"](workload, group)

    def round_trip(state: Any) -> Any:
        return operations.round_trip(method, *state)

    x, ids, weights = suite.input_shapes(mesh, workload)
    drawn = jax.jit(lambda: suite.draw_x(workload, x), out_shardings=x.sharding)()
    put = [
        jax.make_array_from_callback(array.shape, like.sharding, array.__getitem__)
        for array, like in ((workload.ids, ids), (workload.weights, weights))
    ]
    state = (drawn, *put)

    def error(state: Any) -> Any:
        return operations.squares(round_trip(state), state[0])

    for shard in timing.per_rank(error, mesh)(state).addressable_shards:
        difference, exact = np.asarray(shard.data)[0]
        if not difference <= operations.TOLERANCE**2 * exact:
            raise RuntimeError(f"wrong sums of {setting}: {difference} of {exact}")

    # XLA drops optimization barriers early on CPU, and would merge what is repeated.
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    reps = timing.repetitions(40 + 0.25 * setting.tokens) if on_gpu else 1
    program = timing.per_rank(timing.chain(round_trip, reps), mesh).lower(state).compile()
    timing.check_unmerged(program, reps, operations.crossings("round_trip"))
    result = timing.measure(program, (state,), reps, samples, agreed=as_process_0_has_it)
    group.check()
    return dict(
        op="round_trip",
        method="ours",
        sweep=SWEEP,
        **suite.describe(workload),
        includes_route=True,
        path=group.path,
        **result.row(),
        measured_us=round(result.median_us, 3),
        tie_us=None,
        reps=reps,
        samples=samples,
    )


def as_process_0_has_it(seconds: float) -> float:
    """Return the time of process 0, which all processes use."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return seconds
    return float(multihost_utils.broadcast_one_to_all(np.float32(seconds)))


if __name__ == "__main__":
    raise SystemExit(main())
