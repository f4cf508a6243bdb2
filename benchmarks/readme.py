"""Write the figures in the documents from the committed records: ``python -m benchmarks.readme``.

Run it after a new record and its plots are in ``results/``. It writes the parts of ``README.md``
and ``docs/performance.md`` between the marks below, and all of ``results/README.md``.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import record as records
from .plot import (
    Key,
    batch_in_words,
    entry,
    format_in_words,
    grouped,
    is_in_turn,
    layout_in_words,
    mode_in_words,
    of,
    path_of,
    products_in_words,
    tokens_in_words,
)
from .record import FOLDER, ROOT, Found

README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
DETAILS = FOLDER / "README.md"
BEGIN = "<!-- results -->"
END = "<!-- end of results -->"
WIDTH = 120

Row = dict[str, Any]
Cells = list[str]

PLAIN = {"all_gather": "all_gather", "dense": "dense all_to_all", "ragged": "ragged_all_to_all"}
COLUMNS: dict[str, Key] = {
    "route": ("route", True),
    "dispatch": ("dispatch", True),
    "without route": ("dispatch", False),
    "combine": ("combine", False),
    "round trip": ("round_trip", True),
    "backward": ("backward", False),
}


def main() -> None:
    """Write the three documents."""
    README.write_text(with_section(README.read_text(), summary()))
    PERFORMANCE.write_text(with_section(PERFORMANCE.read_text(), results()))
    DETAILS.write_text(details())
    for path in (README, PERFORMANCE, DETAILS):
        print(path)


def with_section(text: str, section: str) -> str:
    """Return a document with the part between its marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section}{END}{after}"


def summary() -> str:
    """Return the table of README.md: round trips of every method, led by ``all_gather``."""
    found = records.newest("")
    assert found is not None, "no record"
    record = found.record
    rows, _ = of_main_size(record["rows"])
    hidden, top_k, experts = (rows[0][key] for key in ("hidden", "top_k", "experts"))
    caption = (
        f"Round trip (route, dispatch and weighted combine) in µs: {machine(record)}; bfloat16, "
        f"hidden {hidden:,}, top-{top_k} of {experts} experts, uniform random routing. *Link "
        "limit* is the time that plain peer stores need for the same bytes, there and back."
    )
    columns = {"all_gather": "`all_gather`", "dense": "dense `all_to_all`", "ours": "this package"}
    header = ["tokens per rank", *columns.values(), "link limit", "compared with `all_gather`"]
    lines = []
    for tokens in sorted({row["tokens"] for row in rows}):
        here = [row for row in rows if row["tokens"] == tokens]
        times = [value(here, COLUMNS["round trip"], method) for method in columns]
        limit = value(here, COLUMNS["round trip"], "ours", "wire_us")
        faster = f"{times[0] / times[-1]:.1f} times faster" if times[0] and times[-1] else "-"
        lines.append([f"{tokens:,}", *map(number, times), number(limit), faster])
    path = _relative(found.path, README.parent)
    ending = fill(f"Medians on the device, inside one jitted program. Record: [{path}]({path}).")
    return "\n" + "\n\n".join([fill(caption), table(header, lines), ending]) + "\n\n"


def results() -> str:
    """Return the figures of ``docs/performance.md``: standard settings, and plots of the sweeps.

    Each comes from the record with the most GPUs, and says how many GPUs that are.
    """
    found = records.newest("")
    assert found is not None, "no record"
    folder = PERFORMANCE.parent
    parts = [standard(found, folder)]
    for sweep in PLOTTED:
        if (one := records.newest(sweep)) is None:
            continue
        where = gpus(one.record) + hooks(one.record)
        parts.append(f"{TITLES[sweep]}, on {where}, {one.record['date']}:")
        parts.append(image(one, sweep, folder))
    path = _relative(DETAILS, folder)
    parts.append(f"All measurements, as tables and plots: [results]({path}).")
    return "\n" + "\n\n".join(parts) + "\n\n"


PLOTTED = ("tokens", "sms", "formats", "products")
EXPLAINED = dict(
    formats="Tokens arrive quantized or decoded, or partial sums are sent quantized",
    processes="Round trips with routing. With NVSHMEM, bytes moved over NVLink: all ranks were on "
    "one host, and the package treated some as if on other hosts. The figures include the "
    "dependency between repetitions",
    modes="Compared with the same result written without the mode; experts return their rows",
    products="Products of 32 experts' weights by bfloat16 rows, by `grouped_dot` (*ours*) and "
    "others. *cuBLAS batched* computes equal groups only. The host starts the calls one after "
    "another",
    schedules="One rank's layer on one GPU; a kernel plays its peers and sends at the speed of a "
    "link. *Predicted* follows from the parts, measured alone in the same run",
    overlap="Matrix products run between the start and the done of an exchange. *Ratio* compares "
    "with the longer of the two alone. *Cost* is what products three times as long lose",
)


def details() -> str:
    """Return ``results/README.md``: every sweep of the newest records, by number of ranks."""
    parts = [
        "# Results",
        fill(
            "`python -m benchmarks.readme` writes this page from the records in this folder. "
            "Figures are medians in µs on the device. The cost of the dependency between "
            "repetitions is subtracted if the record contains it. *Link limit* is the least time "
            "that the busiest link needs. *Bound* is the least time that the busiest link or the "
            "busiest memory needs, if the memory needs longer. Compare figures within one table: "
            "the same setting occurs in several tables and varies between runs. "
            "[Notes on speed](../../docs/history/speed.md) say how it is measured."
        ),
        fill(
            "A record of the standard settings is `<date>-<GPUs>x<kind>.json`; the other records "
            "are `...-<what>.json`. A record has a head (date, commit, GPUs, versions, measured "
            "link limit, failures) and rows. A row says what was exchanged (`tokens` of each rank, "
            "`hidden`, `top_k`, `experts`, `dtype`, `skew`, `capacity`, `batch`, `format`, "
            "`formatted`, `mode`), in which `sweep`, and by which `op` and `method`. `us` is the "
            "median without the dependency between repetitions, and `measured_us` is the median "
            "with it. `wire_us` is the link limit and `bound_us` the bound. Rows of layers name "
            "the grouped matrix product (`grouped`). Rows of `overlap` have the time of exchange "
            "and products together (`us`), and the time of each alone (`exchange_us`, "
            "`products_us`)."
        ),
    ]
    for ranks in all_ranks():
        if (found := newest_wire(ranks)) is not None:
            parts.append(f"## Link limit, {ranks} ranks")
            parts.append(fill(f"{wire_in_words(found.record['wire'])} {source(found, FOLDER)}."))
        for sweep, title in TITLES.items():
            found = records.newest(sweep, ranks)
            if found is None:
                continue
            parts.append(f"## {title}, {records.ranks_in_words(ranks)}")
            parts.append(
                fill(
                    f"{EXPLAINED[sweep] + '. ' if sweep in EXPLAINED else ''}"
                    f"{source(found, DETAILS.parent)}; {machine(found.record)}."
                )
                if sweep
                else standard(found, DETAILS.parent)
            )
            rows = found.record["rows"] if sweep else of_main_size(found.record["rows"])[1]
            if rows:
                parts.append(table(*sweep_table(sweep, rows)))
            if sweep and path_of(found.path, sweep).exists():  # a single candidate has no plot
                parts.append(image(found, sweep, DETAILS.parent))
    return "\n\n".join(parts) + "\n"


def newest_wire(ranks: int) -> Found | None:
    """Return the newest record of so many ranks that measured the link limit, in full."""
    found = [Found(path, records.read(path)) for path in sorted(FOLDER.glob("*.json"))]
    found = [
        f
        for f in found
        if f.record["ranks"] == ranks
        and (f.record["wire"] or {}).get("results")
        and "measured_for" not in f.record["wire"]
    ]
    return max(found, key=lambda f: (f.record["date"], f.path.name), default=None)


def wire_in_words(wire: dict[str, Any]) -> str:
    """Return what a record says about the link limit."""
    best = max(wire["results"], key=lambda r: r["bytes"])
    text = (
        f"Out of each of {wire['gpus']} GPUs at once, evenly to all others: plain stores "
        f"{best['gb_per_s']:.0f} GB/s ({best['blocks']} blocks, {best['bytes'] / 1e6:.0f} MB)"
    )
    for way, found in wire.get("bulk", {}).items():
        if isinstance(found, dict):
            text += (
                f"; bulk copies, {way}: {found['gb_per_s']:.0f} GB/s ({found['blocks']} blocks of "
                f"{found['warps']} warps, {found['stages']} × {found['segment_bytes']:,} B each)"
            )
    if wire.get("local_gb_per_s"):
        text += (
            f". A GPU's own memory: {wire['local_gb_per_s']:,.0f} GB/s, reads and writes counted"
        )
    return f"{text}. A flag takes {wire['flag_us']:.2f} µs one way."


def all_ranks() -> list[int]:
    """Return the numbers of ranks of all records, the most first."""
    return sorted({records.read(path)["ranks"] for path in FOLDER.glob("*.json")}, reverse=True)


def standard(found: Found, folder: pathlib.Path) -> str:
    """Return the caption, the table and the plot of the standard settings."""
    record = found.record
    rows, _ = of_main_size(record["rows"])
    hidden, top_k, experts = (rows[0][key] for key in ("hidden", "top_k", "experts"))
    sms = {row["num_sms"] for row in rows if row["method"] == "ours"}
    rates = [row["gb_per_s"] for row in rows if row["method"] == "wire"]
    caption = (
        f"{machine(record)}; bfloat16, hidden {hidden:,}, top-{top_k} of {experts} experts, "
        "uniform random routing, capacity as tight as the routing allows"
        f"{f', {sms.pop()} SMs' if len(sms) == 1 else ''}. Medians in µs on the device, inside "
        "one jitted program. *Link limit* is the time that plain peer stores need one way for the "
        "same bytes in the same run"
    )
    caption += f" (at most {max(rates):.0f} GB/s per GPU)" if rates else ""
    caption += ". It counts each token once per rank, and no rows that stay on their rank. "
    if all(row.get("tie_us") is None for row in rows if row["method"] == "ours"):
        caption += "The figures include the dependency between repetitions, a few µs."
    else:
        caption += "The cost of the dependency between repetitions (1 to 2 µs) is subtracted."

    header = ["tokens per rank", "link limit", *list(COLUMNS)[1:], *PLAIN.values()]
    lines = []
    for tokens in sorted({row["tokens"] for row in rows}):
        here = [row for row in rows if row["tokens"] == tokens]
        cells = [f"{tokens:,}", number(value(here, COLUMNS["combine"], "ours", "wire_us"))]
        cells += [number(value(here, COLUMNS[name], "ours")) for name in list(COLUMNS)[1:]]
        cells += [number(value(here, COLUMNS["round trip"], method)) for method in PLAIN]
        lines.append(cells)
    explained = (
        "The last three columns are the round trip in plain JAX; `ragged_all_to_all` uses default "
        "flags and one update per peer. Dispatch includes routing, grouping by expert and zeroed "
        "padding. Combine is weighted. Backward is the gradient of the round trip with respect to "
        f"tokens and weights. {source(found, folder)}."
    )
    return "\n\n".join(
        [fill(caption), table(header, lines), fill(explained), image(found, "", folder)]
    )


def of_main_size(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of the sizes that have most of them, and the others."""

    def size_of(row: Row) -> tuple[Any, ...]:
        return tuple(row[key] for key in ("hidden", "top_k", "experts", "skew"))

    sizes = [size_of(row) for row in rows]
    main = max(sizes, key=sizes.count)
    return [r for r in rows if size_of(r) == main], [r for r in rows if size_of(r) != main]


def sweep_table(sweep: str, rows: list[Row]) -> tuple[Cells, list[Cells]]:
    """Return header and lines of a sweep: a line for each setting, method and option."""
    if sweep in TABLES:
        return TABLES[sweep](rows)
    columns = {name: key for name, key in COLUMNS.items() if of(rows, key)}
    waited = of(rows, ("waited", True))
    bounds = {f"bound of {key[0]}": key for key in BOUNDED if any(map(is_bound, of(rows, key)))}
    header = ["", "capacity", "link limit", *bounds, *columns]
    header += ["8 round trips, waited for"] if waited else []
    header += ["GB/s of dispatch without route"] if sweep in ("tokens", "hidden") else []
    header += ["times bfloat16"] if sweep == "formats" else []
    if sweep == "sms":
        rows = [row for row in rows if row["method"] == "ours"]
    shown = [row for row in rows if row["op"] != "thunks" and row["method"] != "wire"]
    lines = []
    for name, here in grouped(shown, lambda row: label(sweep, row)).items():
        one_way = [row for key in BOUNDED for row in of(here, key)]
        # If only round trips were measured.
        twice = next((row["wire_us"] / 2 for row in here if row.get("wire_us")), None)
        cells = [name, f"{here[0]['capacity']:,}"]
        cells.append(number(one_way[0].get("wire_us") if one_way else twice))
        cells += [number(value(here, key, name="bound_us")) for key in bounds.values()]
        cells += [number(value(here, key)) for key in columns.values()]
        cells += [number(value(here, ("waited", True)))] if waited else []
        if sweep in ("tokens", "hidden"):
            cells.append(number(value(here, ("dispatch", False), name="gb_per_s")))
        cells += [times_bare(rows, here)] if sweep == "formats" else []
        lines.append(cells)
    return header, lines


def times_bare(rows: Sequence[Row], here: Sequence[Row]) -> str:
    """Return the ratio to a call without a format: dispatch without route, or combine."""
    key: Key = ("dispatch", False) if of(here, ("dispatch", False)) else ("combine", False)
    bare = [row for row in rows if row["tokens"] == here[0]["tokens"] and not row["format"]]
    ours, base = (value(some, key) for some in (here, bare))
    return f"{ours / base:.2f}" if ours and base else "-"


def overlap_table(rows: list[Row]) -> tuple[Cells, list[Cells]]:
    """Return header and lines of what runs during split exchanges."""
    header = ["", "SMs", "products", "exchange alone", "products alone", "together", "ratio"]
    lines = []
    for row in rows:
        pairs = f"{row['pairs']} pairs" if row["pairs"] > 1 else "one pair"
        cells = [row["op"], f"{row['num_sms']}", f"{pairs}, {row['products']}"]
        cells += [number(row[key]) for key in ("exchange_us", "products_us", "us")]
        lines.append([*cells, f"{row['ratio_to_longer']:.2f}", number(row["cost_us"])])
    return [*header, "cost"], lines


def processes_table(rows: list[Row]) -> tuple[Cells, list[Cells]]:
    """Return header and lines of round trips: a line for each layout, a column for each size."""
    sizes = sorted({row["tokens"] for row in rows})
    lines = [
        [name, *(number(entry(here, tokens=tokens)) for tokens in sizes)]
        for name, here in grouped(rows, layout_in_words).items()
    ]
    return ["", *map(tokens_in_words, sizes)], lines


BOUNDED: tuple[Key, ...] = (("dispatch", True), ("combine", False))


def is_bound(row: Row) -> bool:
    """Return True if the memory, not the link, is the floor, by at least a microsecond."""
    return (row.get("bound_us") or 0) > (row.get("wire_us") or 0) + 1


def layer_table(rows: list[Row]) -> tuple[Cells, list[Cells]]:
    """Return header and lines of whole layers, or of the experts alone."""
    ops = list(dict.fromkeys(row["op"] for row in rows))
    has_exchange = rows[0]["sweep"] != "grouped"
    has_shapes = len({row.get("shape") for row in rows}) > 1
    header = [*["layer"] * has_shapes, "tokens", "grouped product", *["exchange"] * has_exchange]
    lines = []
    names = lambda row: (row.get("shape"), row["tokens"], row["grouped"], row["method"])
    for (shape, tokens, product, method), here in grouped(rows, names).items():
        cells = [*[shape] * has_shapes, f"{tokens:,}", product, *[method] * has_exchange]
        lines.append([*cells, *(number(entry(here, op=op)) for op in ops)])
    return [*header, *(op.replace("_", " ") for op in ops)], lines


def products_table(rows: list[Row]) -> tuple[Cells, list[Cells]]:
    """Return header and lines of grouped products."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    names = lambda row: tuple(row[key] for key in ("shape", "k", "n", "rows", "sizes", "op"))
    lines = []
    for (shape, k, n, num_rows, sizes, op), here in grouped(rows, names).items():
        cells = [f"{shape}, {k:,} × {n:,}", f"{num_rows:,}", sizes, op.replace("_", " ")]
        cells += [number(entry(here, method=method)) for method in methods]
        rates = ("tflops", "weight_gb_per_s")
        lines.append([*cells, *(number(entry(here, name, method="ours")) for name in rates)])
    header = ["weights", "rows", "sizes", "product", *methods]
    return [*header, "TFLOP/s, ours", "GB/s of weights, ours"], lines


def schedules_table(rows: list[Row]) -> tuple[Cells, list[Cells]]:
    """Return header and lines of whole layers with played peers."""
    plain = {(r["shape"], r["played_ranks"], r["op"]): r["us"] for r in rows if is_in_turn(r)}
    lines = []
    for row in rows:
        cells = [row["shape"], f"{row['played_ranks']}", row["op"], row["schedule"]]
        cells += ["-" if row["num_sms"] is None else f"{row['num_sms']}"]
        cells += [products_in_words(row) if row["products"] else "-"]
        cells += [number(row[key]) for key in ("us", "predicted_us")]
        in_turn = plain.get((row["shape"], row["played_ranks"], row["op"]))
        lines.append([*cells, f"{row['us'] / in_turn:.3f}" if in_turn else "-"])
    header = ["shape", "ranks", "pass", "schedule", "SMs of the exchange", "SMs of the products"]
    return [*header, "µs", "predicted", "ratio to one after the other"], lines


TABLES: dict[str, Callable[[list[Row]], tuple[Cells, list[Cells]]]] = dict(
    **dict.fromkeys(("layer", "decode", "grouped"), layer_table),
    overlap=overlap_table,
    processes=processes_table,
    products=products_table,
    schedules=schedules_table,
)

LABEL: dict[str, Callable[[Row], str]] = {
    "": lambda row: (
        f"{row['tokens']:,} × {row['hidden']:,}, top-{row['top_k']} of {row['experts']}, "
        f"{row['routing']}"
    ),
    "tokens": lambda row: tokens_in_words(row["tokens"]),
    "experts": lambda row: f"{row['experts']} experts",
    "hidden": lambda row: f"hidden {row['hidden']:,}",
    "topk": lambda row: f"top-{row['top_k']}",
    "skew": lambda row: (
        "uniform" if row["skew"] == 1 else f"rank 0 gets {row['skew']:g} times its share"
    ),
    "capacity": lambda row: row["capacity_kind"],
    "payload": lambda row: row["dtype"],
    "sms": lambda row: f"{tokens_in_words(row['tokens'])}, {row['num_sms']} SMs",
    "graphs": lambda row: (
        f"{tokens_in_words(row['tokens'])}, {'' if row['cuda_graphs'] else 'not '}in graphs"
    ),
    "vmap": batch_in_words,
    "formats": lambda row: f"{tokens_in_words(row['tokens'])}, {format_in_words(row)}",
    "modes": lambda row: f"{tokens_in_words(row['tokens'])}, {mode_in_words(row)}",
}

TITLES = {
    "": "Standard settings",
    "tokens": "Tokens",
    "experts": "Experts",
    "hidden": "Hidden size",
    "topk": "Top-k",
    "skew": "Skew",
    "capacity": "Capacity, 4096 tokens",
    "payload": "Payload",
    "sms": "SM budget",
    "vmap": "Batch by vmap",
    "graphs": "CUDA graphs",
    "formats": "Token formats",
    "modes": "Modes",
    "overlap": "During matrix products",
    "processes": "In several processes",
    "grouped": "Experts alone",
    "products": "Grouped products",
    "layer": "Whole layer, training",
    "decode": "Whole layer, decode",
    "schedules": "Schedules of a layer, peers played",
}


def label(sweep: str, row: Row) -> str:
    """Return what distinguishes a row of a sweep; plain methods by name."""
    text = LABEL[sweep](row)
    return f"{text}, {row['method']}" if row["method"] in PLAIN else text


def value(rows: Sequence[Row], key: Key, method: str = "", name: str = "us") -> float | None:
    """Return the first value of an operation, and of a method if one is named."""
    return entry(of(rows, key), name, **({"method": method} if method else {}))


def number(x: float | None) -> str:
    """Return a number with three digits or more; a dash for None."""
    if x is None:
        return "-"
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}"


def machine(record: dict[str, Any]) -> str:
    """Return GPUs, versions and date."""
    versions = record["versions"]
    platform = versions["platform"]
    if match := re.fullmatch(r"cuda (\d+)(\d\d)\d", platform):
        platform = f"CUDA {match[1]}.{int(match[2])}"
    where = f"{gpus(record)} of one host"
    if not any("processes" in row for row in record["rows"]):
        where += ", one process"
    return f"{where}, jax {versions['jax']}, {platform}{hooks(record)}, {record['date']}"


def hooks(record: dict[str, Any]) -> str:
    """Return a reservation if the kernels had more to do than those of users."""
    return ", built with test hooks" if record.get("test_hooks") else ""


def gpus(record: dict[str, Any]) -> str:
    """Return the GPUs of a record, "2 × H200" for example."""
    return record["gpus"].replace(" x ", " × ").replace("NVIDIA ", "")


def source(found: Found, folder: pathlib.Path) -> str:
    """Return a link to a record."""
    path = _relative(found.path, folder)
    return f"Record: [{path}]({path})"


def image(found: Found, sweep: str, folder: pathlib.Path) -> str:
    """Return the plot of a record in Markdown."""
    path = _relative(path_of(found.path, sweep), folder)
    return f"![{TITLES[sweep]}, {gpus(found.record)}]({path})"


def table(header: Cells, lines: Iterable[Cells]) -> str:
    """Return a table in Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def fill(text: str) -> str:
    """Return text in lines of ``WIDTH``, broken at spaces."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)


def _relative(path: pathlib.Path, folder: pathlib.Path) -> str:
    return pathlib.Path(os.path.relpath(path, folder)).as_posix()


if __name__ == "__main__":
    main()
