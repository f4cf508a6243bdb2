"""Write the figures in the documents from the committed records: ``python -m benchmarks.readme``.

Run it after a new record and its plots are in ``results/``. It writes the parts of ``README.md``,
``docs/performance.md`` and ``results/README.md`` between the marks below.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import record as records
from .plot import (
    ROUND_TRIP,
    SHOWN,
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

PLAIN = {
    "all_gather": "all_gather",
    "dense": "dense all_to_all",
    "ragged": "ragged_all_to_all",
    "ragged32": "ragged_all_to_all, 32 updates",
}
ROUTED: Row = dict(op="dispatch", includes_route=False)
DISPATCH: Row = dict(op="dispatch", includes_route=True)
COMBINE: Row = dict(op="combine", includes_route=False)
COLUMNS: dict[str, Row] = {
    "route": dict(op="route", includes_route=True),
    "dispatch": DISPATCH,
    "without route": ROUTED,
    "combine": COMBINE,
    "round trip": ROUND_TRIP,
    "backward": dict(op="backward", includes_route=False),
    "chained pair": dict(op="chained", includes_route=False),
}
PLOTTED = ("tokens", "sms", "formats", "products")  # in docs/performance.md
EXPLAINED = dict(
    formats="Tokens arrive quantized or decoded, or partial sums are sent quantized",
    processes="Round trips with routing. With NVSHMEM, bytes moved over NVLink: all ranks were on "
    "one host, and the package treated some as if on other hosts",
    ladder="In a chained pair, a combine follows each dispatch, and the next dispatch sends its "
    "sums. Routing is given, except to plain JAX",
    skew="The log-odds of *popular experts* are normal with this sigma",
    modes="Compared with the same result written without the mode; experts return their rows",
    products="Products of 32 experts' weights by bfloat16 rows, by `grouped_dot` (*ours*) and "
    "others. *cuBLAS batched* computes equal groups only. The host starts the calls one after "
    "another",
    schedules="One rank's layer on one GPU; a kernel plays its peers and sends at the speed of a "
    "link. *Predicted* follows from the parts, measured alone in the same run",
    overlap="Matrix products run between the start and the done of an exchange. *Ratio* compares "
    "with the longer of the two alone. *Cost* is what products three times as long lose",
)


def main() -> None:
    """Write the three documents."""
    for path, section in ((README, summary), (PERFORMANCE, results), (DETAILS, details)):
        path.write_text(with_section(path.read_text(), section()))
        print(path)


def with_section(text: str, section: str) -> str:
    """Return a document with the part between its marks replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


# The three sections


def summary() -> str:
    """Return the table of README.md: round trips of every method, led by ``all_gather``."""
    found, rows = standard_settings()
    caption = (
        f"Round trip (route, dispatch and weighted combine) in µs: {machine(found.record)}; "
        f"{sizes_in_words(rows)}. *Link limit* is the time that plain peer stores need for the "
        "same bytes, there and back."
    )

    def faster(here: Rows) -> str:
        plain, ours = (entry(here, **ROUND_TRIP, method=name) for name in ("all_gather", "ours"))
        return f"{plain / ours:.1f} times faster" if plain and ours else "-"

    columns: Columns = {
        "tokens per rank": "{tokens:,}",
        "`all_gather`": dict(ROUND_TRIP, method="all_gather"),
        "dense `all_to_all`": dict(ROUND_TRIP, method="dense"),
        "this package": dict(ROUND_TRIP, method="ours"),
        "link limit": dict(ROUND_TRIP, method="ours", name="wire_us"),
        "compared with `all_gather`": faster,
    }
    path = _relative(found.path, README.parent)
    ending = f"Medians on the device, inside one jitted program. Record: [{path}]({path})."
    shown = table(*lines_of(rows, lambda row: row["tokens"], columns))
    return "\n\n".join([fill(caption), shown, fill(ending)])


def results() -> str:
    """Return the figures of ``docs/performance.md``: standard settings, and plots of the sweeps.

    Each comes from the record with the most GPUs, and says how many GPUs that are.
    """
    folder = PERFORMANCE.parent
    parts = [standard(*standard_settings(), folder)]
    for found in filter(None, map(records.newest, PLOTTED)):
        sweep = found.record["rows"][0]["sweep"]
        where = gpus(found.record) + hooks(found.record)
        parts.append(f"{SHOWN[sweep].title}, on {where}, {found.record['date']}:")
        parts.append(image(found, sweep, folder))
    path = _relative(DETAILS, folder)
    parts.append(f"All measurements, as tables and plots: [results]({path}).")
    return "\n\n".join(parts)


def details() -> str:
    """Return every sweep of the newest records, by number of ranks."""
    parts: list[str] = []
    for ranks in sorted({records.read(p)["ranks"] for p in FOLDER.glob("*.json")}, reverse=True):
        if (found := newest_wire(ranks)) is not None:
            parts.append(f"## Link limit, {ranks} ranks")
            parts.append(fill(f"{wire_in_words(found.record['wire'])} {source(found, FOLDER)}."))
        for sweep, (title, *_) in SHOWN.items():
            found = records.newest(sweep, ranks)
            if found is None:
                continue
            parts.append(f"## {title}, {records.ranks_in_words(ranks)}")
            rows = found.record["rows"]
            if sweep:
                where = f"{source(found, DETAILS.parent)}; {machine(found.record)}."
                parts.append(fill(f"{explained(sweep, rows)}{where}"))
            else:
                main, rows = of_main_size(rows)
                parts.append(standard(found, main, DETAILS.parent))
            if rows:
                parts.append(table(*sweep_table(sweep, rows)))
            if sweep and path_of(found.path, sweep).exists():  # a single candidate has no plot
                parts.append(image(found, sweep, DETAILS.parent))
    return "\n\n".join(parts)


def standard_settings() -> tuple[Found, list[Row]]:
    """Return the record of the standard settings, and the rows of its main size by tokens."""
    found = records.newest("")
    assert found is not None, "no record"
    return found, of_main_size(found.record["rows"])[0]


def of_main_size(rows: Rows) -> tuple[list[Row], list[Row]]:
    """Return the rows of the sizes that have most of them, by tokens, and the others."""
    sizes = grouped(rows, entries("hidden", "top_k", "experts", "skew"))
    main = max(sizes.values(), key=len)
    return sorted(main, key=lambda row: row["tokens"]), [row for row in rows if row not in main]


def standard(found: Found, rows: list[Row], folder: pathlib.Path) -> str:
    """Return the caption, the table and the plot of the standard settings."""
    ours, wire = of(rows, method="ours"), found.record["wire"]
    sizes = {row["busiest_bytes"] for row in rows}
    rates = [r["gb_per_s"] for r in (wire or {}).get("results", ()) if r["bytes"] in sizes]
    sms = {row["num_sms"] for row in ours}
    has_ties = all(row.get("tie_us") is None for row in ours)
    caption = (
        f"{machine(found.record)}; {sizes_in_words(rows)}, capacity as tight as the routing allows"
        f"{f', {sms.pop()} SMs' if len(sms) == 1 else ''}. Medians in µs on the device, inside "
        "one jitted program. *Link limit* is the time that plain peer stores need one way for the "
        f"same bytes in the same run{f' (at most {max(rates):.0f} GB/s per GPU)' if rates else ''}"
        ". It counts each token once per rank, and no rows that stay on their rank. "
        + (
            "The figures include the dependency between repetitions, a few µs."
            if has_ties
            else "The cost of the dependency between repetitions (1 to 2 µs) is subtracted."
        )
    )
    plain = [method for method in PLAIN if of(rows, method=method)]
    timed = {name: key for name, key in COLUMNS.items() if name != "route" and of(rows, **key)}
    columns: Columns = {
        "tokens per rank": "{tokens:,}",
        "link limit": dict(COMBINE, method="ours", name="wire_us"),
        **{name: dict(key, method="ours") for name, key in timed.items()},
        **{PLAIN[method]: dict(ROUND_TRIP, method=method) for method in plain},
    }
    number_of_plain = ["no", "one", "two", "three", "four"][len(plain)]
    below = (
        f"The last {number_of_plain} columns are the round trip in plain JAX; "
        f"`ragged_all_to_all` uses default flags and one update per peer"
        f"{' or 32' * ('ragged32' in plain)}. Dispatch includes routing, grouping by expert and "
        "zeroed padding. Combine is weighted. Backward is the gradient of the round trip with "
        f"respect to tokens and weights. {source(found, folder)}."
    )
    shown = table(*lines_of(rows, lambda row: row["tokens"], columns))
    return "\n\n".join([fill(caption), shown, fill(below), image(found, "", folder)])


# Tables. A function of a row says which rows make a line, and each header has a cell. A cell is a
# format for the first row; or entries, which select the row with the figure (and its ``name``); or
# a function of the line's rows.

Cell = str | dict[str, Any] | Callable[[list[Row]], str]
Columns = dict[str, Cell]


def lines_of(rows: Rows, line: Callable[[Row], Any], columns: Columns) -> tuple[Cells, list[Cells]]:
    """Return header and lines of a table: rows with equal lines are in one."""

    def fill_in(cell: Cell, here: list[Row]) -> str:
        if isinstance(cell, dict):
            return number(entry(here, **cell))
        if callable(cell):
            return cell(here)
        return cell.format(**{key: "-" if x is None else x for key, x in here[0].items()})

    lines = grouped(rows, line).values()
    return list(columns), [[fill_in(cell, here) for cell in columns.values()] for here in lines]


def sweep_table(sweep: str, rows: list[Row]) -> tuple[Cells, list[Cells]]:
    """Return header and lines of a sweep."""
    if sweep in TABLES:
        return lines_of(*TABLES[sweep](rows))
    if sweep == "sms":
        rows = of(rows, method="ours")
    name = SHOWN[sweep].name
    label = lambda row: name(row) + (f", {row['method']}" if row["method"] in PLAIN else "")
    shown = [row for row in rows if row["op"] != "thunks" and row["method"] != "wire"]
    return lines_of(shown, label, exchange_columns(sweep, rows, label))


def exchange_columns(sweep: str, rows: list[Row], label: Callable[[Row], str]) -> Columns:
    """Return the columns of a sweep of exchanges."""
    columns: Columns = {"": lambda here: label(here[0]), "capacity": "{capacity:,}"}
    if sweep == "skew" and "load" in rows[0]:
        columns |= {"fullest rank / mean": "{load:.2f}", "ranks of a token": "{fan_out:.2f}"}
    columns["link limit"] = link_limit
    for key in (DISPATCH, COMBINE):
        if any(map(is_bound, of(rows, **key))):
            columns[f"bound of {key['op']}"] = dict(key, name="bound_us")
    columns |= {name: key for name, key in COLUMNS.items() if of(rows, **key)}
    if of(rows, op="waited"):
        columns["8 round trips, waited for"] = dict(op="waited")
    if sweep in ("tokens", "hidden"):
        columns["GB/s of dispatch without route"] = dict(ROUTED, name="gb_per_s")
    if sweep == "formats":
        columns["times bfloat16"] = lambda here: times_bare(rows, here)
    return columns


def link_limit(here: Rows) -> str:
    """Return the link limit one way, from that of round trips if only they were measured."""
    if one_way := of(here, **DISPATCH) + of(here, **COMBINE):
        return number(one_way[0].get("wire_us"))
    return number(next((row["wire_us"] / 2 for row in here if row.get("wire_us")), None))


def is_bound(row: Row) -> bool:
    """Return True if the memory, not the link, is the floor, by at least a microsecond."""
    return (row.get("bound_us") or 0) > (row.get("wire_us") or 0) + 1


def times_bare(rows: Rows, here: Rows) -> str:
    """Return the ratio to a call without a format: dispatch without route, or combine."""
    key = ROUTED if of(here, **ROUTED) else COMBINE
    bare = of(rows, tokens=here[0]["tokens"], format="")
    ours, base = (entry(some, **key) for some in (here, bare))
    return f"{ours / base:.2f}" if ours and base else "-"


def overlap_table(rows: list[Row]) -> tuple[Rows, Any, Columns]:
    """Return the table of what runs during split exchanges."""
    columns: Columns = {"": "{op}", "SMs": "{num_sms}"}
    columns["products"] = lambda here: (
        (f"{here[0]['pairs']} pairs" if here[0]["pairs"] > 1 else "one pair")
        + f", {here[0]['products']}"
    )
    columns |= {"exchange alone": dict(name="exchange_us")}
    columns |= {"products alone": dict(name="products_us"), "together": dict(name="us")}
    return rows, id, columns | {"ratio": "{ratio_to_longer:.2f}", "cost": dict(name="cost_us")}


def processes_table(rows: list[Row]) -> tuple[Rows, Any, Columns]:
    """Return the table of round trips by layout, with a column for each number of tokens."""
    sizes = sorted({row["tokens"] for row in rows})
    name: Columns = {"": lambda here: layout_in_words(here[0])}
    return rows, layout_in_words, name | {tokens_in_words(n): dict(tokens=n) for n in sizes}


def layer_table(rows: list[Row]) -> tuple[Rows, Any, Columns]:
    """Return the table of whole layers, or of the experts alone."""
    columns: Columns = {"layer": "{shape}"} if len({r.get("shape") for r in rows}) > 1 else {}
    columns |= {"tokens": "{tokens:,}", "grouped product": "{grouped}"}
    columns |= {"exchange": "{method}"} if rows[0]["sweep"] != "grouped" else {}
    columns |= {row["op"].replace("_", " "): dict(op=row["op"]) for row in rows}
    return rows, entries("shape", "tokens", "grouped", "method"), columns


def products_table(rows: list[Row]) -> tuple[Rows, Any, Columns]:
    """Return the table of grouped products."""
    columns: Columns = {"weights": "{shape}, {k:,} × {n:,}", "rows": "{rows:,}", "sizes": "{sizes}"}
    columns["product"] = lambda here: here[0]["op"].replace("_", " ")
    columns |= {row["method"]: dict(method=row["method"]) for row in rows}
    columns["TFLOP/s, ours"] = dict(name="tflops", method="ours")
    columns["GB/s of weights, ours"] = dict(name="weight_gb_per_s", method="ours")
    return rows, entries("shape", "k", "n", "rows", "sizes", "op"), columns


def schedules_table(rows: list[Row]) -> tuple[Rows, Any, Columns]:
    """Return the table of whole layers with played peers."""
    columns: Columns = {"shape": "{shape}", "ranks": "{played_ranks}", "pass": "{op}"}
    columns |= {"schedule": "{schedule}", "SMs of the exchange": "{num_sms}"}
    columns |= {"SMs of the products": "{products}", "µs": dict(name="us")}
    columns |= {"predicted": dict(name="predicted_us")}
    columns["ratio to one after the other"] = lambda here: (
        f"{here[0]['ratio']:.3f}" if here[0]["ratio"] else "-"
    )
    return with_ratio(rows), id, columns


def entries(*names: str) -> Callable[[Row], Any]:
    """Return what makes a line: these entries of a row."""
    return lambda row: tuple(row.get(name) for name in names)


TABLES: dict[str, Callable[[list[Row]], tuple[Rows, Any, Columns]]] = dict(
    **dict.fromkeys(("layer", "decode", "grouped"), layer_table),
    overlap=overlap_table,
    processes=processes_table,
    products=products_table,
    schedules=schedules_table,
)


# Words


def explained(sweep: str, rows: Rows) -> str:
    """Return what a sweep measures, if the title does not say it all."""
    said = EXPLAINED.get(sweep, "")
    if sweep == "skew" and not any(row["sigma"] for row in rows):
        return ""
    if sweep == "processes" and all(row["tie_us"] is None for row in rows):
        said += ". The figures include the dependency between repetitions"
    return said and f"{said}. "


def newest_wire(ranks: int) -> Found | None:
    """Return the newest record of so many ranks that measured the link limit."""
    found = [Found(path, records.read(path)) for path in sorted(FOLDER.glob("*.json"))]
    found = [f for f in found if f.record["ranks"] == ranks and f.record["wire"]]
    return max(found, key=lambda f: (f.record["date"], f.path.name), default=None)


def wire_in_words(wire: dict[str, Any]) -> str:
    """Return what a record says about the link limit."""
    best = max(wire["results"], key=lambda result: result["bytes"])
    return (
        f"Out of each of {wire['gpus']} GPUs at once, evenly to all others: plain stores "
        f"{best['gb_per_s']:.0f} GB/s ({best['blocks']} blocks, {best['bytes'] / 1e6:.0f} MB). "
        f"A GPU's own memory: {wire['local_gb_per_s']:,.0f} GB/s, reads and writes counted. "
        f"A flag takes {wire['flag_us']:.2f} µs one way."
    )


def sizes_in_words(rows: Rows) -> str:
    """Return the sizes of the standard settings."""
    sizes = "hidden {hidden:,}, top-{top_k} of {experts} experts".format(**rows[0])
    return f"bfloat16, {sizes}, uniform random routing"


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
