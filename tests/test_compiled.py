"""Test that tests/compiled/table.txt is up to date, and that all calls have the package's named
scopes."""

import difflib
import functools
import os
import subprocess
import sys

import pytest
from compiled import plugin

TABLE = plugin.ROOT / "tests/compiled/table.txt"

pytestmark = [
    pytest.mark.several_devices("it compiles for a mesh of absent devices"),
    pytest.mark.one_process("it compiles in a process of its own"),
]


@functools.cache
def made():
    why = plugin.why_not()
    if why and os.environ.get("MOE_A2A_TEST_COMPILED") == "1":
        pytest.fail(f"MOE_A2A_TEST_COMPILED=1, but {why}")
    if why:
        pytest.skip(why)
    command = [sys.executable, "-m", "tests.compiled"]
    done = subprocess.run(command, cwd=plugin.ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_compiled_table_is_up_to_date():
    committed, now = (text.splitlines() for text in (TABLE.read_text(), made()))
    changes = difflib.unified_diff(committed, now, "table.txt", "now", n=8, lineterm="")
    assert committed == now, "run `make compiled`, and commit the table:\n" + "\n".join(changes)


def test_every_call_has_a_scope_of_the_package():
    calls = [line for line in TABLE.read_text().splitlines() if line.startswith("  our call")]
    assert calls and not [line for line in calls if "of no scope" in line]
    assert [line for line in calls if line.endswith(", backward")]
