"""Faults while the kernels run, on the emulator: `tests/emulation` plays 2 to 4 ranks on the CPU,
and compares every result. A failed rank has NaN and an error record, until the group is closed."""

import re
import time

from emulation import runs

from .workers import Wrong

BOUND = 120.0


def emulated(*options, variant="plain", may_be_right=False, ranks=(2, 3, 4)):
    """Return a kind that runs the emulator. An option may be a function of the random choices."""

    def kind(run):
        runs.build(f"{variant}/emulate")
        given = [option(run.rng) if callable(option) else option for option in options]
        num_ranks = run.rng.choice(ranks)
        given = [o % num_ranks if name in RANKS else o for name, o in zip(["", *given], given)]
        command = ["--ranks", num_ranks, *given]
        start = time.monotonic()
        seed = run.rng.randrange(1, 10**6)
        outcome = runs.run(variant, seed, *command, seconds=BOUND)
        told = f"{variant}/emulate --seed {seed} {' '.join(map(str, command))}"
        if not outcome.is_right:
            raise Wrong(f"{told}: {sorted(outcome.signs)}: {outcome.output[-1000:]}")
        records = re.findall(r"^record: (.*)", outcome.output, re.MULTILINE)
        if not records:
            if may_be_right:
                return "right"
            raise Wrong(f"{told}: no record")
        run.error, run.seconds = records[0], time.monotonic() - start
        return "NaN"

    return kind


RANKS = "--stall", "--mismatch", "--heads", "--other"


def any_rank(rng):
    return rng.randrange(12)


def phase(rng):
    return rng.choice((3, 5))


KINDS = {
    "a rank that is late": emulated(
        "--stall", any_rank, "--phase", phase, "--delay", 0.1, "--timeout", 60, may_be_right=True
    ),
    "a rank that stops": emulated(
        "--stall", any_rank, "--phase", phase, "--delay", 0.6, "--timeout", 0.2
    ),
    "a rank that never comes": emulated("--stall", any_rank, "--delay", 2, "--timeout", 0.3),
    "another program": emulated("--mismatch", any_rank, "--timeout", 1),
    "another shape": emulated("--heads", any_rank, "--timeout", 1),
    "another call on one GPU": emulated(
        "--other", any_rank, "--timeout", 1, variant="colocated"
    ),
    "a rank that is late to the first exchange": emulated(
        "--stall", any_rank, "--delay", 0.6, "--timeout", 0.2, "--first-timeout", 60, "--steps", 1,
        may_be_right=True,
    ),
    "a rank on one GPU that stops": emulated(  # no rank waits for a reader
        "--stall", any_rank, "--phase", 3, "--delay", 0.6, "--timeout", 0.2, variant="colocated"
    ),
    "overlapping launches": emulated("--overlap", 1, "--timeout", 1, may_be_right=True),
    "a damaged routing": emulated(
        "--corrupt", lambda rng: rng.choice((3, 20, 100)), "--steps", 2, "--timeout", 1,
        "--ops", "dwfc", may_be_right=True,
    ),
}  # fmt: skip
