"""What dispatch and combine should take on machines that nobody here has: ``python -m
benchmarks.model`` prints the fit, predictions and published figures, and draws results/model-*.png.

A time is a constant, the busiest of links, network and memory, and a tail of local work:

    us = start + slope * max(link, network, memory) + min(memory, tail) + hops

``start``, ``slope`` and ``tail`` are fitted to the newest record on 4 GPUs of one host; rates of
other links, the network and its latency are published figures. Nothing with more than one host has
ever run here: NOTES.md, "A model for more ranks", says where not to trust it.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import jax_moe_a2a as ma
from jax_moe_a2a._src.memory import chance_of_rank as chance_of

from . import plot
from . import record as records

OPERATIONS = ("dispatch", "combine")
LEVELS = ("flat", "two-level")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (128, 4096)
HIDDEN, TOP_K, EXPERTS = 7168, 8, 256
ID_BYTES = 4
MOST_RANKS = 64  # kMaxRanks of cuda/layout.h

# One direction of 400 Gb/s is 50 GB/s; 45 of them is what DeepEP V2 reaches between two hosts:
# 90 GB/s by its count, which has half of the rows stay on their host (its README).
NETWORK_GB_PER_S = 45.0
# Half of the 16.7 us round trip of a small put with a signal, issued by a GPU: Hamidouche et al.,
# GPU-Initiated Networking for NCCL, arXiv:2511.15076.
NETWORK_US = 16.7 / 2
# A row that has landed is read, stored to a peer, and announced: NOTES.md, the timeline of a
# combine (2.1 us to sum what landed, 1.0 for the fence, 1.2 for the flag).
HOP_US = 4.3


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates are GB/s per GPU and direction, of rows; ``domain`` ranks reach each other's memory."""

    name: str
    domain: int
    link: float
    memory: float
    network: float = NETWORK_GB_PER_S
    network_us: float = NETWORK_US


@dataclasses.dataclass(frozen=True)
class Fit:
    """The constants of one operation, and how far each measured point is from them."""

    start: float
    slope: float
    tail: float
    points: tuple[tuple[int, int, float, float], ...]
    """(tokens, hidden, measured us, predicted us)."""

    @property
    def errors(self) -> np.ndarray:
        """Relative, of each point: 0.1 predicts 10 % too much."""
        return np.array([predicted / measured - 1 for *_, measured, predicted in self.points])


@dataclasses.dataclass(frozen=True)
class Load:
    """An exchange of ``tokens`` tokens of ``row_bytes`` bytes per rank, routed uniformly.

    ``copies`` is how often a token crosses to a rank: "rank" is once, however many of its experts
    live there, "choice" is once for each. ``host_limit``: its experts are on so many hosts at most,
    which are drawn uniformly.
    """

    ranks: int
    tokens: int
    row_bytes: int = HIDDEN * 2
    top_k: int = TOP_K
    experts: int = 0
    copies: str = "rank"
    host_limit: int | None = None

    @property
    def num_experts(self) -> int:
        """At least one on each rank."""
        return self.experts or max(EXPERTS, self.ranks)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that leave a rank, which by symmetry are those that arrive, and those of its memory."""

    link: float
    network: float
    memory: float


def expected_distinct(sets: int, experts: int, top_k: int) -> float:
    """How many of ``sets`` equal parts of the experts hold one of ``top_k`` distinct experts, drawn
    uniformly: exact, ``sets * (1 - C(experts - experts/sets, top_k) / C(experts, top_k))``."""
    if experts % sets:
        raise ValueError(f"experts must divide by sets={sets}; got {experts}")
    return sets * chance_of(top_k, experts, experts // sets)


def copies_of(load: Load, hosts: int) -> tuple[float, float]:
    """Expected copies of a token for one rank and for one host."""
    if load.copies == "choice":
        return load.top_k / load.ranks, load.top_k / hosts
    chosen = min(hosts, load.host_limit or hosts)
    experts = load.num_experts * chosen // hosts
    ranks = load.ranks * chosen // hosts
    rank = expected_distinct(ranks, experts, load.top_k) / load.ranks
    return rank, expected_distinct(chosen, experts, load.top_k) / hosts


def traffic(load: Load, machine: Machine, levels: str, operation: str) -> Traffic:
    """Bytes per rank of one exchange.

    Flat: a copy for each rank crosses by itself. Two-level: one for each host crosses to the rank
    with the sender's local index, which stores it to the ranks of its host that want it; so links
    carry what all hosts send to this one. Combine is the same backwards.
    """
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
    """Microseconds of dispatch without routing, or of combine."""
    bytes_ = traffic(load, machine, levels, operation)
    memory = bytes_.memory / machine.memory / 1e3
    busiest = max(bytes_.link / machine.link, bytes_.network / machine.network) / 1e3
    us = fit.start + fit.slope * max(busiest, memory) + min(memory, fit.tail)
    if load.ranks > machine.domain:
        us += machine.network_us + (HOP_US if levels == "two-level" else 0)
    return us


def predict_in_turn(fit: Fit, load: Load, machine: Machine, operation: str = "dispatch") -> float:
    """Microseconds of two levels as the package has them: an exchange between hosts, and then one
    within the host. What lands of the first is rows in memory, zeros where none does."""
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
    """How many times faster a route, a dispatch and a combine are in two levels, one after the
    other, than flat. The route sends ids to all hosts first, in an exchange of its own."""
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
    """Microseconds of routing as it is today: every rank reads the ids of all ranks.

    ``fit`` is (start, us per id). Two-level: ids cross once per host and are forwarded.
    """
    local = min(machine.domain, load.ranks)
    ids = load.tokens * load.top_k
    crossing = load.ranks - local if levels == "flat" else load.ranks // local - 1
    network = crossing * ids * ID_BYTES / machine.network / 1e3
    us = fit[0] + max(fit[1] * ids * load.ranks, network)
    return us + (machine.network_us if load.ranks > local else 0)


def measured(record: dict[str, Any], operation: str, includes_route: bool) -> list[dict[str, Any]]:
    """Our rows of the standard settings with uniform routing and tight capacity."""
    return [
        row
        for row in record["rows"]
        if (row["method"], row["op"], row["includes_route"]) == ("ours", operation, includes_route)
        and (row["sweep"], row["skew"], row["capacity_kind"]) == ("", 1, "tight")
        and row["dtype"] == "bfloat16"
    ]


def here(record: dict[str, Any]) -> Machine:
    """The machine of a record, by the rates that were measured in the same run."""
    wire = record["wire"]
    link = max(result["gb_per_s"] for result in wire["results"])
    return Machine("NVLink 4, 8 a host", 8, link, wire["local_gb_per_s"])


def machines(record: dict[str, Any]) -> tuple[Machine, ...]:
    """The record's own kind, 8 to a host, and NVLink 5 with twice its rate (1.8 TB/s both ways to
    NVLink 4's 0.9: NVIDIA's page of NVLink) and memory of 8 TB/s to the H200's 4.8."""
    own = here(record)
    newer = dict(link=2 * own.link, memory=own.memory * 8.0 / 4.8)
    return (
        own,
        Machine("NVLink 5, 8 a host", 8, **newer),
        Machine("NVLink 5, 64 of 72 in a rack", 64, **newer),
    )


def fit(record: dict[str, Any], operation: str, leave_out: int | None = None) -> Fit:
    """Least squares of relative errors over the measured points, or all but one; the tail by
    trying."""
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
    points = tuple(
        (
            row["tokens"],
            row["hidden"],
            row["us"],
            predict(constants, load, machine, "flat", operation),
        )
        for row, load in zip(rows, loads, strict=True)
    )
    return dataclasses.replace(constants, points=points)


def held_out_errors(record: dict[str, Any], operation: str) -> np.ndarray:
    """The relative error of each point in a fit that has not seen it."""
    points = range(len(fit(record, operation).points))
    return np.array([fit(record, operation, leave_out=i).errors[i] for i in points])


def fit_route(record: dict[str, Any]) -> tuple[float, float]:
    """(start, us per id of all ranks) of routing, by least squares of relative errors."""
    rows = measured(record, "route", includes_route=True)
    us = np.array([row["us"] for row in rows])
    ids = np.array([row["tokens"] * row["top_k"] * record["ranks"] for row in rows])
    (start, slope), *_ = np.linalg.lstsq(
        np.stack([1 / us, ids / us], 1), np.ones(len(us)), rcond=None
    )
    return float(start), float(slope)


@dataclasses.dataclass(frozen=True)
class Published:
    """A figure of somebody else's, as a time; ``levels`` and ``load`` are its own scheme."""

    source: str
    operation: str
    load: Load
    levels: str
    machine: Machine
    us: float


DEEPEP = "DeepEP V1, docs/legacy.md"
DEEPEP_V2 = "DeepEP V2, README.md"
NCCL_EP = "NCCL EP, contrib/nccl_ep/README.md"
FP8_ROW = HIDDEN + HIDDEN // 128 * 4  # a value a byte, a float32 scale for each 128


def published(record: dict[str, Any]) -> list[Published]:
    """What DeepEP and NCCL EP publish for 16 to 64 ranks on 400 Gb/s per GPU, hidden 7168, top-8.

    Their GB/s count rows that stay on the host too (a row for each host in the high-throughput
    kernels, for each choice in the low-latency ones): the time is those bytes over that rate.
    """
    own = here(record)
    # H800: "~160 GB/s NVLink maximum bandwidth", of which their own kernels reach 153 to 158.
    h800 = dataclasses.replace(own, name="H800", link=155.0)
    found = []

    def low_latency(source: str, operation: str, ranks: int, us: float, row_bytes: int) -> None:
        load = Load(ranks, 128, row_bytes, experts=EXPERTS, copies="choice")
        machine = own if source == NCCL_EP else h800
        found.append(Published(source, operation, load, "flat", machine, us))

    for ranks, dispatch_us, combine_us in ((16, 118, 195), (32, 155, 273), (64, 173, 314)):
        low_latency(DEEPEP, "dispatch", ranks, dispatch_us, FP8_ROW)
        low_latency(DEEPEP, "combine", ranks, combine_us, HIDDEN * 2)
    all_choices = 128 * TOP_K * HIDDEN * 2 / 1e3
    for ranks, dispatch_rate, combine_rate in (
        (16, 76.7, 73.0),
        (32, 53.6, 50.0),
        (64, 48.8, 43.8),
    ):
        low_latency(NCCL_EP, "dispatch", ranks, all_choices / dispatch_rate, HIDDEN * 2)
        low_latency(NCCL_EP, "combine", ranks, all_choices / combine_rate, HIDDEN * 2)

    def throughput(source: str, operation: str, ranks: int, rate: float, tokens: int) -> None:
        row_bytes = FP8_ROW if operation == "dispatch" else HIDDEN * 2
        limit = 4 if source == DEEPEP else None  # V1 was measured with top-4 of groups
        load = Load(ranks, tokens, row_bytes, experts=EXPERTS, host_limit=limit)
        machine = h800 if source == DEEPEP else own
        hosts = ranks // machine.domain
        counted = copies_of(load, hosts)[1] * hosts * tokens * row_bytes
        us = counted / rate / 1e3
        found.append(Published(source, operation, load, "two-level", machine, us))

    for ranks, dispatch_rate, combine_rate in ((16, 43, 43), (32, 58, 57), (64, 51, 50)):
        throughput(DEEPEP, "dispatch", ranks, dispatch_rate, 4096)
        throughput(DEEPEP, "combine", ranks, combine_rate, 4096)
    for ranks, dispatch_rate, combine_rate in ((16, 90, 81), (32, 61, 61)):
        throughput(DEEPEP_V2, "dispatch", ranks, dispatch_rate, 8192)
        throughput(DEEPEP_V2, "combine", ranks, combine_rate, 8192)
    return found


def workspace_bytes(ranks: int, tokens: int, hidden: int = HIDDEN, top_k: int = TOP_K) -> int:
    """Of one rank, as the package lays it out: a slot for every token of every rank."""
    return ma.memory_estimate(
        num_tokens=tokens,
        hidden=hidden,
        top_k=top_k,
        num_experts=max(EXPERTS, ranks),
        group_size=ranks,
    ).workspace_bytes


def tables(record: dict[str, Any]) -> str:
    """The fit, predictions and comparisons, in Markdown."""
    fits = {operation: fit(record, operation) for operation in OPERATIONS}
    route = fit_route(record)
    lines = [f"Fitted to the record of {record['date']}, commit {record['commit'][:10]}:", ""]
    lines.append("| | start | slope | tail | mean error | largest | unseen, mean | largest |")
    lines.append("| --- " * 8 + "|")
    for operation, one in fits.items():
        seen, unseen = one.errors, held_out_errors(record, operation)
        cells = (f"{abs(e).mean():.1%} | {max(e, key=abs):+.1%}" for e in (seen, unseen))
        constants = f"{one.start:.1f} | {one.slope:.3f} | {one.tail:.2f}"
        lines.append(f"| {operation} | {constants} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Route: {route[0]:.1f} us and {1e3 * route[1]:.3f} ns for each id of all ranks.",
        "",
    ]
    lines += ["| tokens x hidden | operation | measured | predicted | error |", "| --- " * 5 + "|"]
    for operation, one in fits.items():
        for (tokens, hidden, us, predicted), error in zip(one.points, one.errors, strict=True):
            lines.append(
                f"| {tokens} x {hidden} | {operation} | {us:.1f} | {predicted:.1f} | {error:+.1%} |"
            )
    for tokens in TOKENS:
        lines += ["", f"{tokens} tokens, dispatch / combine in us; route flat and two-level:", ""]
        names = [f"{m.name}, {level}" for m in machines(record) for level in LEVELS]
        lines += [
            "| ranks | " + " | ".join(names) + " | route |",
            "| --- " * (len(names) + 2) + "|",
        ]
        for ranks in RANKS:
            load = Load(ranks, tokens)
            cells = [
                " / ".join(f"{predict(fits[op], load, m, level, op):,.0f}" for op in OPERATIONS)
                for m in machines(record)
                for level in LEVELS
            ]
            routes = (predict_route(route, load, here(record), level) for level in LEVELS)
            cells.append(" / ".join(f"{us:,.0f}" for us in routes))
            lines.append(f"| {ranks:,} | " + " | ".join(cells) + " |")
    lines += ["", "| published | | ranks | tokens | us | predicted for its scheme | |"]
    lines.append("| --- " * 7 + "|")
    for one in published(record):
        us = predict(fits[one.operation], one.load, one.machine, one.levels, one.operation)
        lines.append(
            f"| {one.source} | {one.operation} | {one.load.ranks} | {one.load.tokens} "
            f"| {one.us:,.0f} | {us:,.0f} | {us / one.us - 1:+.0%} |"
        )
    lines += ["", "| ranks | " + " | ".join(f"workspace, {t} tokens, GiB" for t in TOKENS) + " |"]
    lines.append("| --- " * (1 + len(TOKENS)) + "|")
    for ranks in RANKS:
        cells = [f"{workspace_bytes(ranks, tokens) / 2**30:,.2f}" for tokens in TOKENS]
        lines.append(f"| {ranks:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(record: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """model-times.png and model-workspace.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fits = {operation: fit(record, operation) for operation in OPERATIONS}
    figure, axes = plt.subplots(2, 2, figsize=(13, 9))
    for row, tokens in zip(axes, TOKENS, strict=True):
        for axis, operation in zip(row, OPERATIONS, strict=True):
            for i, machine in enumerate(machines(record)):
                for levels, style in zip(LEVELS, ("--", "-"), strict=True):
                    us = [
                        predict(fits[operation], Load(ranks, tokens), machine, levels, operation)
                        for ranks in RANKS
                    ]
                    label = f"{machine.name}, {levels}"
                    axis.plot(RANKS, us, style, color=f"C{i}", label=label, marker="o", ms=3)
            _draw_published(axis, record, operation, tokens)
            axis.set_title(f"{operation}, {tokens:,} tokens")
            axis.set(yscale="log", xlabel="ranks", ylabel="µs, predicted")
            _finish(axis)
    figure.suptitle(
        f"A model, not a measurement: hidden {HIDDEN:,}, top-{TOP_K} of {EXPERTS} experts (at "
        "least one a rank), bfloat16, 400 Gb/s per GPU; "
        f"fitted to {record['gpus']}, {record['date']}",
        fontsize=10,
    )
    made = [folder / "model-times.png", folder / "model-workspace.png"]
    figure.tight_layout()
    figure.savefig(made[0], dpi=120)
    plt.close(figure)

    figure, axis = plt.subplots(figsize=(9, 4.8))
    for tokens in (128, 1024, 4096):
        sizes = [workspace_bytes(ranks, tokens) / 2**30 for ranks in RANKS]
        axis.plot(RANKS, sizes, marker="o", ms=3, label=f"{tokens:,} tokens per rank")
    axis.axhline(141e9 / 4 / 2**30, label="what XLA leaves of an H200 by default", **plot.WIRE)
    axis.axvline(MOST_RANKS, color="gray", ls=":", label="most ranks of the kernels today")
    axis.set(yscale="log", xlabel="ranks", ylabel="workspace of a rank, GiB")
    _finish(axis)
    figure.suptitle(f"Workspace as ranks grow: hidden {HIDDEN:,}, bfloat16", fontsize=10)
    figure.tight_layout()
    figure.savefig(made[1], dpi=120)
    plt.close(figure)
    return made


def _draw_published(axis: Any, record: dict[str, Any], operation: str, tokens: int) -> None:
    """Others' figures of as many tokens, each with its dtype and routing where they differ."""
    of_sources: dict[str, list[tuple[int, float]]] = {}
    for one in published(record):
        if (one.operation, one.load.tokens) == (operation, tokens):
            label = f"published: {one.source.partition(',')[0]}, "
            label += "FP8" if one.load.row_bytes == FP8_ROW else "bfloat16"
            if one.load.host_limit:
                label += f", top-{one.load.host_limit} of hosts"
            of_sources.setdefault(label, []).append((one.load.ranks, one.us))
    for (label, points), marker in zip(of_sources.items(), "x+*", strict=False):
        axis.plot(*zip(*points, strict=True), marker, color="black", ms=9, label=label)


def _finish(axis: Any) -> None:
    plot._ticks_at(axis, RANKS, is_log=True)
    plot._plain_numbers(axis)
    axis.grid(True, which="major", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(fontsize=7)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=records.FOLDER, help="of the plots")
    arguments = parser.parse_args(argv)
    record = newest_record()
    print(tables(record))
    for path in draw(record, arguments.out):
        print(path)


def newest_record() -> dict[str, Any]:
    """The standard settings on the most GPUs."""
    found = records.newest("")
    assert found is not None, "no record"
    return found.record


if __name__ == "__main__":
    main()
