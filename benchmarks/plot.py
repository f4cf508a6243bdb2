"""Draw the plots of records: ``python -m benchmarks.plot RECORD.json ...``."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import record as records

Row = dict[str, Any]
Key = tuple[str, bool]
Rows = Sequence[Row]
Panels = dict[str, Callable[[Any], None]]  # by title
Name = Callable[[Row], str]

LABELS: dict[Key, str] = {
    ("route", True): "route",
    ("dispatch", True): "dispatch",
    ("dispatch", False): "dispatch, without route",
    ("combine", False): "combine",
    ("round_trip", True): "round trip",
    ("backward", False): "backward",
}
WIRE = {"combine": "wire, one way", "round_trip": "wire, both ways"}
MAX_LEGEND = 6  # entries in one column
LOG_FROM = 20  # a scale is logarithmic if the greatest value is at least this many times the least
CUT_FROM = 4  # a bar that is at least this many times the least may go through the frame


def plot(record: dict[str, Any], path: pathlib.Path) -> list[pathlib.Path]:
    """Draw all rows of a record, one PNG for each sweep.

    Args:
      record: as ``record.read`` returns it.
      path: of the record; the plots lie next to it.

    Returns:
      The paths of the plots.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    for sweep, rows in grouped(record["rows"], lambda row: row["sweep"]).items():
        panels = PANELS.get(sweep, PANELS[""])(rows)
        if not panels:
            continue
        size = (max(6 * len(panels), 9), 4.8)
        figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False)
        for axis, (title, draw) in zip(axes[0], panels.items(), strict=True):
            draw(axis)
            axis.set_title(title)
            axis.grid(True, which="major", alpha=0.3)
            axis.set_axisbelow(True)
            if len(labels := axis.get_legend_handles_labels()[1]) > 1:
                axis.legend(fontsize=8, ncols=2 if len(labels) > MAX_LEGEND else 1)
        where = f"{records.ranks_in_words(record['ranks'])} on {record['gpus']}"
        when = f"{record['date']}, {record['commit'][:10]}"
        figure.suptitle("; ".join(filter(None, (where, _in_common(rows), when))), fontsize=10)
        figure.tight_layout()
        made.append(path_of(path, sweep))
        figure.savefig(made[-1], dpi=120)
        plt.close(figure)
    return made


def path_of(record_path: pathlib.Path, sweep: str) -> pathlib.Path:
    """Return the path of the plot of a sweep: <record>.png or <record>-<sweep>.png."""
    stem = record_path.stem
    if sweep and stem != sweep and not stem.endswith(f"-{sweep}"):
        stem += f"-{sweep}"
    return record_path.with_name(f"{stem}.png")


def of(rows: Rows, key: Key) -> list[Row]:
    """Return the rows of an operation."""
    return [row for row in rows if (row["op"], row.get("includes_route")) == key]


def entry(rows: Rows, name: str = "us", **wanted: Any) -> Any:
    """Return an entry of the first row with these other entries; None if there is no such row."""
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return row.get(name)
    return None


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Return the rows by a key, in the order of their first rows."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def tokens_in_words(tokens: int) -> str:
    """Return "1 token", "4,096 tokens" and so on."""
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"


def op_in_words(row: Row) -> str:
    """Return an operation, "dispatch, without route" for example."""
    return LABELS.get((row["op"], row.get("includes_route", False)), row["op"].replace("_", " "))


def format_in_words(row: Row) -> str:
    """Return "bfloat16", "MxFp8", "MxFp8 decoded", "sums in MxFp8" and so on."""
    words = {"": row["dtype"], "rows": "{}", "decoded": "{} decoded", "sums": "sums in {}"}
    return words[row["formatted"]].format(row["format"])


def layout_in_words(row: Row) -> str:
    """Return how the ranks of a row are divided into processes and hosts."""
    words = f"{row['processes']} processes" if row["processes"] > 1 else "one process"
    if row["hosts"] > 1:
        words += f", {row['hosts']} hosts in two levels"
    if row["p2p_world_size"]:
        words += f", NVSHMEM between groups of {row['p2p_world_size']}"
    return words


def mode_in_words(row: Row) -> str:
    """Return the name of a mode, or of the same program without it."""
    words = {"": "no mode", "shared": "shared expert", "replicated": "replicated tokens"}
    without = {"apart": ", by hand", "local": ", plain JAX"}
    return words.get(row["mode"], "routing map") + without.get(row["method"], "")


def batch_in_words(row: Row) -> str:
    """Return a batch by vmap, or the exchange that it is compared with."""
    if row["batch"] == 1:
        return f"one exchange of the same, {row['batch_routing']} routing"
    batch = f"vmap of {row['batch']}, {row['batch_routing']} routing"
    return f"{batch}, axis {row['batch_axis']}"


def _lines(
    x: str,
    xlabel: str,
    series: Name,
    panel: Name = lambda row: "time",
    *,
    y: str = "us",
    ylabel: str = "µs on the device",
) -> Callable[[Rows], Panels]:
    """Return a function that draws ``y`` over ``x``, for times with the range of the samples and
    the link limit."""

    def draw(axis: Any, rows: Rows) -> None:
        for label, here in grouped(rows, series).items():
            here = sorted(here, key=lambda row: row[x])
            xs = [row[x] for row in here]
            (drawn,) = axis.plot(xs, [row[y] for row in here], label=label, marker="o", ms=4)
            if y == "us":
                low, high = ([row[key] for row in here] for key in ("min_us", "max_us"))
                axis.fill_between(xs, low, high, alpha=0.2, color=drawn.get_color())
        mine = [row for row in rows if row["method"] == "ours" and row.get("wire_us")]
        for op, here in grouped(sorted(mine, key=lambda row: row[x]), lambda r: r["op"]).items():
            if op in WIRE and y == "us":
                points = zip(*((row[x], row["wire_us"]) for row in here), strict=True)
                style = "--" if op == "combine" else "-."
                axis.plot(*points, style, color="black", lw=1, label=WIRE[op])
        sizes = sorted({row[x] for row in rows})
        if sizes[-1] > LOG_FROM * sizes[0]:
            axis.set_xscale("log")
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8, rotation=40)
        axis.set_xticks([], minor=True)
        values = [row[y] for row in rows if row[y]]
        if max(values) > LOG_FROM * min(values):
            axis.set_yscale("log")
        elif y == "us":
            axis.set_ylim(bottom=0)
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axis.set(xlabel=xlabel, ylabel=ylabel)

    def panels(rows: Rows) -> Panels:
        titles = grouped(rows, panel)
        return {title: functools.partial(draw, rows=here) for title, here in titles.items()}

    return panels


def _bars(
    group: Name,
    series: Name,
    panel: Name,
    *,
    y: str = "us",
    ylabel: str = "µs on the device",
    may_cut: bool = False,
) -> Callable[[Rows], Panels]:
    """Return a function that draws groups of bars, one of each series, with their heights as
    numbers."""

    def draw(axis: Any, rows: Rows) -> None:
        groups, names = list(grouped(rows, group)), list(grouped(rows, series))
        width = 0.8 / len(names)
        low = min(row[y] for row in rows)
        top = 1.2 * max(row[y] for row in rows if not may_cut or row[y] < CUT_FROM * low)
        for i, name in enumerate(names):
            found = {group(row): row[y] for row in rows if series(row) == name}
            places = [groups.index(g) + (i - (len(names) - 1) / 2) * width for g in found]
            axis.bar(places, list(found.values()), width, label=name)
            for place, height in zip(places, found.values(), strict=True):
                at = min(height, 0.94 * top)
                axis.text(place, at, f"{height:,.0f}", ha="center", va="bottom", fontsize=6)
        axis.set_xticks(range(len(groups)), groups, fontsize=7)
        axis.set(ylim=(0, top), ylabel=ylabel)

    def panels(rows: Rows) -> Panels:
        titles = grouped(rows, panel)
        return {title: functools.partial(draw, rows=here) for title, here in titles.items()}

    return panels


def _standard(rows: Rows) -> Panels:
    """Draw time against tokens: operations of ours, and round trips of all methods."""
    rows = [row for row in rows if row["skew"] == 1]
    sizes = grouped(rows, lambda row: (row["hidden"], row["top_k"], row["experts"]))
    main = max(sizes.values(), key=len)
    mine = [row for row in main if row["method"] == "ours"]
    ours = _lines("tokens", "tokens per rank", op_in_words, lambda row: "ours")
    trips = _lines("tokens", "tokens per rank", _method, lambda row: "round trip")
    return {**ours(mine), **trips(of(main, ("round_trip", True)))}


def _over(x: str, label: str, panel: Name = lambda row: "time") -> Callable[[Rows], Panels]:
    """Return a function that draws our operations over a number."""
    lines = _lines(x, label, op_in_words, panel)
    return lambda rows: lines([r for r in rows if r["method"] == "ours" and r[x] is not None])


def _compared(name: Name) -> Callable[[Rows], Panels]:
    """Return a function that draws a bar of each kind of row for each operation."""
    bars = _bars(
        lambda row: op_in_words(row).replace(", ", ",\n"),
        name,
        lambda row: f"{tokens_in_words(row['tokens'] * row['batch'])} per rank",
    )
    return lambda rows: bars([row for row in rows if row["op"] not in ("waited", "thunks")])


def _method(row: Row) -> str:
    return row["method"]


def _size_and_op(row: Row) -> str:
    return f"{tokens_in_words(row['tokens'])} per rank, {op_in_words(row)}"


def _layer_and_op(row: Row) -> str:
    name = row.get("shape")  # older records have one layer
    return f"{name}, {_size_and_op(row)}" if name else _size_and_op(row)


def _experts_alone(rows: Rows) -> Panels:
    """Draw only the experts, if there are several implementations."""
    bars = _bars(lambda row: row["grouped"], lambda row: "", _layer_and_op, may_cut=True)
    several = [here for here in grouped(rows, _layer_and_op).values() if len(here) > 1]
    return bars([row for here in several for row in here])


def _overlap(rows: Rows) -> Panels:
    """Draw exchanges and products, separately and together."""
    series = dict(exchange_us="exchange alone", products_us="products alone", us="together")
    one_by_one = [
        dict(row, us=row[key], series=name) for row in rows for key, name in series.items()
    ]
    group = lambda row: f"{row['num_sms']} SMs\n{row['pairs']} × {row['columns']}"
    return _bars(group, lambda row: row["series"], lambda row: row["op"])(one_by_one)


def _products(rows: Rows) -> Panels:
    """Draw grouped products of many rows."""
    panel = lambda r: f"{r['shape']}, {r['k']:,} × {r['n']:,}, {r['sizes']} sizes"
    bars = _bars(op_in_words, _method, panel, y="tflops", ylabel="TFLOP/s")
    return bars([row for row in rows if row["rows"] == max(row["rows"] for row in rows)])


def is_in_turn(row: Row) -> bool:
    """Return True for a layer without overlap, with which others are compared."""
    return row["schedule"] == "one after the other"


def products_in_words(row: Row) -> str:
    """Return which multiprocessors products have next to an exchange, and by which ranges."""
    return f"{row['products']}, ranges {row['ranges']}" if row.get("ranges") else row["products"]


def _schedules(rows: Rows) -> Panels:
    """Draw layers with played peers, compared with the same layer without overlap."""
    plain = {(r["shape"], r["played_ranks"], r["op"]): r["us"] for r in rows if is_in_turn(r)}
    ratios = [
        dict(row, ratio=row["us"] / plain[row["shape"], row["played_ranks"], row["op"]])
        for row in rows
        if row["products"]
    ]
    return _lines(
        *("num_sms", "SMs of the exchange"),
        lambda row: f"{row['played_ranks']} ranks, {products_in_words(row)}",
        lambda row: f"shape {row['shape']}, {row['op']}: {row['schedule']}",
        y="ratio",
        ylabel="ratio to one after the other",
    )(ratios)


def _in_common(rows: Rows) -> str:
    """Return the tokens, hidden size, top-k, experts and dtype that all rows share."""
    texts = dict(tokens="{:,} tokens", hidden="hidden {:,}", top_k="top-{}")
    found = []
    for key, text in dict(texts, experts="{} experts", dtype="{}").items():
        values = {row[key] for row in rows if key in row}
        found += [text.format(values.pop())] if len(values) == 1 else []
    return ", ".join(found)


PANELS: dict[str, Callable[[Rows], Panels]] = {
    "": _standard,
    "tokens": _over("tokens", "tokens per rank"),
    "experts": _over("experts", "experts"),
    "hidden": _over("hidden", "hidden"),
    "topk": _over("top_k", "top-k"),
    "skew": _over("skew", "times its share that rank 0 gets"),
    "sms": _over("num_sms", "SMs", lambda row: f"{tokens_in_words(row['tokens'])} per rank"),
    "capacity": _compared(lambda r: f"{r['capacity_kind']} capacity, {r['capacity']:,} rows"),
    "payload": _compared(lambda row: row["dtype"]),
    "vmap": _compared(batch_in_words),
    "graphs": _compared(lambda row: f"{'' if row['cuda_graphs'] else 'not '}in graphs"),
    "formats": _compared(format_in_words),
    "modes": _compared(mode_in_words),
    "overlap": _overlap,
    "processes": _lines("tokens", "tokens per rank", layout_in_words),
    **dict.fromkeys(
        ("layer", "decode"), _bars(_method, lambda row: "", _layer_and_op, may_cut=True)
    ),
    "grouped": _experts_alone,
    "products": _products,
    "schedules": _schedules,
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for made in plot(records.read(pathlib.Path(name)), pathlib.Path(name)):
            print(made)
