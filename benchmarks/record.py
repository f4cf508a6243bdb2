"""Write and read records. A record is the JSON file of a benchmark's run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

FOLDER = pathlib.Path(__file__).with_name("results")
ROOT = pathlib.Path(__file__).parent.parent
COMMIT_VARIABLE = "MOE_A2A_COMMIT"

Row = dict[str, Any]
Rows = Sequence[Row]


class Found(NamedTuple):
    path: pathlib.Path
    record: dict[str, Any]


def head(gpus: str, ranks: int, **more: Any) -> dict[str, Any]:
    return dict(
        date=today(),
        commit=commit(),
        gpus=gpus,
        ranks=ranks,
        versions=versions(),
        **{"wire": None, **more, "rows": []},
    )


def commit() -> str:
    """Return $MOE_A2A_COMMIT, or the repository's commit, with "-dirty" after changes."""
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    found |= versions_of("jax", "jaxlib", "numpy", "jax-moe-a2a")
    found["platform"] = " ".join(jax.devices()[0].client.platform_version.split())
    return found


def versions_of(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def default_path(
    record: dict[str, Any], what: str = "", folder: pathlib.Path = FOLDER
) -> pathlib.Path:
    """Return <date>-<ranks>x<GPU>[-<what>].json."""
    kind = record["gpus"].partition(" x ")[2].removeprefix("NVIDIA ").replace(" ", "-") or "none"
    return folder / f"{today()}-{record['ranks']}x{kind}{f'-{what}' if what else ''}.json"


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def read(path: pathlib.Path) -> dict[str, Any]:
    """Read a record. Rows of old records get default values for entries that they lack."""
    record = json.loads(path.read_text())
    return dict(record, rows=[OLD_ROWS | row for row in record["rows"]])


OLD_ROWS = dict(
    **dict(sweep="", skew=1, sigma=0, idle=0, capacity_kind="tight", tie_us=None, cuda_graphs=None),
    **dict(batch=1, batch_routing="", batch_axis=0, format="", formatted="", mode=""),
)


def newest(sweep: str) -> Found | None:
    return next(iter(all_of(sweep)), None)


def all_of(sweep: str, folder: pathlib.Path = FOLDER) -> list[Found]:
    """Return the records with rows of a sweep, with most ranks and newest first."""
    found = []
    for path in sorted(folder.glob("*.json")):
        record = read(path)
        rows = [row for row in record["rows"] if row["sweep"] == sweep]
        if any(row["method"] != "wire" for row in rows):
            found.append(Found(path, dict(record, rows=rows)))
    key = lambda f: (f.record["ranks"], f.record["date"], f.path.name)
    return sorted(found, key=key, reverse=True)


def entry(rows: Rows, /, name: str = "us", **wanted: Any) -> Any:
    return next((row.get(name) for row in rows if wanted.items() <= row.items()), None)


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def write(record: dict[str, Any], path: pathlib.Path) -> None:
    head = {key: value for key, value in record.items() if key != "rows"}
    rows = ",\n".join("    " + json.dumps(row) for row in record["rows"])
    text = json.dumps(head, indent=2)
    text = text.removesuffix("\n}") + ',\n  "rows": [\n' + rows + "\n  ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
