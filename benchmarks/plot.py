"""The plots of records: ``python -m benchmarks.plot RECORD.json ...``."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import record as records

Row = dict[str, Any]
Key = tuple[str, bool]

LABELS: dict[Key, str] = {
    ("route", True): "route",
    ("dispatch", True): "dispatch",
    ("dispatch", False): "dispatch, without route",
    ("combine", False): "combine",
    ("round_trip", True): "round trip",
    ("backward", False): "backward",
    ("waited", True): "one of 8\nround trips,\nwaited for",
}
COLORS: dict[Key, str] = {key: f"C{i}" for i, key in enumerate(LABELS)}
WIRE = dict(color="black", ls="--", lw=1)
WIRE_TWICE = dict(color="black", ls="-.", lw=1)
DEVICE_TIME = "µs on the device"
MAX_LEGEND = 6  # entries in one column
MAX_TICKS = 6  # that fit beside each other
LOG_FROM = 20  # a scale is logarithmic where the greatest value is so many times the least


def plot(record: dict[str, Any], path: pathlib.Path) -> list[pathlib.Path]:
    """Draws everything that a record has, one PNG for each sweep.

    Args:
      record: as ``record.read`` gives it.
      path: of the record; the plots lie beside it.

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
            axis.grid(True, which="major", alpha=0.3)
            axis.set_axisbelow(True)
            _plain_numbers(axis)
            if labels := axis.get_legend_handles_labels()[1]:
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
    """Where the plot of a record's sweep lies: <record>.png or <record>-<sweep>.png."""
    stem = record_path.stem
    if sweep and stem != sweep and not stem.endswith(f"-{sweep}"):
        stem += f"-{sweep}"
    return record_path.with_name(f"{stem}.png")


Panel = Callable[[Any], None]


def _of(rows: Sequence[Row], key: Key) -> list[Row]:
    return [r for r in rows if (r["op"], r.get("includes_route")) == key]


def _plain_numbers(axis: Any) -> None:
    """1,000 where matplotlib would have 1000, or 10 to the 3 on a logarithmic scale."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for which, scale in ((axis.xaxis, axis.get_xscale()), (axis.yaxis, axis.get_yscale())):
        if isinstance(which.get_major_formatter(), FuncFormatter):
            continue
        if scale == "log":
            which.set_major_locator(LogLocator(10, (1, 2, 5)))
            which.set_minor_formatter(NullFormatter())
        if scale == "log" or type(which.get_major_formatter()).__name__ == "ScalarFormatter":
            which.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))


def _ticks_at(axis: Any, sizes: Sequence[float], is_log: bool) -> None:
    """Marks the sizes that were measured, but few enough to be read."""
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


def _spread(values: Sequence[float]) -> float:
    values = [value for value in values if value]
    return max(values) / min(values) if values else 1.0


def tokens_in_words(tokens: int) -> str:
    """1 token, 4,096 tokens."""
    return f"{tokens:,} token{'' if tokens == 1 else 's'}"


def _line(axis: Any, rows: Sequence[Row], x: str, y: str, label: str, **style: Any) -> None:
    """``y`` over ``x``; for times with the range of the samples."""
    rows = sorted((r for r in rows if r.get(y) is not None), key=lambda r: r[x])
    if rows:
        xs = [r[x] for r in rows]
        (drawn,) = axis.plot(xs, [r[y] for r in rows], label=label, **style)
        if y == "us":
            low, high = ([r[k] for r in rows] for k in ("min_us", "max_us"))
            axis.fill_between(xs, low, high, alpha=0.2, color=drawn.get_color())


def _bars(
    axis: Any,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    labels: Mapping[str, Sequence[float | None]] | None = None,
    floors: Mapping[str, Sequence[float | None]] | None = None,
    floor_label: str = "",
) -> None:
    """Groups of bars, one of each series, with their height or ``labels`` in numbers.

    ``floors`` are drawn as dashes across the bars: what each cannot be below.
    """
    width = 0.8 / max(1, len(series))
    has_floor = False
    for i, (name, heights) in enumerate(series.items()):
        places = [g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))]
        drawn = axis.bar(places, [h or 0 for h in heights], width, label=name)
        numbers = (labels or series)[name]
        axis.bar_label(drawn, [f"{n:,.0f}" if n else "" for n in numbers], fontsize=6)
        for place, floor, height in zip(
            places, (floors or {}).get(name, ()), heights, strict=False
        ):
            if floor and height:
                span = (place - 0.45 * width, place + 0.45 * width)
                label = floor_label if not has_floor else None
                axis.plot(span, (floor, floor), label=label, **WIRE)
                has_floor = True
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.set_ylabel(DEVICE_TIME)


def _of_main_size(rows: Sequence[Row]) -> list[Row]:
    """The uniform rows of the sizes with the widest range of tokens; others are single points."""
    rows = [row for row in rows if row["skew"] == 1]
    sizes = [(row["hidden"], row["top_k"], row["experts"]) for row in rows]
    size = max(sizes, key=sizes.count)
    return [r for r in rows if (r["hidden"], r["top_k"], r["experts"]) == size]


def _standard(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """Time against tokens, ours beside the wire and beside plain JAX."""
    mine = [row for row in rows if row["method"] == "ours"]
    tokens = [row["tokens"] for row in rows]

    def ours(axis: Any) -> None:
        axis.set_title("ours")
        _times(axis, mine, "tokens", [k for k in LABELS if k[0] != "round_trip"])
        axis.set(yscale="log", xlabel="tokens per rank")
        _ticks_at(axis, tokens, True)

    def against_plain(axis: Any) -> None:
        axis.set_title("round trip, against plain JAX")
        trips = _of(rows, ("round_trip", True))
        for method in dict.fromkeys(row["method"] for row in trips):
            chosen = [row for row in trips if row["method"] == method]
            _line(axis, chosen, "tokens", "us", method, marker="o", ms=4)
        trips = _of(mine, ("round_trip", True))
        _line(axis, trips, "tokens", "wire_us", "wire, both ways", **WIRE_TWICE)
        axis.set(yscale="log", xlabel="tokens per rank", ylabel=DEVICE_TIME)
        _ticks_at(axis, tokens, True)

    return [ours, against_plain]


def _times(axis: Any, rows: list[Row], x: str, keys: Sequence[Key]) -> None:
    """Time of each operation over ``x``; the wire, and the memory where it takes longer."""
    for key in keys:
        _line(axis, _of(rows, key), x, "us", LABELS[key], marker="o", ms=4, color=COLORS[key])
    for key in (("dispatch", False), ("combine", False)):
        # By a microsecond at least: below, it is the latencies that count.
        slower = [
            r for r in _of(rows, key) if (r.get("bound_us") or 0) > (r.get("wire_us") or 0) + 1
        ]
        if key in keys and slower:
            label = f"busiest link or memory, {key[0]}"
            _line(axis, _of(rows, key), x, "bound_us", label, color=COLORS[key], ls=":", lw=1)
    _line(axis, _of(rows, ("combine", False)), x, "wire_us", "wire, one way", **WIRE)
    for key in (("round_trip", True), ("backward", False)):
        if key in keys and _of(rows, key):
            _line(axis, _of(rows, key), x, "wire_us", "wire, both ways", **WIRE_TWICE)
            break
    axis.set_ylabel(DEVICE_TIME)


def _over(x: str, label: str, is_log: bool = True) -> Callable[..., list[Panel]]:
    """Panels of a sweep over a number: time, and GB/s on the wire."""

    def panels(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
        mine = [row for row in rows if row["method"] == "ours"]
        keys = [key for key in LABELS if _of(mine, key)]
        sizes = [row[x] for row in mine]

        def times(axis: Any) -> None:
            axis.set_title("time")
            _times(axis, mine, x, keys)
            if _spread([row["us"] for row in mine]) > LOG_FROM:
                axis.set_yscale("log")
            else:
                axis.set_ylim(bottom=0)
            axis.set_xlabel(label)
            _ticks_at(axis, sizes, is_log)

        def rates(axis: Any) -> None:
            axis.set_title("rate")
            for key in keys:
                if key[0] != "route":
                    style = dict(marker="o", ms=4, color=COLORS[key])
                    _line(axis, _of(mine, key), x, "gb_per_s", LABELS[key], **style)
            if record["wire"] and record["wire"].get("results"):
                best = max(r["gb_per_s"] for r in record["wire"]["results"])
                axis.axhline(best, label="wire", **WIRE)
            axis.set(xlabel=label, ylabel="GB/s that leave a GPU", ylim=(0, None))
            _ticks_at(axis, sizes, is_log)

        def against_plain(axis: Any) -> None:
            axis.set_title("against plain JAX; in numbers: µs")
            sizes = sorted({r[x] for r in rows if r["method"] not in ("ours", "wire")})
            methods = list(dict.fromkeys(r["method"] for r in rows if r["method"] != "wire"))
            groups = [(size, key) for size in sizes for key in PLAIN_KEYS]

            def of_methods(name: str) -> dict[str, list[float | None]]:
                return {
                    m: [_value(_of(rows, key), name, method=m, **{x: s}) for s, key in groups]
                    for m in methods
                }

            names = [f"{LABELS[key]}\n{size:,}" for size, key in groups]
            _bars(axis, names, of_methods("ratio"), of_methods("us"))
            axis.axhline(1, label="wire, both ways", **WIRE)
            axis.set_ylabel("times the wire, both ways")

        has_plain = any(r["method"] not in ("ours", "wire") for r in rows)
        return [times, rates, *([against_plain] if has_plain else [])]

    return panels


PLAIN_KEYS = (("round_trip", True), ("backward", False))


def _value(rows: Sequence[Row], name: str = "us", **wanted: Any) -> float | None:
    """Of the row with these entries, if there is one."""
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            return row.get(name)
    return None


def _compared(name_of: Callable[[Row], str]) -> Callable[..., list[Panel]]:
    """Bars: operations, with a bar for each kind of row, and what bounds it; a panel for each
    number of tokens, those of a batch together."""

    def panels(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
        names = list(dict.fromkeys(name_of(row) for row in rows))

        def panel(tokens: int) -> Panel:
            mine = [row for row in rows if row["tokens"] * row["batch"] == tokens]
            keys = [key for key in LABELS if _of(mine, key)]

            def of_names(name: str) -> dict[str, list[float | None]]:
                return {
                    n: [_value([r for r in _of(mine, k) if name_of(r) == n], name) for k in keys]
                    for n in names
                }

            def bars(axis: Any) -> None:
                axis.set_title(f"{tokens_in_words(tokens)} per rank")
                floor = "busiest link or memory"
                groups = [LABELS[key] for key in keys]
                _bars(axis, groups, of_names("us"), floors=of_names("bound_us"), floor_label=floor)

            return bars

        return [panel(n) for n in dict.fromkeys(row["tokens"] * row["batch"] for row in rows)]

    return panels


def format_in_words(row: Row) -> str:
    """bfloat16, MxFp8, MxFp8 decoded, sums in MxFp8."""
    words = {"": row["dtype"], "rows": "{}", "decoded": "{} decoded", "sums": "sums in {}"}
    return words[row["formatted"]].format(row["format"])


def layout_in_words(row: Row) -> str:
    """How the ranks of a row are divided into processes and hosts."""
    words = f"{row['processes']} processes" if row["processes"] > 1 else "one process"
    if row["hosts"] > 1:
        words += f", {row['hosts']} hosts in two levels"
    if row["p2p_world_size"]:
        words += f", NVSHMEM beyond {row['p2p_world_size']}"
    return words


def mode_in_words(row: Row) -> str:
    """A mode, or what one writes without it."""
    words = {"": "no mode", "shared": "shared expert", "replicated": "replicated tokens"}
    without = {"apart": ", by hand", "local": ", plain JAX"}
    return words.get(row["mode"], "routing map") + without.get(row["method"], "")


def _batch_in_words(row: Row) -> str:
    if row["batch"] == 1:
        return f"one exchange of the same, {row['batch_routing']} routing"
    where = "outermost" if row["batch_axis"] == 0 else "behind tokens"
    return f"vmap of {row['batch']}, {row['batch_routing']} routing, batch {where}"


def _sms(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """Time against the SM budget, one panel for each number of tokens."""
    rows = [r for r in rows if r["method"] == "ours" and r["num_sms"] and r["skew"] == 1]

    def panel(tokens: int) -> Panel:
        def draw(axis: Any) -> None:
            axis.set_title(f"{tokens_in_words(tokens)} per rank")
            mine = [row for row in rows if row["tokens"] == tokens]
            keys = [key for key in LABELS if key[0] != "route" and _of(mine, key)]
            _times(axis, mine, "num_sms", keys)
            axis.set(xlabel="SMs", ylim=(0, None))
            _ticks_at(axis, [row["num_sms"] for row in mine], False)

        return draw

    return [panel(tokens) for tokens in sorted({row["tokens"] for row in rows}, reverse=True)]


def _graphs(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """With and without CUDA graphs, one panel for each number of tokens."""

    def panel(tokens: int) -> Panel:
        mine = [row for row in rows if row["tokens"] == tokens and row["op"] != "thunks"]
        keys = [key for key in LABELS if _of(mine, key)]

        def of_one(rows: list[Row], is_on: bool) -> float | None:
            """Of one repetition; what is waited for is in the record as a whole."""
            us = _value(rows, cuda_graphs=is_on)
            return us / rows[0]["reps"] if us and rows[0]["op"] == "waited" else us

        def draw(axis: Any) -> None:
            axis.set_title(f"{tokens_in_words(tokens)} per rank")
            series = {
                name: [of_one(_of(mine, key), is_on) for key in keys]
                for name, is_on in (("in graphs", True), ("not in graphs", False))
            }
            _bars(axis, [LABELS[key].replace(", ", ",\n") for key in keys], series)
            axis.tick_params(axis="x", labelsize=7)
            axis.set_ylabel(f"{DEVICE_TIME}; where waited for, on the host")

        return draw

    return [panel(tokens) for tokens in sorted({row["tokens"] for row in rows})]


LAYER_OPS = {"forward": "experts", "forward_and_gradients": "experts_and_gradients"}


def _layer(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """A whole layer by each method, experts and all else; a panel for each size and operation."""

    def panel(tokens: int, op: str) -> Panel:
        mine = [row for row in rows if (row["tokens"], row["op"]) == (tokens, op)]
        wanted = dict(sweep="grouped", tokens=tokens, op=LAYER_OPS[op], grouped=mine[0]["grouped"])
        experts = _value(record["rows"], **wanted) or 0

        def draw(axis: Any) -> None:
            axis.set_title(f"{tokens_in_words(tokens)} per rank, {op.replace('_', ' ')}")
            mine.sort(key=lambda row: row["us"])
            names = [row["method"] for row in mine]
            axis.bar(names, [experts] * len(mine), label=f"experts: {mine[0]['grouped']}")
            rest = [max(row["us"] - experts, 0) for row in mine]
            axis.bar(names, rest, bottom=experts, label="all else")
            # One method may take ten times the others: its bar goes through the frame.
            top = 1.2 * max(row["us"] for row in mine if row["us"] < 4 * mine[0]["us"])
            axis.set(ylim=(0, top), ylabel=DEVICE_TIME)
            for i, row in enumerate(mine):
                height = min(row["us"], 0.94 * top)
                axis.text(i, height, f"{row['us']:,.0f}", ha="center", va="bottom", fontsize=8)

        return draw

    sizes = dict.fromkeys((row["tokens"], row["op"]) for row in rows)
    return [panel(*size) for size in sizes]


def _grouped(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """The experts alone, by each candidate, where there are several."""

    def panel(tokens: int, op: str) -> Panel:
        def draw(axis: Any) -> None:
            axis.set_title(f"{tokens_in_words(tokens)} per rank, {op.replace('_', ' ')}")
            mine = [row for row in rows if (row["tokens"], row["op"]) == (tokens, op)]
            mine.sort(key=lambda row: -row["us"])
            bars = axis.barh([row["grouped"] for row in mine], [row["us"] for row in mine])
            axis.bar_label(bars, [f"{row['us']:,.0f}" for row in mine], fontsize=8, padding=2)
            axis.margins(x=0.12)  # for the numbers
            axis.locator_params(axis="x", nbins=6)
            axis.set_xlabel(DEVICE_TIME)

        return draw

    sizes = [(row["tokens"], row["op"]) for row in rows]
    return [panel(*size) for size in dict.fromkeys(sizes) if sizes.count(size) > 1]


def _overlap(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """Exchanges and products, alone and together, one panel for each operation."""
    series = {"exchange_us": "exchange alone", "products_us": "products alone", "us": "together"}

    def panel(op: str) -> Panel:
        mine = [row for row in rows if row["op"] == op]

        def draw(axis: Any) -> None:
            axis.set_title(f"{op}; SMs of the exchange, pairs of products")
            groups = [
                f"{row['num_sms']} SMs\n{row['pairs']} × {row['columns']}"
                + f"\n{row['products']}" * (row["products"] != "default")
                for row in mine
            ]
            _bars(
                axis, groups, {label: [row[key] for row in mine] for key, label in series.items()}
            )
            axis.tick_params(axis="x", labelsize=7)

        return draw

    return [panel(op) for op in dict.fromkeys(row["op"] for row in rows)]


def _processes(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """Round trips of each layout of processes."""

    def times(axis: Any) -> None:
        axis.set_title("round trip")
        for name in dict.fromkeys(map(layout_in_words, rows)):
            here = [row for row in rows if layout_in_words(row) == name]
            _line(axis, here, "tokens", "us", name, marker="o", ms=4)
        axis.set(yscale="log", xlabel="tokens per rank", ylabel=DEVICE_TIME)
        _ticks_at(axis, [row["tokens"] for row in rows], True)

    return [times]


def _products(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """Grouped products of many rows, one panel for each shape."""
    main = [row for row in rows if row["rows"] == max(row["rows"] for row in rows)]
    methods = list(dict.fromkeys(row["method"] for row in main))

    def panel(shape: str, sizes: str) -> Panel:
        mine = [row for row in main if (row["shape"], row["sizes"]) == (shape, sizes)]
        ops = list(dict.fromkeys(row["op"] for row in mine))
        found = {(row["method"], row["op"]): row["tflops"] for row in mine}

        def draw(axis: Any) -> None:
            axis.set_title(f"{shape}, {mine[0]['k']:,} × {mine[0]['n']:,}, {sizes} sizes")
            series = {name: [found.get((name, op)) for op in ops] for name in methods}
            _bars(axis, [op.replace("_", " ") for op in ops], series)
            axis.set_ylabel("TFLOP/s")

        return draw

    return [panel(*each) for each in dict.fromkeys((row["shape"], row["sizes"]) for row in main)]


def is_in_turn(row: Row) -> bool:
    """Return True for a layer without overlap, in which others are compared."""
    return row["schedule"] == "one after the other"


def _schedules(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """Layers with played peers, compared with the same layer without overlap."""

    def panel(shape: str, op: str) -> Panel:
        mine = [row for row in rows if (row["shape"], row["op"]) == (shape, op)]
        shown = [row for row in mine if row["products"]]
        plain = {row["played_ranks"]: row["us"] for row in mine if is_in_turn(row)}

        def draw(axis: Any) -> None:
            axis.set_title(f"shape {shape}, {op}: {shown[0]['schedule']}")
            for products in dict.fromkeys(row["products"] for row in shown):
                for ranks in plain:
                    line = [
                        r for r in shown if (r["products"], r["played_ranks"]) == (products, ranks)
                    ]
                    ratios = [dict(row, ratio=row["us"] / plain[ranks]) for row in line]
                    _line(
                        axis, ratios, "num_sms", "ratio", f"{ranks} ranks, {products}", marker="o"
                    )
            axis.axhline(1, color="black", linewidth=0.5)
            axis.set(xlabel="SMs of the exchange", ylabel="ratio to one after the other")

        return draw

    sizes = dict.fromkeys((row["shape"], row["op"]) for row in rows if row["products"])
    return [panel(*size) for size in sizes]


def _in_common(rows: list[Row]) -> str:
    """What all rows share of hidden, top-k, experts and dtype, in words."""

    def one(key: str, text: str) -> list[str]:
        values = {row[key] for row in rows if key in row}
        return [text.format(values.pop())] if len(values) == 1 else []

    found = one("tokens", "{:,} tokens") + one("hidden", "hidden {:,}")
    found += one("top_k", "top-{}") + one("experts", "{} experts") + one("dtype", "{}")
    return ", ".join(found)


PANELS: dict[str, Callable[[dict[str, Any], list[Row]], list[Panel]]] = dict(
    tokens=_over("tokens", "tokens per rank"),
    experts=_over("experts", "experts"),
    hidden=_over("hidden", "hidden"),
    topk=_over("top_k", "top-k"),
    skew=_over("skew", "times its share that rank 0 gets", is_log=False),
    capacity=_compared(lambda row: f"{row['capacity_kind']} capacity, {row['capacity']:,} rows"),
    payload=_compared(lambda row: row["dtype"]),
    sms=_sms,
    vmap=_compared(_batch_in_words),
    graphs=_graphs,
    formats=_compared(format_in_words),
    modes=_compared(mode_in_words),
    overlap=_overlap,
    processes=_processes,
    layer=_layer,
    decode=_layer,
    grouped=_grouped,
    products=_products,
    schedules=_schedules,
)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for made in plot(records.read(pathlib.Path(name)), pathlib.Path(name)):
            print(made)
