"""Simulate the load of ranks with a planned placement: ``python -m benchmarks.placement``.

The simulation needs no GPU. The experts of a token are the ``top_k`` largest values of popularity
plus Gumbel noise. Popularity is normal with standard deviation sigma. The program plans a placement
from the load of one batch, and measures the load of ranks in later batches of the same popularity.
At the end, the program prints the table of docs/placement.md: times of layers with these loads,
calculated from measured rates.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import jax_moe_a2a as ma

from . import record as records
from .run import say, set_platform

TOKENS, TOP_K, EXPERTS, SPARE, BATCHES = 4096, 8, 256, 2, 16
CAPACITY_FACTOR = 1.15
METHODS = ("no plan", "moving alone", "home form", "serving form")

HIDDEN, INTERMEDIATE, ITEM_BYTES = 7168, 2048, 2
PRODUCTS_FLOPS = 663e12  # "B experts" of "ours" in 2026-11-23-1xH100-products.json
WEIGHTS_OF_EXPERT = 3 * HIDDEN * INTERMEDIATE  # gate, up and down
LINK_BYTES = 347e9  # per second, link limit of 4,096 tokens in 2026-11-21-4xH200.json


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=(8, 32))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--out", type=pathlib.Path, help="the record's path (.json)")
    args = parser.parse_args()
    set_platform(None)
    record = records.head("none", 0)
    for ranks in args.ranks:
        for sigma in (1.1, 1.7):
            for row in simulate(ranks, sigma, args.methods):
                record["rows"].append(row)
                say(f"{ranks} ranks, sigma {sigma}: {row['method']}, {row['load']}")
    path = args.out or records.FOLDER / f"{records.today()}-placement.json"
    records.write(record, path)
    say(f"wrote {path}")
    for line in table(record["rows"]):
        say(line)
    return 0


def table(rows: list[records.Row]) -> Iterator[str]:
    yield "| ranks, σ | no plan | home form | its fetch | pays from, tokens per rank |"
    yield "| --- | --- | --- | --- | --- |"
    loads = {(r["ranks"], r["sigma"], r["method"]): r["load"][0] for r in rows}
    for row in rows:
        ranks, sigma, tokens = (row[key] for key in ("ranks", "sigma", "tokens"))
        if row["method"] != "home form" or (ranks, sigma, "no plan") not in loads:
            continue
        fetch = fetch_us(row["fetched"])
        before, after = (
            layer_us(ranks, tokens, loads[ranks, sigma, method])
            for method in ("no plan", "home form")
        )
        least = tokens * fetch / (before - after)
        us = before, after + fetch, fetch, least
        yield f"| {ranks}, {sigma} | " + " | ".join(f"{value:,.0f}" for value in us) + " |"


def layer_us(ranks: int, tokens: int, load: float) -> float:
    rows = load * tokens * TOP_K
    crossing = tokens * (ranks - 1) * (1 - (1 - load / ranks) ** TOP_K)
    products = rows * 2 * WEIGHTS_OF_EXPERT / PRODUCTS_FLOPS
    return 1e6 * (products + 2 * crossing * HIDDEN * ITEM_BYTES / LINK_BYTES)


def fetch_us(experts: int) -> float:
    return 1e6 * experts * WEIGHTS_OF_EXPERT * ITEM_BYTES / LINK_BYTES


def simulate(ranks: int, sigma: float, methods: Sequence[str]) -> Iterator[records.Row]:
    """Yield a row for each method. ``load`` and ``dropped`` are pairs: the mean and the largest
    value over all batches."""
    rng = np.random.default_rng([0, ranks])
    popularity = rng.normal(0, sigma, EXPERTS).astype(np.float32)
    counts = [_counts(popularity, ranks, rng) for _ in range(BATCHES + 1)]
    plans = _plans(counts[0].sum(0), ranks)
    for method in methods:
        loads, drops = [], []
        for batch in counts[1:]:
            rows = _rank_rows(plans[method], batch, ranks)
            loads.append(rows.max() / rows.mean())
            room = CAPACITY_FACTOR * rows.mean()
            drops.append(np.maximum(rows - room, 0).sum() / rows.sum())
        spread = lambda values: [round(float(f(values)), 4) for f in (np.mean, np.max)]
        yield dict(
            sweep="placement",
            method=method,
            ranks=ranks,
            sigma=sigma,
            seed=0,
            tokens=TOKENS,
            top_k=TOP_K,
            experts=EXPERTS,
            spare=0 if method in METHODS[:2] else SPARE,
            replicas=int((plans[method].slot_experts >= 0).sum()) - EXPERTS,
            fetched=_num_fetched(plans[method], ranks) if method == "home form" else 0,
            batches=BATCHES,
            load=spread(loads),
            dropped=spread(drops),
        )


def _num_fetched(placement: ma.Placement, ranks: int) -> int:
    local = EXPERTS // ranks
    spare = np.asarray(placement.slot_experts).reshape(ranks, -1)[:, local:]
    sent = np.bincount(spare[spare >= 0] // local, minlength=ranks)
    return int(max(sent.max(), (spare >= 0).sum(1).max()))


def _plans(load: np.ndarray, ranks: int) -> dict[str, ma.Placement]:
    plan = lambda **options: ma.plan_placement(load, num_ranks=ranks, **options)
    return {
        "no plan": ma.Placement.from_slots(np.arange(EXPERTS), EXPERTS, num_ranks=ranks),
        "moving alone": plan(spare=0, home=False),
        "home form": plan(spare=SPARE),
        "serving form": plan(spare=SPARE, home=False),
    }


def _counts(popularity: Any, ranks: int, rng: np.random.Generator) -> np.ndarray:
    """Return counts [R, E] of choices by rank and expert."""
    counts = np.empty((ranks, EXPERTS), np.int32)
    for rank in range(ranks):  # -log of an exponential number is Gumbel noise
        keys = rng.standard_exponential((TOKENS, EXPERTS), np.float32)
        keys = popularity - np.log(np.maximum(keys, np.float32(1e-30)))
        ids = np.argpartition(keys, -TOP_K, axis=-1)[:, -TOP_K:]
        counts[rank] = np.bincount(ids.ravel(), minlength=EXPERTS)
    return counts


def _rank_rows(placement: ma.Placement, counts: Any, ranks: int) -> np.ndarray:
    """Return the rows of each rank, [R]."""
    rows = np.zeros(placement.num_slots, np.int64)
    for rank in range(ranks):
        ids = np.repeat(np.arange(EXPERTS, dtype=np.int32), counts[rank])[:, None]
        ids = np.pad(ids, ((0, -len(ids) % 4096), (0, 0)), constant_values=-1)
        slots = np.asarray(_choose(ids, placement, rank=rank, num_ranks=ranks))
        rows += np.bincount(slots[slots >= 0], minlength=placement.num_slots)
    return rows.reshape(ranks, -1).sum(1)


@functools.partial(jax.jit, static_argnames="num_ranks")
def _choose(ids: Any, placement: Any, *, rank: Any, num_ranks: int) -> jax.Array:
    return ma.choose_slots(ids, placement, rank=rank, num_ranks=num_ranks)


if __name__ == "__main__":
    raise SystemExit(main())
