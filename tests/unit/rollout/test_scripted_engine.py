"""The scripted engine drives conversations with responses from a function or a file."""

import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.core.enums import FinishReason
from tether.core.errors import BadInput
from tether.rollout.engines.native import NativeEngine
from tether.rollout.engines.registry import DEFAULT_ENGINE, ENGINES, SERVERS, EngineEntry, make_engine
from tether.rollout.engines.scripted import ScriptedEngine
from tether.training.build import check_engine_of_ranks
from tether.training.settings import RunSettings

RIGHT, DOWN = " </think> <answer> Right </answer>", " </think> <answer> Down </answer>"


def test_a_function_answers_and_sees_what_the_model_would_see(tiny: Any) -> None:
    seen: list[tuple[str, int, int]] = []

    def respond(context: str, conversation: int, turn: int) -> str:
        seen.append((context, conversation, turn))
        return RIGHT if turn == 0 else DOWN

    engine = ScriptedEngine(respond, tiny.tokenizer)
    groups = tether.play("frozen_lake", engine, prompts=2, group_size=1, seed=3, options={"slip": 0.0, "max_turns": 2})
    first = groups[0].trajectories[0]
    assert [turn.text for turn in first.turns[:2]] == [RIGHT, DOWN][: len(first.turns)]
    assert first.turns[0].finish is FinishReason.STOP_TEXT and set(first.turns[0].logprobs) == {0.0}
    assert seen[0][0].endswith("<think>") and seen[0][1:] == (0, 0)
    if len(first.turns) > 1:
        assert seen[1][0].startswith(seen[0][0] + RIGHT) and seen[1][1:] == (0, 1)
    assert engine.statistics.sampled_tokens == sum(t.num_sampled for group in groups for t in group.trajectories)
    assert not engine.capabilities.logprobs and not engine.capabilities.weight_sync


def test_a_file_gives_each_conversation_a_line(tiny: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text(f'["{RIGHT}", "{DOWN}"]\n\n"{DOWN}"\n')
    options = {"slip": 0.0, "max_turns": 3, "size": 6}
    groups = tether.play("frozen_lake", ScriptedEngine(script, tiny.tokenizer), prompts=3, group_size=1, options=options)
    texts = [[turn.text for turn in group.trajectories[0].turns] for group in groups]
    assert all(text == DOWN for text in texts[1])
    assert texts[0][0] == RIGHT and texts[2][0] == RIGHT, "the lines begin again"
    assert all(text == DOWN for text in texts[0][1:]), "the last response is repeated"


def test_a_long_response_is_cut_at_the_budget(tiny: Any) -> None:
    engine = ScriptedEngine(lambda context, conversation, turn: " go right" * 50, tiny.tokenizer)
    groups = tether.play("frozen_lake", engine, prompts=1, group_size=1, rollout={"max_tokens": 7, "max_context": 900})
    turn = groups[0].trajectories[0].turns[0]
    assert len(turn.response_ids) == 7 and turn.finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the script"),
        ("", "at least one line"),
        ("[1]\n", "list of strings"),
        ("{\n", "does not parse"),
        ("[]\n", "at least"),
    ],
)
def test_a_bad_script_is_one_line(tiny: Any, tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "script.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=message):
        ScriptedEngine(path, tiny.tokenizer)


def test_names_of_engines(tiny: Any) -> None:
    policy = tether.Policy(tiny.model, tiny.tokenizer)
    assert make_engine("native", policy).backend == "contiguous"
    with pytest.raises(BadInput, match="unknown engine 'nativ': did you mean 'native'"):
        make_engine("nativ", policy)


def test_every_entry_names_a_function_that_builds_and_says_what_the_engine_says(tiny: Any) -> None:
    for entry in (*ENGINES.values(), SERVERS):
        module, _, function = entry.builder.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert ENGINES[DEFAULT_ENGINE].shares_weights and NativeEngine(tether.Policy(tiny.model, tiny.tokenizer)).capabilities.shares_weights


def build_parrot(name: str, policy: tether.Policy, **_: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda text, conversation, turn: "<answer>Up</answer>", policy.tokenizer)


def test_a_new_engine_is_a_file_and_an_entry(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, memory and training learn from the entry what they must know; no other place knows the name."""
    monkeypatch.setitem(ENGINES, "parrot", EngineEntry(f"{__name__}:build_parrot", uses_servers=True, serves_ranks=False))
    settings = RunSettings.model_validate({"env": {"name": "frozen_lake"}, "rollout": {"engine": "parrot", "max_staleness": 1}})
    assert settings.rollout.uses_servers and settings.algorithm.importance_cap == 2.0
    with pytest.raises(BadInput, match=r"rollout\.engine is parrot, which"):
        check_engine_of_ranks(settings, Namespace(size=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has speculative_tokens 4, but engine is parrot"):
        RunSettings.model_validate({"env": {"name": "frozen_lake"}, "rollout": {"engine": "parrot", "speculative_tokens": 4}})
    engine = make_engine("parrot", tether.Policy(tiny.model, tiny.tokenizer))
    groups = tether.play("frozen_lake", engine, prompts=1, group_size=1, tokenizer=tiny.tokenizer)
    assert groups[0].trajectories[0].turns[0].text == "<answer>Up</answer>"


def test_an_engine_without_a_tokenizer_needs_one(tiny: Any) -> None:
    engine = ScriptedEngine(lambda context, conversation, turn: RIGHT, tiny.tokenizer)
    engine.tokenizer = None  # type: ignore[assignment]
    with pytest.raises(BadInput, match="no tokenizer"):
        tether.play("frozen_lake", engine)
