"""Each format's records, as its own source writes them, come out as the same kind of rollout."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tether import StopReason, Trajectory, Turn
from tether.core.enums import FinishReason
from tether.core.errors import BadInput
from tether.diagnostics.rollouts import Rollout, RolloutReader, open_rollouts
from tether.diagnostics.rollouts.traces import Attempts
from tether.runs.schema import trajectory_record
from tether.runs.store import RunStore


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path, **options: Any) -> tuple[RolloutReader, list[Rollout]]:
    reader = open_rollouts(path, **options)
    return reader, list(reader)


# ------------------------------------------------------------------------------------------------------------------ Tether


def a_turn(context: tuple[int, ...], response: tuple[int, ...], text: str, span: tuple[int, int] | None, **more: Any) -> Turn:
    return Turn(context, response, (-0.5,) * len(response), FinishReason.STOP_TEXT, text, span, **more)


def an_episode(turns: list[Turn], group: int = 4, success: bool = False) -> Trajectory:
    return Trajectory(group, 0, 99, turns, StopReason.FAILURE, success=success, env="sokoban")


def a_run(folder: Path) -> RunStore:
    return RunStore.create(folder, "a: 1\n", {})


def test_tether_gives_the_sampled_ids_turn_by_turn(tmp_path: Path) -> None:
    store = a_run(tmp_path / "run")
    first = a_turn((1, 2, 3), (10, 11, 12), " go </think> x", (0, 2), observation="P__", reward=0.5)
    second = a_turn((4, 5), (13, 14), "h\u00f6h </think> y", (0, 1), observation="_P_", reward=0.25)
    store.append_trajectories([trajectory_record(an_episode([first, second], success=True), 3, "train", True)])
    reader, rollouts = read(tmp_path / "run")  # the folder finds the file, although it holds other JSON Lines
    assert reader.format.name == "tether"
    assert [rollout.prompt_ids for rollout in rollouts] == [(1, 2, 3), (1, 2, 3, 10, 11, 12, 4, 5)]
    assert [rollout.reasoning_ids for rollout in rollouts] == [(10, 11), (13,)]
    assert [rollout.response_ids for rollout in rollouts] == [(10, 11, 12), (13, 14)]
    assert [rollout.reasoning for rollout in rollouts] == [" go ", "h\u00f6h "]
    assert [rollout.prompt for rollout in rollouts] == ["P__", "_P_"]
    assert [(rollout.step, rollout.group, rollout.turn) for rollout in rollouts] == [(3, "train/4", 0), (3, "train/4", 1)]
    assert {rollout.trajectory for rollout in rollouts} == {1}
    assert [(rollout.reward, rollout.success) for rollout in rollouts] == [(0.75, True)] * 2


def test_tether_forgets_what_came_before_a_fresh_turn(tmp_path: Path) -> None:
    store = a_run(tmp_path / "run")
    turns = [
        a_turn((1,), (10,), "a</think>", (0, 1), new_context=True),
        a_turn((2,), (11,), "b</think>", (0, 1), new_context=True),
        a_turn((3,), (12,), "c</think>", (0, 1)),
    ]
    store.append_trajectories([trajectory_record(an_episode(turns), 1, "train", True)])
    _, rollouts = read(store.folder)
    assert [rollout.prompt_ids for rollout in rollouts] == [(1,), (2,), (2, 11, 3)]


def test_tether_leaves_errored_episodes_out_and_counts_them(tmp_path: Path) -> None:
    """An episode that an environment error ended is no evidence about the policy: neither its reward nor its success counts."""
    store = a_run(tmp_path / "run")
    turns = [a_turn((1,), (10,), "a</think>", (0, 1))]
    errored = Trajectory(4, 1, 99, turns, StopReason.ENV_ERROR, error="down", env="sokoban")
    store.append_trajectories([trajectory_record(episode, 1, "train", True) for episode in (an_episode(turns), errored)])
    reader, rollouts = read(store.folder)
    assert len(rollouts) == 1 and reader.tally.num_errored == 1
    assert "1 episodes were left out because an error ended them" in reader.tally.notes()


def test_tether_counts_empty_reasoning_by_its_cause(tmp_path: Path) -> None:
    store = a_run(tmp_path / "run")
    turns = [a_turn((1,), (10,), "no end", None), a_turn((2,), (11,), "</think>", (0, 0)), a_turn((3,), (12,), "c</think>", (0, 1))]
    store.append_trajectories([trajectory_record(an_episode(turns), 1, "train", True), trajectory_record(an_episode([]), 1, "train", True)])
    reader, rollouts = read(store.folder)
    assert [rollout.has_reasoning for rollout in rollouts] == [False, False, True]
    assert reader.tally.missing == {"unclosed": 1, "blank": 1}
    assert (reader.tally.num_empty, reader.tally.num_rollouts, reader.tally.num_records, reader.tally.num_without_turns) == (2, 3, 2, 1)


def test_tether_takes_one_split_and_the_last_attempt(tmp_path: Path) -> None:
    store = a_run(tmp_path / "run")

    def add(token: int, step: int, split: str) -> None:
        turns = [a_turn((token,), (10,), "a</think>", (0, 1))]
        store.append_trajectories([trajectory_record(an_episode(turns), step, split, True)])

    add(1, 1, "train")
    add(2, 2, "train")
    add(3, 2, "validation")
    with (store.folder / "trajectories.jsonl").open("a") as file:
        file.write('{"step": 2, "split": "train", "attempt": 0, "env": "soko')  # a kill tears the line; the resumed run writes on
    add(4, 2, "train")
    reader, rollouts = read(store.folder)
    assert [rollout.prompt_ids for rollout in rollouts] == [(1,), (4,)]
    assert (reader.tally.num_superseded, reader.tally.other_splits) == (2, {"validation": 1})
    assert "2 episodes were left out because a resumed run played them again" in reader.tally.notes()
    assert "1 episodes of split 'validation' were left out" in reader.tally.notes()
    assert [rollout.prompt_ids for rollout in read(store.folder, split="validation")[1]] == [(3,)]
    assert [rollout.prompt_ids for rollout in read(store.folder, split=None)[1]] == [(1,), (3,), (4,)]
    with pytest.raises(BadInput, match="no rollouts of split 'test', only of train, validation; choose one of these"):
        read(store.folder, split="test")


def test_the_highest_attempt_counts_wherever_it_stands() -> None:
    first, second, other = (b'{"step": 2, "split": "%s", "attempt": %d, "env": "x"}' % pair for pair in ((b"a", 0), (b"a", 1), (b"b", 0)))
    attempts = Attempts([second, first, other, b"torn"])
    assert [attempts.supersede(line) for line in (first, second, other, b"torn")] == [True, False, False, False]


def test_tether_refuses_a_pattern_and_a_span_outside_the_response(tmp_path: Path) -> None:
    record = trajectory_record(an_episode([a_turn((1,), (10,), "a</think>", (0, 2))]), 1, "train", True)
    path = write(tmp_path / "t.jsonl", [record])
    with pytest.raises(
        BadInput, match=r"t.jsonl line 1: turns\[0\].reasoning_span is \[0, 2\]; expected start and end within 1 response ids"
    ):
        read(path)
    with pytest.raises(BadInput, match="leave the pattern out"):
        open_rollouts(path, pattern="(.*)")


# -------------------------------------------------------------------------------------------------------------------- verl
# verl 0.9.1, verl/trainer/ppo/ray_trainer.py, RayPPOTrainer._write_generations: json.dumps(entry, ensure_ascii=False, default=str) of
# {"input", "output", "gts", "score", "step"} and the reward function's extra values.


def verl_line(prompt: str, output: str, score: float, step: int, **extra: Any) -> dict[str, Any]:
    return {"input": prompt, "output": output, "gts": "72", "score": score, "step": step, **extra}


CHAT = "system\nYou are Qwen.\nuser\nNatalia sold clips \u2026\nassistant\n"


def test_verl_groups_by_prompt(tmp_path: Path) -> None:
    lines = [
        verl_line(CHAT, "<think>48/2=24</think>\n#### 72", 1.0, 5, acc=True),
        verl_line("other", "<think>\nhm\n</think>no", 0.0, 5, acc=0.5),
        verl_line(CHAT, "24+48 </think>72", float("nan"), 6, acc=0.0),
    ]
    reader, rollouts = read(write(tmp_path / "5.jsonl", lines))
    assert reader.format.name == "verl"
    assert rollouts[0].group == rollouts[2].group != rollouts[1].group
    assert [rollout.reasoning for rollout in rollouts] == ["48/2=24", "\nhm\n", "24+48 "]
    assert [rollout.context() for rollout in rollouts] == [CHAT + "<think>", "other<think>", CHAT + "<think>"]
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, None]
    assert [rollout.success for rollout in rollouts] == [True, None, False]
    assert [rollout.step for rollout in rollouts] == [5, 5, 6]
    assert reader.tally.notes() == ["1 of 3 responses have no finite reward"]


def test_verl_uid_names_group_episode_and_turn(tmp_path: Path) -> None:
    # verl/trainer/ppo/v1/trainer_base.py, _log_rollout_data: uid is "{sample}_{rollout}_{output}".
    uids = ["9f-a_b_0_0", "9f-a_b_0_1", "9f-a_b_1_0", "plain"]
    lines = [verl_line(f"p{n}", "<think>a</think>", 0, 1, uid=uid) for n, uid in enumerate(uids)]
    _, rollouts = read(write(tmp_path / "1.jsonl", lines))
    assert [rollout.group for rollout in rollouts] == ["9f-a_b", "9f-a_b", "9f-a_b", "plain"]
    assert [rollout.trajectory for rollout in rollouts[:3]] == ["9f-a_b_0", "9f-a_b_0", "9f-a_b_1"]
    assert [rollout.turn for rollout in rollouts] == [0, 1, 0, 0]


def test_a_folder_of_verl_dumps_is_read_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (10, 9, 100):
        write(tmp_path / f"{step}.jsonl", [verl_line("p", "<think>a</think>", 1, step)])
    (tmp_path / "notes.txt").write_text("not a rollout")
    assert [rollout.step for rollout in read(tmp_path)[1]] == [9, 10, 100]


def test_ragens_validation_dump_has_no_prompt(tmp_path: Path) -> None:
    # ragen/trainer/agent_trainer.py, _validate: sample_inputs are "".
    path = write(tmp_path / "0.jsonl", [{"input": "", "output": "[user]\nstate", "score": 1.0, "step": 0}])
    with pytest.raises(BadInput, match=r"0.jsonl line 1: input is empty.*rollout_data_dir"):
        read(path)


# ------------------------------------------------------------------------------------------------------------------- RAGEN
# RAGEN 20daedc, ragen/llm_agent/agent_proxy.py, _save_as_jsonl.


def ragen_line(group: int, messages: list[dict[str, str]], **metadata: Any) -> dict[str, Any]:
    about = {"env_id": 0, "group_id": group, "num_turns": 2, "total_reward": -0.5, "success": False, **metadata}
    return {"custom_id": "traj_0", "messages": messages, "metadata": about}


def test_ragen_gives_every_response_with_all_that_came_before(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "State 1"},
        {"role": "assistant", "content": "<think>Think 1</think><answer>Up</answer>"},
        {"role": "user", "content": "State 2 (reward: -0.1)"},
        {"role": "assistant", "content": "<think><think> Think 2</think><answer>Down</answer>"},
        {"role": "user", "content": "State 3 (reward: 10)"},
    ]
    lines = [
        ragen_line(7, talk, **{"CoordSokoban/success": 1.0, "CoordSokoban/pass@8": 1.0}),
        ragen_line(8, talk[:2], **{"WebShop/traj_sum/success": 1.0, "WebShop/success": 0.25}),
        ragen_line(8, [], **{"Bandit/success": 0.0}),
        ragen_line(9, talk[:2]),
    ]
    reader, rollouts = read(write(tmp_path / "val.jsonl", lines))
    assert reader.format.name == "ragen"
    assert [rollout.group for rollout in rollouts] == [7, 7, 8, 9]
    assert [rollout.turn for rollout in rollouts] == [0, 1, 0, 0]
    assert [len(rollout.messages or []) for rollout in rollouts] == [1, 3, 1, 1]
    assert rollouts[1].messages == talk[:3]
    assert [rollout.reasoning for rollout in rollouts] == ["Think 1", " Think 2", "Think 1", "Think 1"]
    assert rollouts[1].lead == "<think><think>"  # ctx_manager puts one in front of what the model wrote
    assert [rollout.success for rollout in rollouts] == [True, True, None, False]
    assert [rollout.reward for rollout in rollouts] == [-0.5] * 4
    assert rollouts[0].step is None
    assert reader.tally.num_without_turns == 1


# --------------------------------------------------------------------------------------------------------------------- TRL
# trl 1.16.0, trl/trainer/grpo_trainer.py, GRPOTrainer.log; the parquet file itself is in test_rollouts_parquet.py. Rows also come as lines.


def test_trl_sums_the_rewards_that_applied(tmp_path: Path) -> None:
    row = {
        "step": 2,
        "prompt": "p",
        "completion": "<think>a</think>b",
        "acc_reward": 1.0,
        "format_reward": 0.5,
        "answer": "b",
        "advantage": 9.0,
    }
    rows = [row, {**row, "acc_reward": None}, {**row, "acc_reward": float("nan"), "format_reward": None}, {**row, "tries": 3, "step": "4"}]
    reader, rollouts = read(write(tmp_path / "c.jsonl", rows))
    assert reader.format.name == "trl"
    assert [rollout.reward for rollout in rollouts] == [1.5, 0.5, None, 1.5]
    assert [rollout.step for rollout in rollouts] == [2, 2, 2, 4]
    assert len({rollout.group for rollout in rollouts}) == 1


def test_trl_conversations_are_split_at_every_answer(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]
    answered = [
        {"role": "assistant", "content": "<think>use it</think>", "tool_calls": [{"name": "add"}]},
        {"role": "tool", "name": "add", "content": "4"},
        {"role": "assistant", "content": [{"type": "text", "text": "so "}, {"type": "text", "text": "4"}], "reasoning_content": "easy"},
    ]
    _, rollouts = read(write(tmp_path / "c.jsonl", [{"step": 1, "prompt": asked, "completion": answered, "r": 1.0, "advantage": 0.0}]))
    assert [rollout.messages for rollout in rollouts] == [asked, asked + answered[:2]]
    assert [rollout.reasoning for rollout in rollouts] == ["use it", "easy"]
    assert [rollout.response for rollout in rollouts] == ["<think>use it</think>", "so 4"]
    assert rollouts[0].context("RENDERED") == "RENDERED<think>"
    assert rollouts[1].context("RENDERED") == "RENDERED<think>"
    assert rollouts[1].context("RENDERED<think>\n") == "RENDERED<think>\n"
    assert rollouts[0].group == rollouts[1].group
    with pytest.raises(ValueError, match="line 1 holds messages; render them"):
        rollouts[0].context()
