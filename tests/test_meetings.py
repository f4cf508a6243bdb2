"""Meetings of processes through JAX's coordination service, in two processes: late ones, ones that
fail, ones that lower programs in another order, and a job that begins again. NVSHMEM is a stub
whose collective calls wait for all processes, as the real ones do, but with a bound. GPUs are
pretended.

Each test looks at a scenario of one run, which is this file again in two processes.
"""

import functools
import itertools
import json
import os
import pathlib
import sys
import time

import processes
import pytest

pytestmark = [
    pytest.mark.one_process("it starts processes of its own"),
    pytest.mark.several_devices("it starts processes of its own"),
]

DEADLINE = 150  # seconds, for everything; it needs about thirty on idle cores
PATIENCE = 3.0  # of a meeting
HUNG = 12.0  # after that the stub of NVSHMEM stops waiting, unlike NVSHMEM
SECOND_ADDRESS = "MOE_A2A_TEST_SECOND_ADDRESS"  # of the job that begins again
ROOT = pathlib.Path(__file__).resolve().parents[1]


# ------------------------------------------------------------------------- what a process does


class Worker:
    """A process, with a stub of NVSHMEM that records its collective calls."""

    def __init__(self):
        import jax

        from jax_moe_a2a._src import compat
        from jax_moe_a2a._src.group import native, network

        self.own = jax.process_index()
        self.native, self.network, self.compat = native, network, compat
        self.collective, self.failing, self.steps = [], set(), itertools.count()
        network.LEAST_SECONDS = PATIENCE
        network._host_library = lambda: (
            "/nowhere/libnvshmem_host.so" if "load" in self.failing else "libm.so.6"
        )
        native.load_network = lambda: None
        native.network_id = lambda: b"unique"
        native.prepare_network = lambda: self.local("device")
        native.start_network = lambda unique_id: self.together(f"start {unique_id}")
        native.prepare_multi_host = lambda topology, kind: self.local("prepare")
        native.open_multi_host = self.open_multi_host
        native.close = lambda topology, timeout, kinds: self.local("quiet")
        self.met, jobs = [], itertools.count()
        native.has_kernels = lambda: True
        native.limit = lambda name: 64
        native.cuda_build = lambda: ""
        native.has_test_hooks = lambda: False
        native.protocol_version = lambda: 1
        native.why_unreachable = lambda topology: ""
        native.why_no_gpus = lambda: ""
        native.introduce_devices = lambda: None
        native.listen = lambda: (f"socket {self.own} of job {next(jobs)}", "secret")
        native.has_ended = lambda index: False
        native.add_process = lambda *process: self.met.append(process[:3])

    def local(self, name):
        if name in self.failing:
            raise RuntimeError(f"jax_moe_a2a: no {name} here")

    def together(self, name):
        self.collective.append(name)
        if why := self.compat.coordination_barrier(f"stub/{name}", HUNG):
            raise RuntimeError(f"hung: {why}")

    def open_multi_host(self, topology, kind, half_bytes):
        if half_bytes:  # otherwise the memory exists already
            self.together(f"allocate {topology} {kind}")
        self.local("address")

    def topology(self, number):
        """Return a topology that no other scenario uses."""
        return self.native.Topology((2 * number, 2 * number + 1), 2, 1)

    def step(self):
        """Wait for the other process, outside of what is tested."""
        why = self.compat.coordination_barrier(f"test/{next(self.steps)}", 30.0)
        assert not why, why

    def outcome(self, act, *, patience=PATIENCE):
        """Return '' or the error of a call, how long it took, and its collective calls."""
        self.collective = []
        start, error = time.monotonic(), ""
        self.network.LEAST_SECONDS = patience
        try:
            act()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return dict(
            error=error,
            seconds=time.monotonic() - start,
            collective=list(self.collective),
        )

    def open(self, number, half_bytes=1, **options):
        topology = self.topology(number)
        return self.outcome(
            lambda: self.network.open_workspace(topology, half_bytes, 0.1), **options
        )

    def close(self, number, **options):
        topology = self.topology(number)
        return self.outcome(lambda: self.network.close(topology, 0.1, 0.1), **options)


def start_fails(worker):
    """Process 1 cannot load NVSHMEM; later it can."""
    worker.failing = {"load"} if worker.own == 1 else set()
    found = [worker.open(0)]
    worker.step()
    worker.failing = set()
    return [*found, worker.open(0)]


def one_sided(worker):
    """Process 0 comes alone to opening and to closing; then both come."""
    found = []
    for act in (worker.open, worker.close):
        found += [act(1) if worker.own == 0 else None]
        worker.step()
        found += [act(1)]
        worker.step()
    return [*found, worker.open(2), worker.close(1), worker.close(1), worker.close(2)]


def overlapping(worker):
    """Process 0 stops waiting and tries again; process 1 comes in between, with more patience."""
    if worker.own == 1:
        worker.step()
        return [worker.open(3, patience=4 * PATIENCE)]
    given_up = worker.open(3, patience=PATIENCE / 4)
    worker.step()
    time.sleep(PATIENCE / 2)
    return [given_up, worker.open(3, patience=4 * PATIENCE)]


def late_for_what_was_given_up(worker):
    """Process 0 stops opening and goes on to close; process 1 comes late and does the same."""
    worker.open(4)
    worker.step()
    found = []
    if worker.own == 0:
        found += [worker.open(5), worker.close(4, patience=4 * PATIENCE)]
    else:
        time.sleep(PATIENCE / 2)
        found += [worker.open(6), worker.close(4, patience=4 * PATIENCE)]
    worker.step()
    return [*found, worker.open(5)]


def local_failure(worker):
    """Process 0 fails next to the allocation; then it does not."""
    worker.failing = {"prepare"} if worker.own == 0 else set()
    found = [worker.open(7)]
    worker.step()
    worker.failing = set()
    return [*found, worker.open(7)]


def closing_failure(worker):
    worker.open(8)
    worker.failing = {"quiet"} if worker.own == 1 else set()
    found = [worker.close(8)]
    worker.step()
    worker.failing = set()
    return [*found, worker.close(8)]


def collective_failure(worker):
    """Process 1 fails when memory was taken, which cannot be repeated."""
    worker.failing = {"address"} if worker.own == 1 else set()
    found = [worker.open(9)]
    worker.step()
    worker.failing = set()
    return [*found, worker.open(9)]


def keys(worker):
    worker.open(11)  # The notices of a meeting are deleted at the next one.
    worker.step()
    entries = worker.compat._coordination().key_value_dir_get("jax_moe_a2a/")
    worker.step()  # before the other process goes on, and adds keys
    return [key for key, _ in entries]


def other_order(worker):
    """Lower programs of two groups in each process, in another order; process 1 begins late."""
    import numpy as np
    from jax.sharding import Mesh
    from pretended import Gpu

    import jax_moe_a2a as ma

    worker.network.why_not = lambda: "there are no GPUs"  # also where `make network` was called
    gpus = np.array([Gpu(0, 0), Gpu(1, 1)])
    options = dict(timeout=PATIENCE, first_timeout=2 * PATIENCE)
    orders = ([0, 1], [1, 0])
    groups = [ma.Group(Mesh(gpus[order], ("ep",)), "ep", **options) for order in orders]
    worker.step()
    announced = list(worker.compat.coordination_list("jax_moe_a2a/process"))
    worker.step()
    if worker.own == 1:
        time.sleep(PATIENCE / 2)
    lowered = []

    def lower(group):
        lowered.append(group.placed_by(None).path)

    found = [worker.outcome(lambda: lower(group)) for group in groups[:: 1 - 2 * worker.own]]
    return dict(announced=announced, found=found, lowered=lowered)


def new_job(worker):
    """End the job and begin another one in the same processes. This scenario comes last."""
    import jax
    from jax.extend.backend import clear_backends

    from jax_moe_a2a._src.group import processes as package_processes

    other = 1 - worker.own
    worker.met.clear()
    worker.network.why_not = lambda: "there are no GPUs"  # also where `make network` was called
    package_processes.publish()
    package_processes.meet([other], 5.0)
    worker.step()
    clear_backends()
    jax.distributed.shutdown()
    jax.distributed.initialize(os.environ[SECOND_ADDRESS], 2, worker.own)
    package_processes.publish()
    told = worker.compat.coordination_get(package_processes.KEY.format(other), 5.0)
    package_processes.meet([other], 5.0)
    found = worker.open(10), worker.close(10)
    worker.step()
    return dict(told=bool(told), met=worker.met, found=found)


SCENARIOS = (
    start_fails,
    one_sided,
    overlapping,
    late_for_what_was_given_up,
    local_failure,
    closing_failure,
    collective_failure,
    keys,
    other_order,
    new_job,
)


def work(arguments):
    """Run a worker; `arguments` are the flags of `processes.run_together`."""
    import jax

    address, _, process = (argument.split("=")[1] for argument in arguments)
    jax.distributed.initialize(address, 2, int(process))
    worker = Worker()
    for scenario in SCENARIOS:
        print(f"@{scenario.__name__} {json.dumps(scenario(worker))}", flush=True)


# ------------------------------------------------------------------------------------------- tests


@functools.cache
def all_found(folder):
    """Return what the scenarios have found in both processes, by name; what went wrong; all
    output."""
    environment = dict(
        JAX_PLATFORMS="cpu",
        PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    )
    environment[SECOND_ADDRESS] = processes.free_address()
    program = [sys.executable, str(pathlib.Path(__file__).resolve())], environment
    problems, printed, complaints = processes.run_together(folder, [program] * 2, DEADLINE)
    found = {}
    for text in printed:
        for line in text.splitlines():
            if line.startswith("@"):
                name, result = line[1:].split(" ", 1)
                found.setdefault(name, []).append(json.loads(result))
    return found, problems, "\n".join([*problems, *printed, *complaints])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("meetings")


@pytest.fixture
def found(request, folder):
    """Return what the scenario of a test's name has found in both processes."""
    results, problems, printed = all_found(folder)
    of_scenario = results.get(request.param, [])
    assert len(of_scenario) == 2 and not problems, printed[-8000:]
    return of_scenario


def of(scenario):
    return pytest.mark.parametrize("found", [scenario.__name__], indirect=True)


def assert_well(*outcomes):
    for outcome in outcomes:
        assert outcome["error"] == "", outcomes


def assert_failed_in(process, why, *outcomes, seconds=PATIENCE):
    """Assert that all processes name the process that failed, and why, and that none was left in a
    collective call."""
    for outcome in outcomes:
        assert f": process {process} failed: " in outcome["error"], outcomes
        assert why in outcome["error"], outcomes
        assert outcome["seconds"] < seconds, outcomes


@of(start_fails)
def test_a_process_without_nvshmem_is_an_error_of_all_before_they_start_it(found):
    first, second = zip(*found)
    assert_failed_in(1, "OSError: /nowhere/libnvshmem_host.so", *first)
    assert [outcome["collective"] for outcome in first] == [[], []]
    assert_well(*second)
    for outcome in second:
        assert [call.split()[0] for call in outcome["collective"]] == ["start", "allocate"]


@of(one_sided)
def test_processes_meet_after_one_of_them_has_timed_out(found):
    alone, both, alone_again, both_again, *rest = zip(*found)
    for outcome, _ in (alone, alone_again):
        assert "process 1 has not arrived" in outcome["error"], outcome
        assert outcome["error"].endswith("in the same order"), outcome
        assert PATIENCE - 0.5 < outcome["seconds"] < PATIENCE + 3, outcome
        assert outcome["collective"] == []
    for outcomes in (both, both_again, *rest):
        assert_well(*outcomes)


@of(overlapping)
def test_a_process_that_comes_after_an_attempt_has_ended_is_met_at_the_next(found):
    (given_up, again), (late,) = found
    assert given_up["error"]
    assert_well(again, late)


@of(late_for_what_was_given_up)
def test_processes_that_came_for_different_workspaces_are_told_so_and_close_together(found):
    for process, (opening, closing, opening_again) in enumerate(found):
        other = 1 - process
        own_ids, other_ids = ("(10, 11)", "(12, 13)")[:: 1 if process == 0 else -1]
        assert f"process {other} was last seen " in opening["error"], opening
        assert own_ids in opening["error"].split(f"process {other}")[0]
        if process == 0:
            assert other_ids in opening["error"].split(f"process {other}")[1]
        assert_well(closing, opening_again)


@of(local_failure)
def test_a_failure_in_one_process_keeps_all_from_the_collective_call_and_may_be_mended(found):
    first, second = zip(*found)
    assert_failed_in(0, "no prepare here", *first)
    assert [outcome["collective"] for outcome in first] == [[], []]
    assert_well(*second)


@of(closing_failure)
def test_a_failure_to_close_is_an_error_of_all_and_closing_may_be_repeated(found):
    first, second = zip(*found)
    assert_failed_in(1, "no quiet here", *first)
    assert_well(*second)


@of(collective_failure)
def test_a_failure_within_the_collective_call_stays_an_error_of_all(found):
    first, second = zip(*found)
    assert_failed_in(1, "no address here", *first, *second)
    assert [outcome["collective"] for outcome in second] == [[], []]


@of(keys)
def test_of_all_meetings_the_service_keeps_numbers_of_attempts_only(found):
    for all_keys in found:
        assert all_keys
        assert [key for key in all_keys if "/next/" not in key] == []
        meetings = [key.split("/next/")[0] for key in all_keys]
        assert len(set(meetings)) == len(meetings), all_keys  # one for each


@of(other_order)
def test_processes_announce_themselves_when_they_lower_programs_in_any_order(found):
    """To make a group announces nothing, and each process announces itself before it waits."""
    assert [outcome["announced"] for outcome in found] == [[], []]
    for outcome in found:
        assert_well(*outcome["found"])
        assert outcome["lowered"] == ["cuda", "cuda"]
    # Process 0 comes first and waits until the other one lowers its first program.
    assert found[0]["found"][0]["seconds"] > PATIENCE / 4, found


@of(new_job)
def test_when_jax_distributed_begins_again_processes_find_each_other_and_meet(found):
    for process, outcome in enumerate(found):
        assert outcome["told"]
        names = [f"socket {1 - process} of job {job}" for job in (0, 1)]
        assert [name for _, name, _ in outcome["met"]] == names
        assert_well(*outcome["found"])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    work(sys.argv[1:])
