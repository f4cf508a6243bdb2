"""A tenth of the campaign of faults (`make faults` runs 200). Each commit draws others."""

import subprocess

import pytest
from faults import campaign
from faults.workers import Wrong

pytestmark = [
    pytest.mark.one_process("it starts processes of its own"),
    pytest.mark.several_devices("it starts processes, each with its devices"),
    pytest.mark.exchanges(0),  # of this process
]

# Runs of each place, which take about 2, 1 and 6 seconds; the first two mostly wait.
RUNS = {"memory": 12, "kernels": 4, "programs": 2}


def seed_of_commit():
    """Return a number that changes with each commit."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return int(done.stdout.strip()[:6] or "0", 16)


@pytest.mark.parametrize("place", RUNS)
def test_a_fault_ends_with_its_cause_or_the_right_result(place):
    seed = seed_of_commit()
    kinds = [kind for kind in campaign.KINDS if kind.startswith(place)]
    found = campaign.run_many(seed, range(RUNS[place]), kinds)
    failures = [done for done in found if done.outcome == "FAILURE"]
    again = f"python -m tests.faults --seed {seed} --kinds {place} --first N --last N"
    assert not failures, f"{again}\n{failures}"


def test_close_does_not_wait_for_a_thread_that_waits_for_a_stopped_process():
    done = campaign.run_one(1, 0, ["memory: close() during an opening"])
    assert done.outcome == "error" and "another thread is still opening" in done.error, done


def test_the_survivors_of_a_killed_process_go_on_in_a_group_over_the_remaining_devices():
    """With jax_enable_recoverability, on CPUs. The run makes that group after the error."""
    done = campaign.run_one(1, 0, ["programs: a killed process"])
    assert done.outcome in ("error", "right"), done


def begin_one(run):
    run.workers.append(run.start_one(campaign.memory.Member, 0, count=1, folder=str(run.folder)))
    run.begin(run.workers[0])


def leaks_a_process(run):
    begin_one(run)
    run.all("fork")
    return "right"


def says_nothing(run):
    begin_one(run)
    run.workers[0].ask("sleep", 60, seconds=0.2)


def leaves_memory(run):
    begin_one(run)
    run.all("reserve")
    (left,) = run.all("left")
    if left["mappings"] and left["bytes"]:
        raise Wrong(f"leak in process 0: {left}")


@pytest.mark.parametrize(
    "broken, told",
    ((leaks_a_process, "leaked processes"), (says_nothing, "hang: "), (leaves_memory, "leak in ")),
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_campaign_notices_a_run_that_ends_badly(monkeypatch, broken, told):
    monkeypatch.setitem(campaign.KINDS, "broken", broken)
    done = campaign.run_one(1, 0, ["broken"])
    assert done.outcome == "FAILURE" and told in done.error, done
