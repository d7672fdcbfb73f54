"""log p(z | x) from an OpenAI-compatible server that returns the log-probs of a prompt's own tokens.

Prompt and reasoning are sent together, as token ids, to /v1/completions, and the log-probs of the reasoning's tokens are added up. There are
two dialects, and the first request finds out which one a server speaks:

- `prompt_logprobs` (vLLM): a list with a table per prompt token, which names the token's id and so shows that the ids arrived as sent;
- `echo` with `logprobs` (the classic completions API, SGLang, vLLM): the prompt comes back as part of the completion.

Everything is asked at temperature 1. Requests run in parallel; what may pass (too many requests, a restarting server, a lost connection) is
tried again a few times. Precision and speed are the server's own.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput, ModelUnavailable, did_you_mean

Ids = Sequence[int]
RETRY_DELAYS = (0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt."""
PASSING_STATUSES = (408, 425, 429, 500, 502, 503, 504)
LONGEST_PAUSE = 30.0
"""Seconds; a server that asks for more patience than this is not waited for."""
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
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput(f"'{url}' is not a server's address; give one such as http://localhost:8000")
        if parallel < 1 or not timeout > 0:
            raise BadInput(f"parallel must be at least 1 and timeout above 0 seconds, got {parallel} and {timeout}")
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else f"{base}/v1"
        self._api_key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY")
        self._timeout = timeout
        self._parallel = parallel
        self._model = model
        self._checked = False
        self._dialect: Dialect | None = None

    def score(self, prompt: Ids, reasoning: Ids) -> float:
        """log p(reasoning | prompt)."""
        return float(self.score_all([prompt], [reasoning])[0, 0])

    def score_many(self, prompt: Ids, reasonings: Sequence[Ids]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after one prompt."""
        return self.score_all([prompt], reasonings)[:, 0]

    def score_all(self, prompts: Sequence[Ids], reasonings: Sequence[Ids]) -> npt.NDArray[np.float64]:
        """log p of every reasoning after every prompt, [reasonings, prompts]."""
        pairs = [([int(token) for token in prompt], [int(token) for token in reasoning]) for reasoning in reasonings for prompt in prompts]
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        limits = httpx.Limits(max_connections=self._parallel)
        scores = np.empty(len(pairs), dtype=np.float64)
        with httpx.Client(headers=headers, timeout=self._timeout, limits=limits) as client, ThreadPoolExecutor(self._parallel) as threads:
            model = self._find_model(client)
            scores[0] = self._score(client, model, *pairs[0])  # finds out the dialect before many ask at once
            waiting = [threads.submit(self._score, client, model, *pair) for pair in pairs[1:]]
            try:
                scores[1:] = [future.result() for future in waiting]
            finally:
                threads.shutdown(cancel_futures=True)  # after a failure, what has not been sent is not sent any more
        return scores.reshape(len(reasonings), len(prompts))

    def _find_model(self, client: httpx.Client) -> str:
        """The name to ask for; asks the server once."""
        if self._model is not None and self._checked:
            return self._model
        answer = self._call(client, "GET", "/models")
        entries = answer.get("data") if isinstance(answer.get("data"), list) else []
        names = [str(entry["id"]) for entry in entries or [] if isinstance(entry, dict) and "id" in entry]
        if self._model is None:
            if len(names) != 1:
                raise BadInput(
                    f"the server at {self.url} has {len(names)} models ({', '.join(names) or 'none'}); name one, as in URL#model"
                )
            self._model = names[0]
        elif names and self._model not in names:
            raise BadInput(f"the server at {self.url} has no model '{self._model}': {did_you_mean(self._model, names)}")
        self._checked = True
        return self._model

    def _score(self, client: httpx.Client, model: str, prompt: list[int], reasoning: list[int]) -> float:
        if self._dialect is not None:
            logprobs = self._ask(client, model, prompt + reasoning, self._dialect)
        else:
            logprobs = self._probe(client, model, prompt + reasoning)
        wanted = logprobs[len(prompt) :] if logprobs else []
        if len(wanted) != len(reasoning) or any(value is None for value in wanted):
            raise ModelUnavailable(f"the server at {self.url} left out prompt log-probs that it gave before; check its log and try again")
        return float(np.sum([value for value in wanted if value is not None], dtype=np.float64))

    def _probe(self, client: httpx.Client, model: str, ids: list[int]) -> list[float | None]:
        """Ask in every dialect until one is understood."""
        refusals = []
        for dialect in DIALECTS:
            try:
                logprobs = self._ask(client, model, ids, dialect)
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

    def _ask(self, client: httpx.Client, model: str, ids: list[int], dialect: Dialect) -> list[float | None] | None:
        more, read = dialect
        body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, **more}
        answer = self._call(client, "POST", "/completions", body)
        seen = (answer.get("usage") or {}).get("prompt_tokens", len(ids))
        if seen != len(ids):
            raise BadInput(f"the server at {self.url} read {seen} tokens where {len(ids)} were sent; it must take token ids as they are")
        try:
            return read(answer["choices"][0], ids)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadInput(f"the server at {self.url} answers /completions in a form that is not OpenAI's: {error!r}; {SERVERS}") from error

    def _call(self, client: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The object that the server answers with; what may pass is tried again."""
        for delay in (*RETRY_DELAYS, None):
            try:
                reply = client.request(method, self.url + path, json=body)
            except httpx.TransportError as error:
                problem, pause = f"{type(error).__name__}: {error}", delay
            else:
                if reply.is_success:
                    return self._decoded(reply)
                problem, pause = f"HTTP {reply.status_code}: {_words(reply)}", delay
                if reply.status_code not in PASSING_STATUSES:
                    raise self._refusal(reply.status_code, problem)
                if delay is not None:
                    pause = _asked_pause(reply, delay)
            if pause is None:
                break
            time.sleep(pause)
        raise ModelUnavailable(
            f"the server at {self.url} cannot be used, {len(RETRY_DELAYS) + 1} attempts: {problem}; check that it runs and is not overloaded"
        )

    def _refusal(self, status: int, problem: str) -> BadInput:
        if status in (401, 403):
            return ModelUnavailable(f"the server at {self.url} refuses the key ({problem}); set OPENAI_API_KEY or pass api_key")
        return BadInput(f"the server at {self.url} refuses the request ({problem})")

    def _decoded(self, reply: httpx.Response) -> dict[str, Any]:
        try:
            answer = reply.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ModelUnavailable(f"the server at {self.url} answers no JSON object but '{reply.text[:80]}'; check the address")
        return answer


def _words(reply: httpx.Response) -> str:
    """What the server says is wrong, in one line."""
    try:
        answer = reply.json()
    except ValueError:
        answer = reply.text
    error = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    said = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(said).split())[:300] or "no words"


def _asked_pause(reply: httpx.Response, delay: float) -> float | None:
    """Seconds until the next attempt: the server's wish where it is a number of seconds; None where that is too long."""
    try:
        wished = float(reply.headers.get("retry-after", delay))
    except ValueError:
        return delay
    return max(wished, delay) if wished <= LONGEST_PAUSE else None


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
