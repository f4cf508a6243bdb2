"""Inject faults at random times into processes that exchange tokens, and check how each run ends.

    python -m tests.faults --seed 1 --runs 200                  # everything
    python -m tests.faults --seed 1 --runs 200 --first 17 --last 17         # only run 17
    python -m tests.faults --seed 1 --runs 40 --kinds "memory: a delay"
    python -m tests.faults --list

The outcome of a run is "right", "error" (an error that names the cause), or FAILURE: a wrong
result, a hang, a leaked process, descriptor or byte, or an error that does not name the cause. The
exit status is 1 if a run is a FAILURE. With MOE_A2A_TEST_LOGS=FOLDER, the logs of failed runs are
kept in FOLDER. Here, no kernel runs: `tests/emulation` tests faults during a kernel.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # adds tests/, as pytest does


def main():
    from faults import campaign

    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--last", type=int, help="number of the last run")
    parser.add_argument("--kinds", nargs="+", metavar="TEXT", help="kinds whose name has a text")
    parser.add_argument("--list", action="store_true", help="print the kinds")
    options = parser.parse_args()
    kinds = [k for k in campaign.KINDS if any(t in k for t in options.kinds or [""])]
    if options.list:
        print(*kinds, sep="\n")
        return 0
    last = options.runs - 1 if options.last is None else options.last
    report = lambda text: print(text, flush=True)
    found = campaign.run_many(options.seed, range(options.first, last + 1), kinds, report)
    print(*campaign.table(found), sep="\n")
    return int(any(done.outcome == "FAILURE" for done in found))


if __name__ == "__main__":
    sys.exit(main())
