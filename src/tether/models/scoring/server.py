"""log p(z | x) from an OpenAI-compatible server that returns the log-probs of a prompt's own tokens.

Prompt and reasoning are sent together, as token ids, to /v1/completions, and the log-probs of the reasoning's tokens are added up. There are
two dialects, and the first request finds out which one a server speaks:

- `prompt_logprobs` (vLLM): a list with a table per prompt token, which names the token's id and so shows that the ids arrived as sent;
- `echo` with `logprobs` (the classic completions API, SGLang, vLLM): the prompt comes back as part of the completion.

Everything is asked at temperature 1. Requests run in parallel; what may pass (too many requests, a restarting server, a lost connection) is
tried again a few times. Precision and speed are the server's own.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput, ModelUnavailable
from tether.core.http import token_for
from tether.core.images import has_images
from tether.models.endpoint import ModelEndpoint

Ids = Sequence[int]
SERVERS = "vLLM (prompt_logprobs) and SGLang (echo with logprobs) do"

Dialect = tuple[dict[str, Any], Callable[[dict[str, Any], list[int]], list[float | None] | None]]
"""What to add to a request, and how to read one log-prob per prompt token from a choice of the answer; None where there are none."""


class ServerScorer:
    """Scores reasonings under a model that a server holds.

    Args:
        url: the server's address, with or without /v1 at its end.
        model: the model's name there; None takes the only one it has.
        api_key: None takes the environment variable OPENAI_API_KEY, if set.
        timeout: seconds that one request may take.
        parallel: requests at the same time.
    """

    precision = "as served"

    def __init__(
        self, url: str, model: str | None = None, *, api_key: str | None = None, timeout: float = 120.0, parallel: int = 8
    ) -> None:
        key = api_key if api_key is not None else token_for(url, "OPENAI_API_KEY")
        source = "set OPENAI_API_KEY or pass api_key"
        self._endpoint = ModelEndpoint(url, token=key, token_source=source, timeout=timeout, parallel=parallel)
        self._parallel = parallel
        self._model = model
        self._checked = False
        self._dialect: Dialect | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        return self._endpoint.base

    def score(self, prompt: Ids, reasoning: Ids) -> float:
        """log p(reasoning | prompt)."""
        return float(self.score_all([prompt], [reasoning])[0, 0])

    def score_many(self, prompt: Ids, reasonings: Sequence[Ids]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after one prompt."""
        return self.score_all([prompt], reasonings)[:, 0]

    def score_all(self, prompts: Sequence[Ids], reasonings: Sequence[Ids]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after every prompt, [reasonings, prompts]."""
        pairs = [([int(token) for token in prompt], [int(token) for token in reasoning]) for reasoning in reasonings for prompt in prompts]
        scores = np.empty(len(pairs), dtype=np.float64)
        with self._endpoint, ThreadPoolExecutor(self._parallel) as threads:
            model = self._find_model()
            scores[0] = self._score(model, *pairs[0])  # finds out the dialect before many ask at once
            waiting = [threads.submit(self._score, model, *pair) for pair in pairs[1:]]
            try:
                scores[1:] = [future.result() for future in waiting]
            finally:
                threads.shutdown(cancel_futures=True)  # after a failure, what has not been sent is not sent any more
        return scores.reshape(len(reasonings), len(prompts))

    def token_logprobs(self, ids: Ids) -> list[float]:
        """log p of every token but the first, given the tokens before it."""
        with self._endpoint:
            logprobs = self._logprobs(self._find_model(), [int(token) for token in ids])
        return self._complete(logprobs[1:], len(ids) - 1)

    def _find_model(self) -> str:
        """The name to ask for; asks the server once."""
        if self._model is None or not self._checked:
            self._model, self._checked = str(self._endpoint.find_model(self._model)["id"]), True
        return self._model

    def _score(self, model: str, prompt: list[int], reasoning: list[int]) -> float:
        logprobs = self._logprobs(model, prompt + reasoning)
        return float(np.sum(self._complete(logprobs[len(prompt) :], len(reasoning)), dtype=np.float64))

    def _logprobs(self, model: str, ids: list[int]) -> list[float | None]:
        if has_images(ids):
            raise BadInput("the prompts hold images, and servers score text only; choose a diagnosis.scorer that is loaded here")
        if self._dialect is None:
            return self._probe(model, ids)
        return self._ask(model, ids, self._dialect) or []

    def _complete(self, logprobs: list[float | None], count: int) -> list[float]:
        """The log-probs, of which none may be missing."""
        known = [value for value in logprobs if value is not None]
        if len(known) != count or len(logprobs) != count:
            raise ModelUnavailable(f"the server at {self.url} left out prompt log-probs that it gave before; check its log and try again")
        return known

    def _probe(self, model: str, ids: list[int]) -> list[float | None]:
        """Ask in every dialect until one is understood."""
        refusals = []
        for dialect in DIALECTS:
            try:
                logprobs = self._ask(model, ids, dialect)
            except BadInput as refusal:  # a server may refuse a field that it does not know
                if isinstance(refusal, ModelUnavailable):
                    raise
                refusals.append(str(refusal))
                continue
            if logprobs is not None:
                self._dialect = dialect
                return logprobs
        if len(refusals) == len(DIALECTS):
            raise BadInput(f"{refusals[-1]}; if the tokens are not what is wrong, it has no log-probs of prompt tokens: {SERVERS}")
        raise BadInput(f"the server at {self.url} returns no log-probs of prompt tokens from /completions; {SERVERS}")

    def _ask(self, model: str, ids: list[int], dialect: Dialect) -> list[float | None] | None:
        more, read = dialect
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, **more}
        answer = self._endpoint.call("POST", "/v1/completions", body)
        seen = (answer.get("usage") or {}).get("prompt_tokens", len(ids))
        if seen != len(ids):
            raise BadInput(f"the server at {self.url} read {seen} tokens where {len(ids)} were sent; it must take token ids as they are")
        try:
            return read(answer["choices"][0], ids)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadInput(f"the server at {self.url} answers /completions in a form that is not OpenAI's: {error!r}; {SERVERS}") from error


def _from_prompt_logprobs(choice: dict[str, Any], ids: list[int]) -> list[float | None] | None:
    tables = choice.get("prompt_logprobs")
    if not tables:
        return None
    if len(tables) != len(ids):
        raise ValueError(f"{len(tables)} prompt log-probs for {len(ids)} tokens")
    return [None if table is None else float(table[str(token)]["logprob"]) for token, table in zip(ids, tables, strict=True)]


def _from_echo(choice: dict[str, Any], ids: list[int]) -> list[float | None] | None:
    values = (choice.get("logprobs") or {}).get("token_logprobs") or []
    if len(values) not in (len(ids), len(ids) + 1):  # with or without the one token that was generated
        return None
    return [None if value is None else float(value) for value in values[: len(ids)]]


DIALECTS: tuple[Dialect, ...] = (
    ({"prompt_logprobs": 1}, _from_prompt_logprobs),
    ({"echo": True, "logprobs": 1}, _from_echo),
)
