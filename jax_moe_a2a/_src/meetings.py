"""Let all processes meet through JAX's coordination service, with a bound on the wait.

A meeting is named by what the processes come for. No process counts meetings for itself, so a
process whose wait for one meeting timed out can still come to the next one.

The same meeting can take place again: a group is closed twice, or some processes were late. So a
meeting has attempts, and the coordination service keeps the number of the next attempt. A process
that saw an attempt end writes down the next number before it comes to any other attempt. An attempt
ends for all processes alike, because its barrier belongs to the service: a process that comes after
the end is told so at once, and goes on to the next attempt.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable

import jax

from . import compat

_ROOT = "jax_moe_a2a/meetings"
_WAITING = f"{_ROOT}/waiting"  # what each process waits for, or last waited for until its timeout
_lock = threading.Lock()  # a process is at one meeting at a time
_read_by_all = compat.per_job(list[str])  # keys of this process, to be deleted


def meet(what: str, timeout: float, act: Callable[[], str | None] = lambda: None) -> list[str]:
    """Run ``act``, wait until all processes have run theirs, and return what each ``act``
    returned.

    If ``act`` raises in a process, that process comes to the meeting with its error. So no process
    continues to a call that needs all processes while another process has failed.

    Args:
      what: completes "this process came ...". All processes that meet pass the same text.
      timeout: seconds to wait for the other processes.
      act: what this process does first. All processes receive what it returns.

    Raises:
      RuntimeError: in every process, if ``act`` has raised in one of them, or if a process has not
      come to this meeting within ``timeout`` seconds. The error names the process.
    """
    result, problem, cause = "", "", None
    try:
        result = act() or ""
    except Exception as error:
        # The text of an error of this package says enough; of other errors the type is needed too.
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
            raise RuntimeError(f"{own}. Not all processes know that: {error}") from cause
    for process, (_, problem) in enumerate(told):
        if problem:
            raise RuntimeError(_failure(process, what, problem)) from cause
    return [result for result, _ in told]


def _failure(process: int, what: str, problem: str) -> str:
    return f"jax_moe_a2a: in process {process}, which came {what}: {problem}"


def _gather(what: str, own: list[str], timeout: float) -> list[list[str]]:
    """Wait for all processes; return what each has told, in their order."""
    deadline = time.monotonic() + timeout
    process = jax.process_index()
    meeting = f"{_ROOT}/{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    compat.coordination_set(f"{_WAITING}/{process}", what)
    attempt = -1
    while True:
        # A slow process may have written down an attempt that is over.
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
                f"jax_moe_a2a: waiting for all processes, {what}: {missing}; all processes must "
                "make the same groups, lower the same programs and close together, in one order"
            )
    answers = {key: json.loads(text) for key, text in compat.coordination_list(told).items()}
    # All processes have come here, so they have read what was told at the meetings before this one.
    for old in _read_by_all():
        compat.coordination_delete(old)
    _read_by_all()[:] = [key] if any(own) else []
    compat.coordination_delete(f"{_WAITING}/{process}")
    return [answers.get(str(index), ["", ""]) for index in range(jax.process_count())]


def _attempts(meeting: str) -> list[int]:
    """Return the numbers that processes have written down; the highest one is next."""
    return [0, *map(int, compat.coordination_list(f"{meeting}/next"))]


def _write_down(meeting: str, attempt: int) -> None:
    compat.coordination_set(f"{meeting}/next/{attempt}", "")
    for older in _attempts(meeting):
        if 0 < older < attempt:
            compat.coordination_delete(f"{meeting}/next/{older}")


def _missing(what: str, process: int) -> str:
    """Return where the other processes are, as far as they have said."""
    waiting = compat.coordination_list(_WAITING)
    others = {index: waiting.get(str(index)) for index in range(jax.process_count())}
    del others[process]
    elsewhere = {index: other for index, other in others.items() if other != what}
    if not elsewhere:
        return f"processes {sorted(others)} came too, but not at the same time"
    return ", ".join(
        f"process {index} has not come" if other is None else f"process {index} last came {other}"
        for index, other in elsewhere.items()
    )
