"""Compile the programs of `programs.py` for four H100 GPUs, and print the compiled table.

make compiled                                  # install what this needs, and write table.txt
python -m tests.compiled                       # print the table
python -m tests.compiled --only statistics     # only programs with this word in their names
python -m tests.compiled --hlo build/hlo       # write the optimized programs, too
"""

import argparse
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

TABLE = pathlib.Path(__file__).with_name("table.txt")
HEAD = """\
What XLA makes of our programs for four H100 GPUs: of each rank's program, the kernels and moves, by
what they are. CONTRIBUTING.md ("The compiled table") explains the words. `make compiled` writes
this file.
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
    # Both import jax, with the environment that the first one makes.
    from . import gpus, hlo, programs

    def compiled(name, program, lowered):
        text = lowered.compile().as_text()
        if arguments.hlo:
            arguments.hlo.mkdir(parents=True, exist_ok=True)
            (arguments.hlo / f"{name}.txt").write_text(text)
        rows = hlo.rows_of_table(text, program.rows)
        return "\n".join([f"{name} ({program.rows} rows)", *(f"  {row}" for row in rows), ""])

    start = time.perf_counter()
    makers = programs.all_of(gpus.devices())
    with ThreadPoolExecutor(2) as pool:
        blocks = []
        for name, make in makers.items():
            if arguments.only in name:
                program = make()
                lowered = gpus.lower(program.function, program.args, program.mesh)
                blocks.append(pool.submit(compiled, name, program, lowered))
        table = "\n".join([HEAD, *(block.result() for block in blocks)])
    print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if arguments.write and not arguments.only:
        TABLE.write_text(table)
    else:
        print(table, end="")


if __name__ == "__main__":
    main()
