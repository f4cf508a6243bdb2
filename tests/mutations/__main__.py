"""Apply each mutation of ``list.toml`` to a copy of this repository, and run the mutation's test:
``python -m tests.mutations`` (``make mutations``).

A mutation is detected if its test passes without the mutation, and fails with the mutation within
``--seconds``. A test that cannot run with the mutation does not detect it.
"""

import argparse
import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

from .catalogue import ROOT, read

TREE = ROOT / "build" / "mutations"  # kept, so that the next run compiles less C++ code


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="mutations with such a text in file, texts or test"
    )
    parser.add_argument("--seconds", type=float, default=120, help="time limit of a test")
    options = parser.parse_args()
    every = read()
    stale = list(filter(None, (mutation.why_stale() for mutation in every)))
    if stale:
        print("the list is stale:", *stale, sep="\n  ")
        return 2
    chosen = [m for m in every if any(text in f"{m} {m.test}" for text in options.only)]
    TREE.mkdir(parents=True, exist_ok=True)
    with open(f"{TREE}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run would use the same copy
        copy_tree()
        failed = sum(not is_noticed for is_noticed in notice_each(chosen, options.seconds))
    print(f"{len(chosen) - failed} of {len(chosen)} mutations were noticed")
    return 1 if failed else 0


def notice_each(chosen, limit):
    passes = {}
    for mutation in chosen:
        path = TREE / mutation.file
        if mutation.test not in passes:
            passes[mutation.test], seconds = run(mutation.test, limit)
            report(passes[mutation.test], seconds, f"(no mutation) {mutation.test}")
        if passes[mutation.test] != "passed":
            yield False
            continue
        original = path.read_text()
        path.write_text(mutation.applied(original))
        try:
            verdict, seconds = run(mutation.test, limit)
        finally:
            path.write_text(original)
        is_noticed = verdict == "failed"
        report("noticed" if is_noticed else f"NOT NOTICED: {verdict}", seconds, str(mutation))
        yield is_noticed


def report(verdict, seconds, what):
    print(f"{seconds:5.1f} s  {verdict:12}  {what}", flush=True)


def copy_tree():
    """Make ``TREE`` a copy of all files that git does not ignore. Keep unchanged files."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {name for name in listed.split("\0") if (ROOT / name).is_file()}
    for path in TREE.rglob("*"):
        name = path.relative_to(TREE)
        if name.parts[0] != "build" and path.is_file() and name.as_posix() not in names:
            path.unlink()
    for name in sorted(names):
        source, copy = ROOT / name, TREE / name
        if not copy.is_file() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def run(test, limit):
    """Return ("passed", "failed" or a different result, seconds) of a test in ``TREE``."""
    words = shlex.split(test)
    if words[0].startswith("tests/"):
        words = ["pytest", "-q", "-x", "-p", "no:cacheprovider", *words]
    # Python would reuse compiled modules of sources with the same size and time.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=TREE, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        output = "too slow"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    seconds = time.monotonic() - start
    if process.returncode == 0:
        return ("passed" if not re.search(r"^\d+ skipped", output, re.M) else "skipped"), seconds
    last = (output.strip().splitlines() or [""])[-1]
    if process.returncode == 1 and re.match(r"=*\s*\d+ failed", last):
        return "failed", seconds
    return f"{last[:150]} (exit status {process.returncode})", seconds


if __name__ == "__main__":
    sys.exit(main())
