"""Test how two processes with fake GPUs wait for each other (meet) through JAX's coordination
service. Both run this file, once for all tests."""

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

DEADLINE = 150  # seconds for all scenarios, which need about ten on idle cores
PATIENCE = 3.0  # seconds that a process waits in a meeting
SECOND_ADDRESS = "MOE_A2A_TEST_SECOND_ADDRESS"
ROOT = pathlib.Path(__file__).resolve().parents[1]


class Worker:
    def __init__(self):
        import jax

        from jax_moe_a2a._src import compat
        from jax_moe_a2a._src.group import native

        self.own = jax.process_index()
        self.compat, self.steps = compat, itertools.count()
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

    def step(self):
        """Wait for the other process, so that both continue a scenario at the same time."""
        why = self.compat.coordination_barrier(f"test/{next(self.steps)}", 30.0)
        assert not why, why

    def outcome(self, act):
        """Return the error of `act` ('' if there is none) and its duration."""
        start, error = time.monotonic(), ""
        try:
            act()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return dict(error=error, seconds=time.monotonic() - start)

    def meet(self, name):
        start = time.monotonic()
        why = self.compat.coordination_barrier(name, PATIENCE)
        return dict(error=why, seconds=time.monotonic() - start)


def one_sided(worker):
    """Process 0 first waits alone; then both meet under a different name."""
    alone = worker.meet("alone") if worker.own == 0 else None
    worker.step()
    return [alone, worker.meet("again")]


def other_order(worker):
    """The processes lower programs of two groups in different orders; process 1 starts later."""
    import numpy as np
    from jax.sharding import Mesh
    from pretended import Gpu

    import jax_moe_a2a as ma

    gpus = np.array([Gpu(0, 0), Gpu(1, 1)])
    options = dict(timeout=PATIENCE, first_timeout=2 * PATIENCE)
    orders = ([0, 1], [1, 0])
    groups = [ma.Group(Mesh(gpus[order], ("ep",)), "ep", **options) for order in orders]
    worker.step()
    announced = worker.compat._coordination().key_value_dir_get("jax_moe_a2a/process/")
    worker.step()
    if worker.own == 1:
        time.sleep(PATIENCE / 2)
    lowered = []

    def lower(group):
        lowered.append(group.placed_by(None).path)

    found = [worker.outcome(lambda: lower(group)) for group in groups[:: 1 - 2 * worker.own]]
    return dict(announced=announced, found=found, lowered=lowered)


def new_job(worker):
    """Run this last, because it ends the JAX job that the other scenarios need."""
    import jax
    from jax.extend.backend import clear_backends

    from jax_moe_a2a._src.group import processes as package_processes

    other = 1 - worker.own
    worker.met.clear()
    package_processes.publish()
    package_processes.meet([other], 5.0)
    worker.step()
    clear_backends()
    jax.distributed.shutdown()
    jax.distributed.initialize(os.environ[SECOND_ADDRESS], 2, worker.own)
    package_processes.publish()
    told = worker.compat.coordination_get(package_processes.KEY.format(other), 5.0)
    package_processes.meet([other], 5.0)
    found = worker.meet("another job")
    worker.step()
    return dict(told=bool(told), met=worker.met, found=found)


SCENARIOS = (one_sided, other_order, new_job)


def work(arguments):
    import jax

    address, _, process = (argument.split("=")[1] for argument in arguments)
    jax.distributed.initialize(address, 2, int(process))
    worker = Worker()
    for scenario in SCENARIOS:
        print(f"@{scenario.__name__} {json.dumps(scenario(worker))}", flush=True)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return a dict from each scenario to its results in both processes."""
    environment = dict(
        JAX_PLATFORMS="cpu",
        PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    )
    environment[SECOND_ADDRESS] = processes.free_address()
    program = [sys.executable, str(pathlib.Path(__file__).resolve())], environment
    folder = tmp_path_factory.mktemp("meetings")
    problems, printed, complaints = processes.run_together(folder, [program] * 2, DEADLINE)
    assert not problems, "\n".join([*problems, *printed, *complaints])[-8000:]
    lines = [[line[1:] for line in text.splitlines() if line.startswith("@")] for text in printed]
    of_processes = [dict(line.split(" ", 1) for line in own) for own in lines]
    return {
        scenario: [json.loads(own[scenario.__name__]) for own in of_processes]
        for scenario in SCENARIOS
    }


def assert_well(*outcomes):
    for outcome in outcomes:
        assert outcome["error"] == "", outcomes


def test_a_process_that_does_not_come_is_named_and_the_next_meeting_takes_place(found):
    (alone, *again), (_, *others) = found[one_sided]
    assert alone["error"].endswith("task names: 1"), alone
    assert PATIENCE - 0.5 < alone["seconds"] < PATIENCE + 3, alone
    assert_well(*again, *others)


def test_processes_announce_themselves_when_they_lower_programs_in_any_order(found):
    """A process publishes its notice when it lowers a program, not when it makes a group."""
    outcomes = found[other_order]
    assert [outcome["announced"] for outcome in outcomes] == [[], []]
    for outcome in outcomes:
        assert_well(*outcome["found"])
        assert outcome["lowered"] == ["cuda", "cuda"]
    # Process 0 waits until process 1 lowers its first program.
    assert outcomes[0]["found"][0]["seconds"] > PATIENCE / 4, outcomes


def test_when_jax_distributed_begins_again_processes_find_each_other_and_meet(found):
    for process, outcome in enumerate(found[new_job]):
        assert outcome["told"]
        names = [f"socket {1 - process} of job {job}" for job in (0, 1)]
        assert [name for _, name, _ in outcome["met"]] == names
        assert_well(outcome["found"])


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    work(sys.argv[1:])
