"""The recipe of `tiny` gives a loadable folder, twice the same weights, and its experts always answer in the grammar."""

import random
from pathlib import Path

import pytest

import tether
from tether.core.grammar import parse_response, split_actions
from tether.models.chat import ChatFormat
from tether.models.load import load_model
from tether.training.warmstart import demonstrators, recipe
from tether.training.warmstart.demonstrators import demonstrate
from tether.training.warmstart.recipe import WarmstartSettings, play_expert, warmstart

SMALL = WarmstartSettings(steps=2, episodes=8, batch=4, width=32, hidden=48, layers=2, heads=2)


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_experts_answer_in_the_grammar(name: str) -> None:
    env = tether.make_env(name)
    rng, named, all_turns = random.Random(0), 0, 0
    for seed in range(25):
        for shown, response in play_expert(env, seed, rng):
            parsed = parse_response(response)
            assert parsed.well_formed and parsed.reasoning and shown
            actions = split_actions(parsed.answer or "")
            assert actions == ["Wait"] or (1 <= len(actions) <= 2 and set(actions) <= {"Left", "Right", "Up", "Down"})
            named += actions != ["Wait"]
            all_turns += 1
    assert named > 0.8 * all_turns  # sloppy now and then, not as a rule


def test_a_sure_expert_solves_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    for weakness in ("CONFUSION", "INDECISION", "SLOPPINESS"):
        monkeypatch.setattr(demonstrators, weakness, 0.0)
    for name, options in (("frozen_lake", {"slip": 0.0}), ("sokoban", {"max_turns": 30})):
        env = tether.make_env(name, **options)
        for seed in range(10):
            env.reset(seed)
            rng = random.Random(seed)
            while not (step := env.step(demonstrate(env, rng).answer)).done:
                pass
            assert step.success, f"{name} {seed}"


def test_there_is_no_expert_for_other_environments() -> None:
    with pytest.raises(TypeError, match="there is no demonstrator for object"):
        demonstrate(object(), random.Random(0))  # type: ignore[arg-type]


def test_two_steps_make_a_loadable_folder_and_the_same_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "TOKENIZER_EPISODES", 20)
    stages: list[str] = []
    for name in ("one", "two"):
        warmstart(SMALL, tmp_path / name, "cpu", lambda stage, done, total, remark: stages.append(stage))
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "two" / "model.safetensors").read_bytes()
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
    assert {"demonstrations", "training"} <= set(stages)
    loaded = load_model(str(tmp_path / "one"), device="cpu")
    chat = ChatFormat(loaded.tokenizer)
    assert chat.decode(chat.first_prompt("Rules.", "_P_G")).endswith("_P_G<|im_end|>\n<|im_start|>assistant\n<think>")
    assert len(chat.encode("_P_G")) == 4  # every cell of a board is a token of its own
    assert loaded.model.config.vocab_size == len(loaded.tokenizer)


def test_a_batch_larger_than_the_episodes_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "TOKENIZER_EPISODES", 4)
    few = SMALL.model_copy(update={"steps": 1, "episodes": 2, "batch": 4})
    warmstart(few, tmp_path / "few", "cpu", lambda *_: None)
    assert (tmp_path / "few" / "model.safetensors").is_file()
