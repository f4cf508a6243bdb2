"""The record of a run: one JSON file, with everything that a figure needs to be understood."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
from typing import Any

FOLDER = pathlib.Path(__file__).with_name("results")
ROOT = pathlib.Path(__file__).parent.parent
COMMIT_VARIABLE = "MOE_A2A_COMMIT"


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


def default_path(num_gpus: int, device_kind: str, folder: pathlib.Path = FOLDER) -> pathlib.Path:
    """results/<date>-<gpus>x<name>.json."""
    name = device_kind.removeprefix("NVIDIA ").replace(" ", "-")
    return folder / f"{today()}-{num_gpus}x{name}.json"


def today() -> str:
    """The date in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


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
