"""Full-text search over a corpus: BM25 by tantivy over stemmed English, with the title counted in.

A query is broken into terms and put together from term queries; nothing is parsed, so no query can be malformed. Each term counts where
it fits better, in the title or in title and text together; and a document whose whole title occurs in the query, word for word, gets a
further bonus, since that is the one the query names. Equal scores are ordered by the document's place in the corpus.

`open_index` keeps indexes on disk, each built once and found by the digest of the corpus and the layout. An index is built in a folder beside
its place and renamed when complete, so a half-built one is never seen. A lock keeps other processes from building the same one meanwhile. A
list of its files with sizes and digests reveals a damaged index, which is built again.
"""

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import tantivy
from tantivy import Filter, Occur, Query, TextAnalyzer, TextAnalyzerBuilder, Tokenizer

from tether.core.config import cache_folder
from tether.core.errors import BadInput, StorageError
from tether.core.temporary import temporary_folder
from tether.envs.dataset import with_progress
from tether.envs.searchqa.corpus import Corpus, Document, Hit, readable

QUESTION_WORDS = ["what", "which", "who", "whom", "whose", "when", "where", "why", "how", "did", "does", "do"]
"""As good as stop words in a question, and no English stop-word list has them all."""
LAYOUT = f"2 simple lower fold english-stop {' '.join(QUESTION_WORDS)} english-stem {version('tantivy')}"
"""Everything that decides what an index of the same documents holds; part of its name in the cache."""

MAX_TERM_CHARS = 40
MAX_QUERY_TERMS = 96
"""Terms of a query beyond these are not looked up."""
MAX_TITLE_TERMS = 6
"""Titles of more terms get no bonus for being named whole."""
TITLE_BONUS = 1.5
"""Weight of a title named whole, in units of BM25; chosen on HotpotQA and MuSiQue samples (docs/environments/searchqa.md)."""
MAX_TIES = 1024
"""Documents of equal score that are put in order where they straddle the end of the list."""
WRITER_BYTES = 64_000_000

_DISAMBIGUATION = re.compile(r"\s*\([^()]*\)\s*$")
"""What follows the name in a title such as "Mercury (planet)"."""


@lru_cache(maxsize=1)
def _analyzer() -> TextAnalyzer:
    return (
        TextAnalyzerBuilder(Tokenizer.simple())
        .filter(Filter.remove_long(MAX_TERM_CHARS))
        .filter(Filter.lowercase())
        .filter(Filter.ascii_fold())
        .filter(Filter.stopword("english"))
        .filter(Filter.custom_stopword(QUESTION_WORDS))
        .filter(Filter.stemmer("english"))
        .build()
    )


def _schema() -> tantivy.Schema:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field("title", tokenizer_name="stemmed", index_option="freq")
    builder.add_text_field("all", tokenizer_name="stemmed", index_option="freq")
    builder.add_text_field("whole_title", tokenizer_name="raw", index_option="basic")
    builder.add_bytes_field("document", stored=True)
    builder.add_unsigned_field("place", stored=True)
    return builder.build()


def write_index(folder: Path, documents: Iterable[Document]) -> int:
    """Index documents into an empty folder; returns how many there were. One thread, so that the same documents give the same index."""
    analyzer = _analyzer()
    index = tantivy.Index(_schema(), path=str(folder))
    index.register_tokenizer("stemmed", analyzer)
    writer = index.writer(heap_size=WRITER_BYTES, num_threads=1)
    place = -1
    try:
        for place, document in enumerate(with_progress(documents, "searchqa: indexing the corpus", "documents")):
            writer.add_document(_entry(place, document, analyzer))
        writer.commit()
    finally:
        writer.wait_merging_threads()  # also after an error: nothing may write into the folder any more
    return place + 1


def _entry(place: int, document: Document, analyzer: TextAnalyzer) -> tantivy.Document:
    entry = tantivy.Document()
    entry.add_text("title", document.title)
    entry.add_text("all", f"{document.title}\n{document.text}")
    entry.add_text("whole_title", " ".join(analyzer.analyze(_DISAMBIGUATION.sub("", document.title))))
    entry.add_bytes("document", f"{document.id}\n{document.title}\n{document.text}".encode())
    entry.add_unsigned("place", place)
    return entry


class SearchIndex:
    """An index on disk, open for searching; any number of threads may share it."""

    def __init__(self, folder: Path) -> None:
        index = tantivy.Index.open(str(folder))
        index.config_reader("manual")  # it never changes, so there is nothing to load again
        self._schema = index.schema
        self._searcher = index.searcher()

    def __len__(self) -> int:
        return int(self._searcher.num_docs)

    def search(self, query: str, top_k: int) -> list[Hit]:
        """The best documents first; none if the query has no term that occurs anywhere."""
        terms = _analyzer().analyze(readable(query))[:MAX_QUERY_TERMS]  # in order, repeated ones included
        if not terms or top_k < 1:
            return []
        wanted = self._query(terms)
        limit = top_k + 1
        while True:
            hits = self._searcher.search(wanted, limit, count=False).hits
            tied_at_the_edge = len(hits) == limit and hits[-1][0] == hits[top_k - 1][0]
            if not tied_at_the_edge or limit >= top_k + MAX_TIES:
                break
            limit = min(2 * limit, top_k + MAX_TIES)
        found = [(score, self._searcher.doc(address)) for score, address in hits]
        found.sort(key=lambda pair: (-pair[0], pair[1]["place"][0]))
        return [Hit(_stored(entry), score) for score, entry in found[:top_k]]

    def _query(self, terms: Sequence[str]) -> Query:
        schema = self._schema
        parts = [
            (
                Occur.Should,
                Query.disjunction_max_query(
                    [Query.term_query(schema, "all", term, "freq"), Query.term_query(schema, "title", term, "freq")]
                ),
            )
            for term in dict.fromkeys(terms)
        ]
        runs = dict.fromkeys(
            " ".join(terms[start:end])
            for start in range(len(terms))
            for end in range(start + 1, min(start + MAX_TITLE_TERMS, len(terms)) + 1)
        )
        titles = Query.boolean_query([(Occur.Should, Query.term_query(schema, "whole_title", run, "basic")) for run in runs])
        return Query.boolean_query([*parts, (Occur.Should, Query.boost_query(titles, TITLE_BONUS))])


def _stored(entry: tantivy.Document) -> Document:
    id, title, text = entry["document"][0].decode().split("\n", 2)
    return Document(id, title, text)


FILES = "files.json"
MAX_HASHED_BYTES = 64_000_000
"""Of larger files only the size is checked: reading them whole would take longer than opening the index is worth."""


def open_index(corpus: Corpus) -> SearchIndex:
    """The index of a corpus, built if it is not there or damaged."""
    key = hashlib.blake2b(f"{LAYOUT}\n{corpus.digest}".encode(), digest_size=16).hexdigest()
    folder = cache_folder("search") / key
    if not _is_whole(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _lock(folder.with_suffix(".lock")):
                if not _is_whole(folder):  # else somebody built it while we waited
                    _build(corpus, folder)
        except BadInput:  # about the corpus, not about the index
            raise
        except (OSError, ValueError) as error:  # tantivy reports a full disk as a ValueError
            raise StorageError(
                f"cannot keep the search index in '{folder.parent}': {getattr(error, 'strerror', None) or error}; set TETHER_CACHE to a folder with room"
            ) from error
    return SearchIndex(folder)


def _build(corpus: Corpus, folder: Path) -> None:
    """Replace the content of the folder by a new index."""
    with temporary_folder(f"{folder.name}.building-", folder.parent) as place:
        building = place / "index"
        building.mkdir()
        write_index(building, corpus.read())
        (building / FILES).write_text(json.dumps(_described(building)), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        try:
            building.rename(folder)
        except OSError:
            if not _is_whole(folder):  # else another process, not held by the lock, was first
                raise


def _described(folder: Path) -> dict[str, list[int | str]]:
    """Size and digest of every file of an index but the list itself and tantivy's own locks."""
    described: dict[str, list[int | str]] = {}
    for path in sorted(folder.iterdir()):
        if path.name != FILES and path.suffix != ".lock":
            size = path.stat().st_size
            described[path.name] = [
                size,
                hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if size <= MAX_HASHED_BYTES else "",
            ]
    return described


def _is_whole(folder: Path) -> bool:
    try:
        listed = json.loads((folder / FILES).read_text(encoding="utf-8"))
        return bool(listed) and listed == _described(folder)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock among processes. Where the file system has none, two processes may build the same index, and one of them is kept."""
    with path.open("wb") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
