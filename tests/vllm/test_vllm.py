"""The server engine against a real vLLM: sampling, publishing by process group and by disk, and training. `make test-vllm` runs this file.

vLLM is started once, by Tether itself. TETHER_TEST_VLLM names its command where it has an environment of its own; without vLLM the tests are
skipped.
"""

import copy
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.unit.models.sighted import logprobs_by_transformers, write_model

import tether
from tether.core.errors import BadInput, EngineUnavailable
from tether.core.images import image_digests, image_of
from tether.core.protocols import Sampling
from tether.core.types import Group
from tether.models.chat import ChatFormat
from tether.models.load import load_model
from tether.models.logprobs import score_tokens
from tether.models.policy import Policy
from tether.rollout.engines.server import ServerEngine, ServerOptions
from tether.rollout.engines.vllm_server import LOG_NAME, VllmOptions, VllmServer
from tether.rollout.episode import EpisodeRules
from tether.rollout.sampler import EnvPool, EnvSpec, play_plan, training_plan
from tether.runs.store import RunStore
from tether.training.sft.eyes import sighted
from tether.training.sft.settings import EyesSettings

COMMAND = os.environ.get("TETHER_TEST_VLLM", "vllm")
CLOSE = 1e-4
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 32, the narrowest that vLLM has for a CPU."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(COMMAND) is None, reason=f"there is no vLLM ('{COMMAND}'); run make test-vllm"),
]


@pytest.fixture(scope="module")
def address(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    options = VllmOptions(COMMAND, folder=tmp_path_factory.mktemp("vllm"))
    server = VllmServer(Policy(*tiny), 1024, options)
    yield server.address
    server.stop()


@pytest.fixture
def policy(tiny: Any) -> Policy:
    return Policy(copy.deepcopy(tiny.model), tiny.tokenizer)


def _play(engine: ServerEngine, chat: Any, **options: str) -> list[Group]:
    rules = EpisodeRules(max_context=900, max_tokens=40, format_penalty=-0.1)
    with EnvPool([EnvSpec("frozen_lake", {"instructions": "plain", **options})]) as pool:
        return play_plan(pool, training_plan(0, 1, 2, 4), engine, chat, Sampling(0.8, 40), rules)


def _responses(group: Group) -> list[tuple[int, ...]]:
    return [turn.response_ids for trajectory in group.trajectories for turn in trajectory.turns]


def _nudge(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(1.01)


@pytest.mark.parametrize("by_disk", [False, True])
def test_sampled_logprobs_and_published_weights(address: str, policy: Policy, chat: Any, tmp_path: Path, by_disk: bool) -> None:
    options = ServerOptions(weights_folder=tmp_path if by_disk else None)
    engine = ServerEngine([address], policy, max_rows=8, max_context=900, options=options)
    assert engine.backend == "server (vllm)" and engine.capabilities.weight_sync
    for number in (1, 2):
        assert engine.sync()["probe_difference"] < CLOSE
        groups = _play(engine, chat)
        again = _play(engine, chat)
        for trajectory, other in zip(groups[0].trajectories, again[0].trajectories, strict=True):
            (sequence,) = trajectory.sequences
            scores = [0.0, *score_tokens(policy, sequence.token_ids, 0.8)]
            for mine, here, sampled in zip(sequence.sampled_logprobs, scores, sequence.loss_mask, strict=True):
                assert not sampled or mine == pytest.approx(here, abs=CLOSE)
            assert trajectory.turns[0].response_ids == other.turns[0].response_ids, "the same seed"
            assert set(trajectory.turns[0].versions) == {number - 1}
        _nudge(policy)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_images(family: str, tmp_path: Path) -> None:
    """A model that sees: vLLM reads the very tokens, and its log-probs are those of transformers, also with another tower."""
    model, tokenizer = (
        sighted(EyesSettings()) if family == "qwen2_5_vl" else load_model(str(write_model(family, tmp_path / family, **WIDE)), device="cpu")
    )
    policy = Policy(model.eval(), tokenizer)
    assert policy.vision is not None
    never = list(policy.vision.never_sampled)
    chat = ChatFormat(tokenizer, policy.end_of_turn_ids, policy.vision)
    try:
        server = VllmServer(policy, 1024, VllmOptions(COMMAND, folder=tmp_path))
    except EngineUnavailable:
        if "No module named 'torchvision'" in (tmp_path / LOG_NAME).read_text():
            pytest.skip("this vLLM has no torchvision, which its models of Qwen-VL need")
        raise
    try:
        engine = ServerEngine([server.address], policy, max_rows=8, max_context=900)
        for _ in range(2):
            assert engine.sync()["probe_difference"] < CLOSE
            for trajectory in _play(engine, chat, observation="image")[0].trajectories:
                assert image_digests(trajectory.turns[0].context_ids)
                (sequence,) = trajectory.sequences
                images = [image_of(digest) for digest in image_digests(sequence.token_ids)]
                whole_TV = logprobs_by_transformers(policy, sequence.token_ids, images, 0.8)
                drawn_TV = whole_TV - torch.log1p(-whole_TV[:, never].exp().sum(dim=-1, keepdim=True))  # vLLM draws from the other tokens
                places = [place for place, sampled in enumerate(sequence.loss_mask) if sampled]
                here = drawn_TV[[place - 1 for place in places], [sequence.token_ids[place] for place in places]]
                there = torch.tensor([sequence.sampled_logprobs[place] for place in places])
                assert torch.allclose(here, there, rtol=0, atol=CLOSE), float((here - there).abs().max())
            _nudge(policy)
    finally:
        server.stop()


@pytest.mark.parametrize("by_disk", [False, True])
def test_a_learner_of_another_model_leaves_vllm_as_it_was(
    address: str, policy: Policy, tiny: Any, chat: Any, tmp_path: Path, by_disk: bool
) -> None:
    """It is refused before vLLM is paused, where every request would wait for ever."""
    engine = ServerEngine([address], policy, max_rows=8, max_context=900)
    engine.sync()
    before = _play(engine, chat)
    config = copy.deepcopy(tiny.model.config)
    config.intermediate_size //= 2
    other = Policy(type(tiny.model)(config), tiny.tokenizer)
    options = ServerOptions(weights_folder=tmp_path if by_disk else None)
    with pytest.raises(BadInput, match="serves another model: intermediate_size is 256 in the trained model and 512 in the served one"):
        ServerEngine([address], other, max_rows=8, max_context=900, options=options).sync()
    assert httpx.get(f"{address}/is_paused").json() == {"is_paused": False}
    assert [_responses(group) for group in _play(engine, chat)] == [_responses(group) for group in before]


def test_training(address: str, tmp_path: Path) -> None:
    rollout = {"num_groups": 2, "group_size": 4, "max_tokens": 40, "max_context": 900, "engine": address}
    tether.train("frozen_lake", out=tmp_path / "run", steps=2, filter="all", rollout=rollout, evaluation={"prompts": 2})
    for record in RunStore.open(tmp_path / "run").steps()[1:]:
        assert record.metrics["update/mismatch"] < CLOSE and record.metrics["update/probe_difference"] < CLOSE
        assert record.metrics["rollout/staleness"] == 0 and abs(record.metrics["update/importance_weight"] - 1) < CLOSE
