"""Images through real servers: token ids with pictures, chat with image parts, and what is refused. The model has random weights."""

import base64
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import httpx
import numpy as np
import pytest
import torch
from tests.unit.hostile_images import png_of_size
from tests.unit.models.sighted import logprobs_by_transformers, write_model

import tether
from tether.core.errors import BadInput
from tether.core.http import serving_app
from tether.core.images import _INTERNED, Image, find_runs, image_digests, with_placeholders
from tether.core.protocols import Sampling
from tether.core.types import Completion, Trajectory
from tether.models.chat import ChatFormat
from tether.models.load import LoadedModel, load_model
from tether.models.policy import Policy
from tether.models.scoring.server import ServerScorer
from tether.rollout.engines.dialects import CompletionsDialect, LlamaCppDialect, TetherDialect, TokenRequest, VllmDialect
from tether.rollout.engines.native import NativeEngine
from tether.rollout.engines.server import ServerEngine
from tether.rollout.episode import EpisodeRules, EpisodeSeeds
from tether.rollout.gateway.agents import FunctionAgent
from tether.rollout.gateway.player import AgentPlayer, AgentRules
from tether.rollout.serving.app import make_app
from tether.rollout.serving.requests import SamplingFields
from tether.rollout.serving.served import ServedModel

SAMPLED = 6


def _picture(seed: int, size: tuple[int, int] = (16, 24)) -> Image:
    return Image.of(np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8))


class Talk:
    """A conversation of two turns, each with a picture of its own."""

    prefix_key, closing_tags = 0, ()

    def __init__(self, chat: ChatFormat) -> None:
        self._chat, self.uniforms = chat, np.random.Generator(np.random.PCG64(5))
        self.images = [_picture(1), _picture(2)]
        self.fed: list[tuple[int, ...]] = []
        self.completions: list[Completion] = []

    def begin(self) -> tuple[int, ...]:
        return self._feed(self._chat.first_prompt("Rules. " * 30, f"{self.images[0].marker}\nlook"))

    def receive(self, completion: Completion) -> tuple[int, ...] | None:
        self.completions.append(completion)
        if len(self.completions) == 2:
            return None
        return self._feed(self._chat.next_prompt(f"again {self.images[1].marker} now", completion.token_ids))

    def _feed(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        self.fed.append(ids)
        return ids


class Server:
    """A model that is served, and the same model here."""

    def __init__(self, family: str, folder: Path) -> None:
        self.name = str(write_model(family, folder))
        self.policy = Policy(*load_model(self.name, device="cpu"))
        assert self.policy.tokenizer is not None and self.policy.vision is not None
        self.vision = self.policy.vision
        self.chat = ChatFormat(self.policy.tokenizer, self.policy.end_of_turn_ids, self.vision)
        self.served = ServedModel("model", load_model(self.name, device="cpu"), max_rows=4)
        self.url = ""

    def request(self, ids: tuple[int, ...], state: Any) -> dict[str, Any]:
        request = TokenRequest(ids, Sampling(1.0, SAMPLED), SAMPLED, (), (), 0, state, self.vision)
        return TetherDialect().body("model", request)

    def post(self, body: dict[str, Any], path: str = "/inference/v1/generate", status: int = 200) -> Any:
        reply = httpx.post(f"{self.url}{path}", json=body, timeout=60)
        assert reply.status_code == status, reply.text
        return reply.json()

    def refusal(self, body: dict[str, Any], path: str = "/inference/v1/generate") -> str:
        message = str(self.post(body, path, 400)["error"]["message"])
        assert len(message.splitlines()) == 1
        return message


@pytest.fixture(scope="module", params=["qwen2_5_vl", "smolvlm"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(request.param, tmp_path_factory.mktemp("sighted") / request.param)
    with serving_app(make_app(made.served), "model") as made.url:
        yield made


def test_token_ids_with_images_sample_what_the_native_engine_samples(server: Server) -> None:
    """Nobody but the server holds the pictures while it works, nor between the turns: the slot that it kept goes on without them."""
    talk = Talk(server.chat)
    NativeEngine(server.policy, max_rows=2).run([talk], Sampling(1.0, SAMPLED))
    uniforms = np.random.Generator(np.random.PCG64(5))
    prompt: tuple[int, ...] = ()
    bodies, expected = [], [(each.token_ids, each.logprobs) for each in talk.completions]
    for fed, completion in zip(talk.fed, talk.completions, strict=True):
        prompt = (*prompt, *fed)
        bodies.append(server.request(prompt, uniforms.bit_generator.state))
        uniforms.random(len(completion.token_ids), dtype=np.float32)
        prompt = (*prompt, *completion.token_ids)
    digests = [image.digest for image in talk.images]
    assert image_digests(prompt) == digests
    del talk, fed, completion
    server.chat = ChatFormat(server.chat.tokenizer, server.policy.end_of_turn_ids, server.vision)
    for body, (ids, logprobs) in zip(bodies, expected, strict=True):
        gc.collect()
        assert not set(digests) & set(_INTERNED), "the pictures are gone"
        choice = server.post(body)["choices"][0]
        server.served.thread.exclusive(lambda: None).result()  # the batch has ended
        assert tuple(choice["token_ids"]) == ids
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(logprobs, abs=1e-5)
    assert server.served.thread.statistics.shared_tokens >= len(bodies[0]["token_ids"])


def test_a_request_outlives_its_client(server: Server) -> None:
    """What is queued holds its pictures, also when whoever waited for the answer has gone."""
    image = _picture(11)
    prompt, digest = server.chat.encode(f"a{image.marker}b"), image.digest
    (request,) = SamplingFields(seed=1).requests(prompt, 100, SAMPLED, images=(image,))
    del image
    gc.collect()
    assert digest in _INTERNED and len(server.served.thread.submit(request).result().token_ids) == SAMPLED


def test_new_weights_of_the_tower_are_seen(server: Server) -> None:
    """The features of a picture are those of the published weights, also of one that was seen before."""
    image = _picture(3)
    prompt = server.chat.first_prompt("s", f"{image.marker} look")
    state = np.random.PCG64(7).state
    changed = Policy(*load_model(server.name, device="cpu"))
    with torch.no_grad():
        for part in changed.vision.tower if changed.vision is not None else ():
            for parameter in part.parameters():
                parameter.mul_(3.0)
    policies = (server.policy, changed)
    for policy in policies:
        ServerEngine([server.url], policy, max_rows=2).sync()
        alone = Talk(server.chat)
        alone.uniforms, alone.begin = np.random.Generator(np.random.PCG64(7)), lambda: prompt  # type: ignore[method-assign]
        alone.completions.append(Completion((), (), None))  # type: ignore[arg-type]
        NativeEngine(policy, max_rows=1).run([alone], Sampling(1.0, SAMPLED))
        logprobs = server.post(server.request(prompt, state))["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in logprobs] == pytest.approx(alone.completions[1].logprobs, abs=1e-5)
    ServerEngine([server.url], server.policy, max_rows=2).sync()


BOMB = f"data:image/png;base64,{base64.b64encode(png_of_size(9_000, 9_000)).decode()}"


def test_wrong_images_of_token_ids_are_refused(server: Server) -> None:
    image, other = _picture(4), _picture(5, (32, 24))
    body = server.request(server.chat.first_prompt("s", f"{image.marker} look"), np.random.PCG64(7).state)
    (start, length, digest, patch), *more = body["images"]["runs"]
    first, url = [start, length, digest, patch], image.data_url

    def with_images(runs: Any = None, urls: Any = None) -> dict[str, Any]:
        return {**body, "images": {"runs": [first, *more] if runs is None else runs, "urls": {digest: url} if urls is None else urls}}

    wrong = [
        (with_images(urls={digest: other.data_url}), f"has pixels of the digest {other.digest}"),
        (with_images(urls={}), "not among images.urls"),
        (with_images(urls={digest: "https://example.org/a.png"}), "nothing is fetched"),
        (with_images(urls={digest: "data:image/png;base64,!!!"}), "is broken"),
        (with_images(urls={digest: "data:image/png;base64,AAAA"}), "cannot be read as an image"),
        (with_images(urls={digest: BOMB}), "9000 x 9000 pixels; at most"),
        (with_images(urls={f"{n:012x}": url for n in range(257)}), "images.urls"),
        (with_images([[start + 1, length, digest, patch], *more]), "other tokens than the image token"),
        (with_images([[start, length + 1, digest, patch], *more]), "other tokens than the image token"),
        (with_images([[start, 2**31 - 1, digest, patch], *more]), "send runs in order, each patch once"),
        (with_images([[start + place, 1, digest, 0] for place in range(length)] + more), "not the patches that this model makes"),
        (with_images([first, first, *more]), "send runs in order, each patch once"),
        (with_images([[start, length, digest, patch + 1], *more]), "not the patches that this model makes"),
        (with_images([[start, length, digest[:-1], patch], *more]), "images.runs"),
        (with_images([[start, length - 1, digest, patch], *more]), "not the patches that this model makes"),
        ({**body, "images": None}, f"holds token {server.vision.placeholder_id}, which stands for an image, without one"),
    ]
    for sent, words in wrong:
        assert words in server.refusal({key: value for key, value in sent.items() if value is not None})
    assert server.post(body)["choices"][0]["token_ids"]


def test_scores_of_prompts_with_images_are_refused(server: Server) -> None:
    image = _picture(12)
    with pytest.raises(BadInput, match="the prompts hold images, and servers score text only"):
        ServerScorer(server.url).score(server.chat.encode(image.marker), (3,))


def test_chat_with_images(server: Server) -> None:
    """The prompt is the one of an episode, whichever way the parts are written; replies are those of the same prompt as tokens."""
    image = _picture(6)
    parts = [{"type": "image_url", "image_url": {"url": image.data_url, "detail": "auto"}}, {"type": "text", "text": "\nlook"}]
    expected = server.chat.first_prompt("Rules.", f"{image.marker}\nlook")
    by_tokens = server.post({**server.request(expected, {}), "sampling_params": {"max_tokens": SAMPLED, "seed": 3}})
    runs = find_runs(expected)
    del image
    for content in (parts, [{"type": "input_image", "image_url": parts[0]["image_url"]["url"]}, parts[1]]):  # type: ignore[index]
        messages = [{"role": "system", "content": "Rules."}, {"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": SAMPLED, "seed": 3, "return_token_ids": True}
        choice = server.post(body, "/v1/chat/completions")["choices"][0]
        assert choice["prompt_token_ids"] == with_placeholders(expected, server.vision.placeholder_id)
        assert choice["token_ids"][:SAMPLED] == by_tokens["choices"][0]["token_ids"]
    assert all(choice["prompt_token_ids"][run.start] == server.vision.placeholder_id for run in runs)


def test_chat_refuses_images_in_one_line(server: Server, tiny_url: str) -> None:
    image = _picture(7)

    def refusal(*content: Any) -> str:
        body = {"messages": [{"role": "user", "content": list(content)}], "max_tokens": 1}
        return server.refusal(body, "/v1/chat/completions")

    def shown(url: Any) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": url}}

    assert "messages[0] has a part of which image_url is 'http://example.org/a.png'; send a data URL" in refusal(
        shown("http://example.org/a.png")
    )
    assert "send a data URL" in refusal(shown(None)) and "send a data URL" in refusal({"type": "image_url"})
    assert "9000 x 9000 pixels" in refusal(shown(BOMB))
    assert "text, and images as image_url" in refusal({"type": "input_audio", "input_audio": {}})
    wide = Image.of(np.zeros((1, 1000, 3), dtype=np.uint8))
    if server.policy.model_type.startswith("qwen"):
        assert "the model's processor refuses an image of 1000 x 1 pixels" in refusal(shown(wide.data_url))
    # A text that spells a marker must not show the picture of somebody else, which is in memory here, nor one that nobody has.
    for digest in (image.digest, "0123456789ab"):
        assert f"a text holds '<image:{digest}>'" in refusal({"type": "text", "text": "<image:"}, {"type": "text", "text": f"{digest}>"})
        message = server.refusal({"prompt": f"see <image:{digest}>", "max_tokens": 1}, "/v1/completions")
        assert f"a text holds '<image:{digest}>'" in message
    assert "stands for an image" in refusal({"type": "text", "text": server.vision.placeholder})
    reply = httpx.post(f"{tiny_url}/v1/chat/completions", json={"messages": [{"role": "user", "content": [shown(image.data_url)]}]})
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        400,
        "messages[0] has a part of type 'image_url'; the model reads text only",
    )
    tokens = {"token_ids": [1, 2], "images": {"runs": [[0, 1, image.digest, 0]], "urls": {image.digest: image.data_url}}}
    reply = httpx.post(f"{tiny_url}/inference/v1/generate", json=tokens)
    assert reply.status_code == 400 and "the model reads text only" in reply.json()["error"]["message"]


@pytest.fixture(scope="module")
def tiny_url(tiny: LoadedModel) -> Iterator[str]:
    with serving_app(make_app(ServedModel("tiny", tiny, max_rows=1)), "tiny") as url:
        yield url


def test_chat_as_the_template_has_it_ends_behind_an_image(server: Server) -> None:
    """Whether a prompt opens a think tag is read from its last tokens, patches among them."""
    agent = server.served.agent_chat
    image = _picture(8)
    prompt = server.chat.encode(f"a{image.marker}") + server.chat.encode("b")
    assert not agent.opens_thinking(prompt) and agent.opens_thinking((*prompt, *server.chat.encode("<think>")))


def test_eval_of_a_chat_endpoint_with_pictures(server: Server) -> None:
    """The server gets the pictures of the environment, over HTTP, as image parts: greedy, its replies are those of the model that is loaded."""
    options = {"observation": "image", "max_turns": 1, "instructions": "plain"}
    asked: dict[str, Any] = {"prompts": 2, "temperature": 0.0, "options": options, "rollout.max_tokens": SAMPLED}
    here = tether.evaluate(server.name, "frozen_lake", model={"device": "cpu"}, **asked)
    there = tether.evaluate(f"{server.url}#model", "frozen_lake", **asked)
    for local, remote in zip(here.groups, there.groups, strict=True):
        turns = local.trajectories[0].turns[0], remote.trajectories[0].turns[0]
        assert turns[1].text.removeprefix("<think>") == turns[0].text
        assert turns[0].images == turns[1].images and len(turns[1].images) == 1
        assert turns[1].usage is not None and turns[1].usage.prompt_tokens == len(turns[0].context_ids)


# ------------------------------------------------------------------------------------------------------------------- agents


async def looking_agent(task: dict[str, Any], llm: Any) -> float:
    """Three calls that show a picture each, sent as any client does; one that names somebody else's is refused."""
    import httpx

    messages: list[Any] = []
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:

        async def ask(content: Any) -> Any:
            return await client.post(
                f"{llm.base_url}/chat/completions", json={"messages": [*messages, {"role": "user", "content": content}]}
            )

        for url in task["urls"]:
            content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "look"}]
            reply = (await ask(content)).json()["choices"][0]["message"]["content"]
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": reply}]
        return float((await ask(task["foreign"])).status_code == 400)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.long])])  # a process takes seconds to start
def test_agents_show_images_through_the_gateway(server: Server, workers: int) -> None:
    """Exact tokens, and the pictures in the record of the turns that show them; also where another process plays the agent."""
    images, foreign = [_picture(20), _picture(21), _picture(20)], _picture(22)
    played = _played(server, {"urls": [image.data_url for image in images], "foreign": foreign.marker}, workers)
    assert played.reward == 1.0, played.error
    (sequence,) = played.sequences
    assert image_digests(sequence.token_ids) == [image.digest for image in images]
    assert [turn.images for turn in played.turns] == [(image,) for image in images]
    assert [turn.observation for turn in played.turns] == [f"[user] {image.marker}look" for image in images]
    theirs_TV = logprobs_by_transformers(server.policy, sequence.token_ids, images)
    places = [place for place, sampled in enumerate(sequence.loss_mask) if sampled]
    theirs = theirs_TV[[place - 1 for place in places], [sequence.token_ids[place] for place in places]]
    assert torch.allclose(theirs, torch.tensor([sequence.sampled_logprobs[place] for place in places]), atol=1e-5)


def _played(server: Server, task: dict[str, Any], workers: int) -> Trajectory:
    player = AgentPlayer(FunctionAgent(looking_agent), AgentRules(workers=workers))
    engine = NativeEngine(server.policy, max_rows=2, keeps_slots=True)
    rules, sampling = EpisodeRules(max_context=900, max_tokens=SAMPLED, format_penalty=0.0), Sampling(1.0, SAMPLED)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        (played,) = player.play(lambda _: task, [EpisodeSeeds(0, 0, 5, 0, 1)], engine, server.chat, sampling, rules, None)
    finally:
        player.close()
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    return played


# ------------------------------------------------------------------------------------------------------------- other servers


def test_vllm_gets_one_token_for_an_image_and_must_read_ours(server: Server) -> None:
    images = [_picture(9), _picture(10)]
    prompt = server.chat.first_prompt("s", f"{images[0].marker} then {images[1].marker}{images[0].marker} look")
    request = TokenRequest(prompt, Sampling(1.0, SAMPLED), SAMPLED, (), (), 0, {}, server.vision)
    body = VllmDialect().body("model", request)
    assert [part["url"] for part in body["content_parts"]] == [image.data_url for image in (*images, images[0])]
    assert body["token_ids"].count(server.vision.placeholder_id) == 3 and body["return_token_ids"]
    assert server.chat.decode(tuple(body["token_ids"])).count(server.vision.placeholder) == 3
    again = list(body["token_ids"])
    for image in reversed((*images, images[0])):  # what vLLM does: each is expanded in its place
        place = len(again) - 1 - again[::-1].index(server.vision.placeholder_id)
        again[place : place + 1] = server.vision.expand(image)
    assert tuple(again) == prompt
    assert set(body["sampling_params"]["logit_bias"]) == set(server.vision.never_sampled)
    expanded = with_placeholders(prompt, server.vision.placeholder_id)
    VllmDialect().check_prompt(request, {"prompt_token_ids": expanded})
    for read in (expanded[1:], None):
        with pytest.raises(BadInput, match=rf"vLLM made .* of a prompt with images that has {len(expanded)} tokens here"):
            VllmDialect().check_prompt(request, {"prompt_token_ids": read})


def test_a_server_that_takes_no_images_is_refused_before_anything_is_sampled(server: Server) -> None:
    for dialect in (CompletionsDialect(is_vllm=False), LlamaCppDialect()):
        engine, talk = ServerEngine([server.url], server.policy, max_rows=2), Talk(server.chat)
        engine.servers[0].dialect = dialect
        with pytest.raises(
            BadInput, match=rf"shows images, and the server at .* \({dialect.name}\) takes token ids alone; use tether"
        ) as refused:
            engine.run([talk], Sampling(1.0, SAMPLED))
        assert not talk.completions and len(str(refused.value).splitlines()) == 1
