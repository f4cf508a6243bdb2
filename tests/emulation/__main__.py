"""Run every check of the kernels on this CPU: ``python -m tests.emulation`` (``make emulate``).

The checks need g++ and make, but neither a GPU nor a CUDA toolkit. For each mutation of
``mutations.py``, the program prints how many runs have detected it.
"""

import argparse
import collections
import concurrent.futures
import itertools
import os
import sys
import time

from . import mutations, runs


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.emulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=50, help="sequences of each kind")
    parser.add_argument(
        "--mutation-seeds",
        type=int,
        default=6,
        help="sequences of each mutation; if none notices it, more follow until one does",
    )
    parser.add_argument("--only", default="", help="kinds, mutations and checks of this name")
    parser.add_argument("--seconds", type=int, default=20, help="time of each check of --host")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--host", action="store_true", help="the host code instead (make sanitize)")
    options = parser.parse_args()
    if options.host:
        return _run_host(options)
    chosen = [mutation for mutation in mutations.all_mutations() if options.only in mutation.name]
    kinds = {name: kind for name, kind in runs.KINDS.items() if options.only in name}
    used = {each.variant for each in (*kinds.values(), *chosen)}
    for variant in filter(used.__contains__, runs.VARIANTS):
        _build(f"{variant}/emulate")
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        failed = _run_kinds(pool, kinds, options) + _run_mutations(pool, chosen, options)
    return _result(failed)


def _build(target):
    start = time.monotonic()
    runs.build(target)
    print(f"built {target} in {time.monotonic() - start:.0f} s", flush=True)


def _run_host(options):
    failed, built = [], set()
    for sanitizer, check in itertools.product(runs.HOST_SANITIZERS, runs.HOST_CHECKS):
        if options.only not in f"{sanitizer} {check}":
            continue
        if sanitizer not in built:
            _build(f"host_{sanitizer}/checks")
            built.add(sanitizer)
        wrong = runs.check_host(sanitizer, check, seconds=options.seconds)
        print(f"{sanitizer} {check:12} {wrong or 'as it must be'}", flush=True)
        if wrong:
            failed.append(f"{sanitizer} {check}")
    return _result(failed)


def _result(failed):
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all as it must be")
    return 1 if failed else 0


def _run_kinds(pool, kinds, options):
    failed = []
    for name, kind in kinds.items():
        start = time.monotonic()
        seeds = kind.seeds(1, options.seeds)
        outcomes = list(pool.map(lambda seed, name=name: runs.run_kind(name, seed), seeds))
        right = sum(outcome.is_right for outcome in outcomes)
        print(
            f"{name:28} as it must be {right:3} of {len(seeds)}  "
            f"{_count(outcomes)}  {time.monotonic() - start:.0f} s",
            flush=True,
        )
        for seed, outcome in zip(seeds, outcomes):
            if not outcome.is_right:
                failed.append(f"{name} (seed {seed})")
    return failed


def _run_mutations(pool, chosen, options):
    failed = []
    for mutation in chosen:
        seeds = range(1, options.mutation_seeds + 1)
        outcomes = list(pool.map(lambda seed, m=mutation: runs.mutate(m, seed), seeds))
        why = mutations.JUSTIFIED.get(mutation.name, "")
        for seed in range(options.mutation_seeds + 1, mutations.MAX_SEEDS + 1):
            if why or any(outcome.is_noticed for outcome in outcomes):
                break
            outcomes.append(runs.mutate(mutation, seed))
        noticed = sum(outcome.is_noticed for outcome in outcomes)
        print(
            f"{mutation.name:62} noticed {noticed} of {len(outcomes)}  "
            f"{_count(outcomes)}{'  justified: ' + why if why else ''}",
            flush=True,
        )
        if not noticed and not why:
            failed.append(mutation.name)
    return failed


def _count(outcomes):
    signs = collections.Counter(sign for outcome in outcomes for sign in sorted(outcome.signs))
    return ", ".join(f"{sign} {count}" for sign, count in signs.items())


if __name__ == "__main__":
    sys.exit(main())
