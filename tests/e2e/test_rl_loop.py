"""examples/rl_loop.py trains `tiny` on FrozenLake from public pieces, and its update is the one that the learner makes."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tether import Policy, load_model, play
from tether.algorithms.presets import preset
from tether.rollout.engines.registry import make_engine
from tether.rollout.pack import pack
from tether.training.estimate import AdvantageEstimator
from tether.training.learner import Learner, Rates
from tether.training.settings import LearnerSettings

PATH = Path(__file__).parents[2] / "examples" / "rl_loop.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("rl_loop", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MAX_TOKENS = 40
    return module


def test_it_is_one_short_file_without_private_names() -> None:
    text = PATH.read_text()
    assert len(text.splitlines()) <= 150
    assert not re.search(r"\._|import _", text), "public pieces only"


def test_it_runs_and_is_reproducible(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps and one: the first step prints the same, its loss and information included."""
    rates = example.main(steps=2, prompts=2, group_size=2)
    lines = capsys.readouterr().out.splitlines()
    assert len(rates) == len(lines) == 2 and lines[0].startswith("step 1: success ") and "nats" in lines[0]
    assert example.main(steps=1, prompts=2, group_size=2) == rates[:1]
    assert capsys.readouterr().out.splitlines() == lines[:1]


@pytest.mark.long
@pytest.mark.long
def test_its_gradient_is_that_of_the_learner(example: Any) -> None:
    """The same batch through `update` of the example and through the learner: the same loss, and the same weights to rounding."""
    policies = [Policy(*load_model("tiny", device="cpu")) for _ in range(2)]
    engine = make_engine("native", policies[0], max_context=1024)
    budgets = {"max_tokens": example.MAX_TOKENS, "max_context": 1024}
    groups = play("frozen_lake", engine, 2, 4, 0, tokenizer=policies[0].tokenizer, rollout=budgets)
    algorithm = preset("grpo")
    packed = pack([t for group in groups for t in group.trajectories])
    batch = example.with_advantages(packed, algorithm)
    assert batch.advantages_BT.abs().max() > 0
    optimizer = torch.optim.AdamW(policies[0].module.parameters(), lr=1e-3, weight_decay=0.0)
    loss = example.update(policies[0], batch, algorithm, optimizer)

    settings = LearnerSettings(learning_rate=1e-3, update_batch=64)
    learner = Learner(policies[1], algorithm, settings, temperature=1.0, max_tokens=example.MAX_TOKENS)
    estimated, _ = AdvantageEstimator(algorithm, None, None, temperature=1.0, micro_tokens=8192).complete(packed)
    assert torch.equal(estimated.advantages_BT, batch.advantages_BT)
    metrics = learner.update(estimated, [torch.arange(batch.num_trajectories)], 1.0, Rates(1e-3))
    assert metrics["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-7)
    for one, other in zip(policies[0].module.parameters(), policies[1].module.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-4)  # a wrong sign would be 2e-3 apart
