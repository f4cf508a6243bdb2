"""Let all processes meet through JAX's coordination service, with a bounded wait."""

from __future__ import annotations

import jax

from .. import compat


def meet(what: str, timeout: float) -> None:
    """Wait for all processes.

    Args:
      what: purpose of the meeting, such as "exchanging with all processes". It names the meeting,
        so all processes pass the same text, once in a job.
      timeout: seconds to wait for the other processes.

    Raises:
      RuntimeError: if a process has not arrived within ``timeout`` seconds. The error names the
        process.
    """
    name = f"jax_moe_a2a/meetings/{what}"
    compat.coordination_set(f"{name}/{jax.process_index()}", "")
    if not (why := compat.coordination_barrier(name, timeout)):
        return
    arrived = compat.coordination_list(name)
    missing = sorted(set(range(jax.process_count())) - set(map(int, arrived)))
    late = f"processes {missing} have not arrived within {timeout:g} s" if missing else why
    raise RuntimeError(f"jax_moe_a2a: {what}, which all processes must do together: {late}")
