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
    SHOWN,
    Key,
    entry,
    grouped,
    layout_in_words,
    of,
    path_of,
    tokens_in_words,
    with_ratio,
)
from .record import FOLDER, ROOT, Found

README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
DETAILS = FOLDER / "README.md"
BEGIN = "<!-- results -->"
END = "<!-- end of results -->"
WIDTH = 120

Row = dict[str, Any]
Rows = Sequence[Row]
Cells = list[str]
Columns = dict[str, Callable[[list[Row]], str]]  # by header: from the rows of a line to a cell

PLAIN = {
    "all_gather": "all_gather",
    "dense": "dense all_to_all",
    "ragged": "ragged_all_to_all",
    "ragged32": "ragged_all_to_all, 32 updates",
}
COLUMNS: dict[str, Key] = {
    "route": ("route", True),
    "dispatch": ("dispatch", True),
    "without route": ("dispatch", False),
    "combine": ("combine", False),
    "round trip": ("round_trip", True),
    "backward": ("backward", False),
    "chained pair": ("chained", False),
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
    trip = COLUMNS["round trip"]

    def faster(here: Rows) -> str:
        plain, ours = (value(here, trip, method) for method in ("all_gather", "ours"))
        return f"{plain / ours:.1f} times faster" if plain and ours else "-"

    columns: Columns = {
        "tokens per rank": text("tokens", "{:,}"),
        "`all_gather`": us(trip, "all_gather"),
        "dense `all_to_all`": us(trip, "dense"),
        "this package": us(trip, "ours"),
        "link limit": us(trip, "ours", "wire_us"),
        "compared with `all_gather`": faster,
    }
    path = _relative(found.path, README.parent)
    ending = fill(f"Medians on the device, inside one jitted program. Record: [{path}]({path}).")
    shown = table(*lines_of(sorted_by_tokens(rows), lambda row: row["tokens"], columns))
    return "\n" + "\n\n".join([fill(caption), shown, ending]) + "\n\n"


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
        parts.append(f"{SHOWN[sweep].title}, on {where}, {one.record['date']}:")
        parts.append(image(one, sweep, folder))
    path = _relative(DETAILS, folder)
    parts.append(f"All measurements, as tables and plots: [results]({path}).")
    return "\n" + "\n\n".join(parts) + "\n\n"


PLOTTED = ("tokens", "sms", "formats", "products")
EXPLAINED = dict(
    formats="Tokens arrive quantized or decoded, or partial sums are sent quantized",
    processes="Round trips with routing. With NVSHMEM, bytes moved over NVLink: all ranks were on "
    "one host, and the package treated some as if on other hosts",
    ladder="In a chained pair, a combine follows each dispatch, and the next dispatch sends its "
    "sums. Routing is given, except to plain JAX",
    skew="Experts can be popular to different degrees: *sigma of log-odds* is the standard "
    "deviation. *Load* compares the rows of the fullest rank with the mean",
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
        for sweep, (title, *_) in SHOWN.items():
            found = records.newest(sweep, ranks)
            if found is None:
                continue
            parts.append(f"## {title}, {records.ranks_in_words(ranks)}")
            parts.append(
                fill(
                    f"{explained(sweep, found.record['rows'])}"
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


def explained(sweep: str, rows: Rows) -> str:
    """Return what a sweep measures, if the title does not say it all."""
    said = EXPLAINED.get(sweep, "")
    if sweep == "skew" and "load" not in rows[0]:  # an older record, without these cases
        return ""
    if sweep == "processes" and all(row["tie_us"] is None for row in rows):
        said += ". The figures include the dependency between repetitions"
    return said and f"{said}. "


def newest_wire(ranks: int) -> Found | None:
    """Return the newest record of so many ranks that measured the link limit, in full."""
    found = [Found(path, records.read(path)) for path in sorted(FOLDER.glob("*.json"))]
    found = [
        f for f in found if f.record["ranks"] == ranks and (f.record["wire"] or {}).get("results")
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

    trip = COLUMNS["round trip"]
    plain = [method for method in PLAIN if any(row["method"] == method for row in rows)]
    columns: Columns = {
        "tokens per rank": text("tokens", "{:,}"),
        "link limit": us(COLUMNS["combine"], "ours", "wire_us"),
        **{name: us(key, "ours") for name, key in COLUMNS.items() if of(rows, key)},
        **{PLAIN[method]: us(trip, method) for method in plain},
    }
    del columns["route"]
    shown = table(*lines_of(sorted_by_tokens(rows), lambda row: row["tokens"], columns))
    updates = "one update per peer" + ", or 32 of them" * ("ragged32" in plain)
    explained = (
        f"The last {['no', 'one', 'two', 'three', 'four'][len(plain)]} columns are the round trip "
        f"in plain JAX; `ragged_all_to_all` uses default flags and {updates}. "
        "Dispatch includes routing, grouping by expert and zeroed "
        "padding. Combine is weighted. Backward is the gradient of the round trip with respect to "
        f"tokens and weights. {source(found, folder)}."
    )
    return "\n\n".join([fill(caption), shown, fill(explained), image(found, "", folder)])


def of_main_size(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the rows of the sizes that have most of them, and the others."""

    def size_of(row: Row) -> tuple[Any, ...]:
        return tuple(row[key] for key in ("hidden", "top_k", "experts", "skew"))

    sizes = [size_of(row) for row in rows]
    main = max(sizes, key=sizes.count)
    return [r for r in rows if size_of(r) == main], [r for r in rows if size_of(r) != main]


# Tables. Each consists of what makes a line, and of columns.


def sweep_table(sweep: str, rows: list[Row]) -> tuple[Cells, list[Cells]]:
    """Return header and lines of a sweep."""
    if sweep in TABLES:
        line, columns = TABLES[sweep]
        return lines_of(rows, line, columns(rows))
    if sweep == "sms":
        rows = [row for row in rows if row["method"] == "ours"]
    shown = [row for row in rows if row["op"] != "thunks" and row["method"] != "wire"]
    return lines_of(shown, lambda row: label(sweep, row), exchange_columns(sweep, rows))


def lines_of(rows: Rows, line: Callable[[Row], Any], columns: Columns) -> tuple[Cells, list[Cells]]:
    """Return header and lines of a table: rows with equal lines are in one."""
    lines = grouped(rows, line).values()
    return list(columns), [[cell(here) for cell in columns.values()] for here in lines]


def text(name: str, form: str = "{}") -> Callable[[list[Row]], str]:
    """Return a column with an entry of the first row."""
    return lambda here: "-" if here[0][name] is None else form.format(here[0][name])


def words(name: str) -> Callable[[list[Row]], str]:
    """Return a column with a name, in words."""
    return lambda here: here[0][name].replace("_", " ")


def figure(name: str = "us", **wanted: Any) -> Callable[[list[Row]], str]:
    """Return a column with a number of the first row that has these other entries."""
    return lambda here: number(entry(here, name, **wanted))


def us(key: Key, method: str = "", name: str = "us") -> Callable[[list[Row]], str]:
    """Return a column with a time of an operation, and of a method if one is named."""
    return lambda here: number(value(here, key, method, name))


def sorted_by_tokens(rows: Rows) -> list[Row]:
    """Return the rows by number of tokens."""
    return sorted(rows, key=lambda row: row["tokens"])


BOUNDED: tuple[Key, ...] = (("dispatch", True), ("combine", False))


def exchange_columns(sweep: str, rows: list[Row]) -> Columns:
    """Return the columns of a sweep of exchanges."""
    waited: Key = ("waited", True)
    columns: Columns = {
        "": lambda here: label(sweep, here[0]),
        "capacity": text("capacity", "{:,}"),
    }
    if sweep == "skew" and "load" in rows[0]:
        columns |= {"load": text("load", "{:.2f}"), "ranks of a token": text("fan_out", "{:.2f}")}
    columns["link limit"] = link_limit
    for key in BOUNDED:
        if any(map(is_bound, of(rows, key))):
            columns[f"bound of {key[0]}"] = us(key, name="bound_us")
    columns |= {name: us(key) for name, key in COLUMNS.items() if of(rows, key)}
    if of(rows, waited):
        columns["8 round trips, waited for"] = us(waited)
    if sweep in ("tokens", "hidden"):
        columns["GB/s of dispatch without route"] = us(("dispatch", False), name="gb_per_s")
    if sweep == "formats":
        columns["times bfloat16"] = lambda here: times_bare(rows, here)
    return columns


def link_limit(here: Rows) -> str:
    """Return the link limit one way, from that of round trips if only they were measured."""
    one_way = [row for key in BOUNDED for row in of(here, key)]
    twice = next((row["wire_us"] / 2 for row in here if row.get("wire_us")), None)
    return number(one_way[0].get("wire_us") if one_way else twice)


def is_bound(row: Row) -> bool:
    """Return True if the memory, not the link, is the floor, by at least a microsecond."""
    return (row.get("bound_us") or 0) > (row.get("wire_us") or 0) + 1


def times_bare(rows: Rows, here: Rows) -> str:
    """Return the ratio to a call without a format: dispatch without route, or combine."""
    key: Key = ("dispatch", False) if of(here, ("dispatch", False)) else ("combine", False)
    bare = [row for row in rows if row["tokens"] == here[0]["tokens"] and not row["format"]]
    ours, base = (value(some, key) for some in (here, bare))
    return f"{ours / base:.2f}" if ours and base else "-"


def overlap_columns(rows: list[Row]) -> Columns:
    """Return the columns of what runs during split exchanges."""

    def products(here: list[Row]) -> str:
        pairs = f"{here[0]['pairs']} pairs" if here[0]["pairs"] > 1 else "one pair"
        return f"{pairs}, {here[0]['products']}"

    return {
        "": text("op"),
        "SMs": text("num_sms", "{}"),
        "products": products,
        "exchange alone": figure("exchange_us"),
        "products alone": figure("products_us"),
        "together": figure(),
        "ratio": text("ratio_to_longer", "{:.2f}"),
        "cost": figure("cost_us"),
    }


def processes_columns(rows: list[Row]) -> Columns:
    """Return the columns of round trips by layout: one for each number of tokens."""
    sizes = sorted({row["tokens"] for row in rows})
    name: Columns = {"": lambda here: layout_in_words(here[0])}
    return name | {tokens_in_words(size): figure(tokens=size) for size in sizes}


def layer_columns(rows: list[Row]) -> Columns:
    """Return the columns of whole layers, or of the experts alone: one for each operation."""
    columns: Columns = {}
    if len({row.get("shape") for row in rows}) > 1:
        columns["layer"] = text("shape")
    columns |= {"tokens": text("tokens", "{:,}"), "grouped product": text("grouped")}
    if rows[0]["sweep"] != "grouped":
        columns["exchange"] = text("method")
    return columns | {row["op"].replace("_", " "): figure(op=row["op"]) for row in rows}


def products_columns(rows: list[Row]) -> Columns:
    """Return the columns of grouped products: one for each implementation, and rates of ours."""
    return {
        "weights": lambda here: "{shape}, {k:,} × {n:,}".format(**here[0]),
        "rows": text("rows", "{:,}"),
        "sizes": text("sizes"),
        "product": words("op"),
        **{row["method"]: figure(method=row["method"]) for row in rows},
        "TFLOP/s, ours": figure("tflops", method="ours"),
        "GB/s of weights, ours": figure("weight_gb_per_s", method="ours"),
    }


def schedules_columns(rows: list[Row]) -> Columns:
    """Return the columns of whole layers with played peers."""
    ratios = {id(row): found["ratio"] for row, found in zip(rows, with_ratio(rows), strict=True)}
    return {
        "shape": text("shape"),
        "ranks": text("played_ranks"),
        "pass": text("op"),
        "schedule": text("schedule"),
        "SMs of the exchange": text("num_sms"),
        "SMs of the products": text("products"),
        "µs": figure(),
        "predicted": figure("predicted_us"),
        "ratio to one after the other": lambda here: (
            f"{ratios[id(here[0])]:.3f}" if ratios[id(here[0])] else "-"
        ),
    }


def entries(*names: str) -> Callable[[Row], Any]:
    """Return what makes a line: these entries of a row."""
    return lambda row: tuple(row.get(name) for name in names)


TABLES: dict[str, tuple[Callable[[Row], Any], Callable[[list[Row]], Columns]]] = dict(
    **dict.fromkeys(
        ("layer", "decode", "grouped"),
        (entries("shape", "tokens", "grouped", "method"), layer_columns),
    ),
    overlap=(id, overlap_columns),
    processes=(layout_in_words, processes_columns),
    products=(entries("shape", "k", "n", "rows", "sizes", "op"), products_columns),
    schedules=(id, schedules_columns),
)


def label(sweep: str, row: Row) -> str:
    """Return what distinguishes a row of a sweep; plain methods by name."""
    name = SHOWN[sweep].name(row)
    return f"{name}, {row['method']}" if row["method"] in PLAIN else name


def value(rows: Rows, key: Key, method: str = "", name: str = "us") -> float | None:
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
    return f"![{SHOWN[sweep].title}, {gpus(found.record)}]({path})"


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
