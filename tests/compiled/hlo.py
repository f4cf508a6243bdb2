"""List the package's calls, collectives and XLA's kernels in the text of optimized HLO."""

import collections
import dataclasses
import re

CALL = "moe_a2a_"
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
# FREE: instructions for which a GPU executes nothing.
NAMES = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
FREE = (*NAMES, "after-all", "partition-id")
# A kernel moves data and computes nothing if each of its operations is in MOVES or PLAIN.
UPDATE = "dynamic-update-slice"
MOVES = ("copy", "transpose", "slice", "dynamic-slice", UPDATE, "concatenate", "pad")
PLAIN = (*NAMES, "broadcast", "reshape", "convert", "iota")
# Instructions that may read less than their whole operand.
SLICES = (*NAMES, "slice", "dynamic-slice", "gather")

COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*?\{\n(.*?)^\}", re.M | re.S)
INSTRUCTION = re.compile(r"^  (?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", re.M)
SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def has_axis(shapes, size):
    return any(str(size) in dims.split(",") for _, dims in SHAPE.findall(shapes))


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    op: str
    operands: tuple
    attributes: str

    def attribute(self, pattern):
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    @property
    def target(self):
        return self.attribute(r'custom_call_target="([^"]+)"')

    @property
    def op_name(self):
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"')

    @property
    def shapes(self):
        return ["{}[{}]".format(*shape) for shape in SHAPE.findall(self.shape)]

    @property
    def is_call(self):
        return self.target.startswith(CALL)

    @property
    def is_collective(self):
        return self.op.removesuffix("-start").removesuffix("-done") in COLLECTIVES

    @property
    def is_kernel_of_xla(self):
        other = self.is_call or self.is_collective or self.op.endswith("-done")
        return not other and self.op not in (*FREE, "while", "conditional", "call", "opt-barrier")


class Module:
    """``computations`` maps names of HLO computations to their instructions."""

    def __init__(self, text):
        self.computations = {
            name: [self._instruction(*line) for line in INSTRUCTION.findall(body)]
            for name, body in COMPUTATION.findall(text)
        }
        self.by_name = {i.name: i for body in self.computations.values() for i in body}
        assert len(self.by_name) == len(re.findall(r"^  \S.* = ", text, re.M)), "unread HLO"
        (entry,) = re.findall(r"^ENTRY %([\w.\-]+)", text, re.M)
        self.executed = list(self._walk(entry, in_loop=False))

    @staticmethod
    def _instruction(name, shape, op, rest):
        depth, end = 1, 0
        while depth:
            depth += {"(": 1, ")": -1}.get(rest[end], 0)
            end += 1
        operands = tuple(re.findall(r"%([\w.\-]+)", rest[: end - 1]))
        return Instruction(name, shape, op, operands, rest[end:])

    def _walk(self, computation, in_loop):
        for i in self.computations[computation]:
            if i.op == "while":
                yield from self._walk(i.attribute(r"body=%([\w.\-]+)"), in_loop=True)
            elif i.op in ("call", "async-start"):
                called = i.attribute(r"(?:to_apply|calls)=%([\w.\-]+)")
                yield from self._walk(called, in_loop)
            elif i.op == "conditional":
                branches = i.attribute(r"branch_computations=\{(.*?)\}")
                for branch in re.findall(r"%([\w.\-]+)", branches):
                    yield from self._walk(branch, in_loop)
            elif i.op not in FREE:
                yield i, in_loop

    def fused(self, i):
        if i.op != "fusion":
            return [i]
        body = self.computations[i.attribute(r"calls=%([\w.\-]+)")]
        return [inner for b in body for inner in self.fused(b)]

    def source(self, name):
        """Return the instruction that computes a value, and not one that only renames the value."""
        i = self.by_name[name]
        while i.op in ("bitcast", "get-tuple-element", "opt-barrier"):
            of = self.by_name[i.operands[0]]
            if i.op == "get-tuple-element" and of.op == "tuple":
                of = self.by_name[of.operands[int(i.attribute(r"index=(\d+)"))]]
            i = of
        return i

    def move(self, i):
        """Return the names of the MOVES in a kernel, or "" if the kernel also computes."""
        ops = {b.op for b in self.fused(i) if b.shapes != ["s32[]"]}
        return " and ".join(sorted(ops.intersection(MOVES))) if ops <= {*MOVES, *PLAIN} else ""

    def shapes_of(self, i):
        """Return the shapes of a kernel's in-place updates or, if it has none, of its results."""
        updates = [b.operands[1] for b in self.fused(i) if b.op == UPDATE]
        written = [s for name in updates for s in self.by_name[name].shapes]
        return " ".join(written or i.shapes)

    def scope(self, i):
        """Return the innermost scope `moe_*` of an instruction, and whether it is "backward"."""
        names = re.findall(r"\bmoe_\w+", i.op_name.removesuffix(i.op_name.rsplit("/", 1)[-1]))
        of = f"of {names[-1]}" if names else "of no scope"
        return f"{of}, backward" if "transpose(" in i.op_name else of

    def wide_operands(self, i, size):
        operands = {s for name in i.operands for s in self.by_name[name].shapes}
        return sorted(shape for shape in operands if has_axis(shape, size))

    def passes_over(self, i, size):
        """Return True if a kernel reads or writes all of an axis of this size."""
        return any(
            has_axis(instruction.shape, size)
            for b in self.fused(i)
            if b.op not in SLICES
            for instruction in (b, *map(self.by_name.get, b.operands))
        )


def rows_of_table(text, num_rows):
    """Return a program's sorted rows for table.txt: (kind, count, description)."""
    module = Module(text)
    found = collections.Counter()

    def add(kind, description, in_loop):
        found[f"{kind} in loop" if in_loop else kind, description] += 1

    before, after = (collections.defaultdict(set) for _ in range(2))
    for i, _ in module.executed:
        for source in map(module.source, i.operands):
            if i.is_call:
                before[source.name].add(i.target)
            if source.is_call:
                after[i.name].add(source.target)
    for i, in_loop in module.executed:
        if i.is_call:
            add("our call", f"{i.target} {module.scope(i)}", in_loop)
        elif i.is_collective and not i.op.endswith("-done"):
            add("collective", f"{i.op.removesuffix('-start')} {' '.join(i.shapes)}", in_loop)
        elif i.is_kernel_of_xla:
            add("XLA's kernels", "in all", in_loop)
            add("XLA's kernels", module.scope(i), in_loop)
            move, written = module.move(i), module.shapes_of(i)
            around = {"after": after[i.name], "before": before[i.name]}
            where = [
                f" {when} {' and '.join(sorted(calls))}" for when, calls in around.items() if calls
            ]
            if move and (where or in_loop):
                add("move", f"{move} {written}{''.join(where)}", in_loop)
            if module.passes_over(i, num_rows):
                reads = "" if has_axis(written, num_rows) else module.wide_operands(i, num_rows)
                reads = f"{' '.join(reads)} to " if reads else ""
                add("wide pass", f"{reads}{written} {module.scope(i)}", in_loop)
            for b in module.fused(i):
                operands = [module.by_name[name] for name in b.operands]
                if b.op == "dot":
                    types = " x ".join(SHAPE.search(o.shape)[1] for o in operands)
                    precision = b.attribute(r"operand_precision=\{(.*?)\}") or "default"
                    algorithm = b.attribute(r"algorithm=(\w+)")
                    precision += f" by {algorithm}" if algorithm else ""
                    add("product", f"{types} to {b.shapes[0]}, precision {precision}", in_loop)
                if b.op == "sort":
                    add("sort", " ".join(b.shapes), in_loop)
    return [f"{kind:<22}{n:>4}  {what}".rstrip() for (kind, what), n in sorted(found.items())]
