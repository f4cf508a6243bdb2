"""Compile the programs of `programs.py` for four H100 GPUs, and print tests/compiled/table.txt.

make compiled                                  # install the requirements, and write table.txt
python -m tests.compiled                       # print the table
python -m tests.compiled --only statistics     # only programs with this word in their names
python -m tests.compiled --hlo build/hlo       # also write the optimized HLO
"""

import argparse
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

TABLE = pathlib.Path(__file__).with_name("table.txt")
HEAD = """\
XLA has compiled the programs of tests/compiled/programs.py for four H100 GPUs. This table counts
the calls, kernels and data moves of one rank by kind. CONTRIBUTING.md ("The compiled table")
explains the words. `make compiled` writes this file.
"""


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="write table.txt")
    parser.add_argument("--only", default="", help="a word in the names of the programs")
    parser.add_argument("--hlo", type=pathlib.Path, help="a folder for the optimized programs")
    arguments = parser.parse_args()
    from . import plugin

    if why := plugin.why_not():
        sys.exit(f"python -m tests.compiled: {why}")
    # `gpus` must come first: it sets environment variables, which jax reads when it is imported.
    from . import gpus, hlo, programs

    def compiled(name, program, lowered):
        text = lowered.compile().as_text()
        if arguments.hlo:
            arguments.hlo.mkdir(parents=True, exist_ok=True)
            (arguments.hlo / f"{name}.txt").write_text(text)
        return program.rows, hlo.rows_of_table(text, program.rows)

    start = time.perf_counter()
    makers = programs.all_of(gpus.devices())
    with ThreadPoolExecutor(2) as pool:
        found = {}
        for name, make in makers.items():
            if arguments.only in name:
                program = make()
                lowered = gpus.lower(program.function, program.args, program.mesh)
                found[name] = pool.submit(compiled, name, program, lowered)
        blocks = blocks_of({name: block.result() for name, block in found.items()})
        table = "\n".join([HEAD, *blocks])
    print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if arguments.write and not arguments.only:
        TABLE.write_text(table)
    else:
        print(table, end="")


def blocks_of(found):
    """Yield the lines of the table for each program, or a reference to an equal program."""
    names = {}
    for name, (num_rows, rows) in found.items():
        first = names.setdefault((num_rows, *rows), name)
        rows = rows if first == name else [f'the same as "{first}"']
        yield "\n".join([f"{name} ({num_rows} rows)", *(f"  {row}" for row in rows), ""])


if __name__ == "__main__":
    main()
