"""Write the tables and plots of the documents from the committed records.

    python -m benchmarks.report                     README.md and docs/performance.md, and plots
    python -m benchmarks.report RECORD.json ...     prints and draws these records

Use the first form after you added a record to ``results/``. It rewrites the marked sections of
both documents from the newest record with the most GPUs. It also draws each sweep's newest record.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import record as records
from .record import Row, Rows, entry, grouped

README = records.ROOT / "README.md"
PERFORMANCE = records.ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- {} -->", "<!-- end of {} -->"
TITLES = {"": "Standard settings", "tokens": "Tokens", "sms": "SM budget"}  # of plots
TITLES |= dict(formats="Token formats", products="Grouped products", model="Whole training steps")
TITLES |= dict(stages="Stages of a whole layer")
BARS = dict(products=("tflops", "TFLOP/s"), model=("tokens_per_s", "tokens/s per GPU"))
LOG_FROM = 20  # above this ratio of the largest to the smallest value, an axis is logarithmic

COMBINE: Row = dict(op="combine", method="ours")
OURS, GATHER, DENSE, RAGGED = (
    dict(op="round_trip", includes_route=True, method=method)
    for method in ("ours", "all_gather", "dense", "ragged")
)
# For each column: entries that select a row, and ``name``, the shown entry of this row (or "us").
SUMMARY: dict[str, Row] = {"`all_gather`": GATHER, "dense `all_to_all`": DENSE}
SUMMARY |= {"`ragged_all_to_all`": RAGGED, "this package": OURS}
SUMMARY |= {"link limit": dict(OURS, name="wire_us")}
SUMMARY |= {"this package, GB/s": dict(OURS, name="gb_per_s")}
SUMMARY |= {"link limit, GB/s": dict(op="dispatch", method="wire", name="gb_per_s")}
DETAILS: dict[str, Row] = {
    "link limit": dict(COMBINE, name="wire_us"),
    "dispatch": dict(op="dispatch", includes_route=True, method="ours"),
    "without route": dict(op="dispatch", includes_route=False, method="ours"),
    **{"combine": COMBINE, "round trip": OURS, "backward": dict(op="backward", method="ours")},
    **{"all_gather": GATHER, "dense all_to_all": DENSE, "ragged_all_to_all": RAGGED},
}
# The entry on the x axis. Other sweeps have bars.
X = {"": "tokens", "tokens": "tokens", "topk": "top_k"}
X |= dict(experts="experts", hidden="hidden", sms="num_sms")
PANEL = ("title", "panel", "shape", "k", "n", "sizes", "tokens")
DESCRIBING = (
    *(*PANEL, "hidden", "experts", "top_k", "skew", "sigma", "idle", "dtype"),
    *("capacity_kind", "batch", "batch_routing", "batch_axis", "format", "formatted", "mode"),
    *("grouped", "routing", "micro_batches", "op", "method"),
)
OF_SWEEP = dict(sms="num_sms", products="rows", models="rows", model="rows")
MEASURED = dict(
    **dict(us="µs", wire_us="link limit", gb_per_s="GB/s"),
    **dict(tflops="TFLOP/s", weight_gb_per_s="GB/s", tokens_per_s="tokens/s"),
    **dict(mfu="MFU", peak_gib="GiB", exposed_us="exposed exchange", load="max/mean"),
    **dict(kernels="kernels"),
)
STEPS = "model"
STEP_METHODS = {
    "moe_mlp": "**this package**",
    "moe_mlp_to_fp8": "this package, experts in FP8",
    "all_gather": "`all_gather`, `ma.grouped_dot`",
    "fsdp": "FSDP without expert parallelism, `ma.grouped_dot`",
    "capacity": "capacity of 1.25 per expert, `all_to_all`, cuBLAS",
    "mosaic": "`all_gather`, JAX's Mosaic GPU kernels",
    "ragged32": "`ragged_all_to_all` in 32 updates, `ma.grouped_dot`",
    "local": "*bound: no exchange*",
    "none": "*bound: no MoE layer*",
}
METHODS = {
    "ours": "this package",
    "moe_mlp": "this package",
    "moe_mlp_fp8": "this package, experts in FP8",
    "moe_mlp_to_fp8": "this package, experts in FP8",
    "mosaic": "all_gather",
    "dense": "dense all_to_all",
    "ragged": "ragged_all_to_all",
}
OPS = {
    "forward": "forward",
    "forward_and_gradients": "forward and gradients",
    "experts": "forward",
    "experts_and_gradients": "forward and gradients",
    "d_rows": "gradient of rows",
    "d_weights": "gradient of weights",
}
SORTED = ("layer", "products")  # plots compare methods, best first
STEP_COLUMNS: dict[str, Callable[[Row], str]] = {
    "ms": lambda r: ms(r["us"]),
    "range, ms": lambda r: f"{ms(r['min_us'])} to {ms(r['max_us'])}",
    "tokens/s/GPU": lambda r: number(r["tokens_per_s"]),
    "TFLOP/s/GPU": lambda r: number(r["tflops"]),
    "MFU": lambda r: percent(r["mfu"]),
    "peak GiB": lambda r: f"{r['peak_gib']:.0f}",
    "exposed exchange, ms": lambda r: ms(r["exposed_us"]),
    "first losses": lambda r: "-" if r["is_bound"] else ", ".join(map(str, r["losses"])),
    "dropped": lambda r: number(r["dropped"]),
}


def main(paths: Sequence[str]) -> None:
    for path in map(pathlib.Path, paths):
        record = records.read(path)
        print(*tables(record["rows"]), *plot(record, path), sep="\n\n")
    for found in () if paths else filter(None, map(records.newest, TITLES)):
        print(*plot(found.record, found.path), sep="\n")
    for (path, name), section in () if paths else sections().items():
        path.write_text(with_section(path.read_text(), name, section))
        print(path)


def with_section(text: str, name: str, section: str) -> str:
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n\n{section}\n\n{end}{rest.partition(end)[2]}"


def sections() -> dict[tuple[pathlib.Path, str], str]:
    return {
        (README, "steps"): steps_in_short(README.parent),
        (README, "results"): standard(SUMMARY, README.parent),
        (PERFORMANCE, "steps"): steps_in_full(PERFORMANCE.parent),
        (PERFORMANCE, "results"): standard(DETAILS, PERFORMANCE.parent),
    }


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:,.1f}"


def main_steps(rows: Rows) -> list[Row]:
    most = max(row["rows"] for row in rows)
    main = dict(rows=most, routing="uniform", micro_batches=1)
    return [row for row in rows if main.items() <= row.items()]


def of_method(rows: Rows) -> dict[str, list[Row]]:
    found = grouped(rows, lambda row: row["method"])
    return {method: found[method] for method in STEP_METHODS if method in found}


def steps_in_short(folder: pathlib.Path) -> str:
    found = records.all_of(STEPS)
    most = [f for f in found if f.record["ranks"] == found[0].record["ranks"]][::-1]
    columns = {
        f"{title}, {machine(f.record).split(',')[0]}": {row["method"]: row for row in rows}
        for f in most
        for title, rows in grouped(main_steps(f.record["rows"]), lambda row: row["title"]).items()
    }
    cell = lambda row: f"{row['tokens_per_s']:,} ({percent(row['mfu'])})"
    lines = [
        [words, *(cell(rows[method]) if method in rows else "-" for rows in columns.values())]
        for method, words in STEP_METHODS.items()
        if any(method in rows for rows in columns.values())
    ]
    links = (f"{machine(f.record)} ([record]({os.path.relpath(f.path, folder)}))" for f in most)
    image = os.path.relpath(plot_of(most[0].path, STEPS), folder)
    return "\n\n".join(
        [
            table(["MoE layer", *columns], lines),
            f"{'; '.join(links)}.",
            f"![Tokens per second of whole steps.]({image})",
        ]
    )


def steps_in_full(folder: pathlib.Path) -> str:
    parts = []
    for found in records.all_of(STEPS):
        parts += [f"{machine(found.record)} ([record]({os.path.relpath(found.path, folder)}))."]
        parts += steps_of(found.record["rows"])
    return "\n\n".join(parts)


def steps_of(rows: Rows) -> list[str]:
    parts = []
    key = lambda row: tuple(row[k] for k in ("title", "rows", "routing", "micro_batches"))
    for (title, of_expert, routing, micro_batches), here in grouped(rows, key).items():
        row = here[0]
        lines = [
            [STEP_METHODS[method], *(column(r) for column in STEP_COLUMNS.values())]
            for method, (r, *_) in of_method(here).items()
        ]
        parts += [
            f"{title}, {row['layers']} of {row['of_layers']} layers, {row['experts']} experts, "
            f"{of_expert:,} rows per expert ({row['tokens']:,} tokens a GPU), {routing} routing, "
            f"micro-batches: {micro_batches}. The fullest rank has {row['load']:.2f} times the "
            f"mean load on average over layers, and {row['most_load']:.2f} times in the worst "
            "layer:",
            table(["MoE layer", *STEP_COLUMNS], lines),
        ]
    return parts


def standard(columns: dict[str, Row], folder: pathlib.Path) -> str:
    found = records.newest("")
    assert found is not None, "no record"
    rows = sorted(of_main_size(found.record["rows"]), key=lambda row: row["tokens"])
    lines = [
        [f"{tokens:,}", *(number(entry(here, **column)) for column in columns.values())]
        for tokens, here in grouped(rows, lambda row: row["tokens"]).items()
    ]
    source = f"{machine(found.record)} ([record]({os.path.relpath(found.path, folder)}))."
    return table(["tokens per rank", *columns], lines) + "\n\n" + source


def machine(record: Row) -> str:
    versions = record["versions"]
    cuda = re.sub(r"cuda (\d+)0(\d)\d", r"CUDA \1.\2", versions["platform"])
    gpus = record["gpus"].replace(" x ", " × ").replace("NVIDIA ", "")
    hooks = ", built with test hooks" if record.get("test_hooks") else ""
    return f"{gpus}, jax {versions['jax']}, {cuda}{hooks}, {record['date']}"


def of_main_size(rows: Rows) -> list[Row]:
    size = lambda row: tuple(row[key] for key in ("hidden", "top_k", "experts", "skew", "sigma"))
    return max(grouped(rows, size).values(), key=len)


def number(x: Any) -> str:
    """Return a number with few digits, a name, or a dash for None or ""."""
    if isinstance(x, float):
        return f"{x:,.0f}" if x >= 100 else f"{x:.1f}" if x >= 1 else f"{x:.2g}"
    if isinstance(x, int):
        return f"{x:,}"
    return "-" if x in (None, "") else x if "`" in x else x.replace("_", " ")


def named(row: Row) -> Row:
    is_part = row["op"] in ("dispatch", "round_trip") and row.get("includes_route") is False
    return dict(row, op=row["op"] + " without route" * is_part)


def varying(sweep: str, rows: Rows) -> list[str]:
    keys = [*DESCRIBING[:-2], OF_SWEEP.get(sweep), *DESCRIBING[-2:]]
    return [key for key in keys if key and len({row.get(key) for row in rows}) > 1]


def words_of(row: Row, keys: Iterable[str]) -> str:
    """Return text such as "128 tokens, dispatch"."""
    unit = lambda key: "" if isinstance(row[key], str) else f" {key.replace('_', ' ')}"
    kept = [key for key in keys if row.get(key) not in (None, "")]
    return ", ".join(number(row[key]) + unit(key) for key in kept)


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *lines))


def tables(rows: Rows) -> list[str]:
    found = []
    for sweep, here in grouped(map(named, rows), lambda row: row["sweep"]).items():
        keys = varying(sweep, here)
        figures = [key for key in MEASURED if any(row.get(key) is not None for row in here)]
        lines = [[number(row.get(key)) for key in (*keys, *figures)] for row in here]
        found.append(f"{sweep}\n\n" + table([*keys, *(MEASURED[key] for key in figures)], lines))
    return found


def plot_of(path: pathlib.Path, sweep: str) -> pathlib.Path:
    """Return <record>.png or <record>-<sweep>.png."""
    has_name = not sweep or path.stem == sweep or path.stem.endswith(f"-{sweep}")
    return path.with_name(path.stem + (".png" if has_name else f"-{sweep}.png"))


def plot(record: Row, path: pathlib.Path) -> list[pathlib.Path]:
    """Draw one PNG per sweep."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made = []
    for sweep, rows in grouped(record["rows"], lambda row: row["sweep"]).items():
        panels = panels_of(sweep, rows)
        if not panels:  # CPUs have no SMs
            continue
        heights = [4.8 if sweep in X else 0.2 * len(here) + 1.2 for here in panels.values()]
        figure = plt.figure(figsize=(9, sum(heights) + 0.3), layout="constrained")
        grid = figure.add_gridspec(len(panels), height_ratios=heights)
        for place, (title, here) in zip(grid, panels.items()):
            axis = figure.add_subplot(place)
            (lines if sweep in X else bars)(axis, sweep, here)
            axis.set_title(title, fontsize=9)
            axis.grid(True, alpha=0.3)
            axis.set_axisbelow(True)
        figure.suptitle(f"{TITLES.get(sweep, sweep)}; {machine(record)}", fontsize=10)
        made.append(plot_of(path, sweep))
        figure.savefig(made[-1], dpi=120)
        plt.close(figure)
    return made


def panels_of(sweep: str, rows: Rows) -> dict[str, list[Row]]:
    """Return the rows of each panel by title."""
    x = X.get(sweep)
    rows = [row for row in map(named, rows) if row.get("us") and (not x or row[x])]
    if sweep == STEPS:
        shown = [row for row in main_steps(rows) if row["method"] != "none"]
        rows = [
            dict(r, method=STEP_METHODS[m]) for m, here in of_method(shown).items() for r in here
        ]
        rows = [dict(row, tokens=None) for row in rows]  # a panel for each geometry
    elif sweep in SORTED:
        return compared(sweep, rows)
    ours = [dict(row, panel="this package") for row in rows if row["method"] == "ours"]
    trips = [dict(row, panel="round trip") for row in rows if row["op"] == "round_trip"]
    if x:
        rows = ours if sweep else of_main_size(ours + trips)
    keys = [key for key in varying(sweep, rows) if key in PANEL and key != x]
    return grouped(rows, lambda row: words_of(row, keys))


def compared(sweep: str, rows: Rows) -> dict[str, list[Row]]:
    """Return the rows of each panel by title, the best method first."""
    tight = [row for row in rows if row.get("capacity_kind", "tight") == "tight"]
    equal = [row for row in tight if row.get("sizes", "equal") == "equal"]
    if sweep == "products":
        equal = [row for row in equal if row["rows"] == max(row["rows"] for row in equal)]

    def title(row: Row) -> str:
        if sweep == "products":
            return f"{row['shape']} with {row['rows']:,} rows, {OPS[row['op']]}"
        sizes = f"{row['tokens']:,} tokens per rank, hidden {row['hidden']:,}"
        experts = f"{row['experts']} experts of width {row['intermediate']:,}, top-{row['top_k']}"
        return f"{OPS[row['op']]}: {sizes}, {experts}"

    def method(row: Row) -> str:
        words = METHODS.get(row["method"], row["method"])
        product = row.get("grouped", "Mosaic GPU" if row["method"] == "mosaic" else "grouped_dot")
        return words + (f", {product}" if "package" not in words and sweep == "layer" else "")

    key, sign = ("tflops", -1) if sweep == "products" else ("us", 1)
    rows = [dict(row, method=method(row), title=title(row)) for row in equal]
    rows.sort(key=lambda row: (row["title"], sign * row[key]))
    return grouped(rows, lambda row: row["title"])


def lines(axis: Any, sweep: str, rows: Rows) -> None:
    x = X[sweep]
    rows = sorted(rows, key=lambda row: row[x])
    keys = [key for key in varying(sweep, rows) if key != x]
    rows = [dict(row, method=METHODS.get(row["method"], row["method"])) for row in rows]
    for label, here in grouped(rows, lambda row: words_of(row, keys)).items():
        xs, us, low, high = ([row[key] for row in here] for key in (x, "us", "min_us", "max_us"))
        (drawn,) = axis.plot(xs, us, label=label or sweep, marker="o", ms=4)
        axis.fill_between(xs, low, high, alpha=0.2, color=drawn.get_color())
    for op, style, ways in (("combine", "--", "one way"), ("round_trip", "-.", "both ways")):
        limit = [(row[x], row["wire_us"]) for row in rows if row["op"] == op and "wire_us" in row]
        if limit:
            axis.plot(*zip(*limit), style, color="black", lw=1, label=f"link limit, {ways}")
    sizes, us = sorted({row[x] for row in rows}), [row["us"] for row in rows]
    axis.set_xscale("log" if sizes[-1] > LOG_FROM * sizes[0] else "linear")
    is_wide = max(us) > LOG_FROM * min(us)
    axis.set(yscale="log") if is_wide else axis.set_ylim(bottom=0)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8, rotation=40)
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.set(xlabel=x.replace("_", " "), ylabel="µs on the device")
    axis.legend(fontsize=8)


def bars(axis: Any, sweep: str, rows: Rows) -> None:
    keys, ops = varying(sweep, rows), list(grouped(rows, lambda row: row["op"]))
    y, label = BARS.get(sweep, ("us", "µs on the device"))
    colors = [f"C{ops.index(row['op']) % 10}" for row in rows]
    if sweep == STEPS or sweep in SORTED:
        colors = ["C1" if "package" in row["method"] else "C0" for row in rows]
        keys = ["method"]
    labels = [re.sub("[*`]", "", words_of(row, keys)) for row in rows]
    drawn = axis.barh(range(len(rows)), [row[y] for row in rows], color=colors)
    axis.bar_label(drawn, [number(row[y]) for row in rows], fontsize=7, padding=2)
    axis.set_yticks(range(len(rows)), labels, fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlabel(label)


if __name__ == "__main__":
    main(sys.argv[1:])
