"""Hooks of MkDocs for the documentation site (`mkdocs.yml`): pages made of other files, and formulas.

- A link out of `docs/` leads to a page made of its target: `CONTRIBUTING.md`, `CHANGELOG.md`, a notebook, the
  listing of a source file, or a list of the modules in a folder. So the same links work in the repository.
- The navigation gets all decisions in order, and the other pages that it does not name.
- Formulas, `$...$` and `$$...$$`, become MathML, which browsers draw without a script.
"""

import ast
import base64
import html
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_NOT_FOUND_BY_SEARCH = "---\nsearch:\n  exclude: true\n---\n"
_LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}
_ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """Adds pages made of other files, and completes the navigation."""
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        files.append(File.generated(config, _ROOT_PAGES[name], content=_root_document(name)))
    decisions = sorted(file.src_uri for file in files if re.match(r"decisions/\d", file.src_uri))
    files.append(File.generated(config, "decisions/index.md", content=_list_of_decisions(decisions)))
    _add_linked(files, config)
    _complete(config.nav, files, decisions)
    return files


def _add_linked(files: Files, config: Any) -> None:
    """Adds a page for each file and folder outside `docs/` that any page links to, added pages included."""
    todo = [file for file in files if file.src_uri.endswith(".md")]
    while todo:
        file = todo.pop()
        for match in _LINK.finditer(_FENCE.sub("", file.content_string)):
            path = _outside(file.src_uri, match["target"])
            if path is None or not (ROOT / path).exists():
                continue  # a link to a page, or a broken link, of which MkDocs warns
            uri = _page_of(path)
            if files.get_file_from_path(uri) is None:
                page = File.generated(config, uri, content=_rendered(ROOT / path))
                files.append(page)
                todo.append(page)


def _complete(nav: list, files: Files, decisions: list[str]) -> None:
    """Adds the missing pages to the navigation, except those of source files."""
    sections = {title: content for entry in nav for title, content in entry.items()}
    sections["Project"].append({"Decisions": ["decisions/index.md", *decisions]})
    named = set(_leaves(nav))
    for file in sorted(files.documentation_pages(), key=lambda file: file.src_uri):
        if file.src_uri.startswith("notebooks/"):
            sections["How to"].append(file.src_uri)
        elif file.src_uri.startswith("source/"):
            file.inclusion = type(file.inclusion).NOT_IN_NAV
        elif file.src_uri not in named:
            folder = file.src_uri.partition("/")[0]
            section = {"algorithms": "Algorithms", "how-to": "How to", "reference": "Reference"}
            sections[section.get(folder, "Explanation")].append(file.src_uri)


def _leaves(nav: Any) -> list[str]:
    """The paths of all pages in a part of the navigation."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [leaf for part in parts for leaf in _leaves(part)]


def _list_of_decisions(uris: list[str]) -> str:
    """The page that lists the decisions by title."""
    lines = []
    for uri in uris:
        first = (ROOT / "docs" / uri).read_text().splitlines()[0]
        lines.append(f"- [{first.lstrip('# ')}]({PurePosixPath(uri).name})")
    return "# Decisions\n\nChoices that someone could question, each with its reason.\n\n" + "\n".join(lines)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Makes links out of `docs/` lead to the pages that `on_files` added."""

    def page_link(match: re.Match[str]) -> str:
        path = _outside(page.file.src_uri, match["target"])
        if path is None or files.get_file_from_path(_page_of(path)) is None:
            return match[0]
        here = PurePosixPath(page.file.src_uri).parent
        anchor = match["anchor"] if path.endswith(".md") else ""
        return os.path.relpath(_page_of(path), here) + (anchor or "")

    return _outside_of_code(markdown, lambda text: _LINK.sub(page_link, text))


def _outside(uri: str, target: str) -> str | None:
    """The target of a link out of `docs/`, as a path from the repository's root; None for other links."""
    if ":" in target or target.startswith("/"):
        return None
    path = os.path.normpath(PurePosixPath("docs") / PurePosixPath(uri).parent / target)
    if path == "docs/decisions":  # GitHub lists this folder; the site has a page for it
        return path
    return None if path.startswith(("docs/", "..")) else path


def _page_of(path: str) -> str:
    """The page of a file or folder, as a path from `docs/`; `path` starts at the repository's root."""
    if path == "docs/decisions":
        return "decisions/index.md"
    if path in _ROOT_PAGES:
        return _ROOT_PAGES[path]
    if path.endswith(".ipynb"):
        return path.removesuffix(".ipynb") + ".md"
    return f"source/{path}.md"


def _root_document(name: str) -> str:
    """The text of a document in the root, with its links as they are from `docs/`."""

    def link_from_docs(match: re.Match[str]) -> str:
        target = match["target"]
        if ":" in target:
            return match[0]
        target = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        return target + (match["anchor"] or "")

    return _outside_of_code((ROOT / name).read_text(), lambda text: _LINK.sub(link_from_docs, text))


def _outside_of_code(markdown: str, change: Any) -> str:
    """Applies `change` to all parts of the text outside of code blocks."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _rendered(path: Path) -> str:
    """The page of a file or a folder, as Markdown."""
    if path.suffix == ".ipynb":
        return _notebook(path)
    title = f"# `{path.relative_to(ROOT)}`\n\n"
    if path.is_dir():
        return _NOT_FOUND_BY_SEARCH + title + _folder(path)
    language = _LANGUAGES.get(path.suffix, "text")
    return f"{_NOT_FOUND_BY_SEARCH}{title}````{language}\n{path.read_text()}````\n"


def _folder(path: Path) -> str:
    """A list of a folder's modules, with the first paragraphs of their docstrings."""
    lines = []
    for part in sorted(path.iterdir()):
        code = part / "__init__.py" if part.is_dir() else part
        if part.name.startswith((".", "__")) or not code.is_file() or code.suffix != ".py":
            continue
        first = (ast.get_docstring(ast.parse(code.read_text())) or "").partition("\n\n")[0]
        lines.append(f"- `{part.name}{'/' if part.is_dir() else ''}`: " + first.replace("\n", " "))
    return "\n".join(lines) + "\n"


def _notebook(path: Path) -> str:
    """The cells of a notebook with their outputs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += filter(None, map(_output, _joined(cell["outputs"])))
    where = path.relative_to(ROOT)
    return "\n\n".join([parts[0], f"*This page is the notebook `{where}`.*", *parts[1:]]) + "\n"


def _joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A cell's outputs, in which consecutive pieces of one stream (such as stdout) are joined."""
    joined: list[dict[str, Any]] = []
    for output in outputs:
        if joined and output.get("name") and output.get("name") == joined[-1].get("name"):
            joined[-1] = {**output, "text": [*joined[-1]["text"], *output["text"]]}
        else:
            joined.append(output)
    return joined


def _output(output: dict[str, Any]) -> str:
    """An output as a picture or a block of text; "" if it is neither."""
    data = output.get("data", {})
    if "image/svg+xml" in data:
        drawing = "".join(data["image/svg+xml"]).encode()
        return f"![](data:image/svg+xml;base64,{base64.b64encode(drawing).decode()})"
    if "image/png" in data:
        return f"![](data:image/png;base64,{''.join(data['image/png']).strip()})"
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```" if text else ""


def on_page_content(html_text: str, **_: Any) -> str:
    """Replaces formulas by MathML."""

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[1] == "div" else "inline"
        return convert(html.unescape(match[2]).strip(), display=display)

    return _FORMULA.sub(mathml, html_text)
