"""Rejection sampling: a run's own successes, by their own token ids; a tokenizer that reads them differently is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tether
from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.images import Image, patch_ids
from tether.core.types import Trajectory, Turn
from tether.models.chat import ChatFormat
from tether.runs.schema import trajectory_record
from tether.runs.store import RunStore
from tether.training.sft.demonstrations import demonstrated, select_trajectories
from tether.training.sft.recipe import train_tokenizer
from tether.training.sft.settings import TrajectorySettings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of `tiny` on FrozenLake, 12 episodes each."""
    folder = tmp_path_factory.mktemp("rejection") / "run"
    tether.train(
        {"name": "frozen_lake", "options": {"max_turns": 2}},
        {"name": "tiny", "device": "cpu"},
        steps=2,
        out=folder,
        filter="all",
        rollout={"num_groups": 2, "group_size": 6, "max_tokens": 48, "max_context": 1024},
        evaluation={"prompts": 2},
        diagnosis={"every": 0},
    )
    return folder


def _records(run: Path) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in (run / "trajectories.jsonl").read_text().splitlines()]
    return [record for record in every if record["split"] == "train"]


def test_successes_keep_their_very_tokens(run: Path, chat: ChatFormat) -> None:
    successes = [record for record in _records(run) if record["success"]]
    assert 0 < len(successes) < len(_records(run)) == 24
    found = demonstrated(select_trajectories(run, TrajectorySettings()), chat, run, "tiny")
    assert len(found) == len(successes)
    for each, record in zip(found, successes, strict=True):
        (sequence,) = each.trajectory.sequences
        assert sequence.token_ids == [token for turn in record["turns"] for token in (*turn["context_ids"], *turn["response_ids"])]
        assert sum(sequence.loss_mask) == sum(len(turn["response_ids"]) for turn in record["turns"])
        assert each.prompt == f"frozen_lake {record['seed']}"


def test_which_episodes_are_taken(run: Path) -> None:
    def taken(**chosen: Any) -> list[tuple[int, int, int]]:
        return [(r["step"], r["group"], r["member"]) for r in select_trajectories(run, TrajectorySettings(**chosen))]

    records = _records(run)
    assert taken(success_only=False) == [(r["step"], r["group"], r["member"]) for r in records]
    assert {step for step, _, _ in taken(success_only=False, first_step=2)} == {2}
    assert {step for step, _, _ in taken(success_only=False, last_step=1)} == {1}
    rewards = {(r["step"], r["group"], r["member"]): r["reward"] for r in records}
    assert taken(success_only=False, min_reward=0.5) == [key for key, reward in rewards.items() if reward >= 0.5]
    best = taken(success_only=False, max_per_prompt=2)
    assert len(best) == 2 * 4
    for step, group, _ in best:
        members = sorted((reward for (s, g, _), reward in rewards.items() if (s, g) == (step, group)), reverse=True)
        assert sorted((rewards[key] for key in best if key[:2] == (step, group)), reverse=True) == members[:2]


def test_a_run_without_what_is_wanted(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"none of the 24 training episodes in .* is a success, with a return of at least 9, up to step 1; train"
    ):
        select_trajectories(run, TrajectorySettings(min_reward=9, last_step=1))
    with pytest.raises(BadInput, match="is not a run folder"):
        select_trajectories(tmp_path, TrajectorySettings())


def test_another_tokenizer_is_refused(run: Path) -> None:
    other = train_tokenizer(["some words and other words", "another text"])
    with pytest.raises(BadInput, match=r"the tokenizer of 'other' does not read the token ids of .*; give --model the model of that run"):
        demonstrated(select_trajectories(run, TrajectorySettings()), ChatFormat(other), run, "other")


def test_a_run_teaches_its_own_model(run: Path, tmp_path: Path) -> None:
    result = tether.sft(run, {"name": "tiny", "device": "cpu"}, tmp_path / "better", steps=3, learner={"update_batch": 4})
    assert result.record["source"] == {"kind": "trajectories", "names": [str(run)]}
    assert result.environments == ("frozen_lake",)
    assert (tmp_path / "better" / "model.safetensors").is_file()


def test_pictures_come_back_with_the_tokens(chat: Any, tmp_path: Path) -> None:
    image = Image.of(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    context = (*patch_ids(image.digest, 3), *chat.encode("Go. <think>"))
    text = " Left </think> <answer> Left </answer>"
    words = chat.encode(text)
    turn = Turn(
        context, words, (-0.1,) * len(words), FinishReason.STOP_TEXT, text, (0, 1), observation=f"{image.marker}\nGo.", images=(image,)
    )
    episode = Trajectory(0, 0, 7, [turn], StopReason.SUCCESS, True, env="frozen_lake")
    store = RunStore.create(tmp_path / "seen", "{}", {})
    store.append_trajectories([trajectory_record(episode, 1, "train", True)], images=[image])
    store.close()
    (found,) = demonstrated(select_trajectories(store.folder, TrajectorySettings()), chat, store.folder, "tiny")
    (again,) = found.trajectory.turns
    assert again.context_ids == context and again.images == (image,) and again.response_ids == words
    (store.folder / "images" / image.file_name).unlink()
    with pytest.raises(BadInput, match="of the record is missing"):
        demonstrated(select_trajectories(store.folder, TrajectorySettings()), chat, store.folder, "tiny")
