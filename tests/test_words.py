"""tools/words.py notices a bad sentence in each kind of file, and accepts a good one."""

import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
import words  # noqa: E402

pytestmark = [
    pytest.mark.one_process("reads the files of the repository"),
    pytest.mark.exchanges(0),
]
CONFIG = tomllib.loads((ROOT / "tools" / "words.toml").read_text())
BAD = {  # rule: (path, text with a phrase that it names, the line of the phrase)
    "docstring": ("a.py", 'def f():\n    """The topology of a workspace."""\n', 2),
    "of": ("a.py", "# Nothing moves.\n# Of several processes one ends.\n", 1),
    "behind": ("a.md", "First line.\n\nRows behind the last group are zero.\n", 3),
    "before_in_space": ("a.cu", "int x;\n// A fence in\n// front of a store.\n", 2),
    "beside": ("a.py", 'raise ValueError("nothing runs beside the exchange here")\n', 1),
    "who": ("a.h", "/* A block that\n   nobody awaits. */\n", 2),
    "but_for": ("Makefile", "all: # every target but for docs\n", 1),
    "for_because": ("a.md", "It is faster, for most of its time is the experts'.\n", 1),
    "is_there": ("a.cc", "// Waits until the word is there.\n", 1),
    "else": ("a.md", "Returns 0, else 1.\n", 1),
    "gives": ("a.py", "def test_it_gives_rows():\n    pass\n", 1),
    "piece": ("a.cuh", "// A team takes a piece.\n", 1),
    "apart": ("a.md", "The halves are traced apart.\n", 1),
    "private": ("a.md", "A rank alone sends nothing.\n", 1),
    "home": ("a.md", "The home of a token adds the sums.\n", 1),
    "wire_limit": ("a.md", "It is near the wire limit.\n", 1),
    "ring_slot": ("a.md", "Each ring slot holds an exchange.\n", 1),
    "wide": ("a.md", "A wide workspace never grows.\n", 1),
    "in_vain": ("a.md", "It waited in vain.\n", 1),
    "opening": ("a.py", "# What a copy moves.\n", 1),
}


def findings(path, source):
    """Return (rule, line) of each finding in a text."""
    verbs = set(CONFIG["verbs"]["docstring"].split())
    found = words.findings_of(path, source, CONFIG["rules"], verbs)
    return [(finding.rule, finding.line) for finding in found]


def test_every_rule_has_a_bad_example():
    assert BAD.keys() == CONFIG["rules"].keys()


@pytest.mark.parametrize("rule", BAD)
def test_a_bad_phrase_is_noticed(rule):
    path, source, line = BAD[rule]
    assert (rule, line) in findings(path, source)


def test_good_sentences_and_code_are_accepted():
    good = textwrap.dedent('''
        def f(x, behind):
            """Return the topology of an open workspace.

            The argument `behind` and ``piece = beside`` are code:

            ```python
            who = home if alone else behind
            ```
            """
            return behind[x]["is there"]  # Rows come after the last group, for example.
    ''')
    assert findings("a.py", good) == []


def test_an_exception_covers_its_phrase_only():
    found = [
        words.Finding("behind", "a.md", 1, "behind", "latency hides behind work"),
        words.Finding("behind", "a.md", 2, "behind", "rows behind the group"),
    ]
    exception = dict(file="a.md", phrase="hides behind", reason="a term of the field")
    left, wrong = words.unreviewed(found, [exception])
    assert [f.line for f in left] == [2] and not wrong


def test_an_exception_that_matches_nothing_or_has_no_reason_is_an_error():
    exception = dict(file="a.md", phrase="hides behind")
    _, wrong = words.unreviewed([], [exception])
    assert len(wrong) == 2


def test_a_folder_may_not_have_more_findings_than_it_is_allowed():
    found = [words.Finding("who", "cuda/a.cu", line, "who", "who waits") for line in (1, 2, 3)]
    allowed = dict(file="cuda/", rule="who", most=2, reason="not yet rewritten")
    left, wrong = words.unreviewed(found, [allowed])
    assert len(left) == 3 and len(wrong) == 1
    assert words.unreviewed(found, [allowed | dict(most=3)]) == ([], [])
