"""The actions of alarms in real runs, and that a run stopped among them continues to the same end.

The environment pays by luck alone; in the steps that are `dead` it pays everybody the same. Two such steps in a row raise the alarm
reward_variance_collapse; every other rule needs more steps than these runs have.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tether.core.config import dump_yaml, merge, validate
from tether.core.errors import CheckpointError
from tether.core.seeding import env_seed
from tether.core.types import Observation, Step
from tether.envs.base import ActionOptions
from tether.envs.registry import ENVIRONMENTS
from tether.runs.checkpoints import list_checkpoints
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.training import stages
from tether.training.checkpoint import load_state
from tether.training.loop import Trainer
from tether.training.settings import RunSettings

ALARM = "reward_variance_collapse"
QUICK: dict[str, Any] = {
    "env": {"name": "dying"},
    "model": {"device": "cpu"},
    "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 2, "format_penalty": 0.0},
    "filter": {"strategy": "top_p", "keep": 0.9},
    "learner": {"update_batch": 64, "learning_rate": 1e-3},
    "diagnosis": {"every": 0},
    "evaluation": {"prompts": 1},
    "early_stop": {"empty_steps": 0, "success_floor": 0.0, "invalid_steps": 0},
    "checkpoint": {"every": 1, "keep": 20, "best": False},
    "alarms": {"rules": {"start_steps": 30, "recent_steps": 2, "step_p": 0.03}},
}
STEP_OF = {env_seed(0, step, group, member): step for step in range(1, 20) for group in range(2) for member in range(2)}
"""From the env seed of an episode to its step."""


class _Dying:
    """Pays what luck says, and a quarter in dead steps."""

    name, max_turns, instructions = "dying", 1, "Say anything."
    Options = ActionOptions
    work = "inline"
    dead: frozenset[int] = frozenset()

    def __init__(self, options: Any) -> None:
        self._pay = 0.0

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        self._pay = 0.25 if STEP_OF.get(env_seed or 0) in self.dead else (env_seed or 0) % 1009 / 1009
        return Observation("begin")

    def step(self, answer: str) -> Step:
        return Step(Observation("over"), self._pay, True, False, {"valid": True, "truncated": False})


@pytest.fixture(autouse=True, scope="module")
def small_model(small_policy: Any) -> None:
    """All runs train a small model of random weights with the words of `tiny`."""
    QUICK["model"]["name"] = small_policy(1)


@pytest.fixture(autouse=True)
def dead(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`dead(4, 5)`: these steps pay everybody the same."""
    monkeypatch.setattr(ENVIRONMENTS, "_entries", {**ENVIRONMENTS._entries, "dying": _Dying})
    return lambda *steps: monkeypatch.setattr(_Dying, "dead", frozenset(steps))


def _run(folder: Path, **changes: Any) -> Trainer:
    settings = validate(RunSettings, merge(QUICK, changes))
    trainer = Trainer(settings, RunStore.open(folder) if folder.exists() else RunStore.create(folder, dump_yaml(settings), {}))
    trainer.run()
    return trainer


def _records(folder: Path) -> dict[int, StepRecord]:
    return {record.step: record for record in RunStore.open(folder).steps()}


def _done(folder: Path) -> dict[int, list[str]]:
    """What was done about alarms, by step."""
    notes = {step: [note.partition(f" for {ALARM}: ") for note in record.notes] for step, record in _records(folder).items()}
    return {
        step: [f"{action}: {what}" for action, mark, what in said if mark] for step, said in notes.items() if any(m for _, m, _ in said)
    }


def _weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    model = folder / "checkpoints" / f"step_{step:06d}" / "model"
    return load_file(next(model.glob("*.safetensors")))


def _state(folder: Path, step: int) -> Any:
    return load_state(folder / "checkpoints" / f"step_{step:06d}")


def _same(one: Any, other: Any) -> bool:
    """Whether two states hold the same, bit for bit."""
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


# Checkpoint, filter, stop.


def test_tighten_and_checkpoint_every_cooldown(tmp_path: Path, dead: Any) -> None:
    """The alarm begins at step 2. A checkpoint of a step holds what its alarms changed, whatever the order they are named in."""
    dead(*range(1, 20))
    asked = {"actions": {"critical": ["checkpoint", "tighten_filter"]}, "cooldown": 2, "least_keep": 0.75}
    folder = tmp_path / "run"
    _run(folder, steps=7, alarms=asked, checkpoint={"every": 50})
    assert _done(folder) == {
        2: ["checkpoint: written to step_000002", "tighten_filter: the filter keeps 0.8 from now on, instead of 0.9"],
        4: ["checkpoint: written to step_000004", "tighten_filter: the filter keeps 0.75 from now on, instead of 0.8"],
        6: ["checkpoint: written to step_000006", "tighten_filter: the filter still keeps 0.75: its limit is reached"],
    }
    records = _records(folder)
    assert [records[step].metrics["groups/keep"] for step in range(1, 8)] == pytest.approx([0.9, 0.9, 0.8, 0.8, 0.75, 0.75, 0.75])
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == [f"step_{step:06d}" for step in (2, 4, 6, 7)]
    assert [_state(folder, step)["alarm_actions"]["keep"] for step in (2, 4, 6)] == pytest.approx([0.8, 0.75, 0.75])
    alarms = {step: [(alarm["name"], alarm["began"]) for alarm in record.alarms] for step, record in records.items()}
    assert alarms == {0: [], 1: [], **{step: [(ALARM, 2)] for step in range(2, 8)}}
    assert [records[step].metrics["alarms/critical"] for step in (1, 2, 3)] == [0, 1, 1]
    assert [any(note.startswith(f"critical: {ALARM} since step 2") for note in records[step].notes) for step in (2, 3)] == [True, False]
    shutil.copytree(folder, tmp_path / "killed")
    for step in (4, 6, 7):
        shutil.rmtree(tmp_path / "killed" / "checkpoints" / f"step_{step:06d}")
    _run(tmp_path / "killed", steps=7, alarms=asked, checkpoint={"every": 50})
    assert _records(tmp_path / "killed") == records and _same(_weights(tmp_path / "killed", 7), _weights(folder, 7))


def test_what_is_kept_is_what_the_filter_was_made_to_keep(tmp_path: Path, dead: Any) -> None:
    """A filter that keeps one group of two at a half and both at all of it; without reward variance it keeps none."""
    dead(2, 3)
    asked = {"actions": {ALARM: "loosen_filter"}, "filter_step": 0.5}
    _run(tmp_path / "run", steps=4, alarms=asked, filter={"strategy": "top_k", "keep": 0.5}, checkpoint={"every": 50})
    records = _records(tmp_path / "run")
    assert [records[step].metrics["groups/kept"] for step in (1, 2, 3, 4)] == [1, 0, 0, 2]
    assert _done(tmp_path / "run") == {3: ["loosen_filter: the filter keeps 1 from now on, instead of 0.5"]}


def test_stop_ends_the_run_with_a_checkpoint_and_an_evaluation(tmp_path: Path, dead: Any) -> None:
    dead(*range(2, 20))
    folder = tmp_path / "run"
    trainer = _run(folder, steps=9, alarms={"actions": {ALARM: "stop"}}, checkpoint={"every": 50})
    assert (trainer.step, trainer.store.finished) == (3, f"stopped early after step 3: alarm {ALARM}")
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step_000003"]
    record = _records(folder)[3]
    assert "validation/success" in record.metrics and record.notes[-1] == f"stopped early: alarm {ALARM}"
    assert _done(folder) == {3: ["stop: the run ends here"]}
    assert _run(folder, steps=9, alarms={"actions": {ALARM: "stop"}}).step == 3, "asked to continue, it stops again"
    assert _records(folder)[3] == record


# Roll back.


def test_rollbacks_until_they_are_used_up(tmp_path: Path, dead: Any) -> None:
    """Dead from step 4 on. At step 5 the alarm's window is (4, 5) and step 3 has played it: back to 2. Steps 3 to 5 no longer count, so
    the next alarm is that of steps 6 and 7; the checkpoints 3 and 4 are no way back, and 5 has played step 6. The third one ends the run."""
    dead(*range(4, 20))
    folder, asked = tmp_path / "run", {"actions": {ALARM: ["roll_back"]}, "cooldown": 1, "roll_backs": 2}
    trainer = _run(folder, steps=15, alarms=asked, filter={"strategy": "all"})
    continued = "roll_back: continuing with the weights of step 2"
    assert _done(folder) == {5: [continued], 7: [continued], 9: ["roll_back: all rollbacks are used up, the run ends here"]}
    assert trainer.store.finished == f"stopped early after step 9: alarm {ALARM} after 2 rollbacks (alarms.roll_backs)"
    assert trainer.alarm_actions.rolled_back == [(3, 5), (3, 7)] == _state(folder, 9)["alarm_actions"]["rolled_back"]
    records = _records(folder)
    assert [step for step, record in records.items() if record.alarms] == [5, 7, 9]
    assert list(records) == list(range(10)), "steps keep counting"
    for step in (5, 7):
        assert _same(_weights(folder, step), _weights(folder, 2))
        assert _same(_state(folder, step)["learner"], _state(folder, 2)["learner"])
    assert not _same(_weights(folder, 4), _weights(folder, 2)) and not _same(_weights(folder, 6), _weights(folder, 2))


def test_two_alarms_that_ask_in_one_step_roll_back_once(tmp_path: Path, dead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated text (in steps 4 and 5, of the window 3 to 5) and dead rewards (4 and 5) both begin at step 5: one rollback, to before both."""
    dead(4, 5)
    folder = tmp_path / "run"
    settings = validate(RunSettings, merge(QUICK, {"steps": 5, "alarms": {"actions": {"critical": "roll_back"}, "roll_backs": 1}}))
    trainer = Trainer(settings, RunStore.create(folder, dump_yaml(settings), {}))
    monkeypatch.setattr(stages, "rollout_repetition", lambda groups, limit: {"reasonings": 40, "repeated_text": float(trainer.step >= 3)})
    trainer.run()
    done = [note for note in _records(folder)[5].notes if note.startswith("roll_back")]
    assert done == [
        f"roll_back for {ALARM}: continuing with the weights of step 1",
        "roll_back for repeated_text: done already in this step",
    ]
    assert trainer.alarm_actions.rolled_back == [(2, 5)] and trainer.store.finished == "all 5 steps done"
    assert _same(_weights(folder, 5), _weights(folder, 1))


def test_without_a_healthy_checkpoint_the_run_continues(tmp_path: Path, dead: Any) -> None:
    dead(1, 2)
    _run(tmp_path / "run", steps=3, alarms={"actions": {ALARM: "roll_back"}, "roll_backs": 1})
    assert _done(tmp_path / "run") == {
        2: ["roll_back: no checkpoint from before the decline is left, continuing without; raise checkpoint.keep or lower checkpoint.every"]
    }
    assert _state(tmp_path / "run", 3)["alarm_actions"]["rolled_back"] == []


def test_rolled_back_steps_do_not_end_the_run_early(tmp_path: Path, dead: Any) -> None:
    """The rule on reward variance would stop at step 5; by then its steps are rolled back."""
    dead(4, 5)
    rule = {"early_stop": {"baseline_steps": 2, "variance_steps": 2, "variance_share": 0.01}}
    plain = _run(tmp_path / "plain", steps=6, **rule)
    assert plain.step == 5 and plain.store.finished is not None and "the reward variance was below" in plain.store.finished
    assert _run(tmp_path / "back", steps=6, alarms={"actions": {ALARM: "roll_back"}}, **rule).step == 6


KINDS: dict[str, dict[str, Any]] = {
    "float32, a critic": {"algorithm": {"name": "ppo"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "lora, a reference": {"lora": {"rank": 2, "alpha": 4}, "algorithm": {"name": "grpo", "kl_coef": 0.1}},
}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 takes another way
@pytest.mark.parametrize("kind", KINDS)
def test_rolled_back_and_killed_it_is_the_same_run(kind: str, tmp_path: Path, dead: Any) -> None:
    """Killed before the step that rolls back (its checkpoint and later ones are not there), and right after it."""
    if "lora" in kind:
        pytest.importorskip("peft")
    dead(3, 4)
    changes = merge(KINDS[kind], {"alarms": {"actions": {ALARM: ["roll_back", "tighten_filter"]}}, "steps": 6})
    folder = tmp_path / "run"
    _run(folder, **changes)
    assert _done(folder)[4][0] == "roll_back: continuing with the weights of step 1"
    assert _same(_weights(folder, 4), _weights(folder, 1)) and not _same(_weights(folder, 3), _weights(folder, 1))
    assert _same(_state(folder, 4)["learner"], _state(folder, 1)["learner"])
    assert not _same(_weights(folder, 6), _weights(folder, 1))
    if kind == "bfloat16":  # the masters came back, not what the model computes in
        assert any(master.low.any() for master in _state(folder, 4)["learner"]["optimizers"]["policy"]["masters"])
    for killed_after in (3, 4):
        again = tmp_path / f"killed-{killed_after}"
        shutil.copytree(folder, again)
        for step in range(killed_after + 1, 7):
            shutil.rmtree(again / "checkpoints" / f"step_{step:06d}")
        _run(again, **changes)
        assert _records(again) == _records(folder)
        assert _same(_weights(again, 6), _weights(folder, 6)) and _same(_state(again, 6), _state(folder, 6))


def test_a_checkpoint_of_an_older_version_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _run(folder, steps=1)
    state = _state(folder, 1)
    del state["alarm_actions"]
    torch.save({**state, "monitor": {"sigma_ema": 0.5, "start": None}}, folder / "checkpoints" / "step_000001" / "state.pt")
    (folder / "checkpoints" / "step_000001" / "manifest.json").unlink()  # that version wrote none
    with pytest.raises(CheckpointError) as caught:
        _run(folder, steps=2)
    said = str(caught.value)
    assert "step_000001' holds no state of alarm_actions: another version of tether wrote it; resume with that version" in said
    assert "\n" not in said
