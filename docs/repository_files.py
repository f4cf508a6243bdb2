"""Put files that are outside docs/ into the site, for mkdocs.

Documents link to files of the repository by relative paths, which work on any host that shows the
repository. In the site those files lie under ``repository/``, and this hook rewrites the links.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FOLDER = "repository"
PAGES = ("CONTRIBUTING.md",)
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and every file that a page links to."""
    wanted = list(PAGES)
    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    for page in [*pages, *(ROOT / name for name in PAGES)]:
        for _, target, _ in LINK.findall(page.read_text()):
            if (name := _outside(page, target)) is not None:
                wanted.append(name)
    known = {file.src_uri for file in files}
    while wanted:
        name = wanted.pop()
        uri = f"{FOLDER}/{name}"
        if uri in known:
            continue
        known.add(uri)
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
        if name.endswith(".md"):
            linked = LINK.findall((ROOT / name).read_text())
            wanted += [n for _, t, _ in linked if (n := _outside(ROOT / name, t)) is not None]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links of a page to files outside docs/, and of those files into docs/."""
    uri = page.file.src_uri
    own = Path(uri).relative_to(FOLDER) if uri.startswith(FOLDER + "/") else Path("docs") / uri

    def rewrite(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if "://" in target:
            return match[0]
        name = posixpath.normpath(posixpath.join(posixpath.dirname(own.as_posix()), target))
        in_site = name.removeprefix("docs/") if name.startswith("docs/") else f"{FOLDER}/{name}"
        if name == "README.md":
            in_site = "index.md"
        return before + posixpath.relpath(in_site, posixpath.dirname(uri) or ".") + after

    return LINK.sub(rewrite, markdown)


def _outside(page: Path, target: str) -> str | None:
    """Return the path of a linked file within the repository, or None if it is in docs/."""
    if "://" in target:
        return None
    path = (page.parent / target).resolve()
    if not path.is_file() or path == ROOT / "README.md" or (ROOT / "docs") in path.parents:
        return None
    return path.relative_to(ROOT).as_posix()
