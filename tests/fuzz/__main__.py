"""Compare random exchanges, expert layers and grouped products on the portable path with the numpy
oracle.

    python -m tests.fuzz --seconds 600 --seed 1
    python -m tests.fuzz --seed 1 --program 17    # only this program
    python -m tests.fuzz --seconds 600 --seed 1 --kinds moe_mlp grouped_dot

After the first failure, the fuzzer prints a command that repeats it, and ends with exit status 1.
With `--keep-going`, it continues. To use several cores, start several fuzzers with different seeds.
"""

import argparse
import pathlib
import secrets
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # adds tests/, as pytest does

import conftest  # noqa: F401  it sets the number of devices before jax is imported

from . import fuzzer


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60, help="time limit; 0: no limit")
    parser.add_argument("--seed", type=int, help="default: a random seed")
    parser.add_argument("--program", type=int, help="run only this program")
    parser.add_argument(
        "--kinds", nargs="+", choices=fuzzer.KINDS, help="run only programs of these kinds"
    )
    parser.add_argument("--keep-going", action="store_true", help="continue after failures")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    numbers = fuzzer.numbers_of(seed, options.kinds)
    if options.program is not None:
        numbers = [options.program]
    done = fuzzer.fuzz(
        seed,
        seconds=options.seconds or float("inf"),
        numbers=numbers,
        keep_going=options.keep_going,
        report=lambda text: print(text, flush=True),
    )
    print(done)
    return 1 if done.failures else 0


if __name__ == "__main__":
    sys.exit(main())
