"""Check the English of documents, comments, docstrings and messages against ``tools/words.toml``.

    python tools/words.py                     # lint: fail on phrases that are not reviewed
    python tools/words.py --counts            # a table of counts by rule and folder
    python tools/words.py --show RULE cuda          # all places of a rule below a path
    python tools/words.py --root ANOTHER_TREE --counts

``words.toml`` has the phrases to avoid, the verbs that may begin a docstring, and the reviewed
exceptions. Git lists the files. Code in backquotes, code fences and link addresses are not read.
Names of tests are read as sentences.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCSTRING = "docstring"  # the rule that looks at the first word of a function's docstring
HASH_COMMENTS = (".toml", ".yml", ".yaml", ".txt", "Makefile", ".ci/run")
SOURCES = (".cu", ".cuh", ".cc", ".h")
# A string literal with fewer words is a name or a format, not a sentence.
SENTENCE_WORDS = 4


@dataclasses.dataclass(frozen=True)
class Text:
    """Text that a person reads: a paragraph, a block of comments, a docstring or a message."""

    line: int
    text: str
    opens_function: bool = False  # it is the docstring of a function that is no test


@dataclasses.dataclass(frozen=True)
class Finding:
    """A phrase that a rule asks to replace."""

    rule: str
    path: str
    line: int
    phrase: str
    context: str  # the sentence around the phrase, in one line


def _blank(match: re.Match[str]) -> str:
    """Return ``_`` in place of the match, and keep its line breaks so that lines still count."""
    return "_" + "\n" * match[0].count("\n")


def _without_code(text: str) -> str:
    """Return a text without fences, code in backquotes and addresses of links."""
    text = re.sub(r"^[ \t]*```.*?^[ \t]*```[^\n]*$", _blank, text, flags=re.M | re.S)
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", _blank, text, flags=re.S)
    return re.sub(r"\]\([^)\s]*\)", _blank, text)


def _blocks(lines: dict[int, tuple[int, str]]) -> Iterator[Text]:
    """Join comments of consecutive lines that begin in the same column.

    Args:
      lines: column and text of each comment by its line.
    """
    block: list[str] = []
    first = column = 0
    for line in sorted(lines):
        if block and (line != first + len(block) or lines[line][0] != column):
            yield Text(first, "\n".join(block))
            block = []
        if not block:
            first, column = line, lines[line][0]
        block.append(lines[line][1])
    if block:
        yield Text(first, "\n".join(block))


def _python_texts(source: str) -> Iterator[Text]:
    """Return the docstrings, messages, comments and names of tests of a Python file."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        body = node.body[0] if node.body else None
        if isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant):
            docstrings.add(body.value)
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            yield Text(
                body.lineno,
                str(body.value.value),
                is_function and not node.name.startswith("test"),
            )
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield Text(node.lineno, node.name.replace("_", " "))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node not in docstrings and len(node.value.split()) >= SENTENCE_WORDS:
                yield Text(node.lineno, node.value)
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = (token.start[1], token.string.lstrip("#"))
    yield from _blocks(comments)


def _source_texts(source: str) -> Iterator[Text]:
    """Return the comments and messages of a C++ or CUDA file."""
    comments = {}
    literal = r'"(?:\\.|[^"\\\n])*"'
    for match in re.finditer(rf"//[^\n]*|/\*.*?\*/|{literal}", source, re.S):
        line = source.count("\n", 0, match.start()) + 1
        if match[0].startswith("//"):
            column = match.start() - (source.rfind("\n", 0, match.start()) + 1)
            comments[line] = (column, match[0][2:])
        elif match[0].startswith("/*") or len(match[0].split()) >= SENTENCE_WORDS:
            yield Text(line, match[0].strip('"/*'))
    yield from _blocks(comments)


def texts_of(path: str, source: str) -> Iterator[Text]:
    """Return the texts of a file that a person reads. The file's name tells its kind."""
    if path.endswith(".py"):
        yield from _python_texts(source)
    elif path.endswith(SOURCES):
        yield from _source_texts(source)
    elif path.endswith(".md"):
        yield Text(1, source)
    elif path.endswith(HASH_COMMENTS):
        matches = {
            number: match
            for number, line in enumerate(source.split("\n"), 1)
            if (match := re.search(r"(?:^|\s)#\s(.*)", line))
        }
        yield from _blocks({n: (m.start(), m[1]) for n, m in matches.items()})


def _context(text: str, start: int, end: int) -> str:
    """Return the words around a phrase, in one line."""
    return " ".join(
        (text[max(0, start - 60) : start] + text[start:end] + text[end : end + 60]).split()
    )


def findings_of(path: str, source: str, rules: dict[str, dict], verbs: set[str]) -> list[Finding]:
    """Return every phrase of a file that a rule names.

    Args:
      path: the file's path in the repository; its name tells the kind of file.
      source: the file's text.
      rules: ``words.toml``, table ``rules``.
      verbs: words that may begin the docstring of a function.
    """
    found = []
    for text in texts_of(path, source):
        first = text.text.split(maxsplit=1)[:1]
        if text.opens_function and first and first[0].rstrip(",.:;") not in verbs:
            found.append(Finding(DOCSTRING, path, text.line, first[0], text.text.split("\n")[0]))
        prose = "\n".join(line.strip() for line in _without_code(text.text).split("\n"))
        for name, rule in rules.items():
            if "pattern" not in rule:
                continue
            for match in re.finditer(rule["pattern"].replace(" ", r"\s"), prose, re.M):
                line = text.line + prose.count("\n", 0, match.start())
                context = _context(prose, *match.span())
                found.append(Finding(name, path, line, " ".join(match[0].split()), context))
    return found


def unreviewed(found: list[Finding], exceptions: list[dict]) -> tuple[list[Finding], list[str]]:
    """Return the findings that no exception covers, and the errors of the exceptions.

    An exception names a ``file`` (or a folder, with "/" at the end), a ``reason``, and either a
    ``phrase`` around which no rule holds, or ``most``: how many findings the file or folder may
    have until it is rewritten. Both may be limited to one ``rule``.
    """
    left, wrong = list(found), []
    for exception in exceptions:
        path, name = exception["file"], exception.get("rule")
        matching = [
            finding
            for finding in left
            if (finding.path.startswith(path) if path.endswith("/") else finding.path == path)
            and name in (None, finding.rule)
            and exception.get("phrase", "") in finding.context
        ]
        label = f"{path}: {exception.get('phrase', name or 'any rule')!r}"
        if not exception.get("reason"):
            wrong.append(f"{label}: an exception needs a reason")
        if not matching and "most" not in exception:
            wrong.append(f"{label}: nothing matches this exception; remove it")
        if len(matching) > exception.get("most", len(matching)):
            wrong.append(f"{label}: at most {exception['most']} expected; got {len(matching)}")
        else:
            left = [finding for finding in left if finding not in matching]
    return left, wrong


def files_of(root: Path) -> list[str]:
    """Return the paths of the repository's files, including files that git does not know yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(path for path in set(listed.splitlines()) if (root / path).is_file())


def all_findings(root: Path, config: dict) -> list[Finding]:
    """Return the findings of every file of a tree."""
    verbs = set(config["verbs"]["docstring"].split())
    found = []
    for path in files_of(root):
        if path.endswith((".py", ".md", *SOURCES, *HASH_COMMENTS)):
            source = (root / path).read_text(encoding="utf-8")
            found += findings_of(path, source, config["rules"], verbs)
    return found


def _print_counts(found: list[Finding], rules: dict[str, dict]) -> None:
    """Print the number of findings for each rule and folder."""
    counts = collections.Counter((f.rule, f.path.split("/")[0]) for f in found)
    folders = sorted({folder for _, folder in counts})
    widths = [max(7, len(folder)) for folder in folders]
    print(f"{'rule':16}  total ", *(f"{f:>{w}}" for f, w in zip(folders, widths)))
    for name in rules:
        row = [counts[name, folder] for folder in folders]
        print(f"{name:16} {sum(row):6} ", *(f"{n:{w}}" for n, w in zip(row, widths)))
    print(f"{'all':16} {len(found):6}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to read")
    parser.add_argument("--counts", action="store_true", help="print counts by rule and folder")
    parser.add_argument("--show", nargs=2, metavar=("RULE", "PATH"), help='RULE or "all"')
    args = parser.parse_args()
    config = tomllib.loads((ROOT / "tools" / "words.toml").read_text())
    found = all_findings(args.root, config)
    if args.counts:
        _print_counts(found, config["rules"])
        return 0
    if args.show:
        rule, path = args.show
        found = [f for f in found if rule in ("all", f.rule) and f.path.startswith(path)]
        wrong = []
    else:
        found, wrong = unreviewed(found, config["exceptions"])
    for f in found:
        print(f"{f.path}:{f.line}: {f.rule}: {f.phrase!r} in: {f.context}")
        if not args.show:
            print(f"    {config['rules'][f.rule]['instead']}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong or found) and not args.show)


if __name__ == "__main__":
    sys.exit(main())
