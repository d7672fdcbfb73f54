"""Documents to search, and the file formats they come in.

A corpus is a digest of its content and a way to read its documents: where an index for that digest exists, the documents are not read. Formats,
identified row by row: Search-R1's `{"id", "contents"}` with contents `"Title"` newline text; `{"title", "text"}`; plain strings; and one
JSON object from title to text or to a list of sentences, as HotpotQA corpora come.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput
from tether.envs.dataset import BadRows, Row, RowError, iter_instances

ENV = "searchqa"
DEFAULT_CORPUS = "the built-in encyclopedia"

_TEXT_FIELDS = ("text", "paragraph_text", "content")


@dataclass(frozen=True, slots=True)
class Document:
    """One document."""

    id: str
    title: str
    """May be empty."""
    text: str

    @property
    def contents(self) -> str:
        """Title and text in one string, as Search-R1 writes them; `of_contents` reads it back."""
        if not self.title and not _has_title_line(self.text):
            return self.text
        return f'"{self.title}"\n{self.text}'

    @classmethod
    def of_contents(cls, id: str, contents: str) -> "Document":
        """From Search-R1's form; without a first line in quotation marks there is no title."""
        contents = readable(contents)
        if not _has_title_line(contents):
            return cls(id, "", contents)
        title, _, text = contents.partition("\n")
        return cls(id, title[1:-1], text)


@dataclass(frozen=True, slots=True)
class Hit:
    """A document found, and how well it fits; greater is better."""

    document: Document
    score: float


@dataclass(frozen=True, slots=True)
class Corpus:
    """What can be searched."""

    digest: str
    """Changes with the content."""
    read: Callable[[], Iterable[Document]]
    """The documents, in their order."""


def of_documents(documents: list[Document]) -> Corpus:
    """A corpus in memory."""
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        digest.update(json.dumps([document.id, document.title, document.text]).encode() + b"\n")
    return Corpus(digest.hexdigest(), lambda: documents)


def of_file(source: str, bad_rows: BadRows) -> Corpus:
    """The corpus of a file, or of a data set by name. A file is hashed as it lies there, and read only if it has to be indexed."""
    path = Path(source).expanduser()
    if not path.is_file():
        return of_documents(list(_documents(source, bad_rows)))
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise BadInput(f"{ENV}: cannot read corpus='{source}': {error.strerror}; check the path") from error
    return Corpus(f"{digest.hexdigest()}-{bad_rows}", lambda: _documents(source, bad_rows))


def readable(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON may hold and neither the index nor HTTP takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def joined(sentences: Any) -> str:
    """A text from a list of sentences, or a text as it is; RowError for anything else."""
    if isinstance(sentences, str):
        return readable(sentences)
    if isinstance(sentences, list) and all(isinstance(sentence, str) for sentence in sentences):
        return readable(" ".join(stripped for sentence in sentences if (stripped := sentence.strip())))
    raise RowError(f"has a document of type {type(sentences).__name__}; expected a text or a list of sentences")


def one_line(title: Any) -> str:
    """A title; RowError if it is no text."""
    if not isinstance(title, str):
        raise RowError(f"has a title of type {type(title).__name__}; expected a text")
    return readable(" ".join(title.split()))


def _has_title_line(contents: str) -> bool:
    first, newline, _ = contents.partition("\n")
    return bool(newline) and len(first) >= 2 and first[0] == first[-1] == '"'


def _documents(source: str, bad_rows: BadRows) -> Iterator[Document]:
    """The documents one by one: a corpus may be larger than memory. One without an id is known by its number."""
    rows = iter_instances(source, _document, env=ENV, default=DEFAULT_CORPUS, option="corpus", bad_rows=bad_rows)
    for number, document in enumerate(rows):
        yield document if document.id else replace(document, id=str(number))


def _document(row: Row) -> Document:
    value = row.value
    if isinstance(value, str):
        return Document.of_contents("", value)
    if isinstance(value, tuple):  # an entry of a JSON object
        title, sentences = value
        return Document("", one_line(title), joined(sentences))
    if not isinstance(value, dict):
        raise RowError(f"is a {type(value).__name__}; expected an object with contents, or with title and text")
    id = one_line(str(value.get("id", "")))
    if isinstance(value.get("contents"), str):
        return Document.of_contents(id, value["contents"])
    text = next((value[name] for name in _TEXT_FIELDS if name in value), None)
    if text is None:
        raise RowError(f"has neither contents nor text (it has {', '.join(map(str, value)) or 'nothing'})")
    return Document(id, one_line(value.get("title", "")), joined(text))
