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
    ("waited", True): "8 round trips,\nwaited for",
}
WIRE = dict(color="black", ls="--", lw=1)
BOUND = dict(color="black", ls=":", lw=1)
DEVICE_TIME = "µs on the device"


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
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8)
        figure.suptitle(
            f"{record['ranks']} ranks on {record['gpus']}; {_in_common(rows)}; "
            f"{record['date']}, {record['commit'][:10]}",
            fontsize=10,
        )
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


def _line(axis: Any, rows: Sequence[Row], x: str, y: str, label: str, **style: Any) -> None:
    """``y`` over ``x``; for times with the range of the samples."""
    rows = sorted((r for r in rows if r.get(y) is not None), key=lambda r: r[x])
    if rows:
        xs = [r[x] for r in rows]
        (drawn,) = axis.plot(xs, [r[y] for r in rows], label=label, **style)
        if y == "us":
            low, high = ([r[k] for r in rows] for k in ("min_us", "max_us"))
            axis.fill_between(xs, low, high, alpha=0.2, color=drawn.get_color())


def _bars(axis: Any, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Groups of bars, one of each series."""
    width = 0.8 / max(1, len(series))
    for i, (name, heights) in enumerate(series.items()):
        places = [g + (i - (len(series) - 1) / 2) * width for g in range(len(groups))]
        drawn = axis.bar(places, [h or 0 for h in heights], width, label=name)
        axis.bar_label(drawn, [f"{h:,.0f}" if h else "" for h in heights], fontsize=6)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.set_ylabel(DEVICE_TIME)


def _standard(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """Time against tokens, ours beside the wire and beside plain JAX."""
    rows = [row for row in rows if row["skew"] == 1]
    # The sizes with the widest range of tokens: the others are single points.
    sizes = [(row["hidden"], row["top_k"], row["experts"]) for row in rows]
    size = max(sizes, key=sizes.count)
    rows = [r for r in rows if (r["hidden"], r["top_k"], r["experts"]) == size]
    mine = [row for row in rows if row["method"] == "ours"]

    def ours(axis: Any) -> None:
        axis.set_title("ours, against the wire's limit one way")
        _times(axis, mine, "tokens", [k for k in LABELS if k[0] != "round_trip"])
        axis.set(xscale="log", yscale="log", xlabel="tokens per rank")

    def against_plain(axis: Any) -> None:
        axis.set_title("round trip, against plain JAX")
        trips = _of(rows, ("round_trip", True))
        for method in dict.fromkeys(row["method"] for row in trips):
            chosen = [row for row in trips if row["method"] == method]
            _line(axis, chosen, "tokens", "us", method, marker="o", ms=4)
        _line(axis, _of(mine, ("round_trip", True)), "tokens", "wire_us", "wire, both ways", **WIRE)
        axis.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel=DEVICE_TIME)

    return [ours, against_plain]


def _times(axis: Any, rows: list[Row], x: str, keys: Sequence[Key]) -> None:
    """Time of each operation over ``x``; the wire and the bound of a combine."""
    for key in keys:
        _line(axis, _of(rows, key), x, "us", LABELS[key], marker="o", ms=4)
    for combines in (_of(rows, ("combine", False)),):
        _line(axis, combines, x, "wire_us", "wire, one way", **WIRE)
        _line(axis, combines, x, "bound_us", "busiest link or memory, combine", **BOUND)
    axis.set_ylabel(DEVICE_TIME)


def _over(x: str, label: str, log: bool = True) -> Callable[..., list[Panel]]:
    """Panels of a sweep over a number: time, and GB/s on the wire."""

    def panels(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
        mine = [row for row in rows if row["method"] == "ours"]
        keys = [key for key in LABELS if _of(mine, key)]

        def times(axis: Any) -> None:
            axis.set_title("time")
            _times(axis, mine, x, [k for k in keys if k[0] != "waited"])
            if log:
                axis.set(xscale="log", yscale="log")
            else:
                axis.set_ylim(bottom=0)
            axis.set_xlabel(label)

        def rates(axis: Any) -> None:
            axis.set_title("rate")
            for key in keys:
                if key[0] != "route":
                    _line(axis, _of(mine, key), x, "gb_per_s", LABELS[key], marker="o", ms=4)
            if record["wire"] and record["wire"].get("results"):
                best = max(r["gb_per_s"] for r in record["wire"]["results"])
                axis.axhline(best, label="wire", **WIRE)
            axis.set(xlabel=label, ylabel="GB/s that leave a GPU", ylim=(0, None))
            if log:
                axis.set_xscale("log")

        def against_plain(axis: Any) -> None:
            axis.set_title("round trip and backward, against plain JAX")
            sizes = sorted({r[x] for r in rows if r["method"] not in ("ours", "wire")})
            methods = list(dict.fromkeys(r["method"] for r in rows if r["method"] != "wire"))
            groups = [(size, key) for size in sizes for key in PLAIN_KEYS]
            _bars(
                axis,
                [f"{LABELS[key]}\n{size:,}" for size, key in groups],
                {
                    m: [_value(_of(rows, key), method=m, **{x: size}) for size, key in groups]
                    for m in methods
                },
            )
            axis.set_yscale("log")

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
    """One panel of bars: operations, with a bar for each kind of row; and the wire."""

    def panels(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
        keys = [key for key in LABELS if _of(rows, key)]
        names = list(dict.fromkeys(name_of(row) for row in rows))

        def bars(axis: Any) -> None:
            series: dict[str, list[float | None]] = {}
            for name in names:
                mine = [row for row in rows if name_of(row) == name]
                series[name] = [_value(_of(mine, key)) for key in keys]
            series["wire"] = [_value(_of(rows, key), "wire_us") for key in keys]
            _bars(axis, [LABELS[key] for key in keys], series)

        return [bars]

    return panels


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
            axis.set_title(f"{tokens:,} tokens per rank")
            mine = [row for row in rows if row["tokens"] == tokens]
            _times(axis, mine, "num_sms", [k for k in LABELS if k[0] != "route"])
            axis.set(xlabel="SMs", ylim=(0, None))

        return draw

    return [panel(tokens) for tokens in sorted({row["tokens"] for row in rows}, reverse=True)]


def _graphs(record: dict[str, Any], rows: list[Row]) -> list[Panel]:
    """With and without CUDA graphs, one panel for each number of tokens."""

    def panel(tokens: int) -> Panel:
        mine = [row for row in rows if row["tokens"] == tokens and row["op"] != "thunks"]
        keys = [key for key in LABELS if _of(mine, key)]

        def draw(axis: Any) -> None:
            axis.set_title(f"{tokens:,} tokens per rank")
            series = {
                name: [_value(_of(mine, key), cuda_graphs=is_on) for key in keys]
                for name, is_on in (("in graphs", True), ("not in graphs", False))
            }
            _bars(axis, [LABELS[key] for key in keys], series)

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
            axis.set_title(f"{tokens:,} tokens per rank, {op.replace('_', ' ')}")
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
    """The experts alone, by each candidate."""

    def panel(tokens: int, op: str) -> Panel:
        def draw(axis: Any) -> None:
            axis.set_title(f"{tokens:,} tokens per rank, {op.replace('_', ' ')}")
            mine = [row for row in rows if (row["tokens"], row["op"]) == (tokens, op)]
            bars = axis.barh([row["grouped"] for row in mine], [row["us"] for row in mine])
            axis.bar_label(bars, [f"{row['us']:,.0f}" for row in mine], fontsize=8)
            axis.set_xlabel(DEVICE_TIME)

        return draw

    sizes = dict.fromkeys((row["tokens"], row["op"]) for row in rows)
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
    skew=_over("skew", "times its share that rank 0 gets", log=False),
    capacity=_compared(lambda row: f"{row['capacity_kind']} capacity, {row['capacity']:,} rows"),
    payload=_compared(lambda row: row["dtype"]),
    sms=_sms,
    vmap=_compared(_batch_in_words),
    graphs=_graphs,
    layer=_layer,
    decode=_layer,
    grouped=_grouped,
)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for made in plot(records.read(pathlib.Path(name)), pathlib.Path(name)):
            print(made)
