"""The routes of `tether serve` as a FastAPI application: OpenAI's completions and chat, vLLM's route of token ids, and weight updates.

Log-probs are those that the engine carries: of the whole distribution at the sampling temperature (docs/engine.md). The same seed, prompt
and weights give the same tokens, whatever else is in the batch. A wrong request is answered with {"error": {"message": one line}}.
"""

import asyncio
import hmac
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field

from tether.core.config import Settings, validate
from tether.core.enums import FinishReason
from tether.core.errors import BadInput
from tether.core.grammar import ANSWER_CLOSE, THINK_OPEN
from tether.core.http import (
    DRAIN_SECONDS,
    Refusal,
    declared_type,
    json_object,
    make_server,
    read_body,
    read_json,
    run_server,
    serving_app,
    status_of,
)
from tether.core.images import Image, with_placeholders
from tether.core.telemetry import Telemetry
from tether.core.version import __version__
from tether.models.load import LoadedModel
from tether.models.messages import Message
from tether.models.tool_formats import Tool
from tether.rollout.engines.dialects import IDS, LINES, LOGPROBS, MOST_LINES, packed
from tether.rollout.engines.publish import PUBLISHER_ADVICE, publisher_tokens
from tether.rollout.serving.chat import chat_response, envelope, finish_reason, json_response, read_fields, reply_message
from tether.rollout.serving.requests import COMPLETION_TOKENS, ChatBody, CompletionBody, GenerateBody, SamplingFields
from tether.rollout.serving.response import COMPUTE_ERRORS, ResponseRequest
from tether.rollout.serving.served import Answer, ServedModel

if TYPE_CHECKING:
    from fastapi import FastAPI, Request

    from tether.core.connections import ConnectionLimits

MAX_JSON, MAX_IMAGE_JSON = 16 * 2**20, 64 * 2**20
"""Bytes of a JSON body, and of one that may hold images."""
UPDATE_SECONDS = 60.0
"""Of silence between two calls of a weight update, unless the publisher says otherwise; then it is abandoned."""
MOST_UPDATE_SECONDS = 6 * 3600.0
GENERATION_PATHS = "/v1/completions|/v1/chat/completions|/inference/v1/generate"

B = TypeVar("B", bound=Settings)


def make_app(served: ServedModel, token: str | None = None) -> "FastAPI":
    """The API of one model."""
    from fastapi import FastAPI, Request, Response
    from starlette.exceptions import HTTPException

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        served.close()

    async def failed(_: Request, error: Exception) -> Response:
        return json_response(*_error(error))

    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, Refusal, *COMPUTE_ERRORS), failed)
    app = FastAPI(lifespan=lifespan, openapi_url=None, exception_handlers=handlers)
    _add_information_routes(app, served)
    _add_generation_routes(app, served)
    _add_weight_routes(app, served, token)
    telemetry = Telemetry(health=served.thread.problem, ready=lambda: _unready(served), begins=GENERATION_PATHS)
    served.thread.report(telemetry)
    telemetry.gauge("tether_weights_version", "The number at the end of the label of the weights.", lambda: served.version_number)
    telemetry.gauge("tether_weights_age_seconds", "Since these weights were put in place.", lambda: time.time() - served.weights_since)
    telemetry.counter("tether_weight_updates_total", "Weight updates by outcome.", lambda: served.updates, "outcome")
    telemetry.add_to(app, token, lambda: {"status": "ok", "requests": served.thread.num_requests, **_weights(served)})
    return app


def _unready(served: ServedModel) -> str | None:
    if served.is_swapping:
        return "new weights are being put in place; requests wait until they are"
    if served.thread.diverged:
        return f"the log-probs of the weights of version '{served.version}' are not finite; publish others"
    return None


async def _read(request: "Request", kind: type[B], most: int = MAX_JSON) -> B:
    """The JSON body of a request, checked field by field."""
    return read_fields(await read_json(request, most), kind)


def _most_json(served: ServedModel) -> int:
    return MAX_IMAGE_JSON if served.chat.sees else MAX_JSON


def _check_model(served: ServedModel, wanted: str | None) -> None:
    if wanted is not None and wanted != served.name:
        raise Refusal(404, f"this server has no model '{wanted}'; it serves '{served.name}'")


# --------------------------------------------------------------------------------------------------------- about the server


def _add_information_routes(app: "FastAPI", served: ServedModel) -> None:
    from fastapi import Response

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": f"tether {__version__}"})

    @app.get("/v1/models")
    async def models() -> Response:
        entry = {"id": served.name, "object": "model", "owned_by": "tether", "max_model_len": served.max_positions}
        return json_response({"object": "list", "data": [{**entry, "vocab_size": served.vocabulary_size}]})


# -------------------------------------------------------------------------------------------------------------- generation


def _add_generation_routes(app: "FastAPI", served: ServedModel) -> None:
    from fastapi import Request, Response
    from starlette.responses import StreamingResponse

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _read(request, CompletionBody)
        _check_model(served, body.model)
        prompts = body.prompts(served.encode)
        scores = [await served.score(prompt) for prompt in prompts] if body.prompt_logprobs is not None else []
        requests = [one for prompt in prompts for one in body.requests(prompt, served.room(prompt), COMPLETION_TOKENS)]
        answers = await served.respond(requests, request.is_disconnected)
        choices = [_completion_choice(served, body, index, answer) for index, answer in enumerate(answers)]
        for index, (prompt, score) in enumerate(zip(prompts, scores, strict=False)):
            tables = [{str(token): {"logprob": value}} for token, value in zip(prompt[1:], score, strict=True)]
            choices[index * body.n]["prompt_logprobs"] = [None, *tables]  # as vLLM has them; nothing predicts the first
        return json_response(_envelope(served, "text_completion", choices, prompts, answers))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await _read(request, ChatBody, _most_json(served))
        served.note_name(body.model)
        body = body.model_copy(update={"max_tokens": body.budget})
        messages, tools = await asyncio.to_thread(body.conversation, served.chat.sees)
        images = tuple(image for message in messages for image in message.images)
        await served.look_at(images)
        served.check_text(served.agent_chat.num_characters(messages, tools))
        closing_tags: tuple[str, ...]
        said: Callable[[str], dict[str, Any]]
        if served.as_trained and not _uses_tools(messages, tools):
            prompt = served.chat.prompt([{"role": message.role, "content": message.text} for message in messages])
            closing_tags, said = (ANSWER_CLOSE,), _said_as_trained
        else:
            served.agent_chat.parser(tools)  # an unknown format is refused before anything is sampled
            prompt = served.agent_chat.prompt(messages, tools)
            closing_tags, said = (), partial(_said, served, tools, served.agent_chat.opens_thinking(prompt))
        room = served.room(prompt, images)
        answers = await served.respond(body.requests(prompt, room, room, closing_tags, images), request.is_disconnected)
        choices = [_chat_choice(served, body, index, answer, said(_text(served, body, answer))) for index, answer in enumerate(answers)]
        return chat_response(_envelope(served, "chat.completion", choices, [prompt], answers), body)

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        if declared_type(request) == LINES:
            lines = (await read_body(request, _most_json(served))).splitlines()
            if len(lines) > MOST_LINES:
                raise Refusal(400, f"the body has {len(lines)} lines; send at most {MOST_LINES} at a time")
            return StreamingResponse(_answers(served, lines), media_type=LINES)
        return json_response(await _generate(served, await _read(request, GenerateBody, _most_json(served)), request.is_disconnected))


async def _generate(served: ServedModel, body: GenerateBody, gone: Callable[[], Awaitable[bool]]) -> dict[str, Any]:
    answers = await served.respond(await _token_requests(served, body), gone)
    choices = [_token_choice(body, index, answer) for index, answer in enumerate(answers)]
    return {"request_id": body.request_id or uuid.uuid4().hex, "choices": choices}


async def _token_requests(served: ServedModel, body: GenerateBody) -> list[ResponseRequest]:
    _check_model(served, body.model)
    prompt, images = tuple(body.token_ids), tuple[Image, ...]()
    if body.images is not None:
        prompt, images = await asyncio.to_thread(body.images.placed, body.token_ids, served.policy.vision)
    return body.sampling_params.requests(prompt, served.room(prompt, images), COMPLETION_TOKENS, images=images)


async def _answers(served: ServedModel, lines: Sequence[bytes]) -> AsyncIterator[str]:
    """The answers to many requests, each as soon as it is there: `request_id` says to which. One that is refused is refused alone.

    All are read before the first is queued: one thread of Python computes and another reads, and a prompt that came alone would be computed alone.
    """
    bodies, requests, refused = [], [], []
    for line in lines:
        said: dict[str, Any] = {}
        try:
            said = json_object(line, "the line")
            body = read_fields(said, GenerateBody)
            if body.sampling_params.n > 1:
                raise BadInput(f"n is {body.sampling_params.n}, but a line asks for one response; send n lines")
            requests += await _token_requests(served, body)
            bodies.append(body)
        except (Refusal, *COMPUTE_ERRORS) as error:
            refused.append(_refused_line(said.get("request_id"), error))
    if refused:
        yield "".join(refused)
    try:
        async with aclosing(served.answers(requests)) as answers:  # closed, and with it what nobody waits for, where the client goes
            async for found in answers:
                yield "".join(_answer_line(bodies[number], answer) for number, answer in found)
    except Refusal as error:  # of all
        yield "".join(_refused_line(body.request_id, error) for body in bodies)


def _answer_line(body: GenerateBody, answer: Answer | Exception) -> str:
    if isinstance(answer, Exception):
        return _refused_line(body.request_id, answer)
    reply = {"request_id": body.request_id or uuid.uuid4().hex, "choices": [_token_choice(body, 0, answer, terse=True)]}
    return json.dumps(reply) + "\n"


def _refused_line(request_id: str | None, error: Exception) -> str:
    return json.dumps({"request_id": request_id, **_error(error)[0]}) + "\n"


def _error(error: Exception) -> tuple[dict[str, Any], int]:
    """What a client is told of an error, and the HTTP status."""
    status, message = status_of(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status}}, status


def _envelope(
    served: ServedModel, kind: str, choices: list[dict[str, Any]], prompts: list[tuple[int, ...]], answers: list[Answer]
) -> dict[str, Any]:
    fed, sampled = sum(map(len, prompts)), sum(len(answer.completion.token_ids) for answer in answers)
    return envelope(kind, served.name, choices, fed, sampled)


def _choice(index: int, answer: Answer, **more: Any) -> dict[str, Any]:
    """What the routes say alike of a response. Which weights sampled which tokens is in vLLM's form; a response never spans two versions here."""
    spans = [{"version": answer.version, "start": 0, "end": len(answer.completion.token_ids)}]
    return {
        "index": index,
        "finish_reason": finish_reason(answer.completion, more.get("message")),
        "logprobs": None,
        "weight_versions": spans,
        **more,
    }


def _ids(served: ServedModel, answer: Answer) -> dict[str, Any]:
    vision = served.policy.vision
    prompt = list(answer.prompt) if vision is None else with_placeholders(answer.prompt, vision.placeholder_id)
    return {"token_ids": list(answer.completion.token_ids), "prompt_token_ids": prompt}


def _text(served: ServedModel, body: SamplingFields, answer: Answer) -> str:
    """The text of a response, without the token that ended its turn and, unless wanted, without the stop string that ended it.

    Other special tokens stay: think and answer tags may be among them.
    """
    ids = list(answer.completion.token_ids)
    if answer.completion.finish is FinishReason.END_OF_TURN:
        ids.pop()
    text = served.chat.decode(tuple(ids))
    if body.include_stop_str_in_output:
        return text
    found = [text.index(stop) for stop in body.stops if stop in text]
    return text[: min(found)] if found else text


def _completion_choice(served: ServedModel, body: CompletionBody, index: int, answer: Answer) -> dict[str, Any]:
    choice = _choice(index, answer, text=_text(served, body, answer), **(_ids(served, answer) if body.return_token_ids else {}))
    if body.logprobs is not None:
        pieces = [str(served.tokenizer.decode([token])) for token in answer.completion.token_ids]
        logprobs = list(answer.completion.logprobs)
        top = [{piece: value} for piece, value in zip(pieces, logprobs, strict=True)]
        choice["logprobs"] = {"tokens": pieces, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": []}
    return choice


def _uses_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    return bool(tools) or any(message.role == "tool" or message.calls for message in messages)


def _said_as_trained(text: str) -> dict[str, Any]:
    """The reply opens with the think tag that the prompt ended with, so that the conversation can be sent back as it is."""
    return {"role": "assistant", "content": THINK_OPEN + text}


def _said(served: ServedModel, tools: Sequence[Tool], thinking: bool, text: str) -> dict[str, Any]:
    """The parts of a reply: reasoning, text and tool calls."""
    reply = served.agent_chat.read(text, tools, thinking=thinking)
    return reply_message(reply, [f"call_{secrets.token_hex(12)}" for _ in reply.calls])


def _chat_choice(served: ServedModel, body: ChatBody, index: int, answer: Answer, message: dict[str, Any]) -> dict[str, Any]:
    choice = _choice(index, answer, message=message, **(_ids(served, answer) if body.return_token_ids else {}))
    if body.logprobs:
        pairs = zip(answer.completion.token_ids, answer.completion.logprobs, strict=True)
        choice["logprobs"] = {
            "content": [{"token": str(served.tokenizer.decode([token])), "logprob": value, "top_logprobs": []} for token, value in pairs]
        }
    return choice


def _token_choice(body: GenerateBody, index: int, answer: Answer, *, terse: bool = False) -> dict[str, Any]:
    """`terse`: beside its log-prob nothing is said of a token that `token_ids` does not say."""
    sampled = answer.completion
    ids: list[int] | str = list(sampled.token_ids)
    logprobs: dict[str, Any] | str
    if body.packed:
        ids, logprobs = packed(sampled.token_ids, IDS), packed(sampled.logprobs, LOGPROBS)
    elif terse:
        logprobs = {"content": [{"logprob": value} for value in sampled.logprobs]}
    else:
        pairs = zip(sampled.token_ids, sampled.logprobs, strict=True)
        named: list[dict[str, Any]] = [
            {"token": f"token_id:{token}", "token_id": token, "logprob": value, "rank": None, "top_logprobs": []} for token, value in pairs
        ]
        logprobs = {"content": named}
    wanted = body.sampling_params.logprobs is not None
    return {**_choice(index, answer, stop_reason=None, token_ids=ids), "logprobs": logprobs if wanted else None}


# ----------------------------------------------------------------------------------------------------------------- weights


class StartBody(Settings):
    """POST /start_weight_update."""

    token: Annotated[str, Field(max_length=1000)]
    weight_version: Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]
    seconds: Annotated[float, Field(gt=0, le=MOST_UPDATE_SECONDS)] = UPDATE_SECONDS
    parameters: dict[str, tuple[str, list[int]]] | None = None
    """Dtype and shape of every tensor that will follow: those of another model are refused before anything is sent."""


class PathBody(Settings):
    path: Annotated[str, Field(min_length=1, max_length=4096)]


def _weights(served: ServedModel) -> dict[str, Any]:
    """Which weights are served, and which are on their way."""
    update = served.update_in_progress
    found: dict[str, Any] = {"weight_version": served.version, "updating": update is not None}
    if update is not None:
        found["update"] = {"weight_version": update.version, "since": _time(update.since), "seconds": update.seconds}
    if (lost := served.abandoned) is not None:
        found["abandoned"] = {"weight_version": lost.version, "since": _time(lost.since), "reason": lost.reason}
    return found


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _add_weight_routes(app: "FastAPI", served: ServedModel, token: str | None) -> None:
    from fastapi import Request, Response

    accepted = publisher_tokens(token)

    @app.get("/weight_info")
    async def weight_info() -> Response:
        return json_response(_weights(served))

    @app.post("/start_weight_update")
    async def start(request: Request) -> Response:
        value = await read_json(request, MAX_JSON)
        if "token" not in value:
            raise Refusal(401, f"new weights need the publisher's token; {PUBLISHER_ADVICE}")
        body = validate(StartBody, value, "request")
        if not any(hmac.compare_digest(body.token.encode(errors="replace"), known.encode()) for known in accepted):
            raise Refusal(401, f"this is not the publisher's token; {PUBLISHER_ADVICE}")
        replaced = served.version
        update = served.start_update(body.weight_version, body.seconds, body.parameters)

        def abandon_in_time() -> None:
            if served.update_in_progress is update:
                asyncio.get_running_loop().call_later(max(1.0, update.seconds_left), abandon_in_time)

        abandon_in_time()
        return json_response({"update": update.id, "seconds": update.seconds, "replaces": replaced})

    @app.post("/update_weights")
    async def take(request: Request) -> Response:
        wanted, is_file = request.query_params.get("update"), declared_type(request) == "application/octet-stream"
        try:
            served.find_update(wanted)
        except Refusal:
            async for _ in request.stream():  # kept nowhere; the client reads its refusal once it has sent everything
                pass
            raise
        with served.receiving(wanted) as update:
            source = await read_body(request, _most_bytes(served)) if is_file else Path((await _read(request, PathBody)).path)
            count = await asyncio.to_thread(update.take, source)
        served.find_update(wanted)  # it may have been replaced meanwhile
        return json_response({"tensors": count})

    @app.post("/finish_weight_update")
    async def finish(request: Request) -> Response:
        with served.receiving(request.query_params.get("update")) as update:
            await served.finish_update(update)
        return json_response({"weight_version": update.version})


# ------------------------------------------------------------------------------------------------------------- in a program


def run(served: ServedModel, listener: Any, token: str | None, drain_seconds: float = DRAIN_SECONDS) -> None:
    """Serve until the process is stopped (Ctrl-C raises KeyboardInterrupt once everything is closed)."""
    app = make_app(served, token)
    app.state.telemetry.draining.seconds = drain_seconds
    run_server(make_server(app, served.thread.stop, _limits(served), app.state.telemetry.draining), listener)


def _most_bytes(served: ServedModel) -> int:
    """Of one request: all weights at once, in the widest format."""
    return MAX_JSON + sum(8 * parameter.numel() for parameter in served.policy.module.parameters())


def _limits(served: ServedModel) -> "ConnectionLimits":
    from tether.core.connections import ConnectionLimits

    return ConnectionLimits(max_body=_most_bytes(served) + MAX_IMAGE_JSON)


@contextmanager
def serving_model(loaded: LoadedModel, name: str = "model", *, token: str | None = None, max_rows: int = 64) -> Iterator[str]:
    """A loaded model served in the background of this program, on a free port of this machine; yields the URL.

    Weight updates change the model that is given: pass a copy of one that is used otherwise.
    """
    served = ServedModel(name, loaded, max_rows=max_rows)
    with serving_app(make_app(served, token), name, _limits(served)) as url:
        yield url
