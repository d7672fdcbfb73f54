"""SearchQA as it is played: both formats, what is shown and paid, what is refused, and where questions and documents come from."""

import json
from pathlib import Path
from typing import Any

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput, ConfigError, StorageError
from tether.core.protocols import Env
from tether.envs.registry import make_env
from tether.envs.searchqa.client import RetrieverError
from tether.envs.searchqa.corpus import Document, Hit, Question
from tether.envs.searchqa.env import SearchQA, SearchQAOptions
from tether.envs.searchqa.prompt import results
from tether.envs.splits import split_of

QUESTION = Question("Who built the Long Bridge?", ("Henry Platt", "H. Platt"), ("Long Bridge",), "one_hop")
DOCUMENTS = [
    Document("0", "Long Bridge", "The Long Bridge was built by Henry Platt."),
    Document("1", "", "No title here,\nbut two lines."),
    Document("2", "Henry Platt", "Henry Platt was an engineer."),
]


class Shelf:
    """A retriever that always finds the same documents, except for what holds the word nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def search(self, query: str, top_k: int) -> list[Hit]:
        self.asked.append((query, top_k))
        return [] if "nothing" in query else [Hit(document, 1.0) for document in DOCUMENTS[:top_k]]


def played(**options: Any) -> tuple[SearchQA, Shelf]:
    shelf = Shelf()
    env = SearchQA(SearchQAOptions.model_validate(options), generator=lambda seed, split: QUESTION, retriever=shelf)
    env.reset(0)
    return env, shelf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TETHER_TOKEN", raising=False)


# --- playing with brackets ---


def test_an_episode() -> None:
    env, shelf = played()
    assert isinstance(env, Env)
    assert env.reset(0).text == "Turn 1 of 5.\nQuestion: Who built the Long Bridge?"
    step = env.step("search[Long  Bridge]")
    assert step.observation.text == (
        "Turn 2 of 5.\nResults for 'Long Bridge':\n"
        "[1] Long Bridge: The Long Bridge was built by Henry Platt.\n"
        "[2] No title here, but two lines.\n"
        "[3] Henry Platt: Henry Platt was an engineer."
    )
    assert shelf.asked == [("Long Bridge", 5)]
    assert (step.reward, step.done, step.success) == (0.0, False, False)
    assert step.info == {
        "valid": True, "truncated": False, "em": False, "f1": 0.0, "f1_success": False, "searches": 1, "reward_rule": "f1",
        "titles": ["Long Bridge", "", "Henry Platt"],
    }  # fmt: skip
    step = env.step("finish[the Henry Platt]")
    assert step.observation.text == "Solved.\nYour answer 'the Henry Platt' is right."
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    assert step.info == {
        "valid": True, "truncated": False, "em": True, "f1": 1.0, "f1_success": True, "searches": 1, "reward_rule": "f1", "titles": [],
    }  # fmt: skip


def test_the_reward_may_be_exact_match_and_the_rule_is_named() -> None:
    for answer, paid in (("Henry Platt", 1.0), ("not Henry Platt", 0.0), ("Henry Platt Jr", 0.0)):
        env, _ = played(reward="exact_match")
        assert env.reward_range == (0.0, 1.0)
        step = env.step(f"finish[{answer}]")
        assert (step.reward, step.success, step.info["reward_rule"]) == (paid, bool(paid), "exact_match")
    own = SearchQA(generator=lambda seed, split: QUESTION, retriever=Shelf(), reward=lambda grade, searches: 0.5)
    own.reset(0)
    assert own.step("finish[x]").info["reward_rule"] == "<lambda>"
    with pytest.raises(ConfigError, match="reward"):
        make_env("searchqa", reward="em")


def test_a_nearly_right_answer_pays_its_f1_less_the_searches() -> None:
    env, _ = played()
    for _ in range(3):
        env.step("search[bridge]")
    step = env.step("finish[Henry Platt Jr]")
    assert step.reward == pytest.approx(0.8 - 2 * 0.02)
    assert (step.done, step.success, step.info["em"], step.info["f1_success"]) == (True, False, False, True)
    assert step.info["f1"] == pytest.approx(0.8)
    assert step.observation.text == "Failed.\nYour answer was 'Henry Platt Jr', the right one is 'Henry Platt'."


def test_a_poor_answer_pays_nothing() -> None:
    env, _ = played()
    step = env.step("finish[the Platt family of New York]")
    assert (step.reward, step.success, step.info["f1_success"]) == (0.0, False, False)
    assert step.info["f1"] == pytest.approx(2 / 7)


def test_any_gold_answer_counts() -> None:
    env, _ = played()
    assert env.step("finish[h platt]").success


def test_costs_and_threshold_are_options() -> None:
    env, _ = played(search_cost=0.25, f1_threshold=0.9)
    assert "costs 0.25" in env.instructions
    for _ in range(2):
        env.step("search[bridge]")
    assert env.step("finish[Henry Platt]").reward == pytest.approx(0.75)
    env.reset(0)
    step = env.step("finish[Henry Platt Jr]")
    assert (step.reward, step.info["f1_success"]) == (0.0, False)
    env, _ = played(f1_threshold=0.8)
    step = env.step("finish[Henry Platt Jr]")
    assert (step.reward, step.info["f1_success"]) == (0.8, True)  # the threshold itself is enough
    assert "costs" not in played(search_cost=0.0)[0].instructions


@pytest.mark.parametrize(
    "answer", ["", "Henry Platt", "search[]", "finish[ ]", "<search> x </search>", "\ud800", "search[" * 3, "x" * 100_000]
)
def test_what_is_no_action_uses_a_turn(answer: str) -> None:
    env, shelf = played(max_turns=2)
    step = env.step(answer)
    assert (step.reward, step.done, step.info["valid"], step.info["searches"]) == (0.0, False, False, 0)
    assert step.observation.text == (
        "Turn 2 of 2.\nThat was neither a search nor an answer. To search, write search[your query]; to answer, write finish[your answer]."
    )
    step = env.step(answer)
    assert (step.done, step.info["truncated"], step.success, shelf.asked) == (True, True, False, [])


def test_broken_text_never_reaches_the_retriever() -> None:
    env, shelf = played()
    step = env.step("search[a \ud800 b]")
    assert shelf.asked == [("a ? b", 5)]
    step.observation.text.encode()


def test_a_search_without_results_says_so_and_counts() -> None:
    env, _ = played()
    step = env.step("search[nothing]")
    assert step.observation.text == (
        "Turn 2 of 5.\nNo document was found for 'nothing'. Use other words; very common ones are not looked up."
    )
    assert (step.info["valid"], step.info["searches"], step.info["titles"]) == (True, 1, [])


def test_searches_are_counted_per_episode() -> None:
    env, _ = played()
    env.step("search[a]")
    env.step("search[b]")
    env.reset(0)
    assert env.step("search[c]").info["searches"] == 1


def test_stepping_out_of_turn_is_refused() -> None:
    env, _ = played()
    env.step("finish[x]")
    with pytest.raises(BadInput, match="the episode is over"):
        env.step("search[x]")


# --- what is shown ---


def test_documents_are_cut() -> None:
    documents = [Document(str(number), f"T{number}", "word " * 100) for number in range(3)]
    text, titles = results("q", documents, "brackets", document_chars=20, results_chars=50)
    assert text.split("\n") == ["Results for 'q':", "[1] T0: word word word wo...", "[2] T1: word word word wo...", "[3] T2: word wo..."]
    assert titles == ["T0", "T1", "T2"]
    text, titles = results("q", documents, "brackets", document_chars=20, results_chars=39)
    assert titles == ["T0", "T1"]  # no room is left for the third
    text, _ = results("q", [Document("0", "T", "x" * 20)], "brackets", document_chars=20, results_chars=50)
    assert text.endswith("x" * 20)  # what fits is not cut


def test_top_k() -> None:
    env, shelf = played(top_k=2)
    assert env.step("search[a]").info["titles"] == ["Long Bridge", ""]
    assert shelf.asked == [("a", 2)]
    assert "shows the 2 best documents for a query" in env.instructions
    assert "shows the best document for a query" in played(top_k=1)[0].instructions


# --- tags ---


def test_an_episode_with_tags() -> None:
    env, shelf = played(format="tags")
    assert env.reply_tags == ("search", "answer")
    assert "<search>" in env.instructions
    assert "search[" not in env.instructions
    step = env.step("<search> Long Bridge </search>")
    assert step.observation.text == (
        "Turn 2 of 5.\n<information>Doc 1(Title: Long Bridge) The Long Bridge was built by Henry Platt.\n"
        "Doc 2(Title: ) No title here, but two lines.\n"
        "Doc 3(Title: Henry Platt) Henry Platt was an engineer.</information>"
    )
    step = env.step("Henry Platt")
    assert step.info["valid"] is False
    assert step.observation.text == (
        "Turn 3 of 5.\nThat was neither a search nor an answer. To search, write <search> your query </search>; "
        "to answer, write <answer> your answer </answer>."
    )
    assert env.step("<search> nothing </search>").observation.text.startswith("Turn 4 of 5.\n<information>No document was found")
    assert env.step("<answer> Henry Platt </answer>").reward == pytest.approx(0.98)
    assert len(shelf.asked) == 2


def test_brackets_need_the_answer_tag_only() -> None:
    env, _ = played()
    assert env.reply_tags == ("answer",)
    assert "<search>" not in env.instructions


# --- reward and instance ---


def test_a_reward_of_ones_own() -> None:
    env = SearchQA(generator=lambda seed, split: QUESTION, retriever=Shelf(), reward=lambda grade, searches: 7.0 * grade.em - searches)
    env.reset(0)
    env.step("search[a]")
    assert env.step("finish[Henry Platt]").reward == 6.0
    assert env.reward_range == (float("-inf"), float("inf"))
    assert played()[0].reward_range == (0.0, 1.0)


def test_a_failing_retriever_raises_and_counts_nothing() -> None:
    class Broken:
        def search(self, query: str, top_k: int) -> list[Hit]:
            raise RetrieverError("gone")

    env = SearchQA(generator=lambda seed, split: QUESTION, retriever=Broken())
    env.reset(0)
    with pytest.raises(RetrieverError, match="gone"):
        env.step("search[a]")


# --- the default task ---


def test_the_default_task() -> None:
    env = make_env("searchqa")
    assert isinstance(env, SearchQA)
    first = env.reset(0).text
    assert env.instance == first.partition("Question: ")[2]
    assert split_of(env.instance) is Split.TRAIN
    assert env.work == "inline"
    assert make_env("searchqa").reset(0).text == first
    titles = env.step(f"search[{env.instance}]").info["titles"]
    assert len(titles) == 5 and set(env.question.gold_titles) & set(titles)


def test_a_seed_has_one_instance_whatever_was_played_before() -> None:
    env = make_env("searchqa", split="test")
    texts = [env.reset(seed).text for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "searchqa option key 'top_k': got 0; it should be greater than or equal to 1"),
        ({"format": "tag"}, "searchqa option key 'format': got 'tag'"),
        ({"retriever": "localhost:8000"}, "searchqa option key 'retriever': got 'localhost:8000'; it should be an address such as http"),
        ({"retriever": "http://h:99999"}, "it should be an address such as http"),
        ({"retriever": ""}, "it should be an address such as http"),
        ({"corpus": "c.json"}, "corpus is given without data; add data"),
        ({"data": "d.json", "corpus": "c.json", "retriever": "http://h"}, "corpus and retriever are both given"),
        ({"retriver": "http://h"}, "did you mean 'retriever'?"),
        ({"search_cost": -0.1}, "searchqa option key 'search_cost'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_env("searchqa", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_token_that_fits_no_header_is_refused() -> None:
    env = make_env("searchqa", retriever="http://127.0.0.1:1", retriever_token="tö ken")
    with pytest.raises(BadInput, match="the token may only hold"):
        env.reset(0)


def test_the_token_is_not_shown() -> None:
    assert "hush" not in repr(SearchQAOptions(retriever="http://127.0.0.1:1", retriever_token="hush"))


def test_missing_files_are_reported_when_the_environment_is_made(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^searchqa: data='nowhere.json' does not exist; .*leave it out for generated questions"):
        make_env("searchqa", data="nowhere.json")
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"question": "q?", "golden_answers": ["a"]}) + "\n")
    with pytest.raises(
        BadInput,
        match=r"bring no paragraphs with them, so there is nothing to search; add corpus .* the environment qa takes the same file",
    ):
        make_env("searchqa", data=str(questions))
    with pytest.raises(BadInput, match=r"^searchqa: corpus='nowhere.jsonl' does not exist; .*the built-in encyclopedia"):
        make_env("searchqa", data=str(questions), corpus="nowhere.jsonl")


def test_questions_and_corpus_from_files(tmp_path: Path) -> None:
    questions, corpus = tmp_path / "q.jsonl", tmp_path / "c.jsonl"
    questions.write_text("".join(json.dumps({"question": f"question {n}?", "golden_answers": [f"answer{n}"]}) + "\n" for n in range(3)))
    corpus.write_text("".join(json.dumps({"id": str(n), "contents": f'"Page {n}"\nIt holds answer{n}.'}) + "\n" for n in range(3)))
    env = make_env("searchqa", data=str(questions), corpus=str(corpus), split="all", top_k=1)
    assert env.reset(2).text == "Turn 1 of 5.\nQuestion: question 2?"
    assert env.step("search[answer2]").observation.text.endswith("[1] Page 2: It holds answer2.")
    assert env.step("finish[answer2]").success
    assert env.reset(4).text.endswith("question 1?")  # seeds run round


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions, blocker = tmp_path / "q.jsonl", tmp_path / "file"
    questions.write_text(json.dumps({"question": "q?", "answer": "a", "context": [["T", ["s"]]]}) + "\n")
    blocker.write_text("")
    monkeypatch.setenv("TETHER_CACHE", str(blocker / "below"))
    with pytest.raises(StorageError, match=r"^cannot keep the search index in .*; set TETHER_CACHE to a folder with room$"):
        make_env("searchqa", data=str(questions))


def test_a_remote_retriever_needs_no_corpus_and_waits(tmp_path: Path) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text(json.dumps({"question": "q?", "golden_answers": ["a"]}) + "\n")
    env = make_env("searchqa", data=str(questions), retriever="http://127.0.0.1:9", split="all")
    assert isinstance(env, SearchQA)
    assert env.work == "wait"
    assert env.reset(0).text.endswith("q?")
    assert not (tmp_path / "cache").exists()
