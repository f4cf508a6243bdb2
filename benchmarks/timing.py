"""Measure the device time of an operation as XLA runs it inside one jitted program.

A program repeats the operation. Each repetition needs a result of the previous repetition, so XLA
cannot merge, drop or overlap repetitions. A sample measures the wall-clock time of a few runs of
the program without waits between the runs, and then the time of more runs. The time of a repetition
is the difference of the two times, divided by the difference of the numbers of repetitions. The
host needs half a millisecond or more to start the first run and to notice the end of the last run.
Both times contain this overhead, so the difference does not.

A *tie* is the dependency between repetitions: one small kernel, which adds a number to integers of
the inputs. The number is 1 if the first element of a result is huge, and otherwise 0. It is always
0, but XLA cannot know this before it has the results. All calls of this package read the integers.
For plain JAX, an ``optimization_barrier`` also makes all other inputs wait. To measure the time of
a tie, a program runs only ties, on arrays of about the same sizes. A row has the time without ties,
and the measured time.
"""

from __future__ import annotations

import functools
import operator
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SAMPLE_SECONDS = 0.025
MAX_CALLS = 16  # XLA delays a program if about 32 programs have not ended
MAX_TRIES = 50  # of a sample: on a busy CPU, few runs may take longer than many runs
PROGRAM_US = 5000.0
MAX_REPS = 64
TIE_REPS = 192

# Instructions in the text of a compiled program that move data between devices.
_OURS = re.compile(r'custom_call_target="moe_a2a_')
_COLLECTIVE = re.compile(
    r"\b(?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_FUSION = re.compile(r"\bfusion\(")


class Timing(NamedTuple):
    """The median, smallest and largest time of one repetition, in microseconds."""

    median_us: float
    min_us: float
    max_us: float

    def row(self) -> dict[str, float]:
        names = ("us", "min_us", "max_us")
        return {name: round(us, 3) for name, us in zip(names, self, strict=True)}

    @classmethod
    def of(cls, us: Sequence[float]) -> Timing:
        return cls(statistics.median(us), min(us), max(us))


def per_rank(fn: Callable[..., Any], mesh: Mesh) -> Any:
    """Return a jitted function that runs ``fn``, a function of one rank, on all ranks. Its
    arguments and results have a leading rank axis."""
    spec = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)

    def of_one_rank(*args: Any) -> Any:
        results = fn(*jax.tree.map(lambda leaf: leaf[0], args))
        return jax.tree.map(lambda leaf: leaf[None], results)

    # With check_vma=True, the transposes of collectives would contain casts.
    mapped = jax.shard_map(of_one_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped, in_shardings=sharding, out_shardings=sharding)


def chain(
    step: Callable[..., Any], reps: int, tied_axes: int | None = 2
) -> Callable[..., list[jax.Array]]:
    """Return a function that calls ``step(state, *fixed)`` ``reps`` times with the same arguments.

    It returns the first element of each result of the last call, so that XLA computes the results.
    ``tied_axes`` is the argument ``axes`` of ``pick_tied``. If it is None, every array of the state
    waits for the results of the previous call.
    """
    step = jax.jit(step)  # JAX traces it once, and XLA inlines each call

    def repeated(state: Any, *fixed: Any) -> list[jax.Array]:
        leaves, treedef = jax.tree.flatten(state)
        tied = pick_tied(leaves, tied_axes)
        results: list[jax.Array] = []
        for _ in range(reps):
            # The barrier prevents XLA from computing only the first elements of results.
            results = lax.optimization_barrier(
                jax.tree.leaves(step(jax.tree.unflatten(treedef, leaves), *fixed))
            )
            leaves = tie(leaves, tied, results)
            if tied_axes is None:
                # All leaves now depend on the results. Otherwise, XLA would compute an operation on
                # an untied leaf (an all_gather of x, for example) once for all repetitions.
                leaves = lax.optimization_barrier(leaves)
        return [first_element(leaf) for leaf in results]

    return repeated


def chain_of_ties(reps: int) -> Callable[[Any], list[jax.Array]]:
    """Return a function that repeats the ties of ``chain`` without steps. Its argument is a pair:
    the tied arrays, and arrays that replace the results of steps."""
    tie_all = jax.jit(lambda tied, results: tie(tied, range(len(tied)), results))

    def repeated(state: tuple[list[jax.Array], list[jax.Array]]) -> list[jax.Array]:
        tied, stand_ins = state
        for _ in range(reps):
            tied = tie_all(tied, lax.optimization_barrier([*stand_ins, *tied]))
        return [first_element(leaf) for leaf in tied]

    return repeated


def pick_tied(leaves: Sequence[Any], axes: int | None = 2) -> list[int]:
    """Return the indices of the arrays of a state that a tie changes.

    A tie changes the smallest integer array with at least ``axes`` axes (ids, or slots of a
    routing), because all our calls read this array. If ``axes`` is None, a tie changes all integer
    arrays. If the state has no integers, a tie changes the smallest array.
    """
    by_size = sorted(range(len(leaves)), key=lambda i: leaves[i].size)
    integers = [i for i in by_size if jnp.issubdtype(leaves[i].dtype, jnp.integer)]
    if axes is None and integers:
        return integers
    matrices = [i for i in integers if leaves[i].ndim >= (axes or 0)]
    return (matrices or integers or by_size)[:1]


def tie(
    leaves: Sequence[jax.Array], tied: Sequence[int], results: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the ``leaves`` with unchanged values. One kernel makes the leaves at the indices
    ``tied`` depend on the ``results``."""
    is_huge = [first_element(leaf).astype(jnp.float32) > 3e38 for leaf in results]
    never = functools.reduce(operator.or_, is_huge)
    later = list(leaves)
    for i in tied:
        later[i] = later[i] + never.astype(later[i].dtype)
    return later


def first_element(x: jax.Array) -> jax.Array:
    """Return the first element as a scalar. A slice computes it, because XLA can fuse slices."""
    return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())


def check_unmerged(compiled: Any, reps: int, exchanges: int = 1) -> None:
    """Check that a compiled program has ``reps`` repetitions of at least ``exchanges`` custom calls
    of this package, or of as many collectives. Otherwise raise RuntimeError."""
    text = compiled.as_text()
    calls, collectives = len(_OURS.findall(text)), len(_COLLECTIVE.findall(text))
    if calls % reps or max(calls, collectives) < reps * exchanges:
        raise RuntimeError(
            f"the compiled program must hold {reps} repetitions of {exchanges} exchanges; it has "
            f"{calls} custom calls and {collectives} collectives"
        )


def count_fusions(compiled: Any) -> int:
    """Return the number of fusions in a program. A program of ``chain_of_ties`` has one per tie."""
    return len(_FUSION.findall(compiled.as_text()))


def take_turns(samplers: Mapping[Any, Callable[[], Any]], samples: int) -> dict[Any, list[Any]]:
    """Return samples by name. In each turn, each sampler takes one, because a hot GPU lowers its
    clock. The order is random, because the clock also depends on the previous program."""
    taken: dict[Any, list[Any]] = {name: [] for name in samplers}
    draw = random.Random(0)
    for _ in range(samples):
        for name in draw.sample(list(samplers), len(samplers)):
            taken[name].append(samplers[name]())
    return taken


def sampler(
    program: Callable[..., Any],
    args: tuple[Any, ...],
    reps: int,
    sample_seconds: float = SAMPLE_SECONDS,
) -> Callable[[], float]:
    """Run a compiled program a few times. Return a function that measures the microseconds of a
    repetition.

    The function calls the program for about ``sample_seconds``. If many calls take no longer than
    few calls, the function measures again, at most ``MAX_TRIES`` times.
    """

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = None  # frees memory for the results of the next call
            out = program(*args)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    seconds(1)
    once = min(seconds(1) for _ in range(2))
    calls = max(1, min(round(sample_seconds / once), MAX_CALLS - MAX_CALLS // 4))
    before = max(1, calls // 4)
    seconds(before + calls)

    def sample_us() -> float:
        for _ in range(MAX_TRIES):
            difference = seconds(before + calls) - seconds(before)
            if difference > 0:
                return difference / (calls * reps) * 1e6
        raise RuntimeError(
            f"{before + calls} calls must take longer than {before}; {MAX_TRIES} times they did not"
        )

    return sample_us
