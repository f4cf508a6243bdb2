"""The list of mutations fits the sources, and the runner tells what a test notices."""

import pytest
from mutations import __main__ as runner
from mutations import catalogue

pytestmark = [
    pytest.mark.one_process("it reads files, and starts processes of its own"),
    pytest.mark.exchanges(0),
]
NAMES = "greeting.py", "tests/test_greeting.py"
ADD = catalogue.Mutation(NAMES[0], "a + b", "a - b", f"{NAMES[1]} -k adds")


@pytest.fixture
def tree(tmp_path):
    """Return a folder with a function and its tests."""
    (tmp_path / "tests").mkdir()
    (tmp_path / NAMES[0]).write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / NAMES[1]).write_text(
        "import greeting\n\n"
        "def test_it_adds():\n    assert greeting.add(1, 2) == 3\n\n"
        "def test_zero():\n    assert greeting.add(1, 0) == 1\n"
    )
    return tmp_path


def test_every_text_stands_once_in_its_file_and_every_test_exists():
    every = catalogue.read()
    assert [why for mutation in every if (why := mutation.why_stale())] == []
    assert len({(m.file, m.old) for m in every}) == len(every) >= 60


def test_a_mutation_that_does_not_fit_the_sources_is_stale(tree):
    assert ADD.why_stale(tree) == ""
    for other, why in (
        (dict(old="a * b"), "must have the text once"),
        (dict(old="a"), "must have the text once"),
        (dict(new="a + b"), "another one in its place"),
        (dict(file="gone.py"), "must have the text once"),
        (dict(test="tests/test_gone.py"), "does not exist"),
        (dict(test=f"{NAMES[1]} -k subtracts"), "must have subtracts"),
    ):
        assert why in catalogue.Mutation(**vars(ADD) | other).why_stale(tree)


def test_only_a_test_that_fails_notices_a_mutation(monkeypatch, tree):
    monkeypatch.setattr(runner, "TREE", tree)
    path = tree / ADD.file
    verdict = lambda test: runner.run(test, 60)[0]
    assert verdict(ADD.test) == "passed"
    path.write_text(ADD.applied(path.read_text()))
    assert verdict(ADD.test) == "failed"
    assert verdict(f"{NAMES[1]} -k zero") == "passed"
    assert "exit status 5" in verdict(f"{NAMES[1]} -k nothing")
    path.write_text("def add(")
    assert "exit status 2" in verdict(ADD.test)  # no test has run
    (tree / NAMES[1]).write_text("import time\ntime.sleep(60)\n")
    assert "too slow" in runner.run(ADD.test, 2)[0]
