"""What the plug-ins share, without the trainers they plug into: the filter's options, rows to groups and back, and the doctor's lines."""

import importlib.metadata
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tether.algorithms.filters.group_filter import GroupFilter
from tether.cli import doctor
from tether.core.config import validate
from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.protocols import Sampling
from tether.core.types import Trajectory, Turn
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.integrations.rows import Row, cut_response, flatten, rows_as_generations
from tether.rollout.engines.stop_rule import StopRule

REWARDS, GROUPS = [1.0, 0.0, 0.5, 0.4, 1.0, 1.0], list("aabbcc")


def test_filters() -> None:
    assert GroupFilter.parse("top_p:0.9").select(REWARDS, GROUPS).kept == ["a"]
    assert GroupFilter("top_k", num_groups=2).select(REWARDS, GROUPS).kept == ["a", "b"]
    assert GroupFilter("top_k", num_groups=9).select(REWARDS, GROUPS).kept == ["a", "b", "c"]
    assert GroupFilter("top_k", num_groups=9, include_zero=False).select(REWARDS, GROUPS).kept == ["a", "b"]
    assert GroupFilter("all").select(REWARDS, GROUPS).kept_ratio == 1.0
    by_success = GroupFilter("top_k", num_groups=1, score="outcome_variance")
    assert by_success.column == "successes" and by_success.select(REWARDS, GROUPS, {"successes": [1, 1, 1, 0, 0, 0]}).kept == ["b"]


def test_auto_looks_at_the_recent_steps() -> None:
    """The ratio of this batch is 1.38: filtered alone, and not after four batches in which all prompts varied alike."""
    chosen = GroupFilter("auto", auto_ratio=1.0)
    assert chosen.select(REWARDS, GROUPS).kept == ["a"]
    alike = chosen.select([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], GROUPS).rv_ratio
    assert alike == 0.0 and chosen.select(REWARDS, GROUPS, earlier_ratios=[alike] * 4).kept == ["a", "b", "c"]
    assert GroupFilter("auto", auto_ratio=1.0, auto_steps=1).select(REWARDS, GROUPS, earlier_ratios=[alike] * 4).kept == ["a"]
    assert chosen.select(REWARDS, GROUPS, earlier_ratios=[*[alike] * 9, *[2.0] * 4]).kept == ["a"]  # the oldest no longer count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "topp"}, "did you mean 'top_p'"),
        ({"score": "reward_varianc"}, "did you mean 'reward_variance'"),
        ({"loss_scale": "x"}, "is not a known filter loss_scale"),
        ({"keep": 1.5}, "key 'keep': got 1.5; it should be less than or equal to 1"),
        ({"eps": -1.0}, "key 'eps': got -1.0"),
        ({"strategy": "band"}, "needs band="),
        ({"num_groups": 2}, "num_groups is 2 with strategy top_p"),
    ],
)
def test_wrong_filters(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        validate(GroupFilter, options, "filter")
    with pytest.raises(ValueError, match=re.escape(next(iter(options)))):
        GroupFilter(**options)


def test_an_episode_as_a_row_and_back(tiny: Any) -> None:
    decode = lambda ids: tiny.tokenizer.decode(list(ids), skip_special_tokens=False)  # noqa: E731
    encode = lambda text: tuple(tiny.tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    texts = [
        ("user: a\n<think>", " go up </think> <answer> Up </answer>"),
        ("\nuser: b\n<think>", " left </think> <answer> Left </answer>"),
    ]
    turns = []
    for fed, written in texts:
        ids = encode(written)
        end = len(encode(written[: written.index("</think>")]))
        turns.append(Turn(encode(fed), ids, (-0.5,) * len(ids), FinishReason.STOP_TEXT, written, (0, end), reward=0.5))
    flat = flatten(Trajectory(0, 0, 1, turns, StopReason.SUCCESS, True))
    assert flat.prompt_ids == list(turns[0].context_ids) and len(flat.mask) == len(flat.completion_ids) == len(flat.logprobs)
    assert sum(flat.mask) == sum(len(turn.response_ids) for turn in turns)
    row = Row("k", tuple(flat.prompt_ids), tuple(flat.completion_ids), tuple(map(bool, flat.mask)), True, None)
    found = rows_as_generations([row, row], ["g", "g"], [1.0, float("nan")], [True, False], decode, ReasoningRule())
    (group,) = found.groups
    (back,) = group.trajectories
    assert [turn.response_ids for turn in back.turns] == [turn.response_ids for turn in turns]
    assert [turn.context_ids for turn in back.turns] == [turn.context_ids for turn in turns]
    assert [turn.reasoning_span for turn in back.turns] == [turn.reasoning_span for turn in turns]
    assert (back.reward, back.success) == (1.0, True) and len(group.errored) == 1
    assert group.errored[0].error == "no reward function scored this completion"


def test_a_response_ends_with_its_tag(tiny: Any) -> None:
    ids = tiny.tokenizer.encode(" a </think> <answer> Up </answer> and more", add_special_tokens=False)
    cut = cut_response(StopRule(tiny.tokenizer), ids, [-1.0] * len(ids), Sampling(max_tokens=200), ("</answer>",))
    assert tiny.tokenizer.decode(list(cut.token_ids)).endswith("</answer>") and cut.finish is FinishReason.STOP_TEXT
    assert len(cut.logprobs) == len(cut.token_ids) < len(ids)
    short = cut_response(StopRule(tiny.tokenizer), ids[:3], None, Sampling(max_tokens=200), ("</answer>",))
    assert short.finish is FinishReason.LENGTH and short.logprobs == ()


def test_the_doctor_on_a_plugin_that_verl_would_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert "not offered the plug-in" in doctor._trainer("verl", "0.9.1").detail
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [SimpleNamespace(name="tether")])
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert "VERL_USE_EXTERNAL_PLUGINS is 'none'" in doctor._trainer("verl", "0.9.1").detail
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "auto")
    monkeypatch.setattr(
        doctor.subprocess, "run", lambda *given, **options: SimpleNamespace(returncode=1, stderr="a\nImportError: no ray", stdout="")
    )
    finding = doctor._trainer("verl", "0.9.1")
    assert not finding.good and finding.detail == "verl 0.9.1 is here, but the plug-in does not load: ImportError: no ray"
