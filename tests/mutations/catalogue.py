"""Read the mutations of ``list.toml``, and check that they fit the sources."""

import dataclasses
import pathlib
import re
import shlex
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Mutation:
    file: str
    old: str
    new: str
    test: str

    def __str__(self):
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: {old} -> {new or '(nothing)'}"

    def why_stale(self, root=ROOT):
        """Return why the mutation does not fit the files in ``root``, or ""."""
        path = root / self.file
        number = path.read_text().count(self.old) if path.is_file() else 0
        if number != 1 or self.old == self.new:
            return f"{self.file} must have the text once, and another one in its place: {self.old}"
        module, *options = shlex.split(self.test)
        if not module.startswith("tests/"):
            return ""
        if not (root / module).is_file():
            return f"{module} does not exist"
        text = (root / module).read_text()
        words = [word for option in options for word in re.findall(r"\w{4,}", option)]
        lacking = [word for word in words if word not in text]
        return f"{module} must have {', '.join(lacking)} of the test {self.test}" * bool(lacking)

    def applied(self, text):
        return text.replace(self.old, self.new)


def read():
    entries = tomllib.loads(pathlib.Path(__file__).with_name("list.toml").read_text())
    return [Mutation(**entry) for entry in entries["mutation"]]
