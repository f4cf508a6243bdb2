"""List the mutations of the device code. A run of the emulator must fail with each of them."""

import dataclasses
import pathlib
import re

from . import swaps

CUDA = pathlib.Path(__file__).resolve().parents[2] / "cuda"

# Calls that order memory or wait. Most of the functions are defined in device/ptx.cuh.
_CALL = re.compile(
    r"\b(__syncwarp|__syncthreads(?:_or|_and)?|(?:\w+\.)?sync|load_acquire_sys|store_release_sys|arrive"
    r"|fence_\w+|wait_until_read<[^>]*>|wait_until_loaded|wait_until_stored)\("
)
_DEFINITION = re.compile(r"__(?:device|global)__.*?\b(\w+)\(|^    (\w+_kernel)\(")


# Operations (--ops of main.cc) that execute a function's code, by file and function.
_LETTERS = {
    "combine.cu": "c",
    "dispatch.cu": "d",
    "format_dispatch.cu": "f",
    "routed_dispatch.cu": "x",
    "route.cu": "r",
    "encode.cuh": "fx",
    "plan.cuh": "rx",
    "scan.cuh": "rx",
    "stream.cuh": "df",
    "sum.cuh": "c",
}
_LETTERS_OF_FUNCTION = {
    "count_before": "r",
    "raise_chunk": "dc",
    "raise_chunk_everywhere": "r",
    "raise_heads": "rdc",
    "weigh_rows": "w",
    "change_teams": "dcf",
    "send_chunks": "dc",
}
_OPTIONS_OF_FUNCTION = {
    "prefix_sum": ["--experts", 150],  # more than a block's threads
    "all": ["--stall", 1, "--phase", 5, "--delay", 1, "--timeout", 0.3],  # with late credits
    "send_items": ["--timeout", 1],  # heads do not come
    "fail": ["--stall", 1, "--phase", 3, "--delay", 0.6, "--timeout", 0.2],
}
# `write_own_params` is only in kernels for ranks on one GPU. Several blocks overwrite the outputs
# in `fail`, which ThreadSanitizer reports as a race.
_VARIANTS = {"write_own_params": "colocated", "fail": "plain"}


def _letters(file, function):
    return _LETTERS_OF_FUNCTION.get(function) or _LETTERS.get(file, "rdfxc")


@dataclasses.dataclass(frozen=True)
class Place:
    """A call to leave out."""

    file: str
    line: int
    function: str
    call: str
    nth: int  # among calls in the function

    @property
    def name(self):
        which = f" #{self.nth + 1}" if self.nth else ""
        return f"{self.file} {self.function}: {self.call}{which}"

    @property
    def options(self):
        more = _OPTIONS_OF_FUNCTION.get(self.function, [])
        return ["--without", f"{self.file}:{self.line}", *more]

    @property
    def letters(self):
        return _letters(self.file, self.function)

    @property
    def variant(self):
        return _VARIANTS.get(self.function, "tsan")


@dataclasses.dataclass(frozen=True)
class Swap:
    """Two neighbouring stores in swapped order."""

    stores: swaps.Pair
    variant = "plain"

    @property
    def name(self):
        s = self.stores
        return f"{s.file} {s.function}: {s.second} before {s.first}"

    @property
    def options(self):
        more = _OPTIONS_OF_FUNCTION.get(self.stores.function, [])
        return ["--swap", f"{self.stores.file}:{self.stores.line}", *more]

    @property
    def letters(self):
        return _letters(self.stores.file, self.stores.function)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of the protocol that a test build can break: a ``Mutation`` of device/signal.cuh."""

    name: str
    number: int
    letters: str
    variant: str = "tsan"
    more: tuple = ()

    @property
    def options(self):
        return ["--breaks", self.number, *self.more]


_MISMATCH = ("--mismatch", 1, "--timeout", 2)
# Rank 1 stores its wrong head late. A peer that does not wait for heads then ends without an error.
_OTHER_HEADS = ("--heads", 1, "--stall", 1, "--phase", 3, "--delay", 0.05)
RULES = [
    Rule("kIgnoreCredit", 1, "rdc", more=("--depth", 1)),
    Rule("kFlagBeforeRows", 2, "dfxc"),
    Rule("kCreditByFirstBlock", 3, "rdfxc", more=("--depth", 1, "--sms", 5)),
    Rule("kIgnoreSignature", 4, "rdfxc", "plain", _MISMATCH),
    Rule("kReceiversFirst", 5, "dfxc", "plain", ("--resident", 1, "--sms", 8, "--timeout", 1)),
    Rule("kFlagBeforeStored", 6, "d"),
    Rule("kIgnoreChunk", 8, "rdfxc"),
    Rule("kIgnoreHead", 9, "dfc", "plain", _OTHER_HEADS),
    Rule("kIgnoreIds", 10, "x"),
]

_MESSAGE = "the word is the whole message: no other read depends on its order"
_ATOMIC = "it orders two words that are loaded as atomics: no race, and x86 keeps the order"
_OVERLAP = "it matters only if launches overlap, which they do not in these sequences"
_FLAG_FOLLOWS = "the flag follows both, and nothing reads them before the flag"
_STATE = "only the rank's next launch reads this state, after the end of this launch"
# At least one of these seeds must detect each mutation. Most mutations need one or two seeds.
MAX_SEEDS = 48
# Saves time for mutations that seed 1 does not detect.
_FIRST_SEED = {
    "encode.cuh next: __syncwarp #2": 7,
    "encode.cuh store: __syncwarp #3": 7,
    "encode.cuh store: __syncwarp #4": 2,
    "dispatch.cu send_chunk: fence_global_for_bulk": 6,
    "format_dispatch.cu send_chunk: fence_global_for_bulk": 3,
    "format_dispatch.cu send_everywhere: fence_global_for_bulk": 3,
    "format_dispatch.cu send_token: __syncwarp": 2,
    "format_dispatch.cu send_token: __syncwarp #2": 5,
    "exchange.cuh change_teams: __syncthreads": 2,
    "exchange.cuh leave: store_release_sys": 3,
    "plan.cuh take_row: __syncwarp #2": 4,
    "route.cu find_threshold: __syncthreads #7": 6,
    "route.cu sum_kept: __syncthreads": 6,
    "routed_dispatch.cu see_credit: load_acquire_sys": 9,
    "signal.cuh wait_for_credit: load_acquire_sys": 3,
    "signal.cuh fail: record->kind before record->timeout_ns": 5,
    "kIgnoreSignature": 2,
}
# No run can detect these mutations.
JUSTIFIED = {
    "ranks.cuh write_own_params: __syncthreads #2": "it orders a store that only kOtherCall makes",
    "signal.cuh is_poisoned: load_acquire_sys": _MESSAGE,
    "signal.cuh fail: store_release_sys": _MESSAGE,
    "signal.cuh head_agrees: load_acquire_sys": _ATOMIC,
    "route.cu route_assign_kernel: fence_acq_rel_sys": _OVERLAP,
    "route.cu route_assign_kernel: __syncthreads #6": _OVERLAP,
    "route.cu route_assign_kernel: __syncthreads_or #2": _OVERLAP,
    "encode.cuh decode_leaf: __syncwarp": "redundant: next() waits before the list is read",
    "dispatch.cu send_chunk: wait_until_read<0>": "only kFlagBeforeStored reaches it",
    "routed_dispatch.cu send_leaves: __syncwarp": "redundant: next() waits before the list is read",
    "routed_dispatch.cu is_needed: __syncthreads_or": "the vote remains; later barriers order",
    "stream.cuh Stream: fence_load_barriers": "the fence for zeros follows, with the same effect",
    "team.cuh all: __syncwarp": "all() has it by contract; each caller has another barrier",
    "exchange.cuh raise_heads: store_release_sys": _ATOMIC,
    "exchange.cuh raise_heads: store_relaxed_sys(head->run) before "
    "store_relaxed_sys(head->signature)": _FLAG_FOLLOWS,
    "exchange.cuh leave: own.next_send, ... before store_release_sys": _STATE,
    "exchange.cuh leave: own.next_receive before own.next_send": _STATE,
    "exchange.cuh leave: own.owner before own.next_receive": _STATE,
    "exchange.cuh leave: own.next_epoch before own.owner": _STATE,
    "route.cu route_exchange_kernel: raise_heads before raise_chunk_everywhere": (
        "a head says nothing about chunks"
    ),
}


def seeds_of(mutation):
    """Return the seeds in the order of the tries."""
    first = _FIRST_SEED.get(mutation.name, 1)
    return [first, *(seed for seed in range(1, MAX_SEEDS + 1) if seed != first)]


def all_mutations():
    return [*places(), *map(Swap, swaps.pairs()), *RULES]


def places():
    """Return all calls that a run can leave out, sorted by file and line."""
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
