"""Put files that are outside docs/ into the site, for mkdocs.

Documents link to files of the repository by relative paths, which work on any host that shows the
repository. In the site, these files are under ``repository/``, and this hook rewrites the links.
Each example becomes a page. The home page begins with the first part of README.md.
"""

from __future__ import annotations

import ast
import json
import os
import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
FOLDER = "repository"
PAGES = ("CONTRIBUTING.md",)
FOR_CONTRIBUTORS = (f"{FOLDER}/", "protocol", "history/")  # the site's search omits these pages
OPENING = "<!-- the opening of README.md -->"  # up to the first heading that is not in HOME
HOME = ("Install", "Quick start")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")
PICTURE = re.compile(r"^!\[[^\]]*\]\(([^)]+)\)$", re.M)


def on_config(config: Any) -> Any:
    """Show the version at the foot of each page, and links to the repository if its address is
    known."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.copyright = f"{project['name']} {project['version']}"
    if address := os.environ.get("READTHEDOCS_GIT_CLONE_URL", "").removesuffix(".git"):
        config.repo_url, config.repo_name = address, "repository"
        config.edit_uri = "edit/main/docs/"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the site, and every repository file that a page links to."""
    for example in sorted((ROOT / "examples").iterdir()):
        if example.suffix in (".py", ".ipynb"):
            uri = f"examples/{example.stem}.md"
            files.append(File.generated(config, uri, content=_page_of(example)))
    wanted = list(PAGES)
    pages = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    texts = {page: page.read_text() for page in [*pages, *(ROOT / name for name in PAGES)]}
    for page, text in {**texts, ROOT / "README.md": _opening_of_readme()}.items():
        for _, target, _ in LINK.findall(text):
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
    """Rewrite links between pages of docs/ and files outside docs/ to paths within the site."""
    uri = page.file.src_uri
    if uri.startswith((f"{FOLDER}/", "examples/")):
        page.edit_url = None  # a generated page
    if uri.startswith(FOR_CONTRIBUTORS):
        page.meta["search"] = {"exclude": True}
    own = Path(uri).relative_to(FOLDER) if uri.startswith(FOLDER + "/") else Path("docs") / uri
    opening = _in_site(_opening_of_readme(), Path("README.md"), uri) if OPENING in markdown else ""
    markdown = _in_site(markdown, own, uri).replace(OPENING, opening)
    return PICTURE.sub(r"[\g<0>](\1)", markdown)  # a click opens the picture


def _in_site(markdown: str, own: Path, uri: str) -> str:
    """Rewrite the links in the text of the file `own` for its page in the site, `uri`."""

    def rewrite(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if "://" in target:
            return match[0]
        name = posixpath.normpath(posixpath.join(posixpath.dirname(own.as_posix()), target))
        in_site = name.removeprefix("docs/") if name.startswith("docs/") else f"{FOLDER}/{name}"
        if name == "README.md":
            in_site = "index.md"
        if name.startswith("examples/"):
            in_site = str(Path(name).with_suffix(".md"))
        return before + posixpath.relpath(in_site, posixpath.dirname(uri) or ".") + after

    return LINK.sub(rewrite, markdown)


def _opening_of_readme() -> str:
    """Return README.md without its title and without the sections that HOME does not list."""
    opening, *sections = re.split(r"^(?=## )", (ROOT / "README.md").read_text(), flags=re.M)
    kept = [text for text in sections if text.startswith(tuple(f"## {name}\n" for name in HOME))]
    return "".join([opening.partition("\n")[2], *kept])


def _page_of(example: Path) -> str:
    """Return the Markdown page of an example, with its docstring (or text cells) and its code."""
    text = example.read_text()
    if example.suffix == ".ipynb":
        cells = [part for cell in json.loads(text)["cells"] for part in _parts_of(cell)]
        return "\n\n".join([*cells, f"This page is the notebook `examples/{example.name}`.\n"])
    first, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    code = text[text.index('"""', 3) + 3 :].strip()
    return f"# {example.name}\n\n{first}\n{rest}\n\n```python\n{code}\n```\n"


def _parts_of(cell: dict[str, Any]) -> list[str]:
    """Return a notebook cell as Markdown: first its text or code, then its stored outputs."""
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return [source]
    parts = [f"```python\n{source}\n```"]
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            parts.append(f"```text\n{''.join(output['text'])}```")
        else:
            parts.append(f'<img alt="" src="data:image/png;base64,{output["data"]["image/png"]}">')
    return parts


def _outside(page: Path, target: str) -> str | None:
    """Return the path of a linked file within the repository, or None if the file is in docs/."""
    if "://" in target:
        return None
    path = (page.parent / target).resolve()
    if not path.is_file() or path == ROOT / "README.md" or (ROOT / "docs") in path.parents:
        return None
    name = path.relative_to(ROOT)
    return None if name.parts[0] == "examples" else name.as_posix()
