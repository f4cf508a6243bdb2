"""List the places of the device code that order memory or wait, and the rules that it can break.

Each place is a mutation: the emulator leaves it out, and the checks must notice. The list is read from the sources,
so a new barrier is in it at once. A place that no check can notice is justified in ``JUSTIFIED``.
"""

import dataclasses
import enum
import pathlib
import re

CUDA = pathlib.Path(__file__).resolve().parents[2] / "cuda"

# Calls that order memory or wait. device/ptx.cuh defines most of them.
_CALL = re.compile(
    r"\b(__syncwarp|__syncthreads(?:_or|_and)?|(?:\w+\.)?sync|load_acquire_sys|store_release_sys|arrive"
    r"|fence_\w+|wait_until_read<[^>]*>|wait_until_loaded|wait_until_stored)\("
)
# The head of a function of the device code.
_DEFINITION = re.compile(r"__(?:device|global)__.*?\b(\w+)\(|^    (\w+_kernel)\(")


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the device code that the emulator can leave out."""

    file: str
    line: int
    function: str
    call: str
    nth: int  # of this call in this function, from 0

    @property
    def option(self):
        return ["--without", f"{self.file}:{self.line}"]

    @property
    def name(self):
        which = f" #{self.nth + 1}" if self.nth else ""
        return f"{self.file} {self.function}: {self.call}{which}"


class Rule(enum.IntEnum):
    """A rule of the protocol that a test build breaks. Mirrors ``Mutation`` in device/signal.cuh."""

    IGNORE_CREDIT = 1
    FLAG_BEFORE_ROWS = 2
    CREDIT_BY_FIRST_BLOCK = 3
    IGNORE_SIGNATURE = 4
    RECEIVERS_FIRST = 5
    FLAG_BEFORE_STORED = 6
    IGNORE_CHUNK = 7
    IGNORE_HEAD = 8
    IGNORE_IDS = 9

    @property
    def option(self):
        return ["--breaks", str(int(self))]


# What no check can notice, by the name of the place.
JUSTIFIED: dict[str, str] = {}


def places():
    """Return all places of cuda/device and cuda/kernels, in the order of files and lines."""
    found = []
    for path in sorted([*CUDA.glob("device/*.cuh"), *CUDA.glob("kernels/*.cu")]):
        if path.name != "ptx.cuh":
            found += _places_of(path)
    return found


def _places_of(path):
    function, counts, found = "", {}, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        code = line.split("//")[0]
        if definition := _DEFINITION.search(code):
            function = next(filter(None, definition.groups()))
            code = code[definition.end() :]
        for call in _CALL.findall(code):
            counts[function, call] = nth = counts.get((function, call), -1) + 1
            found.append(Place(path.name, number, function, call, nth))
    return found
