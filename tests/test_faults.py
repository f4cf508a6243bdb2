"""Run a few random faults of tests/faults."""

import pathlib
import signal
import time
from concurrent import futures

import pytest
from faults import campaign, programs
from faults.workers import Wrong

from jax_moe_a2a._src import compat

pytestmark = [
    pytest.mark.one_process("it starts processes of its own"),
    pytest.mark.several_devices("it starts processes, each with its devices"),
    pytest.mark.exchanges(0),  # this process makes no exchange
]

# Number of faults of each kind. In total, the `memory` faults last 2 seconds, the `programs` ones
# 8.
RUNS = {"memory": 8, "programs": 2}
SEED = 1


@pytest.mark.parametrize("place", RUNS)
def test_a_fault_ends_with_its_cause_or_the_right_result(place):
    kinds = [kind for kind in campaign.KINDS if kind.startswith(place)]
    found = campaign.run_many(SEED, range(RUNS[place]), kinds)
    failures = [done for done in found if done.outcome == "FAILURE"]
    again = f"python -m tests.faults --seed {SEED} --kinds {place} --first N --last N"
    assert not failures, f"{again}\n{failures}"


def test_close_does_not_wait_for_a_thread_that_waits_for_a_stopped_process():
    done = campaign.run_one(1, 0, ["memory: close() during an opening"])
    assert done.outcome == "error" and "another thread is still opening" in done.error, done


def closes_while_a_thread_opens(run):
    """Close the workspace of unsplit exchanges while a thread opens the workspace of split
    exchanges."""
    victim = campaign.memory.begin(run, count=2, timeout=8.0)
    run.all("reserve")
    (closer,) = (worker for worker in run.workers if worker is not victim)
    before = closer.ask("mapped").value
    victim.signal(signal.SIGSTOP)
    closer.ask("open_in_a_thread", True)
    time.sleep(0.2)  # then the thread in the closer waits for the victim
    reply = closer.ask("close_without_a_look", 0.2)
    mapped = closer.ask("mapped").value
    victim.signal(signal.SIGCONT)
    closer.ask("join_thread")
    run.error = reply.error
    if not set(before) <= set(mapped):
        raise Wrong("it has closed one of its workspaces")
    campaign.memory.end(run)
    return "error"


def test_close_closes_all_workspaces_or_none(monkeypatch):
    monkeypatch.setitem(campaign.KINDS, "broken", closes_while_a_thread_opens)
    done = campaign.run_one(1, 0, ["broken"])
    assert done.outcome == "error" and "another thread is still opening" in done.error, done


def test_threads_that_ask_at_once_make_the_value_of_a_job_once():
    calls = []
    make = compat.per_job(lambda: (time.sleep(0.05), calls.append(1)))
    with futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: make(), range(4)))
    assert calls == [1]


def killed_at_a_step(run):
    """One survivor raises an error, and the other waits until gloo's timeout."""
    programs.begin(run, count=3)
    programs.churn(run, 7, "kill")
    return programs.die(run, lambda victim: victim.process.join(60))


def test_the_survivors_of_a_killed_process_go_on_in_a_group_over_the_remaining_devices(monkeypatch):
    monkeypatch.setitem(campaign.KINDS, "killed at a step", killed_at_a_step)
    done = campaign.run_one(1, 0, ["killed at a step"])
    assert done.outcome == "error", done
    assert done.to_error < programs.COLLECTIVE + campaign.SLACK, done


def test_the_documents_name_every_kind_and_no_other():
    kinds = campaign.memory.KINDS, programs.KINDS
    text = (pathlib.Path(__file__).parents[1] / "docs/faults.md").read_text()
    for table, of_place in zip(text.split("\n### ")[1:4:2], kinds, strict=True):
        _, _, *rows = (line for line in table.splitlines() if line.startswith("| "))
        named = "; ".join(row.removeprefix("| ").split(" | ")[0] for row in rows).split("; ")
        assert sorted(named) == sorted(of_place)
