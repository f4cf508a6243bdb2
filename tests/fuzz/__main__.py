"""Compare random exchanges, expert layers and grouped products on the portable path with the numpy
oracle.

    python -m tests.fuzz --seconds 600 --seed 1
    python -m tests.fuzz --seed 1 --program 17    # only this program
    python -m tests.fuzz --seconds 600 --seed 1 --kinds moe_mlp grouped_dot
    python -m tests.fuzz --seconds 600 --seed 1 --processes 16 --out 1.json
    python -m tests.fuzz --sum 1.json 2.json

The exit status is 1 after the first failure, which prints the program, the seed and the second
command. With `--keep-going` or several processes, failures are counted. A process whose program
crashes or hangs is replaced. `--out` writes the counts and failures, which `--sum` adds.
"""

import argparse
import json
import pathlib
import secrets
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # tests/, as under pytest

import conftest  # noqa: F401  the devices that tests have, before jax is imported

from . import fuzzer, parts


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long; 0: without end")
    parser.add_argument("--seed", type=int, help="of everything; without it a random one")
    parser.add_argument("--program", type=int, help="the one program to run")
    parser.add_argument(
        "--kinds", nargs="+", choices=fuzzer.KINDS, help="only the programs of these kinds"
    )
    parser.add_argument("--keep-going", action="store_true", help="after failures, too")
    parser.add_argument("--processes", type=int, help="run in so many processes, and keep going")
    parser.add_argument("--out", type=pathlib.Path, help="write the counts to this JSON file")
    parser.add_argument(
        "--sum", type=pathlib.Path, nargs="+", help="add such files, and run nothing"
    )
    options = parser.parse_args()
    if options.sum:
        done = fuzzer.Done()
        for path in options.sum:
            done.add(fuzzer.Done.of_json(json.loads(path.read_text())))
    else:
        done = run(options)
    for text in done.failures if options.sum else ():
        print(text)
    print(done)
    if options.out:
        options.out.write_text(json.dumps(done.as_json(), indent=1))
    return 1 if done.failures else 0


def run(options):
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    seconds = options.seconds or float("inf")
    report = lambda text: print(text, flush=True)
    if options.processes:
        return parts.fuzz(seed, seconds, options.processes, report, options.kinds)
    numbers = fuzzer.numbers_of(seed, options.kinds)
    if options.program is not None:
        numbers = [options.program]
    return fuzzer.fuzz(
        seed,
        seconds=seconds,
        numbers=numbers,
        keep_going=options.keep_going,
        report=report,
    )


if __name__ == "__main__":
    sys.exit(main())
