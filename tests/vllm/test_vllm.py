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

import pytest
import torch

import tether
from tether.core.protocols import Sampling
from tether.core.types import Group
from tether.models.logprobs import score_tokens
from tether.models.policy import Policy
from tether.rollout.engines.server import ServerEngine, ServerOptions
from tether.rollout.engines.vllm_server import VllmOptions, VllmServer
from tether.rollout.episode import EpisodeRules
from tether.rollout.sampler import EnvPool, EnvSpec, play_plan, training_plan
from tether.runs.store import RunStore

COMMAND = os.environ.get("TETHER_TEST_VLLM", "vllm")
CLOSE = 1e-4

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


def _play(engine: ServerEngine, chat: Any) -> list[Group]:
    rules = EpisodeRules(max_context=900, max_tokens=40, format_penalty=-0.1)
    with EnvPool([EnvSpec("frozen_lake", {"instructions": "plain"})]) as pool:
        return play_plan(pool, training_plan(0, 1, 2, 4), engine, chat, Sampling(0.8, 40), rules)


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


def test_training(address: str, tmp_path: Path) -> None:
    rollout = {"num_groups": 2, "group_size": 4, "max_tokens": 40, "max_context": 900, "engine": address}
    tether.train("frozen_lake", out=tmp_path / "run", steps=2, filter="all", rollout=rollout, evaluation={"prompts": 2})
    for record in RunStore.open(tmp_path / "run").steps()[1:]:
        assert record.metrics["update/mismatch"] < CLOSE and record.metrics["update/probe_difference"] < CLOSE
        assert record.metrics["rollout/staleness"] == 0 and abs(record.metrics["update/importance_weight"] - 1) < CLOSE
