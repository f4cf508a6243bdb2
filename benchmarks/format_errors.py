"""What token formats cost in precision, on the activations of a trained model.

    python -m benchmarks.format_errors          # trains examples/train_moe.py, some minutes on CPU

Trains the example's model, takes the tokens that its mixture-of-experts layers see, and compares,
as if four ranks exchanged them in bfloat16:

- the tokens with what they decode to;
- the layers' outputs with those of unquantized tokens (``dispatch(format=..., decode=True)``);
- and with those whose partial sums crossed in float32 (``combine(wire_dtype=...)``).

Errors are root mean squares, relative to that of what is right. The table in docs/formats.md is
written out of the record by this program, and a test compares them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from typing import Any

from .record import FOLDER, ROOT, commit, today

RECORD = FOLDER / "formats" / "errors.json"
DOCUMENT = ROOT / "docs" / "formats.md"
BEGIN, END = "<!-- errors -->\n", "<!-- end of errors -->\n"
RANKS = 4
COLUMNS = ("tokens", "output, tokens in the format", "output, sums in the format")


def load_example() -> Any:
    """examples/train_moe.py as a module."""
    spec = importlib.util.spec_from_file_location("train_moe", ROOT / "examples" / "train_moe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def layers_of_trained_model(example: Any, steps: int) -> list[tuple[Any, ...]]:
    """(x, topk_ids, topk_weights, w_in, w_out) of each layer, float32, of the trained model."""
    import jax

    text = example.read_text()
    loss = jax.tree_util.Partial(
        example.loss, experts=example.experts_dense, mean=lambda value: value
    )
    data = example.batches(text, 8, seed=0)
    params, _ = example.train("dense", loss, example.init(jax.random.key(0)), data, steps)
    seen = []

    def experts(*args: Any) -> Any:
        seen.append(args)
        return example.experts_dense(*args)

    pieces = next(example.batches(text, 16, seed=1))[:, 1:]
    example.model(params, pieces, experts, lambda value: value)
    return seen


def errors_of(layer: tuple[Any, ...], options: dict[str, Any]) -> dict[str, float]:
    """The errors of one layer, whose ``options`` are a format, or a dtype."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    import jax_moe_a2a as ma

    x, ids, weights, w_in, w_out = layer
    group = ma.Group(axis_name="ep", size=RANKS)

    def by_rank(array: Any) -> Any:
        return array.reshape(RANKS, -1, *array.shape[1:])

    def outputs(x: Any, *, wire_dtype: Any = None, **dispatch: Any) -> Any:
        def of_rank(x: Any, ids: Any, weights: Any, w_in: Any, w_out: Any) -> Any:
            num_experts = RANKS * w_in.shape[0]
            recv = ma.dispatch(x, ids, weights, group=group, num_experts=num_experts, **dispatch)
            rows = recv.rows.astype(jnp.float32)
            y = lax.ragged_dot(
                jax.nn.gelu(lax.ragged_dot(rows, w_in, recv.group_sizes)), w_out, recv.group_sizes
            )
            return ma.combine(y, recv, wire_dtype=wire_dtype)

        args = map(by_rank, (x, ids, weights, w_in, w_out))
        return jax.jit(jax.vmap(of_rank, axis_name="ep"))(*args)

    def error(actual: Any, exact: Any) -> float:
        difference = jnp.asarray(actual, jnp.float32) - exact
        return float(jnp.sqrt((difference**2).mean() / (exact**2).mean()))

    exact = outputs(x)
    narrow = x.astype(jnp.bfloat16)
    if "format" not in options:
        return dict(
            zip(
                COLUMNS,
                (
                    error(narrow, x),
                    error(outputs(narrow), exact),
                    error(outputs(x, wire_dtype=jnp.bfloat16), exact),
                ),
                strict=True,
            )
        )
    fmt = options["format"]
    if isinstance(fmt, ma.NvFp4):
        fmt = ma.NvFp4(global_scale=float(jnp.abs(x).max()) / 2688)
    decoded = fmt.decode(fmt.encode(narrow), jnp.bfloat16)
    sums = fmt
    if isinstance(fmt, ma.NvFp4):
        sums = ma.NvFp4(global_scale=float(jnp.abs(exact).max()) / 2688)
    found = (
        error(decoded, x),
        error(outputs(narrow, format=fmt, decode=True), exact),
        error(outputs(x, wire_dtype=sums), exact),
    )
    return dict(zip(COLUMNS, found, strict=True))


def measure(steps: int) -> dict[str, Any]:
    """The record."""
    import jax_moe_a2a as ma

    layers = layers_of_trained_model(load_example(), steps)
    formats: dict[str, dict[str, Any]] = {"bfloat16": {}}
    for fmt in (ma.BlockwiseFp8(), ma.MxFp8(), ma.NvFp4()):
        formats[type(fmt).__name__] = dict(format=fmt)
    rows = []
    for name, options in formats.items():
        of_layers = [errors_of(layer, options) for layer in layers]
        mean = {column: sum(e[column] for e in of_layers) / len(layers) for column in COLUMNS}
        rows.append(dict(format=name, **mean))
        print(rows[-1], flush=True)
    return dict(date=today(), commit=commit(), steps=steps, tokens=len(layers[0][0]), rows=rows)


def table(record: dict[str, Any]) -> str:
    """The table of the document."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for row in record["rows"]:
        cells = [f"{100 * row[column]:.2f} %" for column in COLUMNS]
        lines.append(f"| {row['format']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_errors(text: str, record: dict[str, Any]) -> str:
    """The document with the table between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(record)}\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="of training")
    args = parser.parse_args(argv)
    record = measure(args.steps)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    DOCUMENT.write_text(with_errors(DOCUMENT.read_text(), record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
