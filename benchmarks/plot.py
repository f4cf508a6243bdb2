"""The plot of a record: ``python -m benchmarks.plot RECORD.json``."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

Row = dict[str, Any]


def plot(record: dict[str, Any], path: pathlib.Path) -> None:
    """Draws time against tokens, ours beside the wire and beside plain JAX; time against SMs where
    there are several budgets.

    Args:
      record: as ``__main__`` writes it.
      path: of the PNG.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in record["rows"] if row["routing"] == "uniform"]
    # The sizes with the widest range of tokens: the others are single points.
    sizes = [(row["hidden"], row["top_k"], row["experts"]) for row in rows]
    hidden, top_k, experts = max(sizes, key=sizes.count)
    rows = [r for r in rows if (r["hidden"], r["top_k"], r["experts"]) == (hidden, top_k, experts)]
    mine = [row for row in rows if row["method"] == "ours"]
    budgets = sorted({row["num_sms"] for row in mine if row["num_sms"] is not None})
    budget = record.get("default_num_sms")
    if mine and budget not in budgets:
        budget = mine[0]["num_sms"]
    at_budget = [row for row in mine if row["num_sms"] == budget]

    figure, axes = plt.subplots(
        1, 2 + (len(budgets) > 1), figsize=(6 * (2 + (len(budgets) > 1)), 4.8)
    )

    def line(axis: Any, chosen: list[Row], x: str, y: str, label: str, **style: Any) -> None:
        chosen = sorted((r for r in chosen if r[y] is not None), key=lambda r: r[x])
        if chosen:
            xs = [r[x] for r in chosen]
            axis.plot(xs, [r[y] for r in chosen], label=label, **style)
            if y == "median_us":
                low, high = ([r[k] for r in chosen] for k in ("min_us", "max_us"))
                axis.fill_between(xs, low, high, alpha=0.2)

    def of(chosen: list[Row], op: str, *, includes_route: bool) -> list[Row]:
        return [r for r in chosen if r["op"] == op and r["includes_route"] == includes_route]

    axis = axes[0]
    axis.set_title("ours, against the wire's limit one way")
    for op, includes_route in (
        ("route", True),
        ("dispatch", True),
        ("dispatch", False),
        ("combine", False),
        ("backward", False),
    ):
        label = "dispatch, without route" if (op, includes_route) == ("dispatch", False) else op
        chosen = of(at_budget, op, includes_route=includes_route)
        line(axis, chosen, "tokens", "median_us", label, marker="o", ms=4)
    wire_style = dict(color="black", ls="--", lw=1)
    combines = of(at_budget, "combine", includes_route=False)
    line(axis, combines, "tokens", "wire_us", "wire", **wire_style)

    axis = axes[1]
    axis.set_title("round trip, against plain JAX")
    trips = of(rows, "round_trip", includes_route=True)
    for method in dict.fromkeys(row["method"] for row in trips):
        chosen = [r for r in trips if r["method"] == method]
        if method == "ours":
            chosen = [r for r in chosen if r["num_sms"] == budget]
        line(axis, chosen, "tokens", "median_us", method, marker="o", ms=4)
    line(
        axis,
        of(at_budget, "round_trip", includes_route=True),
        "tokens",
        "wire_us",
        "wire, both ways",
        **wire_style,
    )
    for axis in axes[:2]:
        axis.set(xscale="log", yscale="log", xlabel="tokens per rank", ylabel="µs on the device")

    if len(budgets) > 1:
        axis = axes[2]
        axis.set_title("time against the SM budget")
        for tokens in sorted({row["tokens"] for row in mine}):
            for op in ("dispatch", "combine"):
                chosen = [r for r in of(mine, op, includes_route=False) if r["tokens"] == tokens]
                line(axis, chosen, "num_sms", "median_us", f"{op}, {tokens} tokens", marker="o")
        axis.set(yscale="log", xlabel="SMs", ylabel="µs on the device")

    for axis in axes:
        axis.grid(True, which="major", alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
    figure.suptitle(
        f"{record['ranks']} ranks on {record['gpus']}; hidden {hidden}, top-{top_k} of {experts}, "
        f"{rows[0]['dtype']}; {record['date']}, {record['commit'][:10]}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    source = pathlib.Path(sys.argv[1])
    plot(json.loads(source.read_text()), source.with_suffix(".png"))
    print(source.with_suffix(".png"))
