"""Measure the device time of an operation as XLA runs it inside one jitted program.

A program repeats the operation. Each repetition needs a result of the previous repetition, so XLA
cannot merge, drop or overlap repetitions. A sample measures the wall-clock time of a few runs of
the program without waits between the runs, and then the time of more runs. The time on the device
is the difference of the two times, divided by the difference of the numbers of repetitions. The
start of the first run and the notice of the last end take half a millisecond or more. This overhead
is in both times, so the difference does not contain it.

A *tie* is the dependency between repetitions. A tie is one small kernel, which adds a number to
integers of the inputs: 1 if the first element of a result is huge, otherwise 0. The number is
always 0, but XLA cannot know the number before it has the results. All our calls read these
integers. For plain JAX, an ``optimization_barrier`` also makes all other inputs wait. A program of
only ties, on arrays of about the same sizes, measures the time of a tie. A row has the time without
ties, and the measured time.
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
MAX_CALLS = 16  # XLA delays a program if about 32 are outstanding
MAX_TRIES = 50  # for a sample, because few runs on a busy CPU may take longer than many runs
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
    """The median, least and greatest microseconds of one repetition."""

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
    """Return a jitted function of all ranks from a function ``fn`` of one rank. Arguments and
    results get a leading axis of ranks."""
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

    The function returns the first element of each result of the last call, so that XLA computes
    these results. ``tied_axes`` is the argument of ``pick_tied``. With None, every array of the
    state waits for the previous results.
    """
    step = jax.jit(step)  # traced once, inlined by XLA

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
                # Every leaf changes. Otherwise XLA would compute operations on an unchanged leaf
                # (an all_gather of x, for example) only once for all repetitions.
                leaves = lax.optimization_barrier(leaves)
        return [first_element(leaf) for leaf in results]

    return repeated


def chain_of_ties(reps: int) -> Callable[[Any], list[jax.Array]]:
    """Return a function that repeats the ties of ``chain`` without steps. The argument of the
    function is a pair: the tied arrays, and arrays in place of the results of steps."""
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
    """Return the ``leaves`` with unchanged values. The leaves at the indices ``tied`` now depend on
    the ``results``, through one kernel."""
    is_huge = [first_element(leaf).astype(jnp.float32) > 3e38 for leaf in results]
    never = functools.reduce(operator.or_, is_huge)
    later = list(leaves)
    for i in tied:
        later[i] = later[i] + never.astype(later[i].dtype)
    return later


def first_element(x: jax.Array) -> jax.Array:
    """Return the first element as a scalar, by a slice, which XLA can fuse."""
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
    """Return samples by name. Samplers take turns, because a hot GPU lowers its clock. Each turn
    has a random order, because the clock also depends on the previous program."""
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

    The function calls the program for about ``sample_seconds``. If more calls take no longer than
    fewer calls, the function measures again, at most ``MAX_TRIES`` times.
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
