"""Questions and corpora in the public formats: what is read, what is refused and where it stands, and the real samples."""

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.registry import make_env
from tether.envs.searchqa.corpus import Corpus, Document, Question, of_documents, of_file, passages
from tether.envs.searchqa.dataset import load_questions

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
        ({"question": "q?", "answer": 1945.0}, ("1945",)),
        ({"question": "q?", "answer": 2.5}, ("2.5",)),
        ({"question": "q?", "answer": "a", "golden_answers": ["g"]}, ("g",)),
    ],
)
def test_answers(row: dict[str, Any], answers: tuple[str, ...], tmp_path: Path) -> None:
    assert load_questions(write(tmp_path / "q.jsonl", [row]), "error").questions[0].answers == answers


def test_kilt_questions(tmp_path: Path) -> None:
    output = [
        {"answer": "Henry", "provenance": [{"wikipedia_id": "12", "title": "Bridge"}]},
        {"provenance": [{"title": "Henry"}]},
        {"answer": "Harry"},
    ]
    loaded = load_questions(write(tmp_path / "k.jsonl", [{"id": "1", "input": "Who built it?", "output": output}]), "error")
    assert loaded.questions == (Question("Who built it?", ("Henry", "Harry"), ("Bridge", "Henry")),)
    with pytest.raises(BadInput, match="has no answer in 'answer'"):
        load_questions(write(tmp_path / "none.jsonl", [{"input": "Who?", "output": [{"provenance": []}]}]), "error")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            {"answer": "a"},
            "has no question: expected question with answer, answers, golden_answers or ground_truth, or input with output, got answer; name other",
        ),
        ({"question": " ", "answer": "a"}, "has the question ' '; expected a text"),
        (
            {"question": "q?"},
            "has no answer: expected question with answer, answers, golden_answers or ground_truth, or input with output, got question; name",
        ),
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
    corpus = documents(of_file(str(HOTPOT_CORPUS), "error", passage_words=0))
    assert {(d.title, d.text) for d in corpus} == {(d.title, d.text) for d in loaded.documents}
    assert {title for question in loaded.questions for title in question.gold_titles} <= {document.title for document in corpus}


@pytest.mark.skipif(not SEARCH_R1.exists(), reason="the Search-R1 sample is not beside the checkout")
def test_real_search_r1_corpus() -> None:
    corpus = documents(of_file(str(SEARCH_R1), "error"))
    assert [document.id for document in corpus] == [str(number) for number in range(10)]
    assert corpus[0].title == "Evan Morris" and corpus[0].text.startswith("Evan Morris Evan L. Morris (January 26, 1977")
    rows = [json.loads(line) for line in SEARCH_R1.read_text(encoding="utf-8").splitlines()]
    assert [document.contents for document in corpus] == [row["contents"] for row in rows]


# --- articles ---


def test_a_kilt_article_is_split_into_passages(tmp_path: Path) -> None:
    sentences = [f"Sentence {number} says that thing number {number} is blue." for number in range(60)]  # 540 words
    paragraphs = ["Henry Platt\n", " ".join(sentences[:30]) + "\n", "Section::::Early life.\n", "BULLET::::- " + " ".join(sentences[30:])]
    row = {"_id": "12", "wikipedia_id": "12", "wikipedia_title": "Henry Platt", "text": paragraphs}
    source = write(tmp_path / "kilt.jsonl", [row, {"_id": "13", "wikipedia_title": "Bridge", "text": ["Bridge\n", "It stands.\n"]}])
    found = documents(of_file(source, "error"))
    assert [document.id for document in found] == ["12-1", "12-2", "12-3", "12-4", "12-5", "13"]
    assert {document.title for document in found[:-1]} == {"Henry Platt"} and found[-1] == Document("13", "Bridge", "It stands.")
    assert all(60 < len(document.text.split()) <= 120 for document in found[:-2])
    assert all(document.text.startswith(("Sentence", "Early life.")) and document.text.endswith("blue.") for document in found[:-1])
    assert " ".join(document.text for document in found[:-1]) == " ".join([*sentences[:30], "Early life.", *sentences[30:]])
    whole = documents(of_file(source, "error", 0))
    assert [document.id for document in whole] == ["12", "13"]
    assert of_file(source, "error").digest != of_file(source, "error", 0).digest


def test_paragraphs_stay_whole_and_endless_sentences_are_cut() -> None:
    paragraph = "word " * 299 + "end."
    assert passages(paragraph, 120) == [paragraph]
    cut = passages("word " * 301, 120)
    assert [len(part.split()) for part in cut] == [120, 120, 61]
    assert passages("word " * 301, 0) == ["word " * 301]


def test_an_answer_deep_in_an_article_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    article = ["Harbour\n", "The harbour is old. " * 100, "The crane was built by Henry Platt in 1902.", "Ships come and go. " * 100]
    corpus = write(tmp_path / "c.jsonl", [{"wikipedia_id": "1", "wikipedia_title": "Harbour", "text": article}])
    data = write(tmp_path / "q.jsonl", [{"question": "Who built the crane?", "answer": "Henry Platt"}])
    for passage_words, is_shown in ((120, True), (0, False)):
        env = make_env("searchqa", data=data, corpus=corpus, split="all", top_k=1, passage_words=passage_words)
        env.reset(0)
        assert ("Henry Platt" in env.step("search[crane built]").observation.text) is is_shown
