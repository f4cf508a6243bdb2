"""Test that each mutation in the list fits the sources."""

import pytest
from mutations import catalogue

pytestmark = [
    pytest.mark.one_process("it reads files, and starts processes of its own"),
    pytest.mark.exchanges(0),
]


def test_every_text_occurs_once_in_its_file_and_every_test_exists():
    every = catalogue.read()
    assert [why for mutation in every if (why := mutation.why_stale())] == []
    assert len({(m.file, m.old) for m in every}) == len(every) >= 60
