"""Measure the device time of an operation in one jitted program, which repeats it. A sample is the
difference between few and many runs of the program, so it has no overhead of the host. A *tie* is
the dependency between repetitions: one small kernel, which adds 0 to integers of the inputs. This 0
is computed from the previous results, and all calls of this package read these integers, so a
repetition waits for the previous one. A row has the time without ties, and the measured time."""

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

_OURS = re.compile(r'custom_call_target="moe_a2a_')
_COLLECTIVE = re.compile(
    r"\b(?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_FUSION = re.compile(r"\bfusion\(")


class Timing(NamedTuple):
    """Times of one repetition, in microseconds."""

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
    """Run ``fn`` on each rank. Arguments and results of the program have a leading rank axis."""
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
    """Return a function that calls ``step(state, *fixed)`` ``reps`` times. If ``tied_axes`` is
    None, every array of the state waits for the previous results."""
    step = jax.jit(step)  # JAX traces it once, and XLA inlines each call

    def repeated(state: Any, *fixed: Any) -> list[jax.Array]:
        leaves, treedef = jax.tree.flatten(state)
        tied = pick_tied(leaves, tied_axes)
        results: list[jax.Array] = []
        for _ in range(reps):
            # XLA could otherwise compute only the first elements of results.
            results = lax.optimization_barrier(
                jax.tree.leaves(step(jax.tree.unflatten(treedef, leaves), *fixed))
            )
            leaves = tie(leaves, tied, results)
            if tied_axes is None:
                # XLA would otherwise compute an operation on an untied leaf once for all
                # repetitions.
                leaves = lax.optimization_barrier(leaves)
        return [first_element(leaf) for leaf in results]

    return repeated


def chain_of_ties(reps: int) -> Callable[[Any], list[jax.Array]]:
    """Return a function of ties only. Its argument: tied arrays, and arrays in place of results."""
    tie_all = jax.jit(lambda tied, results: tie(tied, range(len(tied)), results))

    def repeated(state: tuple[list[jax.Array], list[jax.Array]]) -> list[jax.Array]:
        tied, stand_ins = state
        for _ in range(reps):
            tied = tie_all(tied, lax.optimization_barrier([*stand_ins, *tied]))
        return [first_element(leaf) for leaf in tied]

    return repeated


def pick_tied(leaves: Sequence[Any], axes: int | None = 2) -> list[int]:
    """Return the indices of the arrays that a tie changes: the smallest integer array with at least
    ``axes`` axes, because all our calls read it. If ``axes`` is None, return all integer arrays. If
    there are no integers, return the smallest array."""
    by_size = sorted(range(len(leaves)), key=lambda i: leaves[i].size)
    integers = [i for i in by_size if jnp.issubdtype(leaves[i].dtype, jnp.integer)]
    if axes is None and integers:
        return integers
    matrices = [i for i in integers if leaves[i].ndim >= (axes or 0)]
    return (matrices or integers or by_size)[:1]


def tie(
    leaves: Sequence[jax.Array], tied: Sequence[int], results: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the ``leaves`` with unchanged values. Those at ``tied`` depend on the ``results``."""
    is_huge = [first_element(leaf).astype(jnp.float32) > 3e38 for leaf in results]
    never = functools.reduce(operator.or_, is_huge)
    later = list(leaves)
    for i in tied:
        later[i] = later[i] + never.astype(later[i].dtype)
    return later


def first_element(x: jax.Array) -> jax.Array:
    """Return a scalar by a slice, because XLA can fuse slices."""
    return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())


def check_unmerged(compiled: Any, reps: int, exchanges: int = 1) -> None:
    """Raise RuntimeError if there are fewer than ``reps`` times ``exchanges`` custom calls or
    collectives."""
    text = compiled.as_text()
    calls, collectives = len(_OURS.findall(text)), len(_COLLECTIVE.findall(text))
    if calls % reps or max(calls, collectives) < reps * exchanges:
        raise RuntimeError(
            f"the compiled program must hold {reps} repetitions of {exchanges} exchanges; it has "
            f"{calls} custom calls and {collectives} collectives"
        )


def count_fusions(compiled: Any) -> int:
    """Count the fusions, because ``chain_of_ties`` has one fusion per tie."""
    return len(_FUSION.findall(compiled.as_text()))


def take_turns(samplers: Mapping[Any, Callable[[], Any]], samples: int) -> dict[Any, list[Any]]:
    """Return samples by name. The order in a turn is random, because a GPU's clock depends on
    earlier programs."""
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
    """Return a function that measures the microseconds of a repetition. It repeats a sample if many
    calls have taken no longer than few calls."""

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = None  # frees memory
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
