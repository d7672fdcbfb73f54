"""The recipe of tiny-vl: what is written, and that the tower learns the symbols that it is shown."""

from pathlib import Path

import pytest
import torch

from tether.core.images import Image, find_runs
from tether.core.types import Turn
from tether.envs.registry import make_env
from tether.models.chat import ChatFormat
from tether.models.load import load_model
from tether.models.policy import Policy
from tether.training.sft.experts import Experts
from tether.training.sft.eyes import give_eyes, learn_words, sighted
from tether.training.sft.settings import EyesSettings, Weaknesses

SMALL = {"steps": 1, "episodes": 2, "turns": 1}


def test_a_text_is_read_as_by_tiny() -> None:
    model, tokenizer = sighted(EyesSettings())
    tiny, words = load_model("tiny", device="cpu")
    ids = torch.tensor([words.encode("Walk over the frozen lake to the goal", add_special_tokens=False)])
    assert ids.tolist() == [tokenizer.encode("Walk over the frozen lake to the goal", add_special_tokens=False)]
    known = len(words)
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits[..., :known], tiny(input_ids=ids).logits, atol=1e-4)


def test_the_tower_learns_symbols() -> None:
    torch.manual_seed(0)
    model, tokenizer = sighted(EyesSettings())
    policy, losses = Policy(model, tokenizer), []
    learn_words(policy, EyesSettings(word_steps=25), lambda stage, done, total, remark: losses.append(float(remark.split()[1])))
    assert losses[-1] < 0.6 * losses[0]
    assert policy.vision is not None and not policy.vision.is_trained


def test_what_is_written_can_be_loaded_and_shown_a_board(tmp_path: Path) -> None:
    give_eyes(EyesSettings(word_steps=1, skill=SMALL, habit=SMALL, batch=2), tmp_path / "vl", "cpu", lambda *_: None)
    policy = Policy(*load_model(str(tmp_path / "vl"), device="cpu"))
    assert policy.vision is not None and policy.tokenizer is not None and policy.backbone is not None
    chat = ChatFormat(policy.tokenizer, policy.end_of_turn_ids, policy.vision)
    env = make_env("frozen_lake", observation="image")
    (shown,) = Experts([env], chat, Weaknesses(), end_of_turn=False, turns=1).record(0, range(1), lambda *_: None)
    (turn,) = shown.trajectory.turns
    assert isinstance(turn, Turn) and [(run.length, run.digest) for run in find_runs(turn.context_ids)] == [(16, turn.images[0].digest)]
    assert turn.images[0] is Image.of(turn.images[0].pixels) and sum(p.numel() for p in policy.module.parameters()) == pytest.approx(
        2.5e6, rel=0.1
    )
