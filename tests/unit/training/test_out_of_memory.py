"""Steps that do not fit: a rollout is played again with fewer rows, a run that must stop keeps its last complete step and says so.

Allocations fail for real: no machine has a pebibyte.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.core.config import dump_yaml, merge, validate
from tether.core.errors import OutOfMemory
from tether.models.critic import Critic
from tether.rollout.engines.native import NativeEngine
from tether.runs.checkpoints import list_checkpoints
from tether.runs.store import RunStore
from tether.training.learner import Learner
from tether.training.loop import Trainer
from tether.training.optim import FP32MasterAdamW
from tether.training.settings import RunSettings

SMALL: dict[str, Any] = {
    "env": {"name": "frozen_lake", "options": {"max_turns": 2}},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 8, "max_rows": 4},
    "learner": {"update_batch": 2, "learning_rate": 0.01},
    "filter": {"strategy": "all"},
    "diagnosis": {"every": 0},
    "evaluation": {"prompts": 2},
    "checkpoint": {"every": 9},
    "steps": 3,
}
FAILED = "you tried to allocate"
"""In what torch says on every processor."""


class Runs:
    """Makes runs of a small policy."""

    def __init__(self, model: str) -> None:
        self._model = model

    def trainer(self, folder: Path, **changes: Any) -> Trainer:
        settings = validate(RunSettings, merge(merge(SMALL, {"model": {"name": self._model}}), changes))
        return Trainer(settings, RunStore.open(folder) if folder.exists() else RunStore.create(folder, dump_yaml(settings), {}))

    def __call__(self, folder: Path, **changes: Any) -> Trainer:
        trainer = self.trainer(folder, **changes)
        trainer.run()
        return trainer


@pytest.fixture(scope="module")
def run(small_policy: Callable[[int], str]) -> Runs:
    return Runs(small_policy(1))


def _lines(folder: Path) -> dict[int, Any]:
    """The last record of every step."""
    return {record["step"]: record for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


def _weights(folder: Path) -> bytes:
    return (list_checkpoints(folder / "checkpoints")[-1] / "model" / "model.safetensors").read_bytes()


def _pebibyte() -> None:
    torch.empty(2**50, dtype=torch.uint8)


def _failing(real: Callable[..., Any], fails: Callable[[int], bool], before: bool = True) -> Callable[..., Any]:
    """The function, with an allocation that fails in the calls that `fails` names by their number, counted from 1."""
    calls: list[int] = []

    def called(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if before and fails(len(calls)):
            _pebibyte()
        result = real(*arguments, **named)
        if not before and fails(len(calls)):
            _pebibyte()
        return result

    return called


@pytest.fixture(scope="module")
def straight(run: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    run(folder)
    return folder


def test_an_update_that_does_not_fit_leaves_a_checkpoint_to_continue_from(
    run: Runs, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 1 made two updates of one micro-batch each; nothing of step 2 fits."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "policy_losses", _failing(Learner.policy_losses, lambda call: call > 2))
        with pytest.raises(OutOfMemory) as caught:
            run(folder)
    said = str(caught.value)
    assert said.startswith("out of memory in the update") and FAILED in said and "\n" not in said
    assert said.endswith("; nothing already written is lost: --resume continues from step_000001")
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step_000001"] and list(_lines(folder)) == [0, 1]
    run(folder)
    assert _lines(folder) == _lines(straight) and _weights(folder) == _weights(straight)


@pytest.mark.long
def test_weights_of_half_a_step_are_not_kept(run: Runs, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update of step 2 was made, the second does not fit."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "policy_losses", _failing(Learner.policy_losses, lambda call: call > 3))
        with pytest.raises(
            OutOfMemory, match=r"; nothing already written is lost: --resume starts from scratch, as there is no checkpoint yet$"
        ):
            run(folder)
    assert list_checkpoints(folder / "checkpoints") == []
    run(folder)
    assert _lines(folder) == _lines(straight) and _weights(folder) == _weights(straight)


def test_an_optimiser_that_does_not_fit_leaves_no_checkpoint_of_half_an_update(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's weights were changed, the critic's were not."""
    monkeypatch.setattr(FP32MasterAdamW, "step", _failing(FP32MasterAdamW.step, lambda call: call == 2))
    with pytest.raises(OutOfMemory, match=r"^out of memory in the update \(.*: --resume starts from scratch"):
        run(tmp_path / "run", algorithm={"name": "ppo"}, learner={"update_batch": 4})
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []


@pytest.mark.parametrize("before", [True, False], ids=["at once", "at its end"])
def test_a_rollout_is_played_again_with_half_the_rows(
    before: bool, run: Runs, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call 1 is the first validation, call 2 the rollout of step 1."""
    folder = tmp_path / "run"
    monkeypatch.setattr(NativeEngine, "run", _failing(NativeEngine.run, lambda call: call == 2, before))
    trainer = run(folder)
    lines, plain = _lines(folder), _lines(straight)
    again, *notes = lines[1].pop("notes")
    assert again == "out of memory in the rollout with rollout.max_rows=4; played again with 2" and notes == plain[1]["notes"]
    assert len(plain[1].pop("notes")) == 1 and trainer.sampler.max_rows == 2
    assert {step: line["metrics"].keys() for step, line in lines.items()} == {step: line["metrics"].keys() for step, line in plain.items()}
    for name in ("rollout/tokens_sampled", "rollout/reward_mean", "rollout/response_tokens"):
        assert lines[1]["metrics"][name] == plain[1]["metrics"][name]
    texts = [[record["turns"] for record in RunStore.open(path).trajectories(1, "train")] for path in (folder, straight)]
    assert [[turn["response_ids"] for turn in turns] for turns in texts[0]] == [
        [turn["response_ids"] for turn in turns] for turns in texts[1]
    ]


def test_a_validation_is_played_again_too(run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeEngine, "run", _failing(NativeEngine.run, lambda call: call == 1))
    run(tmp_path / "run", steps=1)
    assert _lines(tmp_path / "run")[0]["notes"] == ["out of memory in the validation with rollout.max_rows=4; played again with 2"]


def test_a_rollout_that_still_does_not_fit_stops_the_run(run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeEngine, "run", _failing(NativeEngine.run, lambda call: call > 2))
    with pytest.raises(OutOfMemory) as caught:
        run(tmp_path / "run")
    said = str(caught.value)
    assert said.startswith("out of memory in the rollout (") and "; lower rollout.max_rows (now 2); nothing" in said
    assert said.endswith("--resume continues from step_000001")


def test_one_row_cannot_be_halved(run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _failing(NativeEngine.run, lambda call: True)
    monkeypatch.setattr(NativeEngine, "run", calls)
    trainer = run.trainer(tmp_path / "run", rollout={"max_rows": 1})
    with pytest.raises(OutOfMemory, match=r"lower rollout.max_rows \(now 1\)"):
        trainer.run()
    assert trainer.sampler.max_rows == 1


def test_advantages_that_do_not_fit(run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Critic, "values", _failing(Critic.values, lambda call: True))
    with pytest.raises(OutOfMemory) as caught:
        run(tmp_path / "run", algorithm={"name": "ppo"})
    said = str(caught.value)
    assert (
        said.startswith("out of memory in the advantages (")
        and "; lower learner.micro_tokens (now 8192; the update stays the same); " in said
    )
    assert said.endswith("--resume continues from step_000000")
