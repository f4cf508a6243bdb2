"""Predict dispatch and combine on machines that were not measured: docs/cost_model.md explains it.

    python -m benchmarks.model          prints the fit and the predictions

    us = start + slope * max(link, network, memory) + min(memory, tail) + hops

``start``, ``slope`` and ``tail`` are fitted to the newest record of the standard settings with the
most GPUs; rates of other links, the network and its latency are published figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from jax_moe_a2a._src.plan.memory import chance_of_rank as chance_of

from . import record as records
from .plot import of
from .readme import table

OPERATIONS = ("dispatch", "combine")
LEVELS = ("flat", "two-level")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (128, 4096)
HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
ID_BYTES = 4

# One direction of 400 Gb/s is 50 GB/s; 45 of them is what DeepEP V2 reaches between two hosts:
# 90 GB/s by its count, which has half of the rows stay on their host (its README).
NETWORK_GB_PER_S = 45.0
# Half of the 16.7 us round trip of a small put with a signal, issued by a GPU: Hamidouche et al.,
# GPU-Initiated Networking for NCCL, arXiv:2511.15076.
NETWORK_US = 16.7 / 2
# A row that has landed is read, stored to a peer, and announced: the timeline of a combine in
# docs/history/speed.md (2.1 us to sum what landed, 1.0 for the fence, 1.2 for the flag).
HOP_US = 4.3


@dataclasses.dataclass(frozen=True)
class Machine:
    """Hold rates in GB/s per GPU and direction; ``domain`` ranks reach each other's memory."""

    name: str
    domain: int
    link: float
    memory: float
    network: float = NETWORK_GB_PER_S
    network_us: float = NETWORK_US


@dataclasses.dataclass(frozen=True)
class Fit:
    """Hold the constants of one operation, and the measured points."""

    start: float
    slope: float
    tail: float
    points: tuple[tuple[int, int, float, float], ...]
    """(tokens, hidden, measured us, predicted us)."""

    @property
    def errors(self) -> np.ndarray:
        """Return the relative error of each point: 0.1 predicts 10 % too much."""
        return np.array([predicted / measured - 1 for *_, measured, predicted in self.points])


@dataclasses.dataclass(frozen=True)
class Load:
    """Hold an exchange of ``tokens`` tokens of ``row_bytes`` bytes per rank, routed uniformly."""

    ranks: int
    tokens: int
    row_bytes: int = HIDDEN * 2
    top_k: int = TOP_K
    experts: int = 0

    @property
    def num_experts(self) -> int:
        """Return the number of experts, at least one on each rank."""
        return self.experts or max(EXPERTS, self.ranks)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Hold the bytes that leave a rank, as many as arrive, and those of its memory."""

    link: float
    network: float
    memory: float


def expected_distinct(sets: int, experts: int, top_k: int) -> float:
    """Return how many of ``sets`` equal parts of the experts hold any of ``top_k`` of them.

    Exact, for uniform draws: ``sets * (1 - C(experts - experts/sets, top_k) / C(experts, top_k))``.
    """
    if experts % sets:
        raise ValueError(f"experts must divide by sets={sets}; got {experts}")
    return sets * chance_of(top_k, experts, experts // sets)


def copies_of(load: Load, hosts: int) -> tuple[float, float]:
    """Return the expected copies of a token for one rank and for one host."""
    rank = expected_distinct(load.ranks, load.num_experts, load.top_k) / load.ranks
    return rank, expected_distinct(hosts, load.num_experts, load.top_k) / hosts


def traffic(load: Load, machine: Machine, levels: str, operation: str) -> Traffic:
    """Return the bytes per rank of one exchange; combine is a dispatch in the other direction."""
    local = min(machine.domain, load.ranks)
    if load.ranks % local:
        raise ValueError(f"ranks must divide by the domain, {local}; got {load.ranks}")
    hosts = load.ranks // local
    rank, host = copies_of(load, hosts)
    one = load.tokens * load.row_bytes
    if levels == "flat":
        link, network, relayed = (local - 1) * rank, (load.ranks - local) * rank, 0.0
    else:
        link, network = hosts * (local - 1) * rank, (hosts - 1) * host
        relayed = network  # rows that land here only to be sent on
    landed = (load.ranks - (operation == "dispatch")) * rank  # own rows skip the landing zone
    memory = 1 + 2 * landed + 2 * relayed + load.top_k
    return Traffic(link * one, network * one, memory * one)


def predict(
    fit: Fit, load: Load, machine: Machine, levels: str = "flat", operation: str = "dispatch"
) -> float:
    """Return the microseconds of dispatch without routing, or of combine."""
    bytes_ = traffic(load, machine, levels, operation)
    memory = bytes_.memory / machine.memory / 1e3
    busiest = max(bytes_.link / machine.link, bytes_.network / machine.network) / 1e3
    us = fit.start + fit.slope * max(busiest, memory) + min(memory, fit.tail)
    if load.ranks > machine.domain:
        us += machine.network_us + (HOP_US if levels == "two-level" else 0)
    return us


def predict_in_turn(fit: Fit, load: Load, machine: Machine, operation: str = "dispatch") -> float:
    """Return the microseconds of two levels as in the package: an exchange between hosts, then one
    within the host. The first one leaves rows in memory, and zeros."""
    hosts = load.ranks // min(machine.domain, load.ranks)
    if hosts == 1:
        return predict(fit, load, machine, "flat", operation)
    both = traffic(load, machine, "two-level", operation)
    one = load.tokens * load.row_bytes
    host = copies_of(load, hosts)[1]
    between = one + 2 * both.network + one * hosts  # read, landed, relayed
    within = both.memory - one - 2 * both.network + one * hosts * host
    us = machine.network_us
    for crossing, memory in (
        (both.network / machine.network, between),
        (both.link / machine.link, within),
    ):
        busy = max(crossing, memory / machine.memory) / 1e3
        us += fit.start + fit.slope * busy + min(memory / machine.memory / 1e3, fit.tail)
    return us


def two_levels_gain(
    fits: dict[str, Fit], route: tuple[float, float], load: Load, machine: Machine
) -> float:
    """Return how many times faster a route, a dispatch and a combine are in two levels, one after
    the other, than flat. The route sends ids to all hosts first, in an exchange of its own."""
    hosts = load.ranks // min(machine.domain, load.ranks)
    ids_us = load.tokens * load.top_k * ID_BYTES * (hosts - 1) / machine.network / 1e3
    flat = predict_route(route, load, machine, "flat")
    turns = fits["dispatch"].start + ids_us + machine.network_us
    turns += route[0] + route[1] * load.tokens * load.top_k * load.ranks
    for operation, fit in fits.items():
        flat += predict(fit, load, machine, "flat", operation)
        turns += predict_in_turn(fit, load, machine, operation)
    return flat / turns


def predict_route(fit: tuple[float, float], load: Load, machine: Machine, levels: str) -> float:
    """Return the microseconds of routing, in which every rank reads the ids of all ranks.

    ``fit`` is (start, us per id). Two-level: ids cross once per host and are forwarded.
    """
    local = min(machine.domain, load.ranks)
    ids = load.tokens * load.top_k
    crossing = load.ranks - local if levels == "flat" else load.ranks // local - 1
    network = crossing * ids * ID_BYTES / machine.network / 1e3
    us = fit[0] + max(fit[1] * ids * load.ranks, network)
    return us + (machine.network_us if load.ranks > local else 0)


def measured(record: dict[str, Any], operation: str, includes_route: bool) -> list[dict[str, Any]]:
    """Return our rows of the standard settings with uniform routing and tight capacity."""
    setting = dict(sweep="", skew=1, sigma=0, idle=0, capacity_kind="tight", dtype="bfloat16")
    timed = dict(method="ours", op=operation, includes_route=includes_route)
    return of(record["rows"], **setting, **timed)


def here(record: dict[str, Any]) -> Machine:
    """Return the machine of a record, with the rates of the same run."""
    wire = record["wire"]
    link = max(result["gb_per_s"] for result in wire["results"])
    return Machine("NVLink 4, 8 a host", 8, link, wire["local_gb_per_s"])


def machines(record: dict[str, Any]) -> tuple[Machine, ...]:
    """Return the record's own kind, 8 to a host, and NVLink 5: twice its link rate (1.8 TB/s
    compared with 0.9), and memory of 8 TB/s compared with 4.8."""
    own = here(record)
    newer = dict(link=2 * own.link, memory=own.memory * 8.0 / 4.8)
    return (
        own,
        Machine("NVLink 5, 8 a host", 8, **newer),
        Machine("NVLink 5, 64 of 72 in a rack", 64, **newer),
    )


def fit(record: dict[str, Any], operation: str, leave_out: int | None = None) -> Fit:
    """Fit least squares of relative errors to the measured points, or all but one.

    The tail is the best of a list.
    """
    machine = here(record)
    rows = measured(record, operation, includes_route=False)
    us = np.array([row["us"] for row in rows])
    loads = [
        Load(record["ranks"], row["tokens"], row["hidden"] * 2, row["top_k"], row["experts"])
        for row in rows
    ]
    bytes_ = [traffic(load, machine, "flat", operation) for load in loads]
    memory = np.array([t.memory for t in bytes_]) / machine.memory / 1e3
    busiest = np.maximum(np.array([t.link for t in bytes_]) / machine.link / 1e3, memory)
    counts = np.arange(len(us)) != leave_out
    matrix = np.stack([1 / us, busiest / us], 1)[counts]
    best: tuple[float, tuple[float, float, float]] = (math.inf, (0.0, 0.0, 0.0))
    for tail in np.arange(0, 30, 0.25):
        target = (1 - np.minimum(memory, tail) / us)[counts]
        (start, slope), *_ = np.linalg.lstsq(matrix, target, rcond=None)
        error = float(np.square(matrix @ (start, slope) - target).sum())
        best = min(best, (error, (float(start), float(slope), float(tail))))
    constants = Fit(*best[1], points=())
    predicted = [predict(constants, load, machine, "flat", operation) for load in loads]
    sizes = [(row["tokens"], row["hidden"], row["us"]) for row in rows]
    points = tuple((*size, us) for size, us in zip(sizes, predicted, strict=True))
    return dataclasses.replace(constants, points=points)


def held_out_errors(record: dict[str, Any], operation: str) -> np.ndarray:
    """Return the relative error of each point in a fit that has not seen it."""
    points = range(len(fit(record, operation).points))
    return np.array([fit(record, operation, leave_out=i).errors[i] for i in points])


def fit_route(record: dict[str, Any]) -> tuple[float, float]:
    """Return (start, us per id of all ranks) of routing, by least squares of relative errors."""
    rows = measured(record, "route", includes_route=True)
    us = np.array([row["us"] for row in rows])
    ids = np.array([row["tokens"] * row["top_k"] * record["ranks"] for row in rows])
    (start, slope), *_ = np.linalg.lstsq(
        np.stack([1 / us, ids / us], 1), np.ones(len(us)), rcond=None
    )
    return float(start), float(slope)


def tables(record: dict[str, Any]) -> Iterable[str]:
    """Return the fit and the predictions in Markdown."""
    fits = {operation: fit(record, operation) for operation in OPERATIONS}
    route = fit_route(record)
    yield f"Fitted to the record of {record['date']}, commit {record['commit'][:10]}:"
    lines = []
    for operation, one in fits.items():
        constants = [f"{one.start:.1f}", f"{one.slope:.3f}", f"{one.tail:.2f}"]
        for errors in (one.errors, held_out_errors(record, operation)):
            constants += [f"{abs(errors).mean():.1%}", f"{max(errors, key=abs):+.1%}"]
        lines.append([operation, *constants])
    names = ["", "start", "slope", "tail", "mean error", "largest", "unseen, mean", "largest"]
    yield table(names, lines)
    yield f"Route: {route[0]:.1f} us and {1e3 * route[1]:.3f} ns for each id of all ranks."
    machines_and_levels = [(m, level) for m in machines(record) for level in LEVELS]
    for tokens in TOKENS:
        yield f"{tokens} tokens, dispatch / combine in us; route flat and two-level:"
        lines = []
        for ranks in RANKS:
            load = Load(ranks, tokens)
            cells = [
                [predict(fits[op], load, m, level, op) for op in OPERATIONS]
                for m, level in machines_and_levels
            ]
            cells.append([predict_route(route, load, here(record), level) for level in LEVELS])
            lines.append([f"{ranks:,}", *(" / ".join(f"{us:,.0f}" for us in c) for c in cells)])
        yield table(["ranks", *(f"{m.name}, {v}" for m, v in machines_and_levels), "route"], lines)


def newest_record() -> dict[str, Any]:
    """Return the standard settings on the most GPUs."""
    found = records.newest("")
    assert found is not None, "no record"
    return found.record


if __name__ == "__main__":
    print("\n\n".join(tables(newest_record())))
