"""Hooks of the documentation site (`mkdocs.yml`): files outside of docs/ that its pages link to are pages of the site as well.

The documents are written for the repository's own view, so they link to configs, examples, experiments and other files by relative paths that
leave docs/. MkDocs knows only docs/. Here every such file, and what it links to in turn, gets a page under `repository/`: Markdown as it is, a
notebook as its cells, a picture as a copy, anything else as a listing. The links are rewritten to those pages; the documents stay as they are.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
OUTSIDE = "repository/"
"""Where the site keeps what is outside of docs/."""

LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".jsonl": "json"}
PICTURES = (".png", ".svg")
_CODE = re.compile(r"(^```.*?^```|^    .*?$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that the pages reach by their links."""
    waiting = [f"{DOCS}{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        for target in _targets(waiting.pop()):
            if target not in seen and not target.startswith(DOCS):
                seen.add(target)
                waiting.append(target)
                files.append(_file(target, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links that lead out of docs/, and those of pages that come from outside of it."""
    place = page.file.src_uri
    source = place.removeprefix(OUTSIDE) if place.startswith(OUTSIDE) else f"{DOCS}{place}"

    def rewritten(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        inside = target is not None and target.startswith(DOCS) and source.startswith(DOCS)
        if target is None or inside:
            return link[0]
        return f"{link[1]}{posixpath.relpath(_place(target), posixpath.dirname(place) or '.')}{link[3]}"

    parts = _CODE.split(markdown)
    return "".join(part if number % 2 else _LINK.sub(rewritten, part) for number, part in enumerate(parts))


def _targets(source: str) -> Iterator[str]:
    """The files of the repository that a Markdown file links to."""
    if source.endswith(".md"):
        for link in _LINK.finditer(_CODE.sub("", (ROOT / source).read_text(encoding="utf-8"))):
            target = _target(source, link[2])
            if target is not None:
                yield target


def _target(source: str, link: str) -> str | None:
    """A link as a path from the repository's root; of a folder, its README. None for addresses, and for what is not there: MkDocs says so."""
    if re.match(r"[a-z]+:", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    return path if (ROOT / path).is_file() else None


def _place(target: str) -> str:
    """Where the site has a file of the repository."""
    if target.startswith(DOCS):
        return target.removeprefix(DOCS)
    return OUTSIDE + target if target.endswith((".md", *PICTURES)) else f"{OUTSIDE}{target}.md"


def _file(target: str, config: MkDocsConfig) -> File:
    """The file of the site for a file of the repository."""
    path = ROOT / target
    if target.endswith((".md", *PICTURES)):
        return File.generated(config, _place(target), abs_src_path=str(path))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return File.generated(
            config, _place(target), content="\n\n".join(_listing(body, "python") if kind == "code" else body for kind, body in cells)
        )
    return File.generated(config, _place(target), content=f"# {target}\n\n{_listing(text, LANGUAGES.get(path.suffix, 'text'))}")


def _listing(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````"
