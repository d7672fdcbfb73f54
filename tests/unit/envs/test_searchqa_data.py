"""Questions and corpora in the public formats: what is read, what is refused and where it stands, and the real samples."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.searchqa.corpus import Corpus, Document, of_documents, of_file
from tether.envs.searchqa.dataset import Question, load_questions

SHARED = Path(__file__).parents[4] / "shared" / "data"
HOTPOT = SHARED / "hotpotqa" / "hotpotqa_100_with_context.json"
HOTPOT_CORPUS = SHARED / "hotpotqa" / "hotpotqa_100_corpus.json"
SEARCH_R1 = SHARED / "searchr1_corpus_sample" / "corpus.jsonl"


def write(path: Path, rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) if path.suffix == ".jsonl" else json.dumps(rows))
    return str(path)


def documents(corpus: Corpus) -> list[Document]:
    return list(corpus.read())


# --- questions ---


def test_hotpotqa(tmp_path: Path) -> None:
    row = {
        "_id": "x", "type": "bridge", "level": "easy", "question": "Who  built it?", "answer": "Henry",
        "supporting_facts": [["Bridge", 0], ["Henry", 1], ["Bridge", 2]],
        "context": [["Bridge", ["It stands.", " Henry built it."]], ["Henry", ["An engineer."]], ["Bridge", ["It stands.", "Henry built it."]]],
    }  # fmt: skip
    loaded = load_questions(write(tmp_path / "h.json", [row]), "error")
    assert loaded.questions == (Question("Who built it?", ("Henry",), ("Bridge", "Henry"), "bridge"),)
    assert loaded.documents == [Document("0", "Bridge", "It stands. Henry built it."), Document("1", "Henry", "An engineer.")]
    assert loaded.pool(0, Split.ALL) is loaded.questions[0]


def test_hotpotqa_as_columns(tmp_path: Path) -> None:
    row = {
        "question": "q?", "answer": "yes", "supporting_facts": {"title": ["A", "B"], "sent_id": [0, 1]},
        "context": {"title": ["A", "B"], "sentences": [["one.", " two."], ["three."]]},
    }  # fmt: skip
    loaded = load_questions(write(tmp_path / "h.jsonl", [row]), "error")
    assert loaded.questions[0].gold_titles == ("A", "B")
    assert [(document.title, document.text) for document in loaded.documents] == [("A", "one. two."), ("B", "three.")]


def test_musique(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paragraphs = [
        {"idx": 0, "title": "A", "paragraph_text": "first", "is_supporting": False},
        {"idx": 1, "title": "B", "paragraph_text": "second", "is_supporting": True},
    ]
    row = {"question": "q?", "answer": "Henry", "answer_aliases": ["Harry", "Henry"], "answerable": True, "paragraphs": paragraphs}
    lost = {**row, "question": "unanswerable?", "answerable": False, "paragraphs": [*paragraphs, {"title": "C", "paragraph_text": "third"}]}
    caplog.set_level(logging.INFO)
    loaded = load_questions(write(tmp_path / "m.jsonl", [row, lost]), "error")
    assert loaded.questions == (Question("q?", ("Henry", "Harry"), ("B",)),)
    assert [document.title for document in loaded.documents] == ["A", "B", "C"]  # its paragraphs stay among the distractors
    assert "left out 1 unanswerable" in caplog.text


@pytest.mark.parametrize(
    ("row", "answers"),
    [
        ({"question": "q?", "golden_answers": ["a", "b"]}, ("a", "b")),
        ({"question": "q?", "ground_truth": "a"}, ("a",)),
        ({"question": "q?", "ground_truth": ["a", " ", "b"]}, ("a", "b")),
        ({"question": "q?", "answer": 1984}, ("1984",)),
        ({"question": "q?", "answer": ["a"]}, ("a",)),
        ({"question": "q?", "answer": "a", "golden_answers": ["g"]}, ("g",)),
    ],
)
def test_answers(row: dict[str, Any], answers: tuple[str, ...], tmp_path: Path) -> None:
    assert load_questions(write(tmp_path / "q.jsonl", [row]), "error").questions[0].answers == answers


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"answer": "a"}, "has no field 'question' (it has answer)"),
        ({"question": " ", "answer": "a"}, "has the question ' '; expected a text"),
        ({"question": "q?"}, "has none of answer, golden_answers and ground_truth (it has question)"),
        ({"question": "q?", "answer": ""}, "has no answer in 'answer'"),
        ({"question": "q?", "answer": {"text": "a"}}, "has answer {'text': 'a'}; expected a text or a list of texts"),
        ({"question": "q?", "answer": "a", "context": "text"}, "has neither pairs nor the columns title and sentences where they belong"),
        ({"question": "q?", "answer": "a", "context": [["T"]]}, "has neither pairs nor the columns"),
        ({"question": "q?", "answer": "a", "context": [["T", 5]]}, "has a document of type int; expected a text or a list of sentences"),
        ({"question": "q?", "answer": "a", "context": [[5, ["s"]]]}, "has a title of type int; expected a text"),
        ({"question": "q?", "answer": "a", "context": {"title": ["A"], "sentences": []}}, "has 1 of title for 0 of sentences"),
        ({"question": "q?", "answer": "a", "paragraphs": ["p"]}, "has paragraphs that are no list of objects"),
        ({"question": "q?", "answer": "a", "paragraphs": [{"title": "T"}]}, "has a paragraph without paragraph_text"),
        ("text", "is a str; expected an object with question"),
    ],
)
def test_bad_questions(row: Any, problem: str, tmp_path: Path) -> None:
    good = {"question": "good?", "answer": "a"}
    source = write(tmp_path / "q.jsonl", [good, row])
    with pytest.raises(BadInput) as caught:
        load_questions(source, "error")
    assert str(caught.value).startswith(f"{source}:2: ")
    assert problem in str(caught.value) and "bad_rows=skip" in str(caught.value) and "\n" not in str(caught.value)
    assert [question.text for question in load_questions(source, "skip").questions] == ["good?"]


def test_nothing_but_unanswerable_questions(tmp_path: Path) -> None:
    source = write(tmp_path / "q.jsonl", [{"question": "q?", "answer": "a", "answerable": False}])
    with pytest.raises(BadInput, match="holds no answerable question"):
        load_questions(source, "error")


def test_broken_surrogates_are_mended(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "q \\ud800?", "answer": "a \\ud800", "context": [["T\\ud800", ["s\\ud800"]]]}\n')
    loaded = load_questions(str(path), "error")
    assert loaded.questions[0].text == "q ??" and loaded.questions[0].answers == ("a ?",)
    assert loaded.documents == [Document("0", "T?", "s?")]


# --- corpora ---


def test_search_r1_corpus(tmp_path: Path) -> None:
    rows = [{"id": "7", "contents": '"The Title"\nline one\nline two'}, {"id": 8, "contents": "no title"}, {"contents": '"x" y\nz'}]
    assert documents(of_file(write(tmp_path / "c.jsonl", rows), "error")) == [
        Document("7", "The Title", "line one\nline two"),
        Document("8", "", "no title"),
        Document("2", "", '"x" y\nz'),
    ]


def test_title_and_text(tmp_path: Path) -> None:
    rows = [{"title": "T", "text": "t"}, {"text": "u"}, {"id": "p", "title": " A \n B ", "paragraph_text": ["s.", " t."]}]
    expected = [Document("0", "T", "t"), Document("1", "", "u"), Document("p", "A B", "s. t.")]
    assert documents(of_file(write(tmp_path / "c.jsonl", rows), "error")) == expected
    assert documents(of_file(write(tmp_path / "c.json", rows), "error")) == expected
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    assert documents(of_file(str(tmp_path / "c.jsonl.gz"), "error")) == expected


def test_strings_and_dictionaries(tmp_path: Path) -> None:
    assert documents(of_file(write(tmp_path / "list.json", ["plain", '"T"\ntext']), "error")) == [
        Document("0", "", "plain"), Document("1", "T", "text"),
    ]  # fmt: skip
    assert documents(of_file(write(tmp_path / "dict.json", {"A": ["one.", " two."], "B": "three"}), "error")) == [
        Document("0", "A", "one. two."), Document("1", "B", "three"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"id": "1"}, "has neither contents nor text (it has id)"),
        ({}, "has neither contents nor text (it has nothing)"),
        (5, "is a int; expected an object with contents, or with title and text"),
        ({"title": 5, "text": "t"}, "has a title of type int"),
        ({"title": "T", "text": 5}, "has a document of type int"),
        ({"contents": 5}, "has neither contents nor text"),
    ],
)
def test_bad_documents(row: Any, problem: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write(tmp_path / "c.jsonl", [{"text": "good"}, row])
    with pytest.raises(BadInput) as caught:
        documents(of_file(source, "error"))
    assert str(caught.value).startswith(f"{source}:2: {problem}") and "\n" not in str(caught.value)
    assert documents(of_file(source, "skip")) == [Document("0", "", "good")]
    assert f"skipped 1 of 2 rows of {source}" in caplog.text


def test_a_line_that_is_no_json_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(BadInput, match=r"c\.jsonl:2: is not JSON"):
        documents(of_file(str(path), "error"))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no usable row; the built-in encyclopedia is used"):
        documents(of_file(write(tmp_path / "c.json", []), "error"))


@pytest.mark.parametrize(
    "document",
    [
        Document("1", "T", "text\nmore"),
        Document("1", "", "text"),
        Document("1", "", '"quoted first line"\nrest'),
        Document("1", 'He said "x"', '"y"'),
        Document("1", "", ""),
        Document("1", "T", ""),
    ],
)
def test_contents_are_read_back(document: Document) -> None:
    assert Document.of_contents(document.id, document.contents) == document


def test_contents_as_search_r1_writes_them() -> None:
    assert Document("1", "T", "text").contents == '"T"\ntext'
    assert Document("1", "", "text").contents == "text"


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", [{"text": "a"}])
    same = write(tmp_path / "b.jsonl", [{"text": "a"}])
    other = write(tmp_path / "c.jsonl", [{"text": "b"}])
    assert of_file(one, "error").digest == of_file(same, "error").digest != of_file(other, "error").digest
    assert of_file(one, "error").digest != of_file(one, "skip").digest
    digests = {of_documents([document]).digest for document in (Document("1", "a", "b"), Document("1", "b", "a"), Document("2", "a", "b"))}
    assert len(digests) == 3


# --- the real files ---


@pytest.mark.skipif(not HOTPOT.exists(), reason="the HotpotQA sample is not beside the checkout")
def test_real_hotpotqa() -> None:
    loaded = load_questions(str(HOTPOT), "error")
    assert len(loaded.questions) == 100
    first = loaded.questions[0]
    assert first.text == "If Gallu is a demon Lilu is what?"
    assert first.gold_titles == ("Alû", "Lilu (mythology)")
    assert len(loaded.documents) == 994
    corpus = documents(of_file(str(HOTPOT_CORPUS), "error"))
    assert {(d.title, d.text) for d in corpus} == {(d.title, d.text) for d in loaded.documents}
    assert {title for question in loaded.questions for title in question.gold_titles} <= {document.title for document in corpus}


@pytest.mark.skipif(not SEARCH_R1.exists(), reason="the Search-R1 sample is not beside the checkout")
def test_real_search_r1_corpus() -> None:
    corpus = documents(of_file(str(SEARCH_R1), "error"))
    assert [document.id for document in corpus] == [str(number) for number in range(10)]
    assert corpus[0].title == "Evan Morris" and corpus[0].text.startswith("Evan Morris Evan L. Morris (January 26, 1977")
    rows = [json.loads(line) for line in SEARCH_R1.read_text(encoding="utf-8").splitlines()]
    assert [document.contents for document in corpus] == [row["contents"] for row in rows]
