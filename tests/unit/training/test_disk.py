"""What a run takes on disk is counted before it starts, and is what it then takes."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.cli.main import main
from tether.core.config import load
from tether.training.disk import DiskPlan, disk_note, plan_disk
from tether.training.settings import RunSettings

Usage = namedtuple("Usage", "total used free")
ENV = {"name": "frozen_lake", "options": {"max_turns": 1}}
SMALL: dict[str, Any] = {"rollout": {"num_groups": 1, "group_size": 2, "max_tokens": 20}, "evaluation": {"prompts": 2}}


def _plan(folder: Path, **sections: Any) -> DiskPlan:
    found = plan_disk(load(RunSettings, None, {"env": ENV, **sections}), folder)
    assert found is not None
    return found


@pytest.mark.parametrize("sections", [{"algorithm": {"name": "ppo"}}, {"lora": {"rank": 4}}])
def test_a_checkpoint_is_as_large_as_planned(sections: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tether.train(ENV, steps=1, out=folder, filter="all", diagnosis={"every": 0}, **SMALL, **sections)
    files = [path for path in (folder / "checkpoints" / "step_000001").rglob("*") if path.is_file()]
    weights = sum(path.stat().st_size for path in files if path.suffix in (".safetensors", ".pt"))
    plan = _plan(tmp_path / "other", steps=1, **SMALL, **sections)
    assert plan.most == 1 and weights == pytest.approx(plan.checkpoint, rel=0.1)
    assert (folder / "trajectories.jsonl").stat().st_size < plan.episodes
    resumed = _plan(folder, steps=2, **SMALL, **sections)
    assert resumed.present >= weights


@pytest.mark.parametrize(
    ("sections", "most"),
    [
        ({}, 3),  # two are kept, and one is being written
        ({"checkpoint": {"keep": 1}, "evaluation": {"every": 10}}, 3),  # and the best
        ({"checkpoint": {"every": 50}}, 2),
        ({"checkpoint": {"every": 200, "last": False}}, 0),
        ({"steps": 10**12}, 3),
    ],
)
def test_how_many_lie_there_at_a_time(sections: dict[str, Any], most: int, tmp_path: Path) -> None:
    plan = _plan(tmp_path, **sections)
    assert plan.most == most and (plan.checkpoint > 0) is (most > 0)


def test_too_little_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "frozen_lake", "--steps", "1", "--out", str(tmp_path / "run"), "--filter", "all", "--set", "diagnosis.every=0"]
    words += [
        "--set",
        "rollout.num_groups=1",
        "--set",
        "rollout.group_size=2",
        "--set",
        "rollout.max_tokens=20",
        "--set",
        "env.options.max_turns=1",
        "--set",
        "evaluation.prompts=2",
    ]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 10_000_000, 10_000_000))
    with pytest.raises(SystemExit) as stopped:
        main(words)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and "a checkpoint of 'tiny' takes 28 MB" in said and "has 10 MB free: not even one would fit" in said
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 27_950_000, 27_950_000))
    with pytest.raises(SystemExit):
        main(words)
    said = capsys.readouterr().out
    assert said.index("the disk may become full before the run ends") < said.index("step 0/1")
    assert "needs: memory" in said and "the first step plays 2 validation episodes, then 2 episodes with up to 20 tokens a response" in said


def test_doctor_counts_for_a_model_and_a_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--model", "tiny", "--out", str(tmp_path / "new"), "--set", "steps=10"])
    said = capsys.readouterr().out
    assert "disk for tiny: 1 checkpoint of 28 MB, episodes up to" in said and "100 steps take at most" in said


def test_a_disk_with_room_has_no_note() -> None:
    assert disk_note(DiskPlan(10, 3, 5, 0, 35)) is None and disk_note(DiskPlan(10, 3, 5, 20, 15)) is None
    assert "3 checkpoints of 0 MB" in str(disk_note(DiskPlan(10, 3, 5, 0, 34)))


def test_a_model_that_cannot_be_counted_is_not_refused(tmp_path: Path) -> None:
    assert plan_disk(load(RunSettings, None, {"env": {"name": "frozen_lake"}, "model": {"name": "some.gguf"}}), tmp_path) is None
