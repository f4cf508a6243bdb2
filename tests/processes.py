"""Run the tests in several processes of one JAX job, each with an equal share of the devices.

    python -m tests.processes 2                                 # all tests in 2 processes
    python -m tests.processes 4 -- -q tests/test_dispatch.py    # after --: options of pytest
    python -m tests.processes 2 --as-hosts -- -q    # each with a separate network; needs root
    python -m tests.processes 2 --devices 4 -- -q   # CPU devices of all processes together
    MOE_A2A_TEST_GPU=1 python -m tests.processes 2              # GPUs instead of 8 CPU devices

The program prints the output of process 0 and, after a failure, the last output of the others. It
kills all processes after its deadline, or 30 seconds after the first process has ended. Tests read
and write arrays with `harness.numpy_of` and `harness.put`, or have the marker `one_process`.
"""

import argparse
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
VARIABLE = "MOE_A2A_TEST_PROCESS"  # address of the coordinator,processes,process,devices of each
ON_GPU = os.environ.get("MOE_A2A_TEST_GPU") == "1"
CPU_DEVICES = 8  # of all processes together
GRACE = 30  # seconds from the first process's end to the kill of all others
STALLED = "the deadline was over"


def joined():
    """Return (coordinator address, processes, this process, devices per process), or None in a
    single process."""
    if VARIABLE not in os.environ:
        return None
    address, *numbers = os.environ[VARIABLE].split(",")
    return address, *map(int, numbers)


def join(initialization_timeout=120, **options):
    """Join the JAX job, if there is one, before JAX has devices."""
    if joined() is None:
        return
    address, processes, process, devices = joined()
    import jax

    if ON_GPU:
        own = range(process * devices, (process + 1) * devices)
        options.setdefault("local_device_ids", list(own))
    else:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, processes, process, initialization_timeout=initialization_timeout, **options
    )


def num_gpus():
    """Return the number of GPUs that a process may use, without a call of JAX."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip()])
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())


def environment_of(address, processes, process, devices):
    return os.environ | {VARIABLE: f"{address},{processes},{process},{devices}"}


def run(
    processes,
    pytest_args,
    deadline,
    cpu_devices=CPU_DEVICES,
    address=None,
    placed=lambda process, command: command,
):
    """`placed(process, command)` may change a process's command."""
    devices, rest = divmod(num_gpus() if ON_GPU else cpu_devices, processes)
    if rest or not devices:
        sys.exit(f"{devices * processes + rest} devices cannot be divided by {processes} processes")
    address, workers, printed = address or free_address(), [], []
    # No signal interrupts XLA, so timeouts need a thread. Random or parallel orders would differ
    # between processes.
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:randomly"]
    options += ["-o", "timeout=300", "--timeout-method=thread", "--strict-markers"]
    try:
        for process in range(processes):
            printed.append(None if process == 0 else tempfile.TemporaryFile("w+"))
            workers.append(
                subprocess.Popen(
                    placed(process, [sys.executable, "-m", "pytest", *options, *pytest_args]),
                    env=environment_of(address, processes, process, devices),
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=printed[-1],
                    stderr=None if process == 0 else subprocess.STDOUT,
                )
            )
        problems = wait_for(workers, deadline)
    finally:
        for worker in workers:
            worker.kill()
    for process, file in enumerate(printed):
        if file and problems:
            file.seek(0)
            print(f"\n--- process {process}:\n{file.read()[-8000:]}")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def met_by_chance(*printed):
    """Return True if the run may have failed by chance: a port in use, or a stall.

    On two busy cores with jax 0.10.2, processes stalled about once in hundreds of runs.
    """
    return any(told in text for text in printed for told in ("already in use", STALLED))


def assert_tests_pass(tests, *options, deadline=150):
    """Run tests in two processes, and repeat them once if they failed by chance."""
    command = [sys.executable, "-m", "tests.processes", "2", f"--deadline={deadline}", *options]
    # This process has already reserved most of the GPUs' memory.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for may_repeat in (True, False):
        done = subprocess.run(
            [*command, "--", "-q", *tests], cwd=ROOT, env=environment,
            capture_output=True, text=True, timeout=deadline + 60,
        )  # fmt: skip
        if not (may_repeat and met_by_chance(done.stdout, done.stderr)):
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(tests)} passed" in done.stdout, done.stdout


def run_together(folder, programs, deadline):
    """Run programs of one job, and repeat them once if they failed by chance.

    ``programs`` are pairs (command, additions to the environment). A command accepts
    ``--coordinator``, ``--num-processes`` and ``--process-id``. Return the failures as sentences,
    and the stdout and the stderr of each program.
    """

    def start(process, address, out, err):
        command, environment = programs[process]
        flags = f"--coordinator={address}", f"--num-processes={len(programs)}"
        command = [*command, *flags, f"--process-id={process}"]
        with out.open("w") as stdout, err.open("w") as stderr:
            return subprocess.Popen(
                command, env={**os.environ, **environment}, stdout=stdout, stderr=stderr
            )

    outs, errs = (
        [folder / f"{process}.{stream}" for process in range(len(programs))]
        for stream in ("out", "err")
    )
    for may_repeat in (True, False):
        address = free_address()
        workers = [start(i, address, *files) for i, files in enumerate(zip(outs, errs))]
        problems = wait_for(workers, deadline)
        printed, complaints = ([file.read_text() for file in files] for files in (outs, errs))
        if not (may_repeat and met_by_chance(*problems, *printed, *complaints)):
            break
    return problems, printed, complaints


def how_it_ended(code):
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def wait_for(workers, deadline, grace=GRACE):
    """Wait for all processes, and return the failures. Kill the processes that still run after
    ``deadline`` seconds, or ``grace`` seconds after the first process ended."""
    problems = []
    end, first = time.monotonic() + deadline, None
    while (running := [w for w in workers if w.poll() is None]) and time.monotonic() < end:
        if len(running) < len(workers) and first is None:
            first = [i for i, w in enumerate(workers) if w.poll() is not None]
            end = min(end, time.monotonic() + grace)
        time.sleep(0.1)
    for process, worker in enumerate(workers):
        if worker in running:
            worker.kill()
            worker.wait()
            when = f"after process {first[0]} had ended" if first else f"when {STALLED}"
            problems.append(f"process {process} was still running {when}, and was killed")
        elif worker.returncode:
            problems.append(f"process {process} {how_it_ended(worker.returncode)}")
    return problems


def main():
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(
        prog="python -m tests.processes",
        usage="%(prog)s [-h] [--deadline SECONDS] [--as-hosts] [--devices N] PROCESSES "
        "[-- FOR PYTEST ...]",
        description=__doc__.split("\n\n")[0],
    )
    parser.add_argument("processes", type=int)
    parser.add_argument("--deadline", type=float, default=3600, help="seconds, for everything")
    parser.add_argument(
        "--as-hosts", action="store_true", help="each in a network namespace; needs root and ip"
    )
    parser.add_argument("--devices", type=int, default=CPU_DEVICES, help="on CPU, of all processes")
    args = parser.parse_args(sys.argv[1:end])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # to run the `finally` of `run`
    arguments = args.processes, sys.argv[end + 1 :], args.deadline, args.devices
    if not args.as_hosts:
        sys.exit(run(*arguments))
    from . import hosts

    with hosts.namespaces(args.processes) as names:
        status = run(
            *arguments, hosts.COORDINATOR, lambda i, command: hosts.inside(names[i], *command)
        )
    sys.exit(status)


if __name__ == "__main__":
    main()
