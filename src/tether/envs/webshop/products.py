"""What the shop sells and what is asked for: `Product`, and `Catalogue`, which finds products the way the original's search box does.

A product of the data may have two prices, a range; the price it is sold for is then drawn in that range, by the product's code, so
that it is the same in every process. The original draws it again at every start.

Search is by tantivy: BM25 over one text per product, English stemming, at most 50 hits. The index is in memory: two thousand products take a
fraction of a second, and every environment of a process shares one. A query is a bag of stemmed words made with the index's own analyser. It
is never parsed as a query language, so no text can be a syntax error. Equal scores are ordered by the products' own order, so that a search
gives the same page everywhere.

`Goal` is an instruction for a shopper. Synthetic goals, as in the original: each product with an instruction gives one goal for each combination
of its option values, and its text names the values and a price limit. Human goals are what people wrote, with a price limit put behind it. The
limit is one of the first four tens above the price: two are drawn and the larger is kept. The original draws it from global chance at every
start; here it follows from the product, so that a goal is the same goal in every process.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tantivy

from tether.core.enums import Split
from tether.core.seeding import derive_seed
from tether.envs.dataset import with_progress

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
        for row, text in enumerate(with_progress(texts, "webshop: indexing the catalogue", "products")):
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
    kept = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(tantivy.Filter.remove_long(40)).filter(tantivy.Filter.lowercase())
    return kept.filter(tantivy.Filter.stopword("english")).filter(tantivy.Filter.stemmer("english")).build()


def _encodable(text: str) -> str:
    """The text without lone surrogates, which cannot be written as UTF-8."""
    return text.encode("utf-8", "ignore").decode()


@dataclass(frozen=True, slots=True)
class Product:
    """One product. Example: Product("B0TEST0001", "Oak Desk Lamp", "garden", "desk lamps", "Home › Lighting › Desk Lamps")."""

    asin: str
    """Its code: ten characters."""
    title: str
    category: str
    """The department, in one word."""
    query: str
    """The search under which it was catalogued; products of a kind share it."""
    product_category: str
    """Its place in the tree of categories, parts separated by ›."""
    description: str = ""
    bullets: tuple[str, ...] = ("",)
    prices: tuple[float, ...] = (100.0,)
    """One price, or the two ends of a range."""
    options: Mapping[str, tuple[str, ...]] | None = None
    """Values by name of option, such as {"color": ("red", "navy blue")}."""
    attributes: tuple[str, ...] = ()
    instruction: str | None = None
    """The synthetic instruction, if there is one."""
    instruction_attributes: tuple[str, ...] = ()

    @property
    def choices(self) -> Mapping[str, tuple[str, ...]]:
        """The options; empty where there are none."""
        return self.options or {}

    @property
    def price(self) -> float:
        """What it is sold for."""
        if len(self.prices) == 1:
            return self.prices[0]
        return random.Random(derive_seed("webshop", "price", self.asin)).uniform(*self.prices)

    @property
    def price_tag(self) -> str:
        """The price as the pages show it."""
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def search_text(self) -> str:
        """The one text that is searched: title, description, first bullet and options."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.choices.items())
        return " ".join([self.title, self.description, *self.bullets[:1], options]).lower()


class Catalogue:
    """All products of a shop, in a fixed order."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = tuple(products)

    @cached_property
    def _index(self) -> TextIndex:
        return TextIndex([product.search_text for product in self.products])

    def find(self, keywords: str, rng: random.Random) -> list[Product]:
        """The products a search lists, best first: at most 50, but all of them for the special first words `<a>`, `<c>` and `<q>`."""
        first, _, rest = keywords.partition(" ")
        wanted = rest.strip()
        if first == "<r>":
            return rng.sample(self.products, min(MOST_HITS, len(self.products)))
        if first == "<a>":
            return [product for product in self.products if wanted in product.attributes]
        if first == "<c>":
            return [product for product in self.products if product.category == rest.split(" ")[0].strip()]
        if first == "<q>":
            return [product for product in self.products if product.query == wanted]
        return [self.products[row] for row in self._index.search(keywords)]


NO_LIMIT = 1_000_000.0
_LIMITS = tuple(10.0 * tens for tens in range(1, 100))

Generator = Callable[[int, Split], "Goal"]


Wanted = tuple[tuple[str, str], ...] | tuple[str, ...]
"""Options of an instruction: (name, value) pairs in a synthetic goal, values alone in one a person wrote."""


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """An instruction that a person wrote for a product."""

    text: str
    attributes: tuple[str, ...]
    options: Wanted


@dataclass(frozen=True, slots=True)
class Goal:
    """A product to buy, and what it is scored by."""

    product: Product
    text: str
    attributes: tuple[str, ...]
    options: Wanted
    price_limit: float

    @property
    def fingerprint(self) -> str:
        return "\n".join([self.text, self.product.asin, repr(self.options), repr(self.price_limit)])


def synthetic_goals(products: Iterable[Product]) -> list[Goal]:
    """One goal for each combination of option values of each product with an instruction."""
    goals: list[Goal] = []
    for product in products:
        if product.instruction is None:
            continue
        limit, limit_text = _price_limit(product.price, "synthetic", product.asin)
        names = sorted(product.choices)
        for values in itertools.product(*(product.choices[name] for name in names)):
            options = tuple(zip(names, values, strict=True))
            option_text = ", and ".join(f"{name}: {value}" for name, value in options)
            text = f"{product.instruction}{' with ' if options else ''}{option_text}{limit_text}"
            goals.append(Goal(product, text, product.instruction_attributes, options, limit))
    return _shuffled(goals)


def human_goals(products: Iterable[Product], written: Mapping[str, tuple[HumanInstruction, ...]]) -> list[Goal]:
    """One goal for each thing a person wrote, by product code; those without an attribute are left out, as in the original."""
    goals: list[Goal] = []
    for product in products:
        for number, wanted in enumerate(written.get(product.asin, ())):
            if wanted.attributes:
                limit, limit_text = _price_limit(product.price, "human", product.asin, number)
                goals.append(Goal(product, wanted.text.strip(".") + limit_text, wanted.attributes, wanted.options, limit))
    return _shuffled(goals)


def _price_limit(price: float, *stream: int | str) -> tuple[float, str]:
    """The most the product may cost, and the words for it."""
    above = [limit for limit in _LIMITS if limit > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(random.Random(derive_seed("webshop", "limit", *stream)).sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _shuffled(goals: list[Goal]) -> list[Goal]:
    """The goals in the order of a hash, so that neighbouring seeds are not the same product in another size."""
    return sorted(goals, key=lambda goal: hashlib.sha256(goal.fingerprint.encode("utf-8", "surrogatepass")).digest())
