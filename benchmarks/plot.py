"""Draw the plots of records: ``python -m benchmarks.plot RECORD.json ...``."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from . import record as records

Row = dict[str, Any]
Key = tuple[str, bool]
Panel = Callable[[Any], None]
Rows = Sequence[Row]

LABELS: dict[Key, str] = {
    ("route", True): "route",
    ("dispatch", True): "dispatch",
    ("dispatch", False): "dispatch, without route",
    ("combine", False): "combine",
    ("round_trip", True): "round trip",
    ("backward", False): "backward",
}
COLORS: dict[Key, str] = {key: f"C{i}" for i, key in enumerate(LABELS)}
PLAIN_KEYS = (("round_trip", True), ("backward", False))
WIRE = dict(color="black", ls="--", lw=1)
WIRE_TWICE = dict(color="black", ls="-.", lw=1)
DEVICE_TIME = "µs on the device"
MAX_LEGEND = 6  # entries in one column
MAX_TICKS = 6  # that fit beside each other
LOG_FROM = 20  # a scale is logarithmic if the greatest value is so many times the least


def plot(record: dict[str, Any], path: pathlib.Path) -> list[pathlib.Path]:
    """Draw everything that a record has, one PNG for each sweep.

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
    for sweep in dict.fromkeys(row["sweep"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["sweep"] == sweep]
        if not sweep:
            rows = _of_main_size(rows)
        panels = PANELS.get(sweep, _standard)(record, rows)
        if not panels:
            continue
        figure, axes = plt.subplots(
            1, len(panels), figsize=(max(6 * len(panels), 9), 4.8), squeeze=False
        )
        for axis, panel in zip(axes[0], panels, strict=True):
            panel(axis)
            finish_axis(axis)
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


def value(rows: Rows, name: str = "us", **wanted: Any) -> Any:
    """Return an entry of the first row with these other entries; None if there is no such row."""
    for row in rows:
        if all(row.get(key) == expected for key, expected in wanted.items()):
            return row.get(name)
    return None


def finish_axis(axis: Any) -> None:
    """Draw a grid and a legend, and write 1,000 where matplotlib would have 1000 or 10^3."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.grid(True, which="major", alpha=0.3)
    axis.set_axisbelow(True)
    for which, scale in ((axis.xaxis, axis.get_xscale()), (axis.yaxis, axis.get_yscale())):
        if isinstance(which.get_major_formatter(), FuncFormatter):
            continue
        if scale == "log":
            which.set_major_locator(LogLocator(10, (1, 2, 5)))
            which.set_minor_formatter(NullFormatter())
        if scale == "log" or type(which.get_major_formatter()).__name__ == "ScalarFormatter":
            which.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    if labels := axis.get_legend_handles_labels()[1]:
        axis.legend(fontsize=8, ncols=2 if len(labels) > MAX_LEGEND else 1)


def _ticks_at(axis: Any, sizes: Sequence[float], is_log: bool) -> None:
    """Mark the sizes that were measured, but few enough to be read."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    if is_log:
        axis.set_xscale("log")
    shown: list[float] = []
    for size in sorted(set(sizes), reverse=True):
        if not shown or (shown[-1] / size > 1.3 if is_log else True):
            shown.append(size)
    axis.xaxis.set_major_locator(FixedLocator(shown))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))
    axis.tick_params(axis="x", labelsize=8, rotation=40 if is_log and len(shown) > MAX_TICKS else 0)


def tokens_in_words(tokens: int) -> str:
    """Return "1 token", "4,096 tokens" and so on."""
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"


def _line(axis: Any, rows: Rows, x: str, y: str, label: str, **style: Any) -> None:
    """Draw ``y`` over ``x``; for times with the range of the samples."""
    rows = sorted((r for r in rows if r.get(y) is not None), key=lambda r: r[x])
    if rows:
        xs = [r[x] for r in rows]
        (drawn,) = axis.plot(xs, [r[y] for r in rows], label=label, **style)
        if y == "us":
            low, high = ([r[k] for r in rows] for k in ("min_us", "max_us"))
            axis.fill_between(xs, low, high, alpha=0.2, color=drawn.get_color())


def _bars(
    groups: Sequence[str],
    series: Sequence[str],
    height: Callable[[int, str], float | None],
    title: str,
    *,
    number: Callable[[int, str], float | None] | None = None,
    floor: Callable[[int, str], float | None] | None = None,
    ylabel: str = DEVICE_TIME,
) -> Panel:
    """Return a panel with groups of bars, one of each series.

    ``height`` and ``number``, which stands above a bar, are functions of a group's index and a
    series. ``floor`` is drawn as a dash across the bar: what it cannot be below.
    """

    def panel(axis: Any) -> None:
        width = 0.8 / max(1, len(series))
        label: str | None = "busiest link or memory"
        for i, name in enumerate(series):
            places = [g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))]
            heights = [height(g, name) or 0 for g in range(len(groups))]
            drawn = axis.bar(places, heights, width, label=name)
            numbers = [(number or height)(g, name) for g in range(len(groups))]
            axis.bar_label(drawn, [f"{n:,.0f}" if n else "" for n in numbers], fontsize=6)
            for g, place in enumerate(places):
                if floor is not None and heights[g] and (y := floor(g, name)):
                    span = (place - 0.45 * width, place + 0.45 * width)
                    axis.plot(span, (y, y), label=label, **WIRE)
                    label = None
        axis.set_xticks(range(len(groups)), groups, fontsize=7)
        axis.set(title=title, ylabel=ylabel)

    return panel


def _of_main_size(rows: Rows) -> list[Row]:
    """Return the uniform rows of the sizes with the most of them; others are single points."""
    rows = [row for row in rows if row["skew"] == 1]
    sizes = [(row["hidden"], row["top_k"], row["experts"]) for row in rows]
    size = max(sizes, key=sizes.count)
    return [r for r in rows if (r["hidden"], r["top_k"], r["experts"]) == size]


def _lines(
    series: dict[str, Rows], x: str, xlabel: str, title: str, *, is_log: bool = True, y: str = "us"
) -> Panel:
    """Return a panel with a line for each series."""

    def panel(axis: Any) -> None:
        for name, rows in series.items():
            _line(axis, rows, x, y, name, marker="o", ms=4)
        axis.set(title=title, xlabel=xlabel, ylabel=DEVICE_TIME)
        if is_log:
            axis.set_yscale("log")
        _ticks_at(axis, [row[x] for rows in series.values() for row in rows], is_log)

    return panel


def _standard(record: dict[str, Any], rows: Rows) -> list[Panel]:
    """Draw time against tokens, ours next to the wire and next to plain JAX."""
    trips = of(rows, ("round_trip", True))
    mine = [row for row in rows if row["method"] == "ours" and row["op"] != "round_trip"]
    methods = dict.fromkeys(row["method"] for row in trips)
    series: dict[str, Rows] = {m: [row for row in trips if row["method"] == m] for m in methods}
    against_plain = _lines(series, "tokens", "tokens per rank", "round trip, against plain JAX")

    def with_wire(axis: Any) -> None:
        _line(axis, series.get("ours", ()), "tokens", "wire_us", "wire, both ways", **WIRE_TWICE)
        against_plain(axis)

    return [_times(mine, "tokens", "tokens per rank", "ours", is_log=True, y_log=True), with_wire]


def _times(
    rows: Rows, x: str, xlabel: str, title: str, *, is_log: bool, y_log: bool = False
) -> Panel:
    """Return a panel with the time of each operation, the wire, and the memory if it is slower."""

    def panel(axis: Any) -> None:
        keys = [key for key in LABELS if of(rows, key)]
        for key in keys:
            _line(axis, of(rows, key), x, "us", LABELS[key], marker="o", ms=4, color=COLORS[key])
        for key in (("dispatch", False), ("combine", False)):
            if any(map(is_bound, of(rows, key))):
                label = f"busiest link or memory, {key[0]}"
                _line(axis, of(rows, key), x, "bound_us", label, color=COLORS[key], ls=":", lw=1)
        _line(axis, of(rows, ("combine", False)), x, "wire_us", "wire, one way", **WIRE)
        for key in PLAIN_KEYS:
            if key in keys:
                _line(axis, of(rows, key), x, "wire_us", "wire, both ways", **WIRE_TWICE)
                break
        axis.set(title=title, xlabel=xlabel, ylabel=DEVICE_TIME)
        times = [row["us"] for row in rows if row["us"]]
        if y_log or max(times) > LOG_FROM * min(times):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        _ticks_at(axis, [row[x] for row in rows], is_log)

    return panel


def is_bound(row: Row) -> bool:
    """Return True if the memory, not the link, is the floor, by at least a microsecond."""
    return (row.get("bound_us") or 0) > (row.get("wire_us") or 0) + 1


def _over(x: str, label: str, is_log: bool = True) -> Callable[..., list[Panel]]:
    """Return what draws a sweep over a number: time, GB/s on the wire, and plain JAX."""

    def panels(record: dict[str, Any], rows: Rows) -> list[Panel]:
        mine = [row for row in rows if row["method"] == "ours"]
        rows = [row for row in rows if row["method"] != "wire"]

        def rates(axis: Any) -> None:
            axis.set_title("rate")
            for key in LABELS:
                if key[0] != "route":
                    style = dict(marker="o", ms=4, color=COLORS[key])
                    _line(axis, of(mine, key), x, "gb_per_s", LABELS[key], **style)
            if record["wire"] and record["wire"].get("results"):
                best = max(r["gb_per_s"] for r in record["wire"]["results"])
                axis.axhline(best, label="wire", **WIRE)
            axis.set(xlabel=label, ylabel="GB/s that leave a GPU", ylim=(0, None))
            _ticks_at(axis, [row[x] for row in mine], is_log)

        found = [_times(mine, x, label, "time", is_log=is_log), rates]
        if len(rows) > len(mine):
            sizes = sorted({row[x] for row in rows if row["method"] != "ours"})
            groups = [(size, key) for size in sizes for key in PLAIN_KEYS]
            compared = _bars(
                [f"{LABELS[key]}\n{size:,}" for size, key in groups],
                list(dict.fromkeys(row["method"] for row in rows)),
                lambda g, m: value(of(rows, groups[g][1]), "ratio", method=m, **{x: groups[g][0]}),
                "against plain JAX; in numbers: µs",
                number=lambda g, m: value(of(rows, groups[g][1]), method=m, **{x: groups[g][0]}),
                ylabel="times the wire, both ways",
            )
            found.append(compared)
        return found

    return panels


def _compared(name_of: Callable[[Row], str]) -> Callable[..., list[Panel]]:
    """Return what draws bars: for each operation one of each kind of row, and what bounds it.

    There is a panel for each number of tokens, those of a batch together.
    """

    def panels(record: dict[str, Any], rows: Rows) -> list[Panel]:
        names = list(dict.fromkeys(map(name_of, rows)))

        def panel(tokens: int) -> Panel:
            mine = [row for row in rows if row["tokens"] * row["batch"] == tokens]
            keys = [key for key in LABELS if of(mine, key)]

            def entry(name: str) -> Callable[[int, str], float | None]:
                return lambda g, kind: value(
                    [row for row in of(mine, keys[g]) if name_of(row) == kind], name
                )

            title = f"{tokens_in_words(tokens)} per rank"
            groups = [LABELS[key].replace(", ", ",\n") for key in keys]
            return _bars(groups, names, entry("us"), title, floor=entry("bound_us"))

        return [panel(n) for n in dict.fromkeys(row["tokens"] * row["batch"] for row in rows)]

    return panels


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
        words += f", NVSHMEM beyond {row['p2p_world_size']}"
    return words


def mode_in_words(row: Row) -> str:
    """Return a mode, or what one writes without it."""
    words = {"": "no mode", "shared": "shared expert", "replicated": "replicated tokens"}
    without = {"apart": ", by hand", "local": ", plain JAX"}
    return words.get(row["mode"], "routing map") + without.get(row["method"], "")


def _batch_in_words(row: Row) -> str:
    if row["batch"] == 1:
        return f"one exchange of the same, {row['batch_routing']} routing"
    where = "outermost" if row["batch_axis"] == 0 else "behind tokens"
    return f"vmap of {row['batch']}, {row['batch_routing']} routing, batch {where}"


def _sms(record: dict[str, Any], rows: Rows) -> list[Panel]:
    """Draw time against the SM budget, one panel for each number of tokens."""
    rows = [row for row in rows if row["method"] == "ours" and row["num_sms"] and row["skew"] == 1]
    found = []
    for tokens in sorted({row["tokens"] for row in rows}, reverse=True):
        mine = [row for row in rows if row["tokens"] == tokens]
        title = f"{tokens_in_words(tokens)} per rank"
        found.append(_times(mine, "num_sms", "SMs", title, is_log=False))
    return found


LAYER_OPS = {"forward": "experts", "forward_and_gradients": "experts_and_gradients"}


def _layer(record: dict[str, Any], rows: Rows) -> list[Panel]:
    """Draw bars of methods, experts and all else; or of the experts alone, if there are several."""

    def panel(tokens: int, op: str) -> Panel:
        mine = [row for row in rows if (row["tokens"], row["op"]) == (tokens, op)]
        mine.sort(key=lambda row: row["us"])
        wanted = dict(sweep="grouped", tokens=tokens, grouped=mine[0]["grouped"])
        experts = value(record["rows"], op=LAYER_OPS.get(op), **wanted) or 0

        def draw(axis: Any) -> None:
            axis.set_title(f"{tokens_in_words(tokens)} per rank, {op.replace('_', ' ')}")
            is_alone = mine[0]["sweep"] == "grouped"
            names = [row["grouped" if is_alone else "method"] for row in mine]
            if experts:
                axis.bar(names, [experts] * len(mine), label=f"experts: {mine[0]['grouped']}")
            rest = [max(row["us"] - experts, 0) for row in mine]
            axis.bar(names, rest, bottom=experts, label="all else" if experts else None)
            # One method may take ten times the others: its bar goes through the frame.
            top = 1.2 * max(row["us"] for row in mine if row["us"] < 4 * mine[0]["us"])
            axis.set(ylim=(0, top), ylabel=DEVICE_TIME)
            axis.tick_params(axis="x", labelsize=7)
            for i, row in enumerate(mine):
                height = min(row["us"], 0.94 * top)
                axis.text(i, height, f"{row['us']:,.0f}", ha="center", va="bottom", fontsize=8)

        return draw

    sizes = [(row["tokens"], row["op"]) for row in rows]
    is_alone = rows[0]["sweep"] == "grouped"
    return [panel(*s) for s in dict.fromkeys(sizes) if sizes.count(s) > 1 or not is_alone]


def _overlap(record: dict[str, Any], rows: Rows) -> list[Panel]:
    """Draw exchanges and products, alone and together, one panel for each operation."""
    series = {
        "exchange alone": "exchange_us",
        "products alone": "products_us",
        "together": "us",
    }
    found = []
    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op]
        groups = [f"{row['num_sms']} SMs\n{row['pairs']} × {row['columns']}" for row in mine]
        title = f"{op}; SMs of the exchange, pairs of products"
        entry = lambda g, name, mine=mine: mine[g][series[name]]
        found.append(_bars(groups, list(series), entry, title))
    return found


def _processes(record: dict[str, Any], rows: Rows) -> list[Panel]:
    """Draw round trips of each layout of processes."""
    names = dict.fromkeys(map(layout_in_words, rows))
    series: dict[str, Rows] = {n: [r for r in rows if layout_in_words(r) == n] for n in names}
    return [_lines(series, "tokens", "tokens per rank", "round trip")]


def _products(record: dict[str, Any], rows: Rows) -> list[Panel]:
    """Draw grouped products of many rows, one panel for each shape."""
    main = [row for row in rows if row["rows"] == max(row["rows"] for row in rows)]
    methods = list(dict.fromkeys(row["method"] for row in main))

    def panel(shape: str, sizes: str) -> Panel:
        mine = [row for row in main if (row["shape"], row["sizes"]) == (shape, sizes)]
        ops = list(dict.fromkeys(row["op"] for row in mine))
        return _bars(
            [op.replace("_", " ") for op in ops],
            methods,
            lambda g, name: value(mine, "tflops", method=name, op=ops[g]),
            f"{shape}, {mine[0]['k']:,} × {mine[0]['n']:,}, {sizes} sizes",
            ylabel="TFLOP/s",
        )

    return [panel(*each) for each in dict.fromkeys((row["shape"], row["sizes"]) for row in main)]


def is_in_turn(row: Row) -> bool:
    """Return True for a layer without overlap, with which others are compared."""
    return row["schedule"] == "one after the other"


def _schedules(record: dict[str, Any], rows: Rows) -> list[Panel]:
    """Draw layers with played peers, compared with the same layer without overlap."""

    def panel(shape: str, op: str) -> Panel:
        mine = [row for row in rows if (row["shape"], row["op"]) == (shape, op)]
        shown = [row for row in mine if row["products"]]
        plain = {row["played_ranks"]: row["us"] for row in mine if is_in_turn(row)}
        series: dict[str, list[Row]] = {}
        for row in shown:
            name = f"{row['played_ranks']} ranks, {row['products']}"
            ratio = row["us"] / plain[row["played_ranks"]]
            series.setdefault(name, []).append(dict(row, ratio=ratio))
        title = f"shape {shape}, {op}: {shown[0]['schedule']}"
        lines = _lines(
            dict(series), "num_sms", "SMs of the exchange", title, is_log=False, y="ratio"
        )

        def draw(axis: Any) -> None:
            lines(axis)
            axis.axhline(1, color="black", linewidth=0.5)
            axis.set_ylabel("ratio to one after the other")

        return draw

    sizes = dict.fromkeys((row["shape"], row["op"]) for row in rows if row["products"])
    return [panel(*size) for size in sizes]


def _in_common(rows: Rows) -> str:
    """Return what all rows share of tokens, hidden, top-k, experts and dtype."""
    texts = dict(tokens="{:,} tokens", hidden="hidden {:,}", top_k="top-{}")
    found = []
    for key, text in dict(texts, experts="{} experts", dtype="{}").items():
        values = {row[key] for row in rows if key in row}
        found += [text.format(values.pop())] if len(values) == 1 else []
    return ", ".join(found)


PANELS: dict[str, Callable[[dict[str, Any], Rows], list[Panel]]] = dict(
    tokens=_over("tokens", "tokens per rank"),
    experts=_over("experts", "experts"),
    hidden=_over("hidden", "hidden"),
    topk=_over("top_k", "top-k"),
    skew=_over("skew", "times its share that rank 0 gets", is_log=False),
    capacity=_compared(lambda row: f"{row['capacity_kind']} capacity, {row['capacity']:,} rows"),
    payload=_compared(lambda row: row["dtype"]),
    sms=_sms,
    vmap=_compared(_batch_in_words),
    graphs=_compared(lambda row: f"{'' if row['cuda_graphs'] else 'not '}in graphs"),
    formats=_compared(format_in_words),
    modes=_compared(mode_in_words),
    overlap=_overlap,
    processes=_processes,
    layer=_layer,
    decode=_layer,
    grouped=_layer,
    products=_products,
    schedules=_schedules,
)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for made in plot(records.read(pathlib.Path(name)), pathlib.Path(name)):
            print(made)
