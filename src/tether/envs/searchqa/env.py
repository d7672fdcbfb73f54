"""SearchQA as a turn-based task: search, read what is shown, search again, answer; graded by exact match and token F1.

Questions come from a generator (the invented world by default, or a data set), documents from a retriever (an index in this process, or a
server). Both are shared by all environments with the same options. A retriever that fails raises out of `step`: the episode ends with its
reason, because a failure that looks like an empty search would mislead the agent.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from tether.core.http import checked_token, token_for
from tether.envs.base import Outcome, TextEnv, TurnOptions, Work
from tether.envs.dataset import BadRows
from tether.envs.searchqa import prompt
from tether.envs.searchqa.client import TOKEN_VARIABLES, Api, RemoteRetriever, Retriever
from tether.envs.searchqa.corpus import PASSAGE_WORDS, Generator, Question, readable
from tether.envs.searchqa.dataset import local_sources, questions_alone, read_question
from tether.envs.searchqa.prompt import ActionFormat, parse
from tether.envs.searchqa.reward import AnswerReward, ExactMatchReward, Grade, Reward, RewardRule, grade
from tether.envs.wording import Example


class SearchQAOptions(TurnOptions):
    """Options of searchqa."""

    max_turns: int = Field(default=5, ge=1)
    format: ActionFormat = "brackets"
    """How actions are written: search[..] and finish[..], or Search-R1's tags."""
    top_k: int = Field(default=5, ge=1, le=100)
    """Documents a search shows."""
    document_chars: int = Field(default=800, ge=20)
    """Characters of one document."""
    results_chars: int = Field(default=4000, ge=20)
    """Characters of all documents of a search."""
    search_cost: float = Field(default=0.02, ge=0, le=1)
    """Taken off the reward for each search after the first."""
    reward: RewardRule = "f1"
    """What an answer that is no exact match pays: its F1, or nothing."""
    f1_threshold: float = Field(default=0.3, ge=0, le=1)
    """An F1 below this has reward 0."""
    data: str | None = None
    """Questions: a file, or a data set by name. Without: generated ones about the built-in encyclopedia."""
    corpus: str | None = None
    """Documents: a file. Without: the paragraphs that come with the questions, or the built-in encyclopedia."""
    passage_words: int = Field(default=PASSAGE_WORDS, ge=0)
    """Articles of `corpus` are split into passages of so many words; 0 leaves them whole."""
    retriever: str | None = None
    """Address of a retrieval server, to be used instead of an index in this process."""
    retriever_api: Api = "queries"
    retriever_timeout: float = Field(default=30.0, gt=0, le=3600)
    """Seconds."""
    retriever_token: str | None = Field(default=None, repr=False)
    """Token of the server. A run's record holds its options; the variable TETHER_TOKEN keeps the token out of it."""
    bad_rows: BadRows = "error"
    fields: dict[str, str] = {}
    """Columns of `data` under other names, such as {question: Question, answer: Answer}."""

    @field_validator("retriever")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        try:
            parts = urlsplit("http://unset" if url is None else url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number, a broken IPv6 address
            known = False
        if not known:
            raise ValueError("should be an address such as http://127.0.0.1:8020")
        if parts.username is not None or parts.query:
            raise ValueError("should hold no password and no query, which would be written down; put the token into TETHER_RETRIEVER_TOKEN")
        return url

    @model_validator(mode="after")
    def _fit_together(self) -> "SearchQAOptions":
        if self.corpus is not None and self.retriever is not None:
            raise ValueError("corpus and retriever are both given; a retriever has documents of its own, leave out one of them")
        if self.corpus is not None and self.data is None:
            raise ValueError("corpus is given without data; add data (questions about it), or leave out both for the built-in encyclopedia")
        return self


class SearchQA(TextEnv[SearchQAOptions]):
    """Answer questions by searching."""

    name = "searchqa"
    Options = SearchQAOptions
    default_few_shot = 5
    metrics = ("em", "f1", "searches")
    read_row = staticmethod(read_question)

    def __init__(
        self,
        options: SearchQAOptions | None = None,
        *,
        generator: Generator | None = None,
        retriever: Retriever | None = None,
        reward: Reward | None = None,
    ) -> None:
        super().__init__(options or SearchQAOptions())
        chosen = self.options
        self._pay: Reward = reward or (
            ExactMatchReward(chosen.search_cost)
            if chosen.reward == "exact_match"
            else AnswerReward(chosen.f1_threshold, chosen.search_cost)
        )
        self._rule = self.options.reward if reward is None else getattr(reward, "__name__", type(reward).__name__)
        self._make, self._retriever = generator, retriever
        if self.options.data is not None:
            self._load()  # a file that cannot be used is reported before anything is played

    def _load(self) -> None:
        """Questions and documents that were not handed in. The built-in ones take a second, so they wait for the first reset."""
        options = self.options
        if self._retriever is None and options.retriever is not None:
            token = next((token for variable in TOKEN_VARIABLES if (token := token_for(options.retriever, variable))), None)
            if options.retriever_token is not None:  # an empty one: this address gets no token
                token = options.retriever_token
            token = checked_token(token) if token else None
            self._retriever = RemoteRetriever(options.retriever, options.retriever_api, options.retriever_timeout, token)
        if self._retriever is None:
            generator, self._retriever = local_sources(
                options.data, options.corpus, options.bad_rows, tuple(options.fields.items()), options.passage_words
            )
            self._make = self._make or generator
        if self._make is None:
            self._make = questions_alone(options.data, options.bad_rows, tuple(options.fields.items()))

    @property
    def num_instances(self) -> int | None:
        self._load()
        return super().num_instances

    def generate(self, seed: int) -> None:
        self._load()
        assert self._make is not None
        self.question: Question = self._make(seed, self.options.split)
        self._searches = 0

    def take(self, answer: str) -> Outcome:
        action = parse(readable(answer), self.options.format)
        if action is None:
            return Outcome(prompt.invalid(self.options.format), valid=False, info=self._info([]))
        if action.name == "search":
            text, titles = self._search(action.text)
            return Outcome(text, info=self._info(titles))
        result = grade(action.text, self.question.answers)
        text = prompt.reply_to_answer(action.text, result.em, self.question.answers[0])
        return Outcome(text, self._pay(result, self._searches), done=True, success=result.em, info=self._info([], result))

    def _search(self, query: str) -> tuple[str, list[str]]:
        assert self._retriever is not None
        hits = self._retriever.search(query, self.options.top_k)
        self._searches += 1
        if not hits:
            return prompt.no_results(query, self.options.format), []
        return prompt.results(
            query,
            [hit.document for hit in hits],
            self.options.format,
            document_chars=self.options.document_chars,
            results_chars=self.options.results_chars,
        )

    def _info(self, titles: list[str], result: Grade | None = None) -> dict[str, Any]:
        result = result or Grade(em=False, f1=0.0)
        return {
            "em": result.em,
            "f1": result.f1,
            "f1_success": result.em or (result.f1 > 0 and result.f1 >= self.options.f1_threshold),
            "searches": self._searches,
            "reward_rule": self._rule,
            "titles": titles,
        }

    @property
    def work(self) -> Work:
        return "wait" if self.options.retriever is not None else "inline"

    @property
    def reward_range(self) -> tuple[float, float]:
        return (0.0, 1.0) if isinstance(self._pay, AnswerReward | ExactMatchReward) else super().reward_range

    @property
    def instance(self) -> str:
        return self.question.fingerprint

    @property
    def parameters(self) -> Mapping[str, str]:
        return {"kind": self.question.kind} if self.question.kind else {}

    @property
    def reply_tags(self) -> tuple[str, ...]:
        """The tags a reply may end with. The rollout reads this: it passes the text between answer tags if they are the only ones,
        otherwise the tag with its text."""
        return ("search", "answer") if self.options.format == "tags" else ("answer",)

    @property
    def task(self) -> str:
        return prompt.task(self.options.format, self.options.top_k, self.options.search_cost)

    @property
    def format_rule(self) -> str:
        return prompt.TAGS_RULE if self.options.format == "tags" else super().format_rule

    @property
    def example(self) -> Example:
        return prompt.example(self.options.format)

    @property
    def refused(self) -> str:
        return prompt.refused(self.options.format)

    @property
    def paper(self) -> str:
        return prompt.paper(self.options.format, self.options.top_k, self.options.search_cost)

    def worked_examples(self, count: int) -> list[Example]:
        return prompt.worked(self.options.format)

    def opening(self) -> str:
        return f"Question: {self.question.text}"
