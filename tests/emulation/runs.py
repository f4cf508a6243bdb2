import dataclasses
import fcntl
import os
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable

from . import swaps

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE.parents[1] / "build" / "emulation"

# The Makefile describes them.
VARIANTS = ("plain", "tsan", "colocated", "colocated_tsan")


def build(target):
    """Build a target of the Makefile. A lock lets only one process build at a time."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None or shutil.which("make") is None:
        raise RuntimeError(
            f"the emulator needs make and a C++ compiler; PATH lacks {compiler} or make"
        )
    OUT.mkdir(parents=True, exist_ok=True)
    with open(OUT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        swaps.write_sources(OUT / "swapped")
        command = ["make", "-s", "-j2", f"CXX={compiler}", f"OUT={OUT}", f"{OUT}/{target}"]
        # With CCACHE_BASEDIR, ccache would write unknown targets into .d files, and make would not
        # compile again after a header has changed.
        environment = {k: v for k, v in os.environ.items() if k != "CCACHE_BASEDIR"}
        made = subprocess.run(command, cwd=HERE, capture_output=True, text=True, env=environment)
    if made.returncode != 0:
        raise RuntimeError(f"the emulator does not compile:\n{made.stdout}{made.stderr}")


HOST_SANITIZERS = ("asan", "tsan")
HOST_CHECKS = (
    "threads", "processes", "requests", "memory", "failures", "per_device", "alignment",
)  # fmt: skip


def check_host(sanitizer, check, seconds):
    """Run a check of the host code. Return its output if it has failed, otherwise ""."""
    command = [OUT / f"host_{sanitizer}" / "checks", check, str(seconds)]
    # The sanitizer ignores leaks, because some memory is kept on purpose until the process ends.
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", timeout=120 + 10 * seconds,
    )  # fmt: skip
    has_report = re.search(r"Sanitizer|runtime error:", done.stdout)
    return done.stdout or "no output" if done.returncode != 0 or has_report else ""


# Patterns of output with an error.
_SIGNS = {
    "race": r"ThreadSanitizer: data race",
    "wrong result": r"^wrong: step",
    "incomplete record": r"an incomplete record",
    "damaged memory": r"memory around|after the zones|SEGV|Segmentation",
    "failure": r"has failed:",
    "no failure": r"no rank has reported",
    "illegal": r"^EMULATOR:",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    signs: frozenset[str]
    output: str

    @property
    def is_right(self):
        return not self.signs

    @property
    def is_noticed(self):
        """Return True if a run has errors. Hangs do not count, because the machine may be slow."""
        return bool(self.signs - {"hangs"})


def run(variant, seed, *options, program="emulate", seconds=300, ends_at_report=False):
    """Run the emulator. After `seconds`, the run ends with the sign "hangs". With `ends_at_report`,
    it ends at ThreadSanitizer's first report, because many reports take 100 times longer."""
    command = [OUT / variant / program, "--seed", str(seed), *map(str, options)]
    sanitizer = "exitcode=66 history_size=1 report_signal_unsafe=0 "
    sanitizer += f"halt_on_error={int(ends_at_report)}"
    environment = os.environ | {"TSAN_OPTIONS": sanitizer}
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace")
        return Outcome(frozenset({"hangs"}), output)
    if done.returncode == 2:
        raise ValueError(f"the emulator refused {command}: {done.stdout}")
    signs = {sign for sign, text in _SIGNS.items() if re.search(text, done.stdout, re.MULTILINE)}
    if done.returncode != 0 and not signs:
        signs = {f"exit status {done.returncode}"}
    return Outcome(frozenset(signs), done.stdout)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Sequences without a mutation, which must pass."""

    variant: str
    options: Callable[[int], list]  # seed -> options
    is_slow: bool = False  # True: use only a tenth of the seeds

    def seeds(self, first, count):
        return range(first, first + (max(1, count // 10) if self.is_slow else count))


def _sometimes(seed, *choices):
    return choices[seed % len(choices)]


MANY_RANKS = (72, 96, 128)
TINY = ("--sms", 1, "--tokens", 2, "--experts", 2, "--groups", 1)  # keeps runs short

KINDS = {
    "sequences": Kind("plain", lambda s: ["--ranks", _sometimes(s, 2, 3, 4, 8), "--steps", 10]),
    "races": Kind("tsan", lambda s: ["--ranks", _sometimes(s, 2, 3), "--steps", 6]),
    "races with one ring half": Kind(
        "tsan",
        lambda s: ["--ranks", 3, "--steps", 6, "--depth", 1,
                   "--ops", _sometimes(s, "dc", "rx", "f", "wd")],
    ),
    "one ring half": Kind("plain", lambda s: ["--ranks", 3, "--steps", 10, "--depth", 1]),
    "drops": Kind(
        "plain",
        lambda s: ["--ranks", _sometimes(s, 2, 3, 4, 8), "--steps", 8, "--ops", "rx",
                   "--threshold", 1],
    ),
    "limited residency": Kind(
        "plain",
        lambda s: ["--ranks", 3, "--steps", 8, "--sms", 8, "--resident", _sometimes(s, 1, 2)],
    ),
    "a late rank": Kind(
        "plain",
        lambda s: ["--ranks", 3, "--stall", s % 3, "--phase", _sometimes(s, 3, 5), "--delay", 0.1,
                   "--timeout", 60],
    ),
    "a rank that stalls": Kind(
        "plain",
        lambda s: ["--ranks", 3, "--stall", s % 3, "--phase", _sometimes(s, 3, 5), "--delay", 0.6,
                   "--timeout", 0.2],
    ),
    "a rank that is late to the first exchange": Kind(
        "plain",
        lambda s: ["--ranks", 3, "--stall", s % 3, "--delay", 0.6, "--timeout", 0.2,
                   "--first-timeout", 60, "--steps", 1, "--sms", _sometimes(s, 3, 8)],
    ),
    "a rank that stalls after the first exchange": Kind(
        "plain",
        lambda s: ["--ranks", 3, "--stall", s % 3, "--phase", _sometimes(s, 3, 5), "--delay", 0.6,
                   "--timeout", 0.2, "--first-timeout", 60],
    ),
    "mismatched calls": Kind(
        "plain", lambda s: ["--ranks", _sometimes(s, 2, 3, 4), "--mismatch", s % 2, "--timeout", 1]
    ),
    "calls that differ in their heads": Kind(
        "plain", lambda s: ["--ranks", _sometimes(s, 2, 3, 4), "--heads", s % 2, "--timeout", 1]
    ),
    "many ranks": Kind(
        "plain", lambda s: ["--ranks", _sometimes(s, *MANY_RANKS), "--steps", 2, *TINY],
        is_slow=True,
    ),
    "routings of many ranks": Kind(
        "plain",
        lambda s: ["--ranks", 72, "--steps", 1, *TINY, "--ops", _sometimes(s, "r", "x")],
        is_slow=True,
    ),
    "a token with more slots than choices": Kind(
        "plain",
        lambda s: ["--ranks", 40, "--steps", 1, *TINY, "--ops", "c", "--crowded", s % 40],
        is_slow=True,
    ),
    "many ranks, one of which stalls": Kind(
        "plain",
        lambda s: ["--ranks", 72, "--steps", 2, *TINY, "--ops", _sometimes(s, "d", "c", "rx", "f"),
                   "--stall", 70, "--phase", 3, "--delay", 8, "--timeout", 4],
        is_slow=True,
    ),
    "many ranks on one GPU": Kind(
        "colocated", lambda s: ["--ranks", _sometimes(s, *MANY_RANKS), "--steps", 1, *TINY],
        is_slow=True,
    ),
    "overlapping launches": Kind("plain", lambda s: ["--ranks", 3, "--overlap", 1, "--timeout", 1]),
    "corrupted routings": Kind(
        "plain",
        lambda s: ["--ranks", 3, "--steps", 2, "--corrupt", _sometimes(s, 3, 20, 100),
                   "--timeout", 1, "--ops", "dwfc"],
    ),
    "ranks on one GPU": Kind(
        "colocated", lambda s: ["--ranks", _sometimes(s, 2, 3, 4, 8), "--steps", 10]
    ),
    "races of ranks on one GPU": Kind(
        "colocated_tsan", lambda s: ["--ranks", _sometimes(s, 2, 3), "--steps", 6]
    ),
    "limited residency of ranks on one GPU": Kind(  # one block of each rank
        "colocated",
        lambda s: ["--ranks", 3, "--steps", 8, "--sms", 8, "--resident", _sometimes(s, 3, 4, 5)],
    ),
    # Ranks that share a GPU do not wait for a rank that reads slowly.
    "a rank on one GPU that stalls": Kind(
        "colocated",
        lambda s: ["--ranks", 3, "--stall", s % 3, "--phase", 3, "--delay", 0.6, "--timeout", 0.2],
    ),
    "a rank on one GPU that makes another call": Kind(
        "colocated", lambda s: ["--ranks", _sometimes(s, 2, 3, 4), "--other", s % 2, "--timeout", 1]
    ),
}  # fmt: skip


def run_kind(name, seed):
    kind = KINDS[name]
    return run(kind.variant, seed, *kind.options(seed))


def mutate(mutation, seed):
    """Run with a mutation. The time limit is short: after a hang, another seed is faster."""
    options = ["--ranks", 2 + seed % 2, "--steps", 4, "--timeout", 10, "--ops", mutation.letters]
    if seed % 3 == 0:
        options += ["--depth", 1]
    return run(mutation.variant, seed, *options, *mutation.options, seconds=30, ends_at_report=True)
