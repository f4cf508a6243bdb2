"""Time on the device, of an operation as XLA runs it inside one jitted program.

The operation is repeated in the program, and each repetition needs a result of the one before, so
that none is merged with another, dropped or run beside it. The program runs well past the cost of
launching it, and several times in a row without waiting, so that wall-clock time over repetitions
is time on the device. What ties the repetitions, a comparison and an addition over the routing's
integers, is in the figures: a few microseconds.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SAMPLE_SECONDS = 0.015
MAX_CALLS = 16  # XLA holds back a program when about 32 are on their way
PROGRAM_US = 5000.0
MAX_REPS = 64

# What moves data between devices, in the text of a compiled program. There is at least one such
# instruction in everything that is timed here.
_OURS = re.compile(r'custom_call_target="moe_a2a_')
_COLLECTIVE = re.compile(
    r"\b(?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


class Timing(NamedTuple):
    """Microseconds of one repetition, over the samples."""

    median_us: float
    min_us: float
    max_us: float


def per_rank(fn: Callable[..., Any], mesh: Mesh) -> Any:
    """``fn`` of one rank's arrays as a jitted function of all ranks' arrays.

    The leaves of arguments and results, pytrees, get a leading rank axis.
    """
    spec = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)

    def of_one_rank(*args: Any) -> Any:
        results = fn(*jax.tree.map(lambda leaf: leaf[0], args))
        return jax.tree.map(lambda leaf: leaf[None], results)

    # check_vma would refuse nothing here; without it the collectives transpose without casts.
    mapped = jax.shard_map(of_one_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped, in_shardings=sharding, out_shardings=sharding)


def chain(step: Callable[[Any], Any], reps: int) -> Callable[[Any], Any]:
    """``step`` (state -> results) ``reps`` times on the same state, one after the other.

    The result is one element of each of the last results: enough to keep them alive.
    """
    step = jax.jit(step)  # traced once, inlined by XLA

    def repeated(state: Any) -> Any:
        first_elements: list[jax.Array] = []
        for _ in range(reps):
            # The barrier keeps XLA from computing only the elements that are taken.
            results = lax.optimization_barrier(jax.tree.leaves(step(state)))
            first_elements = [leaf.reshape(-1)[:1] for leaf in results]
            state = tie(state, first_elements)
        return first_elements

    return repeated


def tie(state: Any, first_elements: list[jax.Array]) -> Any:
    """``state`` unchanged, but in a way that XLA cannot know before it has ``first_elements``.

    It shows in the smallest matrix of integers (expert ids, or the slots of a routing), which every
    exchange reads; without one, in all integers, or in the smallest array.
    """
    never = jnp.stack([(x.astype(jnp.float32) > 3e38).any() for x in first_elements]).any()
    leaves, treedef = jax.tree.flatten(state)
    by_size = sorted(range(len(leaves)), key=lambda i: leaves[i].size)
    integers = [i for i in by_size if jnp.issubdtype(leaves[i].dtype, jnp.integer)]
    matrices = [i for i in integers if leaves[i].ndim == 2]
    for i in matrices[:1] or integers or by_size[:1]:
        leaves[i] = leaves[i] + never.astype(leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves)


def repetitions(expected_us: float, most: int = MAX_REPS) -> int:
    """How often to repeat in one program something that takes about so long."""
    return max(1, min(round(PROGRAM_US / expected_us), most))


def check_unmerged(compiled: Any, reps: int) -> None:
    """Checks that the program that XLA made still holds ``reps`` repetitions.

    Raises:
      RuntimeError: it does not.
    """
    text = compiled.as_text()
    calls, collectives = len(_OURS.findall(text)), len(_COLLECTIVE.findall(text))
    if calls % reps or max(calls, collectives) < reps:
        raise RuntimeError(
            f"the compiled program must hold {reps} repetitions; it has {calls} custom calls and "
            f"{collectives} collectives"
        )


def measure(program: Callable[..., Any], args: tuple[Any, ...], reps: int, samples: int) -> Timing:
    """Runs a compiled program and returns the time of one of its repetitions."""

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = program(*args)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    seconds(1)
    once = min(seconds(1) for _ in range(2))
    calls = max(1, min(round(SAMPLE_SECONDS / once), MAX_CALLS))
    seconds(calls)
    us = [seconds(calls) / (calls * reps) * 1e6 for _ in range(samples)]
    return Timing(statistics.median(us), min(us), max(us))
