"""Run every Python snippet of the documents, and check links, paths, commands and API pages.

A snippet can use the names of its file's first snippet, and of earlier snippets in its section. A
``text`` fence contains the expected output and error of the snippet above it; "..." matches any
text. A snippet without such a fence must not raise an error. An HTML comment above a fence may be
one of these marks:

    gpu                 the snippet needs several GPUs
    on CPU              the output is compared on the CPU only
    not run: <reason>   the snippet is only compiled
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import environment
import harness
import jax
import pytest

import jax_moe_a2a as ma

pytestmark = [
    pytest.mark.one_process("the snippets are programs of one process"),
    pytest.mark.several_devices("the snippets make meshes of all devices"),
]
readers_programs = pytest.mark.promotes("readers' programs use JAX's defaults")
ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/results/README.md"),
    *(path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("docs/**/*.md"))),
)
MOST_LINES = {"README.md": 160, "docs/sharp_bits.md": 230}
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
HEADING = re.compile(r"^## (.*)$", re.M)
MARK = re.compile(r"gpu|on CPU|not run: .+")


@dataclasses.dataclass
class Snippet:
    document: str
    section: str
    line: int
    code: str
    mark: str
    output: str | None = None
    output_mark: str = ""

    @property
    def skip_reason(self):
        return self.mark.removeprefix("not run: ") if self.mark.startswith("not run") else ""


@functools.cache
def snippets_of(document):
    source = (ROOT / document).read_text()
    snippets, end = [], 0
    for match in FENCE.finditer(source):
        line = source[: match.start("text")].count("\n") + 1
        mark = match["mark"] or ""
        place = f"{document}:{line}"
        assert match["kind"] in ("", "python", "text", "bash"), f"{place}: unknown kind"
        if match["kind"] in ("python", "text"):
            assert not mark or MARK.fullmatch(mark), f"{place}: {mark!r} is no mark"
        if match["kind"] == "python":
            headings = HEADING.findall(source[: match.start()])
            section = headings[-1] if headings else "(opening)"
            snippets.append(Snippet(document, section, line, match["text"], mark))
        elif match["kind"] == "text":
            between = source[end : match.start()]
            assert snippets and not between.strip(), f"{place}: no snippet precedes this output"
            snippets[-1].output, snippets[-1].output_mark = match["text"], mark
        end = match.end()
    return snippets


def run(snippet, namespace):
    place = f"{snippet.document}:{snippet.line}"
    code = compile("\n" * (snippet.line - 1) + snippet.code, ROOT / snippet.document, "exec")
    if snippet.skip_reason:
        return
    printed, error = io.StringIO(), None
    with environment.restored(), contextlib.redirect_stdout(printed):
        try:
            exec(code, namespace)
        except Exception as raised:
            if snippet.output is None:
                raise
            error = raised
    actual = printed.getvalue()
    if error is not None:
        actual += f"{type(error).__name__}: {error}"
    if snippet.output is None or (snippet.output_mark == "on CPU" and harness.ON_GPU):
        return
    expected = ".*".join(re.escape(one_line(part)) for part in snippet.output.split("..."))
    assert re.fullmatch(expected, one_line(actual)), (
        f"{place} says\n{snippet.output}\nbut gives\n{actual}"
    )


def one_line(text):
    """Replace runs of white space by single spaces, because documents may break lines."""
    return " ".join(text.split())


@functools.cache
def opening_names(document):
    namespace = {"__name__": "__main__"}
    run(snippets_of(document)[0], namespace)
    return namespace


def run_section(document, section, *, with_gpu):
    if len(jax.devices()) < 2:
        pytest.skip("snippets need two devices")
    first, *_ = snippets = snippets_of(document)
    namespace = dict(opening_names(document))
    for snippet in snippets:
        if snippet.section == section and snippet is not first:
            if "import orbax" in snippet.code:  # tensorstore has no wheel for Python 3.15
                pytest.importorskip("orbax.checkpoint")
            if with_gpu or snippet.mark != "gpu":
                run(snippet, namespace)
    for name in ("tune", "step", "balanced_step", "placed_step"):
        if hasattr(namespace.get(name), "_cache_size"):
            assert namespace[name]._cache_size() == 1, f"{name} compiles again"


def sections(wanted):
    """Return the sections (document, section) that have a snippet for which `wanted` is True."""
    found = [(s.document, s.section) for d in DOCUMENTS for s in snippets_of(d) if wanted(s)]
    return list(dict.fromkeys(found))


@readers_programs
@pytest.mark.parametrize(("document", "section"), sections(lambda s: s.mark == ""))
def test_snippets_do_what_the_document_says(document, section):
    run_section(document, section, with_gpu=False)


@readers_programs
@pytest.mark.gpu
@pytest.mark.parametrize(("document", "section"), sections(lambda s: s.mark == "gpu"))
def test_snippets_for_gpus_do_what_the_document_says(document, section):
    try:
        run_section(document, section, with_gpu=True)
    finally:
        opening_names(document)["group"].close()  # the next test needs a working group


@pytest.mark.parametrize("snippet", [s for d in DOCUMENTS for s in snippets_of(d) if s.skip_reason])
def test_snippets_that_are_not_run_say_why(snippet):
    run(snippet, {})  # a skipped snippet is only compiled
    pytest.skip(f"{snippet.document}:{snippet.line}: {snippet.skip_reason}")


@pytest.mark.parametrize(("document", "most"), MOST_LINES.items())
def test_documents_are_short(document, most):
    assert len((ROOT / document).read_text().splitlines()) <= most


CODE_SPAN = re.compile(r"`([^`\n]+)`")
REPOSITORY_PATH = re.compile(r"(?:benchmarks|cuda|docs|examples|jax_moe_a2a|tests|tools)/[\w./*-]+")


def shell_text(document):
    """Return the text of the bash fences, plain fences and code spans of a document."""
    source = (ROOT / document).read_text()
    fences = [m["text"] for m in FENCE.finditer(source) if m["kind"] in ("", "bash")]
    return "\n".join([*fences, *CODE_SPAN.findall(FENCE.sub("", source))])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_name_things_that_exist(document):
    text = shell_text(document)
    rules = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"\bmake ([a-z][\w-]*)", text):
        assert target in rules, f"make {target}"
    for module in re.findall(r"\bpython3? -m ([\w.]+)", text):
        if module.split(".")[0] in ("benchmarks", "tests", "jax_moe_a2a"):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for program in re.findall(r"\bpython3? (\w[\w/]*\.py)\b", text):
        assert (ROOT / program).exists() or program == "train.py", program


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_code_exist(document):
    for path in REPOSITORY_PATH.findall(shell_text(document)):
        path = path.rstrip(".")
        assert any(ROOT.glob(path)) or path.startswith(("benchmarks/results/.", "tests/.")), path


def test_the_api_pages_list_every_public_name_once():
    pages = "\n".join(path.read_text() for path in ROOT.glob("docs/api/*.md"))
    listed = re.findall(r"^::: jax_moe_a2a\.(\w+)$", pages, re.M)
    modules = [name for name, value in vars(ma).items() if isinstance(value, types.ModuleType)]
    public = [name for name in vars(ma) if not name.startswith("_") and name not in modules]
    assert sorted(listed) == sorted(public)
    table = (ROOT / "docs/api/index.md").read_text()
    assert [name for name in public if f"`{name}`" not in table] == []


def test_every_page_is_in_the_navigation_of_the_site():
    config = (ROOT / "mkdocs.yml").read_text()
    for page in ROOT.glob("docs/**/*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in config, page


def test_the_gallery_shows_every_picture_once():
    def pictures_of(page):
        shown = re.findall(r"^!\[[^\]]*\]\(([^)]+)\)$", page.read_text(), re.M)
        return [(page.parent / name).resolve() for name in shown]

    gallery, *others = sorted(ROOT.glob("docs/**/*.md"), key=lambda page: page.stem != "gallery")
    shown = [picture for page in (*others, ROOT / "README.md") for picture in pictures_of(page)]
    shown += ROOT.glob("benchmarks/results/**/*.png")
    assert sorted(pictures_of(gallery)) == sorted({path.resolve() for path in shown})


INTEGRATIONS = ("linen", "maxtext", "nnx", "transformers")


def integrations():
    """Return a dict from the public names of the modules in `integrations` to their values."""
    modules = [importlib.import_module(f"jax_moe_a2a.integrations.{name}") for name in INTEGRATIONS]
    exported = "jax_moe_a2a.integrations._quantized"  # other modules export its names
    return {
        f"{module.__name__.removeprefix('jax_moe_a2a.')}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") in (module.__name__, exported)
    }


def test_the_pages_of_integrations_list_every_public_name():
    pages = "\n".join(path.read_text() for path in ROOT.glob("docs/integrations/*.md"))
    listed = re.findall(r"^::: jax_moe_a2a\.([\w.]+)$", pages, re.M)
    assert sorted(listed) == sorted(integrations())
    files = {path.stem for path in (ROOT / "jax_moe_a2a/integrations").glob("[a-z]*.py")}
    assert files == set(INTEGRATIONS)


def test_integrations_need_flax_only_where_they_are_for_flax():
    names = [name for name in INTEGRATIONS if name not in ("linen", "nnx")]
    code = "import sys; sys.modules['flax'] = None; from jax_moe_a2a.integrations import "
    done = subprocess.run([sys.executable, "-c", code + ", ".join(names)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def public_callables():
    """Return (name, function) pairs of all public functions and methods of the package."""
    found = {name: value for name, value in integrations().items() if inspect.isfunction(value)}
    for name, value in vars(ma).items():
        if name.startswith("_"):
            continue
        if inspect.isfunction(value):
            found[name] = value
        elif inspect.isclass(value) and value.__module__.startswith("jax_moe_a2a"):
            ours = [base for base in value.__mro__ if base.__module__.startswith("jax_moe_a2a")]
            for attribute, method in [item for base in ours for item in vars(base).items()]:
                if inspect.isfunction(method) and not attribute.startswith("_"):
                    found.setdefault(f"{name}.{attribute}", method)
    return found.items()


NO_VERBS = ("A", "An", "The", "What", "How", "Whether", "Where", "As", "All", "Of", "This")


def test_docstrings_of_public_functions_begin_with_a_verb():
    for name, value in public_callables():
        first = (inspect.getdoc(value) or "").split(" ")[0]
        assert first[:1].isupper() and first not in NO_VERBS, f"{name}: {first}"
        assert not first.endswith("s"), f"{name}: {first}"


UNTYPED = (inspect.Signature.empty, "Any")


def test_public_functions_document_and_type_every_parameter():
    for name, function in public_callables():
        doc = inspect.getdoc(function)
        signature = inspect.signature(function)
        for parameter in signature.parameters.values():
            if parameter.name == "self" or "." in name and "Args:" not in doc:
                continue
            assert re.search(rf"^  \*{{0,2}}{parameter.name}: ", doc, re.M), f"{name}: {parameter}"
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:  # another function checks them
                assert parameter.annotation not in UNTYPED, f"{name}: {parameter}"
        assert signature.return_annotation not in UNTYPED, name
        if "." not in name and signature.parameters:
            assert "Returns:" in doc, name


@readers_programs
def test_public_functions_have_a_worked_example():
    for name in EXAMPLES:
        doc = getattr(ma, name).__doc__
        assert "Example:" in doc, name
        code = textwrap.dedent(doc.partition("Example:")[2].partition("```python\n")[2])
        assert "```" in code, name
        code, _, rest = code.partition("```")
        run(Snippet(f"ma.{name}", "", 1, code, "", expected_of(rest)), {})


EXAMPLES = (
    *("route", "dispatch", "combine", "overlap"),
    *("Group", "memory_estimate", "Exchange", "expert_load"),
    *("Router", "TopK", "load_balancing_loss", "router_z_loss", "update_select_bias"),
    "quantile_select_bias",
    *("moe", "moe_partition_specs", "init_moe"),
)


def expected_of(rest):
    match = re.search(r"```text\n(.*?)```", rest, re.S)
    return match and textwrap.dedent(match[1])


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    source = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)]+)\)", source):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        linked = (ROOT / document).parent / path if path else ROOT / document
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            assert anchor in map(anchor_of, headings), target


def anchor_of(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_a_snippet_that_prints_something_else_is_noticed():
    with pytest.raises(AssertionError, match="but gives"):
        run(Snippet("README.md", "", 1, "print(1 + 1)", "", "3\n"), {})
