"""The record of a run: one JSON file, with everything that a figure needs to be understood."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any, NamedTuple

FOLDER = pathlib.Path(__file__).with_name("results")
ROOT = pathlib.Path(__file__).parent.parent
COMMIT_VARIABLE = "MOE_A2A_COMMIT"


class Found(NamedTuple):
    """A record and where it lies."""

    path: pathlib.Path
    record: dict[str, Any]


def commit() -> str:
    """The commit that runs, "-dirty" where files differ from it; or what MOE_A2A_COMMIT says."""
    if COMMIT_VARIABLE in os.environ:
        return os.environ[COMMIT_VARIABLE]
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    import jax

    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "numpy", "jax-moe-a2a"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    found["platform"] = " ".join(jax.devices()[0].client.platform_version.split())
    return found


def default_path(
    num_gpus: int, device_kind: str, what: str = "", folder: pathlib.Path = FOLDER
) -> pathlib.Path:
    """results/<date>-<gpus>x<name>.json; or ...-<what>.json, of a sweep or a layer."""
    name = device_kind.removeprefix("NVIDIA ").replace(" ", "-")
    return folder / f"{today()}-{num_gpus}x{name}{f'-{what}' if what else ''}.json"


def ranks_in_words(ranks: int) -> str:
    """Return "1 rank", "2 ranks" and so on."""
    return f"{ranks} rank{'s' if ranks != 1 else ''}"


def today() -> str:
    """The date in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def read(path: pathlib.Path) -> dict[str, Any]:
    """A record as it would be written today.

    Older ones have times with the tie in them, named otherwise, and sweeps without a name.
    """
    record = json.loads(path.read_text())
    budgets = {row.get("num_sms") for row in record["rows"] if row["method"] == "ours"}
    for row in record["rows"]:
        if "us" not in row and "median_us" in row:
            row["us"] = row["measured_us"] = row.pop("median_us")
            row["tie_us"] = None
        row.setdefault("skew", 4 if row.get("routing") == "skewed" else 1)
        row.setdefault("sweep", "sms" if len(budgets) > 2 else "")
        for key, value in OLD_ROWS.items():
            row.setdefault(key, value)
    return record


OLD_ROWS = dict(
    **dict(capacity_kind="tight", batch=1, batch_routing="", batch_axis=0, cuda_graphs=None),
    **dict(format="", formatted="", mode=""),
)


def newest(sweep: str, ranks: int | None = None, folder: pathlib.Path = FOLDER) -> Found | None:
    """The newest record with rows of a sweep ("" for the standard settings), and those alone.

    Of as many ranks as asked for, or of the most. None if there is none.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        record = read(path)
        rows = [row for row in record["rows"] if row["sweep"] == sweep]
        if any(row["method"] != "wire" for row in rows) and ranks in (None, record["ranks"]):
            found.append(Found(path, dict(record, rows=rows)))
    return max(
        found, key=lambda f: (f.record["ranks"], f.record["date"], f.path.name), default=None
    )


def write(record: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the record, one row a line."""
    head = {key: value for key, value in record.items() if key != "rows"}
    rows = ",\n".join("    " + json.dumps(row) for row in record["rows"])
    text = json.dumps(head, indent=2)
    text = text.removesuffix("\n}") + ',\n  "rows": [\n' + rows + "\n  ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
