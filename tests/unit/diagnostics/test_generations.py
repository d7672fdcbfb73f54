"""Rows of any trainer as Tether's groups, the run folder they are written to, and the monitor that does both."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tether
from tether.core.enums import Scope, StopReason
from tether.core.errors import BadInput, UnknownName
from tether.core.seeding import derive_seed
from tether.diagnostics.logger import TetherLogger, generation_metrics, read_generations
from tether.diagnostics.monitor import Monitor
from tether.diagnostics.pairs import rollout_rows
from tether.diagnostics.rollouts import open_rollouts
from tether.diagnostics.settings import AlarmRules
from tether.diagnostics.summary import group_summary, rollout_summary

PROMPTS = ["user: the box is left\n"] * 2 + ["user: the goal is up\n"] * 2
RESPONSES = [
    "<think>I push left.</think> <answer>Left</answer>",
    "<think>left it is</think> <answer>Left</answer>",
    "<think>I walk up</think> <answer>Up</answer>",
    "I do not think",
]
ROWS: dict[str, Any] = {"prompts": PROMPTS, "responses": RESPONSES, "groups": ["a", "a", "b", "b"]}
EXAMPLE = Path(__file__).parents[3] / "examples" / "filter_in_your_trainer.py"


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def test_texts(tiny: Any) -> None:
    found = read_generations(**ROWS, rewards=[1, 0, 0.5, 0.5], successes=[True, False, False, False], tokenizer=tiny.tokenizer)
    assert found.names == ["a", "b"] and [len(group.trajectories) for group in found.groups] == [2, 2]
    first, last = found.groups[0].trajectories[0], found.groups[1].trajectories[1]
    (turn,) = first.turns
    assert tiny.tokenizer.decode(list(turn.reasoning_ids)) == "I push left." and turn.text == RESPONSES[0]
    assert tiny.tokenizer.decode(list(turn.lead_ids)) == "<think>"
    assert tiny.tokenizer.decode(list(turn.response_ids)) == RESPONSES[0]
    assert (first.reward, first.success, first.stop_reason) == (1.0, True, StopReason.SUCCESS)
    assert last.turns[0].reasoning_span is None and last.stop_reason is StopReason.FAILURE
    assert {t.seed for t in found.groups[0].trajectories} == {found.groups[0].seed} != {found.groups[1].seed}
    assert found.groups[0].seed == derive_seed("prompt", *_ids(tiny.tokenizer, PROMPTS)[0])


def test_the_reasoning_in_token_ids(tiny: Any) -> None:
    """The ids are the caller's; a token that straddles a border is on neither side."""
    ids = _ids(tiny.tokenizer, RESPONSES)
    found = read_generations(
        prompts=_ids(tiny.tokenizer, PROMPTS),
        responses=ids,
        groups=ROWS["groups"],
        logprobs=[[-1.0] * len(row) for row in ids],
        tokenizer=tiny.tokenizer,
    )
    turns = [trajectory.turns[0] for group in found.groups for trajectory in group.trajectories]
    assert [list(turn.response_ids) for turn in turns] == ids
    for turn, text in zip(turns[:3], ["I push left.", "left it is", "I walk up"], strict=True):
        inside = tiny.tokenizer.decode(list(turn.reasoning_ids))
        assert inside and inside in text and len(text) - len(inside) <= 2
        assert "think" not in inside and turn.logprobs == (-1.0,) * len(turn.response_ids)


def test_x_holds_what_stands_before_the_reasoning(tiny: Any) -> None:
    """The members of a group get one x, the most common: here one of three writes a word before the tag."""
    responses = ["<think>a</think>", "Well <think>b</think>", "<think>c</think>"]
    found = read_generations(prompts=["p"] * 3, responses=responses, groups=[0] * 3, tokenizer=tiny.tokenizer)
    rows = rollout_rows(found.groups)
    assert {tiny.tokenizer.decode(list(prompt)) for prompt in rows["prompts"]} == {"p<think>"}


def test_turns_of_one_episode(tiny: Any) -> None:
    first, second = "user: a\n<think>", "x</think> <answer>Up</answer>\nuser: b\n<think>"
    ids = _ids(tiny.tokenizer, [first, "x</think> <answer>Up</answer>", "\nuser: b\n<think>", "y</think> <answer>Up</answer>"])
    found = read_generations(
        prompts=[ids[0], ids[0] + ids[1] + ids[2]],
        responses=[ids[1], ids[3]],
        groups=[7, 7],
        trajectories=["e", "e"],
        rewards=[2.0, 2.0],
        tokenizer=tiny.tokenizer,
    )
    (trajectory,) = found.groups[0].trajectories
    assert [turn.new_context for turn in trajectory.turns] == [True, False] and trajectory.reward == 2.0
    assert list(trajectory.turns[1].context_ids) == ids[2], "only what was fed since the last response"
    assert rollout_rows(found.groups)["prompts"][1] == tuple(ids[0] + ids[1] + ids[2])
    again = read_generations(
        prompts=[first, second], responses=["x</think>", "y</think>"], groups=[7, 7], trajectories=[0, 0], tokenizer=tiny.tokenizer
    )
    assert again.groups[0].trajectories[0].turns[1].new_context, (
        "a text whose tokens do not continue the earlier ones is a context of its own"
    )


def test_metrics_are_those_of_the_trainer(tiny: Any) -> None:
    found = read_generations(**ROWS, rewards=[1, 0, 0.5, 0.5], successes=[True, False, False, False], tokenizer=tiny.tokenizer)
    chosen = tether.select_groups([1, 0, 0.5, 0.5], [0, 0, 1, 1])
    metrics = generation_metrics(found, chosen)
    rollout, groups = rollout_summary(found.groups), group_summary(found.groups, chosen)
    assert metrics == {
        **{name: rollout[name.removeprefix("rollout/")] for name in metrics if name.startswith("rollout/")},
        **{f"groups/{name}": value for name, value in groups.items()},
        "groups/sampled": 2,
        "groups/kept": 1,
    }
    assert {"rollout/success", "rollout/reward_mean", "rollout/response_tokens"} <= metrics.keys()
    assert metrics["groups/rv_mean"] == 0.25 and metrics["groups/kept_ratio"] == 0.5


def test_what_is_not_known_is_left_out(tiny: Any) -> None:
    metrics = generation_metrics(read_generations(**ROWS, tokenizer=tiny.tokenizer))
    assert not any(name.startswith("groups/") or "success" in name or "reward" in name for name in metrics)
    assert "rollout/format_valid" not in metrics
    thoughts = {"prompts": PROMPTS, "reasonings": ["a", "b", "c", None], "groups": [0, 0, 1, 1]}
    assert "rollout/response_tokens" not in generation_metrics(read_generations(**thoughts, tokenizer=tiny.tokenizer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"responses": None}, "give responses or reasonings, got neither"),
        ({"reasonings": ["a"] * 4}, "give responses or reasonings, got both"),
        ({"rewards": [1.0]}, "got 4 prompts and 1 rewards"),
        ({"rewards": [1.0, None, 0.0, 0.0]}, r"rewards of the rows \[1\] are \[nan\]"),
        ({"rewards": [1.0, 0.0, 0.0, 0.0], "trajectories": [0, 0, 1, 1]}, r"rewards of the rows \[0, 1\] are \[1.0, 0.0\]"),
        ({"logprobs": [[0.0], None, None, None]}, r"logprobs\[0\] has 1 values for \d+ tokens"),
        ({"prompts": [""] * 4}, "prompts is empty"),
        ({"prompts": [], "responses": [], "groups": []}, "the batch is empty"),
    ],
)
def test_bad_rows(tiny: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_generations(**{**ROWS, "tokenizer": tiny.tokenizer, **change})


def test_texts_and_ids_need_a_tokenizer() -> None:
    with pytest.raises(BadInput, match="is text; give the tokenizer"):
        read_generations(**ROWS)
    with pytest.raises(BadInput, match="give the tokenizer, which finds the reasoning in them"):
        read_generations(prompts=[[1]], responses=[[2]], groups=[0])


# ------------------------------------------------------------------------------------------------------- the run folder


def test_a_generation_log_becomes_a_run(tiny: Any, tmp_path: Path) -> None:
    log = TetherLogger(tmp_path / "run", tokenizer=tiny.tokenizer, model="tiny", about={"trainer": "mine"}, settings={"lr": 1e-6})
    for step in (1, 2):
        log.log(
            step,
            **ROWS,
            rewards=[1, 0, 0.5, 0.5],
            selection=tether.select_groups([1, 0, 0.5, 0.5], ROWS["groups"]),
            metrics={"update/loss": 0.5},
        )
    log.log(2, **ROWS, rewards=[1, 0, 0, 0])
    log.finish("done")
    run = tether.Run(tmp_path / "run")
    assert run.finished == "done" and run.settings["model"]["name"] == "tiny" and run.store.about()["trainer"] == "mine"
    assert run.metrics("update/loss") == {1: 0.5} and run.metrics("groups/kept") == {1: 1.0, 2: 2.0}
    episodes = list(run.store.trajectories(1))
    assert [episode["kept"] for episode in episodes] == [True, True, False, False]
    assert episodes[0]["success"] is None and episodes[0]["stop_reason"] == "unknown"
    read = list(open_rollouts(tmp_path / "run"))
    assert [rollout.reasoning for rollout in read[:3]] == ["I push left.", "left it is", "I walk up"]
    assert tiny.tokenizer.decode(list(read[0].prompt_ids or ())) == PROMPTS[0] + "<think>"
    with pytest.raises(BadInput, match="exists; resume it"):
        TetherLogger(tmp_path / "run")
    TetherLogger(tmp_path / "run", resume=True, tokenizer=tiny.tokenizer).log(3, **ROWS)
    assert [record.step for record in run.records] == [1, 2, 3]


def test_wrong_names_are_refused(tiny: Any, tmp_path: Path) -> None:
    log = TetherLogger(tmp_path / "run", tokenizer=tiny.tokenizer)
    with pytest.raises(UnknownName, match="update/lost"):
        log.log(1, **ROWS, metrics={"update/lost": 1.0})
    with pytest.raises(BadInput, match="split is 'dev'"):
        log.log(1, **ROWS, split="dev")


# ------------------------------------------------------------------------------------------------------------ the monitor


def test_responses_and_reasonings_give_the_same_numbers(tiny: Any) -> None:
    """By hand: x ends with the opening tag, z is between the tags."""
    prompts = [prompt + "<think>" for prompt in PROMPTS]
    by_hand = Monitor(tiny.model, tokenizer=tiny.tokenizer).observe(
        1, prompts=prompts, reasonings=["I push left.", "left it is", "I walk up", None], groups=ROWS["groups"], rewards=[1, 0, 1, 1]
    )
    read = Monitor(tiny.model, tokenizer=tiny.tokenizer).observe(1, **ROWS, rewards=[1, 0, 1, 1])
    assert read.information[Scope.FIRST_TURN] == by_hand.information[Scope.FIRST_TURN]
    assert read.metrics["information"]["num_empty"] == 1


def test_the_monitor_writes_a_run_and_resumes_it(tiny: Any, tmp_path: Path) -> None:
    out, rules = tmp_path / "run", AlarmRules(start_steps=8, recent_steps=2, step_p=0.03)

    def rewards(step: int) -> list[float]:
        return [1.0, 0.0, 1.0, 0.0] if step <= 8 else [0.0] * 4

    def watch(first: int, last: int, out: Path, resume: bool) -> list[list[str]]:
        monitor = Monitor(lambda x, z: -1.0 * len(z), every=0, tokenizer=tiny.tokenizer, rules=rules, out=out, resume=resume)
        return [
            [str(alarm.name) for alarm in monitor.observe(step, **ROWS, rewards=rewards(step), successes=[False] * 4).new_alarms]
            for step in range(first, last + 1)
        ]

    whole = watch(1, 12, tmp_path / "whole", False)
    assert any("reward_variance_collapse" in names for names in whole)
    watch(1, 9, out, False)
    assert watch(8, 12, out, True) == whole[7:], "steps 8 and 9 are made again, and the history before them counts"
    assert (out / "metrics.jsonl").read_text().splitlines()[-1] == (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1]
    assert [record.step for record in tether.Run(out).records] == list(range(1, 13))


def test_a_function_or_a_name_is_a_scorer(tiny: Any) -> None:
    by_model = tether.cross_score(tiny.model, [[1, 2]], [[3, 4]])
    assert tether.cross_score(lambda x, z: float(by_model[0, 0]), [[1, 2]], [[3, 4]]) == by_model
    rows = {**ROWS, "responses": [f"<think>{text}</think>" for text in ("go up", "up", "left", "go left")]}
    named, given = Monitor("tiny").observe(1, **rows), Monitor(tiny.model, tokenizer=tiny.tokenizer).observe(1, **rows)
    assert named == given


def test_another_tokenizer_than_the_scorers(tiny: Any) -> None:
    class Wide:
        def get_vocab(self) -> dict[str, int]:
            return {}

        def __len__(self) -> int:
            return 10**6

    with pytest.raises(BadInput, match="the tokenizer has 1000000 tokens and the scorer's model"):
        Monitor(tiny.model, tokenizer=Wide())


def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("filter_in_your_trainer", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.MAX_TOKENS = 40
    healths = module.main(2, tmp_path / "run")
    run = tether.Run(tmp_path / "run")
    assert [record.step for record in run.records] == [1, 2] and run.finished == "all 2 steps done"
    assert run.metrics("information/mi_seq")[1] == pytest.approx(healths[0].information[Scope.FIRST_TURN].mi_seq)
    assert run.metrics("groups/sampled") == {1: 4.0, 2: 4.0}
    shown = capsys.readouterr().out
    assert "step 2: reward" in shown and "of 4 prompts" in shown
    kept = [json.loads(line)["kept"] for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert np.mean(kept[:16]) == run.metrics("groups/kept_ratio")[1]
