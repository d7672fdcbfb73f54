"""What a run takes on disk is counted before it starts, and is what it then takes."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

import tether
from tether.cli.main import main
from tether.core.config import load, merge
from tether.core.errors import BadInput
from tether.training.disk import DiskPlan, _at_a_time, disk_notes, plan_disk
from tether.training.settings import RunSettings

Usage = namedtuple("Usage", "total used free")
ENV = {"name": "frozen_lake", "options": {"max_turns": 1}}
SMALL: dict[str, Any] = {"rollout": {"num_groups": 1, "group_size": 2, "max_tokens": 20}, "evaluation": {"prompts": 2}}


def _plan(folder: Path, **sections: Any) -> DiskPlan:
    found = plan_disk(load(RunSettings, None, {"env": ENV, **sections}), folder)
    assert found is not None
    return found


def _tensor_bytes(folder: Path) -> int:
    """Of the files of tensors, but for their headers, which count beside so small a model alone."""
    headers = {path: 8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.rglob("*.safetensors")}
    return sum(path.stat().st_size - header for path, header in headers.items())


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"name": "ppo"}, "checkpoint": {"moments": "bfloat16"}},
        {"model": {"dtype": "bfloat16"}},
        pytest.param({"algorithm": {"name": "ppo"}, "model": {"dtype": "bfloat16"}}, marks=pytest.mark.long),
        {"model": {"name": "tiny"}, "lora": {"rank": 16}},
    ],
    ids=["ppo, moments in bfloat16", "bfloat16", "ppo in bfloat16", "lora"],
)
def test_a_checkpoint_is_as_large_as_planned(sections: dict[str, Any], tmp_path: Path, small_policy: Any) -> None:
    sections = merge({"model": {"name": small_policy(1), "device": "cpu"}}, sections)
    folder, few = tmp_path / "run", {**SMALL, "evaluation": {"prompts": 1, "every": 1}}
    tether.train(ENV, steps=2, out=folder, filter="all", diagnosis={"every": 0}, **few, **{"checkpoint": {}, **sections})
    plan = _plan(tmp_path / "other", steps=2, **few, **sections)
    assert (
        plan.most == 1 and plan.best and _tensor_bytes(folder / "checkpoints" / "step_000002") == pytest.approx(plan.checkpoint, rel=0.01)
    )
    assert _tensor_bytes(folder / "checkpoints" / "best") == pytest.approx(plan.best, rel=0.01)
    assert (folder / "trajectories.jsonl").stat().st_size < plan.episodes
    resumed = _plan(folder, steps=3, **few, **sections)
    assert resumed.present >= plan.checkpoint


def test_qwen_of_1_78_billion_parameters() -> None:
    """The run that filled a disk of 64 GB: the best, the last, and nothing else."""
    settings = load(RunSettings, None, {"env": ENV, "steps": 50, "checkpoint": {"every": 50, "keep": 1}, "evaluation": {"every": 25}})
    exact, compact = (_at_a_time(settings, size, 3_554_000_000) for size in (21_324_000_000, 14_216_000_000))
    assert exact == compact == (1, 3_554_000_000)  # 24.9 and 17.8 GB
    often = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"every": 10})})
    assert _at_a_time(often, 21_324_000_000, 3_554_000_000) == (2, 3_554_000_000)
    unsaved = settings.model_copy(update={"checkpoint": settings.checkpoint.model_copy(update={"last": False})})
    assert _at_a_time(unsaved, 21_324_000_000, 3_554_000_000) == (0, 2 * 3_554_000_000)  # a best that takes the place of another


@pytest.mark.parametrize(
    ("sections", "most"),
    [
        ({}, 3),  # two are kept, and one is being written
        ({"checkpoint": {"keep": 1}, "evaluation": {"every": 10}}, 2),  # and the best weights
        ({"checkpoint": {"every": 50}}, 2),
        ({"checkpoint": {"every": 200, "last": False}}, 0),
        ({"steps": 10**12}, 3),
    ],
)
def test_how_many_lie_there_at_a_time(sections: dict[str, Any], most: int, tmp_path: Path) -> None:
    plan = _plan(tmp_path, **sections)
    assert plan.most == most


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
    assert stopped.value.code == 2 and "the checkpoints of 'tiny' do not fit into" in said and "1 checkpoint of 19 MB" in said
    assert "of 10 MB free; free some space, choose another --out, lower checkpoint.keep" in said and not (tmp_path / "run").exists()
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
    assert disk_notes(DiskPlan(10, 3, 2, 5, 0, 37)) == disk_notes(DiskPlan(10, 3, 2, 5, 20, 17)) == []
    (note,) = disk_notes(DiskPlan(10, 3, 2, 5, 0, 36))
    assert "3 checkpoints of 0 MB, best weights 0 MB, episodes" in note


def test_exact_moments_unless_they_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """28 MB with float32 moments, 19 MB with bfloat16 ones; said before the first step, and never against what was asked for."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 20_000_000))
    plan = _plan(tmp_path, steps=1, **SMALL)
    assert plan.moments == "bfloat16" and plan.checkpoint < 20_000_000 < plan.exact
    assert disk_notes(plan)[0].startswith(
        "Adam's moments are saved in bfloat16: checkpoints with float32 ones would take 28 MB, and 20 MB are there."
    )
    with pytest.raises(BadInput, match=r"do not fit .* 28 MB, .* of 20 MB free; .* give checkpoint.moments=bfloat16"):
        _plan(tmp_path, steps=1, checkpoint={"moments": "float32"}, **SMALL)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, 30_000_000))
    assert _plan(tmp_path, steps=1, **SMALL).moments == "float32"
    assert _plan(tmp_path, steps=1, checkpoint={"moments": "bfloat16"}, **SMALL).checkpoint < 20_000_000


def test_a_model_that_cannot_be_counted_is_not_refused(tmp_path: Path) -> None:
    assert plan_disk(load(RunSettings, None, {"env": {"name": "frozen_lake"}, "model": {"name": "some.gguf"}}), tmp_path) is None
