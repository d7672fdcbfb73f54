"""Questions and their answers, from the public data sets; where the rows bring their own paragraphs, those are kept as a corpus.

Formats, identified by their fields: HotpotQA (`question`, `answer`, `supporting_facts`, `context` as pairs or as the columns the
`datasets` package makes of them), MuSiQue (`answer_aliases`, `paragraphs`, `answerable`), FlashRAG and Search-R1 (`golden_answers`),
rllm's (`ground_truth`), and KILT (`input`, `output`). A question without an answer to give (MuSiQue's unanswerable ones) is left out.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tether.core.errors import BadInput
from tether.envs.dataset import BadRows, Fields, Pool, Row, RowError, RowLeftOut, load_instances
from tether.envs.searchqa import corpus
from tether.envs.searchqa.client import Retriever
from tether.envs.searchqa.corpus import ENV, Document, Generator, Question, joined, one_line, readable
from tether.envs.searchqa.index import open_index

_LOG = logging.getLogger(__name__)
_DEFAULT = "generated questions about the built-in encyclopedia"


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row taken apart."""

    question: Question
    answerable: bool
    paragraphs: tuple[tuple[str, str], ...]
    """Title and text of what the row brought with it."""


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """The questions of a source, and the paragraphs that came with them."""

    pool: Pool[Question]
    questions: tuple[Question, ...]
    documents: list[Document]
    """Each once, in the order met; empty if the rows bring none."""


def load_questions(source: str, bad_rows: BadRows, fields: Fields = ()) -> QuestionSet:
    """Every answerable question of a file, or of a data set by name."""
    entries = load_instances(source, _entry, env=ENV, default=_DEFAULT, bad_rows=bad_rows, fields=fields)
    questions = tuple(entry.question for entry in entries if entry.answerable)
    if not questions:
        raise BadInput(f"{ENV}: data='{source}' holds no answerable question; {_DEFAULT} are used where data is left out")
    if len(questions) < len(entries):
        _LOG.info("%s: left out %d unanswerable questions of %s", ENV, len(entries) - len(questions), source)
    paragraphs = dict.fromkeys(paragraph for entry in entries for paragraph in entry.paragraphs)
    documents = [Document(str(number), title, text) for number, (title, text) in enumerate(paragraphs)]
    return QuestionSet(Pool(questions, env=ENV, source=source), questions, documents)


ACCEPTED = "question with answer, answers, golden_answers or ground_truth, or input with output"


def read_question(row: Row) -> Question:
    """The question of a row in any known format."""
    entry = _entry(row)
    if not entry.answerable:
        raise RowLeftOut("the question is marked as unanswerable")
    return entry.question


def _entry(row: Row) -> _Entry:
    names = row.value if isinstance(row.value, dict) else row.fields("question")
    asked = next((name for name in ("question", "input") if name in names), None)
    if asked is None:
        raise RowError(_unknown("question", names))
    (text,) = row.fields(asked)
    if not isinstance(text, str) or not text.strip():
        raise RowError(f"has the question {text!r}; expected a text")
    answers = _answers(row.value)
    paragraphs = tuple(_paragraphs(row.value))
    kind = row.value.get("type")
    gold = dict.fromkeys(_gold_titles(row.value))
    question = Question(readable(" ".join(text.split())), answers, tuple(gold), kind if isinstance(kind, str) else "")
    return _Entry(question, row.value.get("answerable") is not False, paragraphs)


def _unknown(what: str, names: Iterable[Any]) -> str:
    return (
        f"has no {what}: expected {ACCEPTED}, got {', '.join(map(str, names)) or 'no columns'}; "
        "name other columns with fields={question: COLUMN, answer: COLUMN}"
    )


def _answers(row: dict[str, Any]) -> tuple[str, ...]:
    if "input" in row and isinstance(row.get("output"), list):  # KILT: one entry for each way to answer, some without an answer
        row = {"answer": [entry["answer"] for entry in row["output"] if isinstance(entry, dict) and entry.get("answer") is not None]}
    for name in ("golden_answers", "ground_truth", "answer", "answers"):
        if name in row:
            found = [*_texts(name, row[name]), *_texts("answer_aliases", row.get("answer_aliases") or [])]
            answers = tuple(dict.fromkeys(readable(answer.strip()) for answer in found if answer.strip()))
            if not answers:
                raise RowError(f"has no answer in '{name}'")
            return answers
    raise RowError(_unknown("answer", row))


def _texts(name: str, value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str | int | float) for each in values):
        raise RowError(f"has {name} {value!r}; expected a text or a list of texts")
    # A table with an empty cell stores its whole numbers as floats: 1945.0 is 1945.
    return [str(int(each)) if isinstance(each, float) and each.is_integer() else str(each) for each in values]


def _paragraphs(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """HotpotQA's context and MuSiQue's paragraphs as (title, text)."""
    for title, sentences in _pairs(row.get("context"), "title", "sentences"):
        yield one_line(title), joined(sentences)
    for paragraph in _musique_paragraphs(row):
        text = paragraph.get("paragraph_text", paragraph.get("text"))
        if text is None:
            raise RowError("has a paragraph without paragraph_text")
        yield one_line(paragraph.get("title", "")), joined(text)


def _gold_titles(row: dict[str, Any]) -> Iterator[str]:
    for title, _ in _pairs(row.get("supporting_facts"), "title", "sent_id"):
        yield one_line(title)
    output = row.get("output") if "input" in row else None  # KILT: the articles that an answer comes from
    for entry in output if isinstance(output, list) else []:
        for source in (entry.get("provenance") or []) if isinstance(entry, dict) else []:
            if isinstance(source, dict) and isinstance(source.get("title"), str):
                yield one_line(source["title"])
    for paragraph in _musique_paragraphs(row):
        if paragraph.get("is_supporting") is True:
            yield one_line(paragraph.get("title", ""))


def _musique_paragraphs(row: dict[str, Any]) -> list[dict[str, Any]]:
    paragraphs = row.get("paragraphs")
    if paragraphs is None:
        return []
    if not isinstance(paragraphs, list) or not all(isinstance(paragraph, dict) for paragraph in paragraphs):
        raise RowError("has paragraphs that are no list of objects")
    return paragraphs


def _pairs(value: Any, first: str, second: str) -> list[tuple[Any, Any]]:
    """Pairs from a list of pairs (HotpotQA's files), or from two parallel columns (the same data as `datasets` gives it)."""
    if value is None:
        return []
    if isinstance(value, dict) and isinstance(value.get(first), list) and isinstance(value.get(second), list):
        if len(value[first]) != len(value[second]):
            raise RowError(f"has {len(value[first])} of {first} for {len(value[second])} of {second}")
        return list(zip(value[first], value[second], strict=True))
    if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return [(pair[0], pair[1]) for pair in value]
    raise RowError(f"has neither pairs nor the columns {first} and {second} where they belong")


@lru_cache(maxsize=8)
def local_sources(
    data: str | None, documents: str | None, bad_rows: BadRows, fields: Fields = (), passage_words: int = corpus.PASSAGE_WORDS
) -> tuple[Generator, Retriever]:
    """Questions, and an index in this process over the documents they are about."""
    if data is None:
        return questions_alone(None, bad_rows), open_index(world_corpus())
    questions = load_questions(data, bad_rows, fields)
    if documents is not None:
        return questions.pool, open_index(corpus.of_file(documents, bad_rows, passage_words))
    if not questions.documents:
        raise BadInput(
            f"searchqa: the rows of data='{data}' bring no paragraphs with them, so there is nothing to search; "
            "add corpus (a file of documents) or retriever (an address), or ask them without a search: the environment qa takes the same file"
        )
    return questions.pool, open_index(corpus.of_documents(questions.documents))


@lru_cache(maxsize=8)
def questions_alone(data: str | None, bad_rows: BadRows, fields: Fields = ()) -> Generator:
    """Questions without documents: a retrieval server has them."""
    if data is not None:
        return load_questions(data, bad_rows, fields).pool
    from tether.envs.searchqa.encyclopedia import world_questions  # here: reading the world's tables takes a tenth of a second

    return world_questions()


def world_corpus() -> corpus.Corpus:
    """The built-in encyclopedia."""
    from tether.envs.searchqa.encyclopedia import the_world

    return corpus.of_documents(the_world().documents())
