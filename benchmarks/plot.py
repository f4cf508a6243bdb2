"""Draw the plots of records: ``python -m benchmarks.plot RECORD.json ...``."""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from . import record as records

Row = dict[str, Any]
Rows = Sequence[Row]
Panels = dict[str, Callable[[Any], None]]  # by title
Name = Callable[[Row], str]

ROUND_TRIP: Row = dict(op="round_trip", includes_route=True)
WIRE = {"combine": "wire, one way", "round_trip": "wire, both ways", "chained": "wire, both ways"}
MAX_LEGEND = 6  # entries in one column
LOG_FROM = 20  # a scale is logarithmic if the greatest value is at least this many times the least
CUT_FROM = 4  # a bar that is at least this many times the least may go through the frame
TIME, TOKENS = "µs on the device", "tokens per rank"


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


# Rows


def of(rows: Rows, /, **wanted: Any) -> list[Row]:
    """Return the rows with these entries."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def entry(rows: Rows, /, name: str = "us", **wanted: Any) -> Any:
    """Return an entry of the first row with these other entries; None if there is no such row."""
    found = of(rows, **wanted)
    return found[0].get(name) if found else None


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Return the rows by a key, in the order of their first rows."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def with_ratio(rows: Rows) -> list[Row]:
    """Return layers with played peers, with the ratio to the same layer without overlap."""
    same = lambda row: {key: row[key] for key in ("shape", "played_ranks", "op")}
    plain = of(rows, schedule="one after the other")
    in_turn = [entry(plain, **same(row)) for row in rows]
    return [dict(row, ratio=us and row["us"] / us) for row, us in zip(rows, in_turn, strict=True)]


def _in_common(rows: Rows) -> str:
    """Return the tokens, hidden size, top-k, experts and dtype that all rows share."""
    texts = dict(tokens="{:,} tokens", hidden="hidden {:,}", top_k="top-{}")
    found = []
    for key, text in dict(texts, experts="{} experts", dtype="{}").items():
        values = {row[key] for row in rows if key in row}
        found += [text.format(values.pop())] if len(values) == 1 else []
    return ", ".join(found)


# Words


def tokens_in_words(tokens: int) -> str:
    """Return "1 token", "4,096 tokens" and so on."""
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"


def op_in_words(row: Row) -> str:
    """Return an operation, "dispatch, without route" for example."""
    is_partial = row["op"] == "dispatch" and not row.get("includes_route")
    return row["op"].replace("_", " ") + ", without route" * is_partial


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
        return f"popular experts, sigma {row['sigma']:g}"
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


def graphs_in_words(row: Row) -> str:
    """Return whether XLA may capture our calls."""
    return "in graphs" if row["cuda_graphs"] else "not in graphs"


def _method(row: Row) -> str:
    return row["method"]


def _tokens(row: Row) -> str:
    return tokens_in_words(row["tokens"])


def _and_tokens(name: Name) -> Name:
    return lambda row: f"{_tokens(row)}, {name(row)}"


# Lines and bars


def _panels(
    draw: Callable[..., None],
    panel: Name,
    only: Callable[[Row], bool] = lambda row: True,
    **options: Any,
) -> Callable[[Rows], Panels]:
    """Return a function that draws some rows, those with the same title in one panel."""

    def panels(rows: Rows) -> Panels:
        titles = grouped(filter(only, rows), panel).items()
        return {title: functools.partial(draw, rows=here, **options) for title, here in titles}

    return panels


def _lines(
    axis: Any, rows: Rows, x: str, xlabel: str, series: Name, y: str = "us", ylabel: str = TIME
) -> None:
    """Draw ``y`` over ``x``; times with the range of the samples and the link limit."""
    rows = sorted(rows, key=lambda row: row[x])
    for label, here in grouped(rows, series).items():
        xs = [row[x] for row in here]
        (drawn,) = axis.plot(xs, [row[y] for row in here], label=label, marker="o", ms=4)
        if y == "us":
            low, high = ([row[key] for row in here] for key in ("min_us", "max_us"))
            axis.fill_between(xs, low, high, alpha=0.2, color=drawn.get_color())
    limits = [row for row in of(rows, method="ours") if row.get("wire_us") and row["op"] in WIRE]
    for op, here in grouped(limits, lambda row: row["op"]).items():
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


def _bars(
    axis: Any,
    rows: Rows,
    group: Name,
    series: Name,
    y: str = "us",
    ylabel: str = TIME,
    may_cut: bool = False,
) -> None:
    """Draw groups of bars, one of each series, with their heights as numbers."""
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


# Panels by sweep


def _standard(rows: Rows) -> Panels:
    """Draw time against tokens: operations of ours, and round trips of all methods."""
    sizes = grouped(of(rows, skew=1), lambda row: (row["hidden"], row["top_k"], row["experts"]))
    main = max(sizes.values(), key=len)
    over: Any = dict(x="tokens", xlabel=TOKENS)
    ours = _panels(_lines, lambda row: "ours", series=op_in_words, **over)
    trips = _panels(_lines, lambda row: "round trip", series=_method, **over)
    return {**ours(of(main, method="ours")), **trips(of(main, **ROUND_TRIP))}


def _over(x: str, xlabel: str, panel: Name = lambda row: "time") -> Callable[[Rows], Panels]:
    """Return a function that draws our operations over a number."""
    only = lambda row: row["method"] == "ours" and row[x] is not None
    return _panels(_lines, panel, only, x=x, xlabel=xlabel, series=op_in_words)


def _compared(name: Name) -> Callable[[Rows], Panels]:
    """Return a function that draws a bar of each kind of row for each operation."""
    panel = lambda row: f"{tokens_in_words(row['tokens'] * row['batch'])} per rank"
    plain = ("all_gather", "dense")  # only in tables
    only = lambda row: row["op"] not in ("waited", "thunks") and row["method"] not in plain
    group = lambda row: op_in_words(row).replace(", ", ",\n")
    return _panels(_bars, panel, only, group=group, series=name)


def _layers(group: Name) -> Callable[[Rows], Panels]:
    """Return a function that draws a bar of each layer; a panel of one bar says nothing."""

    def panel(row: Row) -> str:
        shape = f"{row['shape']}, " if row.get("shape") else ""  # older records have one layer
        return f"{shape}{_tokens(row)} per rank, {op_in_words(row)}"

    def several(rows: Rows) -> Panels:
        panels = [here for here in grouped(rows, panel).values() if len(here) > 1]
        return draw([row for here in panels for row in here])

    draw = _panels(_bars, panel, group=group, series=lambda row: "", may_cut=True)
    return several


def _overlap(rows: Rows) -> Panels:
    """Draw exchanges and products, separately and together."""
    series = dict(exchange_us="exchange alone", products_us="products alone", us="together")
    group = lambda row: f"{row['num_sms']} SMs\n{row['pairs']} × {row['columns']}"
    draw = _panels(_bars, lambda row: row["op"], group=group, series=lambda row: row["series"])
    return draw([dict(row, us=row[key], series=series[key]) for row in rows for key in series])


def _products(rows: Rows) -> Panels:
    """Draw grouped products of many rows."""
    panel = lambda r: f"{r['shape']}, {r['k']:,} × {r['n']:,}, {r['sizes']} sizes"
    options: Any = dict(group=op_in_words, series=_method, y="tflops", ylabel="TFLOP/s")
    return _panels(_bars, panel, **options)(of(rows, rows=max(row["rows"] for row in rows)))


def _schedules(rows: Rows) -> Panels:
    """Draw layers with played peers, compared with the same layer without overlap."""
    panel = lambda row: f"shape {row['shape']}, {row['op']}: {row['schedule']}"
    options: Any = dict(x="num_sms", xlabel="SMs of the exchange", y="ratio")
    options["series"] = lambda row: f"{row['played_ranks']} ranks, {row['products']}"
    options["ylabel"] = "ratio to one after the other"
    return _panels(_lines, panel, lambda row: row["products"], **options)(with_ratio(rows))


class Shown(NamedTuple):
    """Hold how a sweep is shown."""

    title: str
    panels: Callable[[Rows], Panels]
    name: Name = lambda row: ""
    """Names a row, to distinguish it from the other rows of the sweep."""


SHOWN: dict[str, Shown] = {
    "": Shown(
        "Standard settings",
        _standard,
        lambda row: "{tokens:,} × {hidden:,}, top-{top_k} of {experts}, {routing}".format(**row),
    ),
    "tokens": Shown("Tokens", _over("tokens", TOKENS), _tokens),
    "ladder": Shown("Ladder of tokens, chained pairs", _over("tokens", TOKENS), _tokens),
    "experts": Shown("Experts", _over("experts", "experts"), "{experts} experts".format_map),
    "hidden": Shown("Hidden size", _over("hidden", "hidden"), "hidden {hidden:,}".format_map),
    "topk": Shown("Top-k", _over("top_k", "top-k"), "top-{top_k}".format_map),
    "skew": Shown("Skew", _compared(routing_in_words), routing_in_words),
    "capacity": Shown(
        "Capacity, 4096 tokens",
        _compared("{capacity_kind} capacity, {capacity:,} rows".format_map),
        "{capacity_kind}".format_map,
    ),
    "payload": Shown("Payload", _compared("{dtype}".format_map), "{dtype}".format_map),
    "sms": Shown(
        "SM budget",
        _over("num_sms", "SMs", lambda row: f"{_tokens(row)} per rank"),
        _and_tokens("{num_sms} SMs".format_map),
    ),
    "vmap": Shown("Batch by vmap", _compared(batch_in_words), batch_in_words),
    "graphs": Shown("CUDA graphs", _compared(graphs_in_words), _and_tokens(graphs_in_words)),
    "formats": Shown("Token formats", _compared(format_in_words), _and_tokens(format_in_words)),
    "modes": Shown("Modes", _compared(mode_in_words), _and_tokens(mode_in_words)),
    "overlap": Shown("During matrix products", _overlap),
    "processes": Shown(
        "In several processes",
        _panels(_lines, lambda _: "time", x="tokens", xlabel=TOKENS, series=layout_in_words),
    ),
    "grouped": Shown("Experts alone", _layers(lambda row: row["grouped"])),
    "products": Shown("Grouped products", _products),
    "layer": Shown("Whole layer, training", _layers(_method)),
    "decode": Shown("Whole layer, decode", _layers(_method)),
    "schedules": Shown("Schedules of a layer, peers played", _schedules),
}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for made in plot(records.read(pathlib.Path(name)), pathlib.Path(name)):
            print(made)
