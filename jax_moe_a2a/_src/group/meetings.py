"""Let all processes meet through JAX's coordination service, with a bounded wait.

The purpose of a meeting is its name. No process counts meetings, so a process whose wait for one
meeting timed out can still take part in the next meeting.

A meeting may be repeated, for example if a group is closed twice, or if some processes were late.
So a meeting has numbered attempts, and the coordination service keeps the number of the next
attempt. After an attempt has ended, each process publishes the next number before it comes to
another attempt. An attempt ends for all processes at once, because its barrier belongs to the
service. If a process comes later, the service reports the end at once, and the process continues
with the next attempt.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable

import jax

from .. import compat

_ROOT = "jax_moe_a2a/meetings"
_WAITING = f"{_ROOT}/waiting"  # the meeting at which each process waits, or last waited
_lock = threading.Lock()  # a process is at one meeting at a time
_read_by_all = compat.per_job(list[str])  # keys of this process, to be deleted


def meet(what: str, timeout: float, act: Callable[[], str | None] = lambda: None) -> list[str]:
    """Run ``act`` in all processes, wait for all of them, and return the result of each process.

    If ``act`` raises in a process, the process still takes part in the meeting, with its error,
    because no process may continue to a call that needs all processes after one has failed.

    Args:
      what: purpose of the meeting, such as "starting NVSHMEM". All processes pass the same text.
      timeout: seconds to wait for the other processes.
      act: function to run first. All processes receive its result.

    Raises:
      RuntimeError: in every process, if ``act`` has raised in any process, or if a process has not
      arrived within ``timeout`` seconds. The error names the process.
    """
    result, problem, cause = "", "", None
    try:
        result = act() or ""
    except Exception as error:
        # Errors of this package are clear without their type; other errors need their type.
        text, prefix = str(error), "jax_moe_a2a: "
        is_own = text.startswith(prefix)
        problem = text.removeprefix(prefix) if is_own else f"{type(error).__name__}: {text}"
        cause = error
    with _lock:
        try:
            told = _gather(what, [result, problem], timeout)
        except Exception as error:
            if cause is None:
                raise
            own = _failure(jax.process_index(), what, problem)
            raise RuntimeError(
                f"{own}. Other processes may not know of this failure: {error}"
            ) from cause
    for process, (_, problem) in enumerate(told):
        if problem:
            raise RuntimeError(_failure(process, what, problem)) from cause
    return [result for result, _ in told]


def _failure(process: int, what: str, problem: str) -> str:
    return f"jax_moe_a2a: {what}: process {process} failed: {problem}"


def _gather(what: str, own: list[str], timeout: float) -> list[list[str]]:
    """Wait for all processes, and return the text of each process, in process order."""
    deadline = time.monotonic() + timeout
    process = jax.process_index()
    meeting = f"{_ROOT}/{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    compat.coordination_set(f"{_WAITING}/{process}", what)
    attempt = -1
    while True:
        # A slow process may have published an attempt that is over.
        attempt = max(attempt + 1, *_attempts(meeting))
        told = f"{meeting}/told/{attempt}"
        key = f"{told}/{process}"
        if any(own):
            compat.coordination_set(key, json.dumps(own))
        why = compat.coordination_barrier(f"{meeting}/{attempt}", deadline - time.monotonic())
        _write_down(meeting, attempt + 1)
        if not why:
            break
        if any(own):
            compat.coordination_delete(key)
        is_late = "DEADLINE_EXCEEDED" in why
        if not is_late or time.monotonic() >= deadline:
            missing = _missing(what, process) if is_late else why
            raise RuntimeError(
                f"jax_moe_a2a: {what}, which all processes must do together: {missing}. All "
                "processes must make the same groups, lower the same programs and close together, "
                "in the same order"
            )
    answers = {key: json.loads(text) for key, text in compat.coordination_list(told).items()}
    # All processes have arrived, so all have read the texts of earlier meetings.
    for old in _read_by_all():
        compat.coordination_delete(old)
    _read_by_all()[:] = [key] if any(own) else []
    compat.coordination_delete(f"{_WAITING}/{process}")
    return [answers.get(str(index), ["", ""]) for index in range(jax.process_count())]


def _attempts(meeting: str) -> list[int]:
    """Return the published numbers of attempts. The highest number is the next attempt."""
    return [0, *map(int, compat.coordination_list(f"{meeting}/next"))]


def _write_down(meeting: str, attempt: int) -> None:
    compat.coordination_set(f"{meeting}/next/{attempt}", "")
    for older in _attempts(meeting):
        if 0 < older < attempt:
            compat.coordination_delete(f"{meeting}/next/{older}")


def _missing(what: str, process: int) -> str:
    """Return at which meetings the other processes are, as far as known."""
    waiting = compat.coordination_list(_WAITING)
    others = {index: waiting.get(str(index)) for index in range(jax.process_count())}
    del others[process]
    elsewhere = {index: other for index, other in others.items() if other != what}
    if not elsewhere:
        return f"processes {sorted(others)} arrived too, but not at the same time"
    return ", ".join(
        f"process {index} has not arrived"
        if other is None
        else f"process {index} was last seen {other}"
        for index, other in elsewhere.items()
    )
