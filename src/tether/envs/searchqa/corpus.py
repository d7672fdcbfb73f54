"""Documents to search, the file formats they come in, and questions about them.

A corpus is a digest of its content and a way to read its documents: where an index for that digest exists, the documents are not read. Formats,
identified row by row: Search-R1's `{"id", "contents"}` with contents `"Title"` newline text; `{"title", "text"}`, also as BEIR (`_id`) and
KILT (`wikipedia_title`, a list of paragraphs) have it; plain strings; and one JSON object from title to text or to a list of sentences, as
HotpotQA corpora come. A whole article is split into passages: a search shows the beginning of a document, and what lies behind it would never
be seen.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.dataset import BadRows, Row, RowError, iter_instances, with_progress

ENV = "searchqa"
DEFAULT_CORPUS = "the built-in encyclopedia"

PASSAGE_WORDS = 120
"""Of a passage; about 700 characters, which the default `document_chars` shows whole."""
ARTICLE_WORDS = 300
"""A longer document is an article; a shorter one is a paragraph, and stays as it is."""

_TEXT_FIELDS = ("text", "paragraph_text", "content")
_TITLE_FIELDS = ("title", "wikipedia_title")
_ID_FIELDS = ("id", "_id", "wikipedia_id")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_KILT_MARK = re.compile(r"^(?:Section::::|BULLET::::-?)\s*")


Generator = Callable[[int, Split], "Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question to be answered by searching."""

    text: str
    answers: tuple[str, ...]
    """Any of them is right; the first is the one to show."""
    gold_titles: tuple[str, ...] = ()
    """Titles of the documents that hold the answer, where known; for measuring retrieval."""
    kind: str = ""
    """What sort of question it is, where known: "bridge", "comparison"."""

    @property
    def fingerprint(self) -> str:
        return self.text

    @property
    def summary(self) -> str:
        """In a line, for people."""
        return f"{self.text} -> {' | '.join(self.answers)}"


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


def of_file(source: str, bad_rows: BadRows, passage_words: int = PASSAGE_WORDS) -> Corpus:
    """The corpus of a file, or of a data set by name. A file is hashed as it lies there, and read only if it has to be indexed."""
    path = Path(source).expanduser()
    if not path.is_file():
        return of_documents(list(_documents(source, bad_rows, passage_words)))
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            for block in with_progress(iter(lambda: file.read(1 << 20), b""), f"{ENV}: hashing {source}", "MiB"):
                digest.update(block)
    except OSError as error:
        raise BadInput(f"{ENV}: cannot read corpus='{source}': {error.strerror}; check the path") from error
    return Corpus(f"{digest.hexdigest()}-{bad_rows}-{passage_words}", lambda: _documents(source, bad_rows, passage_words))


def passages(text: str, limit: int) -> list[str]:
    """An article in passages of at most `limit` words, whole sentences as far as possible; a paragraph, or anything with limit 0, whole.

    A sentence of more words than a passage may have is cut.
    """
    if not limit or len(text.split()) <= ARTICLE_WORDS:
        return [text]
    found: list[list[str]] = [[]]
    for sentence in _SENTENCE_END.split(text.strip()):
        words = sentence.split()
        if found[-1] and len(found[-1]) + len(words) > limit:
            found.append([])
        found[-1] += words
        while len(found[-1]) > limit:
            found[-1:] = [found[-1][:limit], found[-1][limit:]]
    return [" ".join(words) for words in found if words]


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


def _documents(source: str, bad_rows: BadRows, passage_words: int) -> Iterator[Document]:
    """The documents one by one: a corpus may be larger than memory. One without an id is known by its number, the passages of an article by
    its id and theirs: "12-1", "12-2"."""
    rows = iter_instances(source, _document, env=ENV, default=DEFAULT_CORPUS, option="corpus", bad_rows=bad_rows)
    for number, document in enumerate(rows):
        named = document if document.id else replace(document, id=str(number))
        parts = passages(named.text, passage_words)
        if len(parts) == 1:
            yield named
        else:
            yield from (replace(named, id=f"{named.id}-{place}", text=part) for place, part in enumerate(parts, 1))


def _document(row: Row) -> Document:
    value = row.value
    if isinstance(value, str):
        return Document.of_contents("", value)
    if isinstance(value, tuple):  # an entry of a JSON object
        title, sentences = value
        return Document("", one_line(title), joined(sentences))
    if not isinstance(value, dict):
        raise RowError(f"is a {type(value).__name__}; expected an object with contents, or with title and text")
    id = one_line(str(next((value[name] for name in _ID_FIELDS if value.get(name) is not None), "")))
    if isinstance(value.get("contents"), str):
        return Document.of_contents(id, value["contents"])
    text = next((value[name] for name in _TEXT_FIELDS if name in value), None)
    if text is None:
        raise RowError(
            f"has neither contents nor text (it has {', '.join(map(str, value)) or 'nothing'}); expected contents, title and text, or "
            "wikipedia_title and text"
        )
    title = one_line(next((value[name] for name in _TITLE_FIELDS if name in value), ""))
    return Document(id, title, _article(title, text) if "wikipedia_title" in value else joined(text))


def _article(title: str, paragraphs: Any) -> str:
    """The text of an article of KILT: without its title, which is the first paragraph, and without the marks of headings and lists."""
    if not isinstance(paragraphs, list) or not all(isinstance(paragraph, str) for paragraph in paragraphs):
        return joined(paragraphs)
    kept = [_KILT_MARK.sub("", paragraph.strip()) for paragraph in paragraphs]
    return joined(kept[1:] if kept and kept[0] == title else kept)
