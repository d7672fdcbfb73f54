"""Full-text search by tantivy: BM25 over one text per product, English stemming, at most 50 hits.

The index is in memory: two thousand products take a fraction of a second, and every environment of a process shares one. A query is a
bag of stemmed words made with the index's own analyser, never parsed as a query language, so no text can be a syntax error. Equal
scores are ordered by the products' own order, so that a search gives the same page everywhere.
"""

from collections.abc import Sequence

import tantivy

MOST_HITS = 50
MOST_TERMS = 1024
"""Words of a query that count; Lucene, which the original uses, takes as many."""

_FIELD = "contents"
_WRITER_BYTES = 50_000_000


class TextIndex:
    """Which of some texts fit a query best."""

    def __init__(self, texts: Sequence[str]) -> None:
        builder = tantivy.SchemaBuilder()
        builder.add_text_field(_FIELD, tokenizer_name="english", index_option="freq")
        builder.add_unsigned_field("row", stored=True)
        self._schema = builder.build()
        self._analyser = _english()
        index = tantivy.Index(self._schema)
        index.register_tokenizer("english", self._analyser)
        # One thread: texts are then indexed in their order.
        writer = index.writer(heap_size=_WRITER_BYTES, num_threads=1)
        for row, text in enumerate(texts):
            document = tantivy.Document()
            document.add_text(_FIELD, _encodable(text))
            document.add_unsigned("row", row)
            writer.add_document(document)
        writer.commit()
        writer.wait_merging_threads()
        index.reload()
        self._searcher = index.searcher()

    def search(self, words: str) -> list[int]:
        """The places of the best texts, best first; nothing for a query without a word that counts."""
        terms = self._analyser.analyze(_encodable(words))[:MOST_TERMS]
        if not terms:
            return []
        clauses = [(tantivy.Occur.Should, tantivy.Query.term_query(self._schema, _FIELD, term)) for term in terms]
        hits = self._searcher.search(tantivy.Query.boolean_query(clauses), MOST_HITS, count=False).hits
        placed = [(-score, self._searcher.doc(address)["row"][0]) for score, address in hits]
        return [row for _, row in sorted(placed)]


def _english() -> tantivy.TextAnalyzer:
    analyser = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    for step in (
        tantivy.Filter.remove_long(40),
        tantivy.Filter.lowercase(),
        tantivy.Filter.stopword("english"),
        tantivy.Filter.stemmer("english"),
    ):
        analyser = analyser.filter(step)
    return analyser.build()


def _encodable(text: str) -> str:
    """The text without lone surrogates, which cannot be written as UTF-8."""
    return text.encode("utf-8", "ignore").decode()
