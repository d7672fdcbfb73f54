"""The routes of the gateway: one address with a secret in its path for every episode, which speaks OpenAI's chat completions.

Retries of OpenAI's clients are joined: a request that is sent again (`x-stainless-retry-count`) with the same body gets the reply of the first, whether that
is still being sampled or done. A request after the end of its episode is answered with 410, one to an unknown address with 404; both are
not tried again by clients. What the engine fails with ends the rollout, not one episode.
"""

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from tether.core.enums import StopReason
from tether.core.errors import BadInput
from tether.core.http import Refusal, read_json, status_of
from tether.core.protocols import Sampling
from tether.core.telemetry import Problem, Telemetry
from tether.core.types import Completion
from tether.models.messages import AgentChat
from tether.rollout.gateway.session import Budgets, Session
from tether.rollout.serving.chat import ChatFields, chat_response, envelope, finish_reason, json_response, read_fields, reply_message
from tether.rollout.serving.response import COMPUTE_ERRORS, ResponseRequest

if TYPE_CHECKING:
    from fastapi import FastAPI, Response

MAX_JSON = 64 * 2**20
RETRY_HEADER = "x-stainless-retry-count"
SESSION_PATH = re.compile(r"/sessions/[^/]+/v1/")


class GatewayBody(ChatFields):
    """POST /v1/chat/completions of a session. How tokens are drawn is the run's choice, or the log-probs would not be those of the policy."""

    n: Literal[1] = 1
    logprobs: Literal[False] = False
    top_logprobs: Literal[0] = 0
    # Without effect, which a note says.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


OVERRULED = tuple(name for name, field in GatewayBody.model_fields.items() if name not in ChatFields.model_fields and field.default is None)


@dataclass(slots=True, eq=False)
class _Entry:
    """A session at the gateway."""

    session: Session
    sampling: Sampling
    replies: dict[str, "asyncio.Future[dict[str, Any]]"] = field(default_factory=dict)
    """By the hash of the request's body."""


class Gateway:
    """The sessions that are open, and what answers them."""

    def __init__(self, chat: AgentChat, model: str) -> None:
        self.chat, self.model = chat, model
        self.submit: Callable[[ResponseRequest], Future[Completion]] | None = None
        """Queues a request at the engine; None while no rollout is played."""
        self.failure: Exception | None = None
        """What the engine failed with."""
        self.notes: dict[str, None] = {}
        """What is worth saying once."""
        self._entries: dict[str, _Entry] = {}
        self._ended: set[str] = set()
        """Secrets of sessions that are forgotten."""

    def open(self, seed: int, sampling: Sampling, budgets: Budgets, *, exact: bool = True) -> tuple[str, Session]:
        """A new session and the secret of its address."""
        secret, session = secrets.token_urlsafe(24), Session(self.chat, seed, budgets, exact=exact)
        self._entries[secret] = _Entry(session, sampling)
        return secret, session

    def close(self, secret: str) -> None:
        """End a session; later requests to its address are answered with 410."""
        self._entries[secret].session.close()

    def forget(self) -> None:
        """Forget the sessions that have ended, all but their secrets."""
        self._ended |= {secret for secret, entry in self._entries.items() if not entry.session.is_open}
        self._entries = {secret: entry for secret, entry in self._entries.items() if entry.session.is_open}

    @property
    def num_open(self) -> int:
        """Sessions that are open."""
        return sum(entry.session.is_open for entry in list(self._entries.values()))

    def app(self, token: str | None = None, health: Problem = lambda: None) -> "FastAPI":
        """The routes; those of a session need no token, because its secret is in their path. `health`: of the engine behind it."""
        from fastapi import FastAPI, Request, Response
        from starlette.exceptions import HTTPException

        async def failed(_: Request, error: Exception) -> Response:
            status, message = status_of(error)
            code = getattr(error, "code", None) or ("invalid_request_error" if status < 500 else "server_error")
            return json_response(
                {"error": {"message": message, "type": "invalid_request_error" if status < 500 else "server_error", "code": code}}, status
            )

        handlers: dict[Any, Any] = dict.fromkeys((HTTPException, Refusal, BadInput, *COMPUTE_ERRORS), failed)
        app = FastAPI(openapi_url=None, exception_handlers=handlers)

        @app.get("/sessions/{secret}/v1/models")
        async def models(secret: str) -> Response:
            self._entry(secret)
            return json_response({"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "tether"}]})

        @app.post("/sessions/{secret}/v1/chat/completions")
        async def chat(secret: str, request: Request) -> Response:
            body = await read_json(request, MAX_JSON)
            return await self._answer(self._entry(secret), body, request.headers.get(RETRY_HEADER, "0") != "0")

        telemetry = Telemetry(
            health=health,
            ready=lambda: "no rollout is being played" if self.submit is None else None,
            is_busy=lambda: self.num_open > 0,
            begins="/sessions",
        )
        telemetry.gauge("tether_sessions", "Sessions that are open.", lambda: self.num_open)
        telemetry.add_to(app, token, lambda: {"status": "ok", "sessions": self.num_open}, SESSION_PATH)
        return app

    def _entry(self, secret: str) -> _Entry:
        entry = self._entries.get(secret)
        if entry is None and secret not in self._ended:
            raise Refusal(404, "there is no such session; use the base_url that the episode was given")
        if entry is None or not entry.session.is_open:
            if entry is not None:
                entry.session.num_late += 1
            raise Refusal(410, "the episode of this session is over")
        return entry

    async def _answer(self, entry: _Entry, body: dict[str, Any], is_retry: bool) -> "Response":
        asked = read_fields(body, GatewayBody)
        for name in OVERRULED:
            if name in asked.model_fields_set:
                self._note(f"agents send {name}, which has no effect: sampling is the run's (rollout.{name} where there is such a setting)")
        if asked.model not in (None, self.model):
            self._note(f"agents ask for the model {asked.model!r:.60}; every name is answered by the policy")
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        reply = entry.replies.get(digest) if is_retry else None
        if reply is None:
            reply = asyncio.ensure_future(self._sample(entry, asked))
            entry.replies[digest] = reply
        made = await asyncio.shield(reply)  # a client that goes away and asks again finds it
        return chat_response(made, asked)

    def _note(self, note: str) -> None:
        self.notes[note] = None

    async def _sample(self, entry: _Entry, asked: GatewayBody) -> dict[str, Any]:
        session, sampling, budgets = entry.session, entry.sampling, entry.session.budgets
        if self.submit is None:
            raise Refusal(503, "no rollout is being played")
        messages, tools = await asyncio.to_thread(asked.conversation, self.chat.sees)
        self.chat.parser(tools)  # an unknown format is refused before anything is sampled
        num_characters = self.chat.num_characters(messages, tools)
        if num_characters > budgets.max_context * self.chat.longest_token:  # to tokenise it would keep others waiting
            session.stop = StopReason.CONTEXT_FULL
            raise BudgetSpent(
                session.stop, f"the prompt has {num_characters} characters, and a conversation may have {budgets.max_context} tokens"
            )
        call = session.begin(messages, tools)
        refused = session.refusal(call.prompt)
        if refused is not None:
            session.withdraw(call)
            session.stop = refused[0]
            raise BudgetSpent(*refused)
        room = min(budgets.max_reply, budgets.max_context - len(call.prompt), asked.budget or budgets.max_reply)
        sampling = replace(sampling, max_tokens=room, stop_strings=(*sampling.stop_strings, *asked.stops))
        request = ResponseRequest(call.prompt, sampling, session.draws(call.prompt), images=call.images)
        try:
            completion = await asyncio.wrap_future(self.submit(request))
        except COMPUTE_ERRORS as error:
            session.withdraw(call)
            session.failure, self.failure = error, self.failure or error
            raise
        text = _before_stop(self.chat.reply_text(completion), asked.stops)
        session.finish(call, completion, text)
        assert call.reply is not None and call.message is not None
        message = reply_message(call.reply, call.message.call_ids)
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(completion, message), "logprobs": None}
        return envelope("chat.completion", self.model, [choice], len(call.prompt), len(completion.token_ids))


class BudgetSpent(Refusal):
    """A call beyond the budget of its episode."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(400, message)
        self.code = "context_length_exceeded" if reason is StopReason.CONTEXT_FULL else "budget_exceeded"


def _before_stop(text: str, stops: tuple[str, ...]) -> str:
    found = [text.index(stop) for stop in stops if stop in text]
    return text[: min(found)] if found else text
