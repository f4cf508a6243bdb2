"""The names of the hooks match the C++ names."""

import pathlib
import re

import hooks
import pytest

SOURCES = pathlib.Path(__file__).parents[2] / "cuda"


@pytest.mark.parametrize(
    ("header", "mirror"),
    (("device/signal.cuh", hooks.Mutation), ("status.h", hooks.Phase)),
    ids=("mutations", "phases"),
)
def test_enumerations_mirror_the_kernels_headers(header, mirror):
    text = (SOURCES / header).read_text()
    body = re.search(rf"enum (?:class )?{mirror.__name__} : uint32_t {{(.*?)}};", text, re.S)[1]
    theirs = {
        re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper(): int(value)
        for name, value in re.findall(r"k(\w+) = (\d+)", body)
    }
    assert theirs == {member.name: member.value for member in mirror if member.value}


def test_phases_are_named_as_in_errors():
    text = (SOURCES / "status.h").read_text()
    for phase, name in hooks.PHASE_TEXT.items():
        constant = "k" + phase.name.title().replace("_", "")
        assert f'case Phase::{constant}: return "{name}";' in text
