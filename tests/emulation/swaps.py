"""List pairs of neighbouring stores in device code. Write sources in which a run can swap a pair.
A *store* is a statement whose result other ranks, the host or later launches read. A *word* is a
flag, a head, a credit, the kind of a record, or the state of a launch. At least one store of a pair
stores a word, because readers of a word rely on earlier stores."""

import dataclasses
import pathlib
import re

CUDA = pathlib.Path(__file__).resolve().parents[2] / "cuda"

_CALL = re.compile(r"\b((?:store|raise|send|write)(?:_\w+)?)(?:<\w+(?:, \w+)*>)?\(")
_FIELD = re.compile(r"\b(own\.\w+(?= = )|record->\w+(?=\)? = )|head->\w+)")
_IS_WORD = re.compile(r"\b(?:store|raise)_\w+(?:<\w+>)?\(|\*const_cast<volatile|\bown\.\w+ = ")
# These calls may stand between two neighbouring stores.
_BETWEEN = re.compile(r"(delay_for_test|fence_\w+|wait_until_stored|__threadfence\w*)\(")
# These statements end a run of stores.
_OTHER = re.compile(r"(const|auto|static|return|break|continue|using)\b|if \(breaks\(|#")
_BLOCK = re.compile(r"(?:\)|\]|\belse|\bconst) \{")
_FUNCTION = re.compile(r"__(?:device|global)__[^;{]*?\b(\w+)\(|^    (\w+_kernel)\(", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Pair:
    file: str
    line: int  # of the first store
    function: str
    first: str
    second: str


def pairs():
    found = []
    for path in _sources():
        source = _Source(path)
        for run in source.runs:
            for (begin, end), second in zip(run, run[1:]):
                first, second = (source.code[slice(*span)] for span in [(begin, end), second])
                names = source.function(begin), _name(first), _name(second)
                found.append(Pair(path.name, source.line(begin), *names))
    return sorted(found, key=lambda pair: (pair.file, pair.line))


def write_sources(folder):
    """Write the sources. Unchanged files are not written, so make does not compile them again."""
    sources = _sources()
    for path in [*CUDA.glob("device/*"), *CUDA.glob("kernels/*")]:
        text = _Source(path).rewritten() if path in sources else path.read_text()
        to = folder / path.relative_to(CUDA)
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists() or to.read_text() != text:
            to.write_text(text)


def _sources():
    paths = [*CUDA.glob("device/*.cuh"), *CUDA.glob("kernels/*.cu")]
    return sorted(path for path in paths if path.name != "ptx.cuh")


def _name(store):
    call = _CALL.search(store)
    fields = list(dict.fromkeys(_FIELD.findall(store)))
    stored = ", ".join(fields) if len(fields) <= 2 else f"{fields[0]}, ..."
    return f"{call[1]}({stored})" if call and stored else call[1] if call else stored


class _Source:
    """A source without comments. Each of `runs` is a list of two or more stores (begin, end)."""

    def __init__(self, path):
        def blank(comment):
            return re.sub(r"[^\n]", " ", comment[0])

        self.name = path.name
        self.code = re.sub(r"//[^\n]*", blank, path.read_text())
        blocks = [match.end() for match in _BLOCK.finditer(self.code)]
        self.runs = sorted(run for begin in blocks for run in self._runs(begin))

    def line(self, place):
        return self.code.count("\n", 0, place) + 1

    def function(self, place):
        """Return the last function that begins before `place`."""
        return next(filter(None, _FUNCTION.findall(self.code, 0, place)[-1]))

    def rewritten(self, begin=0, end=None):
        """Return code with an `if` around each pair of stores."""
        end = len(self.code) if end is None else end
        text = ""
        for run in self.runs:
            if begin <= run[0][0] and run[-1][1] <= end:  # not inside an earlier run
                text += self._copied(begin, run[0][0]) + self._with_choices(run)
                begin = run[-1][1]
        return text + self._copied(begin, end)

    def _copied(self, begin, end):
        """Return code after a #line directive."""
        return f'\n#line {self.line(begin)} "{self.name}"\n{self.code[begin:end]}'

    def _with_choices(self, run):
        if len(run) == 1:
            return self.rewritten(*run[0])
        first, second = run[:2]
        between = self.code[first[1] : second[0]]
        swapped = f'::emulation::are_swapped({{"{self.name}", {self.line(first[0])}}})'
        return (
            f"if ({swapped}) {{ {self._copied(*second)}{between}::emulation::pause_often();"
            f" {self._copied(*first)}{self._copied(second[1], run[-1][1])} }}"
            f" else {{ {self.rewritten(*first)}{between}{self._with_choices(run[1:])} }}"
        )

    def _runs(self, begin):
        """Return the runs of the C++ block at `begin`."""
        runs, run = [], []
        for span in self._statements(begin):
            statement = self.code[slice(*span)]
            if _BETWEEN.match(statement):
                continue
            is_store = _CALL.search(statement) or _FIELD.search(statement)
            if not is_store or _OTHER.match(statement):
                runs, run = [*runs, run], []
            elif run and not any(map(_IS_WORD.search, [statement, self.code[slice(*run[-1])]])):
                runs, run = [*runs, run], [span]
            else:
                run.append(span)
        return [run for run in [*runs, run] if len(run) > 1]

    def _statements(self, place):
        """Yield begin and end of each statement in the block."""
        while self.code[place := self._next(place)] != "}":
            end = self._end(place)
            yield place, end
            place = end

    def _next(self, place):
        """Return the index of the next character that is not white space."""
        while self.code[place].isspace():
            place += 1
        return place

    def _end(self, place):
        code = self.code
        if code[place] == "#":
            return code.index("\n", place)
        if code[place] == "{":
            return self._closed(place)
        if head := re.compile(r"(if|for|while|switch)( constexpr)? (?=\()").match(code, place):
            end = self._end(self._next(self._closed(head.end())))
            if head[1] == "if" and code.startswith("else", after := self._next(end)):
                end = self._end(self._next(after + len("else")))
            return end
        while code[place] != ";":
            place = self._closed(place) if code[place] in "({[" else place + 1
        return place + 1

    def _closed(self, place):
        depth = 0
        while True:
            depth += (self.code[place] in "({[") - (self.code[place] in ")}]")
            place += 1
            if depth == 0:
                return place
