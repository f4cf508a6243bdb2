"""Draw the plots of records: ``python -m benchmarks.plot RECORD.json ...``."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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
    ("chained", False): "chained pair",
}
WIRE = {"combine": "wire, one way", "round_trip": "wire, both ways", "chained": "wire, both ways"}
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
        panels = SHOWN.get(sweep, SHOWN[""]).panels(rows)
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


def routing_in_words(row: Row) -> str:
    """Return how the rows are divided among ranks."""
    if row["idle"]:
        return f"{records.ranks_in_words(row['idle'])} without rows"
    if row["sigma"]:
        return f"sigma {row['sigma']:g} of log-odds"
    return "uniform" if row["skew"] == 1 else f"rank 0 gets {row['skew']:g} times its share"


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
    only: Callable[[Row], bool] = lambda row: True,
) -> Callable[[Rows], Panels]:
    """Return a function that draws ``y`` over ``x``, for times with the range of the samples and
    the link limit."""

    def draw(axis: Any, rows: Rows) -> None:
        rows = sorted(rows, key=lambda row: row[x])
        for label, here in grouped(rows, series).items():
            xs = [row[x] for row in here]
            (drawn,) = axis.plot(xs, [row[y] for row in here], label=label, marker="o", ms=4)
            if y == "us":
                low, high = ([row[key] for row in here] for key in ("min_us", "max_us"))
                axis.fill_between(xs, low, high, alpha=0.2, color=drawn.get_color())
        mine = [row for row in rows if row["method"] == "ours" and row.get("wire_us")]
        for op, here in grouped(mine, lambda row: row["op"]).items():
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

    return _in_panels(draw, panel, only)


def _bars(
    group: Name,
    series: Name,
    panel: Name,
    *,
    y: str = "us",
    ylabel: str = "µs on the device",
    may_cut: bool = False,
    only: Callable[[Row], bool] = lambda row: True,
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

    return _in_panels(draw, panel, only)


def _in_panels(
    draw: Callable[..., None], panel: Name, only: Callable[[Row], bool]
) -> Callable[[Rows], Panels]:
    """Return a function that draws some rows, those with the same title in one panel."""

    def panels(rows: Rows) -> Panels:
        titles = grouped(filter(only, rows), panel)
        return {title: functools.partial(draw, rows=here) for title, here in titles.items()}

    return panels


# Rows of a sweep that are derived, or chosen among, before they are drawn.


def _standard(rows: Rows) -> Panels:
    """Draw time against tokens: operations of ours, and round trips of all methods."""
    rows = [row for row in rows if row["skew"] == 1]
    sizes = grouped(rows, lambda row: (row["hidden"], row["top_k"], row["experts"]))
    main = max(sizes.values(), key=len)
    ours = _lines("tokens", TOKENS, op_in_words, lambda row: "ours", only=_is_ours)
    trips = _lines("tokens", TOKENS, _method, lambda row: "round trip")
    return {**ours(main), **trips(of(main, ("round_trip", True)))}


def _experts_alone(rows: Rows) -> Panels:
    """Draw only the experts, if there are several implementations."""
    bars = _bars(lambda row: row["grouped"], lambda row: "", _layer_and_op, may_cut=True)
    several = [here for here in grouped(rows, _layer_and_op).values() if len(here) > 1]
    return bars([row for here in several for row in here])


def _overlap(rows: Rows) -> Panels:
    """Draw exchanges and products, separately and together."""
    series = dict(exchange_us="exchange alone", products_us="products alone", us="together")
    group = lambda row: f"{row['num_sms']} SMs\n{row['pairs']} × {row['columns']}"
    bars = _bars(group, lambda row: row["series"], lambda row: row["op"])
    return bars([dict(row, us=row[key], series=series[key]) for row in rows for key in series])


def _products(rows: Rows) -> Panels:
    """Draw grouped products of many rows."""
    most = max(row["rows"] for row in rows)
    panel = lambda r: f"{r['shape']}, {r['k']:,} × {r['n']:,}, {r['sizes']} sizes"
    options: Any = dict(y="tflops", ylabel="TFLOP/s", only=lambda row: row["rows"] == most)
    return _bars(op_in_words, _method, panel, **options)(rows)


def with_ratio(rows: Rows) -> list[Row]:
    """Return layers with played peers, with the ratio to the same layer without overlap."""
    name = lambda row: (row["shape"], row["played_ranks"], row["op"])
    plain = {name(r): r["us"] for r in rows if r["schedule"] == "one after the other"}
    return [
        dict(row, ratio=row["us"] / plain[name(row)] if name(row) in plain else None)
        for row in rows
    ]


def _schedules(rows: Rows) -> Panels:
    """Draw layers with played peers, compared with the same layer without overlap."""
    series = lambda row: f"{row['played_ranks']} ranks, {row['products']}"
    panel = lambda row: f"shape {row['shape']}, {row['op']}: {row['schedule']}"
    options: Any = dict(y="ratio", ylabel="ratio to one after the other")
    options["only"] = lambda row: row["products"]
    lines = _lines("num_sms", "SMs of the exchange", series, panel, **options)
    return lines(with_ratio(rows))


def _over(x: str, label: str, panel: Name = lambda row: "time") -> Callable[[Rows], Panels]:
    """Return a function that draws our operations over a number."""
    only = lambda row: _is_ours(row) and row[x] is not None
    return _lines(x, label, op_in_words, panel, only=only)


def _compared(name: Name) -> Callable[[Rows], Panels]:
    """Return a function that draws a bar of each kind of row for each operation."""
    return _bars(
        lambda row: op_in_words(row).replace(", ", ",\n"),
        name,
        lambda row: f"{tokens_in_words(row['tokens'] * row['batch'])} per rank",
        only=lambda row: row["op"] not in ("waited", "thunks"),
    )


def _method(row: Row) -> str:
    return row["method"]


def _is_ours(row: Row) -> bool:
    return row["method"] == "ours"


def _layer_and_op(row: Row) -> str:
    shape = f"{row['shape']}, " if row.get("shape") else ""  # older records have one layer
    return f"{shape}{tokens_in_words(row['tokens'])} per rank, {op_in_words(row)}"


def _in_common(rows: Rows) -> str:
    """Return the tokens, hidden size, top-k, experts and dtype that all rows share."""
    texts = dict(tokens="{:,} tokens", hidden="hidden {:,}", top_k="top-{}")
    found = []
    for key, text in dict(texts, experts="{} experts", dtype="{}").items():
        values = {row[key] for row in rows if key in row}
        found += [text.format(values.pop())] if len(values) == 1 else []
    return ", ".join(found)


class Shown(NamedTuple):
    """Hold how a sweep is shown."""

    title: str
    panels: Callable[[Rows], Panels]
    name: Name = lambda row: ""
    """What distinguishes a row of the sweep."""


def _and_tokens(name: Name) -> Name:
    return lambda row: f"{tokens_in_words(row['tokens'])}, {name(row)}"


def _layer(title: str) -> Shown:
    return Shown(title, _bars(_method, lambda row: "", _layer_and_op, may_cut=True))


def _number(title: str, x: str, label: str, name: str) -> Shown:
    """Return a sweep over a number, with the name as a format."""
    return Shown(title, _over(x, label), lambda row: name.format(row[x]))


def _kinds(title: str, name: Name, in_plot: Name | None = None) -> Shown:
    """Return a sweep over what has names."""
    return Shown(title, _compared(in_plot or name), name)


TOKENS = "tokens per rank"
SHOWN: dict[str, Shown] = {
    "": Shown(
        "Standard settings",
        _standard,
        lambda row: (
            f"{row['tokens']:,} × {row['hidden']:,}, top-{row['top_k']} of {row['experts']}, "
            f"{row['routing']}"
        ),
    ),
    "tokens": Shown("Tokens", _over("tokens", TOKENS), lambda r: tokens_in_words(r["tokens"])),
    "ladder": Shown(
        "Ladder, chained pairs of dispatch and combine",
        _over("tokens", TOKENS),
        lambda row: tokens_in_words(row["tokens"]),
    ),
    "experts": _number("Experts", "experts", "experts", "{} experts"),
    "hidden": _number("Hidden size", "hidden", "hidden", "hidden {:,}"),
    "topk": _number("Top-k", "top_k", "top-k", "top-{}"),
    "skew": _kinds("Skew", routing_in_words),
    "capacity": _kinds(
        "Capacity, 4096 tokens",
        lambda row: row["capacity_kind"],
        lambda row: f"{row['capacity_kind']} capacity, {row['capacity']:,} rows",
    ),
    "payload": _kinds("Payload", lambda row: row["dtype"]),
    "sms": Shown(
        "SM budget",
        _over("num_sms", "SMs", lambda row: f"{tokens_in_words(row['tokens'])} per rank"),
        _and_tokens(lambda row: f"{row['num_sms']} SMs"),
    ),
    "vmap": _kinds("Batch by vmap", batch_in_words),
    "graphs": _kinds(
        "CUDA graphs",
        _and_tokens(lambda row: f"{'' if row['cuda_graphs'] else 'not '}in graphs"),
        lambda row: f"{'' if row['cuda_graphs'] else 'not '}in graphs",
    ),
    "formats": _kinds("Token formats", _and_tokens(format_in_words), format_in_words),
    "modes": _kinds("Modes", _and_tokens(mode_in_words), mode_in_words),
    "overlap": Shown("During matrix products", _overlap),
    "processes": Shown("In several processes", _lines("tokens", TOKENS, layout_in_words)),
    "grouped": Shown("Experts alone", _experts_alone),
    "products": Shown("Grouped products", _products),
    "layer": _layer("Whole layer, training"),
    "decode": _layer("Whole layer, decode"),
    "schedules": Shown("Schedules of a layer, peers played", _schedules),
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for made in plot(records.read(pathlib.Path(name)), pathlib.Path(name)):
            print(made)
